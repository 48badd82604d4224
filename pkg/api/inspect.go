// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/explain"
)

// Inspection is all about one pod, with what needs attention.
type Inspection struct {
	enroll.Inspection
	Health Health `json:"health"`
	// Warnings is what needs somebody's attention; empty when nothing does. Node is the same of the node, and does not count for Health.
	Warnings []Warning `json:"warnings"`
	Node     []Warning `json:"node"`
}

// inspected looks at the pod that a request names.
func (s *Server) inspected(r *http.Request) (*enroll.Inspection, error) {
	uid := r.PathValue("uid")
	if err := enroll.ValidateUID(uid); err != nil {
		return nil, invalid(err)
	}
	found, err := s.Enroller.Inspect(r.Context(), uid)
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", uid, err)
	}
	return found, nil
}

func (s *Server) inspect(r *http.Request) (any, error) {
	found, err := s.inspected(r)
	if err != nil {
		return nil, err
	}
	status := Status{Agent: s.Agent, Proxies: s.Enroller.Proxies.Status()}
	warnings := []Warning{}
	if found.State == enroll.StatePending {
		status.Pods.Pending = 1
		warnings = append(warnings, noProxy(&status)...)
	}
	warnings = append(warnings, podWarnings(&status, &found.Pod)...)
	for _, o := range found.Drift() {
		if o.Kind == enroll.ObjectListener { // said in other words already
			continue
		}
		warnings = append(warnings, Warning{
			Reason: ReasonDrift, Severity: Red,
			Message: fmt.Sprintf("%s %s is not as it should be: %s; want: %s", o.Kind, o.Name, o.Have, o.Want),
			Remedy:  "the agent puts it back within seconds; if it is gone again, find who takes it away: " + watcherOf(o.Kind, found.NetNS),
		})
	}
	warnings = append(warnings, failing(&found.Pod, found.Failing)...)
	for i := range warnings {
		warnings[i].Pod, warnings[i].UID = found.String(), found.UID
	}
	warnings = append(warnings, s.repaired(func(e uidEvent) bool { return e.uid == found.UID })...)
	var node Status
	if err := s.lookAtNode(&node); err != nil {
		return nil, err
	}
	return &Inspection{*found, healthOf(warnings), warnings, nodeWarnings(&node)}, nil
}

// watcherOf is a command that shows who changes things of a kind, or that they change.
func watcherOf(kind enroll.ObjectKind, netns string) string {
	switch kind {
	case enroll.ObjectRule, enroll.ObjectRoute:
		return fmt.Sprintf("`nsenter --net=%s ip monitor rule route` shows when it goes", netns)
	case enroll.ObjectFilter:
		return fmt.Sprintf("`nsenter --net=%s tc monitor` shows when it goes", netns)
	case enroll.ObjectSysctl:
		return "`grep -r fwmark /etc/sysctl.d /run/sysctl.d`, and what sets sysctls in pods"
	default:
		return "`bpftool prog show` and `bpftool map show` name the processes that have it open"
	}
}

func failing(pod *enroll.Pod, why string) []Warning {
	if why == "" {
		return nil
	}
	return []Warning{{
		Reason: ReasonFailing, Severity: Red, Pod: pod.String(), UID: pod.UID,
		Message: "the pod cannot be kept as it should be: " + strings.ReplaceAll(why, "\n", "; "),
		Remedy:  "remove what the message names; it is tried again every few seconds",
	}}
}

// maxHost bounds the text of an address in a question, in bytes.
const maxHost = 64

func (s *Server) explain(r *http.Request) (any, error) {
	values := r.URL.Query()
	uid := values.Get("pod")
	if err := enroll.ValidateUID(uid); err != nil {
		return nil, invalid(err)
	}
	q := explain.Query{By: explain.Maker(values.Get("by")), Protocol: explain.Protocol(values.Get("protocol")), Via: values.Get("via")}
	if q.By != "" && !slices.Contains(explain.Makers(), q.By) {
		return nil, invalid(fmt.Errorf("bad maker %q: use one of %v", q.By, explain.Makers()))
	}
	if q.Protocol != "" && q.Protocol != explain.TCP && q.Protocol != explain.UDP {
		return nil, invalid(fmt.Errorf("bad protocol %q: use tcp or udp", q.Protocol))
	}
	for _, a := range []struct {
		name string
		into *netip.AddrPort
	}{{"from", &q.From}, {"to", &q.To}} {
		text := values.Get(a.name)
		if text == "" {
			continue
		}
		var err error
		if len(text) > maxHost {
			return nil, invalid(fmt.Errorf("bad %s: it has more than %d bytes", a.name, maxHost))
		}
		if *a.into, err = netip.ParseAddrPort(text); err != nil {
			return nil, invalid(fmt.Errorf("bad %s %q: write an address and a port, as in 10.0.0.7:80 or [fd00::7]:80", a.name, text))
		}
	}
	pod, ok := s.Enroller.Brief(uid)
	if !ok {
		return nil, fmt.Errorf("pod %s: %w", uid, enroll.ErrNotEnrolled)
	}
	q.Cookie = pod.NetNSCookie
	if q.Via != "" {
		index, err := s.Enroller.InterfaceIndex(r.Context(), uid, q.Via)
		if err != nil {
			return nil, err
		}
		q.Interface = uint32(index)
	}
	answer, err := explain.Explain(s.Enroller.Datapath.Maps(), q)
	if err != nil {
		return nil, invalid(err)
	}
	return answer, nil
}
