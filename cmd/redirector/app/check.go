// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/redirector-dataplane/redirector/pkg/preflight"
)

// Exit statuses of check, besides those of all commands.
const (
	exitUnknown = 3
	exitLimited = 4
)

// statusError ends a command with a status of its own.
type statusError struct {
	error
	status int
}

func newCheck(env *Env) *cobra.Command {
	var opts preflight.Options
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Look whether this machine has what the agent needs",
		Long: `Look whether this machine has what the agent needs: features of the kernel, rights, file systems and
settings. Each line is ok, missing (with the kernel version or option that brings it, and what happens without
it), or unknown, when it cannot be found out. Nothing is changed, no agent is asked, and nothing needs to
be installed. Run it as the agent will run: as root, in the same container.

It ends with status 0 when all is there; 4 when the agent works, without something that is missing or
unknown; 3 when of something that the agent needs it is unknown whether it is there; and 1 when something is
missing that the agent needs. The agent refuses to start for the same features of the kernel.`,
		Example: `  redirector check
  redirector check -o json
  redirector check --cgroup /sys/fs/cgroup/unified`,
	}
	flags := cmd.Flags()
	output := addOutput(flags)
	addBPFFS(flags, &opts.BPFFS)
	addPath(flags, &opts.Cgroup, "cgroup", "", "cgroup2 directory whose processes are looked at (default: where cgroup2 is mounted)")
	addPath(flags, &opts.Proc, "proc", defaultProc, "the node's /proc")
	twin(flags, "cgroup")
	twin(flags, "proc")
	cmd.RunE = func(*cobra.Command, []string) error {
		report := preflight.Run(opts)
		if output.value == outputJSON {
			return errors.Join(env.printJSON(report), checkError(&report))
		}
		return errors.Join(env.print(func(w io.Writer) error { return writeCheck(w, &report) }), checkError(&report))
	}
	return cmd
}

// checkError names the worst of what was found, and makes it the exit status.
func checkError(r *preflight.Report) error {
	var names []string
	state, needed := preflight.Missing, true
	status, says := exitFailed, "this machine lacks what the agent needs"
	switch r.Verdict {
	case preflight.Good:
		return nil
	case preflight.Bad:
	case preflight.Doubtful:
		state, status, says = preflight.Unknown, exitUnknown, "it is unknown whether this machine has what the agent needs"
	case preflight.Limited:
		needed, status, says = false, exitLimited, "the agent works here, without"
	}
	for _, c := range r.Checks {
		if c.Needed == needed && (c.State == state || !needed && c.State != preflight.OK) {
			names = append(names, c.Name)
		}
	}
	return &statusError{fmt.Errorf("%s: %s: see the lines on standard output", says, strings.Join(names, "; ")), status}
}

func writeCheck(w io.Writer, r *preflight.Report) error {
	tw := newTable(w)
	fmt.Fprintf(tw, "STATE\tNEEDED\tWHAT\tFOUND\n")
	for _, c := range r.Checks {
		needed := "yes"
		if !c.Needed {
			needed = "no"
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\n", c.State, needed, c.Name, oneLine(fmt.Errorf("%s", c.Found)))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "\nkernel %s: %s\n", r.Kernel, r.Verdict)
	unknown := 0
	for _, c := range r.Checks {
		switch c.State {
		case preflight.OK:
		case preflight.Unknown:
			unknown++
		case preflight.Missing:
			fmt.Fprintf(w, "  missing: %s\n    without it: %s\n    -> %s\n", c.Name, c.Without, c.Needs())
		}
	}
	if unknown > 0 {
		fmt.Fprintf(w, "  unknown: %d\n    -> give this process the rights that the agent will have, and ask again\n", unknown)
	}
	return nil
}
