// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
)

// component is who events are said to come from.
const component = "redirector"

// Reasons of events.
const (
	reasonFailed     = "EnrollFailed"
	reasonPending    = "ProxyPending"
	reasonAnnotation = "BadAnnotation"
	reasonLate       = "CapturedLate"
)

const (
	// quietTries is how many times an enrolment may fail before an event says so: a pod that is just being made may not be
	// found at once.
	quietTries = 3
	// sayAgain is how soon the same is said of a pod again.
	sayAgain = 10 * time.Minute
	// sayOther is how soon something else of the same kind is.
	sayOther = 10 * time.Second
)

// said is what an event has said, and when.
type said struct {
	text string
	at   time.Time
}

// startEvents has events sent to the API server until stop is called.
func (w *Watcher) startEvents() (stop func()) {
	broadcaster := record.NewBroadcaster()
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: w.Client.CoreV1().Events("")})
	recorder := broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component, Host: w.Node})
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = recorder
	return broadcaster.Shutdown
}

// say makes a warning of a pod, unless the same, or just now something like it, was said. The recorder has a limit of its own, for
// each pod.
func (w *Watcher) say(pod *corev1.Pod, reason, text string) {
	now := time.Now()
	fresh := false
	var events record.EventRecorder
	w.update(string(pod.UID), func(k *known) {
		last, ok := k.said[reason]
		pause := sayOther
		if last.text == text {
			pause = sayAgain
		}
		if fresh = !ok || now.Sub(last.at) >= pause; fresh {
			k.said[reason] = said{text, now}
		}
		events = w.events
	})
	if fresh && events != nil {
		events.Event(pod, corev1.EventTypeWarning, reason, text)
	}
}

// sayBad makes an event of annotations that make no sense.
func (w *Watcher) sayBad(pod *corev1.Pod, bad []string) {
	if len(bad) > 0 {
		w.say(pod, reasonAnnotation, "The pod's "+strings.Join(bad, "; ")+".")
	}
}
