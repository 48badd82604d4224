// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"bufio"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
)

// Rule is one line of the list of expected skips.
type Rule struct {
	// Where names the line, for messages.
	Where string
	// Kernel is a release or its beginning up to a dot, dash or plus sign ("6.1" is not "6.12"), the same with an
	// exclamation mark before it for all others, or * for all. Behind an @ it is the name of an odd machine, on whatever kernel;
	// other rules count there, too.
	Kernel string
	// Package is a path below the module's root, in which * stands for anything.
	Package string
	// Test is a test's full name, in which * stands for anything. Without one the rule demands that the test is skipped.
	Test string
	// Reason has to occur in what the test says.
	Reason string

	packages, tests *regexp.Regexp
}

// ReadRules reads a list of expected skips: a rule a line, KERNEL PACKAGE TEST REASON..., with # for comments.
func ReadRules(name string, r io.Reader) ([]Rule, error) {
	var rules []Rule
	s := bufio.NewScanner(r)
	for n := 1; s.Scan(); n++ {
		f := strings.Fields(s.Text())
		if len(f) == 0 || strings.HasPrefix(f[0], "#") {
			continue
		}
		where := fmt.Sprintf("%s:%d", name, n)
		if len(f) < 4 {
			return nil, fmt.Errorf("%s: want KERNEL PACKAGE TEST REASON, have %q", where, s.Text())
		}
		rules = append(rules, Rule{
			Where: where, Kernel: f[0], Package: f[1], Test: f[2], Reason: strings.Join(f[3:], " "),
			packages: glob(f[1]), tests: glob(f[2]),
		})
	}
	if err := s.Err(); err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return rules, nil
}

// glob compiles a pattern in which only * is special.
func glob(pattern string) *regexp.Regexp {
	return regexp.MustCompile("^" + strings.ReplaceAll(regexp.QuoteMeta(pattern), `\*`, ".*") + "$")
}

// covers says whether the rule is about this package on this kernel.
func (r *Rule) covers(c *Cell) bool {
	if machine, odd := strings.CutPrefix(r.Kernel, "@"); odd {
		return c.Machine == machine && r.packages.MatchString(c.Package)
	}
	kernel, others := strings.CutPrefix(r.Kernel, "!")
	rest, begins := strings.CutPrefix(c.Kernel, kernel)
	same := begins && (rest == "" || strings.ContainsAny(rest[:1], ".-+~"))
	return (kernel == "*" || same != others) && r.packages.MatchString(c.Package)
}

// allows says whether the rule expects the skip of t.
func (r *Rule) allows(c *Cell, t Test) bool {
	return r.covers(c) && r.tests.MatchString(t.Name) && t.Reason != "" && strings.Contains(t.Reason, r.Reason)
}

// exact says whether the rule names one test of one package.
func (r *Rule) exact() bool { return !strings.Contains(r.Package+r.Test, "*") }

// Judge holds the cell's skips against the rules and adds what is wrong to its problems: a skip that no rule expects or
// that gives no reason, and a test that an exact rule names and that passed. With complete, when no tests were selected,
// it is also wrong that a test an exact rule names does not exist, or that the package has no tests at all. An odd machine
// need not skip what ordinary ones have to.
func (c *Cell) Judge(rules []Rule, complete bool) {
	if complete && len(c.all) == 0 && len(c.Problems) == 0 {
		c.problem("no test ran")
	}
	for _, s := range c.skips(func(t Test) bool {
		return !slices.ContainsFunc(rules, func(r Rule) bool { return r.allows(c, t) })
	}) {
		if s.reason == "" {
			c.problem("skipped without a reason, name the missing feature in t.Skip: %s", strings.Join(s.tests, ", "))
		} else {
			c.problem("skipped and not expected to be: %s: %s", strings.Join(s.tests, ", "), s.reason)
		}
	}
	for i := range rules {
		r := &rules[i]
		if !r.exact() || !r.covers(c) || c.Machine != "" && !strings.HasPrefix(r.Kernel, "@") {
			continue
		}
		switch t := c.all[r.Test]; {
		case t == nil && complete && len(c.all) > 0:
			c.problem("%s expects %s to be skipped, and there is no such test: remove the line", r.Where, r.Test)
		case t != nil && t.Outcome == Passed:
			c.problem("%s expects %s to be skipped, and it passed: remove the line", r.Where, r.Test)
		}
	}
}

// Stale returns a message for each rule with a wildcard that is about some of the cells and under which nothing was
// skipped in any of them. It is for complete runs. A rule for all kernels is left out: perhaps not all of them ran.
func Stale(cells []*Cell, rules []Rule) []string {
	var stale []string
	for i := range rules {
		r := &rules[i]
		if r.exact() || r.Kernel == "*" {
			continue
		}
		covered, used := false, false
		for _, c := range cells {
			covered = covered || r.covers(c)
			used = used || slices.ContainsFunc(c.Tests, func(t Test) bool { return t.Outcome == Skipped && r.allows(c, t) })
		}
		if covered && !used {
			stale = append(stale, fmt.Sprintf("%s expects skips, and there were none: remove the line", r.Where))
		}
	}
	return stale
}

// Fail adds a problem that is not about one test.
func (c *Cell) Fail(err error) { c.problem("%v", err) }

func (c *Cell) problem(format string, args ...any) {
	if p := fmt.Sprintf(format, args...); !slices.Contains(c.Problems, p) {
		c.Problems = append(c.Problems, p)
	}
}
