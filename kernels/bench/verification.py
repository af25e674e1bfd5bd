"""Verification of drafted chains over Llama 3's vocabulary, by rule, with and without filters.

A chain of 8 nodes is what the goals speak of. Drafts are accepted about as often as good drafters' are, so
that walks go some levels deep.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gammaray.kernels import verify as rules
from gammaray.kernels.bench.case import Case, Ready
from gammaray.kernels.bench.walks import CUT, apart, tried
from gammaray.kernels.philox import NoiseKeys, Purpose, gumbel, uniform
from gammaray.kernels.verification import (
    Job,
    Node,
    Rule,
    Size,
    VerifyBatch,
    VerifyResult,
    VerifyWorkspace,
    by_levels,
    verify,
)

VOCAB = 128_256
BATCHES, NODES = (1, 64), (8, 64)
SUPPORT = 64  # tokens of q that a draft carries
ACCEPTED = 0.7  # share of drafted tokens that are the target's own
TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.9
SPREAD = 4.0  # standard deviation of the logits
RULES = {"greedy": Rule.GREEDY, "coupled": Rule.COUPLED, "rejection": Rule.IID}


@dataclass(frozen=True, slots=True)
class Shape:
    rule: str
    batch: int
    nodes: int
    filters: bool
    vocab: int = VOCAB
    dtype: torch.dtype = torch.bfloat16

    @property
    def rows(self) -> int:
        """Of logits: each job's root and nodes."""
        return self.batch * (1 + self.nodes)

    @property
    def size(self) -> Size:
        return Size(
            jobs=self.batch,
            rows=self.rows,
            vocab=self.vocab,
            depth=self.nodes,
            support=SUPPORT if self.rule == "rejection" else 0,
            filters=self.filters,
            levels=by_levels(self.batch, self.rows, self.nodes),
        )


def cases(device: torch.device) -> Iterator[Case]:
    for batch in BATCHES:
        for rule in RULES:
            for filters in (False, True) if rule != "greedy" else (False,):
                yield case(Shape(rule, batch, 8, filters), device)


def case(shape: Shape, device: torch.device) -> Case:
    read = shape.rows * shape.vocab * shape.dtype.itemsize
    return Case(
        kernel="verification",
        sizes={
            "rule": shape.rule,
            "batch": shape.batch,
            "nodes": shape.nodes,
            "filters": f"top_k {TOP_K} top_p {TOP_P}" if shape.filters else "no filters",
        },
        moved=read,
        operations=0,
        memory=read + 12 * shape.rows * shape.vocab * 4,  # the truth takes the most
        tolerance=0.0,
        prepare=partial(_ready, shape, device),
        seconds=8.0,
    )


def _ready(shape: Shape, device: torch.device) -> Ready:
    logits = (torch.randn(shape.rows, shape.vocab, device=device) * SPREAD).to(shape.dtype)
    truth = Truth(shape, logits)
    batch, workspace = _pack(shape, truth), VerifyWorkspace.of(shape.size, device)

    def run() -> Tensor:
        return verify(logits, batch, workspace).storage

    return Ready(run, lambda storage: truth.share_wrong(VerifyResult.of(storage, shape.size.depth)))


