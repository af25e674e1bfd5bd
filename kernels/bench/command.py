"""`gammaray bench kernels`: correctness, then times where there is a CUDA device; or compilation alone."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from gammaray.errors import ConfigError
from gammaray.kernels.backend import VARIABLE
from gammaray.kernels.bench import attention, joining, moves, output, report, verification
from gammaray.kernels.bench.case import Case, Skipped
from gammaray.kernels.bench.check import Planned, checks
from gammaray.kernels.bench.report import Report
from gammaray.kernels.bench.run import Budget, Found, measure
from gammaray.kernels.bench.timing import CudaTimer, Timer, roofs

LIMIT_S = 225.0  # of the 240 that the command may take: Python and torch start before
FREE = 0.85  # share of the free memory for our cases; what they are compared with needs some, too


def run(files: Sequence[Path], compile_only: bool, as_json: bool) -> int:
    """Print a report and write it to `files`. Returns the exit code: 1 where something is wrong.

    Raises ConfigError for files that cannot be written and where fused kernels cannot be had.
    """
    output.check(files)
    require_fused()
    made: output.Made = compiled() if compile_only else this_machine()
    print(output.to_json(made) if as_json else made.as_text(), flush=True)
    output.write(made, files)
    return 1 if made.failed else 0


def require_fused() -> None:
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in ("auto", "fused"):
        raise ConfigError(
            f"bench kernels runs fused kernels, and {VARIABLE} is {wanted!r}: unset it, or use auto or fused"
        )
    if find_spec("triton") is None:
        raise ConfigError(
            "bench kernels needs Triton: "
            "pip install -e '.[gpu]' (from a checkout) or pip install 'gammaray[gpu]'"
        )


def compiled() -> output.Made:
    """Every variant of every kernel, compiled; in a terminal a line says how far that is."""
    from gammaray.kernels.fused import resources

    return resources.compiled(_progress if sys.stderr.isatty() else None)


def _progress(done: int, total: int) -> None:
    print(f"\r{done} of {total} compiled", end="\n" if done == total else "", file=sys.stderr, flush=True)


def environment() -> dict[str, str]:
    """What the process must have set before a kernel is imported: on a CPU, Triton interprets."""
    fused = {"GAMMARAY_KERNELS": "fused"}
    return fused if torch.cuda.is_available() else fused | {"TRITON_INTERPRET": "1"}


def this_machine(limit_s: float = LIMIT_S) -> Report:
    """Checks and times on the GPU; without one, checks alone."""
    os.environ.update(environment())
    budget, device = Budget(limit_s), torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
