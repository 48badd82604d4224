// SPDX-License-Identifier: Apache-2.0

package podns

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
)

// ErrNoProcess says that no process of a pod is in a network namespace of the pod's own.
var ErrNoProcess = errors.New("no process of the pod is in a network namespace of its own")

// procRoot is where the node's processes are listed.
var procRoot atomic.Pointer[string]

// UseProc says where the node's /proc is, if it is not at /proc: in a container that has a PID namespace of its own and the
// node's /proc mounted elsewhere. It counts for the whole process, and is called before anything else of this package.
func UseProc(root string) { procRoot.Store(&root) }

// Sysctl returns the path of a sysctl, as net.ipv4.fwmark_reflect's is at net/ipv4/fwmark_reflect: below the node's /proc, because a
// container cannot write to its own. The file is of the network namespace of the thread that opens it, whosever /proc it is.
func Sysctl(name string) string { return filepath.Join(proc(), "sys", name) }

// proc returns where the node's processes are listed.
func proc() string {
	if root := procRoot.Load(); root != nil {
		return *root
	}
	return "/proc"
}

// podGroup is a cgroup that the kubelet makes for a pod: "pod" and the UID with the cgroupfs driver, the same at the end of a
// slice's name with systemd's, which knows no '-' within a name and has '_' instead. A runtime with another driver than the kubelet
// puts ":cri-containerd:ID" behind it. What is above it is not looked at: from within a container's cgroup namespace it begins with
// "/../..", and may name no kubepods. The UID of a static pod is a hash without '-'.
var podGroup = regexp.MustCompile(
	`^(?:[^/]*kubepods[^/]*-)?pod([0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12})(?:\.slice(?::.*)?)?$`,
)

// PodUID tells which pod a process belongs to by the text of its /proc/PID/cgroup: "" if none. A pod's containers may have cgroups
// of their own that look like pods', so the outermost counts. Where hierarchies disagree it is nobody's.
func PodUID(cgroup string) string {
	uid := ""
	for line := range strings.Lines(cgroup) {
		// hierarchy:controllers:path
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		found := podInPath(parts[2])
		if found == "" {
			continue
		}
		if uid != "" && uid != found {
			return ""
		}
		uid = found
	}
	return uid
}

func podInPath(path string) string {
	for name := range strings.SplitSeq(path, "/") {
		if m := podGroup.FindStringSubmatch(name); m != nil {
			return canonicalUID(m[1])
		}
	}
	return ""
}

// canonicalUID writes a UID as the API server does: with '-', or as a hash without any.
func canonicalUID(uid string) string { return strings.ReplaceAll(uid, "_", "-") }

// Processes is what a look at the node's processes has found: who is in which network namespace.
type Processes struct {
	// byPod has each pod's namespaces, that of its oldest process first.
	byPod map[string][]podProcess
}

// podProcess is the oldest process of a pod in a network namespace.
type podProcess struct {
	path  string
	id    identity
	start uint64 // in clock ticks since the boot
	pid   int
}

// older says which of two processes is the older one.
func older(a, b podProcess) int {
	return cmp.Or(cmp.Compare(a.start, b.start), cmp.Compare(a.pid, b.pid))
}

// Look lists the processes of pods. Processes that come or go meanwhile may be left out. Those in the host's network namespace
// are, and so is a process that is in a namespace where an older one is another pod's: it has gone there.
func Look() (*Processes, error) {
	root := proc()
	dir, err := os.Open(root)
	if err != nil {
		return nil, fmt.Errorf("look at the node's processes: %w", err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("look at the node's processes: %w", err)
	}
	host := []identity{own}
	if init, err := statNetNS(filepath.Join(root, "1/ns/net")); err == nil {
		host = append(host, init)
	}

	type owner struct {
		uid string
		podProcess
	}
	owners := map[identity]owner{}
	all := map[string]map[identity]podProcess{}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		uid, p, err := lookAt(root, pid)
		if err != nil || uid == "" || slices.Contains(host, p.id) {
			continue
		}
		if known, ok := owners[p.id]; !ok || older(p, known.podProcess) < 0 {
			owners[p.id] = owner{uid, p}
		}
		if all[uid] == nil {
			all[uid] = map[identity]podProcess{}
		}
		if known, ok := all[uid][p.id]; !ok || older(p, known) < 0 {
			all[uid][p.id] = p
		}
	}

	found := &Processes{byPod: map[string][]podProcess{}}
	for uid, namespaces := range all {
		for id, p := range namespaces {
			if owners[id].uid == uid {
				found.byPod[uid] = append(found.byPod[uid], p)
			}
		}
		slices.SortFunc(found.byPod[uid], older)
	}
	return found, nil
}

// lookAt looks at one process. The UID is "" if it is no pod's.
func lookAt(root string, pid int) (uid string, p podProcess, err error) {
	dir := filepath.Join(root, strconv.Itoa(pid))
	cgroup, err := os.ReadFile(filepath.Join(dir, "cgroup"))
	if err != nil {
		return "", p, err
	}
	if uid = PodUID(string(cgroup)); uid == "" {
		return "", p, nil
	}
	p = podProcess{path: filepath.Join(dir, "ns/net"), pid: pid}
	if p.id, err = statNetNS(p.path); err != nil {
		return "", p, err
	}
	p.start, err = startTime(filepath.Join(dir, "stat"))
	return uid, p, err
}

// startTime reads when a process was started.
func startTime(path string) (uint64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	// The second field is the program's name, in brackets, and may have anything in it. The start time is the 22nd.
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	const startField = 22 - 3
	if len(fields) <= startField {
		return 0, fmt.Errorf("%s has %d fields", path, len(fields)+2)
	}
	return strconv.ParseUint(fields[startField], 10, 64)
}

// Has says whether a process of the pod was seen in a network namespace of its own.
func (p *Processes) Has(uid string) bool { return len(p.byPod[uid]) > 0 }

// Open opens the network namespace of a pod: that of its oldest process, of those that own one of the addresses. The error wraps
// ErrNoProcess if there is none. That a namespace was seen does not mean that it is still there; Open opens what is.
func (p *Processes) Open(uid string, ips []netip.Addr) (*NetNS, error) {
	var errs []error
	for _, process := range p.byPod[uid] {
		ns, err := Open(process.path)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		owned, err := ns.owns(ips)
		// The pid may have become another process's since.
		if err == nil && ns.id == process.id && owned {
			return ns, nil
		}
		if err == nil {
			err = fmt.Errorf("%s owns none of the pod's addresses", process.path)
		}
		errs = append(errs, err, ns.Close())
	}
	return nil, errors.Join(append([]error{fmt.Errorf("pod %s: %w", uid, ErrNoProcess)}, errs...)...)
}

// owns says whether an interface in the namespace has one of the addresses.
func (n *NetNS) owns(ips []netip.Addr) (owned bool, err error) {
	err = n.Do(func() error {
		addrs, err := net.InterfaceAddrs()
		if err != nil {
			return fmt.Errorf("list the addresses in %s: %w", n.path, err)
		}
		for _, addr := range addrs {
			prefix, ok := addr.(*net.IPNet)
			if !ok {
				continue
			}
			if ip, ok := netip.AddrFromSlice(prefix.IP); ok && slices.Contains(ips, ip.Unmap()) {
				owned = true
			}
		}
		return nil
	})
	return owned, err
}
