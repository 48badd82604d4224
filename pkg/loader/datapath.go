// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/pkg/cgroups"
	"github.com/redirector-dataplane/redirector/pkg/fault"
	"github.com/redirector-dataplane/redirector/pkg/maps"
)

// Names below the BPFFS directory.
const (
	mapsDir   = "maps"
	linksDir  = "links"
	podsDir   = "pods"
	steerLink = "steer"
)

// madeDirs are those that a dataplane has from its beginning.
var madeDirs = []string{mapsDir, linksDir, podsDir}

// unfinished is added to the name of the BPFFS directory while it is being filled.
const unfinished = "-unfinished"

// Options say where the dataplane lives.
type Options struct {
	// BPFFS is the directory that holds all pins. It need not exist, but must lie on a mounted BPF filesystem.
	BPFFS string
	// Cgroup is the cgroup2 directory whose processes are looked at: the root, on a node.
	Cgroup string
	// Release names this version of redirector to later ones.
	Release string
}

// Datapath is the dataplane in the kernel, opened for use by one process at a time. What it holds stays in the kernel after
// Close.
type Datapath struct {
	bpffs   string
	cgroup  string
	lock    *os.File
	maps    *maps.Maps
	steer   *template
	seal    *template
	adopted bool

	// What Heal puts back when it is gone. mu is held by it.
	mu     sync.Mutex
	links  map[string]link.Link
	shared map[string]*ebpf.Program
	// answering are the cgroups that have SO_ORIGINAL_DST answered, by the names of the pins; "" if an earlier process knew it.
	answering map[string]string

	// bridge is there between Open and Settle, after a map has been replaced that programs write.
	bridge bridge
}

