// SPDX-License-Identifier: Apache-2.0

// Package preflight finds out, before anything is installed, whether a machine has what redirector needs: features of the kernel,
// which are those that the agent itself asks for (pkg/loader), rights, file systems and settings. It tries things in network
// namespaces of its own that are gone afterwards, and changes nothing. docs/kernels.md is made from the same table.
package preflight

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/podns"
)

// State is what is known of one requirement.
type State string

// The states of a requirement.
const (
	OK      State = "ok"
	Missing State = "missing"
	// Unknown says that it could not be found out, mostly because the process may not look.
	Unknown State = "unknown"
)

// Verdict is what the machine is good for.
type Verdict string

// The verdicts, best first.
const (
	// Good says that nothing is missing.
	Good Verdict = "ok"
	// Limited says that the agent works, without what is missing or not known.
	Limited Verdict = "limited"
	// Doubtful says that of something that the agent needs it is not known whether it is there.
	Doubtful Verdict = "unknown"
	// Bad says that something is missing that the agent needs.
	Bad Verdict = "missing"
)

// Group says what a requirement is about.
type Group string

// The groups of requirements, in the order in which they are checked.
const (
	GroupRights  Group = "rights"
	GroupKernel  Group = "kernel"
	GroupMachine Group = "machine"
)

// Check is one requirement.
type Check struct {
	Group Group
	// Name says what it is.
	Name string
	// Needed says that the agent does not start without it, or enrols no pod.
	Needed bool
	// Since is the kernel version that brought it, Option the configuration option that it needs; empty where there is none.
	Since, Option string
	// Without is what happens where it is missing.
	Without string
	// Remedy is what to do about it besides running another kernel; empty where there is nothing.
	Remedy string

	run func(*Options) (State, string)
}

// Options say where the agent is going to live.
type Options struct {
	// BPFFS is the agent's --bpffs.
	BPFFS string
	// Cgroup is the agent's --cgroup; empty: where cgroup2 is mounted.
	Cgroup string
	// Proc is the agent's --proc; empty: /proc.
	Proc string
}

// Result is a requirement and how it is met on this machine. The names in JSON are an interface; all of them are always there.
type Result struct {
	Group  Group  `json:"group"`
	Name   string `json:"name"`
	State  State  `json:"state"`
	Needed bool   `json:"needed"`
	// Found is what was seen: of what is missing or unknown, why.
	Found   string `json:"found"`
	Since   string `json:"since"`
	Option  string `json:"option"`
	Without string `json:"without"`
	Remedy  string `json:"remedy"`
}

// Report is the machine's.
type Report struct {
	// Kernel is what uname -r prints.
	Kernel  string   `json:"kernel"`
	Verdict Verdict  `json:"verdict"`
	Checks  []Result `json:"checks"`
}

// Run checks everything. It needs no rights: what they are missing for is unknown.
func Run(opts Options) Report {
	var name unix.Utsname
	r := Report{Kernel: "unknown", Verdict: Good}
	if unix.Uname(&name) == nil {
		r.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	// Kernels before 5.11 charge maps and programs to this limit. Where it cannot be lifted, what fails for it is unknown.
	_ = rlimit.RemoveMemlock()
	if opts.Proc != "" {
		podns.UseProc(opts.Proc)
	}
	for _, c := range Checks() {
		state, found := c.run(&opts)
		r.Checks = append(r.Checks, Result{
			Group: c.Group, Name: c.Name, State: state, Needed: c.Needed, Found: found,
			Since: c.Since, Option: c.Option, Without: c.Without, Remedy: c.Remedy,
		})
	}
	r.Verdict = verdict(r.Checks)
	return r
}

func verdict(results []Result) Verdict {
	rank := map[Verdict]int{Good: 0, Limited: 1, Doubtful: 2, Bad: 3}
	worst := Good
	for _, r := range results {
		v := Good
		switch {
		case r.State == OK:
		case !r.Needed:
			v = Limited
		case r.State == Unknown:
			v = Doubtful
		default:
			v = Bad
		}
		if rank[v] > rank[worst] {
			worst = v
		}
	}
	return worst
}

// Needs says by what the requirement is met: a remedy, a kernel version, an option.
func (r *Result) Needs() string {
	if r.Since == "" && r.Option == "" {
		return r.Remedy
	}
	kernel := "kernel " + r.Since + " or later"
	switch {
	case r.Since == "":
		kernel = "a kernel with " + r.Option
	case r.Option != "":
		kernel += " with " + r.Option
	}
	if r.Remedy == "" {
		return "run " + kernel
	}
	return r.Remedy + "; it needs " + kernel
}

// Checks lists all requirements.
func Checks() []Check {
	var all []Check
	for _, c := range loader.Capabilities() {
		all = append(all, Check{
			Group: GroupRights, Name: c.Name, Needed: !c.Optional,
			Without: c.Without, Remedy: loader.CapabilityRemedy,
			run: func(*Options) (State, string) {
				switch held, err := c.Held(); {
				case err != nil:
					return Unknown, err.Error()
				case !held:
					return Missing, "the process needs it " + c.For
				}
				return OK, "held"
			},
		})
	}
	for _, f := range loader.Features() {
		all = append(all, Check{
			Group: GroupKernel, Name: f.Name, Needed: !f.Optional, Since: f.Since, Option: f.Option, Without: f.Without,
			run: func(*Options) (State, string) { return judge(f.Probe()) },
		})
	}
	return append(all, machineChecks()...)
}

// judge tells a kernel that cannot from a process that may not, or that lacks memory or descriptors.
func judge(err error) (State, string) {
	if err == nil {
		return OK, "tried"
	}
	for _, hindrance := range []error{unix.EPERM, unix.ENOMEM, unix.EMFILE, unix.ENFILE} {
		if errors.Is(err, hindrance) {
			return Unknown, fmt.Sprintf("cannot be tried here: %v", hindrance)
		}
	}
	return Missing, fmt.Sprintf("the kernel says: %v", err)
}
