// SPDX-License-Identifier: Apache-2.0

package app

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/renameio/v2"
	"github.com/spf13/cobra"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
)

// toolTimeout is how long one run of bpftool may take.
const toolTimeout = 20 * time.Second

type bugreportOptions struct {
	runDir, bpffs, file string
	stdout              bool
}

func newBugreport(env *Env) *cobra.Command {
	var o bugreportOptions
	cmd := &cobra.Command{
		Use:   "bugreport",
		Short: "Write a file with all that is so on the node, for whoever is to help",
		Long: `Write a compressed tar file with all that is so on the node: what version, status and pods say as JSON, what
"pod" says of each pod, and where bpftool is installed, what is in the maps and which programs run. What could not be
had is named in errors.txt; without an agent, that is much.

There are no secrets in it: the dataplane has none. There are names and addresses of pods.`,
		Example: `  redirector bugreport
  redirector bugreport --file /tmp/node-1.tar.gz
  redirector bugreport --stdout | tar tz`,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context(), env) },
	}
	addRunDir(cmd.Flags(), &o.runDir)
	addBPFFS(cmd.Flags(), &o.bpffs)
	addPath(cmd.Flags(), &o.file, "file", "", "the file to write (default: redirector-bugreport-TIME.tar.gz in the current directory)")
	cmd.Flags().BoolVar(&o.stdout, "stdout", false, "write it to standard output, and no file")
	cmd.MarkFlagsMutuallyExclusive("file", "stdout")
	return cmd
}

// unlisted are maps whose entries go with sockets, and cannot be listed.
var unlisted = []string{"sockets", "dns_notes"}

// report is a file in the making.
type report struct {
	tar    *tar.Writer
	now    time.Time
	failed bytes.Buffer
}

func (o *bugreportOptions) run(ctx context.Context, env *Env) error {
	now := time.Now()
	if o.file == "" && !o.stdout {
		dir, err := os.Getwd()
		if err != nil {
			return fmt.Errorf("find the current directory: %w: name a file with --file", err)
		}
		o.file = filepath.Join(dir, "redirector-bugreport-"+now.UTC().Format("20060102T150405Z")+".tar.gz")
	}
	var file bytes.Buffer
	compressed := gzip.NewWriter(&file)
	r := &report{tar: tar.NewWriter(compressed), now: now}
	if err := errors.Join(o.collect(ctx, env, r), r.tar.Close(), compressed.Close()); err != nil {
		return fmt.Errorf("make the report: %w", err)
	}
	if o.stdout {
		return env.print(func(w io.Writer) error {
			_, err := w.Write(file.Bytes())
			return err
		})
	}
	// All or nothing, and for nobody but root: there are names of pods in it.
	if err := renameio.WriteFile(o.file, file.Bytes(), 0o600); err != nil {
		return fmt.Errorf("write the report: %w: name another file with --file", err)
	}
	return env.printf("%s\n", o.file)
}

// collect puts in whatever can be had.
func (o *bugreportOptions) collect(ctx context.Context, env *Env, r *report) error {
	errs := []error{r.json("version.json", env.buildInfo(), nil)}
	var pods []enroll.Pod
	err := ask(ctx, o.runDir, 0, func(ctx context.Context, agent *api.Client) error {
		status, err := agent.Status(ctx)
		errs = append(errs, r.json("status.json", status, err))
		pods, err = agent.Pods(ctx)
		errs = append(errs, r.json("pods.json", pods, err))
		return nil
	})
	errs = append(errs, err)
	for i := range pods {
		err := ask(ctx, o.runDir, 0, func(ctx context.Context, agent *api.Client) error {
			found, err := agent.Inspect(ctx, pods[i].UID)
			return r.json("pods/"+pods[i].UID+".json", found, err)
		})
		errs = append(errs, err)
	}
	pins, err := filepath.Glob(filepath.Join(o.bpffs, "maps", "*"))
	errs = append(errs, err)
	for _, pin := range pins {
		if slices.Contains(unlisted, filepath.Base(pin)) {
			continue
		}
		errs = append(errs, r.tool(ctx, "bpftool/map-"+filepath.Base(pin)+".txt", "bpftool", "map", "dump", "pinned", pin))
	}
	errs = append(errs,
		r.tool(ctx, "bpftool/programs.json", "bpftool", "-j", "prog", "show"),
		r.tool(ctx, "bpftool/links.json", "bpftool", "-j", "link", "show"),
		r.add("errors.txt", r.failed.Bytes()),
	)
	return errors.Join(errs...)
}

func (r *report) add(name string, content []byte) error {
	header := &tar.Header{Name: "redirector-bugreport/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: r.now}
	if err := r.tar.WriteHeader(header); err != nil {
		return err
	}
	_, err := r.tar.Write(content)
	return err
}

// json adds a value, or notes why it could not be had.
func (r *report) json(name string, value any, err error) error {
	if err != nil {
		fmt.Fprintf(&r.failed, "%s: %s\n", name, oneLine(err))
		return nil
	}
	text, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	return r.add(name, append(text, '\n'))
}

// tool adds what a command writes, or notes why it could not be run.
func (r *report) tool(ctx context.Context, name string, argv ...string) error {
	ctx, cancel := context.WithTimeout(ctx, toolTimeout)
	defer cancel()
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = &out, io.Discard
	if err := cmd.Run(); err != nil {
		fmt.Fprintf(&r.failed, "%s: %v: %s\n", name, argv, oneLine(err))
		return nil
	}
	return r.add(name, out.Bytes())
}
