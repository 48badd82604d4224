// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/pkg/cgroups"
	"github.com/redirector-dataplane/redirector/pkg/maps"
)

// Names below the BPFFS directory.
const (
	mapsDir   = "maps"
	linksDir  = "links"
	podsDir   = "pods"
	steerLink = "steer"
)

// unfinished is added to the name of the BPFFS directory while it is being filled.
const unfinished = "-unfinished"

// Options say where the dataplane lives.
type Options struct {
	// BPFFS is the directory that holds all pins. It need not exist, but must lie on a mounted BPF filesystem.
	BPFFS string
	// Cgroup is the cgroup2 directory whose processes are looked at: the root, on a node.
	Cgroup string
}

// Datapath is the dataplane in the kernel, opened for use by one process at a time. What it holds stays in the kernel after
// Close.
type Datapath struct {
	bpffs   string
	lock    *os.File
	maps    *maps.Maps
	steer   *template
	seal    *template
	adopted bool
}

// Open makes the dataplane, or takes over the one that an earlier process has left: its maps are kept and its programs are
// replaced in place. Making it is all or nothing. Errors name what is missing: a directory, a kernel feature
// (*FeatureError), or the lock that another process holds.
func Open(opts Options) (*Datapath, error) {
	if err := CheckFeatures(); err != nil {
		return nil, err
	}
	if err := checkCgroup(opts.Cgroup); err != nil {
		return nil, err
	}
	if err := checkBPFFS(opts.BPFFS); err != nil {
		return nil, err
	}
	spec, err := bpf.LoadRedirector()
	if err != nil {
		return nil, err
	}

	d := &Datapath{bpffs: opts.BPFFS}
	_, err = os.Stat(filepath.Join(opts.BPFFS, mapsDir))
	switch {
	case err == nil:
		err = d.adopt(spec, opts.Cgroup)
		d.adopted = true
	case errors.Is(err, fs.ErrNotExist):
		err = d.create(spec, opts.Cgroup)
	}
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// create builds everything in a directory beside the final one, which one rename then makes visible.
func (d *Datapath) create(spec *ebpf.CollectionSpec, cgroup string) (err error) {
	// A leftover of a process that was killed half way is not locked, and is removed.
	fresh := d.bpffs + unfinished
	if err := os.Mkdir(fresh, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make a directory for pins: %w", err)
	}
	if d.lock, err = lockDir(fresh); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(fresh))
		}
	}()
	for _, dir := range []string{mapsDir, linksDir, podsDir} {
		if err := os.RemoveAll(filepath.Join(fresh, dir)); err != nil {
			return fmt.Errorf("remove what an interrupted start left: %w", err)
		}
		if err := os.Mkdir(filepath.Join(fresh, dir), 0o700); err != nil {
			return fmt.Errorf("make a directory for pins: %w", err)
		}
	}

	d.maps = new(maps.Maps)
	if err := spec.LoadAndAssign(&d.maps.RedirectorMaps, nil); err != nil {
		return fmt.Errorf("create maps: %w", err)
	}
	for name, m := range d.byName() {
		if err := m.Pin(filepath.Join(fresh, mapsDir, name)); err != nil {
			return fmt.Errorf("pin map %s: %w", name, err)
		}
	}
	if err := d.load(spec, cgroup, filepath.Join(fresh, linksDir)); err != nil {
		return err
	}
	if err := os.Rename(fresh, d.bpffs); err != nil {
		return fmt.Errorf("put the pins in place (remove %s if it is not ours): %w", d.bpffs, err)
	}
	return nil
}

