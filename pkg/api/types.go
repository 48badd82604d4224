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
	// KindBusy: the pod is being worked on.
	KindBusy Kind = "busy"
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
	// Health is the worst of all warnings, and Next what to do first; empty when nothing needs attention.
	Health Health `json:"health"`
	Next   string `json:"next,omitempty"`
	Agent  Agent  `json:"agent"`
	// Features are what the dataplane needs of the kernel, which has them all.
	Features []Feature `json:"features"`
	// Hooks are the programs that work for the whole node.
	Hooks []Hook `json:"hooks"`
	// KernelStats says whether the kernel counts how often and how long programs run (sysctl kernel.bpf_stats_enabled).
	KernelStats bool `json:"kernelStats"`
	// Maps says how full they are.
	Maps []MapUsage `json:"maps"`
	// Conditions are what the agent needs to be ready.
	Conditions []Condition `json:"conditions"`
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

// Feature is something of the kernel that the dataplane cannot do without.
type Feature struct {
	Name string `json:"name"`
	// Since is the kernel version that brought it; distributions also carry it in older ones.
	Since string `json:"since"`
}

// Hook is a program that works for the whole node.
type Hook struct {
	Name string `json:"name"`
	// Program is its name, and ID its number, as in `bpftool prog show`; 0: there is none.
	Program string `json:"program"`
	ID      uint32 `json:"id"`
	// Link is the number of the link that keeps it attached, and Pin the path of that; of a program that others call there is none.
	Link uint32 `json:"link,omitempty"`
	Pin  string `json:"pin,omitempty"`
	// Problem says what is not as it should be; empty if nothing is.
	Problem string `json:"problem,omitempty"`
	// Runs and RunTime count while the kernel does; see Status.KernelStats.
	Runs    uint64   `json:"runs"`
	RunTime Duration `json:"runTime"`
	// Show is a command that shows it, for root on the node.
	Show string `json:"show"`
}

// MapUsage is how full a map is.
type MapUsage struct {
	Map      string `json:"map"`
	Entries  int    `json:"entries"`
	Capacity int    `json:"capacity"`
	// Evicts says that when it is full the least recently used entries go, and nothing is refused.
	Evicts bool   `json:"evicts"`
	Pin    string `json:"pin"`
}

// Condition is something that the agent needs to be ready.
type Condition struct {
	Name string `json:"name"`
	// Problem says why it is not met; empty if it is.
	Problem string `json:"problem,omitempty"`
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
	// Severity is Yellow or Red.
	Severity Health `json:"severity"`
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
	// ReasonRepaired: something had to be put back lately.
	ReasonRepaired Reason = "repaired"
	// ReasonDrift: something is not as it should be right now.
	ReasonDrift Reason = "drift"
	// ReasonFailing: something cannot be put back.
	ReasonFailing Reason = "failing"
	// ReasonHook: a program that works for the whole node is not where it should be.
	ReasonHook Reason = "hook"
	// ReasonMapFull: a map has no room, or nearly none.
	ReasonMapFull Reason = "map_full"
	// ReasonNotReady: the agent lacks something that it needs, of Kubernetes or the CNI.
	ReasonNotReady Reason = "not_ready"
	// ReasonUnnamed: the pod is captured, but the agent does not know its name.
	ReasonUnnamed Reason = "unnamed"
)