// Open makes the dataplane, or takes over the one that an earlier process has left: programs are replaced in place, and so are
// maps that this version lays out in another way, with their entries. Making it is all or nothing. Errors name what is
// missing: a directory, a kernel feature (*FeatureError), or the lock that another process holds (*InUseError). A dataplane of
// another version that cannot be taken over is left as it is (*LayoutError). When the pods are taken over, call Settle.
func Open(opts Options) (*Datapath, error) {
	if err := CheckFeatures(); err != nil {
		return nil, err
	}
	if err := CheckCgroup(opts.Cgroup); err != nil {
		return nil, err
	}
	if err := CheckBPFFS(opts.BPFFS); err != nil {
		return nil, err
	}
	spec, err := bpf.LoadRedirector()
	if err != nil {
		return nil, err
	}

	d := &Datapath{bpffs: opts.BPFFS, cgroup: opts.Cgroup, links: map[string]link.Link{}, answering: map[string]string{}}
	mine := Layout{Version: layoutVersion, Oldest: layoutOldest, Release: opts.Release}
	_, err = os.Stat(filepath.Join(opts.BPFFS, mapsDir))
	switch {
	case err == nil:
		d.adopted = true
		err = d.adopt(spec, mine)
	case errors.Is(err, fs.ErrNotExist):
		err = d.create(spec, mine)
	}
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// create builds everything in a directory beside the final one, which one rename then makes visible.
func (d *Datapath) create(spec *ebpf.CollectionSpec, mine Layout) (err error) {
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
	for _, dir := range append([]string{nextDir, previousDir}, madeDirs...) {
		if err := os.RemoveAll(filepath.Join(fresh, dir)); err != nil {
			return fmt.Errorf("remove what an interrupted start left: %w", err)
		}
	}
	for _, dir := range madeDirs {
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
	fault.Point("create: maps pinned")
	if err := d.load(spec); err != nil {
		return err
	}
	if err := writeLayout(d.maps.Layout, mine); err != nil {
		return err
	}
	if err := d.putToWork(spec, filepath.Join(fresh, linksDir)); err != nil {
		return err
	}
	fault.Point("create: programs attached")
	if err := os.Rename(fresh, d.bpffs); err != nil {
		return fmt.Errorf("put the pins in place (remove %s if it is not ours): %w", d.bpffs, err)
	}
	fault.Point("create: pins in place")
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

// openMaps opens the pinned maps, which must have this version's layout. One that is not there, for it is of a later version
// than the dataplane, is made, to be empty.
func (d *Datapath) openMaps(spec *ebpf.CollectionSpec) error {
	pinned, err := d.openPinned(spec)
	defer func() { closeAll(pinned) }() // those in d are duplicates
	if err != nil {
		return err
	}
	for name, m := range pinned {
		if err := spec.Maps[name].Compatible(m); err != nil {
			return fmt.Errorf("pinned map %s is of another version of redirector: drain the node, and run that version's `redirector cleanup`: %w", name, err)
		}
	}
	d.maps = new(maps.Maps)
	if err := spec.LoadAndAssign(&d.maps.RedirectorMaps, &ebpf.CollectionOptions{MapReplacements: pinned}); err != nil {
		return fmt.Errorf("open pinned maps: %w", err)
	}
	return nil
}

// openPinned opens those of the maps that the dataplane has. One whose pin somebody has removed is found by the programs that
// use it. If all are missing, that is fs.ErrNotExist.
func (d *Datapath) openPinned(spec *ebpf.CollectionSpec) (map[string]*ebpf.Map, error) {
	pinned := map[string]*ebpf.Map{}
	var missing []string
	var errMissing error
	for name := range spec.Maps {
		m, err := ebpf.LoadPinnedMap(filepath.Join(d.bpffs, mapsDir, name), nil)
		switch {
		case err == nil:
			pinned[name] = m
		case errors.Is(err, fs.ErrNotExist):
			missing = append(missing, name)
			errMissing = fmt.Errorf("open pinned map %s: %w", name, err)
		default:
			return pinned, fmt.Errorf("open pinned map %s: %w", name, err)
		}
	}
	if len(pinned) == 0 {
		return pinned, errMissing
	}
	if len(missing) > 0 {
		return pinned, d.findUnpinned(missing, pinned)
	}
	return pinned, nil
}

// findUnpinned looks for maps by their names among those that the programs on the cgroup use.
func (d *Datapath) findUnpinned(names []string, found map[string]*ebpf.Map) error {
	for _, p := range nodePrograms {
		ids, err := mapsOfLink(filepath.Join(d.bpffs, linksDir, p.pin))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		for _, id := range ids {
			m, err := ebpf.NewMapFromID(id)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return fmt.Errorf("open map %d: %w", id, err)
			}
			info, err := m.Info()
			if err != nil {
				return errors.Join(fmt.Errorf("look at map %d: %w", id, err), m.Close())
			}
			if slices.Contains(names, info.Name) && found[info.Name] == nil {
				found[info.Name] = m
			} else {
				_ = m.Close()
			}
		}
	}
	return nil
}

// mapsOfLink returns the maps that the program of a pinned link uses.
func mapsOfLink(pin string) ([]ebpf.MapID, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return nil, fmt.Errorf("open pinned link %s: %w", pin, err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return nil, fmt.Errorf("look at pinned link %s: %w", pin, err)
	}
	prog, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		return nil, fmt.Errorf("open the program of pinned link %s: %w", pin, err)
	}
	defer prog.Close()
	about, err := prog.Info()
	if err != nil {
		return nil, fmt.Errorf("look at the program of pinned link %s: %w", pin, err)
	}
	ids, _ := about.MapIDs()
	return ids, nil
}

func closeAll(all map[string]*ebpf.Map) {
	for _, m := range all {
		_ = m.Close()
	}
}

// adopt opens the maps that are there, replaces those that this version lays out in another way, and puts this version's
// programs in the place of the old ones. Until all that can fail for reasons of layout or of the programs is done, nothing that
// works is touched. Killed at any point, it is done again by the next agent.
func (d *Datapath) adopt(spec *ebpf.CollectionSpec, mine Layout) (err error) {
	if d.lock, err = lockDir(d.bpffs); err != nil {
		return err
	}
	next := filepath.Join(d.bpffs, nextDir)
	if err := os.RemoveAll(next); err != nil {
		return fmt.Errorf("remove what an interrupted upgrade left: %w", err)
	}
	pinned, err := d.openPinned(spec)
	defer func() { closeAll(pinned) }()
	if err != nil {
		return err
	}
	replace, err := d.checkLayout(spec, pinned, mine)
	if err != nil {
		return err
	}

	use := map[string]*ebpf.Map{}
	made := map[string]*ebpf.Map{}
	defer func() { closeAll(made) }()
	defer func() { err = errors.Join(err, os.RemoveAll(next)) }()
	if err := os.Mkdir(next, 0o700); err != nil {
		return fmt.Errorf("make a directory for pins: %w", err)
	}
	for name, want := range spec.Maps {
		old := pinned[name]
		if old != nil && !replace[name] {
			use[name] = old
			continue
		}
		m, err := d.makeMap(want, old)
		if err != nil {
			err = fmt.Errorf("map %s: %w", name, err)
			if errors.Is(err, unix.E2BIG) {
				return &LayoutError{BPFFS: d.bpffs, Pinned: d.pinnedLayout(pinned), Mine: mine, Err: err}
			}
			return err
		}
		made[name], use[name] = m, m
		if err := m.Pin(filepath.Join(next, name)); err != nil {
			return fmt.Errorf("pin map %s: %w", name, err)
		}
	}
	fault.Point("upgrade: maps copied")
	d.maps = new(maps.Maps)
	if err := spec.LoadAndAssign(&d.maps.RedirectorMaps, &ebpf.CollectionOptions{MapReplacements: use}); err != nil {
		return fmt.Errorf("open pinned maps: %w", err)
	}
	if err := d.load(spec); err != nil {
		return err
	}
	fault.Point("upgrade: programs loaded")

	if err := d.replacePins(pinned, made); err != nil {
		return err
	}
	if err := d.putToWork(spec, filepath.Join(d.bpffs, linksDir)); err != nil {
		return err
	}
	if err := d.adoptOriginalDst(); err != nil {
		return err
	}
	if err := d.removeUnknown(spec); err != nil {
		return err
	}
	if err := writeLayout(d.maps.Layout, mine); err != nil {
		return err
	}
	fault.Point("upgrade: layout noted")
	return nil
}

// pinnedLayout is what a dataplane says of itself, as far as it can be read.
func (d *Datapath) pinnedLayout(pinned map[string]*ebpf.Map) Layout {
	l, _ := readLayout(pinned[bpf.RedirectorMapLayout])
	return l
}

// checkLayout compares the layouts, by the versions' numbers and map by map. It returns the maps that must be replaced.
func (d *Datapath) checkLayout(spec *ebpf.CollectionSpec, pinned map[string]*ebpf.Map, mine Layout) (replace map[string]bool, err error) {
	theirs, err := readLayout(pinned[bpf.RedirectorMapLayout])
	if err != nil {
		return nil, err
	}
	if !mine.takesOver(theirs) {
		return nil, &LayoutError{BPFFS: d.bpffs, Pinned: theirs, Mine: mine}
	}
	replace = map[string]bool{}
	for name, m := range pinned {
		same, err := sameLayout(spec.Maps[name], m)
		if errors.Is(err, errMeaning) {
			return nil, &LayoutError{BPFFS: d.bpffs, Pinned: theirs, Mine: mine, Err: fmt.Errorf("map %s: %w", name, err)}
		}
		if err != nil {
			return nil, fmt.Errorf("pinned map %s: %w", name, err)
		}
		replace[name] = !same
	}
	return replace, nil
}

// makeMap makes a map, with the entries of the old one if there is one.
func (d *Datapath) makeMap(spec *ebpf.MapSpec, old *ebpf.Map) (*ebpf.Map, error) {
	if old != nil {
		return carryOver(spec, old)
	}
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, fmt.Errorf("create: %w", err)
	}
	return m, nil
}

