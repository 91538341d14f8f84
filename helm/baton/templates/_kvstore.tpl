{{/* The KV store's container: dict root port (of metrics) portName address (host of its address) nodeId image */}}
{{- define "baton.kvstoreContainer" -}}
{{- $values := .root.Values -}}
{{- /* The blocks in shared memory count as this container's, which takes them; huge pages are counted by themselves. */}}
{{- $blocks := ternary 0 (include "baton.bytes" $values.kvstore.capacity) (ne $values.kvstore.hugepages "") -}}
{{- $memory := add $blocks (include "baton.bytes" $values.kvstore.resources.limits.memory) -}}
{{- $requested := add $blocks (include "baton.bytes" $values.kvstore.resources.requests.memory) -}}
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
    {{- include "baton.hugePages" .root | nindent 4 }}
  limits:
    {{- with omit $values.kvstore.resources.limits "memory" }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    memory: {{ $memory | quote }}
    {{- include "baton.hugePages" .root | nindent 4 }}
securityContext:
  {{- include "baton.containerSecurity" . | nindent 2 }}
volumeMounts:
  {{- include "baton.commonMounts" (dict "root" .root "role" "kvstore") | nindent 2 }}
  - name: {{ ternary "slab" "shm" (ne $values.kvstore.hugepages "") }}
    mountPath: {{ include "baton.slabDir" .root }}
  {{- if $values.kvstore.fileTier }}
  - name: file-tier
    mountPath: /var/lib/baton
  {{- end }}
{{- end }}

{{- /* Where the slab lies, in every container that maps it. */}}
{{- define "baton.slabDir" -}}
{{ ternary "/dev/hugepages" "/dev/shm" (ne .Values.kvstore.hugepages "") }}
{{- end }}

{{- /* Of the store's container: what it asks for is what it may take, as Kubernetes demands of huge pages. */}}
{{- define "baton.hugePages" -}}
{{- with .Values.kvstore.hugepages }}
hugepages-{{ . }}: {{ include "baton.bytes" $.Values.kvstore.capacity | quote }}
{{- end }}
{{- end }}

{{- /* dict root worker (none: of the store's own pod): folders in memory. Without huge pages the slab lies in `shm`, beside what the
processes of one model share. */}}
{{- define "baton.memoryVolumes" -}}
{{- $store := .root.Values.kvstore -}}
{{- $own := "" -}}
{{- if .worker }}{{ $own = .worker.shmSizeLimit }}{{ end -}}
{{- if ne $store.hugepages "" }}
- name: slab
{{- if eq $store.placement "daemonset" }}
  hostPath: {path: {{ $store.hostPath }}, type: Directory}
{{- else }}
  emptyDir: {medium: HugePages-{{ $store.hugepages }}}
{{- end }}
{{- if $own }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ $own }}}
{{- end }}
{{- else }}
- name: shm
{{- if eq $store.placement "daemonset" }}
  hostPath: {path: {{ $store.hostPath }}, type: Directory}
{{- else if eq $store.placement "sidecar" }}
  emptyDir: {medium: Memory, sizeLimit: {{ add (include "baton.bytes" $store.capacity) (include "baton.bytes" $own) | quote }}}
{{- else }}
  emptyDir: {medium: Memory, sizeLimit: {{ $own }}}
{{- end }}
{{- end }}
{{- end }}

{{- /* dict root: where the file tier lies; a little more than it takes. */}}
{{- define "baton.fileTierVolume" -}}
{{- with .root.Values.kvstore.fileTier }}
- name: file-tier
  emptyDir: {sizeLimit: {{ add (include "baton.bytes" .) 67108864 | quote }}}
{{- end }}
{{- end }}
