// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// PodOptions says what a pod is like. Namespace and Name are needed.
type PodOptions struct {
	Namespace, Name     string
	Labels, Annotations map[string]string
	// ServiceAccount is that of the pod; empty for "default".
	ServiceAccount string
	// DaemonSet owns the pod, if it is set.
	DaemonSet string
	// HostNetwork puts its process into the node's namespace.
	HostNetwork bool
	// Node is the node that it is bound to; empty for the bed's.
	Node string
	// Static has its process started from a file of the kubelet's, of which the object is the mirror: its cgroups have the file's
	// hash for a UID.
	Static bool
	// Systemd lays its cgroups out as the kubelet does with the systemd driver; otherwise it is the cgroupfs driver.
	Systemd bool
	// Net says how its network namespace differs from one with both families.
	Net bed.PodOptions
}

// hash is that of a static pod's file: as long as a UID, without its dashes.
func (o *PodOptions) hash() string {
	return fmt.Sprintf("%.16x", sha256.Sum256([]byte(o.Namespace+"/"+o.Name)))
}

// Pod is a pod: an object in the API server and, once it is started, a network namespace with a process.
type Pod struct {
	// Object is the pod as last written here. What others have changed since is not in it.
	Object *corev1.Pod
	// NS is its network namespace: of one with HostNetwork the node's, of one that is not started nil.
	NS *bed.NS
	// Process is its only process, which sleeps.
	Process *bed.Proc

	c       *Cluster
	options PodOptions
	group   string
}

// UID is the pod's UID.
func (p *Pod) UID() string { return string(p.Object.UID) }

// RuntimeUID is the UID by which the kubelet and the runtime know the pod.
func (p *Pod) RuntimeUID() string {
	if p.options.Static {
		return p.options.hash()
	}
	return p.UID()
}

// IPs returns the addresses of the pod's namespace.
func (p *Pod) IPs() []netip.Addr {
	var ips []netip.Addr
	if p.NS != nil {
		for _, ip := range []netip.Addr{p.NS.V4, p.NS.V6} {
			if ip.IsValid() {
				ips = append(ips, ip)
			}
		}
	}
	return ips
}

// RunPod makes a pod and brings it to where the kubelet would: it runs, and its status says so.
func (c *Cluster) RunPod(o PodOptions) *Pod {
	c.tb.Helper()
	p := c.CreatePod(o)
	p.Start()
	p.SetStatus(corev1.PodRunning, p.IPs()...)
	return p
}

// CreatePod makes the object of a pod that is bound to the node, as it is before the kubelet has seen it.
func (c *Cluster) CreatePod(o PodOptions) *Pod {
	c.tb.Helper()
	object, err := c.Admin.CoreV1().Pods(o.Namespace).Create(c.tb.Context(), NewPod(o), create)
	if err != nil {
		c.tb.Fatal(err)
	}
	return &Pod{Object: object, c: c, options: o}
}

// NewPod returns the object of a pod without creating it.
func NewPod(o PodOptions) *corev1.Pod {
	node, account := o.Node, o.ServiceAccount
	if node == "" {
		node = NodeName
	}
	if account == "" {
		account = "default"
	}
	var owners []metav1.OwnerReference
	if o.DaemonSet != "" {
		owners = []metav1.OwnerReference{{
			APIVersion: "apps/v1", Kind: "DaemonSet", Name: o.DaemonSet, UID: "of-" + types.UID(o.DaemonSet),
		}}
	}
	annotations := maps.Clone(o.Annotations)
	if o.Static {
		if annotations == nil {
			annotations = map[string]string{}
		}
		annotations["kubernetes.io/config.hash"], annotations["kubernetes.io/config.mirror"] = o.hash(), o.hash()
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: o.Namespace, Name: o.Name, Labels: o.Labels, Annotations: annotations, OwnerReferences: owners,
		},
		Spec: corev1.PodSpec{
			NodeName:           node,
			ServiceAccountName: account,
			HostNetwork:        o.HostNetwork,
			Containers:         []corev1.Container{{Name: "app", Image: "app"}},
		},
	}
}

