// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/redirector-dataplane/redirector/pkg/cni"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/kubeapi"
)

const (
	// workers is how many pods are worked on at a time. Most of the work on one is the kernel's verifier's.
	workers = 8
	// statusWorkers write annotations. They wait for the API server, and must not keep the others waiting.
	statusWorkers = 8
	// firstRetry and lastRetry bound the time between tries, which doubles each time.
	firstRetry = 50 * time.Millisecond
	lastRetry  = 10 * time.Second
	// logEvery is which tries are logged after the first ones: of those that come after lastRetry, one in five minutes.
	logEvery = 30
	// statusEvery is how soon it is noticed that a proxy took a pod, or left it.
	statusEvery = time.Second
	// goneTimeout bounds the question whether a pod that was never seen still exists.
	goneTimeout = 5 * time.Second
	// notedAgain is how soon an absent pod that still exists is looked at again.
	notedAgain = 5 * time.Second
)

// Names of indices.
const (
	byUID       = "uid"
	byNamespace = cache.NamespaceIndex
)

// Options are what a Watcher works with. All are needed but ObserveEvent.
type Options struct {
	Client *kubeapi.Client
	// Node is the node's name.
	Node     string
	Policy   Policy
	Enroller *enroll.Enroller
	// RunDir is where the CNI plugin looks for the node's state.
	RunDir string
	Log    *slog.Logger
	// ObserveEvent is told of each event on a pod or the node. It may be nil.
	ObserveEvent func(Reason)
}

// Watcher has the pods of a node enrolled and taken out as is wanted of them. It is a cni.Adder.
type Watcher struct {
	Options
	pods       cache.SharedIndexInformer
	namespaces cache.SharedIndexInformer
	queue      workqueue.TypedRateLimitingInterface[string] // of UIDs
	statuses   workqueue.TypedRateLimitingInterface[string] // of UIDs
	// changed says that a namespace has changed.
	changed   chan struct{}
	processes processes
	started   time.Time
	synced    atomic.Bool
	// stateErr is why the node's state could not be written, "" if it could.
	stateErr atomic.Pointer[string]

	mu    sync.Mutex
	known map[string]*known
	// events are those that are to be sent to the API server.
	events chan *corev1.Event
	// node is what is known of what all pods share: its repairs.
	node known
	// incidentLimit bounds the events on incidents of all pods.
	incidentLimit *rate.Limiter
}

// known is what is known of a pod beside what the API server and the kernel know.
type known struct {
	// enrolled says that the pod is enrolled, or may be.
	enrolled bool
	// unseen says that the pod was enrolled before the watch told of it. Until it does, its absence means nothing.
	unseen bool
	// wasOut says that the pod ran outside of the mesh while it was watched: enrolling it later is what somebody asked for.
	wasOut bool
	// looked says that the pod's network namespace was looked for since this agent has started.
	looked bool
	// failed says that the last try to enrol it failed.
	failed bool
	// capturedAt is when the pod was first seen captured, servedAt when a proxy was last seen to run for it.
	capturedAt, servedAt time.Time
	// wrote is the annotation that was written last.
	wrote *written
	// said are the events about the pod that were the last of their kind.
	said map[Reason]said
	// counted is what the pod has counted that is no news, repairs are those that are, and incidents says when an event was made
	// of each kind.
	counted   counted
	repairs   map[enroll.Repair]uint64
	incidents map[string]time.Time
	// limit bounds the events about the pod.
	limit *rate.Limiter
}

