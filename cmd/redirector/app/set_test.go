// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"testing"
)

// settingsJSON is what `redirector pods -o json` shows of a pod's settings.
func (m *machine) settingsJSON() string {
	m.t.Helper()
	pods := m.pods()
	if len(pods) != 1 {
		m.t.Fatalf("pods are %+v", pods)
	}
	text, err := json.Marshal(pods[0].Settings)
	if err != nil {
		m.t.Fatal(err)
	}
	return string(text)
}

func TestSettingsAreGivenAtEnrolmentAndChanged(t *testing.T) {
	m := newMachine(t)
	agent := m.agent()
	web := m.pod("web")
	run(t, nil, m.enrollFlags(web, "--bypass-inbound", "--dns-capture=false", "--exclude-outbound-ports", "465,25",
		"--exclude-outbound-cidrs", "10.0.0.0/8,!10.1.0.0/16", "--exclude-outbound-cidrs", "fd00::/8", "--exclude-inbound-ports", "9100",
		"--reroute-interfaces", "auto")...).wantDone(t)
	want := `{"bypassInbound":true,"dnsCapture":false,"excludeOutboundPorts":[25,465],` +
		`"excludeOutboundCIDRs":["10.0.0.0/8","!10.1.0.0/16","fd00::/8"],"excludeInboundPorts":[9100],"rerouteInterfaces":["auto"]}`
	if got := m.settingsJSON(); got != want {
		t.Errorf("after enrolment they are %s, want %s", got, want)
	}

	out := run(t, nil, "set", "--run-dir", m.RunDir, "--uid", "uid-web", "bypass-inbound=false", "dns-capture=default",
		"exclude-outbound-cidrs=", "reroute-interfaces=br0,tap0").wantDone(t)
	if out != "pod shop/web (uid-web) is set\n" {
		t.Errorf("it says %q", out)
	}
	want = `{"excludeOutboundPorts":[25,465],"excludeInboundPorts":[9100],"rerouteInterfaces":["br0","tap0"]}`
	if got := m.settingsJSON(); got != want {
		t.Errorf("after set they are %s, want %s", got, want)
	}
	m.stop(agent)
	m.agent()
	if got := m.settingsJSON(); got != want {
		t.Errorf("with the next agent they are %s, want %s", got, want)
	}
	// Enrolled again, it has what it is enrolled with.
	run(t, nil, m.enrollFlags(web)...).wantDone(t)
	if got := m.settingsJSON(); got != "{}" {
		t.Errorf("after another enrolment they are %s", got)
	}
}

func TestSetRefusals(t *testing.T) {
	m := newMachine(t)
	m.agent()
	web := m.pod("web")
	before := m.state(web)
	run(t, nil, m.enrollFlags(web, "--exclude-outbound-ports", "0")...).wantFailure(t, exitUsage, "exclude-outbound-ports", `"0" is no port`)
	run(t, nil, m.enrollFlags(web, "--bypass-inbound=perhaps")...).wantFailure(t, exitUsage, "bypass-inbound", "perhaps")
	m.wantState(before, web)
	run(t, nil, m.enrollFlags(web, "--exclude-outbound-ports", "25")...).wantDone(t)
	for name, c := range map[string]struct {
		args  []string
		code  int
		words []string
	}{
		"no pod":                 {[]string{"--uid", "uid-none", "bypass-inbound=true"}, exitFailed, []string{"uid-none", "no such pod"}},
		"a UID that is none":     {[]string{"--uid", "a/b", "bypass-inbound=true"}, exitUsage, []string{`"a/b"`}},
		"no UID":                 {[]string{"bypass-inbound=true"}, exitUsage, []string{"--uid"}},
		"nothing to set":         {[]string{"--uid", "uid-web"}, exitUsage, []string{"KEY=VALUE", "exclude-outbound-cidrs"}},
		"no value":               {[]string{"--uid", "uid-web", "bypass-inbound"}, exitUsage, []string{`"bypass-inbound"`, "KEY=VALUE"}},
		"a key twice":            {[]string{"--uid", "uid-web", "bypass-inbound=true", "bypass-inbound=false"}, exitUsage, []string{"bypass-inbound", "twice"}},
		"an unknown key":         {[]string{"--uid", "uid-web", "colour=blue"}, exitUsage, []string{`"colour"`, "bypass-inbound"}},
		"a bad range":            {[]string{"--uid", "uid-web", "exclude-outbound-cidrs=10.0.0.0/8,10.1"}, exitUsage, []string{"exclude-outbound-cidrs", `"10.1"`}},
		"a port that is too big": {[]string{"--uid", "uid-web", "exclude-inbound-ports=65536"}, exitUsage, []string{"exclude-inbound-ports", "65536"}},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, nil, append([]string{"set", "--run-dir", m.RunDir}, c.args...)...).wantFailure(t, c.code, c.words...)
			if got := (&machine{m.Bed, t}).settingsJSON(); got != `{"excludeOutboundPorts":[25]}` {
				t.Errorf("the settings are %s", got)
			}
		})
	}
}
