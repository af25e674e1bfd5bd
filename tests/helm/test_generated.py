"""values.schema.json, README.md and files/ of the chart: up to date, and as strict as the server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from support.helm import CHART, CI, VERSIONS, helm, refused, with_values

from gammaray.cluster.chart_values import over
from gammaray.config import DEFAULT, parse
from gammaray.drafter_config import METHODS

ROOT = CHART.parents[1]
LATER = {
    "$defs",
    "prefixItems",
    "unevaluatedProperties",
    "unevaluatedItems",
    "dependentRequired",
    "minContains",
}
FULL = """
target: {model: m, dtype: bfloat16, tensor_parallel: 2, replicas: 3, kv: {num_blocks: 64}}
drafters:
  a: {method: ngram}
  b: {method: suffix, memory: tenant}
  c: {method: recycle}
  d: {method: lookahead}
  e: {method: model, model: m, placement: split, tree: sequoia}
  f: {method: layer_exit, layers: 4}
  g: {method: medusa, path: p}
  h: {method: eagle, path: p, tree: static, draft_sampling: true}
  i: {method: eagle3, path: p}
  j: {method: mtp}
  k: {method: dspark, path: p}
  l: {method: composite, drafters: [a, b]}
tenants:
  chat:
    drafter: i
    fallback_drafter: a
    choices: [{prompt_tokens_over: 4096, drafter: a}]
    pool: {workers: 1, max_workers: 4}
    buckets: [{alpha: [0.5, 1], gamma: 6, width: 2}, {alpha: [0.0, 0.5], gamma: 0}]
    speculation: {canary: {drafter: h, share: 0.1}, quality_gate: {kl_threshold: 0.1}, verification: coupled}
    limits: {requests_per_minute: null, tokens_per_day: 50000000}
    classes: [{name: long, when: {prompt_tokens_over: 4096, header: {x-team: a}, route: chat}, drafter: b}]
    region: eu-west
    warmup_s: 12.5
placement: {min_nvlink_version: 3}
controller: {audit_log: /tmp/audit}
telemetry: {otlp_endpoint: "http://otel:4317", trace_ratio: 0.1}
server: {access_log: /tmp/log, request_timeout_s: 60}
"""


@cache
def schema() -> dict[str, Any]:
    return json.loads((CHART / "values.schema.json").read_text())


def defaults() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def faults(values: dict[str, Any]) -> list[str]:
    """Of values that a user gives, over the chart's own."""
    found = Draft7Validator(schema()).iter_errors(over(defaults(), values))
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


def keywords(node: Any) -> Iterator[str]:
    """Of a schema; names of properties and definitions are none."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield key
        named = key in ("properties", "definitions")
        for part in value.values() if named else value if isinstance(value, list) else [value]:
            yield from keywords(part)


def generate(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "helm" / "generate.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """All that is generated, and what it is generated from."""
    shutil.copytree(ROOT / "helm", tmp_path / "helm")
    shutil.copytree(ROOT / "telemetry" / "dashboards", tmp_path / "telemetry" / "dashboards")
    return tmp_path


def test_what_is_generated_is_up_to_date() -> None:
    done = generate(ROOT)
    assert done.returncode == 0, f"run `make chart`: {done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("helm/gammaray/values.yaml", "gpus: 0", "gpus: 1", "README.md is stale"),
        ("helm/gammaray/values.yaml", "  numNodes: 1", "  nodes: 1", "has no computeDomain.numNodes"),
        ("helm/gammaray/values.yaml", "  # -- Nodes of it\n", "", "comment .* computeDomain.numNodes"),
        ("helm/gammaray/values.yaml", "idleTimeoutSeconds: 600", "idleTimeoutSeconds: null", "has no type"),
        ("helm/README.intro.md", "# gammaray", "# Gammaray", "README.md is stale"),
        ("telemetry/dashboards/rules.yaml", "groups:", "groups: # changed", "files/rules.yaml is stale"),
        ("helm/gammaray/values.schema.json", '"minimum": 0', '"minimum": 1', "schema.json is stale"),
    ],
)
def test_what_is_stale_or_says_nothing_is_told(file: str, old: str, new: str, says: str, copy: Path) -> None:
    """Each a way for the chart's text and its values to drift apart."""
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new, 1))
    done = generate(copy)
    assert done.returncode == 1
    assert re.search(says, done.stdout + done.stderr), done.stdout + done.stderr


