// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// What is put beside a thing that is, or is not, as it should be.
const (
	markRight = "ok"
	markWrong = "NOT AS IT SHOULD BE"
)

// way is how connections should travel.
type way int

const (
	direct  way = iota
	proxied     // through the proxy in each enrolled pod at its ends
)

var visitColumns = []column{
	{"connection", 17}, {"family", 6}, {"request", 22}, {"what the proxy saw (its log)", 42}, {"the app saw", 12}, {"result", 6},
}

var blockedColumns = []column{
	{"connection", 17}, {"family", 6}, {"request", 22}, {"result", 16},
}

var netfilterColumns = []column{
	{"namespace", 9}, {"iptables, ip6tables", 19}, {"nftables", 8}, {"connections tracked", 19},
}

func (v *visit) who() string { return v.from.Name + " -> " + v.to.Name }

func (v *visit) family() string {
	if v.v6 {
		return "IPv6"
	}
	return "IPv4"
}

// expected is what the proxy should write about the request.
func (v *visit) expected(want way) []nodeproxy.Record {
	if want == direct {
		return nil
	}
	var lines []nodeproxy.Record
	add := func(h *host, direction nodeproxy.Direction) {
		if h.uid != "" {
			lines = append(lines, nodeproxy.Record{
				UID: h.uid, Pod: h.podName(), Direction: direction, Source: v.local, OriginalDestination: v.destination(),
			})
		}
	}
	add(v.from, nodeproxy.Outbound)
	add(v.to, nodeproxy.Inbound)
	return lines
}

// text writes all that has to be right about a line of the proxy's log.
func text(r nodeproxy.Record) string {
	return fmt.Sprintf("pod %s, %s, %s %s -> %s %s", r.UID, r.Pod, r.Direction, r.Source, r.OriginalDestination, r.Error)
}

// judge says what is not as it should be about a request that should have been answered.
func (v *visit) judge(want way) []string {
	if v.err != nil {
		return []string{v.err.Error()}
	}
	var wrong []string
	expect := func(what string, got, want any) {
		if got != want {
			wrong = append(wrong, fmt.Sprintf("%s: %v, should be %v", what, got, want))
		}
	}
	expect("the client's getpeername", v.peer, v.destination())
	expect("the app's getsockname", v.saw.Local, v.destination())
	expect("the client's address", v.local.Addr(), v.from.address(v.v6))
	if want == direct {
		expect("the app's getpeername", v.saw.Peer, v.local)
	} else {
		expect("the address that the app sees", v.saw.Peer.Addr(), v.local.Addr())
	}
	expected := v.expected(want)
	expect("number of lines in the proxy's log", len(v.proxy), len(expected))
	for i := range min(len(v.proxy), len(expected)) {
		got, want := v.proxy[i], expected[i]
		if i > 0 { // the proxy's connection to the other pod's proxy has a port of its own
			got.Source = netip.AddrPortFrom(got.Source.Addr(), want.Source.Port())
		}
		expect("the proxy's log", text(got), text(want))
	}
	return wrong
}

// travelled says by whom the request passed, going by the proxy's log.
func (v *visit) travelled() string {
	stops := []string{v.from.Name}
	for _, l := range v.proxy {
		port := ":15001"
		if l.Direction == nodeproxy.Inbound {
			port = ":15006"
		}
		stops = append(stops, fmt.Sprintf("proxy %s (in pod %s)", port, l.UID))
	}
	return strings.Join(append(stops, v.to.Name), " -> ")
}

// showVisit prints the row of a request that should have been answered.
func (d *demo) showVisit(v *visit, want way) {
	lines := make([]string, len(v.proxy))
	for i, l := range v.proxy {
		lines[i] = fmt.Sprintf("%-8s %s -> %s", l.Direction, l.Source.Addr(), l.OriginalDestination)
	}
	if len(lines) == 0 {
		lines = []string{"nothing"}
	}
	saw := "nothing"
	if v.saw.Peer.IsValid() {
		saw = v.saw.Peer.Addr().String()
	}
	wrong := v.judge(want)
	d.page.tableRow(visitColumns, d.verdict(wrong), v.who(), v.family(), v.url(), strings.Join(lines, "\n"), saw, v.result())
	d.page.printf("  %s", d.page.paint(dim, "its way: "+v.travelled()))
	d.complain(wrong)
}

// showBlocked prints the row of a request that should not have been answered.
func (d *demo) showBlocked(v *visit) {
	var wrong []string
	result := "blocked: " + v.result()
	if v.err == nil {
		result = v.result()
		wrong = []string{"it was answered, should be blocked"}
	}
	d.page.tableRow(blockedColumns, d.verdict(wrong), v.who(), v.family(), v.url(), result)
	d.complain(wrong)
}

func (d *demo) showNetfilter(name string, n netfilter) {
	legacy, nft := "none", "none"
	if len(n.iptables) > 0 {
		legacy = strings.Join(n.iptables, " ")
	}
	if n.nftables > 0 {
		nft = fmt.Sprintf("%d tables", n.nftables)
	}
	var wrong []string
	if !n.empty() {
		wrong = []string{"there should be none"}
	}
	d.page.tableRow(netfilterColumns, d.verdict(wrong), name, legacy, nft, n.conntrack)
	d.complain(wrong)
}

// showChanges says what the lines of a snapshot that enrolment has changed are for, by the word that they begin with.
func (d *demo) showChanges(lines []string) {
	for _, kind := range []struct{ word, meaning string }{
		{"rule", "connections that carry redirector's mark have a route of their own ..."},
		{"route", "... which delivers them in this same namespace, whatever their destination is"},
		{"netns", "an sk_lookup program that gives new connections to the proxy's listeners"},
		{"qdisc", "on eth0, clsact: the place for ..."},
		{"filter", "... the seal, a program that drops what would leave past the proxy"},
		{"sysctl", "tcp_fwmark_accept, fwmark_reflect: answers go back to the proxy, as they carry its connection's mark"},
	} {
		is := func(line string) bool { return strings.HasPrefix(line, kind.word+" ") }
		if slices.ContainsFunc(lines, is) {
			d.page.printf("  %-7s %s", kind.word, kind.meaning)
			lines = slices.DeleteFunc(lines, is)
		}
	}
	d.check(len(lines) == 0, "nothing", "and nothing else"+strings.Join(lines, "; "))
}

// check prints a line about something that has to be so.
func (d *demo) check(right bool, want, text string) {
	if right {
		d.page.printf("%s  %s", d.page.paint(green, markRight), text)
		return
	}
	d.page.printf("%s", text)
	d.complain([]string{"should be " + want})
}

func (d *demo) verdict(wrong []string) style {
	if len(wrong) > 0 {
		return red
	}
	return green
}

// complain marks what was printed last as wrong, and says why.
func (d *demo) complain(wrong []string) {
	if len(wrong) == 0 {
		return
	}
	d.wrong++
	for _, w := range wrong {
		d.page.printf("  %s", d.page.paint(red, markWrong+": "+w))
	}
}
