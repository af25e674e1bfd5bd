"""A plan for people and for scripts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gammaray.cluster.plans import Placed, Plan, Unplaced
from gammaray.cluster.topology import printable
from gammaray.config import Target

OUTLOOK = "a plan for GPUs was never carried out on real ones: see docs/limits.md"
REFUSED = "{} works on CPUs only in this version"


def with_outlook(plan: Plan, target: Target) -> Plan:
    """Says what would become of it where a plan is for GPUs."""
    if not any(placed.gpus for placed in plan.placements):
        return plan
    asked = {"tensor_parallel": target.tensor_parallel > 1, "deterministic": target.deterministic}
    refused = (f"`serve` would refuse it: {REFUSED.format(name)}" for name, on in asked.items() if on)
    return replace(plan, notes=(*plan.notes, OUTLOOK, *refused))


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
    """Two lines for each process: where, and why."""
    lines = [line for placed in plan.placements for line in _lines(placed)]
    lines += [line for missing in plan.unplaced for line in _missing(missing)]
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


def _missing(missing: Unplaced) -> tuple[str, ...]:
    return f"NOT PLACED: {missing.what}", f"      {missing.reason}", f"      needs {missing.needs}"
