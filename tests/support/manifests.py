"""What a cluster would refuse of rendered objects: schemas of Kubernetes, KubeRay and others' kinds."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

Object = dict[str, Any]
KUBERNETES = "1.34"  # the oldest with resource.k8s.io/v1
CRDS = Path(os.environ.get("GAMMARAY_CRDS", Path(__file__).resolve().parents[3] / "shared" / "data" / "crds"))
FROM_CRD = {"RayService", "ComputeDomain"}
OTHERS = Path(__file__).with_name("other_kinds.yaml")


def problems(found: Object, kubernetes: str = KUBERNETES) -> list[str]:
    """One sentence for each field that is wrong. A kind that nobody knows is wrong too."""
    kind, version = found["kind"], found["apiVersion"]
    if kind in FROM_CRD:
        schema = crds().get(f"{version} {kind}")
        return _errors(found, schema) if schema else []
    if f"{version} {kind}" in others():
        return _errors(found, others()[f"{version} {kind}"])
    try:
        kubernetes_validate.validate(found, kubernetes, strict=True)
    except kubernetes_validate.SchemaNotFoundError as error:
        return [error.message]
    except kubernetes_validate.ValidationError as error:
        return [_sentence(error)]
    return []


def pods(service: Object) -> Iterator[Object]:
    """The pods that KubeRay would make of a RayService, as they stand in it."""
    cluster = service["spec"]["rayClusterConfig"]
    for name, group in groups(cluster):
        template = group["template"]
        about = {"name": name} | template.get("metadata", {})
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": template["spec"]}


def groups(cluster: Object) -> list[tuple[str, Object]]:
    """The head and the groups of workers of a RayCluster."""
    return [("head", cluster["headGroupSpec"])] + [
        (group["groupName"], group) for group in cluster.get("workerGroupSpecs", [])
    ]


def needs_crds() -> None:
    """Skips the test where the definitions are not."""
    if not crds():
        pytest.skip(f"needs KubeRay's CRDs (1.7.0) in {CRDS}; GAMMARAY_CRDS names another folder")


@cache
def crds() -> dict[str, Object]:
    """A strict schema of each version and kind; none where the folder is absent."""
    found = {}
    for file in sorted(CRDS.glob("*.yaml.gz")):
        crd = yaml.load(gzip.decompress(file.read_bytes()), yaml.CSafeLoader)["spec"]
        for version in crd["versions"]:
            name = f"{crd['group']}/{version['name']} {crd['names']['kind']}"
            found[name] = _custom(strict(version["schema"]["openAPIV3Schema"]))
    return found


@cache
def others() -> dict[str, Object]:
    """Schemas of what this chart makes of others' kinds."""
    written = yaml.load(OTHERS.read_text(), yaml.CSafeLoader)
    return {name: _custom({"properties": {"spec": strict(_spelt(spec))}}) for name, spec in written.items()}


def strict(schema: Any) -> Any:
    """Unknown fields are errors, as for a server that checks strictly; it fills in defaults first."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: strict(value) for name, value in schema.items()}
    fields = schema.get("properties")
    if isinstance(fields, dict) and "type" in schema:  # and no field that is called properties
        result.setdefault("additionalProperties", False)
        needed = [name for name in schema.get("required", []) if "default" not in fields.get(name, {})]
        result["required"] = needed
    return result


def _custom(schema: Object) -> Object:
    texts = {"type": "object", "additionalProperties": {"type": "string"}}
    names = {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": texts,
        "annotations": texts,
    }
    about = {"type": "object", "properties": names, "required": ["name"], "additionalProperties": False}
    fields = schema["properties"] | {"apiVersion": {}, "kind": {}, "metadata": about}
    return schema | {"properties": fields, "required": ["spec", "metadata"], "additionalProperties": False}


def _spelt(short: Any) -> Object:
    """`{name!: string}`, `[...]` and `{...: string}` as a JSON schema."""
    if isinstance(short, str):
        return {} if short == "any" else {"enum": short.split("|")} if "|" in short else {"type": short}
    if isinstance(short, list):
        return {"type": "array", "items": _spelt(short[0])}
    if "..." in short:
        return {"type": "object", "additionalProperties": _spelt(short["..."])}
    fields = {name.rstrip("!"): _spelt(value) for name, value in short.items()}
    needed = [name.rstrip("!") for name in short if name.endswith("!")]
    return {"type": "object", "properties": fields, "required": needed}


def _errors(found: Object, schema: Object) -> list[str]:
    return [_sentence(error) for error in jsonschema.Draft7Validator(schema).iter_errors(found)]


def _sentence(error: jsonschema.ValidationError) -> str:
    return f"{'.'.join(map(str, error.path))}: {error.message[:300]}"
