{{/* Settings of a run over the defaults. Takes (list $ name). */}}
{{- define "likeness.run" -}}
{{- $root := index . 0 -}}
{{- $own := default dict (get $root.Values.trainer.runs (index . 1)) -}}
{{- toJson (mergeOverwrite (deepCopy $root.Values.trainer.defaults) (deepCopy $own)) -}}
{{- end -}}

{{/* Name of a run's Job, Service and ConfigMap. Takes (list $ name). */}}
{{- define "likeness.run.name" -}}
{{ include "likeness.fullname" (index . 0) }}-{{ index . 1 }}
{{- end -}}

{{/* Labels of a run's objects. Takes (list $ name). */}}
{{- define "likeness.run.labels" -}}
{{ include "likeness.labels" (list (index . 0) "trainer") }}
likeness-run: {{ index . 1 }}
{{- end -}}

{{/* Processes of a run: one a GPU, one a node without. */}}
{{- define "likeness.run.processes" -}}
{{- mul (int .nodes) (max 1 (int .gpusPerNode)) -}}
{{- end -}}

{{/*
The command of a run. One process is started as it is; more by torchrun, where the first pod holds rank 0: torchrun
numbers nodes by the order of their names. Takes (list $ name run).
*/}}
{{- define "likeness.run.arguments" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $run := index . 2 -}}
{{- $own := include "likeness.run.name" (list $root $name) -}}
{{- if eq (include "likeness.run.processes" $run) "1" }}
- likeness-trainer
{{- else }}
- torchrun
{{- if ne $run.kind "trainjob" }}
- --nnodes={{ int $run.nodes }}
- --nproc-per-node={{ max 1 (int $run.gpusPerNode) }}
- --max-restarts={{ int $run.torchrunRestarts }}
- --shutdown-timeout={{ int $run.gracePeriodSeconds }}
{{- if gt (int $run.nodes) 1 }}
{{- $first := printf "%s-0.%s" $own $own }}
{{- if eq $run.kind "jobset" }}
{{- $first = printf "%s-node-0-0.%s" $own $own }}
{{- end }}
- --rdzv-backend=c10d
- --rdzv-endpoint={{ $first }}.{{ $root.Release.Namespace }}.svc:{{ int $run.rendezvousPort }}
- --rdzv-id={{ $own }}
{{- else }}
- --standalone
{{- end }}
{{- end }}
- -m
- likeness_trainer
{{- end }}
- train
{{- if $run.recipeInline }}
- /etc/likeness/recipe/recipe.yaml
{{- else }}
- {{ $run.recipe }}
{{- end }}
- --set=run_dir=/runs/{{ $name }}
- --set=reward.endpoint={{ include "likeness.reward.endpoint" $root }}
{{- with include "likeness.run.access" $root }}
{{ . }}
{{- end }}
{{- range $key, $value := $run.set }}
- {{ printf "--set=%s=%s" $key (include "likeness.word" $value) | quote }}
{{- end }}
{{- if $run.acceptOtherReward }}
- --accept-other-reward
{{- end }}
{{- end -}}

{{/* Where a trainer finds token and keys for the reward service. */}}
{{- define "likeness.run.access" -}}
{{- $lines := list -}}
{{- if include "likeness.run.tokenSecret" . -}}
{{- $lines = append $lines "- --set=reward.token_file=/etc/likeness/token/token" -}}
{{- end -}}
{{- if include "likeness.run.caSecret" . -}}
{{- $lines = append $lines "- --set=reward.tls_ca=/etc/likeness/ca/ca.crt" -}}
{{- end -}}
{{- if .Values.trainer.access.clientSecret -}}
{{- $lines = append $lines "- --set=reward.tls_cert=/etc/likeness/client/tls.crt" -}}
{{- $lines = append $lines "- --set=reward.tls_key=/etc/likeness/client/tls.key" -}}
{{- end -}}
{{- $fingerprint := .Values.reward.expectFingerprint -}}
{{- if and .Values.reward.enabled (eq (len $fingerprint) 64) -}}
{{- $lines = append $lines (printf "- --set=reward.expected_fingerprint='%s'" $fingerprint) -}}
{{- end -}}
{{- join "\n" $lines -}}
{{- end -}}

