"""Draws the figures of docs/tuning.md, docs/pictures/tuning-*.svg, from what was measured.

    python benchmarks/figures.py [--out FOLDER]

Nothing is measured here, and the same results give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PICTURES = HERE.parent / "docs" / "pictures"
WIDTH, LEFT, RIGHT, TOP = 760, 190, 40, 62  # of a figure, and its margins, in pixels
STYLE = """\
    text { font: 13px system-ui, sans-serif; fill: #1f2430 }
    .small { font-size: 11.5px; fill: #586070 }
    .middle { text-anchor: middle }
    .end { text-anchor: end }
    .bold { font-weight: 600 }
    .grid { stroke: #d5d9e2 }
    .even { stroke: #586070; stroke-dasharray: 4 4 }
    .one { fill: #5665b8; stroke: #5665b8; stroke-width: 2 }
    .two { fill: #c2571a; stroke: #c2571a; stroke-width: 2 }
    text.one, text.two { stroke: none }
    polyline.one, polyline.two { fill: none }
    @media (prefers-color-scheme: dark) {
      text { fill: #e4e7ef }
      .small { fill: #a7aebd }
      .grid { stroke: #3a4050 }
      .even { stroke: #a7aebd }
      .one { fill: #8c9bf0; stroke: #8c9bf0 }
      .two { fill: #f0a070; stroke: #f0a070 }
      polyline.one, polyline.two { fill: none }
    }
"""
Point = tuple[float, float]
Scale = Callable[[float], float]


def text(x: float, y: float, content: str, classes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}">{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, classes: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{classes}"/>'


def dot(x: float, y: float, classes: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{classes}"/>'


def svg(height: int, title: str, note: str, parts: Iterable[str]) -> str:
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    head = [text(16, 24, title, "bold"), text(16, 43, note, "small")]
    body = "\n".join(f"  {part}" for part in [*head, *parts])
    names = f"  <title>{escape(title)}</title>\n  <desc>{escape(note)}</desc>"
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">'
    return f"{opening}\n{names}\n  <style>\n{STYLE}  </style>\n{body}\n</svg>\n"


def scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) * (end - start) / (high - low)


def ranges(title: str, note: str, rows: Sequence[tuple[str, float, float, float]], ends: Point) -> str:
    """One row a (name, low, middle, high): a dot with its interval, beside the line of break-even."""
    x, bottom = scale(*ends, LEFT, WIDTH - RIGHT), TOP + 24 * len(rows)
    ticks = [tick / 2 for tick in range(round(2 * ends[0]), round(2 * ends[1]) + 1)]
    parts = [line(x(tick), TOP, x(tick), bottom, "even" if tick == 1 else "grid") for tick in ticks]
    parts += [text(x(tick), bottom + 18, f"{tick:g}x", "small middle") for tick in ticks]
    for i, (name, low, middle, high) in enumerate(rows):
        y = TOP + 12 + 24 * i
        parts += [text(LEFT - 12, y + 4, name, "end"), line(x(low), y, x(high), y, "one")]
        parts.append(dot(x(middle), y, "one"))
    return svg(bottom + 30, title, note, parts)


def curves(
    title: str,
    note: str,
    axes: tuple[str, str],
    ends: tuple[Point, Point],
    ticks: tuple[Sequence[float], Sequence[float]],
    series: Sequence[tuple[str, Sequence[Point]]],
    joined: bool,
) -> str:
    """Up to two named series of points over two axes."""
    height, left = 330, 70
    x, y = scale(*ends[0], left, WIDTH - RIGHT), scale(*ends[1], height - 50, TOP + 18)
    parts = [
        line(left, y(tick), WIDTH - RIGHT, y(tick), "even" if tick == 1 else "grid") for tick in ticks[1]
    ]
    parts += [text(left - 8, y(tick) + 4, f"{tick:g}", "small end") for tick in ticks[1]]
    parts += [text(x(tick), height - 32, f"{tick:g}", "small middle") for tick in ticks[0]]
    parts += [text((left + WIDTH) / 2, height - 10, axes[0], "middle"), text(16, TOP + 4, axes[1])]
    for i, (name, points) in enumerate(series):
        kind = ("one", "two")[i]
        places = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        parts += [f'<polyline points="{places}" class="{kind}"/>'] * joined
        parts += [dot(x(a), y(b), kind) for a, b in points]
        parts += [dot(WIDTH - 390 + 190 * i, TOP, kind), text(WIDTH - 378 + 190 * i, TOP + 4, name, kind)]
    return svg(height, title, note, parts)


def speedups(by: str) -> list[tuple[str, float, float, float]]:
    """`drafter`: of all prompts; `category`: of the n-gram drafter. The best first."""
    rows = json.loads((RESULTS / "engine.json").read_text())["rows"]
    chosen = [
        row
        for row in rows
        if (
            row["category"] == "all"
            if by == "drafter"
            else row["drafter"] == "ngram" and row["category"] != "all"
        )
    ]
    found = [(row[by], row["speedup_ci"][0], row["speedup"], row["speedup_ci"][1]) for row in chosen]
    return sorted(found, key=lambda row: -row[2])


def step_times(cases: dict[str, int]) -> list[Point]:
    """(tokens fed, ms) of the default mode in bfloat16 behind 256 tokens."""
    (found,) = (
        result["passes"]
        for result in json.loads((RESULTS / "deterministic.json").read_text())["cost"]["cost"]["results"]
        if result["dtype"] == "bfloat16"
    )
    times = {own["case"]: own["default_ms"] for own in found if own["context"] == 256}
    return [(tokens, times[case]) for case, tokens in cases.items()]


def overlaps(concurrency: int) -> list[Point]:
    """(hit rate, ratio to the synchronous link) of every setting."""
    row = re.compile(
        rf"^\| [\d.]+ \| {concurrency} \| \w+ \| [\d.]+ \| ([\d.]+) \|.*?\*\*([\d.]+)x", re.MULTILINE
    )
    found = row.findall((RESULTS / "overlap.md").read_text())
    return sorted((float(hit), float(ratio)) for hit, ratio in found)


ALONE = {
    "decode, batch 1": 1,
    "verify 5, batch 1": 5,
    "verify 9, batch 1": 9,
    "verify a tree of 16 in two branches": 16,
}
BATCH = {"decode, batch 1": 1, "decode, batch 8": 8, "decode, batch 16": 16}
ENGINE = "Decode tok/s over plain decoding of the same prompts, concurrency 1, float32, two CPU cores; 95 %"


def figures() -> dict[str, str]:
    """File name: content."""
    model = "SmolLM2-135M"
    return {
        "tuning-drafters.svg": ranges(
            f"Speed-up by drafter, {model}, 26 prompts of Spec-Bench", ENGINE, speedups("drafter"), (0.5, 1.5)
        ),
        "tuning-categories.svg": ranges(
            f"Speed-up of ngram by kind of prompt, {model}, two prompts each",
            ENGINE,
            speedups("category"),
            (0.5, 3.5),
        ),
        "tuning-steps.svg": curves(
            f"What a step costs by the tokens that it feeds, {model}",
            "One pass behind 256 tokens, bfloat16, two CPU cores shared with other work, median of 8",
            ("tokens fed in the step", "ms"),
            ((0, 17), (0, 70)),
            ((1, 5, 9, 16), (0, 10, 20, 30, 40, 50, 60, 70)),
            [("a draft of one request", step_times(ALONE)), ("plain tokens of a batch", step_times(BATCH))],
            joined=True,
        ),
        "tuning-overlap.svg": curves(
            "Drafting while the target verifies, by hit rate",
            "Tok/s over the same worker that drafts when asked; simulated: target 20 ms, draft pass 3 ms",
            ("hit rate", "ratio"),
            ((0, 1), (0.9, 1.6)),
            ((0, 0.25, 0.5, 0.75, 1), (0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6)),
            [("concurrency 1", overlaps(1)), ("concurrency 8", overlaps(8))],
            joined=False,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PICTURES)
    folder = parser.parse_args().out
    for name, content in figures().items():
        (folder / name).write_text(content)
        print(folder / name)


if __name__ == "__main__":
    main()
