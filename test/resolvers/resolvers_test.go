// SPDX-License-Identifier: Apache-2.0

// Package resolvers tests DNS capture with the resolvers that apps use: those of C libraries and of Go, dig, and Python's
// sockets. Its tests need Debian's packages of them (hack/install-deps.sh test).
package resolvers

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/zds"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// The main thread stays where it is, for /proc/self to mean the host.
func init() { runtime.LockOSThread() }

// roleVariable makes a process of the test binary something else.
const roleVariable = "TEST_RESOLVERS_ROLE"

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleVariable); role {
	case "":
		os.Exit(m.Run())
	case "nodeproxy":
		os.Exit(nodeproxy.Main(os.Args[1:]))
	case "resolver":
		os.Exit(resolve(os.Args[1]))
	default:
		fmt.Fprintf(os.Stderr, "unknown role %q\n", role)
		os.Exit(2)
	}
}

// resolve looks a name up with Go's own resolver, and prints whom it has asked and the addresses.
func resolve(name string) int {
	r := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
		var d net.Dialer
		c, err := d.DialContext(ctx, network, address)
		if err == nil {
			fmt.Println("connected to", c.RemoteAddr())
		}
		return c, err
	}}
	addrs, err := r.LookupHost(context.Background(), name)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println(strings.Join(addrs, "\n"))
	return 0
}

// world is a pod with a node proxy, and two servers outside of it that must not be asked.
type world struct {
	*bed.Bed
	t    *testing.T
	pod  *bed.NS
	self string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	b := bed.ForTest(t, bed.Options{})
	if err := b.JoinCgroup(); err != nil {
		t.Fatal(err)
	}
	a := agent.Start(t, b, nil)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	argv := []string{self, "--zds-socket", b.ZDSSocket, "--log", filepath.Join(b.Dir, "proxy.json")}
	if _, err := b.Start(b.Node, true, "proxy", argv, []string{roleVariable + "=nodeproxy"}); err != nil {
		t.Fatal(err)
	}
	ready := func() bool {
		for _, c := range a.Proxies.Status() {
			if c.State == zds.StateReady {
				return true
			}
		}
		return false
	}
	for deadline := time.Now().Add(10 * time.Second); !ready(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the node proxy does not get ready")
		}
	}
	pod, err := b.Pod("pod", bed.PodOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	spec := agent.Spec(pod)
	on := true
	spec.Settings.DNSCapture = &on
	if err := a.Enroll(ctx, spec, true); err != nil {
		t.Fatal(err)
	}
	return &world{Bed: b, t: t, pod: pod, self: self}
}

// run runs a program in the pod with a resolv.conf that names the servers, and returns what it prints.
func (w *world) run(t *testing.T, servers []netip.Addr, env []string, argv ...string) string {
	t.Helper()
	var conf strings.Builder
	for _, s := range servers {
		fmt.Fprintf(&conf, "nameserver %s\n", s)
	}
	conf.WriteString("options timeout:5 attempts:2\n")
	file := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(file, []byte(conf.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	const script = `mount --bind "$0" "$(realpath /etc/resolv.conf)" && exec "$@"`
	argv = append([]string{"unshare", "--mount", "sh", "-c", script, file}, argv...)
	p, err := w.Start(w.pod, true, filepath.Base(t.Name()), argv, env)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := p.Wait(ctx); err != nil {
		t.Errorf("%s: %v: %s", argv[6], err, p.Output())
	}
	return p.Output()
}

// says fails the test unless each of these is in the output.
func says(t *testing.T, output string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(output, part) {
			t.Errorf("no %q in\n%s", part, output)
		}
	}
}

func TestResolvers(t *testing.T) {
	w := newWorld(t)
	lookup := filepath.Join(t.TempDir(), "lookup")
	if out, err := exec.Command("musl-gcc", "-static", "-O2", "-o", lookup, "testdata/lookup.c").CombinedOutput(); err != nil {
		t.Fatalf("musl-gcc (of Debian's musl-tools): %v: %s", err, out)
	}
	ask, err := filepath.Abs("testdata/ask.py")
	if err != nil {
		t.Fatal(err)
	}
	// Nobody is at these addresses: whoever gets an answer gets it from the proxy.
	v4, otherV4 := netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("198.51.100.2")
	v6 := netip.MustParseAddr("2001:db8::1")
	a, aaaa := nodeproxy.DNSAnswerV4.String(), nodeproxy.DNSAnswerV6.String()
	const name = "name.test"

	for _, servers := range [][]netip.Addr{{v4}, {v6}, {v4, otherV4}, {v4, v6}, {v6, v4}} {
		t.Run(fmt.Sprint(servers), func(t *testing.T) {
			t.Run("glibc", func(t *testing.T) {
				says(t, w.run(t, servers, nil, "getent", "ahostsv4", name), a)
				says(t, w.run(t, servers, nil, "getent", "ahostsv6", name), aaaa)
				says(t, w.run(t, servers, nil, "getent", "ahosts", name), a, aaaa)
			})
			t.Run("musl", func(t *testing.T) {
				says(t, w.run(t, servers, nil, lookup, name), a, aaaa)
			})
			t.Run("Go", func(t *testing.T) {
				says(t, w.run(t, servers, []string{roleVariable + "=resolver"}, w.self, name), a, aaaa,
					"connected to "+netip.AddrPortFrom(servers[0], 53).String())
			})
		})
	}
	for _, server := range []netip.Addr{v4, v6} {
		t.Run(server.String(), func(t *testing.T) {
			t.Run("dig", func(t *testing.T) {
				says(t, w.run(t, nil, nil, "dig", "@"+server.String(), name, "A"), a, "SERVER: "+server.String()+"#53", "(UDP)")
			})
			t.Run("dig from an address", func(t *testing.T) {
				own := w.pod.V4
				if server.Is6() {
					own = w.pod.V6
				}
				says(t, w.run(t, nil, nil, "dig", "-b", own.String(), "@"+server.String(), name, "AAAA"), aaaa,
					"SERVER: "+server.String()+"#53", "(UDP)")
			})
			t.Run("dig by TCP", func(t *testing.T) {
				says(t, w.run(t, nil, nil, "dig", "+tcp", "@"+server.String(), name, "AAAA"), aaaa,
					"SERVER: "+server.String()+"#53", "(TCP)")
			})
			t.Run("Python", func(t *testing.T) {
				says(t, w.run(t, nil, nil, "/usr/bin/python3", ask, server.String()), "answer "+a,
					fmt.Sprintf("connected to %s 53", server), fmt.Sprintf("heard %s 53", server))
			})
		})
	}
}
