// SPDX-License-Identifier: Apache-2.0

// Package identity tells the programs who is who on the node: which processes are a node proxy's, which are pods', which are
// the kubelet's. It owns the maps config and cgroups, and writes nothing else.
package identity

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/cgroups"
	"github.com/redirector-dataplane/redirector/pkg/hostprobe"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/podns"
)

// rescanEvery is how soon a kubelet's or the pods' cgroup that was made anew is recognised.
const rescanEvery = 2 * time.Second

// Options say what counts as what.
type Options struct {
	Maps *maps.Maps
	// Cgroup is the cgroup2 directory that the programs are attached to.
	Cgroup        string
	ProbeSource   maps.ProbeSource
	ProbeIdentity maps.ProbeIdentity
	ProxyIdentity maps.ProxyIdentity
	// Kubernetes says that the node's pods must have a cgroup in common: without it, who is no pod cannot be told.
	Kubernetes bool
	// Probes are the addresses that probes come from, as hostprobe.Add has returned them.
	Probes hostprobe.Addrs
	// OnProxyCgroup, if set, is told the directory of a proxy's cgroup when the proxy connects, before it is served.
	OnProxyCgroup func(dir string) error
	Log           *slog.Logger
}

// Identity keeps the programs informed. Its methods may be called from several goroutines.
type Identity struct {
	opts Options

	mu     sync.Mutex
	config maps.Config
	// scanned are the roles that the last scan has found.
	scanned map[uint64]maps.CgroupRole
	// proxies are the directories of the cgroups of proxies that have connected; "" if an earlier agent knew it.
	proxies  map[uint64]string
	warnings map[string]string // by topic
}

// New writes the settings and what a first scan of the node finds. The calling process must be in the host's network
// namespace.
func New(opts Options) (*Identity, error) {
	cookie, err := podns.Cookie()
	if err != nil {
		return nil, fmt.Errorf("read the host's netns cookie: %w", err)
	}
	i := &Identity{
		opts: opts,
		config: maps.Config{
			HostNetNSCookie: cookie,
			ProbeSource:     opts.ProbeSource,
			ProbeIdentity:   opts.ProbeIdentity,
			ProxyIdentity:   opts.ProxyIdentity,
			ProbeV4:         opts.Probes.V4,
			ProbeV6:         opts.Probes.V6,
		},
		scanned:  map[uint64]maps.CgroupRole{},
		proxies:  map[uint64]string{},
		warnings: map[string]string{},
	}
	// Cgroups first: with the settings alone, a hostNetwork pod would pass for the kubelet. Proxies that an earlier agent
	// knew stay known, for they need not connect again at once.
	before, err := opts.Maps.Cgroups()
	if err != nil {
		return nil, err
	}
	for id, role := range before {
		if role == maps.CgroupProxy {
			i.proxies[id] = ""
		} else {
			i.scanned[id] = role
		}
	}
	if err := i.scan(); err != nil {
		return nil, err
	}
	return i, opts.Maps.SetConfig(i.config)
}

// Run keeps looking for cgroups that come and go, and keeps the probes' addresses on the host's lo, until ctx is done.
func (i *Identity) Run(ctx context.Context) error {
	ticker := time.NewTicker(rescanEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		if _, err := hostprobe.Add(i.opts.Probes); err != nil {
			i.opts.Log.Error("cannot keep the addresses of probes on the host's lo", "error", err)
		}
		if err := i.scan(); err != nil {
			i.opts.Log.Error("cannot tell which processes are pods' and which the kubelet's", "error", err)
		}
	}
}

