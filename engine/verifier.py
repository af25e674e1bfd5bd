"""Walks each request's draft tree with the target's logits and says what is emitted. Always lossless.

On a GPU the kernels of `kernels/verification.py` do it, in `packing.py`'s terms. What follows here is plain
torch, and the truth for them.

The walks of a batch advance together, one level at a time, so only rows on accepted paths are ever processed:
noise and filters cost about 1 ms a row at 49152 tokens, far more than the few calls of a level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gammaray.engine.constraints import Constraints
from gammaray.engine.drafters.base import DraftTree
from gammaray.engine.logits import process
from gammaray.errors import EngineFailure
from gammaray.kernels import verify as rules
from gammaray.kernels.backend import backend
from gammaray.kernels.philox import NoiseKeys, Purpose, uniform
from gammaray.kernels.verification import Rule
from gammaray.types import SamplingParams, Verification


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """One sequence of the batch: what was drafted, and how its tokens are drawn."""

    tree: DraftTree | None  # None: a plain round
    sampling: SamplingParams
    sequence: int
    position: int  # absolute index, prompt included, of the next token to emit
    verification: Verification
    constraints: Constraints | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one round emits.

    `tested` counts the visited nodes that had children, which are also the levels tested; of these, the first
    len(path) were accepted.
    """

    path: tuple[int, ...]  # accepted nodes, root to leaf
    tokens: tuple[int, ...]  # their tokens, then the recovered or bonus token
    tested: int
    ranks: tuple[int, ...] = ()  # of the accepted nodes among their siblings, in the order these were tried
    failed: bool = False  # no token can follow: the model gave no finite logit, or constraints left none

    @property
    def rows(self) -> tuple[int, ...]:
        """Which of the job's rows of logits each token was chosen from."""
        return (0, *(node + 1 for node in self.path))[: len(self.tokens)]


def verify(logits: Tensor, jobs: Sequence[VerifyJob]) -> list[Verdict]:
    """Verdicts of all jobs. logits [sum(1 + K), V] float32: per job its root, then its K nodes in tree order.

    A node at depth d (1 for children of the root) predicts position `job.position + d`. Rejection needs
    children that were sampled, and their q; all else is verified coupled, which is lossless for any draft.
    Kernels read the logits in any dtype of 16 bits, too.
    """
    rows = sum(1 + len(job.tree or ()) for job in jobs)
    assert logits.shape[0] == rows, "one row per root and per node"
    if jobs and backend(logits.device) == "fused":
        from gammaray.engine.packing import verify_fused

        return verify_fused(logits, jobs)
    return verify_torch(logits, jobs)


def rule(job: VerifyJob) -> Rule:
    """How a job is verified."""
    if job.sampling.greedy:
        return Rule.GREEDY
    tree = job.tree
    if tree is None or tree.drawn == "deterministic" or tree.q_probs is None:
        return Rule.COUPLED
    if job.verification == "coupled":
        return Rule.COUPLED
    return Rule.WITHOUT_REPLACEMENT if tree.drawn == "without_replacement" else Rule.IID


def verify_torch(logits: Tensor, jobs: Sequence[VerifyJob]) -> list[Verdict]:
    walks = _start(jobs)
    alive = walks
    while alive:
        rows = _constrained(logits, alive)
        finite = rows.amax(-1).isfinite()  # also False for NaN anywhere in a row
        if not bool(finite.all()):
            alive, rows = _drop_failed(alive, finite.tolist()), rows[finite]
        steps = _advance(rows, alive)
        alive = [walk for walk, step in zip(alive, steps, strict=True) if walk.take(step)]
    return [walk.verdict() for walk in walks]


@dataclass(frozen=True, slots=True)
class _Step:
    rank: int  # accepted child among its siblings, -1: none
    token: int


@dataclass(slots=True)
class _Walk:
    """Where one job stands: at node `path[-1]`, or at the root."""

    job: VerifyJob
    first_row: int
    children: list[list[int]]  # children[1 + node], the root first
    path: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    tested: int = 0
    failed: bool = False

    @property
    def row(self) -> int:
        return self.first_row + self.here

    @property
    def here(self) -> int:
        return self.path[-1] + 1 if self.path else 0

    @property
    def siblings(self) -> list[int]:
        """Tokens of the current node's children."""
        tree = self.job.tree
        return [tree.tokens[child] for child in self.children[self.here]] if tree else []

    def take(self, step: _Step) -> bool:
        """Record one step; True while the walk goes on."""
        children = self.children[self.here]
        self.tokens.append(step.token)
        self.tested += bool(children)
        if step.rank < 0:
            return False
        self.ranks.append(step.rank)
        self.path.append(children[step.rank])
        return True

    def verdict(self) -> Verdict:
        return Verdict(tuple(self.path), tuple(self.tokens), self.tested, tuple(self.ranks), self.failed)


def _start(jobs: Sequence[VerifyJob]) -> list[_Walk]:
    walks, row = [], 0
    for job in jobs:
        parents = job.tree.parents if job.tree else ()
        children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
        for node, parent in enumerate(parents):
            children[parent + 1].append(node)
        walks.append(_Walk(job, row, children))
        row += len(children)
    return walks


