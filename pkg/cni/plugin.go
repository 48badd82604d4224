// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/ns"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
	"github.com/containernetworking/cni/pkg/version"
	"gopkg.in/natefinch/lumberjack.v2"
)

// versions are those of the CNI specification that the plugin knows. 0.3.0 is the first in which plugins can be chained as here: it
// brought prevResult.
var versions = version.VersionsStartingFrom("0.3.0")

// The defaults of what the installer puts into the configuration.
const (
	// DefaultRunDir is the agent's default.
	DefaultRunDir = "/var/run/redirector"
	// DefaultTimeout is how long the plugin waits for the agent in all. The kubelet gives a sandbox four minutes (twice its
	// --runtime-request-timeout), in which the plugins before have their part.
	DefaultTimeout = 30 * time.Second
)

// The plugin's log, in the run-dir.
const (
	logName    = "plugin.log"
	logPattern = "plugin*.log" // with those that were rotated
	maxLog     = 5             // MB
)

// Entry is the plugin's part of a CNI configuration. All of it is in the configuration: the plugin reads no environment of its own.
type Entry struct {
	// Type is PluginType.
	Type string `json:"type"`
	// RunDir is the agent's run-dir as the container runtime sees it; "": DefaultRunDir.
	RunDir string `json:"runDir,omitempty"`
	// Timeout is how long the plugin waits for the agent, as time.ParseDuration reads it; "": DefaultTimeout.
	Timeout string `json:"timeout,omitempty"`
	// AgentNamespace and AgentPodPrefix tell the agent's own pod, which starts without being asked for: its namespace, and what
	// its name begins with. If one is "", no pod is the agent's.
	AgentNamespace string `json:"agentNamespace,omitempty"`
	AgentPodPrefix string `json:"agentPodPrefix,omitempty"`
	// ExcludeNamespaces are those whose pods start without being asked for.
	ExcludeNamespaces []string `json:"excludeNamespaces,omitempty"`
	// Replaces is the name of the file that held the primary plugin's configuration before the installer made a list of it.
	Replaces string `json:"replaces,omitempty"`
	// Owned says that the whole list is the installer's, and goes when it goes.
	Owned bool `json:"owned,omitempty"`
}

// pluginConf is what the plugin gets on standard input.
type pluginConf struct {
	Entry
	CNIVersion string          `json:"cniVersion"`
	PrevResult json.RawMessage `json:"prevResult"`

	timeout time.Duration
}

// kubernetesArgs are those of CNI_ARGS that the kubelet's runtimes send.
type kubernetesArgs struct {
	types.CommonArgs
	K8S_POD_NAME      types.UnmarshallableString //nolint:revive // the name is the variable's, which LoadArgs looks for
	K8S_POD_NAMESPACE types.UnmarshallableString //nolint:revive // as above
	K8S_POD_UID       types.UnmarshallableString //nolint:revive // as above
}

// Main is the plugin: it reads the CNI's environment and standard input, writes a result or an error as JSON to standard output, and
// returns the exit status.
func Main() int {
	if os.Getenv("CNI_COMMAND") == "DEL" {
		// What ADD did goes with the pod's network namespace, and the agent sees that. A DEL that fails would keep the pod
		// from ending, so nothing is asked that could be missing: no variable, no configuration, no agent.
		_ = guard(func() *types.Error {
			leaveIfLast(os.Getenv("CNI_CONTAINERID"))
			return nil
		})
		return 0
	}
	pass := func(*skel.CmdArgs) error { return nil }
	err := guard(func() *types.Error {
		return skel.PluginMainFuncsWithError(skel.CNIFuncs{
			Add: add,
			Del: pass,
			// The agent compares and repairs all the time; there is nothing that a pod's container could be checked for.
			Check: pass,
			GC:    pass,
			// Not whether the agent answers: a node whose network is "not ready" starts no pod, the agent's neither.
			Status: pass,
		}, versions, "")
	})
	if err == nil {
		return 0
	}
	if printErr := err.Print(); printErr != nil {
		fmt.Fprintln(os.Stderr, "redirector cni: cannot write an error to standard output:", printErr)
	}
	return 1
}