// scan finds the cgroups of pods and kubelets, and updates the map where something has changed.
func (i *Identity) scan() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	found := map[uint64]maps.CgroupRole{}
	note := func(dirs []string, role maps.CgroupRole) error {
		for _, dir := range dirs {
			id, err := cgroups.ID(dir)
			if errors.Is(err, unix.ENOENT) {
				continue
			}
			if err != nil {
				return err
			}
			found[id] = role
		}
		return nil
	}
	pods, err := cgroups.Pods(i.opts.Cgroup)
	if err == nil {
		err = note(pods, maps.CgroupPods)
	}
	if err != nil {
		return err
	}
	if i.opts.ProbeSource == maps.ProbeSourceKubelet {
		kubelets, err := cgroups.Kubelets(i.opts.Cgroup)
		if err == nil {
			err = note(kubelets, maps.CgroupKubelet)
		}
		if err != nil {
			return err
		}
		i.warn("kubelet", len(kubelets) == 0, "no kubelet is in a cgroup of its own: no probe is let through; start it, or use --probe-source=node")
	}
	i.warn("pods", i.opts.Kubernetes && i.opts.ProbeSource == maps.ProbeSourceNode && len(pods) == 0,
		"no cgroup of pods (kubepods) is found: every process of the host's network namespace counts as a probe")

	for id, role := range found {
		if i.scanned[id] != role {
			if err := i.opts.Maps.PutCgroup(id, role); err != nil {
				return err
			}
		}
	}
	for id := range i.scanned {
		if _, ok := found[id]; !ok {
			if err := i.opts.Maps.DeleteCgroup(id); err != nil {
				return err
			}
		}
	}
	i.scanned = found
	return i.forgetProxies()
}

// forgetProxies takes out the cgroups of proxies that are gone. The mutex is held.
func (i *Identity) forgetProxies() error {
	for id, dir := range i.proxies {
		if dir == "" {
			continue
		}
		if now, err := cgroups.ID(dir); err == nil && now == id {
			continue
		}
		if err := i.opts.Maps.DeleteCgroup(id); err != nil {
			return err
		}
		delete(i.proxies, id)
	}
	return nil
}

// ProxyConnected tells that a process has connected as a node proxy: sockets that its cgroup makes from now on, and marks,
// are the proxy's. Where cgroups tell nothing, the mark alone has to do, and Warnings says so.
func (i *Identity) ProxyConnected(pid int32) error {
	if i.opts.ProxyIdentity == maps.ProxyIdentityMark {
		return nil
	}
	dir, err := cgroups.Of(i.opts.Cgroup, int(pid))
	i.mu.Lock()
	defer i.mu.Unlock()
	if errors.Is(err, cgroups.ErrRoot) {
		i.warn("proxy", true, fmt.Sprintf("the node proxy (pid %d) is in the root of cgroup2: whoever sets the mark 0x539 passes for the proxy; "+
			"run it in a cgroup of its own", pid))
		i.config.ProxyIdentity = maps.ProxyIdentityMark
		return i.opts.Maps.SetConfig(i.config)
	}
	if err != nil {
		return fmt.Errorf("find the cgroup of the node proxy: %w", err)
	}
	id, err := cgroups.ID(dir)
	if err != nil {
		return fmt.Errorf("find the cgroup of the node proxy: %w", err)
	}
	if err := i.opts.Maps.PutCgroup(id, maps.CgroupProxy); err != nil {
		return err
	}
	i.proxies[id] = dir
	if i.opts.OnProxyCgroup != nil {
		return i.opts.OnProxyCgroup(dir)
	}
	return nil
}

// Config returns the settings as they are in force.
func (i *Identity) Config() maps.Config {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.config
}

// Warnings says what is weaker than it was asked to be, and what to do about it.
func (i *Identity) Warnings() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	all := make([]string, 0, len(i.warnings))
	for _, w := range i.warnings {
		all = append(all, w)
	}
	slices.Sort(all)
	return all
}

// warn sets or clears the warning on a topic, and logs one that is new. The mutex is held.
func (i *Identity) warn(topic string, on bool, text string) {
	if !on {
		delete(i.warnings, topic)
		return
	}
	if i.warnings[topic] != text {
		i.opts.Log.Warn("who is who on the node cannot be told as asked for", "why", text)
	}
	i.warnings[topic] = text
}
