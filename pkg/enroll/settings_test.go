// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

func TestSettingsAreReadAsPeopleWriteThem(t *testing.T) {
	for setting, want := range map[string]string{ // as JSON
		"bypass-inbound=true":                `{"bypassInbound":true}`,
		"bypass-inbound=0":                   `{}`,
		"dns-capture=true":                   `{"dnsCapture":true}`,
		"dns-capture=false":                  `{"dnsCapture":false}`,
		"dns-capture=default":                `{}`,
		"exclude-outbound-ports=465, 25,465": `{"excludeOutboundPorts":[25,465]}`,
		"exclude-outbound-ports=":            `{}`,
		"exclude-outbound-ports= ":           `{}`,
		"exclude-outbound-cidrs=fd00::/8,!10.1.0.0/16,10.0.0.0/8": `{"excludeOutboundCIDRs":["10.0.0.0/8","!10.1.0.0/16","fd00::/8"]}`,
		"exclude-outbound-cidrs=0.0.0.0/0,0.0.0.0/0":              `{"excludeOutboundCIDRs":["0.0.0.0/0"]}`,
		"exclude-inbound-ports=1,65535":                           `{"excludeInboundPorts":[1,65535]}`,
		"reroute-interfaces=tap0,br0,auto":                        `{"rerouteInterfaces":["auto","br0","tap0"]}`,
		"reroute-interfaces=veth-of-15bytes":                      `{"rerouteInterfaces":["veth-of-15bytes"]}`,
	} {
		key, value, _ := strings.Cut(setting, "=")
		var s, again Settings
		if err := s.Set(key, value); err != nil {
			t.Errorf("%s: %v", setting, err)
			continue
		}
		text, err := json.Marshal(s)
		if err != nil || string(text) != want {
			t.Errorf("%s becomes %s, %v; want %s", setting, text, err, want)
		}
		if err := json.Unmarshal(text, &again); err != nil || !reflect.DeepEqual(again, s) {
			t.Errorf("%s: after it was written and read it is %+v, %v; it was %+v", setting, again, err, s)
		}
	}
}

func TestBadSettings(t *testing.T) {
	many := func(of string, n int) string { return strings.TrimSuffix(strings.Repeat(of+",", n), ",") }
	for setting, reason := range map[string]string{
		"=1":                                             `there is no setting ""`,
		"Bypass-Inbound=true":                            "there is no setting",
		"exclude-outbound-port=80":                       "use bypass-inbound, dns-capture",
		"bypass-inbound=":                                "neither true nor false",
		"bypass-inbound=yes":                             `"yes" is neither true nor false`,
		"dns-capture=maybe":                              "or default",
		"exclude-outbound-ports=0":                       `"0" is no port`,
		"exclude-outbound-ports=65536":                   `"65536" is no port`,
		"exclude-outbound-ports=-1":                      `"-1" is no port`,
		"exclude-outbound-ports=80,":                     `"" is no port`,
		"exclude-outbound-ports=80-90":                   `"80-90" is no port`,
		"exclude-outbound-ports=http":                    `"http" is no port`,
		"exclude-inbound-ports=15001":                    "15001 is the node proxy's",
		"exclude-inbound-ports=15006":                    "15006 is the node proxy's",
		"exclude-inbound-ports=15008":                    "15008 is the node proxy's",
		"exclude-outbound-cidrs=10/8":                    `bad range "10/8"`,
		"exclude-outbound-cidrs=10.0.0.0":                "bad range",
		"exclude-outbound-cidrs=10.0.0.0/33":             "bad range",
		"exclude-outbound-cidrs=10.0.0.1/8":              "write 10.0.0.0/8",
		"exclude-outbound-cidrs=!10.0.0.1/8":             "write !10.0.0.0/8",
		"exclude-outbound-cidrs=!!10.0.0.0/8":            "bad range",
		"exclude-outbound-cidrs=::ffff:10.0.0.0/104":     "write it as one of IPv4",
		"exclude-outbound-cidrs=fe80::%eth0/64":          "bad range",
		"exclude-outbound-cidrs=10.0.0.0/8,!10.0.0.0/8":  "both with and without",
		"exclude-outbound-ports=" + many("80", 257):      "257 entries, and may have 256",
		"exclude-outbound-ports=" + many("80", 10_000):   "10000 entries",
		"exclude-outbound-cidrs=" + many("::/0", 10_000): "10000 entries",
		"reroute-interfaces=" + many("br0", 17):          "17 entries, and may have 16",
		"reroute-interfaces=" + strings.Repeat("x", 16):  "16 bytes, and may have 15",
		"reroute-interfaces=" + strings.Repeat("x", 300): "300 bytes",
		"reroute-interfaces=br0,lo":                      "leave lo out",
		"reroute-interfaces=a/b":                         "is no name of an interface",
		"reroute-interfaces=a b":                         "is no name of an interface",
		"reroute-interfaces=..":                          "is no name of an interface",
		"reroute-interfaces=br0,":                        "is no name of an interface",
		"reroute-interfaces=a\x1bb":                      "is no name of an interface",
	} {
		key, value, _ := strings.Cut(setting, "=")
		before := Settings{BypassInbound: true, ExcludeOutboundPorts: []uint16{25}, RerouteInterfaces: []string{"br0"}}
		s := before
		err := s.Set(key, value)
		if err == nil || !strings.Contains(err.Error(), key) || !strings.Contains(err.Error(), reason) {
			t.Errorf("%.80s: the error is %v; it has to name the key, and to say %q", setting, err, reason)
			continue
		}
		if len(err.Error()) > 300 || strings.ContainsAny(err.Error(), "\n\x1b") {
			t.Errorf("%.80s: the error is not fit to be printed: %q", setting, err)
		}
		if !reflect.DeepEqual(s, before) {
			t.Errorf("%.80s: the settings are changed to %+v", setting, s)
		}
	}
}

// What comes as JSON, from a file or over the API, is looked at as well.
func TestBadSettingsInJSON(t *testing.T) {
	for text, reason := range map[string]string{
		`{"excludeOutboundPorts":[0]}`:                                  "exclude-outbound-ports: 0 is no port",
		`{"excludeInboundPorts":[80,15008]}`:                            "exclude-inbound-ports: port 15008",
		`{"excludeOutboundCIDRs":["10.0.0.0/8","!10.0.0.0/8"]}`:         "exclude-outbound-cidrs: 10.0.0.0/8",
		`{"excludeOutboundCIDRs":["10.0.0.1/8"]}`:                       "write 10.0.0.0/8",
		`{"excludeOutboundCIDRs":[""]}`:                                 "bad range",
		`{"rerouteInterfaces":["lo"]}`:                                  "reroute-interfaces: what comes by lo",
		`{"excludeOutboundPorts":[` + strings.Repeat("1,", 256) + `1]}`: "257 entries",
	} {
		var s Settings
		err := json.Unmarshal([]byte(text), &s)
		if err == nil {
			err = s.Validate()
		}
		if err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%.80s: the error is %v, want one that says %q", text, err, reason)
		}
	}
}

// Without the pod's addresses nobody knows which interfaces are not its own.
func TestAutoNeedsAddresses(t *testing.T) {
	spec := Spec{UID: "1", Namespace: "shop", Name: "web", ServiceAccount: "web", NetNS: "/run/netns/web"}
	spec.Settings.RerouteInterfaces = []string{AutoInterfaces}
	if err := spec.Validate(); err == nil || !strings.Contains(err.Error(), KeyRerouteInterfaces) {
		t.Errorf("the error is %v", err)
	}
}
