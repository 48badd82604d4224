// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/zds"
)

type rawConn = syscall.RawConn

// The source ports of connections that steer passes on; none that the kernel
// would choose by itself.
const steerOutbound, steerInbound = 1001, 1002

// steer does what the dataplane does, by the client's port: it passes connections to
// the proxy's listeners, with their addresses left alone.
func (n *testPod) steer(x *proxy, uid string) {
	n.t.Helper()
	listeners, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.SockMap, KeySize: 4, ValueSize: 8, MaxEntries: 2})
	if err != nil {
		n.t.Fatal(err)
	}
	defer listeners.Close()
	for i, dir := range []Direction{Outbound, Inbound} {
		n.put(listeners, uint32(i), x, uid, dir)
	}
	const remotePort = 36 // in struct bpf_sk_lookup, big endian
	n.attach(asm.Instructions{
		asm.LoadMem(asm.R7, asm.R6, remotePort, asm.Half),
		asm.HostTo(asm.BE, asm.R7, asm.Half),
		asm.JLT.Imm(asm.R7, steerOutbound, "pass"),
		asm.JGT.Imm(asm.R7, steerInbound, "pass"),
		asm.Sub.Imm(asm.R7, steerOutbound),
	}, listeners, "drop")
}

// newestFirst does what the dataplane does for PortHBONE when there are several
// proxies: it passes all connections to the listener that point was last called
// with, and none to others that share the port.
func (n *testPod) newestFirst(uid string) (point func(*proxy)) {
	n.t.Helper()
	newest, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.SockMap, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = newest.Close() })
	const localPort = 60 // in struct bpf_sk_lookup, in the host's order
	n.attach(asm.Instructions{
		asm.LoadMem(asm.R7, asm.R6, localPort, asm.Word),
		asm.JNE.Imm(asm.R7, PortHBONE, "pass"),
		asm.Mov.Imm(asm.R7, 0),
	}, newest, "pass")
	return func(x *proxy) {
		n.t.Helper()
		n.put(newest, 0, x, uid, HBONE)
	}
}

// put writes a proxy's listener into a map.
func (n *testPod) put(m *ebpf.Map, key uint32, x *proxy, uid string, dir Direction) {
	n.t.Helper()
	x.mu.Lock()
	p := x.pods[uid]
	x.mu.Unlock()
	raw, err := p.listeners[dir].SyscallConn()
	if err != nil {
		n.t.Fatal(err)
	}
	if ctlErr := raw.Control(func(fd uintptr) { err = m.Put(key, uint64(fd)) }); err != nil || ctlErr != nil {
		n.t.Fatal(err, ctlErr)
	}
}

// attach attaches an sk_lookup program to the pod. It assigns the listener whose key
// the choice leaves in R7, with the context in R6; if there is none, it goes on at
// the label.
func (n *testPod) attach(choice asm.Instructions, listeners *ebpf.Map, ifNone string) {
	n.t.Helper()
	const noReuseport = 2 // BPF_SK_LOOKUP_F_NO_REUSEPORT
	instructions := append(asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}, choice...)
	instructions = append(instructions,
		asm.StoreMem(asm.RFP, -4, asm.R7, asm.Word),
		asm.LoadMapPtr(asm.R1, listeners.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, ifNone),
		asm.Mov.Reg(asm.R7, asm.R0),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Reg(asm.R2, asm.R7),
		asm.Mov.Imm(asm.R3, noReuseport),
		asm.FnSkAssign.Call(),
		asm.Mov.Reg(asm.R1, asm.R7),
		asm.FnSkRelease.Call(),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("pass"),
		asm.Return(),
	)
	if ifNone == "drop" {
		instructions = append(instructions, asm.Mov.Imm(asm.R0, 0).WithSymbol("drop"), asm.Return())
	}
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:         ebpf.SkLookup,
		AttachType:   ebpf.AttachSkLookup,
		License:      "Apache-2.0",
		Instructions: instructions,
	})
	if err != nil {
		n.t.Fatalf("load the steering program: %+v", err)
	}
	defer prog.Close()
	l, err := link.AttachNetNs(n.ns.fd, prog)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = l.Close() })
}

