// SPDX-License-Identifier: Apache-2.0

package zds

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	mathrand "math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/redirector-dataplane/redirector/pkg/zds/zdsapi"
)

func TestAProxyGetsASnapshotThenChangesAsTheyCome(t *testing.T) {
	s := startServer(t, Options{})
	ns1, ns2 := newNetNS(t), newNetNS(t)
	s.set(t, "a", ns1)

	p := dial(t, s.path)
	s.states(t, StateHello)
	p.hello()
	g := p.expect("add a")
	if g.ns != ns1.id {
		t.Errorf("namespace of a is %v, want %v", g.ns, ns1.id)
	}
	want := &zdsapi.AddWorkload{Uid: "a", WorkloadInfo: &zdsapi.WorkloadInfo{
		Name: "name-a", Namespace: "ns-a", ServiceAccount: "sa-a",
	}}
	if diff := cmp.Diff(want, g.req.GetAdd(), protocmp.Transform()); diff != "" {
		t.Errorf("add (-want +got):\n%s", diff)
	}
	s.states(t, StateSnapshot)
	p.answer("")
	p.expect("snapshot sent")
	p.answer("")
	if st := s.states(t, StateReady)[0]; !st.Newest || st.Pods != 1 || int(st.PID) != os.Getpid() || int(st.UID) != os.Getuid() || st.ID != 1 {
		t.Errorf("status is %+v", st)
	}

	s.set(t, "b", ns2)
	if g := p.expect("add b"); g.ns != ns2.id {
		t.Errorf("namespace of b is %v, want %v", g.ns, ns2.id)
	}
	p.answer("")
	s.wait(t, "b")
	st, ok := s.Pod("b")
	if diff := cmp.Diff(PodStatus{UID: "b", Acked: []uint64{1}}, st); diff != "" || !ok {
		t.Errorf("status of b, set %v (-want +got):\n%s", ok, diff)
	}

	removed := make(chan error, 1)
	go func() { removed <- s.Remove(context.Background(), "a") }()
	p.expect("del a")
	select {
	case err := <-removed:
		t.Errorf("Remove returned (%v) before the proxy answered", err)
	default:
	}
	p.answer("")
	if err := <-removed; err != nil {
		t.Error(err)
	}
	if _, ok := s.Pod("a"); ok {
		t.Error("a is still set")
	}
}

func TestAProxyTakesPodsFromItsHelloOn(t *testing.T) {
	s := startServer(t, Options{})
	s.set(t, "a", newNetNS(t))
	takes := func(when string, want bool) {
		t.Helper()
		if s.Taking() != want {
			t.Errorf("Taking is %t %s", !want, when)
		}
	}
	takes("without a proxy", false)
	p := dial(t, s.path)
	s.states(t, StateHello)
	takes("before it has said hello", false)
	p.hello()
	p.expect("add a")
	takes("while it gets its first pods", true)
	p.answer("")
	p.expect("snapshot sent")
	p.answer("")
	s.states(t, StateReady)
	takes("when it is ready", true)
	p.close()
	s.states(t)
	takes("when it is gone", false)
}

func TestTheServerKeepsItsOwnHoldOfANamespaceWhileThePodIsSet(t *testing.T) {
	s := startServer(t, Options{})
	ns := newNetNS(t)
	s.set(t, "a", ns)
	if err := ns.Close(); err != nil {
		t.Fatal(err)
	}
	p := startProxy(t, s.path, nil)
	p.expectRunning(map[string]fileID{"a": ns.id})
	s.remove(t, "a") // checkFDs sees whether it is let go
}

func TestAPodWithoutNamespaceIsKeptAndAddedWhenItIsKnown(t *testing.T) {
	s := startServer(t, Options{})
	ns := newNetNS(t)
	s.set(t, "a", nil)
	p := dial(t, s.path)
	p.hello()
	p.expect("keep a")
	p.answer("")
	p.expect("snapshot sent")
	p.answer("")
	s.states(t, StateReady)

	// After the snapshot there is no keep.
	s.set(t, "b", nil)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	for _, uid := range []string{"a", "b"} {
		if err := s.Wait(ctx, uid); !errors.Is(err, ErrNoNetNS) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Wait for %s: %v, want %v", uid, err, ErrNoNetNS)
		}
	}
	s.set(t, "a", ns)
	if g := p.expect("add a"); g.ns != ns.id {
		t.Errorf("namespace is %v, want %v", g.ns, ns.id)
	}
	p.answer("")
	s.wait(t, "a")
}

func TestAPodWhoseNamespaceBecomesUnknownStaysWithItsProxy(t *testing.T) {
	s := startServer(t, Options{})
	s.set(t, "a", newNetNS(t))
	first := dial(t, s.path)
	first.hello()
	first.expect("add a")
	first.answer("")
	first.expect("snapshot sent")
	first.answer("")
	s.states(t, StateReady)

	s.set(t, "a", nil)
	s.set(t, "b", newNetNS(t))
	first.expect("add b") // and nothing about a before it
	first.answer("")
	s.wait(t, "b")
}

