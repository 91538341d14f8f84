{{/* What all pods share. */}}

{{/* dict root component values config: metadata of a pod. */}}
{{- define "baton.podMetadata" -}}
labels:
  {{- include "baton.labels" . | nindent 2 }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  # A process reads its settings once: other settings, other pods.
  checksum/config: {{ .config | sha256sum }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* dict root component values: the pod's own fields, beside containers and volumes. */}}
{{- define "baton.podSpec" -}}
serviceAccountName: {{ .serviceAccount | default (printf "%s-pod" (include "baton.fullname" .root)) }}
automountServiceAccountToken: {{ .withToken | default false }}
enableServiceLinks: false
securityContext:
  {{- include "baton.podSecurity" . | nindent 2 }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .isSpread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selector" . | nindent 8 }}
    # Of this revision: old pods must not push new ones together.
    matchLabelKeys: [{{ .revisionLabel | default "pod-template-hash" }}]
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "baton.env" -}}
- name: HOME
  value: /tmp
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: HOST_IP
  valueFrom: {fieldRef: {fieldPath: status.hostIP}}
{{- end }}

{{/* dict port startupSeconds: a process's probes; `port` is the name of its port of metrics. */}}
{{- define "baton.probes" -}}
startupProbe:
  httpGet: {path: /readyz, port: {{ .port }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: {{ max 15 (div (int .startupSeconds) 2) }}
readinessProbe:
  httpGet: {path: /readyz, port: {{ .port }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  # Depends on no load and no peer: lost when the process's loop has stood still for a minute. On a machine that is far too
  # busy even this answer takes seconds, so it gets as long.
  httpGet: {path: /livez, port: {{ .port }}}
  periodSeconds: 20
  timeoutSeconds: 20
  failureThreshold: 3
{{- end }}

{{/* Volumes and mounts of the model: dict root model (none: the one that is served). Downloads go to a folder of the pod's own. */}}
{{- define "baton.modelMounts" -}}
{{- $model := .model | default .root.Values.model -}}
{{- if eq $model.source "hub" }}
- name: models
  mountPath: /models
{{- if $model.hub.tokenSecret }}
- name: hub-token
  mountPath: /etc/baton/hub
  readOnly: true
{{- end }}
{{- else if eq $model.source "pvc" }}
- name: models
  mountPath: /models/{{ $model.name }}
  {{- with $model.pvc.subPath }}
  subPath: {{ . }}
  {{- end }}
  readOnly: true
{{- else if eq $model.source "image" }}
- name: models
  mountPath: /models/{{ $model.name }}
  readOnly: true
{{- end }}
{{- end }}

{{- define "baton.modelVolumes" -}}
{{- $model := .model | default .root.Values.model -}}
{{- if eq $model.source "hub" }}
- name: models
  emptyDir: {sizeLimit: {{ $model.hub.cacheSizeLimit }}}
{{- if $model.hub.tokenSecret }}
- name: hub-token
  secret: {secretName: {{ $model.hub.tokenSecret }}, defaultMode: 0440, items: [{key: token, path: token}]}
{{- end }}
{{- else if eq $model.source "pvc" }}
- name: models
  persistentVolumeClaim: {claimName: {{ $model.pvc.claimName }}, readOnly: true}
{{- else if eq $model.source "image" }}
- name: models
  image: {reference: {{ $model.image.reference }}, pullPolicy: {{ .root.Values.images.pullPolicy }}}
{{- end }}
{{- end }}

{{- define "baton.modelEnv" -}}
{{- if eq .root.Values.model.source "hub" }}
- name: HF_HOME
  value: /models
{{- with .root.Values.model.hub.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- if .root.Values.model.hub.tokenSecret }}
- name: HF_TOKEN_PATH
  value: /etc/baton/hub/token
{{- end }}
{{- else }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- range $name, $value := .values.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{/* dict root role isWithoutRedis (it is not shown the password): files that every process of ours reads. */}}
{{- define "baton.commonMounts" -}}
- name: config
  mountPath: /etc/baton/config
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- if and (include "baton.redisSecret" .root) (not .isWithoutRedis) }}
- name: redis
  mountPath: /etc/baton/redis
  readOnly: true
{{- end }}
{{- if ne .root.Values.tls.mode "off" }}
- name: tls-{{ .role }}
  mountPath: /etc/baton/tls
  readOnly: true
{{- end }}
{{- end }}

{{/* dict root component roles (whose certificates) isWithoutRedis */}}
{{- define "baton.commonVolumes" -}}
{{- $full := include "baton.fullname" .root -}}
- name: config
  configMap: {name: {{ $full }}-{{ .component }}}
- name: tmp
  emptyDir: {sizeLimit: {{ .tmpSizeLimit | default "256Mi" }}}
{{- if and (include "baton.redisSecret" .root) (not .isWithoutRedis) }}
- name: redis
  secret:
    secretName: {{ include "baton.redisSecret" .root }}
    defaultMode: 0440
    items:
      - {key: password, path: password}
      {{- if and (not $.root.Values.redis.enabled) $.root.Values.redis.hasCa }}
      - {key: ca.crt, path: ca.crt}
      {{- end }}
{{- end }}
{{- if ne .root.Values.tls.mode "off" }}
{{- range .roles }}
- name: tls-{{ . }}
  secret: {secretName: {{ $full }}-tls-{{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- end }}
