// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
)

func TestHealthKnowsWhatTheAPIServerDoesNotGive(t *testing.T) {
	status := http.StatusOK
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
	// Not by TCP: lo may be down.
	socket := filepath.Join(t.TempDir(), "sock")
	listener, err := new(net.ListenConfig).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server.Listener = listener
	server.Start()
	defer server.Close()
	var h Health
	client := http.Client{Transport: h.Wrap(&http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	})}
	do := func(method, path string, answer int) {
		t.Helper()
		status = answer
		req, err := http.NewRequestWithContext(t.Context(), method, "http://server"+path, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err == nil {
			resp.Body.Close()
		}
	}
	want := func(words ...string) {
		t.Helper()
		err := h.Err()
		if (err == nil) != (len(words) == 0) {
			t.Fatalf("it says %v, want %q", err, words)
		}
		for _, word := range words {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("%q does not say %q", err, word)
			}
		}
	}
	const pods, namespaces = "/api/v1/pods?watch=true", "/api/v1/namespaces"
	const status1 = "/api/v1/namespaces/shop/pods/web/status"

	do("GET", pods, 200)
	want()
	do("GET", pods, 403)
	want("list and watch pods", "403", "service account")
	do("GET", namespaces, 200)
	want("list and watch pods")
	do("GET", pods, 200)
	want()
	do("GET", namespaces, 500)
	want("list and watch namespaces", "500")
	do("GET", namespaces, 410) // it is listed anew
	want()
	do("PATCH", status1, 403)
	do("GET", namespaces, 401)
	want("patch pods/status", "list and watch namespaces")
	do("PATCH", status1, 404)
	do("GET", namespaces, 200)
	want()
	// One that is asked for once says nothing of now, but for the rights.
	do("GET", "/api/v1/namespaces/shop/pods/web", 500)
	do("POST", "/api/v1/namespaces/shop/events", 403)
	do("GET", "/apis/apps/v1/namespaces/shop/daemonsets/x", 403)
	want()
	do("GET", "/api/v1/namespaces/shop/pods/web", 403)
	want("get pods")
	do("GET", "/api/v1/namespaces/shop/pods/web", 404)
	want()

	server.Close()
	do("GET", "/api/v1/namespaces/shop/pods/web", 0)
	want()
	do("GET", pods, 0)
	want("list and watch pods", "no such file")
}
