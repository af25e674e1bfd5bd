"""The acceptance predictor: what a decision and a training cost, and what is gained over the prior.

    python benchmarks/predictor.py [--requests 20000] [--later 5000] [--out FOLDER]

Requests are simulated (`tests/support/bimodal.py`); everything else is the product's own code. Acceptance has
two modes, and the prompts tell them apart; a second run has prompts that tell nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
from support.bimodal import MODES, VOCABULARY, traffic

from gammaray.actors.link.bench import machine, versions
from gammaray.routing.calibration import brier
from gammaray.routing.features import DIMS, PRIOR, features
from gammaray.routing.learning import EVERY, Learner, Reservoir, Samples, train
from gammaray.routing.predictor import Predictor
from gammaray.types import Finished

PROMPT = 32_000  # tokens of the prompt whose features are timed
REPEATS = 5000


def microseconds(call: Callable[[], object]) -> tuple[float, float]:
    """Median and 99th percentile of CPU time: others take the core for milliseconds at a time."""
    times = []
    for _ in range(REPEATS):
        began = time.thread_time()
        call()
        times.append((time.thread_time() - began) * 1e6)
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def decisions(predictor: Predictor) -> list[tuple[str, float, float]]:
    """What, median us, P99 us."""
    rng = np.random.default_rng(0)
    prompt = tuple(rng.integers(VOCABULARY, size=PROMPT).tolist())
    table = rng.normal(size=(VOCABULARY, DIMS)).astype(np.float16)

    def known() -> tuple[float, ...]:
        return features(prompt, 0.7, "chat", "default", "lookup", 0.5, table)

    found = known()
    return [
        (f"features of a prompt of {PROMPT} tokens", *microseconds(known)),
        ("prediction", *microseconds(lambda: predictor.predict(found))),
        ("both", *microseconds(lambda: predictor.predict(known()))),
    ]


def kept(requests: list[Finished]) -> Samples:
    reservoir = Reservoir(len(requests))
    for request in requests:
        reservoir.add(request)
    return reservoir.samples()


def trained(samples: Samples) -> tuple[float, float, float]:
    """Seconds of a training in a thread; the longest that this thread, which never rests, stood still
    meanwhile; and the same while the other thread only sleeps.
    """

    def work() -> None:
        train(*samples.split()[:2], 1)

    work()  # loads LightGBM
    took, longest = beside(work)
    return took, longest, beside(lambda: time.sleep(took))[1]


def beside(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds that `work` takes in a thread, and the longest standstill of this one."""
    thread = threading.Thread(target=work)
    began = last = time.perf_counter()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return last - began, longest


def learnt(requests: list[Finished]) -> Learner:
    """From requests that come ten a second."""
    learner = Learner()
    for i, request in enumerate(requests):
        learner.add(request)
        learner.maybe_train(i / 10)
    return learner


def scores(predictor: Predictor, before: Samples, later: Samples) -> dict[str, float]:
    """Brier's score per tested token of the later requests."""
    mean = float(np.average(before.rates, weights=before.weights))
    prior = later.rows[:, PRIOR]
    predictions = {
        "predictor": predictor.many(later.rows),
        "EWMA prior of the key, within its band": np.where(np.isnan(prior), mean, prior),
        "constant: the mean of all before": np.full(len(prior), mean),
        "each request's own rate (nothing can be better)": later.rates,
    }
    return {
        name: float(np.average(brier(p, later.rates), weights=later.weights))
        for name, p in predictions.items()
    }


ABOUT = """# The acceptance predictor

Nothing here ran on a model: requests are simulated. Acceptance of a request has two modes ({low:.0%} and
{high:.0%} in the mean, each a Beta distribution); prompts of the high one repeat a phrase, those of the low
one do not. Four tenants mix the two 30:70 to 70:30. Features, training, calibration, gate and prediction are
the product's. One thread; other work ran on the machine.

Machine: `{machine}`
Command: `python benchmarks/predictor.py --requests {requests} --later {later}`

## A decision

| what | median, us of CPU time | P99 |
|---|---|---|
{decisions}

Goal: under 1000 us together, features under 300 us. A pickled predictor has {size} bytes.

## A training

{samples} samples: {train_s:.2f} s in a thread of its own. The longest that another thread of the process,
which never rests, stood still meanwhile: {gap_ms:.1f} ms; while the first only slept, {usual_ms:.1f} ms.
LightGBM computes without Python's lock.

## Predictions

Learnt from {requests} requests, a training every {every} of them; {versions_out} version(s) let out. Brier's
score per tested token over the {later} requests after them; lower is better.

| by | Brier | above the last row |
|---|---|---|
{scores}

The same with prompts that say nothing of the mode: {noise} version(s) let out.
"""


def page(given: argparse.Namespace) -> str:
    requests = list(traffic(given.requests + given.later))
    before, later = requests[: given.requests], kept(requests[given.requests :])
    predictor = learnt(before).predictor
    assert predictor is not None, "nothing was learnt"
    noise = learnt(list(traffic(given.requests, told_apart=False))).predictor
    samples = kept(before)
    train_s, gap_s, usual_s = trained(samples)
    found = scores(predictor, samples, later)
    least = min(found.values())
    return ABOUT.format(
        low=MODES[0],
        high=MODES[1],
        machine=json.dumps({**machine(), "versions": versions()}),
        requests=given.requests,
        later=given.later,
        decisions="\n".join(
            f"| {what} | {median:.0f} | {most:.0f} |" for what, median, most in decisions(predictor)
        ),
        size=len(pickle.dumps(predictor)),
        samples=given.requests,
        train_s=train_s,
        gap_ms=gap_s * 1000,
        usual_ms=usual_s * 1000,
        every=EVERY,
        versions_out=predictor.version,
        scores="\n".join(f"| {by} | {score:.4f} | {score - least:.4f} |" for by, score in found.items()),
        noise=noise.version if noise else 0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--later", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "predictor.md").write_text(page(given))


if __name__ == "__main__":
    main()
