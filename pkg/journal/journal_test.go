// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"context"
	"strconv"
	"testing"
	"time"
)

func TestTheLastEventsAreKept(t *testing.T) {
	var j Journal
	begin := time.Unix(1000, 0)
	for i := range 2 * ofAll {
		j.Add(Event{Time: begin.Add(time.Duration(i) * time.Second), Kind: Repaired, UID: "u" + strconv.Itoa(i%2), Message: strconv.Itoa(i)})
	}
	of := j.Of("u1")
	if len(of) != perPod || of[perPod-1].Message != strconv.Itoa(2*ofAll-1) || of[0].Message != strconv.Itoa(2*ofAll-2*perPod+1) {
		t.Errorf("of one pod there are %d events: %+v", len(of), of)
	}
	if all := j.Since(time.Time{}); len(all) != ofAll || all[0].Message != strconv.Itoa(ofAll) {
		t.Errorf("of all there are %d events, the first %+v", len(all), all[0])
	}
	if last := j.Since(begin.Add((2*ofAll - 3) * time.Second)); len(last) != 2 || last[1].Message != strconv.Itoa(2*ofAll-1) {
		t.Errorf("the last two are %+v", last)
	}
	j.Add(Event{Kind: Unenrolled, UID: "u1"})
	if of := j.Of("u1"); len(of) != 0 {
		t.Errorf("a pod that has left has %+v", of)
	}
}

func TestAFollowerThatDoesNotReadLosesEventsAndBlocksNobody(t *testing.T) {
	var j Journal
	ctx, cancel := context.WithCancel(t.Context())
	f := j.Follow(ctx)
	for range behind + 7 {
		j.Add(Event{Kind: Failing})
	}
	if lost := f.Lost(); lost != 7 {
		t.Errorf("%d are lost, want 7", lost)
	}
	for range behind {
		<-f.Events()
	}
	j.Add(Event{Kind: Recovered, Message: "again"})
	if e := <-f.Events(); e.Message != "again" {
		t.Errorf("the next is %+v", e)
	}
	cancel()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		j.mu.Lock()
		n := len(j.followers)
		j.mu.Unlock()
		if n == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("a follower that has gone is still told")
		}
	}
}