func TestSettingThePodAgainSendsItOnlyIfItChanged(t *testing.T) {
	s := startServer(t, Options{})
	ns, other := newNetNS(t), newNetNS(t)
	p := dial(t, s.path)
	p.hello()
	p.expect("snapshot sent")
	p.answer("")
	s.states(t, StateReady)
	s.set(t, "a", ns)
	p.expect("add a")
	p.answer("")
	s.wait(t, "a")

	// The same namespace by another file descriptor.
	again, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", ns.FD()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = again.Close() }()
	s.set(t, "a", testNS{File: again})
	s.wait(t, "a")

	s.set(t, "a", other)
	if g := p.expect("add a"); g.ns != other.id {
		t.Errorf("namespace is %v, want the new one %v", g.ns, other.id)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := s.Wait(ctx, "a"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Wait for the new namespace, with an ack for the old one only: %v", err)
	}
	p.answer("")
	s.wait(t, "a")

	changed := testPod("a", other)
	changed.ServiceAccount = "another"
	if err := s.Set(changed); err != nil {
		t.Fatal(err)
	}
	if g := p.expect("add a"); g.req.GetAdd().GetWorkloadInfo().GetServiceAccount() != "another" {
		t.Errorf("received %v", g.req)
	}
	p.answer("")
	s.wait(t, "a")
}

func TestAddsGoToTheNewestProxyAndDelsToAll(t *testing.T) {
	s := startServer(t, Options{})
	a, b := newNetNS(t), newNetNS(t)
	s.set(t, "a", a)
	old := startProxy(t, s.path, nil)
	s.states(t, StateReady)
	young := startProxy(t, s.path, nil)
	if st := s.states(t, StateReady, StateReady); st[0].Newest || !st[1].Newest {
		t.Errorf("newest is %v, %v; want false, true", st[0].Newest, st[1].Newest)
	}
	s.set(t, "b", b)
	s.wait(t, "b")
	young.expectRunning(map[string]fileID{"a": a.id, "b": b.id})
	old.expectRunning(map[string]fileID{"a": a.id})
	if st, _ := s.Pod("a"); !reflect.DeepEqual(st.Acked, []uint64{1, 2}) {
		t.Errorf("a is acked by %v, want 1 and 2", st.Acked)
	}
	s.remove(t, "a")
	young.expectRunning(map[string]fileID{"b": b.id})
	old.expectRunning(map[string]fileID{})
}

func TestAnOlderProxyIsToldToLeaveANamespaceThatWasReplaced(t *testing.T) {
	s := startServer(t, Options{})
	before, after := newNetNS(t), newNetNS(t)
	s.set(t, "a", before)
	old := startProxy(t, s.path, nil)
	s.states(t, StateReady)
	young := startProxy(t, s.path, nil)
	s.states(t, StateReady, StateReady)
	s.set(t, "a", after)
	s.wait(t, "a")
	young.expectRunning(map[string]fileID{"a": after.id})
	old.expectRunning(map[string]fileID{})
}

func TestTheNextNewestTakesOverWhenTheNewestGoesInTheMiddleOfAnAdd(t *testing.T) {
	s := startServer(t, Options{})
	a := newNetNS(t)
	old := startProxy(t, s.path, nil)
	s.states(t, StateReady)
	young := dial(t, s.path)
	young.hello()
	young.expect("snapshot sent")
	young.answer("")
	s.states(t, StateReady, StateReady)

	s.set(t, "a", a)
	young.expect("add a")
	if r := old.running(); len(r) != 0 {
		t.Errorf("the older proxy runs %v already", r)
	}
	young.close()
	s.wait(t, "a")
	old.expectRunning(map[string]fileID{"a": a.id})
}

func TestAPodSetDuringASnapshotReachesBothProxies(t *testing.T) {
	s := startServer(t, Options{})
	a, b := newNetNS(t), newNetNS(t)
	s.set(t, "a", a)
	old := startProxy(t, s.path, nil)
	s.states(t, StateReady)
	young := dial(t, s.path)
	young.hello()
	young.expect("add a")

	// The one in its snapshot is not the target yet, and does not lose the pod.
	s.set(t, "b", b)
	s.wait(t, "b")
	old.expectRunning(map[string]fileID{"a": a.id, "b": b.id})
	young.answer("")
	young.expect("add b")
	young.answer("")
	young.expect("snapshot sent")
	young.answer("")
	s.states(t, StateReady, StateReady)
}

func TestAPodRemovedDuringASnapshotIsDeletedBeforeRemoveReturns(t *testing.T) {
	s := startServer(t, Options{})
	s.set(t, "a", newNetNS(t))
	s.set(t, "b", newNetNS(t))
	p := dial(t, s.path)
	p.hello()
	p.expect("add a")
	removed := make(chan error, 2)
	// The proxy has been told of a, and may have b from an earlier connection.
	for _, uid := range []string{"a", "b"} {
		go func() { removed <- s.Remove(context.Background(), uid) }()
		eventually(t, func() error {
			if _, ok := s.Pod(uid); ok {
				return errors.New("the pod is still set")
			}
			return nil
		})
	}
	p.answer("")
	dels := map[string]bool{}
	for range 2 {
		g, err := p.read()
		if err != nil {
			t.Fatal(err)
		}
		dels[g.String()] = true
		if len(removed) == 2 {
			t.Error("both Removes returned before both were answered")
		}
		p.answer("")
	}
	if !dels["del a"] || !dels["del b"] {
		t.Errorf("received %v, want del a and del b", dels)
	}
	for range 2 {
		if err := <-removed; err != nil {
			t.Error(err)
		}
	}
	p.expect("snapshot sent")
	p.answer("")
	s.states(t, StateReady)
}

func TestAnOlderProxyLeavesAPodThatWasRemovedAndSetAgain(t *testing.T) {
	s := startServer(t, Options{})
	ns := newNetNS(t)
	s.set(t, "a", ns)
	s.set(t, "b", ns)
	old := dial(t, s.path)
	old.hello()
	for _, r := range []string{"add a", "add b", "snapshot sent"} {
		old.expect(r)
		old.answer("")
	}
	s.states(t, StateReady)
	young := startProxy(t, s.path, nil)
	s.states(t, StateReady, StateReady)

	// a comes back before the older proxy could be told that it is gone.
	removed := make(chan error, 2)
	go func() { removed <- s.Remove(context.Background(), "b") }()
	old.expect("del b")
	go func() { removed <- s.Remove(context.Background(), "a") }()
	young.expectRunning(map[string]fileID{})
	s.set(t, "a", ns)
	s.wait(t, "a")
	old.answer("")
	old.expect("del a")
	old.answer("")
	for range 2 {
		if err := <-removed; err != nil {
			t.Error(err)
		}
	}
	young.expectRunning(map[string]fileID{"a": ns.id})
}

func TestRemoveOfAPodThatIsNotSetSucceeds(t *testing.T) {
	s := startServer(t, Options{})
	s.remove(t, "nobody")
	startProxy(t, s.path, nil)
	s.states(t, StateReady)
	s.remove(t, "nobody")
}

func TestWaitSaysWhatIsMissing(t *testing.T) {
	s := startServer(t, Options{})
	short := func() context.Context {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		t.Cleanup(cancel)
		return ctx
	}
	if err := s.Wait(short(), "a"); !errors.Is(err, ErrNotSet) {
		t.Errorf("not set: %v, want %v", err, ErrNotSet)
	}
	s.set(t, "a", newNetNS(t))
	if err := s.Wait(short(), "a"); !errors.Is(err, ErrNoProxy) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no proxy: %v, want %v", err, ErrNoProxy)
	}
	p := dial(t, s.path)
	s.states(t, StateHello)
	if err := s.Wait(short(), "a"); !errors.Is(err, ErrNoProxy) {
		t.Errorf("a proxy that has not said hello: %v, want %v", err, ErrNoProxy)
	}
	p.hello()
	p.expect("add a")
	if err := s.Wait(short(), "a"); !errors.Is(err, ErrNoProxy) {
		t.Errorf("a proxy in its snapshot: %v, want %v", err, ErrNoProxy)
	}
	p.answer("")
	p.expect("snapshot sent")
	p.answer("")
	s.states(t, StateReady)
	s.set(t, "b", newNetNS(t))
	p.expect("add b")
	err := s.Wait(short(), "b")
	if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrNoProxy) || !strings.Contains(err.Error(), fmt.Sprint(os.Getpid())) {
		t.Errorf("a proxy that does not answer: %v, want its pid", err)
	}
	waited := make(chan error, 1)
	go func() { waited <- s.Wait(context.Background(), "b") }()
	p.answer("")
	if err := <-waited; err != nil {
		t.Error(err)
	}
	s.set(t, "c", newNetNS(t))
	p.expect("add c")
	go func() { waited <- s.Wait(context.Background(), "c") }()
	go func() { _ = s.Remove(context.Background(), "c") }()
	if err := <-waited; !errors.Is(err, ErrNotSet) {
		t.Errorf("removed while waited for: %v, want %v", err, ErrNotSet)
	}
	s.set(t, "d", newNetNS(t))
	go func() { waited <- s.Wait(context.Background(), "d") }()
	s.stop()
	if err := <-waited; !errors.Is(err, ErrClosed) {
		t.Errorf("stopped while waited for: %v, want %v", err, ErrClosed)
	}
	if err := s.Set(testPod("e", newNetNS(t))); !errors.Is(err, ErrClosed) {
		t.Errorf("Set after the end: %v, want %v", err, ErrClosed)
	}
}

