// SPDX-License-Identifier: Apache-2.0

// Package kube runs a real Kubernetes control plane for tests: etcd and kube-apiserver, with RBAC and an audit log, on the loopback
// of a bed's node. There is no scheduler, no kubelet and no controller manager: a test creates pods that are bound to the node, and
// does itself what those would do, with real network namespaces and real processes in cgroups laid out as the kubelet does.
//
// The agent under test runs on the bed's node too. It has the rights that the DaemonSet gives it and no others, and reaches the API
// server through a proxy that makes faults. What it asked for is read from the server's audit log.
package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// NodeName is the name of the node that the bed is: a value for NODE_NAME.
const NodeName = "bed"

// patience is how long the control plane may take for anything, on a busy machine with two cores.
const patience = 90 * time.Second

var (
	etcdClient = netip.MustParseAddrPort("127.0.0.1:2379")
	etcdPeer   = netip.MustParseAddrPort("127.0.0.1:2380")
	apiServer  = netip.MustParseAddrPort("127.0.0.1:6443")
)

// faultPort is where the fault proxy listens, beside the API server.
const faultPort = 7443

// Cluster is a control plane on a bed's node.
type Cluster struct {
	// Bed is the node.
	Bed *bed.Bed
	// Admin may do everything, and reaches the API server without the fault proxy. It has no limit on its rate.
	Admin *kubernetes.Clientset
	// Faults is between the agent and the API server.
	Faults *FaultProxy
	// Kubeconfig is a file with which a process on the node reaches the API server through Faults, as the agent.
	Kubeconfig string

	tb     testing.TB
	binary string
	dir    string
	pki    *pki
	procs  *procs
	pods   *atomic.Int64 // how many were started
}

// procs are the processes of a control plane.
type procs struct{ etcd, apiServer *bed.Proc }

// Start runs a control plane on the bed's node until the end of the test, and returns when it is ready: that takes some five
// seconds. The first call on a machine builds it, see Binary.
func Start(tb testing.TB, b *bed.Bed) *Cluster {
	tb.Helper()
	binary, err := Binary(tb.Context(), os.Stderr)
	if err != nil {
		tb.Fatal(err)
	}
	c := &Cluster{Bed: b, tb: tb, binary: binary, dir: tb.TempDir(), procs: &procs{}, pods: &atomic.Int64{}}
	// Before the folder goes, and long before the bed does.
	tb.Cleanup(func() {
		for _, p := range []*bed.Proc{c.procs.apiServer, c.procs.etcd} {
			if p == nil {
				continue
			}
			if err := p.Kill(); err != nil {
				tb.Error(err)
			}
		}
	})
	if err := c.configure(); err != nil {
		tb.Fatal(err)
	}
	c.Admin, err = kubernetes.NewForConfig(c.adminConfig())
	if err != nil {
		tb.Fatal(err)
	}
	c.startEtcd()
	c.StartAPIServer()
	c.Faults = newFaultProxy(tb, b.Node, faultPort, apiServer)
	c.makeAgentAccount()
	return c
}

func (c *Cluster) path(name string) string { return c.dir + "/" + name }

func (c *Cluster) configure() error {
	var err error
	if c.pki, err = newPKI(c.dir); err != nil {
		return err
	}
	if err := c.pki.leaf("apiserver", "kube-apiserver", nil, net.IP(apiServer.Addr().AsSlice())); err != nil {
		return err
	}
	if err := c.pki.leaf("admin", "admin", []string{"system:masters"}); err != nil {
		return err
	}
	return os.WriteFile(c.path("audit.yaml"), []byte(auditPolicy), 0o600)
}

// adminConfig has no limit on the rate of requests, for tests that make many objects.
func (c *Cluster) adminConfig() *rest.Config {
	return &rest.Config{
		Host: "https://" + apiServer.String(),
		QPS:  -1,
		Dial: c.dial,
		TLSClientConfig: rest.TLSClientConfig{
			CAFile:   c.pki.path("ca.crt"),
			CertFile: c.pki.path("admin.crt"),
			KeyFile:  c.pki.path("admin.key"),
		},
		ContentConfig: rest.ContentConfig{
			ContentType:        "application/vnd.kubernetes.protobuf",
			AcceptContentTypes: "application/vnd.kubernetes.protobuf,application/json",
		},
	}
}

// dial connects from the node.
func (c *Cluster) dial(ctx context.Context, _, address string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, err
	}
	return c.Bed.Node.Dial(ctx, bed.DialSpec{Remote: to})
}

func (c *Cluster) start(name string, flags ...string) *bed.Proc {
	c.tb.Helper()
	p, err := c.Bed.Start(c.Bed.Node, false, name, append([]string{c.binary, name}, flags...), nil)
	if err != nil {
		c.tb.Fatal(err)
	}
	return p
}

func (c *Cluster) startEtcd() {
	c.tb.Helper()
	client, peer := "http://"+etcdClient.String(), "http://"+etcdPeer.String()
	c.procs.etcd = c.start("etcd",
		"--name=bed",
		"--data-dir="+c.path("etcd"),
		"--listen-client-urls="+client, "--advertise-client-urls="+client,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=bed="+peer,
		"--unsafe-no-fsync", // nothing outlives the test
		"--log-level=warn",
	)
}