// New returns a Watcher that does not watch yet.
func New(opts Options) (*Watcher, error) {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[string]
	if opts.ObserveEvent == nil {
		opts.ObserveEvent = func(Reason) {}
	}
	w := &Watcher{
		Options:  opts,
		queue:    workqueue.NewTypedRateLimitingQueue(limiter(firstRetry, lastRetry)),
		statuses: workqueue.NewTypedRateLimitingQueue(limiter(firstRetry, lastRetry)),
		changed:  make(chan struct{}, 1),
		known:    map[string]*known{},
		events:   make(chan *corev1.Event, maxEvents),

		incidentLimit: rate.NewLimiter(incidentRate, incidentBurst),
	}
	onNode := opts.Client.WatchPods(fields.OneTermEqualSelector("spec.nodeName", opts.Node).String())
	w.pods = cache.NewSharedIndexInformer(onNode, &corev1.Pod{}, 0, cache.Indexers{
		byNamespace: cache.MetaNamespaceIndexFunc,
		byUID: func(object any) ([]string, error) {
			pod, ok := object.(*corev1.Pod)
			if !ok {
				return nil, fmt.Errorf("%T is no pod", object)
			}
			return []string{string(pod.UID)}, nil
		},
	})
	w.namespaces = cache.NewSharedIndexInformer(opts.Client.WatchNamespaces(), &corev1.Namespace{}, 0, nil)
	onPod := cache.ResourceEventHandlerFuncs{
		AddFunc: w.podChanged,
		UpdateFunc: func(before, after any) {
			// Another pod of that name may have taken its place unnoticed.
			w.podChanged(before)
			w.podChanged(after)
		},
		DeleteFunc: w.podChanged,
	}
	onNamespace := cache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { w.namespaceChanged(nil, object) },
		UpdateFunc: w.namespaceChanged,
		DeleteFunc: func(object any) { w.namespaceChanged(object, nil) },
	}
	_, errPods := w.pods.AddEventHandler(onPod)
	_, errNamespaces := w.namespaces.AddEventHandler(onNamespace)
	errStrip := errors.Join(w.pods.SetTransform(strip), w.namespaces.SetTransform(strip))
	if err := errors.Join(errStrip, errPods, errNamespaces); err != nil {
		return nil, fmt.Errorf("watch pods and namespaces: %w", err)
	}
	return w, nil
}

// Run watches until ctx is done. The pods that an earlier agent has enrolled must have been taken over before (Enroller.Restore).
func (w *Watcher) Run(ctx context.Context) error {
	w.started = time.Now()
	if err := w.noteEnrolled(); err != nil {
		return err
	}
	var group errgroup.Group
	group.Go(func() error { w.sendEvents(ctx); return nil })
	group.Go(func() error { w.pods.RunWithContext(ctx); return nil })
	group.Go(func() error { w.namespaces.RunWithContext(ctx); return nil })
	context.AfterFunc(ctx, func() {
		w.queue.ShutDown()
		w.statuses.ShutDown()
	})
	group.Go(func() error {
		if !cache.WaitForCacheSync(ctx.Done(), w.pods.HasSynced, w.namespaces.HasSynced) {
			return nil
		}
		w.synced.Store(true)
		w.Log.Info("the node's pods are known", "pods", len(w.pods.GetStore().ListKeys()),
			"namespaces", len(w.namespaces.GetStore().ListKeys()), "took", time.Since(w.started))
		for _, uid := range w.enrolled() {
			w.queue.Add(uid)
		}
		for range workers {
			group.Go(func() error { work(ctx, w, w.queue, w.sync); return nil })
		}
		for range statusWorkers {
			group.Go(func() error { work(ctx, w, w.statuses, w.syncStatus); return nil })
		}
		group.Go(func() error { w.keepStatus(ctx); return nil })
		group.Go(func() error { w.keepNodeState(ctx); return nil })
		group.Go(func() error { w.keepIncidents(ctx); return nil })
		return nil
	})
	return group.Wait()
}

// Ready says why the watcher does not know what it should, nil if it does.
func (w *Watcher) Ready() error {
	switch {
	case !w.pods.HasSynced():
		return errors.New("the pods of this node are not known yet")
	case !w.namespaces.HasSynced():
		return errors.New("the namespaces are not known yet")
	case !w.synced.Load():
		return errors.New("the node's pods are about to be looked at")
	}
	if text := w.stateErr.Load(); text != nil && *text != "" {
		return errors.New(*text)
	}
	return nil
}

