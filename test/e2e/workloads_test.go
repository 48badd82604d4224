// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"fmt"
	"strings"
)

const (
	system = "istio-system"
	shop   = "shop"
	plain  = "plain"
	// manifestFile is what is installed, as people get it.
	manifestFile = "../../deploy/redirector.yaml"
)

// proxyManifest is a node proxy on each node, with flags.
func proxyManifest(flags ...string) string {
	args := append([]string{"--log=" + proxyLog}, flags...)
	return fmt.Sprintf(`
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: ztunnel, namespace: %s}
spec:
  selector: {matchLabels: {app: ztunnel}}
  template:
    metadata: {labels: {app: ztunnel}}
    spec:
      hostNetwork: true
      terminationGracePeriodSeconds: 10
      tolerations: [{operator: Exists}]
      containers:
        - name: proxy
          image: localhost/nodeproxy:1
          imagePullPolicy: Never
          args: [%s]
          securityContext: {privileged: true}
          volumeMounts:
            - {name: zds, mountPath: /var/run/ztunnel}
            - {name: log, mountPath: /var/log}
      volumes:
        - {name: zds, hostPath: {path: /var/run/ztunnel, type: DirectoryOrCreate}}
        - {name: log, hostPath: {path: /var/log}}
`, system, `"`+strings.Join(args, `", "`)+`"`)
}

// container is one of app's, in a pod's spec. args are words; more is put behind.
func container(name, args, more string) string {
	return fmt.Sprintf(`{name: %s, image: "localhost/app:1", imagePullPolicy: Never, args: [%s]%s}`,
		name, `"`+strings.ReplaceAll(args, " ", `", "`)+`"`, more)
}

// workload is a Deployment, or the like, of pods with one container; podSpec is put into their spec.
func workload(kind, namespace, name string, replicas int, podSpec string) string {
	more := ""
	if kind == "StatefulSet" {
		more = "serviceName: " + name
	}
	return fmt.Sprintf(`
---
apiVersion: apps/v1
kind: %[1]s
metadata: {name: %[3]s, namespace: %[2]s}
spec:
  replicas: %[4]d
  selector: {matchLabels: {app: %[3]s}}
  %[6]s
  template:
    metadata: {labels: {app: %[3]s}}
    spec: {terminationGracePeriodSeconds: 2, tolerations: [{operator: Exists}], %[5]s}
`, kind, namespace, name, replicas, podSpec, more)
}

// podManifest is a pod.
func podManifest(namespace, name, podSpec string) string {
	return fmt.Sprintf(`
---
apiVersion: v1
kind: Pod
metadata: {name: %[2]s, namespace: %[1]s, labels: {app: %[2]s}}
spec: {terminationGracePeriodSeconds: 2, tolerations: [{operator: Exists}], %[3]s}
`, namespace, name, podSpec)
}

// service is for the pods of a workload of the same name.
func service(namespace, name, spec string) string {
	return fmt.Sprintf(`
---
apiVersion: v1
kind: Service
metadata: {name: %[2]s, namespace: %[1]s}
spec: {selector: {app: %[2]s}, ports: [{port: 80, targetPort: 8080}]%[3]s}
`, namespace, name, spec)
}

const (
	httpServer = "serve -http :8080"
	ready      = `, readinessProbe: {httpGet: {path: /healthz, port: 8080}, periodSeconds: 1}`
)
