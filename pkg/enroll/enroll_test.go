// SPDX-License-Identifier: Apache-2.0

package enroll_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/podns"
	"github.com/redirector-dataplane/redirector/pkg/zds/zdsapi"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// The main thread stays where it is, for /proc/self to mean the host.
func init() { runtime.LockOSThread() }

func newPod(tb testing.TB, b *bed.Bed, name string, opts bed.PodOptions) *bed.NS {
	tb.Helper()
	pod, err := b.Pod(name, opts)
	if err != nil {
		tb.Fatal(err)
	}
	return pod
}

func snapshot(tb testing.TB, ns *bed.NS) string {
	tb.Helper()
	s, err := ns.Snapshot()
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

func TestUnenrolLeavesTheNamespaceAsItWas(t *testing.T) {
	for name, opts := range map[string]bed.PodOptions{
		"dual stack":    {},
		"IPv4 only":     {V4Only: true},
		"IPv6 only":     {V6Only: true},
		"IPv6 disabled": {V6Disabled: true},
	} {
		t.Run(name, func(t *testing.T) {
			b := bed.ForTest(t, bed.Options{})
			pod := newPod(t, b, "pod", opts)
			n := agent.Start(t, b, nil)
			before := snapshot(t, pod)
			for range 2 {
				if err := n.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
					t.Fatal(err)
				}
				if snapshot(t, pod) == before {
					t.Error("enrolment has changed nothing")
				}
				// Repeated, it changes nothing more.
				enrolled := snapshot(t, pod)
				if err := n.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
					t.Fatal(err)
				}
				diff(t, enrolled, snapshot(t, pod))
				for range 2 {
					if err := n.Unenroll(t.Context(), "uid-pod"); err != nil {
						t.Fatal(err)
					}
					diff(t, before, snapshot(t, pod))
				}
			}
		})
	}
}

func TestUnenrolKeepsWhatThePodHadBefore(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	pod := newPod(t, b, "pod", bed.PodOptions{})
	n := agent.Start(t, b, nil)

	for _, sysctl := range []string{"net.ipv4.tcp_fwmark_accept", "net.ipv6.fwmark_reflect"} {
		if err := pod.SetSysctl(sysctl, "1"); err != nil {
			t.Fatal(err)
		}
	}
	h, err := pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	eth0, err := h.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: eth0.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
	if err := h.QdiscAdd(qdisc); err != nil {
		t.Fatal(err)
	}
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Mark, rule.Table = unix.AF_INET, 1, 0x7, 100
	if err := h.RuleAdd(rule); err != nil {
		t.Fatal(err)
	}

	before := snapshot(t, pod)
	if err := n.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
		t.Fatal(err)
	}
	if err := n.Unenroll(t.Context(), "uid-pod"); err != nil {
		t.Fatal(err)
	}
	diff(t, before, snapshot(t, pod))
}

func TestEnrolThatFailsLeavesNothing(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	n := agent.Start(t, b, nil)
	pod := newPod(t, b, "pod", bed.PodOptions{})
	down := newPod(t, b, "down", bed.PodOptions{LoDown: true})

	unknown := agent.Spec(pod)
	unknown.IPs = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	host := agent.Spec(pod)
	host.NetNS = "/proc/self/ns/net"
	for name, c := range map[string]struct {
		spec enroll.Spec
		want string
	}{
		"lo is down":         {agent.Spec(down), "ip link set lo up"},
		"an address it owns": {unknown, "192.0.2.1"},
		"the host":           {host, podns.ErrHost.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			before := snapshot(t, pod) + snapshot(t, down)
			err := n.Enroll(t.Context(), c.spec, false)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got error %v, want one with %q", err, c.want)
			}
			diff(t, before, snapshot(t, pod)+snapshot(t, down))
			if pods, err := n.Datapath.Maps().Pods(); err != nil || len(pods) > 0 {
				t.Errorf("map pods has %v, %v", pods, err)
			}
			if addrs, err := n.Datapath.Maps().OwnAddrs(); err != nil || len(addrs) > 0 {
				t.Errorf("map own_addrs has %v, %v", addrs, err)
			}
			if pins, _ := os.ReadDir(filepath.Join(b.BPFFS, "pods")); len(pins) > 0 {
				t.Errorf("pins are left: %v", pins)
			}
		})
	}
}

func TestANamespaceBelongsToOnePod(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	n := agent.Start(t, b, nil)
	pod := newPod(t, b, "pod", bed.PodOptions{})
	if err := n.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
		t.Fatal(err)
	}
	other := agent.Spec(pod)
	other.UID = "other"
	if err := n.Enroll(t.Context(), other, false); !errors.Is(err, enroll.ErrTaken) || !strings.Contains(err.Error(), "uid-pod") {
		t.Errorf("a second pod in the same namespace: %v", err)
	}
	if _, err := n.Pod("uid-pod"); err != nil {
		t.Errorf("the first pod is gone: %v", err)
	}
}

