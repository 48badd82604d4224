// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// keptAnnotations are the annotations that are looked at. Others may have many kilobytes.
var keptAnnotations = func() []string {
	kept := []string{
		StatusAnnotation, annotationBypassInbound, annotationDNSCapture, annotationSidecar, annotationConfigHash, annotationMirror,
	}
	for _, list := range listAnnotations {
		kept = append(kept, list.annotation)
	}
	return kept
}()

// strip is the transform of the caches: it leaves of an object what is looked at.
func strip(object any) (any, error) {
	switch o := object.(type) {
	case *corev1.Pod:
		return stripPod(o), nil
	case *corev1.Namespace:
		return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
			Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion, Labels: o.Labels,
		}}, nil
	default:
		return object, nil // what stands for an object whose deletion was missed
	}
}

func stripPod(pod *corev1.Pod) *corev1.Pod {
	stripped := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: pod.Name, Namespace: pod.Namespace, UID: pod.UID, ResourceVersion: pod.ResourceVersion,
			DeletionTimestamp: pod.DeletionTimestamp, Labels: pod.Labels, OwnerReferences: pod.OwnerReferences,
		},
		Spec: corev1.PodSpec{
			NodeName: pod.Spec.NodeName, HostNetwork: pod.Spec.HostNetwork, ServiceAccountName: pod.Spec.ServiceAccountName,
		},
		Status: corev1.PodStatus{Phase: pod.Status.Phase, PodIP: pod.Status.PodIP, PodIPs: pod.Status.PodIPs},
	}
	for _, key := range keptAnnotations {
		if value, ok := pod.Annotations[key]; ok {
			if stripped.Annotations == nil {
				stripped.Annotations = map[string]string{}
			}
			stripped.Annotations[key] = value
		}
	}
	return stripped
}
