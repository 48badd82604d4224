// SPDX-License-Identifier: Apache-2.0

package app

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
)

// style colours words for people who read on a terminal. The zero value does not.
type style struct{ on bool }

// colour is a terminal's code for one.
type colour string

// All codes have the same length: cells of a table's column stay aligned when each is painted.
const (
	plain  colour = "39"
	red    colour = "31"
	green  colour = "32"
	yellow colour = "33"
)

// styleOf says how to write to the command's standard output: with colours on a terminal, unless NO_COLOR is set to anything or
// the terminal knows none.
func (env *Env) styleOf() style {
	if env.Getenv("NO_COLOR") != "" || env.Getenv("TERM") == "dumb" {
		return style{}
	}
	f, ok := env.Stdout.(*os.File)
	if !ok {
		return style{}
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return style{on: err == nil}
}

func (s style) paint(c colour, text string) string {
	if !s.on {
		return text
	}
	return "\x1b[" + string(c) + "m" + text + "\x1b[0m"
}

func (s style) health(h api.Health) string {
	return s.paint(map[api.Health]colour{api.Green: green, api.Yellow: yellow, api.Red: red}[h], string(h))
}

func (s style) state(st enroll.State) string {
	if st == enroll.StateEnrolled {
		return s.paint(green, string(st))
	}
	return s.paint(red, string(st))
}

// verdict paints a word that says whether something is as it should be.
func (s style) verdict(ok bool, text string) string {
	if ok {
		return s.paint(green, text)
	}
	return s.paint(red, text)
}
