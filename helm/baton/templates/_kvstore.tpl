{{/* The KV store's container: dict root port (of metrics) portName address (host of its address) nodeId image */}}
{{- define "baton.kvstoreContainer" -}}
{{- $values := .root.Values -}}
{{- $memory := add (include "baton.bytes" $values.kvstore.capacity) (include "baton.bytes" $values.kvstore.resources.limits.memory) -}}
{{- $requested := add (include "baton.bytes" $values.kvstore.capacity) (include "baton.bytes" $values.kvstore.resources.requests.memory) -}}
name: kvstore
image: {{ include "baton.image" (dict "root" .root "image" .image) }}
imagePullPolicy: {{ $values.images.pullPolicy }}
command: [python, -P, -m, kvstore]
args:
  - --config=/etc/baton/config/kvstore.toml
  - --set=node_id="{{ .nodeId }}"
  - --set=advertise="{{ .address }}:8520"
  - --log-level={{ $values.logLevel }}
env:
  {{- include "baton.env" . | nindent 2 }}
ports:
  - {name: kvstore, containerPort: 8520{{ with .hostPort }}, hostPort: {{ . }}{{ end }}}
  - {name: {{ .portName }}, containerPort: {{ .port }}}
{{ include "baton.probes" (dict "port" .portName "startupSeconds" 60) }}
resources:
  requests:
    {{- toYaml (omit $values.kvstore.resources.requests "memory") | nindent 4 }}
    memory: {{ $requested | quote }}
  limits:
    {{- with omit $values.kvstore.resources.limits "memory" }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    # The blocks in shared memory count as this container's, which takes them.
    memory: {{ $memory | quote }}
securityContext:
  {{- include "baton.containerSecurity" . | nindent 2 }}
volumeMounts:
  {{- include "baton.commonMounts" (dict "root" .root "role" "kvstore") | nindent 2 }}
  - name: shm
    mountPath: /dev/shm
  {{- if $values.kvstore.fileTier }}
  - name: file-tier
    mountPath: /var/lib/baton
  {{- end }}
{{- end }}

{{- /* dict root: where the file tier lies; a little more than it takes. */}}
{{- define "baton.fileTierVolume" -}}
{{- with .root.Values.kvstore.fileTier }}
- name: file-tier
  emptyDir: {sizeLimit: {{ add (include "baton.bytes" .) 67108864 | quote }}}
{{- end }}
{{- end }}
