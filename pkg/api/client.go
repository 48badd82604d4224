// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/explain"
	"github.com/redirector-dataplane/redirector/pkg/sockfile"
)

// maxAnswer bounds what is read of an answer, in bytes: as many pods as the maps hold, with room.
const maxAnswer = 64 << 20

// ErrNoAgent says that no agent listens on the socket.
var ErrNoAgent = errors.New("no agent answers")

// Client asks an agent. What the agent refuses comes back as an *Error. Its methods may be called from several goroutines.
type Client struct {
	socket string
	http   http.Client
}

// NewClient returns a client of the agent that listens on the socket at that path. It does not connect yet.
func NewClient(socket string) *Client {
	c := &Client{socket: socket}
	c.http = http.Client{
		Transport: &http.Transport{
			DialContext:       c.dial,
			DisableKeepAlives: true, // the command line asks once
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return c
}

// Enroll has a pod enrolled and returns what is so for it then.
func (c *Client) Enroll(ctx context.Context, request EnrollRequest) (enroll.Pod, error) {
	var pod enroll.Pod
	body, err := json.Marshal(request)
	if err != nil {
		return pod, fmt.Errorf("write the request: %w", err)
	}
	err = c.do(ctx, http.MethodPost, "/v1/pods", body, &pod)
	return pod, err
}

// Set has settings of an enrolled pod changed, and returns what is so for it then.
func (c *Client) Set(ctx context.Context, uid string, request SettingsRequest) (enroll.Pod, error) {
	var pod enroll.Pod
	path, err := podPath(uid)
	if err != nil {
		return pod, err
	}
	body, err := json.Marshal(request)
	if err != nil {
		return pod, fmt.Errorf("write the request: %w", err)
	}
	err = c.do(ctx, http.MethodPost, path+"/settings", body, &pod)
	return pod, err
}

// Unenroll has a pod unenrolled. That it is not enrolled is no error.
func (c *Client) Unenroll(ctx context.Context, uid string) error {
	path, err := podPath(uid)
	if err != nil {
		return err
	}
	return c.do(ctx, http.MethodDelete, path, nil, nil)
}

// Pods lists the enrolled pods by namespace and name.
func (c *Client) Pods(ctx context.Context) ([]enroll.Pod, error) {
	var pods []enroll.Pod
	err := c.do(ctx, http.MethodGet, "/v1/pods", nil, &pods)
	return pods, err
}

// Pod describes one enrolled pod.
func (c *Client) Pod(ctx context.Context, uid string) (enroll.Pod, error) {
	var pod enroll.Pod
	path, err := podPath(uid)
	if err != nil {
		return pod, err
	}
	err = c.do(ctx, http.MethodGet, path, nil, &pod)
	return pod, err
}

// Inspect asks for all about one enrolled pod.
func (c *Client) Inspect(ctx context.Context, uid string) (Inspection, error) {
	var found Inspection
	path, err := podPath(uid)
	if err != nil {
		return found, err
	}
	err = c.do(ctx, http.MethodGet, path+"/inspection", nil, &found)
	return found, err
}

// Verify has one enrolled pod checked with real packets.
func (c *Client) Verify(ctx context.Context, uid string) (Verification, error) {
	var v Verification
	path, err := podPath(uid)
	if err != nil {
		return v, err
	}
	err = c.do(ctx, http.MethodPost, path+"/verification", nil, &v)
	return v, err
}

// Explain asks what becomes of a connection of the pod with that UID; the query's Cookie and Interface are not looked at, for the agent
// finds them by UID and name.
func (c *Client) Explain(ctx context.Context, uid string, q explain.Query) (explain.Answer, error) {
	var answer explain.Answer
	values := url.Values{"pod": {uid}}
	for name, value := range map[string]string{"by": string(q.By), "protocol": string(q.Protocol), "via": q.Via} {
		if value != "" {
			values.Set(name, value)
		}
	}
	for name, a := range map[string]netip.AddrPort{"from": q.From, "to": q.To} {
		if a.Addr().IsValid() {
			values.Set(name, a.String())
		}
	}
	err := c.do(ctx, http.MethodGet, "/v1/explain?"+values.Encode(), nil, &answer)
	return answer, err
}

// Status asks the agent about itself and the node.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var status Status
	err := c.do(ctx, http.MethodGet, "/v1/status", nil, &status)
	return status, err
}

// podPath keeps a UID like ".." from leading elsewhere.
func podPath(uid string) (string, error) {
	if err := enroll.ValidateUID(uid); err != nil {
		return "", invalid(err)
	}
	return "/v1/pods/" + url.PathEscape(uid), nil
}

// dialError says why there is no connection to the agent.
type dialError struct{ error }

// Unwrap returns what is said.
func (e *dialError) Unwrap() error { return e.error }

func (c *Client) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	if len(c.socket) > sockfile.MaxPath {
		return nil, &dialError{fmt.Errorf("agent socket %s: the path has %d bytes, a Unix socket's has %d at most: use a shorter run-dir",
			c.socket, len(c.socket), sockfile.MaxPath)}
	}
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", c.socket)
	switch {
	case err == nil:
		return conn, nil
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ECONNREFUSED):
		err = fmt.Errorf("%w at %s: start one with `redirector agent --standalone`, or name its --run-dir", ErrNoAgent, c.socket)
	case errors.Is(err, fs.ErrPermission):
		err = fmt.Errorf("the agent at %s talks to root only: run this as root", c.socket)
	default:
		err = fmt.Errorf("connect to the agent at %s: %w", c.socket, err)
	}
	return nil, &dialError{err}
}

// refusal is the *Error that an agent has answered with, or says that it is none. request is in words.
func (c *Client) refusal(response *http.Response, answer []byte, request string) error {
	refused := Error{Status: response.StatusCode}
	if json.Unmarshal(answer, &refused) != nil || refused.Message == "" {
		return fmt.Errorf("agent at %s: it answers %q to %s: is it of another version?", c.socket, response.Status, request)
	}
	return &refused
}

func (c *Client) do(ctx context.Context, method, path string, body []byte, into any) error {
	// The host is not looked at: the transport knows but one way.
	request, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("ask the agent: %w", err)
	}
	response, err := c.http.Do(request)
	if err != nil {
		return c.explain(ctx, err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	if err != nil {
		return c.explain(ctx, err)
	}
	if response.StatusCode/100 != 2 {
		return c.refusal(response, answer, method+" "+path)
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(answer, into); err != nil {
		return fmt.Errorf("agent at %s: read its answer to %s %s (is it of another version?): %w", c.socket, method, path, err)
	}
	return nil
}

// explain takes off what net/http puts around an error, and says what it means.
func (c *Client) explain(ctx context.Context, err error) error {
	if dial := (*dialError)(nil); errors.As(err, &dial) {
		return dial
	}
	if wrapped := (*url.Error)(nil); errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fmt.Errorf("the agent at %s does not answer in time: see its log: %w", c.socket, ctx.Err())
	case ctx.Err() != nil:
		return fmt.Errorf("given up before the agent at %s had answered: see `redirector pods` for what has become of it: %w", c.socket, ctx.Err())
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, unix.ECONNRESET):
		return fmt.Errorf("the agent at %s went away before it had answered: see its log: %w", c.socket, err)
	default:
		return fmt.Errorf("who answers at %s is no agent of this version: %w", c.socket, err)
	}
}
