{{/* What `likeness-reward` is told on its command line. */}}
{{- define "likeness.reward.arguments" -}}
{{- $reward := .Values.reward -}}
- serve
- --host=0.0.0.0
- --port={{ $reward.ports.grpc }}
- --health-port={{ $reward.ports.health }}
- --metrics-port={{ $reward.ports.metrics }}
- --workers={{ $reward.workers }}
- --log-format={{ $reward.logFormat }}
- --drain-timeout-s={{ $reward.drainSeconds }}
{{- if eq $reward.backend "embedded" }}
- --pack={{ include "likeness.pack.directory" . }}
- --provider={{ $reward.provider }}
- --threads={{ $reward.threads }}
{{- with $reward.detectorSize }}
- --detector-size={{ . }}
{{- end }}
{{- else }}
- --backend=triton
{{- if eq $reward.backend "triton-sidecar" }}
- --triton-url=localhost:{{ .Values.triton.ports.grpc }}
- --triton-shared-memory=on
{{- else }}
- --triton-url={{ default (printf "%s:%d" (include "likeness.triton.name" .) (int .Values.triton.ports.grpc)) $reward.tritonUrl }}
- --triton-shared-memory=off
{{- end }}
{{- end }}
{{- with $reward.expectFingerprint }}
- --expect-fingerprint={{ . }}
{{- end }}
{{- if $reward.reflection }}
- --reflection
{{- end }}
{{- if $reward.token.secret }}
- --token-file=/etc/likeness/token/token
{{- end }}
{{- if $reward.tls.secret }}
- --tls-cert=/etc/likeness/tls/tls.crt
- --tls-key=/etc/likeness/tls/tls.key
{{- end }}
{{- if $reward.tls.clientCaSecret }}
- --client-ca=/etc/likeness/client-ca/ca.crt
{{- end }}
{{- end -}}

{{/* The settings that have no flag, as LIKENESS_REWARD_<NAME>. */}}
{{- define "likeness.reward.environment" -}}
- {name: OMP_NUM_THREADS, value: {{ .Values.reward.threads | quote }}}
{{- if ne .Values.reward.backend "embedded" }}
# The image names a pack; with Triton there is none here.
- {name: LIKENESS_REWARD_PACK, value: ""}
{{- end }}
{{- range $name, $value := .Values.reward.settings }}
{{- if and (not (kindIs "invalid" $value)) (or (not (hasPrefix "triton" $name)) (ne $.Values.reward.backend "embedded")) }}
- {name: LIKENESS_REWARD_{{ $name | snakecase | upper }}, value: {{ include "likeness.word" $value | quote }}}
{{- end }}
{{- end }}
{{- end -}}
