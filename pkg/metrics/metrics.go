// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/podwatch"
	"github.com/redirector-dataplane/redirector/pkg/zds"
)

// MaxPods is the default of how many pods metrics are exported of with Options.PerPod; a node has 110 by Kubernetes's default.
const MaxPods = 512

// Options say what runs, and what to export.
type Options struct {
	// Version and Commit are the binary's, Kernel is this machine's release.
	Version, Commit, Kernel string
	// PerPod exports the counters of each pod besides their sums, of that many pods at most: the first by namespace and name.
	PerPod  bool
	MaxPods int // 0: the constant of that name
}

// Metrics are an agent's. Its Observe methods may be called from several goroutines, and before Watch.
type Metrics struct {
	opts     Options
	registry *prometheus.Registry
	enroller *enroll.Enroller
	// base is what the counters were when this agent came: its own begin with zero, as those of each process that is started anew.
	base maps.Counters

	acks, enrolments, steps, reconciles *prometheus.HistogramVec
	events                              *prometheus.CounterVec
}

// New returns metrics with nothing in them but durations, and what the Go runtime and the kernel say of this process.
func New(opts Options) *Metrics {
	opts.MaxPods = cmp.Or(opts.MaxPods, MaxPods)
	m := &Metrics{opts: opts, registry: prometheus.NewRegistry()}
	for vec, f := range map[**prometheus.HistogramVec]*Family{
		&m.acks: ackDuration, &m.enrolments: enrolDuration, &m.steps: stepDuration, &m.reconciles: reconcileDuration,
	} {
		*vec = prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: f.Name, Help: f.Help, Buckets: f.buckets}, f.Labels)
		m.registry.MustRegister(*vec)
	}
	m.events = prometheus.NewCounterVec(prometheus.CounterOpts{Name: kubernetesEvents.Name, Help: kubernetesEvents.Help}, kubernetesEvents.Labels)
	m.registry.MustRegister(m.events)
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	// What has not happened yet is there with a zero, or the first time would not show as an increase.
	for _, request := range zds.Requests() {
		for _, outcome := range zds.Outcomes() {
			m.acks.WithLabelValues(string(request), string(outcome))
		}
	}
	for _, reason := range podwatch.Reasons() {
		m.events.WithLabelValues(string(reason))
	}
	m.enrolments.WithLabelValues(resultDone)
	m.enrolments.WithLabelValues(resultFailed)
	m.reconciles.WithLabelValues()
	return m
}

// Watch has the numbers of an Enroller, its dataplane and its proxies read at each scrape. It is to be called once, and before
// Enroller.Restore. It fails when a map cannot be read.
func (m *Metrics) Watch(e *enroll.Enroller) error {
	base, err := e.Totals()
	if err != nil {
		return fmt.Errorf("read the counters for metrics: %w", err)
	}
	m.enroller, m.base = e, base
	return m.registry.Register(m)
}

// Gatherer returns what a scrape reads.
func (m *Metrics) Gatherer() prometheus.Gatherer { return m.registry }

// The results of enrolments.
const (
	resultDone   = "done"
	resultFailed = "failed"
)

// ObserveStep notes how long a step of an enrolment took; see enroll.Config.
func (m *Metrics) ObserveStep(step string, took time.Duration) {
	m.steps.WithLabelValues(step).Observe(took.Seconds())
}

// ObserveEnrolment notes how long an enrolment took; see enroll.Config.
func (m *Metrics) ObserveEnrolment(took time.Duration, err error) {
	result := resultDone
	if err != nil {
		result = resultFailed
	}
	m.enrolments.WithLabelValues(result).Observe(took.Seconds())
}

// ObserveReconcile notes how long a look at all pods took; see enroll.Config.
func (m *Metrics) ObserveReconcile(took time.Duration) {
	m.reconciles.WithLabelValues().Observe(took.Seconds())
}

// ObserveAnswer notes how long a request to a node proxy took; see zds.Options.
func (m *Metrics) ObserveAnswer(request zds.Request, outcome zds.Outcome, took time.Duration) {
	m.acks.WithLabelValues(string(request), string(outcome)).Observe(took.Seconds())
}

