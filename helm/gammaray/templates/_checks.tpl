{{/*
What no schema can say, in sentences that say what to change. Some are rules that the operator has alone, and would tell
in a condition of the RayService long after `helm install` has said that all is well.
*/}}
{{- define "gammaray.checks" -}}
{{- include "gammaray.checkNames" . -}}
{{- include "gammaray.checkPools" . -}}
{{- include "gammaray.checkPorts" . -}}
{{- include "gammaray.checkDrafters" . -}}
{{- include "gammaray.checkKeys" . -}}
{{- include "gammaray.checkOperator" . -}}
{{- include "gammaray.checkUpgrade" . -}}
{{- end -}}

{{- define "gammaray.checkNames" -}}
{{- $name := include "gammaray.fullname" . -}}
{{- if gt (len $name) 47 -}}
{{- fail (printf "the name %s has %d characters and KubeRay allows 47: set fullnameOverride" $name (len $name)) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the name %s must begin with a letter, end with a letter or digit and hold only a-z, 0-9 and -: set fullnameOverride" $name) -}}
{{- end -}}
{{- end -}}

{{- define "gammaray.checkPools" -}}
{{- $pools := include "gammaray.pools" . | fromYaml -}}
{{- $pods := 0 -}}
{{- $most := 0 -}}
{{- range $name, $pool := $pools -}}
{{- if or (has $name (list "head" "ingress")) (not (regexMatch "^[a-z]([a-z0-9-]{0,22}[a-z0-9])?$" $name)) -}}
{{- fail (printf "pools.%s: give it another name: at most 24 of a-z, 0-9 and -, a letter first, and neither head nor ingress" $name) -}}
{{- end -}}
{{- if or (lt (int $pool.replicas) (int $pool.minReplicas)) (gt (int $pool.replicas) (int $pool.maxReplicas)) -}}
{{- fail (printf "pools.%s: replicas (%d) must lie between minReplicas (%d) and maxReplicas (%d)" $name (int $pool.replicas) (int $pool.minReplicas) (int $pool.maxReplicas)) -}}
{{- end -}}
{{- if and (not $.Values.autoscaling.enabled) (ne (int $pool.minReplicas) (int $pool.maxReplicas)) -}}
{{- fail (printf "pools.%s: minReplicas and maxReplicas differ, so something must choose: set autoscaling.enabled, or leave both out" $name) -}}
{{- end -}}
{{- if and (gt (int $pool.gpus) 0) (not $pool.gpuResource) (not $pool.resourceClaims) -}}
{{- fail (printf "pools.%s: nothing brings its GPUs: set gpuResource or resourceClaims" $name) -}}
{{- end -}}
{{- range $resource, $_ := $pool.resources -}}
{{- if or (eq $resource $pool.gpuResource) (regexMatch "^nvidia\\.com/(gpu|mig-)" $resource) -}}
{{- fail (printf "pools.%s.resources: ask for %s with gpus and gpuResource, by which Ray counts them and the image is chosen" $name $resource) -}}
{{- end -}}
{{- end -}}
{{- $pods = add $pods (ternary $pool.minReplicas $pool.replicas $.Values.autoscaling.enabled) -}}
{{- $most = max $most $pool.gpus -}}
{{- include "gammaray.checkPod" (dict "root" $ "place" (printf "pools.%s" $name) "pool" $name "own" $pool) -}}
{{- end -}}
{{- include "gammaray.checkPod" (dict "root" $ "place" "head" "pool" "" "own" .Values.head) -}}
{{- include "gammaray.checkPod" (dict "root" $ "place" "ingressPool" "pool" "ingress" "own" .Values.ingressPool) -}}
{{- if lt (int $pods) 1 -}}
{{- fail "pools: there is no pod for the model: name a pool with replicas, and with autoscaling minReplicas, of at least 1" -}}
{{- end -}}
{{- $parallel := dig "target" "tensor_parallel" 1 .Values.config | int -}}
{{- if and (gt (int $most) 0) (gt $parallel 1) -}}
{{- fail (printf "config.target.tensor_parallel is %d, and works on CPUs only in this version: with pools of GPUs leave it out, and let the target fit one GPU" $parallel) -}}
{{- end -}}
{{- if and .Values.ingressPool.enabled (lt (int .Values.ingressPool.replicas) 1) -}}
{{- fail "ingressPool.replicas must be at least 1: no request would come in; or set ingressPool.enabled to false" -}}
{{- end -}}
{{- end -}}

{{/* What people add to one pod: (dict "root" $ "place" VALUES "pool" NAME or "" "own" POD). */}}
{{- define "gammaray.checkPod" -}}
{{- $taken := list "RAY_REDIS_ADDRESS" "REDIS_PASSWORD" "REDIS_USERNAME" "RAY_enable_autoscaler_v2" "RAY_GCS_STORAGE" "RAY_GCS_STORAGE_PATH" "RAY_AUTH_MODE" "RAY_AUTH_TOKEN" "KUBERAY_GEN_RAY_START_CMD" "GAMMARAY_NODE" -}}
{{- range include "gammaray.podEnvironment" . | fromYamlArray }}{{ $taken = append $taken .name }}{{ end -}}
{{- $place := .place -}}
{{- range .own.extraEnv -}}
{{- if has .name $taken -}}
{{- fail (printf "%s.extraEnv: %s belongs to the chart or to the operator; use the value that it is made of" $place .name) -}}
{{- end -}}
{{- end -}}
{{- $labels := set (include "gammaray.selectorLabels" .root | fromYaml) "app.kubernetes.io/component" "" -}}
{{- range $label, $_ := .own.podLabels -}}
{{- if or (hasKey $labels $label) (hasPrefix "ray.io/" $label) (hasPrefix "gammaray/" $label) -}}
{{- fail (printf "%s.podLabels: by %s the chart or the operator finds its pods; use another label" $place $label) -}}
{{- end -}}
{{- end -}}
{{- $volumes := include "gammaray.volumes" (dict "root" .root "own" (omit .own "extraVolumes") "head" (not .pool) "mounts" false) | fromYamlArray -}}
{{- range .own.extraVolumes -}}
{{- $extra := . -}}
{{- range $volumes -}}
{{- if eq .name $extra.name -}}
{{- fail (printf "%s.extraVolumes: the chart has a volume %s of its own; give it another name" $place .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What listens in our pods beside HTTP and our metrics: Ray, at ports that the operator or Ray sets; its processes take
theirs of a range. */}}
{{- define "gammaray.checkPorts" -}}
{{- $http := include "gammaray.httpPort" . | int -}}
{{- $metrics := include "gammaray.metricsPort" . | int -}}
{{- $taken := concat (list 6379 8080 8265 44217 44227 52365) (untilStep 10001 20000 1) -}}
{{- $advice := "keep config.server.port 8000 in the pods and set service.port" -}}
{{- range $key, $port := dict "config.server.port" $http "config.telemetry.prometheus_port" $metrics -}}
{{- if has $port $taken -}}
{{- fail (printf "%s is %d, where Ray listens in the pods: %s, or choose another port" $key $port $advice) -}}
{{- end -}}
{{- end -}}
{{- if eq $http $metrics -}}
{{- fail (printf "config.telemetry.prometheus_port is %d, as config.server.port is: %s, or choose another port for one of them" $metrics $advice) -}}
{{- end -}}
{{- if and (not $metrics) (or .Values.monitoring.podMonitor.enabled .Values.monitoring.serviceMonitor.enabled) -}}
{{- fail "config.telemetry.prometheus_port is 0, so that Prometheus would see Ray alone: set a port, or turn monitoring's monitors off" -}}
{{- end -}}
{{- end -}}

{{/* Drafters that tenants name: else the application alone would tell, when all pods are there. */}}
{{- define "gammaray.checkDrafters" -}}
{{- $drafters := default dict .Values.config.drafters -}}
{{- range $tenant, $own := .Values.config.tenants -}}
{{- $own = default dict $own -}}
{{- $named := pick $own "drafter" "fallback_drafter" -}}
{{- with (default dict $own.speculation).canary }}{{ $_ := set $named "speculation.canary.drafter" .drafter }}{{ end -}}
{{- range $list := list "choices" "classes" -}}
{{- range $i, $one := get $own $list | default list -}}
{{- range $key, $name := pick $one "drafter" "fallback_drafter" -}}
{{- $_ := set $named (printf "%s[%d].%s" $list $i $key) $name -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $place, $name := $named -}}
{{- if and $name (not (hasKey $drafters $name)) -}}
{{- fail (printf "config.tenants.%s.%s: config.drafters has no %s, but %s" $tenant $place $name (keys $drafters | sortAlpha | join ", " | default "nothing")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "gammaray.checkKeys" -}}
{{- $tenants := default dict .Values.config.tenants -}}
{{- $keys := .Values.keys -}}
{{- $known := false -}}
{{- range $tenant, $given := $keys.tenants -}}
{{- if not (or (hasKey $tenants $tenant) (eq $tenant "default")) -}}
{{- fail (printf "keys.tenants.%s: config.tenants has no such tenant: add it there, or take its keys away" $tenant) -}}
{{- end -}}
{{- if not (regexMatch "^[A-Za-z0-9_-][A-Za-z0-9._-]*$" $tenant) -}}
{{- fail (printf "keys.tenants.%s: its keys lie in a folder of that name: use letters, digits, '.', '_' and '-' only, and no '.' first" $tenant) -}}
{{- end -}}
{{- if not (get (default dict $given) "existingSecret") -}}
{{- fail (printf "keys.tenants.%s: set existingSecret to the name of the Secret with its keys" $tenant) -}}
{{- end -}}
{{- $known = true -}}
{{- end -}}
{{- range $tenant, $own := $tenants -}}
{{- if dig "api_keys" list (default dict $own) }}{{ $known = true }}{{ end -}}
{{- end -}}
{{- $server := default dict .Values.config.server -}}
{{- if and $server.require_api_key (not $known) -}}
{{- fail "config.server.require_api_key: no tenant has a key, so no request could come in: name Secrets in keys.tenants" -}}
{{- end -}}
{{- if and $server.protect_metrics (not $keys.operator.existingSecret) (not $server.operator_keys) -}}
{{- fail "config.server.protect_metrics: there is no operator key to read them with: set keys.operator.existingSecret" -}}
{{- end -}}
{{- $timeout := get $server "request_timeout_s" | default 600 | int -}}
{{- if lt (int .Values.terminationGracePeriodSeconds) (add $timeout 30 | int) -}}
{{- fail (printf "terminationGracePeriodSeconds must be at least %d, config.server.request_timeout_s and 30: else open requests are cut off; raise it, or lower the other" (add $timeout 30)) -}}
{{- end -}}
{{- end -}}

{{- define "gammaray.checkOperator" -}}
{{- if and .Values.auth.enabled (semverCompare "<2.52.0" .Values.rayVersion) -}}
{{- fail (printf "auth.enabled needs Ray 2.52 or later, and rayVersion is %s" .Values.rayVersion) -}}
{{- end -}}
{{- if .Values.kueue.queueName -}}
{{- if .Values.autoscaling.enabled -}}
{{- fail "kueue.queueName: Kueue takes no service with Ray's autoscaler: set autoscaling.enabled to false, or leave the queue out" -}}
{{- end -}}
{{- $groups := add (len .Values.pools) (ternary 1 0 .Values.ingressPool.enabled) -}}
{{- if gt (int $groups) 7 -}}
{{- fail (printf "kueue.queueName: Kueue takes 7 groups of pods beside the head, and there are %d: join pools, or leave the queue out" $groups) -}}
{{- end -}}
{{- end -}}
{{- with .Values.gcsFaultTolerance -}}
{{- if .enabled -}}
{{- if not (has .backend (list "redis" "rocksdb")) -}}
{{- fail (printf "gcsFaultTolerance.backend is %q: use redis or rocksdb" .backend) -}}
{{- end -}}
{{- if and (eq .backend "redis") (not .redisAddress) -}}
{{- fail "gcsFaultTolerance.backend is redis: set gcsFaultTolerance.redisAddress" -}}
{{- end -}}
{{- if and (eq .backend "rocksdb") (or .redisAddress .existingSecret) -}}
{{- fail "gcsFaultTolerance.backend is rocksdb, which has no address and no password: leave redisAddress and existingSecret empty" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "gammaray.checkUpgrade" -}}
{{- $strategies := list "NewCluster" "NewClusterWithIncrementalUpgrade" "None" -}}
{{- with .Values.upgrade -}}
{{- if not (has .strategy $strategies) -}}
{{- fail (printf "upgrade.strategy is %q: use one of %s" .strategy (join ", " $strategies)) -}}
{{- end -}}
{{- if not (has .configChange (list "in-place" "new-cluster")) -}}
{{- fail (printf "upgrade.configChange is %q: use in-place or new-cluster" .configChange) -}}
{{- end -}}
{{- if and (eq .configChange "new-cluster") (eq .strategy "None") -}}
{{- fail "upgrade.configChange new-cluster needs an upgrade, and upgrade.strategy is None: choose another strategy, or in-place" -}}
{{- end -}}
{{- if include "gammaray.incremental" $ -}}
{{- if not $.Values.autoscaling.enabled -}}
{{- fail "upgrade.strategy NewClusterWithIncrementalUpgrade needs Ray's autoscaler: set autoscaling.enabled" -}}
{{- end -}}
{{- if not .gatewayClassName -}}
{{- fail "upgrade.strategy NewClusterWithIncrementalUpgrade moves traffic by a Gateway: set upgrade.gatewayClassName" -}}
{{- end -}}
{{- if gt (int .stepSizePercent) (int .maxSurgePercent) -}}
{{- fail (printf "upgrade.stepSizePercent (%d) must not exceed upgrade.maxSurgePercent (%d)" (int .stepSizePercent) (int .maxSurgePercent)) -}}
{{- end -}}
{{- if lt (int .intervalSeconds) 1 -}}
{{- fail "upgrade.intervalSeconds must be at least 1" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
