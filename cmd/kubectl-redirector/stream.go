// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"net/url"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/streaming/pkg/httpstream"
)

// newExecutor makes streams as kubectl does: by WebSocket, or by SPDY where a server, or a proxy on the way, does not know that.
func newExecutor(config *rest.Config, target *url.URL) (remotecommand.Executor, error) {
	spdy, err := remotecommand.NewSPDYExecutor(config, http.MethodPost, target)
	if err != nil {
		return nil, err
	}
	webSocket, err := remotecommand.NewWebSocketExecutor(config, http.MethodGet, target.String())
	if err != nil {
		return nil, err
	}
	return remotecommand.NewFallbackExecutor(webSocket, spdy, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
}
