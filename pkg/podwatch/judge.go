// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The keys of labels and annotations that this package reads or writes; istio's are as istio-cni has them.
const (
	// StatusAnnotation says to the rest of the mesh how far a pod is.
	StatusAnnotation = "ambient.istio.io/redirection"

	annotationBypassInbound = "ambient.istio.io/bypass-inbound-capture" //nolint:gosec // no password: the word is bypass
	annotationDNSCapture    = "ambient.istio.io/dns-capture"
	annotationReroute       = "istio.io/reroute-virtual-interfaces"
	// annotationPrefix comes before those that istio-cni does not have.
	annotationPrefix  = "redirector/"
	annotationSidecar = "sidecar.istio.io/status"
	// The kubelet's: what a static pod is called in cgroups and by the runtime, and that an object only mirrors one.
	annotationConfigHash = "kubernetes.io/config.hash"
	annotationMirror     = "kubernetes.io/config.mirror"

	appLabel = "app"
	proxyApp = "ztunnel"
)

// Want is whether a pod is to be enrolled.
type Want string

// What can be wanted of a pod.
const (
	// WantIn: the pod is to be enrolled.
	WantIn Want = "in"
	// WantOut: the pod is not to be enrolled.
	WantOut Want = "out"
	// WantAddress: the pod is to be enrolled, and has no address yet by which its network namespace could be told. If it is
	// enrolled already, by CNI, it stays.
	WantAddress Want = "address"
	// WantKnowledge: the pod's namespace is not known. All stays as it is.
	WantKnowledge Want = "knowledge"
)

// Verdict is what is wanted of a pod, and why, in words.
type Verdict struct {
	Want   Want
	Reason string
}

// Policy says which pods are in the mesh.
type Policy struct {
	Selectors Selectors
	// ExcludeNamespaces are those whose pods are never in the mesh.
	ExcludeNamespaces []string
	// SystemNamespace is that of the node proxy, which is in no mesh.
	SystemNamespace string
	// AgentNamespace, and AgentDaemonSet or AgentPod, tell the agent's own pods.
	AgentNamespace, AgentDaemonSet, AgentPod string
}

// Judge decides about a pod. It looks at nothing but its arguments. namespace is nil if it is not known.
func (p *Policy) Judge(pod *corev1.Pod, namespace *corev1.Namespace) Verdict {
	out := func(format string, args ...any) Verdict { return Verdict{WantOut, fmt.Sprintf(format, args...)} }
	switch _, sidecar := pod.Annotations[annotationSidecar]; {
	case pod.Spec.HostNetwork:
		return out("the pod uses the host's network")
	case p.excluded(pod.Namespace):
		return out("namespace %s is excluded", pod.Namespace)
	case pod.Namespace == p.SystemNamespace && pod.Labels[appLabel] == proxyApp:
		return out("the pod is the node proxy")
	case p.isAgent(pod):
		return out("the pod is the agent")
	case sidecar:
		return out("the pod has a sidecar proxy (annotation %s)", annotationSidecar)
	case pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed:
		return out("the pod has finished (phase %s)", pod.Status.Phase)
	case namespace == nil:
		return Verdict{WantKnowledge, fmt.Sprintf("namespace %s is not known yet", pod.Namespace)}
	case !p.Selectors.Match(pod.Labels, namespace.Labels):
		return out("no selector matches the labels of the pod and of namespace %s", pod.Namespace)
	case len(addressesOf(pod)) == 0:
		return Verdict{WantAddress, "the pod has no address yet"}
	default:
		return Verdict{WantIn, fmt.Sprintf("a selector matches the labels of the pod and of namespace %s", pod.Namespace)}
	}
}

func (p *Policy) excluded(namespace string) bool {
	return slices.Contains(p.ExcludeNamespaces, namespace)
}

// isAgent says whether a pod is one of the agent's DaemonSet's.
func (p *Policy) isAgent(pod *corev1.Pod) bool {
	if p.AgentNamespace == "" || pod.Namespace != p.AgentNamespace {
		return false
	}
	ours := func(owner metav1.OwnerReference) bool {
		return owner.Kind == "DaemonSet" && owner.Name == p.AgentDaemonSet
	}
	return p.AgentPod != "" && pod.Name == p.AgentPod || slices.ContainsFunc(pod.OwnerReferences, ours)
}

// meshNamespace says whether pods of the namespace are in the mesh that do not say anything themselves.
func (p *Policy) meshNamespace(namespace *corev1.Namespace) bool {
	return !p.excluded(namespace.Name) && p.Selectors.Match(nil, namespace.Labels)
}

// addressesOf returns the addresses that a pod's status has, sorted, IPv4 never as v4-mapped IPv6. What is no pod's address is
// left out.
func addressesOf(pod *corev1.Pod) []netip.Addr {
	texts := []string{pod.Status.PodIP}
	for _, ip := range pod.Status.PodIPs {
		texts = append(texts, ip.IP)
	}
	var all []netip.Addr
	for _, text := range texts {
		ip, err := netip.ParseAddr(text)
		if err != nil || ip.IsUnspecified() || ip.IsMulticast() || ip.IsLoopback() {
			continue
		}
		all = append(all, ip.Unmap())
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}
