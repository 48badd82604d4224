// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// roleDemo makes the test binary the demo; lackVar takes something from it first.
const (
	roleDemo = "demo"
	lackVar  = "REDIRECTOR_DEMO_TEST_LACK"
)

func TestMain(m *testing.M) {
	if os.Getenv(roleVar) == roleDemo {
		if err := lack(os.Getenv(lackVar)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
		os.Exit(demoMain(os.Args[1:]))
	}
	if code, ok := playRole(); ok {
		os.Exit(code)
	}
	// With the race detector, a process sleeps for a second when it ends. There are many here.
	if err := os.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// lack takes from this process what a machine may not have.
func lack(what string) error {
	switch what {
	case "root":
		return syscall.Setuid(65534)
	case "cgroup2":
		for mount, err := loader.FindCgroup2(); err == nil; mount, err = loader.FindCgroup2() {
			if err := unix.Unmount(mount, unix.MNT_DETACH); err != nil {
				return err
			}
		}
	}
	return nil
}

// process is a demo in a process of its own. The bed's pod stands for the machine that it runs on.
type process struct {
	*exec.Cmd
	tmp    string // where its bed is
	stdout *bufio.Reader
	pipe   io.Closer
	seen   strings.Builder // of stdout
	stderr bytes.Buffer
}

// start starts a demo. At the end of the test nothing of it may be left, and its machine's network may not have changed.
func start(t *testing.T, configure func(*exec.Cmd)) *process {
	t.Helper()
	machine, err := bed.ForTest(t, bed.Options{}).Pod("machine", bed.PodOptions{})
	if err != nil {
		t.Fatal(err)
	}
	before, err := machine.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "demo") //nolint:usetesting // t.TempDir's path is too long for the sockets below it
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{Cmd: exec.Command(self), tmp: dir}
	p.Env = append(os.Environ(), roleVar+"="+roleDemo, "TMPDIR="+dir)
	p.Stderr = &p.stderr
	p.SysProcAttr = &unix.SysProcAttr{Unshareflags: unix.CLONE_NEWNS} // for what is lacking, to be lacking only there
	stdout, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.stdout, p.pipe = bufio.NewReader(stdout), stdout
	if configure != nil {
		configure(p.Cmd)
	}
	if err := machine.Do(p.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(dir); err != nil {
			t.Errorf("the demo has left files or mounts: %v", err)
		}
		for _, group := range groupsOf(t, p.Process.Pid) {
			t.Errorf("the demo has left the cgroup %s", group)
		}
		after, err := machine.Snapshot()
		if diff := cmp.Diff(before, after); diff != "" || err != nil {
			t.Errorf("the demo has changed the machine's own network (-before +after), %v:\n%s", err, diff)
		}
	})
	return p
}

// needKernel skips the test on a kernel that the dataplane does not work on.
func needKernel(t *testing.T) {
	t.Helper()
	if err := loader.CheckFeatures(); err != nil {
		t.Skip(err) // it names the feature and the version
	}
}

// groupsOf lists the cgroups of beds that a process has made. A group with a process in it cannot be removed, so that
// there is none says that no process is left either.
func groupsOf(t *testing.T, pid int) []string {
	t.Helper()
	mount, err := loader.FindCgroup2()
	if err != nil {
		t.Fatal(err)
	}
	groups, err := filepath.Glob(filepath.Join(mount, fmt.Sprintf("redirector-bed-%d-*", pid)))
	if err != nil {
		t.Fatal(err)
	}
	return groups
}

// dir returns the directory of the demo's bed.
func (p *process) dir(t *testing.T) string {
	t.Helper()
	beds, err := filepath.Glob(filepath.Join(p.tmp, "*"))
	if len(beds) != 1 || err != nil {
		t.Fatalf("beds of the demo: %q, %v", beds, err)
	}
	return beds[0]
}

// readTo reads what the demo prints up to the line that contains text, or all of it.
func (p *process) readTo(text string) (found bool) {
	for {
		line, err := p.stdout.ReadString('\n')
		p.seen.WriteString(line)
		switch {
		case text != "" && strings.Contains(line, text):
			return true
		case err != nil:
			return false
		}
	}
}

// end waits for the demo's end, and returns its exit status.
func (p *process) end(t *testing.T) int {
	t.Helper()
	p.readTo("")
	err := p.Wait()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	t.Logf("it printed:\n%s%s", &p.seen, &p.stderr)
	return p.ProcessState.ExitCode()
}

