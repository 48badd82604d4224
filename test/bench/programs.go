// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Program is what a BPF program cost under the load of all scenarios, one after the other.
type Program struct {
	Name string `json:"name"`
	// Translated is the number of the kernel's instructions, and Verified how many the verifier went through.
	Translated int    `json:"instructions"`
	Verified   uint32 `json:"verified_instructions"`
	Runs       uint64 `json:"runs"`
	// Nanoseconds are per run, with the kernel's own measuring. What a program calls by tail call counts as its own.
	Nanoseconds float64 `json:"ns_per_run"`
}

// programIDs lists the programs that are in the kernel.
func programIDs() (map[ebpf.ProgramID]bool, error) {
	all := map[ebpf.ProgramID]bool{}
	for id := ebpf.ProgramID(0); ; {
		next, err := ebpf.ProgramGetNextID(id)
		if errors.Is(err, os.ErrNotExist) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("list BPF programs: %w", err)
		}
		all[next], id = true, next
	}
}

// runTimes has the kernel count what our programs do (BPF_ENABLE_STATS, Linux 5.8). That costs something itself, so it is done when
// all else has been measured. before are the programs of others.
func runTimes(subjects []*subject, o options, before map[ebpf.ProgramID]bool) ([]Program, error) {
	i := slices.IndexFunc(subjects, func(s *subject) bool { return s.name == redirector })
	if i < 0 {
		return nil, nil
	}
	now, err := programIDs()
	if err != nil {
		return nil, err
	}
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return nil, fmt.Errorf("have the kernel count what BPF programs do: %w", err)
	}
	defer stats.Close()
	for _, sc := range o.scenarios {
		if _, err := subjects[i].measure(sc, o.window, 0); err != nil {
			return nil, err
		}
	}
	var all []Program
	for id := range now {
		if before[id] {
			continue
		}
		p, err := describe(id)
		if errors.Is(err, os.ErrNotExist) {
			continue // it was somebody else's, and has gone
		}
		if err != nil {
			return nil, err
		}
		if strings.HasPrefix(p.Name, "redir_") && p.Runs > 0 {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b Program) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

func describe(id ebpf.ProgramID) (Program, error) {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return Program{}, err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return Program{}, err
	}
	stats, err := p.Stats()
	if err != nil {
		return Program{}, err
	}
	size, err := info.TranslatedSize()
	if err != nil {
		return Program{}, err
	}
	verified, _ := info.VerifiedInstructions()
	const instruction = 8 // bytes
	d := Program{Name: info.Name, Translated: size / instruction, Verified: verified, Runs: stats.RunCount}
	if d.Runs > 0 {
		d.Nanoseconds = float64(stats.Runtime/time.Nanosecond) / float64(d.Runs)
	}
	return d, nil
}
