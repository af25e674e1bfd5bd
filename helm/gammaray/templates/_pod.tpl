{{/* Variables of every Ray process: gammaray.cluster.service.environment says the same, and a test compares. */}}
{{- define "gammaray.environment" -}}
{{- $told := default dict .Values.config.telemetry -}}
{{- $ratio := float64 (default 0 $told.trace_ratio) -}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_SERVE_LOG_TO_STDERR, value: "0"}
- {name: RAY_SERVE_USE_GRPC_BY_DEFAULT, value: "1"}
- {name: RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS, value: "1"}
- {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: gammaray.cluster.proxy.middlewares}
- {name: GAMMARAY_MAX_BODY_BYTES, value: {{ dig "server" "max_body_bytes" 4194304 .Values.config | int64 | quote }}}
{{- if and $told.otlp_endpoint $ratio }}
- {name: RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH, value: "gammaray.telemetry.tracing:span_processors"}
- {name: RAY_SERVE_TRACING_SAMPLING_RATIO, value: {{ ternary "1.0" (toString $ratio) (eq $ratio 1.0) | quote }}}
- {name: GAMMARAY_OTLP_ENDPOINT, value: {{ $told.otlp_endpoint | quote }}}
{{- end }}
{{- end -}}

{{/* Variables of one pod: (dict "root" $ "pool" NAME or ""). */}}
{{- define "gammaray.podEnvironment" -}}
{{- $values := .root.Values -}}
{{ include "gammaray.environment" .root }}
{{- if not $values.auth.enabled }}
- {name: RAY_AUTH_MODE, value: disabled}
{{- end }}
- {name: HF_HOME, value: {{ $values.modelCache.mountPath | quote }}}
{{- with $values.huggingFace.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $values.huggingFace.secretKey | quote }}}}
{{- end }}
{{- if .pool }}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: GAMMARAY_POOL, value: {{ .pool | quote }}}
{{- end }}
{{- end -}}

{{/* A probe that asks over HTTP: (dict "path" "port" "fields" and, of a startup probe, "seconds"). */}}
{{- define "gammaray.probe" -}}
{{- $fields := deepCopy .fields -}}
{{- if .seconds -}}
{{- $_ := set $fields "failureThreshold" (divf .seconds (default 10 $fields.periodSeconds) | ceil | int) -}}
{{- end -}}
{{- $port := ternary (int .port) .port (ne (int .port) 0) -}}
{{- set $fields "httpGet" (dict "path" .path "port" $port) | toYaml -}}
{{- end -}}

{{/* Requests and limits alike, so that pods are Guaranteed: (dict "root" $ "own" POD). */}}
{{- define "gammaray.resources" -}}
{{- $all := deepCopy .own.resources -}}
{{- $claims := list -}}
{{- range .own.resourceClaims }}{{ $claims = append $claims (dict "name" .name) }}{{ end -}}
{{- if gt (int .own.gpus) 0 -}}
{{- with .own.gpuResource }}{{ $_ := set $all . (int $.own.gpus) }}{{ end -}}
{{- if .root.Values.computeDomain.enabled }}{{ $claims = append $claims (dict "name" "channel") }}{{ end -}}
{{- end -}}
{{- $resources := dict "requests" $all "limits" $all -}}
{{- with $claims }}{{ $_ := set $resources "claims" . }}{{ end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Volumes of one pod, and with "mounts" where they are: (dict "root" $ "own" POD "head" BOOL "mounts" BOOL). */}}
{{- define "gammaray.volumes" -}}
{{- $values := .root.Values -}}
{{- $volumes := list -}}
{{- $memory := dict "medium" "Memory" "sizeLimit" .own.shmSize -}}
{{- $volumes = append $volumes (dict "at" "/dev/shm" "is" (dict "name" "shm" "emptyDir" $memory)) -}}
{{- $models := dict "name" "models" "emptyDir" dict -}}
{{- if or $values.modelCache.enabled $values.modelCache.existingClaim -}}
{{- $claim := dict "claimName" (include "gammaray.modelClaim" .root) -}}
{{- $models = dict "name" "models" "persistentVolumeClaim" $claim -}}
{{- end -}}
{{- $volumes = append $volumes (dict "at" $values.modelCache.mountPath "is" $models) -}}
{{- if .head -}}
{{- range $i, $tenant := default dict $values.keys.tenants | keys | sortAlpha -}}
{{- $secret := dict "secretName" (get $values.keys.tenants $tenant).existingSecret -}}
{{- $at := printf "/etc/gammaray/keys/tenants/%s" $tenant -}}
{{- $volumes = append $volumes (dict "at" $at "is" (dict "name" (printf "keys-%d" $i) "secret" $secret)) -}}
{{- end -}}
{{- with $values.keys.operator.existingSecret -}}
{{- $secret := dict "name" "keys-operator" "secret" (dict "secretName" .) -}}
{{- $volumes = append $volumes (dict "at" "/etc/gammaray/keys/operator" "is" $secret) -}}
{{- end -}}
{{- end -}}
{{- $found := list -}}
{{- range $volumes -}}
{{- if $.mounts -}}
{{- $mount := dict "name" .is.name "mountPath" .at -}}
{{- if hasKey .is "secret" }}{{ $_ := set $mount "readOnly" true }}{{ end -}}
{{- $found = append $found $mount -}}
{{- else -}}
{{- $found = append $found .is -}}
{{- end -}}
{{- end -}}
{{- concat $found (ternary .own.extraVolumeMounts .own.extraVolumes .mounts | default list) | toYaml -}}
{{- end -}}

