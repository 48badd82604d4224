// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/redirector-dataplane/redirector/pkg/cni"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
)

const (
	// cachePatience is how long the watch may be behind the runtime before the API server is asked.
	cachePatience = 100 * time.Millisecond
	cacheEvery    = 10 * time.Millisecond
	// getTimeout bounds a question to the API server.
	getTimeout = 10 * time.Second
	// againTimeout bounds the question for what is known already, and may be out of date.
	againTimeout = 3 * time.Second
)

var _ cni.Adder = (*Watcher)(nil)

// AddPod enrols a pod whose network is about to be ready, in the network namespace that the runtime names, and returns when a
// node proxy runs for it. It needs no API server if the watch has told of the pod and its namespace.
func (w *Watcher) AddPod(ctx context.Context, req cni.AddRequest) error {
	if w.Policy.excluded(req.PodNamespace) {
		return &cni.NotEligibleError{Reason: fmt.Sprintf("namespace %s is excluded", req.PodNamespace)}
	}
	pod, seen, err := w.findPod(ctx, req)
	if err != nil {
		return err
	}
	verdict, err := w.judgeNow(ctx, pod)
	if err != nil {
		return err
	}
	if verdict.Want == WantOut {
		return &cni.NotEligibleError{Reason: verdict.Reason}
	}

	spec := specOf(pod)
	spec.NetNS = req.Netns
	if len(req.IPs) > 0 {
		spec.IPs = sortedAddrs(req.IPs)
	}
	var bad []string
	spec.Settings, bad = SettingsOf(pod)
	w.sayBad(pod, bad)
	w.update(spec.UID, func(k *known) {
		k.enrolled, k.looked, k.wasOut = true, true, false
		k.unseen = k.unseen || !seen
	})
	err = w.Enroller.Enroll(ctx, spec, true)
	w.update(spec.UID, func(k *known) { k.failed = err != nil && !errors.Is(err, enroll.ErrPending) })
	// The pod may have been deleted, or changed, meanwhile.
	w.queue.Add(spec.UID)
	w.statuses.Add(spec.UID)
	if err != nil {
		return err
	}
	w.Log.Info("pod is enrolled before it starts", "pod", podName(pod), "uid", spec.UID, "netns", spec.NetNS, "reason", verdict.Reason)
	return nil
}

// findPod finds the pod that the runtime means. seen says that the watch has told of it.
func (w *Watcher) findPod(ctx context.Context, req cni.AddRequest) (pod *corev1.Pod, seen bool, err error) {
	for deadline := time.Now().Add(cachePatience); ; {
		if pod := w.cachedPod(req); pod != nil {
			return pod, true, nil
		}
		if !w.synced.Load() || time.Now().After(deadline) {
			break
		}
		select {
		case <-ctx.Done():
			return nil, false, ctx.Err()
		case <-time.After(cacheEvery):
		}
	}
	ctx, cancel := context.WithTimeout(ctx, getTimeout)
	defer cancel()
	pod, err = w.Client.Pod(ctx, req.PodNamespace, req.PodName)
	switch {
	case apierrors.IsNotFound(err):
		return nil, false, fmt.Errorf("the API server has no pod %s/%s: it was deleted meanwhile", req.PodNamespace, req.PodName)
	case err != nil:
		return nil, false, fmt.Errorf("find out whether pod %s/%s is in the mesh: the watch has not told of it, nor does the API server: %w",
			req.PodNamespace, req.PodName, err)
	}
	pod = stripPod(pod)
	if !isMeant(pod, req) {
		return nil, false, fmt.Errorf("pod %s/%s has UID %s, and the runtime starts one with UID %s: it was deleted meanwhile",
			req.PodNamespace, req.PodName, pod.UID, req.PodUID)
	}
	return pod, w.pod(string(pod.UID)) != nil, nil
}

// cachedPod returns the pod that the runtime means, if the watch has told of it. If the runtime tells no UID, one that is about to
// go may be another of the same name.
func (w *Watcher) cachedPod(req cni.AddRequest) *corev1.Pod {
	object, ok, err := w.pods.GetStore().GetByKey(req.PodNamespace + "/" + req.PodName)
	if err != nil || !ok {
		return nil
	}
	pod, ok := object.(*corev1.Pod)
	if !ok || !isMeant(pod, req) || req.PodUID == "" && pod.DeletionTimestamp != nil {
		return nil
	}
	return pod
}

func isMeant(pod *corev1.Pod, req cni.AddRequest) bool {
	return req.PodUID == "" || req.PodUID == string(pod.UID) || req.PodUID == groupUID(pod)
}

// judgeNow decides about a pod that is about to start. That it is not in the mesh cannot be put right later: its first packets
// would be gone. So a namespace whose labels keep the pod out is asked for again, for the watch may be behind; if it cannot be had,
// what the watch has told counts.
func (w *Watcher) judgeNow(ctx context.Context, pod *corev1.Pod) (Verdict, error) {
	cached := w.namespace(pod.Namespace)
	verdict := w.Policy.Judge(pod, cached)
	if verdict.Want != WantKnowledge && (verdict.Want != WantOut || w.Policy.Judge(pod, nil).Want == WantOut) {
		return verdict, nil // whatever the namespace is like, or because it is as it is
	}
	patience := getTimeout
	if cached != nil {
		patience = againTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	namespace, err := w.Client.Namespace(ctx, pod.Namespace)
	switch {
	case err == nil:
		return w.Policy.Judge(pod, namespace), nil
	case cached != nil:
		return verdict, nil
	default:
		return Verdict{}, fmt.Errorf("find out whether namespace %s is in the mesh: %w", pod.Namespace, err)
	}
}
