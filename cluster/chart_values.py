"""Values of the chart, as helm makes them of its defaults and of files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gammaray.errors import ConfigError
from gammaray.yamlfile import read

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

Values = dict[str, Any]


def merged(files: Sequence[Path]) -> Values:
    """Later files over earlier ones, over the defaults: maps level by level, lists as a whole.

    A null takes a default away. Raises ConfigError for a file that is not there, or no mapping.
    """
    asked: Values = {}
    for file in files:
        asked = over(asked, _read(file))
    defaults = mapping(read(DEFAULTS, "defaults"), "defaults")
    return _without_nulls(over(defaults, asked), defaults)


def over(below: Values, above: Values) -> Values:
    """`above`, and what it leaves of `below`."""
    return {**below, **above, **{key: over(below[key], above[key]) for key in _maps(below, above)}}


def mapping(value: object, where: str) -> Values:
    """Raises ConfigError, that names `where`, unless it is one."""
    if isinstance(value, dict):
        return value
    raise ConfigError(f"{where}: expected a mapping")


def _maps(one: Values, other: Values) -> list[str]:
    """Keys of which both have a mapping."""
    return [key for key, value in one.items() if isinstance(value, dict) and isinstance(other.get(key), dict)]


def _without_nulls(values: Values, defaults: Values) -> Values:
    kept = {key: value for key, value in values.items() if not (value is None and key in defaults)}
    return {**kept, **{key: _without_nulls(kept[key], defaults[key]) for key in _maps(kept, defaults)}}


def _read(file: Path) -> Values:
    try:
        found = read(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read values {str(file)!r}: {reason}") from None
    return mapping({} if found is None else found, str(file))
