"""Drafting while the target verifies against drafting when asked, on two processes with a core each.

    python benchmarks/overlap.py [--repeats 5] [--tokens 100] [--out FOLDER]

A simulated target decodes in this process, a simulated draft model in another one; each forward pass sleeps
for what it would take on a device, everything else is the product's own code: engine, frames, Unix socket,
draft server. Two workers stand ready, one of which never drafts ahead. The same requests go to either in
turn, and each turn's two rates are compared with each other. Metric: tokens a second of all requests, by the
wall clock. Then what a worker's loss costs: the longest time between two chunks of a text.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import psutil
from support.decoding import Driver
from support.draft_process import connected, device, language, remote, worker
from support.rig import requests
from support.tape import Letters

from gammaray.actors.link.bench import machine, versions
from gammaray.actors.link.pool import KEEP_S
from gammaray.actors.link.remote import RemoteDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.types import PLAIN, GenerateRequest

VERIFY_S, LEVEL_S, GAMMA = 0.020, 0.003, 4
NOISES = (0.02, 0.3, 30.0)  # how far the draft model's language is from the target's
BATCH, BUDGET = 8, 512
WANTED, HIGH, NEVER_UNDER = 1.3, 0.7, 0.98  # the goal: this ratio from this hit rate on, and nowhere less
KINDS = list(product((1, 8), (1, 3), (0.0, 1.0)))  # concurrency, width (1: a chain), temperature
USABLE = psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else []

LOSS_TOKENS, BEFORE = 120, 3  # of each text in which a worker is lost, and rounds with drafts before that

Texts = dict[tuple[str, int], list[int]]


@dataclass(frozen=True)
class Kind:
    concurrency: int
    width: int
    temperature: float

    def requests(self, tokens: int) -> list[GenerateRequest]:
        found = requests(self.concurrency, tokens, self.temperature, self.width)
        return [replace(request, plan=replace(request.plan, gamma=GAMMA)) for request in found]


@dataclass(frozen=True)
class Turn:
    """One batch of requests, from the first step to the last."""

    tok_s: float
    hit_rate: float
    texts: Texts


def engine(drafter: RemoteDrafter | None, verify_s: float = VERIFY_S) -> Engine:
    options = EngineOptions(max_batch=BATCH, token_budget=BUDGET)
    drafters = {} if drafter is None else {"small": drafter}
    return Engine(device(language(), verify_s), Letters(), drafters=drafters, options=options)


def plainly(batch: list[GenerateRequest]) -> Texts:
    driver = Driver(engine(None, verify_s=0.0))
    driver.submit(replace(request, plan=PLAIN) for request in batch)
    driver.finish()
    return texts(driver)


def texts(driver: Driver) -> Texts:
    return {key: outcome.ids for key, outcome in driver.outcomes.items()}


def decode(drafter: RemoteDrafter, batch: list[GenerateRequest]) -> Turn:
    driver = Driver(engine(drafter))
    drafts, hits = drafter.drafts, drafter.hits
    driver.submit(batch)
    began = time.perf_counter()
    driver.finish()
    took = time.perf_counter() - began
    drafted = drafter.drafts - drafts
    found = texts(driver)
    tokens = sum(map(len, found.values()))
    return Turn(tokens / took, (drafter.hits - hits) / max(1, drafted), found)


@contextmanager
def ready(overlap: bool, noise: float) -> Iterator[tuple[RemoteDrafter, int]]:
    """A drafter that is connected to a worker, and the worker's process id."""
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder, "draft"))
        with worker(place, LEVEL_S, noise, overlap, core=cores()[1]) as process:
            drafter = connected(remote(place))
            yield drafter, process.pid or 0
            drafter.link.close()


def cores() -> tuple[int | None, int | None]:
    """The target's and the draft model's; None where the system does not pin processes."""
    if not hasattr(psutil.Process, "cpu_affinity"):
        return None, None
    return USABLE[0], USABLE[-1]


def compared(noise: float, kinds: list[Kind], repeats: int, tokens: int) -> list[dict[str, object]]:
    with ready(True, noise) as (ahead, _), ready(False, noise) as (asked, _):
        return [row(ahead, asked, noise, kind, repeats, tokens) for kind in kinds]


def row(
    ahead: RemoteDrafter, asked: RemoteDrafter, noise: float, kind: Kind, repeats: int, tokens: int
) -> dict[str, object]:
    batch = kind.requests(tokens)
    expected = plainly(batch)
    pairs = []
    for turn in range(repeats + 1):  # the first warms up
        both = [ahead, asked] if turn % 2 else [asked, ahead]
        turns = {drafter: decode(drafter, batch) for drafter in both}
        assert all(done.texts == expected for done in turns.values()), "drafts have changed a text"
        pairs.append((turns[ahead], turns[asked]))
    pairs = pairs[1:]
    ratios = sorted(fast.tok_s / slow.tok_s for fast, slow in pairs)
    found = {
        "noise": noise,
        **vars(kind),
        "hit_rate": round(statistics.median(fast.hit_rate for fast, _ in pairs), 2),
        "overlapped_tok_s": round(statistics.median(fast.tok_s for fast, _ in pairs), 1),
        "synchronous_tok_s": round(statistics.median(slow.tok_s for _, slow in pairs), 1),
        "ratio": round(statistics.median(ratios), 3),
        "least": round(ratios[0], 3),
        "most": round(ratios[-1], 3),
    }
    print(json.dumps(found), flush=True)
    return found


