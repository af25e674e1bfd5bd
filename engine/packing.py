"""A step's jobs as the kernels of `kernels/verification.py` take them, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gammaray.engine.constraints import Listed
from gammaray.engine.verifier import Verdict, VerifyJob, rule
from gammaray.kernels import verification
from gammaray.kernels.verification import (
    Edit,
    Job,
    Rule,
    Size,
    VerifyBatch,
    VerifyResult,
    VerifyWorkspace,
)
from gammaray.types import SamplingParams

NOTHING = Size(0, 0, 0)


def verify_fused(logits: Tensor, jobs: Sequence[VerifyJob]) -> list[Verdict]:
    """`verifier.verify` by kernels: one copy to the device, and one back."""
    batch = send(pack(jobs, logits.shape[1], pin=logits.is_cuda), jobs, logits.device)
    return verdicts(verification.verify(logits, batch, VerifyWorkspace.of(batch.size, logits.device)))


def pack(jobs: Sequence[VerifyJob], vocab: int, at_least: Size = NOTHING, pin: bool = False) -> VerifyBatch:
    """The batch, on the CPU, in pinned memory with `pin`. Padded where `at_least` says so.

    q is filled in where it is on the CPU already; else `send` does that on the device.
    """
    parts = [_part(job) for job in jobs]
    batch = VerifyBatch.empty(_size(jobs, parts, vocab, at_least), pin=pin)
    if batch.size.support:
        batch.q_probs.zero_()
    fill = _Fill(batch)
    for job, part in zip(jobs, parts, strict=True):
        fill.add(job, part)
    fill.finish()
    _fill_q(batch, jobs, "cpu")
    return batch


def send(batch: VerifyBatch, jobs: Sequence[VerifyJob], device: torch.device) -> VerifyBatch:
    """A packed batch on a device, with the q that were there."""
    if device.type == "cpu":
        return batch
    there = batch.to(device)
    _fill_q(there, jobs, device.type)
    return there


def verdicts(result: VerifyResult) -> list[Verdict]:
    """Waits for the device, and copies once. What pads a batch comes out with token -1."""
    host = VerifyResult.of(result.storage.cpu(), result.path.shape[1])
    columns = (host.path, host.tokens, host.tested, host.ranks, host.accepted, host.failed)
    return [
        Verdict(tuple(path[:n]), tuple(tokens[: n + 1 - failed]), tested, tuple(ranks[:n]), bool(failed))
        for path, tokens, tested, ranks, n, failed in zip(*(c.tolist() for c in columns), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Part:
    """One job's tree, and its constraints at each row."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: list[int]  # of the rows
    listed: Listed | None
    bans: list[list[int]]  # of the rows
    masks: list[Tensor | None]  # of the rows


def _part(job: VerifyJob) -> _Part:
    tokens, parents = (job.tree.tokens, job.tree.parents) if job.tree else ((), ())
    paths: list[list[int]] = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*paths[parent + 1], token])
    depths, rules = [len(path) for path in paths], job.constraints
    if rules is None:
        return _Part(tokens, parents, depths, None, [[]] * len(paths), [None] * len(paths))
    bans = [rules.banned(path) for path in paths]
    return _Part(tokens, parents, depths, rules.listed(tokens), bans, rules.masks(tokens, parents))


def _size(jobs: Sequence[VerifyJob], parts: Sequence[_Part], vocab: int, at_least: Size) -> Size:
    def most(least: int, *sizes: int) -> int:
        return max(least, *sizes, 0)

    rows = most(at_least.rows, sum(len(part.depths) for part in parts))
    count, depth = most(at_least.jobs, len(jobs)), most(at_least.depth, *(max(p.depths) for p in parts))
    size = Size(
        jobs=count,
        rows=rows,
        vocab=vocab,
        depth=depth,
        support=most(at_least.support, *(_support(job) for job in jobs)),
        edits=most(at_least.edits, sum(len(p.listed.tokens) for p in parts if p.listed)),
        bans=most(at_least.bans, sum(len(bans) for part in parts for bans in part.bans)),
        masks=most(at_least.masks, sum(mask is not None for part in parts for mask in part.masks)),
        filters=at_least.filters or any(_filters(job.sampling, vocab) for job in jobs),
        constrains=at_least.constrains or any(job.constraints is not None for job in jobs),
    )
    return replace(size, levels=at_least.levels or verification.by_levels(count, rows, depth))


def _support(job: VerifyJob) -> int:
    if not _rejects(job):
        return 0
    assert job.tree is not None and job.tree.q_ids is not None
    return max(1, job.tree.q_ids.shape[-1])


def _rejects(job: VerifyJob) -> bool:
    return rule(job) in (Rule.IID, Rule.WITHOUT_REPLACEMENT)


def _filters(sampling: SamplingParams, vocab: int) -> bool:
    cuts = sampling.min_p > 0 or sampling.top_p < 1 or 0 < sampling.top_k < vocab
    return cuts and not sampling.greedy