// Start makes the pod's network namespace and its process, as a runtime does. The API server learns nothing of it.
func (p *Pod) Start() {
	p.c.tb.Helper()
	b := p.c.Bed
	p.NS = b.Node
	if !p.options.HostNetwork {
		ns, err := b.Pod(fmt.Sprintf("pod%d", p.c.pods.Add(1)), p.options.Net)
		if err != nil {
			p.c.tb.Fatal(err)
		}
		p.NS = ns
	}
	uid, id := p.RuntimeUID(), fmt.Sprintf("%x", sha256.Sum256([]byte(p.UID()+p.NS.Path)))
	p.group = filepath.Join("kubepods", "besteffort", "pod"+uid, id)
	if p.options.Systemd {
		p.group = filepath.Join("kubepods.slice", "kubepods-besteffort.slice",
			"kubepods-besteffort-pod"+strings.ReplaceAll(uid, "-", "_")+".slice", "cri-containerd-"+id+".scope")
	}
	group, err := b.Group(p.group)
	if err != nil {
		p.c.tb.Fatal(err)
	}
	p.Process, err = b.StartIn(p.NS, group, p.options.Namespace+"_"+p.options.Name, []string{"sleep", "infinity"}, nil)
	if err != nil {
		p.c.tb.Fatal(err)
	}
}

// Move gives the pod's interface another IPv4 address, as when an address that is free again is given to the next pod, and has the
// node route that to it. The address must be no other namespace's any more.
func (p *Pod) Move(addr netip.Addr) {
	p.c.tb.Helper()
	err := p.NS.Do(func() error {
		link, err := netlink.LinkByName(p.NS.Link)
		if err != nil {
			return err
		}
		old, err := netlink.AddrList(link, netlink.FAMILY_V4)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: host(addr)}); err != nil {
			return err
		}
		for _, a := range old {
			if err := netlink.AddrDel(link, &a); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		p.c.tb.Fatalf("give pod %s address %s: %v", p.options.Name, addr, err)
	}
	err = p.c.Bed.Node.Do(func() error {
		link, err := netlink.LinkByName(p.NS.HostLink)
		if err != nil {
			return err
		}
		return netlink.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: host(addr), Scope: netlink.SCOPE_LINK})
	})
	if err != nil {
		p.c.tb.Fatalf("route %s to pod %s: %v", addr, p.options.Name, err)
	}
	p.NS.V4 = addr
}

func host(addr netip.Addr) *net.IPNet {
	return &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())}
}

// Stop ends the pod's process and removes its cgroups and its network namespace, as a runtime does. The API server learns
// nothing of it.
func (p *Pod) Stop() {
	p.c.tb.Helper()
	err := p.Process.Kill()
	for _, group := range []string{p.group, filepath.Dir(p.group)} {
		dir := filepath.Join(p.c.Bed.Cgroup, group)
		p.c.eventually("cgroup "+dir+" is empty", func() error {
			if err := os.Remove(dir); !errors.Is(err, os.ErrNotExist) {
				return err
			}
			return nil
		})
	}
	if !p.options.HostNetwork {
		err = errors.Join(err, p.c.Bed.RemovePod(p.NS))
	}
	if err != nil {
		p.c.tb.Fatal(err)
	}
	p.NS, p.Process = nil, nil
}

// SetStatus writes phase and addresses into the pod's status, as the kubelet does.
func (p *Pod) SetStatus(phase corev1.PodPhase, ips ...netip.Addr) {
	p.c.tb.Helper()
	status := fmt.Sprintf(`{"status":{"phase":%q,"hostIP":%q,"podIP":null,"podIPs":null}}`, phase, p.c.Bed.Node.V4)
	if len(ips) > 0 {
		var list []string
		for _, ip := range ips {
			list = append(list, fmt.Sprintf(`{"ip":%q}`, ip))
		}
		status = fmt.Sprintf(`{"status":{"phase":%q,"hostIP":%q,"podIP":%q,"podIPs":[%s]}}`,
			phase, p.c.Bed.Node.V4, ips[0], strings.Join(list, ","))
	}
	p.patch(types.MergePatchType, status, "status")
}

