// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/podns"
)

// lookFresh is for how long a look at the node's processes counts as one of now, for a pod that it shows. Whether what it shows is
// still so is seen when the namespace is opened.
const lookFresh = time.Second

// processes looks at the node's processes, no more often than needed: to look takes a time that grows with their number, and many
// pods may be looked for at once.
type processes struct {
	mu   sync.Mutex
	last *podns.Processes
	at   time.Time
}

// find returns the path and the inode number of a pod's network namespace.
func (p *processes) find(uid string, ips []netip.Addr) (path string, inode uint64, err error) {
	asked := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.last != nil && p.last.Has(uid) && time.Since(p.at) < lookFresh {
		if path, inode, err = open(p.last, uid, ips); err == nil {
			return path, inode, nil
		}
	}
	// Who waited here while another looked has been served, if that one began later.
	if p.last == nil || !p.at.After(asked) {
		at := time.Now()
		if p.last, err = podns.Look(); err != nil {
			return "", 0, err
		}
		p.at = at
	}
	return open(p.last, uid, ips)
}

func open(found *podns.Processes, uid string, ips []netip.Addr) (path string, inode uint64, err error) {
	ns, err := found.Open(uid, ips)
	if err != nil {
		return "", 0, err
	}
	defer ns.Close()
	return ns.Path(), ns.Inode(), nil
}

// pathTo returns a path that leads to the network namespace which an enrolled pod has.
func pathTo(have enroll.Pod) (string, error) {
	if ns, err := podns.Open(have.NetNS); err == nil {
		defer ns.Close()
		if ns.Cookie() == have.NetNSCookie {
			return have.NetNS, nil
		}
	}
	ns, err := podns.Find(have.NetNSInode, have.NetNSCookie)
	if err != nil {
		return "", fmt.Errorf("find the network namespace of pod %s again: %w", &have.Spec, err)
	}
	defer ns.Close()
	return ns.Path(), nil
}

func sortedAddrs(addrs []netip.Addr) []netip.Addr {
	all := slices.Clone(addrs)
	for i, addr := range all {
		all[i] = addr.Unmap()
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}