class _Fill:
    """Writes jobs into a batch, one behind the other."""

    def __init__(self, batch: VerifyBatch) -> None:
        self._batch = batch
        self._jobs: list[list[int]] = []  # columns
        self._reals: list[list[float]] = []
        self._nodes: list[list[int]] = []
        self._bans: list[int] = []
        self._masks: list[Tensor] = []
        self._edits = 0

    def add(self, job: VerifyJob, part: _Part) -> None:
        first, edits = len(self._nodes), self._edits
        tree = zip((-1, *part.tokens), (-1, *(p + 1 for p in part.parents)), part.depths, strict=True)
        for (token, parent, depth), bans, mask in zip(tree, part.bans, part.masks, strict=True):
            held = len(self._bans)
            self._bans += bans
            place = -1 if mask is None else len(self._masks)
            column = [len(self._jobs), token, parent, depth, place, held, len(self._bans)]  # see Node
            self._nodes.append(column)
            self._masks += [] if mask is None else [mask]
        if part.listed is not None:
            self._list(part.listed)
        self._jobs.append(_job(job, first, len(part.depths), self._batch.size.vocab, edits, self._edits))
        self._reals.append(_reals(job.sampling))

    def _list(self, listed: Listed) -> None:
        own = self._batch.edits[:, self._edits : self._edits + len(listed.tokens)]
        own[Edit.TOKEN] = listed.tokens
        own[Edit.BIAS] = listed.bias.view(torch.int32)
        own[Edit.COUNT] = listed.counts.view(torch.int32)
        own[Edit.SEEN] = listed.seen
        self._edits += len(listed.tokens)

    def finish(self) -> None:
        batch = self._batch
        if self._jobs:
            batch.jobs[:, : len(self._jobs)] = torch.tensor(self._jobs).T
            batch.jobs[_REALS, : len(self._jobs)] = torch.tensor(self._reals).view(torch.int32).T
            batch.nodes[:, : len(self._nodes)] = torch.tensor(self._nodes).T
        batch.bans[: len(self._bans)] = torch.tensor(self._bans, dtype=torch.int32)
        if self._masks:
            batch.masks[: len(self._masks)] = _bits(torch.stack(self._masks), batch.size.words)


_REALS = [Job.TEMPERATURE, Job.TOP_P, Job.FLOOR, Job.REPETITION, Job.REWARD, Job.FREQUENCY, Job.PRESENCE]


def _job(job: VerifyJob, first: int, rows: int, vocab: int, edits: int, edits_end: int) -> list[int]:
    """A column of `VerifyBatch.jobs`, without its floats."""
    sampling, column = job.sampling, [0] * len(Job)
    column[Job.FIRST_ROW], column[Job.ROWS], column[Job.RULE] = first, rows, rule(job)
    column[Job.SEED_LOW], column[Job.SEED_HIGH] = _signed(sampling.seed), _signed(sampling.seed >> 32)
    column[Job.SEQUENCE], column[Job.POSITION] = _signed(job.sequence), _signed(job.position)
    column[Job.FILTERED] = _filters(sampling, vocab)
    column[Job.TOP_K] = sampling.top_k if 0 < sampling.top_k < vocab else 0
    column[Job.LOGPROBS] = sampling.logprobs is not None
    column[Job.CONSTRAINED] = job.constraints is not None
    column[Job.EDITS], column[Job.EDITS_END] = edits, edits_end
    return column


def _reals(sampling: SamplingParams) -> list[float]:
    """Those of `_REALS`."""
    temperature = 1.0 if sampling.greedy else max(sampling.temperature, torch.finfo(torch.float32).tiny)
    floor = 0.0 - math.log(sampling.min_p) if sampling.min_p > 0 else math.inf
    repetition = sampling.repetition_penalty
    penalties = (repetition, 1 / repetition, sampling.frequency_penalty, sampling.presence_penalty)
    return [temperature, sampling.top_p, floor, *penalties]


def _signed(word: int) -> int:
    """The low 32 bits, as an int32."""
    word &= (1 << 32) - 1
    return word - (1 << 32) if word >> 31 else word


def _bits(masks: Tensor, words: int) -> Tensor:
    """Bit v % 32 of word v // 32 from bool [M, V]: int32 [M, words]."""
    padded = torch.nn.functional.pad(masks, (0, words * 32 - masks.shape[1]))
    return torch.from_numpy(np.packbits(padded.numpy(), axis=1, bitorder="little").view(np.int32))


def _fill_q(batch: VerifyBatch, jobs: Iterable[VerifyJob], device: str) -> None:
    """q of the jobs that have it on this kind of device; siblings share the row of the first."""
    row = 0
    for job in jobs:
        tree = job.tree
        if tree and _rejects(job) and tree.q_ids is not None and tree.q_probs is not None:
            nodes, support = slice(row + 1, row + 1 + len(tree)), tree.q_ids.shape[-1]
            if tree.q_ids.device.type == device:
                batch.q_ids[nodes, :support] = tree.q_ids
                batch.q_probs[nodes, :support] = tree.q_probs
        row += 1 + len(tree or ())
