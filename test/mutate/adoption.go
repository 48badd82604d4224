// SPDX-License-Identifier: Apache-2.0

package main

// adoptionMutations are the rules of taking over a dataplane, of looking after it, and of failing in good order.
func adoptionMutations() []mutation {
	const (
		bridge   = "pkg/loader/bridge.go"
		datapath = "pkg/loader/datapath.go"
		heal     = "pkg/loader/heal.go"
		layout   = "pkg/loader/layout.go"
		migrate  = "pkg/loader/migrate.go"
		state    = "pkg/enroll/state.go"
		listen   = "pkg/enroll/listeners.go"

		loaderTests = "./pkg/loader"
		upgrades    = "TestUpgradesUnderLoad"
		noted       = "TestWhatIsNotedOfAPodGetsLost"
		troubles    = "TestTroubleIsNamedAndLeavesNothing"
	)
	return []mutation{
		{
			name: "adoption: a map of another layout is used as it is", file: datapath,
			old: "replace[name] = !same", new: "replace[name] = !same && false", tests: upgrades,
		},
		{
			name: "adoption: the versions of layouts do not matter", file: datapath,
			old: "if !mine.takesOver(theirs) {", new: "if false {", tests: "TestAnUpgradeIsRefused",
		},
		{
			name: "adoption: what a field means does not matter", file: layout,
			old: "if other.Name != m.Name || otherFrom != from || otherTo != to {", new: "if false {", tests: "TestWhichLayoutsFit", pkg: loaderTests,
		},
		{
			name: "adoption: entries are not carried over", file: migrate,
			old: "if err := to.Put(newKey, value); err != nil {", new: "if err := error(nil); err != nil {",
			tests: "TestEntriesAreCarriedOver", pkg: loaderTests,
		},
		{
			name: "adoption: older counts are forgotten", file: migrate,
			old: "asm.AddAtomic.Mem(asm.R8,", new: "asm.AddAtomic.Mem(asm.R7,", tests: "TestCountersAreAddedUp", pkg: loaderTests,
		},
		{
			name: "adoption: older counts are added again and again", file: migrate,
			old: "exchange.Constant = int64(asm.Xchg) >> 8", new: "exchange.Constant = int64(asm.FetchAdd) >> 8",
			tests: "TestCountersAreAddedUp", pkg: loaderTests,
		},
		{
			name: "adoption: listeners are not copied", file: bridge,
			old: `if err := iterate(iterSockets, ins, from); err != nil {`, new: "if err := error(nil); err != nil {",
			tests: "TestListenersAreCopied", pkg: loaderTests,
		},
		{
			name: "adoption: notes of sockets are not copied", file: bridge,
			old: `return iterate(iterNotes, ins, from)`, new: "return nil", tests: "TestNotesOfSocketsAreCopied", pkg: loaderTests,
		},
		{
			name: "adoption: flows are admitted in the new map only", file: datapath,
			old: "d.bridgeAdmitted(spec), ", new: "", tests: upgrades,
		},
		{
			name: "adoption: the seals of pods go on with the old maps", file: datapath,
			old: "if err := d.eachPrevious(bpf.RedirectorMapTailCalls, put); err != nil {", new: "if err := error(nil); err != nil {", tests: upgrades,
		},
		{
			name: "adoption: a bridge goes with the agent", file: bridge,
			old: "if err := pinLink(l, pin); err != nil {", new: "if err := error(nil); err != nil {", tests: "TestAnUpgradeIsInterrupted",
		},
		{
			name: "adoption: a map whose pin is gone is made anew", file: datapath,
			old: "return pinned, d.findUnpinned(missing, pinned)", new: "return pinned, nil", tests: "TestAMapWithoutAPinIsFound", pkg: loaderTests,
		},
		{
			name: "adoption: a pod without a name keeps the old programs", file: state,
			old: "e.renewPrograms(ns, entry.UID), ", new: "", tests: noted,
		},
		{
			name: "adoption: a file under another pod's name is believed", file: state,
			old: "err == nil && name != s.UID+stateSuffix", new: "false && name != s.UID+stateSuffix", tests: noted,
		},
		{
			name: "adoption: a pod whose namespace was replaced meanwhile is forgotten", file: state,
			old: "if ns := e.successor(&spec); ns != nil {", new: "if ns := e.successor(&spec); false {",
			tests: "TestTheAgentIsKilledWhenANamespaceIsGone/another_in_its_place/$",
		},
		{
			name: "adoption: a pod that is on its way to another namespace has no file", file: enroll,
			old:   "\t\tif err := e.letGo(p); err != nil {\n\t\t\te.Log",
			new:   "\t\tif err := errors.Join(e.removeState(p.uid), e.letGo(p)); err != nil {\n\t\t\te.Log",
			tests: "TestTheAgentIsKilledWhenANamespaceIsGone/another_in_its_place/enrol:_open#2",
		},
		{
			name: "repair: a pod without a name stays for ever", file: reconcile,
			old: "if r.round%unnamedEvery == 0 {", new: "if false {", tests: "TestAPodWithoutANameIsForgotten",
		},
		{
			name: "repair: a pod without a name goes though it is there", file: reconcile,
			old: "\t\tcase err == nil:\n\t\t\t_ = ns.Close()\n\t\tcase !errors.Is(err, podns.ErrGone):", new: "\t\tcase err == nil && ns == nil:\n\t\t\t_ = ns.Close()\n\t\tcase err != nil && !errors.Is(err, podns.ErrGone):",
			tests: "TestAPodWithoutANameIsForgotten",
		},
		{
			name: "routing: another's table is used", file: netns,
			old: "if !foreign {", new: "if !foreign || true {", tests: "TestRulesAndRoutesOfOthersStay",
		},
		{
			name: "routing: others' rules go with the pod's", file: netns,
			old: "return rule.Protocol == routeProtocol &&\n", new: "return rule.Priority == rulePriority || rule.Protocol == routeProtocol &&\n",
			tests: "TestRulesAndRoutesOfOthersStay",
		},
		{
			name: "adoption: what was being written stays", file: state,
			old: "if err := removeHalfWritten(e.StateDir); err != nil {", new: "if err := error(nil); err != nil {",
			tests: "TestWhatAKilledAgentWasWritingIsRemoved",
		},
		{
			name: "adoption: a namespace is where it was, or nowhere", file: state,
			old: "ns, err := findNetNS(s.NetNS, s.NetNSInode, s.NetNSCookie)\n\tif errors.Is", new: "ns, err := podns.Open(s.NetNS)\n\tif errors.Is",
			tests: noted,
		},
		{
			name: "adoption: a proxy is asked for its listeners only when it is ready", file: listen,
			old: "found, err := takeover.", new: "if proxy.State != \"ready\" {\n\t\t\tcontinue\n\t\t}\n\t\tfound, err := takeover.", tests: "TestAProxyMissesThatAPodLeft",
		},
		{
			name: "heal: a detached program stays away", file: heal,
			old: "if !on {", new: "if false {", tests: "TestHeal", pkg: loaderTests,
		},
		{
			name: "heal: another's program stays in the link", file: heal,
			old: "if id, _ := about.ID(); info.Program != id {", new: "if false {", tests: "TestHeal", pkg: loaderTests,
		},
		{
			name: "heal: a removed link pin stays away", file: heal,
			old: "return true, errors.Join(pinLink(again, pin), again.Close())", new: "return false, again.Close()", tests: "TestHeal", pkg: loaderTests,
		},
		{
			name: "heal: a tail call stays away", file: heal,
			old: "return true, d.maps.TailCalls.Put(index, prog)", new: "return false, nil", tests: "TestHeal", pkg: loaderTests,
		},
		{
			name: "trouble: a failed enrolment is not undone", file: enroll,
			old: "err = errors.Join(err, undos.run())\n\t\t}\n\t\t// Not", new: "}\n\t\t// Not", tests: troubles,
		},
		{
			name: "trouble: what failed is undone with a closed handle, in the host's namespace", file: enroll,
			old:   "\tdefer func() {\n\t\tif err != nil {\n\t\t\terr = errors.Join(err, undos.run())",
			new:   "\tdefer func() {\n\t\tif n != nil {\n\t\t\tn.close()\n\t\t}\n\t\tif err != nil {\n\t\t\terr = errors.Join(err, undos.run())",
			tests: troubles,
		},
		{
			name: "trouble: what keeps a repair from being made is said at each look", file: watch,
			old: "case err.Error() != p.failing:", new: "default:", tests: "TestTroubleWithARepairIsNamedAndPasses",
		},
		{
			name: "trouble: a repair that has failed is not tried again", file: reconcile,
			old: "\tr.repair(p, have, full)\n", new: "\tif p.failing == \"\" {\n\t\tr.repair(p, have, full)\n\t}\n",
			tests: "TestTroubleWithARepairIsNamedAndPasses",
		},
		{
			name: "trouble: a pod leaves whose file has to stay", file: enroll,
			old: "if err := unix.Access(e.StateDir, unix.W_OK); err != nil {", new: "if err := error(nil); err != nil {", tests: troubles,
		},
	}
}
