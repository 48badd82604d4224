// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// TestOneNode has all but what needs two nodes, with the bridge plugin. Its parts go on from each other.
func TestOneNode(t *testing.T) {
	c := start(t, "bridge", "node1")
	before := c.look()
	c.prepare()
	for _, part := range []struct {
		name string
		test func(*cluster)
	}{
		{"install", install},
		{"probes pass a strict proxy", probes},
		{"the first act of a pod is captured", firstActs},
		{"kinds of workloads", kinds},
		{"services", services},
		{"labels come and go", labels},
		{"each capability is needed", capabilities},
		{"the agent is upgraded under traffic", upgrade},
		{"the agent crashes", crashes},
		{"a cron job", cronJob},
		{"uninstall and install again", func(c *cluster) { uninstall(c, before) }},
	} {
		if !t.Run(part.name, func(t *testing.T) { part.test(c.with(t)) }) {
			return // what follows would fail for that
		}
	}
}

// prepare makes namespaces: shop is in the mesh, plain is not. The proxy is started later.
func (c *cluster) prepare() {
	c.t.Helper()
	for _, namespace := range []string{system, shop, plain} {
		c.kubectl("create", "namespace", namespace)
	}
	c.kubectl("label", "namespace", shop, "istio.io/dataplane-mode=ambient")
	for _, namespace := range []string{shop, plain} {
		c.eventually("the default account of "+namespace, func() error {
			_, err := c.in("node1", "kubectl", "-n", namespace, "get", "serviceaccount", "default")
			return err
		})
	}
	// A server that is not in the cluster.
	c.serveOutside()
}

// serveOutside runs a server on a host outside the cluster, until the node ends.
func (c *cluster) serveOutside() {
	c.t.Helper()
	app := built.app
	c.must("node1", "sh", "-c", fmt.Sprintf("setsid ip netns exec outside %s serve -http :8080 </dev/null >/dev/null 2>&1 &", app))
	c.eventually("the server outside answers", func() error {
		_, err := c.in("node1", "curl", "-sf", "--max-time", "2", "http://"+outside+":8080/healthz")
		return err
	})
}

func install(c *cluster) {
	manifest, err := os.ReadFile(manifestFile)
	if err != nil {
		c.t.Fatal(err)
	}
	c.apply(string(manifest))
	c.apply(proxyManifest())
	c.rollout(system, "daemonset/redirector")
	c.rollout(system, "daemonset/ztunnel")
	for _, node := range c.nodes {
		if conf := c.must(node, "cat", "/etc/cni/net.d/10-net.conflist"); !strings.Contains(conf, `{"type":"redirector"`) {
			c.t.Errorf("the plugin is not in the configuration of %s: %s", node, conf)
		}
	}
}

// restarts adds up the restarts of all containers.
func restarts(pod corev1.Pod) (n int32) {
	for _, s := range slices.Concat(pod.Status.ContainerStatuses, pod.Status.InitContainerStatuses) {
		n += s.RestartCount
	}
	return n
}

const annotation = "ambient.istio.io/redirection"

// wantAnnotation waits for a pod's annotation to have a value; "": to be gone.
func (c *cluster) wantAnnotation(namespace, selector, want string) {
	c.t.Helper()
	c.eventually(fmt.Sprintf("the annotation of %s/%s is %q", namespace, selector, want), func() error {
		for _, pod := range c.pods(namespace, selector) {
			if got := pod.Annotations[annotation]; got != want {
				return fmt.Errorf("that of %s is %q", pod.Name, got)
			}
		}
		return nil
	})
}

