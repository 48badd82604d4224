// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// blockedPatience is how long a client waits where nothing should pass. It ends before a lost SYN is sent again, after 1 s.
const blockedPatience = 400 * time.Millisecond

// build makes the network and starts the agent and the node proxy.
func (d *demo) build(ctx context.Context) error {
	d.page.headline("Redirector sends the TCP of pods through a node proxy, without iptables and without conntrack. See it work:")
	var err error
	if d.self, err = os.Executable(); err != nil {
		return fmt.Errorf("find this program's file: %w", err)
	}
	if d.bed, err = bed.New(bed.Options{}); err != nil {
		return remedy(err)
	}
	d.log = &proxyLog{path: filepath.Join(d.bed.RunDir, "connections.log")}
	d.outside = &host{NS: d.bed.Outside}
	for _, p := range []struct {
		host **host
		name string
	}{{&d.client, "client"}, {&d.web, "web"}} {
		ns, err := d.bed.Pod(p.name, bed.PodOptions{})
		if err != nil {
			return err
		}
		*p.host = &host{NS: ns, uid: p.name}
	}
	// What is attached to the bed's cgroup sees only its members, and the HTTP servers and clients are this process.
	if err := d.bed.JoinCgroup(); err != nil {
		return err
	}
	if err := errors.Join(d.web.serve(), d.outside.serve()); err != nil {
		return err
	}

	d.page.headline("1. Two pods on a node, and a host outside, each a network namespace made for this")
	d.page.printf("pod client  %s  %s  --+", d.client.V4, d.client.V6)
	d.page.printf("%37s  +-- node: agent, node proxy -- outside  %s  %s", "", d.outside.V4, d.outside.V6)
	d.page.printf("pod web     %s  %s  --+", d.web.V4, d.web.V6)
	d.page.printf("There are HTTP servers in pod web and outside. Nothing of this is joined to your machine's own network.")
	d.page.printf("")
	d.page.printf("D=%s", d.bed.Dir)
	d.page.printf("C=%s", d.bed.Cgroup)

	args := []string{"agent", "--standalone", "--run-dir", d.bed.RunDir, "--zds-socket", d.bed.ZDSSocket,
		"--bpffs", d.bed.BPFFS, "--cgroup", d.bed.Cgroup}
	d.command("redirector", args...)
	if d.agent, err = d.start(roleRedirector, "agent", args...); err != nil {
		return err
	}
	if err := d.waitForAgent(ctx); err != nil {
		return err
	}
	return d.startProxy()
}

// waitForAgent waits until the agent takes commands.
func (d *demo) waitForAgent(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		var dialer net.Dialer
		c, err := dialer.DialContext(ctx, "unix", filepath.Join(d.bed.RunDir, "agent.sock"))
		if err == nil {
			return c.Close()
		}
		select {
		case <-d.agent.Done():
			return fmt.Errorf("the agent does not start: %s", strings.TrimSpace(d.agent.Output()))
		case <-ctx.Done():
			return fmt.Errorf("the agent takes no commands: %w", err)
		case <-time.After(2 * time.Millisecond):
		}
	}
}

func (d *demo) startProxy() error {
	args := []string{"--zds-socket", d.bed.ZDSSocket, "--log", d.log.path}
	d.command("nodeproxy", args...)
	var err error
	d.proxy, err = d.start(roleNodeproxy, "nodeproxy", args...)
	return err
}

// enrolBoth enrols both pods by the command line.
func (d *demo) enrolBoth(ctx context.Context) error {
	for _, h := range []*host{d.client, d.web} {
		var err error
		if h.before, err = h.Snapshot(); err != nil {
			return err
		}
		err = d.show(ctx, "enroll", "--uid", h.uid, "--name", h.podName(), "--service-account", "default",
			"--netns", h.Path, "--ip", h.V4.String()+","+h.V6.String(), "--run-dir", d.bed.RunDir)
		if err != nil {
			return err
		}
	}
	return nil
}

// visits are the requests that each table shows: out of a pod, into a pod, and from pod to pod.
func (d *demo) visits() []*visit {
	var all []*visit
	for _, v := range [][2]*host{{d.client, d.outside}, {d.outside, d.web}, {d.client, d.web}} {
		for _, v6 := range []bool{false, true} {
			all = append(all, &visit{from: v[0], to: v[1], v6: v6})
		}
	}
	return all
}

