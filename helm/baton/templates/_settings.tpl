{{/*
What each process is told. The chart's own come first; a user's `settings` cannot name them (values.schema.json leaves them
out), so nothing is told twice.
*/}}

{{- define "baton.commonSettings" -}}
{{ include "baton.redisSettings" . }}
{{- if .Values.monitoring.tracing.endpoint }}
tracing:
  endpoint: {{ .Values.monitoring.tracing.endpoint | quote }}
  sample_ratio: {{ .Values.monitoring.tracing.sampleRatio }}
{{- end }}
{{- end }}

{{- define "baton.redisSettings" -}}
redis_url: {{ include "baton.redisUrl" . }}
{{- if include "baton.redisSecret" . }}
redis:
  password_file: /etc/baton/redis/password
  {{- with .Values.redis.user }}
  user: {{ . | quote }}
  {{- end }}
  {{- if and .Values.redis.enabled (ne .Values.tls.mode "off") }}
  ca_file: /etc/baton/tls/ca.crt
  {{- else if .Values.redis.hasCa }}
  ca_file: /etc/baton/redis/ca.crt
  {{- end }}
{{- end }}
{{- end }}

{{- define "baton.tlsSettings" -}}
{{- if eq .Values.tls.mode "off" -}}
allow_plaintext: true
{{- else -}}
ca_file: /etc/baton/tls/ca.crt
cert_file: /etc/baton/tls/tls.crt
key_file: /etc/baton/tls/tls.key
{{- end -}}
{{- end }}

{{- define "baton.routerSettings" -}}
listen: 0.0.0.0:8500
http_listen: 0.0.0.0:8501
metrics_listen: 0.0.0.0:9100
model: {{ include "baton.model" . | quote }}
times:
  drain_s: {{ .Values.router.drainSeconds }}
{{- if ne .Values.tls.mode "off" }}
tls:
  {{- include "baton.tlsSettings" . | nindent 2 }}
{{- end }}
client_tls:
  {{- if .Values.clients.tlsSecret }}
  cert_file: /etc/baton/client-tls/tls.crt
  key_file: /etc/baton/client-tls/tls.key
  {{- else }}
  allow_plaintext: true
  {{- end }}
{{- with include "baton.holdSeconds" . }}
hold_without_workers_s: {{ . }}
{{- end }}
{{- if .Values.clients.apiKeysSecret }}
api_keys_file: /etc/baton/api-keys/api-keys.toml
{{- else }}
allow_anonymous: true
{{- end }}
{{ include "baton.commonSettings" . }}
{{- end }}

{{/* dict root role */}}
{{- define "baton.workerSettings" -}}
{{- $worker := index .root.Values .role -}}
listen: 0.0.0.0:8510
metrics_listen: 0.0.0.0:9100
handle_keys_file: /etc/baton/keys/handle-keys
limits:
  drain_s: {{ $worker.drainSeconds }}
tls:
  {{- include "baton.tlsSettings" .root | nindent 2 }}
engine:
  model: {{ include "baton.model" .root | quote }}
  device: {{ ternary "cuda" "cpu" (gt (int $worker.gpus) 0) }}
  {{- if not (or $worker.gpus (hasKey (dig "engine" dict $worker.settings) "num_threads")) }}
  num_threads: 1
  {{- end }}
  {{- if and (eq .role "decode") (gt (int .root.Values.draft.replicas) 0) }}
  speculation:
    draft_workers:
      {{- include "baton.draftAddresses" .root | nindent 6 }}
  {{- end }}
{{ include "baton.commonSettings" .root }}
{{- end }}

{{/* dict root port (of metrics) */}}
{{- define "baton.kvstoreSettings" -}}
listen: 0.0.0.0:8520
metrics_listen: 0.0.0.0:{{ .port }}
capacity_bytes: {{ include "baton.bytes" .root.Values.kvstore.capacity }}
slab_dir: {{ include "baton.slabDir" .root }}
drain_s: {{ .root.Values.kvstore.drainSeconds }}
{{- with .root.Values.kvstore.fileTier }}
file_tier_dir: /var/lib/baton
file_tier_bytes: {{ include "baton.bytes" . }}
{{- end }}
tls:
  {{- include "baton.tlsSettings" .root | nindent 2 }}
{{ include "baton.commonSettings" .root }}
{{- end }}

{{- /* Whether an autoscaler runs: it acts by itself, or says to others what it wants. */}}
{{- define "baton.plans" -}}
{{- if ne .Values.scaling.by "none" }}yes{{ end -}}
{{- end }}

{{- define "baton.scalesToZero" -}}
{{- if and (include "baton.plans" .) (ne .Values.scaling.by "hpa") (eq 0 (int .Values.scaling.prefill.min)) (eq 0 (int .Values.scaling.decode.min)) }}yes{{ end -}}
{{- end }}

{{- /* How long a router holds requests while there are no workers: longer than one takes to start, unless a user says. */}}
{{- define "baton.holdSeconds" -}}
{{- if hasKey .Values.router.settings "hold_without_workers_s" -}}
{{ .Values.router.settings.hold_without_workers_s }}
{{- else if include "baton.scalesToZero" . -}}
{{ max (int .Values.prefill.startupSeconds) (int .Values.decode.startupSeconds) }}
{{- end }}
{{- end }}

{{/* Of a role: an HPA starts nothing from none. dict root role */}}
{{- define "baton.minWorkers" -}}
{{- $least := int (index .root.Values.scaling .role).min -}}
{{- if eq .root.Values.scaling.by "hpa" }}{{ max 1 $least }}{{ else }}{{ $least }}{{ end -}}
{{- end }}

{{- define "baton.autoscalerSettings" -}}
{{- $full := include "baton.fullname" . -}}
listen: 0.0.0.0:8530
metrics_listen: 0.0.0.0:9100
scaler: kubernetes
act: {{ eq .Values.scaling.by "autoscaler" }}
# A worker that takes the other role drains first, as long as it may.
flip_timeout_s: {{ add (max (int .Values.prefill.drainSeconds) (int .Values.decode.drainSeconds)) 30 }}
kubernetes:
  namespace: {{ .Release.Namespace }}
  prefill_deployment: {{ $full }}-prefill
  decode_deployment: {{ $full }}-decode
  pod_selector: app.kubernetes.io/name=baton,app.kubernetes.io/instance={{ .Release.Name }}
  lease_name: {{ $full }}-autoscaler
plan:
  limits:
    {{- range $role := list "prefill" "decode" }}
    {{- $bounds := index $.Values.scaling $role }}
    {{ $role }}:
      min_workers: {{ include "baton.minWorkers" (dict "root" $ "role" $role) }}
      max_workers: {{ $bounds.max }}
      num_devices: {{ max 1 (int (index $.Values $role).gpus) }}
    {{- end }}
tls:
  {{- include "baton.tlsSettings" . | nindent 2 }}
{{ include "baton.redisSettings" . }}
{{- end }}

{{/* dict settings (YAML text) user: one TOML file. */}}
{{- define "baton.configFile" -}}
{{- include "baton.toml" (mergeOverwrite (deepCopy .user) (fromYaml .settings)) -}}
{{- end }}