def _constrained(logits: Tensor, walks: list[_Walk]) -> Tensor:
    """Logits of the nodes that the walks stand on, each under the constraints of its own path. [J, V]"""
    rows = logits[[walk.row for walk in walks]]
    for row, walk in zip(rows, walks, strict=True):
        if walk.job.constraints is not None:
            try:
                walk.job.constraints.apply(row, walk.tokens)
            except EngineFailure:  # of this request's grammar
                row.fill_(-math.inf)
    return rows


def _drop_failed(walks: list[_Walk], finite: list[bool]) -> list[_Walk]:
    for walk, good in zip(walks, finite, strict=True):
        walk.failed = not good
    return [walk for walk in walks if not walk.failed]


def _advance(logits: Tensor, walks: list[_Walk]) -> list[_Step]:
    """One step of each walk, from its row of logits [J, V]."""
    groups: dict[_Rule, list[int]] = {}
    for index, walk in enumerate(walks):
        groups.setdefault(_STEPS[rule(walk.job)], []).append(index)
    steps: dict[int, _Step] = {}
    for step, members in groups.items():
        group = [walks[index] for index in members]
        rows = logits if len(groups) == 1 else logits[members]
        steps.update(zip(members, step(rows, group), strict=True))
    return [steps[index] for index in range(len(walks))]


_Rule = Callable[[Tensor, list[_Walk]], list[_Step]]


def _greedy(logits: Tensor, walks: list[_Walk]) -> list[_Step]:
    return _matched(logits.argmax(-1), walks)


def _coupled(logits: Tensor, walks: list[_Walk]) -> list[_Step]:
    return _matched(rules.draw(_process(logits, walks), _keys(walks, Purpose.TARGET, logits.device)), walks)


def _matched(targets: Tensor, walks: list[_Walk]) -> list[_Step]:
    """Accept the first child that equals the target's own token."""
    pairs = [(walk.siblings, token) for walk, token in zip(walks, targets.tolist(), strict=True)]
    return [_Step(siblings.index(x) if x in siblings else -1, x) for siblings, x in pairs]


def _rejection(logits: Tensor, walks: list[_Walk]) -> list[_Step]:
    children = _sampled_children(walks, logits.device)
    # The sibling rank is the index of the uniform: counter-based noise is independent across indices.
    uniforms = uniform(_keys(walks, Purpose.ACCEPT, logits.device), children.tokens.shape[1])
    chosen, p = rules.try_children(_process(logits, walks), children, uniforms)
    emitting = (chosen < 0).nonzero()[:, 0].tolist()
    keys = _keys([walks[index] for index in emitting], Purpose.RESIDUAL, logits.device)
    tokens = children.tokens.gather(1, chosen.clamp_min(0)[:, None])[:, 0]
    tokens[emitting] = rules.draw(p[emitting].log(), keys)
    return [_Step(*pair) for pair in zip(chosen.tolist(), tokens.tolist(), strict=True)]


_STEPS: dict[Rule, _Rule] = {
    Rule.GREEDY: _greedy,
    Rule.COUPLED: _coupled,
    Rule.IID: _rejection,
    Rule.WITHOUT_REPLACEMENT: _rejection,
}


def _sampled_children(walks: list[_Walk], device: torch.device) -> rules.SampledChildren:
    """The current nodes' children as tensors; a leaf has none, and an empty q. Siblings share one q."""
    siblings = [walk.siblings for walk in walks]
    width = max(1, *map(len, siblings))
    tokens = torch.tensor([row + [-1] * (width - len(row)) for row in siblings], device=device)
    q = [_proposal(walk) for walk in walks]
    pad = torch.nn.utils.rnn.pad_sequence
    return rules.SampledChildren(
        tokens=tokens,
        q_ids=pad([ids for ids, _ in q], batch_first=True).to(device),
        q_probs=pad([probs for _, probs in q], batch_first=True).to(device),
        without_replacement=torch.tensor(
            [rule(walk.job) is Rule.WITHOUT_REPLACEMENT for walk in walks], device=device
        ),
    )


def _proposal(walk: _Walk) -> tuple[Tensor, Tensor]:
    tree, children = walk.job.tree, walk.children[walk.here]
    assert tree is not None and tree.q_ids is not None and tree.q_probs is not None
    row = slice(children[0], children[0] + 1) if children else slice(0)
    return tree.q_ids[row].flatten(), tree.q_probs[row].flatten()


def _process(logits: Tensor, walks: list[_Walk]) -> Tensor:
    return process(logits, [walk.job.sampling for walk in walks])


def _keys(walks: list[_Walk], purpose: Purpose, device: torch.device) -> NoiseKeys:
    """Noise of the position that each walk's next token takes."""
    return NoiseKeys.build(
        [walk.job.sampling.seed for walk in walks],
        [walk.job.sequence for walk in walks],
        [walk.job.position + len(walk.path) for walk in walks],
        purpose,
        device=device,
    )
