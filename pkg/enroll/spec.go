// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/redirector-dataplane/redirector/pkg/maps"
)

// Spec says which pod to enrol.
type Spec struct {
	// UID names the pod, to the proxy and in the paths of its pins: letters, digits, '-' and '_', at most
	// maps.UIDMax bytes. Kubernetes' UIDs are such.
	UID string `json:"uid"`
	// Namespace, Name and ServiceAccount are what the proxy derives the pod's identity from.
	Namespace      string `json:"namespace"`
	Name           string `json:"name"`
	ServiceAccount string `json:"serviceAccount"`
	// NetNS is the path of the pod's network namespace.
	NetNS string `json:"netns"`
	// IPs are addresses of which the namespace must own at least one; none: any namespace will do.
	IPs []netip.Addr `json:"ips,omitempty"`
	// Settings are what the pod asks for.
	Settings Settings `json:"settings,omitzero"`
}

// uidPattern allows what may be the name of a directory of pins. The BPF filesystem allows no '.' there.
var uidPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]*$`)

// labelPattern is RFC 1123's: what Kubernetes allows in the names of namespaces; names of pods and service accounts may
// have several, joined by dots.
var (
	labelPattern     = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	subdomainPattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$`)
)

// ValidateUID says what is wrong with a UID, if anything.
func ValidateUID(uid string) error {
	if len(uid) > maps.UIDMax || !uidPattern.MatchString(uid) {
		return fmt.Errorf("bad UID %q: use at most %d letters, digits, '-' and '_', the first a letter or digit", uid, maps.UIDMax)
	}
	return nil
}

// Validate says what is wrong with the pod's names, addresses and settings, if anything.
func (s *Spec) Validate() error {
	if err := ValidateUID(s.UID); err != nil {
		return err
	}
	if !labelPattern.MatchString(s.Namespace) {
		return fmt.Errorf("bad namespace %q: use a Kubernetes namespace's name, of lower-case letters, digits and '-'", s.Namespace)
	}
	if !subdomainPattern.MatchString(s.Name) {
		return fmt.Errorf("bad pod name %q: use a Kubernetes name, of lower-case letters, digits, '-' and '.'", s.Name)
	}
	if !subdomainPattern.MatchString(s.ServiceAccount) {
		return fmt.Errorf("bad service account %q: use a Kubernetes name, of lower-case letters, digits, '-' and '.'", s.ServiceAccount)
	}
	if !filepath.IsAbs(s.NetNS) {
		return fmt.Errorf("bad network namespace path %q: name an absolute path, as in /run/netns/NAME or /proc/PID/ns/net", s.NetNS)
	}
	for _, ip := range s.IPs {
		if !ip.IsValid() {
			return errors.New("bad IP: one of the pod's addresses is empty")
		}
		if ip.IsUnspecified() || ip.IsMulticast() || ip.IsLoopback() {
			return fmt.Errorf("bad IP %s: a pod's own address is neither unspecified nor multicast nor loopback", ip)
		}
	}
	if err := s.Settings.Validate(); err != nil {
		return err
	}
	if len(s.IPs) == 0 && slices.Contains(s.Settings.RerouteInterfaces, AutoInterfaces) {
		return fmt.Errorf("bad %s: %s needs to know the pod's addresses: enroll the pod with them", KeyRerouteInterfaces, AutoInterfaces)
	}
	return nil
}

// String names the pod as people do.
func (s *Spec) String() string { return s.Namespace + "/" + s.Name }