// Each kind of probe, as each of the kubelet's three, with a proxy that lets nothing of strangers in.
func probes(c *cluster) {
	c.apply(proxyManifest("--hold"))
	c.rollout(system, "daemonset/ztunnel")
	ways := map[string]string{
		"http": "httpGet: {path: /healthz, port: 8080}",
		"tcp":  "tcpSocket: {port: 9000}",
		"grpc": "grpc: {port: 9001}",
		"exec": `exec: {command: [/app, get, "http://127.0.0.1:8080/healthz"]}`,
	}
	for way, probe := range ways {
		const often = ", periodSeconds: 1, timeoutSeconds: 2"
		more := fmt.Sprintf(", startupProbe: {%[1]s%[2]s, failureThreshold: 30}, readinessProbe: {%[1]s%[2]s}, livenessProbe: {%[1]s%[2]s, failureThreshold: 2}",
			probe, often)
		c.apply(workload("Deployment", shop, "probed-"+way, 1,
			"containers: ["+container("app", "serve -http :8080 -tcp :9000 -grpc :9001", more)+"]"))
	}
	for way := range ways {
		c.rollout(shop, "deployment/probed-"+way)
		c.wantAnnotation(shop, "app=probed-"+way, "enabled")
	}
	// As long as it takes the kubelet to kill them, were a probe held.
	time.Sleep(6 * time.Second)
	for way := range ways {
		pod := c.pod(shop, "app=probed-"+way)
		if n := restarts(pod); n != 0 {
			c.t.Errorf("the pod with probes over %s was restarted %d times", way, n)
		}
		if got := proxied(c.records(), pod, nodeproxy.Inbound, 0); len(got) != 0 {
			c.t.Errorf("the proxy has had probes over %s: %+v", way, got)
		}
	}
	// The proxy does hold what is no probe.
	pod := c.pod(shop, "app=probed-http")
	if out, err := c.in("node1", "ip", "netns", "exec", "outside", "curl", "-s", "--max-time", "2", "http://"+pod.Status.PodIP+":8080/"); err == nil {
		c.t.Errorf("a strict proxy lets a stranger in: %s", out)
	}
	if got := proxied(c.records(), pod, nodeproxy.Inbound, 8080); len(got) == 0 {
		c.t.Error("what a stranger sends does not come to the proxy")
	}
	c.apply(proxyManifest())
	c.rollout(system, "daemonset/ztunnel")
	for way := range ways {
		c.kubectl("-n", shop, "delete", "deployment", "probed-"+way)
	}
}

// wantFirst checks that the first connection of a pod, to the server outside, went by the proxy.
func (c *cluster) wantFirst(selector string) {
	c.t.Helper()
	for _, pod := range c.pods(shop, selector) {
		got := proxied(c.records(), pod, nodeproxy.Outbound, 8080)
		if len(got) == 0 || got[0].OriginalDestination.Addr().String() != outside || got[0].Source.Addr().String() != pod.Status.PodIP || got[0].Error != "" {
			c.t.Errorf("the proxy has had of %s: %+v", pod.Name, got)
		}
		if n := restarts(pod); n != 0 {
			c.t.Errorf("%s was restarted %d times", pod.Name, n)
		}
	}
}

const firstAct = "serve -http :8080 -first http://" + outside + ":8080/"

func firstActs(c *cluster) {
	c.apply(workload("Deployment", shop, "eager", 3, "containers: ["+container("app", firstAct, ready)+"]"))
	c.rollout(shop, "deployment/eager")
	c.wantFirst("app=eager")
	c.kubectl("-n", shop, "delete", "deployment", "eager")
}

func kinds(c *cluster) {
	get := "get http://" + outside + ":8080/"
	c.apply(fmt.Sprintf(`
apiVersion: batch/v1
kind: Job
metadata: {name: job, namespace: %s}
spec:
  completions: 2
  template:
    metadata: {labels: {app: job}}
    spec: {restartPolicy: Never, containers: [%s]}
`, shop, container("app", get, "")))
	c.apply(workload("StatefulSet", shop, "set", 2, "containers: ["+container("app", firstAct, ready)+"]"))
	c.apply(podManifest(shop, "initial", "initContainers: ["+container("talks", get, "")+"], containers: ["+container("app", httpServer, ready)+"]"))
	c.apply(podManifest(shop, "on-the-host", "hostNetwork: true, containers: ["+container("app", "serve -http :18080", "")+"]"))
	c.apply(podManifest(shop, "host-port", "containers: ["+container("app", httpServer, ready+`, ports: [{containerPort: 8080, hostPort: 28080}]`)+"]"))
	c.apply(podManifest(shop, "declines", "containers: ["+container("app", httpServer, ready)+"]"))
	c.kubectl("-n", shop, "wait", "--for=condition=Complete", "job/job", "--timeout=100s")
	c.rollout(shop, "statefulset/set")
	c.kubectl("-n", shop, "wait", "--for=condition=Ready", "pod/initial", "pod/host-port", "pod/on-the-host", "--timeout=100s")

	for _, selector := range []string{"app=set", "app=initial"} {
		c.wantFirst(selector)
		c.wantAnnotation(shop, selector, "enabled")
	}
	jobs := c.pods(shop, "app=job")
	if len(jobs) != 2 {
		c.t.Errorf("the job has %d pods", len(jobs))
	}
	for _, pod := range jobs {
		if got := proxied(c.records(), pod, nodeproxy.Outbound, 8080); len(got) != 1 {
			c.t.Errorf("of %s the proxy has had %+v", pod.Name, got)
		}
	}
	// One that has finished is not in the mesh any more.
	c.wantAnnotation(shop, "app=job", "")

	onHost := c.pod(shop, "app=on-the-host")
	if value, ok := onHost.Annotations[annotation]; ok {
		c.t.Errorf("a pod in the host's network has the annotation %q", value)
	}
	if _, err := c.get(onHost, "http://"+outside+":8080/"); err != nil {
		c.t.Error(err)
	}
	if got := c.records(); slices.ContainsFunc(got, func(r nodeproxy.Record) bool { return r.UID == string(onHost.UID) }) {
		c.t.Error("the proxy has had connections of a pod in the host's network")
	}

	// Through the host's port, from outside: NAT, and then as any peer.
	hostPort := c.pod(shop, "app=host-port")
	c.must("node1", "ip", "netns", "exec", "outside", "curl", "-sf", "--max-time", "5", "http://172.18.0.2:28080/")
	if got := proxied(c.records(), hostPort, nodeproxy.Inbound, 8080); len(got) != 1 {
		c.t.Errorf("the proxy has had %+v through the host's port", got)
	}
}

