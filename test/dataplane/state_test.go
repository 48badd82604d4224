// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// steerProgram is the id of the program that steers the pod.
func steerProgram(t *testing.T, b *bed.Bed, uid string) ebpf.ProgramID {
	t.Helper()
	l, err := link.LoadPinnedLink(filepath.Join(b.BPFFS, "pods", uid, "steer"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		t.Fatal(err)
	}
	return info.Program
}

// Between two agents something becomes of what is noted of a pod, or of the path of its namespace. The pod stays captured by the
// next agent's programs. What is lost is reported by name, and enrolling it again makes it good.
func TestWhatIsNotedOfAPodGetsLost(t *testing.T) {
	type loss struct {
		lose func(t *testing.T, n *node, file string)
		// words are what the next agent has to say; with none, it has to know the pod as before.
		words []string
	}
	write := func(content func(old string) string) func(t *testing.T, n *node, file string) {
		return func(t *testing.T, _ *node, file string) {
			t.Helper()
			old, err := os.ReadFile(file)
			if err == nil {
				err = os.WriteFile(file, []byte(content(string(old))), 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	remove := func(t *testing.T, _ *node, file string) {
		t.Helper()
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
	unreadable := []string{"cannot read", "uid-pod.json", "its name is lost"}
	for name, c := range map[string]loss{
		"nothing":  {func(*testing.T, *node, string) {}, nil},
		"the file": {remove, []string{"its name is lost", "uid-pod"}},
		"all files": {
			func(t *testing.T, n *node, _ string) {
				if err := os.RemoveAll(filepath.Join(n.RunDir, "pods")); err != nil {
					t.Fatal(err)
				}
			},
			[]string{"its name is lost", "uid-pod"},
		},
		"its end":   {write(func(s string) string { return s[:len(s)/2] }), unreadable},
		"its text":  {write(func(string) string { return "" }), unreadable},
		"its sense": {write(func(string) string { return `["something", "else"]` }), unreadable},
		"its place": {
			write(func(s string) string { return strings.Replace(s, "uid-pod", "uid-other", 1) }),
			append([]string{"uid-other"}, unreadable...),
		},
		"to a directory": {
			func(t *testing.T, n *node, file string) {
				remove(t, n, file)
				if err := os.Mkdir(file, 0o700); err != nil {
					t.Fatal(err)
				}
			},
			unreadable,
		},
		"the path of its namespace": {
			func(t *testing.T, n *node, _ string) {
				if err := unix.Unmount(filepath.Join(n.Dir, "its-netns"), unix.MNT_DETACH); err != nil {
					t.Fatal(err)
				}
			},
			nil,
		},
		"the path, and all pins": {
			func(t *testing.T, n *node, _ string) {
				if err := unix.Unmount(filepath.Join(n.Dir, "its-netns"), unix.MNT_DETACH); err != nil {
					t.Fatal(err)
				}
				if err := loader.Unload(n.BPFFS); err != nil {
					t.Fatal(err)
				}
			},
			nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newBareNode(t)
			b := n.Bed
			pod := n.plainPod("pod")
			before, err := pod.Snapshot()
			if err != nil {
				t.Fatal(err)
			}
			n.serve(n.Outside, 8080, bed.AppOptions{})
			n.serve(pod, 8080, bed.AppOptions{})
			spec := agent.Spec(pod)
			spec.NetNS = filepath.Join(n.Dir, "its-netns")
			if err := os.WriteFile(spec.NetNS, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := unix.Mount(pod.Path, spec.NetNS, "", unix.MS_BIND, ""); err != nil {
				t.Fatal(err)
			}
			dns := true
			spec.Settings = enroll.Settings{BypassInbound: true, DNSCapture: &dns}

			a := startAgent(t, b)
			proxy := n.startProxyProcess()
			request := api.EnrollRequest{Spec: spec, Wait: true, Timeout: api.Duration(patience)}
			if _, err := a.client.Enroll(t.Context(), request); err != nil {
				t.Fatal(err)
			}
			old := steerProgram(t, b, spec.UID)
			if err := a.Kill(); err != nil {
				t.Fatal(err)
			}
			c.lose(t, n, filepath.Join(n.RunDir, "pods", spec.UID+".json"))

			a = startAgent(t, b)
			for _, word := range c.words {
				if out := a.Output(); !strings.Contains(out, word) {
					t.Errorf("the agent says %q, and not %q", out, word)
				}
			}
			// An agent of the same version leaves the program alone that is there.
			if kept := steerProgram(t, b, spec.UID) == old; kept != (name != "the path, and all pins") {
				t.Errorf("the pod has the program of the agent before: %t", kept)
			}
			eachFamily(t, func(t *testing.T, family string) {
				remote := netip.AddrPortFrom(addr(n.Outside, family), 8080)
				_, local := ask(t, pod, bed.DialSpec{Remote: remote})
				proxy.saw(pod, nodeproxy.Outbound, local, remote)
			})
			if len(c.words) == 0 {
				pods, err := a.client.Pods(t.Context())
				if err != nil || len(pods) != 1 {
					t.Fatalf("the agent has %+v, %v", pods, err)
				}
				if got := pods[0].Settings; !got.BypassInbound || got.DNSCapture == nil || !*got.DNSCapture {
					t.Errorf("its settings are %+v", got)
				}
			}
			if name == "to a directory" { // which is not the agent's to remove
				if err := os.Remove(filepath.Join(n.RunDir, "pods", spec.UID+".json")); err != nil {
					t.Fatal(err)
				}
			}
			request.NetNS = pod.Path
			if _, err := a.client.Enroll(t.Context(), request); err != nil {
				t.Fatal(err)
			}
			if err := a.client.Unenroll(t.Context(), spec.UID); err != nil {
				t.Fatal(err)
			}
			n.wantUntouched(pod, before)
		})
	}
}

// A file that an agent was writing when it was killed is removed by the next.
func TestWhatAKilledAgentWasWritingIsRemoved(t *testing.T) {
	n := newBareNode(t)
	dir := filepath.Join(n.RunDir, "pods")
	half := filepath.Join(dir, ".uid-pod.json3427094639987425301")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(half, []byte(`{"uid": "uid-po`), 0o600); err != nil {
		t.Fatal(err)
	}
	startAgent(t, n.Bed)
	if left, err := os.ReadDir(dir); len(left) > 0 || err != nil {
		t.Errorf("%s has %v, %v", dir, left, err)
	}
}

// Of a pod whose name is lost nothing is left either, when its network namespace is gone.
func TestAPodWithoutANameIsForgotten(t *testing.T) {
	n := newBareNode(t)
	pod, stays := n.plainPod("pod"), n.plainPod("stays")
	a := startAgent(t, n.Bed)
	proxy := n.startProxyProcess()
	n.serve(n.Outside, 8080, bed.AppOptions{})
	for _, p := range []*bed.NS{pod, stays} {
		request := api.EnrollRequest{Spec: agent.Spec(p), Wait: true, Timeout: api.Duration(patience)}
		if _, err := a.client.Enroll(t.Context(), request); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(a.Kill(), os.RemoveAll(filepath.Join(n.RunDir, "pods"))); err != nil {
		t.Fatal(err)
	}
	a = startAgent(t, n.Bed)
	status := func() api.Status {
		t.Helper()
		s, err := a.client.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	if s := status(); s.Pods.Unnamed != 2 {
		t.Fatalf("pods are %+v", s.Pods)
	}
	if err := n.RemovePod(pod); err != nil {
		t.Fatal(err)
	}
	const two = 2 * 3 * 3 * time.Second // the looks that it takes
	for start := time.Now(); status().Pods.Unnamed == 2; time.Sleep(50 * time.Millisecond) {
		if time.Since(start) > two+patience {
			t.Fatal("the pod is not forgotten")
		}
	}
	eventually(t, "its pin is gone", func() bool {
		_, err := os.Stat(filepath.Join(n.BPFFS, "pods", "uid-pod"))
		return errors.Is(err, os.ErrNotExist)
	})
	if s := status(); s.Pods.Unnamed != 1 || s.Repairs[enroll.RepairGone] != 1 {
		t.Errorf("pods are %+v, repairs %v", s.Pods, s.Repairs)
	}
	remote := netip.AddrPortFrom(n.Outside.V4, 8080)
	_, local := ask(t, stays, bed.DialSpec{Remote: remote})
	proxy.saw(stays, nodeproxy.Outbound, local, remote)
}
