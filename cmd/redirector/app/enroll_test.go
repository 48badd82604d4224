// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

func TestAPathMeansTheSameToTheAgent(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	here := fmt.Sprintf("/proc/%d", os.Getpid())
	for path, want := range map[string]string{
		"/run/netns/web":           "/run/netns/web",
		"/var/run/../run/netns/x/": "/var/run/netns/x",
		"web":                      filepath.Join(dir, "web"),
		"./a/../web":               filepath.Join(dir, "web"),
		"/proc/self/ns/net":        here + "/ns/net",
		"/proc/thread-self/ns/net": here + "/ns/net",
		"/proc//./self/fd/3":       here + "/fd/3",
		"/dev/fd/3":                here + "/fd/3",
		"/dev/stdin":               here + "/fd/0",
		"/proc/4711/ns/net":        "/proc/4711/ns/net",
		"/proc/selfish/ns/net":     "/proc/selfish/ns/net",
	} {
		if got, err := callersPath(path); err != nil || got != want {
			t.Errorf("%s becomes %q, %v; want %q", path, got, err, want)
		}
	}
}

// The namespace that the command runs in is the one that is meant, not the agent's.
func TestEnrollInAPodMeansThatPod(t *testing.T) {
	m := newMachine(t)
	agent := m.agent()
	web, other := m.pod("web"), m.pod("other")
	for pod, path := range map[string]string{"web": "/proc/self/ns/net", "other": "/proc/thread-self/ns/net"} {
		ns := web
		if pod == "other" {
			ns = other
		}
		out := m.commandIn(ns, roleRedirector, m.enrollFlags(ns, "--netns", path)).wantDone(t)
		if want := fmt.Sprintf("pod shop/%s (uid-%s) is pending\n", pod, pod); out != want {
			t.Errorf("it says %q, want %q", out, want)
		}
	}
	for _, pod := range m.pods() {
		want := web.Inode
		if pod.Name == "other" {
			want = other.Inode
		}
		if pod.NetNSInode != want {
			t.Errorf("pod %s has the namespace %d, want %d", &pod.Spec, pod.NetNSInode, want)
		}
	}
	// The process that the path names is gone, and its number may be another's: the namespaces are found again.
	m.stop(agent)
	m.agent()
	if pods := m.pods(); len(pods) != 2 {
		t.Errorf("pods are %+v", pods)
	}
}