func services(c *cluster) {
	server := "containers: [" + container("app", httpServer, ready) + "]"
	c.apply(workload("Deployment", shop, "web", 1, server) + service(shop, "web", ", type: NodePort") +
		workload("Deployment", shop, "single", 1, server) + service(shop, "single", ", clusterIP: None") +
		workload("Deployment", shop, "client", 1, server) + workload("Deployment", plain, "stranger", 1, server))
	for _, name := range []string{"web", "single", "client"} {
		c.rollout(shop, "deployment/"+name)
	}
	c.rollout(plain, "deployment/stranger")
	web, client, stranger := c.pod(shop, "app=web"), c.pod(shop, "app=client"), c.pod(plain, "app=stranger")
	var svc corev1.Service
	if err := json.Unmarshal([]byte(c.kubectl("-n", shop, "get", "service", "web", "-o", "json")), &svc); err != nil {
		c.t.Fatal(err)
	}
	vip := "http://" + svc.Spec.ClusterIP + "/"
	c.eventually("the service answers", func() error {
		_, err := c.get(stranger, vip)
		return err
	})

	start := len(c.records())
	if host, peer := c.mustGet(client, vip); host != web.Name || !strings.HasPrefix(peer, client.Status.PodIP+":") {
		c.t.Errorf("through the service %s has answered to %s", host, peer)
	}
	// The client's proxy sees the service's address, the server's that of the client.
	got := c.records()[start:]
	out, in := proxied(got, client, nodeproxy.Outbound, 80), proxied(got, web, nodeproxy.Inbound, 8080)
	if len(out) != 1 || out[0].OriginalDestination.Addr().String() != svc.Spec.ClusterIP {
		c.t.Errorf("the client's proxy has had %+v", out)
	}
	if len(in) != 1 || in[0].Source.Addr().String() != client.Status.PodIP {
		c.t.Errorf("the server's proxy has had %+v", in)
	}

	start = len(c.records())
	if _, peer := c.mustGet(stranger, vip); !strings.HasPrefix(peer, stranger.Status.PodIP+":") {
		c.t.Errorf("the server sees the stranger as %s", peer)
	}
	if got := proxied(c.records()[start:], web, nodeproxy.Inbound, 8080); len(got) != 1 {
		c.t.Errorf("of the stranger the server's proxy has had %+v", got)
	}

	start = len(c.records())
	nodePort := fmt.Sprintf("http://172.18.0.2:%d/", svc.Spec.Ports[0].NodePort)
	c.must("node1", "ip", "netns", "exec", "outside", "curl", "-sf", "--max-time", "5", nodePort)
	if got := proxied(c.records()[start:], web, nodeproxy.Inbound, 8080); len(got) != 1 {
		c.t.Errorf("through the node's port the server's proxy has had %+v", got)
	}

	// A headless service is but its pods' addresses.
	start = len(c.records())
	single := c.pod(shop, "app=single")
	var endpoints struct {
		Items []struct {
			Endpoints []struct{ Addresses []string }
		}
	}
	text := c.kubectl("-n", shop, "get", "endpointslices", "-l", "kubernetes.io/service-name=single", "-o", "json")
	if err := json.Unmarshal([]byte(text), &endpoints); err != nil || len(endpoints.Items) != 1 || len(endpoints.Items[0].Endpoints) != 1 {
		c.t.Fatalf("the headless service has %+v, %v", endpoints, err)
	}
	c.mustGet(client, "http://"+endpoints.Items[0].Endpoints[0].Addresses[0]+":8080/")
	if got := c.records()[start:]; len(proxied(got, client, nodeproxy.Outbound, 8080)) != 1 || len(proxied(got, single, nodeproxy.Inbound, 8080)) != 1 {
		c.t.Errorf("by the headless service the proxy has had %+v", got)
	}

	// To itself through its own service.
	start = len(c.records())
	if host, _ := c.mustGet(web, vip); host != web.Name {
		c.t.Errorf("to itself: %s has answered", host)
	}
	if got := c.records()[start:]; len(proxied(got, web, nodeproxy.Outbound, 80)) != 1 {
		c.t.Errorf("to itself through its service the proxy has had %+v", got)
	}
	// And to its own address, which is nobody's business.
	start = len(c.records())
	c.mustGet(web, "http://"+web.Status.PodIP+":8080/")
	if got := c.records()[start:]; len(got) != 0 {
		c.t.Errorf("to its own address the proxy has had %+v", got)
	}
}

