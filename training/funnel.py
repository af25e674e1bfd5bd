"""Which of several drafters a target should have: three sieves, each dearer than the one before.

    coarse     size, acceptance and draft latency, on a few prompts
    sharing    whether a second turn finds the KV of the first: the target's, and the drafter's own
    measured   against plain decoding and each other, in turns on one engine

A verdict is a pure function of what was measured; `choose.py` measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from gammaray.engine.bench.figures import Row
from gammaray.kernels.bench.report import table
from gammaray.types import Reuse

NONE = "none, plain decoding is faster or as fast"
Sieve = Literal["load", "coarse", "sharing", "measured"]


@dataclass(frozen=True, slots=True)
class Limits:
    """`largest` and `smallest`: parameters, of the target's. Reuse: of what could have been (KRR, math.md
    section 4)."""

    largest: float = 1 / 20
    smallest: float = 1 / 30
    alpha: float = 0.55
    latency: float = 0.30
    reuse: float = 0.5


@dataclass(frozen=True, slots=True)
class Coarse:
    """`free`: its drafts are paid with look-ups, not with passes over weights."""

    size: float | None  # parameters of its own, of the target's; 0: none; None: nobody knows
    alpha: float | None  # None: no draft was tested
    latency: float  # T_draft per drafted token, of T_AR
    free: bool = False


@dataclass(frozen=True, slots=True)
class Sharing:
    """Of second turns: the target's cache beside this drafter, and the drafter's own; None: it has none."""

    target: Reuse
    own: Reuse | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """`chosen`: the one. `reason`: a sentence, also of those that remain behind."""

    drafter: str
    sieve: Sieve  # the last that it came to
    chosen: bool
    reason: str
    coarse: Coarse | None = None
    sharing: Sharing | None = None
    measured: Row | None = None


def coarse(found: Coarse, limits: Limits) -> str:
    """Why it is dropped; empty: it is not.

    A draft that is free pays with less acceptance too, so that `limits.alpha` is for the others.
    """
    if found.size is not None and found.size > limits.largest:
        return f"has {found.size:.1%} of the target's parameters, more than {limits.largest:.1%}"
    if found.latency > limits.latency:
        return f"a drafted token takes {found.latency:.0%} of a plain one, more than {limits.latency:.0%}"
    if found.alpha is None:
        return "drafted nothing that was tested"
    if not found.free and found.alpha < limits.alpha:
        return f"alpha {found.alpha:.2f} is below {limits.alpha:.2f}"
    return ""


def remark(found: Coarse, limits: Limits) -> str:
    """What is to be known of one that is not dropped."""
    if found.size and found.size < limits.smallest:
        return f"; smaller than 1/{1 / limits.smallest:.0f} of the target, so mind its alpha"
    return ""


def sharing(found: Sharing, limits: Limits) -> str:
    """Why it is dropped; empty: it is not. What was never seen before cannot be reused."""
    for whose, reuse in (("the target", found.target), ("it", found.own)):
        if reuse and reuse.seen and (ratio := reuse.reused / reuse.seen) < limits.reuse:
            return f"{whose} reuses {ratio:.0%} of what a second turn could, less than {limits.reuse:.0%}"
    return ""


def best(rows: Mapping[str, Row]) -> str | None:
    """The fastest of those faster than plain decoding, also at the lower end of their interval."""
    gains = {name: row.speedup for name, row in rows.items() if row.speedup and _surely(row)}
    return max(gains, key=lambda name: gains[name]) if gains else None


def decided(one: Verdict, rows: Mapping[str, Row], limits: Limits) -> Verdict:
    """Of one that came to the last sieve. `rows`: of all of these, by drafter."""
    chosen, reason = measured(one.drafter, rows)
    more = remark(one.coarse, limits) if one.coarse is not None else ""
    row = rows[one.drafter]
    return replace(one, sieve="measured", measured=row, chosen=chosen, reason=reason + more)


def measured(name: str, rows: Mapping[str, Row]) -> tuple[bool, str]:
    """Whether it is chosen, and why."""
    row, winner = rows[name], best(rows)
    if not row.speedup:
        return False, "answers were too short to time"
    own = f"{row.speedup:.2f}x{_interval(row)}"
    if name == winner:
        return True, f"the fastest: {own}"
    if not _surely(row):
        return False, f"no sure gain: {own}"
    return False, f"{own}, behind {winner} with {rows[winner or ''].speedup:.2f}x"


def _surely(row: Row) -> bool:
    low = row.speedup_ci[0]
    return (row.speedup or 0.0) > 1 and (low is None or low > 1)


def _interval(row: Row) -> str:
    low, high = row.speedup_ci
    return "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"


HEAD = ("drafter", "size", "alpha", "latency", "target KV", "own KV", "speed-up", "verdict")


def as_text(verdicts: Sequence[Verdict]) -> str:
    """A table, the chosen one first."""
    ordered = sorted(verdicts, key=lambda one: not one.chosen)
    chosen = [one.drafter for one in verdicts if one.chosen]
    return "\n".join([*table(HEAD, map(_cells, ordered)), "", f"chosen: {chosen[0] if chosen else NONE}"])


def as_json(verdicts: Sequence[Verdict]) -> dict[str, object]:
    chosen = [one.drafter for one in verdicts if one.chosen]
    return {"chosen": chosen[0] if chosen else None, "verdicts": [asdict(one) for one in verdicts]}


def _cells(one: Verdict) -> list[str]:
    found, shared, row = one.coarse, one.sharing, one.measured
    return [
        one.drafter,
        "-" if found is None or found.size is None else f"{found.size:.1%}",
        "-" if found is None or found.alpha is None else f"{found.alpha:.2f}",
        "-" if found is None else f"{found.latency:.1%}",
        "-" if shared is None else _ratio(shared.target),
        "-" if shared is None else _ratio(shared.own),
        "-" if row is None or row.speedup is None else f"{row.speedup:.2f}",
        f"{'chosen' if one.chosen else f'out ({one.sieve})'}: {one.reason}",
    ]


def _ratio(reuse: Reuse | None) -> str:
    return "none" if reuse is None else f"{reuse.reused / reuse.seen:.0%}" if reuse.seen else "-"
