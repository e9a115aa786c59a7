{{/* Parts of pods with an engine: those of mode single, and the engines of a fleet. */}}

{{- define "sluice.engineResources" -}}
{{- $resources := deepCopy .Values.engine.resources -}}
{{- with .Values.engine.gpu -}}
{{- if .count -}}
{{- $limits := deepCopy (default dict $resources.limits) -}}
{{- $_ := set $limits .resourceName (int .count) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{/* Options that an engine has in both modes. */}}
{{- define "sluice.engineArgs" -}}
{{- with .Values.model.servedName }}
- --served-model-name={{ . }}
{{- end }}
{{- $tensor := default (.Values.engine.gpu.count | int) (.Values.engine.tensorParallelSize | int) }}
{{- $hasModel := .Values.model.name }}
{{- if and $hasModel (gt $tensor 1) }}
- --tensor-parallel-size={{ $tensor }}
{{- end }}
{{- $nodes := ternary .Values.engine.nodesPerReplica 1 (eq .Values.mode "fleet") }}
{{- $pipeline := default ($nodes | int) (.Values.engine.pipelineParallelSize | int) }}
{{- if and $hasModel (gt $pipeline 1) }}
- --pipeline-parallel-size={{ $pipeline }}
{{- end }}
{{- with .Values.engine.gpu.kvCacheMemory }}
- --kv-cache-memory={{ . }}
{{- end }}
- --exit-timeout-secs={{ .Values.shutdown.exitTimeoutSeconds }}
{{- range .Values.engine.args }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* Called with (list . CONTAINER). */}}
{{- define "sluice.engineEnv" -}}
{{- $container := index . 1 -}}
{{- with index . 0 -}}
{{- include "sluice.huggingFaceEnv" . }}
{{- $limits := default dict .Values.engine.resources.limits }}
{{- if and $limits.cpu (not .Values.engine.gpu.count) }}
# A thread for each core that the limit allows: with one for each core of the node, they would wait for each other.
- name: SLUICE_NUM_THREADS
  valueFrom:
    resourceFieldRef: {containerName: {{ $container }}, resource: limits.cpu, divisor: "1"}
{{- end }}
{{- with .Values.engine.gpu.mps }}
{{- if .activeThreadPercentage }}
- {name: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, value: {{ .activeThreadPercentage | quote }}}
{{- end }}
{{- if .pinnedDeviceMemoryLimit }}
- {name: CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, value: {{ .pinnedDeviceMemoryLimit | quote }}}
{{- end }}
{{- end }}
{{- with .Values.engine.env }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}

{{/* The arguments of `sluice engine`. */}}
{{- define "sluice.engineCommand" -}}
- engine
- {{ .Values.model.name | quote }}
- --listen=tcp://0.0.0.0:5557
{{- if .Values.curve.enabled }}
- --curve-key=/etc/sluice/curve/engine.key_secret
- --allowed-clients=/etc/sluice/allowed-clients
{{- else }}
- --insecure
{{- end }}
- --health-host=0.0.0.0
- --health-port=8080
{{ include "sluice.engineArgs" . | trim }}
{{- end }}

{{/* The specification of a pod of a fleet's engine. Called with (dict "root" . "isWorker" BOOL). */}}
{{- define "sluice.enginePod" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{ include "sluice.podHead" (dict "root" $root "part" $values.engine "needsApi" false "gpu" (gt (int $values.engine.gpu.count) 0)) }}
containers:
  - name: {{ ternary "worker" "engine" .isWorker }}
    image: {{ include "sluice.image" $root }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    {{- if .isWorker }}
    command:
      {{- toYaml $values.engine.workerCommand | nindent 6 }}
    {{- else if $values.engine.leaderSetup }}
    command: [sh, -c, {{ printf "%s && exec sluice \"$@\"" $values.engine.leaderSetup | quote }}, sluice]
    {{- end }}
    {{- if not .isWorker }}
    args:
      {{- include "sluice.engineCommand" $root | nindent 6 }}
    ports:
      - {name: engine, containerPort: 5557}
      - {name: health, containerPort: 8080}
    {{- end }}
    {{- with include "sluice.engineEnv" (list $root (ternary "worker" "engine" .isWorker)) | trim }}
    env:
      {{- . | nindent 6 }}
    {{- end }}
    {{- if .isWorker }}
    # The first pod's streams need the others until they have ended.
    lifecycle:
      preStop:
        exec:
          command: [sleep, {{ add $values.shutdown.preStopSeconds $values.shutdown.exitTimeoutSeconds | quote }}]
    {{- else }}
    {{- include "sluice.probes" (dict "live" "/health/live" "ready" "/health/ready" "port" "health" "startup" $values.engine.startupTimeoutSeconds) | nindent 4 }}
    lifecycle:
      {{- include "sluice.preStop" $root | nindent 6 }}
    {{- end }}
    resources:
      {{- include "sluice.engineResources" $root | nindent 6 }}
    securityContext:
      {{- toYaml $values.securityContext | nindent 6 }}
    volumeMounts:
      {{- include "sluice.mounts" $root | nindent 6 }}
      {{- if include "sluice.ownSharedMemory" $root }}
      - {name: shm, mountPath: /dev/shm}
      {{- end }}
      {{- if and $values.curve.enabled (not .isWorker) }}
      - {name: curve, mountPath: /etc/sluice/curve, readOnly: true}
      - {name: allowed-clients, mountPath: /etc/sluice/allowed-clients, readOnly: true}
      {{- end }}
volumes:
  - name: data
    emptyDir: {}
  {{- if $values.persistence.cache.existingClaim }}
  - name: cache
    persistentVolumeClaim: {claimName: {{ $values.persistence.cache.existingClaim }}}
  {{- else if not $values.persistence.cache.enabled }}
  - name: cache
    emptyDir: {}
  {{- end }}
  {{- include "sluice.volumes" $root | nindent 2 }}
  {{- if include "sluice.ownSharedMemory" $root }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $values.engine.sharedMemory }}}
  {{- end }}
  {{- if and $values.curve.enabled (not .isWorker) }}
  - name: curve
    secret:
      secretName: {{ $values.curve.existingSecret }}
      defaultMode: 0440
      items: [{key: engine.key_secret, path: engine.key_secret}]
  - name: allowed-clients
    secret:
      secretName: {{ $values.curve.existingSecret }}
      items: [{key: gateway.key, path: gateway.key}]
  {{- end }}
{{- end }}
