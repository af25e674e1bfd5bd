"""Drafters as a command line names them, and the configuration for one request at a time.

ngram, suffix, recycle, lookahead          a method that needs nothing more
layer_exit:20, eagle3:FOLDER, mtp          a method and what it is made from
ngram+recycle                              the trees of both, merged
anything else                              a model with the target's vocabulary
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gammaray.config import Config, parse
from gammaray.drafter_config import METHODS, WEIGHTLESS
from gammaray.errors import ConfigError
from gammaray.types import MAX_TREE_NODES
from gammaray.yamlfile import read

# method -> the key of the configuration that its value is for
VALUES = {"layer_exit": "layers", "model": "model"} | dict.fromkeys(
    ("medusa", "eagle", "eagle3", "mtp", "dspark"), "path"
)
WITHOUT_VALUE = WEIGHTLESS | {"mtp"}  # whose value may be left out, or is none
SHAPED = re.compile(r"(.+)@(\d{1,2})x(\d)")
Entries = Mapping[str, Any]  # of `drafters`, by name


@dataclass(frozen=True, slots=True)
class Arm:
    """What is measured beside plain decoding: a drafter, and the shape of its trees."""

    label: str
    drafter: str
    gamma: int
    width: int


def entries(text: str, dtype: str) -> dict[str, Any]:
    """The drafter that `text` names, under that name, and the parts of a composite; `dtype`: of a model.

    Raises ConfigError.
    """
    parts = text.split("+")
    if len(parts) > 1 and all(part.partition(":")[0] in METHODS for part in parts):
        found = {name: entry for part in parts for name, entry in entries(part, dtype).items()}
        return found | {text: {"method": "composite", "drafters": parts}}
    method, _, value = text.partition(":")
    if method not in METHODS:
        return {text: _model(text, dtype)}
    if value and method in VALUES:
        return {text: _with_value(method, value, dtype)}
    if method in WITHOUT_VALUE and ":" not in text:
        return {text: {"method": method}}
    raise ConfigError(f"drafter {text!r}: {_how(method)}")


def _model(text: str, dtype: str) -> dict[str, str]:
    if (near := get_close_matches(text, METHODS, 1)) and "/" not in text and not Path(text).exists():
        raise ConfigError(f"no drafter is called {text!r}; did you mean {near[0]!r}?")
    return {"method": "model", "model": text, "dtype": dtype}


def _with_value(method: str, value: str, dtype: str) -> dict[str, object]:
    if method == "layer_exit" and not value.isdecimal():
        raise ConfigError(f"drafter 'layer_exit:{value}': {_how(method)}")
    entry: dict[str, object] = {"method": method}
    entry[VALUES[method]] = int(value) if method == "layer_exit" else value
    return entry | ({"dtype": dtype} if method == "model" else {})


def _how(method: str) -> str:
    if method in WEIGHTLESS:
        return f"{method} takes no value; its settings go into a configuration"
    if method == "composite":
        return "name its parts, as in ngram+recycle"
    example = {"layer_exit": "layer_exit:8, the first 8 layers", "model": "model:FOLDER"}
    return f"write {example.get(method, f'{method}:FOLDER')}"


def arms(text: str, gamma: int, width: int) -> list[Arm]:
    """Of `NAME,NAME@GAMMAxWIDTH,...`; `gamma` and `width`: of those that name none. Raises ConfigError."""
    found = [_arm(label.strip(), gamma, width) for label in text.split(",") if label.strip()]
    if not found:
        raise ConfigError("--drafters names none")
    if len({arm.label for arm in found}) < len(found):
        raise ConfigError(f"--drafters {text}: each only once")
    return found


def _arm(label: str, gamma: int, width: int) -> Arm:
    shaped = SHAPED.fullmatch(label)
    name = shaped[1] if shaped else label
    gamma, width = (int(shaped[2]), int(shaped[3])) if shaped else (gamma, width)
    if not (1 <= gamma <= 16 and 1 <= width <= 8 and gamma * width <= MAX_TREE_NODES):
        raise ConfigError(
            f"{label}: {gamma} x {width} is no shape: depth 1 to 16, width 1 to 8, "
            f"and at most {MAX_TREE_NODES} nodes"
        )
    return Arm(label, name, gamma, width)


def read_drafters(file: Path) -> Entries:
    """The `drafters` of a YAML file, whatever else it holds. Raises ConfigError."""
    try:
        data = read(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read drafters {str(file)!r}: {error}") from None
    found = data.get("drafters") if isinstance(data, dict) else None
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{file}: there is no `drafters:` map of names")
    return found


def known(names: Sequence[str], given: Entries, dtype: str) -> dict[str, Any]:
    """`given`, and what those of `names` mean that are not in it. Raises ConfigError."""
    meant = [entries(name, dtype) for name in names if name not in given]
    return {name: entry for one in meant for name, entry in one.items()} | dict(given)


def alone(target: Mapping[str, Any], dtype: str, drafters: Entries) -> Config:
    """For one request at a time, without tenants, and without a prefix cache: a second run of a prompt would
    find the first one's. `target`: of a configuration. Raises ConfigError."""
    kv = {**target.get("kv", {}), "prefix_cache": False}
    return parse(
        {"target": {**target, "dtype": dtype, "max_batch": 1, "kv": kv}, "drafters": dict(drafters)},
        "command line",
    )
