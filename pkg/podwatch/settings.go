// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"fmt"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
)

// listAnnotations are those that hold lists, as enroll.Settings.Set reads them, with the settings that they are about.
var listAnnotations = []struct{ annotation, setting string }{
	{annotationReroute, enroll.KeyRerouteInterfaces},
	{annotationPrefix + enroll.KeyExcludeOutboundPorts, enroll.KeyExcludeOutboundPorts},
	{annotationPrefix + enroll.KeyExcludeOutboundCIDRs, enroll.KeyExcludeOutboundCIDRs},
	{annotationPrefix + enroll.KeyExcludeInboundPorts, enroll.KeyExcludeInboundPorts},
}

// SettingsOf reads what a pod asks for in its annotations. bad says, in words, what was asked for and makes no sense; that counts
// as not asked for.
func SettingsOf(pod *corev1.Pod) (s enroll.Settings, bad []string) {
	read := func(key string) *bool {
		text, ok := pod.Annotations[key]
		if !ok {
			return nil
		}
		value, err := strconv.ParseBool(text)
		if err != nil {
			bad = append(bad, fmt.Sprintf("annotation %s has the value %q, and is ignored: write true or false", key, text))
			return nil
		}
		return &value
	}
	if bypass := read(annotationBypassInbound); bypass != nil {
		s.BypassInbound = *bypass
	}
	s.DNSCapture = read(annotationDNSCapture)
	for _, list := range listAnnotations {
		if err := s.Set(list.setting, pod.Annotations[list.annotation]); err != nil {
			bad = append(bad, fmt.Sprintf("annotation %s is ignored: %v", list.annotation, err))
		}
	}
	return s, bad
}
