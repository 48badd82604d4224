// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/test/agent"
)

func TestSettingsAreChanged(t *testing.T) {
	s := serve(t, nil)
	spec := agent.Spec(s.pod(t, "web"))
	if _, err := s.Enroll(t.Context(), EnrollRequest{Spec: spec}); err != nil {
		t.Fatal(err)
	}
	pod, err := s.Set(t.Context(), spec.UID, SettingsRequest{"bypass-inbound": "true", "exclude-outbound-ports": "25,465"})
	want := enroll.Settings{BypassInbound: true, ExcludeOutboundPorts: []uint16{25, 465}}
	if err != nil || !reflect.DeepEqual(pod.Settings, want) {
		t.Errorf("the settings are %+v, %v; want %+v", pod.Settings, err, want)
	}
	entry, err := s.agent.Datapath.Maps().Pod(pod.NetNSCookie)
	if err != nil || !entry.BypassInbound || !entry.HasExceptions {
		t.Errorf("the pod's entry is %+v, %v", entry, err)
	}

	// Those that are not named stay.
	pod, err = s.Set(t.Context(), spec.UID, SettingsRequest{"exclude-outbound-ports": ""})
	if err != nil || !reflect.DeepEqual(pod.Settings, enroll.Settings{BypassInbound: true}) {
		t.Errorf("the settings are %+v, %v", pod.Settings, err)
	}
	if entry, err = s.agent.Datapath.Maps().Pod(pod.NetNSCookie); err != nil || !entry.BypassInbound || entry.HasExceptions {
		t.Errorf("the pod's entry is %+v, %v", entry, err)
	}
}

// All or nothing.
func TestBadSettingsChangeNothing(t *testing.T) {
	s := serve(t, nil)
	spec := agent.Spec(s.pod(t, "web"))
	spec.IPs = nil
	if _, err := s.Enroll(t.Context(), EnrollRequest{Spec: spec}); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		request SettingsRequest
		words   []string
	}{
		"an unknown key":    {SettingsRequest{"bypass-inbound": "true", "colour": "blue"}, []string{`"colour"`, "bypass-inbound"}},
		"a bad range":       {SettingsRequest{"bypass-inbound": "true", "exclude-outbound-cidrs": "10.0.0.0/99"}, []string{"exclude-outbound-cidrs", "10.0.0.0/99"}},
		"a bad port":        {SettingsRequest{"bypass-inbound": "true", "exclude-inbound-ports": "65536"}, []string{"exclude-inbound-ports", "65536"}},
		"no addresses":      {SettingsRequest{"bypass-inbound": "true", "reroute-interfaces": "auto"}, []string{"reroute-interfaces", "addresses"}},
		"10 000 entries":    {SettingsRequest{"exclude-outbound-ports": strings.Repeat("80,", 9_999) + "80"}, []string{"exclude-outbound-ports", "10000"}},
		"300 bytes of name": {SettingsRequest{"reroute-interfaces": strings.Repeat("x", 300)}, []string{"reroute-interfaces", "300"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := s.Set(t.Context(), spec.UID, c.request)
			wantError(t, err, KindInvalid, http.StatusBadRequest, c.words...)
			if pod, err := s.Pod(t.Context(), spec.UID); err != nil || !reflect.DeepEqual(pod.Settings, enroll.Settings{}) {
				t.Errorf("the settings are %+v, %v", pod.Settings, err)
			}
		})
	}
	_, err := s.Set(t.Context(), "nobody", SettingsRequest{"bypass-inbound": "true"})
	wantError(t, err, KindNotEnrolled, http.StatusNotFound, "nobody", "no such pod")
}