// bench is an agent, a proxy, and a pod "a" whose connections are steered.
type bench struct {
	*testPod
	agent *testAgent
	proxy *testProxy
}

func newBench(t *testing.T, cfg Config) *bench {
	t.Helper()
	checkProcess(t)
	b := &bench{testPod: newTestPod(t), agent: startAgent(t, zds.Options{})}
	b.proxy = startProxy(t, b.agent, cfg)
	b.agent.set("a", b)
	b.steer(b.proxy.x, "a")
	return b
}

func at(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

// steered are connections that come to a proxy in all the ways there are.
var steered = []struct {
	name      string
	direction Direction
	from, to  netip.AddrPort
}{
	{"outbound v4", Outbound, at(client4, steerOutbound), at(app4, 80)},
	{"outbound v6", Outbound, at(client6, steerOutbound), at(app6, 80)},
	{"inbound v4", Inbound, at(stranger4, steerInbound), at(app4, 80)},
	{"inbound v6", Inbound, at(stranger6, steerInbound), at(app6, 80)},
}

func TestSourceAndDestinationAreKept(t *testing.T) {
	b := newBench(t, Config{})
	// The app is told who the client is, and echoes.
	b.serve(at(app4, 80), echo)
	b.serve(at(app6, 80), echo)
	for _, tt := range steered {
		t.Run(tt.name, func(t *testing.T) {
			c := b.mustDial(tt.from, tt.to)
			if peer := addrPortOf(c.RemoteAddr()); peer != tt.to {
				t.Errorf("the client's peer is %v, want %v", peer, tt.to)
			}
			r := bufio.NewReader(c)
			if who, err := r.ReadString('\n'); err != nil || who != tt.from.Addr().String()+"\n" {
				t.Errorf("the app's peer is %q, %v, want %s", who, err, tt.from.Addr())
			}
			exchange(t, c, r)
			b.proxy.expectRecord(Record{
				UID: "a", Pod: "shop/pod-a", Direction: tt.direction, Source: tt.from, OriginalDestination: tt.to,
			})
		})
	}
}

// exchange sends a megabyte, ends its side, and wants all of it back and the end.
func exchange(t *testing.T, c *net.TCPConn, r io.Reader) {
	t.Helper()
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	go func() {
		_, _ = c.Write(want)
		_ = c.CloseWrite()
	}()
	got, err := io.ReadAll(r)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes came back and %v, want the %d that were sent", len(got), err, len(want))
	}
}

func TestARefusalByTheOtherSideReachesTheClientAtOnce(t *testing.T) {
	b := newBench(t, Config{})
	for _, tt := range steered { // nobody serves
		t.Run(tt.name, func(t *testing.T) {
			c, err := b.dial(tt.from, tt.to)
			if err == nil {
				// The proxy accepted before it knew.
				_, err = c.Read(make([]byte, 1))
			}
			if !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("the client got %v, want %v", err, unix.ECONNRESET)
			}
			b.proxy.expectRecord(Record{
				UID: "a", Pod: "shop/pod-a", Direction: tt.direction, Source: tt.from, OriginalDestination: tt.to,
				Error: "connection refused",
			})
		})
	}
}

func TestAResetIsPassedOn(t *testing.T) {
	b := newBench(t, Config{})
	seen := make(chan error, 1)
	b.serve(at(app4, 80), func(c *net.TCPConn) {
		line, err := bufio.NewReader(c).ReadString('\n')
		if line == "reset\n" {
			reset(c)
			return
		}
		if err == nil {
			_, err = c.Read(make([]byte, 1))
		}
		seen <- err
	})
	c := b.mustDial(at(client4, steerOutbound), at(app4, 80))
	fmt.Fprint(c, "reset\n")
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the app reset it, and the client got %v, want %v", err, unix.ECONNRESET)
	}
	c = b.mustDial(at(client4, steerOutbound), at(app4, 80))
	fmt.Fprint(c, "wait\n")
	time.Sleep(10 * time.Millisecond) // or a reset would overtake the line
	reset(c)
	if err := <-seen; !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the client reset it, and the app got %v, want %v", err, unix.ECONNRESET)
	}
}

