// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/zds/zdsapi"
)

// buildInfo is what `version` prints.
type buildInfo struct {
	Version string `json:"version"`
	Commit  string `json:"commit"`
	Go      string `json:"go"`
	Kernel  string `json:"kernel"` // of this machine
	// ZDS is the version of the protocol that node proxies (ztunnel) must speak.
	ZDS string `json:"zds"`
}

func newVersion(env *Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print what this is and what it runs on",
		Long: `Print the version of this binary, the commit and the Go version it was built from, this machine's
kernel, and the version of the protocol that node proxies must speak. No agent is asked.`,
		Example: `  redirector version
  redirector version -o json`,
	}
	output := addOutput(cmd.Flags())
	cmd.RunE = func(*cobra.Command, []string) error {
		info := env.buildInfo()
		if output.value == outputJSON {
			return env.printJSON(info)
		}
		return env.print(func(w io.Writer) error {
			tw := newTable(w)
			fmt.Fprintf(tw, "redirector\t%s\ncommit\t%s\ngo\t%s\nkernel\t%s\nzds\t%s\n", info.Version, info.Commit, info.Go, info.Kernel, info.ZDS)
			return tw.Flush()
		})
	}
	return cmd
}

func (env *Env) buildInfo() buildInfo {
	info := buildInfo{
		Version: env.Version,
		Commit:  env.Commit,
		Go:      runtime.Version(),
		Kernel:  kernelRelease(),
		ZDS:     zdsapi.Version_V1.String(),
	}
	if built, ok := debug.ReadBuildInfo(); ok {
		info.Version = cmp.Or(info.Version, built.Main.Version)
		for _, setting := range built.Settings {
			if setting.Key == "vcs.revision" {
				info.Commit = cmp.Or(info.Commit, setting.Value)
			}
		}
	}
	info.Version = cmp.Or(info.Version, "unknown")
	info.Commit = cmp.Or(info.Commit, "unknown")
	return info
}

// kernelRelease is what uname -r prints.
func kernelRelease() string {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(name.Release[:])
}