func TestARefusedPodIsOfferedAgainUntilItIsTaken(t *testing.T) {
	s := startServer(t, Options{RetryAfter: 30 * time.Millisecond})
	ns := newNetNS(t)
	var mu sync.Mutex
	refusal, offers := "port 15001\nis taken\x1b[31m", 0
	p := startProxy(t, s.path, func(g got) string {
		mu.Lock()
		defer mu.Unlock()
		if g.req.GetAdd() == nil {
			return ""
		}
		offers++
		return refusal
	})
	s.states(t, StateReady)
	s.set(t, "a", ns)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := s.Wait(ctx, "a")
	var nack *NackError
	if !errors.As(err, &nack) {
		t.Fatalf("Wait: %v, want a NackError", err)
	}
	if want := (NackError{UID: "a", PID: int32(os.Getpid()), Text: "port 15001 is taken [31m"}); *nack != want {
		t.Errorf("refusal is %+v, want %+v", *nack, want)
	}
	if st, _ := s.Pod("a"); !strings.Contains(st.LastError, "port 15001") || st.LastErrorAt.IsZero() || st.Acked != nil {
		t.Errorf("status of the pod is %+v", st)
	}
	if st := s.Status(); !strings.Contains(st[0].LastError, "add a: port 15001") || st[0].Pods != 0 {
		t.Errorf("status of the connection is %+v", st[0])
	}
	eventually(t, func() error {
		mu.Lock()
		defer mu.Unlock()
		if offers < 3 {
			return fmt.Errorf("offered %d times", offers)
		}
		return nil
	})
	mu.Lock()
	refusal = ""
	mu.Unlock()
	p.expectRunning(map[string]fileID{"a": ns.id})
	eventually(t, func() error {
		if st, _ := s.Pod("a"); st.LastError != "" || len(st.Acked) != 1 {
			return fmt.Errorf("status of the pod is %+v", st)
		}
		return nil
	})
	s.wait(t, "a")
	mu.Lock()
	defer mu.Unlock()
	if lines := s.log.with("refused", "port 15001 is taken"); len(lines) < 3 || len(lines) >= offers {
		t.Errorf("%d offers gave %d log lines about a refusal", offers, len(lines))
	}
}

