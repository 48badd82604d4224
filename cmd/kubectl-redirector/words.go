// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
)

// commands are those of redirector that look at a node, or at a pod, by way of its agent.
var commands = []string{"status", "pods", "pod", "explain", "verify", "monitor", "check", bugreport, "version"}

// named are the commands whose first word besides flags is a pod's name; the others have --pod.
var named = []string{"pod", "verify"}

// withValues are the flags of the named commands that take the next word.
var withValues = []string{"-o", "--output", "--run-dir"}

// aboutPod finds which pod a command is about, and has it named with its namespace. It returns the command as it is to run, and the
// pod; empty if it is about none.
func aboutPod(args []string, namespace string) (command []string, pod string) {
	command = slices.Clone(args)
	at := -1 // of the name
	prefix := ""
	for i := 1; i < len(command); i++ {
		word := command[i]
		flag, value, assigned := strings.Cut(word, "=")
		switch {
		case flag == "--pod" && assigned:
			at, prefix, pod = i, "--pod=", value
		case flag == "--pod" && i+1 < len(command):
			i++
			at, pod = i, command[i]
		case slices.Contains(withValues, word):
			i++
		case !strings.HasPrefix(word, "-") && at < 0 && slices.Contains(named, command[0]):
			at, pod = i, word
		}
	}
	if pod == "" {
		return command, ""
	}
	if !strings.Contains(pod, "/") {
		pod = namespace + "/" + pod
	}
	command[at] = prefix + pod
	return command, pod
}

// endless says whether a command runs until it is stopped.
func endless(args []string) bool {
	return args[0] == "monitor" || slices.ContainsFunc(args, func(word string) bool {
		return word == "-w" || word == "--watch" || strings.HasPrefix(word, "--watch=")
	})
}
