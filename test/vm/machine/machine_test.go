// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/test/vm/guest"
)

func TestArchiveReportsTheFirstError(t *testing.T) {
	a := newArchive(&bytes.Buffer{})
	missing := filepath.Join(t.TempDir(), "missing")
	a.copyTree(missing) // may be absent
	a.copyFile("/x", missing)
	a.file("/y", nil)
	if err := a.close(); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), missing) {
		t.Errorf("close() = %v, want the missing file", err)
	}
}

func TestComplaintsAreThoseSinceTheProgramStarted(t *testing.T) {
	log := "[1.0] WARNING: CPU: 0 at boot\n[2.0] " + guest.LogMark + "\r\n" +
		"[3.0] test: nothing special\r\n[4.0] WARNING: CPU: 1 PID: 7 at net/core/sock_map.c:12\r\n[5.0] BUG: sleeping function\r\n"
	want := []string{"[4.0] WARNING: CPU: 1 PID: 7 at net/core/sock_map.c:12", "[5.0] BUG: sleeping function"}
	if diff := cmp.Diff(want, Complaints(log)); diff != "" {
		t.Errorf("complaints (-want +got):\n%s", diff)
	}
	if got := Complaints("[1.0] WARNING: at boot, and no program started\n"); got != nil {
		t.Errorf("complaints of a boot alone: %q", got)
	}
}

func TestTailKeepsWholeLines(t *testing.T) {
	for _, tc := range []struct {
		in   string
		n    int
		want string
	}{{"one\ntwo\n", 100, "one\ntwo\n"}, {"one\ntwo\nthree\n", 8, "three\n"}, {"onelongline", 4, "line"}} {
		if got := string(tail([]byte(tc.in), tc.n)); got != tc.want {
			t.Errorf("tail(%q, %d) = %q, want %q", tc.in, tc.n, got, tc.want)
		}
	}
}

func TestFolderWithoutAKernelIsRefused(t *testing.T) {
	dir := t.TempDir()
	if _, err := OpenKernel(dir); err == nil || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "fetch.sh") {
		t.Errorf("error is %v, want one that names the folder and the remedy", err)
	}
}

func TestGuestWritesOnlyWhatWasAskedFor(t *testing.T) {
	dir := t.TempDir()
	p := &Program{Collect: []string{filepath.Join(dir, "cover.out"), filepath.Join(dir, "covdata") + "/"}}
	for path, want := range map[string]bool{
		filepath.Join(dir, "cover.out"):         true,
		filepath.Join(dir, "covdata/counters"):  true,
		filepath.Join(dir, "other"):             false,
		filepath.Join(dir, "cover.out/x"):       false,
		filepath.Join(dir, "covdata2/counters"): false,
		dir + "/covdata/../other":               false,
	} {
		err := p.store(&guest.Record{Kind: guest.File, Path: path, Data: []byte("x")})
		if (err == nil) != want {
			t.Errorf("store(%s) = %v, want accepted %t", path, err, want)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "other")); err == nil {
		t.Error("a file that nobody asked for was written")
	}
}

// cachedKernels opens the kernels that test/vm/fetch.sh has put into the cache.
func cachedKernels(t *testing.T) []*Kernel {
	t.Helper()
	cache := os.Getenv("REDIRECTOR_CACHE")
	if cache == "" {
		cache = "/var/cache/redirector"
	}
	dirs, err := filepath.Glob(filepath.Join(cache, "kernels", "[0-9]*"))
	if err != nil {
		t.Fatal(err)
	}
	if len(dirs) == 0 {
		t.Skipf("no kernel in %s: run test/vm/fetch.sh", cache)
	}
	var kernels []*Kernel
	for _, d := range dirs {
		k, err := OpenKernel(d)
		if err != nil {
			t.Fatal(err)
		}
		kernels = append(kernels, k)
	}
	return kernels
}

func TestModulesComeAfterThoseTheyNeed(t *testing.T) {
	for _, k := range cachedKernels(t) {
		t.Run(k.Version, func(t *testing.T) {
			mods, absent, err := k.resolve([]string{"tcp_diag", "8021q", "bridge", "tcp-diag", "no_such_thing", "tcp_cubic"})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]string{"no_such_thing"}, absent); diff != "" {
				t.Errorf("absent modules (-want +got):\n%s", diff)
			}
			var names []string
			for _, m := range mods {
				names = append(names, m.name)
			}
			for _, pair := range [][2]string{{"inet_diag", "tcp_diag"}, {"stp", "bridge"}, {"garp", "8021q"}} {
				need, by := slices.Index(names, pair[0]), slices.Index(names, pair[1])
				if need < 0 || by < need {
					t.Errorf("load order %v: want %s before %s", names, pair[0], pair[1])
				}
			}
			if n := len(slices.Compact(slices.Sorted(slices.Values(names)))); n != len(names) {
				t.Errorf("load order %v has a module twice", names)
			}
		})
	}
}

