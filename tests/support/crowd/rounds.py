"""Decode rounds of many requests at once, or of one with the engine's own breaker; both count alike.

Whether a drafted token is accepted is a matter of its position alone, as under coupled verification: so every
way to draft meets the same text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gammaray.engine.breaker import GOOD, HOT, MIDDLE_DEPTH, POOR, POOR_DEPTH, ROUNDS, Breaker, Trial

from .costs import MOST_DEPTH, Costs, Floats, Ints

TEMPERATURE = 0.7  # of all requests
Bools = NDArray[np.bool_]


def runs(accepted: Bools) -> NDArray[np.int16]:
    """[R, L + 1] from [R, L]: how many tokens in a row would be accepted from each position on."""
    found = np.zeros((accepted.shape[0], accepted.shape[1] + 1), np.int16)
    for i in range(accepted.shape[1] - 1, -1, -1):
        found[:, i] = (found[:, i + 1] + 1) * accepted[:, i]
    return found


@dataclass(frozen=True, slots=True)
class Texts:
    """R requests: `run` as `runs` gives it, `tokens` [R] to emit; what the engine says of a round's cost:
    `base_s` [R] of the step without the key's drafts, `node_s` [R] of a level of all sequences of the key.
    """

    run: NDArray[np.int16]
    tokens: Ints
    base_s: Floats
    node_s: Floats


@dataclass(frozen=True, slots=True)
class Served:
    """What was done for R requests."""

    plain: Ints  # [R] rounds without a draft
    drafted: Ints  # [R] tokens
    tests: Ints  # [R, MOST_DEPTH + 1] rounds with a draft, by the tokens tested
    hits: Ints  # [R, MOST_DEPTH + 1] ... by those accepted
    broke: Bools  # [R] the breaker opened

    @property
    def drafting(self) -> Ints:
        """[R] rounds with a draft."""
        rounds: Ints = self.hits.sum(1)
        return rounds

    def seconds(self, costs: Costs, batch: Floats) -> Floats:
        """[R] of the device."""
        rounds_s = (self.plain + self.drafting) * costs.round_s(batch)
        total: Floats = rounds_s + self.drafted * costs.node_s(batch)
        return total


def nothing(count: int) -> Served:
    """To be counted into."""
    plain, drafted = np.zeros((2, count), np.int64)
    tests, hits = np.zeros((2, count, MOST_DEPTH + 1), np.int64)
    return Served(plain, drafted, tests, hits, np.zeros(count, np.bool_))


def serve(texts: Texts, depth: Ints, adaptive: bool) -> Served:
    """All requests, each at most `depth` [R] deep; 0 is plain. `adaptive`: with a breaker each."""
    done, position, limit = nothing(len(depth)), np.zeros_like(texts.tokens), depth.copy()
    sums = np.zeros((3, len(depth)), np.int64)  # tested, accepted, drafted
    past = deque([sums.copy()], maxlen=ROUNDS + 1)
    done.plain[depth == 0] = texts.tokens[depth == 0]
    at = np.flatnonzero(depth)
    while len(at):
        deep = np.minimum(limit[at], texts.tokens[at] - position[at] - 1)
        done.plain[at[deep == 0]] += 1  # the last token
        at, deep = at[deep > 0], deep[deep > 0]
        accepted = np.minimum(texts.run[at, position[at]], deep)
        tested = np.minimum(accepted + 1, deep)
        done.tests[at, tested] += 1
        done.hits[at, accepted] += 1
        done.drafted[at] += deep
        position[at] += accepted + 1
        sums[:, at] += np.stack((tested, accepted, deep))
        past.append(sums.copy())
        if adaptive and len(past) > ROUNDS:
            last = (past[-1] - past[0])[:, at]
            limit[at] = np.minimum(depth[at], _limits(last))
            opened = at[_opens(last, texts.base_s[at], texts.node_s[at])]
            done.broke[opened] = True
            done.plain[opened] += texts.tokens[opened] - position[opened]
            position[opened] = texts.tokens[opened]
        at = at[position[at] < texts.tokens[at]]
    return done


def _limits(last: Ints) -> Ints:
    """`Breaker.limit` of [3, N]: tested, accepted and drafted tokens of the last rounds."""
    alpha = last[1] / last[0]
    return np.where(alpha > GOOD, MOST_DEPTH, np.where(alpha >= POOR, MIDDLE_DEPTH, POOR_DEPTH))


def _opens(last: Ints, base_s: Floats, node_s: Floats) -> Bools:
    """Whether `Breaker.add` opens it."""
    base, extra = ROUNDS * base_s, last[2] * node_s
    speedup = (ROUNDS + last[1]) / ROUNDS * base / (base + extra)
    opens: Bools = (last[1] / last[0] < POOR) & (speedup < 1)
    return opens


def serve_one(done: Served, i: int, texts: Texts, depth: int) -> None:
    """Request `i` with the engine's breaker, into its row."""
    breaker, position = Breaker(), 0
    run: Sequence[int] = texts.run[i].tolist()
    tokens, base_s, node_s = int(texts.tokens[i]), float(texts.base_s[i]), float(texts.node_s[i])
    while position < tokens:
        deep = 0 if breaker.open else breaker.limit(min(depth, tokens - position - 1), TEMPERATURE > HOT)
        if deep == 0:
            done.plain[i] += 1
            position += 1
            continue
        accepted = min(run[position], deep)
        tested = min(accepted + 1, deep)
        done.tests[i, tested] += 1
        done.hits[i, accepted] += 1
        done.drafted[i] += deep
        position += accepted + 1
        breaker.add(Trial(tested, accepted, accepted + 1, base_s, deep * node_s))
    done.broke[i] = breaker.open
