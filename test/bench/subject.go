// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"net/rpc"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/monitor"
	"github.com/redirector-dataplane/redirector/pkg/zds"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// The subjects. All are measured alike, each in namespaces of its own, by the same programs.
const (
	direct         = "direct"          // no redirection: to the proxy's own port
	redirector     = "redirector"      // with a real agent
	iptablesLegacy = "iptables-legacy" // the rule sets
	iptablesNFT    = "iptables-nft"
	nativeNFT      = "nftables"
	otherBuild     = "other build" // redirector, with the agent of another build of this program; only if asked for
	spliced        = "spliced"     // redirector, with an experiment beside it; only if asked for
	watched        = "watched"     // redirector, with somebody who watches all connections by its monitor; only if asked for
)

var subjectNames = []string{direct, redirector, iptablesLegacy, iptablesNFT, nativeNFT}

// The directions.
const (
	outbound = "outbound" // an app of the pod connects to a server outside
	inbound  = "inbound"  // a peer outside connects to the pod's app
	probe    = "probe"    // a process of the node connects to the pod's app
)

// startPatience is how long a process may take to answer.
const startPatience = 20 * time.Second

// subject is a pod with an app, a proxy, and clients in the pod, outside and on the node.
type subject struct {
	name string
	*bed.Bed
	pod     *bed.NS
	proxy   *rpc.Client
	app     *rpc.Client
	clients map[string]*rpc.Client // by direction
	agent   *api.Client
	binary  string // that has the agent
	splice  *splice
	unwatch context.CancelFunc
	rate    int // of its jobs
}

// captures says whether it is an agent that redirects.
func (s *subject) captures() bool { return s.binary != "" }