// noteEnrolled notes the pods that are enrolled before the watch begins, those too of which only the kernel knows.
func (w *Watcher) noteEnrolled() error {
	pods, err := w.Enroller.Datapath.Maps().Pods()
	if err != nil {
		return err
	}
	named, err := w.Enroller.Pods()
	if err != nil {
		return err
	}
	for cookie, pod := range pods {
		w.update(pod.UID, func(k *known) { k.enrolled = true })
		w.passOver(pod.UID, cookie)
	}
	for _, pod := range named {
		w.update(pod.UID, func(k *known) { k.enrolled = true })
	}
	return nil
}

// update changes what is known of a pod.
func (w *Watcher) update(uid string, change func(k *known)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	k := w.known[uid]
	if k == nil {
		k = &known{said: map[Reason]said{}}
		w.known[uid] = k
	}
	change(k)
}

// about returns what is known of a pod.
func (w *Watcher) about(uid string) known {
	w.mu.Lock()
	defer w.mu.Unlock()
	if k := w.known[uid]; k != nil {
		return *k
	}
	return known{}
}

func (w *Watcher) forget(uid string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.known, uid)
}

// enrolled lists the UIDs of pods that are enrolled, or may be.
func (w *Watcher) enrolled() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var uids []string
	for uid, k := range w.known {
		if k.enrolled {
			uids = append(uids, uid)
		}
	}
	return uids
}

// podChanged has a pod looked at.
func (w *Watcher) podChanged(object any) {
	if last, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = last.Obj
	}
	if pod, ok := object.(*corev1.Pod); ok {
		w.queue.Add(string(pod.UID))
	}
}

// namespaceChanged has the pods of a namespace looked at, if its labels may have changed. Pods of one that is gone are deleted
// before it is.
func (w *Watcher) namespaceChanged(before, after any) {
	select {
	case w.changed <- struct{}{}:
	default: // somebody will look
	}
	now, ok := after.(*corev1.Namespace)
	if !ok {
		return
	}
	if then, ok := before.(*corev1.Namespace); ok && sameLabels(then.Labels, now.Labels) {
		return
	}
	objects, err := w.pods.GetIndexer().ByIndex(byNamespace, now.Name)
	if err != nil {
		w.Log.Error("cannot list the pods of a namespace", "namespace", now.Name, "error", err)
	}
	for _, object := range objects {
		w.podChanged(object)
	}
}

func sameLabels(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for key, value := range a {
		if other, ok := b[key]; !ok || other != value {
			return false
		}
	}
	return true
}

// work takes UIDs from a queue until it is shut down.
func work(
	ctx context.Context, w *Watcher, queue workqueue.TypedRateLimitingInterface[string], do func(context.Context, string) error,
) {
	for {
		uid, down := queue.Get()
		if down {
			return
		}
		if ctx.Err() == nil {
			if err := do(ctx, uid); err != nil {
				queue.AddRateLimited(uid)
				if tries := queue.NumRequeues(uid); tries <= quietTries || tries%logEvery == 0 {
					w.Log.Warn("cannot do what is wanted of a pod: it is tried again", "uid", uid, "tries", tries, "error", err)
				}
			} else {
				queue.Forget(uid)
			}
		}
		queue.Done(uid)
	}
}

// pod returns a pod from the cache, nil if it is not there.
func (w *Watcher) pod(uid string) *corev1.Pod {
	objects, err := w.pods.GetIndexer().ByIndex(byUID, uid)
	if err != nil || len(objects) == 0 {
		return nil
	}
	pod, _ := objects[0].(*corev1.Pod)
	return pod
}

// namespace returns a namespace from the cache, nil if it is not there.
func (w *Watcher) namespace(name string) *corev1.Namespace {
	object, ok, err := w.namespaces.GetStore().GetByKey(name)
	if err != nil || !ok {
		return nil
	}
	namespace, _ := object.(*corev1.Namespace)
	return namespace
}