func TestDemoShowsWhatItPromises(t *testing.T) {
	needKernel(t)
	p := start(t, nil)
	if code := p.end(t); code != 0 {
		t.Errorf("exit status %d", code)
	}
	out := p.seen.String()
	for _, want := range []string{
		"client -> outside  IPv4    http://10.88.0.2/       outbound 10.88.1.2 -> 10.88.0.2:80          10.88.1.2     200 OK",
		"client -> outside  IPv6    http://[fd00:88::2]/    outbound fd00:88:1::2 -> [fd00:88::2]:80    fd00:88:1::2  200 OK",
		"outside -> web     IPv4    http://10.88.1.3/       inbound  10.88.0.2 -> 10.88.1.3:80          10.88.0.2     200 OK",
		"outside -> web     IPv6    http://[fd00:88:1::3]/  inbound  fd00:88::2 -> [fd00:88:1::3]:80    fd00:88::2    200 OK",
		"client -> web      IPv4    http://10.88.1.3/       outbound 10.88.1.2 -> 10.88.1.3:80          10.88.1.2     200 OK",
		"                                                   inbound  10.88.1.2 -> 10.88.1.3:80\n",
		"client -> web      IPv6    http://[fd00:88:1::3]/  outbound fd00:88:1::2 -> [fd00:88:1::3]:80  fd00:88:1::2  200 OK",
		"its way: client -> proxy :15001 (in pod client) -> proxy :15006 (in pod web) -> web\n",
		"client -> web      IPv6    http://[fd00:88:1::3]/  blocked: ",
		"outside -> web     IPv4    http://10.88.1.3/       blocked: ",
		"client -> outside  IPv4    http://10.88.0.2/       nothing                                     10.88.1.2     200 OK",
		"its way: client -> web\n",
		"nothing is left",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("it did not print:\n%s", want)
		}
	}
	if strings.Contains(out, "\x1b") {
		t.Error("it uses colours where there is no terminal")
	}
	for line := range strings.Lines(out) {
		if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > pageWidth {
			t.Errorf("a line of %d characters:\n%s", n, line)
		}
	}
}

func TestInterruptedDemoLeavesNothing(t *testing.T) {
	needKernel(t)
	for _, c := range []struct {
		at   string // the line that is on the screen then
		sig  unix.Signal
		done bool // the demo may have come to its end by then
		long bool // not in short runs, which have others like it
	}{
		{"See it work", unix.SIGINT, false, false},
		{"$ redirector agent", unix.SIGTERM, false, true},
		{"$ nodeproxy", unix.SIGQUIT, false, true},
		{"$ redirector enroll", unix.SIGINT, false, false},
		{"2. Both pods are enrolled", unix.SIGHUP, false, true},
		{"4. The node proxy is stopped", unix.SIGTERM, false, false},
		{"5. A node proxy comes back", unix.SIGTERM, false, true},
		{"$ redirector unenroll", unix.SIGINT, false, true},
		{"$ redirector cleanup", unix.SIGINT, true, true},
	} {
		if c.long && testing.Short() {
			continue
		}
		t.Run(c.at, func(t *testing.T) {
			p := start(t, nil)
			if !p.readTo(c.at) {
				t.Fatalf("it ended early with status %d", p.end(t))
			}
			if err := p.Process.Signal(c.sig); err != nil {
				t.Fatal(err)
			}
			code := p.end(t)
			if code != 128+int(c.sig) && (code != 0 || !c.done) {
				t.Errorf("exit status %d, want %d", code, 128+int(c.sig))
			}
		})
	}
}

func TestDemoWithoutReaderLeavesNothing(t *testing.T) {
	needKernel(t)
	p := start(t, nil)
	if !p.readTo("2. Both pods are enrolled") {
		t.Fatalf("it ended early with status %d", p.end(t))
	}
	if err := p.pipe.Close(); err != nil { // as `demo | head` does
		t.Fatal(err)
	}
	if code := p.end(t); code != 128+int(unix.SIGPIPE) {
		t.Errorf("exit status %d, want %d", code, 128+int(unix.SIGPIPE))
	}
}

func TestHeldDemoWaitsForEnter(t *testing.T) {
	needKernel(t)
	stdin, enter, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	defer enter.Close()
	p := start(t, func(c *exec.Cmd) {
		c.Args = append(c.Args, "-hold")
		c.Stdin = stdin
	})
	if !p.readTo("tail -f ") {
		t.Fatalf("it ended early with status %d", p.end(t))
	}
	// What is shown there has to be true while it waits.
	socket := filepath.Join(p.dir(t), "run", "agent.sock")
	if pods, err := api.NewClient(socket).Pods(t.Context()); len(pods) != 2 || err != nil {
		t.Errorf("the agent knows of %d pods, %v", len(pods), err)
	}
	if _, err := enter.WriteString("\n"); err != nil {
		t.Fatal(err)
	}
	if code := p.end(t); code != 0 {
		t.Errorf("exit status %d", code)
	}
}