// guard turns a panic into a CNI error.
func guard(do func() *types.Error) (err *types.Error) {
	defer func() {
		if cause := recover(); cause != nil {
			fmt.Fprintf(os.Stderr, "redirector cni: panic: %v\n%s", cause, debug.Stack())
			err = types.NewError(types.ErrInternal, fmt.Sprintf("the redirector plugin has a bug: panic: %v", cause), "")
		}
	}()
	return do()
}

// add lets a pod start when it may.
func add(args *skel.CmdArgs) error {
	conf, err := parseConf(args.StdinData)
	if err != nil {
		return err
	}
	result, ips, err := conf.result()
	if err != nil {
		return err
	}
	pod := kubernetesArgs{CommonArgs: types.CommonArgs{IgnoreUnknown: true}}
	if err := types.LoadArgs(args.Args, &pod); err != nil {
		return types.NewError(types.ErrInvalidEnvironmentVariables, fmt.Sprintf("bad CNI_ARGS %q: %v", args.Args, err), "")
	}
	// The skeleton looks at this, too, but when the result is printed.
	if own, err := ns.CheckNetNS(args.Netns); err != nil {
		return err
	} else if own {
		return types.NewError(types.ErrInvalidNetNS, fmt.Sprintf("CNI_NETNS %s is the host's network namespace: name the pod's own", args.Netns), "")
	}
	request := addBody{
		Netns:        args.Netns,
		PodName:      string(pod.K8S_POD_NAME),
		PodNamespace: string(pod.K8S_POD_NAMESPACE),
		PodUID:       string(pod.K8S_POD_UID),
		IPs:          ips,
	}
	if err := conf.admit(&request); err != nil {
		return err
	}
	if _, err := os.Stdout.Write(result); err != nil {
		return types.NewError(types.ErrIOFailure, fmt.Sprintf("write the result to standard output: %v", err), "")
	}
	return nil
}

func parseConf(stdin []byte) (*pluginConf, error) {
	var conf pluginConf
	if err := json.Unmarshal(stdin, &conf); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, fmt.Sprintf("read the network configuration: %v", err), "")
	}
	conf.RunDir = cmp.Or(conf.RunDir, DefaultRunDir)
	conf.timeout = DefaultTimeout
	if conf.Timeout != "" {
		timeout, err := time.ParseDuration(conf.Timeout)
		if err != nil || timeout <= 0 {
			return nil, types.NewError(types.ErrInvalidNetworkConfig,
				fmt.Sprintf("bad timeout %q in the network configuration: write a time as in 30s", conf.Timeout), "")
		}
		conf.timeout = timeout
	}
	return &conf, nil
}

// result returns what to print, and the addresses in it. It is the previous plugin's, byte for byte, unless that is of another
// version than the configuration. A plugin that is not called in a chain has no result to pass on, and prints one with nothing in it.
func (c *pluginConf) result() ([]byte, []ipBody, error) {
	text := c.PrevResult
	if len(text) == 0 || bytes.Equal(text, []byte("null")) {
		text = fmt.Appendf(nil, `{"cniVersion":%q}`, c.CNIVersion)
	}
	refuse := func(err error) ([]byte, []ipBody, error) {
		return nil, nil, types.NewError(types.ErrInvalidNetworkConfig, fmt.Sprintf("read prevResult of the network configuration: %v", err), "")
	}
	var its struct {
		CNIVersion string `json:"cniVersion"`
	}
	if err := json.Unmarshal(text, &its); err != nil {
		return refuse(err)
	}
	of := cmp.Or(its.CNIVersion, c.CNIVersion)
	parsed, err := create.Create(of, text)
	if err != nil {
		return refuse(err)
	}
	if its.CNIVersion != c.CNIVersion {
		converted, err := parsed.GetAsVersion(c.CNIVersion)
		if err != nil {
			return refuse(err)
		}
		var out bytes.Buffer
		if err := converted.PrintTo(&out); err != nil {
			return refuse(err)
		}
		text = out.Bytes()
	}
	current, err := types100.NewResultFromResult(parsed)
	if err != nil {
		return refuse(err)
	}
	ips := []ipBody{}
	for _, ip := range current.IPs {
		ips = append(ips, ipBody{Interface: ip.Interface, Address: ip.Address, Gateway: ip.Gateway})
	}
	return text, ips, nil
}

