{{/* Names and labels. */}}

{{- define "baton.fullname" -}}
{{- if contains "baton" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-baton" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* dict root component */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "baton.metadata" -}}
name: {{ include "baton.fullname" .root }}-{{ .name | default .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
{{- end }}

{{/* dict root image */}}
{{- define "baton.image" -}}
{{- $image := .image -}}
{{- $repository := $image.repository -}}
{{- if and .root.Values.images.registry (not .isForeign) -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .root.Values.images.registry) $image.repository -}}
{{- end -}}
{{- if $image.digest -}}
{{ $repository }}@{{ $image.digest }}
{{- else -}}
{{ $repository }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "baton.redisUrl" -}}
{{- if .Values.redis.enabled -}}
{{ ternary "redis" "rediss" (eq .Values.tls.mode "off") }}://{{ include "baton.fullname" . }}-redis.{{ .Release.Namespace }}.svc:6379/0
{{- else -}}
{{ .Values.redis.url }}
{{- end -}}
{{- end }}

{{/* Names of secrets. */}}
{{- define "baton.keysSecret" -}}
{{ .Values.secrets.existingSecret | default (printf "%s-keys" (include "baton.fullname" .)) }}
{{- end }}
{{- define "baton.redisSecret" -}}
{{- if .Values.redis.enabled }}{{ .Values.redis.existingSecret | default (printf "%s-redis" (include "baton.fullname" .)) }}{{ else }}{{ .Values.redis.existingSecret }}{{ end -}}
{{- end }}

{{/* Of the model in a process's settings: a name, or a folder that is mounted under that name. */}}
{{- define "baton.model" -}}
{{ include "baton.modelPath" .Values.model }}
{{- end }}
{{- define "baton.modelPath" -}}
{{- if has .source (list "pvc" "image") }}/models/{{ .name }}{{ else }}{{ .name }}{{ end -}}
{{- end }}

{{/* A quantity of bytes such as 256Mi as a number. */}}
{{- define "baton.bytes" -}}
{{- $text := toString . -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 -}}
{{- $found := dict "factor" 1 "number" $text -}}
{{- range $unit, $factor := $units -}}
{{- if and (hasSuffix $unit $text) (regexMatch "^[0-9.]+$" (trimSuffix $unit $text)) -}}
{{- $_ := set $found "factor" $factor -}}
{{- $_ := set $found "number" (trimSuffix $unit $text) -}}
{{- end -}}
{{- end -}}
{{- if not (regexMatch "^[0-9]+(\\.[0-9]+)?$" $found.number) -}}
{{- fail (printf "baton: %q is no quantity of bytes; write it as 256Mi or 2Gi" $text) -}}
{{- end -}}
{{- mulf (float64 $found.number) $found.factor | int64 -}}
{{- end }}
