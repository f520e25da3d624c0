{{/* Full name of the release's objects. */}}
{{- define "likeness.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What selects the pods of a component; never changes. Takes (list $ component). */}}
{{- define "likeness.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ $root.Release.Name | trunc 63 }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of an object of a component. Takes (list $ component). */}}
{{- define "likeness.labels" -}}
{{- $root := index . 0 -}}
{{ include "likeness.selector" . }}
app.kubernetes.io/part-of: likeness
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name ($root.Chart.Version | replace "+" "_") }}
{{- with $root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods: without versions, so that an upgrade of the chart alone replaces none. Takes (list $ component). */}}
{{- define "likeness.podLabels" -}}
{{ include "likeness.selector" . }}
app.kubernetes.io/part-of: likeness
{{- with (index . 0).Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Reference of an image; a digest wins. Takes (list $ image). */}}
{{- define "likeness.image" -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default (index . 0).Chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}

{{- define "likeness.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "likeness.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{/*
The beginning of every pod's spec. Service links stay off: for a Service likeness-reward Kubernetes would set
LIKENESS_REWARD_PORT=tcp://..., which the server would read as its own setting.
*/}}
{{- define "likeness.podDefaults" -}}
serviceAccountName: {{ include "likeness.serviceAccountName" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Where pods may run. Takes reward, triton or the settings of a run. */}}
{{- define "likeness.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* Resources with GPUs among the limits. Takes (list resources count gpuResource). */}}
{{- define "likeness.resources" -}}
{{- $resources := deepCopy (index . 0) -}}
{{- if gt (int (index . 1)) 0 -}}
{{- $limits := set (default dict $resources.limits | deepCopy) (index . 2) (int (index . 1)) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* A setting as a word on a command line: whole numbers without exponent, lists and maps as JSON, which is YAML. */}}
{{- define "likeness.word" -}}
{{- if kindIs "string" . -}}{{ . }}{{- else -}}{{ toJson . }}{{- end -}}
{{- end -}}

{{- define "likeness.reward.name" -}}{{ include "likeness.fullname" . }}-reward{{- end -}}
{{- define "likeness.reward.headless" -}}{{ include "likeness.fullname" . }}-reward-headless{{- end -}}
{{- define "likeness.triton.name" -}}{{ include "likeness.fullname" . }}-triton{{- end -}}

{{/* Whether the chart runs a Triton of its own: "true" or empty. */}}
{{- define "likeness.triton.own" -}}
{{- if and .Values.reward.enabled (eq .Values.reward.backend "triton") (not .Values.reward.tritonUrl) -}}true{{- end -}}
{{- end -}}

{{/* HOST:PORT that trainers call: the headless Service, so that gRPC sees every replica and shares the calls out. */}}
{{- define "likeness.reward.endpoint" -}}
{{- if .Values.trainer.rewardEndpoint -}}
{{ .Values.trainer.rewardEndpoint }}
{{- else -}}
{{ include "likeness.reward.headless" . }}.{{ .Release.Namespace }}.svc:{{ .Values.reward.ports.grpc }}
{{- end -}}
{{- end -}}
