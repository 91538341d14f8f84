{{/* Settings as TOML: dotted keys, one a line. Helm's own toToml writes whole numbers as floats. */}}

{{- define "baton.toml" -}}
{{- range $line := splitList "\n" (include "baton.tomlLines" (dict "prefix" "" "values" .)) -}}
{{- if trim $line }}
{{ $line }}
{{- end -}}
{{- end }}
{{- end }}

{{- define "baton.tomlLines" -}}
{{- $prefix := .prefix -}}
{{- range $key, $value := .values -}}
{{- if kindIs "map" $value }}
{{ include "baton.tomlLines" (dict "prefix" (printf "%s%s." $prefix $key) "values" $value) }}
{{- else if not (kindIs "invalid" $value) }}
{{ $prefix }}{{ $key }} = {{ include "baton.tomlValue" $value }}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "baton.tomlValue" -}}
{{- if kindIs "slice" . -}}
[{{ range $index, $each := . }}{{ if $index }}, {{ end }}{{ include "baton.tomlValue" $each }}{{ end }}]
{{- else if kindIs "string" . -}}
{{ toJson . }}
{{- else if and (kindIs "float64" .) (eq . (floor .)) -}}
{{ int64 . }}
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end }}