// sync makes so what is wanted of a pod.
func (w *Watcher) sync(ctx context.Context, uid string) error {
	pod := w.pod(uid)
	if pod == nil {
		return w.gone(ctx, uid)
	}
	verdict := w.Policy.Judge(pod, w.namespace(pod.Namespace))
	switch verdict.Want {
	case WantOut:
		return w.takeOut(ctx, pod, verdict)
	case WantAddress, WantIn:
		return w.takeIn(ctx, pod, verdict)
	default:
		return nil
	}
}

// gone takes out a pod that the API server does not have any more.
func (w *Watcher) gone(ctx context.Context, uid string) error {
	k := w.about(uid)
	if k.unseen {
		exists, err := w.exists(ctx, uid)
		if err != nil {
			return err
		}
		if exists {
			w.queue.AddAfter(uid, notedAgain)
			return nil
		}
	}
	if k.enrolled {
		if err := w.Enroller.Unenroll(ctx, uid); err != nil {
			return err
		}
		w.Log.Info("pod is gone, and unenrolled", "uid", uid)
	}
	w.forget(uid)
	return nil
}

// exists asks the API server for an enrolled pod.
func (w *Watcher) exists(ctx context.Context, uid string) (bool, error) {
	have, ok := w.Enroller.Brief(uid)
	if !ok {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, goneTimeout)
	defer cancel()
	pod, err := w.Client.Pod(ctx, have.Namespace, have.Name)
	switch {
	case apierrors.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("ask whether pod %s still exists: %w", &have.Spec, err)
	}
	return string(pod.UID) == uid, nil
}

// takeOut takes out a pod that exists.
func (w *Watcher) takeOut(ctx context.Context, pod *corev1.Pod, verdict Verdict) error {
	uid := string(pod.UID)
	if w.about(uid).enrolled {
		w.sayIncidents(uid) // its counters go
		if err := w.Enroller.Unenroll(ctx, uid); err != nil {
			return err
		}
		w.Log.Info("pod is unenrolled", "pod", podName(pod), "uid", uid, "reason", verdict.Reason)
	}
	w.update(uid, func(k *known) {
		*k = known{wasOut: true, wrote: k.wrote, said: k.said, repairs: k.repairs, incidents: k.incidents, limit: k.limit}
	})
	w.statuses.Add(uid)
	return nil
}

// takeIn enrols a pod, or brings its enrolment up to date.
func (w *Watcher) takeIn(ctx context.Context, pod *corev1.Pod, verdict Verdict) error {
	uid := string(pod.UID)
	spec := specOf(pod)
	settings, bad := SettingsOf(pod)
	spec.Settings = settings
	w.sayBad(pod, bad)
	w.update(uid, func(k *known) { k.unseen = false })

	have, captured := w.Enroller.Brief(uid)
	if verdict.Want == WantAddress {
		if !captured {
			return nil
		}
		spec.IPs = sortedAddrs(have.IPs)
	}
	var err error
	spec.NetNS, err = w.netNS(pod, spec, have, captured)
	if err == nil && captured && spec.NetNS == "" {
		w.statuses.Add(uid)
		return nil // as it should be
	}
	if err == nil {
		w.update(uid, func(k *known) { k.enrolled = true })
		err = w.Enroller.Enroll(ctx, spec, false)
	}
	w.update(uid, func(k *known) { k.failed = err != nil })
	w.statuses.Add(uid)
	if err != nil {
		if w.queue.NumRequeues(uid) >= quietTries {
			w.say(pod, ReasonFailed, fmt.Sprintf("The pod cannot be enrolled: %s. It is tried again.", oneLine(err)))
		}
		return err
	}
	if captured {
		w.Log.Info("pod's enrolment is up to date again", "pod", podName(pod), "uid", uid, "netns", spec.NetNS, "ips", spec.IPs)
		return nil
	}
	w.Log.Info("pod is captured", "pod", podName(pod), "uid", uid, "netns", spec.NetNS, "reason", verdict.Reason)
	if !w.about(uid).wasOut {
		w.say(pod, ReasonLate, "The pod was running before it was captured: "+
			"connections that it made until now do not go through the node proxy. Restart the pod if that matters.")
	}
	return nil
}

