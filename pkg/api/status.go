// SPDX-License-Identifier: Apache-2.0

package api

import (
	"cmp"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/zds"
)

func (s *Server) status(*http.Request) (any, error) {
	status := Status{Agent: s.Agent, Proxies: s.Enroller.Proxies.Status(), Features: features(), KernelStats: kernelStats(), Conditions: []Condition{}}
	status.Agent.Uptime = Duration(time.Since(s.Agent.Started).Truncate(time.Second))
	pods, err := s.Enroller.Pods()
	if err != nil {
		return nil, err
	}
	captured, err := s.Enroller.Datapath.Maps().Pods()
	if err != nil {
		return nil, err
	}
	if status.AdmittedFlows, err = s.Enroller.Datapath.Maps().Admitted(); err != nil {
		return nil, err
	}
	if err := s.lookAtNode(&status); err != nil {
		return nil, err
	}
	for _, pod := range pods {
		delete(captured, pod.NetNSCookie)
		status.Counters.Add(&pod.Counters)
		if pod.State == enroll.StateEnrolled {
			status.Pods.Enrolled++
		} else {
			status.Pods.Pending++
		}
	}
	var unnamed []string
	for _, pod := range captured {
		unnamed = append(unnamed, pod.UID)
	}
	slices.Sort(unnamed)
	status.Pods.Unnamed = len(unnamed)
	status.Repairs = s.Enroller.Repairs()
	status.Warnings = warnings(&status, pods, unnamed)
	for i := range pods {
		status.Warnings = append(status.Warnings, failing(&pods[i], s.Enroller.Failing(pods[i].UID))...)
	}
	status.Warnings = append(status.Warnings, s.identityWarnings()...)
	status.Warnings = append(status.Warnings, s.repaired(func(uidEvent) bool { return true })...)
	sortWarnings(status.Warnings)
	status.Health, status.Next = healthOf(status.Warnings), next(status.Warnings)
	return status, nil
}

// lookAtNode fills in what is so of the node, whatever pods there are.
func (s *Server) lookAtNode(status *Status) (err error) {
	if status.Hooks, err = s.hooks(); err != nil {
		return err
	}
	if status.Maps, err = s.usages(); err != nil {
		return err
	}
	if s.Conditions != nil {
		status.Conditions = s.Conditions()
	}
	return nil
}

// nodeWarnings say what of that needs attention. Who asks about a pod is told, too: it may be why that does not work.
func nodeWarnings(status *Status) []Warning {
	all := append([]Warning{}, conditionWarnings(status.Conditions)...) // in JSON it is a list even when there are none
	all = append(all, hookWarnings(status.Hooks)...)
	return append(all, mapWarnings(status.Maps)...)
}

// identityWarnings are about what is weaker than it was meant to be.
func (s *Server) identityWarnings() []Warning {
	if s.Identity == nil {
		return nil
	}
	var all []Warning
	for _, w := range s.Identity.Warnings() {
		message, remedy, _ := strings.Cut(w, ": ")
		all = append(all, Warning{Reason: ReasonIdentity, Severity: Yellow, Message: message, Remedy: remedy})
	}
	return all
}

// kernelStats says whether the kernel counts runs of programs.
func kernelStats() bool {
	value, err := os.ReadFile("/proc/sys/kernel/bpf_stats_enabled")
	return err == nil && strings.TrimSpace(string(value)) != "0"
}

// maxUnnamed is how many pods without a name are named one by one.
const maxUnnamed = 10

// warnings says what needs attention. unnamed are the UIDs of pods that the kernel captures and the Enroller does not know.
func warnings(status *Status, pods []enroll.Pod, unnamed []string) []Warning {
	all := append([]Warning{}, noProxy(status)...)
	all = append(all, nodeWarnings(status)...)
	for i := range pods {
		pod := &pods[i]
		for _, w := range podWarnings(status, pod) {
			w.Pod, w.UID = pod.String(), pod.UID
			all = append(all, w)
		}
	}
	for i, uid := range unnamed {
		if i == maxUnnamed {
			all = append(all, Warning{
				Reason:   ReasonUnnamed,
				Severity: Yellow,
				Message:  fmt.Sprintf("the names of %d more captured pods are lost", len(unnamed)-i),
				Remedy:   "enroll them again, or unenroll them; `bpftool map dump` of map pods lists them",
			})
			break
		}
		all = append(all, Warning{
			Reason:   ReasonUnnamed,
			Severity: Yellow,
			UID:      uid,
			Message:  "the pod is captured, but its name is lost, so a node proxy can only keep it, not take it",
			Remedy:   "enroll it again under this UID, or `redirector unenroll --uid " + uid + "`",
		})
	}
	return all
}

