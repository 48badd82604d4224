// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/verify"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// Of a pod that is as it should be, all checks pass.
func TestVerifyPasses(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	pod, app := n.enrolledPod("pod")
	before := app.Accepts()
	seen := len(n.proxy.connections())
	v := n.verify(pod)
	ran := map[string]int{}
	for _, c := range v.Checks {
		if c.Result != verify.Passed {
			t.Errorf("%+v", c)
		}
		ran[c.Name]++
	}
	for _, name := range []string{verify.Outbound, verify.Unproxied, verify.Seal, verify.DNS, verify.Inbound, verify.Probe} {
		if ran[name] != 2 {
			t.Errorf("check %s was done %d times, want once for each family", name, ran[name])
		}
	}
	if !v.Passed {
		t.Error("it has not passed")
	}
	// It is harmless: no app hears of it, and whatever the proxy was asked to connect to is the node or the pod.
	if accepts := app.Accepts(); accepts != before {
		t.Errorf("an app got %d connections", accepts-before)
	}
	for _, r := range n.proxy.connections()[seen:] {
		if to := r.OriginalDestination.Addr(); to != pod.V4 && to != pod.V6 && to != nodesAddr(t, n.Node, pod.V4) && to != nodesAddr(t, n.Node, pod.V6) {
			t.Errorf("the proxy was asked to connect to %s", r.OriginalDestination)
		}
	}
}

// Where the agent is itself in a pod, as in Kubernetes, or only the kubelet probes, the probe is of another process.
func TestVerifyProbesAsWhoMay(t *testing.T) {
	for name, c := range map[string]struct {
		flags   []string
		group   string
		probe   verify.Result
		inbound verify.Result
	}{
		"an agent in a pod":               {nil, groupHostPod, verify.Passed, verify.Passed},
		"only the kubelet":                {[]string{"--probe-source", "kubelet"}, "", verify.Passed, verify.Passed},
		"flows are probes":                {[]string{"--probe-identity", "flow"}, "", verify.Passed, verify.Skipped},
		"flows are, of an agent in a pod": {[]string{"--probe-identity", "flow"}, groupHostPod, verify.Passed, verify.Passed},
	} {
		t.Run(name, func(t *testing.T) {
			n := newEmptyProbeNode(t, bed.Options{}, c.flags...)
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			name := filepath.Join(n.Dir, "kubelet") // as a process
			if err := os.Symlink(self, name); err != nil {
				t.Fatal(err)
			}
			if _, err := n.StartIn(n.Node, n.group(groupKubelet), "kubelet", []string{name}, []string{roleVariable + "=sleeper"}); err != nil {
				t.Fatal(err)
			}
			n.agentGroup = c.group
			n.startAgent()
			n.startProxyIn("proxy")
			pod, _ := n.enrolledPod("pod")
			for _, check := range n.verify(pod).Checks {
				want := verify.Passed
				switch check.Name {
				case verify.Probe:
					want = c.probe
				case verify.Inbound:
					want = c.inbound
				}
				if check.Result != want {
					t.Errorf("%+v, want %s", check, want)
				}
			}
		})
	}
}

// Settings change what is to be so, and verify goes by them.
func TestVerifyGoesByThePodsSettings(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	pod, _ := n.enrolledPod("pod")
	n.change(pod, api.SettingsRequest{"bypass-inbound": "true", "dns-capture": "false", "exclude-outbound-ports": "9"})
	for _, c := range n.verify(pod).Checks {
		want := verify.Passed
		switch c.Name {
		case verify.Outbound, verify.Unproxied, verify.Seal, verify.DNS:
			want = verify.Skipped
		}
		if c.Result != want {
			t.Errorf("%+v, want %s", c, want)
		}
	}
}

func (n *probeNode) verify(pod *bed.NS) api.Verification {
	n.t.Helper()
	v, err := n.agent.client.Verify(n.t.Context(), "uid-"+pod.Name)
	if err != nil {
		n.t.Fatal(err)
	}
	return v
}

// pinnedMaps opens those maps of the running agent that the faults are about.
func (n *probeNode) pinnedMaps() *maps.Maps {
	n.t.Helper()
	open := func(name string) *ebpf.Map {
		m, err := ebpf.LoadPinnedMap(filepath.Join(n.BPFFS, "maps", name), nil)
		if err != nil {
			n.t.Fatal(err)
		}
		n.t.Cleanup(func() { _ = m.Close() })
		return m
	}
	return &maps.Maps{RedirectorMaps: bpf.RedirectorMaps{
		Pods: open("pods"), OwnAddrs: open("own_addrs"), Listeners: open("listeners"), Counters: open("counters"),
	}}
}

// injected is something that goes wrong, and what is to be said of it.
type injected struct {
	name string
	// inject makes it so, and is called again and again for as long as others undo it. follow does what the remedy says.
	inject func(t *testing.T)
	follow func(t *testing.T)
	// status and pod are words of a warning each, with its remedy; check is one that fails, and cause has words of its cause and remedy.
	status, pod []string
	check       string
	cause       []string
}

