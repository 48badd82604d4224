// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/podns"
	"github.com/redirector-dataplane/redirector/pkg/zds"
)

// stateSuffix is that of the files in StateDir; their names begin with the pod's UID.
const stateSuffix = ".json"

// restoreWorkers bounds how many pods are taken over at a time when the agent starts.
const restoreWorkers = 8

// savedPod is what must outlive the agent and is not in the kernel. It is written before anything is changed, so that an
// enrolment that was interrupted can be completed or undone. Cookies and inodes mean something in one boot only.
type savedPod struct {
	Spec
	NetNSCookie uint64    `json:"netnsCookie"`
	NetNSInode  uint64    `json:"netnsInode"`
	BootID      string    `json:"bootID"`
	Since       time.Time `json:"since"`
	Before      before    `json:"before"`
}

// before is what a namespace was like before enrolment, as far as enrolment changes it in ways that do not show who did.
type before struct {
	// Restore names the sysctls that were 0.
	Restore maps.Restore `json:"restore"`
	// Links are the indices of the interfaces that were there, but for lo, and Clsact of those that had a clsact qdisc.
	Links  []int `json:"links"`
	Clsact []int `json:"clsact"`
}

var bootID = sync.OnceValue(func() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
})

func (e *Enroller) stateFile(uid string) string { return filepath.Join(e.StateDir, uid+stateSuffix) }

func (e *Enroller) saveState(p *pod) error {
	b, err := json.MarshalIndent(savedPod{p.spec, p.ns.Cookie(), p.ns.Inode(), bootID(), p.since, p.before}, "", "  ")
	if err == nil {
		// A new agent finds most files as they should be, and writing is what would take it the longest.
		if have, errRead := os.ReadFile(e.stateFile(p.uid)); errRead == nil && bytes.Equal(have, b) {
			return nil
		}
		err = replaceFile(e.stateFile(p.uid), b)
	}
	if err != nil {
		return fmt.Errorf("note the pod in %s: %w", e.StateDir, err)
	}
	return nil
}

// replaceFile gives a file its content in one step: whoever is killed meanwhile leaves the old one or the new one, and perhaps
// what removeHalfWritten removes. It does not wait for the disk, which takes longer than all the rest of an enrolment: what a
// machine that stops has not written is of a boot that is over, and nobody's to read.
func replaceFile(name string, content []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+"*") // with mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	if _, err := f.Write(content); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}

func (e *Enroller) removeState(uid string) error {
	if err := os.Remove(e.stateFile(uid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forget the pod: %w", err)
	}
	return nil
}

// loadState reads all state files. What cannot be read is left out, and logged.
func (e *Enroller) loadState() (map[string]savedPod, error) {
	if err := os.MkdirAll(e.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("make a directory for what is known of pods: %w", err)
	}
	if err := removeHalfWritten(e.StateDir); err != nil {
		e.Log.Warn("cannot remove what an earlier agent was writing when it was killed", "error", err)
	}
	saved, unread, err := readStates(e.StateDir)
	for _, err := range unread {
		e.Log.Error("cannot read what is known of a pod: it stays captured, enroll it again", "error", err)
	}
	return saved, err
}

// removeHalfWritten removes what was to become a state file when an agent was killed. Such a file has the name of the one that it was
// to become between a dot and a number.
func removeHalfWritten(dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, ".*"+stateSuffix+"*"))
	if err != nil {
		return fmt.Errorf("list them: %w", err)
	}
	var errs []error
	for _, file := range files {
		errs = append(errs, os.Remove(file))
	}
	return errors.Join(errs...)
}

// readStates reads all state files of this boot in a directory, by UID. unread says which could not be read, and why.
func readStates(dir string) (saved map[string]savedPod, unread []error, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "*"+stateSuffix))
	if err != nil {
		return nil, nil, fmt.Errorf("list what is known of pods: %w", err)
	}
	saved = map[string]savedPod{}
	boot := bootID()
	for _, file := range files {
		s, err := readState(file)
		if name := filepath.Base(file); err == nil && name != s.UID+stateSuffix {
			err = fmt.Errorf("it is about the pod with UID %s, which has a file of its own: remove it", s.UID)
		}
		if err != nil {
			unread = append(unread, fmt.Errorf("%s: %w", file, err))
		} else if s.BootID == boot {
			saved[s.UID] = s
		}
	}
	return saved, unread, nil
}