// role selects what the test binary does inside the machine.
const role = "TEST_VM_ROLE"

func TestMain(m *testing.M) {
	switch os.Getenv(role) {
	case "":
		os.Exit(m.Run())
	case "talk":
		wd, _ := os.Getwd()
		fmt.Printf("dir %s\n", wd)
		links, _ := net.Interfaces()
		for _, l := range links {
			fmt.Printf("link %s %s\n", l.Name, l.Flags)
		}
		for _, magic := range []struct {
			path string
			want int64
		}{{"/sys/fs/cgroup", unix.CGROUP2_SUPER_MAGIC}, {"/sys/fs/bpf", unix.BPF_FS_MAGIC}} {
			var st unix.Statfs_t
			if err := unix.Statfs(magic.path, &st); err != nil || st.Type != magic.want {
				fmt.Printf("%s: type %#x, %v\n", magic.path, st.Type, err)
			}
		}
		_ = fs.WalkDir(os.DirFS("testdata"), ".", func(p string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				b, _ := os.ReadFile(filepath.Join("testdata", p))
				fmt.Printf("%s: %s\n", p, b)
			}
			return err
		})
		_ = os.WriteFile(os.Args[1], []byte("collected"), 0o644)
		fmt.Print("bytes \x16\x00\xff\r\nno newline")
		os.Exit(42)
	case "die":
		fmt.Println("dying:", os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0))
	case "hang":
		fmt.Println("hanging")
		time.Sleep(time.Hour)
	}
}

// boot runs this test binary, rebuilt without cgo, in a machine.
func boot(ctx context.Context, t *testing.T, what string, p Program) (*Result, string, error) {
	t.Helper()
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		t.Skip("qemu-system-x86_64 is not installed: run hack/install-deps.sh vm")
	}
	k := cachedKernels(t)[0]
	bin := t.TempDir()
	for _, args := range [][]string{
		{"build", "-o", filepath.Join(bin, "vminit"), "../cmd/vminit"},
		{"test", "-c", "-o", filepath.Join(bin, "program"), "."},
	} {
		cmd := exec.Command("go", args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go %v: %v\n%s", args, err, out)
		}
	}
	var out bytes.Buffer
	p.Path, p.Output = filepath.Join(bin, "program"), io.MultiWriter(&out, orDiscard(p.Output))
	p.Env = []string{role + "=" + what}
	m := &Machine{Kernel: k, Init: filepath.Join(bin, "vminit")}
	res, err := m.Run(ctx, p)
	return res, out.String(), err
}

func TestMachineHandsOutputStatusAndFilesBack(t *testing.T) {
	dir := t.TempDir()
	// The kernel is the judge of the archive: names and contents of every length modulo four, folders in folders.
	// Nothing but lo is there, and it is down: whatever a test needs it makes.
	want := "dir " + dir + "\nlink lo loopback\n"
	for i, name := range []string{"a", "ab/c", "abc/d/efg", "abcd", "abcde with spaces", "empty"} {
		file := filepath.Join(dir, "testdata", name)
		content := "12345"[:5-i]
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		want += name + ": " + content + "\n"
	}
	want += "bytes \x16\x00\xff\r\nno newline"
	profile := filepath.Join(dir, "profile")
	res, out, err := boot(t.Context(), t, "talk", Program{Args: []string{profile}, Dir: dir, Collect: []string{profile}})
	if err != nil {
		t.Fatal(err)
	}
	if out != want {
		t.Errorf("output %q, want %q", out, want)
	}
	if res.Code != 42 || res.Release == "" || res.Boot <= 0 || len(res.Complaints) > 0 {
		t.Errorf("result %+v, want exit status 42 and a quiet kernel", res)
	}
	if got, err := os.ReadFile(profile); string(got) != "collected" {
		t.Errorf("collected file holds %q (%v)", got, err)
	}
}

func TestMachineThatDiesIsAnErrorWithItsLastWords(t *testing.T) {
	_, _, err := boot(t.Context(), t, "die", Program{})
	if err == nil || !strings.Contains(err.Error(), "Kernel panic") {
		t.Errorf("error is %v, want the kernel's panic", err)
	}
}

func orDiscard(w io.Writer) io.Writer {
	if w == nil {
		return io.Discard
	}
	return w
}

// writerFunc is an io.Writer.
type writerFunc func(b []byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func TestMachineThatHangsIsStopped(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	_, out, err := boot(ctx, t, "hang", Program{Output: writerFunc(func(b []byte) (int, error) {
		cancel(errors.New("out of patience")) // it runs by now
		return len(b), nil
	})})
	if err == nil || !strings.Contains(err.Error(), "out of patience") {
		t.Errorf("error is %v, want the context's cause", err)
	}
	if out != "hanging\n" {
		t.Errorf("output %q, want what the program said before", out)
	}
}
