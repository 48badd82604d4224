{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}

{{- /* What differs between platforms, by name. */ -}}
{{- define "redirector.platforms" -}}
eks: {}
aks: {}
rke2: {}
talos: {}
gke:
  binDir: /home/kubernetes/bin
  quota: true
k3s:
  binDir: /var/lib/rancher/k3s/data/cni
  confDir: /var/lib/rancher/k3s/agent/etc/cni/net.d
k3d:
  binDir: /bin
  confDir: /var/lib/rancher/k3s/agent/etc/cni/net.d
microk8s:
  binDir: /var/snap/microk8s/current/opt/cni/bin
  confDir: /var/snap/microk8s/current/args/cni-network
minikube:
  netnsDir: /var/run/docker/netns
openshift:
  binDir: /var/lib/cni/bin
  confDir: /etc/cni/multus/net.d
  confName: redirector.conf
  chained: false
  provider: multus
  systemNamespace: kube-system
  scc: true
{{- end -}}

{{- /* The settings: each value as given, or as the platform has it, or the default. In YAML. */ -}}
{{- define "redirector.settings" -}}
{{- $v := .Values -}}
{{- $global := $v.global | default dict -}}
{{- $platform := coalesce $v.platform $global.platform -}}
{{- $preset := dict -}}
{{- if $platform -}}
{{- $preset = get (include "redirector.platforms" . | fromYaml) $platform -}}
{{- else if contains "-gke" .Capabilities.KubeVersion.Version -}}
{{- $preset = dict "binDir" "/home/kubernetes/bin" -}}
{{- end -}}
{{- $chained := $v.chained -}}
{{- if kindIs "invalid" $chained -}}
{{- $chained = ternary $preset.chained true (hasKey $preset "chained") -}}
{{- end -}}
{{- $quota := $v.resourceQuotas.enabled -}}
{{- if kindIs "invalid" $quota -}}
{{- $quota = $preset.quota | default false -}}
{{- end -}}
{{- $json := eq $v.logging.format "json" -}}
{{- if and (not $v.logging.format) $global.logAsJson -}}
{{- $json = true -}}
{{- end -}}
{{- $image := $v.image -}}
{{- if not (kindIs "map" $image) -}}
{{- $image = dict -}}
{{- end -}}
{{- $hub := coalesce $v.hub $global.hub -}}
{{- $repository := coalesce $image.repository (ternary (printf "%s/redirector" (trimSuffix "/" (toString $hub))) "redirector" (not (empty $hub))) -}}
{{- $strategy := deepCopy $v.updateStrategy -}}
{{- if $v.rollingMaxUnavailable -}}
{{- $strategy = dict "type" "RollingUpdate" "rollingUpdate" (dict "maxUnavailable" $v.rollingMaxUnavailable) -}}
{{- end -}}
binDir: {{ coalesce $v.cniBinDir $preset.binDir "/opt/cni/bin" | quote }}
confDir: {{ coalesce $v.cniConfDir $preset.confDir "/etc/cni/net.d" | quote }}
netnsDir: {{ coalesce $v.cniNetnsDir $preset.netnsDir "/var/run/netns" | quote }}
confName: {{ coalesce $v.cniConfFileName $preset.confName "" | quote }}
chained: {{ $chained }}
provider: {{ coalesce $v.provider $preset.provider "default" | quote }}
quota: {{ $quota }}
systemNamespace: {{ coalesce $v.systemNamespace $preset.systemNamespace "istio-system" | quote }}
scc: {{ $preset.scc | default false }}
logLevel: {{ include "redirector.logLevel" (coalesce $v.logging.level ($global.logging | default dict).level "info") | quote }}
logFormat: {{ ternary "json" "text" $json | quote }}
image: {{ ternary (printf "%s@%s" $repository $image.digest) (printf "%s:%s" $repository ($image.tag | default .Chart.AppVersion)) (not (empty $image.digest)) | quote }}
pullPolicy: {{ coalesce $image.pullPolicy $v.pullPolicy $global.imagePullPolicy "IfNotPresent" | quote }}
pullSecrets:
{{- range concat ($v.imagePullSecrets | default list) ($global.imagePullSecrets | default list) | uniq }}
- name: {{ if kindIs "map" . }}{{ .name | quote }}{{ else }}{{ quote . }}{{ end }}
{{- else }} []
{{- end }}
resources: {{ coalesce $v.resources $global.defaultResources (dict) | toJson }}
updateStrategy: {{ $strategy | toJson }}
networkPolicy: {{ or $v.networkPolicy.enabled ($global.networkPolicy | default dict).enabled | default false }}
scope: {{ $global.resourceScope | default "all" | quote }}
{{- end -}}

{{- /* istio-cni's level is one word, or a list of scope:level. That of the scopes default, all and cni-agent counts. */ -}}
{{- define "redirector.logLevel" -}}
{{- $level := "info" -}}
{{- range splitList "," (toString .) -}}
{{- $pair := splitList ":" (trim .) -}}
{{- if eq (len $pair) 1 -}}
{{- $level = first $pair -}}
{{- else if has (first $pair) (list "default" "all" "cni-agent") -}}
{{- $level = last $pair -}}
{{- end -}}
{{- end -}}
{{- get (dict "none" "error" "fatal" "error" "error" "error" "warn" "warn" "info" "info" "debug" "debug" "trace" "debug") $level -}}
{{- end -}}

{{- define "redirector.selectorLabels" -}}
app.kubernetes.io/name: redirector
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "redirector.labels" -}}
{{ include "redirector.selectorLabels" . }}
app.kubernetes.io/component: agent
app.kubernetes.io/part-of: redirector
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.revision }}
istio.io/rev: {{ . | quote }}
{{- end }}
{{- end -}}
