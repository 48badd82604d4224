// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// cacheVariable names the folder for what is slow to make and outlives a clone; the Makefile sets it.
const cacheVariable = "REDIRECTOR_CACHE"

// sources are the files of test/kube/build that decide what the program is.
var sources = []string{"go.mod", "go.sum", "main.go"}

var requiredKubernetes = regexp.MustCompile(`(?m)^\s+k8s\.io/kubernetes (v(\d+)\.(\d+)\.\S+)`)

// Binary returns the path of the program that is etcd and all of Kubernetes (test/kube/build). The first time it builds it, says
// so on progress, and keeps it in the cache, by version, Go version and a hash of its sources. That takes some minutes, and
// GOCACHE grows by some gigabytes. When several processes want it at once, one builds and the others wait.
func Binary(ctx context.Context, progress io.Writer) (string, error) {
	module, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("find the sources of kube-apiserver: run go env: %w", err)
	}
	dir := filepath.Join(filepath.Dir(strings.TrimSpace(string(module))), "test", "kube", "build")
	sum := sha256.New()
	var mod []byte
	for _, name := range sources {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return "", fmt.Errorf("read the sources of kube-apiserver: %w: run this within Redirector's module", err)
		}
		fmt.Fprintf(sum, "%s %d\n", name, len(data))
		sum.Write(data)
		if name == "go.mod" {
			mod = data
		}
	}
	version := requiredKubernetes.FindSubmatch(mod)
	if version == nil {
		return "", fmt.Errorf("%s requires no k8s.io/kubernetes", filepath.Join(dir, "go.mod"))
	}
	cache := os.Getenv(cacheVariable)
	if cache == "" {
		cache = "/var/cache/redirector"
	}
	path := filepath.Join(cache, fmt.Sprintf("kube-%s-%s-%.6x", version[1], runtime.Version(), sum.Sum(nil)), "kube")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", fmt.Errorf("make a folder for kube-apiserver: %w: set %s to a folder that can be written to", err, cacheVariable)
	}
	unlock, err := lock(filepath.Join(filepath.Dir(path), ".lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(path); err == nil {
		return path, nil
	} else if !errors.Is(err, os.ErrNotExist) {
		return "", err
	}

	fmt.Fprintf(progress, "building etcd and Kubernetes %s, once; takes some minutes\n", version[1])
	start := time.Now()
	const stamp = "-X k8s.io/component-base/version."
	flags := fmt.Sprintf("-s -w %sgitVersion=%s %sgitMajor=%s %sgitMinor=%s", stamp, version[1], stamp, version[2], stamp, version[3])
	build := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-trimpath", "-ldflags", flags, "-o", path+".new", ".")
	build.Dir = dir
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build kube-apiserver in %s: %w: %s", dir, err, out)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return "", fmt.Errorf("keep kube-apiserver: %w", err)
	}
	fmt.Fprintf(progress, "built %s in %s\n", path, time.Since(start).Round(time.Second))
	return path, nil
}

// lock waits until no other process holds the file.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock the cache: %w: set %s to a folder that can be written to", err, cacheVariable)
	}
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return func() { _ = f.Close() }, nil // with its last descriptor the lock goes
}
