// SPDX-License-Identifier: Apache-2.0

// Package fault names the places where an agent may be killed with something half done, for tests to kill it there. A real
// agent has no hook, and passes them at the cost of a comparison with nil.
package fault

// Hook is called at each point that is passed, with its name, by whatever goroutine passes it. A test sets it before anything
// starts. It is nil outside of tests.
var Hook func(point string)

// Point is called where one step is done and the next is not begun.
func Point(name string) {
	if Hook != nil {
		Hook(name)
	}
}

// Points lists all names by what is under way, each in the order in which they are passed. Some of an upgrade are passed only
// when the layout of a map has changed.
var Points = map[string][]string{
	"create": {"create: maps pinned", "create: programs attached", "create: pins in place"},
	"enrol": {
		"enrol: watch", "enrol: open", "enrol: state file", "enrol: own addresses", "enrol: routing IPv4", "enrol: routing IPv6",
		"enrol: sysctls", "enrol: seal", "enrol: steer", "enrol: exceptions", "enrol: map entry", "enrol: counters",
		"enrol: probe targets", "enrol: proxy",
	},
	"set": {"set: state file", "set: routing", "set: exceptions", "set: map entry"},
	"unenrol": {
		"unenrol: proxies told", "unenrol: capture off", "unenrol: steer detached", "unenrol: namespace restored",
		"unenrol: map entries removed", "unenrol: state file removed",
	},
	"reconcile": {
		"reconcile: seal", "reconcile: routing", "reconcile: sysctl", "reconcile: steer", "reconcile: pod-entry", "reconcile: counters",
		"reconcile: own-address", "reconcile: probe-target", "reconcile: exception", "reconcile: netns", "reconcile: gone",
	},
	"upgrade": {
		"upgrade: maps copied", "upgrade: programs loaded", "upgrade: old map kept", "upgrade: map replaced",
		"upgrade: bridges built", "upgrade: program replaced", "upgrade: tail call replaced", "upgrade: layout noted", "upgrade: pods taken over",
		"upgrade: counters added up",
	},
}