func TestARefusalInTheSnapshotDoesNotEndIt(t *testing.T) {
	for _, retryAfter := range []time.Duration{time.Hour, time.Millisecond} {
		s := startServer(t, Options{RetryAfter: retryAfter})
		s.set(t, "a", newNetNS(t))
		s.set(t, "b", newNetNS(t))
		p := dial(t, s.path)
		p.hello()
		p.expect("add a")
		p.answer("not yet")
		p.expect("add b")
		p.answer("")
		p.expect("snapshot sent")
		p.answer("")
		s.states(t, StateReady)
		if retryAfter == time.Hour {
			var nack *NackError
			if err := s.Wait(context.Background(), "a"); !errors.As(err, &nack) || nack.Text != "not yet" {
				t.Errorf("Wait: %v, want the refusal", err)
			}
			continue
		}
		p.expect("add a")
		p.answer("")
		s.wait(t, "a")
	}
}

func TestARefusedDelIsDone(t *testing.T) {
	s := startServer(t, Options{})
	startProxy(t, s.path, func(g got) string {
		if g.req.GetDel() != nil {
			return "I would rather not"
		}
		return ""
	})
	s.states(t, StateReady)
	s.set(t, "a", newNetNS(t))
	s.wait(t, "a")
	s.remove(t, "a")
	s.log.expect(t, 1, "del a", "I would rather not")
}

