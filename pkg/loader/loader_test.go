// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/podns"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// The main thread stays where it is, for /proc/self to mean the host.
func init() { runtime.LockOSThread() }

func TestFeatures(t *testing.T) {
	for _, f := range Features() {
		t.Run(f.Name, func(t *testing.T) {
			if err := f.Probe(); err != nil {
				t.Skipf("needs kernel %s: %v", f.Since, err)
			}
		})
	}
}

// What is asked of the kernel before anything is loaded must be all that the programs call, for the refusal to name it.
func TestFeaturesAreAllThatTheProgramsCall(t *testing.T) {
	// In every kernel since 4.19, the oldest that has the features of that time.
	always := []asm.BuiltinFunc{
		asm.FnMapLookupElem, asm.FnMapUpdateElem, asm.FnMapDeleteElem, asm.FnTailCall, asm.FnSkbLoadBytes,
		asm.FnSockHashUpdate, asm.FnSockOpsCbFlagsSet,
	}
	probed := map[helper]bool{}
	for _, f := range Features() {
		if f.Optional {
			continue
		}
		for _, h := range f.helpers {
			probed[h] = true
		}
	}
	spec, err := bpf.LoadRedirector()
	if err != nil {
		t.Fatal(err)
	}
	for name, prog := range spec.Programs {
		for _, ins := range prog.Instructions {
			fn := asm.BuiltinFunc(ins.Constant)
			if ins.IsBuiltinCall() && !slices.Contains(always, fn) && !probed[helper{prog.Type, fn}] {
				t.Errorf("program %s (%v) calls %v, which no feature names: add it to one in features.go", name, prog.Type, fn)
			}
		}
	}
}

func TestAMissingFeatureIsNamed(t *testing.T) {
	err := error(&FeatureError{Feature: Feature{Name: "sk_lookup programs", Since: "5.9", Option: "CONFIG_BPF_SYSCALL"}, Err: unix.EINVAL})
	for _, want := range []string{"sk_lookup programs", "5.9", "CONFIG_BPF_SYSCALL"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not name %s", err, want)
		}
	}
	if !errors.Is(err, unix.EINVAL) {
		t.Error("the kernel's answer is lost")
	}
}

// On a kernel that lacks something, Open must say what, and leave nothing.
func TestOpenNamesWhatTheKernelLacks(t *testing.T) {
	missing := CheckFeatures()
	if missing == nil {
		t.Skip("this kernel lacks nothing")
	}
	b := bed.ForTest(t, bed.Options{})
	_, err := Open(Options{BPFFS: b.BPFFS, Cgroup: b.Cgroup})
	if _, ok := errors.AsType[*FeatureError](err); !ok {
		t.Fatalf("Open: %v", err)
	}
	if err.Error() != missing.Error() || strings.Contains(err.Error(), "\n") {
		t.Errorf("Open says %q, want %q", err, missing)
	}
	t.Log(err)
	wantNoPins(t, b)
}

// A program that the verifier rejects is named, and its log is not in the way.
func TestTheAgentSaysInOneLineWhatTheVerifierRejects(t *testing.T) {
	if err := CheckFeatures(); err != nil {
		t.Skip(err)
	}
	spec, err := bpf.LoadRedirector()
	if err != nil {
		t.Fatal(err)
	}
	// It ends without a result, after all that it does otherwise.
	broken := spec.Programs[bpf.RedirectorProgRedirMark]
	for i, ins := range broken.Instructions {
		if ins.OpCode.JumpOp() == asm.Exit {
			broken.Instructions[i] = asm.LoadMem(asm.R0, asm.R10, 8, asm.DWord).WithMetadata(ins.Metadata)
			break
		}
	}
	d := &Datapath{maps: new(maps.Maps)}
	if err := spec.LoadAndAssign(&d.maps.RedirectorMaps, nil); err != nil {
		t.Fatal(err)
	}
	err = errors.Join(d.load(spec), d.Close())
	if err == nil || !strings.Contains(err.Error(), broken.Name) || strings.Contains(err.Error(), "\n") {
		t.Errorf("%v, want one line with %s", err, broken.Name)
	}
	t.Log(err)
}

func open(t *testing.T, b *bed.Bed) *Datapath {
	t.Helper()
	d, err := Open(Options{BPFFS: b.BPFFS, Cgroup: b.Cgroup})
	if _, lacks := errors.AsType[*FeatureError](err); lacks {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
	})
	return d
}

func closeNow(t *testing.T, d *Datapath) {
	t.Helper()
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
}

func wantNoPins(t *testing.T, b *bed.Bed) {
	t.Helper()
	if left, _ := filepath.Glob(b.BPFFS + "*"); len(left) > 0 {
		t.Errorf("pins are left: %v", left)
	}
}

