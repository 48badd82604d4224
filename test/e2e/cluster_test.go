// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/redirector-dataplane/redirector/pkg/flock"
	"github.com/redirector-dataplane/redirector/test/kube"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

const (
	// stateDir is where a cluster has its state; there is one at a time. Nodes have a /run, /var, /etc and /opt of their own.
	stateDir = "/tmp/redirector-e2e"
	// patience is how long anything in the cluster may take, on a busy machine with two cores.
	patience = 2 * time.Minute
	outside  = "172.18.0.1"
)

// built is what all clusters have in common.
var built struct {
	kube, app, helm, plugin string
	// images are archives that each node loads.
	images []string
}

func TestMain(m *testing.M) {
	os.Exit(func() int {
		if os.Geteuid() != 0 {
			fmt.Fprintln(os.Stderr, "the end-to-end tests need root: run make e2e as root")
			return 1
		}
		dir, err := os.MkdirTemp("", "redirector-e2e")
		if err == nil {
			defer os.RemoveAll(dir)
			err = build(context.Background(), dir)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}())
}

// build makes the images, and Kubernetes if it is not in the cache.
func build(ctx context.Context, dir string) (err error) {
	if built.kube, err = kube.Binary(ctx, os.Stderr); err != nil {
		return err
	}
	built.helm = filepath.Join(dir, "helm")
	helm := exec.CommandContext(ctx, "go", "build", "-o", built.helm, "helm.sh/helm/v4/cmd/helm")
	helm.Dir = "../chart"
	helm.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := helm.CombinedOutput(); err != nil {
		return fmt.Errorf("build Helm: %w\n%s", err, out)
	}
	built.plugin = filepath.Join(dir, "kubectl-redirector")
	plugin := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", built.plugin, "../../cmd/kubectl-redirector")
	plugin.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := plugin.CombinedOutput(); err != nil {
		return fmt.Errorf("build the kubectl plugin: %w\n%s", err, out)
	}
	for _, program := range []struct {
		base, module, flags, image string
	}{
		{"redirector", "../../cmd/redirector", "-X main.version=0.1.0", "redirector:0.1.0"},
		{"redirector", "../../cmd/redirector", "-X main.version=0.1.1", "redirector:0.1.1"},
		{"nodeproxy", "../nodeproxy/cmd/nodeproxy", "", "localhost/nodeproxy:1"},
		{"app", "app", "", "localhost/app:1"},
	} {
		to := filepath.Join(dir, strings.NewReplacer("/", "-", ":", "-").Replace(program.image))
		file := filepath.Join(to, program.base)
		cmd := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-trimpath", "-ldflags", "-s -w "+program.flags, "-o", file, ".")
		cmd.Dir = program.module
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w\n%s", program.image, err, out)
		}
		image := exec.CommandContext(ctx, "go", "run", ".", "-name", program.base, "-tag", program.image, "-version", "0", "-o", to,
			runtime.GOARCH+"="+file)
		image.Dir = "../../deploy/image"
		if out, err := image.CombinedOutput(); err != nil {
			return fmt.Errorf("make the image %s: %w\n%s", program.image, err, out)
		}
		if program.base == "app" {
			built.app = file
		}
		built.images = append(built.images, fmt.Sprintf("%s-%s.tar", file, runtime.GOARCH))
	}
	return nil
}

// cluster is a running cluster.
type cluster struct {
	t     *testing.T
	nodes []string
	cni   string
}

