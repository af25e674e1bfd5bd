{{- /* The port of gammaray's own metrics in the pods; nothing where there is none. */ -}}
{{- define "gammaray.metricsPort" -}}
{{- $port := dig "telemetry" "prometheus_port" 9464 .Values.config | int }}
{{- if $port }}{{ $port }}{{ end }}
{{- end }}

{{- /* The port of HTTP in the pods. */ -}}
{{- define "gammaray.httpPort" -}}
{{- dig "server" "port" 8000 .Values.config | int }}
{{- end }}

{{- /* The Service that Ingress and HTTPRoute lead to: (list $ "ingress"). */ -}}
{{- define "gammaray.backend" -}}
{{- $root := first . }}
{{- if include "gammaray.incremental" $root }}
{{- printf "%s.enabled does not go with upgrade.strategy NewClusterWithIncrementalUpgrade: the operator makes a Gateway and its route itself" (last .) | fail }}
{{- end }}
{{- include "gammaray.serveService" $root }}
{{- end }}

{{- /* Pods of each worker group, by its name. */ -}}
{{- define "gammaray.podsOfPools" -}}
{{- if .Values.ingressPool.enabled }}
ingress: {{ .Values.ingressPool.replicas }}
{{- end }}
{{- range $name, $pool := include "gammaray.pools" . | fromYaml }}
{{ $name | quote }}: {{ $pool.replicas }}
{{- end }}
{{- end }}

{{- /* How Prometheus reads the metrics: whose pod it is, and the operator's key where one is asked for. */ -}}
{{- define "gammaray.scrape" -}}
relabelings:
  - {sourceLabels: [__meta_kubernetes_pod_label_ray_io_cluster], targetLabel: ray_io_cluster}
{{- if dig "server" "protect_metrics" false .Values.config }}
{{- $secret := .Values.keys.operator.existingSecret }}
{{- $key := .Values.monitoring.operatorKey }}
{{- if not (and $secret $key) }}
{{- fail "config.server.protect_metrics keeps Prometheus out: name a key of keys.operator.existingSecret in monitoring.operatorKey" }}
{{- end }}
authorization:
  credentials: {name: {{ $secret | quote }}, key: {{ $key | quote }}}
{{- end }}
{{- end }}
