// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// fetch runs fetch.sh in a network namespace with no way out of it.
func fetch(t *testing.T, cache string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, for a network namespace")
	}
	var out, complaints strings.Builder
	cmd := exec.Command("../fetch.sh", args...)
	cmd.Env = append(os.Environ(), "REDIRECTOR_CACHE="+cache)
	cmd.Stdout, cmd.Stderr = &out, &complaints
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode(), out.String(), complaints.String()
	}
	if err != nil {
		t.Fatal(err)
	}
	return 0, out.String(), complaints.String()
}

// cacheOf makes a cache that has kernels of these lines.
func cacheOf(t *testing.T, lines map[string]string) string {
	t.Helper()
	cache := t.TempDir()
	for line, version := range lines {
		link := filepath.Join(cache, "lines", line)
		err := errors.Join(
			os.MkdirAll(filepath.Join(cache, "kernels", version), 0o755),
			os.MkdirAll(filepath.Dir(link), 0o755),
			os.Symlink("../kernels/"+version, link),
		)
		if err != nil {
			t.Fatal(err)
		}
	}
	return cache
}

func TestFetchNeedsNoNetworkWhenTheCacheIsFull(t *testing.T) {
	cache := cacheOf(t, map[string]string{"5.10": "5.10.0-1", "6.1": "6.1.0-2", "newest": "7.1.0"})
	code, stdout, stderr := fetch(t, cache, "5.10", "6.1", "newest")
	if code != 0 || stderr != "" {
		t.Errorf("exit status %d, and it says %q", code, stderr)
	}
	for _, want := range []string{"5.10 ", "5.10.0-1\n", "6.1.0-2\n", "newest   7.1.0\n"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("%q is not in\n%s", want, stdout)
		}
	}
	if _, err := os.Stat(filepath.Join(cache, "apt")); err == nil {
		t.Error("it has asked apt for something")
	}
}

func TestFetchSaysWhatItCannotGet(t *testing.T) {
	code, stdout, stderr := fetch(t, cacheOf(t, map[string]string{"6.1": "6.1.0-2"}), "6.1", "6.12")
	if code != 3 || !strings.Contains(stderr, "no kernel for: 6.12 (not in ") {
		t.Errorf("exit status %d, want 3, and it says %q", code, stderr)
	}
	if !strings.Contains(stdout, "6.1.0-2\n") || strings.Contains(stdout, "6.12") {
		t.Errorf("it has\n%s", stdout)
	}
}

func TestFetchKeepsAKernelThatItCannotRefresh(t *testing.T) {
	code, stdout, stderr := fetch(t, cacheOf(t, map[string]string{"6.1": "6.1.0-2"}), "--refresh", "6.1")
	if code != 0 || !strings.Contains(stdout, "6.1.0-2\n") {
		t.Errorf("exit status %d, and it says %q and %q", code, stdout, stderr)
	}
}
