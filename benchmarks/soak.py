"""Streams over two replicas and two tenants' draft workers while all of these are killed at random.

    python benchmarks/soak.py [--minutes 30] [--seed 1] [--out FOLDER]

The exit code is 1 when a stream said anything but its undisturbed text, was refused, or when something was
not given back.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home folder
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps every Ray listener on 127.0.0.1
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.soak import NODES, POOLS, READERS, REPLICAS, Result, soak
from support.soak_killer import PAUSES_S
from support.soak_parts import LEVEL_S, VERIFY_S

from gammaray.actors.link.bench import machine, versions

ABOUT = """# Soak: streams under random kills

Nothing here ran on a GPU. {replicas} replicas and the draft workers of {tenants} tenants on {nodes} raylets
of one machine and a head, {readers} readers at a time, for {minutes:.1f} minutes. Target and draft model are
simulated: a target pass sleeps {verify:.0f} ms, a draft pass {level:.0f} ms; Serve, ingress, engines, draft
links, workers and keeper are the product's. Requests are greedy and seeded, with chains, trees and no drafts,
one choice or two, with and without a stop string. A fault comes {least:g} to {most:g} s after the last one; a
replica is killed, alone or with its node, only while the other one answers.

Each text, finish reason and token count was compared with those of the request run alone without drafts.
"""


def rows(result: Result) -> list[tuple[str, object]]:
    tally = result.tally
    return [
        ("streams that ran to their end", tally.whole),
        ("streams that their reader left", tally.left),
        ("tokens of the whole streams", tally.tokens),
        ("streams that differed or broke", len(tally.faults)),
        ("streams that the server ended with an error", len(tally.refused)),
        ("longest time between two events of a choice, s", round(tally.longest_gap_s, 2)),
        *sorted(result.kills.items()),
        ("drafts", result.drafts),
        ("drafts made while the target verified", result.hits),
        ("KV blocks, sequences, processes or files left at the end", len(result.leaks)),
    ]


def page(result: Result, minutes: float, seed: int) -> str:
    about = ABOUT.format(
        replicas=REPLICAS,
        tenants=len(POOLS),
        nodes=len(NODES),
        readers=READERS,
        minutes=result.seconds / 60,
        verify=VERIFY_S * 1000,
        level=LEVEL_S * 1000,
        least=PAUSES_S[0],
        most=PAUSES_S[1],
    )
    lines = [
        about,
        f"Machine: `{json.dumps({**machine(), 'versions': versions()})}`",
        f"Command: `python benchmarks/soak.py --minutes {minutes:g} --seed {seed}`",
        "",
        "| what | count |",
        "|---|---|",
        *(f"| {what} | {count} |" for what, count in rows(result)),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(60 * given.minutes, given.seed, Path(folder))
    wrong = [*result.tally.faults, *result.tally.refused, *result.leaks]
    print("\n".join(f"wrong: {fault}" for fault in wrong))
    print("\n".join(f"{what}: {count}" for what, count in rows(result)))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "soak.md").write_text(page(result, given.minutes, given.seed))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