func readState(file string) (savedPod, error) {
	var s savedPod
	b, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err == nil {
		err = s.Validate()
	}
	return s, err
}

// stateBefore returns what an enrolment of the pod into this namespace that was interrupted has noted.
func (e *Enroller) stateBefore(p *pod) (before, bool) {
	s, err := readState(e.stateFile(p.uid))
	return s.Before, err == nil && s.BootID == bootID() && s.NetNSCookie == p.ns.Cookie()
}

// Restore takes over the pods that an earlier agent has enrolled, and forgets those whose network namespace is gone. Of a
// pod that the kernel knows and no file does, only the capture stays: proxies are told to keep it.
func (e *Enroller) Restore(ctx context.Context) error {
	saved, err := e.loadState()
	if err != nil {
		return err
	}
	inKernel, err := e.Datapath.Maps().Pods()
	if err != nil {
		return err
	}
	left, err := e.leftovers()
	if err != nil {
		return err
	}

	var group errgroup.Group
	group.SetLimit(restoreWorkers)
	var failed atomic.Bool
	for cookie, entry := range inKernel {
		s, known := saved[entry.UID]
		if known && s.NetNSCookie == cookie {
			delete(saved, entry.UID)
		} else {
			s = savedPod{}
		}
		group.Go(func() error {
			if err := e.restore(ctx, cookie, entry, s, left(cookie, entry.UID)); err != nil {
				failed.Store(true)
				e.Log.Error("cannot take over an enrolled pod: it stays as it is",
					"uid", entry.UID, "netns_inode", entry.NetNSInode, "error", err)
			}
			return nil
		})
	}
	// The kernel does not know these: the pins were removed by hand, or the last agent was killed on its way in or out.
	for uid, s := range saved {
		group.Go(func() error {
			if err := e.restoreSaved(s, left(s.NetNSCookie, uid)); err != nil {
				e.Log.Warn("cannot enrol a pod again: enroll it by hand if it still runs", "pod", s.String(), "uid", uid, "error", err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return e.Datapath.Settle(!failed.Load())
}

// restoreSaved enrols a pod that only its file knows, or forgets it when its network namespace is gone.
func (e *Enroller) restoreSaved(s savedPod, left leftovers) error {
	left.captured = false
	ns, err := findNetNS(s.NetNS, s.NetNSInode, s.NetNSCookie)
	if errors.Is(err, podns.ErrGone) {
		return e.succeed(s, left)
	}
	if err != nil {
		return err
	}
	s.NetNS = ns.Path()
	return e.captureIn(ns, s.Spec, left, s.Since)
}

// succeed enrols a pod whose network namespace is gone in the one that its path leads to now, or forgets it when there is none.
func (e *Enroller) succeed(s savedPod, left leftovers) error {
	if err := e.clear(s.UID, s.NetNSCookie, nil, left, s.Before); err != nil {
		return err
	}
	spec := s.Spec
	if ns := e.successor(&spec); ns != nil {
		e.Log.Info("pod has another network namespace now", "pod", spec.String(), "uid", spec.UID, "netns", ns.Path())
		return e.captureIn(ns, spec, leftovers{}, s.Since)
	}
	e.Log.Info("forget a pod whose network namespace is gone", "uid", s.UID, "pod", s.String())
	return e.removeState(s.UID)
}

// successor opens the network namespace that a pod's path leads to, if the pod can be enrolled there; see fit.
func (e *Enroller) successor(spec *Spec) *podns.NetNS {
	if !mayMove(spec.NetNS) {
		return nil
	}
	ns, err := podns.Open(spec.NetNS)
	if err != nil {
		return nil
	}
	if !e.fit(ns, spec) {
		_ = ns.Close()
		return nil
	}
	return ns
}

// restore takes over one pod that the kernel knows. s is what its file says, or empty.
func (e *Enroller) restore(ctx context.Context, cookie uint64, entry maps.Pod, s savedPod, left leftovers) error {
	ns, err := findNetNS(s.NetNS, entry.NetNSInode, cookie)
	if errors.Is(err, podns.ErrGone) && s.UID != "" {
		return e.succeed(s, left)
	}
	if errors.Is(err, podns.ErrGone) {
		e.Log.Info("forget a pod whose network namespace is gone", "uid", entry.UID)
		return e.removeUnknown(ctx, entry.UID)
	}
	if err != nil {
		return err
	}
	if s.UID == "" {
		e.Log.Warn("a pod is captured, but its name is lost: enroll it again, or unenroll it", "uid", entry.UID, "netns", ns.Path())
		return errors.Join(e.renewPrograms(ns, entry.UID), e.Proxies.Set(zds.Pod{UID: entry.UID}), ns.Close())
	}
	s.NetNS = ns.Path()
	return e.captureIn(ns, s.Spec, left, s.Since)
}

// renewPrograms gives a captured pod this version's programs, and nothing else.
func (e *Enroller) renewPrograms(ns *podns.NetNS, uid string) error {
	n, err := openPodNet(ns)
	if err != nil {
		return err
	}
	defer n.close()
	p := &pod{uid: uid, ns: ns}
	if _, err := e.applySeals(p, n, true); err != nil {
		return err
	}
	steer := e.loadSteer(p)
	if steer.err != nil || steer.prog == nil {
		return steer.err
	}
	defer steer.prog.Close()
	return e.Datapath.AttachSteer(ns, uid, steer.prog)
}

// leftovers reads what the maps have of all pods.
func (e *Enroller) leftovers() (func(cookie uint64, uid string) leftovers, error) {
	addrs, err := e.Datapath.Maps().OwnAddrs()
	if err != nil {
		return nil, err
	}
	targets, err := e.Datapath.Maps().ProbeTargets()
	if err != nil {
		return nil, err
	}
	excepted, err := e.Datapath.Maps().Exceptions()
	if err != nil {
		return nil, err
	}
	probed := map[string]map[netip.Addr]bool{}
	for addr, target := range targets {
		if probed[target.UID] == nil {
			probed[target.UID] = map[netip.Addr]bool{}
		}
		probed[target.UID][addr] = true
	}
	return func(cookie uint64, uid string) leftovers {
		return leftovers{addrs[cookie], probed[uid], excepted[cookie], true}
	}, nil
}

// findNetNS opens a network namespace that is known by its numbers; path is where it used to be.
func findNetNS(path string, inode, cookie uint64) (*podns.NetNS, error) {
	if path != "" {
		if ns, err := podns.Open(path); err == nil {
			if ns.Cookie() == cookie {
				return ns, nil
			}
			_ = ns.Close()
		}
	}
	return podns.Find(inode, cookie)
}

// removeUnknown takes out a pod that this Enroller does not hold, going by what the kernel knows of it.
func (e *Enroller) removeUnknown(ctx context.Context, uid string) error {
	if err := e.Proxies.Remove(ctx, uid); err != nil {
		e.Log.Warn("a proxy has not confirmed that it left the pod", "uid", uid, "error", err)
	}
	entries, err := e.Datapath.Maps().Pods()
	if err != nil {
		return err
	}
	left, err := e.leftovers()
	if err != nil {
		return err
	}
	saved, errSaved := readState(e.stateFile(uid))
	found := false
	for cookie, entry := range entries {
		if entry.UID != uid {
			continue
		}
		found = true
		ns, err := podns.Find(entry.NetNSInode, cookie)
		if err != nil && !errors.Is(err, podns.ErrGone) {
			return err
		}
		err = e.clear(uid, cookie, ns, left(cookie, uid), saved.Before)
		if ns != nil {
			err = errors.Join(err, ns.Close())
		}
		if err != nil {
			return err
		}
	}
	if !found && errSaved == nil && saved.BootID == bootID() {
		// An enrolment was interrupted before capture was on.
		ns, err := findNetNS(saved.NetNS, saved.NetNSInode, saved.NetNSCookie)
		if err != nil && !errors.Is(err, podns.ErrGone) {
			return err
		}
		if ns != nil {
			err = errors.Join(strip(ns, saved.Before), ns.Close())
		}
		if err != nil && !errors.Is(err, podns.ErrGone) {
			return err
		}
	}
	return errors.Join(e.Datapath.DetachSteer(uid), e.removeState(uid))
}
