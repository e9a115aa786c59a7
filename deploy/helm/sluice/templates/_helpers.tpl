{{/* Names, labels and parts of pods that several templates share. */}}

{{/* Short: a StatefulSet's name has to leave room for what Kubernetes adds in labels of 63 characters. */}}
{{- define "sluice.fullname" -}}
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
{{- end }}

{{- define "sluice.isFleet" -}}
{{- if eq .Values.mode "fleet" }}true{{ end -}}
{{- end }}

{{/* What answers clients: whole servers, or gateways. */}}
{{- define "sluice.frontComponent" -}}
{{- ternary "gateway" "server" (eq .Values.mode "fleet") -}}
{{- end }}

{{- define "sluice.frontName" -}}
{{- $name := include "sluice.fullname" . -}}
{{- ternary (printf "%s-gateway" $name) $name (eq .Values.mode "fleet") -}}
{{- end }}

{{- define "sluice.engineName" -}}
{{- printf "%s-engine" (include "sluice.fullname" .) -}}
{{- end }}

{{/* Not the name of the engines' Service: the controller of LeaderWorkerSets makes a Service of the group's name. */}}
{{- define "sluice.engineGroupName" -}}
{{- printf "%s-group" (include "sluice.fullname" .) -}}
{{- end }}

{{- define "sluice.redisName" -}}
{{- printf "%s-redis" (include "sluice.fullname" .) -}}
{{- end }}

{{- define "sluice.metadata" -}}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "sluice.labels" . | nindent 2 }}
{{- end }}

{{- define "sluice.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* The labels by which one component's pods are found. Called with (list . COMPONENT). */}}
{{- define "sluice.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "sluice.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "sluice.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{- define "sluice.image" -}}
{{- printf "%s:%s" .Values.image.repository .Values.image.tag -}}
{{- end }}

{{- define "sluice.frontImage" -}}
{{- $own := ternary .Values.gateway.imageTag "" (eq .Values.mode "fleet") -}}
{{- printf "%s:%s" .Values.image.repository (default .Values.image.tag $own) -}}
{{- end }}

{{/* Names of Secrets: the operator's, else the chart's where it has a value, else none. */}}
{{- define "sluice.apiKeySecret" -}}
{{- if .Values.auth.existingSecret -}}{{ .Values.auth.existingSecret }}
{{- else if .Values.auth.apiKey -}}{{ include "sluice.fullname" . }}
{{- end -}}
{{- end }}

{{- define "sluice.huggingFaceSecret" -}}
{{- if .Values.huggingFace.existingSecret -}}{{ .Values.huggingFace.existingSecret }}
{{- else if .Values.huggingFace.token -}}{{ include "sluice.fullname" . }}
{{- end -}}
{{- end }}

{{/* preStop, then --exit-timeout-secs, then 15 seconds after which a server that hangs ends itself, and some more. */}}
{{- define "sluice.gracePeriod" -}}
{{- add .Values.shutdown.preStopSeconds .Values.shutdown.exitTimeoutSeconds 20 -}}
{{- end }}

{{- define "sluice.preStop" -}}
preStop:
  exec:
    command: [sleep, {{ .Values.shutdown.preStopSeconds | quote }}]
{{- end }}

{{/* Probes. Called with (dict "live" PATH "ready" PATH "port" NAME "startup" SECONDS). The startup probe holds the
others back while a model loads, so they need no initial delay. */}}
{{- define "sluice.probes" -}}
startupProbe:
  httpGet: {path: {{ .ready }}, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (div (add .startup 4) 5) }}
livenessProbe:
  httpGet: {path: {{ .live }}, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: {{ .ready }}, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
{{- end }}

{{/* Whether there is a volume of models. */}}
{{- define "sluice.hasModelVolume" -}}
{{- with .Values.model.volume }}{{ if or .existingClaim .hostPath .init.image }}true{{ end }}{{ end -}}
{{- end }}

{{/* The parts of every pod that runs Sluice, before its containers. Called with (dict "root" . "part" VALUES
"needsApi" BOOL "gpu" BOOL). */}}
{{- define "sluice.podHead" -}}
{{- $root := .root -}}
serviceAccountName: {{ include "sluice.serviceAccountName" $root }}
automountServiceAccountToken: {{ .needsApi }}
# Variables of services called sluice would be read as options: SLUICE_HTTP_PORT=tcp://...
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "sluice.gracePeriod" $root }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with .part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or .part.tolerations .gpu }}
tolerations:
  {{- if .gpu }}
  - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
  {{- end }}
  {{- with .part.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- with .part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.model.volume.init }}
{{- if .image }}
initContainers:
  - name: model
    image: {{ .image }}
    {{- with .command }}
    command:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with .args }}
    args:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- if or .env (include "sluice.huggingFaceSecret" $root) }}
    env:
      {{- include "sluice.huggingFaceEnv" $root | nindent 6 }}
      {{- with .env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- end }}
    securityContext:
      {{- toYaml $root.Values.securityContext | nindent 6 }}
    volumeMounts:
      - {name: models, mountPath: {{ $root.Values.model.volume.mountPath }}}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}
{{- end }}

{{- define "sluice.huggingFaceEnv" -}}
{{- with include "sluice.huggingFaceSecret" . -}}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: token}
{{- end -}}
{{- end }}

{{/* Mounts and volumes of every pod that runs Sluice, without data and cache, whose kinds differ. */}}
{{- define "sluice.mounts" -}}
- {name: data, mountPath: /var/lib/sluice}
- {name: cache, mountPath: /var/cache/sluice}
- {name: tmp, mountPath: /tmp}
{{- if include "sluice.hasModelVolume" . }}
- {name: models, mountPath: {{ .Values.model.volume.mountPath }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "sluice.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if include "sluice.hasModelVolume" . }}
- name: models
  {{- if .Values.model.volume.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.model.volume.existingClaim }}}
  {{- else if .Values.model.volume.hostPath }}
  hostPath: {path: {{ .Values.model.volume.hostPath }}, type: Directory}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
{{- end }}

{{/* NVIDIA's device plugin mounts a /dev/shm of its own into pods that share a GPU by MPS. */}}
{{- define "sluice.ownSharedMemory" -}}
{{- if ne .Values.engine.gpu.sharing "mps" }}true{{ end -}}
{{- end }}
