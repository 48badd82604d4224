// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/remotecommand"
)

const (
	cmdName   = "kubectl redirector"
	bugreport = "bugreport"
)

// usageError is a mistake in how the plugin was called.
type usageError struct{ error }

func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

// plugin is what the flags say, and the cluster that they lead to.
type plugin struct {
	node, selector, container string
	loading                   *clientcmd.ClientConfigLoadingRules
	overrides                 clientcmd.ConfigOverrides
	config                    *rest.Config
	client                    kubernetes.Interface
	namespace                 string // of pods that are named without one
}

func newCommand() *cobra.Command {
	p := &plugin{loading: clientcmd.NewDefaultClientConfigLoadingRules()}
	cmd := &cobra.Command{
		Use:   cmdName + " [flags] COMMAND [arguments]",
		Short: "Run redirector's commands in the agents of a cluster",
		Long: `Run redirector's commands in the agents of a cluster: in the agent of the node that the pod is on which the
command is about, in that of --node, or in all of them, one after the other, each with its node's name above it.

The commands are ` + strings.Join(commands, ", ") + `. What follows the command's name is the
command's own; the flags of this plugin come before it. A pod is named as NAMESPACE/NAME, or by a name
in kubectl's namespace. You need the right to list pods and to create pods/exec where the agents are.`,
		Example: `  kubectl redirector status
  kubectl redirector pod shop/web
  kubectl redirector verify web
  kubectl redirector monitor --pod shop/web
  kubectl redirector explain --pod shop/web --to 10.1.2.3:80
  kubectl redirector --node node-1 pods -o wide
  kubectl redirector --node node-1 bugreport >node-1.tar.gz`,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 || args[0] == "help" {
				return cmd.Help()
			}
			return p.run(cmd.Context(), args)
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	cmd.CompletionOptions.DisableDefaultCmd = true
	flags := cmd.Flags()
	flags.SetInterspersed(false)
	flags.StringVar(&p.node, "node", "", "the agent of this node, whatever pod the command is about")
	flags.StringVar(&p.selector, "agents", "app.kubernetes.io/name=redirector,k8s-app=istio-cni-node", "label selector of the agents' pods")
	flags.StringVar(&p.container, "container", "agent", "the agent's container")
	flags.StringVar(&p.loading.ExplicitPath, clientcmd.RecommendedConfigPathFlag, "", "path of the kubeconfig file")
	clientcmd.BindOverrideFlags(&p.overrides, flags, clientcmd.RecommendedConfigOverrideFlags(""))
	return cmd
}

// run runs a command of redirector's.
func (p *plugin) run(ctx context.Context, args []string) error {
	if !slices.Contains(commands, args[0]) {
		return usagef("%q is none of the commands that are run in agents: %s", args[0], strings.Join(commands, ", "))
	}
	if err := p.connect(); err != nil {
		return err
	}
	args, pod := aboutPod(args, p.namespace)
	node, err := p.nodeOf(ctx, pod)
	if err != nil {
		return err
	}
	agents, err := p.agents(ctx, node)
	if err != nil {
		return err
	}
	if len(agents) > 1 && (endless(args) || args[0] == bugreport) {
		return usagef("%s is for one node, and there are %d agents: name a pod, or a node by --node", args[0], len(agents))
	}
	terminal := term.IsTerminal(int(os.Stdout.Fd()))
	if args[0] == bugreport {
		if terminal {
			return usagef("%s writes a compressed tar file: send its output to one, as in %s --node NODE %s >report.tar.gz", bugreport, cmdName, bugreport)
		}
		args = append(args, "--stdout")
	}
	var errs []error
	for i := range agents {
		if len(agents) > 1 {
			fmt.Printf("== %s\n", agents[i].Spec.NodeName)
		}
		errs = append(errs, p.exec(ctx, &agents[i], append([]string{"/redirector"}, args...), terminal))
	}
	return errors.Join(errs...)
}

// connect reads the kubeconfig as kubectl does.
func (p *plugin) connect() (err error) {
	config := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(p.loading, &p.overrides)
	if p.namespace, _, err = config.Namespace(); err != nil {
		return fmt.Errorf("read the kubeconfig: %w", err)
	}
	if p.config, err = config.ClientConfig(); err != nil {
		return fmt.Errorf("read the kubeconfig: %w", err)
	}
	p.client, err = kubernetes.NewForConfig(p.config)
	return err
}

// nodeOf is the node that a command is to run on; empty: on all.
func (p *plugin) nodeOf(ctx context.Context, pod string) (string, error) {
	if p.node != "" || pod == "" {
		return p.node, nil
	}
	namespace, name, _ := strings.Cut(pod, "/")
	found, err := p.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return "", fmt.Errorf("there is no pod %s: name it as NAMESPACE/NAME, or give its namespace by -n", pod)
	case err != nil:
		return "", fmt.Errorf("look for pod %s: %w", pod, err)
	case found.Spec.NodeName == "":
		return "", fmt.Errorf("pod %s is on no node yet: see `kubectl -n %s describe pod %s`", pod, namespace, name)
	}
	return found.Spec.NodeName, nil
}

// agents are those of a node, or of all, that run.
func (p *plugin) agents(ctx context.Context, node string) ([]corev1.Pod, error) {
	options := metav1.ListOptions{LabelSelector: p.selector}
	if node != "" {
		options.FieldSelector = "spec.nodeName=" + node
	}
	list, err := p.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, options)
	if err != nil {
		return nil, fmt.Errorf("look for agents: %w", err)
	}
	agents := slices.DeleteFunc(list.Items, func(pod corev1.Pod) bool {
		return pod.DeletionTimestamp != nil || pod.Status.Phase != corev1.PodRunning
	})
	if len(agents) == 0 {
		where := "in the cluster"
		if node != "" {
			where = "on node " + node
		}
		return nil, fmt.Errorf("no agent runs %s (pods with %s): see `kubectl get pods -A -l %s`", where, p.selector, p.selector)
	}
	slices.SortFunc(agents, func(a, b corev1.Pod) int { return strings.Compare(a.Spec.NodeName, b.Spec.NodeName) })
	return agents, nil
}

// exec runs a program in an agent's container, on a terminal or not: on one it writes in colour.
func (p *plugin) exec(ctx context.Context, agent *corev1.Pod, argv []string, terminal bool) error {
	request := p.client.CoreV1().RESTClient().Post().Resource("pods").Namespace(agent.Namespace).Name(agent.Name).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Container: p.container, Command: argv, Stdout: true, Stderr: !terminal, TTY: terminal}, scheme.ParameterCodec)
	executor, err := newExecutor(p.config, request.URL())
	if err != nil {
		return err
	}
	options := remotecommand.StreamOptions{Stdout: os.Stdout, Stderr: os.Stderr, Tty: terminal}
	if terminal {
		options.Stderr = nil
	}
	if err := executor.StreamWithContext(ctx, options); err != nil && ctx.Err() == nil {
		return fmt.Errorf("in agent %s/%s: %w", agent.Namespace, agent.Name, err)
	}
	return nil
}
