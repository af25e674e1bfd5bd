"""Calibrates a drafter's confidences on rounds over held-out texts, once it is trained.

Temperatures are fitted on one half of the rounds and judged on the other, which is of other texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from gammaray.drafter_config import DsparkDrafter
from gammaray.engine.drafters import dspark
from gammaray.engine.drafters.head_loading import read_config
from gammaray.engine.drafters.registry import Making
from gammaray.engine.runner import ModelRunner
from gammaray.training.batches import Texts
from gammaray.training.calibrate import Judged, Round, Rounds, judge
from gammaray.training.files import replacing
from gammaray.training.rounds import replay

MOST = 8000  # rounds: more take time and change nothing
TEMPERATURES, FILE = "confidence_temperatures", "calibration.json"


def calibrate(runner: ModelRunner, texts: Texts, folder: Path) -> dict[str, float]:
    """Of the block drafter in `folder`, which is changed: see `keep`. Returns figures for its card: tau of
    these rounds, and the expected calibration error of survival before and after. With held-out texts for
    one half only it stays as it is, and has no such error. Raises ConfigError."""
    making = Making("trained", DsparkDrafter(method="dspark", path=str(folder)), runner, "", None)  # type: ignore[arg-type]
    drafter = dspark.make(making)
    documents = texts.held_out()
    halves = [
        list(islice(_rounds(drafter, runner, texts, half), MOST // 2))
        for half in (documents[::2], documents[1::2])
    ]
    rounds = halves[0] + halves[1]
    tau = 1 + sum(one.accepted for one in rounds) / max(len(rounds), 1)
    if not all(halves):
        return {"tau": tau}
    found = judge(*(Rounds.of(half, drafter.drafted) for half in halves))
    keep(folder, found)
    return {"tau": tau, "ece_before": found.before, "ece_after": found.after}


def keep(folder: Path, judged: Judged) -> None:
    """Write the temperatures into the drafter's config.json, over those that the rounds were told with, and
    beside it what they are worth."""
    config = read_config(folder)
    known = config.get(TEMPERATURES) or [1.0] * len(judged.temperatures)
    told = [old * new for old, new in zip(known, judged.temperatures, strict=True)]
    for name, content in (("config.json", config | {TEMPERATURES: told}), (FILE, judged.to_json())):
        with replacing(folder / name) as work:
            work.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _rounds(
    drafter: dspark.DsparkDrafter, runner: ModelRunner, texts: Texts, documents: Sequence[int]
) -> Iterator[Round]:
    for document in documents:
        tokens, answers = texts.corpus.document(document)
        yield from replay(drafter, runner, tokens.tolist(), answers.tolist(), drafter.drafted)
