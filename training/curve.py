"""A curve of layers against acceptance and speed, as SVG: the same figures give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from gammaray.training.layers import Exit

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 60, 60, 62, 50  # pixels
TICKS = 4
STYLE = """\
    text { font: 13px system-ui, sans-serif; fill: #1f2430 }
    .small { font-size: 11.5px; fill: #586070 }
    .middle { text-anchor: middle }
    .end { text-anchor: end }
    .grid { stroke: #d5d9e2 }
    .alpha { fill: #5665b8; stroke: #5665b8; stroke-width: 2 }
    .speed { fill: #c2571a; stroke: #c2571a; stroke-width: 2 }
    text.alpha, text.speed { stroke: none }
    polyline { fill: none !important }
    .picked { fill: none; stroke: #586070; stroke-dasharray: 4 4 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e4e7ef }
      .small { fill: #a7aebd }
      .grid { stroke: #3a4050 }
    }
"""
Scale = Callable[[float], float]


def svg(target: str, exits: Sequence[Exit], picked: Exit) -> str:
    """`exits` ascending. Alpha has the axis on the left, from 0 to 1, the predicted speed-up that on the
    right, from 0."""
    first, last = exits[0].layers, exits[-1].layers
    fastest = max(1.0, *(one.speedup for one in exits))
    x = _scale(first, max(last, first + 1), LEFT, WIDTH - RIGHT)
    alpha, speed = (_scale(0, top, HEIGHT - BOTTOM, TOP) for top in (1.0, fastest))
    title = f"Layer exit of {target}"
    note = f"{picked.layers} layers: alpha {picked.alpha:.2f}, predicted speed-up {picked.speedup:.2f}"
    parts = [f"<title>{escape(title)}</title>", f"<desc>{escape(note)}</desc>"]
    parts += [_text(16, 24, title), *_grid(alpha, fastest)]
    parts += [_text(x(one.layers), HEIGHT - 30, str(one.layers), "small middle") for one in exits]
    parts += [_text(WIDTH / 2, HEIGHT - 8, "layers that draft", "middle")]
    parts += [f'<path d="M{x(picked.layers):.1f} {TOP} V{HEIGHT - BOTTOM}" class="picked"/>']
    parts += _series([(x(one.layers), alpha(one.alpha)) for one in exits], "alpha")
    parts += _series([(x(one.layers), speed(one.speedup)) for one in exits], "speed")
    parts += [
        _text(LEFT, 48, "alpha (left)", "alpha"),
        _text(LEFT + 140, 48, "predicted speed-up (right)", "speed"),
    ]
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    body = "\n".join(f"  {part}" for part in parts)
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">'
    return f"{opening}\n  <style>\n{STYLE}  </style>\n{body}\n</svg>\n"


def _grid(y: Scale, top: float) -> list[str]:
    parts = []
    for tick in range(TICKS + 1):
        share = tick / TICKS
        parts.append(f'<path d="M{LEFT} {y(share):.1f} H{WIDTH - RIGHT}" class="grid"/>')
        parts.append(_text(LEFT - 8, y(share) + 4, f"{share:.2f}", "small end"))
        parts.append(_text(WIDTH - RIGHT + 8, y(share) + 4, f"{share * top:.2f}x", "small"))
    return parts


def _series(points: Sequence[tuple[float, float]], kind: str) -> list[str]:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="{kind}"/>' for x, y in points]
    return [f'<polyline points="{places}" class="{kind}"/>', *dots]


def _text(x: float, y: float, content: str, classes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}">{escape(content)}</text>'


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) * (end - start) / (high - low)
