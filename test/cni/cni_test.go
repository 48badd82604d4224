// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"

	"github.com/redirector-dataplane/redirector/pkg/cni"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// What runtimes do with a pod in its life, in the usual chains.
func TestTheLifeOfAPod(t *testing.T) {
	for _, primary := range []string{"bridge", "ptp"} {
		t.Run(primary, func(t *testing.T) {
			n := newNode(t, primary)
			n.startProxy()
			outside, err := n.Outside.ServeApp(80, bed.AppOptions{})
			if err != nil {
				t.Fatal(err)
			}

			web := n.sandbox("shop", "web")
			web.rt.CapabilityArgs = map[string]any{"portMappings": []map[string]any{{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}}}
			if err := n.del(web); err != nil {
				t.Errorf("DEL without ADD: %v", err)
			}
			n.mustAdd(web)
			if !n.enrolled(web) {
				t.Error("ADD is done, and the pod is not enrolled")
			}
			if !web.V4.IsValid() || !web.V6.IsValid() {
				t.Errorf("the result has the addresses %s and %s", web.V4, web.V6)
			}
			for _, ip := range []netip.Addr{n.Outside.V4, n.Outside.V6} {
				remote := netip.AddrPortFrom(ip, outside.Port)
				local, _, err := firstSYN(t.Context(), web, remote)
				if err != nil {
					t.Fatal(err)
				}
				eventually(t, "the proxy has seen it", func() bool {
					c, ok := n.proxied()[local]
					return ok && c.OriginalDestination == remote && c.Direction == nodeproxy.Outbound && c.Error == ""
				})
			}
			// The port mapping of the plugin before works through the proxy.
			if _, err := web.ServeApp(80, bed.AppOptions{}); err != nil {
				t.Fatal(err)
			}
			c, err := n.Outside.Dial(t.Context(), bed.DialSpec{Remote: netip.AddrPortFrom(n.Node.V4, 8080), Timeout: patience})
			if err != nil {
				t.Errorf("by the host port: %v", err)
			} else {
				if id, err := bed.ReadIdentity(c); err != nil || id.Peer.Addr() != n.Outside.V4 {
					t.Errorf("by the host port: %+v, %v", id, err)
				}
				c.Close()
			}

			// A second ADD is refused by the plugin that makes the interface, and changes nothing.
			if err := n.add(web); err == nil {
				t.Errorf("%s adds a pod twice", primary)
			}
			if !n.enrolled(web) {
				t.Error("after a second ADD the pod is not enrolled")
			}

			// Not in the mesh: the pod starts as it is.
			plain := n.sandbox("plain", "other")
			n.mustAdd(plain)
			if n.enrolled(plain) {
				t.Error("a pod that is not in the mesh is enrolled")
			}
			if _, id, err := firstSYN(t.Context(), plain, netip.AddrPortFrom(n.Outside.V4, outside.Port)); err != nil || id.Peer.Addr() != plain.V4 {
				t.Errorf("a pod that is not in the mesh: %+v, %v", id, err)
			}
			// Not of the other: Debian's portmap looks for rules for IPv4 among those for IPv6.
			if err := n.check(plain); err != nil {
				t.Errorf("CHECK: %v", err)
			}

			for _, p := range []*pod{web, web, plain} {
				if err := n.del(p); err != nil {
					t.Errorf("DEL of %s: %v", p.Name, err)
				}
			}
			// The addresses are free, so DEL has come to the end of the chain.
			if left, err := filepath.Glob(filepath.Join(n.Dir, "ipam", "k8s", "[0-9f]*:*")); err != nil || len(left) > 0 {
				t.Errorf("addresses are still taken: %v, %v", left, err)
			}
		})
	}
}

