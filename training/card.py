"""The model card: a report for people, and how the drafter was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gammaray.kernels.bench.report import listed, table
from gammaray.papers import AcceptanceReport, Workload

KNOWN = ("method", "target", "target_sha256")  # of the facts, said above
HEAD = ("prompts", "number", "alpha", "tau", "speed-up")


def text(report: AcceptanceReport, facts: Mapping[str, object]) -> str:
    """Markdown. `facts`: see `report.facts`."""
    return "\n".join(_lines(report, facts)) + "\n"


def _lines(report: AcceptanceReport, facts: Mapping[str, object]) -> Iterator[str]:
    yield f"# Drafter for {report.target}: {report.method}"
    yield ""
    yield (
        "It proposes tokens that the target then verifies, so that the text stays the target's own. Made by "
        "`gammaray train`, for these weights and no others:"
    )
    yield ""
    yield f"- target: SHA-256 {report.target_sha256}"
    yield f"- drafter: SHA-256 {report.drafter_sha256}"
    yield ""
    yield "## What was measured"
    yield ""
    yield from _measured(report)
    yield ""
    yield "## How it was made"
    yield ""
    if not facts:
        yield "Nothing is known of that."
    yield from _made(facts)


def _measured(report: AcceptanceReport) -> Iterator[str]:
    yield (
        f"On held-out prompts ({report.data}) at temperature {report.temperature:g}, one request at a time, "
        f"{report.max_tokens} tokens an answer, {report.dtype}, drafts of depth {report.gamma} and width "
        f"{report.width} verified whole:"
    )
    yield ""
    yield from table(HEAD, map(_cells, [*report.workloads, report.total]))
    yield ""
    if report.alpha is not None:
        one = report.alpha
        yield (
            f"- alpha over {one.requests} requests with 32 tested tokens or more: P5 {one.p5:.2f}, "
            f"P50 {one.p50:.2f}, P95 {one.p95:.2f}"
        )
    levels = ", ".join(f"{share:.2f}" for share in report.survival)
    yield f"- accepted by level, where it was tested: {levels}"
    yield f"- rounds that had a draft: {report.drafting:.0%}"
    yield f"- drafting a token takes {report.latency_ratio:.1%} of the time of a plain one"
    yield f"- a round without its drafting takes {report.verify_ratio:.2f} times a plain one"
    yield f"- so a speed-up of {report.speedup_predicted:.2f} is predicted; measured was what the table says"
    if report.kl is not None:
        yield f"- KL between dense and verified distributions: {report.kl:.1e} nats a token"
    if report.equal is not None:
        yield f"- outputs {'equal' if report.equal else 'DIFFER FROM'} those of plain decoding"
    yield f"- machine: {listed(report.machine)}"


def _cells(one: Workload) -> tuple[str, ...]:
    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    return one.name, str(one.prompts), figure(one.alpha), figure(one.tau), figure(one.speedup)


def _made(facts: Mapping[str, object]) -> Iterator[str]:
    """What it was asked for, then what came of it."""
    made = facts.get("made")
    asked = {name: value for name, value in facts.items() if name not in (*KNOWN, "made")}
    yield from _listed(asked)
    if isinstance(made, dict):
        yield ""
        yield "What came of it:"
        yield ""
        yield from _listed(made)


def _listed(facts: Mapping[str, object]) -> Iterator[str]:
    for name, value in facts.items():
        if value is not None and value != []:
            said = listed(value) if isinstance(value, dict) else str(value)
            yield f"- {name.replace('_', ' ')}: {said}"
