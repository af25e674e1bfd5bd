"""values.schema.json: the types of values.yaml's defaults, and pydantic's schema of the configuration.

Draft-07, as helm 3 ignores what came later without a word.
"""

from __future__ import annotations

from typing import Any

from values import Value

from gammaray.config import Config

Schema = dict[str, Any]

TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
# No fractions: the CRDs have integers or text.
QUANTITY: Schema = {"type": ["string", "integer"], "pattern": r"^[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPEm])?$"}
COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
PERCENT: Schema = {"type": "integer", "minimum": 1, "maximum": 100}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|[ywdhms]))+$"}
DIGEST: Schema = {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}
RESOURCES: Schema = {"type": "object", "additionalProperties": QUANTITY}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}  # labels, annotations
PROBE: Schema = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}}
SECRET: Schema = {
    "type": "object",
    "properties": {"existingSecret": {"type": "string", "minLength": 1}},
    "required": ["existingSecret"],
    "additionalProperties": False,
}
VARIABLE: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "value": {"type": "string"}},
    "required": ["name"],
}
# Lists of which the templates read more than that they are lists.
NAMED: Schema = {
    "type": "array",
    "items": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}
PATH: Schema = {"type": "object", "properties": {"path": {"type": "string"}, "pathType": {"type": "string"}}}
HOST: Schema = {
    "type": "object",
    "properties": {
        "host": {"type": "string"},
        "paths": {"type": "array", "items": {**PATH, "additionalProperties": False}},
    },
    "additionalProperties": False,
}


def _one_of(*names: str) -> Schema:
    return {"enum": list(names)}


# Where a default does not say enough. `*` stands for any name.
MORE: dict[str, Schema] = {
    "image.repository": {"type": "string", "minLength": 1},
    "image.pullPolicy": _one_of("Always", "IfNotPresent", "Never"),
    "image.digest": DIGEST,
    "image.cudaDigest": DIGEST,
    "rayVersion": {"type": "string", "pattern": r"^[0-9]+\.[0-9]+\.[0-9]+([.+-].*)?$"},
    "keys.tenants": {"type": "object", "additionalProperties": SECRET},
    "*.resources": RESOURCES,
    "*.nodeSelector": TEXTS,
    "*.podAnnotations": TEXTS,
    "*.podLabels": TEXTS,
    "*.annotations": TEXTS,
    "*.labels": TEXTS,
    "*.extraEnv": {"type": "array", "items": VARIABLE},
    "*.extraVolumes": NAMED,
    "*.extraVolumeMounts": NAMED,
    "*.resourceClaims": NAMED,
    "imagePullSecrets": NAMED,
    "ingress.hosts": {"type": "array", "items": HOST},
    "probes.startup": PROBE,
    "probes.readiness": PROBE,
    "probes.liveness": PROBE,
    "httpRoute.hostnames": {"type": "array", "items": {"type": "string"}},
    "extraObjects": {"type": "array", "items": {"type": ["object", "string"]}},
    "*.startupSeconds": {"type": "integer", "minimum": 1},
    "poolDefaults.minReplicas": COUNT,
    "poolDefaults.maxReplicas": COUNT,
    "poolDefaults.gpuMemory": {"anyOf": [QUANTITY, {"const": ""}]},
    "poolDefaults.shmSize": QUANTITY,
    "modelCache.size": QUANTITY,
    "modelCache.mountPath": {"type": "string", "pattern": "^/."},
    "service.port": PORT,
    "service.type": _one_of("ClusterIP", "NodePort", "LoadBalancer"),
    "podDisruptionBudget.minAvailable": COUNT,
    "monitoring.podMonitor.interval": DURATION,
    "monitoring.serviceMonitor.interval": DURATION,
    "gcsFaultTolerance.backend": _one_of("redis", "rocksdb"),
    "gcsFaultTolerance.rocksdb.size": QUANTITY,
    "autoscaling.upscalingMode": _one_of("Default", "Aggressive", "Conservative"),
    "upgrade.strategy": _one_of("NewCluster", "NewClusterWithIncrementalUpgrade", "None"),
    "upgrade.configChange": _one_of("in-place", "new-cluster"),
    "upgrade.maxSurgePercent": PERCENT,
    "upgrade.stepSizePercent": PERCENT,
    "upgrade.intervalSeconds": {"type": "integer", "minimum": 1},
    "computeDomain.numNodes": {"type": "integer", "minimum": 1},
}