// The plugin by itself, as the CNI's library calls it: what it is given is what it returns, and a second time is as the first.
func TestThePluginIsIdempotent(t *testing.T) {
	n := newNode(t, "ptp")
	n.startProxy()
	web := n.sandbox("shop", "web")
	n.mustAdd(web)
	cached, err := n.runtime.GetNetworkListCachedResult(n.list(), web.rt)
	if err != nil {
		t.Fatal(err)
	}
	list := n.list()
	own := list.Plugins[len(list.Plugins)-1]
	if own.Network.Type != cni.PluginType {
		t.Fatalf("the last plugin is %s", own.Network.Type)
	}
	conf, err := libcni.InjectConf(own, map[string]any{"name": "k8s", "cniVersion": "1.0.0", "prevResult": cached})
	if err != nil {
		t.Fatal(err)
	}
	if err := n.check(web); err != nil {
		t.Errorf("CHECK of the list: %v", err)
	}
	var want bytes.Buffer
	if err := cached.PrintTo(&want); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		err := n.inNode(func(ctx context.Context) error {
			result, err := n.runtime.AddNetwork(ctx, conf, web.rt)
			if err != nil {
				return err
			}
			var got bytes.Buffer
			err = result.PrintTo(&got)
			if d := cmp.Diff(want.String(), got.String()); d != "" {
				t.Errorf("the result is another (-want +got):\n%s", d)
			}
			return err
		})
		if err != nil {
			t.Errorf("ADD again: %v", err)
		}
		if err := n.inNode(func(ctx context.Context) error { return n.runtime.CheckNetwork(ctx, conf, web.rt) }); err != nil {
			t.Errorf("CHECK: %v", err)
		}
	}
}

// GC and STATUS are of version 1.1.0, which Debian's plugins do not know.
func TestGCAndStatus(t *testing.T) {
	n := newNode(t, "ptp")
	n.stopSocket() // neither needs an agent
	own := n.list().Plugins[3]
	list, err := libcni.NetworkConfFromBytes(fmt.Appendf(nil, `{"cniVersion":"1.1.0","name":"k8s","plugins":[%s]}`, own.Bytes))
	if err != nil {
		t.Fatal(err)
	}
	err = n.inNode(func(ctx context.Context) error {
		return errors.Join(n.runtime.GetStatusNetworkList(ctx, list), n.runtime.GCNetworkList(ctx, list, &libcni.GCArgs{}))
	})
	if err != nil {
		t.Error(err)
	}
	versions, err := n.runtime.GetVersionInfo(t.Context(), cni.PluginType)
	if err != nil || strings.Join(versions.SupportedVersions(), " ") != "0.3.0 0.3.1 0.4.0 1.0.0 1.1.0" {
		t.Errorf("VERSION: %v, %v", versions, err)
	}
}

func TestTheAgentIsAway(t *testing.T) {
	n := newNode(t, "ptp")
	n.startProxy()
	running := n.sandbox("shop", "running")
	n.mustAdd(running)
	if err := (cni.NodeState{EnrolledNamespaces: []string{"shop"}, ExcludedNamespaces: []string{"out"}}).Write(n.RunDir); err != nil {
		t.Fatal(err)
	}
	n.stopSocket()

	web := n.sandbox("shop", "web")
	wantCode(t, n.add(web), 11, "shop/web", "no redirector agent answers", "is in the mesh", "the kubelet tries again")
	if n.enrolled(web) {
		t.Error("the pod is enrolled")
	}
	// As a runtime does after a failure, and when a pod ends.
	for _, p := range []*pod{web, running} {
		if err := n.del(p); err != nil {
			t.Errorf("DEL of %s: %v", p.Name, err)
		}
	}
	for _, p := range [][2]string{{"other", "a"}, {"out", "b"}, {"kube-system", "c"}, {"istio-system", "redirector-node-fghij"}} {
		if err := n.add(n.sandbox(p[0], p[1])); err != nil {
			t.Errorf("ADD of %s/%s: %v", p[0], p[1], err)
		}
	}

	// The kubelet tries again with a new sandbox, and the agent is back while it waits.
	again := n.sandbox("shop", "again")
	done := make(chan error, 1)
	go func() { done <- n.add(again) }()
	log := filepath.Join(n.RunDir, "plugin.log")
	eventually(t, "the plugin waits for the agent", func() bool {
		text, err := os.ReadFile(log)
		return err == nil && strings.Contains(string(text), "pod=again")
	})
	n.serveSocket()
	if err := <-done; err != nil || !n.enrolled(again) {
		t.Errorf("with the agent back: %v", err)
	}
}

