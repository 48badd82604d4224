// SPDX-License-Identifier: Apache-2.0

// Package kubeapi is the agent's access to Kubernetes: the few requests that it makes, by client-go's REST client. The clientset and
// the event recorder of client-go bring the types of all of Kubernetes and of OpenAPI, which takes 7 MB of memory on every node.
package kubeapi

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/flowcontrol"
)

// scheme has the types of the resources that a Client knows.
var scheme = runtime.NewScheme()

func init() {
	utilruntime.Must(corev1.AddToScheme(scheme))
	utilruntime.Must(appsv1.AddToScheme(scheme))
}

// eventQPS, per second, and eventBurst bound the events.
const eventQPS, eventBurst = 25, 50

// Client asks the API server. Its methods may be called from several goroutines. Their errors are the API server's; see
// k8s.io/apimachinery/pkg/api/errors.
type Client struct{ core, apps, events rest.Interface }

// New returns a client that does not connect before it is used. Its requests share the limit on their rate that the configuration
// has, QPS and Burst, which must be set; events have one of their own, so that nothing waits for them. It fails when the
// configuration makes no sense.
func New(config *rest.Config) (*Client, error) {
	shared := rest.CopyConfig(config)
	shared.NegotiatedSerializer = rest.CodecFactoryForGeneratedClient(scheme, serializer.NewCodecFactory(scheme)).WithoutConversion()
	transport, err := rest.HTTPClientFor(shared)
	if err != nil {
		return nil, fmt.Errorf("make a client for the API server: %w", err)
	}
	of := func(path string, version schema.GroupVersion, limit flowcontrol.RateLimiter) (rest.Interface, error) {
		one := rest.CopyConfig(shared)
		one.RateLimiter = limit
		one.APIPath, one.GroupVersion = path, &version
		client, err := rest.RESTClientForConfigAndClient(one, transport)
		if err != nil {
			return nil, fmt.Errorf("make a client for the API server: %w", err)
		}
		return client, nil
	}
	limit := flowcontrol.NewTokenBucketRateLimiter(config.QPS, config.Burst)
	core, err := of("/api", corev1.SchemeGroupVersion, limit)
	if err != nil {
		return nil, err
	}
	apps, err := of("/apis", appsv1.SchemeGroupVersion, limit)
	if err != nil {
		return nil, err
	}
	events, err := of("/api", corev1.SchemeGroupVersion, flowcontrol.NewTokenBucketRateLimiter(eventQPS, eventBurst))
	if err != nil {
		return nil, err
	}
	return &Client{core: core, apps: apps, events: events}, nil
}

// Pod gets a pod.
func (c *Client) Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	var pod corev1.Pod
	return &pod, c.core.Get().Namespace(namespace).Resource("pods").Name(name).Do(ctx).Into(&pod)
}

// Namespace gets a namespace.
func (c *Client) Namespace(ctx context.Context, name string) (*corev1.Namespace, error) {
	var namespace corev1.Namespace
	return &namespace, c.core.Get().Resource("namespaces").Name(name).Do(ctx).Into(&namespace)
}

// Node gets a node.
func (c *Client) Node(ctx context.Context, name string) (*corev1.Node, error) {
	var node corev1.Node
	return &node, c.core.Get().Resource("nodes").Name(name).Do(ctx).Into(&node)
}

// DaemonSet gets a DaemonSet.
func (c *Client) DaemonSet(ctx context.Context, namespace, name string) (*appsv1.DaemonSet, error) {
	var ds appsv1.DaemonSet
	return &ds, c.apps.Get().Namespace(namespace).Resource("daemonsets").Name(name).Do(ctx).Into(&ds)
}

// DeleteDaemonSet has a DaemonSet deleted once its pods are gone; until then it is there, with a time of deletion.
func (c *Client) DeleteDaemonSet(ctx context.Context, namespace, name string) error {
	foreground := metav1.DeletePropagationForeground
	return c.apps.Delete().Namespace(namespace).Resource("daemonsets").Name(name).
		Body(&metav1.DeleteOptions{PropagationPolicy: &foreground}).Do(ctx).Error()
}

// PatchPodStatus changes a pod's status, or its annotations, by a JSON merge patch on pods/status, and returns the pod as it is then.
func (c *Client) PatchPodStatus(ctx context.Context, namespace, name string, patch []byte) (*corev1.Pod, error) {
	var pod corev1.Pod
	return &pod, c.core.Patch(types.MergePatchType).Namespace(namespace).Resource("pods").Name(name).SubResource("status").
		Body(patch).Do(ctx).Into(&pod)
}

// CreateEvent makes an event, in the namespace that it names.
func (c *Client) CreateEvent(ctx context.Context, event *corev1.Event) error {
	return c.events.Post().Namespace(event.Namespace).Resource("events").Body(event).Do(ctx).Error()
}

// WatchPods lists and watches the pods that a field selector selects, of all namespaces.
func (c *Client) WatchPods(fieldSelector string) cache.ListerWatcher {
	return cache.NewFilteredListWatchFromClient(c.core, "pods", metav1.NamespaceAll, func(o *metav1.ListOptions) {
		o.FieldSelector = fieldSelector
	})
}

// WatchNamespaces lists and watches namespaces.
func (c *Client) WatchNamespaces() cache.ListerWatcher {
	return cache.NewFilteredListWatchFromClient(c.core, "namespaces", metav1.NamespaceAll, func(*metav1.ListOptions) {})
}
