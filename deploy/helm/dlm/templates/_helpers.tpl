{{/* The name of every object of a release, plus a suffix. 40 characters leave room for it. */}}
{{- define "dlm.name" -}}
{{ printf "%s-dlm" .Release.Name | trunc 40 }}
{{- end }}

{{/* How a Service or a budget selects pods; those of one shard add the shard. */}}
{{- define "dlm.selector" -}}
app.kubernetes.io/name: dlm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "dlm.labels" -}}
{{ include "dlm.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Rejects what a server would reject at startup. */}}
{{- define "dlm.check" -}}
{{- if not (or .Values.insecure (and .Values.tls.secretName (or .Values.tls.clientCertificates .Values.tokens.secretName))) }}
{{- fail "no authentication is configured: set tls.secretName with tokens.secretName or tls.clientCertificates; or insecure: true, on a network where every pod may read the model" }}
{{- end }}
{{- if and .Values.tls.clientCertificates (not .Values.tls.secretName) }}
{{- fail "tls.clientCertificates needs tls.secretName" }}
{{- end }}
{{- end }}
