"""The control loop before a crowd of tenants: what a tick takes, and what the adaptation gains.

    python benchmarks/simulate_control.py [--tenants 10000] [--replicas 100] [--ticks 60] [--sampled 100]
        [--misled 0.02] [--collapsing 0.2] [--no-predictor] [--seed 0] [--json] [--out FOLDER]

Replicas, traffic and device are modelled (`tests/support/crowd`); controller, predictor and, for the sampled
tenants, router and breaker are the product's own. `--json` prints the numbers as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
from support.bimodal import MODES
from support.crowd import traffic
from support.crowd.costs import Costs
from support.crowd.trial import Setup, Trial

from gammaray.actors.link.bench import machine, versions
from gammaray.routing.evidence import WINDOW_S

START = int(WINDOW_S / traffic.INTERVAL_S)  # ticks until every window is full
TICK = "fold and tick"
Numbers = dict[str, Any]

ABOUT = """# The control loop before a crowd

Nothing here ran on a model or a GPU. {tenants} tenants on {replicas} replicas, {ticks} ticks of
{interval:g} s.

**Real**: `Control` (evidence, state machine, policy), priors, predictor with its training and gate; of
{sampled} tenants, evenly spaced, also the plan of each request (`routing.plan`) and its breaker
(`engine.breaker`), round by round. Goodput is that of these {sampled}.

**Modelled**: each tenant is active in every tick, with {mean:g} requests in the mean (one, and a Poisson
number of more, whose rate is lognormal over the tenants, sigma {sigma:g}), of {least} to {most} tokens, on
{homes} replicas ({shares}). The load swings by {swing:.0%} over the run. A request's tokens are accepted
independently at its own rate, which is of one of two modes ({low:.0%} and {high:.0%} in the mean, each a
Beta distribution); tenants have {good_low:.0%} to {good_high:.0%} of the high one. Prompts of the high mode
repeat a phrase; {misled:.0%} of the requests have a prompt of the wrong kind. {collapsing:.0%} of the tenants
fall to the low mode once and recover within a third of the run, whatever their prompts look like. A request
is served within the tick that it comes in, under the policy and priors of the last one; policies do not
change during a request. The other tenants' plans and breakers are the same rules with arrays; their breaker
is exact, the predictor's word on each of {prompts} prompts is taken at the mean prior. Temperature is 0.7.

