// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/redirector-dataplane/redirector/cmd/redirector/app"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// The main thread stays where it is, for /proc/self to mean the host.
func init() { runtime.LockOSThread() }

// Environment variables: what a process of the test binary is, how long to go on, and from which seed.
const (
	roleVariable = "TEST_SOAK_ROLE"
	timeVariable = "SOAK"
	seedVariable = "SEED"
)

// patience is how long what should happen may take before it counts as not happening.
const patience = 10 * time.Second

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleVariable); role {
	case "":
		os.Exit(m.Run())
	case "nodeproxy":
		os.Exit(nodeproxy.Main(os.Args[1:]))
	case "redirector":
		os.Exit(app.Main(context.Background(), os.Args[1:], app.Env{
			Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv, Version: "test",
		}))
	default:
		fmt.Fprintf(os.Stderr, "unknown role %q\n", role)
		os.Exit(2)
	}
}

// seed is the one that was asked for, or a new one.
func seed() (uint64, error) {
	given := os.Getenv(seedVariable)
	if given == "" {
		return rand.Uint64(), nil
	}
	n, err := strconv.ParseUint(given, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s=%s is no seed: give a number", seedVariable, given)
	}
	return n, nil
}

// Whatever happens to the node, no connection of an enrolled pod gets past the proxy, none is lost that nothing has happened to,
// and in the end nothing is left.
func TestSoak(t *testing.T) {
	given := os.Getenv(timeVariable)
	if testing.Short() || given == "" {
		t.Skip("a soak test: make soak runs it")
	}
	length, err := time.ParseDuration(given)
	if err == nil && length <= 0 {
		err = errors.New("it must be more than nothing")
	}
	if err != nil {
		t.Fatalf("%s=%s is no time to go on for: %v", timeVariable, given, err)
	}
	from, err := seed()
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("soak: %v from SEED=%d\n", length, from)
	s := newSoak(t, from)
	defer s.report()
	s.begin()
	for end := time.Now().Add(length); time.Now().Before(end) && !s.failed(); {
		s.act()
	}
	s.settle()
	s.wantFlat()
	s.wantNothingLeft()
}
