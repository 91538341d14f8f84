{{/* Huge pages: what does not fit together, one line each. */}}
{{- define "baton.checkHugePages" -}}
{{- $store := .Values.kvstore -}}
{{- with $store.hugepages }}
{{- if eq $store.placement "none" }}
{{- fail (printf "baton: kvstore.hugepages: %s, but kvstore.placement=none has no store to lie on them" .) }}
{{- end }}
{{- if mod (include "baton.bytes" $store.capacity) (include "baton.bytes" .) }}
{{- fail (printf "baton: kvstore.capacity: %v is no whole number of pages of %s; round it" $store.capacity .) }}
{{- end }}
{{- if and (eq $store.placement "daemonset") (eq $store.hostPath "/dev/shm") }}
{{- fail "baton: kvstore.hostPath: /dev/shm has no huge pages; name a folder on the nodes' mount of them (hugetlbfs) that uid 65532 may write to" }}
{{- end }}
{{- range $kind := list "requests" "limits" }}
{{- range $name := keys (index $store.resources $kind) | sortAlpha }}
{{- if hasPrefix "hugepages-" $name }}
{{- fail (printf "baton: kvstore.resources.%s: %s follows from kvstore.hugepages and kvstore.capacity" $kind $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
