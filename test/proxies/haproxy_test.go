// SPDX-License-Identifier: Apache-2.0

// Package proxies tests that node proxies other than ztunnel work in a pod as they are. Its tests need Debian's packages of
// them (hack/install-deps.sh test).
package proxies

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redirector-dataplane/redirector/cmd/redirector/app"
	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/zds"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// The main thread stays where it is, for /proc/self to mean the host.
func init() { runtime.LockOSThread() }

// roleVariable makes a process of the test binary something else.
const roleVariable = "TEST_PROXIES_ROLE"

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleVariable); role {
	case "":
		os.Exit(m.Run())
	case "agent":
		os.Exit(app.Main(context.Background(), os.Args[1:], app.Env{
			Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv, Version: "test",
		}))
	case "nodeproxy":
		os.Exit(nodeproxy.Main(os.Args[1:]))
	default:
		fmt.Fprintf(os.Stderr, "unknown role %q\n", role)
		os.Exit(2)
	}
}

// world is a node with an agent, whose node proxy is known and listens nowhere.
type world struct {
	*bed.Bed
	t      *testing.T
	client *api.Client
}

func newWorld(t *testing.T, agentFlags ...string) *world {
	t.Helper()
	w := &world{Bed: bed.ForTest(t, bed.Options{}), t: t}
	if err := w.JoinCgroup(); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	argv := append([]string{
		self, "agent", "--standalone", "--run-dir", w.RunDir, "--bpffs", w.BPFFS, "--cgroup", w.Cgroup, "--zds-socket", w.ZDSSocket,
	}, agentFlags...)
	a := w.start(w.Node, "agent", argv, roleVariable+"=agent")
	w.client = api.NewClient(filepath.Join(w.RunDir, "agent.sock"))
	w.eventually("the agent answers", a, func() bool {
		_, err := w.client.Status(t.Context())
		return err == nil
	})
	sidecar := w.start(w.Node, "proxy", []string{self, "--zds-socket", w.ZDSSocket, "--mute", "listen"}, roleVariable+"=nodeproxy")
	w.eventually("the proxy's sidecar is ready", sidecar, func() bool {
		status, err := w.client.Status(t.Context())
		return err == nil && slices.ContainsFunc(status.Proxies, func(c zds.ConnStatus) bool { return c.State == zds.StateReady })
	})
	return w
}

// start starts a program in the cgroup of that name.
func (w *world) start(ns *bed.NS, group string, argv []string, env ...string) *bed.Proc {
	w.t.Helper()
	dir, err := w.Group(group)
	if err != nil {
		w.t.Fatal(err)
	}
	p, err := w.StartIn(ns, dir, filepath.Base(argv[0]), argv, env)
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

// eventually waits for something that a process is to bring about.
func (w *world) eventually(what string, p *bed.Proc, so func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !so(); time.Sleep(5 * time.Millisecond) {
		select {
		case <-p.Done():
			w.t.Fatalf("%s has ended: %s", p.Name, p.Output())
		default:
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("it is not so that %s; %s says: %s", what, p.Name, p.Output())
		}
	}
}

const haproxyConfig = `
global
    log stdout format raw local0
defaults
    mode tcp
    timeout connect 10s
    timeout client 10s
    timeout server 10s
frontend outbound
    bind 0.0.0.0:15001 transparent
    bind :::15001 v6only transparent
    log global
    log-format "from %ci:%cp for %[fc_dst]:%[fc_dst_port] by %bi:%bp to %si:%sp"
    default_backend original
backend original
    server original *
`

// HAProxy sets no mark, and takes the original destination from the socket. It serves a pod's connections as it is.
func TestHAProxy(t *testing.T) {
	for _, answers := range []string{"auto", "on", "off"} {
		t.Run("--original-dst="+answers, func(t *testing.T) {
			w := newWorld(t, "--proxy-identity=cgroup-alone", "--original-dst="+answers)
			pod, err := w.Pod("pod", bed.PodOptions{})
			if err != nil {
				t.Fatal(err)
			}
			request := api.EnrollRequest{Spec: agent.Spec(pod), Wait: true, Timeout: api.Duration(20 * time.Second)}
			if _, err := w.client.Enroll(t.Context(), request); err != nil {
				t.Fatal(err)
			}
			const port = 8080
			server, err := w.Outside.ServeApp(port, bed.AppOptions{})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = server.Close() })
			file := filepath.Join(t.TempDir(), "haproxy.cfg")
			if err := os.WriteFile(file, []byte(haproxyConfig), 0o600); err != nil {
				t.Fatal(err)
			}
			haproxy := w.start(pod, "proxy", []string{"haproxy", "-db", "-f", file})
			w.eventually("HAProxy listens for both families", haproxy, func() bool {
				p, err := w.client.Pod(t.Context(), request.Spec.UID)
				return err == nil && p.Counters.ListenersAdded == 2
			})

			for _, remote := range []netip.Addr{w.Outside.V4, w.Outside.V6} {
				dst := netip.AddrPortFrom(remote, port)
				c, err := pod.Dial(t.Context(), bed.DialSpec{Remote: dst})
				if err != nil {
					t.Fatal(err)
				}
				src, err := bed.Sockname(c)
				if err != nil {
					t.Fatal(err)
				}
				if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
					t.Fatal(err)
				}
				seen, err := bed.ReadIdentity(c)
				if err != nil {
					t.Fatalf("no answer from %s: %v; HAProxy says: %s", dst, err, haproxy.Output())
				}
				_ = c.Close()
				// From the pod, by HAProxy's own connection.
				if seen.Peer.Addr() != src.Addr() || seen.Peer == src {
					t.Errorf("the server sees a connection from %s, want one of the pod's other than the app's %s", seen.Peer, src)
				}
				line := fmt.Sprintf("from %s:%d for %s:%d by %s:%d to %s:%d", src.Addr(), src.Port(), remote, port,
					seen.Peer.Addr(), seen.Peer.Port(), remote, port)
				w.eventually("HAProxy logs "+line, haproxy, func() bool {
					return slices.Contains(strings.Split(haproxy.Output(), "\n"), line)
				})
			}
			p, err := w.client.Pod(t.Context(), request.Spec.UID)
			if err != nil {
				t.Fatal(err)
			}
			if c := p.Counters; c.OutboundCaptured != 2 || c.ProxyOutbound != 2 {
				t.Errorf("counters are %+v, want 2 connections captured and 2 of the proxy's", c)
			}
		})
	}
}
