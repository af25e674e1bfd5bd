"""Why one request was slow, in one sentence, from its numbers against what is usual."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from gammaray.routing.window import Phases
from gammaray.types import Cause, Finished

NOTABLE = 0.2  # of the request's time: less is no reason
DRAFTING = 0.5  # of the steps' time
NO_PHASES = Phases()
_WHY: dict[Cause, str] = {
    "low_acceptance": "its drafts were hardly ever accepted",
    "worker_lost": "its draft worker was lost",
    "timeout": "its drafts came too late",
    "oom": "the drafter ran out of memory",
    "kv": "KV blocks ran out for its drafts",
}


@dataclass(frozen=True, slots=True)
class Usual:
    """Medians over requests; 0 where nothing tells."""

    queued_s: float = 0.0
    prefill_s: float = 0.0  # from its first run to its first token
    round_s: float = 0.0
    tau: float = 0.0  # tokens per decode round


def usual(finished: Iterable[Finished]) -> Usual:
    """Of the requests that came to an end in their own time: no aborts and errors."""
    good = [ended for ended in finished if ended.reason in ("stop", "length")]
    decoded = [ended for ended in good if ended.stats.rounds and ended.output_tokens > 1]
    return Usual(
        _median(ended.queued_s for ended in good),
        _median(_prefill_s(ended) for ended in good),
        _median(_round_s(ended) for ended in decoded),
        _median(_tau(ended) for ended in decoded),
    )


def diagnose(ended: Finished, others: Usual, phases: Phases = NO_PHASES) -> str:
    """The part of its time that exceeds the usual most: the queue, the prompt, or decoding.

    `phases` are those of its replica at that time.
    """
    excess = {
        _queued: ended.queued_s - others.queued_s,
        _prompt: _prefill_s(ended) - others.prefill_s,
        _decoding: _decoding_excess_s(ended, others),
    }
    explain, most = max(excess.items(), key=lambda item: item[1])
    if most <= NOTABLE * ended.total_s:
        return "nothing about it was unusual: it is long"
    return explain(ended, others, phases)


def _queued(ended: Finished, others: Usual, phases: Phases) -> str:
    return f"it waited {ended.queued_s:.2f} s to run first, where {others.queued_s:.2f} s is usual"


def _prompt(ended: Finished, others: Usual, phases: Phases) -> str:
    read = ended.prompt_tokens - ended.cached_tokens
    return (
        f"its prompt took {_prefill_s(ended):.2f} s, where {others.prefill_s:.2f} s is usual: "
        f"{read} of {ended.prompt_tokens} tokens were not in the prefix cache"
    )


def _decoding(ended: Finished, others: Usual, phases: Phases) -> str:
    """Long rounds or few tokens in each, whichever is further from the usual."""
    tokens, seconds = _tau(ended), _round_s(ended)
    if seconds * tokens > others.round_s * others.tau:
        return _long_rounds(ended, seconds, others, phases)
    gave = f"a round gave {tokens:.1f} tokens, where {others.tau:.1f} are usual"
    if ended.fallback is not None:
        return f"it went on without drafts, as {_WHY[ended.fallback]}: {gave}"
    alpha = ended.stats.acceptance
    if alpha is None:
        return f"it decoded without drafts: {gave}"
    return f"only {alpha:.0%} of its drafted tokens were accepted: {gave}"


def _long_rounds(ended: Finished, seconds: float, others: Usual, phases: Phases) -> str:
    steps_s = phases.draft_s + phases.verify_s + phases.schedule_s + phases.commit_s
    took = f"a round took {1e3 * seconds:.0f} ms, where {1e3 * others.round_s:.0f} ms is usual"
    if ended.preemptions:
        return f"{took}: it gave up its KV blocks {ended.preemptions} times and computed them again"
    if steps_s and phases.draft_s > DRAFTING * steps_s:
        return f"{took}: drafting was {phases.draft_s / steps_s:.0%} of the steps' time"
    return f"{took}: the batch was crowded"


def _decoding_excess_s(ended: Finished, others: Usual) -> float:
    """Over the usual time for so many tokens."""
    if not others.tau:
        return 0.0
    rounds = ended.stats.rounds
    return rounds * (_round_s(ended) - others.round_s * _tau(ended) / others.tau)


def _prefill_s(ended: Finished) -> float:
    return ended.first_s - ended.queued_s


def _round_s(ended: Finished) -> float:
    return (ended.total_s - ended.first_s) / ended.stats.rounds if ended.stats.rounds else 0.0


def _tau(ended: Finished) -> float:
    return ended.stats.tau or 0.0


def _median(values: Iterable[float]) -> float:
    known = list(values)
    return median(known) if known else 0.0
