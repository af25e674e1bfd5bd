"""What was decided, with all that decided it: one JSON line a decision, which can be decided again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gammaray.errors import InvalidRequest
from gammaray.routing.rules import RULES, decide
from gammaray.routing.states import Facts, Level, Limits, Unit, to_json, unit_from

Target = tuple[str | None, str | None, str | None]  # tenant, class, drafter; None: all


@dataclass(frozen=True, slots=True)
class Decision:
    """`decide(old, numbers, limits, time)` gave `new`, by `rule`."""

    time: float
    key: Target
    level: Level
    old: Unit
    new: Unit
    numbers: Facts
    limits: Limits
    rule: str

    @property
    def reason(self) -> str:
        return self.new.reason


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The `index`-th record does not follow from its inputs, or from the one before of its unit."""

    index: int
    key: Target
    why: str


def record(decision: Decision) -> dict[str, Any]:
    """JSON-able, without what has its default value; the states are always there."""
    return {
        "time": decision.time,
        "key": list(decision.key),
        "level": decision.level,
        "old": {"state": decision.old.state, **to_json(decision.old)},
        "new": {"state": decision.new.state, **to_json(decision.new)},
        "numbers": to_json(decision.numbers),
        "rule": decision.rule,
        "reason": decision.reason,
        "limits": to_json(decision.limits),
    }


def decision(record: Mapping[str, Any]) -> Decision:
    """From `record`. Raises InvalidRequest for what is none."""
    try:
        tenant, request_class, drafter = record["key"]
        limits = Limits(**record["limits"])
        if record["level"] != limits.level or limits.level not in RULES:
            raise ValueError(f"its level is {record['level']!r}, that of its limits {limits.level!r}")
        return Decision(
            record["time"],
            (tenant, request_class, drafter),
            record["level"],
            unit_from(record["old"]),
            unit_from(record["new"]),
            Facts(**record["numbers"]),
            limits,
            record["rule"],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"this is no record of a decision: {error!r}", param="audit") from None


def read(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Records of a log; a last line that a crash cut off is left out.

    Raises InvalidRequest, with its number, for any other line that is no JSON object.
    """
    kept = [line for line in lines if line.strip()]
    for number, line in enumerate(kept, 1):
        try:
            tree = json.loads(line)
        except json.JSONDecodeError:
            if number < len(kept):
                message = f"line {number} of the audit log is not JSON: the log is damaged"
                raise InvalidRequest(message, param="audit") from None
            return
        if not isinstance(tree, dict):
            raise InvalidRequest(f"line {number} of the audit log is no record of a decision", param="audit")
        yield tree


def replay(records: Iterable[Mapping[str, Any]]) -> list[Mismatch]:
    """Decides each record again. Empty: all of them follow from their inputs, and none is missing between.

    Raises InvalidRequest for what is no record.
    """
    found, last, counted = [], dict[tuple[str, Target], Unit](), None
    for index, tree in enumerate(records):
        told, number = decision(tree), tree.get("number")
        why = _differs(told, tree, last.get((told.level, told.key)))
        if counted is not None and number != counted + 1:
            why = why or f"it is number {number}, but the record before is number {counted}"
        if why:
            found.append(Mismatch(index, told.key, why))
        last[told.level, told.key], counted = told.new, number
    return found


def _differs(told: Decision, tree: Mapping[str, Any], before: Unit | None) -> str:
    try:
        after, rule = decide(told.old, told.numbers, told.limits, told.time)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        message = f"no decision can be made from this record: {error!r}"
        raise InvalidRequest(message, param="audit") from None
    if (after, rule) != (told.new, told.rule):
        return f"the rules give {after.state} by {rule or 'no rule'}, not {told.new.state} by {told.rule}"
    if tree.get("reason") != after.reason:
        return "the reason is not the one that the numbers give"
    if before is not None and before.born == told.old.born and before.decided != told.old.decided:
        return f"it began in {told.old.state}, but the record before left the unit in {before.state}"
    return ""