func labels(c *cluster) {
	stranger, web := c.pod(plain, "app=stranger"), c.pod(shop, "app=web")
	url := "http://" + web.Status.PodIP + ":8080/"
	outbound := func() int {
		start := len(c.records())
		c.mustGet(stranger, url)
		return len(proxied(c.records()[start:], stranger, nodeproxy.Outbound, 0))
	}
	if n := outbound(); n != 0 {
		c.t.Errorf("before: %d connections came to the proxy", n)
	}
	c.kubectl("label", "namespace", plain, "istio.io/dataplane-mode=ambient")
	c.wantAnnotation(plain, "app=stranger", "enabled")
	if n := outbound(); n != 1 {
		c.t.Errorf("with the label: %d connections came to the proxy", n)
	}
	c.kubectl("label", "namespace", plain, "istio.io/dataplane-mode-")
	c.wantAnnotation(plain, "app=stranger", "")
	if n := outbound(); n != 0 {
		c.t.Errorf("without it: %d connections came to the proxy", n)
	}
	// A pod's own label, in a namespace without.
	c.kubectl("-n", plain, "label", "pod", stranger.Name, "istio.io/dataplane-mode=ambient")
	c.wantAnnotation(plain, "app=stranger", "enabled")
	if n := outbound(); n != 1 {
		c.t.Errorf("with the pod's label: %d connections came to the proxy", n)
	}
	c.kubectl("-n", plain, "label", "pod", stranger.Name, "istio.io/dataplane-mode-")
	c.wantAnnotation(plain, "app=stranger", "")
	if n := restarts(c.pod(plain, "app=stranger")); n != 0 {
		c.t.Errorf("it was restarted %d times", n)
	}
}

// stats are what a pod that makes load has seen.
type stats struct {
	Requests, Failed int
	LastError        string
}