// StartAPIServer starts the API server, after StopAPIServer, and waits until it is ready.
func (c *Cluster) StartAPIServer() {
	c.tb.Helper()
	c.procs.apiServer = c.start("kube-apiserver",
		"--etcd-servers=http://"+etcdClient.String(),
		"--bind-address="+apiServer.Addr().String(), "--secure-port="+strconv.Itoa(int(apiServer.Port())),
		"--advertise-address="+c.Bed.Node.V4.String(), // may not be a loopback address
		"--service-cluster-ip-range=10.96.0.0/16",
		"--tls-cert-file="+c.pki.path("apiserver.crt"), "--tls-private-key-file="+c.pki.path("apiserver.key"),
		"--client-ca-file="+c.pki.path("ca.crt"),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+c.pki.path("sa.pub"), "--service-account-signing-key-file="+c.pki.path("sa.key"),
		"--authorization-mode=RBAC",
		// It waits for accounts and objects that the controller manager makes.
		"--disable-admission-plugins=ServiceAccount",
		"--endpoint-reconciler-type=none",
		"--cert-dir="+c.path("generated"),
		"--audit-policy-file="+c.path("audit.yaml"), "--audit-log-path="+c.auditLog(), "--audit-log-maxsize=0",
	)
	c.eventually("the API server is ready", func() error {
		select {
		case <-c.procs.apiServer.Done():
			c.tb.Fatalf("kube-apiserver has ended; it wrote:\n%s", c.procs.apiServer.Output())
		default:
		}
		return c.Admin.RESTClient().Get().AbsPath("/readyz").Do(c.tb.Context()).Error()
	})
}

// StopAPIServer kills the API server: it says good-bye to nobody.
func (c *Cluster) StopAPIServer() {
	c.tb.Helper()
	if err := c.procs.apiServer.Kill(); err != nil {
		c.tb.Fatal(err)
	}
}

// eventually waits until fn returns nil.
func (c *Cluster) eventually(what string, fn func() error) {
	c.tb.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := fn()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			c.tb.Fatalf("not so after %s: %s: %v", patience, what, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// Compact has etcd forget all revisions but the newest. With the API server started anew after it, a watch that wants to go on
// from an older one is told 410 Gone.
func (c *Cluster) Compact() {
	c.tb.Helper()
	var head struct {
		Header struct {
			Revision string `json:"revision"`
		} `json:"header"`
	}
	c.callEtcd("/v3/kv/range", map[string]any{"key": "AA=="}, &head) // of any key, for the header
	c.callEtcd("/v3/kv/compaction", map[string]any{"revision": head.Header.Revision, "physical": true}, &head)
}

// callEtcd calls a method by the JSON that etcd has beside gRPC.
func (c *Cluster) callEtcd(path string, request, answer any) {
	c.tb.Helper()
	body, err := json.Marshal(request)
	if err != nil {
		c.tb.Fatal(err)
	}
	req, err := http.NewRequestWithContext(c.tb.Context(), http.MethodPost, "http://"+etcdClient.String()+path, bytes.NewReader(body))
	if err != nil {
		c.tb.Fatal(err)
	}
	client := http.Client{Transport: &http.Transport{DialContext: c.dial, DisableKeepAlives: true}, Timeout: patience}
	resp, err := client.Do(req)
	if err != nil {
		c.tb.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		c.tb.Fatalf("etcd answers %s with %s: %s %v", path, resp.Status, text, err)
	}
	if err := json.Unmarshal(text, answer); err != nil {
		c.tb.Fatalf("etcd answers %s with %s: %v", path, text, err)
	}
}

// writeKubeconfig writes Kubeconfig: the token is in a file of its own, as in a pod.
func (c *Cluster) writeKubeconfig(token string) error {
	if err := os.WriteFile(c.path("token"), []byte(token), 0o600); err != nil {
		return err
	}
	c.Kubeconfig = c.path("agent.kubeconfig")
	err := clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{NodeName: {
			Server:               "https://" + c.Faults.Addr.String(),
			CertificateAuthority: c.pki.path("ca.crt"),
		}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{AgentAccount: {TokenFile: c.path("token")}},
		Contexts:       map[string]*clientcmdapi.Context{NodeName: {Cluster: NodeName, AuthInfo: AgentAccount}},
		CurrentContext: NodeName,
	}, c.Kubeconfig)
	if err != nil {
		return fmt.Errorf("write the agent's kubeconfig: %w", err)
	}
	return nil
}

var (
	create = metav1.CreateOptions{}
	get    = metav1.GetOptions{}
	update = metav1.UpdateOptions{}
)

// For returns the same cluster with failures reported to tb, a subtest of the test that it was started for.
func (c *Cluster) For(tb testing.TB) *Cluster {
	inner := *c
	inner.tb = tb
	return &inner
}
