// SPDX-License-Identifier: Apache-2.0

package bed

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Snapshot returns all that an agent could change in the namespace as sorted lines of text: links, addresses, permanent
// neighbours, rules of all families, nexthops, routes of all tables, qdiscs, filters, tcx programs, sysctls below
// net.ipv4, net.ipv6 and net.mptcp, and programs attached to the namespace. Two snapshots of an unchanged namespace
// are equal byte for byte: counters, ages, timers and the ids of programs are left out. What the kernel reports
// and this package has no name for is kept too, in hex.
func (n *NS) Snapshot() (string, error) {
	var lines []string
	err := n.Do(func() error {
		names, err := linkNames()
		if err != nil {
			return err
		}
		for _, part := range []func(map[uint32]string) ([]string, error){
			links, addresses, neighbours, rules, nexthops, routes, qdiscs, filters, tcxPrograms, sysctls,
		} {
			more, err := part(names)
			if err != nil {
				return err
			}
			slices.Sort(more)
			lines = append(lines, more...)
		}
		return nil
	})
	if err == nil {
		var more []string
		more, err = n.programs()
		lines = append(lines, more...)
	}
	if err != nil {
		return "", fmt.Errorf("take a snapshot of netns %s: %w", n.Name, err)
	}
	return strings.Join(lines, "\n") + "\n", nil
}

// dump asks the kernel for all objects of a kind. It takes the namespace of the calling thread.
func dump(get, reply int, body nl.NetlinkRequestData) ([][]byte, error) {
	// A dump that is interrupted by a change is inconsistent: ask again.
	for range 10 {
		req := nl.NewNetlinkRequest(get, unix.NLM_F_DUMP)
		req.AddData(body)
		msgs, err := req.Execute(unix.NETLINK_ROUTE, uint16(reply))
		if errors.Is(err, netlink.ErrDumpInterrupted) {
			continue
		}
		return msgs, err
	}
	return nil, errors.New("the namespace keeps changing")
}

// attrKind says how to print an attribute's value.
type attrKind int

const (
	asHex attrKind = iota
	asSkipped
	asUint // of 1, 2, 4 or 8 bytes
	asHexUint
	asString
	asAddr
	asLink // an interface index
)

type attrFormat struct {
	name string
	kind attrKind
}

// text prints attributes in the order of their types. With only, those without a format are left out.
func text(attrs []syscall.NetlinkRouteAttr, formats map[uint16]attrFormat, names map[uint32]string, only bool) string {
	attrs = slices.Clone(attrs)
	slices.SortStableFunc(attrs, func(a, b syscall.NetlinkRouteAttr) int {
		return int(a.Attr.Type&nl.NLA_TYPE_MASK) - int(b.Attr.Type&nl.NLA_TYPE_MASK)
	})
	var out strings.Builder
	for _, a := range attrs {
		typ := a.Attr.Type & nl.NLA_TYPE_MASK
		f, ok := formats[typ]
		if !ok {
			if only {
				continue
			}
			f.name = fmt.Sprintf("attr%d", typ)
		}
		if f.kind != asSkipped {
			fmt.Fprintf(&out, " %s %s", f.name, value(a.Value, f.kind, names))
		}
	}
	return out.String()
}

func value(data []byte, kind attrKind, names map[uint32]string) string {
	switch kind {
	case asSkipped, asHex:
	case asString:
		return strings.TrimRight(string(data), "\x00")
	case asAddr:
		if a, ok := netip.AddrFromSlice(data); ok {
			return a.String()
		}
	case asLink:
		if len(data) == 4 {
			return linkName(names, binary.NativeEndian.Uint32(data))
		}
	case asUint, asHexUint:
		format := "%d"
		if kind == asHexUint {
			format = "%#x"
		}
		switch len(data) {
		case 1:
			return fmt.Sprintf(format, data[0])
		case 2:
			return fmt.Sprintf(format, binary.NativeEndian.Uint16(data))
		case 4:
			return fmt.Sprintf(format, binary.NativeEndian.Uint32(data))
		case 8:
			return fmt.Sprintf(format, binary.NativeEndian.Uint64(data))
		}
	}
	return "0x" + hex.EncodeToString(data)
}