func TestTheAgentIsSlow(t *testing.T) {
	n := newNode(t, "ptp")
	n.startProxy()
	n.beSlow(500 * time.Millisecond)
	web := n.sandbox("shop", "web")
	if err := n.add(web); err != nil || !n.enrolled(web) {
		t.Errorf("within the time: %v", err)
	}
	n.beSlow(time.Minute)
	late := n.sandbox("shop", "late")
	wantCode(t, n.add(late), 11, "shop/late", "not captured and served within")
	if n.enrolled(late) {
		t.Error("what nobody waits for any more is done all the same")
	}
	if err := n.del(late); err != nil {
		t.Errorf("DEL: %v", err)
	}
}

// Without a node proxy the pod would be captured, but not served: it does not start.
func TestNoProxyRuns(t *testing.T) {
	n := newNode(t, "ptp")
	wantCode(t, n.add(n.sandbox("shop", "web")), 11, "shop/web", "not captured and served within", "proxy")
}

// Each pod connects as its first act, and the proxy must have been ready for it.
func TestTheFirstSYNIsCaptured(t *testing.T) {
	const pods, atOnce = 200, 4
	n := newNode(t, "ptp")
	n.startProxy()
	outside, err := n.Outside.ServeApp(80, bed.AppOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	clients := map[netip.AddrPort]netip.AddrPort{}
	group, ctx := errgroup.WithContext(t.Context())
	group.SetLimit(atOnce)
	for i := range pods {
		p := n.sandbox("shop", fmt.Sprintf("pod-%d", i))
		group.Go(func() error {
			if err := n.add(p); err != nil {
				return fmt.Errorf("pod %d: %w", i, err)
			}
			remote := netip.AddrPortFrom([]netip.Addr{n.Outside.V4, n.Outside.V6}[i%2], outside.Port)
			local, _, err := firstSYN(ctx, p, remote)
			if err != nil {
				return fmt.Errorf("pod %d: %w", i, err)
			}
			mu.Lock()
			defer mu.Unlock()
			clients[local] = remote
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	captured := 0
	eventually(t, "the proxy has written its log", func() bool {
		captured = 0
		seen := n.proxied()
		for local, remote := range clients {
			if c, ok := seen[local]; ok && c.Direction == nodeproxy.Outbound && c.OriginalDestination == remote {
				captured++
			}
		}
		return captured == pods
	})
	t.Logf("captured: %d of %d", captured, len(clients))
}

// Without the plugin in the chain it is not so: the test above can fail.
func TestWithoutThePluginTheFirstSYNIsNotCaptured(t *testing.T) {
	n := newNode(t, "ptp")
	n.startProxy()
	before := n.conf("ptp")
	if out, err := n.redirector("uninstall"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if now, err := os.ReadFile(filepath.Join(n.netDir, confName)); err != nil || string(now) != before {
		t.Errorf("the configuration is not as it was: %s, %v", now, err)
	}
	if left, err := os.ReadDir(n.binDir); err != nil || len(left) > 0 {
		t.Errorf("it leaves %v, %v", left, err)
	}
	outside, err := n.Outside.ServeApp(80, bed.AppOptions{})
	if err != nil {
		t.Fatal(err)
	}
	p := n.sandbox("shop", "web")
	n.mustAdd(p)
	local, id, err := firstSYN(t.Context(), p, netip.AddrPortFrom(n.Outside.V4, outside.Port))
	if err != nil || id.Peer != local {
		t.Errorf("%+v, %v", id, err)
	}
	if n.enrolled(p) {
		t.Error("the pod is enrolled")
	}
}

// Uninstalling with pods running: they can be deleted, by a runtime that reads the new configuration as by one that has kept theirs.
func TestUninstallingUnderRunningPods(t *testing.T) {
	n := newNode(t, "ptp")
	n.startProxy()
	old := n.list()
	a, b := n.sandbox("shop", "a"), n.sandbox("shop", "b")
	n.mustAdd(a)
	n.mustAdd(b)
	out, err := n.redirector("uninstall")
	if err != nil || !strings.Contains(out, "2 containers") {
		t.Fatalf("%v: %s", err, out)
	}
	n.stopSocket()
	for _, p := range []*pod{a, b} {
		if err := n.inNode(func(ctx context.Context) error { return n.runtime.DelNetworkList(ctx, old, p.rt) }); err != nil {
			t.Errorf("DEL of %s by its cached configuration: %v", p.Name, err)
		}
	}
	if left, err := os.ReadDir(n.binDir); err != nil || len(left) > 0 {
		t.Errorf("it leaves %v, %v", left, err)
	}
	if err := n.add(n.sandbox("shop", "c")); err != nil {
		t.Errorf("ADD by the new configuration: %v", err)
	}
}

// The binary itself, called as no runtime should.
func TestTheBinaryCalledBadly(t *testing.T) {
	n := newNode(t, "ptp")
	installed := filepath.Join(n.binDir, cni.PluginType)
	env := []string{"CNI_COMMAND=ADD", "CNI_CONTAINERID=c", "CNI_IFNAME=eth0", "CNI_NETNS=/run/netns/none", "CNI_PATH=" + n.binDir}
	big := bytes.Repeat([]byte("x"), 1<<20)
	good := []byte(`{"cniVersion":"1.0.0","name":"k8s","type":"redirector","more":"` + string(big) + `"}`)
	for name, c := range map[string]struct {
		args, env []string
		stdin     []byte
		code      uint // 0: no error
	}{
		"1 MB":                 {env: env, stdin: good},
		"1 MB, by name":        {args: []string{"cni"}, env: env, stdin: good},
		"1 MB of garbage":      {env: env, stdin: big, code: 6},
		"garbage":              {env: env, stdin: []byte("{]"), code: 6},
		"nothing":              {env: env, code: 6},
		"no environment":       {args: []string{"cni"}, stdin: good, code: 4},
		"a command only":       {env: env[:1], stdin: good, code: 4},
		"an unknown command":   {env: append([]string{"CNI_COMMAND=HELP"}, env[1:]...), stdin: good, code: 4},
		"DEL, garbage":         {env: append([]string{"CNI_COMMAND=DEL"}, env[1:]...), stdin: []byte("{]")},
		"DEL, no environment":  {env: []string{"CNI_COMMAND=DEL"}},
		"VERSION and no stdin": {env: []string{"CNI_COMMAND=VERSION"}},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			cmd := exec.CommandContext(t.Context(), installed, c.args...)
			cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = c.env, bytes.NewReader(c.stdin), &stdout, &stderr
			if cmd.Env == nil {
				cmd.Env = []string{"PATH=/"}
			}
			err := cmd.Run()
			var answer struct{ Code uint }
			if stdout.Len() > 0 || c.code != 0 {
				if err := json.Unmarshal(stdout.Bytes(), &answer); err != nil {
					t.Errorf("standard output has %q: %v", &stdout, err)
				}
			}
			if exit := cmd.ProcessState.ExitCode(); answer.Code != c.code || (exit != 0) != (c.code != 0) || exit > 1 {
				t.Errorf("exit status %d (%v), code %d, want code %d; standard error: %s", exit, err, answer.Code, c.code, &stderr)
			}
			if stderr.Len() > 0 {
				t.Errorf("standard error has %s", &stderr)
			}
		})
	}
}
