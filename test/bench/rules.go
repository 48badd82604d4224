// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// The rule sets make the decisions that istio-cni makes in ambient mode: the same ports, marks, exemptions and order.
//
//go:embed rules
var ruleFiles embed.FS

// ruleSet is one way to have netfilter make the decisions.
type ruleSet struct {
	name string
	// restore are the programs that take the rules of IPv4 and of IPv6; native is the one that takes both, and
	// then there is no restore.
	restore [2]string
	native  string
}

var ruleSets = []ruleSet{
	{name: iptablesLegacy, restore: [2]string{"iptables-legacy-restore", "ip6tables-legacy-restore"}},
	{name: iptablesNFT, restore: [2]string{"iptables-nft-restore", "ip6tables-nft-restore"}},
	{name: nativeNFT, native: "nft"},
}

// What a probe comes from, and where the marked answers go.
const (
	routeTable    = 100
	routePriority = 32764
	replyMark     = 0x111
	markMask      = 0xfff
)

var (
	probeV4 = netip.MustParseAddr("169.254.7.127")
	probeV6 = netip.MustParseAddr("fd16:9254:7127:1337:ffff:ffff:ffff:ffff")
)

// ruleAddrs are the addresses that the rules of one family name.
type ruleAddrs struct{ Probe, Loopback, Pod string }

func addrsOf(pod *bed.NS) (v4, v6 ruleAddrs) {
	return ruleAddrs{probeV4.String(), "127.0.0.1", pod.V4.String()}, ruleAddrs{probeV6.String(), "::1", pod.V6.String()}
}

// apply puts the rules, and the route for answers, into a pod's namespace: what an enrolment does.
func (r ruleSet) apply(b *bed.Bed, pod *bed.NS) error {
	if err := addReplyRoutes(pod); err != nil {
		return err
	}
	return r.load(b, pod, "pod", pod)
}

// applyNode puts the rules for probes into the bed's node.
func (r ruleSet) applyNode(b *bed.Bed, pod *bed.NS) error { return r.load(b, b.Node, "node", pod) }

// remove undoes apply.
func (r ruleSet) remove(b *bed.Bed, pod *bed.NS) error {
	var errs []error
	if r.native != "" {
		errs = append(errs, run(b, pod, "delete table inet bench\n", r.native, "-f", "-"))
	} else {
		for _, program := range r.restore {
			errs = append(errs, run(b, pod, "*raw\nCOMMIT\n*mangle\nCOMMIT\n*nat\nCOMMIT\n", program))
		}
	}
	return errors.Join(append(errs, removeReplyRoutes(pod))...)
}

// load has the programs of the rule set read one of the files of rules.
func (r ruleSet) load(b *bed.Bed, ns *bed.NS, file string, pod *bed.NS) error {
	texts, err := r.texts(file, pod)
	if err != nil {
		return err
	}
	return r.feed(b, ns, texts)
}

// texts are what the programs of the rule set are to read, in their order.
func (r ruleSet) texts(file string, pod *bed.NS) ([]string, error) {
	v4, v6 := addrsOf(pod)
	if r.native != "" {
		text, err := render(file+".nft", struct{ V4, V6 ruleAddrs }{v4, v6})
		return []string{text}, err
	}
	text4, err := render(file+".iptables", v4)
	if err != nil {
		return nil, err
	}
	text6, err := render(file+".iptables", v6)
	return []string{text4, text6}, err
}

func (r ruleSet) feed(b *bed.Bed, ns *bed.NS, texts []string) error {
	if r.native != "" {
		return run(b, ns, texts[0], r.native, "-f", "-")
	}
	return errors.Join(run(b, ns, texts[0], r.restore[0]), run(b, ns, texts[1], r.restore[1]))
}

func render(file string, data any) (string, error) {
	t, err := template.ParseFS(ruleFiles, "rules/"+file)
	if err != nil {
		return "", err
	}
	var text strings.Builder
	err = t.Execute(&text, data)
	return text.String(), err
}

// run runs a program in a namespace. The lock of iptables is the bed's own: nothing waits for others on this machine.
func run(b *bed.Bed, ns *bed.NS, stdin, program string, args ...string) error {
	var out bytes.Buffer
	cmd := exec.Command(program, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &out
	cmd.Env = append(os.Environ(), "XTABLES_LOCKFILE="+filepath.Join(b.Dir, "xtables.lock"))
	if err := ns.Do(cmd.Run); err != nil {
		return fmt.Errorf("%s in netns %s (hack/install-deps.sh bench installs it): %w: %s", program, ns.Name, err, out.String())
	}
	return nil
}

// replyRoute is the rule and the route that bring marked answers back over lo, of one family.
func replyRoute(family, lo int) (*netlink.Rule, *netlink.Route) {
	rule := netlink.NewRule()
	mask := uint32(markMask)
	rule.Family, rule.Mark, rule.Mask, rule.Table, rule.Priority = family, replyMark, &mask, routeTable, routePriority
	all := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	if family == unix.AF_INET6 {
		all = &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	}
	return rule, &netlink.Route{
		Family: family, LinkIndex: lo, Dst: all, Table: routeTable, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
	}
}

func addReplyRoutes(pod *bed.NS) error {
	return withReplyRoutes(pod, (*netlink.Handle).RuleAdd, (*netlink.Handle).RouteAdd)
}

func removeReplyRoutes(pod *bed.NS) error {
	return withReplyRoutes(pod, (*netlink.Handle).RuleDel, (*netlink.Handle).RouteDel)
}

func withReplyRoutes(
	pod *bed.NS, rule func(*netlink.Handle, *netlink.Rule) error, route func(*netlink.Handle, *netlink.Route) error,
) error {
	h, err := pod.Handle()
	if err != nil {
		return err
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return err
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		r, rt := replyRoute(family, lo.Attrs().Index)
		if err := errors.Join(rule(h, r), route(h, rt)); err != nil {
			return fmt.Errorf("the way of marked answers in netns %s: %w", pod.Name, err)
		}
	}
	return nil
}
