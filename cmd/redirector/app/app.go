// SPDX-License-Identifier: Apache-2.0

// Package app is the command line of redirector. It reads flags and their twins in the environment, and prints; what is done
// is done in pkg/, and by the agent, which the other commands ask over its socket.
//
// A command ends with status 0 when it has done what it was told, 1 when it has not, and 2 when it was called wrongly; check
// has more of them. When it is not 0, it writes one line to standard error that says what is wrong and what to do.
package app

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"strings"
	"unicode"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/redirector-dataplane/redirector/pkg/cni"
)

// Exit statuses.
const (
	exitDone   = 0
	exitFailed = 1
	exitUsage  = 2
)

// Env is what commands see of the process that they run in.
type Env struct {
	Stdout, Stderr io.Writer
	// Getenv returns an environment variable; "" stands for one that is not set.
	Getenv func(string) string
	// Version and Commit say what was built, as the linker was told. If empty, what the go command noted is taken.
	Version, Commit string
}

// usageError is a mistake in how a command was called.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

// loggedError is one that is on standard error already.
type loggedError struct{ error }

// Main runs the command that args name and returns its exit status. It ends early, and in good order, when ctx is done or the
// process gets SIGINT or SIGTERM.
//
// Where CNI_COMMAND is set and no command is named, it is the CNI plugin, and the rest of the environment says what to do.
func Main(ctx context.Context, args []string, env Env) int {
	if isPlugin(args, env) {
		return cni.Main()
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGINT, unix.SIGTERM)
	defer stop()
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)

	root := newRoot(&env)
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	usage, logged, status := (*usageError)(nil), (*loggedError)(nil), (*statusError)(nil)
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &logged):
		return exitFailed
	case errors.As(err, &usage):
		fmt.Fprintf(env.Stderr, "%s: %s (see %s --help)\n", root.Name(), oneLine(err), cmd.CommandPath())
		return exitUsage
	case errors.As(err, &status):
		fmt.Fprintf(env.Stderr, "%s: %s\n", root.Name(), oneLine(err))
		return status.status
	default:
		fmt.Fprintf(env.Stderr, "%s: %s\n", root.Name(), oneLine(err))
		return exitFailed
	}
}

// Commands returns all commands, for what is generated from them; they are not to be run.
func Commands() *cobra.Command {
	return newRoot(&Env{Stdout: io.Discard, Stderr: io.Discard, Getenv: func(string) string { return "" }})
}

func newRoot(env *Env) *cobra.Command {
	root := &cobra.Command{
		Use:   "redirector",
		Short: "Steer the traffic of pods to the node proxy",
		Long: `Redirector steers the TCP traffic of enrolled pods to the node proxy, with eBPF programs and without
iptables or conntrack. The agent runs once per node. Other commands talk to it, and must run as root on that node.

A command ends with status 0 when it has done what it was told, 1 when it has not, and 2 when it was
called wrongly, and then says why in one line on standard error. "check" has more of them.`,
		Example: `  redirector check
  redirector agent --standalone &
  redirector enroll --uid 1 --name shop/web --service-account web --netns /run/netns/web
  redirector pods
  redirector pod web
  redirector status
  redirector unenroll --uid 1`,
		Version:       env.buildInfo().Version,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          knownCommand,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			return applyEnv(cmd.Flags(), env.Getenv)
		},
	}
	root.SetOut(env.Stdout)
	root.SetErr(env.Stderr)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	root.CompletionOptions.DisableDefaultCmd = true
	root.SetHelpCommand(newHelp())
	for _, cmd := range []*cobra.Command{
		newAgent(env), newEnroll(env), newSet(env), newUnenroll(env), newPods(env), newPod(env), newStatus(env), newCheck(env),
		newExplain(env), newVerify(env), newMonitor(env), newBugreport(env), newDial(env),
		newCleanup(env), newVersion(env), newCNI(), newInstall(env), newUninstall(env), newWithdraw(env), newCompletion(env),
	} {
		if cmd.Args == nil {
			cmd.Args = noArgs
		}
		root.AddCommand(cmd)
	}
	return root
}

// knownCommand refuses what is no command, in one line.
func knownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		return usagef("unknown command %q: did you mean %s?", args[0], strings.Join(near, " or "))
	}
	return usagef("unknown command %q", args[0])
}

func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("unexpected argument %q: everything is given by flags", args[0])
	}
	return nil
}

func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:   "help [command]",
		Short: "Explain a command",
		RunE: func(cmd *cobra.Command, args []string) error {
			topic, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return usagef("there is no command %q to explain", strings.Join(args, " "))
			}
			topic.InitDefaultHelpFlag()
			topic.InitDefaultVersionFlag()
			return topic.Help()
		},
	}
}

// print writes what a command found out. It fails when not all could be written: to a full disk, say.
func (env *Env) print(write func(io.Writer) error) error {
	var b bytes.Buffer
	err := write(&b)
	if err == nil {
		_, err = env.Stdout.Write(b.Bytes())
	}
	if err != nil {
		return fmt.Errorf("write to standard output: %w", err)
	}
	return nil
}

func (env *Env) printf(format string, args ...any) error {
	return env.print(func(w io.Writer) error {
		_, err := fmt.Fprintf(w, format, args...)
		return err
	})
}

func (env *Env) printJSON(value any) error {
	return env.print(func(w io.Writer) error {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(value)
	})
}

// printYAML writes the same fields as printJSON.
func (env *Env) printYAML(value any) error {
	return env.print(func(w io.Writer) error {
		text, err := yaml.Marshal(value)
		if err == nil {
			_, err = w.Write(text)
		}
		return err
	})
}

// oneLine writes an error on one line: those that are joined are on several, and a name may have anything in it.
func oneLine(err error) string {
	var parts []string
	for line := range strings.Lines(err.Error()) {
		if line = strings.TrimSpace(line); line != "" {
			parts = append(parts, line)
		}
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return '?'
		}
		return r
	}, strings.Join(parts, "; "))
}