A step takes {fixed:g} ms, and {token:g} ms for each token fed, and {level:g} ms for each level drafted; it
is shared equally by its batch. The batch of a replica follows from its load (Little's law, decoding plainly)
and is the same in every arm. Windows tell `base_s` and `extra_s` as the engine does: of the whole step, and
of all that a key drafts in it.

Machine: `{machine}`
Command: `{command}`
"""

RESULTS = """
## Goodput

Tokens per second of modelled device time, {requests} requests of the sampled tenants, the same texts in every
arm; the mean batch is {batch:.1f} ({batch_low:.1f} to {batch_high:.1f}, P5 to P95).

| arm | tokens/s | of the oracle |
|---|---|---|
{goodput}

Goal: adaptive at 0.95 of the oracle or more: {goodput_met}. Without the first {start} ticks, in which nothing
is known of any tenant and no predictor is there, it is at {later:.3f}.

## A tick

Milliseconds, {rows:.0f} rows and {ended:.0f} finished requests a tick; CPU time, as other work ran on the
machine, with the wall clock beside it. After start-up, which is the first {start} ticks.

| part | CPU p50 | CPU p99 | wall p50 | wall p99 | CPU at start-up, worst |
|---|---|---|---|---|---|
{parts}

Goal: fold and tick under 250 ms at p99: {tick_met}. All windows of a tick have {window_mb:.1f} MB as pickles,
the policy {snapshot} bytes at most. Of the first tick all keys are new. The process had {memory_mb:.0f} MB
at most, the simulated replicas among it.

Decisions by rule: {rules}.
Keys in the policy by state, share of all keys and ticks: {states}. {predictors} predictors were let out.
"""


def quantiles(seconds: list[float]) -> tuple[float, float]:
    """p50 and p99 in ms."""
    half, most = np.quantile(seconds, [0.5, 0.99]).tolist()
    return 1e3 * half, 1e3 * most


def numbers(trial: Trial) -> Numbers:
    """What `--json` prints. Times are CPU time after start-up, unless they say otherwise."""
    start = min(START, trial.setup.ticks - 1)
    cpu, wall = trial.times.cpu, trial.times.wall
    goodput, later, best = trial.arms.goodput(), trial.arms.goodput(start), trial.arms.best_fixed()
    half, most = quantiles(cpu[TICK][start:])
    found = {
        "tick_ms_p99": most,
        "tick_ms_p50": half,
        "tick_wall_ms_p99": quantiles(wall[TICK][start:])[1],
        "startup_tick_ms": 1e3 * max(cpu[TICK][:start]),
        "snapshot_bytes": trial.snapshot_bytes,
        "window_bytes": trial.window_bytes,
        "goodput_vs_oracle": goodput["adaptive"] / goodput["oracle"],
        "goodput_vs_oracle_after_startup": later["adaptive"] / later["oracle"],
        **{f"goodput_{arm}": goodput[arm] for arm in ("oracle", "hindsight", "adaptive")},
        "goodput_best_fixed": goodput[best],
        "goodput_off": goodput[0],
        "best_fixed_gamma": best,
        "tenants": trial.setup.tenants,
        "replicas": trial.setup.replicas,
        "ticks": trial.setup.ticks,
        "sampled_requests": trial.arms.requests,
        "decisions": trial.rules.total(),
        "predictors": trial.predictors,
    }
    parts = {part: quantiles(times[start:])[1] for part, times in cpu.items()}
    return found | {"parts_ms_p99": parts}


def about(trial: Trial, command: str) -> str:
    setup, costs = trial.setup, trial.setup.costs
    return ABOUT.format(
        tenants=setup.tenants,
        replicas=setup.replicas,
        ticks=setup.ticks,
        interval=traffic.INTERVAL_S,
        sampled=trial.sampled,
        mean=1 + traffic.REQUESTS,
        sigma=traffic.INEQUALITY,
        least=traffic.TOKENS[0],
        most=traffic.TOKENS[1],
        homes=traffic.HOMES,
        shares=", ".join(f"{share:.0%}" for share in traffic.HOME_SHARES),
        swing=traffic.SWING,
        low=MODES[0],
        high=MODES[1],
        good_low=traffic.GOOD_SHARES[0],
        good_high=traffic.GOOD_SHARES[1],
        misled=setup.misled,
        collapsing=setup.collapsing,
        prompts=traffic.POOL,
        fixed=1e3 * costs.fixed_s,
        token=1e3 * costs.token_s,
        level=1e3 * costs.level_s,
        machine=json.dumps({**machine(), "versions": versions()}),
        command=command,
    )


def results(trial: Trial) -> str:
    found, start = numbers(trial), min(START, trial.setup.ticks - 1)
    ticks, keyed = trial.setup.ticks, trial.setup.tenants * trial.setup.ticks
    low, mean, high = trial.arms.batch
    return RESULTS.format(
        requests=trial.arms.requests,
        batch=mean,
        batch_low=low,
        batch_high=high,
        goodput="\n".join(_goodput(found)),
        later=found["goodput_vs_oracle_after_startup"],
        goodput_met="met" if found["goodput_vs_oracle"] >= 0.95 else "missed",
        rows=trial.rows / ticks,
        ended=trial.ended / ticks,
        start=start,
        parts="\n".join(_part(trial, part, start) for part in trial.times.cpu),
        tick_met="met" if found["tick_ms_p99"] < 250 else "missed",
        window_mb=trial.window_bytes / 1e6,
        snapshot=trial.snapshot_bytes,
        memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        rules=", ".join(f"{rule} {count}" for rule, count in trial.rules.most_common()) or "none",
        predictors=trial.predictors,
        states=", ".join(f"{state} {count / keyed:.1%}" for state, count in trial.states.most_common()),
    )


def _goodput(found: Numbers) -> list[str]:
    arms = {
        "oracle: the best depth for each request's acceptance, 0 to 8": "oracle",
        "the depth that turned out best for each text": "hindsight",
        "adaptive": "adaptive",
        f"the best single depth for all, {found['best_fixed_gamma']:.0f}": "best_fixed",
        "off: plain decoding": "off",
    }
    rates = {what: found[f"goodput_{name}"] for what, name in arms.items()}
    return [f"| {what} | {rate:.0f} | {rate / found['goodput_oracle']:.3f} |" for what, rate in rates.items()]


def _part(trial: Trial, part: str, start: int) -> str:
    cpu, wall = trial.times.cpu[part], trial.times.wall[part]
    columns = *quantiles(cpu[start:]), *quantiles(wall[start:]), 1e3 * max(cpu[:start])
    return f"| {part} | " + " | ".join(f"{each:.1f}" for each in columns) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--ticks", type=int, default=60)
    parser.add_argument(
        "--sampled", type=int, default=100, help="tenants whose requests run the product's code"
    )
    parser.add_argument("--misled", type=float, default=0.02, help="share of prompts of the wrong kind")
    parser.add_argument(
        "--collapsing", type=float, default=0.2, help="share of tenants that fall and recover"
    )
    parser.add_argument("--no-predictor", action="store_true", help="priors alone foretell the acceptance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the numbers as one line, the last one")
    parser.add_argument("--out", type=Path, help="folder for simulate_control.md")
    given = parser.parse_args()
    setup = Setup(
        given.tenants,
        given.replicas,
        given.ticks,
        given.sampled,
        not given.no_predictor,
        given.misled,
        given.collapsing,
        given.seed,
        Costs(),
    )
    trial, began = Trial(setup), time.perf_counter()
    trial.run()
    page = about(trial, " ".join(["python", "benchmarks/simulate_control.py", *sys.argv[1:]])) + results(
        trial
    )
    print(page)
    print(f"The run took {time.perf_counter() - began:.0f} s.")
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "simulate_control.md").write_text(page)
    if given.json:
        print(json.dumps(numbers(trial)))


if __name__ == "__main__":
    main()
