// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"time"
)

// addPath is where a pod is reported. It and the JSON are istio-cni's, so that either's plugin can talk to either's agent.
const addPath = "/cmdadd"

// maxBody bounds requests and answers, in bytes.
const maxBody = 1 << 20

// addBody is a request. PodUID and Timeout are ours: istio-cni leaves them out, and ignores them.
type addBody struct {
	Netns        string
	PodName      string
	PodNamespace string
	PodUID       string `json:",omitempty"`
	IPs          []ipBody
	// Timeout is in how long an answer is of use, in nanoseconds; 0: not known.
	Timeout time.Duration `json:",omitempty"`
}

// ipBody is one address of a CNI result. Address is written as encoding/json writes it: the mask in base64.
type ipBody struct {
	Interface *int `json:",omitempty"`
	Address   net.IPNet
	Gateway   net.IP `json:",omitempty"`
}

// addAnswer is the body of an answer with status 200.
type addAnswer struct {
	// Enrolled says whether the pod is captured. If not, it may start as it is.
	Enrolled bool `json:"enrolled"`
	// Reason is why it is not.
	Reason string `json:"reason,omitempty"`
}

// parseAdd reads a request, and says what is wrong with it. timeout is in how long an answer is of use, 0 if not known.
func parseAdd(data []byte) (req AddRequest, timeout time.Duration, err error) {
	var body addBody
	if err := json.Unmarshal(data, &body); err != nil {
		return AddRequest{}, 0, fmt.Errorf("read the request: %w", err)
	}
	switch {
	case body.PodName == "" || body.PodNamespace == "":
		return AddRequest{}, 0, errors.New("the request names no pod: send PodName and PodNamespace")
	case !filepath.IsAbs(body.Netns):
		return AddRequest{}, 0, fmt.Errorf("bad Netns %q: send the absolute path of the pod's network namespace", body.Netns)
	}
	req = AddRequest{Netns: body.Netns, PodName: body.PodName, PodNamespace: body.PodNamespace, PodUID: body.PodUID}
	for _, ip := range body.IPs {
		addr, ok := netip.AddrFromSlice(ip.Address.IP)
		if !ok {
			return AddRequest{}, 0, fmt.Errorf("bad address %q of pod %s/%s: send 4 or 16 bytes", ip.Address.IP, body.PodNamespace, body.PodName)
		}
		req.IPs = append(req.IPs, addr.Unmap())
	}
	return req, body.Timeout, nil
}