func linkName(names map[uint32]string, index uint32) string {
	if name, ok := names[index]; ok {
		return name
	}
	return fmt.Sprintf("if%d", index)
}

// split parts a message into its header of the given size and its attributes.
func split(msg []byte, header int) ([]byte, []syscall.NetlinkRouteAttr, error) {
	if len(msg) < header {
		return nil, nil, fmt.Errorf("netlink message of %d bytes is shorter than its header of %d", len(msg), header)
	}
	attrs, err := nl.ParseRouteAttr(msg[header:])
	return msg[:header], attrs, err
}

// describe dumps objects of one kind and prints each with describeHeader and its attributes. An empty header text leaves
// the object out.
func describe(get, reply int, body nl.NetlinkRequestData, size int, formats map[uint16]attrFormat, names map[uint32]string,
	describeHeader func(h []byte) string,
) ([]string, error) {
	msgs, err := dump(get, reply, body)
	if err != nil {
		return nil, err
	}
	var lines []string
	for _, m := range msgs {
		h, attrs, err := split(m, size)
		if err != nil {
			return nil, err
		}
		if head := describeHeader(h); head != "" {
			lines = append(lines, head+text(attrs, formats, names, false))
		}
	}
	return lines, nil
}

func family(f uint8) string {
	switch f {
	case unix.AF_INET:
		return "inet"
	case unix.AF_INET6:
		return "inet6"
	}
	return fmt.Sprintf("family%d", f)
}

func linkNames() (map[uint32]string, error) {
	msgs, err := dump(unix.RTM_GETLINK, unix.RTM_NEWLINK, nl.NewIfInfomsg(unix.AF_UNSPEC))
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	names := map[uint32]string{}
	for _, m := range msgs {
		h, attrs, err := split(m, unix.SizeofIfInfomsg)
		if err != nil {
			return nil, fmt.Errorf("list links: %w", err)
		}
		for _, a := range attrs {
			if a.Attr.Type == unix.IFLA_IFNAME {
				names[binary.NativeEndian.Uint32(h[4:])] = value(a.Value, asString, nil)
			}
		}
	}
	return names, nil
}

// linkFormats has what is steady of a link; the rest of its many attributes are statistics and device details.
var linkFormats = map[uint16]attrFormat{
	unix.IFLA_ADDRESS:       {"address", asHex},
	unix.IFLA_MTU:           {"mtu", asUint},
	unix.IFLA_LINK:          {"peer", asUint},
	unix.IFLA_QDISC:         {"qdisc", asString},
	unix.IFLA_MASTER:        {"master", asLink},
	unix.IFLA_TXQLEN:        {"txqlen", asUint},
	unix.IFLA_OPERSTATE:     {"operstate", asUint},
	unix.IFLA_LINKMODE:      {"linkmode", asUint},
	unix.IFLA_IFALIAS:       {"alias", asString},
	unix.IFLA_GROUP:         {"group", asUint},
	unix.IFLA_PROP_LIST:     {"altnames", asHex},
	unix.IFLA_GSO_MAX_SIZE:  {"gso_max_size", asUint},
	unix.IFLA_GRO_MAX_SIZE:  {"gro_max_size", asUint},
	unix.IFLA_NUM_TX_QUEUES: {"txqueues", asUint},
	unix.IFLA_NUM_RX_QUEUES: {"rxqueues", asUint},
}

