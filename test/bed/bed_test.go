// SPDX-License-Identifier: Apache-2.0

package bed

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// traces is what a bed could leave behind in this process and on this machine.
type traces struct {
	Mounts, Threads, Links string
	FDs, Beds              []string
}

func look(t *testing.T) traces {
	t.Helper()
	var tr traces
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	me, err := thisProcess()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		// Other packages' tests, which run at the same time, have beds as well.
		if !strings.Contains(line, dirPrefix) || strings.Contains(line, me.prefix()) {
			tr.Mounts += line
		}
	}
	tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	inodes := map[string]bool{}
	for _, task := range tasks {
		if ns, err := os.Readlink(task); err == nil { // a thread may end meanwhile
			inodes[ns] = true
		}
	}
	tr.Threads = fmt.Sprint(inodes)
	links, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	tr.Links = fmt.Sprint(links)
	fds, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if what, err := os.Readlink(fd); err == nil { // not the one that listed them
			tr.FDs = append(tr.FDs, what)
		}
	}
	slices.Sort(tr.FDs)
	for _, dir := range []string{os.TempDir(), cgroupMountOrEmpty()} {
		beds, err := filepath.Glob(filepath.Join(dir, me.prefix()+"*"))
		if err != nil {
			t.Fatal(err)
		}
		tr.Beds = append(tr.Beds, beds...)
	}
	return tr
}

