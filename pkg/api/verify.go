// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/journal"
	"github.com/redirector-dataplane/redirector/pkg/podns"
	"github.com/redirector-dataplane/redirector/pkg/verify"
)

// Verification is what checks with real packets have found of one pod.
type Verification struct {
	Pod string `json:"pod"`
	UID string `json:"uid"`
	// Passed is whether no check has failed.
	Passed bool           `json:"passed"`
	Checks []verify.Check `json:"checks"`
	// Node is what needs attention of the node; it is of no check.
	Node []Warning `json:"node"`
}

func (s *Server) verify(r *http.Request) (any, error) {
	// Before anything is tried: what is missing then may be back when it has failed.
	found, err := s.inspected(r)
	if err != nil {
		return nil, err
	}
	ns, err := podns.Find(found.NetNSInode, found.NetNSCookie)
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", found.UID, err)
	}
	defer ns.Close()
	m := s.Enroller.Datapath.Maps()
	config, err := m.Config()
	if err != nil {
		return nil, err
	}
	var node Status
	if err := s.lookAtNode(&node); err != nil {
		return nil, err
	}
	addrs := found.IPs
	if len(addrs) == 0 {
		addrs = found.Addresses
	}
	v := &Verification{Pod: found.String(), UID: found.UID, Passed: true, Node: nodeWarnings(&node)}
	v.Checks = verify.Run(verify.Target{NS: ns, Maps: m, Addrs: addrs, Prober: verify.NewProber(config, s.Agent.Cgroup)})
	v.Checks = append(v.Checks, objectsCheck(found))
	why := causes{server: s, pod: found, hooks: node.Hooks}
	for i := range v.Checks {
		if v.Checks[i].Result == verify.Failed {
			v.Passed = false
			v.Checks[i].Cause, v.Checks[i].Remedy = why.of(&v.Checks[i])
		}
	}
	return v, nil
}

// causes finds out why a check has failed.
type causes struct {
	server *Server
	pod    *enroll.Inspection
	hooks  []Hook
}

// objects is the name of the check that everything is there in the kernel.
const objects = "objects"

// objectsCheck says whether everything was there before the packets were sent.
func objectsCheck(found *enroll.Inspection) verify.Check {
	drift := found.Drift()
	if len(drift) == 0 {
		return verify.Check{
			Name: objects, Family: "both", Result: verify.Passed,
			Message: fmt.Sprintf("all %d objects that the kernel must have for the pod are there", len(found.Objects)),
		}
	}
	var names []string
	for _, o := range drift {
		names = append(names, fmt.Sprintf("%s %s", o.Kind, o.Name))
	}
	return verify.Check{
		Name: objects, Family: "both", Result: verify.Failed,
		Message: fmt.Sprintf("of %d objects these are not as they should be: %s", len(found.Objects), strings.Join(names, ", ")),
	}
}

// needs says what a check goes by: names of objects of the pod, or beginnings of them, and of the node's programs.
var needs = map[string]struct{ objects, hooks []string }{
	verify.Outbound:  {[]string{"map entry pods", "rule FAMILY", "route FAMILY", "link steer", "listener 15001"}, []string{"sock_ops"}},
	verify.Unproxied: {[]string{"map entry pods", "rule FAMILY"}, []string{"sock_ops", "sock_create"}},
	verify.Seal:      {[]string{"filter seal", "map entry counters", "map entry pods"}, []string{"seal_pkt"}},
	verify.DNS:       {[]string{"map entry pods"}, []string{"connect4", "connect6", "sendmsg", "recvmsg"}},
	verify.Inbound:   {[]string{"map entry pods", "link steer", "map entry own_addrs", "listener 15006"}, []string{"sock_ops"}},
	objects:          {[]string{""}, nil},
	verify.Probe:     {[]string{"map entry pods", "map entry probe_targets", "link steer"}, []string{"sock_ops", "connect4", "connect6"}},
}

// of names the cause of a failed check, and the remedy.
func (c *causes) of(check *verify.Check) (cause, remedy string) {
	need := needs[check.Name]
	for _, name := range need.objects {
		name = strings.ReplaceAll(name, "FAMILY", check.Family)
		for _, o := range c.pod.Objects {
			if o.OK || !strings.HasPrefix(string(o.Kind)+" "+o.Name, name) {
				continue
			}
			if o.Kind == enroll.ObjectListener {
				return c.noListener(&o)
			}
			return fmt.Sprintf("%s %s: %s", o.Kind, o.Name, o.Have),
				"the agent puts it back within seconds; if it is gone again, find who takes it away: " + watcherOf(o.Kind, c.pod.NetNS)
		}
	}
	for _, h := range c.hooks {
		for _, name := range need.hooks {
			if h.Problem != "" && strings.HasPrefix(h.Name, name) {
				return fmt.Sprintf("program %s: %s", h.Name, h.Problem),
					"the agent puts it back within seconds; if it is gone again, find who takes it away: `bpftool cgroup tree`"
			}
		}
	}
	if cause, remedy, ok := c.proxy(); ok && check.Name != verify.Seal && check.Name != verify.Probe {
		return cause, remedy
	}
	for _, e := range c.server.Enroller.Journal().Since(time.Now().Add(-recently)) {
		if e.Kind == journal.Repaired && (e.UID == c.pod.UID || e.UID == "") {
			cause = "it was missing when this was tried, and has been put back: " + e.Message
			remedy = "verify again; if it fails again, " + c.server.repairRemedy(enroll.Repair(e.What), e.UID)
		}
	}
	if cause != "" {
		return cause, remedy
	}
	return "everything of the dataplane is where it should be", "see whether filters or routes of the pod's own keep it, with " +
		fmt.Sprintf("`nsenter --net=%s nft list ruleset` and `nsenter --net=%s ip rule`, and the node proxy's log", c.pod.NetNS, c.pod.NetNS)
}

// noListener says why the node proxy does not listen.
func (c *causes) noListener(o *enroll.Object) (cause, remedy string) {
	if cause, remedy, ok := c.proxy(); ok {
		return cause, remedy
	}
	return fmt.Sprintf("the node proxy runs for the pod, but no listener of its is known on port %s", o.Name),
		fmt.Sprintf("restart the node proxy, or unenroll and enroll the pod: listeners are noted when they are made, by processes in cgroup %s",
			c.server.Agent.Cgroup)
}

// proxy says what is wrong with the node proxy, if anything.
func (c *causes) proxy() (cause, remedy string, ok bool) {
	if c.pod.State == enroll.StateEnrolled {
		return "", "", false
	}
	status := Status{Agent: c.server.Agent, Proxies: c.server.Enroller.Proxies.Status(), Pods: PodCounts{Pending: 1}}
	for _, w := range append(noProxy(&status), podWarnings(&status, &c.pod.Pod)...) {
		return w.Message, w.Remedy, true
	}
	return "", "", false
}
