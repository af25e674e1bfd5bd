"""Rows against the goals: which rows a goal is about, and where its limit lies."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gammaray.kernels.bench.case import LLAMA_3_8B, LLAMA_3_70B, Case, Heads, Ready, Roofs, Row
from gammaray.kernels.bench.goals import Goal, goals

ROOFS = Roofs(copied=1000.0, operations=4000.0)  # a microsecond
BANDWIDTH, VERIFY, PEAK, SMALL, LOGITS = range(5)


def row(kernel: str, sizes: Mapping[str, str | int], us: float, moved: int = 0, operations: int = 0) -> Row:
    ready = Ready(lambda: torch.zeros(()), lambda _: 0.0)
    return Row(Case(kernel, sizes, moved, operations, 0, 0.0, lambda: ready), us, 0.0, ROOFS)


def attention(
    batch: int, context: int, nodes: int, us: float, moved: int = 0, ops: int = 0, heads: Heads = LLAMA_3_8B
) -> Row:
    sizes = {"model": heads.model, "batch": batch, "context": context, "nodes": nodes, "group": heads.group}
    return row("attention", sizes, us, moved, ops)


def judged(*rows: Row) -> list[tuple[int, int]]:
    return [(goal.met, goal.judged) for goal in goals(rows)]


def test_bandwidth_counts_from_batch_8_and_8k_on() -> None:
    """80 % of 1000 bytes a microsecond: 8000 bytes may take 10."""
    good, bad = attention(8, 8192, 1, 10.0, 8000), attention(8, 8192, 16, 10.1, 8000)
    small = [attention(4, 8192, 1, 99, 1), attention(8, 8191, 1, 99, 1), attention(8, 8192, 17, 99, 1)]
    assert judged(good, bad, *small)[BANDWIDTH] == (1, 2)


def test_verification_is_judged_by_the_decode_row_of_its_own_shape() -> None:
    decode = [attention(1, 1024, 1, 10.0), attention(1, 8192, 1, 100.0)]
    same = attention(1, 1024, 8, 12.5)
    assert judged(*decode, same)[VERIFY] == (1, 1)
    assert judged(*decode, attention(1, 1024, 8, 12.6))[VERIFY] == (0, 1)
    assert judged(*decode, attention(1, 8192, 16, 12.6))[VERIFY] == (1, 1)
    assert judged(*decode, attention(1, 1024, 17, 99.0))[VERIFY] == (0, 0), "more than 64 query rows"
    assert judged(*decode, attention(1, 1024, 8, 9.0, heads=LLAMA_3_70B))[VERIFY] == (0, 0), "another model"


def test_the_peak_is_asked_only_where_bytes_allow_it() -> None:
    """At 55 % of 4000 operations a microsecond, 22000 of them take 10; 10000 bytes take 10 as well."""
    met = attention(8, 8192, 64, 10.0, 9000, 22_000)
    missed = attention(8, 8192, 64, 10.1, 9000, 22_000)
    out_of_reach = attention(8, 8192, 64, 11.0, 11_000, 22_000)
    assert judged(met, missed, out_of_reach)[PEAK] == (1, 2)
    assert "1 more" in goals([out_of_reach])[PEAK].note


def test_verification_of_tokens() -> None:
    small = {"batch": 1, "nodes": 8, "filters": "none"}
    assert judged(row("verification", small, 30.0, 10), row("verification", small, 30.5, 10))[SMALL] == (1, 2)
    large = small | {"batch": 64}
    assert judged(row("verification", large, 13.0, 10_000))[LOGITS] == (1, 1)
    assert judged(row("verification", large, 13.1, 10_000))[LOGITS] == (0, 1)


def test_the_worst_row_is_named_and_nothing_is_met_by_absence() -> None:
    found = goals([attention(8, 8192, 1, 20.0, 8000), attention(32, 8192, 1, 16.0, 8000)])[BANDWIDTH]
    assert found == Goal(found.goal, 0, 2, "Llama-3-8B batch 8 context 8192 nodes 1 group 4: 0.4")
    assert found.verdict == "missed"
    assert {goal.verdict for goal in goals([])} == {"not measured"}
