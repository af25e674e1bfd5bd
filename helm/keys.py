"""The keys of values.yaml for `gammaray plan --values`: the chart is not in the wheel, its keys are."""

from __future__ import annotations

from typing import Any

Keys = dict[str, Any]


def keys(part: dict[str, Any], definitions: dict[str, Any]) -> Keys | None:
    """What each key of values.schema.json may have below it, `*` for any key; None: that is left open."""
    if "$ref" in part:
        part = definitions[part["$ref"].rpartition("/")[2]]
    more = part.get("additionalProperties", True)
    if more is False:
        return {name: keys(below, definitions) for name, below in part["properties"].items()}
    below = None if more is True else keys(more, definitions)
    return below and {"*": below}
