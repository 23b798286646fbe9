{{/* Every object of a release is called so, with an ending. 40 characters leave room for it. */}}
{{- define "dlm.name" -}}
{{ printf "%s-dlm" .Release.Name | trunc 40 }}
{{- end }}

{{/* What a Service or a budget chooses pods by; a shard is added where it is one's own. */}}
{{- define "dlm.selector" -}}
app.kubernetes.io/name: dlm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "dlm.labels" -}}
{{ include "dlm.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Refuses what a server would refuse at its start. */}}
{{- define "dlm.check" -}}
{{- if not (or .Values.insecure (and .Values.tls.secretName (or .Values.tls.clientCertificates .Values.tokens.secretName))) }}
{{- fail "clients need not authenticate: set tls.secretName with tokens.secretName or tls.clientCertificates; or insecure: true, on a network where every pod may read the model" }}
{{- end }}
{{- if and .Values.tls.clientCertificates (not .Values.tls.secretName) }}
{{- fail "tls.clientCertificates needs tls.secretName" }}
{{- end }}
{{- end }}
