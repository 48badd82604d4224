// SPDX-License-Identifier: Apache-2.0

package api

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/zds"
)

func (s *Server) status(*http.Request) (any, error) {
	status := Status{Agent: s.Agent, Proxies: s.Enroller.Proxies.Status()}
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
	if s.Identity != nil {
		for _, w := range s.Identity.Warnings() {
			message, remedy, _ := strings.Cut(w, ": ")
			status.Warnings = append(status.Warnings, Warning{Reason: ReasonIdentity, Message: message, Remedy: remedy})
		}
	}
	return status, nil
}

// warnings says what needs attention. unnamed are the UIDs of pods that the kernel captures and the Enroller does not know.
func warnings(status *Status, pods []enroll.Pod, unnamed []string) []Warning {
	all := []Warning{}
	if status.Pods.Pending > 0 && !ready(status.Proxies) {
		all = append(all, Warning{
			Reason:  ReasonNoProxy,
			Message: fmt.Sprintf("no node proxy is ready, so nothing passes of the pending pods (%d)", status.Pods.Pending),
			Remedy:  fmt.Sprintf("start a node proxy that connects to %s: it is handed the pods at once", status.Agent.ZDSSocket),
		})
	}
	for i := range pods {
		pod := &pods[i]
		for _, w := range podWarnings(status, pod) {
			w.Pod, w.UID = pod.String(), pod.UID
			all = append(all, w)
		}
	}
	for _, uid := range unnamed {
		all = append(all, Warning{
			Reason:  ReasonUnnamed,
			UID:     uid,
			Message: "the pod is captured, but its name is lost, so a node proxy can only keep it, not take it",
			Remedy:  "enroll it again under this UID, or `redirector unenroll --uid " + uid + "`",
		})
	}
	return all
}

// ready says whether a node proxy is there to take pods.
func ready(proxies []zds.ConnStatus) bool {
	return slices.ContainsFunc(proxies, func(p zds.ConnStatus) bool { return p.State == zds.StateReady })
}

func podWarnings(status *Status, pod *enroll.Pod) []Warning {
	var all []Warning
	switch missing := withoutListener(pod); {
	case pod.State == enroll.StatePending && ready(status.Proxies):
		all = append(all, Warning{
			Reason:  ReasonPending,
			Message: "nothing of the pod passes: " + cmp.Or(pod.Reason, "the node proxy has not answered yet"),
			Remedy:  "see the node proxy's log; the pod is offered to it again every few seconds",
		})
	case pod.State == enroll.StateEnrolled && len(missing) > 0:
		all = append(all, Warning{
			Reason: ReasonNoListener,
			Message: fmt.Sprintf("a node proxy says that it runs for the pod, but no listener is known on port %s: connections there are dropped",
				strings.Join(missing, ", ")),
			Remedy: fmt.Sprintf("restart the node proxy, or unenroll and enroll the pod: listeners are noted when they are made, by processes in cgroup %s",
				status.Agent.Cgroup),
		})
	}
	c := &pod.Counters
	if c.ListenersRejected > 0 {
		all = append(all, Warning{
			Reason: ReasonListenersRejected,
			Message: fmt.Sprintf("connections cannot be steered to some listeners of the node proxy (%d): they are MPTCP, or more than fit",
				c.ListenersRejected),
			Remedy: "switch MPTCP off in the node proxy, and look for node proxies that should have ended",
		})
	}
	if c.MarkedListeners > 0 {
		all = append(all, Warning{
			Reason: ReasonMarkedListeners,
			Message: fmt.Sprintf("an app of the pod listens with a mark of its own (SO_MARK, %d times): connections through the node proxy time out there",
				c.MarkedListeners),
			Remedy: "have the app listen without SO_MARK, and restart it",
		})
	}
	if c.CaptureFailed > 0 {
		all = append(all, Warning{
			Reason:  ReasonCaptureFailed,
			Message: fmt.Sprintf("connections of the pod or of its proxy could not be marked, bound or steered as they must be, and may have failed (%d)", c.CaptureFailed),
			Remedy:  "look for other programs on the cgroup that change socket options, with `bpftool cgroup tree`",
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
