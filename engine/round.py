"""What one step computes, before any sequence changes: drafts, logits, verdicts, log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gammaray.engine import logprobs
from gammaray.engine.batch import Row
from gammaray.engine.drafters.base import DraftTree
from gammaray.engine.hidden import of_layers
from gammaray.engine.kv import KVCache
from gammaray.engine.runner import ModelRunner
from gammaray.engine.scheduler import Slice
from gammaray.engine.verifier import Verdict, VerifyJob, verify
from gammaray.types import Logprobs


@dataclass(slots=True)
class Round:
    """By rid. `ends` are the slices that reach the end of their sequence and so get a verdict."""

    slices: list[Slice] = field(default_factory=list)
    ends: list[Slice] = field(default_factory=list)
    drafted: dict[str, int] = field(default_factory=dict)  # nodes proposed
    trees: dict[str, DraftTree] = field(default_factory=dict)  # ... and verified
    logits: Tensor | None = None  # [N, V] of the ends: each one's root, then its nodes
    first_row: dict[str, int] = field(default_factory=dict)  # where those begin
    layers: tuple[int, ...] = ()  # whose hidden states somebody wants
    features: Tensor | None = None  # [T, len(layers) * H] of all tokens fed
    first_token: dict[str, int] = field(default_factory=dict)  # where those of each slice begin
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    shadows: dict[str, Verdict] = field(default_factory=dict)  # what theirs would be, were they none
    logprobs: dict[str, list[Logprobs]] = field(default_factory=dict)  # one per token of the verdict
    prompt_logprobs: dict[str, list[Logprobs]] = field(default_factory=dict)  # of this slice's successors

    def rows_of(self, rid: str, count: int) -> Tensor:
        """The logits [count, V] that its next `count` tokens were chosen from."""
        assert self.logits is not None
        return self.logits[[self.first_row[rid] + row for row in self.verdicts[rid].rows[:count]]]

    def likeliest(self, rid: str, count: int) -> Tensor:
        """The `count` likeliest tokens [1 + K, count] behind its last committed token and each node."""
        assert self.logits is not None
        first = self.first_row[rid]
        rows = self.logits[first : first + 1 + len(self.trees.get(rid, ()))]
        return rows.topk(min(count, rows.shape[1]), dim=-1).indices

    def features_of(self, part: Slice, kept: int, layers: Sequence[int]) -> Tensor:
        """Hidden states [pending + max(0, kept - 1), len(layers) * H] of its tokens: those that were pending,
        and those that were accepted, save the last of the `kept`, which was not fed."""
        assert self.features is not None
        rid, first = part.sequence.rid, self.first_token[part.sequence.rid]
        path = self.verdicts[rid].path[: max(0, kept - 1)] if rid in self.verdicts else ()
        rows = [*range(first, first + part.pending), *(first + part.pending + node for node in path)]
        return of_layers(self.features[rows], self.layers, layers)


def compute(
    runner: ModelRunner,
    slices: list[Slice],
    trees: Mapping[str, DraftTree],
    drafted: Mapping[str, int],
    layers: tuple[int, ...] = (),
) -> Round:
    """One pass of the target over the slices and their drafts, and what it says of them. `layers`: whose
    hidden states are wanted besides."""
    done = Round(
        layers=layers,
        slices=slices,
        ends=[part for part in slices if part.pending == part.sequence.pending],
        drafted=dict(drafted),
        trees=dict(trees),
    )
    if not slices:
        return done
    rows = [_row(part, trees.get(part.sequence.rid)) for part in slices]
    # [N, V]: of each row the pending tokens that want some, then the nodes
    logits, done.features = runner.forward_features(rows, layers) if layers else (runner.forward(rows), None)
    fed = 0
    for part, row in zip(slices, rows, strict=True):
        done.first_token[part.sequence.rid] = fed
        fed += part.pending + len(row.tree_tokens)
    _score_prompts(done, rows, logits)
    done.logits = _of_ends(done, rows, logits)
    first = 0
    for part in done.ends:
        done.first_row[part.sequence.rid] = first
        first += 1 + len(trees.get(part.sequence.rid, ()))
    verdicts = verify(done.logits, [_job(part, trees.get(part.sequence.rid)) for part in done.ends])
    for part, verdict in zip(done.ends, verdicts, strict=True):
        rid = part.sequence.rid
        if part.sequence.request.plan.shadow:
            failed = verdict.failed and not verdict.tokens  # at its root, not where it would have been
            done.shadows[rid], verdict = verdict, Verdict((), verdict.tokens[:1], 0, failed=failed)
        done.verdicts[rid] = verdict
    _score_tokens(done)
    return done


def _row(part: Slice, tree: DraftTree | None) -> Row:
    sequence, start = part.sequence, part.sequence.table.computed
    return Row(
        pending=sequence.tokens[start : start + part.pending],
        start=start,
        blocks=sequence.table.blocks,
        tree_tokens=tree.tokens if tree else (),
        tree_parents=tree.parents if tree else (),
        logits=part.pending if sequence.scoring else int(part.pending == sequence.pending),
    )


def _job(part: Slice, tree: DraftTree | None) -> VerifyJob:
    sequence = part.sequence
    return VerifyJob(
        tree=tree,
        sampling=sequence.request.sampling,
        sequence=sequence.index,
        position=len(sequence.tokens),
        verification="coupled" if sequence.request.plan.shadow else sequence.request.plan.verification,
        constraints=sequence.constraints,
    )


def _score_prompts(done: Round, rows: Sequence[Row], logits: Tensor) -> None:
    """The logits of a prompt token are about the next one."""
    first = 0
    for part, row in zip(done.slices, rows, strict=True):
        sequence = part.sequence
        if sequence.scoring:
            following = sequence.request.prompt[row.start + 1 : row.start + 1 + part.pending]
            top = sequence.request.sampling.prompt_logprobs or 0
            found = logprobs.report(logits[first : first + len(following)], following, top)
            done.prompt_logprobs[sequence.rid] = found
        first += row.wanted


def _of_ends(done: Round, rows: Sequence[Row], logits: Tensor) -> Tensor:
    if not done.prompt_logprobs:
        return logits
    keep: list[int] = []
    first = 0
    for part, row in zip(done.slices, rows, strict=True):
        own = range(first, first + row.wanted)
        keep += own[-1 - len(row.tree_tokens) :] if part in done.ends else ()
        first = own.stop
    return logits[keep]


def _score_tokens(done: Round) -> None:
    for part in done.ends:
        rid, top = part.sequence.rid, part.sequence.request.sampling.logprobs
        if top is not None:
            tokens = done.verdicts[rid].tokens
            done.logprobs[rid] = logprobs.report(done.rows_of(rid, len(tokens)), tokens, top)


def moves(done: Round, cache: KVCache) -> tuple[list[int], list[int]]:
    """Slots of accepted nodes, and the ones behind the pending token that their KV moves down to."""
    source: list[int] = []
    target: list[int] = []
    for part in done.ends:
        table = part.sequence.table
        base = table.computed + part.pending
        moved = [(node, at) for at, node in enumerate(done.verdicts[part.sequence.rid].path) if node != at]
        source += cache.slots(table, (base + node for node, _ in moved))
        target += cache.slots(table, (base + at for _, at in moved))
    return source, target
