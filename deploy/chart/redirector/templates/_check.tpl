{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}

{{- /* What the schema cannot say, each with the value's name. */ -}}
{{- define "redirector.check" -}}
{{- $v := .Values -}}
{{- $s := include "redirector.settings" . | fromYaml -}}
{{- if and (hasKey $v.ambient "enabled") (not $v.ambient.enabled) -}}
{{- fail "ambient.enabled: false: this chart is for nothing else; leave it out, or do not install the chart" -}}
{{- end -}}
{{- if and (not $s.chained) $v.istioOwnedCNIConfig -}}
{{- fail "istioOwnedCNIConfig: true: it needs chained: true" -}}
{{- end -}}
{{- if and $v.istioOwnedCNIConfigFileName (not $v.istioOwnedCNIConfig) -}}
{{- fail "istioOwnedCNIConfigFileName: it needs istioOwnedCNIConfig: true" -}}
{{- end -}}
{{- if and (eq $s.provider "multus") $s.chained -}}
{{- fail "provider: multus: it needs chained: false" -}}
{{- end -}}
{{- if and $v.metrics.podMonitor.enabled $v.metrics.serviceMonitor.enabled -}}
{{- fail "metrics.podMonitor.enabled and metrics.serviceMonitor.enabled: with both, all is counted twice; choose one" -}}
{{- end -}}
{{- if and (not $v.metrics.enabled) (or $v.metrics.podMonitor.enabled $v.metrics.serviceMonitor.enabled) -}}
{{- fail "metrics.enabled: false: metrics.podMonitor and metrics.serviceMonitor need metrics" -}}
{{- end -}}
{{- if eq (int $v.health.port) (int $v.metrics.port) -}}
{{- fail (printf "health.port and metrics.port: both are %d" (int $v.health.port)) -}}
{{- end -}}
{{- if not $s.logLevel -}}
{{- fail "logging.level: must be debug, info, warn or error, or a list of istio's scopes with their levels" -}}
{{- end -}}
{{- $strategy := $v.updateStrategy.rollingUpdate | default dict -}}
{{- if and (hasKey $strategy "maxSurge") (not (has (toString $strategy.maxSurge) (list "0" "0%"))) -}}
{{- fail "updateStrategy.rollingUpdate.maxSurge: must be 0: one agent has the node; the kernel steers on while there is none" -}}
{{- end -}}
{{- range $name, $_ := $v.env -}}
{{- if has $name (list "NODE_NAME" "POD_NAME" "POD_NAMESPACE") -}}
{{- fail (printf "env.%s: the chart sets it" $name) -}}
{{- end -}}
{{- end -}}
{{- if .Chart.IsRoot -}}
{{- $known := list "hub" "tag" "variant" "imagePullPolicy" "imagePullSecrets" "logging" "logAsJson" "defaultResources" "networkPolicy" "nativeNftables" "resourceScope" "platform" -}}
{{- range $name, $_ := $v.global -}}
{{- if not (has $name $known) -}}
{{- fail (printf "global.%s: there is no such value; there are %s" $name (join ", " $known)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Values of istio-cni that are set and change nothing here, one a line. */ -}}
{{- define "redirector.withoutEffect" -}}
{{- $v := .Values -}}
{{- range $name := list "tag" "variant" "profile" "compatibilityVersion" "ownerName" "repair" -}}
{{- if hasKey $v $name }}
{{ $name }}
{{- end -}}
{{- end -}}
{{- if kindIs "string" $v.image }}
image
{{- end -}}
{{- range $name := list "ipv6" "reconcileIptablesOnStartup" "shareHostNetworkNamespace" "enableAmbientDetectionRetry" "configDir" -}}
{{- if hasKey $v.ambient $name }}
ambient.{{ $name }}
{{- end -}}
{{- end -}}
{{- range $name := list "tag" "variant" "nativeNftables" -}}
{{- if hasKey ($v.global | default dict) $name }}
global.{{ $name }}
{{- end -}}
{{- end -}}
{{- end -}}