// netNS returns the path of the network namespace that the pod is to be enrolled in, "" if it is enrolled as it should be.
func (w *Watcher) netNS(pod *corev1.Pod, spec enroll.Spec, have enroll.Pod, captured bool) (string, error) {
	uid := string(pod.UID)
	moved := captured && !slices.Equal(spec.IPs, sortedAddrs(have.IPs))
	if captured && !moved && w.about(uid).looked {
		if sameSpec(spec, have.Spec) {
			return "", nil
		}
		return pathTo(have)
	}
	// New to this agent, or to its place: where is it?
	path, inode, err := w.processes.find(groupUID(pod), spec.IPs)
	w.update(uid, func(k *known) { k.looked = true })
	switch {
	case err == nil && captured && !moved && inode == have.NetNSInode && sameSpec(spec, have.Spec):
		return "", nil
	case err == nil:
		return path, nil
	case !captured:
		return "", err
	case !moved && sameSpec(spec, have.Spec):
		return "", nil
	default:
		return pathTo(have)
	}
}

// sameSpec says whether two specs differ in nothing but the path of the namespace and the addresses.
func sameSpec(a, b enroll.Spec) bool {
	return a.Name == b.Name && a.Namespace == b.Namespace && a.ServiceAccount == b.ServiceAccount &&
		reflect.DeepEqual(a.Settings, b.Settings)
}

// specOf is what the API server says about a pod, without its settings and its network namespace.
func specOf(pod *corev1.Pod) enroll.Spec {
	account := pod.Spec.ServiceAccountName
	if account == "" {
		account = "default"
	}
	return enroll.Spec{
		UID:            string(pod.UID),
		Namespace:      pod.Namespace,
		Name:           pod.Name,
		ServiceAccount: account,
		IPs:            addressesOf(pod),
	}
}

// groupUID is the UID by which the kubelet and the runtime know a pod. That of a static pod is the hash of its file.
func groupUID(pod *corev1.Pod) string {
	if _, mirror := pod.Annotations[annotationMirror]; mirror {
		if hash := pod.Annotations[annotationConfigHash]; hash != "" {
			return hash
		}
	}
	return string(pod.UID)
}

func podName(pod *corev1.Pod) string { return pod.Namespace + "/" + pod.Name }

// keepNodeState keeps what the CNI plugin goes by while no agent answers.
func (w *Watcher) keepNodeState(ctx context.Context) {
	last := ""
	for {
		state := cni.NodeState{ExcludedNamespaces: w.Policy.ExcludeNamespaces}
		for _, object := range w.namespaces.GetStore().List() {
			if namespace, ok := object.(*corev1.Namespace); ok && w.Policy.meshNamespace(namespace) {
				state.EnrolledNamespaces = append(state.EnrolledNamespaces, namespace.Name)
			}
		}
		slices.Sort(state.EnrolledNamespaces)
		retry := make(<-chan time.Time)
		if now := strings.Join(state.EnrolledNamespaces, ","); now != last || w.stateErr.Load() == nil || *w.stateErr.Load() != "" {
			text := ""
			if err := state.Write(w.RunDir); err != nil {
				w.Log.Error("cannot tell the CNI plugin which namespaces are in the mesh: it is tried again", "error", err)
				text, retry = err.Error(), time.After(lastRetry)
			}
			last = now
			w.stateErr.Store(&text)
		}
		select {
		case <-ctx.Done():
			return
		case <-w.changed:
		case <-retry:
		}
	}
}

// oneLine writes joined errors on one line.
func oneLine(err error) string { return strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", "; ") }