func TestOneSideMayEndAndStillBeAnswered(t *testing.T) {
	b := newBench(t, Config{})
	b.serve(at(app4, 80), func(c *net.TCPConn) {
		fmt.Fprint(c, "hello\n")
		_ = c.CloseWrite()
		got, err := io.ReadAll(c)
		if err != nil || string(got) != "and goodbye" {
			t.Errorf("after its own end the app got %q, %v", got, err)
		}
	})
	c := b.mustDial(at(client4, steerOutbound), at(app4, 80))
	if got, err := io.ReadAll(c); err != nil || string(got) != "hello\n" {
		t.Errorf("the client got %q, %v", got, err)
	}
	if _, err := c.Write([]byte("and goodbye")); err != nil {
		t.Error(err)
	}
	_ = c.CloseWrite()
}

func TestAConnectionToTheProxysOwnPortIsRefused(t *testing.T) {
	b := newBench(t, Config{})
	tests := []struct {
		direction Direction
		from, to  netip.AddrPort
	}{
		// Straight to the listeners; their own address would be the destination.
		{Outbound, at(client4, 40000), at(app4, PortOutbound)},
		{Outbound, at(client6, 40000), at(app6, PortOutbound)},
		{Inbound, at(client4, 40000), at(app4, PortInbound)},
		{Inbound, at(stranger6, 40000), at(app6, PortInbound)},
		// Steered there.
		{Outbound, at(client4, steerOutbound), at(app4, PortInbound)},
		{Inbound, at(stranger6, steerInbound), at(app6, PortOutbound)},
		{Inbound, at(stranger4, steerInbound), at(app4, PortHBONE)},
	}
	for _, tt := range tests {
		c, err := b.dial(tt.from, tt.to)
		if err == nil {
			_, err = c.Read(make([]byte, 1))
		}
		if !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("%s to %v: the client got %v, want %v", tt.direction, tt.to, err, unix.ECONNRESET)
		}
		b.proxy.expectRecord(Record{
			UID: "a", Pod: "shop/pod-a", Direction: tt.direction, Source: tt.from, OriginalDestination: tt.to,
			Error: "refused: it would be a connection to the proxy's own port",
		})
	}
}

// connectTo asks for a tunnel and returns the status, with the connection's reader.
func connectTo(c net.Conn, target, early string) (status string, r *bufio.Reader, err error) {
	if _, err := fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n%s", target, target, early); err != nil {
		return "", nil, err
	}
	r = bufio.NewReader(c)
	status, err = r.ReadString('\n')
	if err != nil {
		return "", nil, err
	}
	for {
		line, err := r.ReadString('\n')
		if err != nil || line == "\r\n" {
			return strings.TrimSpace(status), r, err
		}
	}
}