func TestFaultsAreNamedWithARemedyThatWorks(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	pod, _ := n.enrolledPod("pod")
	m := n.pinnedMaps()
	for _, f := range n.faults(pod, m) {
		t.Run(f.name, func(t *testing.T) {
			n.t = t
			wantNone(t, n, pod)
			said := map[string]string{}
			eventually(t, "status, pod and verify name the cause and the remedy", func() bool {
				f.inject(t)
				v, err := n.agent.client.Verify(t.Context(), "uid-pod")
				if err != nil {
					t.Logf("verify: %v", err) // the pod is being moved
					return false
				}
				found, err := n.agent.client.Inspect(t.Context(), "uid-pod")
				if err != nil {
					t.Logf("pod: %v", err)
					return false
				}
				note := func(who string, warnings []api.Warning, words []string) {
					if len(words) == 0 {
						return
					}
					if w := warningWith(warnings, words); w != nil {
						said[who] = fmt.Sprintf("%s: %s -> %s", w.Severity, w.Message, w.Remedy)
					}
				}
				note("status", n.status().Warnings, f.status)
				note("pod", slices.Concat(found.Warnings, found.Node), f.pod)
				if f.check == "" {
					note("verify", v.Node, f.cause)
				}
				for _, c := range v.Checks {
					if c.Name == f.check && c.Result == verify.Failed && hasAll(c.Cause+" -> "+c.Remedy, f.cause) {
						said["verify"] = c.Cause + " -> " + c.Remedy
					}
				}
				return len(said) == f.sayers()
			})
			t.Logf("%+v", said)
			f.follow(t)
			eventually(t, "after the remedy all is well", func() bool {
				status := n.status()
				return n.verify(pod).Passed && status.Health != api.Red
			})
		})
	}
	n.t = t
}

// sayers is how many of status, pod and verify are to name it.
func (f *injected) sayers() int {
	n := 0
	for _, words := range [][]string{f.status, f.pod, f.cause} {
		if len(words) > 0 {
			n++
		}
	}
	return n
}

func hasAll(text string, words []string) bool {
	return !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(text, word) })
}

// warningWith is a warning that has all the words.
func warningWith(warnings []api.Warning, words []string) *api.Warning {
	i := slices.IndexFunc(warnings, func(w api.Warning) bool { return hasAll(w.Message+" -> "+w.Remedy, words) })
	if i < 0 {
		return nil
	}
	return &warnings[i]
}

// wantNone checks that nothing is wrong before something is made so.
func wantNone(t *testing.T, n *probeNode, pod *bed.NS) {
	t.Helper()
	if s := n.status(); s.Health == api.Red {
		t.Fatalf("before, status says %+v", s.Warnings)
	}
	if v := n.verify(pod); !v.Passed {
		t.Fatalf("before, verify says %+v", v.Checks)
	}
}

// fight does something again and again until the function that it returns is called.
func fight(t *testing.T, do func()) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			do()
			time.Sleep(time.Millisecond)
		}
	}()
	return func() { cancel(); <-done }
}

// once returns a function that calls do the first time only.
func once(do func(t *testing.T)) func(t *testing.T) {
	did := false
	return func(t *testing.T) {
		t.Helper()
		if !did {
			did = true
			do(t)
		}
	}
}