def test_the_schema_is_draft_07_and_nothing_later() -> None:
    """helm 3 ignores later keywords without a word, and would take anything there."""
    Draft7Validator.check_schema(schema())
    found = set(keywords(schema()))
    assert schema()["$schema"].endswith("draft-07/schema#")
    assert found & LATER == set() and {"allOf", "if", "additionalItems"} <= found


def test_whatever_the_server_takes_the_schema_takes() -> None:
    """Every key of the configuration, and each drafter; as written, and with all defaults spelt out."""
    config = yaml.safe_load(FULL)
    assert {drafter["method"] for drafter in config["drafters"].values()} == set(METHODS)
    whole = parse(config, "test").model_dump(mode="json")
    assert faults({"config": config}) == faults({"config": whole}) == []
    assert faults({"config": yaml.safe_load(DEFAULT)}) == []


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_examples_fit_and_are_told_of(file: Path) -> None:
    values = yaml.safe_load(file.read_text())
    assert faults({**values, "pools": {name: pool for name, pool in values["pools"].items() if pool}}) == []
    assert f"(ci/{file.name})" in (CHART / "README.md").read_text()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"config": {"target": {"modell": "x"}}}, "modell"),
    ({"config": {"target": {"replicas": 0}}}, "replicas"),
    ({"config": {"drafters": {"a": {"method": "ngrams"}}}}, "method"),
    ({"config": {"drafters": {"a": {"method": "model", "model": "m", "layers": 3}}}}, "layers"),
    ({"config": {"drafters": {"a": {"method": "layer_exit"}}}}, "layers"),
    ({"config": {"tenants": {"t": {"speculation": {"gamma": 17}}}}}, "gamma"),
    ({"config": {"tenants": {"t": {"buckets": [{"alpha": [0, 1, 2], "gamma": 1}]}}}}, "alpha"),
    ({"pools": {"a": {"gpu": 8}}}, "gpu"),
    ({"pools": {"a": {"gpus": "8"}}}, "gpus"),
    ({"pools": {"a": {"resources": {"memory": "16 GB"}}}}, "memory"),
    ({"image": {"pulPolicy": "Always"}}, "pulPolicy"),
    ({"upgrade": {"strategy": "Rolling"}}, "strategy"),
    ({"podDisruptionBudget": {"minAvailable": "half"}}, "minAvailable"),
    ({"keys": {"tenants": {"chat": {"secret": "x"}}}}, "existingSecret"),
    ({"replicas": 2}, "replicas"),
]


@pytest.mark.parametrize(("values", "names"), WRONG, ids=[names for _, names in WRONG])
def test_what_is_wrong_is_named(values: dict[str, Any], names: str) -> None:
    found = faults(values)
    assert found and any(names in fault for fault in found), found


@pytest.mark.parametrize("major", VERSIONS)
def test_both_helms_read_the_schema_alike(major: str, tmp_path: Path) -> None:
    """Old and new helm bring validators of their own: each refuses all of it, and takes all that is good."""
    for values, names in WRONG:
        said = refused(major, *with_values(values, tmp_path))
        assert "schema" in said and names in said
    good = {"config": {**yaml.safe_load(FULL), "target": {"model": "m"}}}
    done = helm(major, "template", "demo", CHART, *with_values(good, tmp_path))
    assert "schema" not in done.stderr, done.stderr
