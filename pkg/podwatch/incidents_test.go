// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/maps"
)

// ordinary are the counters that a pod counts which behaves, on a node that is in order, or while no node proxy runs, of which
// another event tells.
var ordinary = []string{
	"outbound_captured", "outbound_steered", "outbound_no_listener", "inbound_steered", "inbound_no_listener", "hbone_steered",
	"hbone_no_listener", "proxy_to_app", "proxy_outbound", "own_address", "probes_admitted", "listeners_added", "unbound_listeners",
	"dns_captured", "excluded_outbound", "excluded_inbound", "bypassed_inbound", "rerouted", "seal_excluded",
}

func TestEachCounterIsAnIncidentOrOrdinary(t *testing.T) {
	left := map[string]bool{}
	new(maps.Counters).Each(func(name string, _ uint64) { left[name] = true })
	for _, i := range incidents {
		if !left[i.counter] {
			t.Errorf("%s is no counter, or listed twice", i.counter)
		}
		delete(left, i.counter)
	}
	for _, name := range ordinary {
		if !left[name] {
			t.Errorf("%s is no counter, or listed twice", name)
		}
		delete(left, name)
	}
	for name := range left {
		t.Errorf("counter %s is new: list it in incidents, with an event, or in ordinary", name)
	}
}

func TestTextsOfIncidentsSayHowOftenAndWhatToDo(t *testing.T) {
	all := map[string]string{}
	for _, i := range incidents {
		all[i.counter] = i.text
	}
	for kind, text := range repairTexts {
		if !slices.Contains(enroll.RepairKinds(), kind) {
			t.Errorf("%s is no repair", kind)
		}
		all["repair "+string(kind)] = text
	}
	for what, text := range all {
		said := fmt.Sprintf(text, howOften(1))
		if !strings.Contains(said, "(once)") || strings.Contains(said, "%!") || strings.Count(said, ". ") < 1 || !strings.HasSuffix(said, ".") {
			t.Errorf("%s is said as %q: want how often, and a second sentence on what to do", what, said)
		}
		if len(fmt.Sprintf(text, howOften(1<<63))) > maxMessage {
			t.Errorf("%s is too long", what)
		}
	}
}

// TestOfOnePodThereAreFewEvents has a pod fail in a new way each time, for ever.
func TestOfOnePodThereAreFewEvents(t *testing.T) {
	said := 0
	w := &Watcher{
		Options:       Options{Node: "node", ObserveEvent: func(Reason) { said++ }},
		known:         map[string]*known{},
		events:        make(chan *corev1.Event, maxEvents),
		incidentLimit: rate.NewLimiter(0, 60),
	}
	for i := range 2 * podBurst {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a", UID: "1"}}
		w.say(pod, ReasonFailed, fmt.Sprintf("It cannot be enrolled, by process %d.", i))
		w.update("1", func(k *known) {
			delete(k.said, ReasonFailed) // as if some time had passed
			w.sayIncident(pod, k, fmt.Sprint("kind ", i), ReasonBypass, "Something happened (%s).", 1)
		})
	}
	if said != podBurst || len(w.events) != podBurst {
		t.Errorf("%d events were made, and %d are to be sent, want %d", said, len(w.events), podBurst)
	}
	if left := w.incidentLimit.Tokens(); left != 60-float64(podBurst+1)/2 && left != 60-float64(podBurst-1)/2 {
		t.Errorf("what was not said leaves %v for other pods", left)
	}
	other := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "b", UID: "2"}}
	w.say(other, ReasonFailed, "It cannot be enrolled.")
	if said != podBurst+1 {
		t.Error("of another pod nothing can be said")
	}
}
