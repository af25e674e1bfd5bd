"""A plan for people and for scripts."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from gammaray.cluster.plans import Placed, Plan
from gammaray.cluster.topology import printable


def as_json(plan: Plan) -> dict[str, Any]:
    """The shape that scripts rely on."""
    return {
        "placements": [_placed(placed) for placed in plan.placements],
        "unplaced": [
            {"what": missing.what, "reason": missing.reason, "needs": missing.needs}
            for missing in plan.unplaced
        ],
        "notes": list(plan.notes),
    }


def as_text(plan: Plan) -> str:
    """Two lines for each process: where, and why. What has no place for the same reason shares it."""
    lines = [line for placed in plan.placements for line in _lines(placed)]
    for (reason, needs), alike in groupby(plan.unplaced, lambda missing: (missing.reason, missing.needs)):
        lines += [f"NOT PLACED: {missing.what}" for missing in alike]
        lines += [f"      {reason}", f"      needs {needs}"]
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(map(printable, lines))


def _placed(placed: Placed) -> dict[str, Any]:
    share = placed.memory_fraction
    return {
        "tenant": placed.tenant,
        "role": placed.role,
        "drafter": placed.drafter,
        "node": placed.node,
        "gpus": list(placed.gpus),
        "mode": placed.mode,
        "reason": placed.reason,
        "replica": placed.replica,
        "worker": placed.worker,
        "spare": placed.spare,
        "uuids": list(placed.uuids),
        "memory_fraction": None if share is None else round(share, 4),
    }


def _lines(placed: Placed) -> tuple[str, ...]:
    who = f"target replica {placed.replica}"
    if placed.role == "draft":
        who = f"  draft {placed.drafter} of {placed.tenant}, worker {placed.worker}"
    where = "CPU" if not placed.gpus else f"GPU {' '.join(map(str, placed.gpus))}"
    share = "" if placed.memory_fraction is None else f"  {placed.memory_fraction:.0%} of memory"
    head = f"{who:<44} {placed.node}  {where:<12} {placed.mode}{share}"
    return head, f"{' ' * 6}{placed.reason}"
