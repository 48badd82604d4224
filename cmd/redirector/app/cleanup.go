// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/cni"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/sockfile"
)

type cleanupOptions struct {
	runDir    string
	bpffs     string
	zdsSocket string
}

func newCleanup(env *Env) *cobra.Command {
	var o cleanupOptions
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Take everything off the node that agents have put there",
		Long: `Take everything off the node that agents have put there: routes, rules, sysctls, filters and programs in
the network namespaces of pods, pinned maps and links, and the files in the run-dir. New connections of
pods go past the mesh from then on.

It is refused while an agent runs, and may be repeated.`,
		Example: `  redirector cleanup
  redirector cleanup --bpffs /sys/fs/bpf/redirector --run-dir /run/redirector`,
		RunE: func(*cobra.Command, []string) error { return o.run(env) },
	}
	addRunDir(cmd.Flags(), &o.runDir)
	addBPFFS(cmd.Flags(), &o.bpffs)
	addZDSSocket(cmd.Flags(), &o.zdsSocket)
	return cmd
}

func (o *cleanupOptions) run(env *Env) error {
	if err := o.clean(); err != nil {
		if errors.Is(err, fs.ErrPermission) {
			err = fmt.Errorf("%w: run this as root", err)
		}
		return fmt.Errorf("clean up: %w", err)
	}
	return env.printf("nothing is left at %s and %s\n", o.bpffs, o.runDir)
}

func (o *cleanupOptions) clean() (err error) {
	// Where no agent has ever run there is nothing to lock.
	if _, err := os.Stat(o.runDir); err == nil {
		lock, err := lockRunDir(o.runDir)
		if err != nil {
			return err
		}
		// Last: no agent must start before all is gone.
		defer func() {
			err = errors.Join(err, lock.release())
			removeRunDir(o.runDir)
		}()
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("look at run-dir %s: %w", o.runDir, err)
	}

	stateDir := filepath.Join(o.runDir, podsName)
	if err := enroll.Cleanup(o.bpffs, stateDir); err != nil {
		return err
	}
	_ = os.Remove(stateDir) // fails if there is something of others in it
	if err := cni.RemoveRunFiles(o.runDir); err != nil {
		return err
	}
	if err := sockfile.RemoveStale("unix", filepath.Join(o.runDir, cni.SocketName)); err != nil {
		return err
	}
	if err := sockfile.RemoveStale("unix", filepath.Join(o.runDir, pprofName)); err != nil {
		return err
	}
	err = sockfile.RemoveStale("unix", o.zdsSocket)
	if errors.Is(err, sockfile.ErrInUse) {
		err = nil // of another agent, as istio-cni's, which has taken over
	}
	return errors.Join(err, sockfile.RemoveStale("unix", socketIn(o.runDir)))
}

// removeRunDir removes the run-dir unless there is something of others in it. In a container it is a mount, which stays, of a directory
// on the node, which goes.
func removeRunDir(dir string) {
	if err := os.Remove(dir); !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EROFS) {
		return
	}
	node, err := os.Open("/proc/1/root")
	if err != nil {
		return
	}
	defer node.Close()
	// As pid 1 sees it: /var/run is usually a link, and its target begins with a slash.
	parent, err := unix.Openat2(int(node.Fd()), filepath.Dir(dir), &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT,
	})
	if err != nil {
		return
	}
	defer unix.Close(parent)
	_ = unix.Unlinkat(parent, filepath.Base(dir), unix.AT_REMOVEDIR)
}
