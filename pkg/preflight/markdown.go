// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"cmp"
	"fmt"
	"strings"
)

// tables are those of the page: the groups, with the columns that say something of them.
var tables = []struct {
	group   Group
	title   string
	columns []column
}{
	{GroupKernel, "Features of the kernel", []column{name, since, option, without}},
	{GroupRights, "Rights of the agent", []column{name, without}},
	{GroupMachine, "The machine", []column{name, since, option, without, remedy}},
}

type column struct {
	title string
	cell  func(*Check) string
}

var (
	name = column{"what", func(c *Check) string {
		if !c.Needed {
			return c.Name + " (optional)"
		}
		return c.Name
	}}
	since  = column{"since", func(c *Check) string { return cmp.Or(c.Since, "any") }}
	option = column{"option", func(c *Check) string {
		if c.Option == "" {
			return "none"
		}
		return "`" + c.Option + "`"
	}}
	without = column{"without it", func(c *Check) string { return c.Without }}
	remedy  = column{"remedy", func(c *Check) string { return cmp.Or(c.Remedy, "another kernel") }}
)

// Markdown returns the tables of docs/kernels.md: what is needed, since which kernel, and what happens without it.
func Markdown() string {
	var b strings.Builder
	row := func(columns []column, cell func(column) string) {
		for _, c := range columns {
			fmt.Fprintf(&b, "| %s ", strings.ReplaceAll(cell(c), "|", `\|`))
		}
		b.WriteString("|\n")
	}
	for _, t := range tables {
		fmt.Fprintf(&b, "### %s\n\n", t.title)
		row(t.columns, func(c column) string { return c.title })
		row(t.columns, func(column) string { return "---" })
		for _, check := range Checks() {
			if check.Group == t.group {
				row(t.columns, func(c column) string { return c.cell(&check) })
			}
		}
		b.WriteString("\n")
	}
	return b.String()
}
