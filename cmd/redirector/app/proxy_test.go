// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// proxy starts a node proxy on the node.
func (m *machine) proxy(more ...string) *bed.Proc {
	m.t.Helper()
	return m.start(m.Node, roleNodeproxy, "nodeproxy", append([]string{"--zds-socket", m.ZDSSocket}, more...))
}

// serveOn runs an app that says who is connected to it.
func (m *machine) serveOn(ns *bed.NS) *bed.App {
	m.t.Helper()
	app, err := ns.ServeApp(0, bed.AppOptions{})
	if err != nil {
		m.t.Fatal(err)
	}
	return app
}

// wantConnection connects from one namespace to an app in another, and checks that both see each other's true addresses.
func (m *machine) wantConnection(from *bed.NS, source, app netip.Addr, port uint16) {
	m.t.Helper()
	remote := netip.AddrPortFrom(app, port)
	conn, err := from.Dial(m.t.Context(), bed.DialSpec{Remote: remote})
	if err != nil {
		m.t.Error(err)
		return
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		m.t.Fatal(err)
	}
	id, err := bed.ReadIdentity(conn)
	if err != nil {
		m.t.Errorf("%s to %s: %v", from.Name, remote, err)
		return
	}
	if id.Peer.Addr() != source || id.Local != remote {
		m.t.Errorf("%s to %s: the app sees %s and is %s", from.Name, remote, id.Peer, id.Local)
	}
}

// row returns a row of the table of pods, by column.
func (m *machine) row(pod string) map[string]string {
	m.t.Helper()
	out := run(m.t, nil, "pods", "-o", "wide", "--run-dir", m.RunDir).wantDone(m.t)
	lines := strings.Split(out, "\n")
	columns := strings.Fields(strings.ReplaceAll(lines[0], "PROXY LISTENERS", "LISTENERS"))
	for _, line := range lines[1:] {
		fields := strings.Fields(line)
		if len(fields) != len(columns) || fields[0] != pod {
			continue
		}
		row := map[string]string{}
		for i, column := range columns {
			row[column] = fields[i]
		}
		return row
	}
	m.t.Fatalf("there is no pod %s in\n%s", pod, out)
	return nil
}

// wantIn checks the column IN, which may have more than connections: what comes late for one that is closed counts, too.
func (m *machine) wantIn(row map[string]string, connections int) {
	m.t.Helper()
	if n, err := strconv.Atoi(row["IN"]); err != nil || n < connections {
		m.t.Errorf("IN is %q, want at least %d", row["IN"], connections)
	}
}

func (m *machine) wantWarnings(reasons ...api.Reason) {
	m.t.Helper()
	var got, want []string
	for _, w := range m.status().Warnings {
		got = append(got, string(w.Reason))
	}
	for _, r := range reasons {
		want = append(want, string(r))
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		m.t.Errorf("status warns of %q, want %q", got, want)
	}
}