class Truth:
    """What each row emits by `kernels.verify`, and drafts for it. Rows are numbered job by job."""

    def __init__(self, shape: Shape, logits: Tensor) -> None:
        self._shape, self.device = shape, logits.device
        logprobs, clear = _process(logits, shape)  # [N, V], [N]
        self.q_ids, self.q_probs = _top(logprobs)  # [N, S] of the node in this row, from its parent's row
        if shape.rule == "rejection":
            self.tokens = self.q_ids.gather(1, self.q_probs.multinomial(1))[:, 0]
            self._accepted, self._emitted, sure = self._reject(logprobs)
        else:
            own, sure = self._own(logits, logprobs)
            other = torch.randint(shape.vocab, own.shape, device=self.device)
            drafted = torch.where(torch.rand(own.shape, device=self.device) < ACCEPTED, own, other)
            self.tokens = drafted.roll(1)
            self._accepted, self._emitted = own == drafted, own
        self.tokens.view(shape.batch, -1)[:, 0] = -1  # the roots
        self.decided = clear & sure  # [N], see `walks.py`

    def share_wrong(self, found: VerifyResult) -> float:
        """Share of the jobs that emit other tokens, as far as their steps are decided."""
        jobs = (self._shape.batch, -1)
        accepted = self._accepted.view(jobs)[:, :-1].long().cumprod(1).sum(1).tolist()  # [J]
        decided = self.decided.view(jobs).long().cumprod(1).sum(1).tolist()  # [J] of the first rows
        emitted, tokens = self._emitted.view(jobs).tolist(), self.tokens.view(jobs).tolist()
        wrong = 0
        for job, (length, steps) in enumerate(zip(accepted, decided, strict=True)):
            expected = [*tokens[job][1 : length + 1], emitted[job][length]][:steps]
            same = found.tokens[job, : len(expected)].tolist() == expected
            wrong += not same or (steps > length and int(found.accepted[job]) != length)
        return wrong / len(accepted)

    def _own(self, logits: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """What each row emits whatever was drafted, and whether that is decided."""
        if self._shape.rule == "greedy":
            own = logits.argmax(-1)
            return own, torch.ones_like(own, dtype=torch.bool)
        return _draw(logprobs, self._keys(Purpose.TARGET))

    def _reject(self, logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each row with its one child: is that accepted, what is emitted if not, and are both decided."""
        leaf = (
            torch.arange(self._shape.rows, device=self.device) % (1 + self._shape.nodes) == self._shape.nodes
        )
        children = rules.SampledChildren(
            tokens=self.tokens.roll(-1)[:, None].masked_fill(leaf[:, None], -1),
            q_ids=self.q_ids.roll(-1, 0),
            q_probs=self.q_probs.roll(-1, 0).masked_fill(leaf[:, None], 0.0),
            without_replacement=torch.zeros_like(leaf),
        )
        (chosen, rest), sure = tried(logprobs, children, uniform(self._keys(Purpose.ACCEPT), 1))
        emitted, clear = _draw(rest.log(), self._keys(Purpose.RESIDUAL))
        return chosen == 0, emitted, sure & (clear | (chosen == 0))

    def _keys(self, purpose: Purpose) -> NoiseKeys:
        """Job j has seed and sequence j and begins at position j."""
        job, depth = _job_and_depth(self._shape, self.device)
        full = torch.full_like(job, int(purpose))
        return NoiseKeys(
            seed=job, sequence=job, position=job + depth, purpose=full, rank=torch.zeros_like(job)
        )


def _draw(logprobs: Tensor, keys: NoiseKeys) -> tuple[Tensor, Tensor]:
    """`rules.draw` [N], and whether the best is clear of the second."""
    scores = logprobs + gumbel(keys, logprobs.shape[1])
    return scores.argmax(-1), apart(scores)


def _process(logits: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N, V] float32 after temperature, top_k and top_p, and whether the cut is decided."""
    scaled = logits.float() if shape.rule == "greedy" else logits.float() / TEMPERATURE
    clear = torch.ones(len(scaled), dtype=torch.bool, device=scaled.device)
    if shape.filters:
        top, ids = scaled.sort(descending=True, stable=True)
        top, ids = top[:, :TOP_K], ids[:, :TOP_K]
        share = top.softmax(-1)
        before = share.cumsum(-1) - share
        clear = ((before - TOP_P).abs() > CUT).all(-1)
        top = top.masked_fill(before >= TOP_P, -math.inf)
        scaled = torch.full_like(scaled, -math.inf).scatter_(1, ids, top)
    return scaled.log_softmax(-1), clear


def _top(logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """q of each row's node: the likeliest tokens of the row before, its parent's."""
    scores, ids = logprobs.roll(1, 0).topk(min(SUPPORT, logprobs.shape[1]))
    return ids, scores.softmax(-1)


def _job_and_depth(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    rows = torch.arange(shape.rows, device=device)
    return rows // (1 + shape.nodes), rows % (1 + shape.nodes)


def _pack(shape: Shape, truth: Truth) -> VerifyBatch:
    batch = VerifyBatch.empty(shape.size, truth.device)
    index = torch.arange(shape.batch, device=truth.device)
    jobs: dict[Job, Tensor | int] = {
        Job.FIRST_ROW: index * (1 + shape.nodes),
        Job.ROWS: 1 + shape.nodes,
        Job.RULE: int(RULES[shape.rule]),
        Job.SEED_LOW: index,
        Job.SEED_HIGH: 0,
        Job.SEQUENCE: index,
        Job.POSITION: index,
        Job.FILTERED: int(shape.filters),
        Job.TOP_K: TOP_K if shape.filters else 0,
        Job.LOGPROBS: 0,
        Job.CONSTRAINED: 0,
    }
    reals = {
        Job.TEMPERATURE: 1.0 if shape.rule == "greedy" else TEMPERATURE,
        Job.TOP_P: TOP_P if shape.filters else 1.0,
        Job.FLOOR: math.inf,
    }
    for field, value in jobs.items():
        batch.jobs[field] = value
    for field, real in reals.items():
        batch.jobs.view(torch.float32)[field] = real
    job, depth = _job_and_depth(shape, truth.device)
    nodes: dict[Node, Tensor | int] = {
        Node.JOB: job,
        Node.TOKEN: truth.tokens,
        Node.PARENT: depth - 1,
        Node.DEPTH: depth,
        Node.MASK: -1,
        Node.BANS: 0,
        Node.BANS_END: 0,
    }
    for column, entries in nodes.items():
        batch.nodes[column] = entries
    if shape.size.support:
        batch.q_ids.copy_(truth.q_ids)
        batch.q_probs.copy_(truth.q_probs)
    return batch