func TestHBONECarriesATunnelToTheApp(t *testing.T) {
	b := newBench(t, Config{})
	b.serve(at(app4, 80), echo)
	b.serve(at(app6, 80), echo)
	loopback := netip.MustParseAddr("127.0.0.1")
	b.serve(at(loopback, 81), echo)
	for i, tt := range []struct{ from, proxy, to netip.AddrPort }{
		{at(stranger4, 2001), at(app4, PortHBONE), at(app4, 80)},
		{at(stranger6, 2001), at(app6, PortHBONE), at(app6, 80)},
		{at(netip.MustParseAddr("127.0.0.5"), 2001), at(loopback, PortHBONE), at(loopback, 81)},
	} {
		c := b.mustDial(tt.from, tt.proxy)
		early := strings.Repeat("early", i) // data in the same packet as the request, or not
		status, r, err := connectTo(c, tt.to.String(), early)
		if err != nil || status != "HTTP/1.1 200 OK" {
			t.Fatalf("CONNECT from %v to %v: %q, %v", tt.from, tt.to, status, err)
		}
		if who, err := r.ReadString('\n'); err != nil || who != tt.from.Addr().String()+"\n" {
			t.Errorf("the app's peer is %q, %v, want %s", who, err, tt.from.Addr())
		}
		back := make([]byte, len(early))
		if _, err := io.ReadFull(r, back); err != nil || string(back) != early {
			t.Errorf("what was sent with the request came back as %q, %v, want %q", back, err, early)
		}
		exchange(t, c, r)
		b.proxy.expectRecord(Record{UID: "a", Pod: "shop/pod-a", Direction: HBONE, Source: tt.from, OriginalDestination: tt.to})
	}
}

func TestHBONERefusesWhatItMust(t *testing.T) {
	b := newBench(t, Config{})
	for i, tt := range []struct{ target, status, err string }{
		{"10.9.0.1:82", "503 Service Unavailable", "connection refused"},
		{"192.0.2.7:80", "403 Forbidden", "refused: 192.0.2.7 is no address of the pod"},
		{"[2001:db8::7]:80", "403 Forbidden", "refused: 2001:db8::7 is no address of the pod"},
		{"10.9.0.1:15008", "503 Service Unavailable", "refused: it would be a connection to the proxy's own port"},
		{"example.org:80", "400 Bad Request", `the CONNECT request's target: ParseAddr("example.org"): unexpected character (at "example.org")`},
	} {
		from := at(client4, uint16(2010+i))
		c := b.mustDial(from, at(app4, PortHBONE))
		status, _, err := connectTo(c, tt.target, "")
		if err != nil || status != "HTTP/1.1 "+tt.status {
			t.Errorf("CONNECT to %s: %q, %v, want %s", tt.target, status, err, tt.status)
		}
		want := Record{UID: "a", Pod: "shop/pod-a", Direction: HBONE, Source: from, Error: tt.err}
		if want.OriginalDestination, err = netip.ParseAddrPort(tt.target); err != nil {
			want.OriginalDestination = at(app4, PortHBONE)
		}
		b.proxy.expectRecord(want)
	}
	for _, request := range []string{"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "\x16\x03\x01\r\n\r\n", strings.Repeat("x", connectMaxSize)} {
		c := b.mustDial(at(client4, 0), at(app4, PortHBONE))
		if _, err := io.WriteString(c, request); err != nil {
			t.Error(err)
		}
		if status, err := bufio.NewReader(c).ReadString('\n'); err != nil || status != "HTTP/1.1 400 Bad Request\r\n" {
			t.Errorf("%.20q was answered with %q, %v", request, status, err)
		}
	}
}

func TestHoldAcceptsAndNeverProxies(t *testing.T) {
	b := newBench(t, Config{Hold: true})
	b.serve(at(app4, 80), func(c *net.TCPConn) { t.Errorf("%v was proxied", c.RemoteAddr()) })
	from := at(client4, steerOutbound)
	c := b.mustDial(from, at(app4, 80))
	b.proxy.expectRecord(Record{
		UID: "a", Pod: "shop/pod-a", Direction: Outbound, Source: from, OriginalDestination: at(app4, 80), Error: "held",
	})
	_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("reading on a held connection: %v, want that nothing happens", err)
	}
	b.proxy.stop() // does not wait for it
	_ = c.SetReadDeadline(time.Now().Add(patience))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("after the end: %v, want %v", err, unix.ECONNRESET)
	}
}

// listening reports whether a proxy listens in the pod.
func (n *testPod) listening() bool {
	c, err := n.dial(at(client4, 0), at(app4, PortHBONE))
	if err == nil {
		reset(c)
	}
	return err == nil
}

