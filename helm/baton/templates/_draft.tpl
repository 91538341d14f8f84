{{/* Draft workers: where they are, what they are told, what does not fit together. */}}

{{- /* As a list in YAML: a name for each pod. Behind one name for all of them sessions would scatter. */}}
{{- define "baton.draftAddresses" -}}
{{- $name := printf "%s-draft" (include "baton.fullname" .) -}}
{{- range $index := until (int .Values.draft.replicas) }}
- {{ printf "%s-%d.%s.%s.svc:8540" $name $index $name $.Release.Namespace }}
{{- end }}
{{- end }}

{{- /* The draft model, in the form of .Values.model, as JSON. */}}
{{- define "baton.draftModel" -}}
{{- $model := .Values.model -}}
{{- $draft := .Values.draft -}}
{{- $pvc := dict "claimName" ($draft.pvc.claimName | default $model.pvc.claimName) "subPath" $draft.pvc.subPath -}}
{{ dict "name" $draft.model "source" $model.source "hub" $model.hub "pvc" $pvc "image" $draft.image | toJson }}
{{- end }}

{{- define "baton.draftSettings" -}}
{{- $draft := .Values.draft -}}
listen: 0.0.0.0:8540
metrics_listen: 0.0.0.0:9100
limits:
  drain_s: {{ $draft.drainSeconds }}
tls:
  {{- include "baton.tlsSettings" . | nindent 2 }}
engine:
  model: {{ include "baton.modelPath" (include "baton.draftModel" . | fromJson) | quote }}
  device: {{ ternary "cuda" "cpu" (gt (int $draft.gpus) 0) }}
  {{- if not (or $draft.gpus (hasKey (dig "engine" dict $draft.settings) "num_threads")) }}
  num_threads: 1
  {{- end }}
{{- end }}

{{- /* One line each, with the value to change. */}}
{{- define "baton.checkDraft" -}}
{{- $draft := .Values.draft -}}
{{- $source := .Values.model.source -}}
{{- if $draft.replicas }}
{{- if not $draft.model }}
{{- fail "baton: draft.model: needed with draft.replicas; name a small model with the tokenizer of model.name" }}
{{- end }}
{{- if and (eq $source "bundled") (not (hasPrefix "baton-" $draft.model)) }}
{{- fail (printf "baton: draft.model: %q is no bundled model, as model.source says" $draft.model) }}
{{- end }}
{{- if and (has $source (list "pvc" "image")) (contains "/" $draft.model) }}
{{- fail (printf "baton: draft.model: %q: name the folder of draft.%s, without a /" $draft.model $source) }}
{{- end }}
{{- $isSame := and (has $draft.pvc.claimName (list "" .Values.model.pvc.claimName)) (eq $draft.pvc.subPath .Values.model.pvc.subPath) }}
{{- if and (eq $source "pvc") $isSame }}
{{- fail "baton: draft.pvc: is the folder of model.pvc, so the model would guess for itself; set draft.pvc.subPath or draft.pvc.claimName" }}
{{- end }}
{{- if and (eq $source "image") (not $draft.image.reference) }}
{{- fail "baton: draft.image.reference: needed with draft.replicas and model.source=image" }}
{{- end }}
{{- if gt (int $draft.gpus) 1 }}
{{- fail (printf "baton: draft.gpus: %d, but a draft worker computes on one GPU; raise draft.replicas" (int $draft.gpus)) }}
{{- end }}
{{- $speculation := dig "engine" "speculation" dict .Values.decode.settings | default dict }}
{{- if hasKey $speculation "draft_workers" }}
{{- fail "baton: decode.settings.engine.speculation.draft_workers: the chart names its own with draft.replicas; leave one of the two out" }}
{{- end }}
{{- end }}
{{- end }}
