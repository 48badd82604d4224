// SPDX-License-Identifier: Apache-2.0

package podns

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// The main thread stays where it is, for /proc/self to mean the host.
func init() { runtime.LockOSThread() }

// newNetNS makes a network namespace that lives as long as the test, and returns a path to it.
func newNetNS(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("run the tests as root: they make network namespaces")
	}
	if _, err := Cookie(); errors.Is(err, unix.ENOPROTOOPT) {
		t.Skip("needs kernel 5.14: SO_NETNS_COOKIE")
	}
	path := make(chan string)
	errs := make(chan error)
	ended := make(chan struct{})
	t.Cleanup(func() { close(ended) })
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			errs <- err
			return
		}
		path <- fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
		<-ended
	}()
	select {
	case p := <-path:
		return p
	case err := <-errs:
		t.Fatal(err)
		return ""
	}
}

func TestOpenRefusesTheHost(t *testing.T) {
	dir := t.TempDir()
	mount := filepath.Join(dir, "bind mount")
	if err := os.WriteFile(mount, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("/proc/self/ns/net", mount, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(mount, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	link := filepath.Join(dir, "link")
	if err := os.Symlink(mount, link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/proc/self/ns/net", "/proc/thread-self/ns/net", mount, link} {
		if ns, err := Open(path); !errors.Is(err, ErrHost) {
			t.Errorf("Open(%q) = %v, %v", path, ns, err)
		}
	}
	// Whoever may not look at pid 1's namespaces cannot open this one at all.
	if ns, err := Open("/proc/1/ns/net"); !errors.Is(err, ErrHost) && !errors.Is(err, os.ErrPermission) {
		t.Errorf("Open of pid 1's network namespace = %v, %v", ns, err)
	}
}

// The ways of telling a host's namespace must each work alone: on another node one of them may be all there is.
func TestEachWayOfTellingTheHost(t *testing.T) {
	ways := map[string]func() (bool, error){
		"initial namespace": inInitialNetNS,
		"listed by pid 1":   inNetNSOfInit,
	}
	for name, way := range ways {
		if host, err := way(); !host || err != nil {
			t.Errorf("%s: the host's namespace: %v, %v", name, host, err)
		}
	}
	ns, err := Open(newNetNS(t))
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	for name, way := range ways {
		err := ns.Do(func() error {
			host, err := way()
			if host {
				t.Errorf("%s: a pod's namespace is taken for the host's", name)
			}
			return err
		})
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOpenRefusesWhatIsNoNetNS(t *testing.T) {
	dir := t.TempDir()
	file, fifo := filepath.Join(dir, "file"), filepath.Join(dir, "fifo")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, fifo, dir, "/dev/null", "/proc/self/ns/mnt", "/proc/self/ns/user"} {
		if ns, err := Open(path); !errors.Is(err, ErrNotNetNS) || !strings.Contains(err.Error(), path) {
			t.Errorf("Open(%q) = %v, %v", path, ns, err)
		}
	}
	missing := filepath.Join(dir, "missing")
	if ns, err := Open(missing); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), missing) {
		t.Errorf("Open(%q) = %v, %v", missing, ns, err)
	}
}

func TestOpen(t *testing.T) {
	path := newNetNS(t)
	ns, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	again, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	other, err := Open(newNetNS(t))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if ns.Cookie() != again.Cookie() || ns.Inode() != again.Inode() {
		t.Error("one namespace has two identities")
	}
	if ns.Cookie() == other.Cookie() || ns.Inode() == other.Inode() {
		t.Error("two namespaces have one identity")
	}
	if want, err := statNetNS(path); err != nil || ns.Inode() != want.ino {
		t.Errorf("inode is %d, want %d, %v", ns.Inode(), want.ino, err)
	}

	found, err := Find(ns.Inode(), ns.Cookie())
	if !errors.Is(err, ErrGone) {
		// A thread's namespace is in /proc/PID/task/TID only, where nothing is looked for.
		t.Errorf("Find = %v, %v", found, err)
	}
}

func TestDoLeavesNoThreadBehind(t *testing.T) {
	ns, err := Open(newNetNS(t))
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	boom := errors.New("boom")
	for range 50 {
		err := ns.Do(func() error {
			in, err := statNetNS("/proc/thread-self/ns/net")
			if err != nil {
				return err
			}
			if in.ino != ns.Inode() {
				t.Error("the function does not run in the namespace")
			}
			return boom
		})
		if !errors.Is(err, boom) {
			t.Fatalf("Do = %v", err)
		}
	}
	in := 0
	tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		if id, err := statNetNS(task); err == nil && id.ino == ns.Inode() {
			in++
		}
	}
	if in != 1 { // the one that newNetNS keeps there
		t.Errorf("%d threads are in the namespace, want 1", in)
	}
}

func TestFindAndAll(t *testing.T) {
	path := newNetNS(t)
	mount := filepath.Join(t.TempDir(), `a name with blanks and \`)
	if err := os.WriteFile(mount, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(path, mount, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(mount, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	ns, err := Open(mount)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	found, err := Find(ns.Inode(), ns.Cookie())
	if err != nil {
		t.Fatal(err)
	}
	if found.Path() != mount {
		t.Errorf("found at %q, want %q", found.Path(), mount)
	}
	_ = found.Close()
	if _, err := Find(ns.Inode(), ns.Cookie()+1); !errors.Is(err, ErrGone) {
		t.Errorf("a namespace with another cookie is found: %v", err)
	}
	n := 0
	for ns, err := range All() {
		if err != nil {
			t.Fatal(err)
		}
		if ns.Path() == mount {
			n++
		}
		if host, err := statNetNS("/proc/self/ns/net"); err != nil || ns.Inode() == host.ino {
			t.Errorf("All has the host's namespace, %v", err)
		}
	}
	if n != 1 {
		t.Errorf("All has the namespace %d times", n)
	}
}
