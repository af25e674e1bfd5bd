"""A drafter of set acceptance, for simulated time: it knows what the target will say, and errs on purpose."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor

from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.logits import process
from gammaray.engine.sim import Language, SimClock
from gammaray.kernels.philox import NoiseKeys, Purpose
from gammaray.kernels.verify import draw

# (salt, time) -> probability that the target's own token is the child of rank 0, 1, ...; the first is alpha.
Ranks = Callable[[bytes, float], Sequence[float]]


@dataclass(slots=True)
class _State:
    salt: bytes
    length: int
    digest: int


@dataclass(slots=True)
class _Growth:
    """A tree while it grows. Only one node of a level has children: the right one, or else the first."""

    view: DraftView
    ranks: Sequence[float]
    digest: int
    levels: int = 0
    grown_from: int = -1  # parent of the next level
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        return self.view.length + self.levels


class OracleDrafter:
    """Proposes the target's own next token with the probability that `ranks` sets, else other tokens.

    The target's token is the best one, or the one drawn with the request's noise; constraints (grammar,
    penalties, bias) are not looked at. Whether a position goes right depends on (seed, rid, position) alone,
    and each position is tested once, so acceptance is independent from level to level and every run repeats.
    A level of all trees together takes `level_s` on `clock`. Like every drafter of the engine's own process
    it answers whatever the deadline. `beside`: it has a device of its own, which works from `begin` on.
    `spread`: it tells a confidence, the rate of its rank times up to 1 +- spread, and is right as often as it
    says; None: it tells none.
    """

    def __init__(
        self,
        language: Language,
        clock: SimClock,
        ranks: Ranks,
        level_s: float = 0.0,
        seed: int = 0,
        spread: float | None = None,
        beside: bool = False,
    ) -> None:
        self.vocab_size: int | None = language.vocab_size
        self._language = language
        self._clock = clock
        self._ranks = ranks
        self._level_s = level_s
        self._seed = seed
        self._spread = spread
        self._beside = beside
        self._free_at = 0.0  # when its own device has done what it was told
        self._states: dict[str, _State] = {}

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views), self._clock())

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        begun: float = ticket.payload  # type: ignore[assignment]
        now = max(begun, self._free_at) if self._beside else self._clock()
        grown = [growth for view in ticket.views if (growth := self._root(view, now))]
        while growing := [growth for growth in grown if growth.levels < growth.view.depth]:
            for growth, target in zip(growing, self._targets(growing), strict=True):
                self._add_level(growth, target)
        levels = max((growth.levels for growth in grown), default=0)
        self._free_at = now + levels * self._level_s
        self._clock.advance_to(self._free_at)
        return {growth.view.rid: self._tree(growth) for growth in grown}

    def commit(self, rid: str, tokens: Sequence[int], features: Tensor | None = None) -> None:
        if state := self._states.get(rid):
            state.digest = self._language.extend(state.digest, state.length, tokens)
            state.length += len(tokens)

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        self._states[rid] = _State(salt, len(tokens), self._language.extend(0, 0, tokens))

    def release(self, rid: str) -> None:
        self._states.pop(rid, None)

    def length(self, rid: str) -> int | None:
        state = self._states.get(rid)
        return state.length if state else None

    def _root(self, view: DraftView, now: float) -> _Growth | None:
        state = self._states.get(view.rid)
        if state is None or state.length != view.length:
            return None
        if view.length + view.depth > self._language.max_model_len:
            return None
        return _Growth(view, self._ranks(state.salt, now), state.digest)

    def _tree(self, growth: _Growth) -> DraftTree:
        said = None if self._spread is None else tuple(growth.confidence)
        return DraftTree(tuple(growth.tokens), tuple(growth.parents), confidence=said)

    def _ranks_at(self, growth: _Growth) -> list[float]:
        """Of the next level."""
        if not self._spread or not (total := sum(growth.ranks)):
            return list(growth.ranks)
        most = min(self._spread, 1 / total - 1)
        own = 2 * _uniform(self._seed, f"{growth.view.rid} spread", growth.position) - 1
        return [rank * (1 + most * own) for rank in growth.ranks]

    def _targets(self, growing: Sequence[_Growth]) -> list[int]:
        """The token that the target would emit behind each tree's path."""
        logits = self._language.logits([growth.digest for growth in growing])
        targets = logits.argmax(-1)
        noisy = [i for i, growth in enumerate(growing) if not growth.view.sampling.greedy]
        if noisy:
            targets[noisy] = _drawn(logits[noisy], [growing[i] for i in noisy])
        return [int(target) for target in targets]

    def _add_level(self, growth: _Growth, target: int) -> None:
        vocab = self._language.vocab_size
        width = min(growth.view.width, vocab - 1)
        children = [(target + 1 + other) % vocab for other in range(width)]
        u = _uniform(self._seed, growth.view.rid, growth.position)
        ranks = self._ranks_at(growth)
        right = next((rank for rank, sum_ in enumerate(accumulate(ranks)) if u < sum_), width)
        if right < width:
            children[right] = target
        parent, first = growth.grown_from, len(growth.tokens)
        growth.tokens += children
        growth.parents += [parent] * width
        growth.confidence += [*ranks, *[0.0] * width][:width]
        growth.grown_from = first + (right if right < width else 0)
        growth.digest = self._language.extend(
            growth.digest, growth.position, [growth.tokens[growth.grown_from]]
        )
        growth.levels += 1


def constant(*ranks: float) -> Ranks:
    """The same at all times, for every tenant."""
    return lambda salt, now: ranks


def _drawn(logits: Tensor, growing: Sequence[_Growth]) -> Tensor:
    """[N, V] to [N], as the verifier draws."""
    views = [growth.view for growth in growing]
    keys = NoiseKeys.build(
        [view.sampling.seed for view in views],
        [view.sequence for view in views],
        [growth.position for growth in growing],
        Purpose.TARGET,
    )
    return draw(process(logits, [view.sampling for view in views]), keys)


def _uniform(seed: int, rid: str, position: int) -> float:
    """In [0, 1), from its arguments alone."""
    digest = hashlib.blake2b(f"{seed} {position} {rid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
