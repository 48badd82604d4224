// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/kube"
)

// twoReads is longer than two looks at what pods have counted take.
const twoReads = 12 * time.Second

// TestAttemptsToGetPastTheProxyAreSaid has a pod try, again and again, and looks at what is said of it.
func TestAttemptsToGetPastTheProxyAreSaid(t *testing.T) {
	n := newNode(t)
	n.startAgent()
	n.wantReady()
	p, quiet := n.run("mesh"), n.run("mesh")
	n.wantIn(p)
	n.wantIn(quiet)
	n.wantEvent(quiet, "CapturedLate")
	n.wantConnection(quiet, true)

	rawSYN(t, p, n.b.Outside.V4, n.app.Port)
	n.wantEvent(p, "BypassBlocked", "dropped on its way out of the pod (once)", "CAP_NET_RAW")
	conn, err := p.NS.Dial(t.Context(), bed.DialSpec{Remote: netip.AddrPortFrom(n.b.Outside.V4, n.app.Port), Mark: 0x539})
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	err = p.NS.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1)
	})
	if !errors.Is(err, unix.EPERM) {
		t.Errorf("PACKET_QDISC_BYPASS in the pod: %v, want EPERM", err)
	}
	n.wantEvent(p, "BypassBlocked", "0x539", "CAP_NET_ADMIN")
	n.wantEvent(p, "BypassBlocked", "PACKET_QDISC_BYPASS", "EPERM")

	// The same again is not said again, neither by this agent nor by the next.
	before := len(n.events(p))
	for range 20 {
		rawSYN(t, p, n.b.Outside.V4, n.app.Port)
	}
	time.Sleep(twoReads)
	n.stopAgent()
	n.startAgent()
	n.wantReady()
	time.Sleep(twoReads)
	if after := n.events(p); len(after) != before {
		t.Errorf("what was said a short time ago, or counted before this agent was there, is said again: %s", texts(after))
	}
	// What is new to this agent is said, with what was counted since it came.
	rawSYN(t, p, n.b.Outside.V4, n.app.Port)
	rawSYN(t, p, n.b.Outside.V4, n.app.Port)
	n.wantEvent(p, "BypassBlocked", "dropped on its way out of the pod (2 times)")
	if events := n.events(quiet); len(events) != 1 {
		t.Errorf("of a pod that has done nothing it is said: %s", texts(events))
	}

	// An event waits for the API server.
	n.Faults.Refuse(true)
	rawSYN(t, quiet, n.b.Outside.V4, n.app.Port)
	time.Sleep(twoReads)
	n.Faults.Refuse(false)
	n.wantEvent(quiet, "BypassBlocked", "dropped on its way out of the pod (once)")
}

// rawSYN sends a SYN by a raw socket.
func rawSYN(t *testing.T, p *kube.Pod, to netip.Addr, port uint16) {
	t.Helper()
	tcp := make([]byte, 20)
	tcp[0], tcp[1] = 0x30, 0x39
	tcp[2], tcp[3] = byte(port>>8), byte(port)
	tcp[12] = 5 << 4 // five words
	tcp[13] = 2      // SYN
	err := p.NS.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, tcp, 0, &unix.SockaddrInet4{Addr: to.As4()})
	})
	if err != nil {
		t.Fatal(err)
	}
}

func texts(events []corev1.Event) string {
	var all []string
	for _, e := range events {
		all = append(all, fmt.Sprintf("%s ×%d: %s", e.Reason, e.Count, e.Message))
	}
	return strings.Join(all, "\n")
}

