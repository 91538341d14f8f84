{{/* What KEDA's API server would refuse later, in a condition of the ScaledObject. */}}
{{- define "baton.checkScaling" -}}
{{- range $role := list "prefill" "decode" }}
{{- if and (eq $.Values.scaling.by "keda") (lt (int (index $.Values.scaling $role).max) 1) }}
{{- fail (printf "baton: scaling.%s.max: 0, but the HPA that KEDA makes allows at least 1" $role) }}
{{- end }}
{{- end }}
{{- end }}