func TestADeletedPodStopsAtOnce(t *testing.T) {
	b := newBench(t, Config{})
	b.serve(at(app4, 80), echo)
	c := b.mustDial(at(client4, steerOutbound), at(app4, 80))
	r := bufio.NewReader(c)
	if _, err := r.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	idle := b.mustDial(at(client4, 0), at(app4, PortHBONE)) // has not sent its request
	eventually(t, func() error {
		if _, err := fmt.Fprint(idle, "CONNECT "); err != nil {
			return err
		}
		return nil
	})
	b.agent.remove("a")
	for _, c := range []*net.TCPConn{c, idle} {
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("a connection of a deleted pod: %v, want %v", err, unix.ECONNRESET)
		}
	}
	if b.listening() {
		t.Error("the proxy still listens in the pod")
	}
	b.agent.set("a", b)
	if !b.listening() {
		t.Error("the proxy does not listen in the pod that was added again")
	}
}

func TestAnotherNamespaceReplacesThePods(t *testing.T) {
	checkProcess(t)
	first, second := newTestPod(t), newTestPod(t)
	agent := startAgent(t, zds.Options{})
	startProxy(t, agent, Config{})
	agent.set("a", first)
	agent.set("a", second)
	if first.listening() || !second.listening() {
		t.Errorf("listening in the old namespace: %v, in the new one: %v; want false, true", first.listening(), second.listening())
	}
}