{{- define "likeness.run.tokenSecret" -}}
{{- if .Values.trainer.access.tokenSecret -}}{{ .Values.trainer.access.tokenSecret }}
{{- else if and .Values.reward.enabled (not .Values.trainer.rewardEndpoint) -}}{{ .Values.reward.token.secret }}{{- end -}}
{{- end -}}

{{- define "likeness.run.tokenKey" -}}
{{- if .Values.trainer.access.tokenSecret -}}{{ .Values.trainer.access.tokenKey }}{{- else -}}{{ .Values.reward.token.key }}{{- end -}}
{{- end -}}

{{- define "likeness.run.caSecret" -}}
{{- if .Values.trainer.access.caSecret -}}{{ .Values.trainer.access.caSecret }}
{{- else if and .Values.reward.enabled (not .Values.trainer.rewardEndpoint) -}}{{ .Values.reward.tls.secret }}{{- end -}}
{{- end -}}

{{/* Claim of a kind of storage. Takes (list $ kind). */}}
{{- define "likeness.claim" -}}
{{- $root := index . 0 -}}
{{- $kind := index . 1 -}}
{{- default (printf "%s-%s" (include "likeness.fullname" $root) $kind) (get $root.Values.storage $kind).existingClaim -}}
{{- end -}}

{{/* The pod of a run, as the template of a Job. Takes (list $ name run). */}}
{{- define "likeness.run.pod" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $run := index . 2 -}}
{{- $many := gt (int (include "likeness.run.processes" $run)) 1 -}}
metadata:
  labels:
    {{- include "likeness.podLabels" (list $root "trainer") | nindent 4 }}
    likeness-run: {{ $name }}
    {{- with $run.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $run.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "likeness.podDefaults" $root | nindent 2 }}
  {{- include "likeness.placement" $run | nindent 2 }}
  restartPolicy: Never
  terminationGracePeriodSeconds: {{ add (int $run.gracePeriodSeconds) (ternary 30 0 $many) }}
  {{- if eq $run.kind "job" }}
  subdomain: {{ include "likeness.run.name" (list $root $name) }}
  {{- end }}
  {{- if $run.paintPeople }}
  initContainers:
    - name: paint-people
      image: {{ include "likeness.image" (list $root $run.image) }}
      imagePullPolicy: {{ $run.image.pullPolicy }}
      command: [sh, -c]
      args:
        - >-
          python -m likeness_toyworld.dataset /data/train --clips 48 &&
          python -m likeness_toyworld.dataset /data/held_out --clips 32 --held-out
      securityContext:
        {{- toYaml $root.Values.containerSecurityContext | nindent 8 }}
      resources:
        requests: {cpu: 500m, memory: 512Mi}
        limits: {memory: 2Gi}
      volumeMounts:
        - {name: data, mountPath: /data}
        - {name: tmp, mountPath: /tmp}
  {{- end }}
  containers:
    - name: {{ ternary "node" "trainer" (eq $run.kind "trainjob") }}
      image: {{ include "likeness.image" (list $root $run.image) }}
      imagePullPolicy: {{ $run.image.pullPolicy }}
      command: [sh, -c]
      args:
        - |
          {{- $root.Files.Get "files/start_run.sh" | nindent 10 }}
        - start-run
        {{- include "likeness.run.arguments" . | nindent 8 }}
      env:
        - {name: RUN_DIR, value: /runs/{{ $name }}}
        {{- if and $many (gt (int $run.nodes) 1) (ne $run.kind "trainjob") }}
        - {name: RENDEZVOUS, value: c10d}
        # Processes that start again must not read addresses of those before.
        - {name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE, value: "1"}
        {{- end }}
        - {name: HF_HOME, value: /cache/huggingface}
        - {name: TORCHINDUCTOR_CACHE_DIR, value: /cache/inductor}
        - {name: TRITON_CACHE_DIR, value: /cache/triton}
        {{- with $run.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if and $many (gt (int $run.nodes) 1) (ne $run.kind "trainjob") }}
      ports:
        - {name: rendezvous, containerPort: {{ int $run.rendezvousPort }}}
      {{- end }}
      securityContext:
        {{- toYaml $root.Values.containerSecurityContext | nindent 8 }}
      resources:
        {{- include "likeness.resources" (list $run.resources $run.gpusPerNode $run.gpuResource) | nindent 8 }}
      volumeMounts:
        - {name: runs, mountPath: /runs}
        - {name: cache, mountPath: /cache}
        - {name: tmp, mountPath: /tmp}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- if $root.Values.storage.models.existingClaim }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if or $root.Values.storage.data.existingClaim $run.paintPeople }}
        - {name: data, mountPath: /data, readOnly: true}
        {{- end }}
        {{- if $run.recipeInline }}
        - {name: recipe, mountPath: /etc/likeness/recipe, readOnly: true}
        {{- end }}
        {{- if include "likeness.run.tokenSecret" $root }}
        - {name: token, mountPath: /etc/likeness/token, readOnly: true}
        {{- end }}
        {{- if include "likeness.run.caSecret" $root }}
        - {name: ca, mountPath: /etc/likeness/ca, readOnly: true}
        {{- end }}
        {{- if $root.Values.trainer.access.clientSecret }}
        - {name: client, mountPath: /etc/likeness/client, readOnly: true}
        {{- end }}
        {{- with $run.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "likeness.run.volumes" . | nindent 4 }}
{{- end -}}

