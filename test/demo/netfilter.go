// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// netfilter is what the kernel's firewall and connection tracking hold in a network namespace.
type netfilter struct {
	iptables  []string // tables that iptables and ip6tables have made (their legacy kind)
	nftables  int      // number of tables of nftables, which are also where today's iptables keeps its rules
	conntrack string   // number of connections that are tracked, or noConntrack
}

// noConntrack is said of a kernel that tracks no connections at all.
const noConntrack = "not even loaded"

func (n netfilter) empty() bool {
	return len(n.iptables) == 0 && n.nftables == 0 && (n.conntrack == "0" || n.conntrack == noConntrack)
}

// lookAtNetfilter reads a namespace's state. It loads no module that is about connection tracking.
func lookAtNetfilter(ns *bed.NS) (n netfilter, err error) {
	err = ns.Do(func() error {
		for _, name := range []string{"ip_tables_names", "ip6_tables_names"} {
			tables, err := os.ReadFile("/proc/thread-self/net/" + name)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			n.iptables = append(n.iptables, strings.Fields(string(tables))...)
		}
		count, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		switch {
		case err == nil:
			n.conntrack = strings.TrimSpace(string(count))
		case errors.Is(err, fs.ErrNotExist):
			n.conntrack = noConntrack
		default:
			return err
		}
		n.nftables, err = countNftables()
		return err
	})
	if err != nil {
		return netfilter{}, fmt.Errorf("look for rules in netns %s: %w", ns.Name, err)
	}
	return n, nil
}

// countNftables counts the tables in the namespace of the calling thread.
func countNftables() (int, error) {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETTABLE, unix.NLM_F_DUMP)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC})
	tables, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
		return 0, nil // the kernel has no nftables
	}
	return len(tables), err
}