// sockOpsPrograms are the ids of the programs on the bed's cgroup.
func sockOpsPrograms(t *testing.T, cgroup string) []ebpf.ProgramID {
	t.Helper()
	f, err := os.Open(cgroup)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	result, err := link.QueryPrograms(link.QueryOptions{Target: int(f.Fd()), Attach: ebpf.AttachCGroupSockOps})
	if err != nil {
		t.Fatal(err)
	}
	var ids []ebpf.ProgramID
	for _, p := range result.Programs {
		ids = append(ids, p.ID)
	}
	return ids
}

func TestOpenPinsWhatTheDesignSays(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	open(t, b)
	var got []string
	err := filepath.WalkDir(b.BPFFS, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			got = append(got, strings.TrimPrefix(path, b.BPFFS+"/"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"links/bind4", "links/bind6", "links/connect4", "links/connect6", "links/getpeername4", "links/getpeername6",
		"links/recvmsg4", "links/recvmsg6", "links/sendmsg4", "links/sendmsg6", "links/setsockopt", "links/sock_create", "links/sock_ops",
		"maps/admitted", "maps/cgroups", "maps/cidrs", "maps/config", "maps/counters", "maps/dns_bounds", "maps/dns_notes",
		"maps/exceptions", "maps/layout", "maps/listeners", "maps/machines", "maps/own_addrs", "maps/pods", "maps/probe_targets", "maps/sockets", "maps/tail_calls",
	}
	if !slices.Equal(got, want) {
		t.Errorf("pinned are %v, want %v", got, want)
	}
	if n := len(sockOpsPrograms(t, b.Cgroup)); n != 1 {
		t.Errorf("%d programs are on the cgroup, want 1", n)
	}
}

func TestCreationIsAllOrNothing(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	if err := CheckFeatures(); err != nil {
		t.Skip(err)
	}
	// A program that was attached for itself alone makes the very last step fail.
	prog, err := newProgram(ebpf.SockOps, ebpf.AttachCGroupSockOps, asm.Mov.Imm(asm.R0, 1), asm.Return())
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()
	cgroup, err := os.Open(b.Cgroup)
	if err != nil {
		t.Fatal(err)
	}
	defer cgroup.Close()
	target := int(cgroup.Fd())
	if err := link.RawAttachProgram(link.RawAttachProgramOptions{Target: target, Program: prog, Attach: ebpf.AttachCGroupSockOps}); err != nil {
		t.Fatal(err)
	}
	if d, err := Open(Options{BPFFS: b.BPFFS, Cgroup: b.Cgroup}); err == nil || !strings.Contains(err.Error(), b.Cgroup) {
		t.Fatalf("Open = %v, %v", d, err)
	}
	wantNoPins(t, b)
	if n := len(sockOpsPrograms(t, b.Cgroup)); n != 1 {
		t.Errorf("%d programs are on the cgroup, want the foreign one", n)
	}
	if err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: target, Program: prog, Attach: ebpf.AttachCGroupSockOps}); err != nil {
		t.Fatal(err)
	}
	open(t, b)
}

func TestAnInterruptedStartIsSweptUp(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	d := open(t, b)
	closeNow(t, d)
	// As if it had died before the rename.
	if err := os.Rename(b.BPFFS, b.BPFFS+unfinished); err != nil {
		t.Fatal(err)
	}
	open(t, b)
	if n := len(sockOpsPrograms(t, b.Cgroup)); n != 1 {
		t.Errorf("%d programs are on the cgroup, want 1", n)
	}
	if _, err := os.Stat(b.BPFFS + unfinished); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the unfinished directory: %v", err)
	}
}

func TestOneProcessAtATime(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	d := open(t, b)
	if _, err := Open(Options{BPFFS: b.BPFFS, Cgroup: b.Cgroup}); !errors.Is(err, ErrInUse) {
		t.Errorf("a second Open: %v", err)
	}
	if _, err := OpenMaps(b.BPFFS); !errors.Is(err, ErrInUse) {
		t.Errorf("OpenMaps: %v", err)
	}
	if err := Unload(b.BPFFS); !errors.Is(err, ErrInUse) {
		t.Errorf("Unload: %v", err)
	}
	closeNow(t, d)
	open(t, b)
}

func TestOpenAdopts(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	d := open(t, b)
	if d.Adopted() {
		t.Error("a new dataplane is called adopted")
	}
	if err := d.Maps().PutPod(42, maps.Pod{UID: "u"}); err != nil {
		t.Fatal(err)
	}
	before := sockOpsPrograms(t, b.Cgroup)
	closeNow(t, d)
	if got := sockOpsPrograms(t, b.Cgroup); !slices.Equal(got, before) {
		t.Errorf("with nobody there the cgroup has %v, want %v", got, before)
	}

	d = open(t, b)
	if !d.Adopted() {
		t.Error("an adopted dataplane is called new")
	}
	if pod, err := d.Maps().Pod(42); err != nil || pod.UID != "u" {
		t.Errorf("the pod is %v, %v", pod, err)
	}
	after := sockOpsPrograms(t, b.Cgroup)
	if len(after) != 1 || after[0] == before[0] {
		t.Errorf("the cgroup has %v, want one other than %v", after, before)
	}
}

