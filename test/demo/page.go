// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// pageWidth is the number of columns that everything printed fits into.
const pageWidth = 120

// style is a terminal's escape sequence.
type style string

const (
	bold  style = "\x1b[1m"
	dim   style = "\x1b[2m"
	red   style = "\x1b[31m"
	green style = "\x1b[32m"
	reset style = "\x1b[0m"
)

// page is what the demo prints on.
type page struct {
	out    io.Writer
	colour bool
}

// newPage uses colour on terminals, unless the environment says otherwise (see no-color.org).
func newPage(f *os.File) *page {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return &page{out: f, colour: err == nil && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"}
}

func (p *page) paint(s style, text string) string {
	if !p.colour || s == "" || text == "" {
		return text
	}
	return string(s) + text + string(reset)
}

// printf prints lines below a headline.
func (p *page) printf(format string, args ...any) {
	fmt.Fprintf(p.out, "  "+format+"\n", args...)
}

// headline begins a part of the demo; it says in plain words what is to be seen there.
func (p *page) headline(text string) {
	fmt.Fprintf(p.out, "\n%s\n", p.paint(bold, text))
}

// command prints a command line as a person would type it, broken before a flag where it would be too long.
func (p *page) command(words ...string) {
	line := "$"
	for i, w := range words {
		next := len(w)
		if strings.HasPrefix(w, "--") && i+1 < len(words) {
			next += 1 + len(words[i+1])
		}
		if len(line)+1+next > pageWidth-4 {
			p.printf(`%s \`, line)
			line = "   "
		}
		line += " " + w
	}
	p.printf("%s", line)
}

// column is one of a table; its cells may have several lines.
type column struct {
	title string
	width int // of the widest cell, in characters
}

// tableHead prints the titles of a table.
func (p *page) tableHead(columns []column) {
	titles := make([]string, len(columns))
	rules := make([]string, len(columns))
	for i, c := range columns {
		titles[i], rules[i] = c.title, strings.Repeat("-", c.width)
	}
	p.tableRow(columns, "", titles...)
	p.tableRow(columns, "", rules...)
}

// tableRow prints one row; the last cell, which tells how it went, in a colour of its own.
func (p *page) tableRow(columns []column, last style, cells ...string) {
	split := make([][]string, len(cells))
	height := 1
	for i, c := range cells {
		split[i] = strings.Split(c, "\n")
		height = max(height, len(split[i]))
	}
	for y := range height {
		var line strings.Builder
		for i, c := range columns {
			text := ""
			if y < len(split[i]) {
				text = split[i][y]
			}
			if i == len(columns)-1 {
				line.WriteString(p.paint(last, text))
			} else {
				fmt.Fprintf(&line, "%-*s  ", c.width, text)
			}
		}
		p.printf("%s", strings.TrimRight(line.String(), " "))
	}
}