func links(names map[uint32]string) ([]string, error) {
	msgs, err := dump(unix.RTM_GETLINK, unix.RTM_NEWLINK, nl.NewIfInfomsg(unix.AF_UNSPEC))
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	var lines []string
	for _, m := range msgs {
		h, attrs, err := split(m, unix.SizeofIfInfomsg)
		if err != nil {
			return nil, fmt.Errorf("list links: %w", err)
		}
		index := binary.NativeEndian.Uint32(h[4:])
		kind, xdp := "-", uint8(0)
		for _, a := range attrs {
			switch a.Attr.Type & nl.NLA_TYPE_MASK {
			case unix.IFLA_LINKINFO:
				kind = nested(a.Value, nl.IFLA_INFO_KIND, kind)
			case unix.IFLA_XDP:
				// Only how a program is attached, not its id.
				xdp = nestedUint8(a.Value, nl.IFLA_XDP_ATTACHED)
			}
		}
		lines = append(lines, fmt.Sprintf("link %s index %d type %d kind %s flags %#x xdp %d%s", linkName(names, index), index,
			binary.NativeEndian.Uint16(h[2:]), kind, binary.NativeEndian.Uint32(h[8:]), xdp, text(attrs, linkFormats, names, true)))
	}
	return lines, nil
}

// nested returns a string among the attributes in data, or the fallback.
func nested(data []byte, typ uint16, fallback string) string {
	attrs, err := nl.ParseRouteAttr(data)
	if err != nil {
		return fallback
	}
	for _, a := range attrs {
		if a.Attr.Type&nl.NLA_TYPE_MASK == typ {
			return value(a.Value, asString, nil)
		}
	}
	return fallback
}

func nestedUint8(data []byte, typ uint16) uint8 {
	if s := nested(data, typ, ""); s != "" {
		return s[0]
	}
	return 0
}

var addressFormats = map[uint16]attrFormat{
	unix.IFA_ADDRESS:   {"address", asAddr},
	unix.IFA_LOCAL:     {"local", asAddr},
	unix.IFA_LABEL:     {"label", asString},
	unix.IFA_BROADCAST: {"broadcast", asAddr},
	unix.IFA_CACHEINFO: {"", asSkipped}, // ages
	unix.IFA_FLAGS:     {"flags", asHexUint},
}

func addresses(names map[uint32]string) ([]string, error) {
	lines, err := describe(unix.RTM_GETADDR, unix.RTM_NEWADDR, nl.NewIfAddrmsg(unix.AF_UNSPEC), unix.SizeofIfAddrmsg,
		addressFormats, names, func(h []byte) string {
			return fmt.Sprintf("address %s dev %s prefix %d scope %d", family(h[0]),
				linkName(names, binary.NativeEndian.Uint32(h[4:])), h[1], h[3])
		})
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	return lines, nil
}

var neighbourFormats = map[uint16]attrFormat{
	unix.NDA_DST:       {"dst", asAddr},
	unix.NDA_LLADDR:    {"lladdr", asHex},
	unix.NDA_CACHEINFO: {"", asSkipped}, // ages
	unix.NDA_PROBES:    {"", asSkipped},
}

// sizeofNdMsg is the size of struct ndmsg, in bytes.
const sizeofNdMsg = 12

// neighbours lists permanent neighbours: the others come and go by themselves.
func neighbours(names map[uint32]string) ([]string, error) {
	lines, err := describe(unix.RTM_GETNEIGH, unix.RTM_NEWNEIGH, &netlink.Ndmsg{Family: unix.AF_UNSPEC}, sizeofNdMsg,
		neighbourFormats, names, func(h []byte) string {
			if binary.NativeEndian.Uint16(h[8:])&unix.NUD_PERMANENT == 0 {
				return ""
			}
			return fmt.Sprintf("neighbour %s dev %s flags %#x", family(h[0]), linkName(names, binary.NativeEndian.Uint32(h[4:])),
				h[10])
		})
	if err != nil {
		return nil, fmt.Errorf("list neighbours: %w", err)
	}
	return lines, nil
}

