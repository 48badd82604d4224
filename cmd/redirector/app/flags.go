// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// Defaults of flags that several commands have.
const (
	defaultRunDir    = "/var/run/redirector"
	defaultZDSSocket = "/var/run/ztunnel/ztunnel.sock"
	defaultBPFFS     = "/sys/fs/bpf/redirector"
)

// envAnnotation holds the names of a flag's twins in the environment, the first that is set counts.
const envAnnotation = "redirector_env"

// twin gives a flag its twin in the environment, and others that are looked at after it.
func twin(flags *pflag.FlagSet, name string, others ...string) {
	f := flags.Lookup(name)
	vars := append([]string{strings.ToUpper(strings.ReplaceAll(name, "-", "_"))}, others...)
	if f.Annotations == nil {
		f.Annotations = map[string][]string{}
	}
	f.Annotations[envAnnotation] = vars
	f.Usage += " [$" + strings.Join(vars, ", $") + "]"
}

// applyEnv sets flags that the command line does not set from their twins. A variable that is set to nothing counts as unset.
func applyEnv(flags *pflag.FlagSet, getenv func(string) string) error {
	var errs []error
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Changed {
			return
		}
		for _, name := range f.Annotations[envAnnotation] {
			value := getenv(name)
			if value == "" {
				continue
			}
			if err := flags.Set(f.Name, value); err != nil {
				// pflag's own words name the flag, which nobody has given.
				errs = append(errs, usagef("invalid value %q of environment variable %s: %w", value, name, cause(err)))
			}
			return
		}
	})
	return errors.Join(errs...)
}

// cause takes off what pflag puts around a value's error.
func cause(err error) error {
	if wrapped := (*pflag.InvalidValueError)(nil); errors.As(err, &wrapped) {
		return wrapped.Unwrap()
	}
	return err
}

// choice is a flag that takes one of some words.
type choice struct {
	value   string
	choices []string
}

func (c *choice) String() string { return c.value }

// Type is what --help calls the value.
func (c *choice) Type() string { return strings.Join(c.choices, "|") }

// Set refuses what is not among the choices.
func (c *choice) Set(value string) error {
	if !slices.Contains(c.choices, value) {
		return fmt.Errorf("must be %s", strings.Join(c.choices, " or "))
	}
	c.value = value
	return nil
}

// pathFlag is a path that is made absolute: it may be used by another process.
type pathFlag string

func (p *pathFlag) String() string { return string(*p) }

// Type is what --help calls the value.
func (p *pathFlag) Type() string { return "path" }

// Set refuses an empty path, which would be the current directory.
func (p *pathFlag) Set(value string) error {
	if value == "" {
		return errors.New("the path is empty")
	}
	abs, err := filepath.Abs(value)
	if err != nil {
		return err
	}
	*p = pathFlag(abs)
	return nil
}

// addrFlag is an IP address that parse accepts.
type addrFlag struct {
	addr  *netip.Addr
	parse func(string) (netip.Addr, error)
}

func (a *addrFlag) String() string {
	if a.addr == nil || !a.addr.IsValid() {
		return ""
	}
	return a.addr.String()
}

// Type is what --help calls the value.
func (a *addrFlag) Type() string { return "address" }

// Set refuses what parse refuses.
func (a *addrFlag) Set(value string) (err error) {
	*a.addr, err = a.parse(value)
	return err
}

func addPath(flags *pflag.FlagSet, p *string, name, value, usage string) {
	*p = value
	flags.Var((*pathFlag)(p), name, usage)
}

func addRunDir(flags *pflag.FlagSet, p *string) {
	addPath(flags, p, "run-dir", defaultRunDir, "directory of the agent's socket, lock and notes")
	twin(flags, "run-dir")
}

func addBPFFS(flags *pflag.FlagSet, p *string) {
	addPath(flags, p, "bpffs", defaultBPFFS, "directory for pinned maps and links, on a BPF filesystem")
	twin(flags, "bpffs")
}

func addZDSSocket(flags *pflag.FlagSet, p *string) {
	addPath(flags, p, "zds-socket", defaultZDSSocket, "socket that node proxies connect to")
	twin(flags, "zds-socket", "ZTUNNEL_UDS_ADDRESS")
}

// The values of --output.
const (
	outputTable = "table"
	outputJSON  = "json"
	outputWide  = "wide"
	outputYAML  = "yaml"
)

// addOutput adds --output with the values that all commands have, and more.
func addOutput(flags *pflag.FlagSet, more ...string) *choice {
	c := &choice{value: outputTable, choices: append([]string{outputTable, outputJSON}, more...)}
	flags.VarP(c, "output", "o", "how to print")
	return c
}
