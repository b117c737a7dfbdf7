{{/* The full name of an image: the context and the name. */}}
{{- define "isthmus.image" -}}
{{- $root := index . 0 -}}
{{- with $root.Values.image.registry }}{{ . }}/{{ end -}}
{{ index . 1 }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end }}

{{/* The labels by which a workload finds its pods: the context and the component. They never change. */}}
{{- define "isthmus.selector" -}}
app.kubernetes.io/name: isthmus-{{ index . 1 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- end }}

{{/* All labels of an object: the context and the component. */}}
{{- define "isthmus.labels" -}}
{{ include "isthmus.selector" . }}
app.kubernetes.io/part-of: isthmus
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
{{- end }}

{{/* The rules that controller-gen wrote for a kind of role, from the program's own markers. */}}
{{- define "isthmus.rules" -}}
{{- $root := index . 0 -}}{{- $part := index . 1 -}}{{- $kind := index . 2 -}}
{{- range splitList "\n---\n" (printf "\n%s" ($root.Files.Get (printf "files/%s-role.yaml" $part))) }}
{{- $role := fromYaml . }}
{{- if eq (default "" $role.kind) $kind }}
{{- toYaml $role.rules }}
{{- end }}
{{- end }}
{{- end }}
