// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"context"
	"fmt"
	"strings"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
)

// component is who events are said to come from.
const component = "redirector"

// Reason is an event's, in one word.
type Reason string

// The reasons of events. All are warnings. docs/events.md says what each means, and what to do.
const (
	ReasonFailed     Reason = "EnrollFailed"
	ReasonPending    Reason = "ProxyPending"
	ReasonLate       Reason = "CapturedLate"
	ReasonAnnotation Reason = "BadAnnotation"
	ReasonBypass     Reason = "BypassBlocked"
	ReasonSteering   Reason = "SteeringFailed"
	ReasonRepaired   Reason = "Repaired"
)

// Reasons lists all reasons.
func Reasons() []Reason {
	return []Reason{
		ReasonFailed, ReasonPending, ReasonLate, ReasonAnnotation, ReasonBypass, ReasonSteering, ReasonRepaired,
	}
}

const (
	// quietTries is how many times an enrolment may fail before an event says so: a pod that is just being made may not be
	// found at once.
	quietTries = 3
	// sayAgain is how soon the same is said of a pod again.
	sayAgain = 10 * time.Minute
	// sayOther is how soon something else of the same kind is.
	sayOther = 10 * time.Second
	// podEvery and podBurst bound the events on one pod, whatever they say.
	podEvery = 5 * time.Minute
	podBurst = 25
)

const (
	// maxEvents is how many events may wait to be sent. More are left out, and logged.
	maxEvents = 1000
	// maxMessage is how long an event's text may be for the API server, in bytes.
	maxMessage = 1024
	// eventTimeout bounds one attempt to send an event, eventRetry the pauses between attempts, which double, and eventPatience
	// all of it.
	eventTimeout  = 10 * time.Second
	eventRetry    = 5 * time.Second
	eventPatience = time.Minute
)

// said is what an event has said, and when.
type said struct {
	text string
	at   time.Time
}

// say makes a warning of a pod, unless the same, or just now something like it, was said.
func (w *Watcher) say(pod *corev1.Pod, reason Reason, text string) {
	now := time.Now()
	w.update(string(pod.UID), func(k *known) {
		last, ok := k.said[reason]
		pause := sayOther
		if last.text == text {
			pause = sayAgain
		}
		if (!ok || now.Sub(last.at) >= pause) && k.mayBeSaid() {
			k.said[reason] = said{text, now}
			w.warn(pod, reason, text)
		}
	})
}

// mayBeSaid says whether there may be one more event. The mutex is held.
func (k *known) mayBeSaid() bool {
	if k.limit == nil {
		k.limit = rate.NewLimiter(rate.Every(podEvery), podBurst)
	}
	return k.limit.Allow()
}

// warn makes a warning of a pod, or, if that is nil, of the node. It waits for nobody.
func (w *Watcher) warn(pod *corev1.Pod, reason Reason, text string) {
	// The node as the kubelet has it in its own events, by which kubectl describe finds them.
	about := corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: w.Node, UID: types.UID(w.Node)}
	namespace := metav1.NamespaceDefault
	if pod != nil {
		about = corev1.ObjectReference{
			Kind: "Pod", APIVersion: "v1", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion,
		}
		namespace = pod.Namespace
	}
	now := metav1.Now()
	event := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: namespace, Name: eventName(about.Name)},
		InvolvedObject: about,
		Type:           corev1.EventTypeWarning,
		Reason:         string(reason),
		Message:        truncated(text),
		Source:         corev1.EventSource{Component: component, Host: w.Node},
		FirstTimestamp: now,
		LastTimestamp:  now,
		Count:          1,

		ReportingController: component,
		ReportingInstance:   w.Node,
	}
	select {
	case w.events <- event:
		w.ObserveEvent(reason)
	default:
		w.Log.Warn("an event is left out, as too many wait to be sent", "reason", reason, "about", about.Name, "text", text)
	}
}

// eventName makes a name for an event, which is never longer than names may be.
func eventName(of string) string {
	return fmt.Sprintf("%.200s.%s", of, uuid.NewUUID()[:18])
}

// truncated cuts a text to what the API server takes.
func truncated(text string) string {
	if len(text) > maxMessage {
		text = strings.ToValidUTF8(text[:maxMessage-len("...")], "") + "..."
	}
	return text
}

// sendEvents sends events to the API server until ctx is done. What it does not take is tried again for some time: all of it is in
// the log, too.
func (w *Watcher) sendEvents(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case event := <-w.events:
			w.sendEvent(ctx, event)
		}
	}
}

func (w *Watcher) sendEvent(ctx context.Context, event *corev1.Event) {
	deadline := time.Now().Add(eventPatience)
	for wait := firstRetry; ; wait = min(2*wait, eventRetry) {
		asking, cancel := context.WithTimeout(ctx, eventTimeout)
		err := w.Client.CreateEvent(asking, event)
		cancel()
		switch {
		case err == nil, ctx.Err() != nil, apierrors.IsAlreadyExists(err): // it was made, and its answer was lost
			return
		case isRefusal(err), time.Now().After(deadline):
			w.Log.Warn("the API server does not take an event", "reason", event.Reason, "about", event.InvolvedObject.Name,
				"text", event.Message, "error", err)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// isRefusal says whether the API server has understood a request, and will not do it.
func isRefusal(err error) bool {
	switch apierrors.ReasonForError(err) {
	case metav1.StatusReasonForbidden, metav1.StatusReasonUnauthorized, metav1.StatusReasonNotFound, metav1.StatusReasonInvalid,
		metav1.StatusReasonBadRequest, metav1.StatusReasonMethodNotAllowed:
		return true
	default:
		return false
	}
}

// sayBad makes an event of annotations that make no sense.
func (w *Watcher) sayBad(pod *corev1.Pod, bad []string) {
	if len(bad) > 0 {
		w.say(pod, ReasonAnnotation, "The pod's "+strings.Join(bad, "; ")+".")
	}
}