// showProxied sends real requests while both pods are enrolled.
func (d *demo) showProxied(ctx context.Context) error {
	d.page.headline("2. Both pods are enrolled: all their connections go through the node proxy, and both ends see each other's true address")
	d.page.printf("The proxy is one process on the node. It listens inside the network namespace of each pod.")
	return d.table(ctx, d.visits(), proxied)
}

// table sends requests one after the other, so that the proxy's lines are those of one request, and shows them.
func (d *demo) table(ctx context.Context, visits []*visit, want way) error {
	d.page.tableHead(visitColumns)
	for _, v := range visits {
		v.send(ctx, patience)
		lines := 0
		if v.err == nil {
			lines = len(v.expected(want))
		}
		var err error
		if v.proxy, err = d.log.next(ctx, lines); err != nil {
			return err
		}
		if err := context.Cause(ctx); err != nil {
			return err
		}
		// The proxies at the two ends write in any order; the way goes out of one pod before it goes into the other.
		slices.SortFunc(v.proxy, func(a, b nodeproxy.Record) int { return cmp.Compare(b.Direction, a.Direction) })
		d.showVisit(v, want)
	}
	return nil
}

// showKernel shows what is not, and what is, in the namespaces while the pods are enrolled.
func (d *demo) showKernel(context.Context) error {
	d.page.headline("3. In the pods, and on the node, there is no iptables rule, no nftables rule and no tracked connection")
	d.page.tableHead(netfilterColumns)
	for _, ns := range []*bed.NS{d.client.NS, d.web.NS, d.bed.Node} {
		n, err := lookAtNetfilter(ns)
		if err != nil {
			return err
		}
		d.showNetfilter(ns.Name, n)
	}
	now, err := d.client.Snapshot()
	if err != nil {
		return err
	}
	d.page.printf("")
	d.page.printf("What enrolment has changed in pod client instead:")
	d.showChanges(changes(d.client.before, now))
	return nil
}

// changes returns the lines of a snapshot that an earlier one has not.
func changes(before, now string) []string {
	old := map[string]bool{}
	for line := range strings.Lines(before) {
		old[line] = true
	}
	return slices.DeleteFunc(slices.Collect(strings.Lines(now)), func(line string) bool { return old[line] })
}

// holdOn waits for Enter, if it was asked for.
func (d *demo) holdOn(ctx context.Context) error {
	if !d.hold {
		return nil
	}
	d.page.headline("Look around (in another shell, as root); the demo goes on when you press Enter, and ends with Ctrl-C")
	d.page.printf("D=%s", d.bed.Dir)
	d.page.printf("C=%s", d.bed.Cgroup)
	for _, line := range []string{
		filepath.Join(filepath.Dir(d.self), "redirector") + " pods --run-dir $D/run",
		"bpftool map dump pinned $D/bpf/redirector/maps/pods",
		"nsenter --net=$D/netns/client ip rule",
		"nsenter --net=$D/netns/web ss -tlnp",
		"sh -c 'echo $$ > '$C'/cgroup.procs; exec nsenter --net='$D'/netns/client curl -s " + (&visit{to: d.outside}).url() + "'",
		"tail -f " + d.short(d.log.path),
	} {
		d.page.command(line)
	}
	enter := make(chan struct{})
	go func() {
		if bufio.NewScanner(os.Stdin).Scan() { // the end of a file is no Enter
			close(enter)
		}
	}()
	select {
	case <-enter:
	case <-ctx.Done():
		return nil
	}
	_, err := d.log.next(ctx, 0) // what was tried meanwhile is not of the story
	return err
}

