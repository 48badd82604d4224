// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/redirector-dataplane/redirector/pkg/maps"
)

// Type is a metric's type, in Prometheus's words.
type Type string

// The types of metrics.
const (
	Counter   Type = "counter"
	Gauge     Type = "gauge"
	Histogram Type = "histogram"
)

// Family is a metric with all its labels' values.
type Family struct {
	Name   string
	Type   Type
	Help   string
	Labels []string
	// PerPod says that it is exported with Options.PerPod only.
	PerPod bool

	desc    *prometheus.Desc
	buckets []float64
}

var families []*Family

func family(kind Type, name, help string, labels ...string) *Family {
	f := &Family{Name: name, Type: kind, Help: help, Labels: labels, desc: prometheus.NewDesc(name, help, labels, nil)}
	families = append(families, f)
	return f
}

// perPod marks a family as one that is exported on request only.
func perPod(f *Family) *Family {
	f.PerPod = true
	return f
}

// Those of the pods' counters. Each has a twin per pod.
var (
	connections = family(Counter, "redirector_connections_total",
		"Connections of pods, and of the node proxy on their behalf, by direction and by what was done with them.", "direction", "verdict")
	steeredSYNs = family(Counter, "redirector_steered_syns_total",
		"SYNs handed to the node proxy, by its listener. Repeated SYNs count, so there may be more than connections.", "listener")
	droppedPackets = family(Counter, "redirector_dropped_packets_total",
		"Packets of pods that were dropped because they would have passed without the node proxy.", "direction", "reason")
	excludedSYNs = family(Counter, "redirector_excluded_syns_total",
		"SYNs of pods that have left without the node proxy, to what is excluded. Repeated ones count, so there may be more than connections.")
	bypassAttempts = family(Counter, "redirector_bypass_attempts_total",
		"Attempts to get past the node proxy that were refused before a packet was made.", "kind")
	dnsQueries = family(Counter, "redirector_dns_queries_total",
		"connect() calls and datagrams of pods to DNS servers, with DNS capture on, by what was done with them.", "verdict")
	proxyListeners = family(Counter, "redirector_proxy_listeners_total",
		"Listeners of the node proxy in pods, by whether connections can be steered to them.", "result")
	appListeners = family(Counter, "redirector_app_listeners_total",
		"Listeners of pods' apps that need care.", "kind")
)

// counterSeries says as what a counter of the dataplane is exported.
type counterSeries struct {
	counter string // as maps.Counters.Each calls it
	family  *Family
	values  []string // of the family's labels
	meaning string
}

var series = []counterSeries{
	{"outbound_captured", connections, []string{"outbound", "captured"}, "the app's `connect()`, on its way to the proxy"},
	{"proxy_outbound", connections, []string{"outbound", "proxied"}, "the proxy's own, to anything outside the pod"},
	{"own_address", connections, []string{"outbound", "own_address"}, "the app's, to loopback or one of the pod's own addresses: untouched"},
	{"excluded_outbound", connections, []string{"outbound", "excluded"}, "the app's, to a port or range that is excluded: untouched"},
	{"capture_failed", connections, []string{"outbound", "failed"}, "could not be marked, bound or steered; does not get past the proxy"},
	{"proxy_to_app", connections, []string{"inbound", "proxied"}, "the proxy's, to the app, with the client's address"},
	{"probes_admitted", connections, []string{"inbound", "probe"}, "the host's probes, to the app"},
	{"excluded_inbound", connections, []string{"inbound", "excluded"}, "SYNs of peers to a port that is excluded, to the app"},
	{"bypassed_inbound", connections, []string{"inbound", "bypassed"}, "SYNs of peers, to the app, as the pod asks for all of them"},
	{"bind_failed", connections, []string{"inbound", "failed"}, "accepted, but could not be bound to their device"},
	{"outbound_steered", steeredSYNs, []string{"outbound"}, "port 15001: what the pod's apps send"},
	{"rerouted", steeredSYNs, []string{"outbound_rerouted"}, "port 15001: what machines behind the pod send"},
	{"inbound_steered", steeredSYNs, []string{"inbound"}, "port 15006: what peers send in plain"},
	{"hbone_steered", steeredSYNs, []string{"hbone"}, "port 15008: the mesh tunnel"},
	{"outbound_no_listener", droppedPackets, []string{"outbound", "no_listener"}, "no proxy listens on port 15001"},
	{"seal_dropped", droppedPackets, []string{"outbound", "seal"}, "fresh SYNs on their way out past the proxy"},
	{"seal_dropped_synack", droppedPackets, []string{"outbound", "seal_synack"}, "answers to connections that did not come by the proxy"},
	{"strays_dropped", droppedPackets, []string{"outbound", "stray"}, "for loopback, or for the proxy's DNS answers only"},
	{"inbound_no_listener", droppedPackets, []string{"inbound", "no_listener"}, "no proxy listens on port 15006"},
	{"hbone_no_listener", droppedPackets, []string{"inbound", "no_hbone_listener"}, "no proxy listens on port 15008"},
	{"loops_dropped", droppedPackets, []string{"inbound", "loop"},
		"SYNs to the proxy's own ports from the pod or its proxy, or from who only says that he is the pod"},
	{"seal_excluded", excludedSYNs, nil, "fresh SYNs on their way out to what is excluded"},
	{"unowned_dropped", droppedPackets, []string{"inbound", "unowned"},
		"SYNs for addresses that are here by a route only: of machines behind the pod that are not rerouted, or the pod claims them"},
	{"foreign_marks", bypassAttempts, []string{"foreign_mark"}, "sockets with the proxy's mark that no process of a proxy has made"},
	{"raw_bypass_refused", bypassAttempts, []string{"raw_socket"}, "`setsockopt()` calls that would have sent packets past the seal"},
	{"dns_captured", dnsQueries, []string{"captured"}, "sent to the proxy"},
	{"dns_refused", dnsQueries, []string{"refused"}, "could not be sent to the proxy, and went nowhere"},
	{"listeners_added", proxyListeners, []string{"added"}, "connections can be steered to it"},
	{"listeners_rejected", proxyListeners, []string{"rejected"}, "they cannot: all slots are taken, or it is MPTCP"},
	{"unbound_listeners", appListeners, []string{"unbound"}, "was bound to a device, and is so no more"},
	{"marked_listeners", appListeners, []string{"marked"}, "has a mark of its own: proxied inbound connections fail there"},
}