var ruleFormats = map[uint16]attrFormat{
	nl.FRA_DST:                {"to", asAddr},
	nl.FRA_SRC:                {"from", asAddr},
	nl.FRA_IIFNAME:            {"iif", asString},
	nl.FRA_OIFNAME:            {"oif", asString},
	nl.FRA_GOTO:               {"goto", asUint},
	nl.FRA_PRIORITY:           {"priority", asUint},
	nl.FRA_FWMARK:             {"fwmark", asHexUint},
	nl.FRA_FWMASK:             {"fwmask", asHexUint},
	nl.FRA_TABLE:              {"table", asUint},
	nl.FRA_SUPPRESS_IFGROUP:   {"suppress_ifgroup", asHexUint},
	nl.FRA_SUPPRESS_PREFIXLEN: {"suppress_prefixlen", asHexUint},
	nl.FRA_PROTOCOL:           {"protocol", asUint},
	nl.FRA_IP_PROTO:           {"ipproto", asUint},
}

func rules(names map[uint32]string) ([]string, error) {
	lines, err := describe(unix.RTM_GETRULE, unix.RTM_NEWRULE, nl.NewRtMsg(), unix.SizeofRtMsg,
		ruleFormats, names, func(h []byte) string {
			return fmt.Sprintf("rule %s action %d flags %#x to/%d from/%d tos %d", family(h[0]), h[7],
				binary.NativeEndian.Uint32(h[8:]), h[1], h[2], h[3])
		})
	if err != nil {
		return nil, fmt.Errorf("list rules: %w", err)
	}
	return lines, nil
}

// nhMsg is struct nhmsg: 8 bytes of family, scope, protocol, reserved and flags.
type nhMsg [8]byte

// Len implements nl.NetlinkRequestData.
func (m *nhMsg) Len() int { return len(m) }

// Serialize implements nl.NetlinkRequestData.
func (m *nhMsg) Serialize() []byte { return m[:] }

func nexthops(names map[uint32]string) ([]string, error) {
	lines, err := describe(unix.RTM_GETNEXTHOP, unix.RTM_NEWNEXTHOP, &nhMsg{}, len(nhMsg{}),
		map[uint16]attrFormat{
			unix.NHA_ID:      {"id", asUint},
			unix.NHA_OIF:     {"oif", asLink},
			unix.NHA_GATEWAY: {"via", asAddr},
		}, names, func(h []byte) string {
			return fmt.Sprintf("nexthop %s scope %d protocol %d flags %#x", family(h[0]), h[1], h[2],
				binary.NativeEndian.Uint32(h[4:]))
		})
	if err != nil {
		return nil, fmt.Errorf("list nexthops: %w", err)
	}
	return lines, nil
}

var routeFormats = map[uint16]attrFormat{
	unix.RTA_DST:       {"dst", asAddr},
	unix.RTA_SRC:       {"src", asAddr},
	unix.RTA_IIF:       {"iif", asLink},
	unix.RTA_OIF:       {"oif", asLink},
	unix.RTA_GATEWAY:   {"via", asAddr},
	unix.RTA_PRIORITY:  {"priority", asUint},
	unix.RTA_PREFSRC:   {"prefsrc", asAddr},
	unix.RTA_TABLE:     {"table", asUint},
	unix.RTA_PREF:      {"pref", asUint},
	unix.RTA_CACHEINFO: {"", asSkipped}, // ages and counters
	unix.RTA_EXPIRES:   {"", asSkipped},
}

func routes(names map[uint32]string) ([]string, error) {
	var lines []string
	for _, af := range []uint8{unix.AF_INET, unix.AF_INET6} {
		body := nl.NewRtMsg()
		body.RtMsg = unix.RtMsg{Family: af}
		more, err := describe(unix.RTM_GETROUTE, unix.RTM_NEWROUTE, body, unix.SizeofRtMsg, routeFormats, names,
			func(h []byte) string {
				flags := binary.NativeEndian.Uint32(h[8:])
				if flags&unix.RTM_F_CLONED != 0 {
					return "" // the cache
				}
				return fmt.Sprintf("route %s type %d dst/%d src/%d tos %d protocol %d scope %d flags %#x", family(h[0]), h[7],
					h[1], h[2], h[3], h[5], h[6], flags)
			})
		if err != nil {
			return nil, fmt.Errorf("list %s routes: %w", family(af), err)
		}
		lines = append(lines, more...)
	}
	return lines, nil
}