func TestAnswersAreObserved(t *testing.T) {
	type answer struct {
		request Request
		outcome Outcome
	}
	var mu sync.Mutex
	var all []answer
	s := startServer(t, Options{AckTimeout: 100 * time.Millisecond, OnAnswer: func(request Request, outcome Outcome, took time.Duration) {
		if took <= 0 {
			t.Errorf("the answer to %s took %v", request, took)
		}
		mu.Lock()
		defer mu.Unlock()
		all = append(all, answer{request, outcome})
	}})
	if err := s.Set(testPod("kept", nil)); err != nil {
		t.Fatal(err)
	}
	s.set(t, "a", newNetNS(t))
	p := dial(t, s.path)
	p.hello()
	for _, r := range []struct{ request, answer string }{
		{"keep kept", ""}, {"add a", "no room"}, {"snapshot sent", ""},
	} {
		p.expect(r.request)
		p.answer(r.answer)
	}
	s.states(t, StateReady)
	if err := s.Remove(canceled(), "a"); err == nil {
		t.Error("nobody has answered the del")
	}
	p.expect("del a")
	p.expectClosed()
	want := []answer{
		{RequestKeep, OutcomeAcked}, {RequestAdd, OutcomeRefused}, {RequestSnapshotSent, OutcomeAcked}, {RequestDel, OutcomeLost},
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(all, want) {
		t.Errorf("observed %v, want %v", all, want)
	}
}

func canceled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// Each bad peer is next to a good one, loses its connection with a reason in the
// log, and the good one gets its pods meanwhile and after.
func TestABadPeerLosesItsConnectionAndHarmsNobody(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = null.Close() }()
	random := make([]byte, 700)
	if _, err := rand.Read(random); err != nil {
		t.Fatal(err)
	}
	random[0] = 0x07 // no valid field

	intoSnapshot := func(p *peer) { p.hello(); p.expect("add seed") }
	ready := func(p *peer) {
		intoSnapshot(p)
		p.answer("")
		p.expect("snapshot sent")
		p.answer("")
	}
	withFD := func(p *peer, msg []byte) {
		if _, _, err := p.uc.WriteMsgUnix(msg, unix.UnixRights(int(null.Fd()), int(null.Fd())), nil); err != nil {
			p.t.Error(err)
		}
	}
	huge := func(p *peer) {
		raw, err := p.uc.SyscallConn()
		if err != nil {
			p.t.Fatal(err)
		}
		if ctlErr := raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 32<<20)
		}); err != nil || ctlErr != nil {
			p.t.Fatal(err, ctlErr)
		}
		// 10 MB in one message is more than most kernels carry, a few are not.
		for size := 10 << 20; ; size /= 2 {
			_, err := p.uc.Write(make([]byte, size))
			if err == nil && size > 1<<20 {
				return
			}
			if !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EMSGSIZE) {
				p.t.Fatalf("send %d bytes: %v", size, err)
			}
		}
	}
	hello := marshal(t, &zdsapi.ZdsHello{Version: zdsapi.Version_V1})

	tests := []struct {
		name string
		do   func(p *peer)
		why  string // in the log
	}{
		{"never says hello", func(*peer) {}, "no hello within"},
		{"goes before its hello", func(p *peer) { p.close() }, "node proxy closed it"},
		{"says garbage for hello", func(p *peer) { p.send(random) }, "no hello"},
		{"says megabytes for hello", huge, "more than 1024 bytes"},
		{"says an ack for hello", func(p *peer) { p.answer("") }, "no hello"},
		{"speaks another version", func(p *peer) { p.send(marshal(p.t, &zdsapi.ZdsHello{Version: 2})) }, "version 2"},
		{"sends file descriptors with its hello", func(p *peer) { withFD(p, hello) }, "file descriptors"},
		{"says hello twice", func(p *peer) { p.hello(); p.hello() }, `why="sent `},
		{"never answers in the snapshot", intoSnapshot, "no answer to add seed within"},
		{"goes in the snapshot", func(p *peer) { intoSnapshot(p); p.close() }, "before it answered add seed"},
		{"answers garbage in the snapshot", func(p *peer) { intoSnapshot(p); p.send(random) }, "no response"},
		{"never answers the end of the snapshot", func(p *peer) {
			intoSnapshot(p)
			p.answer("")
			p.expect("snapshot sent")
		}, "no answer to snapshot sent within"},
		{"goes at the end of the snapshot", func(p *peer) {
			intoSnapshot(p)
			p.answer("")
			p.expect("snapshot sent")
			p.close()
		}, "before it answered snapshot sent"},
		{"answers megabytes", func(p *peer) { intoSnapshot(p); huge(p) }, "more than 1024 bytes"},
		{"answers without an ack", func(p *peer) {
			intoSnapshot(p)
			// Field 15, which nobody knows: a response without any payload we know.
			p.send([]byte{15 << 3, 1})
		}, "without an ack"},
		{"sends file descriptors with its answer", func(p *peer) { intoSnapshot(p); withFD(p, ackMessage(p.t, "")) }, "file descriptors"},
		{"answers twice", func(p *peer) {
			ready(p)
			p.answer("")
		}, "while no request was in flight"},
		{"goes when it is ready", func(p *peer) { ready(p); p.close() }, "node proxy closed it"},
		{"sends garbage when it is ready", func(p *peer) { ready(p); p.send(random) }, "while no request was in flight"},
		{"sends megabytes when it is ready", func(p *peer) { ready(p); huge(p) }, "more than 1024 bytes"},
		{"shuts down its sending side", func(p *peer) {
			ready(p)
			if err := p.uc.CloseWrite(); err != nil {
				p.t.Error(err)
			}
		}, "node proxy closed it"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := startServer(t, Options{
				HelloTimeout: shortDeadline,
				WriteTimeout: shortDeadline,
				AckTimeout:   shortDeadline,
			})
			seed, live, later := newNetNS(t), newNetNS(t), newNetNS(t)
			s.set(t, "seed", seed)
			good := startProxy(t, s.path, nil)
			s.states(t, StateReady)
			bad := dial(t, s.path)
			tt.do(bad)
			s.set(t, "live", live)
			s.wait(t, "live")
			s.remove(t, "seed")
			s.states(t, StateReady)
			bad.expectClosedUnlessClosed()
			s.log.expect(t, 1, "closed node proxy's connection", "conn=2", tt.why)
			s.log.expect(t, 1, "closed node proxy's connection")
			s.set(t, "later", later)
			s.wait(t, "later")
			good.expectRunning(map[string]fileID{"live": live.id, "later": later.id})
		})
	}
}

// expectClosedUnlessClosed is expectClosed for a peer that may have gone itself.
func (p *peer) expectClosedUnlessClosed() {
	p.t.Helper()
	if err := p.uc.SetDeadline(time.Time{}); !errors.Is(err, net.ErrClosed) {
		p.expectClosed()
	}
}

func TestALateAckIsNotTakenForAnotherRequest(t *testing.T) {
	s := startServer(t, Options{AckTimeout: 100 * time.Millisecond})
	s.set(t, "a", newNetNS(t))
	s.set(t, "b", newNetNS(t))
	p := dial(t, s.path)
	p.hello()
	p.expect("add a")
	s.states(t) // it is thrown out
	_, err := p.uc.Write(ackMessage(t, ""))
	if !errors.Is(err, unix.EPIPE) {
		t.Errorf("late ack: %v, want %v", err, unix.EPIPE)
	}
	for _, uid := range []string{"a", "b"} {
		if st, _ := s.Pod(uid); len(st.Acked) != 0 {
			t.Errorf("%s counts as acked: %+v", uid, st)
		}
	}
}