func TestPodsGoOnWithoutTheAgentAndFollowItsNextSnapshot(t *testing.T) {
	checkProcess(t)
	stays, goes, moves, moved, kept := newTestPod(t), newTestPod(t), newTestPod(t), newTestPod(t), newTestPod(t)
	path := filepath.Join(t.TempDir(), "zds.sock")
	agent := startAgent(t, zds.Options{Path: path})
	p := startProxy(t, agent, Config{})
	stays.serve(at(app4, 80), echo)
	agent.set("stays", stays)
	agent.set("goes", goes)
	agent.set("moves", moves)
	agent.set("kept", kept)
	c := stays.mustDial(at(client4, 3000), at(app4, PortHBONE))
	status, r, err := connectTo(c, at(app4, 80).String(), "")
	if err != nil || status != "HTTP/1.1 200 OK" {
		t.Fatal(status, err)
	}
	if _, err := r.ReadString('\n'); err != nil {
		t.Fatal(err)
	}

	agent.stop()
	p.log.expect(t, "not connected to the agent", "no such file")
	for _, n := range []*testPod{stays, goes, moves, kept} {
		if !n.listening() {
			t.Error("a pod stopped with the agent")
		}
	}
	next, err := zds.Listen(zds.Options{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	agent = &testAgent{Server: next, t: t, path: path, log: &lines{}}
	renamed := podOf("stays", stays)
	renamed.Name = "renamed"
	for _, pod := range []zds.Pod{renamed, podOf("moves", moved), podOf("kept", nil), podOf("unknown", nil)} {
		if err := agent.Set(pod); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- next.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	agent.ready(1)
	got := []bool{stays.listening(), goes.listening(), moves.listening(), moved.listening(), kept.listening()}
	if want := []bool{true, false, false, true, true}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("listening in the pods that stays, goes, moves (old, new), is kept: %v, want %v", got, want)
	}
	exchange(t, c, r) // the connection has not noticed
	from := at(client4, 3001)
	c = stays.mustDial(from, at(app4, PortHBONE))
	if status, _, err := connectTo(c, at(app4, 80).String(), ""); err != nil || status != "HTTP/1.1 200 OK" {
		t.Error(status, err)
	}
	p.expectRecord(Record{UID: "stays", Pod: "shop/renamed", Direction: HBONE, Source: from, OriginalDestination: at(app4, 80)})
}

func TestAPodThatCannotBeStartedIsRefusedAndStartsWhenItCan(t *testing.T) {
	checkProcess(t)
	n := newTestPod(t)
	var blocker net.Listener
	if err := n.ns.do(func() (err error) {
		blocker, err = net.Listen("tcp", fmt.Sprintf("[::]:%d", PortHBONE))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = blocker.Close() }()
	agent := startAgent(t, zds.Options{RetryAfter: 10 * time.Millisecond})
	startProxy(t, agent, Config{})
	agent.ready(1)
	if err := agent.Set(podOf("a", n)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := agent.Wait(ctx, "a")
	if nack, ok := errors.AsType[*zds.NackError](err); !ok || !strings.Contains(nack.Text, "listen on port 15008: bind: address already in use") {
		t.Errorf("Wait: %v, want the port that is taken", err)
	}
	if c, err := n.dial(at(client4, 0), at(app4, PortOutbound)); err == nil {
		_ = c.Close()
		t.Error("it listens on another port nevertheless")
	}
	_ = blocker.Close()
	eventually(t, func() error {
		if st, _ := agent.Pod("a"); len(st.Acked) != 1 {
			return fmt.Errorf("the pod is %+v", st)
		}
		return nil
	})
}

func TestAPodWithoutIPv6(t *testing.T) {
	checkProcess(t)
	n := newTestPod(t)
	if err := n.ns.do(func() error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0o644)
	}); err != nil {
		t.Fatal(err)
	}
	agent := startAgent(t, zds.Options{})
	p := startProxy(t, agent, Config{})
	agent.set("a", n)
	n.steer(p.x, "a")
	n.serve(at(app4, 80), echo)
	c := n.mustDial(at(client4, steerOutbound), at(app4, 80))
	r := bufio.NewReader(c)
	if _, err := r.ReadString('\n'); err != nil {
		t.Error(err)
	}
	exchange(t, c, r)
	if l := p.x.pods["a"].listeners[Outbound].Addr().String(); l != "0.0.0.0:15001" {
		t.Errorf("it listens on %s, want 0.0.0.0:15001", l)
	}
}

func TestTheListenersAreWhatTheDataplaneNeeds(t *testing.T) {
	b := newBench(t, Config{})
	p := b.proxy.x.pods["a"]
	for dir, l := range p.listeners {
		raw, err := l.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		for _, opt := range []struct {
			name       string
			level, opt int
			want       int
		}{
			{"SO_MARK", unix.SOL_SOCKET, unix.SO_MARK, 0x539},
			{"SO_REUSEPORT", unix.SOL_SOCKET, unix.SO_REUSEPORT, 1},
			{"IP_TRANSPARENT", unix.SOL_IP, unix.IP_TRANSPARENT, 1},
			{"IPV6_TRANSPARENT", unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1},
			{"IPV6_V6ONLY", unix.SOL_IPV6, unix.IPV6_V6ONLY, 0},
			{"SO_PROTOCOL", unix.SOL_SOCKET, unix.SO_PROTOCOL, unix.IPPROTO_TCP},
		} {
			var got int
			_ = raw.Control(func(fd uintptr) { got, err = unix.GetsockoptInt(int(fd), opt.level, opt.opt) })
			if err != nil || got != opt.want {
				t.Errorf("%s: %s is %d, %v, want %d", dir, opt.name, got, err, opt.want)
			}
		}
	}
}

func TestWhatIsNoPodsNamespaceIsRefused(t *testing.T) {
	checkProcess(t)
	for path, want := range map[string]string{
		"/proc/thread-self/ns/net": "of the node proxy itself",
		"/proc/self/ns/uts":        "no network namespace",
		os.DevNull:                 "no network namespace",
	} {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := newNetNS(fd); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
}

// Proxies are replaced one after the other, the next before the last is stopped,
// while clients connect as fast as they can. New connections go to the newest, so
// what the last one has when it is stopped is in its queue or accepted.
func TestNoConnectionIsLostWhenAProxyIsReplaced(t *testing.T) {
	b := newBench(t, Config{})
	b.serve(at(app4, 80), echo)
	b.agent.ready(1)
	point := b.newestFirst("a")
	point(b.proxy.x)
	var made atomic.Int64
	stop := make(chan struct{})
	var clients sync.WaitGroup
	for range 4 {
		clients.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := b.oneRequest(); err != nil {
					t.Errorf("connection %d: %v", made.Load(), err)
					return
				}
				made.Add(1)
			}
		})
	}
	old := b.proxy
	for range 10 {
		next := startProxy(t, b.agent, Config{})
		b.agent.ready(2)
		point(next.x)
		// Handshakes that the last one began are over then.
		for enough := made.Load() + 50; made.Load() < enough && !t.Failed(); {
			time.Sleep(time.Millisecond)
		}
		old.stop()
		b.agent.ready(1)
		old = next
	}
	close(stop)
	clients.Wait()
	t.Logf("%d connections", made.Load())
}