func (n *probeNode) faults(pod *bed.NS, m *maps.Maps) []injected {
	n.t.Helper()
	h, err := pod.Handle()
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(h.Close)
	link, err := h.LinkByName(pod.Link)
	if err != nil {
		n.t.Fatal(err)
	}
	var stop func()
	stopFight := func(*testing.T) { stop() }
	startProxy := func(*testing.T) { n.startProxyIn("proxy") }
	kill := func(t *testing.T) {
		t.Helper()
		if err := n.proxy.Kill(); err != nil {
			t.Fatal(err)
		}
	}
	var mute *bed.Proc
	var other *bed.NS
	replaceMute := func(t *testing.T) {
		t.Helper()
		if err := mute.Kill(); err != nil {
			t.Fatal(err)
		}
		startProxy(t)
	}
	stale := pod.V4.Next().Next()
	return []injected{
		{
			name: "a rule is removed",
			inject: once(func(t *testing.T) {
				t.Helper()
				stop = fight(t, func() { removeRules(h) })
			}),
			follow: stopFight,
			status: []string{"the rule or the route that leads marked connections to lo was missing", "ip monitor rule"},
			pod:    []string{"rule IPv4 for marked connections", "missing", "ip monitor rule"},
			check:  verify.Outbound, cause: []string{"rule IPv4 for marked connections: missing", "ip monitor rule"},
		},
		{
			name: "the proxy is down", inject: once(kill), follow: startProxy,
			status: []string{"no node proxy is connected", "start a node proxy", n.ZDSSocket},
			pod:    []string{"no node proxy is connected", "start a node proxy", n.ZDSSocket},
			check:  verify.Outbound, cause: []string{"no node proxy is connected", "start a node proxy"},
		},
		{
			name: "the proxy is mute",
			inject: once(func(t *testing.T) {
				t.Helper()
				kill(t)
				mute = n.process("nodeproxy", "proxy", "mute", "--zds-socket", n.ZDSSocket, "--mute", "hello")
			}),
			follow: replaceMute,
			status: []string{"is connected, but says nothing", "restart it"},
			pod:    []string{"is connected, but says nothing", "restart it"},
			check:  verify.Inbound, cause: []string{"is connected, but says nothing", "restart it"},
		},
		{
			name: "listeners are not in the map",
			inject: once(func(t *testing.T) {
				t.Helper()
				kill(t)
				mute = n.process("nodeproxy", "proxy", "deaf", "--zds-socket", n.ZDSSocket, "--mute", "listen")
			}),
			follow: replaceMute,
			status: []string{"no listener is known on port 15001", "restart the node proxy"},
			pod:    []string{"no listener is known on port 15001", "restart the node proxy"},
			check:  verify.Outbound, cause: []string{"no listener of its is known on port 15001", "restart the node proxy"},
		},
		{
			name: "a sysctl is off",
			inject: func(t *testing.T) {
				t.Helper()
				if err := pod.SetSysctl("net.ipv4.tcp_fwmark_accept", "0"); err != nil {
					t.Fatal(err)
				}
			},
			follow: func(*testing.T) {},
			status: []string{"a sysctl that carries marks was off", "tcp_fwmark_accept"},
			pod:    []string{"sysctl net.ipv4.tcp_fwmark_accept is not as it should be: 0", "sysctl.d"},
			check:  "objects", cause: []string{"net.ipv4.tcp_fwmark_accept: 0", "sysctl.d"},
		},
		{
			name: "the seal is missing",
			inject: once(func(t *testing.T) {
				t.Helper()
				stop = fight(t, func() { removeFilters(h, link) })
			}),
			follow: stopFight,
			status: []string{"an interface had no seal", "tc monitor"},
			pod:    []string{"filter seal on " + pod.Link, "missing", "tc monitor"},
			check:  verify.Seal, cause: []string{"filter seal on " + pod.Link + ": missing", "tc monitor"},
		},
		{
			name: "an address is stale",
			inject: func(t *testing.T) {
				t.Helper()
				if err := m.PutOwnAddr(pod.Cookie, stale, 2); err != nil {
					t.Fatal(err)
				}
			},
			follow: func(*testing.T) {},
			status: []string{"map own_addrs did not have what the pod's interfaces have", "bpftool map show"},
			pod:    []string{"own_addrs " + stale.String(), "want: missing", "bpftool"},
			check:  "objects", cause: []string{"own_addrs " + stale.String(), "bpftool"},
		},
		{
			name: "a map is full",
			inject: once(func(t *testing.T) {
				t.Helper()
				fillMap(t, m.RedirectorMaps.Pods)
				other = n.plainPod("other")
				_, err := n.agent.client.Enroll(t.Context(), api.EnrollRequest{Spec: agent.Spec(other)})
				wantNamed(t, err, []string{"map pods", "full"})
			}),
			follow: func(t *testing.T) {
				t.Helper()
				emptyMap(t, m.RedirectorMaps.Pods)
				n.enrolSpec(other)
			},
			status: []string{"map pods is full", "move pods off this node", "bpftool map dump pinned"},
			pod:    []string{"map pods is full", "move pods off this node"}, cause: []string{"map pods is full", "move pods off this node"},
		},
		{
			name: "the network namespace is replaced",
			inject: once(func(t *testing.T) {
				t.Helper()
				n.replaceNetNS(t, pod, "new")
			}),
			follow: func(*testing.T) {},
			status: []string{"the pod's path led to another network namespace", "sandbox was made anew", pod.Path},
			pod:    []string{"the pod's path led to another network namespace", "sandbox was made anew", pod.Path},
		},
	}
}

// removeRules removes all of our rules in a namespace.
func removeRules(h *netlink.Handle) {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		rules, err := h.RuleList(family)
		if err != nil {
			continue
		}
		for _, r := range rules {
			if r.Mark == 0x110 {
				r.Family = family
				_ = h.RuleDel(&r)
			}
		}
	}
}

// removeFilters removes all filters from an interface's egress.
func removeFilters(h *netlink.Handle, link netlink.Link) {
	filters, err := h.FilterList(link, netlink.HANDLE_MIN_EGRESS)
	if err != nil {
		return
	}
	for _, f := range filters {
		_ = h.FilterDel(f)
	}
}

// replaceNetNS has the path of a pod lead to the namespace of another.
func (n *probeNode) replaceNetNS(t *testing.T, pod *bed.NS, name string) {
	t.Helper()
	fresh := n.plainPod(name)
	if err := unix.Mount(fresh.Path, pod.Path, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(pod.Path, unix.MNT_DETACH); err != nil && !os.IsNotExist(err) {
			t.Error(err)
		}
	})
}
