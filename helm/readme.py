"""The chart's README: README.intro.md, and the comments of values.yaml as tables."""

from __future__ import annotations

import json

from values import Value

HEAD = "| value | default | |\n|---|---|---|\n"


def readme(intro: str, values: Value) -> str:
    """A table of what stands alone, and one for each group."""
    alone = [child for child in values.children if not child.is_documented_below]
    groups = [child for child in values.children if child.is_documented_below]
    tables = [HEAD + "".join(map(_row, alone)), *map(_section, groups)]
    return "\n".join([intro.rstrip(), "", *tables])


def _section(group: Value) -> str:
    title = f"### {group.name}\n"
    text = f"{group.text or group.heading}\n"
    rows = "".join(map(_row, group.documented()))
    return "\n".join([title, *([text] if text.strip() else []), f"{HEAD}{rows}"])


def _row(value: Value) -> str:
    default = "" if value.is_documented_below else f"`{_short(value.default)}`"
    return f"| `{value.name}` | {default} | {_prose(value.text)} |\n"


def _short(default: object) -> str:
    return (default if isinstance(default, str) and default else json.dumps(default)).replace("|", "\\|")


def _prose(text: str) -> str:
    return text.replace("|", "\\|")