def schema(values: Value) -> Schema:
    """Raises ValueError when `MORE` speaks of a value that is not there, or a default says nothing at all."""
    used: set[str] = set()
    whole = _closed(values, used)
    if stale := MORE.keys() - used:
        raise ValueError(f"helm/schema.py: values.yaml has no {', '.join(sorted(stale))}")
    configuration = Config.model_json_schema()
    pool = {**whole["properties"]["poolDefaults"]}
    del pool["required"]  # what a pool does not say is in poolDefaults
    described = {name: whole["properties"][name]["description"] for name in ("config", "pools")}
    whole["properties"] |= {
        "global": {"type": "object"},  # helm's own, of charts that have this one as a part
        "config": {"$ref": "#/definitions/Config", "description": described["config"]},
        "pools": {
            "type": "object",
            "description": described["pools"],
            "additionalProperties": {"$ref": "#/definitions/PodPool"},
        },
    }
    parts = configuration.pop("$defs")
    known = {name: _draft07(part) for name, part in {**parts, "Config": configuration}.items()}
    draft = "http://json-schema.org/draft-07/schema#"
    return {"$schema": draft, **whole, "definitions": {**known, "PodPool": pool}}


def _closed(group: Value, used: set[str]) -> Schema:
    """Nothing but what is named: helm tells of a misspelt key. A null takes a default away, and what has one
    is needed: the templates count on it."""
    properties = {child.path[-1]: _schema(child, used) for child in group.children}
    needed = [child.path[-1] for child in group.children if child.default not in (None, "", [], {})]
    return {"type": "object", "properties": properties, "additionalProperties": False, "required": needed}


def _schema(value: Value, used: set[str]) -> Schema:
    if value.is_group:
        return _closed(value, used)
    return {**_type(value, used), "description": value.text}


def _type(value: Value, used: set[str]) -> Schema:
    for pattern in (value.name, f"*.{value.path[-1]}"):
        if pattern in MORE:
            used.add(pattern)
            return MORE[pattern]
    if value.default is None:
        raise ValueError(f"values.yaml: {value.name} is null, which has no type: say it in helm/schema.py")
    found: Schema = {"type": TYPES[type(value.default)]}
    if found["type"] == "array":
        found["items"] = {"type": TYPES[type(value.default[0])] if value.default else "object"}
    return {**found, "minimum": 0} if found["type"] == "integer" else found


def _draft07(node: Any) -> Any:
    """What pydantic writes of draft 2020-12, in the words of draft-07."""
    if isinstance(node, list):
        return [_draft07(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    if "discriminator" in node:
        return _by_method(node["discriminator"])
    if "$ref" in node:
        return {"$ref": node["$ref"].replace("#/$defs/", "#/definitions/")}
    if "properties" in node:
        properties = {name: _draft07(part) for name, part in node["properties"].items()}
        return {**_plain(node), "properties": properties}
    if "prefixItems" in node:
        return {**_plain(node), "items": _draft07(node["prefixItems"]), "additionalItems": False}
    return _plain(node)


def _plain(node: Schema) -> Schema:
    """Without titles, which repeat the key, and defaults, which the configuration has."""
    return {
        key: _draft07(part)
        for key, part in node.items()
        if key not in ("title", "default", "prefixItems", "properties")
    }


def _by_method(discriminator: Schema) -> Schema:
    """One condition a method: of `oneOf` helm would tell why each of them does not fit."""
    key, mapping = discriminator["propertyName"], discriminator["mapping"]
    return {
        "type": "object",
        "required": [key],
        "properties": {key: {"enum": sorted(mapping)}},
        "allOf": [
            {"if": {"properties": {key: {"const": name}}, "required": [key]}, "then": _draft07({"$ref": ref})}
            for name, ref in sorted(mapping.items())
        ],
    }
