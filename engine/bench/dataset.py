"""Prompts from files in the forms that benchmarks come in, and a fair choice among them.

    Spec-Bench      {"question_id": 82, "category": "writing", "turns": ["...", ...]}          the first turn
    ShareGPT        {"id": "...", "conversations": [{"from": "human", "value": "..."}, ...]}   up to its first
    OpenAI batch    {"custom_id": "...", "body": {"messages": [...]}} or {"body": {"prompt": "..."}}

One JSON object a line; a file that is one JSON list of them will do as well.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gammaray.engine.bench.prompts import PROMPTS
from gammaray.errors import ConfigError

HUMAN = {"human", "user"}
FORMS = "Spec-Bench (`turns`), ShareGPT (`conversations`) nor an OpenAI batch (`body`)"
Messages = tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    name: str
    category: str
    ask: Messages | str  # for the chat template; or text to continue as it is


def built_in() -> list[Prompt]:
    return [Prompt(name, name, _user(text)) for name, text in PROMPTS.items()]


def read(file: Path) -> list[Prompt]:
    """All prompts of a file. Raises ConfigError that names the line."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read data set {str(file)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read data set {str(file)!r}: it is not UTF-8 text") from None
    found = []
    for place, entry in _entries(text, str(file)):
        try:
            found += _prompts(entry, place)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{place}: {_reason(error)}") from None
    if not found:
        raise ConfigError(f"{file} holds no prompts")
    return found


def spread(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """At most `limit` of them: as many of each category as of any other, evenly spaced within it.

    The categories take turns, so that an interrupted run has seen all of them.
    """
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    share = Counter[str]()
    while share.total() < min(limit, len(prompts)):
        for category, all_of in by_category.items():
            if share[category] < len(all_of) and share.total() < limit:
                share[category] += 1
    return [
        all_of[(2 * i + 1) * len(all_of) // (2 * share[category])]
        for i in range(max(share.values()))
        for category, all_of in by_category.items()
        if i < share[category]
    ]


def _entries(text: str, file: str) -> Iterator[tuple[str, Any]]:
    """(where it stands, object)"""
    if text.lstrip().startswith("["):
        for number, entry in enumerate(_json(text, file, 1), start=1):
            yield f"{file}: entry {number}", entry
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{file}: line {number}", _json(line, file, number)


def _json(text: str, file: str, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{file}: line {line + error.lineno - 1}"
        raise ConfigError(f"{where}: not JSON: {error.msg} (column {error.colno})") from None
    except (RecursionError, ValueError):  # ValueError: an integer of thousands of digits
        raise ConfigError(f"{file}: line {line}: not JSON that can be read") from None


def _prompts(entry: Any, place: str) -> list[Prompt]:
    """Of one entry; none when nobody asks anything there."""
    if not isinstance(entry, dict):
        raise TypeError("a JSON object is needed")
    number = place.rpartition(" ")[2]
    if "turns" in entry:
        name, category = str(entry.get("question_id", number)), str(entry.get("category", "all turns"))
        return [Prompt(name, category, _user(_text(entry["turns"][0], "turns[0]")))] if entry["turns"] else []
    if "conversations" in entry:
        messages = _until_human(entry["conversations"])
        return [Prompt(str(entry.get("id", number)), "sharegpt", messages)] if messages else []
    if isinstance(entry.get("body"), dict):
        return [Prompt(str(entry.get("custom_id", number)), "batch", _asked(entry["body"]))]
    raise ValueError(f"it is neither {FORMS}")


def _until_human(turns: Any) -> Messages:
    """A system message, if there is one, and the first turn of a human."""
    messages: list[dict[str, str]] = []
    for turn in turns:
        text = _text(turn["value"], "value")
        if turn["from"] in HUMAN:
            return (*messages, *_user(text))
        if turn["from"] == "system":
            messages.append({"role": "system", "content": text})
    return ()


def _asked(body: dict[str, Any]) -> Messages | str:
    if "messages" not in body:
        return _text(body["prompt"], "body.prompt")
    if not body["messages"]:
        raise ValueError("body.messages is empty")
    return tuple({"role": str(m["role"]), "content": _content(m["content"])} for m in body["messages"])


def _content(content: Any) -> str:
    """Text, or the list of text parts that the API takes as well."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(_text(part["text"], "content") for part in parts)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{what} must be text")
    return value


def _user(text: str) -> Messages:
    return ({"role": "user", "content": text},)


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
