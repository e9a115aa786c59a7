{{/* Values that contradict each other. values.schema.json checks each value alone. */}}
{{- define "sluice.check" -}}
{{- $values := .Values -}}
{{- if include "sluice.isFleet" . -}}
  {{- if not $values.model.name -}}
    {{- fail "model.name is empty: mode fleet needs the model that its engines serve, such as Qwen/Qwen3-8B" -}}
  {{- end -}}
  {{- if and $values.curve.enabled (not $values.curve.existingSecret) -}}
    {{- fail "curve.existingSecret is empty: mode fleet needs a Secret with the keys of gateways and engines (docs/kubernetes.md), or curve.enabled=false" -}}
  {{- end -}}
  {{- if and (not $values.curve.enabled) (not $values.networkPolicy.enabled) -}}
    {{- fail "curve.enabled and networkPolicy.enabled are both false: any pod could use the engines" -}}
  {{- end -}}
  {{- if or $values.persistence.data.enabled $values.persistence.data.existingClaim -}}
    {{- fail "persistence.data is for mode single: gateways of a fleet share no files (docs/kubernetes.md)" -}}
  {{- end -}}
  {{- if $values.inferencePool.enabled -}}
    {{- fail "inferencePool.enabled is for mode single: the gateways of a fleet choose the engines themselves" -}}
  {{- end -}}
  {{- if gt (int $values.engine.nodesPerReplica) 1 -}}
    {{- if not $values.engine.workerCommand -}}
      {{- fail "engine.workerCommand is empty: with engine.nodesPerReplica above 1 it is what the other pods of a replica run" -}}
    {{- end -}}
    {{- if and $values.persistence.cache.enabled (not $values.persistence.cache.existingClaim) -}}
      {{- fail "persistence.cache.enabled makes no claims for engines of several nodes: give persistence.cache.existingClaim" -}}
    {{- end -}}
  {{- end -}}
{{- else -}}
  {{- if gt (int $values.engine.nodesPerReplica) 1 -}}
    {{- fail "engine.nodesPerReplica is above 1: engines of several nodes need mode fleet" -}}
  {{- end -}}
  {{- $hasData := or $values.persistence.data.enabled $values.persistence.data.existingClaim -}}
  {{- if and $hasData (or (gt (int $values.gateway.replicas) 1) (ne $values.autoscaling.provider "none")) -}}
    {{- fail "persistence.data is for one replica: gateway.replicas must be 1 and autoscaling.provider none" -}}
  {{- end -}}
{{- end -}}
{{- if and (ne $values.engine.gpu.sharing "none") (not $values.engine.gpu.kvCacheMemory) -}}
  {{- fail (printf "engine.gpu.kvCacheMemory is empty: with engine.gpu.sharing=%s an engine would take the memory that others need" $values.engine.gpu.sharing) -}}
{{- end -}}
{{- if and (ne $values.engine.gpu.sharing "none") (gt (int $values.engine.gpu.count) 1) -}}
  {{- fail "engine.gpu.count is above 1: NVIDIA's device plugin gives a pod one share of a GPU" -}}
{{- end -}}
{{- if and $values.redis.bundled.enabled (or $values.redis.url $values.redis.existingSecret) -}}
  {{- fail "redis.bundled.enabled stands beside redis.url or redis.existingSecret: choose one" -}}
{{- end -}}
{{- if and $values.redis.bundled.enabled (or $values.redis.use.responses $values.redis.use.keys) -}}
  {{- fail "redis.use.responses and redis.use.keys need a Redis of yours that writes to its disk: the bundled one forgets" -}}
{{- end -}}
{{- if and $values.inferencePool.enabled (not $values.inferencePool.endpointPicker.name) -}}
  {{- fail "inferencePool.endpointPicker.name is empty: it is the Service of the endpoint picker" -}}
{{- end -}}
{{- if and $values.ingress.enabled (not $values.ingress.host) -}}
  {{- fail "ingress.host is empty: an Ingress for every host name would take other applications' requests" -}}
{{- end -}}
{{- if eq (int $values.autoscaling.minReplicas) 0 -}}
  {{- if ne $values.autoscaling.provider "keda" -}}
    {{- fail "autoscaling.minReplicas is 0: only keda starts a first replica; set autoscaling.provider to keda, or 1" -}}
  {{- end -}}
  {{- if not (include "sluice.isFleet" .) -}}
    {{- fail "autoscaling.minReplicas is 0: a gateway must hold the requests; set mode to fleet, or 1" -}}
  {{- end -}}
{{- end -}}
{{- if gt (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas) -}}
  {{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas" -}}
{{- end -}}
{{- end }}
