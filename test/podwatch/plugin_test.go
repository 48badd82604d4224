// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"github.com/redirector-dataplane/redirector/pkg/cni"
	"github.com/redirector-dataplane/redirector/test/kube"
)

// plugin is the CNI plugin as a runtime calls it: this binary, by the CNI's library, behind a plugin that has made the interface.
type plugin struct {
	n       *node
	library *libcni.CNIConfig
	conf    string
}

// newPlugin returns one that waits for an agent for that long.
func (n *node) newPlugin(timeout time.Duration) *plugin {
	n.t.Helper()
	self, err := os.Executable()
	if err != nil {
		n.t.Fatal(err)
	}
	bin := n.t.TempDir()
	if err := os.Symlink(self, filepath.Join(bin, cni.PluginType)); err != nil {
		n.t.Fatal(err)
	}
	n.t.Setenv(roleVar, "redirector")
	return &plugin{
		n:       n,
		library: libcni.NewCNIConfigWithCacheDir([]string{bin}, n.t.TempDir(), nil),
		conf: fmt.Sprintf(`{"cniVersion":"1.0.0","name":"k8s","type":%q,"runDir":%q,"timeout":%q,"excludeNamespaces":["kube-system"],`+
			`"agentNamespace":%q,"agentPodPrefix":"redirector-node-"}`, cni.PluginType, n.b.RunDir, timeout, kube.AgentNamespace),
	}
}

// add is ADD for a pod whose namespace is there.
func (p *plugin) add(ctx context.Context, pod *kube.Pod) error {
	previous := &types100.Result{CNIVersion: "1.0.0"}
	for _, ip := range pod.IPs() {
		previous.IPs = append(previous.IPs, &types100.IPConfig{
			Address: net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(ip.BitLen(), ip.BitLen())},
		})
	}
	conf, err := libcni.NetworkPluginConfFromBytes([]byte(p.conf))
	if err != nil {
		return err
	}
	if conf, err = libcni.InjectConf(conf, map[string]any{"prevResult": previous}); err != nil {
		return err
	}
	return p.n.b.Node.Do(func() error {
		_, err := p.library.AddNetwork(ctx, conf, &libcni.RuntimeConf{
			ContainerID: "container-" + pod.Object.Name,
			NetNS:       pod.NS.Path,
			IfName:      "eth0",
			Args: [][2]string{
				{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", pod.Object.Namespace}, {"K8S_POD_NAME", pod.Object.Name},
				{"K8S_POD_UID", pod.RuntimeUID()},
			},
		})
		return err
	})
}

// TestTheFirstSYNIsCaptured has each pod connect at once when ADD has returned.
func TestTheFirstSYNIsCaptured(t *testing.T) {
	const pods, atOnce = 200, 4
	n := newNode(t)
	plugin := n.newPlugin(patience)
	n.startAgent()
	n.wantReady()
	var mu sync.Mutex
	sources := map[netip.AddrPort]*kube.Pod{}
	group, ctx := errgroup.WithContext(t.Context())
	group.SetLimit(atOnce)
	for i := range pods {
		to := netip.AddrPortFrom([]netip.Addr{n.b.Outside.V4, n.b.Outside.V6}[i%2], n.app.Port)
		p := n.CreatePod(kube.PodOptions{Namespace: "mesh", Name: n.name("pod")})
		p.Start()
		group.Go(func() error {
			if err := plugin.add(ctx, p); err != nil {
				return err
			}
			source := n.connect(p, to)
			mu.Lock()
			defer mu.Unlock()
			sources[source] = p
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	captured := 0
	for source, p := range sources {
		if n.proxied(p, source) {
			captured++
		}
	}
	t.Logf("captured: %d of %d", captured, pods)
	if captured != pods {
		t.Errorf("the proxy has seen the first connection of %d pods, want all %d", captured, pods)
	}
}

// TestPodsThatStartWhileTheAgentIsAway has the agent's own word on which pods may start without it, and sees them taken in later.
func TestPodsThatStartWhileTheAgentIsAway(t *testing.T) {
	n := newNode(t)
	n.CreateNamespace("shop", nil)
	n.startAgent()
	n.wantReady()
	n.settle() // and so the plugin's file is there
	n.stopAgent()
	plugin := n.newPlugin(2 * time.Second)

	inMesh := n.CreatePod(kube.PodOptions{Namespace: "mesh", Name: "cart"})
	inMesh.Start()
	err := plugin.add(t.Context(), inMesh)
	if e, ok := errors.AsType[*types.Error](err); !ok || e.Code != types.ErrTryAgainLater || !strings.Contains(err.Error(), "is in the mesh") {
		t.Errorf("a pod of a namespace in the mesh: %v", err)
	}
	at := time.Now()
	for _, o := range []kube.PodOptions{
		{Namespace: "kube-system", Name: "dns"},
		{Namespace: kube.AgentNamespace, Name: "redirector-node-xyz", DaemonSet: kube.AgentAccount},
	} {
		p := n.CreatePod(o)
		p.Start()
		if err := plugin.add(t.Context(), p); err != nil {
			t.Errorf("pod %s/%s: %v", o.Namespace, o.Name, err)
		}
		p.SetStatus(corev1.PodRunning, p.IPs()...)
	}
	t.Logf("two pods that need no agent start within %s", time.Since(at))
	asks := n.CreatePod(kube.PodOptions{Namespace: "shop", Name: "asks", Labels: map[string]string{mode: "ambient"}})
	asks.Start()
	if err := plugin.add(t.Context(), asks); err != nil {
		t.Errorf("a pod of another namespace: %v", err)
	}
	asks.SetStatus(corev1.PodRunning, asks.IPs()...)
	n.wantConnection(asks, false)
	if err := n.only(); err != nil {
		t.Errorf("without an agent: %v", err)
	}

	n.startAgent()
	n.wantIn(asks)
	n.wantEvent(asks, "CapturedLate", "before it was captured")
	n.wantConnection(asks, true)
	// The kubelet tries again.
	if err := plugin.add(t.Context(), inMesh); err != nil {
		t.Errorf("with the agent back: %v", err)
	}
	// Of a static pod the runtime knows another UID than the API server.
	static := n.CreatePod(kube.PodOptions{Namespace: "mesh", Name: "static-bed", Static: true})
	static.Start()
	if err := plugin.add(t.Context(), static); err != nil {
		t.Errorf("a static pod: %v", err)
	}
	if err := n.only(asks, inMesh, static); err != nil {
		t.Error(err)
	}
	inMesh.SetStatus(corev1.PodRunning, inMesh.IPs()...)
	n.wantIn(inMesh)
	n.wantConnection(inMesh, true)
	if events := n.events(inMesh); len(events) > 0 {
		t.Errorf("of a pod that was captured before it started it is said: %s", texts(events))
	}
}