// replacePins puts the pins of new maps in the place of the old ones, and pins anew a map whose pin is gone. From then on an
// agent that starts anew uses the new maps. Old programs go on with the old ones, which have the same entries.
func (d *Datapath) replacePins(pinned, made map[string]*ebpf.Map) error {
	for name := range made {
		old := pinned[name]
		if old != nil && old.Type() != ebpf.Hash && old.Type() != ebpf.Array && old.Type() != ebpf.LPMTrie {
			if err := keep(d.bpffs, name, old); err != nil {
				return err
			}
			fault.Point("upgrade: old map kept")
		}
		// Renaming is one step, also in a BPF filesystem. The map knows its pin.
		if err := os.Rename(filepath.Join(d.bpffs, nextDir, name), filepath.Join(d.bpffs, mapsDir, name)); err != nil {
			return fmt.Errorf("put the pin of map %s in place: %w", name, err)
		}
		fault.Point("upgrade: map replaced")
	}
	_, err := d.pinMaps()
	return err
}

// pinMaps pins those maps that are not pinned, and returns their names.
func (d *Datapath) pinMaps() (again []string, err error) {
	for name, m := range d.byName() {
		pin := filepath.Join(d.bpffs, mapsDir, name)
		switch _, err := os.Lstat(pin); {
		case err == nil:
			continue
		case !errors.Is(err, fs.ErrNotExist):
			return again, fmt.Errorf("look for the pin of map %s: %w", name, err)
		}
		unpinned, err := m.Clone() // one that does not believe to have a pin
		if err != nil {
			return again, fmt.Errorf("pin map %s: %w", name, err)
		}
		err = errors.Join(unpinned.Pin(pin), unpinned.Close())
		if err != nil {
			return again, fmt.Errorf("pin map %s: %w", name, err)
		}
		again = append(again, name)
	}
	return again, nil
}

