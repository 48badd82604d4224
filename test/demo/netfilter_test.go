// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"testing"

	mdnetlink "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/test/bed"
)

func TestNftablesRulesAreSeen(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	if n, err := lookAtNetfilter(b.Node); !n.empty() || err != nil {
		t.Errorf("a new namespace has %+v, %v", n, err)
	}
	if err := b.Outside.Do(addTable); errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		t.Skipf("the kernel has no nftables (CONFIG_NF_TABLES): %v", err)
	} else if err != nil {
		t.Fatal(err)
	}
	if n, err := lookAtNetfilter(b.Outside); n.empty() || n.nftables != 1 || err != nil {
		t.Errorf("a namespace with an nftables table has %+v, %v", n, err)
	}
	if n, err := lookAtNetfilter(b.Node); !n.empty() || err != nil {
		t.Errorf("the namespace beside it has %+v, %v", n, err)
	}
}

// addTable adds a table for IPv4 in the calling thread's namespace: `nft add table ip x`.
func addTable() error {
	c, err := mdnetlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	message := func(typ uint16, flags mdnetlink.HeaderFlags, family, resource byte, attrs ...byte) mdnetlink.Message {
		return mdnetlink.Message{
			Header: mdnetlink.Header{Type: mdnetlink.HeaderType(typ), Flags: mdnetlink.Request | flags},
			Data:   append([]byte{family, unix.NFNETLINK_V0, 0, resource}, attrs...), // struct nfgenmsg
		}
	}
	name, err := mdnetlink.MarshalAttributes([]mdnetlink.Attribute{{Type: unix.NFTA_TABLE_NAME, Data: []byte("x\x00")}})
	if err != nil {
		return err
	}
	_, err = c.SendMessages([]mdnetlink.Message{
		message(unix.NFNL_MSG_BATCH_BEGIN, 0, 0, unix.NFNL_SUBSYS_NFTABLES),
		message(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWTABLE, mdnetlink.Create|mdnetlink.Acknowledge, unix.NFPROTO_IPV4, 0, name...),
		message(unix.NFNL_MSG_BATCH_END, 0, 0, unix.NFNL_SUBSYS_NFTABLES),
	})
	if err != nil {
		return err
	}
	_, err = c.Receive() // the acknowledgement, or why not
	return err
}