// start brings a cluster up for the time of the test.
func start(t *testing.T, cni string, nodes ...string) *cluster {
	t.Helper()
	c := &cluster{t: t, cni: cni, nodes: nodes}
	lock, err := os.OpenFile(stateDir+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := flock.Try(lock); err != nil {
		t.Fatalf("another cluster is up: %v", err)
	}
	c.clear() // what an interrupted run has left
	t.Cleanup(func() {
		c.t = t
		if t.Failed() {
			c.keepLogs()
		}
		c.clear()
		if err := errors.Join(os.Remove(lock.Name()), lock.Close()); err != nil {
			t.Error(err)
		}
	})
	if err := os.Mkdir(stateDir, 0o700); err != nil {
		t.Fatal(err)
	}
	// In memory: what is below is the upper part of overlays, which not every file system can be.
	if err := unix.Mount("tmpfs", stateDir, "tmpfs", 0, "mode=0755"); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(stateDir+"/images", 0o755); err != nil {
		t.Fatal(err)
	}
	for i, image := range built.images {
		text, err := os.ReadFile(image)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(fmt.Sprintf("%s/images/%d.tar", stateDir, i), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	begin := time.Now()
	c.up()
	t.Logf("%s with %s are ready after %s", strings.Join(nodes, " and "), cni, time.Since(begin).Round(100*time.Millisecond))
	return c
}

// with is the same cluster for a subtest.
func (c *cluster) with(t *testing.T) *cluster {
	d := *c
	d.t = t
	return &d
}

func (c *cluster) env() []string {
	return append(os.Environ(), "STATE="+stateDir, "KUBE="+built.kube, "CNI="+c.cni, "NODES="+strings.Join(c.nodes, " "))
}

// up starts nodes, all by default.
func (c *cluster) up(nodes ...string) {
	c.t.Helper()
	cmd := exec.CommandContext(c.t.Context(), "cluster/up.sh", nodes...)
	cmd.Env = c.env()
	// The nodes hold its output open for as long as they live.
	log, err := os.CreateTemp(c.t.TempDir(), "up")
	if err != nil {
		c.t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Run(); err != nil {
		text, _ := os.ReadFile(log.Name())
		c.t.Fatalf("start %v: %v\n%s", nodes, err, text)
	}
}

// down stops nodes, all by default, at once. Their disks stay.
func (c *cluster) down(nodes ...string) {
	c.t.Helper()
	cmd := exec.Command("cluster/down.sh", nodes...)
	cmd.Env = c.env()
	if out, err := cmd.CombinedOutput(); err != nil {
		c.t.Errorf("stop %v: %v\n%s", nodes, err, out)
	}
}

// clear removes the cluster and all that it had.
func (c *cluster) clear() {
	c.t.Helper()
	if _, err := os.Stat(stateDir); err != nil {
		return
	}
	c.down()
	if err := unix.Unmount(stateDir, 0); err != nil && !errors.Is(err, unix.EINVAL) {
		c.t.Errorf("unmount %s: %v", stateDir, err)
		return
	}
	if err := os.RemoveAll(stateDir); err != nil {
		c.t.Error(err)
	}
}

// keepLogs shows what may say why a test has failed.
func (c *cluster) keepLogs() {
	for _, args := range [][]string{
		{"kubectl", "get", "pods", "-A", "-o", "wide"},
		{"kubectl", "get", "events", "-A", "--sort-by=.lastTimestamp"},
		{"kubectl", "-n", "istio-system", "logs", "-l", "app.kubernetes.io/name=redirector", "--tail=100", "--prefix"},
		{"kubectl", "-n", "istio-system", "logs", "-l", "app=ztunnel", "--tail=40", "--prefix"},
	} {
		out, err := c.in("node1", args...)
		c.t.Logf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	if to := os.Getenv("REDIRECTOR_E2E_LOGS"); to != "" {
		for _, node := range c.nodes {
			if err := os.CopyFS(filepath.Join(to, node), os.DirFS(filepath.Join(stateDir, node, "log"))); err != nil {
				c.t.Log(err)
			}
		}
	}
}

// in runs a command on a node, and returns what it writes.
func (c *cluster) in(node string, args ...string) (string, error) {
	return c.pipe(node, "", args...)
}

func (c *cluster) pipe(node, input string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "cluster/in.sh", args...)
	cmd.Env = append(c.env(), "NODE="+node)
	cmd.Stdin = strings.NewReader(input)
	cmd.WaitDelay = time.Second
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("on %s: %s: %w: %s", node, strings.Join(args, " "), err, errs.String())
	}
	return out.String(), nil
}

// must runs a command on a node that has to succeed.
func (c *cluster) must(node string, args ...string) string {
	c.t.Helper()
	out, err := c.in(node, args...)
	if err != nil {
		c.t.Fatal(err)
	}
	return out
}

// kubectl is run with success.
func (c *cluster) kubectl(args ...string) string {
	c.t.Helper()
	return c.must("node1", append([]string{"kubectl"}, args...)...)
}

// helm is run with success, as the cluster's administrator.
func (c *cluster) helm(args ...string) string {
	c.t.Helper()
	return c.must("node1", append([]string{
		"env", "HOME=/run/helm", "KUBECONFIG=" + stateDir + "/pki/admin.kubeconfig", built.helm,
	}, args...)...)
}

// apply makes what a manifest says.
func (c *cluster) apply(manifest string) {
	c.t.Helper()
	if _, err := c.pipe("node1", manifest, "kubectl", "apply", "-f", "-"); err != nil {
		c.t.Fatal(err)
	}
}

// rollout waits until a workload is as it should be.
func (c *cluster) rollout(namespace, what string) {
	c.t.Helper()
	c.kubectl("-n", namespace, "rollout", "status", what, "--timeout=100s")
}

// eventually waits until fn has no error.
func (c *cluster) eventually(what string, fn func() error) {
	c.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := fn()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("%s: did not happen within %s: %v", what, patience, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// pods are those that a selector selects and that are not on their way out.
func (c *cluster) pods(namespace, selector string) []corev1.Pod {
	c.t.Helper()
	var list corev1.PodList
	if err := json.Unmarshal([]byte(c.kubectl("-n", namespace, "get", "pods", "-l", selector, "-o", "json")), &list); err != nil {
		c.t.Fatal(err)
	}
	return slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil })
}

// pod is the only one that a selector selects.
func (c *cluster) pod(namespace, selector string) corev1.Pod {
	c.t.Helper()
	all := c.pods(namespace, selector)
	if len(all) != 1 {
		c.t.Fatalf("there are %d pods with %s in %s", len(all), selector, namespace)
	}
	return all[0]
}

// get has a pod fetch a URL.
func (c *cluster) get(pod corev1.Pod, url string) (string, error) {
	out, err := c.in("node1", "kubectl", "-n", pod.Namespace, "exec", pod.Name, "--", "/app", "get", url)
	return strings.TrimSpace(out), err
}

// mustGet has a pod fetch a URL with success, and returns who has answered and whom it has seen.
func (c *cluster) mustGet(pod corev1.Pod, url string) (host, peer string) {
	c.t.Helper()
	out, err := c.get(pod, url)
	if err != nil {
		c.t.Fatal(err)
	}
	host, peer, _ = strings.Cut(out, " ")
	return host, peer
}

const proxyLog = "/var/log/nodeproxy.log"

// records are the connections that the node proxies of all nodes have had, or one node's.
func (c *cluster) records(nodes ...string) []nodeproxy.Record {
	c.t.Helper()
	if len(nodes) == 0 {
		nodes = c.nodes
	}
	var all []nodeproxy.Record
	for _, node := range nodes {
		for line := range strings.Lines(c.must(node, "cat", proxyLog)) {
			var r nodeproxy.Record
			if err := json.Unmarshal([]byte(line), &r); err != nil {
				continue // it is being written
			}
			all = append(all, r)
		}
	}
	return all
}

// proxied are the records of a pod's in one direction, to a port if it is not 0.
func proxied(all []nodeproxy.Record, pod corev1.Pod, direction nodeproxy.Direction, port uint16) []nodeproxy.Record {
	return slices.DeleteFunc(slices.Clone(all), func(r nodeproxy.Record) bool {
		return r.UID != string(pod.UID) || r.Direction != direction || (port != 0 && r.OriginalDestination.Port() != port)
	})
}