func TestAdoptionRefusesAnotherLayout(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	d := open(t, b)
	before := sockOpsPrograms(t, b.Cgroup)
	closeNow(t, d)
	pin := filepath.Join(b.BPFFS, mapsDir, "pods")
	if err := os.Remove(pin); err != nil {
		t.Fatal(err)
	}
	other, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 8, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := other.Pin(pin); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{BPFFS: b.BPFFS, Cgroup: b.Cgroup}); err == nil || !strings.Contains(err.Error(), "pods") {
		t.Errorf("Open: %v", err)
	}
	if got := sockOpsPrograms(t, b.Cgroup); !slices.Equal(got, before) {
		t.Errorf("the cgroup has %v, want %v", got, before)
	}
}

func TestTheSockOpsProgramMovesToAnotherCgroup(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	closeNow(t, open(t, b))
	other := filepath.Join(b.Cgroup, "other")
	if err := os.Mkdir(other, 0o755); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(other)
	d, err := Open(Options{BPFFS: b.BPFFS, Cgroup: other})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(sockOpsPrograms(t, other)); n != 1 {
		t.Errorf("%d programs are on the new cgroup, want 1", n)
	}
	if n := len(sockOpsPrograms(t, b.Cgroup)); n != 0 {
		t.Errorf("%d programs are on the old cgroup, want none", n)
	}
	closeNow(t, d)
	if err := Unload(b.BPFFS); err != nil {
		t.Error(err)
	}
}

func TestUnload(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	d := open(t, b)
	pod, err := b.Pod("pod", bed.PodOptions{})
	if err != nil {
		t.Fatal(err)
	}
	before, err := pod.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	ns, err := podns.Open(pod.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	prog, err := d.LoadSteer(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()
	for range 2 { // the second replaces the first
		if err := d.AttachSteer(ns, "uid", prog); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := pod.Snapshot(); err != nil || got == before {
		t.Errorf("the namespace has no program, %v", err)
	}
	closeNow(t, d)
	for range 2 {
		if err := Unload(b.BPFFS); err != nil {
			t.Fatal(err)
		}
		wantNoPins(t, b)
		if n := len(sockOpsPrograms(t, b.Cgroup)); n != 0 {
			t.Errorf("%d programs are on the cgroup, want none", n)
		}
		if got, err := pod.Snapshot(); err != nil || got != before {
			t.Errorf("the namespace is not as it was, %v", err)
		}
	}
}

func TestAttachSteerThatFailsLeavesNothing(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	d := open(t, b)
	pod, err := b.Pod("pod", bed.PodOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ns, err := podns.Open(pod.Path)
	if err != nil {
		t.Fatal(err)
	}
	prog, err := d.LoadSteer(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()
	if err := ns.Close(); err != nil {
		t.Fatal(err)
	}
	if err := d.AttachSteer(ns, "uid", prog); err == nil {
		t.Error("a program is attached to a closed namespace")
	}
	if left, _ := os.ReadDir(filepath.Join(b.BPFFS, podsDir)); len(left) > 0 {
		t.Errorf("pins are left: %v", left)
	}
}

func TestBadPlacesAreNamed(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	if err := CheckFeatures(); err != nil {
		t.Skip(err)
	}
	for name, c := range map[string]struct {
		opts Options
		want string
	}{
		"bpffs on no bpffs":      {Options{BPFFS: filepath.Join(b.RunDir, "bpf"), Cgroup: b.Cgroup}, "mount -t bpf"},
		"bpffs without parent":   {Options{BPFFS: "/no/such/dir", Cgroup: b.Cgroup}, "/no/such"},
		"bpffs that is relative": {Options{BPFFS: "bpf", Cgroup: b.Cgroup}, "absolute"},
		"bpffs with a dot":       {Options{BPFFS: b.BPFFS + ".d", Cgroup: b.Cgroup}, "'.'"},
		"cgroup of version 1":    {Options{BPFFS: b.BPFFS, Cgroup: b.RunDir}, "cgroup2"},
		"cgroup that is missing": {Options{BPFFS: b.BPFFS, Cgroup: "/no/such/cgroup"}, "/no/such/cgroup"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Open(c.opts)
			if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("Open: %v, want one line with %q", err, c.want)
			}
			wantNoPins(t, b)
		})
	}
}

func TestFindCgroup2(t *testing.T) {
	dir, err := FindCgroup2()
	if err != nil {
		t.Fatal(err)
	}
	if err := CheckCgroup(dir); err != nil {
		t.Error(err)
	}
}

func TestTheJITIsOff(t *testing.T) {
	jited, err := TryJIT()
	if err != nil {
		t.Fatal(err)
	}
	if jited {
		t.Skip("the JIT is on here")
	}
	// Without it programs that call functions, and programs by way of a map, must load all the same.
	b := bed.ForTest(t, bed.Options{})
	open(t, b)
}