// noProxy is a warning of pods for which no proxy is there.
func noProxy(status *Status) []Warning {
	if status.Pods.Pending == 0 || ready(status.Proxies) {
		return nil
	}
	w := Warning{
		Reason: ReasonNoProxy, Severity: Red,
		Message: fmt.Sprintf("no node proxy is connected, so nothing passes of the pending pods (%d)", status.Pods.Pending),
		Remedy:  fmt.Sprintf("start a node proxy that connects to %s: it is handed the pods at once", status.Agent.ZDSSocket),
	}
	if n := len(status.Proxies); n > 0 {
		p := status.Proxies[n-1]
		w.Message = fmt.Sprintf("a node proxy (pid %d) is connected, but says nothing, so nothing passes of the pending pods (%d)", p.PID, status.Pods.Pending)
		w.Remedy = fmt.Sprintf("see the log of process %d, and restart it: it is handed the pods when it says hello", p.PID)
	}
	return []Warning{w}
}

// ready says whether a node proxy is there to take pods, or being sent its first ones.
func ready(proxies []zds.ConnStatus) bool {
	return slices.ContainsFunc(proxies, func(p zds.ConnStatus) bool { return p.State != zds.StateHello })
}

func podWarnings(status *Status, pod *enroll.Pod) []Warning {
	var all []Warning
	switch missing := withoutListener(pod); {
	case pod.State == enroll.StatePending && ready(status.Proxies):
		all = append(all, Warning{
			Reason:   ReasonPending,
			Severity: Red,
			Message:  "nothing of the pod passes: " + cmp.Or(pod.Reason, "the node proxy has not answered yet"),
			Remedy:   "see the node proxy's log; the pod is offered to it again every few seconds",
		})
	case pod.State == enroll.StateEnrolled && len(missing) > 0:
		all = append(all, Warning{
			Reason:   ReasonNoListener,
			Severity: Red,
			Message: fmt.Sprintf("a node proxy says that it runs for the pod, but no listener is known on port %s: connections there are dropped",
				strings.Join(missing, ", ")),
			Remedy: fmt.Sprintf("restart the node proxy, or unenroll and enroll the pod: listeners are noted when they are made, by processes in cgroup %s",
				status.Agent.Cgroup),
		})
	}
	c := &pod.Counters
	if c.ListenersRejected > 0 {
		all = append(all, Warning{
			Reason:   ReasonListenersRejected,
			Severity: Yellow,
			Message: fmt.Sprintf("connections cannot be steered to some listeners of the node proxy (%d): they are MPTCP, or more than fit",
				c.ListenersRejected),
			Remedy: "switch MPTCP off in the node proxy, and look for node proxies that should have ended",
		})
	}
	if c.MarkedListeners > 0 {
		all = append(all, Warning{
			Reason:   ReasonMarkedListeners,
			Severity: Yellow,
			Message: fmt.Sprintf("an app of the pod listens with a mark of its own (SO_MARK, %d times): connections through the node proxy time out there",
				c.MarkedListeners),
			Remedy: "have the app listen without SO_MARK, and restart it",
		})
	}
	if c.CaptureFailed > 0 {
		all = append(all, Warning{
			Reason:   ReasonCaptureFailed,
			Severity: Yellow,
			Message:  fmt.Sprintf("connections of the pod or of its proxy could not be marked, bound or steered as they must be, and may have failed (%d)", c.CaptureFailed),
			Remedy:   "look for other programs on the cgroup that change socket options, with `bpftool cgroup tree`",
		})
	}
	return all
}

// withoutListener lists the ports on which the proxy should listen in the pod, and does not.
func withoutListener(pod *enroll.Pod) []string {
	var missing []string
	for _, port := range []uint16{maps.PortOutbound, maps.PortInbound, maps.PortHBONE} {
		if pod.Listeners[port] == 0 {
			missing = append(missing, strconv.Itoa(int(port)))
		}
	}
	return missing
}