// tcFormats leaves out the statistics of qdiscs and filters.
var tcFormats = map[uint16]attrFormat{
	nl.TCA_KIND:    {"kind", asString},
	nl.TCA_OPTIONS: {"", asSkipped}, // see tcOptions
	nl.TCA_STATS:   {"", asSkipped},
	nl.TCA_XSTATS:  {"", asSkipped},
	nl.TCA_STATS2:  {"", asSkipped},
	nl.TCA_RATE:    {"", asSkipped},
}

var bpfFormats = map[uint16]attrFormat{
	nl.TCA_BPF_CLASSID:   {"classid", asHexUint},
	nl.TCA_BPF_NAME:      {"name", asString},
	nl.TCA_BPF_FLAGS:     {"flags", asHexUint},
	nl.TCA_BPF_FLAGS_GEN: {"flags_gen", asHexUint},
	nl.TCA_BPF_TAG:       {"tag", asHex},
	nl.TCA_BPF_ID:        {"", asSkipped}, // another at each load
}

// u32Formats leaves out what counts in a u32 filter: TCA_U32_PCNT of linux/pkt_cls.h.
var u32Formats = map[uint16]attrFormat{nl.TCA_U32_PCNT: {"", asSkipped}}

// tcOptions prints the options of a qdisc or filter, whose meaning depends on its kind.
func tcOptions(attrs []syscall.NetlinkRouteAttr) (string, error) {
	kind := ""
	for _, a := range attrs {
		if a.Attr.Type&nl.NLA_TYPE_MASK == nl.TCA_KIND {
			kind = value(a.Value, asString, nil)
		}
	}
	for _, a := range attrs {
		if a.Attr.Type&nl.NLA_TYPE_MASK != nl.TCA_OPTIONS {
			continue
		}
		var formats map[uint16]attrFormat
		switch kind {
		case "bpf":
			formats = bpfFormats
		case "u32":
			formats = u32Formats
		default:
			// The options of some kinds are a bare struct.
			return " options " + value(a.Value, asHex, nil), nil
		}
		options, err := nl.ParseRouteAttr(a.Value)
		if err != nil {
			return "", fmt.Errorf("read the options of a %s: %w", kind, err)
		}
		return text(options, formats, nil, false), nil
	}
	return "", nil
}

func describeTC(what string, m []byte, names map[uint32]string) (string, error) {
	h, attrs, err := split(m, nl.SizeofTcMsg)
	if err != nil {
		return "", err
	}
	options, err := tcOptions(attrs)
	if err != nil {
		return "", err
	}
	word := func(at int) uint32 { return binary.NativeEndian.Uint32(h[at:]) }
	info := ""
	if what == "filter" {
		// The upper half is the priority, the lower the protocol in network byte order; see tc(8).
		protocol := uint16(word(16))
		info = fmt.Sprintf(" priority %d protocol %#04x", word(16)>>16, protocol<<8|protocol>>8)
	}
	return fmt.Sprintf("%s dev %s handle %x parent %x%s%s%s", what, linkName(names, word(4)), word(8), word(12), info,
		text(attrs, tcFormats, names, false), options), nil
}

func qdiscs(names map[uint32]string) ([]string, error) {
	msgs, err := dump(unix.RTM_GETQDISC, unix.RTM_NEWQDISC, &nl.TcMsg{})
	if err != nil {
		return nil, fmt.Errorf("list qdiscs: %w", err)
	}
	var lines []string
	for _, m := range msgs {
		line, err := describeTC("qdisc", m, names)
		if err != nil {
			return nil, fmt.Errorf("list qdiscs: %w", err)
		}
		lines = append(lines, line)
	}
	return lines, nil
}

