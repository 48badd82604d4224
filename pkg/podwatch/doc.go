// SPDX-License-Identifier: Apache-2.0

// Package podwatch is the agent's eye on Kubernetes: it watches the pods of this node and the namespaces, decides which pods are in
// the mesh, has them enrolled and taken out, and writes on them what is so.
//
// There are three things, and each is asked of one source only. What is wanted comes from the pod and its namespace, by
// Policy.Judge. What is so comes from the Enroller, which knows the kernel. The annotation ambient.istio.io/redirection is written
// and never read to decide anything but whether it has to be written. See docs/decisions/0009-want-have-annotation.md.
//
// Nothing is taken out because something is not known: only a pod that a complete list does not have, or whose deletion was
// seen, is gone.
package podwatch
