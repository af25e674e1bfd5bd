"""`gammaray bench kernels`: correctness first, then times where there is a CUDA device."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from gammaray.errors import ConfigError
from gammaray.kernels.backend import backend
from gammaray.kernels.bench import attention, joining, moves, report, verification
from gammaray.kernels.bench.case import Case, Skipped
from gammaray.kernels.bench.check import Planned, checks
from gammaray.kernels.bench.report import Report
from gammaray.kernels.bench.run import Budget, Found, measure
from gammaray.kernels.bench.timing import CudaTimer, Timer, roofs

LIMIT_S = 225.0  # of the 240 that the command may take: Python and torch start before
FREE = 0.85  # share of the free memory for our cases; what they are compared with needs some, too
SUFFIXES = (".json", ".md")


def environment() -> dict[str, str]:
    """What the process must have set before a kernel is imported: on a CPU, Triton interprets."""
    fused = {"GAMMARAY_KERNELS": "fused"}
    return fused if torch.cuda.is_available() else fused | {"TRITON_INTERPRET": "1"}


def this_machine(limit_s: float = LIMIT_S) -> Report:
    """Checks and times on the GPU; without one, checks alone. Raises ConfigError where Triton is missing."""
    budget, device = Budget(limit_s), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend(device)
    if device.type == "cpu":
        return without_times(device, list(checks(device)), cases(device), budget)
    free = int(torch.cuda.mem_get_info()[0] * FREE)
    return with_times(device, list(checks(device)), cases(device), CudaTimer(device), free, budget)


def cases(device: torch.device) -> list[Case]:
    """Attention last: should time run out, its largest shapes are what is dropped."""
    parts = (verification, moves, joining, attention)
    return [case for part in parts for case in part.cases(device)]


def without_times(
    device: torch.device, planned: Sequence[Planned], cases: Sequence[Case], budget: Budget
) -> Report:
    done = [check.run() for check in planned]
    kernels = Counter(case.kernel for case in cases)
    skipped = [Skipped(f"{name}: {count} shapes", "there is no GPU") for name, count in kernels.items()]
    return Report(
        report.device(device), report.versions(), done, Found(skipped=skipped), None, budget.spent_s
    )


def with_times(
    device: torch.device,
    planned: Sequence[Planned],
    cases: Sequence[Case],
    timer: Timer,
    free: int,
    budget: Budget,
) -> Report:
    """`free`: bytes of memory that a case may take."""
    done = [check.run() for check in planned]
    top = roofs(timer, device)
    found = measure(cases, timer, top, free, budget)
    return Report(report.device(device), report.versions(), done, found, top, budget.spent_s)


def check_names(files: Sequence[Path]) -> None:
    """Raises ConfigError for a file that `write` has no form for."""
    for file in files:
        if file.suffix not in SUFFIXES:
            raise ConfigError(f"--out writes {' and '.join(SUFFIXES)}, by the name; {file} is neither")


def write(made: Report, files: Sequence[Path]) -> None:
    for file in files:
        text = as_json(made) if file.suffix == ".json" else made.as_markdown()
        file.write_text(text + "\n")


def as_json(made: Report) -> str:
    return json.dumps(made.as_json(), indent=1)


def compile_all(as_json: bool) -> int:
    """Compile every variant of every kernel and print what it takes. Returns the exit code."""
    from gammaray.kernels.fused import resources

    usages = resources.measure()
    print(json.dumps([asdict(usage) for usage in usages]) if as_json else resources.as_text(usages))
    return 1 if any(usage.problems for usage in usages) else 0