// oneRequest is a short connection through PortHBONE.
func (b *bench) oneRequest() error {
	d := net.Dialer{Timeout: patience}
	var c net.Conn
	if err := b.ns.do(func() (err error) {
		// Not DialTCP, which would bind a port and soon find none.
		c, err = d.Dial("tcp", at(app4, PortHBONE).String())
		return err
	}); err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	status, r, err := connectTo(c, at(app4, 80).String(), "x")
	if err != nil {
		return err
	}
	if status != "HTTP/1.1 200 OK" {
		return errors.New(status)
	}
	if _, err := r.ReadString('\n'); err != nil {
		return err
	}
	_, err = r.ReadByte()
	return err
}

func TestWhatWaitsInTheQueueIsServedBeforeTheEnd(t *testing.T) {
	b := newBench(t, Config{})
	b.serve(at(app4, 80), echo)
	p := b.proxy.x.pods["a"]
	// Nothing takes connections out of the queue while its accept loop is asleep.
	if err := p.listeners[HBONE].SetDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	var waiting []*net.TCPConn
	for range 20 {
		waiting = append(waiting, b.mustDial(at(client4, 0), at(app4, PortHBONE)))
	}
	stopped := make(chan struct{})
	go func() {
		b.proxy.stop()
		close(stopped)
	}()
	for _, c := range waiting {
		status, r, err := connectTo(c, at(app4, 80).String(), "")
		if err != nil || status != "HTTP/1.1 200 OK" {
			t.Fatal(status, err)
		}
		if _, err := r.ReadString('\n'); err != nil {
			t.Error(err)
		}
		exchange(t, c, r)
	}
	<-stopped
	if b.listening() {
		t.Error("it listens after its end")
	}
}

func TestAConnectionThatDoesNotEndIsCutWhenTheDrainIsOver(t *testing.T) {
	b := newBench(t, Config{Drain: 50 * time.Millisecond})
	b.serve(at(app4, 80), echo)
	c := b.mustDial(at(client4, steerOutbound), at(app4, 80))
	if _, err := bufio.NewReader(c).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	b.proxy.stop()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the client got %v, want %v", err, unix.ECONNRESET)
	}
}

func TestTheBadPeersAreBad(t *testing.T) {
	for mute, reasons := range map[Mute][]string{
		MuteHello:   {"no hello within"},
		MuteAck:     {"no answer to add a within"},
		MuteLate:    {"no answer to add a within"},
		MuteGarbage: {"no hello", "while no request was in flight"},
		MuteHuge:    {"more than 1024 bytes"},
		MuteVanish:  {"before it answered add a"},
	} {
		t.Run(string(mute), func(t *testing.T) {
			checkProcess(t)
			n := newTestPod(t)
			agent := startAgent(t, zds.Options{HelloTimeout: 200 * time.Millisecond, AckTimeout: 200 * time.Millisecond})
			if err := agent.Set(podOf("a", n)); err != nil {
				t.Fatal(err)
			}
			startProxy(t, agent, Config{Mute: mute})
			for _, r := range reasons {
				agent.log.expect(t, "closed node proxy's connection", r)
			}
			if mute != MuteLate { // Each comes back; this one when its ack is due.
				agent.log.expect(t, "closed node proxy's connection", "conn=2")
			}
			if n.listening() {
				t.Error("it runs the pod")
			}
		})
	}
}