{{/* Volumes of a run's pod. Takes (list $ name run). */}}
{{- define "likeness.run.volumes" -}}
{{- $root := index . 0 -}}
{{- $run := index . 2 -}}
- name: runs
  persistentVolumeClaim: {claimName: {{ include "likeness.claim" (list $root "runs") }}}
- name: cache
  {{- if $root.Values.storage.cache.enabled }}
  persistentVolumeClaim: {claimName: {{ include "likeness.claim" (list $root "cache") }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
- name: tmp
  emptyDir: {}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ $run.sharedMemory }}}
{{- with $root.Values.storage.models.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- if $run.paintPeople }}
- name: data
  emptyDir: {}
{{- else if $root.Values.storage.data.existingClaim }}
- name: data
  persistentVolumeClaim: {claimName: {{ $root.Values.storage.data.existingClaim }}, readOnly: true}
{{- end }}
{{- if $run.recipeInline }}
- name: recipe
  configMap: {name: {{ include "likeness.run.name" (list $root (index . 1)) }}}
{{- end }}
{{- with include "likeness.run.tokenSecret" $root }}
- name: token
  secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: {{ include "likeness.run.tokenKey" $root }}, path: token}]}
{{- end }}
{{- with include "likeness.run.caSecret" $root }}
- name: ca
  secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- with $root.Values.trainer.access.clientSecret }}
- name: client
  secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]}
{{- end }}
{{- with $run.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The spec of a run's Job. Takes (list $ name run). */}}
{{- define "likeness.run.job" -}}
{{- $run := index . 2 -}}
completionMode: Indexed
completions: {{ int $run.nodes }}
parallelism: {{ int $run.nodes }}
{{- if eq $run.kind "job" }}
backoffLimit: {{ int $run.backoffLimit }}
{{- with $run.ttlSecondsAfterFinished }}
ttlSecondsAfterFinished: {{ int . }}
{{- end }}
suspend: {{ $run.suspend }}
{{- else }}
# The set restarts as a whole.
backoffLimit: 0
{{- end }}
{{- with $run.activeDeadlineSeconds }}
activeDeadlineSeconds: {{ int . }}
{{- end }}
# Two pods must never write the same run: a new one waits until the old one has ended.
podReplacementPolicy: Failed
podFailurePolicy:
  rules:
    # Drained, preempted or evicted: no fault of the run.
    - action: Ignore
      onPodConditions:
        - {type: DisruptionTarget, status: "True"}
    # 2: a setting, file or row is wrong, and stays so. torchrun has exit codes of its own.
    - action: FailJob
      onExitCodes: {operator: In, values: [2]}
template:
  {{- include "likeness.run.pod" . | nindent 2 }}
{{- end -}}

{{/* The spec of a run's JobSet, also inside a TrainingRuntime. Takes (list $ name run). */}}
{{- define "likeness.run.jobset" -}}
{{- $run := index . 2 -}}
failurePolicy:
  maxRestarts: {{ int $run.backoffLimit }}
  rules:
    - name: wrongSettings
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
replicatedJobs:
  - name: node
    replicas: 1
    template:
      {{- if eq $run.kind "trainjob" }}
      metadata:
        labels:
          trainer.kubeflow.org/trainjob-ancestor-step: trainer
      {{- end }}
      spec:
        {{- include "likeness.run.job" . | nindent 8 }}
{{- end -}}