# A worker's loss -------------------------------------------------------------------------------------


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def nothing(pid: int) -> None:
    """The baseline."""


FAULTS: dict[str, Callable[[int], None]] = {"undisturbed": nothing, "kill -9": kill, "SIGSTOP": stop}


@contextmanager
def kept(drafter: RemoteDrafter) -> Iterator[None]:
    """As a pool keeps its links, in a thread."""
    over = threading.Event()

    def keep() -> None:
        while not over.wait(KEEP_S):
            drafter.keep()

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


def longest_gap(fault: Callable[[int], None], tokens: int) -> float:
    """Seconds between two chunks of one text, when the fault comes in the midst of it."""
    batch = Kind(BATCH, 1, 0.0).requests(tokens)
    with ready(True, 0.1) as (drafter, pid), kept(drafter):
        driver = Driver(engine(drafter))
        driver.submit(batch)
        came: list[float] = []
        faulty = False
        while not driver.engine.idle:
            driver.step()  # brings a chunk of every sequence
            came.append(time.perf_counter())
            if not faulty and drafter.drafts >= BEFORE * BATCH:
                fault(pid)
                faulty = True
        assert faulty, "nothing was drafted before the fault"
        assert texts(driver) == plainly(batch), "the loss has changed a text"
    return max(after - before for before, after in pairwise(came[2:]))  # without the prompts' steps


def losses(repeats: int, tokens: int) -> list[dict[str, object]]:
    found: dict[str, list[float]] = {name: [] for name in FAULTS}
    for _ in range(repeats):
        for name, fault in FAULTS.items():
            found[name].append(longest_gap(fault, tokens) * 1000)
    rows: list[dict[str, object]] = [
        {"fault": name, "median_ms": round(statistics.median(gaps), 1), "worst_ms": round(max(gaps), 1)}
        for name, gaps in found.items()
    ]
    print(json.dumps(rows), flush=True)
    return rows


# The page --------------------------------------------------------------------------------------------


def verdict(found: dict[str, object]) -> str:
    """Of one row, by its median ratio."""
    least = WANTED if found["hit_rate"] >= HIGH else NEVER_UNDER  # type: ignore[operator]
    return "yes" if found["ratio"] >= least else f"no: under {least}"  # type: ignore[operator]


COLUMNS = (
    *("noise", "concurrency", "shape", "temperature", "hit rate", "overlapped tok/s"),
    *("synchronous tok/s", "ratio", "least to most", "goal met"),
)
ABOUT = """# Drafting while the target verifies, on two processes

Nothing here ran on a GPU. Target and draft model are simulated devices in two processes, each pinned to a
core; a target pass sleeps {verify:.0f} ms, a draft pass {level:.0f} ms, whatever it feeds. Engine, frames,
Unix socket and draft server are the product's. Drafts are {gamma} deep, a tree is 3 wide; each request
decodes {tokens} tokens. Metric: tokens a second of all requests, by the wall clock; the baseline is the same
link and worker that drafts only when asked, in turns with it ({repeats} pairs after one to warm up): medians,
and the median, least and most of the pairs' ratios. `noise` sets how often the draft model is right. Every
text was equal to that of plain decoding. Goal: {wanted}x from a hit rate of {high} on, and never under
{never}x.
"""
LOSS = """
## When the worker goes away

Concurrency {batch}, chain, temperature 0, noise 0.1, texts of {tokens} tokens. The longest time between two
chunks of a text; the fault comes after {before} rounds with drafts; {repeats} runs each, in turns. Bound: the
undisturbed gap and 100 ms.
"""


def page(rows: list[dict[str, object]], lost: list[dict[str, object]], given: argparse.Namespace) -> str:
    costs = {"verify": VERIFY_S * 1000, "level": LEVEL_S * 1000, "gamma": GAMMA}
    goal = {"wanted": WANTED, "high": HIGH, "never": NEVER_UNDER}
    lines = [
        ABOUT.format(**costs, **goal, tokens=given.tokens, repeats=given.repeats),
        f"Machine: `{json.dumps({**machine(), 'versions': versions()})}`",
        f"Command: `python benchmarks/overlap.py --repeats {given.repeats} --tokens {given.tokens}`",
        "",
        table(*COLUMNS),
        "|---" * len(COLUMNS) + "|",
        *(as_line(found) for found in rows),
        LOSS.format(batch=BATCH, before=BEFORE, tokens=LOSS_TOKENS, repeats=given.repeats),
        table("fault", "median, ms", "worst, ms"),
        "|---" * 3 + "|",
        *(table(row["fault"], row["median_ms"], row["worst_ms"]) for row in lost),
    ]
    return "\n".join(lines) + "\n"


def as_line(r: dict[str, object]) -> str:
    shape = "chain" if r["width"] == 1 else "tree"
    rates = r["hit_rate"], r["overlapped_tok_s"], r["synchronous_tok_s"]
    spread = f"{r['least']} to {r['most']}"
    kind = r["noise"], r["concurrency"], shape, r["temperature"]
    return table(*kind, *rates, f"**{r['ratio']}x**", spread, verdict(r))


def table(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    if (core := cores()[0]) is not None:
        psutil.Process().cpu_affinity([core])
    kinds = [Kind(*kind) for kind in KINDS]
    rows = [row for noise in NOISES for row in compared(noise, kinds, given.repeats, given.tokens)]
    lost = losses(given.repeats, LOSS_TOKENS)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "overlap.md").write_text(page(rows, lost, given))


if __name__ == "__main__":
    main()