// removeUnknown detaches programs of another version that this one does not have, and lets go of such maps: they would be in
// the way of a later version's that takes what it finds there for true.
func (d *Datapath) removeUnknown(spec *ebpf.CollectionSpec) error {
	links, err := os.ReadDir(filepath.Join(d.bpffs, linksDir))
	if err != nil {
		return fmt.Errorf("list the pinned links: %w", err)
	}
	for _, file := range links {
		pin := filepath.Join(d.bpffs, linksDir, file.Name())
		if d.links[file.Name()] == nil && d.bridge.links[pin] == nil {
			if err := detach(pin); err != nil {
				return err
			}
		}
	}
	pins, err := os.ReadDir(filepath.Join(d.bpffs, mapsDir))
	if err != nil {
		return fmt.Errorf("list the pinned maps: %w", err)
	}
	for _, file := range pins {
		if spec.Maps[file.Name()] == nil {
			if err := os.Remove(filepath.Join(d.bpffs, mapsDir, file.Name())); err != nil {
				return fmt.Errorf("let go of another version's map %s: %w", file.Name(), err)
			}
		}
	}
	return nil
}

// nodePrograms are those that are attached to the cgroup for the whole node, with the names of their pins.
var nodePrograms = []struct {
	pin     string
	program string
	attach  ebpf.AttachType
	// notes says that it leaves notes with sockets for others to read. What reads them comes first: see putToWork.
	notes bool
}{
	{"sock_ops", bpf.RedirectorProgRedirMark, ebpf.AttachCGroupSockOps, false},
	{"sock_create", bpf.RedirectorProgRedirCreate, ebpf.AttachCGroupInetSockCreate, true},
	{"setsockopt", bpf.RedirectorProgRedirSetsockopt, ebpf.AttachCGroupSetsockopt, false},
	{"bind4", bpf.RedirectorProgRedirBind4, ebpf.AttachCGroupInet4Bind, false},
	{"bind6", bpf.RedirectorProgRedirBind6, ebpf.AttachCGroupInet6Bind, false},
	// What reads the notes of DNS queries comes before what writes them.
	{"recvmsg4", bpf.RedirectorProgRedirRecvmsg4, ebpf.AttachCGroupUDP4Recvmsg, false},
	{"recvmsg6", bpf.RedirectorProgRedirRecvmsg6, ebpf.AttachCGroupUDP6Recvmsg, false},
	{"getpeername4", bpf.RedirectorProgRedirGetpeername4, ebpf.AttachCgroupInet4GetPeername, false},
	{"getpeername6", bpf.RedirectorProgRedirGetpeername6, ebpf.AttachCgroupInet6GetPeername, false},
	{"sendmsg4", bpf.RedirectorProgRedirSendmsg4, ebpf.AttachCGroupUDP4Sendmsg, false},
	{"sendmsg6", bpf.RedirectorProgRedirSendmsg6, ebpf.AttachCGroupUDP6Sendmsg, false},
	{"connect4", bpf.RedirectorProgRedirConnect4, ebpf.AttachCGroupInet4Connect, true},
	{"connect6", bpf.RedirectorProgRedirConnect6, ebpf.AttachCGroupInet6Connect, true},
}

// load loads the programs that all pods share, and prepares those that each pod gets a copy of.
func (d *Datapath) load(spec *ebpf.CollectionSpec) (err error) {
	shared, err := ebpf.NewCollectionWithOptions(sharedPrograms(spec), ebpf.CollectionOptions{MapReplacements: d.byName()})
	if err != nil {
		return fmt.Errorf("load programs: %w", err)
	}
	defer shared.Close()
	d.shared, shared.Programs = shared.Programs, nil
	if d.steer, err = newTemplate(spec.Programs[bpf.RedirectorProgRedirSteer], d.byName()); err != nil {
		return err
	}
	d.seal, err = newTemplate(spec.Programs[bpf.RedirectorProgRedirSeal], d.byName())
	return err
}

// tailCalls are the programs that others call, with their indices.
var tailCalls = []struct {
	index   bpf.RedirectorTailCall
	program string
}{
	{bpf.RedirectorTailCallTAIL_CALL_SEAL_PKT, bpf.RedirectorProgRedirSealPkt},
}