func TestAnAckSentAheadIsNotTakenForTheNextRequest(t *testing.T) {
	s := startServer(t, Options{})
	p := dial(t, s.path)
	// The server cannot get from the hello to its first request before the ack is there.
	s.mu.Lock()
	p.hello()
	p.answer("")
	s.mu.Unlock()
	p.expectClosed()
	s.log.expect(t, 1, "closed", "while no request was in flight")
}

func TestAMutePeerDelaysNobody(t *testing.T) {
	// The deadlines are far away: nothing here can be due to one that passed.
	s := startServer(t, Options{HelloTimeout: time.Hour, AckTimeout: time.Hour})
	a, b := newNetNS(t), newNetNS(t)
	s.set(t, "a", a)
	good := startProxy(t, s.path, nil)
	s.states(t, StateReady)
	mute := dial(t, s.path)
	mute.hello()
	mute.expect("add a")
	dial(t, s.path) // one without hello

	s.set(t, "b", b)
	s.wait(t, "b")
	good.expectRunning(map[string]fileID{"a": a.id, "b": b.id})
	s.remove(t, "nobody's")

	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	err := s.Remove(ctx, "a")
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), fmt.Sprint(os.Getpid())) {
		t.Errorf("Remove of what a mute peer may run: %v, want its pid", err)
	}
	good.expectRunning(map[string]fileID{"b": b.id})
	s.states(t, StateReady, StateSnapshot, StateHello)

	// Repeated, it waits for what is still open, and ends when the peer does.
	removed := make(chan error, 1)
	go func() { removed <- s.Remove(context.Background(), "a") }()
	mute.close()
	if err := <-removed; err != nil {
		t.Error(err)
	}
}

func TestARemoveEndsAtThePeersDeadline(t *testing.T) {
	s := startServer(t, Options{AckTimeout: 100 * time.Millisecond})
	p := dial(t, s.path)
	p.hello()
	p.expect("snapshot sent")
	p.answer("")
	s.set(t, "a", newNetNS(t))
	p.expect("add a")
	p.answer("")
	s.wait(t, "a")
	s.remove(t, "a")
	p.expect("del a")
	s.states(t)
}

func TestAPeerThatAnswersWithoutReadingIsThrownOut(t *testing.T) {
	s := startServer(t, Options{WriteTimeout: 100 * time.Millisecond, AckTimeout: 100 * time.Millisecond})
	for i := range 2000 {
		s.set(t, fmt.Sprintf("%0200d", i), nil)
	}
	p := dial(t, s.path)
	p.hello()
	s.states(t, StateSnapshot)
	// It answers as fast as the server asks, or faster, and takes nothing out: sooner
	// or later an answer is ahead of its request, or there is no room for one.
	for len(s.Status()) > 0 {
		_, _ = p.uc.Write(ackMessage(t, ""))
		time.Sleep(50 * time.Microsecond)
	}
	s.log.expect(t, 1, "closed", "conn=1")
	s.log.expect(t, 0, "node proxy closed it")
}

func TestConnectionsAreBounded(t *testing.T) {
	s := startServer(t, Options{MaxConns: 3, HelloTimeout: time.Hour})
	startProxy(t, s.path, nil)
	s.states(t, StateReady)
	loiterer := dial(t, s.path)
	s.states(t, StateReady, StateHello)
	startProxy(t, s.path, nil)
	s.states(t, StateReady, StateHello, StateReady)

	// One that has not said hello makes room.
	startProxy(t, s.path, nil)
	s.states(t, StateReady, StateReady, StateReady)
	loiterer.expectClosed()
	// The others do not.
	dial(t, s.path).expectClosed()
	s.states(t, StateReady, StateReady, StateReady)
	s.log.expect(t, 1, "refused a connection", "allowed=3")
	s.log.expect(t, 1, "made room")
}

func TestAFloodOfConnectionsDoesNotKeepProxiesOut(t *testing.T) {
	s := startServer(t, Options{MaxConns: 4, HelloTimeout: time.Hour})
	ns := newNetNS(t)
	for range 30 {
		dial(t, s.path)
	}
	p := startProxy(t, s.path, nil)
	s.set(t, "a", ns)
	s.wait(t, "a")
	p.expectRunning(map[string]fileID{"a": ns.id})
}

func TestASnapshotOfAThousandPods(t *testing.T) {
	s := startServer(t, Options{})
	ns := newNetNS(t)
	want := make(map[string]fileID)
	for i := range 1000 {
		uid := fmt.Sprintf("pod-%04d", i)
		s.set(t, uid, ns)
		want[uid] = ns.id
	}
	var order []string
	p := startProxy(t, s.path, func(g got) string { order = append(order, g.String()); return "" })
	if st := s.states(t, StateReady); st[0].Pods != 1000 {
		t.Errorf("proxy acked %d pods, want 1000", st[0].Pods)
	}
	p.expectRunning(want)
	p.stop()
	if len(order) != 1001 || order[1000] != "snapshot sent" {
		t.Fatalf("%d requests, the last is %q; want 1001 and snapshot sent", len(order), order[len(order)-1])
	}
	for i, r := range order[:1000] {
		if want := fmt.Sprintf("add pod-%04d", i); r != want {
			t.Fatalf("request %d is %q, want %q, the order in which they were set", i, r, want)
		}
	}
}

