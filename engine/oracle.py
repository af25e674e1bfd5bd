"""The state oracle: recompute one sequence densely and compare all state that speculation could spoil.

On in tests. A mismatch names the first wrong layer and position; it means a bug, never a bad request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gammaray.engine.drafters.base import DraftTree
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.drafting import GuardedDrafter
from gammaray.engine.kv import BlockTable, KVCache
from gammaray.engine.round import Round
from gammaray.engine.runner import ModelRunner
from gammaray.engine.sequence import Sequence as Running
from gammaray.engine.sequence import State
from gammaray.errors import StateMismatch

# Largest deviation relative to the size of the values; rounding alone stays far below.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


class Oracle:
    """Checks one sequence a step, in turn."""

    def __init__(self, runner: ModelRunner, cache: KVCache, drafters: Mapping[str, GuardedDrafter]) -> None:
        self._runner = runner
        self._cache = cache
        self._drafters = drafters
        self._turn = 0

    def check(self, done: Round, tables: Iterable[BlockTable]) -> None:
        """After a commit, with the tables of all sequences. Raises StateMismatch."""
        assert done.logits is not None
        if wrong := self._cache.pool.audit(tables):
            raise StateMismatch(wrong, "the pool", None, 0, 1.0)
        sequences = [part.sequence for part in done.ends]
        starts = _row_starts(sequences, done.trees)
        alive = [(s, at) for s, at in zip(sequences, starts, strict=True) if s.state is State.RUNNING]
        if not alive:
            return
        sequence, start = alive[self._turn % len(alive)]
        self._turn += 1
        verdict = done.verdicts[sequence.rid]
        rows = done.logits[[start] + [start + 1 + node for node in verdict.path]]  # [accepted + 1, V]
        computed = sequence.table.computed
        slots = self._cache.slots(sequence.table, range(computed))
        dense = check_kv("target KV", self._runner, sequence.rid, sequence.tokens[:computed], slots)
        first = computed - len(rows)  # the row of the root
        _compare("logits", sequence.rid, None, first, dense[first:], rows, TOLERANCE[self._runner.dtype])
        self._check_drafter(sequence)

    def _check_drafter(self, sequence: Running) -> None:
        guarded = self._drafters.get(sequence.request.plan.drafter or "")
        if guarded is None or (length := guarded.length(sequence.rid)) is None:
            return
        drafter = guarded.inner
        if length > len(sequence.tokens):
            raise StateMismatch("drafter length", sequence.rid, None, len(sequence.tokens), 1.0)
        if isinstance(drafter, ModelDrafter) and (state := drafter.committed(sequence.rid)):
            tokens, slots = state
            if tokens != sequence.tokens[: len(tokens)]:
                raise StateMismatch("drafter tokens", sequence.rid, None, len(tokens), 1.0)
            check_kv("drafter KV", drafter.runner, sequence.rid, tokens, slots)


def check_kv(what: str, runner: ModelRunner, rid: str, tokens: Sequence[int], slots: Sequence[int]) -> Tensor:
    """Compare the KV in `slots` with a dense pass over `tokens`; returns its logits [T, V]."""
    if not tokens:
        return torch.empty(0, runner.vocab_size)
    logits, dense = runner.dense(tokens)
    tolerance = TOLERANCE[runner.dtype]
    for layer, (expected, found) in enumerate(zip(dense, runner.read_kv(slots), strict=True)):
        for name, one, other in zip(("keys", "values"), expected, found, strict=True):
            _compare(f"{what} ({name})", rid, layer, 0, one, other, tolerance)
    return logits


def _compare(
    what: str, rid: str, layer: int | None, first: int, expected: Tensor, found: Tensor, tolerance: float
) -> None:
    """Rows are positions, from `first` on."""
    scale = expected.float().abs().max().clamp(min=1.0)
    error = (expected.float() - found.float()).abs().flatten(1).amax(1) / scale  # [T]
    bad = (~(error <= tolerance)).nonzero()  # NaN is bad as well
    if len(bad):
        row = int(bad[0])
        raise StateMismatch(what, rid, layer, first + row, float(error[row]))


def _row_starts(sequences: Sequence[Running], trees: Mapping[str, DraftTree]) -> list[int]:
    starts, at = [], 0
    for sequence in sequences:
        starts.append(at)
        at += 1 + (len(trees[sequence.rid]) if sequence.rid in trees else 0)
    return starts
