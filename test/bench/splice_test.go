// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// pair is a connection within a namespace, with both of its ends.
type pair struct{ client, server *net.TCPConn }

// connectedPair makes one to the port that is spliced.
func connectedPair(t *testing.T, ns *bed.NS) pair {
	t.Helper()
	var p pair
	at := net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), splicedPort))
	err := ns.Do(func() error {
		l, err := net.ListenTCP("tcp4", at)
		if err != nil {
			return err
		}
		defer l.Close()
		if p.client, err = net.DialTCP("tcp4", nil, at); err != nil {
			return err
		}
		p.server, err = l.AcceptTCP()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = p.client.Close(), p.server.Close() })
	for _, c := range []*net.TCPConn{p.client, p.server} {
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	}
	return p
}

// control calls do with a connection's socket.
func control(c *net.TCPConn, do func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	return errors.Join(raw.Control(func(fd uintptr) { result = do(int(fd)) }), result)
}

// meanings are things that programs do with a connection, and what comes of it in words.
var meanings = map[string]func(p pair) string{
	"a hundred megabytes arrive as they were sent": func(p pair) string {
		const size = 100 << 20
		sent, got := sha256.New(), sha256.New()
		go func() {
			random := rand.NewChaCha8([32]byte{1})
			_, _ = io.CopyN(io.MultiWriter(p.client, sent), random, size)
			_ = p.client.CloseWrite()
		}()
		n, err := io.Copy(got, p.server)
		return fmt.Sprint(n == size, err, slices.Equal(sent.Sum(nil), got.Sum(nil)))
	},
	"after half a close the other half works": func(p pair) string {
		_, err := p.client.Write([]byte("question"))
		err = errors.Join(err, p.client.CloseWrite())
		asked, errAsked := io.ReadAll(p.server)
		_, errAnswer := p.server.Write([]byte("answer"))
		err = errors.Join(err, errAsked, errAnswer, p.server.Close())
		answered, errEnd := io.ReadAll(p.client)
		return fmt.Sprintf("%s %s %v", asked, answered, errors.Join(err, errEnd))
	},
	"a reset with data unread is told": func(p pair) string {
		_, err := p.client.Write([]byte("unread"))
		err = errors.Join(err, p.client.SetLinger(0), p.client.Close())
		time.Sleep(50 * time.Millisecond)
		_, errRead := io.ReadAll(p.server)
		return fmt.Sprint(err, errors.Is(errRead, unix.ECONNRESET))
	},
	"urgent data is apart from the rest": func(p pair) string {
		err := control(p.client, func(fd int) error {
			return errors.Join(unix.Sendto(fd, []byte("ab"), 0, nil), unix.Sendto(fd, []byte("!"), unix.MSG_OOB, nil), unix.Sendto(fd, []byte("cd"), 0, nil))
		})
		time.Sleep(50 * time.Millisecond)
		var urgent []byte
		errUrgent := control(p.server, func(fd int) error {
			b := make([]byte, 1)
			n, _, err := unix.Recvfrom(fd, b, unix.MSG_OOB)
			urgent = b[:max(n, 0)]
			return err
		})
		err = errors.Join(err, p.client.CloseWrite())
		rest, errRest := io.ReadAll(p.server)
		return fmt.Sprintf("%q %v, %q %v", urgent, errUrgent, rest, errors.Join(err, errRest))
	},
	"a socket tells how much there is to read": func(p pair) string {
		_, err := p.client.Write(make([]byte, 1000))
		time.Sleep(50 * time.Millisecond)
		n := 0
		err = errors.Join(err, control(p.server, func(fd int) (err error) {
			n, err = unix.IoctlGetInt(fd, unix.TIOCINQ)
			return err
		}))
		return fmt.Sprint(n, err)
	},
	"a socket tells how much it has sent": func(p pair) string {
		_, err := p.client.Write(make([]byte, 1000))
		time.Sleep(50 * time.Millisecond)
		var sent uint64
		err = errors.Join(err, control(p.client, func(fd int) error {
			info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
			if err == nil {
				sent = info.Bytes_acked - 1 // the SYN counts
			}
			return err
		}))
		return fmt.Sprint(sent, err)
	},
	"a reader that lets it pile up holds the writer back": func(p pair) string {
		err := control(p.server, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 4096) })
		_ = p.client.SetWriteDeadline(time.Now().Add(time.Second))
		n := 0
		for errWrite := error(nil); errWrite == nil && n < 256<<20; {
			var wrote int
			wrote, errWrite = p.client.Write(make([]byte, 64<<10))
			n += wrote
		}
		return fmt.Sprint(err, n < 64<<20)
	},
}

// What splicing changes besides the speed. docs/performance/splice.md has the same list: it is why it is an experiment.
func TestWhatSplicingChanges(t *testing.T) {
	outcomes := func(t *testing.T, splicing bool) map[string]string {
		t.Helper()
		b := bed.ForTest(t, bed.Options{})
		if err := b.JoinCgroup(); err != nil {
			t.Fatal(err)
		}
		if splicing {
			s, err := newSplice(b.Cgroup)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = s.Close() })
		}
		ns, err := b.Pod("pod", bed.PodOptions{})
		if err != nil {
			t.Fatal(err)
		}
		all := map[string]string{}
		for name, do := range meanings {
			all[name] = do(connectedPair(t, ns))
		}
		return all
	}
	plain, spliced := map[string]string{}, map[string]string{}
	// Each in a bed of its own.
	t.Run("plain", func(t *testing.T) { maps.Copy(plain, outcomes(t, false)) })
	t.Run("spliced", func(t *testing.T) { maps.Copy(spliced, outcomes(t, true)) })
	var changed []string
	for _, name := range slices.Sorted(maps.Keys(plain)) {
		t.Logf("%s: %s; spliced: %s", name, plain[name], spliced[name])
		if plain[name] != spliced[name] {
			changed = append(changed, name)
		}
	}
	want := []string{
		"a reader that lets it pile up holds the writer back",
		"a socket tells how much it has sent",
		"urgent data is apart from the rest",
	}
	if diff := cmp.Diff(want, changed); diff != "" {
		t.Errorf("splicing changes (-documented +seen):\n%s", diff)
	}
}
