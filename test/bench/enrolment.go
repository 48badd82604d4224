// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/zds"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// Enrolment is what it takes to redirect a pod and to leave it again, in microseconds.
type Enrolment struct {
	Subject   string  `json:"subject"`
	EnrolP50  float64 `json:"enrol_p50_us"`
	EnrolP99  float64 `json:"enrol_p99_us"`
	RemoveP50 float64 `json:"unenrol_p50_us"`
	RemoveP99 float64 `json:"unenrol_p99_us"`
	// Datapath is what the rule sets are compared with: without the state file, and without asking a proxy. It is 0 for the rule
	// sets, which do nothing else.
	DatapathP50 float64 `json:"datapath_p50_us,omitempty"`
	DatapathP99 float64 `json:"datapath_p99_us,omitempty"`
	Steps       []Step  `json:"steps,omitempty"`
}

// Step is a part of an enrolment, in microseconds.
type Step struct {
	Name string  `json:"name"`
	P50  float64 `json:"p50_us"`
	P99  float64 `json:"p99_us"`
}

// compared is the time that counts against other subjects.
func (e *Enrolment) compared() float64 {
	if e.DatapathP50 > 0 {
		return e.DatapathP50
	}
	return e.EnrolP50
}

// enrolments enrols and removes a pod again and again, in turn with each subject. Another pod is there all the time: the first of
// all pays for what the kernel does once.
func enrolments(ctx context.Context, count int) (all []Enrolment, err error) {
	b, err := bed.New(bed.Options{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	ours, err := newEnroller(ctx, b)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, ours.close()) }()
	other, err := b.Pod("other", bed.PodOptions{})
	if err != nil {
		return nil, err
	}
	if err := ours.Enroll(ctx, specOf(other), false); err != nil {
		return nil, err
	}
	cycles := []cycle{{name: redirector}}
	for _, r := range ruleSets {
		cycles = append(cycles, cycle{name: r.name, apply: r.apply, remove: r.remove})
	}
	cycles[0].apply = func(_ *bed.Bed, pod *bed.NS) error { return ours.Enroll(ctx, specOf(pod), false) }
	cycles[0].remove = func(_ *bed.Bed, pod *bed.NS) error { return ours.Unenroll(ctx, specOf(pod).UID) }
	for i := range cycles {
		if cycles[i].pod, err = b.Pod("pod-"+cycles[i].name, bed.PodOptions{}); err != nil {
			return nil, err
		}
		if err := cycles[i].run(b); err != nil {
			return nil, err
		}
		cycles[i].applied, cycles[i].removed = nil, nil
	}
	ours.reset()
	for range count {
		for i := range cycles {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			ours.sum = 0
			if err := cycles[i].run(b); err != nil {
				return nil, err
			}
			if i == 0 {
				ours.datapath = append(ours.datapath, micro(ours.sum))
			}
		}
	}
	for i := range cycles {
		all = append(all, cycles[i].result())
	}
	ours.describe(&all[0])
	return all, nil
}

// cycle is a pod that comes and goes.
type cycle struct {
	name             string
	pod              *bed.NS
	apply, remove    func(*bed.Bed, *bed.NS) error
	applied, removed []float64
}

func (c *cycle) run(b *bed.Bed) error {
	for _, part := range []struct {
		what func(*bed.Bed, *bed.NS) error
		took *[]float64
	}{{c.apply, &c.applied}, {c.remove, &c.removed}} {
		start := time.Now()
		if err := part.what(b, c.pod); err != nil {
			return fmt.Errorf("enrolment with %s: %w", c.name, err)
		}
		*part.took = append(*part.took, micro(time.Since(start)))
	}
	return nil
}

func (c *cycle) result() Enrolment {
	return Enrolment{
		Subject: c.name, EnrolP50: quantile(c.applied, 0.50), EnrolP99: quantile(c.applied, 0.99),
		RemoveP50: quantile(c.removed, 0.50), RemoveP99: quantile(c.removed, 0.99),
	}
}

// enroller is the part of an agent that enrols, in this process, with the steps that it took.
type enroller struct {
	*enroll.Enroller
	end func() error

	order    []string
	steps    map[string][]float64
	sum      time.Duration // of the enrolment under way, of what is datapath
	datapath []float64
}

func newEnroller(ctx context.Context, b *bed.Bed) (*enroller, error) {
	datapath, err := loader.Open(loader.Options{BPFFS: b.BPFFS, Cgroup: b.Cgroup})
	if err != nil {
		return nil, err
	}
	if err := datapath.Maps().SetConfig(maps.Config{ProxyIdentity: maps.ProxyIdentityMark}); err != nil {
		return nil, errors.Join(err, datapath.Close())
	}
	log := slog.New(slog.DiscardHandler)
	proxies, err := zds.Listen(zds.Options{Path: b.ZDSSocket, Log: log})
	if err != nil {
		return nil, errors.Join(err, datapath.Close())
	}
	serving, cancel := context.WithCancel(ctx)
	served := make(chan error, 1)
	go func() { served <- proxies.Serve(serving) }()
	e := &enroller{}
	e.reset()
	e.Enroller = enroll.New(enroll.Config{
		Datapath: datapath, Proxies: proxies, StateDir: filepath.Join(b.RunDir, "pods"), Log: log, Observe: e.observe,
	})
	e.end = func() error {
		e.Close()
		cancel()
		return errors.Join(<-served, datapath.Close())
	}
	if err := e.Restore(ctx); err != nil {
		return nil, errors.Join(err, e.end())
	}
	return e, nil
}

func (e *enroller) close() error { return e.end() }

func (e *enroller) reset() {
	e.order, e.steps, e.datapath, e.sum = nil, map[string][]float64{}, nil, 0
}

// observe is told of each step. Two of them put nothing into the kernel.
func (e *enroller) observe(step string, took time.Duration) {
	if e.steps[step] == nil {
		e.order = append(e.order, step)
	}
	e.steps[step] = append(e.steps[step], micro(took))
	if step != "state file" && step != "proxy" {
		e.sum += took
	}
}

func (e *enroller) describe(to *Enrolment) {
	to.DatapathP50, to.DatapathP99 = quantile(e.datapath, 0.50), quantile(e.datapath, 0.99)
	for _, step := range e.order {
		to.Steps = append(to.Steps, Step{step, quantile(e.steps[step], 0.50), quantile(e.steps[step], 0.99)})
	}
}
