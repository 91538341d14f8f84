{{/* What the schema cannot say: one line each, with the value to change. */}}
{{- define "baton.checks" -}}
{{- $values := .Values -}}
{{- if and (eq $values.model.source "pvc") (not $values.model.pvc.claimName) }}
{{- fail "baton: model.pvc.claimName: needed with model.source=pvc" }}
{{- end }}
{{- if and (eq $values.model.source "image") (not $values.model.image.reference) }}
{{- fail "baton: model.image.reference: needed with model.source=image" }}
{{- end }}
{{- if and (has $values.model.source (list "pvc" "image")) (contains "/" $values.model.name) }}
{{- fail (printf "baton: model.name: %q: name the folder of model.%s, without a /" $values.model.name $values.model.source) }}
{{- end }}
{{- if and (eq $values.model.source "bundled") (not (hasPrefix "baton-" $values.model.name)) }}
{{- fail (printf "baton: model.name: %q is no bundled model; set model.source=hub, pvc or image" $values.model.name) }}
{{- end }}
{{- if and (not $values.redis.enabled) (not $values.redis.url) }}
{{- fail "baton: redis.url: needed with redis.enabled=false" }}
{{- end }}
{{- if and $values.redis.enabled $values.redis.url }}
{{- fail "baton: redis.url: is for redis.enabled=false; with both, which one is meant?" }}
{{- end }}
{{- if contains "@" $values.redis.url }}
{{- fail "baton: redis.url: holds a user or password; put the password into a Secret named by redis.existingSecret, the user into redis.user" }}
{{- end }}
{{- if and $values.redis.user (not $values.redis.existingSecret) }}
{{- fail "baton: redis.user: needs redis.existingSecret, with the user's password" }}
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- $worker := index $values $role }}
{{- $engine := $worker.settings.engine | default dict }}
{{- $ranks := mul (int (get $engine "tensor_parallel" | default 1)) (int (get $engine "pipeline_parallel" | default 1)) }}
{{- if and (gt (int $worker.gpus) 0) (ne (int $worker.gpus) (int $ranks)) }}
{{- fail (printf "baton: %s.gpus: %d, but %s.settings.engine has tensor_parallel x pipeline_parallel = %d" $role (int $worker.gpus) $role (int $ranks)) }}
{{- end }}
{{- end }}
{{- $isOutside := or (ne $values.router.service.type "ClusterIP") $values.router.ingress.enabled $values.router.gateway.enabled }}
{{- if and $isOutside (not $values.clients.apiKeysSecret) (ne $values.clients.allowAnonymous "anywhere") }}
{{- fail "baton: clients.apiKeysSecret: needed for a router that is reached from outside the cluster (or clients.allowAnonymous=anywhere, for everybody)" }}
{{- end }}
{{- if and (not $values.clients.apiKeysSecret) (eq $values.clients.allowAnonymous "never") }}
{{- fail "baton: clients.apiKeysSecret: needed with clients.allowAnonymous=never" }}
{{- end }}
{{- if and $values.router.ingress.enabled (not $values.router.ingress.host) }}
{{- fail "baton: router.ingress.host: needed with router.ingress.enabled" }}
{{- end }}
{{- if and $values.router.gateway.enabled (not $values.router.gateway.parentRefs) }}
{{- fail "baton: router.gateway.parentRefs: needed with router.gateway.enabled; name the Gateway" }}
{{- end }}
{{- if and (eq $values.tls.mode "cert-manager") (not $values.tls.certManager.issuerRef.name) }}
{{- fail "baton: tls.certManager.issuerRef.name: needed with tls.mode=cert-manager" }}
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- $bounds := index $values.scaling $role }}
{{- if gt (int $bounds.min) (int $bounds.max) }}
{{- fail (printf "baton: scaling.%s.min: %d is above max, %d" $role (int $bounds.min) (int $bounds.max)) }}
{{- end }}
{{- end }}
{{- if and (eq $values.scaling.by "keda") (ne $values.tls.mode "off") }}
{{- fail "baton: scaling.by: KEDA calls the autoscaler without a certificate of ours; with tls.mode=off, or scaling.by=autoscaler" }}
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- if and (eq $values.scaling.by "hpa") (lt (int (index $values.scaling $role).max) 1) }}
{{- fail (printf "baton: scaling.%s.max: 0, but an HPA keeps at least 1" $role) }}
{{- end }}
{{- end }}
{{- $own := include "baton.labels" (dict "root" $ "component" "any") | fromYaml }}
{{- range $part := list "router" "prefill" "decode" "draft" }}
{{- range $label := keys ((index $values $part).podLabels | default dict) | sortAlpha }}
{{- if hasKey $own $label }}
{{- fail (printf "baton: %s.podLabels: %q is the chart's own; selectors and network policies go by it" $part $label) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (eq $values.kvstore.placement "daemonset") (eq $values.tls.mode "off") (not $values.kvstore.allowPlaintext) }}
{{- fail "baton: kvstore.placement: daemonset opens port 8520 of every node, in the clear; set tls.mode=self-made or cert-manager (or kvstore.allowPlaintext=true, where only Baton reaches it)" }}
{{- end }}
{{- include "baton.checkSecrets" . }}
{{- end }}

{{/* Secrets that a user names and that are not there: said now, not by pods that wait for ever. Only where there is a
cluster to look into. */}}
{{- define "baton.checkSecrets" -}}
{{- $values := .Values -}}
{{- $wanted := list
  (list "secrets.existingSecret" $values.secrets.existingSecret (list "handle-keys" "secret.toml"))
  (list "clients.apiKeysSecret" $values.clients.apiKeysSecret (list "api-keys.toml"))
  (list "clients.tlsSecret" $values.clients.tlsSecret (list "tls.crt" "tls.key"))
  (list "model.hub.tokenSecret" $values.model.hub.tokenSecret (list "token"))
  (list "redis.existingSecret" $values.redis.existingSecret (ternary (list "password" "ca.crt") (list "password") $values.redis.hasCa))
-}}
{{- $hasCluster := lookup "v1" "Namespace" "" "default" -}}
{{- range $wanted }}
{{- $value := index . 0 }}
{{- $name := index . 1 }}
{{- if and $name $hasCluster }}
{{- $secret := lookup "v1" "Secret" $.Release.Namespace $name }}
{{- if not $secret }}
{{- fail (printf "baton: %s: there is no Secret %q in namespace %q" $value $name $.Release.Namespace) }}
{{- end }}
{{- range $key := index . 2 }}
{{- if not (hasKey ($secret.data | default dict) $key) }}
{{- fail (printf "baton: %s: Secret %q has no key %q" $value $name $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
