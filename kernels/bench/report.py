"""What `gammaray bench kernels` says: as JSON, and as Markdown, which is also what the terminal shows."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from gammaray.kernels.bench.case import SEED, Roofs, Row
from gammaray.kernels.bench.check import Check
from gammaray.kernels.bench.goals import goals
from gammaray.kernels.bench.run import Found

PACKAGES = ("gammaray", "torch", "triton", "transformers")


@dataclass(frozen=True, slots=True)
class Report:
    device: dict[str, object]
    versions: dict[str, str]
    checks: Sequence[Check]
    found: Found
    roofs: Roofs | None  # None: nothing was timed
    seconds: float

    @property
    def failed(self) -> list[str]:
        """What is wrong, a line each."""
        checks = [f"{c.check}: {c.problem or f'error {c.error:.2g}'}" for c in self.checks if not c.ok]
        rows = [
            f"{r.case.kernel} {r.case.shape}: error {r.error:.2g}" for r in self.found.rows if not r.correct
        ]
        return [*checks, *rows, *self.found.failed]

    def as_json(self) -> dict[str, object]:
        return {
            "device": self.device,
            "versions": self.versions,
            "seed": SEED,
            "seconds": round(self.seconds, 1),
            "measured": _roofs(self.roofs) if self.roofs else None,
            "checks": [check.as_json() for check in self.checks],
            "rows": [row.as_json() for row in self.found.rows],
            "goals": [asdict(goal) | {"verdict": goal.verdict} for goal in goals(self.found.rows)],
            "skipped": [asdict(one) for one in self.found.skipped],
            "failed": self.failed,
        }

    def as_text(self) -> str:
        return self.as_markdown()

    def as_markdown(self) -> str:
        return "\n".join(_lines(self))


def device(of: torch.device) -> dict[str, object]:
    if of.type != "cuda":
        return {"name": f"CPU, {platform.system()} {platform.machine()}, kernels interpreted"}
    found = torch.cuda.get_device_properties(of)
    capability, memory = f"{found.major}.{found.minor}", round(found.total_memory / 2**30, 1)
    return {"name": found.name, "compute_capability": capability, "memory_gib": memory}


def versions() -> dict[str, str]:
    found = {"commit": _commit(), "python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _commit() -> str:
    """Of the checkout, "+" when tracked files differ from it; "unknown" outside of a checkout."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return "unknown"
    same = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True).returncode == 0
    return head.stdout.strip() + ("" if same else "+")


def _roofs(roofs: Roofs) -> dict[str, float]:
    return {
        "copy_gb_per_s": round(roofs.copied / 1e3, 1),
        "bf16_tflop_per_s": round(roofs.operations / 1e6, 1),
    }


def _lines(report: Report) -> Iterator[str]:
    yield f"Device: {listed(report.device)}"
    yield f"Versions: {listed(report.versions)}"
    yield f"Seed: {SEED}"
    if report.roofs:
        yield f"Measured: {listed(_roofs(report.roofs))}"
    yield from ("", *table(("check", "error", "allowed", ""), map(_check, report.checks)))
    if report.found.rows:
        head = (
            "kernel",
            "shape",
            "us",
            "floor us",
            "of copy bandwidth",
            "of bf16 peak",
            "error",
            "others, us",
        )
        yield from ("", *table(head, map(_row, report.found.rows)))
    found = ((g.goal, g.verdict, f"{g.met} of {g.judged}", g.worst, g.note) for g in goals(report.found.rows))
    yield from ("", *table(("goal on an H200", "", "rows that meet it", "worst", ""), found))
    if report.found.skipped:
        yield from ("", *table(("skipped", "why"), ((one.what, one.reason) for one in report.found.skipped)))
    yield from ("", *(f"FAILED {line}" for line in report.failed))
    yield f"{len(report.checks)} checks, {len(report.found.rows)} rows, {report.seconds:.0f} s" + (
        "" if report.failed else ", nothing failed"
    )


def _check(check: Check) -> tuple[str, ...]:
    return check.check, f"{check.error:.2g}", f"{check.tolerance:.2g}", "ok" if check.ok else "FAILED"


def _row(row: Row) -> tuple[str, ...]:
    times, shares = (row.us, row.floor_us), (row.bandwidth, row.peak)
    others = ", ".join(f"{name} {us:.0f}" for name, us in row.others.items())
    return (
        row.case.kernel,
        row.case.shape,
        *(f"{us:.1f}" for us in times),
        *(f"{share:.0%}" for share in shares),
        f"{row.error:.1e}",
        others,
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def listed(entries: dict[str, object] | dict[str, str] | dict[str, float]) -> str:
    return ", ".join(f"{name} {value}" for name, value in entries.items())
