// SPDX-License-Identifier: Apache-2.0

// Package guest is the contract between the host side of the test VM (package machine) and its PID 1 (cmd/vminit): the
// configuration that goes in with the initramfs, and the records that come back between the lines of the program's
// output.
package guest

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// ConfigPath is where the initramfs holds the Config, as JSON.
const ConfigPath = "/vm.json"

// LogMark is the line that vminit writes to the kernel log just before it starts the program. What the kernel logged
// before it is about the boot; what comes after it was caused by the program.
const LogMark = "vminit: program starts"

// Config tells vminit what to run.
type Config struct {
	// Argv is the program's absolute path in the guest and its arguments.
	Argv []string
	// Env is the program's whole environment, as KEY=VALUE.
	Env []string
	// Dir is the program's working directory.
	Dir string
	// Modules are the kernel modules, in the order in which they have to be loaded.
	Modules []Module
	// Cgroups says how cgroups are mounted.
	Cgroups Cgroups
	// Sysctls are set before the program starts: values by path below /proc/sys.
	Sysctls map[string]string
	// Collect are the paths of files, or of folders of files, that are handed back when the program has ended.
	Collect []string
}

// Cgroups says how the cgroup file systems are mounted in the guest.
type Cgroups string

// The ways to mount cgroups.
const (
	// CgroupsUnified is cgroup2 at /sys/fs/cgroup, as systemd has it now.
	CgroupsUnified Cgroups = ""
	// CgroupsLegacy is version 1 alone, a hierarchy for each controller below /sys/fs/cgroup, and cgroup2 nowhere.
	CgroupsLegacy Cgroups = "legacy"
)

// Module is a kernel module to load.
type Module struct {
	// Path of the uncompressed module in the guest.
	Path string
	// Params are its parameters, as on the command line of insmod(8).
	Params string
}

// Kind says what a Record is about.
type Kind string

// The kinds of records, in the order in which they come.
const (
	// Note is a complaint of vminit's: a mount or a module that failed. Text holds it.
	Note Kind = "note"
	// Ready comes once, right before the program starts. Text is the running kernel's release.
	Ready Kind = "ready"
	// File is one of the collected files, with Path and Data.
	File Kind = "file"
	// Exit is the last record. Code is the program's exit status, or 128 + the number of the signal that ended it.
	Exit Kind = "exit"
)

// Exit statuses of vminit's own, as a shell has them.
const (
	// CodeSetup means that vminit could not read its configuration.
	CodeSetup = 125
	// CodeExec means that the program could not be started; a Note says why.
	CodeExec = 126
)

// Record is what vminit says to the host. It shares the serial port with the program's output.
type Record struct {
	Kind Kind   `json:"kind"`
	Text string `json:"text,omitempty"`
	Path string `json:"path,omitempty"`
	Data []byte `json:"data,omitempty"`
	Code int    `json:"code,omitempty"`
}

// start introduces a record. It is a control character, so that no text a test prints by itself looks like one, and it
// is found in the middle of a line too: the program's last line may lack its newline.
const start = "\x1evminit:"

// Line returns the record as one line for the serial port, newline included.
func (r Record) Line() ([]byte, error) {
	b, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode %s record: %w", r.Kind, err)
	}
	return append(append([]byte(start), b...), '\n'), nil
}

// Cut splits a line (with or without its newline) into the program's own output and the record behind it. rec is nil
// when the line has no record, or one that cannot be read: then the whole line is output.
func Cut(line []byte) (output []byte, rec *Record) {
	before, after, ok := bytes.Cut(line, []byte(start))
	if !ok {
		return line, nil
	}
	rec = new(Record)
	if err := json.Unmarshal(after, rec); err != nil {
		return line, nil
	}
	return before, rec
}
