"""Makes a drafter anew for a target whose weights changed, as it was made the first time.

How that was stands in run.json beside the drafter. Data are written anew too, by the target as it is now.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gammaray import papers
from gammaray.engine import identity
from gammaray.errors import ConfigError
from gammaray.training import report
from gammaray.training.command import Asked, Kind
from gammaray.training.kinds import KINDS, noted

OWN = "its own"  # questions, see gather.py
State = Literal["fresh", "unreported", "stale"]


@dataclass(frozen=True, slots=True)
class Plan:
    """`stale`: to be trained, in `run`; `unreported`: only to be measured; `fresh`: nothing is to be done."""

    state: State
    drafter: Path  # the one that answers from then on
    run: Path


def plan(target: str, drafter: Path, run: Path | None = None) -> Plan:
    """What a refresh has to do. `run` None: a folder beside the old run, or here where there is none, named
    after the target's weights, so that the same command goes on there. Raises ConfigError."""
    found, here = papers.read(drafter), identity.of(target)
    if found is None:
        raise ConfigError(f"{drafter} has no {papers.TARGET}: `gammaray train` did not make it")
    if found.target == here:
        return Plan("unreported" if found.problem else "fresh", drafter, drafter.parent)
    old = drafter.resolve()
    beside = old.parent if (old.parent / report.RUN).is_file() else Path.cwd() / old.name
    place = run or beside.with_name(f"{beside.name}-{here[: papers.SHOWN]}")
    return Plan("stale", place / "out", place)


def again(target: str, drafter: Path, run: Path, prompts: Path | None = None) -> tuple[Asked, Kind]:
    """What `command.train` takes to make the drafter anew in `run`. `prompts`: the file, if it was made with
    one. Raises ConfigError where nobody knows how it was made."""
    known = report.facts(drafter)
    method = str(known.get("method", ""))
    if method not in KINDS:
        raise ConfigError(f"{drafter} has no {report.RUN} of a head that can be made anew: train one")
    if prompts is None and (asked := known.get("questions", OWN)) != OWN:
        raise ConfigError(f"{drafter} was made with a file of prompts ({asked}): give it with --prompts")
    begun = noted(Asked, known, target=target, run=run, data=None, prompts=prompts)
    return begun, KINDS[method](begun, known)
