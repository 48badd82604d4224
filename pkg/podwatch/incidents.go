// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	corev1 "k8s.io/api/core/v1"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/maps"
)

const (
	// incidentsEvery is how often the pods' counters are read for what is worth an event.
	incidentsEvery = 5 * time.Second
	// incidentAgain is how soon an incident of the same kind is said of a pod again. What happens meanwhile is counted in the next.
	incidentAgain = 10 * time.Minute
	// incidentRate, per second, and incidentBurst bound the events on incidents of all pods of the node. Those that have to wait
	// are said later; annotations, which use the same connection, come first.
	incidentRate, incidentBurst = 1, 50
)

// incident says what a counter of the kernel's means for whoever looks at a pod, and what to do.
type incident struct {
	counter string // as maps.Counters.Each calls it
	reason  Reason
	text    string // with a verb for how often
}

// incidents are the counters that no pod counts that behaves, on a node that is in order. docs/events.md lists them.
var incidents = []incident{
	{"seal_dropped", ReasonBypass, "A packet that would have opened a connection past the node proxy was dropped on its way " +
		"out of the pod (%s). " +
		"The pod uses raw or packet sockets, forwards packets, runs a process outside of its cgroup, or was about to connect as " +
		"it was captured. " +
		"If that is not meant, take CAP_NET_RAW and CAP_NET_ADMIN from its containers."},
	{"seal_dropped_synack", ReasonBypass, "An answer to a connection that did not come by the node proxy was dropped on its " +
		"way out of the pod (%s). " +
		"Something in the pod accepts connections in the node proxy's stead, or was about to as the pod was captured. " +
		"If that is not meant, take CAP_NET_RAW and CAP_NET_ADMIN from its containers."},
	{"strays_dropped", ReasonBypass, "A packet for a loopback address was dropped on its way out of the pod (%s). " +
		"A route or a rule of the pod's own leads it there: see its ip route and ip rule."},
	{"loops_dropped", ReasonBypass, "A connection to the node proxy's own ports, 15001 or 15006, that came from the pod " +
		"itself, or says so, was dropped (%s). " +
		"Connect to the app's port instead; if nothing in the pod does this, somebody forges its address."},
	{"foreign_marks", ReasonBypass, "A socket has the node proxy's mark, 0x539, and was not made by a node proxy: the mark was " +
		"not honoured (%s). " +
		"Have the app use another mark, or take CAP_NET_ADMIN from the pod's containers."},
	{"raw_bypass_refused", ReasonBypass, "A socket option that sends packets past all filters was refused, with EPERM (%s): " +
		"PACKET_QDISC_BYPASS or AF_XDP. " +
		"If the app needs it, keep its pod out of the mesh; if not, take CAP_NET_RAW from its containers."},
	{"capture_failed", ReasonSteering, "A connection could not be sent to the node proxy, and did not come about (%s). " +
		"See redirector status on the node, and the agent's log."},
	{"bind_failed", ReasonSteering, "An accepted connection could not be bound to its device (%s), and may be taken for " +
		"another with the same addresses and ports. " +
		"See redirector status on the node, and the agent's log."},
	{"unowned_dropped", ReasonSteering, "A connection for an address that none of the pod's interfaces has was dropped (%s): " +
		"something behind the pod made it, or the pod has a route for the address. " +
		"Name the interface of machines behind the pod in the annotation " + annotationReroute + ", or give the address to an interface."},
	{"dns_refused", ReasonSteering, "A DNS query could not be sent to the node proxy, and went nowhere (%s): " +
		"the app's socket is bound to a device and an address, or the kernel had no memory. " +
		"Have the app bind to one of them, or switch DNS capture off for the pod with the annotation " + annotationDNSCapture + "."},
	{"listeners_rejected", ReasonSteering, "Connections cannot be steered to a listener of the node proxy (%s): there are too " +
		"many, or it is MPTCP. " +
		"Run at most two node proxies at a time, and have them listen without MPTCP."},
	{"marked_listeners", ReasonSteering, "An app listens with a mark (SO_MARK) of its own (%s): connections that come by the " +
		"node proxy fail there. " +
		"Have the app set no mark on its listeners."},
}

