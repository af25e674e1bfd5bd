"""The papers of a drafter that `gammaray train` made: whose target it is, and how it was found to be.

In its folder config.json names the target (`gammaray_target`, see engine/identity.py), and report.json is the
acceptance report. A drafter from elsewhere has no papers, and nothing here asks for any.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from gammaray.validation import Strict, explain, path

CONFIG, REPORT, CARD, WEIGHTS = "config.json", "report.json", "README.md", "model.safetensors"
TARGET = "gammaray_target"  # key of config.json
SHOWN = 12  # digits of a hash that a message shows

Share = Annotated[float, Field(ge=0, le=1)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=1)]


class Finite(Strict):
    model_config = ConfigDict(allow_inf_nan=False)


class Spread(Finite):
    """Of alpha over requests with at least 32 tested tokens (math.md section 4)."""

    requests: Count
    p5: Share
    p50: Share
    p95: Share

    @model_validator(mode="after")
    def _ascends(self) -> Spread:
        if not self.p5 <= self.p50 <= self.p95:
            raise PydanticCustomError("order", "p5, p50 and p95 must ascend")
        return self


class Workload(Finite):
    """Held-out prompts of one kind. None: there was nothing to measure.

    `speedup`: measured, over plain decoding of the same prompts in turns with it.
    """

    name: str = Field(min_length=1)
    prompts: Count
    rounds: Count
    alpha: Share | None
    tau: float = Field(ge=1)
    speedup: float | None = Field(gt=0)


class AcceptanceReport(Finite):
    """Measured at temperature `temperature`, one request at a time, drafts verified whole.

    `speedup_predicted` is S = E[tau] / (v + gamma * c) (math.md section 2): E[tau] from the survival of each
    level, in the share `drafting` of rounds that had a draft.
    """

    format: Literal[1] = 1
    method: str = Field(min_length=1)
    target: str = Field(min_length=1)
    target_sha256: Hash
    drafter_sha256: Hash  # of its weights and its config.json, see `digest`
    data: str = Field(min_length=1)  # the held-out prompts
    dtype: str
    temperature: float = Field(ge=0)
    seed: int
    gamma: int = Field(ge=1, le=16)
    width: int = Field(ge=1, le=8)
    max_tokens: Count
    alpha: Spread | None  # None: no request had enough tested tokens
    total: Workload
    workloads: list[Workload] = Field(min_length=1)
    survival: list[Share] = Field(min_length=1)  # [j]: level j accepted, of the rounds that tested it
    drafting: Share
    latency_ratio: float = Field(ge=0)  # c: T_draft per drafted token / T_AR
    verify_ratio: float = Field(gt=0)  # v: what else a round takes / T_AR
    kl: float | None = Field(ge=0)  # mean KL(p_dense || p_verify), nats a token; None: nothing was audited
    speedup_predicted: float = Field(gt=0)
    equal: bool | None  # float32: every output was that of plain decoding; None: another dtype
    machine: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Papers:
    """Of one drafter. `problem`: why there is no report, or it does not count."""

    target: str  # hash of the weights that it was made for
    report: AcceptanceReport | None = None
    problem: str = ""


def made_for(folder: Path) -> str | None:
    """Hash of the target's weights; None for a drafter from elsewhere, or where there is none."""
    target = _json(folder / CONFIG).get(TARGET)
    return target if isinstance(target, str) else None


def read(folder: Path) -> Papers | None:
    """None for a drafter from elsewhere, or where there is none."""
    target = made_for(folder)
    if target is None:
        return None
    try:
        report = parse((folder / REPORT).read_bytes())
    except FileNotFoundError:
        return Papers(target, problem=f"it has no acceptance report ({REPORT})")
    except (OSError, ValueError) as error:
        return Papers(target, problem=f"its {REPORT} cannot be used: {error}")
    if report.target_sha256 != target:
        return Papers(target, problem=f"its {REPORT} is of another target")
    if report.drafter_sha256 != digest(folder):
        return Papers(target, problem=f"{WEIGHTS} or {CONFIG} is not what its {REPORT} is of")
    if report.equal is False:
        return Papers(target, problem=f"its {REPORT} found an output that was not plain decoding's")
    return Papers(target, report)


def parse(text: bytes) -> AcceptanceReport:
    """Raises ValueError that names what is wrong."""
    try:
        return AcceptanceReport.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path(first) or 'the whole'}: {explain(first)}") from None


def refusal(what: str, papers: Papers | None, target: str | None, place: str, model: str) -> str:
    """Why a drafter must not answer requests, and what to do; empty: it may.

    `what` it is called, `place` is its folder. `target`: hash of the weights of `model`, which is served;
    None: not known here, so that only the process that loads both compares.
    """
    if papers is None:
        return ""
    if target is not None and papers.target != target:
        return (
            f"{what} was made for a target with the weights {papers.target[:SHOWN]}, and {model} has "
            f"{target[:SHOWN]}: make it anew with `gammaray train refresh {model} --drafter {place}`"
        )
    if papers.problem:
        return f"{what}: {papers.problem}; measure it with `gammaray train report {model} --drafter {place}`"
    return ""


def digest(folder: Path) -> str | None:
    """SHA-256 of all that is loaded of a drafter, as `sha256sum config.json *.safetensors | sha256sum` tells
    it; None where config.json or model.safetensors is missing."""
    weights = {WEIGHTS, *(file.name for file in folder.glob("*.safetensors"))}
    parts = {name: sha256(folder / name) for name in (CONFIG, *sorted(weights))}
    if None in parts.values():
        return None
    return hashlib.sha256("".join(f"{one}  {name}\n" for name, one in parts.items()).encode()).hexdigest()


def sha256(file: Path) -> str | None:
    """None where there is no such file."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError:
        return None


def _json(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