func TestWhatCannotBeAPodIsRefused(t *testing.T) {
	s := startServer(t, Options{})
	own, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = own.Close() }()
	uts, err := os.Open("/proc/self/ns/uts")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = uts.Close() }()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = null.Close() }()
	ns := newNetNS(t)

	tests := []struct {
		name string
		pod  Pod
		want string
	}{
		{"no UID", Pod{NetNS: ns}, "UID is empty"},
		{"too long", Pod{UID: "a", Name: strings.Repeat("x", 1100), NetNS: ns}, "1024"},
		{"no UTF-8", Pod{UID: "a\xff", NetNS: ns}, "UTF-8"},
		{"own namespace", Pod{UID: "a", NetNS: testNS{File: own}}, ErrHostNetNS.Error()},
		{"another kind of namespace", Pod{UID: "a", NetNS: testNS{File: uts}}, "not a network namespace"},
		{"a file", Pod{UID: "a", NetNS: testNS{File: null}}, "no namespace"},
		{"a closed file descriptor", Pod{UID: "a", NetNS: closedNS{}}, "bad file descriptor"},
	}
	// Not everywhere may even root look at process 1.
	if init, err := os.Open("/proc/1/ns/net"); err == nil {
		defer func() { _ = init.Close() }()
		tests = append(tests, tests[3])
		tests[len(tests)-1].name, tests[len(tests)-1].pod.NetNS = "process 1's namespace", testNS{File: init}
	}
	for _, tt := range tests {
		err := s.Set(tt.pod)
		if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want one line with %q", tt.name, err, tt.want)
		}
		if _, ok := s.Pod(tt.pod.UID); ok {
			t.Errorf("%s: the pod is set", tt.name)
		}
	}
}

type closedNS struct{}

func (closedNS) FD() int { return 1 << 20 }

