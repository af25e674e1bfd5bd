{{/* The name that all objects begin with; KubeRay adds to it. */}}
{{- define "gammaray.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name -}}
{{- end -}}
{{- end -}}

{{/* What selects our pods; never changes. Not app.kubernetes.io/name: the Service RELEASE-head-svc, which KubeRay makes
for a RayService, looks for heads that have its own name there. */}}
{{- define "gammaray.selectorLabels" -}}
app.kubernetes.io/part-of: gammaray
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Labels of objects. Pods do not have those of the version: KubeRay takes a changed pod for a new cluster. */}}
{{- define "gammaray.labels" -}}
{{ include "gammaray.selectorLabels" . }}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* An image: (dict "root" $ "gpus" 0). */}}
{{- define "gammaray.image" -}}
{{- $image := .root.Values.image -}}
{{- $digest := ternary $image.cudaDigest $image.digest (gt (int .gpus) 0) -}}
{{- $tag := default .root.Chart.AppVersion $image.tag -}}
{{- if $digest -}}
{{ $image.repository }}@{{ $digest }}
{{- else -}}
{{ $image.repository }}:{{ $tag }}{{ if gt (int .gpus) 0 }}-cuda{{ end }}
{{- end -}}
{{- end -}}

{{- define "gammaray.serviceAccountName" -}}
{{- default (ternary (include "gammaray.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{/* The claim of the model cache, ours or one that was there. */}}
{{- define "gammaray.modelClaim" -}}
{{- default (printf "%s-models" (include "gammaray.fullname" .)) .Values.modelCache.existingClaim -}}
{{- end -}}

{{- define "gammaray.incremental" -}}
{{- if eq .Values.upgrade.strategy "NewClusterWithIncrementalUpgrade" }}true{{ end -}}
{{- end -}}

{{/* The Service that KubeRay makes for HTTP; in incremental upgrades there is none of this name. */}}
{{- define "gammaray.serveService" -}}
{{ include "gammaray.fullname" . }}-serve-svc
{{- end -}}

{{/* The template of claims that a ComputeDomain makes. */}}
{{- define "gammaray.channelTemplate" -}}
{{ include "gammaray.fullname" . }}-channel
{{- end -}}

{{/* What Ray Serve is told, and tells gammaray.cluster.service: (dict "root" $ "pods" PODS BY POOL). */}}
{{- define "gammaray.serveConfig" -}}
{{- $values := .root.Values -}}
{{- $ingress := $values.ingressPool -}}
{{- $keys := or $values.keys.tenants $values.keys.operator.existingSecret -}}
proxy_location: EveryNode
http_options: {host: 0.0.0.0, port: {{ include "gammaray.httpPort" .root }}}
logging_config: {enable_access_log: false, log_level: WARNING}
applications:
  - name: gammaray
    route_prefix: /
    import_path: gammaray.cluster.service:application
    args:
      config:
        {{- mergeOverwrite (deepCopy $values.config) (dict "server" (dict "host" "0.0.0.0")) | toYaml | nindent 8 }}
      pools: {{ toJson .pods }}
      ingress: {pool: {{ ternary "ingress" "null" $ingress.enabled }}, replicas: {{ ternary $ingress.replicas 1 $ingress.enabled | int }}}
      keys: {{ ternary "null" "/etc/gammaray/keys" (empty $keys) }}
{{- end -}}

{{/* The pools as YAML, what they do not say from poolDefaults. */}}
{{- define "gammaray.pools" -}}
{{- $pools := dict -}}
{{- range $name, $own := .Values.pools -}}
{{- $pool := mergeOverwrite (deepCopy $.Values.poolDefaults) (deepCopy (default dict $own)) -}}
{{- range $bound := list "minReplicas" "maxReplicas" -}}
{{- if kindIs "invalid" (index $pool $bound) }}{{ $_ := set $pool $bound $pool.replicas }}{{ end -}}
{{- end -}}
{{- $_ := set $pools $name $pool -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end -}}
