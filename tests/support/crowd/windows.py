"""What the replicas tell of a tick's requests: windows as a Collector would have made them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gammaray.routing.window import (
    COLUMN,
    SAMPLES,
    SLOWEST,
    TPOT_EDGES,
    VECTOR,
    WIDTH,
    Counts,
    Phases,
    Window,
)
from gammaray.types import Finished, Forecast, Key, SpeculationStats

from .costs import MOST_DEPTH, Costs, Floats, Ints
from .plans import CLASS, DRAFTER, key
from .rounds import Served, Texts
from .traffic import INTERVAL_S, Requests

PROMPT_TOKENS = 200  # in the counts; nobody decides by it
BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Tick:
    """All that happened; [R] but for `batches` [replicas]."""

    number: int
    requests: Requests
    forecasts: Sequence[Forecast]
    planned: Ints  # whether it was to speculate
    texts: Texts
    served: Served
    batches: Floats


def windows(tick: Tick, names: Sequence[str], costs: Costs) -> Iterator[Window]:
    """One of each replica. The keys of a replica's requests are told as plain and drafting ones."""
    requests, tenants = tick.requests, len(names)
    per_token_s = _per_token_s(tick, costs)
    place = (requests.replica * tenants + requests.tenant) * 2
    drafting = _drafting_rows(tick, per_token_s)
    plain = _plain_rows(tick, per_token_s)
    told, counts = _summed(np.concatenate((place + 1, place)), np.concatenate((drafting, plain)))
    keys: list[Key] = [key(names[i // 2 % tenants]) if i % 2 else (names[i // 2 % tenants], CLASS, None)
                       for i in told.tolist()]  # fmt: skip
    ends = np.searchsorted(told, np.arange(len(tick.batches) + 1) * tenants * 2).tolist()
    by_replica = np.argsort(requests.replica, kind="stable")
    of = np.searchsorted(requests.replica[by_replica], np.arange(len(tick.batches) + 1)).tolist()
    for replica, batch in enumerate(tick.batches.tolist()):
        mine, rows_ = by_replica[of[replica] : of[replica + 1]], slice(ends[replica], ends[replica + 1])
        finished = _finished(tick, mine[:SAMPLES], names, per_token_s)
        steps = int(INTERVAL_S / float(costs.step_s(np.array(batch))))
        yield Window(
            f"replica-{replica}",
            tick.number + 1,
            tuple(keys[rows_]),
            counts[rows_].copy(),
            finished,
            tuple(sorted(finished, key=lambda one: -(one.per_token_s or 0.0))[:SLOWEST]),
            phases=Phases(steps, verify_s=INTERVAL_S),
            running=round(batch),
            kv_used_blocks=BLOCKS // 2,
            kv_total_blocks=BLOCKS,
        )


def _summed(place: Ints, rows: Counts) -> tuple[Ints, Counts]:
    """([K], [K, WIDTH]) the places [N] of which `rows` [N, WIDTH] hold anything, ascending, and the sums."""
    busy = rows.any(1)
    order = np.flatnonzero(busy)[np.argsort(place[busy], kind="stable")]
    told, first = np.unique(place[order], return_index=True)
    return told, np.add.reduceat(rows[order], first, axis=0)


def _per_token_s(tick: Tick, costs: Costs) -> Floats:
    """[R] a request's rounds take as long as the steps, in which all others draft as much as it does."""
    batch = tick.batches[tick.requests.replica]
    seconds: Floats = tick.served.seconds(costs, batch) * batch / tick.texts.tokens
    return seconds


def _drafting_rows(tick: Tick, per_token_s: Floats) -> Counts:
    """[R, WIDTH] of what counts for the key with the drafter."""
    served, lengths = tick.served, np.arange(MOST_DEPTH + 1)
    rows, rounds = np.zeros((len(tick.planned), WIDTH)), served.drafting
    accepted = served.hits @ lengths
    scalars = {
        "rounds": rounds,
        "drafted": served.drafted,
        "verified": served.drafted,
        "levels": served.drafted,
        "accepted": accepted,
        "emitted": rounds + accepted,
        "emitted_squared": served.hits @ (lengths + 1) ** 2,
        "tested": served.tests @ lengths,
        "first_accepted": accepted,
        "base_s": rounds * tick.texts.base_s,
        "extra_s": served.drafted * tick.texts.node_s,
        "planned": tick.planned,
        "low_acceptance": served.broke,
    }
    for name, values in scalars.items():
        rows[:, COLUMN[name]] = values
    for name, by_length in (("level_tested", served.tests), ("level_first", served.hits)):
        rows[:, VECTOR[name]][:, :MOST_DEPTH] = _beyond(by_length)
    rows[:, VECTOR["level_accepted"]] = rows[:, VECTOR["level_first"]]
    rows[:, VECTOR["ranks"].start] = accepted
    return _with_ends(rows, tick, tick.planned, per_token_s)


def _plain_rows(tick: Tick, per_token_s: Floats) -> Counts:
    rows = np.zeros((len(tick.planned), WIDTH))
    for name in ("rounds", "emitted", "emitted_squared"):
        rows[:, COLUMN[name]] = tick.served.plain
    return _with_ends(rows, tick, 1 - tick.planned, per_token_s)


def _with_ends(rows: Counts, tick: Tick, ended: Ints, per_token_s: Floats) -> Counts:
    """Of the requests that ended under this key."""
    rows[:, COLUMN["finished"]] = ended
    rows[:, COLUMN["prompt_tokens"]] = PROMPT_TOKENS * ended
    rows[:, COLUMN["output_tokens"]] = tick.texts.tokens * ended
    which = np.flatnonzero(ended)
    rows[which, VECTOR["tpot"].start + np.searchsorted(TPOT_EDGES, per_token_s[which])] = 1.0
    return rows


def _beyond(by_length: Ints) -> Ints:
    """[R, MOST_DEPTH] rounds of more than j tokens, from [R, MOST_DEPTH + 1] rounds of just j."""
    beyond: Ints = by_length[:, ::-1].cumsum(1)[:, ::-1][:, 1:]
    return beyond


def _finished(tick: Tick, which: Ints, names: Sequence[str], per_token_s: Floats) -> tuple[Finished, ...]:
    """These requests as they are told one by one."""
    served, lengths = tick.served, np.arange(MOST_DEPTH + 1)
    columns = (
        which,
        tick.requests.tenant[which],
        tick.planned[which],
        served.broke[which],
        tick.texts.tokens[which],
        served.plain[which],
        served.drafting[which],
        served.drafted[which],
        served.tests[which] @ lengths,
        served.hits[which] @ lengths,
        per_token_s[which],
        served.hits[which],
        _beyond(served.tests[which]),
        _beyond(served.hits[which]),
    )
    found = []
    for (
        i, tenant, planned, broke, tokens, plain, rounds, drafted, tested, accepted, each_s, hits, *levels
    ) in zip(*(column.tolist() for column in columns), strict=True):  # fmt: skip
        emitted = (0, plain + hits[0], *hits[1:])
        stats = SpeculationStats(
            rounds + plain, drafted, drafted, accepted, tokens, tested, accepted, drafted, emitted,
            tuple(levels[0]), tuple(levels[1]), tuple(levels[1]), (accepted,),
            accepted, tuple(levels[0]), tuple(levels[1]),
        )  # fmt: skip
        found.append(Finished(
            names[tenant], CLASS, DRAFTER if planned else None, "on", False, "length",
            "low_acceptance" if broke else None, 0, PROMPT_TOKENS, 0, tokens, stats,
            first_s=each_s, total_s=each_s * tokens, forecast=tick.forecasts[i],
            request_id=f"{tick.number}-{i}",
        ))  # fmt: skip
    return tuple(found)