func TestListen(t *testing.T) {
	checkFDs(t)
	dir := t.TempDir()
	stopped, cancel := context.WithCancel(context.Background())
	cancel()
	listen := func(path string) error {
		s, err := Listen(Options{Path: path})
		if err != nil {
			if strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), path) {
				t.Errorf("error is %q, want one line with the path", err)
			}
			return err
		}
		info, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != os.ModeSocket|0o600 {
			t.Errorf("mode of the socket is %v, want 0600", info.Mode())
		}
		if err := s.Serve(stopped); err != nil {
			t.Errorf("Serve: %v", err)
		}
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket file is still there: %v", err)
		}
		if err := s.Serve(stopped); err == nil {
			t.Error("Serve may be called twice")
		}
		return nil
	}
	expectErr := func(path, want string) {
		t.Helper()
		if err := listen(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Listen: %v, want %q", err, want)
		}
	}

	if err := listen(filepath.Join(dir, "new", "directory", "zds.sock")); err != nil {
		t.Error(err)
	}

	stale := filepath.Join(dir, "stale.sock")
	dead, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: stale, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	expectErr(stale, "in use")
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	if err := listen(stale); err != nil {
		t.Errorf("a stale socket: %v", err)
	}

	stream := filepath.Join(dir, "stream.sock")
	other, err := net.Listen("unix", stream)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	expectErr(stream, "in use")

	full := filepath.Join(dir, "full.sock")
	busy, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(busy) }()
	if err := errors.Join(unix.Bind(busy, &unix.SockaddrUnix{Name: full}), unix.Listen(busy, 0)); err != nil {
		t.Fatal(err)
	}
	dial(t, full) // fills the queue
	expectErr(full, "in use")

	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	expectErr(file, "not a socket")
	if b, err := os.ReadFile(file); err != nil || string(b) != "precious" {
		t.Errorf("the file is now %q, %v", b, err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	expectErr(link, "not a socket")
	expectErr(filepath.Join(file, "zds.sock"), "create the directory")
	expectErr(dir, "not a socket")
	expectErr("relative.sock", "absolute")
	expectErr("/"+strings.Repeat("x", 120), "shorter")
}

func TestTheSocketFileOfASuccessorIsNotRemoved(t *testing.T) {
	s := startServer(t, Options{})
	if err := os.Remove(s.path); err != nil {
		t.Fatal(err)
	}
	successor, err := Listen(Options{Path: s.path})
	if err != nil {
		t.Fatal(err)
	}
	s.stop()
	if _, err := os.Lstat(s.path); err != nil {
		t.Errorf("the successor's socket file: %v", err)
	}
	stopped, cancel := context.WithCancel(context.Background())
	cancel()
	if err := successor.Serve(stopped); err != nil {
		t.Error(err)
	}
}

func TestDefaults(t *testing.T) {
	s, err := Listen(Options{Path: filepath.Join(t.TempDir(), "zds.sock")})
	if err != nil {
		t.Fatal(err)
	}
	stopped, cancel := context.WithCancel(context.Background())
	cancel()
	defer func() { _ = s.Serve(stopped) }()
	o := s.opts
	if o.HelloTimeout != 5*time.Second || o.AckTimeout != 5*time.Second || o.WriteTimeout != 5*time.Second ||
		o.RetryAfter != 5*time.Second || o.MaxConns != 16 || o.Mode != 0o600 {
		t.Errorf("defaults are %+v", o)
	}
}

// Pods come and go from all sides while proxies do; whatever the order was, the
// proxy that stays ends up with exactly what is wanted, and so does a late one.
func TestInTheEndAProxyRunsExactlyWhatIsWanted(t *testing.T) {
	s := startServer(t, Options{RetryAfter: time.Millisecond, HelloTimeout: 100 * time.Millisecond, AckTimeout: shortDeadline})
	namespaces := make([]testNS, 8)
	for i := range namespaces {
		namespaces[i] = newNetNS(t)
	}
	const workers, podsEach, steps = 8, 12, 150
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	survivor := startSurvivor(t, s.path, func(g got) string {
		if g.req.GetAdd() != nil && mathrand.IntN(20) == 0 {
			return "not now"
		}
		return ""
	})

	var noise, work sync.WaitGroup
	stopNoise := make(chan struct{})
	for range 3 {
		noise.Go(func() {
			for {
				select {
				case <-stopNoise:
					return
				default:
					comeAndGo(t, s.path)
				}
			}
		})
	}
	wanted := make([]map[string]fileID, workers)
	for w := range workers {
		wanted[w] = make(map[string]fileID)
		work.Go(func() {
			for range steps {
				uid := fmt.Sprintf("w%d-p%d", w, mathrand.IntN(podsEach))
				switch mathrand.IntN(6) {
				case 0, 1, 2:
					ns := namespaces[mathrand.IntN(len(namespaces))]
					if err := s.Set(testPod(uid, ns)); err != nil {
						t.Error(err)
					}
					wanted[w][uid] = ns.id
				case 3, 4:
					if err := s.Remove(ctx, uid); err != nil {
						t.Error(err)
					}
					delete(wanted[w], uid)
				case 5:
					short, cancel := context.WithTimeout(ctx, 5*time.Millisecond)
					_ = s.Wait(short, uid)
					cancel()
				}
			}
		})
	}
	work.Wait()
	close(stopNoise)
	noise.Wait()

	all := make(map[string]fileID)
	for _, m := range wanted {
		maps.Copy(all, m)
	}
	survivor.expectRunning(all)
	latecomer := startSurvivor(t, s.path, nil)
	latecomer.expectRunning(all)
	for uid := range all {
		s.remove(t, uid)
	}
	survivor.expectRunning(map[string]fileID{})
	latecomer.expectRunning(map[string]fileID{})
}

// comeAndGo is one life of a peer that may behave for a while, and then not.
func comeAndGo(t *testing.T, path string) {
	p := &peer{t: t}
	var err error
	if p.uc, err = net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"}); err != nil {
		t.Error(err)
		return
	}
	defer p.close()
	if mathrand.IntN(4) == 0 {
		return
	}
	if _, err := p.uc.Write(marshal(t, &zdsapi.ZdsHello{Version: zdsapi.Version_V1})); err != nil {
		return // it came to it too late, and is thrown out already
	}
	for range mathrand.IntN(60) {
		if _, err := p.readWithin(time.Second); err != nil {
			return
		}
		if _, err := p.uc.Write(ackMessage(t, "")); err != nil {
			return
		}
	}
	for mathrand.IntN(4) == 0 {
		// Without a word, until it is thrown out or tired of it.
		if _, err := p.readWithin(time.Second); err != nil {
			return
		}
	}
}

func FuzzParseHello(f *testing.F) {
	f.Add([]byte{8, 1})
	f.Add([]byte{8, 2})
	f.Add([]byte{})
	f.Add([]byte{10, 0})
	f.Add([]byte("\x08\x81\x80\x80\x80\x80\x80\x80\x80\x80\x01"))
	f.Fuzz(func(t *testing.T, msg []byte) {
		err := parseHello(msg)
		var hello zdsapi.ZdsHello
		valid := proto.Unmarshal(msg, &hello) == nil && hello.GetVersion() == zdsapi.Version_V1
		if (err == nil) != valid {
			t.Errorf("%x: %v, but the message is %v", msg, err, &hello)
		}
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%x: %q has more than one line", msg, err)
		}
	})
}

func FuzzParseAck(f *testing.F) {
	f.Add([]byte{10, 0})
	f.Add([]byte{10, 4, 10, 2, 'n', 'o'})
	f.Add([]byte{10, 3, 10, 1, '\n'})
	f.Add([]byte{10, 4, 10, 2, 0xff, 0xfe})
	f.Add([]byte{8, 1})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, msg []byte) {
		refusal, err := parseAck(msg)
		var response zdsapi.WorkloadResponse
		valid := proto.Unmarshal(msg, &response) == nil && response.GetAck() != nil
		if (err == nil) != valid {
			t.Fatalf("%x: %v, but the message is %v", msg, err, &response)
		}
		// Never may a refusal turn into a yes, or a yes into a refusal.
		if valid && (refusal == "") != (response.GetAck().GetError() == "") {
			t.Errorf("%x: refusal is %q, was %q", msg, refusal, response.GetAck().GetError())
		}
		if strings.ContainsAny(refusal, "\n\r\x00\x1b") {
			t.Errorf("%x: %q is not fit for a log", msg, refusal)
		}
	})
}