// ObserveEvent notes an event on a pod or the node; see podwatch.Options.
func (m *Metrics) ObserveEvent(reason podwatch.Reason) {
	m.events.WithLabelValues(string(reason)).Inc()
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(to chan<- *prometheus.Desc) {
	for _, f := range families {
		if f.Type != Histogram && f != kubernetesEvents {
			to <- f.desc
		}
	}
}

// Collect implements prometheus.Collector: it reads everything for one scrape.
func (m *Metrics) Collect(to chan<- prometheus.Metric) {
	s := &scrape{m, to}
	s.put(buildInfo, 1, m.opts.Version, m.opts.Commit, runtime.Version(), m.opts.Kernel)
	s.totals()
	s.states()
	s.repairs()
	s.proxies()
	s.maps()
	if m.opts.PerPod {
		s.perPod()
	}
}

type scrape struct {
	*Metrics
	to chan<- prometheus.Metric
}

func (s *scrape) put(f *Family, value float64, labels ...string) {
	kind := prometheus.GaugeValue
	if f.Type == Counter {
		kind = prometheus.CounterValue
	}
	// It has as many values as labels; but a pod's name may be no UTF-8.
	metric, err := prometheus.NewConstMetric(f.desc, kind, value, labels...)
	if err != nil {
		metric = prometheus.NewInvalidMetric(f.desc, err)
	}
	s.to <- metric
}

// failed has the scrape say that a family could not be read. The others are exported all the same.
func (s *scrape) failed(f *Family, err error) { s.to <- prometheus.NewInvalidMetric(f.desc, err) }

func (s *scrape) totals() {
	now, err := s.enroller.Totals()
	if err != nil {
		s.failed(connections, err)
		return
	}
	before := map[string]uint64{}
	s.base.Each(func(name string, value uint64) { before[name] = value })
	eachSeries(&now, func(c *counterSeries, value uint64) {
		// It is less than before only when somebody else has removed counters.
		s.put(c.family, float64(max(value, before[c.counter])-before[c.counter]), c.values...)
	})
}

func (s *scrape) states() {
	enrolled, pending, unnamed, err := s.enroller.States()
	if err != nil {
		s.failed(pods, err)
		return
	}
	s.put(pods, float64(enrolled), string(enroll.StateEnrolled))
	s.put(pods, float64(pending), string(enroll.StatePending))
	s.put(pods, float64(unnamed), "unnamed")
}

func (s *scrape) perPod() {
	all, err := s.enroller.Pods()
	if err != nil {
		s.failed(podsLeftOut, err)
		return
	}
	exported := all[:min(len(all), s.opts.MaxPods)]
	for i := range exported {
		pod := &exported[i]
		eachSeries(&pod.Counters, func(c *counterSeries, value uint64) {
			s.put(podTwins[c.family], float64(value), slices.Concat([]string{pod.Namespace, pod.Name, pod.UID}, c.values)...)
		})
	}
	s.put(podsLeftOut, float64(len(all)-len(exported)))
}

func (s *scrape) repairs() {
	done := s.enroller.Repairs()
	for _, kind := range enroll.RepairKinds() {
		s.put(repairs, float64(done[kind]), string(kind))
	}
}

func (s *scrape) proxies() {
	count := map[zds.ConnState]int{}
	for _, p := range s.enroller.Proxies.Status() {
		count[p.State]++
	}
	for _, state := range []zds.ConnState{zds.StateHello, zds.StateSnapshot, zds.StateReady} {
		s.put(proxies, float64(count[state]), string(state))
	}
	s.put(ztunnelConnected, float64(count[zds.StateSnapshot]+count[zds.StateReady]))
}

func (s *scrape) maps() {
	usage, err := s.enroller.Datapath.Maps().Usage()
	if err != nil {
		s.failed(mapEntries, err)
		return
	}
	for _, u := range usage {
		s.put(mapEntries, float64(u.Entries), u.Map)
		s.put(mapCapacity, float64(u.Capacity), u.Map)
		if u.Map == "admitted" {
			s.put(admittedFlows, float64(u.Entries))
		}
	}
}