// newSubject makes a subject of that name. The caller closes it. The agent of the other build is in the file other.
func newSubject(ctx context.Context, name, other string) (*subject, error) {
	b, err := bed.New(bed.Options{})
	if err != nil {
		return nil, err
	}
	s := &subject{name: name, Bed: b, clients: map[string]*rpc.Client{}}
	switch name {
	case redirector, spliced, watched:
		s.binary, err = os.Executable()
	case otherBuild:
		s.binary, err = filepath.Abs(other)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	if err := s.setUp(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", name, err), s.Close())
	}
	return s, nil
}

func (s *subject) setUp(ctx context.Context) error {
	var err error
	if s.pod, err = s.Pod("pod", bed.PodOptions{}); err != nil {
		return err
	}
	// A proxy that connects to the app as the peer may get the port of another connection of that peer's. By chance that is rare, but
	// not with as many connections as here, and what becomes of it is no matter of speed: so no two get the same.
	if err := errors.Join(
		s.Outside.SetSysctl("net.ipv4.ip_local_port_range", "4096 32767"),
		s.pod.SetSysctl("net.ipv4.ip_local_port_range", "32768 60999"),
	); err != nil {
		return err
	}
	if err := s.redirect(ctx); err != nil {
		return err
	}
	spoof := "-spoof=" + fmt.Sprint(s.name != direct)
	for _, p := range []struct {
		client **rpc.Client
		ns     *bed.NS
		group  string
		role   string
	}{{&s.proxy, s.pod, "proxy", roleProxy}, {&s.app, s.pod, "kubepods/pod", roleApp}} {
		if *p.client, err = s.start(ctx, p.ns, p.group, p.role, p.role, spoof); err != nil {
			return err
		}
	}
	for direction, ns := range map[string]*bed.NS{outbound: s.pod, inbound: s.Outside, probe: s.Node} {
		group := map[string]string{outbound: "kubepods/pod", inbound: "", probe: "host"}[direction]
		if s.clients[direction], err = s.start(ctx, ns, group, roleLoad+"-"+direction, roleLoad); err != nil {
			return err
		}
	}
	return nil
}

// redirect brings the pod's traffic to the proxy, if the subject does.
func (s *subject) redirect(ctx context.Context) error {
	if s.captures() {
		if err := s.enrol(ctx); err != nil {
			return err
		}
		switch s.name {
		case spliced:
			var err error
			s.splice, err = newSplice(s.Cgroup)
			return err
		case watched:
			return s.watch(ctx)
		}
		return nil
	}
	i := slices.IndexFunc(ruleSets, func(r ruleSet) bool { return r.name == s.name })
	if i < 0 {
		return nil
	}
	return errors.Join(ruleSets[i].apply(s.Bed, s.pod), ruleSets[i].applyNode(s.Bed, s.pod))
}

// enrol starts an agent, with what it does by default, and what says for the proxy that it runs.
func (s *subject) enrol(ctx context.Context) error {
	// The agent looks for the group of all pods as it starts, and takes no process for the node's own if there is none.
	if _, err := s.Group("kubepods/pod"); err != nil {
		return err
	}
	agent := []string{s.binary, "agent", "--standalone", "--run-dir", s.RunDir, "--zds-socket", s.ZDSSocket,
		"--bpffs", s.BPFFS, "--cgroup", s.Cgroup}
	proc, err := s.startIn(s.Node, "host", "agent", agent, roleAgent)
	if err != nil {
		return err
	}
	s.agent = api.NewClient(filepath.Join(s.RunDir, "agent.sock"))
	if err := until(ctx, proc, func() error {
		_, err := s.agent.Status(ctx)
		return err
	}); err != nil {
		return err
	}
	proc, err = s.startIn(s.Node, "proxy", "hello", []string{s.binary, "--zds-socket", s.ZDSSocket, "--mute", "listen"}, roleHello)
	if err != nil {
		return err
	}
	if err := until(ctx, proc, func() error {
		status, err := s.agent.Status(ctx)
		if err == nil && !slices.ContainsFunc(status.Proxies, func(c zds.ConnStatus) bool { return c.State == zds.StateReady }) {
			err = errors.New("the agent knows no node proxy")
		}
		return err
	}); err != nil {
		return err
	}
	_, err = s.agent.Enroll(ctx, api.EnrollRequest{Spec: specOf(s.pod), Wait: true, Timeout: api.Duration(startPatience)})
	return err
}

func specOf(pod *bed.NS) enroll.Spec {
	return enroll.Spec{
		UID: "uid-" + pod.Name, Namespace: "default", Name: pod.Name, ServiceAccount: "default", NetNS: pod.Path,
		IPs: []netip.Addr{pod.V4, pod.V6},
	}
}

// startIn starts this program in another role: in a group below the bed's cgroup, where the dataplane sees it, or, without a name
// of one or for the other subjects, beside it.
func (s *subject) startIn(ns *bed.NS, group, name string, argv []string, role string) (*bed.Proc, error) {
	env := []string{roleVariable + "=" + role}
	if group == "" || !s.captures() {
		return s.Start(ns, false, name, argv, env)
	}
	dir, err := s.Group(group)
	if err != nil {
		return nil, err
	}
	return s.StartIn(ns, dir, name, argv, env)
}

// start starts a role that is spoken to, and waits until it answers.
func (s *subject) start(ctx context.Context, ns *bed.NS, group, name, role string, flags ...string) (*rpc.Client, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(s.RunDir, name+".sock")
	proc, err := s.startIn(ns, group, name, append([]string{self, "-control=" + socket}, flags...), role)
	if err != nil {
		return nil, err
	}
	var c *rpc.Client
	err = until(ctx, proc, func() error {
		var err error
		c, err = rpc.Dial("unix", socket)
		return err
	})
	return c, err
}

// until waits until something succeeds that a process is to bring about.
func until(ctx context.Context, p *bed.Proc, try func() error) error {
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-p.Done():
			return fmt.Errorf("%s has ended: %s", p.Name, p.Output())
		case <-ctx.Done():
			return fmt.Errorf("%s: %w: %w: %s", p.Name, context.Cause(ctx), err, p.Output())
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// watch has the agent tell this process of all that happens, for as long as the subject lives.
func (s *subject) watch(ctx context.Context) error {
	begun, ended := make(chan struct{}), make(chan error, 1)
	ctx, s.unwatch = context.WithCancel(ctx)
	go func() {
		ended <- s.agent.Monitor(ctx, monitor.Filter{}, func() { close(begun) }, func(monitor.Event) error { return nil })
	}()
	select {
	case <-begun:
		return nil
	case err := <-ended:
		return fmt.Errorf("watch: %w", err)
	}
}

// Close ends the subject's processes and removes its namespaces. An agent's dataplane goes with its bed.
func (s *subject) Close() error {
	for _, c := range []*rpc.Client{s.proxy, s.app, s.clients[outbound], s.clients[inbound], s.clients[probe]} {
		if c != nil {
			_ = c.Close()
		}
	}
	if s.unwatch != nil {
		s.unwatch()
	}
	if s.splice != nil {
		return errors.Join(s.splice.Close(), s.Bed.Close())
	}
	return s.Bed.Close()
}

// target says where a client of a scenario connects to.
func (s *subject) target(sc scenario) netip.AddrPort {
	loopback, server, pod := netip.MustParseAddr("127.0.0.1"), s.Outside.V4, s.pod.V4
	if sc.V6 {
		loopback, server, pod = netip.IPv6Loopback(), s.Outside.V6, s.pod.V6
	}
	switch {
	case sc.Work == workDNS && s.name == direct:
		return netip.AddrPortFrom(loopback, portDNS)
	case sc.Work == workDNS:
		return netip.AddrPortFrom(server, 53)
	case sc.Direction == outbound && s.name == direct:
		return netip.AddrPortFrom(loopback, portOutbound)
	case sc.Direction == outbound:
		return netip.AddrPortFrom(server, 80) // nobody is there: the proxy answers
	case sc.Direction == inbound && s.name == direct:
		return netip.AddrPortFrom(pod, portInbound)
	default:
		return netip.AddrPortFrom(pod, portApp)
	}
}

// snapshot is what the processes of one direction have done so far.
type snapshot struct{ proxy, app, client Stats }

func (s *subject) snapshot(direction string) (snapshot, error) {
	var n snapshot
	err := errors.Join(
		s.proxy.Call("Bench.Stats", struct{}{}, &n.proxy),
		s.app.Call("Bench.Stats", struct{}{}, &n.app),
		s.clients[direction].Call("Bench.Stats", struct{}{}, &n.client),
	)
	for who, failure := range map[string]string{"proxy": n.proxy.Err, "app": n.app.Err} {
		if failure != "" {
			err = errors.Join(err, fmt.Errorf("%s's %s: %s", s.name, who, failure))
		}
	}
	return n, err
}

// measure runs a scenario, and sees that every connection of it went where it should: each was counted by the proxy or, of probes,
// by the app alone, and the last had the right original destination.
func (s *subject) measure(sc scenario, duration time.Duration, count int) (Measured, error) {
	fail := func(err error) (Measured, error) { return Measured{}, fmt.Errorf("%s, %s: %w", s.name, sc, err) }
	before, err := s.snapshot(sc.Direction)
	if err != nil {
		return fail(err)
	}
	var r Result
	job := Job{Work: sc.Work, Target: s.target(sc), Clients: sc.Clients, Size: sc.Size, Duration: duration, Count: count, Rate: s.rate}
	if err := s.clients[sc.Direction].Call("Bench.Run", job, &r); err != nil {
		_, why := s.snapshot(sc.Direction) // what a server has to say is nearer to the cause
		return fail(errors.Join(err, why))
	}
	after, err := s.snapshot(sc.Direction)
	if err != nil {
		return fail(err)
	}
	if err := s.check(sc, r, before, after); err != nil {
		return fail(err)
	}
	m := Measured{Rate: float64(r.Ops) / r.Elapsed.Seconds(), P50: micro(r.P50), P99: micro(r.P99)}
	if sc.Work == workStream {
		m.Rate = float64(r.Bytes) / r.Elapsed.Seconds()
	}
	cpu := after.proxy.CPU - before.proxy.CPU + after.app.CPU - before.app.CPU + after.client.CPU - before.client.CPU
	m.CPU = micro(cpu) / float64(max(r.Ops, 1))
	return m, nil
}

func micro(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }

// check compares what the servers have seen with what the client did.
func (s *subject) check(sc scenario, r Result, before, after snapshot) error {
	pairs := map[string][2]Seen{
		"proxy, outbound": {before.proxy.Outbound, after.proxy.Outbound},
		"proxy, inbound":  {before.proxy.Inbound, after.proxy.Inbound},
		"proxy, DNS":      {before.proxy.DNS, after.proxy.DNS},
		"app":             {before.app.App, after.app.App},
	}
	want := map[string]uint64{}
	switch {
	case sc.Work == workDNS:
		want["proxy, DNS"] = r.Ops
	case sc.Direction == outbound:
		want["proxy, outbound"] = r.Connections
	case sc.Direction == inbound:
		want["proxy, inbound"], want["app"] = r.Connections, r.Connections
	default:
		want["app"] = r.Connections
	}
	for who, pair := range pairs {
		if got := pair[1].Count - pair[0].Count; got != want[who] {
			return fmt.Errorf("%s: %d connections, where there should be %d", who, got, want[who])
		}
	}
	return s.checkAddresses(sc, after)
}

// checkAddresses looks at the original destination and the source of the last connection.
func (s *subject) checkAddresses(sc scenario, n snapshot) error {
	switch {
	case sc.Work == workDNS:
		return nil // the proxy cannot see where a query was to go
	case sc.Direction == outbound:
		return same("the proxy's original destination", n.proxy.Outbound.Destination, s.target(sc))
	case sc.Direction == inbound:
		peer := s.Outside.V4
		if sc.V6 {
			peer = s.Outside.V6
		}
		err := errors.Join(same("the proxy's original destination", n.proxy.Inbound.Destination, s.target(sc)),
			same("the proxy's peer", n.proxy.Inbound.Source.Addr(), peer))
		if s.name != direct {
			err = errors.Join(err, same("the app's peer", n.app.App.Source.Addr(), peer))
		}
		return err
	}
	if s.name == direct {
		return nil
	}
	from := probeV4
	if sc.V6 {
		from = probeV6
	}
	return same("the source of a probe", n.app.App.Source.Addr(), from)
}

func same[T comparable](what string, got, want T) error {
	if got != want {
		return fmt.Errorf("%s is %v, and should be %v", what, got, want)
	}
	return nil
}