// repairTexts say what was put right of a pod. Kinds that are missing are no news: an entry of a pod that is gone, or a namespace
// that the runtime has made anew.
var repairTexts = map[enroll.Repair]string{
	enroll.RepairSeal: "An interface of the pod had no seal, and has it now (%s): the interface is new, or something has " +
		"removed the seal's filter. " +
		"If the pod makes no interfaces, take CAP_NET_ADMIN from its containers.",
	enroll.RepairRouting: "A rule or route that leads connections to the node proxy was missing, and is there again (%s): " +
		"something in the pod changes them. " +
		"Take CAP_NET_ADMIN from its containers.",
	enroll.RepairSysctl: "A sysctl that carries marks (tcp_fwmark_accept, fwmark_reflect) was off, and is on again (%s): " +
		"something in the pod changes it. " +
		"Run no privileged containers in it.",
	enroll.RepairSteer: "The program that steers connections to the node proxy was not the one it should be, and is again (%s): " +
		"something with root's rights on the node changes links or pins of BPF programs. Look for it on the node.",
	enroll.RepairEntry: "The entry of map pods, which switches capture on, was missing or another, and is right again (%s): " +
		"something with root's rights on the node changes BPF maps. Look for it on the node.",
	enroll.RepairCounters: "The pod's entry in map counters was missing, and is there again (%s): " +
		"something with root's rights on the node changes BPF maps. Look for it on the node.",
	enroll.RepairOwnAddr: "Map own_addrs had not the addresses of the pod, and has them again (%s): " +
		"something with root's rights on the node changes BPF maps. Look for it on the node.",
	enroll.RepairProbeTarget: "Map probe_targets had not the addresses of the pod, and has them again (%s): " +
		"something with root's rights on the node changes BPF maps. Look for it on the node.",
	enroll.RepairException: "Map exceptions or cidrs had not what the pod's settings say, and has it again (%s): " +
		"something with root's rights on the node changes BPF maps. Look for it on the node.",
	enroll.RepairNode: "A program or a pin that all pods of the node share was missing, and is there again (%s): " +
		"something with root's rights on the node detaches BPF programs or removes their pins. Look for it on the node.",
}

// counted is which of a pod's counters are no news.
type counted struct {
	cookie uint64 // of the namespace that they are about
	values map[string]uint64
}

// Repaired notes a repair, to be said soon; see enroll.Config.
func (w *Watcher) Repaired(uid string, kind enroll.Repair) {
	if repairTexts[kind] == "" {
		return
	}
	note := func(k *known) {
		if k.repairs == nil {
			k.repairs = map[enroll.Repair]uint64{}
		}
		k.repairs[kind]++
	}
	if uid != "" {
		w.update(uid, note)
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	note(&w.node)
}

// keepIncidents makes events of what is counted or repaired, until ctx is done.
func (w *Watcher) keepIncidents(ctx context.Context) {
	every(ctx, incidentsEvery, func() {
		w.mu.Lock()
		w.sayRepairs(nil, &w.node)
		w.mu.Unlock()
		for _, uid := range w.enrolled() {
			w.sayIncidents(uid)
		}
	})
}

// sayIncidents makes events of what has happened to a pod since the last time.
func (w *Watcher) sayIncidents(uid string) {
	pod := w.pod(uid)
	have, captured := w.Enroller.Brief(uid)
	if pod == nil || !captured {
		return
	}
	now, err := w.Enroller.Datapath.Maps().Counters(have.NetNSCookie)
	if err != nil {
		if !errors.Is(err, ebpf.ErrKeyNotExist) {
			w.Log.Error("cannot read what a pod has counted: it is tried again", "pod", podName(pod), "uid", uid, "error", err)
		}
		return
	}
	values := valuesOf(&now)
	w.update(uid, func(k *known) {
		if k.counted.cookie != have.NetNSCookie {
			k.counted = counted{have.NetNSCookie, map[string]uint64{}}
		}
		for _, i := range incidents {
			before := k.counted.values[i.counter]
			if values[i.counter] < before {
				before = 0 // they were removed, and have begun anew
			}
			if w.sayIncident(pod, k, i.counter, i.reason, i.text, values[i.counter]-before) {
				k.counted.values[i.counter] = values[i.counter]
			}
		}
		w.sayRepairs(pod, k)
	})
}

// sayRepairs makes events of repairs. The mutex is held.
func (w *Watcher) sayRepairs(pod *corev1.Pod, k *known) {
	for _, kind := range enroll.RepairKinds() {
		if w.sayIncident(pod, k, "repair "+string(kind), ReasonRepaired, repairTexts[kind], k.repairs[kind]) {
			delete(k.repairs, kind)
		}
	}
}

// sayIncident makes an event, of the node if pod is nil, unless nothing has happened or one of that kind was made a short time ago.
// The mutex is held.
func (w *Watcher) sayIncident(pod *corev1.Pod, k *known, kind string, reason Reason, text string, times uint64) bool {
	if last, ok := k.incidents[kind]; times == 0 || ok && time.Since(last) < incidentAgain ||
		w.incidentLimit.Tokens() < 1 || !k.mayBeSaid() {
		return false
	}
	_ = w.incidentLimit.Allow() // it was looked at just now
	if k.incidents == nil {
		k.incidents = map[string]time.Time{}
	}
	k.incidents[kind] = time.Now()
	w.warn(pod, reason, fmt.Sprintf(text, howOften(times)))
	return true
}

func howOften(times uint64) string {
	if times == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", times)
}

// passOver has what a pod has counted until now be no news: it was counted before this agent was there.
func (w *Watcher) passOver(uid string, cookie uint64) {
	now, err := w.Enroller.Datapath.Maps().Counters(cookie)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		w.Log.Error("cannot read what a pod has counted: events may say it again", "uid", uid, "error", err)
	}
	w.update(uid, func(k *known) { k.counted = counted{cookie, valuesOf(&now)} })
}

func valuesOf(c *maps.Counters) map[string]uint64 {
	values := map[string]uint64{}
	c.Each(func(name string, value uint64) { values[name] = value })
	return values
}