// podLabels name a pod. They are not called namespace and pod, which Prometheus gives to the agent's own.
var podLabels = []string{"pod_namespace", "pod_name", "pod_uid"}

// podTwins has the family per pod of each family of counters.
var podTwins = func() map[*Family]*Family {
	twins := map[*Family]*Family{}
	for _, f := range slices.Clone(families) {
		twin := family(Counter, "redirector_pod_"+f.Name[len("redirector_"):],
			"As "+f.Name+", of one pod since its enrolment.", slices.Concat(podLabels, f.Labels)...)
		twins[f] = perPod(twin)
	}
	return twins
}()

// What is so when somebody scrapes.
var (
	podsLeftOut = perPod(family(Gauge, "redirector_pods_left_out",
		"Pods without metrics of their own, since there are more than metrics per pod are exported of."))
	pods = family(Gauge, "redirector_pods",
		"Captured pods: a node proxy runs for them (enrolled), none does, so nothing passes (pending), or their names are lost (unnamed).",
		"state")
	repairs = family(Counter, "redirector_repairs_total",
		"What was found not to be as it should be, and was put right, since the agent's start.", "kind")
	admittedFlows = family(Gauge, "redirector_admitted_flows",
		"Connections that are let through to apps right now: the host's probes, and those of pods with their own IPv6 addresses.")
	proxies = family(Gauge, "redirector_proxies",
		"Connections of node proxies: not introduced yet (hello), being told of all pods (snapshot), or told (ready).", "state")
	ztunnelConnected = family(Gauge, "ztunnel_connected",
		"Connections of node proxies that have introduced themselves, under the name that istio-cni gives it.")
	mapEntries = family(Gauge, "redirector_map_entries",
		"Entries of the dataplane's BPF maps.", "map")
	mapCapacity = family(Gauge, "redirector_map_max_entries",
		"How many entries the dataplane's BPF maps have room for. When admitted and dns_bounds are full, the entries that were used least recently go.",
		"map")
	buildInfo = family(Gauge, "redirector_build_info",
		"Always 1; the labels say what runs, and on what.", "version", "commit", "go_version", "kernel")
)

// What is noted when it happens.
var (
	kubernetesEvents = family(Counter, "redirector_events_total",
		"Events on pods and on the node that were made for Kubernetes, by reason; docs/events.md says what each means.", "reason")
	ackDuration = histogram("redirector_zds_ack_duration_seconds",
		"Time from a request to a node proxy to its answer, by request and outcome.",
		[]float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, 1, 5}, "request", "outcome")
	enrolDuration = histogram("redirector_enrolment_duration_seconds",
		"Time to capture a pod that somebody asked for, without the wait for a node proxy, by result.",
		[]float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5}, "result")
	stepDuration = histogram("redirector_enrolment_step_duration_seconds",
		"Time of each step of an enrolment. The pod's program is loaded beside the others: steer is the wait for what is left.",
		[]float64{.0001, .00025, .0005, .001, .0025, .01, .05, .25}, "step")
	reconcileDuration = histogram("redirector_reconcile_duration_seconds",
		"Time of each comparison of what is wanted with what the kernel has, for all pods.",
		[]float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5})
)

func histogram(name, help string, buckets []float64, labels ...string) *Family {
	f := family(Histogram, name, help, labels...)
	f.buckets = buckets
	return f
}

// Families lists all metrics that begin with redirector_, and those that have istio-cni's names.
func Families() []Family {
	var all []Family
	for _, f := range families {
		all = append(all, *f)
	}
	return all
}

// eachSeries calls do with each counter of the dataplane that is exported.
func eachSeries(c *maps.Counters, do func(s *counterSeries, value uint64)) {
	values := map[string]uint64{}
	c.Each(func(name string, value uint64) { values[name] = value })
	for i := range series {
		do(&series[i], values[series[i].counter])
	}
}

// SeriesOf says as what a counter of the dataplane is exported: the metric, and the names and values of its labels in turn. The
// name is empty if it is not.
func SeriesOf(counter string) (name string, labels []string) {
	for i := range series {
		if s := &series[i]; s.counter == counter {
			for j, label := range s.family.Labels {
				labels = append(labels, label, s.values[j])
			}
			return s.family.Name, labels
		}
	}
	return "", nil
}