// admit returns when the pod may start.
func (c *pluginConf) admit(pod *addBody) error {
	switch {
	case pod.PodName == "" && pod.PodNamespace == "":
		return nil // not Kubernetes' container
	case pod.PodName == "" || pod.PodNamespace == "":
		return types.NewError(types.ErrInvalidEnvironmentVariables, "CNI_ARGS has one of K8S_POD_NAME and K8S_POD_NAMESPACE: the runtime must set both", "")
	case c.isAgent(pod), slices.Contains(c.ExcludeNamespaces, pod.PodNamespace), isRetired():
		return nil
	}
	log, closeLog := c.openLog()
	defer closeLog()
	log = log.With("namespace", pod.PodNamespace, "pod", pod.PodName, "netns", pod.Netns)

	ctx, cancel := context.WithTimeout(context.Background(), c.timeout)
	defer cancel()
	socket := filepath.Join(c.RunDir, SocketName)
	start := time.Now()
	err := ask(ctx, socket, pod)
	away, isAway := errors.AsType[*unreachableError](err)
	for isAway && ctx.Err() == nil {
		if c.excludedByState(pod.PodNamespace) {
			break
		}
		log.Info("waiting for the agent", "error", away)
		sleep(ctx, askAgain)
		if ctx.Err() != nil {
			break
		}
		err = ask(ctx, socket, pod)
		var still *unreachableError
		if still, isAway = errors.AsType[*unreachableError](err); isAway && ctx.Err() == nil {
			away = still // otherwise it says no more than that the time is over
		}
	}
	if isAway {
		err = c.admitWithoutAgent(pod, away, log)
	}
	took := time.Since(start)
	if err != nil {
		log.Warn("the pod does not start", "took", took, "error", err)
		return types.NewError(types.ErrTryAgainLater, oneLine(fmt.Errorf("pod %s/%s: %w", pod.PodNamespace, pod.PodName, err)), "")
	}
	log.Info("the pod may start", "took", took)
	return nil
}

func (c *pluginConf) isAgent(pod *addBody) bool {
	return c.AgentNamespace != "" && c.AgentPodPrefix != "" &&
		pod.PodNamespace == c.AgentNamespace && strings.HasPrefix(pod.PodName, c.AgentPodPrefix)
}

func (c *pluginConf) excludedByState(namespace string) bool {
	state, err := ReadNodeState(c.RunDir)
	return err == nil && slices.Contains(state.ExcludedNamespaces, namespace)
}

// admitWithoutAgent judges by what the last agent has left. Where nothing is known, nothing starts: so it is after a reboot, which
// empties the run-dir and starts all pods at once.
func (c *pluginConf) admitWithoutAgent(pod *addBody, away *unreachableError, log *slog.Logger) error {
	const remedy = "see whether the agent runs on this node; the kubelet tries again"
	state, err := ReadNodeState(c.RunDir)
	switch {
	case err != nil:
		return fmt.Errorf("%w, and it is not known whether the namespace is in the mesh (%w): %s", away, err, remedy)
	case slices.Contains(state.ExcludedNamespaces, pod.PodNamespace):
		return nil
	case slices.Contains(state.EnrolledNamespaces, pod.PodNamespace):
		return fmt.Errorf("%w, and the namespace is in the mesh, so the pod must not start without it: %s", away, remedy)
	default:
		log.Warn("no agent answers: the pod starts without being asked for, as its namespace is not in the mesh; if the pod itself is, "+
			"the agent captures it when it is back", "error", away)
		return nil
	}
}

// openLog opens the plugin's log. Where there is no run-dir it is standard error, which the runtime may keep.
func (c *pluginConf) openLog() (*slog.Logger, func()) {
	if info, err := os.Stat(c.RunDir); err != nil || !info.IsDir() {
		return slog.New(slog.NewTextHandler(os.Stderr, nil)), func() {}
	}
	file := &lumberjack.Logger{Filename: filepath.Join(c.RunDir, logName), MaxSize: maxLog, MaxBackups: 1}
	return slog.New(slog.NewTextHandler(file, nil)).With("pid", os.Getpid()), func() { _ = file.Close() }
}
