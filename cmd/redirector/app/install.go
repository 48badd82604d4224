// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/redirector-dataplane/redirector/pkg/cni"
)

// errPlugin says that the plugin has failed. It has written why to standard output, as plugins do.
var errPlugin = errors.New("the CNI plugin has failed")

// pluginOptions are those of the plugin's installation.
type pluginOptions struct {
	netDir, binDir, cacheDir string
	confName                 string
	chained, owned           bool
	ownedName                string
	groupRead                bool

	runDir, podNamespace, podName string
	exclude                       string
	timeout                       time.Duration
}

// addPluginDirs adds the flags that say where the plugin is installed.
func (o *pluginOptions) addPluginDirs(flags *pflag.FlagSet) {
	addPath(flags, &o.netDir, "mounted-cni-net-dir", cni.DefaultNetDir, "directory of the runtime's CNI configurations")
	twin(flags, "mounted-cni-net-dir", "CNI_NET_DIR")
	addPath(flags, &o.binDir, "cni-bin-dir", cni.DefaultBinDir, "directory of the runtime's CNI plugins")
	twin(flags, "cni-bin-dir")
	addPath(flags, &o.cacheDir, "cni-cache-dir", cni.DefaultCacheDir, "directory of the runtime's CNI cache; if this is a container, mount it at the same path")
	twin(flags, "cni-cache-dir")
}

// addPluginFlags adds all flags of the plugin's installation but --run-dir.
func (o *pluginOptions) addPluginFlags(flags *pflag.FlagSet) {
	o.addPluginDirs(flags)
	flags.StringVar(&o.confName, "cni-conf-name", "", "configuration to be chained into (default: the first valid one by name); "+
		"without --chained-cni-plugin, the plugin's own (default: "+cni.DefaultOwnConf+")")
	flags.BoolVar(&o.chained, "chained-cni-plugin", true, "put the plugin at the end of the primary plugin's list; otherwise it gets a configuration of its own, for Multus")
	flags.BoolVar(&o.owned, "istio-owned-cni-config", false, "chain into a copy of the primary plugin's list, which sorts before it and follows its changes")
	flags.StringVar(&o.ownedName, "istio-owned-cni-config-filename", cni.DefaultOwnedName, "name of that copy")
	flags.BoolVar(&o.groupRead, "cni-conf-group-read", false, "let the group read files that are made: mode 0640 instead of 0600")
	flags.DurationVar(&o.timeout, "cni-timeout", cni.DefaultTimeout, "how long the plugin waits for the agent")
	flags.StringVar(&o.exclude, "exclude-namespaces", "", "namespaces whose pods are never enrolled, and start without asking the agent, with commas in between")
	flags.StringVar(&o.podNamespace, "pod-namespace", "", "namespace of the agent's own pod, which starts without asking the agent")
	flags.StringVar(&o.podName, "pod-name", "", "name of the agent's own pod: its DaemonSet's others start without asking, too")
	for _, name := range []string{
		"cni-conf-name", "chained-cni-plugin", "istio-owned-cni-config", "istio-owned-cni-config-filename", "cni-conf-group-read",
		"cni-timeout", "exclude-namespaces", "pod-namespace", "pod-name",
	} {
		twin(flags, name)
	}
}

// installer returns an installer with these options.
func (o *pluginOptions) installer(log *slog.Logger) (*cni.Installer, error) {
	if o.timeout <= 0 {
		return nil, usagef("bad --cni-timeout %s: wait longer than 0s", o.timeout)
	}
	entry := cni.Entry{AgentNamespace: o.podNamespace, AgentPodPrefix: podPrefix(o.podName)}
	if o.runDir != "" && o.runDir != cni.DefaultRunDir {
		entry.RunDir = o.runDir
	}
	if o.timeout != cni.DefaultTimeout {
		entry.Timeout = o.timeout.String()
	}
	entry.ExcludeNamespaces = o.excluded()
	installer, err := cni.NewInstaller(cni.Options{
		NetDir: o.netDir, BinDir: o.binDir, CacheDir: o.cacheDir,
		ConfName: o.confName, Chained: o.chained, Owned: o.owned, OwnedName: o.ownedName, GroupRead: o.groupRead,
		Entry: entry,
		Log:   log,
	})
	if err != nil {
		return nil, &usageError{err}
	}
	return installer, nil
}

