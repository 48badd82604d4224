// SPDX-License-Identifier: Apache-2.0

// Package journal remembers the last things that happened to pods and to the node, for people who ask what happened, and tells
// them to whoever follows. It is about changes of state, some a day for each pod, never about connections.
package journal

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Kind is what sort of thing has happened.
type Kind string

// The kinds of events.
const (
	// Enrolled: the pod is captured from now on.
	Enrolled Kind = "enrolled"
	// Unenrolled: the pod is captured no more.
	Unenrolled Kind = "unenrolled"
	// Adopted: the pod was captured already when this agent began to look after it.
	Adopted Kind = "adopted"
	// Repaired: something was not as it should be, and is again; What says of which kind it is.
	Repaired Kind = "repaired"
	// Failing: things cannot be kept as they should be.
	Failing Kind = "failing"
	// Recovered: they can again.
	Recovered Kind = "recovered"
)

// Event is one thing that happened.
type Event struct {
	Time time.Time `json:"time"`
	Kind Kind      `json:"kind"`
	// Pod is its namespace and name, UID its own; both are empty for what is about the node.
	Pod string `json:"pod,omitempty"`
	UID string `json:"uid,omitempty"`
	// What names the thing, for programs: the kind of a repair.
	What string `json:"what,omitempty"`
	// Message says on one line what happened.
	Message string `json:"message"`
}

const (
	// perPod is how many events are kept of each pod, and ofAll how many of all together.
	perPod = 16
	ofAll  = 512
	// behind is how many events a follower may have to read yet. More are lost to it, and counted.
	behind = 256
)

// Journal keeps events. The zero value is empty and ready for use. Its methods may be called from several goroutines.
type Journal struct {
	mu        sync.Mutex
	all       []Event
	byUID     map[string][]Event
	followers map[*Follower]bool
}

// Add notes an event. It never blocks.
func (j *Journal) Add(e Event) {
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.all = keepLast(append(j.all, e), ofAll)
	switch {
	case e.UID == "":
	case e.Kind == Unenrolled:
		delete(j.byUID, e.UID)
	default:
		if j.byUID == nil {
			j.byUID = map[string][]Event{}
		}
		j.byUID[e.UID] = keepLast(append(j.byUID[e.UID], e), perPod)
	}
	for f := range j.followers {
		select {
		case f.events <- e:
		default:
			f.lost++
		}
	}
}

func keepLast(events []Event, n int) []Event {
	if len(events) <= n {
		return events
	}
	return slices.Delete(events, 0, len(events)-n)
}

// Of returns the last events of a pod that is enrolled, oldest first.
func (j *Journal) Of(uid string) []Event {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.byUID[uid])
}

// Since returns the last events of all pods and of the node that happened after a time, oldest first.
func (j *Journal) Since(t time.Time) []Event {
	j.mu.Lock()
	defer j.mu.Unlock()
	i := len(j.all)
	for i > 0 && j.all[i-1].Time.After(t) {
		i--
	}
	return slices.Clone(j.all[i:])
}

// Follower is told of events as they happen.
type Follower struct {
	journal *Journal
	events  chan Event
	lost    uint64 // guarded by the journal's mutex
}

// Follow begins to tell events to a new follower, until ctx is done.
func (j *Journal) Follow(ctx context.Context) *Follower {
	f := &Follower{journal: j, events: make(chan Event, behind)}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.followers == nil {
		j.followers = map[*Follower]bool{}
	}
	j.followers[f] = true
	context.AfterFunc(ctx, func() {
		j.mu.Lock()
		defer j.mu.Unlock()
		delete(j.followers, f)
	})
	return f
}

// Events are what happened since Follow.
func (f *Follower) Events() <-chan Event { return f.events }

// Lost is how many events came while there was no room for them.
func (f *Follower) Lost() uint64 {
	f.journal.mu.Lock()
	defer f.journal.mu.Unlock()
	return f.lost
}
