// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/redirector-dataplane/redirector/test/vm/guest"
)

// odd is a machine that is set up in a way that few are. Some of the tests run on it, those that show that what can work there
// does, and that the rest is refused with a reason.
type odd struct {
	name string
	// lines are the kernel lines that it is made with.
	lines []string
	// cmdline is added to the kernel's command line.
	cmdline string
	cgroups guest.Cgroups
	sysctls map[string]string
	// tests are patterns of tests by packages.
	tests map[string]string
}

// mainPaths are tests of all that becomes of connections and queries, in and out, and of nothing passing by.
const mainPaths = `^(TestOutbound|TestInbound|TestFromPodToPod|TestUntouched|TestHBONEPort|TestWithoutAProxyNothingPasses` +
	`|TestTheSealJudgesFrames|TestDNSIsCaptured|TestOneSocketAsksManyDNSServers|TestProbesReachTheAppPastTheProxy|TestAHostWithoutIPv6)$`

var oddMachines = []odd{
	{
		name: "ipv6-off", lines: []string{"6.1", "newest"}, cmdline: "ipv6.disable=1",
		tests: map[string]string{
			"test/dataplane":     mainPaths,
			"cmd/redirector/app": `^(TestCheck.*|TestAnAgentIsStoppedAndAnotherTakesOver|TestSysctlsThatCannotBeSet)$`,
			"pkg/preflight":      ".",
		},
	},
	{
		name: "jit-off", lines: []string{"6.1", "newest"}, sysctls: map[string]string{"net/core/bpf_jit_enable": "0"},
		tests: map[string]string{
			"test/dataplane":     mainPaths,
			"cmd/redirector/app": `^TestCheck.*$`,
			"pkg/loader":         `^(TestVerifier.*|TestTheJITIsOff)$`,
			"pkg/preflight":      ".",
		},
	},
	{
		name: "cgroup-v1", lines: []string{"6.1", "6.12"}, cgroups: guest.CgroupsLegacy,
		tests: map[string]string{
			"cmd/redirector/app": `^TestCgroupsOfVersion1Alone$`,
			"pkg/preflight":      ".",
		},
	},
}