func TestAPodMayGetANewNamespace(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	n := agent.Start(t, b, nil)
	first, second := newPod(t, b, "first", bed.PodOptions{}), newPod(t, b, "second", bed.PodOptions{})
	before := snapshot(t, first)
	spec := agent.Spec(first)
	if err := n.Enroll(t.Context(), spec, false); err != nil {
		t.Fatal(err)
	}
	spec.NetNS, spec.IPs = second.Path, nil
	if err := n.Enroll(t.Context(), spec, false); err != nil {
		t.Fatal(err)
	}
	diff(t, before, snapshot(t, first))
	if p, err := n.Pod(spec.UID); err != nil || p.NetNSCookie != second.Cookie {
		t.Errorf("pod is %+v, %v", p, err)
	}
}

func TestANewInterfaceGetsItsSealAndItsAddressIsKnown(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	n := agent.Start(t, b, nil)
	pod := newPod(t, b, "pod", bed.PodOptions{})
	if err := n.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
		t.Fatal(err)
	}
	h, err := pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "late0"}, PeerName: "late1"}
	if err := h.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	addr := netip.MustParseAddr("198.51.100.7")
	if err := h.AddrAdd(veth, &netlink.Addr{IPNet: netlink.NewIPNet(addr.AsSlice())}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"late0", "late1"} {
		l, err := h.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, name+" has its seal", func() bool {
			sealed, err := loader.Sealed(h, l)
			return err == nil && sealed
		})
	}
	owns := func() bool {
		addrs, err := n.Datapath.Maps().OwnAddrs()
		_, ok := addrs[pod.Cookie][addr]
		return err == nil && ok
	}
	eventually(t, "the address is known", owns)
	if err := h.LinkDel(veth); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the address is forgotten", func() bool { return !owns() })
}