{{/*
One pod of the Ray cluster, as its template: (dict "root" $ "own" POD "pool" NAME or "" "serves" BOOL). `serves`: HTTP
comes in through it, so its port has the name that the Service looks for.
*/}}
{{- define "gammaray.pod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $own := .own -}}
{{- $head := not .pool -}}
{{- $port := dig "server" "port" 8000 $values.config | int -}}
{{- /* Ready means that HTTP may come in. Only then does the proxy have to be there, which a pod of drafts never has. */ -}}
{{- $incremental := eq (include "gammaray.incremental" $root) "true" -}}
{{- $proxied := and (not $head) (or .serves $incremental) -}}
metadata:
  labels:
    {{- include "gammaray.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ default "head" .pool | quote }}
    {{- with $own.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $annotations := deepCopy (default dict $own.podAnnotations) }}
  {{- if not $head }}{{ $_ := set $annotations "ray.io/overwrite-container-cmd" "true" }}{{ end }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "gammaray.serviceAccountName" $root | quote }}
  automountServiceAccountToken: {{ and $head $values.autoscaling.enabled }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ int $values.terminationGracePeriodSeconds }}
  securityContext:
    {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $field := list "priorityClassName" "runtimeClassName" }}
  {{- with get $own $field }}
  {{ $field }}: {{ . | quote }}
  {{- end }}
  {{- end }}
  {{- $selector := deepCopy (default dict $own.nodeSelector) }}
  {{- with $own.accelerator }}{{ $_ := set $selector "nvidia.com/gpu.product" . }}{{ end }}
  {{- with $selector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $field := list "tolerations" "affinity" "topologySpreadConstraints" }}
  {{- with get $own $field }}
  {{ $field }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- $claims := default list $own.resourceClaims }}
  {{- if and $values.computeDomain.enabled (gt (int $own.gpus) 0) }}
  {{- $channel := dict "name" "channel" "resourceClaimTemplateName" (include "gammaray.channelTemplate" $root) }}
  {{- $claims = append $claims $channel }}
  {{- end }}
  {{- with $claims }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumes:
    {{- include "gammaray.volumes" (dict "root" $root "own" $own "head" $head "mounts" false) | nindent 4 }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" $head }}
      image: {{ include "gammaray.image" (dict "root" $root "gpus" $own.gpus) | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- if not $head }}
      command: ["python", "-m", "gammaray.cluster.pod"]
      {{- end }}
      ports:
        {{- if $head }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        - {name: dash-metrics, containerPort: 44227}
        {{- if $values.autoscaling.enabled }}
        - {name: as-metrics, containerPort: 44217}
        {{- end }}
        {{- end }}
        - {name: metrics, containerPort: 8080}
        - {name: {{ ternary "serve" "proxy" (or $head .serves) }}, containerPort: {{ $port }}}
        {{- with dig "telemetry" "prometheus_port" 9464 $values.config | int }}
        - {name: gammaray, containerPort: {{ . }}}
        {{- end }}
      env:
        {{- include "gammaray.podEnvironment" (dict "root" $root "pool" .pool) | nindent 8 }}
        {{- with $own.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources:
        {{- include "gammaray.resources" (dict "root" $root "own" $own) | nindent 8 }}
      securityContext:
        {{- toYaml $values.securityContext | nindent 8 }}
      {{- if .serves }}
      lifecycle: # Ray ends at SIGTERM, and open streams with it
        preStop: {exec: {command: ["python", "-m", "gammaray.cluster.leave"]}}
      {{- end }}
      {{- $raylet := dict "path" "/api/healthz" "port" 52365 }}
      {{- $proxy := dict "path" "/-/healthz" "port" (ternary "serve" "proxy" .serves) }}
      startupProbe:
        {{- $startup := dict "fields" $values.probes.startup "seconds" $own.startupSeconds }}
        {{- include "gammaray.probe" (merge $startup $raylet) | nindent 8 }}
      readinessProbe:
        {{- $asked := ternary $proxy $raylet $proxied }}
        {{- include "gammaray.probe" (merge (dict "fields" $values.probes.readiness) $asked) | nindent 8 }}
      livenessProbe:
        {{- include "gammaray.probe" (merge (dict "fields" $values.probes.liveness) $raylet) | nindent 8 }}
      volumeMounts:
        {{- include "gammaray.volumes" (dict "root" $root "own" $own "head" $head "mounts" true) | nindent 8 }}
{{- end -}}
