// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"
)

// mutePeer misbehaves, one session after the other.
type mutePeer struct {
	cfg      *Config
	sessions int
}

func (m *mutePeer) session(ctx context.Context, c *zdsConn) (spoke bool, err error) {
	m.sessions++
	atOnce := m.sessions%2 == 1
	switch m.cfg.Mute {
	case MuteHello:
		return false, untilClosed(c)
	case MuteGarbage:
		if atOnce {
			return false, errors.Join(sendGarbage(c), untilClosed(c))
		}
	case MuteHuge:
		if atOnce {
			return false, errors.Join(sendHuge(c), untilClosed(c))
		}
	default:
	}

	if err := c.sendHello(); err != nil {
		return false, err
	}
	for {
		r, err := c.recv()
		if err != nil {
			return false, err
		}
		if r.add != nil {
			_ = closeFD(r.netnsFD)
		}
		switch m.cfg.Mute {
		case MuteAck:
			return false, untilClosed(c)
		case MuteHuge:
			return false, errors.Join(sendHuge(c), untilClosed(c))
		case MuteLate:
			select {
			case <-ctx.Done():
				return false, ctx.Err()
			case <-time.After(lateAck):
			}
		case MuteVanish:
			if r.add != nil {
				return false, errors.New("vanished")
			}
		default:
		}
		if err := c.sendAck(nil); err != nil {
			return false, err
		}
		if m.cfg.Mute == MuteGarbage && r.snapshotSent {
			return false, errors.Join(sendGarbage(c), untilClosed(c))
		}
	}
}

// untilClosed waits for the agent to close the connection.
func untilClosed(c *zdsConn) error {
	for {
		r, err := c.recv()
		if err != nil {
			return err
		}
		if r.add != nil {
			_ = closeFD(r.netnsFD)
		}
	}
}

func sendGarbage(c *zdsConn) error {
	b := make([]byte, 500)
	if _, err := io.ReadFull(rand.Reader, b); err != nil {
		return err
	}
	b[0] = 0x07 // a wire type that does not exist: by no chance a message
	_, err := c.Write(b)
	return err
}

// sendHuge sends 10 MB, or the largest message that the kernel takes.
func sendHuge(c *zdsConn) error {
	const size = 10 << 20
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var optErr error
	if err := raw.Control(func(fd uintptr) {
		optErr = setsockopt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 2*size, "SO_SNDBUFFORCE")
	}); err != nil || optErr != nil {
		return errors.Join(err, optErr)
	}
	for n := size; n > maxMessage; n /= 2 {
		_, err = c.Write(make([]byte, n))
		if !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EMSGSIZE) {
			return err
		}
	}
	return fmt.Errorf("send a huge message: %w", err)
}
