// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"math"
	"slices"

	"golang.org/x/perf/benchmath"
)

// Measured is what came of one scenario with one subject in one round.
type Measured struct {
	// Rate is operations per second; of streams, bytes per second.
	Rate float64 `json:"rate"`
	// P50 and P99 are of the time of an operation, in microseconds; 0 for streams.
	P50 float64 `json:"p50_us"`
	P99 float64 `json:"p99_us"`
	// CPU is the processor time of client, proxy and app together for an operation (of streams: a message), in microseconds.
	CPU float64 `json:"cpu_us"`
}

// Interval is a median with the bounds that hold the true one with at least the given confidence, from 0 to 1. With too few values
// there are no bounds: they are 0, and so is the confidence.
type Interval struct {
	Median     float64 `json:"median"`
	Low        float64 `json:"low"`
	High       float64 `json:"high"`
	Confidence float64 `json:"confidence"`
}

// wanted is the confidence that is asked for.
const wanted = 0.95

// fewest is how many values a median needs for bounds with that confidence: with n values the chance that all are on one side of it
// is 2 to the power 1-n.
const fewest = 6

// interval assumes nothing of how the values are distributed.
func interval(values []float64) Interval {
	if len(values) == 0 {
		return Interval{}
	}
	s := benchmath.AssumeNothing.Summary(benchmath.NewSample(slices.Clone(values), &benchmath.DefaultThresholds), wanted)
	if len(values) < fewest {
		return Interval{Median: s.Center}
	}
	return Interval{s.Center, s.Lo, s.Hi, s.Confidence}
}

// Row is a subject in a scenario: how it compares with another subject in the same rounds.
type Row struct {
	Scenario scenario `json:"scenario"`
	Subject  string   `json:"subject"`
	// Rate, P50, P99 and CPU are ratios to direct, round by round.
	Rate Interval `json:"rate_to_direct"`
	P50  Interval `json:"p50_to_direct"`
	P99  Interval `json:"p99_to_direct"`
	CPU  Interval `json:"cpu_to_direct"`
	// Absolute are the medians themselves.
	Absolute Measured `json:"median"`
}

// rows compares all subjects with direct.
func rows(scenarios []scenario, subjects []string, measured map[scenario]map[string][]Measured) []Row {
	var all []Row
	for _, sc := range scenarios {
		base := measured[sc][direct]
		for _, name := range subjects {
			of := measured[sc][name]
			ratio := func(value func(Measured) float64) Interval { return interval(ratios(of, base, value)) }
			median := func(value func(Measured) float64) float64 { return medianOf(of, value) }
			all = append(all, Row{
				Scenario: sc, Subject: name,
				Rate: ratio(rate), P50: ratio(p50), P99: ratio(p99), CPU: ratio(cpu),
				Absolute: Measured{median(rate), median(p50), median(p99), median(cpu)},
			})
		}
	}
	return all
}

func rate(m Measured) float64 { return m.Rate }
func p50(m Measured) float64  { return m.P50 }
func p99(m Measured) float64  { return m.P99 }
func cpu(m Measured) float64  { return m.CPU }

// ratios compares round by round. A round in which there was nothing to compare with is left out.
func ratios(of, base []Measured, value func(Measured) float64) []float64 {
	var all []float64
	for i := range min(len(of), len(base)) {
		if value(base[i]) > 0 {
			all = append(all, value(of[i])/value(base[i]))
		}
	}
	return all
}

func medianOf(of []Measured, value func(Measured) float64) float64 {
	var values []float64
	for _, m := range of {
		values = append(values, value(m))
	}
	return interval(values).Median
}

// quantile returns the smallest value that at least the fraction p of the values do not exceed; 0 of none.
func quantile[T cmp.Ordered](values []T, p float64) T {
	var none T
	if len(values) == 0 {
		return none
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[max(0, int(math.Ceil(p*float64(len(sorted))))-1)]
}
