// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/zds"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// evade is a role of the test binary: "evade REMOTE LOCAL MARK" connects, and says how that went.
func evade(args []string) int {
	socket := func() error {
		r, err := netip.ParseAddrPort(args[0])
		if err != nil {
			return err
		}
		l, err := netip.ParseAddrPort(args[1])
		if err != nil {
			return err
		}
		mark, err := strconv.ParseUint(args[2], 0, 32)
		if err != nil {
			return err
		}
		fd, err := tcpSocket(r.Addr())
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := marked(uint32(mark))(fd); err != nil {
			return err
		}
		if err := unix.Bind(fd, sockaddrOf(l)); err != nil {
			return err
		}
		return connectWithin(fd, r, evasionPatience)
	}
	if err := socket(); err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("connected")
	return 0
}

// evasionPatience is how long a connection that is to fail is tried. The kernel repeats a SYN after a second.
const evasionPatience = 300 * time.Millisecond

// The app that evaders want to reach.
const evasionPort = 8080

// evasionStage is a node as it is run: the agent, the node proxy and the pods' processes in cgroups of their own. The test's
// own process is in that of a pod.
type evasionStage struct {
	*node
	agent *agentProcess
	proxy *proxy
	// outside is the app beyond the node that evaders of the pods want to reach.
	outside *bed.App
	// wire is a packet socket on all links of the node.
	wire int
	// ports are given to evaders one by one, so that each is recognised on the wire; below those that the kernel chooses.
	ports uint16
	pods  int
	// asked is how many connections accepted has made.
	asked int64
}

// accepted is how many connections the app outside has accepted for evaders. It makes one of its own, which queues up behind all that
// there are: a slow machine's app may not have come to them yet.
func (s *evasionStage) accepted() int64 {
	s.t.Helper()
	s.asked++
	ask(s.t, s.Outside, bed.DialSpec{Remote: netip.AddrPortFrom(s.Outside.V4, evasionPort)})
	return s.outside.Accepts() - s.asked
}

func newEvasionStage(t *testing.T) *evasionStage {
	t.Helper()
	b := bed.ForTest(t, bed.Options{})
	if err := b.JoinCgroup(); err != nil {
		t.Fatal(err)
	}
	s := &evasionStage{node: &node{Bed: b, t: t}, ports: 20000}
	s.joinGroup("kubepods/podX") // first, for the agent to find the pods' group at once
	s.startAgent()
	s.outside = s.serve(b.Outside, evasionPort, bed.AppOptions{})
	s.wire = packetSocket(t, b.Node, 0, unix.ETH_P_ALL)
	if err := unix.SetsockoptTimeval(s.wire, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}); err != nil {
		t.Fatal(err)
	}
	return s
}

// untraced is a role of the test binary: the agent without CAP_SYS_PTRACE.
const untraced = "untraced"

// dropPtrace takes CAP_SYS_PTRACE from the calling thread and from all that it starts. It must be the process's main thread,
// and the process runs on from the beginning, so that all its threads lack it.
func dropPtrace() error {
	if err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_PTRACE, 0, 0, 0); err != nil {
		return err
	}
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, roleVariable+"=") })
	return unix.Exec("/proc/self/exe", os.Args, append(env, roleVariable+"=agent"))
}

// startAgent starts an agent as on a node, in a cgroup of its own.
func (s *evasionStage) startAgent() {
	s.t.Helper()
	s.startAgentAs("agent")
}

// startAgentAs starts an agent by a role of the test binary.
func (s *evasionStage) startAgentAs(role string, flags ...string) {
	s.t.Helper()
	args := []string{
		"agent", "--standalone", "--run-dir", s.RunDir, "--bpffs", s.BPFFS, "--cgroup", s.Cgroup, "--zds-socket", s.ZDSSocket,
	}
	s.agent = &agentProcess{
		s.startIn("system/agent", s.Node, "agent", role, append(args, flags...)...),
		api.NewClient(filepath.Join(s.RunDir, "agent.sock")),
	}
	eventually(s.t, "the agent answers", func() bool {
		select {
		case <-s.agent.Done():
			if strings.Contains(s.agent.Output(), "kernel lacks") {
				s.t.Skip(s.agent.Output())
			}
			s.t.Fatalf("the agent has ended: %s", s.agent.Output())
		default:
		}
		_, err := s.agent.client.Status(s.t.Context())
		return err == nil
	})
}