func TestAnAgentThatStartsTakesOver(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	n := agent.Start(t, b, nil)
	pod, gone := newPod(t, b, "pod", bed.PodOptions{}), newPod(t, b, "gone", bed.PodOptions{})
	nameless := newPod(t, b, "nameless", bed.PodOptions{})
	before := snapshot(t, pod)
	beforeNameless := snapshot(t, nameless)
	for _, ns := range []*bed.NS{pod, gone, nameless} {
		if err := n.Enroll(t.Context(), agent.Spec(ns), false); err != nil {
			t.Fatal(err)
		}
	}
	enrolled := snapshot(t, pod)
	n.Stop()

	if err := b.RemovePod(gone); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(b.RunDir, "pods", "uid-nameless.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	n = agent.Start(t, b, nil)
	diff(t, enrolled, snapshot(t, pod))
	pods, err := n.Pods()
	if err != nil || len(pods) != 1 || pods[0].UID != "uid-pod" || pods[0].Name != "pod" {
		t.Errorf("the new agent knows %+v, %v", pods, err)
	}
	inKernel, err := n.Datapath.Maps().Pods()
	if err != nil || len(inKernel) != 2 || inKernel[nameless.Cookie].UID != "uid-nameless" {
		t.Errorf("the kernel knows %+v, %v", inKernel, err)
	}
	for _, uid := range []string{"uid-pod", "uid-nameless"} {
		if err := n.Unenroll(t.Context(), uid); err != nil {
			t.Fatal(err)
		}
	}
	diff(t, before, snapshot(t, pod))
	diff(t, beforeNameless, snapshot(t, nameless))
}

// A proxy that does not answer keeps an unenrol waiting, but not those who want to know what is so.
func TestPodsAreListedWhileOneIsOnItsWayOut(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	n := agent.Start(t, b, nil)
	pod := newPod(t, b, "pod", bed.PodOptions{})
	if err := n.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
		t.Fatal(err)
	}
	// A peer that says hello and takes the pod, and then nothing more.
	mute, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: b.ZDSSocket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	hello, err := proto.Marshal(&zdsapi.ZdsHello{Version: zdsapi.Version_V1})
	if err != nil {
		t.Fatal(err)
	}
	ack, err := proto.Marshal(&zdsapi.WorkloadResponse{Payload: &zdsapi.WorkloadResponse_Ack{Ack: &zdsapi.Ack{}}})
	if err != nil {
		t.Fatal(err)
	}
	say := func(message []byte) {
		t.Helper()
		if _, err := mute.Write(message); err != nil {
			t.Fatal(err)
		}
	}
	hear := func() {
		t.Helper()
		if _, err := mute.Read(make([]byte, 1024)); err != nil {
			t.Fatal(err)
		}
	}
	say(hello)
	hear() // the add
	say(ack)
	hear() // the end of the snapshot
	say(ack)
	eventually(t, "the proxy has the pod", func() bool { p, err := n.Pod("uid-pod"); return err == nil && p.State == enroll.StateEnrolled })

	done := make(chan error, 1)
	go func() { done <- n.Unenroll(context.Background(), "uid-pod") }()
	hear() // the del, which it does not answer
	if pods, err := n.Pods(); err != nil || len(pods) != 1 {
		t.Errorf("on its way out, the pods are %+v, %v", pods, err)
	}
	select {
	case err := <-done:
		t.Errorf("the unenrol did not wait: %v", err)
	default:
	}
	_ = mute.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// An agent that dies between its first step and the last leaves a note, by which the next completes what it has begun, and by
// which cleanup finds its way without any pins.
func TestWhatAKilledAgentHasBegunIsKnown(t *testing.T) {
	for name, undo := range map[string]func(t *testing.T, b *bed.Bed){
		"by the next agent": func(t *testing.T, b *bed.Bed) {
			n := agent.Start(t, b, nil)
			if _, err := n.Pod("uid-pod"); err != nil {
				t.Errorf("the next agent has not completed the enrolment: %v", err)
			}
			if err := n.Unenroll(t.Context(), "uid-pod"); err != nil {
				t.Fatal(err)
			}
		},
		"by cleanup": func(t *testing.T, b *bed.Bed) {
			if err := enroll.Cleanup(b.BPFFS, filepath.Join(b.RunDir, "pods")); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := bed.ForTest(t, bed.Options{})
			pod := newPod(t, b, "pod", bed.PodOptions{})
			before := snapshot(t, pod)
			n := agent.Start(t, b, nil)
			if err := n.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
				t.Fatal(err)
			}
			n.Stop()
			// As if it had died before the map entry and the seal: the entry is gone with all pins, of the seal only the
			// qdisc is there.
			if err := loader.Unload(b.BPFFS); err != nil {
				t.Fatal(err)
			}
			h, err := pod.Handle()
			if err != nil {
				t.Fatal(err)
			}
			defer h.Close()
			eth0, err := h.LinkByName(pod.Link)
			if err != nil {
				t.Fatal(err)
			}
			filters, err := h.FilterList(eth0, netlink.HANDLE_MIN_EGRESS)
			if err != nil || len(filters) != 1 {
				t.Fatalf("filters are %v, %v", filters, err)
			}
			if err := h.FilterDel(filters[0]); err != nil {
				t.Fatal(err)
			}
			undo(t, b)
			diff(t, before, snapshot(t, pod))
		})
	}
}

func TestCleanupLeavesNothing(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	n := agent.Start(t, b, nil)
	state := filepath.Join(b.RunDir, "pods")
	var pods []*bed.NS
	var before []string
	for _, name := range []string{"a", "b"} {
		pod := newPod(t, b, name, bed.PodOptions{})
		pods, before = append(pods, pod), append(before, snapshot(t, pod))
		if err := n.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
			t.Fatal(err)
		}
	}
	if err := enroll.Cleanup(b.BPFFS, state); !errors.Is(err, loader.ErrInUse) {
		t.Errorf("cleanup under a running agent: %v", err)
	}
	n.Stop()
	for range 2 {
		if err := enroll.Cleanup(b.BPFFS, state); err != nil {
			t.Fatal(err)
		}
		for i, pod := range pods {
			diff(t, before[i], snapshot(t, pod))
		}
		if left, _ := filepath.Glob(b.BPFFS + "*"); len(left) > 0 {
			t.Errorf("pins are left: %v", left)
		}
		if left, _ := filepath.Glob(filepath.Join(state, "*")); len(left) > 0 {
			t.Errorf("state is left: %v", left)
		}
	}
}

// eventually gives what the agent does by itself the second that it may take, and a slow machine some more.
func eventually(tb testing.TB, what string, so func() bool) {
	tb.Helper()
	for deadline := time.Now().Add(5 * time.Second); !so(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			tb.Fatalf("not so after 5 s: %s", what)
		}
	}
}

func diff(tb testing.TB, want, got string) {
	tb.Helper()
	if want == got {
		return
	}
	had, has := strings.Split(want, "\n"), strings.Split(got, "\n")
	count := map[string]int{}
	for _, line := range had {
		count[line]--
	}
	for _, line := range has {
		count[line]++
	}
	for line, n := range count {
		if n > 0 {
			tb.Errorf("too much: %s", line)
		} else if n < 0 {
			tb.Errorf("missing: %s", line)
		}
	}
}