// OpenMaps opens the maps of a dataplane that is there, to look at it or to take it down. The error wraps
// fs.ErrNotExist when there is none, and ErrInUse when another process has it open.
func OpenMaps(bpffs string) (*Datapath, error) {
	d := &Datapath{bpffs: bpffs}
	spec, err := bpf.LoadRedirector()
	if err == nil {
		d.lock, err = lockDir(bpffs)
	}
	if err == nil {
		err = onBPFFS(d.lock)
	}
	if err == nil {
		err = d.openMaps(spec)
	}
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// openMaps opens the pinned maps.
func (d *Datapath) openMaps(spec *ebpf.CollectionSpec) (err error) {
	pinned := map[string]*ebpf.Map{}
	defer func() {
		for _, m := range pinned { // those in d are duplicates
			err = errors.Join(err, m.Close())
		}
	}()
	for name, m := range spec.Maps {
		if pinned[name], err = ebpf.LoadPinnedMap(filepath.Join(d.bpffs, mapsDir, name), nil); err != nil {
			delete(pinned, name)
			return fmt.Errorf("open pinned map %s: %w", name, err)
		}
		if err := m.Compatible(pinned[name]); err != nil {
			return fmt.Errorf("pinned map %s is of another version of redirector: drain the node, and run that version's `redirector cleanup`: %w", name, err)
		}
	}
	d.maps = new(maps.Maps)
	if err := spec.LoadAndAssign(&d.maps.RedirectorMaps, &ebpf.CollectionOptions{MapReplacements: pinned}); err != nil {
		return fmt.Errorf("open pinned maps: %w", err)
	}
	return nil
}

// adopt opens the maps that are there and puts this version's programs in the place of the old ones.
func (d *Datapath) adopt(spec *ebpf.CollectionSpec, cgroup string) (err error) {
	if d.lock, err = lockDir(d.bpffs); err != nil {
		return err
	}
	if err := d.openMaps(spec); err != nil {
		return err
	}
	return d.load(spec, cgroup, filepath.Join(d.bpffs, linksDir))
}

// nodePrograms are those that are attached to the cgroup for the whole node, with the names of their pins.
var nodePrograms = []struct {
	pin     string
	program string
	attach  ebpf.AttachType
}{
	// What leaves notes with sockets comes before what reads them, and what marks comes last.
	{"sock_create", bpf.RedirectorProgRedirCreate, ebpf.AttachCGroupInetSockCreate},
	{"setsockopt", bpf.RedirectorProgRedirSetsockopt, ebpf.AttachCGroupSetsockopt},
	{"recvmsg4", bpf.RedirectorProgRedirRecvmsg4, ebpf.AttachCGroupUDP4Recvmsg},
	{"recvmsg6", bpf.RedirectorProgRedirRecvmsg6, ebpf.AttachCGroupUDP6Recvmsg},
	{"getpeername4", bpf.RedirectorProgRedirGetpeername4, ebpf.AttachCgroupInet4GetPeername},
	{"getpeername6", bpf.RedirectorProgRedirGetpeername6, ebpf.AttachCgroupInet6GetPeername},
	{"sendmsg4", bpf.RedirectorProgRedirSendmsg4, ebpf.AttachCGroupUDP4Sendmsg},
	{"sendmsg6", bpf.RedirectorProgRedirSendmsg6, ebpf.AttachCGroupUDP6Sendmsg},
	{"connect4", bpf.RedirectorProgRedirConnect4, ebpf.AttachCGroupInet4Connect},
	{"connect6", bpf.RedirectorProgRedirConnect6, ebpf.AttachCGroupInet6Connect},
	{"sock_ops", bpf.RedirectorProgRedirMark, ebpf.AttachCGroupSockOps},
}

// load loads the programs that all pods share, puts them to work, and prepares those that each pod gets a copy of.
func (d *Datapath) load(spec *ebpf.CollectionSpec, cgroup, links string) error {
	shared, err := ebpf.NewCollectionWithOptions(sharedPrograms(spec), ebpf.CollectionOptions{MapReplacements: d.byName()})
	if err != nil {
		return fmt.Errorf("load programs: %w", err)
	}
	defer shared.Close()
	sealPkt := shared.Programs[bpf.RedirectorProgRedirSealPkt]
	if err := d.maps.TailCalls.Put(uint32(bpf.RedirectorTailCallTAIL_CALL_SEAL_PKT), sealPkt); err != nil {
		return fmt.Errorf("map tail_calls: put: %w", err)
	}

	if d.steer, err = newTemplate(spec.Programs[bpf.RedirectorProgRedirSteer], d.byName()); err != nil {
		return err
	}
	if d.seal, err = newTemplate(spec.Programs[bpf.RedirectorProgRedirSeal], d.byName()); err != nil {
		return err
	}
	for _, p := range nodePrograms {
		if err := attachCgroup(shared.Programs[p.program], p.attach, cgroup, filepath.Join(links, p.pin)); err != nil {
			return err
		}
	}
	return nil
}

// sharedPrograms is the object without the programs that are loaded per pod.
func sharedPrograms(spec *ebpf.CollectionSpec) *ebpf.CollectionSpec {
	spec = spec.Copy()
	delete(spec.Programs, bpf.RedirectorProgRedirSteer)
	delete(spec.Programs, bpf.RedirectorProgRedirSeal)
	return spec
}

// attachCgroup attaches a program to the cgroup, or puts it in the place of the one that is attached there already.
func attachCgroup(prog *ebpf.Program, attach ebpf.AttachType, cgroup, pin string) (err error) {
	what := filepath.Base(pin)
	old, err := link.LoadPinnedLink(pin, nil)
	if err == nil {
		defer func() { err = errors.Join(err, old.Close()) }()
		if on, err := isOnCgroup(old, cgroup); err != nil {
			return err
		} else if on {
			if err := old.Update(prog); err != nil {
				return fmt.Errorf("replace the %s program on cgroup %s: %w", what, cgroup, err)
			}
			return nil
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("open pinned link %s: %w", pin, err)
	}

	l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: attach, Program: prog})
	if err != nil {
		return fmt.Errorf("attach the %s program to cgroup %s: %w", what, cgroup, err)
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	if old != nil {
		// The new one works already, on the cgroup that the node has now.
		if err := old.Unpin(); err != nil {
			return fmt.Errorf("unpin the %s program of another cgroup: %w", what, err)
		}
	}
	if err := l.Pin(pin); err != nil {
		return fmt.Errorf("pin the link of the %s program: %w", what, err)
	}
	return nil
}

func isOnCgroup(l link.Link, cgroup string) (bool, error) {
	info, err := l.Info()
	if err != nil {
		return false, fmt.Errorf("look at a cgroup link: %w", err)
	}
	id, err := cgroups.ID(cgroup)
	if err != nil {
		return false, err
	}
	on := info.Cgroup()
	return on != nil && on.CgroupId == id, nil
}

// Adopted says whether the dataplane had been there before Open.
func (d *Datapath) Adopted() bool { return d.adopted }

// Maps gives access to the maps, valid until Close.
func (d *Datapath) Maps() *maps.Maps { return d.maps }

// Close gives back the process's handles. The dataplane goes on working. d may be nil, for none.
func (d *Datapath) Close() error {
	if d == nil {
		return nil
	}
	var errs []error
	if d.maps != nil {
		errs = append(errs, d.maps.Close())
	}
	if d.lock != nil {
		errs = append(errs, d.lock.Close())
	}
	return errors.Join(errs...)
}

// byName lists the maps under the names they have in the object and in BPFFS.
func (d *Datapath) byName() map[string]*ebpf.Map {
	m := d.maps
	return map[string]*ebpf.Map{
		bpf.RedirectorMapPods:         m.RedirectorMaps.Pods,
		bpf.RedirectorMapOwnAddrs:     m.RedirectorMaps.OwnAddrs,
		bpf.RedirectorMapListeners:    m.RedirectorMaps.Listeners,
		bpf.RedirectorMapAdmitted:     m.RedirectorMaps.Admitted,
		bpf.RedirectorMapCounters:     m.RedirectorMaps.Counters,
		bpf.RedirectorMapTailCalls:    m.RedirectorMaps.TailCalls,
		bpf.RedirectorMapConfig:       m.RedirectorMaps.Config,
		bpf.RedirectorMapProbeTargets: m.RedirectorMaps.ProbeTargets,
		bpf.RedirectorMapCgroups:      m.RedirectorMaps.Cgroups,
		bpf.RedirectorMapSockets:      m.RedirectorMaps.Sockets,
		bpf.RedirectorMapDnsNotes:     m.RedirectorMaps.DnsNotes,
		bpf.RedirectorMapDnsBounds:    m.RedirectorMaps.DnsBounds,
	}
}

// Unload takes the whole dataplane off the node: all links, programs and maps. The seals on interfaces, and what else a pod
// has, are the caller's to remove first. That there is nothing to remove is no error; that another process uses the
// dataplane is.
func Unload(bpffs string) error {
	for _, dir := range []string{bpffs + unfinished, bpffs} {
		lock, err := lockDir(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if err := errors.Join(removePins(lock), lock.Close()); err != nil {
			return fmt.Errorf("remove the dataplane at %s: %w", dir, err)
		}
	}
	return nil
}

// removePins removes a directory of pins, and nothing of others that may be in it, should its name have been mistaken.
func removePins(dir *os.File) error {
	if err := onBPFFS(dir); err != nil {
		return err
	}
	errs := []error{detachAll(dir.Name())}
	for _, ours := range []string{mapsDir, linksDir, podsDir} {
		errs = append(errs, os.RemoveAll(filepath.Join(dir.Name(), ours)))
	}
	return errors.Join(append(errs, os.Remove(dir.Name()))...)
}

// onBPFFS fails for what cannot be a directory of pins.
func onBPFFS(dir *os.File) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &st); err != nil {
		return fmt.Errorf("bpffs %s: statfs: %w", dir.Name(), err)
	}
	if st.Type != unix.BPF_FS_MAGIC {
		return fmt.Errorf("bpffs %s is not on a BPF filesystem: name the directory that the agent was given", dir.Name())
	}
	return nil
}

// detachAll detaches every pinned link at once; unpinning alone leaves that to a worker of the kernel.
func detachAll(bpffs string) error {
	pins, err := filepath.Glob(filepath.Join(bpffs, podsDir, "*", steerLink))
	if err != nil {
		return err
	}
	for _, p := range nodePrograms {
		pins = append(pins, filepath.Join(bpffs, linksDir, p.pin))
	}
	var errs []error
	for _, pin := range pins {
		errs = append(errs, detach(pin))
	}
	return errors.Join(errs...)
}

// detach detaches and unpins a link. That it is not there is no error.
func detach(pin string) error {
	l, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open pinned link %s: %w", pin, err)
	}
	defer l.Close()
	// A link whose cgroup or namespace is gone is detached already, which the kernel says in its own ways.
	if err := l.Detach(); err != nil && !errors.Is(err, unix.ENOLINK) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("detach %s: %w", pin, err)
	}
	if err := os.Remove(pin); err != nil {
		return fmt.Errorf("unpin %s: %w", pin, err)
	}
	return nil
}
