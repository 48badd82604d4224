// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	gomaps "maps"
	"slices"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/zds"
)

// MaxTimeout is the longest that a request may wait for a node proxy. Who wants to wait longer may ask again.
const MaxTimeout = 5 * time.Minute

// EnrollRequest asks for a pod to be enrolled.
type EnrollRequest struct {
	enroll.Spec
	// Wait says whether to answer only when a node proxy runs for the pod.
	Wait bool `json:"wait"`
	// Timeout bounds that wait. It must be positive, and at most MaxTimeout; without Wait it is not looked at.
	Timeout Duration `json:"timeout"`
}

// SettingsRequest asks for settings of an enrolled pod to be changed: values as people write them, by the keys of package enroll.
// Settings that it does not name stay.
type SettingsRequest map[string]string

// Apply makes the changes, in the order of the keys, so that of several mistakes always the same one is told.
func (r SettingsRequest) Apply(settings *enroll.Settings) error {
	for _, key := range slices.Sorted(gomaps.Keys(r)) {
		if err := settings.Set(key, r[key]); err != nil {
			return err
		}
	}
	return nil
}

// Duration is a time.Duration that is written as people do in JSON: "10s".
type Duration time.Duration

// MarshalText writes the duration as time.Duration.String does.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText reads what time.ParseDuration reads.
func (d *Duration) UnmarshalText(text []byte) error {
	parsed, err := time.ParseDuration(string(text))
	if err != nil {
		return fmt.Errorf("bad duration %q: write one like 10s or 1m30s", text)
	}
	*d = Duration(parsed)
	return nil
}

// Kind says what sort of failure an Error is, for programs.
type Kind string

// The kinds of Error.
const (
	// KindInvalid: the request is not one that can be carried out by any agent.
	KindInvalid Kind = "invalid"
	// KindPending: the pod is captured, but no node proxy runs for it yet. It stays so, and is handed to one that comes.
	KindPending Kind = "pending"
	// KindTaken: the network namespace belongs to another enrolled pod.
	KindTaken Kind = "taken"
	// KindNetNS: the path leads to no network namespace that a pod may have.
	KindNetNS Kind = "netns"
	// KindNotEnrolled: there is no such pod.
	KindNotEnrolled Kind = "not_enrolled"
	// KindStopping: the agent stops, and the request has had no effect.
	KindStopping Kind = "stopping"
	// KindFailed: all else; the text says what.
	KindFailed Kind = "failed"
)

// Error is the agent's answer to a request that it has not carried out.
type Error struct {
	// Message says on one line what is wrong and what to do about it.
	Message string `json:"error"`
	Kind    Kind   `json:"kind"`
	// Status is the HTTP status.
	Status int `json:"-"`
}

// Error returns the agent's words.
func (e *Error) Error() string { return e.Message }

// Agent describes the agent's process.
type Agent struct {
	Version   string    `json:"version"`
	PID       int       `json:"pid"`
	Started   time.Time `json:"started"`
	Uptime    Duration  `json:"uptime"` // whole seconds
	Kernel    string    `json:"kernel"` // the kernel's release, as uname -r prints it
	RunDir    string    `json:"runDir"`
	BPFFS     string    `json:"bpffs"`
	Cgroup    string    `json:"cgroup"`
	ZDSSocket string    `json:"zdsSocket"`
}

// Status is what the agent says about itself and the node.
type Status struct {
	Agent Agent `json:"agent"`
	// Proxies are the node proxies' connections, oldest first.
	Proxies []zds.ConnStatus `json:"proxies"`
	Pods    PodCounts        `json:"pods"`
	// Counters are the sums over the pods that are enrolled now.
	Counters maps.Counters `json:"counters"`
	// Repairs counts, by kind, what was found missing in pods' network namespaces since the agent's start, and put back.
	Repairs map[enroll.Repair]uint64 `json:"repairs"`
	// AdmittedFlows is how many connections are let through to apps right now: the host's probes, and those of pods with their own
	// IPv6 addresses.
	AdmittedFlows int `json:"admittedFlows"`
	// Warnings is what needs somebody's attention; empty when nothing does.
	Warnings []Warning `json:"warnings"`
}

// PodCounts counts pods by state.
type PodCounts struct {
	Enrolled int `json:"enrolled"`
	Pending  int `json:"pending"`
	// Unnamed pods are captured, but the agent does not know their names.
	Unnamed int `json:"unnamed"`
}

// Warning is something that needs attention.
type Warning struct {
	// Reason names the warning, for programs.
	Reason Reason `json:"reason"`
	// Pod and UID are empty when it is not about one pod.
	Pod string `json:"pod,omitempty"`
	UID string `json:"uid,omitempty"`
	// Message says what is so, Remedy what to do about it.
	Message string `json:"message"`
	Remedy  string `json:"remedy"`
}

// Reason names a Warning.
type Reason string

// The reasons of warnings.
const (
	// ReasonNoProxy: there are pods, and no node proxy that would take them.
	ReasonNoProxy Reason = "no_proxy"
	// ReasonPending: a node proxy is there, but does not run for the pod.
	ReasonPending Reason = "pending"
	// ReasonNoListener: a node proxy says that it runs for the pod, but there is a port on which it does not listen.
	ReasonNoListener Reason = "no_listener"
	// ReasonListenersRejected: a node proxy listens with sockets that connections cannot be steered to.
	ReasonListenersRejected Reason = "listeners_rejected"
	// ReasonMarkedListeners: the pod's app listens with a mark of its own.
	ReasonMarkedListeners Reason = "marked_listeners"
	// ReasonCaptureFailed: connections of the pod or its proxy could not be marked, bound or steered. They did not get past the proxy.
	ReasonCaptureFailed Reason = "capture_failed"
	// ReasonIdentity: the node does not allow to tell proxies or probes apart as well as was asked for.
	ReasonIdentity Reason = "identity"
	// ReasonUnnamed: the pod is captured, but the agent does not know its name.
	ReasonUnnamed Reason = "unnamed"
)