// showWithoutProxy stops the proxy and shows that nothing passes.
func (d *demo) showWithoutProxy(ctx context.Context) error {
	d.page.headline("4. The node proxy is stopped: nothing gets past it, out of the pods or into them")
	d.page.command("kill", fmt.Sprint(d.proxy.Pid), "  # the node proxy")
	err := stop(d.proxy)
	d.proxy = nil
	if err != nil {
		return err
	}
	before, err := d.pods(ctx)
	if err != nil {
		return err
	}
	accepted := d.web.accepted.Load() + d.outside.accepted.Load()

	visits := d.visits()
	var all sync.WaitGroup
	for _, v := range visits {
		all.Go(func() { v.send(ctx, blockedPatience) })
	}
	all.Wait()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	d.page.tableHead(blockedColumns)
	for _, v := range visits {
		d.showBlocked(v)
	}
	after, err := d.pods(ctx)
	if err != nil {
		return err
	}

	d.page.printf("")
	d.page.printf("What the kernel has counted meanwhile (`redirector pods -o json`):")
	for _, c := range []struct {
		uid, name, meaning string
		want               int
		of                 func(maps.Counters) uint64
	}{
		{d.client.uid, "outbound_no_listener", "SYNs of the pod dropped: no proxy listens", 4,
			func(c maps.Counters) uint64 { return c.OutboundNoListener }},
		{d.web.uid, "inbound_no_listener", "SYNs to the pod dropped: no proxy listens", 2,
			func(c maps.Counters) uint64 { return c.InboundNoListener }},
	} {
		n := int(c.of(after[c.uid].Counters) - c.of(before[c.uid].Counters))
		d.check(n >= c.want, fmt.Sprintf("at least %d", c.want),
			fmt.Sprintf("pod %-6s  %-20s  +%d  %s", c.uid, c.name, n, c.meaning))
	}
	n := d.web.accepted.Load() + d.outside.accepted.Load() - accepted
	d.check(n == 0, "none", fmt.Sprintf("connections that reached a server: %d", n))
	return nil
}

// showProxyBack starts a proxy again and shows that new connections work.
func (d *demo) showProxyBack(ctx context.Context) error {
	d.page.headline("5. A node proxy comes back: new connections work again")
	if err := d.startProxy(); err != nil {
		return err
	}
	if err := d.waitForProxy(ctx); err != nil {
		return err
	}
	return d.table(ctx, []*visit{{from: d.client, to: d.web}}, proxied)
}

// waitForProxy waits until the agent says that a proxy runs for both pods.
func (d *demo) waitForProxy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		pods, err := d.pods(ctx)
		if err != nil {
			return err
		}
		waiting := 0
		for _, p := range pods {
			if p.State != "enrolled" || p.Listeners[maps.PortOutbound] == 0 || p.Listeners[maps.PortInbound] == 0 {
				waiting++
			}
		}
		if waiting == 0 {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("the node proxy does not run for %d pods, %s after its start", waiting, patience)
		}
		pause(ctx, 10*time.Millisecond)
	}
}

// showUnenrolled takes both pods out and shows that all is as it was.
func (d *demo) showUnenrolled(ctx context.Context) error {
	d.page.headline("6. Both pods are taken out: their traffic is direct again, and the proxy, which still runs, sees none of it")
	err := d.show(ctx, "unenroll", "--uid", d.client.uid, "--uid", d.web.uid, "--run-dir", d.bed.RunDir)
	if err != nil {
		return err
	}
	if err := d.table(ctx, d.visits(), direct); err != nil {
		return err
	}
	// A proxy that has ended has written all it had to say.
	proxy := d.proxy
	d.proxy = nil
	if err := stop(proxy); err != nil {
		return err
	}
	fresh, err := d.log.next(ctx, 0)
	if err != nil {
		return err
	}
	d.page.printf("")
	d.check(len(fresh) == 0, "none", fmt.Sprintf("lines that the proxy wrote about these connections: %d", len(fresh)))
	for _, h := range []*host{d.client, d.web} {
		now, err := h.Snapshot()
		if err != nil {
			return err
		}
		d.check(now == h.before, "the same", fmt.Sprintf("pod %s: rules, routes, filters, programs and sysctls are %s", h.Name,
			map[bool]string{true: "what they were before, byte for byte", false: "not what they were before"}[now == h.before]))
	}
	return nil
}

// programsOn counts the sock_ops programs that are attached to a cgroup.
func programsOn(cgroup string) (int, error) {
	dir, err := os.Open(cgroup)
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	result, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: ebpf.AttachCGroupSockOps})
	if err != nil {
		return 0, fmt.Errorf("list the programs on cgroup %s: %w", cgroup, err)
	}
	return len(result.Programs), nil
}

// farewell says what to try next.
func (d *demo) farewell(took time.Duration) {
	d.page.headline(fmt.Sprintf("All as it should be, in %.1f s. What to try next:", took.Seconds()))
	d.page.printf("make demo DEMOFLAGS=--hold    the same, with a stop while both pods are enrolled, to look inside")
	d.page.printf("bin/redirector --help         the command line; each command has its own --help")
	d.page.printf("docs/ARCHITECTURE.md          a packet's whole way")
	d.page.printf("make test                     all tests on this machine's kernel")
}
