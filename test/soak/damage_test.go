// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// damage takes away something of an enrolled pod's that the agent has made.
type damage struct {
	name string
	kind enroll.Repair
	do   func(s *soak, pod *bed.NS) error
	// node says that it is about all pods.
	node bool
}

func damages() []damage {
	all := []damage{
		{"the seal", enroll.RepairSeal, inPod(removeSeal), false},
		{"the seal and its queueing discipline", enroll.RepairSeal, inPod(removeClsact), false},
		{"the steer link", enroll.RepairSteer, func(s *soak, pod *bed.NS) error { return detachSteer(s.steerPin(pod)) }, false},
		{"the steer link's pin", enroll.RepairSteer, func(s *soak, pod *bed.NS) error { return os.Remove(s.steerPin(pod)) }, false},
		{"its entry in pods", enroll.RepairEntry, inMaps(func(m *maps.Maps, pod *bed.NS) error { return m.DeletePod(pod.Cookie) }), false},
		{"its entry in counters", enroll.RepairCounters, inMaps(func(m *maps.Maps, pod *bed.NS) error { return m.DeleteCounters(pod.Cookie) }), false},
		{"the sysctl tcp_fwmark_accept", enroll.RepairSysctl, setSysctl("net.ipv4.tcp_fwmark_accept"), false},
		{"the sysctl fwmark_reflect", enroll.RepairSysctl, setSysctl("net.ipv4.fwmark_reflect"), false},
		{"the sysctl fwmark_reflect for IPv6", enroll.RepairSysctl, setSysctl("net.ipv6.fwmark_reflect"), false},
		{"the program redir_mark's pin", enroll.RepairNode, func(s *soak, _ *bed.NS) error {
			return os.Remove(filepath.Join(s.BPFFS, "links", "sock_ops"))
		}, true},
		{"the pin of map pods", enroll.RepairNode, func(s *soak, _ *bed.NS) error { return os.Remove(filepath.Join(s.BPFFS, "maps", "pods")) }, true},
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		name, addr := "IPv4", func(pod *bed.NS) netip.Addr { return pod.V4 }
		if family == unix.AF_INET6 {
			name, addr = "IPv6", func(pod *bed.NS) netip.Addr { return pod.V6 }
		}
		all = append(all,
			damage{"the " + name + " rule", enroll.RepairRouting, inPod(func(h *netlink.Handle, _ *bed.NS) error { return removeRule(h, family) }), false},
			damage{"the " + name + " route", enroll.RepairRouting, inPod(func(h *netlink.Handle, _ *bed.NS) error { return removeRoute(h, family) }), false},
			damage{"its " + name + " address in own_addrs", enroll.RepairOwnAddr, inMaps(func(m *maps.Maps, pod *bed.NS) error {
				return m.DeleteOwnAddr(pod.Cookie, addr(pod))
			}), false},
			damage{"its " + name + " address in probe_targets", enroll.RepairProbeTarget, inMaps(func(m *maps.Maps, pod *bed.NS) error {
				return m.DeleteProbeTarget(addr(pod), "uid-"+pod.Name)
			}), false})
	}
	return all
}

// inPod does something in the pod's network namespace.
func inPod(do func(h *netlink.Handle, pod *bed.NS) error) func(*soak, *bed.NS) error {
	return func(_ *soak, pod *bed.NS) error {
		h, err := pod.Handle()
		if err != nil {
			return err
		}
		defer h.Close()
		return do(h, pod)
	}
}

// inMaps does something to the pinned maps.
func inMaps(do func(m *maps.Maps, pod *bed.NS) error) func(*soak, *bed.NS) error {
	return func(s *soak, pod *bed.NS) (err error) {
		var m maps.Maps
		var all []*ebpf.Map
		defer func() {
			for _, opened := range all {
				err = errors.Join(err, opened.Close())
			}
		}()
		var opened []*ebpf.Map
		defer func() {
			for _, o := range opened {
				err = errors.Join(err, o.Close())
			}
		}()
		for name, to := range map[string]**ebpf.Map{
			bpf.RedirectorMapPods:         &m.RedirectorMaps.Pods,
			bpf.RedirectorMapOwnAddrs:     &m.RedirectorMaps.OwnAddrs,
			bpf.RedirectorMapCounters:     &m.RedirectorMaps.Counters,
			bpf.RedirectorMapProbeTargets: &m.RedirectorMaps.ProbeTargets,
		} {
			if *to, err = openMap(s.BPFFS, name); err != nil {
				return err
			}
			opened = append(opened, *to)
		}
		return do(&m, pod)
	}
}

func openMap(bpffs, name string) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(filepath.Join(bpffs, "maps", name), nil)
	if err != nil {
		return nil, fmt.Errorf("open map %s: %w", name, err)
	}
	return m, nil
}

func setSysctl(name string) func(*soak, *bed.NS) error {
	return func(_ *soak, pod *bed.NS) error { return pod.SetSysctl(name, "0") }
}

func (s *soak) steerPin(pod *bed.NS) string {
	return filepath.Join(s.BPFFS, "pods", "uid-"+pod.Name, "steer")
}

func detachSteer(pin string) error {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return err
	}
	return errors.Join(l.Detach(), l.Close())
}

func removeRule(h *netlink.Handle, family int) error {
	rules, err := h.RuleList(family)
	if err != nil {
		return err
	}
	for _, r := range rules {
		if r.Mark == 0x110 {
			r.Family = family
			return h.RuleDel(&r)
		}
	}
	return errors.New("there is none")
}

func removeRoute(h *netlink.Handle, family int) error {
	routes, err := h.RouteListFiltered(family, &netlink.Route{Protocol: 0x72}, netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TABLE)
	if err != nil {
		return err
	}
	if len(routes) != 1 {
		return fmt.Errorf("there are %d", len(routes))
	}
	return h.RouteDel(&routes[0])
}

func removeSeal(h *netlink.Handle, pod *bed.NS) error {
	l, err := h.LinkByName(pod.Link)
	if err != nil {
		return err
	}
	filters, err := h.FilterList(l, netlink.HANDLE_MIN_EGRESS)
	if err != nil {
		return err
	}
	if len(filters) != 1 {
		return fmt.Errorf("there are %d", len(filters))
	}
	return h.FilterDel(filters[0])
}

func removeClsact(h *netlink.Handle, pod *bed.NS) error {
	l, err := h.LinkByName(pod.Link)
	if err != nil {
		return err
	}
	return h.QdiscDel(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}})
}
