// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
)

// The values of StatusAnnotation. A pod that is not captured has none.
const (
	statusEnabled = "enabled"
	statusPending = "pending"
)

const (
	// proxyGrace is how long a node proxy may be away, for its restart or the agent's, before the pods that it ran for are said
	// to be pending: to write that on every pod of the node, and undo it seconds later, helps nobody. And it is how long one may
	// take to get to a pod that is new to it, while it takes many.
	proxyGrace = 30 * time.Second
	// ackGrace is how long a pod that was just captured may be without a proxy that would take it, before it is said to be pending.
	ackGrace = time.Second
	// patchTimeout bounds one attempt to write an annotation.
	patchTimeout = 15 * time.Second
)

// written is an annotation that was written, and the version of the pod with it.
type written struct {
	value   string // "": none
	version string
}

// annotation is what a pod has: what the cache says, or what was written since.
func annotation(pod *corev1.Pod, wrote *written) string {
	if wrote != nil {
		if order, err := resourceversion.CompareResourceVersion(pod.ResourceVersion, wrote.version); err == nil && order < 0 {
			return wrote.value
		}
	}
	return pod.Annotations[StatusAnnotation]
}

// keepStatus has the annotations of enrolled pods looked at from time to time: proxies come and go.
func (w *Watcher) keepStatus(ctx context.Context) {
	every(ctx, statusEvery, func() {
		for _, uid := range w.enrolled() {
			w.statuses.Add(uid)
		}
	})
}

// every does something after each period, until ctx is done.
func every(ctx context.Context, period time.Duration, do func()) {
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			do()
		}
	}
}

// syncStatus writes a pod's annotation if it is not what it should be.
func (w *Watcher) syncStatus(ctx context.Context, uid string) error {
	pod := w.pod(uid)
	if pod == nil {
		return nil
	}
	have := annotation(pod, w.about(uid).wrote)
	want, why := w.status(pod, have, time.Now())
	if want == statusPending && have != statusPending {
		w.say(pod, ReasonPending, fmt.Sprintf("The pod is captured, and nothing of it passes until a node proxy runs for it: %s.", why))
	}
	if want == have {
		return nil
	}
	return w.writeStatus(ctx, pod, want)
}

// status decides what a pod's annotation should be, given what it is. why is the reason if that is statusPending.
func (w *Watcher) status(pod *corev1.Pod, have string, now time.Time) (want, why string) {
	uid := string(pod.UID)
	enrolled, captured := w.Enroller.Brief(uid)
	if !captured {
		verdict := w.Policy.Judge(pod, w.namespace(pod.Namespace))
		if verdict.Want == WantOut || w.about(uid).failed {
			return "", ""
		}
		return have, "" // it is about to be seen to
	}
	served := enrolled.State == enroll.StateEnrolled
	var since time.Time
	w.update(uid, func(k *known) {
		if k.capturedAt.IsZero() {
			k.capturedAt = now
		}
		if served {
			k.servedAt = now
		}
		since = k.capturedAt
		if k.servedAt.After(since) {
			since = k.servedAt
		}
	})
	grace, why := ackGrace, enrolled.Reason
	taking := why == "" && w.Enroller.Proxies.Taking()
	if have == statusEnabled || taking {
		grace = proxyGrace
	}
	switch {
	case why != "":
	case taking:
		why = "the one that is connected has not got to it yet"
	default:
		why = "none is connected that takes it"
	}
	switch {
	case served:
		return statusEnabled, ""
	case now.Sub(since) >= grace:
		return statusPending, why
	default:
		w.statuses.AddAfter(uid, ackGrace/10)
		return have, ""
	}
}

// writeStatus writes a pod's annotation, or removes it. That the pod is gone, or is another by now, is no error.
func (w *Watcher) writeStatus(ctx context.Context, pod *corev1.Pod, value string) error {
	var annotation any // null removes it
	if value != "" {
		annotation = value
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid":         pod.UID,
		"annotations": map[string]any{StatusAnnotation: annotation},
	}})
	if err != nil {
		return fmt.Errorf("write the annotation of pod %s: %w", podName(pod), err)
	}
	ctx, cancel := context.WithTimeout(ctx, patchTimeout)
	defer cancel()
	now, err := w.Client.PatchPodStatus(ctx, pod.Namespace, pod.Name, patch)
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil
	case err != nil:
		return fmt.Errorf("write annotation %s of pod %s: %w", StatusAnnotation, podName(pod), err)
	}
	w.update(string(pod.UID), func(k *known) { k.wrote = &written{value, now.ResourceVersion} })
	w.Log.Debug("pod is annotated", "pod", podName(pod), "uid", pod.UID, "value", value)
	return nil
}

// RemoveStatus removes the annotation from all pods of the node that have it, as far as they are known. It is for when the agent
// goes for good, and Run has returned.
func (w *Watcher) RemoveStatus(ctx context.Context) error {
	var group errgroup.Group
	group.SetLimit(statusWorkers)
	objects := w.pods.GetStore().List()
	errs := make([]error, len(objects))
	for i, object := range objects {
		pod, ok := object.(*corev1.Pod)
		if !ok || annotation(pod, w.about(string(pod.UID)).wrote) == "" {
			continue
		}
		group.Go(func() error {
			errs[i] = w.writeStatus(ctx, pod, "")
			return nil
		})
	}
	_ = group.Wait() // always nil
	return errors.Join(errs...)
}
