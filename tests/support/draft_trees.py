"""Draft trees of every shape and kind, with logits to verify them by, and both verifiers on them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gammaray.engine import packing, verifier
from gammaray.engine.drafters.base import DraftTree
from gammaray.engine.verifier import Verdict, VerifyJob
from gammaray.kernels import verification
from gammaray.kernels.verification import Size, VerifyResult, VerifyWorkspace
from gammaray.types import SamplingParams

POISON = 0x7FC00BAD  # a NaN, and no token


def parents_of(rng: random.Random, nodes: int) -> list[int]:
    """Chains, bushes, and what lies between."""
    parents = [-1]
    while len(parents) < nodes:
        parents.append(rng.randrange(-1, len(parents)) if rng.random() < 0.6 else len(parents) - 1)
    return parents[:nodes]


def tree_of(rng: random.Random, parents: Sequence[int], vocab: int, drawn: str) -> DraftTree:
    """Siblings drawn from one q of some of the vocabulary, not always by its weights."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    proposals: dict[int, tuple[Tensor, Tensor, list[int]]] = {}
    tokens, ids, probs = [], [], []
    for parent in parents:
        if parent not in proposals:
            top = torch.randn(vocab, generator=generator).topk(rng.choice([min(vocab, 64), 4]))
            proposals[parent] = (top.indices, top.values.softmax(-1), [])
        q_ids, q_probs, used = proposals[parent]
        free = [i for i in range(len(q_ids)) if i not in used] if drawn == "without_replacement" else []
        used.append(rng.choice(free or range(len(q_ids))))
        tokens.append(int(q_ids[used[-1]]))
        ids.append(q_ids)
        probs.append(q_probs)
    pad = torch.nn.utils.rnn.pad_sequence
    q_ids, q_probs = pad(ids, batch_first=True), pad(probs, batch_first=True)
    return DraftTree(tuple(tokens), tuple(parents), drawn, q_ids, q_probs)


def sampling_of(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.5, 1.0, 1.0, 1.6]),
        top_k=rng.choice([0, 0, 3, 50]),
        top_p=rng.choice([1.0, 1.0, 0.8, 0.3]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        seed=rng.randrange(2**64),
        logprobs=rng.choice([None, 0]),
    )


def jobs_of(seed: int, count: int, vocab: int, most: int = 8) -> tuple[Tensor, list[VerifyJob]]:
    """Jobs of all rules and parameters; logits [N, V] in which some rows have a NaN, or nothing."""
    rng, rows, jobs = random.Random(seed), [], []
    for _ in range(count):
        drawn = rng.choice(["iid", "without_replacement", "deterministic"])
        tree = tree_of(rng, parents_of(rng, rng.randrange(1, most + 1)), vocab, drawn)
        tree = None if rng.random() < 0.1 else tree
        rule = "coupled" if rng.random() < 0.3 else "rejection"
        jobs.append(VerifyJob(tree, sampling_of(rng), rng.randrange(3), rng.randrange(10**6), rule))
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        own = torch.randn(1 + len(tree or ()), vocab, generator=generator) * 1.5
        if rng.random() < 0.1:
            own[rng.randrange(len(own)), rng.randrange(vocab)] = float("nan")
        if rng.random() < 0.1:
            own[rng.randrange(len(own))] = float("-inf")
        rows.append(own)
    return torch.cat(rows), jobs


def truth(logits: Tensor, jobs: Sequence[VerifyJob]) -> list[Verdict]:
    return verifier.verify_torch(logits, jobs)


def launched(
    logits: Tensor, jobs: Sequence[VerifyJob], at_least: Size = packing.NOTHING, chunk: int = 64
) -> VerifyResult:
    """What kernels make of the jobs, in memory that was full of NaN."""
    batch = packing.pack(jobs, logits.shape[1], at_least)
    workspace = VerifyWorkspace.of(batch.size, chunk=chunk)
    for name in ("scratch", "cuts", "found", "partials", "residual", "emission", "result"):
        getattr(workspace, name).view(torch.int32).fill_(POISON)
    return verification.verify(logits, batch, workspace)


def fused(
    logits: Tensor, jobs: Sequence[VerifyJob], at_least: Size = packing.NOTHING, chunk: int = 64
) -> list[Verdict]:
    return packing.verdicts(launched(logits, jobs, at_least, chunk))[: len(jobs)]


BY_LEVELS = replace(packing.NOTHING, levels=True)