// watchNetns returns a function that waits until the kernel has destroyed the namespace ns, as seen from watcher: the
// kernel forgets the id that one namespace has in another when that is gone. The caller chooses an id; small ones are taken
// by the kernel for the other ends of links.
func watchNetns(t *testing.T, watcher *NS, id int, ns *NS) (waitGone func()) {
	t.Helper()
	h, err := watcher.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if err := h.SetNetNsIdByFd(int(ns.file.Fd()), id); err != nil {
		t.Fatal(err)
	}
	known := func() bool {
		found := false
		err := watcher.Do(func() error {
			msgs, err := dump(unix.RTM_GETNSID, unix.RTM_NEWNSID, &nl.RtGenMsg{})
			for _, m := range msgs {
				// The attributes of a message with a header of one byte begin where the next four do.
				_, attrs, splitErr := split(m, unix.NLMSG_ALIGNTO)
				err = errors.Join(err, splitErr)
				for _, a := range attrs {
					found = found || a.Attr.Type == unix.NETNSA_NSID && value(a.Value, asUint, nil) == fmt.Sprint(id)
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	if !known() {
		t.Fatalf("%s does not know the namespace that it is to watch", watcher.Name)
	}
	return func() {
		t.Helper()
		eventually(t, "the kernel has destroyed netns "+ns.Name, func() bool { return !known() })
	}
}

func TestCloseLeavesNothing(t *testing.T) {
	watcher := ForTest(t, Options{})
	steer, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SkLookup, AttachType: ebpf.AttachSkLookup, License: "Apache-2.0",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer steer.Close()
	argv, env := role(t, "sleep")
	var before traces
	for round := range 3 {
		b, err := New(Options{})
		if err != nil {
			t.Fatal(err)
		}
		closeAtEnd(t, b) // when the test ends early
		p := pod(t, b, "a", PodOptions{})
		if err := b.JoinCgroup(); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Start(p, true, "sleeper", argv, env); err != nil {
			t.Fatal(err)
		}
		app := serve(t, b.Outside, AppOptions{})
		for _, remote := range []netip.Addr{b.Outside.V4, b.Outside.V6} {
			checkConnection(t, p, DialSpec{Remote: addrPort(remote, app.Port)}, own(p, remote))
		}
		// The other end of this one stays open in the app.
		c, err := p.Dial(within(t), DialSpec{Remote: addrPort(b.Outside.V4, app.Port)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.Listen("tcp", 0, ListenOptions{}); err != nil {
			t.Fatal(err)
		}
		snapshot(t, p)
		// What holds the namespace's program is a pin on the bed's bpffs.
		l, err := link.AttachNetNs(int(p.file.Fd()), steer)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(b.BPFFS, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := l.Pin(filepath.Join(b.BPFFS, "steer")); err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		var waits []func()
		for i, ns := range []*NS{p, b.Node, b.Outside} {
			waits = append(waits, watchNetns(t, watcher.Node, 100+3*round+i, ns))
		}

		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := b.Close(); err != nil {
				t.Fatal(err)
			}
		}
		for _, wait := range waits {
			wait()
		}
		// The first round has had the runtime open what it keeps.
		if round == 0 {
			before = look(t)
			continue
		}
		if diff := cmp.Diff(before, look(t)); diff != "" {
			t.Errorf("round %d left something:\n%s", round, diff)
		}
	}
}

func TestClosedBedMakesNothing(t *testing.T) {
	b, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	p := pod(t, b, "a", PodOptions{})
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Pod("b", PodOptions{}); err == nil {
		t.Error("a closed bed made a pod")
	}
	if _, err := p.ServeApp(0, AppOptions{}); err == nil {
		t.Error("a closed bed's pod served an app")
	}
	if _, err := p.Dial(within(t), DialSpec{Remote: netip.MustParseAddrPort("127.0.0.1:1")}); err == nil {
		t.Error("a closed bed's pod made a connection")
	}
	argv, env := role(t, "hello")
	if _, err := b.Start(p, true, "hello", argv, env); err == nil {
		t.Error("a closed bed started a process")
	}
}

func TestPathsAreUsable(t *testing.T) {
	b := ForTest(t, Options{})
	if _, err := os.Stat(b.BPFFS); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("BPFFS %s: %v, want that it does not exist", b.BPFFS, err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(b.BPFFS), &fs); err != nil || fs.Type != unix.BPF_FS_MAGIC {
		t.Errorf("BPFFS %s would be on a file system of type %#x, %v", b.BPFFS, fs.Type, err)
	}
	if err := unix.Statfs(b.Cgroup, &fs); err != nil || fs.Type != unix.CGROUP2_SUPER_MAGIC {
		t.Errorf("cgroup %s is on a file system of type %#x, %v", b.Cgroup, fs.Type, err)
	}
	l, err := net.Listen("unixpacket", b.ZDSSocket)
	if err != nil {
		t.Errorf("ZDSSocket: %v", err)
	} else if err := l.Close(); err != nil {
		t.Error(err)
	}
	if entries, err := os.ReadDir(b.RunDir); len(entries) > 0 || err != nil {
		t.Errorf("the run-dir holds %v, %v", entries, err)
	}
}

func TestDoReturnsToTheThreadsOwnNamespace(t *testing.T) {
	b := ForTest(t, Options{})
	home, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	mine := errors.New("mine")
	for _, ns := range []*NS{b.Node, b.Outside} {
		err := ns.Do(func() error {
			if got, err := os.Readlink(threadNetns); got != fmt.Sprintf("net:[%d]", ns.Inode) || err != nil {
				t.Errorf("Do runs in %s, %v", got, err)
			}
			return b.Node.Do(func() error { return mine })
		})
		if !errors.Is(err, mine) {
			t.Errorf("Do returned %v", err)
		}
	}
	err = b.Node.Do(func() error { runtime.Goexit(); return nil })
	if err == nil {
		t.Error("Do said nothing about a function that has not returned")
	}
	if got := look(t).Threads; got != fmt.Sprint(map[string]bool{home: true}) {
		t.Errorf("threads are in %s, the process is in %s", got, home)
	}
}

// TestNewThatFailsLeavesNothing has New fail at its beginning and in the middle.
func TestNewThatFailsLeavesNothing(t *testing.T) {
	for name, c := range map[string]struct {
		capability int
		env        []string
		want       string
	}{
		"mount":   {capability: unix.CAP_SYS_ADMIN, want: "needs root"},
		"network": {capability: unix.CAP_NET_ADMIN, want: "bring link lo up"},
		"path":    {capability: -1, env: []string{"TMPDIR=" + filepath.Join(t.TempDir(), strings.Repeat("x", 90))}, want: "TMPDIR"},
	} {
		t.Run(name, func(t *testing.T) {
			argv, env := role(t, "new")
			cmd := exec.Command(argv[0])
			cmd.Env = append(append(os.Environ(), env...), c.env...)
			var out []byte
			done := make(chan error)
			go func() {
				// The child gets what the thread has; the thread, without the capability, ends with the goroutine.
				runtime.LockOSThread()
				if c.capability >= 0 {
					if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c.capability), 0, 0, 0); err != nil {
						done <- err
						return
					}
				}
				var err error
				out, err = cmd.CombinedOutput()
				done <- err
			}()
			if err := <-done; err != nil {
				t.Fatal(err, string(out))
			}
			if got := string(out); !strings.Contains(got, c.want) || strings.Contains(got, "<nil>") || strings.Contains(got, "LEFT") {
				t.Errorf("it said %q, want an error with %q and nothing left", got, c.want)
			}
		})
	}
}

func TestSweepRemovesTheBedsOfTheDeadOnly(t *testing.T) {
	argv, env := role(t, "crash")
	cmd := exec.Command(argv[0])
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = stdin.Close() // its sign to go
		_ = cmd.Wait()    // killed by itself
	}()
	var dir, cgroup string
	var sleeper int
	if _, err := fmt.Fscan(stdout, &dir, &cgroup, &sleeper); err != nil {
		t.Fatal(err)
	}

	own := ForTest(t, Options{}) // sweeps too
	if err := Sweep(); err != nil {
		t.Fatal(err)
	}
	for _, b := range []struct{ dir, cgroup string }{{dir, cgroup}, {own.Dir, own.cgroupTop}} {
		for _, path := range []string{b.cgroup, filepath.Join(b.dir, "netns", "node")} {
			if _, err := os.Stat(path); err != nil {
				t.Errorf("the bed of a living process was swept: %v", err)
			}
		}
	}
	if err := unix.Kill(sleeper, 0); err != nil {
		t.Errorf("the process of a living process's bed: %v", err)
	}

	if err := stdin.Close(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Fatalf("the process that was to be killed ended with %v", err)
	}
	if _, err := os.Stat(dir); err != nil {
		t.Fatalf("there is nothing to sweep: %v", err)
	}
	if err := Sweep(); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, cgroup} {
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", path, err)
		}
	}
	points, err := mountPoints()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range points {
		if strings.HasPrefix(p, dir) {
			t.Errorf("%s is still mounted", p)
		}
	}
	if err := unix.Kill(sleeper, 0); !errors.Is(err, unix.ESRCH) && !zombie(sleeper) {
		t.Errorf("the process %d of a dead process's bed is still there: %v", sleeper, err)
	}
	if _, err := os.Stat(own.Dir); err != nil {
		t.Errorf("our own bed was swept: %v", err)
	}
}

func TestOwnerInAName(t *testing.T) {
	me, err := thisProcess()
	if err != nil {
		t.Fatal(err)
	}
	if o, ok := parseOwner(me.prefix() + "123"); o != me || !ok || o.dead() {
		t.Errorf("of this process's own name there is read %v, %v, dead %v", o, ok, o.dead())
	}
	// Another process has got the pid since.
	if o := (owner{me.pid, me.start - 1}); !o.dead() {
		t.Errorf("%v is said to live", o)
	}
	for _, name := range []string{"", "redirector-bed-", "redirector-bed-1-2", "redirector-bed-x-2-3", "redirector-bed-1-x-3",
		"redirector-bed--1-2-3", "redirector-bed-1-2-3-4", "x-redirector-bed-1-2-3"} {
		if o, ok := parseOwner(name); ok {
			t.Errorf("in %q there is read %v", name, o)
		}
	}
}

func TestUnescape(t *testing.T) {
	for in, want := range map[string]string{`/a`: `/a`, `/a\040b\134`: `/a b\`, `/a\0`: `/a\0`, `/a\999`: `/a\999`} {
		if got := unescape(in); got != want {
			t.Errorf("%q was read as %q, want %q", in, got, want)
		}
	}
}