// filters lists the filters at the root qdisc, at the ingress qdisc and at both sides of clsact.
func filters(names map[uint32]string) ([]string, error) {
	var lines []string
	for index, name := range names {
		for _, parent := range []uint32{
			netlink.HANDLE_ROOT, netlink.MakeHandle(0xffff, 0), netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS,
		} {
			body := &nl.TcMsg{Ifindex: int32(index), Parent: parent}
			msgs, err := dump(unix.RTM_GETTFILTER, unix.RTM_NEWTFILTER, body)
			if err != nil {
				return nil, fmt.Errorf("list the filters of %s at parent %x: %w", name, parent, err)
			}
			for _, m := range msgs {
				line, err := describeTC("filter", m, names)
				if err != nil {
					return nil, fmt.Errorf("list the filters of %s at parent %x: %w", name, parent, err)
				}
				lines = append(lines, line)
			}
		}
	}
	return lines, nil
}

// tcxPrograms counts the tcx programs of each link (kernel 6.6). It takes the namespace of the calling thread.
func tcxPrograms(names map[uint32]string) ([]string, error) {
	var lines []string
	for index, name := range names {
		for _, at := range []struct {
			name   string
			attach ebpf.AttachType
		}{{"ingress", ebpf.AttachTCXIngress}, {"egress", ebpf.AttachTCXEgress}} {
			count, err := countPrograms(int(index), at.attach)
			if err != nil {
				return nil, fmt.Errorf("list the tcx %s programs of %s: %w", at.name, name, err)
			}
			if count > 0 {
				lines = append(lines, fmt.Sprintf("tcx %s dev %s programs %d", at.name, name, count))
			}
		}
	}
	return lines, nil
}

// programs counts the programs attached to the namespace itself.
func (n *NS) programs() ([]string, error) {
	var lines []string
	for _, at := range []struct {
		name   string
		attach ebpf.AttachType
	}{{"flow_dissector", ebpf.AttachFlowDissector}, {"sk_lookup", ebpf.AttachSkLookup}} {
		count, err := countPrograms(int(n.file.Fd()), at.attach)
		if err != nil {
			return nil, fmt.Errorf("list its %s programs: %w", at.name, err)
		}
		lines = append(lines, fmt.Sprintf("netns %s programs %d", at.name, count))
	}
	return lines, nil
}

func countPrograms(target int, attach ebpf.AttachType) (int, error) {
	result, err := link.QueryPrograms(link.QueryOptions{Target: target, Attach: attach})
	// A kernel that does not know the attach type says EINVAL, and has no such program.
	if errors.Is(err, unix.EINVAL) || errors.Is(err, ebpf.ErrNotSupported) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return len(result.Programs), nil
}

// volatileSysctls change without anyone having set them.
var volatileSysctls = map[string]bool{
	"net.ipv4.tcp_fastopen_key": true, // made by the first use of TCP Fast Open
}

// sysctls lists the readable sysctls of the calling thread's namespace.
func sysctls(map[uint32]string) ([]string, error) {
	var lines []string
	for _, dir := range []string{"/proc/sys/net/ipv4", "/proc/sys/net/ipv6", "/proc/sys/net/mptcp"} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) && path == dir {
				return nil // a kernel without it
			}
			if err != nil || d.IsDir() {
				return err
			}
			name := strings.ReplaceAll(strings.TrimPrefix(path, "/proc/sys/"), "/", ".")
			if volatileSysctls[name] {
				return nil
			}
			data, err := os.ReadFile(path)
			switch {
			case errors.Is(err, fs.ErrPermission): // write only
				return nil
			case errors.Is(err, unix.EIO): // a stable_secret that was never set
				data = []byte("(unset)")
			case err != nil:
				return err
			}
			lines = append(lines, fmt.Sprintf("sysctl %s = %s", name, strings.ReplaceAll(strings.TrimSpace(string(data)), "\n", "\\n")))
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("list sysctls: %w", err)
		}
	}
	return lines, nil
}
