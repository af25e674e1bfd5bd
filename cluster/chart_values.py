"""Values of the chart, as helm makes them of its defaults and of files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gammaray.errors import ConfigError
from gammaray.validation import nearest, shorten
from gammaray.yamlfile import mapping, read, read_file

# What a plan needs of helm/gammaray/values.yaml, which is not in the wheel; a test compares them.
DEFAULTS = """\
config:
  target: {model: smollm2-135m-instruct}
  drafters:
    lookup: {method: ngram, max_ngram: 4, min_ngram: 2}
  tenants:
    default: {drafter: lookup}
  server: {port: 8000}
  telemetry: {prometheus_port: 9464}
keys: {tenants: {}, operator: {existingSecret: ""}}
pools: {main: {}}
poolDefaults:
  replicas: 1
  gpus: 0
  accelerator: ""
  gpuMemory: ""
  resources: {cpu: "4", memory: 16Gi}
"""

KEYS = json.loads(Path(__file__).with_name("chart_keys.json").read_text())  # made by `make chart`

Values = dict[str, Any]


def merged(files: Sequence[Path]) -> Values:
    """Later files over earlier ones, over the defaults: maps level by level, lists as a whole.

    A null takes a default away. Raises ConfigError for a file that is not there, no mapping, or has a key
    that the chart has not.
    """
    asked: Values = {}
    for file in files:
        asked = over(asked, _read(file))
    defaults = mapping(read(DEFAULTS, "defaults"), "defaults")
    return _without_nulls(over(defaults, asked), defaults)


def over(below: Values, above: Values) -> Values:
    """`above`, and what it leaves of `below`."""
    return {**below, **above, **{key: over(below[key], above[key]) for key in _maps(below, above)}}


def _maps(one: Values, other: Values) -> list[str]:
    """Keys of which both have a mapping."""
    return [key for key, value in one.items() if isinstance(value, dict) and isinstance(other.get(key), dict)]


def _without_nulls(values: Values, defaults: Values) -> Values:
    kept = {key: value for key, value in values.items() if not (value is None and key in defaults)}
    return {**kept, **{key: _without_nulls(kept[key], defaults[key]) for key in _maps(kept, defaults)}}


def _read(file: Path) -> Values:
    found = read_file(file, "values")
    values = mapping({} if found is None else found, str(file))
    if faults := list(_unknown(values, KEYS)):
        raise ConfigError("\n".join(f"{file}: {fault}" for fault in faults))
    return values


def _unknown(values: object, known: Values | None, where: str = "") -> Iterator[str]:
    """Keys of `values` that `known` has not; see helm/keys.py."""
    if known is None or not isinstance(values, dict):
        return
    for key, value in values.items():
        name = key if key in known else "*"
        if name in known:
            yield from _unknown(value, known[name], f"{where}{key}.")
        else:
            yield f"{where}{shorten(str(key))}: unknown key{nearest(key, known)}"
