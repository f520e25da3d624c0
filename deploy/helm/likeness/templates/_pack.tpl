{{/* Folder of the pack in the containers that read it. */}}
{{- define "likeness.pack.directory" -}}
{{- $pack := .Values.reward.pack -}}
{{- $path := "" -}}
{{- if eq $pack.source "pvc" -}}{{- $path = $pack.pvc.path -}}{{- end -}}
{{- if eq $pack.source "image" -}}{{- $path = $pack.image.path -}}{{- end -}}
{{- if $path -}}/packs/default/{{ trimAll "/" $path }}{{- else -}}/packs/default{{- end -}}
{{- end -}}

{{/* The pack's volume. */}}
{{- define "likeness.pack.volumes" -}}
{{- $pack := .Values.reward.pack -}}
{{- if eq $pack.source "pvc" }}
- name: pack
  persistentVolumeClaim: {claimName: {{ $pack.pvc.claim }}, readOnly: true}
{{- else if eq $pack.source "image" }}
- name: pack
  image: {reference: {{ $pack.image.reference | quote }}, pullPolicy: {{ $pack.image.pullPolicy }}}
{{- else if eq $pack.source "download" }}
- name: pack
  emptyDir: {sizeLimit: {{ $pack.download.sizeLimit }}}
- name: pack-script
  configMap: {name: {{ include "likeness.fullname" . }}-pack-script}
{{- end }}
{{- end -}}

{{/* Its mount in containers that read it. */}}
{{- define "likeness.pack.mount" -}}
{{- if eq .Values.reward.pack.source "download" }}
- {name: pack, mountPath: /packs, readOnly: true}
{{- else if ne .Values.reward.pack.source "none" }}
- {name: pack, mountPath: /packs/default, readOnly: true}
{{- end }}
{{- end -}}

{{/* The init container that downloads it. */}}
{{- define "likeness.pack.download" -}}
{{- $download := .Values.reward.pack.download -}}
{{- if eq .Values.reward.pack.source "download" }}
- name: fetch-pack
  image: {{ include "likeness.image" (list . .Values.reward.image) }}
  imagePullPolicy: {{ .Values.reward.image.pullPolicy }}
  command: [python, /scripts/fetch_pack.py]
  args: [{{ $download.url | quote }}, {{ $download.sha256 | quote }}, /packs/default]
  securityContext:
    {{- toYaml .Values.containerSecurityContext | nindent 4 }}
  {{- if $download.authorizationSecret }}
  env:
    - name: PACK_AUTHORIZATION
      valueFrom: {secretKeyRef: {name: {{ $download.authorizationSecret }}, key: {{ $download.authorizationKey }}}}
  {{- end }}
  resources:
    requests: {cpu: 100m, memory: 128Mi}
    limits: {memory: 512Mi}
  volumeMounts:
    - {name: pack, mountPath: /packs}
    - {name: pack-script, mountPath: /scripts, readOnly: true}
{{- end }}
{{- end -}}
