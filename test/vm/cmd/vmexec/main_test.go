// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestProfilesAreFoundInTheTestFlags(t *testing.T) {
	for _, tc := range []struct {
		args string
		want []string
	}{
		{"-test.v -test.run=TestX -test.timeout=10m", nil},
		{"-test.coverprofile=/out/c.out -test.trace=t.out", []string{"/out/c.out", "/work/t.out"}},
		{"-test.cpuprofile=cpu -test.outputdir=/prof -test.memprofile=/abs/mem", []string{"/prof/cpu", "/abs/mem"}},
		{"-test.gocoverdir=/tmp/cov", []string{"/tmp/cov/"}},
	} {
		if diff := cmp.Diff(tc.want, profiles(strings.Fields(tc.args), "/work")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.args, diff)
		}
	}
}

func TestOnlyVariablesForGoTestsReachTheGuest(t *testing.T) {
	t.Setenv("GODEBUG", "a=1")
	t.Setenv("TEST_SEED", "7")
	t.Setenv("SECRET", "x")
	env := strings.Join(environment(), "\n") + "\n"
	if !strings.Contains(env, "GODEBUG=a=1\n") || !strings.Contains(env, "TEST_SEED=7\n") {
		t.Errorf("environment lacks a variable:\n%s", env)
	}
	if strings.Contains(env, "SECRET") || strings.Contains(env, "PATH=") {
		t.Errorf("environment has more than it should:\n%s", env)
	}
}