func (c *cluster) stats(pod corev1.Pod) (s stats) {
	c.t.Helper()
	out, err := c.get(pod, "http://127.0.0.1:8081/")
	if err == nil {
		err = json.Unmarshal([]byte(out), &s)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return s
}

// load starts a pod that sends a request to the service web every 20 ms, and waits until it does.
func (c *cluster) load(name string) corev1.Pod {
	c.t.Helper()
	vip := c.kubectl("-n", shop, "get", "service", "web", "-o", "jsonpath={.spec.clusterIP}")
	c.apply(podManifest(shop, name, "containers: ["+container("app", "load -url http://"+vip+"/", `, readinessProbe: {tcpSocket: {port: 8081}, periodSeconds: 1}`)+"]"))
	c.kubectl("-n", shop, "wait", "--for=condition=Ready", "pod/"+name, "--timeout=100s")
	pod := c.pod(shop, "app="+name)
	c.eventually("there is traffic", func() error {
		if s := c.stats(pod); s.Requests < 10 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	return pod
}

// wantNoneLost stops the load and compares what it has sent with what the proxies have had of it, on both sides.
func (c *cluster) wantNoneLost(pod corev1.Pod) {
	c.t.Helper()
	web := c.pod(shop, "app=web")
	before := c.stats(pod)
	records := c.records()
	after := c.stats(pod)
	if after.Failed != 0 {
		c.t.Errorf("%d of %d requests have failed: %s", after.Failed, after.Requests, after.LastError)
	}
	out := len(proxied(records, pod, nodeproxy.Outbound, 80))
	in := 0
	for _, r := range proxied(records, web, nodeproxy.Inbound, 8080) {
		if r.Source.Addr().String() == pod.Status.PodIP {
			in++
		}
	}
	// One may be under way when the log is read.
	if out < before.Requests || out > after.Requests+1 || in < before.Requests || in > after.Requests+1 {
		c.t.Errorf("of %d to %d requests, the proxy has had %d going out, %d coming in", before.Requests, after.Requests, out, in)
	}
	c.t.Logf("%d requests, %d failed; the proxy has had %d going out, %d coming in", after.Requests, after.Failed, out, in)
	c.kubectl("-n", shop, "delete", "pod", pod.Name, "--wait=false")
}

func upgrade(c *cluster) {
	pod := c.load("load-upgrade")
	old := c.pod(system, "k8s-app=istio-cni-node")
	c.kubectl("-n", system, "set", "image", "daemonset/redirector", "agent=redirector:0.1.1")
	c.rollout(system, "daemonset/redirector")
	agent := c.pod(system, "k8s-app=istio-cni-node")
	if out := c.kubectl("-n", system, "exec", agent.Name, "--", "/redirector", "status"); agent.Name == old.Name || !strings.Contains(out, "version 0.1.1") {
		c.t.Errorf("after the upgrade %s runs:\n%s", agent.Name, out)
	}
	// A pod that starts now is captured by the new one.
	c.apply(podManifest(shop, "after-upgrade", "containers: ["+container("app", firstAct, ready)+"]"))
	c.kubectl("-n", shop, "wait", "--for=condition=Ready", "pod/after-upgrade", "--timeout=100s")
	c.wantFirst("app=after-upgrade")
	c.wantNoneLost(pod)
}

func crashes(c *cluster) {
	pod := c.load("load-crash")
	// Its pod is deleted.
	agent := c.pod(system, "k8s-app=istio-cni-node")
	c.kubectl("-n", system, "delete", "pod", agent.Name)
	c.rollout(system, "daemonset/redirector")
	// It is killed, again and again, for the kubelet to back off.
	agent = c.pod(system, "k8s-app=istio-cni-node")
	for i := range 3 {
		c.eventually("the agent runs", func() error {
			return c.killAgent(agent)
		})
		c.eventually("the kubelet starts it again", func() error {
			if now := c.pod(system, "k8s-app=istio-cni-node"); restarts(now) <= int32(i) {
				return errors.New("it does not")
			}
			return nil
		})
	}
	// A pod that starts in between waits, and is captured.
	c.apply(podManifest(shop, "after-crash", "containers: ["+container("app", firstAct, ready)+"]"))
	c.kubectl("-n", shop, "wait", "--for=condition=Ready", "pod/after-crash", "--timeout=100s")
	c.wantFirst("app=after-crash")
	c.rollout(system, "daemonset/redirector")
	c.wantNoneLost(pod)
}

// killAgent kills the agent of a pod with SIGKILL.
func (c *cluster) killAgent(pod corev1.Pod) error {
	out, err := c.in("node1", "sh", "-c", `
		for d in /proc/[0-9]*; do
			if [ "$(tr '\0' ' ' <$d/cmdline 2>/dev/null | cut -d' ' -f1-2)" = "/redirector agent" ]; then kill -KILL ${d#/proc/} && echo killed; fi
		done`)
	if err != nil {
		return err
	}
	if !strings.Contains(out, "killed") {
		return fmt.Errorf("no process of %s", pod.Name)
	}
	return nil
}

func cronJob(c *cluster) {
	c.apply(fmt.Sprintf(`
apiVersion: batch/v1
kind: CronJob
metadata: {name: cron, namespace: %s}
spec:
  schedule: "* * * * *"
  jobTemplate:
    spec:
      template:
        metadata: {labels: {app: cron}}
        spec: {restartPolicy: Never, containers: [%s]}
`, shop, container("app", "get http://"+outside+":8080/", "")))
	c.eventually("a job of the cron job succeeds", func() error {
		for _, pod := range c.pods(shop, "app=cron") {
			if pod.Status.Phase == corev1.PodSucceeded {
				if got := proxied(c.records(), pod, nodeproxy.Outbound, 8080); len(got) != 1 {
					c.t.Errorf("of %s the proxy has had %+v", pod.Name, got)
				}
				return nil
			}
		}
		return errors.New("none has")
	})
	c.kubectl("-n", shop, "delete", "cronjob", "cron")
}