// excluded are the namespaces whose pods are never in the mesh.
func (o *pluginOptions) excluded() []string {
	var names []string
	for name := range strings.SplitSeq(o.exclude, ",") {
		if name = strings.TrimSpace(name); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// podPrefix is what the names of a DaemonSet's pods have in common: all up to the last part, which is the pod's own.
func podPrefix(pod string) string { return pod[:strings.LastIndexByte(pod, '-')+1] }

func newInstall(env *Env) *cobra.Command {
	var o pluginOptions
	var watch bool
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Install the CNI plugin on this node",
		Long: `Install the CNI plugin: copy this program to the runtime's plugins, and put it at the end of the list of
plugins in the first valid CNI configuration. All else in that file stays as it is, byte for byte; a
configuration of a single plugin is put aside, and a list takes its place. What is as it should be is left
alone, so it may be repeated.

With --watch it goes on to look after it until SIGTERM: it waits for a configuration, and puts the plugin
in again when another program has rewritten the file. SIGTERM leaves the plugin installed.

Each flag has a twin in the environment, named beside it. The flag wins; a variable that is set to
nothing counts as unset.`,
		Example: `  redirector install
  redirector install --exclude-namespaces kube-system --cni-conf-name 10-flannel.conflist
  redirector install --watch --mounted-cni-net-dir /host/etc/cni/net.d --cni-bin-dir /host/opt/cni/bin
  redirector install --chained-cni-plugin=false --cni-conf-name redirector.conf`,
	}
	o.addPluginFlags(cmd.Flags())
	addPath(cmd.Flags(), &o.runDir, "run-dir", defaultRunDir, "the agent's run-dir, as the runtime sees it")
	twin(cmd.Flags(), "run-dir")
	cmd.Flags().BoolVar(&watch, "watch", false, "keep it installed until SIGTERM")
	cmd.RunE = func(*cobra.Command, []string) error {
		level := slog.LevelWarn
		if watch {
			level = slog.LevelInfo
		}
		installer, err := o.installer(slog.New(slog.NewTextHandler(env.Stderr, &slog.HandlerOptions{Level: level})))
		if err != nil {
			return err
		}
		if watch {
			return installer.Run(cmd.Context(), nil)
		}
		changed, err := installer.Install()
		if err != nil {
			return fmt.Errorf("install the CNI plugin: %w", asRoot(err))
		}
		return env.print(func(w io.Writer) error { return printChanged(w, changed, "the plugin is installed already") })
	}
	return cmd
}

func newUninstall(env *Env) *cobra.Command {
	o := pluginOptions{chained: true, timeout: cni.DefaultTimeout}
	keep := choice{value: string(cni.KeepIfCached), choices: []string{string(cni.KeepIfCached), string(cni.KeepNever)}}
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Take the CNI plugin off this node",
		Long: `Take the CNI plugin off this node: first out of all CNI configurations, which are then, byte for byte, as
they were, and then the program. It does not matter how it was installed, and it may be repeated. Whoever keeps
it installed ("redirector install --watch") has to be stopped before. Enrolled pods stay enrolled: see
"redirector cleanup".

CRI-O and Multus delete a container by the configuration that it was added by, and call plugins that are
installed no more. So the program stays while the runtime's cache has containers that were added by it: it
lets all pods start then, and removes itself when the last of those containers goes. containerd does not do that;
--keep-binary=never is right there.`,
		Example: `  redirector uninstall
  redirector uninstall --keep-binary=never --mounted-cni-net-dir /host/etc/cni/net.d --cni-bin-dir /host/opt/cni/bin`,
	}
	o.addPluginDirs(cmd.Flags())
	cmd.Flags().Var(&keep, "keep-binary", "whether the program stays for containers that the runtime will delete by it")
	twin(cmd.Flags(), "keep-binary")
	cmd.RunE = func(*cobra.Command, []string) error {
		installer, err := o.installer(slog.New(slog.NewTextHandler(env.Stderr, &slog.HandlerOptions{Level: slog.LevelError})))
		if err != nil {
			return err
		}
		done, err := installer.Uninstall(cni.KeepBinary(keep.value))
		if err != nil {
			return fmt.Errorf("uninstall the CNI plugin: %w", asRoot(err))
		}
		return env.print(func(w io.Writer) error {
			if done.CachedBy > 0 {
				fmt.Fprintf(w, "%d containers were added by the plugin: %s stays until the last is deleted\n", done.CachedBy, o.binDir)
			}
			return printChanged(w, done.Changed, "no configuration has the plugin")
		})
	}
	return cmd
}

func printChanged(w io.Writer, changed []string, nothing string) error {
	if len(changed) == 0 {
		_, err := fmt.Fprintln(w, nothing)
		return err
	}
	for _, path := range changed {
		verb := "written"
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
			verb = "removed"
		}
		if _, err := fmt.Fprintf(w, "%s %s\n", verb, path); err != nil {
			return err
		}
	}
	return nil
}

// asRoot says what to do about a lack of rights.
func asRoot(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%w: run this as root", err)
	}
	return err
}
