// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/test/bed"
)

const (
	// outVariable is a file to write the results into, as Markdown; commitVariable says what is measured.
	outVariable    = "REDIRECTOR_SCALE_OUT"
	commitVariable = "REDIRECTOR_SCALE_COMMIT"
	// hopTime is how long connections and answers are counted at a time, hopRounds how often; the median counts.
	hopTime   = 200 * time.Millisecond
	hopRounds = 9
)

// crowd is how long it took to enrol and to remove so many pods, so many at a time.
type crowd struct {
	pods, atOnce    int
	enrol, unenrol  []time.Duration // of each pod, sorted
	enrolAll, rmAll time.Duration
}

// measureCrowds enrols and removes 1, 10, 100 and so on of the pods by the agent's API, one after another and atOnce at a time.
func (n *node) measureCrowds(a *agentProcess, requests []api.EnrollRequest) []crowd {
	n.b.Helper()
	var all []crowd
	for count := 1; count <= len(requests); count *= 10 {
		for _, width := range []int{1, atOnce} {
			if width > 1 && count < width {
				continue
			}
			c := crowd{pods: count, atOnce: width}
			c.enrol, c.enrolAll = n.each(requests[:count], width, func(r api.EnrollRequest) error {
				_, err := a.client.Enroll(n.b.Context(), r)
				return err
			})
			c.unenrol, c.rmAll = n.each(requests[:count], width, func(r api.EnrollRequest) error {
				return a.client.Unenroll(n.b.Context(), r.UID)
			})
			all = append(all, c)
		}
	}
	return all
}

// each does something with each pod, and returns how long each took, sorted, and all of them.
func (n *node) each(requests []api.EnrollRequest, width int, do func(api.EnrollRequest) error) (each []time.Duration, all time.Duration) {
	n.b.Helper()
	each = make([]time.Duration, len(requests))
	start := time.Now()
	var group errgroup.Group
	group.SetLimit(width)
	for i, r := range requests {
		group.Go(func() error {
			start := time.Now()
			defer func() { each[i] = time.Since(start) }()
			return do(r)
		})
	}
	if err := group.Wait(); err != nil {
		n.b.Fatal(err)
	}
	all = time.Since(start)
	slices.Sort(each)
	return each, all
}

// hop is what a captured pod's connections get, by way of the proxy.
type hop struct {
	pods     int
	connects float64 // per second, one after another, each with a line from the app
	answers  float64 // per second, on one connection, of one byte
}

// measureHop has the first pod connect to an app outside.
func (n *node) measureHop(pods int) hop {
	n.b.Helper()
	app, err := n.Outside.ServeApp(8080, bed.AppOptions{})
	if err != nil {
		n.b.Fatal(err)
	}
	defer func() { _ = app.Close() }()
	dial := func() (*net.TCPConn, error) {
		c, err := n.pods[0].Dial(n.b.Context(), bed.DialSpec{Remote: netip.AddrPortFrom(n.Outside.V4, app.Port)})
		if err == nil {
			_, err = bed.ReadIdentity(c)
		}
		return c, err
	}
	echo, err := dial()
	if err != nil {
		n.b.Fatal(err)
	}
	defer func() { _ = echo.Close() }()
	var connects, answers []float64
	for range hopRounds {
		connects = append(connects, n.rate(func() error {
			c, err := dial()
			if err != nil {
				return err
			}
			return errors.Join(c.SetLinger(0), c.Close())
		}))
		var one [1]byte
		answers = append(answers, n.rate(func() error {
			if _, err := echo.Write(one[:]); err != nil {
				return err
			}
			_, err := io.ReadFull(echo, one[:])
			return err
		}))
	}
	slices.Sort(connects)
	slices.Sort(answers)
	return hop{pods, connects[hopRounds/2], answers[hopRounds/2]}
}

// rate is how often something can be done in a second.
func (n *node) rate(do func() error) float64 {
	n.b.Helper()
	count := 0
	start := time.Now()
	for time.Since(start) < hopTime {
		if err := do(); err != nil {
			n.b.Fatal(err)
		}
		count++
	}
	return float64(count) / time.Since(start).Seconds()
}

