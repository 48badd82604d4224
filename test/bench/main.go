// SPDX-License-Identifier: Apache-2.0

// Command bench compares Redirector with no redirection at all and with three rule sets of netfilter that make the same decisions.
//
// Each subject is a pod in namespaces of its own with the same app, the same proxy and the same clients, which are this program in
// other roles. In each round every scenario is run with every subject, in a random order, so that what disturbs the machine
// disturbs all; what counts is the ratio to direct within a round. A connection that does not go where it should fails the run.
//
// It needs root, Linux 6.1 and iptables and nft, and touches nothing but namespaces that it makes itself.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/cmd/redirector/app"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// roleVariable makes this program play one of the others.
const roleVariable = "REDIRECTOR_BENCH_ROLE"

const (
	roleAgent = "agent" // the real one
	roleHello = "hello" // says to the agent that a proxy runs, and listens nowhere
	roleProxy = "proxy"
	roleApp   = "app"
	roleLoad  = "load"
)

func main() {
	if code, ok := playRole(); ok {
		os.Exit(code)
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err == nil {
		err = bench(ctx, o)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(1) //nolint:gocritic // nothing is left to be stopped
	}
}

// playRole runs the program that the environment names, and returns its exit status; ok is false when it names none.
func playRole() (code int, ok bool) {
	role := os.Getenv(roleVariable)
	switch role {
	case "":
		return 0, false
	case roleAgent:
		return app.Main(context.Background(), os.Args[1:], app.Env{
			Stdout: os.Stdout, Stderr: os.Stderr, Getenv: func(string) string { return "" },
		}), true
	case roleHello:
		return nodeproxy.Main(os.Args[1:]), true
	}
	flags := flag.NewFlagSet(role, flag.ContinueOnError)
	control := flags.String("control", "", "socket")
	spoof := flags.Bool("spoof", true, "connect to the app as the peer")
	if err := flags.Parse(os.Args[1:]); err != nil {
		return 2, true
	}
	ctx := context.Background()
	err := fmt.Errorf("there is no role %q", role)
	switch role {
	case roleProxy:
		err = serveProxy(ctx, *control, *spoof)
	case roleApp:
		err = serveApp(ctx, *control)
	case roleLoad:
		err = serveLoad(ctx, *control)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1, true
	}
	return 0, true
}

// options are the flags.
type options struct {
	quick, check         bool
	rounds, enrolments   int
	rate                 int
	window               time.Duration
	out, history, commit string
	other                string
	scenarios            []scenario
	subjects, also       []string
	noEnrolments         bool
}

func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.BoolVar(&o.quick, "quick", false, "a few scenarios in short rounds")
	f.BoolVar(&o.check, "check", false, "fail when Redirector is out of all proportion")
	f.IntVar(&o.rounds, "rounds", 0, "how often each scenario is run with each subject (default 15, quick: 7)")
	f.IntVar(&o.enrolments, "enrolments", 0, "how often a pod is enrolled with each subject (default 100, quick: 20)")
	f.DurationVar(&o.window, "window", 0, "how long a scenario is run at a time (default 150ms, quick: 80ms)")
	f.IntVar(&o.rate, "rate", 0, "begin no more than this many connections, requests, messages or queries in a second (default: as many as can be)")
	f.StringVar(&o.out, "out", "", "write bench.json, bench.md and bench.svg into this `FOLDER`")
	f.StringVar(&o.history, "history", "", "append the result to this `FILE`, as a line of JSON")
	f.StringVar(&o.commit, "commit", "unknown", "what is measured")
	only := f.String("run", "", "only scenarios whose names, as in the tables, match this `REGEXP`; enrolments are called enrolment")
	f.StringVar(&o.other, "other", "", "compare with the agent in this `FILE`, too: this program built from other sources")
	f.Var(also{&o.also, spliced}, "splice", "compare with an experiment, too: connections spliced by a map of sockets (IPv4)")
	f.Var(also{&o.also, watched}, "monitor", "compare with Redirector while somebody watches all connections, too")
	subjects := f.String("subjects", strings.Join(subjectNames, ","), "only these, of which direct must be the first")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	o.scenarios = allScenarios()
	rounds, enrolments, window := 15, 100, 150*time.Millisecond
	if o.quick {
		o.scenarios = quickScenarios()
		rounds, enrolments, window = 7, 20, 80*time.Millisecond
	}
	if o.rounds == 0 {
		o.rounds = rounds
	}
	if o.enrolments == 0 {
		o.enrolments = enrolments
	}
	if err := o.pick(*only, *subjects); err != nil {
		return o, err
	}
	if o.window == 0 {
		o.window = window
	}
	switch {
	case f.NArg() > 0:
		return o, fmt.Errorf("unexpected argument %q: see bench -help", f.Arg(0))
	case o.rounds < fewest:
		return o, fmt.Errorf("-rounds=%d: at least %d are needed for an interval", o.rounds, fewest)
	case o.enrolments < 1 || o.window <= 0 || o.rate < 0:
		return o, errors.New("-enrolments, -window and -rate must be positive")
	}
	return o, nil
}

// also is a flag that adds a subject.
type also struct {
	subjects *[]string
	name     string
}

func (a also) String() string { return "false" }

// IsBoolFlag says to package flag that it takes no value.
func (a also) IsBoolFlag() bool { return true }

