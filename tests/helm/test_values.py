"""Every value of the chart changes something that is rendered: one that does not only looks as if it did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import yaml
from support.charts import EVERY
from support.helm import CHART, helm

UPGRADE = CHART / "ci" / "upgrade-values.yaml"
POOL = ("pools.h100=null", "pools.main={}")
# By the values that need them to count; the rest counts with every option on.
BASES: dict[str, tuple[object, ...]] = {
    "": ("--values", EVERY),
    "poolDefaults": ("--values", EVERY, *POOL, "poolDefaults.replicas=3"),
    "poolDefaults.gpu": ("--values", EVERY, *POOL, "poolDefaults.gpus=2"),
    "upgrade": ("--values", UPGRADE),
    "kueue": (),
    "gcsFaultTolerance.rocksdb": ('gcsFaultTolerance={"enabled": true, "backend": "rocksdb"}',),
}
# Where another text, seven more, or another entry would be refused.
CHANGED = {
    "rayVersion": "2.59.0",
    "config.tenants.default.drafter": "small",
    "keys.tenants": {"default": {"existingSecret": "changed"}},
    "pools.main": {"shmSize": "3Gi"},
    "poolDefaults.minReplicas": 2,
    "poolDefaults.maxReplicas": 5,
    "upgrade.strategy": "None",
    "upgrade.configChange": "new-cluster",
}
# Does not go with the autoscaler, which is among every option.
ALONE = {"kueue.queueName"}
# `gammaray plan --values` reads the first; the other is refused unless the address goes with it.
ELSEWHERE = {"poolDefaults.gpuMemory", "gcsFaultTolerance.backend"}


def leaves(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def another(value: Any, mark: str) -> Any:
    kinds = {dict: {mark: "x"}, list: [{"name": mark}], str: mark}
    return kinds[type(value)] if type(value) in kinds else (value or 0) + 7


def setting(path: str, value: Any, mark: str = "changed") -> str:
    return f"{path}={json.dumps(CHANGED.get(path, another(value, mark)))}"


@cache
def text(*values: object) -> str | None:
    """None where the chart refuses. The schema would refuse marks for a size or a choice."""
    given = [part for one in values for part in (("--set-json", one) if "=" in str(one) else (one,))]
    done = helm("4", "template", "demo", CHART, "--skip-schema-validation", *given)
    return done.stdout if done.returncode == 0 else None


def counts(path: str, value: Any) -> bool:
    both = isinstance(value, bool)  # as some of the bases have changed it already
    changes = [f"{path}=true", f"{path}=false"] if both else [setting(path, value)]
    likely = sorted(BASES, key=lambda beginning: (path.startswith(beginning), len(beginning)), reverse=True)
    return any(
        (changed := text(*BASES[one], change)) and changed != text(*BASES[one])
        for one in likely
        for change in changes
    )


def seen_at_once(values: dict[str, Any]) -> set[str]:
    """Those of them whose marks are all in one text: most, and a render of each takes a minute."""
    markable = [path for path, value in values.items() if isinstance(value, str | list | dict)]
    marks = {path: f"m{i}m" for i, path in enumerate(markable)}
    given = [setting(path, values[path], mark) for path, mark in marks.items() if path not in CHANGED]
    found = text("--values", EVERY, *given)
    assert found
    return {path for path, mark in marks.items() if mark in found}


def test_no_value_is_dead() -> None:
    values = dict(leaves(yaml.safe_load((CHART / "values.yaml").read_text())))
    assert values.keys() > CHANGED.keys() | ELSEWHERE
    seen = seen_at_once({path: value for path, value in values.items() if path not in ELSEWHERE | ALONE})
    others = values.keys() - seen - ELSEWHERE
    assert all(text(*base) for base in BASES.values()) and len(seen) > 60
    assert sorted(path for path in others if not counts(path, values[path])) == []
