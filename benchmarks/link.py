"""`gammaray bench engine --link` for two sizes of a round, as a page.

python benchmarks/link.py [--repeats 1000] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TOKENS, BATCH = (64, 2048), 32  # in the drafts of all sequences together; 2048: 64 of each


def measured(tokens: int, repeats: int) -> dict[str, Any]:
    options = ["--tokens", str(tokens), "--batch", str(BATCH), "--repeats", str(repeats), "--json"]
    command = [sys.executable, "-m", "gammaray.cli", "bench", "engine", "--link", *options]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


def section(found: dict[str, Any], repeats: int) -> str:
    payload = found["payload"]
    tokens, floor = payload["tokens"], found["rows"][0]["p50_us"]
    lines = [
        f"## {tokens} tokens in {payload['batch']} drafts",
        "",
        f"Command: `gammaray bench engine --link --tokens {tokens} --batch {BATCH} --repeats {repeats}`",
        f"Machine: `{json.dumps({**found['machine'], 'versions': found['versions']})}`",
        "",
        *(f"- {side}: {payload[f'{side}_bytes']} bytes, {payload[side]}" for side in SIDES),
        "",
        "| transport | p50 us | p90 us | p99 us | p50 over in process | n |",
        "|---|---|---|---|---|---|",
        *(
            f"| {r['transport']} | {r['p50_us']:.0f} | {r['p90_us']:.0f} | {r['p99_us']:.0f} "
            f"| {r['p50_us'] - floor:.0f} | {r['n']} |"
            for r in found["rows"]
        ),
    ]
    return "\n".join(lines) + "\n"


SIDES = ("question", "answer", "features")
HEAD = """# The draft link: what it costs to ask for drafts

Microseconds of a round trip as the engine sees it, at concurrency 32 (the sequences of a round): packing the
question, its way to another process, reading and answering it there with a drafter that takes no time, the
way back, and reading the answer into trees. All transports carry the same frames and take turns, trip by
trip, in one run. The baseline of each is "in process": the same work without a way. Nothing here ran on a
GPU; `device` is torch.distributed over gloo between two processes of this machine.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    sections = [section(measured(tokens, given.repeats), given.repeats) for tokens in TOKENS]
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "link.md").write_text(HEAD + "\n".join(sections))


if __name__ == "__main__":
    main()