// TestEachCounterThatIsAnIncidentMakesOneEvent raises all counters of a pod at once, as the programs do.
func TestEachCounterThatIsAnIncidentMakesOneEvent(t *testing.T) {
	n := newNode(t)
	n.startAgent()
	n.wantReady()
	p := n.CreatePod(kube.PodOptions{Namespace: "mesh", Name: "pod"})
	p.Start()
	if err := n.cniAdd(p); err != nil {
		t.Fatal(err)
	}
	p.SetStatus(corev1.PodRunning, p.IPs()...)
	n.wantIn(p)
	pinned, err := ebpf.LoadPinnedMap(filepath.Join(n.b.BPFFS, "maps", "counters"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer pinned.Close()
	perCPU := make([]bpf.RedirectorPodCounters, ebpf.MustPossibleCPU())
	perCPU[0] = bpf.RedirectorPodCounters{
		OutboundCaptured: 3, OutboundSteered: 3, OutboundNoListener: 3, InboundSteered: 3, InboundNoListener: 3, HboneSteered: 3,
		HboneNoListener: 3, ProxyToApp: 3, ProxyOutbound: 3, OwnAddress: 3, CaptureFailed: 3, BindFailed: 3, ProbesAdmitted: 3,
		SealDropped: 3, SealDroppedSynack: 3, LoopsDropped: 3, ForeignMarks: 3, RawBypassRefused: 3, ListenersAdded: 3,
		ListenersRejected: 3, UnboundListeners: 3, MarkedListeners: 3, DnsCaptured: 3, DnsRefused: 3, StraysDropped: 3,
		ExcludedOutbound: 3, ExcludedInbound: 3, BypassedInbound: 3, Rerouted: 3, SealExcluded: 3, UnownedDropped: 3,
	}
	if err := pinned.Update(bpf.RedirectorNetnsKey{NetnsCookie: p.NS.Cookie}, perCPU, ebpf.UpdateExist); err != nil {
		t.Fatal(err)
	}
	want := map[string]int{"BypassBlocked": 6, "SteeringFailed": 6}
	n.eventually("each has its event", func() error {
		have := map[string]int{}
		for _, e := range n.events(p) {
			have[e.Reason]++
			if !strings.Contains(e.Message, "(3 times)") {
				t.Errorf("%s says %q", e.Reason, e.Message)
			}
		}
		if fmt.Sprint(have) != fmt.Sprint(want) {
			return fmt.Errorf("there are %v, want %v", have, want)
		}
		return nil
	})
}

// TestRepairsAreSaid breaks what enrolment has made, in the pod and on the node.
func TestRepairsAreSaid(t *testing.T) {
	n := newNode(t)
	n.startAgent()
	n.wantReady()
	p, left := n.run("mesh"), n.run("mesh")
	n.wantIn(p)
	n.wantIn(left)
	n.wantEvent(left, "CapturedLate")
	err := p.NS.Do(func() error {
		rules, err := netlink.RuleList(unix.AF_INET)
		if err != nil {
			return err
		}
		for _, r := range rules {
			if r.Mark == 0x110 {
				return netlink.RuleDel(&r)
			}
		}
		return errors.New("there is no rule of the agent's")
	})
	if err != nil {
		t.Fatal(err)
	}
	n.wantEvent(p, "Repaired", "rule or route", "CAP_NET_ADMIN")
	if err := os.Remove(filepath.Join(n.b.BPFFS, "pods", p.UID(), "steer")); err != nil {
		t.Fatal(err)
	}
	n.wantEvent(p, "Repaired", "steers connections", "on the node")
	n.wantConnection(p, true)
	if events := n.events(left); len(events) != 1 {
		t.Errorf("of a pod that was left alone it is said: %s", texts(events))
	}

	if err := os.Remove(filepath.Join(n.b.BPFFS, "links", "sock_ops")); err != nil {
		t.Fatal(err)
	}
	n.eventually("there is an event on the node", func() error {
		list, err := n.Admin.CoreV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{
			FieldSelector: "involvedObject.kind=Node,involvedObject.name=" + kube.NodeName,
		})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.Reason == "Repaired" && strings.Contains(e.Message, "all pods of the node share") {
				return nil
			}
		}
		return fmt.Errorf("there are %s", texts(list.Items))
	})
}
