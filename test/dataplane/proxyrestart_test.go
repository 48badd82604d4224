// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/zds"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// Proxies come and go, in good order or killed, while pods are enrolled and taken out. Whatever a pod's enrolment met, a
// snapshot, a live change, or no proxy at all, in the end the last proxy has exactly the pods that are enrolled.
func TestProxiesRestartWhilePodsComeAndGo(t *testing.T) {
	n := newNode(t)
	n.serve(n.Outside, 8080, bed.AppOptions{})
	const workers, restarts = 6, 8
	var pods []*bed.NS
	for i := range workers {
		pods = append(pods, n.plainPod(fmt.Sprintf("pod%d", i)))
	}
	stop := make(chan struct{})
	var group sync.WaitGroup
	for i, pod := range pods {
		group.Go(func() {
			// The last thing that each does is to enrol its pod, or, every third, to take it out.
			for ended := false; !ended; {
				select {
				case <-stop:
					ended = true
				case <-time.After(time.Duration(i) * time.Millisecond):
				}
				if err := n.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
					t.Error(err)
				}
				if ended && i%3 != 0 {
					return
				}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				if err := n.Unenroll(ctx, "uid-"+pod.Name); err != nil {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	var last *proxy
	for i := range restarts {
		start := time.Now()
		next := n.startProxy()
		t.Logf("proxy %d has its snapshot %v after it was started", i+1, time.Since(start).Round(time.Millisecond))
		switch {
		case last == nil:
		case i%2 == 0:
			last.stop()
		default:
			if err := last.Signal(unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
		last = next
	}
	close(stop)
	group.Wait()

	for i, pod := range pods {
		uid := "uid-" + pod.Name
		if i%3 == 0 {
			if _, ok := n.Proxies.Pod(uid); ok {
				t.Errorf("%s is taken out, and proxies are told of it", uid)
			}
			continue
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		if err := n.Proxies.Wait(ctx, uid); err != nil && !errors.Is(err, zds.ErrNotSet) {
			t.Errorf("no proxy has %s: %v", uid, err)
		}
		cancel()
		eachFamily(t, func(t *testing.T, family string) {
			remote := netip.AddrPortFrom(addr(n.Outside, family), 8080)
			_, local := ask(t, pod, bed.DialSpec{Remote: remote})
			last.saw(pod, nodeproxy.Outbound, local, remote)
		})
	}
}

// A proxy that is away while a pod is taken out and enrolled again has had it all the time, with its listeners. They are known
// again by the time that Enroll returns.
func TestAProxyMissesThatAPodLeft(t *testing.T) {
	n := newBareNode(t)
	b := n.Bed
	n.serve(n.Outside, 8080, bed.AppOptions{})
	a := startAgent(t, b)
	p := n.startProxyProcess()
	pod := n.plainPod("pod")
	enrol := func(wait bool) {
		t.Helper()
		request := api.EnrollRequest{Spec: agent.Spec(pod), Wait: wait, Timeout: api.Duration(patience)}
		if _, err := a.client.Enroll(t.Context(), request); err != nil {
			t.Fatal(err)
		}
	}
	enrol(true)
	if err := p.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := a.Kill(); err != nil {
		t.Fatal(err)
	}
	a = startAgent(t, b)
	if err := a.client.Unenroll(t.Context(), "uid-pod"); err != nil {
		t.Fatal(err)
	}
	enrol(false)
	if err := p.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	enrol(true)
	ask(t, pod, bed.DialSpec{Remote: netip.AddrPortFrom(n.Outside.V4, 8080)})
	pods, err := a.client.Pods(t.Context())
	if err != nil || len(pods) != 1 {
		t.Fatalf("the agent has %+v, %v", pods, err)
	}
	if c := pods[0].Counters; c.OutboundNoListener > 0 {
		t.Errorf("counters are %+v", c)
	}
}