func TestHelloDelay(t *testing.T) {
	checkProcess(t)
	agent := startAgent(t, zds.Options{HelloTimeout: 50 * time.Millisecond})
	startProxy(t, agent, Config{HelloDelay: time.Second})
	agent.log.expect(t, "no hello within 50ms")
}

func TestProgram(t *testing.T) {
	checkProcess(t)
	n := newTestPod(t)
	n.serve(at(app4, 80), echo)
	agent := startAgent(t, zds.Options{})
	logFile := filepath.Join(t.TempDir(), "connections")
	cmd, stderr := program(t, "--zds-socket", agent.path, "--log", logFile)
	agent.ready(1)
	if pid := int(agent.Status()[0].PID); pid != cmd.Process.Pid {
		t.Errorf("the proxy's pid is %d, want %d", pid, cmd.Process.Pid)
	}
	agent.set("a", n)
	c := n.mustDial(at(client4, 4000), at(app4, PortHBONE))
	if status, _, err := connectTo(c, at(app4, 80).String(), ""); err != nil || status != "HTTP/1.1 200 OK" {
		t.Error(status, err)
	}
	_ = c.Close()
	if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v, want exit code 0; it said:\n%s", err, stderr)
	}
	got, err := os.ReadFile(logFile)
	if err != nil {
		t.Fatal(err)
	}
	var when string
	if _, err := fmt.Sscanf(string(got), `{"time":%q`, &when); err != nil {
		t.Errorf("log %q: %v", got, err)
	}
	want := fmt.Sprintf(`{"time":%q,"uid":"a","pod":"shop/pod-a","direction":"hbone","source":"10.9.0.9:4000","original_destination":"10.9.0.1:80","error":""}`+"\n", when)
	if string(got) != want {
		t.Errorf("log is\n%s, want\n%s", got, want)
	}
}

// program starts the node proxy as a process.
func program(t *testing.T, args ...string) (cmd *exec.Cmd, stderr *bytes.Buffer) {
	t.Helper()
	stderr = &bytes.Buffer{}
	cmd = exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	cmd.Stderr = stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	return cmd, stderr
}

func TestWrongArguments(t *testing.T) {
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--mute=loud"}, 2, `unknown mute "loud": it is one of hello, ack, late, garbage, huge, vanish`},
		{[]string{"--bogus"}, 2, "not defined: -bogus"},
		{[]string{"--drain=soon"}, 2, "soon"},
		{[]string{"--drain=-1s"}, 2, "--drain -1s is negative"},
		{[]string{"--hello-delay=-1s"}, 2, "--hello-delay -1s is negative"},
		{[]string{"--zds-socket="}, 2, "--zds-socket is empty"},
		{[]string{"more"}, 2, `unexpected argument "more"`},
		{[]string{"--log=/nowhere/at/all"}, 1, "/nowhere/at/all"},
	} {
		cmd, stderr := program(t, tt.args...)
		err := cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != tt.code {
			t.Errorf("%q: exit code %d (%v), want %d", tt.args, code, err, tt.code)
		}
		if s := stderr.String(); !strings.Contains(s, tt.want) || strings.Count(s, "\n") != 1 {
			t.Errorf("%q: it said %q, want one line with %q", tt.args, s, tt.want)
		}
	}
	cmd, stderr := program(t, "--help")
	if err := cmd.Wait(); err != nil || stderr.Len() > 0 {
		t.Errorf("--help: %v, %q", err, stderr)
	}
}
