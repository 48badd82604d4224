// SPDX-License-Identifier: Apache-2.0

// Package agent runs the parts of an agent (dataplane, ZDS server, enroller) in the process of a test.
package agent

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/zds"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// Agent is an agent on a bed.
type Agent struct {
	*enroll.Enroller
	Datapath *loader.Datapath
	Proxies  *zds.Server

	tb      testing.TB
	cancel  context.CancelFunc
	served  chan error
	stopped bool
}

// Start runs an agent on the bed until Stop, or the end of the test. On a kernel that lacks a feature the test is skipped,
// with the feature's name. observe may be nil; see enroll.Config.
func Start(tb testing.TB, b *bed.Bed, observe func(step string, took time.Duration)) *Agent {
	tb.Helper()
	datapath, err := loader.Open(loader.Options{BPFFS: b.BPFFS, Cgroup: b.Cgroup})
	if _, lacks := errors.AsType[*loader.FeatureError](err); lacks {
		tb.Skip(err)
	}
	if err != nil {
		tb.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(tb.Output(), nil))
	// The test's own sockets may play the proxy. That the mark alone is not enough, and what the host side does, is tested
	// with an agent that is a process on the bed's node.
	if err := datapath.Maps().SetConfig(maps.Config{ProxyIdentity: maps.ProxyIdentityMark}); err != nil {
		tb.Fatal(err)
	}
	proxies, err := zds.Listen(zds.Options{Path: b.ZDSSocket, Log: log})
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	a := &Agent{
		Enroller: enroll.New(enroll.Config{
			Datapath: datapath,
			Proxies:  proxies,
			StateDir: filepath.Join(b.RunDir, "pods"),
			Log:      log,
			Observe:  observe,
		}),
		Datapath: datapath,
		Proxies:  proxies,
		tb:       tb,
		cancel:   cancel,
		served:   make(chan error, 1),
	}
	go func() { a.served <- proxies.Serve(ctx) }()
	tb.Cleanup(a.Stop)
	if err := a.Restore(ctx); err != nil {
		tb.Fatal(err)
	}
	return a
}

// Stop ends the agent; what it has put into the kernel stays. It may be called again.
func (a *Agent) Stop() {
	if a.stopped {
		return
	}
	a.stopped = true
	a.Close()
	a.cancel()
	if err := errors.Join(<-a.served, a.Datapath.Close()); err != nil {
		a.tb.Error(err)
	}
}

// Spec describes a pod of a bed as Enroll wants it. Its UID is "uid-" and the pod's name.
func Spec(pod *bed.NS) enroll.Spec {
	s := enroll.Spec{UID: "uid-" + pod.Name, Namespace: "default", Name: pod.Name, ServiceAccount: "default", NetNS: pod.Path}
	for _, ip := range []netip.Addr{pod.V4, pod.V6} {
		if ip.IsValid() {
			s.IPs = append(s.IPs, ip)
		}
	}
	return s
}