// Set is called for -flag, with "true", and for -flag=VALUE.
func (a also) Set(value string) error {
	on, err := strconv.ParseBool(value)
	if on {
		*a.subjects = append(*a.subjects, a.name)
	}
	return err
}

// pick leaves out what is not asked for.
func (o *options) pick(only, subjects string) error {
	wanted, err := regexp.Compile(only)
	if err != nil {
		return fmt.Errorf("-run=%q is no regular expression: %w", only, err)
	}
	o.scenarios = slices.DeleteFunc(o.scenarios, func(sc scenario) bool { return !wanted.MatchString(sc.String()) })
	o.noEnrolments = !wanted.MatchString("enrolment")
	if len(o.scenarios) == 0 && o.noEnrolments {
		return fmt.Errorf("-run=%q matches no scenario", only)
	}
	o.subjects = strings.Split(subjects, ",")
	for _, name := range o.subjects {
		if !slices.Contains(subjectNames, name) {
			return fmt.Errorf("-subjects: there is no %q, only %s", name, strings.Join(subjectNames, ", "))
		}
	}
	if o.other != "" {
		o.also = append(o.also, otherBuild)
	}
	o.subjects = append(o.subjects, o.also...)
	if o.subjects[0] != direct {
		return fmt.Errorf("-subjects=%s does not begin with %s, to which all are compared", subjects, direct)
	}
	return nil
}

// bench does it all.
func bench(ctx context.Context, o options) error {
	report := Report{Machine: machine(o.commit), Rounds: o.rounds, Window: o.window.String(), OpsPerSecond: o.rate, Subjects: o.subjects}
	var err error
	if !o.noEnrolments {
		if report.Enrolments, err = enrolments(ctx, o.enrolments); err != nil {
			return err
		}
	}
	if report.Rows, report.Programs, err = hops(ctx, o); err != nil {
		return err
	}
	report.Machine.LoadAfter = load()
	fmt.Print(report.markdown())
	if o.out != "" {
		if err := report.write(o.out); err != nil {
			return err
		}
	}
	if o.history != "" {
		if err := report.append(o.history); err != nil {
			return err
		}
	}
	if o.check {
		return report.disaster()
	}
	return nil
}

// hops measures all scenarios.
func hops(ctx context.Context, o options) (all []Row, programs []Program, err error) {
	before, err := programIDs()
	if err != nil {
		return nil, nil, err
	}
	subjects, err := startSubjects(ctx, o)
	defer func() {
		for _, s := range subjects {
			err = errors.Join(err, s.Close())
		}
	}()
	if err != nil {
		return nil, nil, err
	}
	for _, sc := range o.scenarios {
		for _, s := range subjects {
			// Nothing is timed before it is known to go where it should; and what is first pays for what is done once.
			if _, err := s.measure(sc, 0, 3); err != nil {
				return nil, nil, err
			}
		}
	}
	measured, err := rounds(ctx, subjects, o)
	if err != nil {
		return nil, nil, err
	}
	programs, err = runTimes(subjects, o, before)
	return rows(o.scenarios, o.subjects, measured), programs, err
}

func startSubjects(ctx context.Context, o options) ([]*subject, error) {
	var subjects []*subject
	for _, name := range o.subjects {
		s, err := newSubject(ctx, name, o.other)
		if err != nil {
			return subjects, err
		}
		s.rate = o.rate
		subjects = append(subjects, s)
	}
	return subjects, nil
}

// rounds runs each scenario with each subject, in another order each time.
func rounds(ctx context.Context, subjects []*subject, o options) (map[scenario]map[string][]Measured, error) {
	measured := map[scenario]map[string][]Measured{}
	start := time.Now()
	for round := range o.rounds {
		for _, sc := range o.scenarios {
			if measured[sc] == nil {
				measured[sc] = map[string][]Measured{}
			}
			for _, i := range rand.Perm(len(subjects)) {
				if err := ctx.Err(); err != nil {
					return nil, err
				}
				m, err := subjects[i].measure(sc, o.window, 0)
				if err != nil {
					return nil, err
				}
				measured[sc][subjects[i].name] = append(measured[sc][subjects[i].name], m)
			}
		}
		took := time.Since(start).Round(time.Second)
		left := time.Duration(float64(took) / float64(round+1) * float64(o.rounds-round-1)).Round(time.Second)
		fmt.Fprintf(os.Stderr, "round %d of %d, %s, %s to go, load %s\n", round+1, o.rounds, took, left, load())
	}
	return measured, nil
}

// Machine says where and what was measured.
type Machine struct {
	CPU        string `json:"cpu"`
	Cores      int    `json:"cores"`
	Kernel     string `json:"kernel"`
	Commit     string `json:"commit"`
	Time       string `json:"time"`
	LoadBefore string `json:"load_before"` // of the last minute
	LoadAfter  string `json:"load_after"`
}

func machine(commit string) Machine {
	m := Machine{CPU: "unknown", Cores: runtime.NumCPU(), Kernel: "unknown", Commit: commit, LoadBefore: load()}
	m.Time = time.Now().UTC().Format(time.RFC3339)
	if data, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(data)) {
			if name, ok := strings.CutPrefix(line, "model name"); ok {
				m.CPU = strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(name), ":"))
				break
			}
		}
	}
	if data, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m.Kernel = strings.TrimSpace(string(data))
	}
	return m
}

// load is the machine's load in the last minute.
func load() string {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Fields(string(data))[0]
}
