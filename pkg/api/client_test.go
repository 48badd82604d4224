// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// answering returns the socket of a server that writes the same to everybody, or nothing, and closes or holds the connection.
func answering(t *testing.T, answer string, hold bool) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = conn.Read(make([]byte, 4096))
				_, _ = io.WriteString(conn, answer)
				if hold {
					_, _ = io.Copy(io.Discard, conn)
				}
			}()
		}
	}()
	return path
}

func TestAClientSaysWhatIsWrongWithTheAgent(t *testing.T) {
	stale := filepath.Join(t.TempDir(), "stale")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}

	for name, c := range map[string]struct {
		socket string
		is     error
		words  []string
	}{
		"no socket":      {filepath.Join(t.TempDir(), "none"), ErrNoAgent, []string{"redirector agent --standalone"}},
		"a stale socket": {stale, ErrNoAgent, []string{"redirector agent --standalone"}},
		"a file":         {file, ErrNoAgent, []string{"redirector agent --standalone"}},
		"a long path":    {"/" + strings.Repeat("x", 200), nil, []string{"shorter"}},
		"silence":        {answering(t, "", true), context.DeadlineExceeded, []string{"log"}},
		"a hang-up":      {answering(t, "", false), io.EOF, []string{"log"}},
		"half an answer": {answering(t, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", false), io.ErrUnexpectedEOF, []string{"log"}},
		"no HTTP":        {answering(t, "SSH-2.0-dropbear\r\n", false), nil, []string{"malformed"}},
		"no JSON":        {answering(t, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", false), nil, []string{"another version"}},
		"another server": {answering(t, "HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nhi", false), nil, []string{"404 Not Found", "another version"}},
		"a way elsewhere": {answering(t, "HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n", false), nil,
			[]string{"302 Found", "another version"}},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			_, err := NewClient(c.socket).Status(ctx)
			if err == nil {
				t.Fatal("it went well")
			}
			if c.is != nil && !errors.Is(err, c.is) {
				t.Errorf("%v does not wrap %v", err, c.is)
			}
			for _, word := range append(c.words, c.socket) {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("%q does not say %q", err, word)
				}
			}
		})
	}
}

func TestAClientAsksNothingAboutABadUID(t *testing.T) {
	c := NewClient(answering(t, "", false))
	for _, uid := range []string{"", "..", "a/b", strings.Repeat("x", 100)} {
		wantError(t, c.Unenroll(t.Context(), uid), KindInvalid, http.StatusBadRequest, "UID")
		_, err := c.Pod(t.Context(), uid)
		wantError(t, err, KindInvalid, http.StatusBadRequest, "UID")
	}
}
