// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
)

// Health knows what the API server last answered to each kind of request that the agent depends on.
type Health struct {
	mu      sync.Mutex
	failing map[string]string // what is asked for → why it is not had
}

// Wrap has the requests of a transport looked at; see rest.Config.
func (h *Health) Wrap(next http.RoundTripper) http.RoundTripper { return &observed{h, next} }

// Err says what the API server does not give, nil if it gives all.
func (h *Health) Err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.failing) == 0 {
		return nil
	}
	all := make([]string, 0, len(h.failing))
	for what, why := range h.failing {
		all = append(all, what+": "+why)
	}
	slices.Sort(all)
	return errors.New(strings.Join(all, "; "))
}

func (h *Health) note(what, why string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.failing == nil {
		h.failing = map[string]string{}
	}
	if why == "" {
		delete(h.failing, what)
	} else {
		h.failing[what] = why
	}
}

type observed struct {
	health *Health
	next   http.RoundTripper
}

// RoundTrip passes a request on and notes what became of it.
func (o *observed) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := o.next.RoundTrip(r)
	what, repeated := kindOf(r)
	if what == "" {
		return resp, err
	}
	switch {
	case errors.Is(err, context.Canceled):
	case err != nil && repeated:
		o.health.note(what, err.Error())
	case err != nil:
		// It tells nothing that what is asked for all the time does not tell, and may not be asked again.
	case resp.StatusCode == http.StatusUnauthorized || resp.StatusCode == http.StatusForbidden:
		o.health.note(what, fmt.Sprintf("the API server answers %s: look at the rights of the agent's service account", resp.Status))
	case repeated && (resp.StatusCode >= http.StatusInternalServerError || resp.StatusCode == http.StatusTooManyRequests):
		o.health.note(what, "the API server answers "+resp.Status)
	default:
		o.health.note(what, "")
	}
	return resp, err
}

// kindOf says what a request asks for, "" if nothing depends on it, and whether it is asked again until it is had.
func kindOf(r *http.Request) (what string, repeated bool) {
	_, path, ok := strings.Cut(r.URL.Path, "/api/v1/")
	parts := strings.Split(path, "/")
	switch {
	case !ok:
		return "", false
	case r.Method == http.MethodGet && len(parts) == 1 && (parts[0] == "pods" || parts[0] == "namespaces"):
		return "list and watch " + parts[0], true
	case r.Method == http.MethodGet && len(parts) == 2 && parts[0] == "namespaces":
		return "get namespaces", false
	case r.Method == http.MethodGet && len(parts) == 4 && parts[2] == "pods":
		return "get pods", false
	case r.Method == http.MethodPatch && len(parts) == 5 && parts[2] == "pods" && parts[4] == "status":
		return "patch pods/status", false
	default:
		return "", false
	}
}