func TestDemoThatFailsLeavesNothing(t *testing.T) {
	needKernel(t)
	var out bytes.Buffer
	d := &demo{page: &page{out: &out}}
	err := d.run(t.Context(), func(ctx context.Context) error {
		if err := d.build(ctx); err != nil {
			return err
		}
		panic("on purpose")
	})
	if err == nil || !strings.Contains(err.Error(), "on purpose") || !strings.Contains(err.Error(), "demo_test.go") {
		t.Errorf("it does not tell what went wrong and where: %v", err)
	}
	if !strings.Contains(out.String(), "no mount, no file is left") {
		t.Errorf("it printed:\n%s", &out)
	}
	if err := d.leftovers(); err != nil {
		t.Error(err)
	}
}

func TestDemoNamesWhatTheMachineLacks(t *testing.T) {
	lacks := map[string]string{
		"root":    "needs root",
		"cgroup2": "mount one with",
	}
	if err := loader.CheckFeatures(); err != nil {
		lacks["a feature"] = err.Error()
	}
	for what, want := range lacks {
		t.Run(what, func(t *testing.T) {
			p := start(t, func(c *exec.Cmd) { c.Env = append(c.Env, lackVar+"="+what) })
			if code := p.end(t); code != 1 {
				t.Errorf("exit status %d, want 1", code)
			}
			if got := p.stderr.String(); !strings.Contains(got, want) || strings.Count(got, "\n") != 1 {
				t.Errorf("it says %q, want one line with %q", got, want)
			}
			if p.seen.Len() > 0 {
				t.Errorf("it began with %q", &p.seen)
			}
		})
	}
}

// TestWrongRowIsNoticed changes one thing after another about a request that went as it should.
func TestWrongRowIsNoticed(t *testing.T) {
	ip := netip.MustParseAddr
	port := netip.MustParseAddrPort
	client := &host{NS: &bed.NS{Name: "client", V4: ip("10.88.1.2")}, uid: "client"}
	web := &host{NS: &bed.NS{Name: "web", V4: ip("10.88.1.3")}, uid: "web"}
	good := func() *visit {
		return &visit{
			from: client, to: web, local: port("10.88.1.2:40000"), peer: port("10.88.1.3:80"),
			saw: sighting{Peer: port("10.88.1.2:40001"), Local: port("10.88.1.3:80")},
			proxy: []nodeproxy.Record{
				{UID: "client", Pod: "demo/client", Direction: nodeproxy.Outbound, Source: port("10.88.1.2:40000"), OriginalDestination: port("10.88.1.3:80")},
				{UID: "web", Pod: "demo/web", Direction: nodeproxy.Inbound, Source: port("10.88.1.2:40002"), OriginalDestination: port("10.88.1.3:80")},
			},
		}
	}
	if wrong := good().judge(proxied); len(wrong) > 0 {
		t.Errorf("a good row is called wrong: %q", wrong)
	}
	for what, spoil := range map[string]func(*visit){
		"not answered":         func(v *visit) { v.err = unix.ECONNREFUSED },
		"client's peer":        func(v *visit) { v.peer = port("10.88.1.2:15001") },
		"client's address":     func(v *visit) { v.local = port("127.0.0.1:40000") },
		"app's peer":           func(v *visit) { v.saw.Peer = port("10.88.1.3:40001") },
		"app's address":        func(v *visit) { v.saw.Local = port("10.88.1.3:15006") },
		"past the proxy":       func(v *visit) { v.proxy = nil },
		"past one proxy":       func(v *visit) { v.proxy = v.proxy[:1] },
		"twice":                func(v *visit) { v.proxy = append(v.proxy, v.proxy[1]) },
		"other pod":            func(v *visit) { v.proxy[1].UID = "client" },
		"original destination": func(v *visit) { v.proxy[0].OriginalDestination = port("10.88.1.3:15001") },
		"source":               func(v *visit) { v.proxy[1].Source = port("10.88.1.1:40002") },
		"source port":          func(v *visit) { v.proxy[0].Source = port("10.88.1.2:1") },
		"direction":            func(v *visit) { v.proxy[1].Direction = nodeproxy.Outbound },
		"proxy's error":        func(v *visit) { v.proxy[0].Error = "refused" },
	} {
		v := good()
		spoil(v)
		var out bytes.Buffer
		d := &demo{page: &page{out: &out}}
		d.showVisit(v, proxied)
		if d.wrong != 1 || !strings.Contains(out.String(), markWrong) {
			t.Errorf("%s: not noticed:\n%s", what, &out)
		}
	}
	answered := good()
	d := &demo{page: &page{out: io.Discard}}
	d.showBlocked(answered)
	if d.wrong != 1 {
		t.Error("an answer where nothing should pass is not noticed")
	}
	d.showVisit(answered, direct)
	if d.wrong != 2 {
		t.Error("a proxied request of a pod that is not enrolled is not noticed")
	}
	err := d.run(t.Context(), func(context.Context) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "2 of the things above") {
		t.Errorf("a demo with wrong rows ends with %v", err)
	}
}
