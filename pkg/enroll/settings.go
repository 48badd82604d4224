// SPDX-License-Identifier: Apache-2.0

package enroll

// Settings is what a pod may have its own way. The zero value is what a pod has that asks for nothing.
type Settings struct {
	// BypassInbound lets peers' connections reach the app without the proxy. The mesh tunnel still ends at the proxy.
	BypassInbound bool `json:"bypassInbound,omitempty"`
	// DNSCapture sends the pod's DNS queries to the proxy, or does not; nil: as Config.DNSCapture says.
	DNSCapture *bool `json:"dnsCapture,omitempty"`
}