// putToWork puts the programs that all pods share where they act, in the place of those that may be there. The order is what
// keeps everything found: first the new programs leave notes with sockets, beside the old ones; then the program is replaced
// that reads these notes and admits flows; then what old programs have written is copied; then the seal is replaced, which
// reads all that; and last the old programs that leave notes.
func (d *Datapath) putToWork(spec *ebpf.CollectionSpec, links string) (err error) {
	listeners := func() error {
		return d.eachPrevious(bpf.RedirectorMapListeners, func(old *ebpf.Map) error {
			return copyListeners(d.maps.RedirectorMaps.Listeners, old)
		})
	}
	var notes bridge
	defer func() { err = errors.Join(err, notes.close()) }()
	if d.adopted {
		if err := errors.Join(d.bridgeSockets(&notes), d.bridgeAdmitted(spec), listeners()); err != nil {
			return err
		}
		fault.Point("upgrade: bridges built")
	}
	for i, p := range nodePrograms {
		l, err := attachCgroup(d.shared[p.program], p.attach, d.cgroup, filepath.Join(links, p.pin))
		if err != nil {
			return err
		}
		d.links[p.pin] = l
		fault.Point("upgrade: program replaced")
		if i > 0 {
			continue
		}
		// Listeners once more, for what was made meanwhile.
		if err := errors.Join(listeners(), d.copyAdmitted()); err != nil {
			return err
		}
		if err := d.putTailCalls(); err != nil {
			return err
		}
	}
	return errors.Join(d.copyDNSNotes(), notes.end())
}

// putTailCalls puts the programs that others call into the map.
func (d *Datapath) putTailCalls() error {
	for _, t := range tailCalls {
		put := func(m *ebpf.Map) error {
			if uint32(t.index) >= m.MaxEntries() {
				return nil // an older map, of a version that has no such program
			}
			if err := m.Put(uint32(t.index), d.shared[t.program]); err != nil {
				return fmt.Errorf("put: %w", err)
			}
			return nil
		}
		if err := put(d.maps.TailCalls); err != nil {
			return fmt.Errorf("map tail_calls: %w", err)
		}
		// What pods have from an older version calls this version's programs, too: they read the maps that are written now.
		if err := d.eachPrevious(bpf.RedirectorMapTailCalls, put); err != nil {
			return err
		}
		fault.Point("upgrade: tail call replaced")
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

// attachCgroup attaches a program to the cgroup, or puts it in the place of the one that is attached there already. The link is
// the caller's to close, and works on by its pin.
func attachCgroup(prog *ebpf.Program, attach ebpf.AttachType, cgroup, pin string) (link.Link, error) {
	what := filepath.Base(pin)
	old, err := link.LoadPinnedLink(pin, nil)
	if err == nil {
		on, err := isOnCgroup(old, cgroup)
		if on && err == nil {
			if err := old.Update(prog); err != nil {
				return nil, errors.Join(fmt.Errorf("replace the %s program on cgroup %s: %w", what, cgroup, err), old.Close())
			}
			return old, nil
		}
		defer old.Close()
		if err != nil {
			return nil, err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open pinned link %s: %w", pin, err)
	}

	l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: attach, Program: prog})
	if err != nil {
		return nil, fmt.Errorf("attach the %s program to cgroup %s: %w", what, cgroup, err)
	}
	if err := pinLink(l, pin); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	// The new one works before the old one goes: at once, where losing its pin would leave that to a worker of the kernel.
	if old != nil {
		if err := old.Detach(); err != nil && !errors.Is(err, unix.ENOLINK) {
			return nil, errors.Join(fmt.Errorf("detach the %s program from another cgroup: %w", what, err), l.Close())
		}
	}
	return l, nil
}

// pinLink pins a link, in the place of another if need be.
func pinLink(l link.Link, pin string) error {
	fresh := pin + unfinished
	err := os.Remove(fresh)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		if err = l.Pin(fresh); err == nil {
			err = os.Rename(fresh, pin)
		}
	}
	if err != nil {
		return fmt.Errorf("pin the link of the %s program: %w", filepath.Base(pin), err)
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
	errs = append(errs, d.bridge.close())
	for _, l := range d.links {
		errs = append(errs, l.Close())
	}
	for _, p := range d.shared {
		errs = append(errs, p.Close())
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
		bpf.RedirectorMapLayout:       m.RedirectorMaps.Layout,
		bpf.RedirectorMapDnsNotes:     m.RedirectorMaps.DnsNotes,
		bpf.RedirectorMapDnsBounds:    m.RedirectorMaps.DnsBounds,
		bpf.RedirectorMapExceptions:   m.RedirectorMaps.Exceptions,
		bpf.RedirectorMapCidrs:        m.RedirectorMaps.Cidrs,
		bpf.RedirectorMapMachines:     m.RedirectorMaps.Machines,
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
	for _, ours := range append([]string{nextDir, previousDir}, madeDirs...) {
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
	links, err := filepath.Glob(filepath.Join(bpffs, linksDir, "*"))
	if err != nil {
		return err
	}
	pins = append(pins, links...)
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