func TestAPodGoesThroughTheNodeProxyAndBack(t *testing.T) {
	m := newMachine(t)
	if err := m.JoinCgroup(); err != nil {
		t.Fatal(err)
	}
	pod := m.pod("web")
	before := m.state(pod)
	outside, inside := m.serveOn(m.Outside), m.serveOn(pod)
	agent := m.agent()
	proxy := m.proxy()

	enroll3 := m.enrollFlags(pod, "--wait-proxy", "--timeout", "20s")
	if out := run(t, nil, enroll3...).wantDone(t); out != "pod shop/web (uid-web) is enrolled\n" {
		t.Errorf("enroll says %q", out)
	}
	if status := m.status(); status.Pods != (api.PodCounts{Enrolled: 1}) || len(status.Proxies) != 1 || status.Proxies[0].PID != int32(proxy.Pid) {
		t.Errorf("status has pods %+v and proxies %+v, the proxy's pid is %d", status.Pods, status.Proxies, proxy.Pid)
	}
	m.wantWarnings()
	m.wantConnection(pod, pod.V4, m.Outside.V4, outside.Port)
	m.wantConnection(pod, pod.V6, m.Outside.V6, outside.Port)
	m.wantConnection(m.Outside, m.Outside.V4, pod.V4, inside.Port)
	m.wantConnection(m.Outside, m.Outside.V6, pod.V6, inside.Port)
	row := m.row("shop/web")
	for column, want := range map[string]string{
		"UID": "uid-web", "STATE": "enrolled", "ADDRESSES": pod.V4.String() + "," + pod.V6.String(), "LISTENERS": "15001,15006,15008",
		"CAPTURED": "2", "TO-APP": "2", "DROPPED": "0",
	} {
		if row[column] != want {
			t.Errorf("%s is %q, want %q", column, row[column], want)
		}
	}
	m.wantIn(row, 2)
	if c := m.status().Counters; c.OutboundCaptured != 2 || c.ProxyOutbound != 2 {
		t.Errorf("the totals are %+v", c)
	}

	// Without an agent all goes on, and the next one has the pod and the proxy again.
	m.kill(agent)
	m.wantConnection(pod, pod.V4, m.Outside.V4, outside.Port)
	m.wantConnection(m.Outside, m.Outside.V6, pod.V6, inside.Port)
	agent = m.agent()
	m.eventually("the proxy has the pod again", func() bool { return m.status().Pods == api.PodCounts{Enrolled: 1} })
	m.wantWarnings()
	row = m.row("shop/web")
	if row["CAPTURED"] != "3" || row["TO-APP"] != "3" || row["LISTENERS"] != "15001,15006,15008" {
		t.Errorf("after a restart the pod has %v", row)
	}
	m.wantIn(row, 3)

	// Without the proxy nothing passes, and that is said.
	m.kill(proxy)
	m.eventually("the pod is pending", func() bool { return m.status().Pods == api.PodCounts{Pending: 1} })
	m.wantWarnings(api.ReasonNoProxy)
	if row := m.row("shop/web"); row["LISTENERS"] != "none" || row["STATE"] != "pending" {
		t.Errorf("without a proxy the pod has %v", row)
	}
	if conn, err := m.Outside.Dial(t.Context(), bed.DialSpec{Remote: netip.AddrPortFrom(pod.V6, inside.Port), Timeout: time.Second}); err == nil {
		_ = conn.Close()
		t.Error("a connection reached the app without the proxy")
	}
	if row := m.row("shop/web"); row["DROPPED"] == "0" {
		t.Error("what was dropped is not counted")
	}

	proxy = m.proxy()
	run(t, nil, enroll3...).wantDone(t)
	run(t, nil, "unenroll", "--run-dir", m.RunDir, "--uid", "uid-web").wantDone(t)
	m.wantConnection(pod, pod.V4, m.Outside.V4, outside.Port)
	if strings.Contains(proxy.Output(), m.Outside.V4.String()) {
		t.Errorf("the proxy saw a connection of a pod that is not enrolled: %s", proxy.Output())
	}
	m.stop(agent)
	m.kill(proxy)
	m.wantCleanedUp(before, pod)
}

func TestEnrollSaysWhyAPodIsPending(t *testing.T) {
	m := newMachine(t)
	pod := m.pod("web")
	m.agent()
	flags := m.enrollFlags(pod, "--wait-proxy", "--timeout", "300ms")
	run(t, nil, flags...).wantFailure(t, exitFailed, "shop/web", "captured and pending", "no node proxy", m.ZDSSocket, "300ms", "start one")
	if pods := m.pods(); len(pods) != 1 || pods[0].State != enroll.StatePending {
		t.Errorf("pods are %+v", pods)
	}
	mute := m.proxy("--mute", "ack")
	m.eventually("the mute proxy is connected", func() bool { return len(m.status().Proxies) == 1 })
	run(t, nil, flags...).wantFailure(t, exitFailed, "shop/web", "captured and pending")
	m.kill(mute)
	m.proxy()
	flags = m.enrollFlags(pod, "--wait-proxy", "--timeout", "20s")
	run(t, nil, flags...).wantDone(t)
}

// One who waits and gives up leaves a pod that is captured, and is told so.
func TestEnrollThatIsInterrupted(t *testing.T) {
	m := newMachine(t)
	pod := m.pod("web")
	m.agent()
	ctx, interrupt := context.WithCancel(t.Context())
	var stderr strings.Builder
	code := make(chan int, 1)
	go func() {
		code <- Main(ctx, m.enrollFlags(pod, "--wait-proxy", "--timeout", "1m"), Env{Stdout: &strings.Builder{}, Stderr: &stderr, Getenv: func(string) string { return "" }})
	}()
	m.eventually("the pod is captured", func() bool { return len(m.pods()) == 1 })
	interrupt()
	result{code: <-code, stderr: stderr.String()}.wantFailure(t, exitFailed, "redirector pods")
}
