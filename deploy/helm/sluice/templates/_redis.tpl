{{/* How servers find Redis. */}}

{{/* The address where the chart knows it: the operator's, or the bundled one's. */}}
{{- define "sluice.redisUrl" -}}
{{- if .Values.redis.url -}}{{ .Values.redis.url }}
{{- else if .Values.redis.bundled.enabled -}}redis://{{ include "sluice.redisName" . }}:6379/0
{{- end -}}
{{- end }}

{{/* Variables of the stores in Redis. Variables, because an address may have a password. */}}
{{- define "sluice.redisEnv" -}}
{{- $url := include "sluice.redisUrl" . -}}
{{- $secret := .Values.redis.existingSecret -}}
{{- if or $url $secret -}}
{{- $stores := dict "quotas" "SLUICE_QUOTA_STORE" "streams" "SLUICE_STREAM_STORE" "responses" "SLUICE_RESPONSES_STORE" "keys" "SLUICE_KEYS_STORE" -}}
{{- range $use, $variable := $stores }}
{{- if index $.Values.redis.use $use }}
- name: {{ $variable }}
  {{- if $secret }}
  valueFrom:
    secretKeyRef: {name: {{ $secret }}, key: url}
  {{- else }}
  value: {{ $url | quote }}
  {{- end }}
{{- end }}
{{- end }}
{{- if and $url .Values.redis.use.cache (not $secret) }}
{{- $parts := urlParse $url }}
- name: SLUICE_CACHE_CONFIG
  value: {{ printf "redis,host=%s;redis,port=%s;redis,ttl=%d" (regexReplaceAll ":[0-9]+$" $parts.host "") (default "6379" (regexFind "[0-9]+$" (regexFind ":[0-9]+$" $parts.host))) (int .Values.redis.cacheSeconds) | quote }}
{{- end }}
{{- end -}}
{{- end }}
