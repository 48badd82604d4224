// SPDX-License-Identifier: Apache-2.0

// Package e2e tests Redirector as people get it: the image and the manifest, in a cluster of real etcd, API server, controllers,
// scheduler, kubelets, kube-proxies and containerd. Each node is a set of namespaces on this machine, with a disk in memory and a network that
// is not the machine's (cluster/).
//
// The tests have the build tag e2e, because they need root, containerd, runc and minutes: make e2e runs them.
package e2e
