{{/* The init container that writes the pack as a Triton model repository. */}}
{{- define "likeness.triton.export" -}}
{{- $export := .Values.triton.export }}
- name: export-pack
  image: {{ include "likeness.image" (list . .Values.reward.image) }}
  imagePullPolicy: {{ .Values.reward.image.pullPolicy }}
  # A pod that starts again finds its old export.
  command: [sh, -c, 'rm -rf /repository/models && exec "$@"', export-pack]
  args:
    - likeness-reward
    - pack
    - export-triton
    - {{ include "likeness.pack.directory" . }}
    - /repository/models
    - --device={{ ternary "cuda" "cpu" (gt (int .Values.triton.gpus) 0) }}
    - --max-batch={{ $export.maxBatch }}
    - --precision={{ $export.precision }}
    - --instances={{ $export.instances }}
    - --threads={{ $export.threads }}
    - --runtime={{ $export.runtime }}
    {{- if $export.tensorrt }}
    - --tensorrt
    {{- end }}
    {{- if $export.gradients }}
    - --gradients
    {{- end }}
    {{- with .Values.reward.detectorSize }}
    - --detector-size={{ . }}
    {{- end }}
  securityContext:
    {{- toYaml .Values.containerSecurityContext | nindent 4 }}
  resources:
    requests: {cpu: 500m, memory: 1Gi}
    limits: {memory: 2Gi}
  volumeMounts:
    - {name: repository, mountPath: /repository}
    - {name: tmp, mountPath: /tmp}
    {{- include "likeness.pack.mount" . | nindent 4 }}
{{- end -}}

{{/* The container of Triton, without its name's dash and without restartPolicy. */}}
{{- define "likeness.triton.container" -}}
name: triton
image: {{ include "likeness.image" (list . .Values.triton.image) }}
imagePullPolicy: {{ .Values.triton.image.pullPolicy }}
command: [tritonserver]
args:
  - --model-repository=/repository/models
  - --grpc-port={{ .Values.triton.ports.grpc }}
  - --allow-http=false
  - --metrics-port={{ .Values.triton.ports.metrics }}
  - --disable-auto-complete-config
  - --exit-timeout-secs={{ .Values.triton.exitSeconds }}
ports:
  - {name: triton-grpc, containerPort: {{ .Values.triton.ports.grpc }}}
  - {name: triton-metrics, containerPort: {{ .Values.triton.ports.metrics }}}
startupProbe:
  grpc: {port: {{ .Values.triton.ports.grpc }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div (add (int .Values.triton.startupSeconds) 4) 5 }}
livenessProbe:
  grpc: {port: {{ .Values.triton.ports.grpc }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc: {port: {{ .Values.triton.ports.grpc }}}
  periodSeconds: 5
  timeoutSeconds: 3
securityContext:
  {{- toYaml .Values.containerSecurityContext | nindent 2 }}
resources:
  {{- include "likeness.resources" (list .Values.triton.resources .Values.triton.gpus .Values.triton.gpuResource) | nindent 2 }}
volumeMounts:
  - {name: repository, mountPath: /repository, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  - {name: shared-memory, mountPath: /dev/shm}
{{- end -}}

{{/* Volumes of pods with Triton, beside the pack's. */}}
{{- define "likeness.triton.volumes" }}
- name: repository
  emptyDir: {}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.triton.sharedMemory }}}
{{- end -}}