func (s *evasionStage) startIn(group string, ns *bed.NS, name, role string, args ...string) *bed.Proc {
	s.t.Helper()
	dir, err := s.Group(group)
	if err != nil {
		s.t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	p, err := s.StartIn(ns, dir, name, append([]string{self}, args...), []string{roleVariable + "=" + role})
	if err != nil {
		s.t.Fatal(err)
	}
	return p
}

// joinGroup moves the test's process into a group below the bed's; the bed moves it back in the end.
func (s *evasionStage) joinGroup(name string) {
	s.t.Helper()
	dir, err := s.Group(name)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0)
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

// startNodeProxy starts a node proxy in a cgroup of its own, and waits until it is ready.
func (s *evasionStage) startNodeProxy(args ...string) *proxy {
	s.t.Helper()
	p := s.startNodeProxyProcess(args...)
	s.waitProxy(p)
	return p
}

func (s *evasionStage) startNodeProxyProcess(args ...string) *proxy {
	s.t.Helper()
	s.proxies++
	p := &proxy{log: filepath.Join(s.Dir, fmt.Sprintf("proxy%d.json", s.proxies)), t: s.t}
	p.Proc = s.startIn("proxy", s.Node, fmt.Sprintf("proxy%d", s.proxies), "nodeproxy",
		append([]string{"--zds-socket", s.ZDSSocket, "--log", p.log}, args...)...)
	s.proxy = p
	return p
}

func (s *evasionStage) waitProxy(p *proxy) {
	s.t.Helper()
	eventually(s.t, "the node proxy is ready", func() bool {
		status, err := s.agent.client.Status(s.t.Context())
		return err == nil && slices.ContainsFunc(status.Proxies, func(c zds.ConnStatus) bool {
			return c.State == zds.StateReady && int(c.PID) == p.Pid
		})
	})
}

func (s *evasionStage) nextPort() uint16 {
	s.ports++
	return s.ports
}

func (s *evasionStage) newPod(t *testing.T) *bed.NS {
	t.Helper()
	s.pods++
	pod, err := s.Pod(fmt.Sprintf("pod%d", s.pods), bed.PodOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

// enrolWith has the agent enrol a pod, and waits for the proxy if one runs.
func (s *evasionStage) enrolPod(t *testing.T, pod *bed.NS) {
	t.Helper()
	request := api.EnrollRequest{Spec: agent.Spec(pod), Wait: s.proxy != nil, Timeout: api.Duration(20 * time.Second)}
	if _, err := s.agent.client.Enroll(t.Context(), request); err != nil {
		t.Fatal(err)
	}
}

func (s *evasionStage) podStatus(t *testing.T, pod *bed.NS) enroll.Pod {
	t.Helper()
	pods, err := s.agent.client.Pods(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pods {
		if p.UID == "uid-"+pod.Name {
			return p
		}
	}
	t.Fatalf("pod %s is not enrolled", pod.Name)
	return enroll.Pod{}
}

// counter is one of a pod's counters, by its name.
func (s *evasionStage) counter(t *testing.T, pod *bed.NS, name string) uint64 {
	t.Helper()
	counters := s.podStatus(t, pod).Counters
	return counterNamed(t, &counters, name)
}

func counterNamed(t *testing.T, c *maps.Counters, want string) uint64 {
	t.Helper()
	var found *uint64
	c.Each(func(name string, value uint64) {
		if name == want {
			found = &value
		}
	})
	if found == nil {
		t.Fatalf("there is no counter %s", want)
	}
	return *found
}

// repairs is how often the agent has put back something of that kind.
func (s *evasionStage) repairs(t *testing.T, kind enroll.Repair) uint64 {
	t.Helper()
	status, err := s.agent.client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return status.Repairs[kind]
}

// attempt is one evader's try to reach the app outside.
type attempt struct {
	*evasionStage
	pod    *bed.NS
	family string
	// local is the evader's address and port, remote the app's.
	local, remote netip.AddrPort
	// enrolled says whether the pod is: the same is tried in one that is not, where it must succeed.
	enrolled bool
	// socket is what prepare has left for try.
	socket int
	// uplink is the pod's link to the node; a kind may make another.
	uplink string
}

func (s *evasionStage) newAttempt(t *testing.T, family string) *attempt {
	t.Helper()
	pod := s.newPod(t)
	return &attempt{
		evasionStage: s, pod: pod, family: family, socket: -1, uplink: pod.Link,
		local:  netip.AddrPortFrom(addr(pod, family), s.nextPort()),
		remote: netip.AddrPortFrom(addr(s.Outside, family), evasionPort),
	}
}

// opened is what was seen on the node's links of TCP segments with the attempt's ports, since the last call.
type opened struct {
	// syn counts segments that may open a connection, and synAck answers to such.
	syn, synAck int
}

const wireMarker = "all that was sent before has come through"

// onTheWire looks at what has come through the node's links since the last call, whatever it is wrapped in: the ports are
// looked for anywhere in a frame.
func (a *attempt) onTheWire(t *testing.T) opened {
	t.Helper()
	return a.portsOnTheWire(t, a.local.Port(), a.remote.Port())
}

func (a *attempt) portsOnTheWire(t *testing.T, source, destination uint16) opened {
	t.Helper()
	var ports []byte
	ports = binary.BigEndian.AppendUint16(ports, source)
	ports = binary.BigEndian.AppendUint16(ports, destination)
	var seen opened
	a.eachFrame(t, func(frame []byte) {
		at := bytes.Index(frame, ports)
		switch {
		case at < 0:
		case at+13 >= len(frame):
			seen.syn++ // it has no flags: what a fragment may hide
		case frame[at+13]&(syn|ack) == syn:
			seen.syn++
		case frame[at+13]&(syn|ack) == syn|ack:
			seen.synAck++
		}
	})
	return seen
}

// eachFrame calls do with all frames that have come through the node's links since the last call. A marker is sent behind
// them, and again if it is lost: the pod's link may not be up.
func (a *attempt) eachFrame(t *testing.T, do func(frame []byte)) {
	t.Helper()
	buf := make([]byte, 2048)
	a.sendMarker(t)
	for lost := 0; lost < 10; {
		n, _, err := unix.Recvfrom(a.wire, buf, 0)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			lost++
			a.sendMarker(t)
		case err != nil:
			t.Fatal(err)
		case bytes.Contains(buf[:n], []byte(wireMarker)):
			return
		default:
			do(buf[:n])
		}
	}
	t.Fatal("the marker does not come through")
}

// sendMarker puts a frame of no known kind on the pod's link, behind all that the pod has sent before.
func (a *attempt) sendMarker(t *testing.T) {
	t.Helper()
	link := linkOf(t, a.pod, a.uplink)
	fd := packetSocket(t, a.pod, link.Attrs().Index, 0)
	frame := append(append(bytes.Repeat([]byte{0xff}, 6), link.Attrs().HardwareAddr...), 0x88, 0xb5)
	if err := unix.Sendto(fd, append(frame, wireMarker...), 0, &unix.SockaddrLinklayer{Ifindex: link.Attrs().Index}); err != nil {
		t.Fatal(err)
	}
}

// evasion is a way to get a connection out of a pod past the proxy.
type evasion struct {
	name string
	// family is the one that the kind exists for, if not both.
	family string
	// prepare is done before enrolment. It may be nil.
	prepare func(t *testing.T, a *attempt)
	// try is done after it.
	try func(t *testing.T, a *attempt)
	// proxied says that the connection must show in the proxy's log. Otherwise it must not come about at all.
	proxied bool
	// counter must have risen.
	counter string
}

// Whatever a pod does, no connection leaves it un-proxied. Each kind is tried in a pod that is not enrolled as well, and must
// get out of that: a try that would fail anyway proves nothing.
func TestNothingLeavesPastTheProxy(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	for _, e := range slices.Concat(socketEvasions(), packetEvasions(), linkEvasions()) {
		t.Run(e.name, func(t *testing.T) {
			if e.family != "" {
				t.Run(e.family, func(t *testing.T) { s.run(t, e, e.family) })
				return
			}
			eachFamily(t, func(t *testing.T, family string) { s.run(t, e, family) })
		})
	}
}

func (s *evasionStage) run(t *testing.T, e evasion, family string) {
	t.Helper()
	s.t = t
	free := s.newAttempt(t, family)
	if e.prepare != nil {
		e.prepare(t, free)
	}
	e.try(t, free)
	if seen := free.onTheWire(t); seen.syn+seen.synAck == 0 {
		t.Error("it does not get out of a pod that is not enrolled either: the test proves nothing")
	}

	a := s.newAttempt(t, family)
	if e.prepare != nil {
		e.prepare(t, a)
	}
	a.onTheWire(t) // what was before does not count
	s.enrolPod(t, a.pod)
	a.enrolled = true
	// One that the pod before has made may come to the app only now.
	accepted := func() int64 {
		return s.accepted() - s.outside.AcceptsFrom(free.pod.V4) - s.outside.AcceptsFrom(free.pod.V6)
	}
	before := accepted()
	e.try(t, a)
	if seen := a.onTheWire(t); seen.syn+seen.synAck > 0 {
		t.Errorf("%d SYNs and %d SYN-ACKs have left the pod past the proxy", seen.syn, seen.synAck)
	}
	if e.proxied {
		p := *s.proxy
		p.t = t
		p.saw(a.pod, nodeproxy.Outbound, a.local, a.remote)
	}
	got := accepted() - before
	known := int64(a.proxied())
	// The proxy may note a connection after the next one.
	for deadline := time.Now().Add(patience); e.proxied && got > known && time.Now().Before(deadline); known = int64(a.proxied()) {
		time.Sleep(5 * time.Millisecond)
	}
	if !e.proxied && known > 0 {
		t.Errorf("the proxy has seen %d connections", known)
	}
	if got > known {
		t.Errorf("the app has accepted %d connections, of which the proxy knows %d", got, known)
	}
	if got := s.counter(t, a.pod, e.counter); got == 0 {
		t.Errorf("it is not counted as %s: %+v", e.counter, s.podStatus(t, a.pod).Counters)
	}
}

// tcpSocket makes a TCP socket of the address's family in the namespace of the calling thread. It does not wait.
func tcpSocket(of netip.Addr) (int, error) {
	domain := unix.AF_INET6
	if of.Is4() {
		domain = unix.AF_INET
	}
	return unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_TCP)
}

func sockaddrOf(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// connectWithin connects a socket and waits for what comes of it.
func connectWithin(fd int, remote netip.AddrPort, patience time.Duration) error {
	if err := unix.Connect(fd, sockaddrOf(remote)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return err
	}
	return waitConnected(fd, patience)
}

// waitConnected waits for a connect() that is under way.
func waitConnected(fd int, patience time.Duration) error {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	for deadline := time.Now().Add(patience); ; {
		n, err := unix.Poll(fds, int(time.Until(deadline).Milliseconds()))
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case n == 0:
			return os.ErrDeadlineExceeded
		}
		errno, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && errno != 0 {
			err = unix.Errno(errno)
		}
		if err == nil {
			_, err = unix.Getpeername(fd) // the error may have been told before
		}
		return err
	}
}

// open makes a TCP socket in a namespace, bound to the attempt's address, for prepare or try.
func (a *attempt) open(t *testing.T, ns *bed.NS, options ...func(fd int) error) {
	t.Helper()
	err := ns.Do(func() (err error) {
		a.socket, err = tcpSocket(a.remote.Addr())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	fd := a.socket
	t.Cleanup(func() { _ = unix.Close(fd) })
	for _, set := range options {
		if err := set(fd); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Bind(fd, sockaddrOf(a.local)); err != nil {
		t.Fatal(err)
	}
}

func option(level, name, value int) func(fd int) error {
	return func(fd int) error {
		return os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, level, name, value))
	}
}

func marked(mark uint32) func(fd int) error {
	return option(unix.SOL_SOCKET, unix.SO_MARK, int(mark))
}

// connect connects the attempt's socket, and does not mind whether that works.
func (a *attempt) connect() {
	_ = connectWithin(a.socket, a.remote, evasionPatience)
}