// kernelMemory is what the kernel says it has for maps, and for the programs of pods, in bytes.
type kernelMemory struct{ maps, programs uint64 }

func (n *node) kernelMemory() kernelMemory {
	n.b.Helper()
	var m kernelMemory
	pins, err := filepath.Glob(filepath.Join(n.BPFFS, "maps", "*"))
	if err != nil {
		n.b.Fatal(err)
	}
	for _, pin := range pins {
		opened, err := ebpf.LoadPinnedMap(pin, nil)
		if err != nil {
			n.b.Fatal(err)
		}
		info, err := opened.Info()
		_ = opened.Close()
		if err != nil {
			n.b.Fatal(err)
		}
		size, _ := info.Memlock()
		m.maps += size
	}
	for id, err := ebpf.ProgramGetNextID(0); err == nil; id, err = ebpf.ProgramGetNextID(id) {
		prog, err := ebpf.NewProgramFromID(id)
		if err != nil {
			continue // gone
		}
		info, err := prog.Info()
		_ = prog.Close()
		if err != nil {
			n.b.Fatal(err)
		}
		if info.Name == bpf.RedirectorProgRedirSteer || info.Name == bpf.RedirectorProgRedirSeal {
			size, _ := info.Memlock()
			m.programs += size
		}
	}
	return m
}

// report writes the results as Markdown, if the environment says where.
func report(b *testing.B, rows [][2]string, crowds []crowd, hops []hop) {
	b.Helper()
	name := os.Getenv(outVariable)
	if name == "" {
		return
	}
	var s strings.Builder
	fmt.Fprintf(&s, "# A node with many pods, measured\n\nMade by `make bench PKG=./test/scale` with `%s`: commit %s, %s, %s.\n\n",
		outVariable, os.Getenv(commitVariable), machine(), time.Now().UTC().Format(time.RFC3339))
	fmt.Fprint(&s, "| | measured |\n|---|---:|\n")
	for _, r := range rows {
		fmt.Fprintf(&s, "| %s | %s |\n", r[0], r[1])
	}
	fmt.Fprint(&s, "\nEnrolments and removals by the agent's API, the request included, while no proxy runs; in milliseconds:\n\n"+
		"| pods | at once | enrol p50 | p99 | all | unenrol p50 | p99 | all |\n|---:|---:|---:|---:|---:|---:|---:|---:|\n")
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	for _, c := range crowds {
		p := func(all []time.Duration, percent int) float64 { return ms(all[min(len(all)-1, len(all)*percent/100)]) }
		fmt.Fprintf(&s, "| %d | %d | %.2f | %.2f | %.1f | %.2f | %.2f | %.1f |\n", c.pods, c.atOnce,
			p(c.enrol, 50), p(c.enrol, 99), ms(c.enrolAll), p(c.unenrol, 50), p(c.unenrol, 99), ms(c.rmAll))
	}
	fmt.Fprint(&s, "\nConnections of one pod by way of the proxy:\n\n| enrolled pods | connections/s | answers/s on one |\n|---:|---:|---:|\n")
	for _, h := range hops {
		fmt.Fprintf(&s, "| %d | %.0f | %.0f |\n", h.pods, h.connects, h.answers)
	}
	fmt.Fprint(&s, "\nHow it is measured is in [method.md](method.md), and what was tried in [tried.md](tried.md).\n")
	if err := os.WriteFile(name, []byte(s.String()), 0o644); err != nil {
		b.Fatal(err)
	}
}

// machine names processor, cores, kernel and the load of the last minute.
func machine() string {
	read := func(file string) string {
		content, err := os.ReadFile(file)
		if err != nil {
			return "unknown"
		}
		return strings.TrimSpace(string(content))
	}
	cpu := "an unknown processor"
	lines := bufio.NewScanner(strings.NewReader(read("/proc/cpuinfo")))
	for lines.Scan() {
		if name, ok := strings.CutPrefix(lines.Text(), "model name"); ok {
			cpu = strings.TrimLeft(name, "\t :")
			break
		}
	}
	load, _, _ := strings.Cut(read("/proc/loadavg"), " ")
	return fmt.Sprintf("kernel %s, %d cores of %s, load %s", read("/proc/sys/kernel/osrelease"), runtime.NumCPU(), cpu, load)
}
