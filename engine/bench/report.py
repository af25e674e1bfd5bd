"""What `gammaray bench engine` says: as JSON, and as Markdown, which is also what the terminal shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from gammaray.engine.bench.figures import ALL, Row, rows
from gammaray.engine.bench.measure import Measured, Skipped
from gammaray.kernels.bench.report import listed, table

HEAD = (
    *("drafter", "category", "prompts", "alpha", "accepted", "tau"),
    *("tok/s", "plain tok/s", "speed-up", "95 %", "equal"),
)
MEANING = (
    "Decode throughput: the tokens after the first, by the time since it came. Speed-up: over plain decoding "
    "of the same prompts, in turns with it; all tokens by all time. 95 %: bootstrap over prompts. Equal: "
    "outputs that are those of plain decoding. Alpha: share of first tries that were right, in "
    "drafts that were verified whole, which are few where drafts are trimmed. Accepted: the same of all "
    "drafts."
)


@dataclass(slots=True)
class Report:
    """`about`: the machine, versions, and what was asked, as the JSON has them."""

    about: Mapping[str, object]
    arms: Sequence[str]
    dtype: str
    measured: list[Measured] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    interrupted: bool = False

    @property
    def rows(self) -> list[Row]:
        return [row for label in self.arms for row in rows(label, self.measured)]

    @property
    def failed(self) -> list[str]:
        """What is wrong, a line each. Other dtypes round differently with the batch, so theirs may differ."""
        unequal = [
            f"{label}: {one.prompt.name} differs from plain decoding in float32"
            for one in self.measured
            for label, run in one.runs.items()
            if run.ids != one.plain.ids and self.dtype == "float32"
        ]
        return unequal + [f"{one.prompt}: {one.reason}" for one in self.skipped if one.failed]

    def as_json(self) -> dict[str, object]:
        return {
            **self.about,
            "concurrency": 1,
            "rows": [asdict(row) for row in self.rows],
            "skipped": [asdict(one) for one in self.skipped],
            "failed": self.failed,
            "interrupted": self.interrupted,
        }

    def as_text(self) -> str:
        return self.as_markdown()

    def as_markdown(self) -> str:
        return "\n".join(_lines(self))


def _lines(report: Report) -> Iterator[str]:
    yield "# Drafters: speed-up over plain decoding, one request at a time"
    yield ""
    yield MEANING
    yield ""
    for name, value in report.about.items():
        yield f"- {name}: {listed(value) if isinstance(value, dict) else value}"
    found = report.rows
    yield from ("", *table(HEAD, (_cells(row) for row in found if row.category == ALL)))
    yield from ("", *table(HEAD, (_cells(row) for row in found if row.category != ALL)))
    yield ""
    if report.skipped:
        yield from table(("left out", "why"), ((one.prompt, one.reason) for one in report.skipped))
        yield ""
    yield from (f"FAILED {line}" for line in report.failed)
    count = f"{len(report.measured)} prompts"
    yield f"{count}, then interrupted" if report.interrupted else f"{count}, {len(report.skipped)} left out"


def _cells(row: Row) -> tuple[str, ...]:
    low, high = row.speedup_ci
    return (
        row.drafter,
        row.category,
        str(row.prompts),
        figure(row.alpha, ".2f"),
        figure(row.acceptance, ".2f"),
        figure(row.tau, ".2f"),
        figure(row.tok_s, ".1f"),
        figure(row.plain_tok_s, ".1f"),
        f"**{figure(row.speedup, '.2f')}**",
        f"{figure(low, '.2f')} to {figure(high, '.2f')}" if low is not None else "-",
        f"{row.equal} of {row.prompts}",
    )


def figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