// Label sets a label of the pod; the value "" removes it.
func (p *Pod) Label(key, value string) {
	p.c.tb.Helper()
	p.patch(types.MergePatchType, metadataPatch("labels", key, value))
}

// Annotate sets an annotation of the pod; the value "" removes it.
func (p *Pod) Annotate(key, value string) {
	p.c.tb.Helper()
	p.patch(types.MergePatchType, metadataPatch("annotations", key, value))
}

func metadataPatch(what, key, value string) string {
	text := "null"
	if value != "" {
		text = fmt.Sprintf("%q", value)
	}
	return fmt.Sprintf(`{"metadata":{%q:{%q:%s}}}`, what, key, text)
}

func (p *Pod) patch(kind types.PatchType, data string, subresources ...string) {
	p.c.tb.Helper()
	pods := p.c.Admin.CoreV1().Pods(p.options.Namespace)
	object, err := pods.Patch(p.c.tb.Context(), p.options.Name, kind, []byte(data), metav1.PatchOptions{}, subresources...)
	if err != nil {
		p.c.tb.Fatal(err)
	}
	p.Object = object
}

// Annotation returns an annotation as the API server has it now, empty without it or without the pod.
func (p *Pod) Annotation(key string) string {
	p.c.tb.Helper()
	object, err := p.c.Admin.CoreV1().Pods(p.options.Namespace).Get(p.c.tb.Context(), p.options.Name, get)
	if apierrors.IsNotFound(err) {
		return ""
	}
	if err != nil {
		p.c.tb.Fatal(err)
	}
	if object.UID != p.Object.UID {
		return ""
	}
	return object.Annotations[key]
}

// Delete removes the pod's object at once, as the kubelet does when all of the pod is gone.
func (p *Pod) Delete() {
	p.c.tb.Helper()
	now := int64(0)
	err := p.c.Admin.CoreV1().Pods(p.options.Namespace).Delete(p.c.tb.Context(), p.options.Name, metav1.DeleteOptions{
		GracePeriodSeconds: &now,
		Preconditions:      &metav1.Preconditions{UID: &p.Object.UID},
	})
	// A conflict says that there is another pod of that name.
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		p.c.tb.Fatal(err)
	}
}

// CreateNamespace makes a namespace with labels.
func (c *Cluster) CreateNamespace(name string, labels map[string]string) {
	c.tb.Helper()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
	if _, err := c.Admin.CoreV1().Namespaces().Create(c.tb.Context(), namespace, create); err != nil {
		c.tb.Fatal(err)
	}
}

// LabelNamespace sets a label of a namespace; the value "" removes it.
func (c *Cluster) LabelNamespace(name, key, value string) {
	c.tb.Helper()
	data, namespaces := []byte(metadataPatch("labels", key, value)), c.Admin.CoreV1().Namespaces()
	if _, err := namespaces.Patch(c.tb.Context(), name, types.MergePatchType, data, metav1.PatchOptions{}); err != nil {
		c.tb.Fatal(err)
	}
}

// DeleteNamespace removes a namespace with the objects of its pods, as the controller manager and the kubelet do: first it is
// on its way out, then its pods go, then it.
func (c *Cluster) DeleteNamespace(name string) {
	c.tb.Helper()
	ctx, now := c.tb.Context(), int64(0)
	if err := c.Admin.CoreV1().Namespaces().Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		c.tb.Fatal(err)
	}
	err := c.Admin.CoreV1().Pods(name).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: &now}, metav1.ListOptions{})
	if err != nil {
		c.tb.Fatal(err)
	}
	namespace, err := c.Admin.CoreV1().Namespaces().Get(ctx, name, get)
	if err != nil {
		c.tb.Fatal(err)
	}
	namespace.Spec.Finalizers = nil
	if _, err := c.Admin.CoreV1().Namespaces().Finalize(ctx, namespace, update); err != nil {
		c.tb.Fatal(err)
	}
}
