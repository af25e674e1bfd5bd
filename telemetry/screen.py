"""The overview as a screen of text: a line for each tenant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gammaray.types import State

Json = dict[str, Any]

NONE = "-"
STATES: dict[State, tuple[str, str]] = {  # shape and colour
    "on": ("●", "blue"),
    "contract": ("◐", "yellow"),
    "warmup": ("◔", "cyan"),
    "ramp": ("▲", "yellow"),
    "probe": ("◇", "yellow"),
    "shadow": ("○", "cyan"),
    "emergency": ("!", "bold red"),
    "off": ("■", "red"),
    "pinned_off": ("▬", "dim"),
}
BEST_FIRST = get_args(State)
COLUMNS = ("alpha", "tau", "S", "bounds", "FR", "gamma/w", "req/s", "tok/s")


def screen(data: Json) -> Group:
    """The whole view: how the cluster is, then a line for each tenant, the worst state first."""
    tenants = sorted(data["tenants"], key=lambda one: (-BEST_FIRST.index(standing(one)[0]), one["tenant"]))
    return Group(*_headline(data), _table(tenants) if tenants else Text("no tenant has sent a request yet"))


def _headline(data: Json) -> Iterable[Text]:
    control, last = data["controller"], (data["throughput"] or [{}])[-1]
    yield Text.assemble(
        ("gammaray", "bold"),
        f"  {number(last.get('tokens_per_s'), 0)} tok/s  {number(last.get('requests_per_s'), 1)} req/s"
        f"  TPOT p99 {number(last.get('tpot_p99_ms'), 0)} ms",
    )
    if not data["speculation"]:
        yield Text("! the kill switch is on: every tenant decodes plainly", "bold red")
    if control["state"] != "ok":
        age = number(control.get("age_s"), 0)
        yield Text(
            f"! the controller has been silent for {age} s: the last policy stays in force", "bold red"
        )


def _table(tenants: Iterable[Json]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("tenant", overflow="ellipsis", no_wrap=True, max_width=32)
    table.add_column("state", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for one in tenants:
        table.add_row(*_row(one))
    return table


def _row(one: Json) -> Iterable[Text]:
    yield Text(plain(one["tenant"]))
    state, having, drafters = standing(one)
    shape, style = STATES[state]
    part = f" {having}/{drafters}" if having < drafters else ""
    yield Text(f"{shape} {state.replace('_', ' ')}{part}", style)
    yield Text(number(one["alpha"], 2))
    yield Text(number(one["tau"], 2))
    yield Text(number(one["S"], 2), _worth(one))
    yield Text(f"{number(one['S_low'], 2)}..{number(one['S_high'], 2)}", "dim")
    yield Text(NONE if one["FR"] is None else f"{100 * one['FR']:.1f} %")
    keys = [key for part in one["classes"] for key in part["keys"]]
    yield Text(f"{_range(key['gamma'] for key in keys)}/{_range(key['width'] for key in keys)}")
    yield Text(number(one["requests_per_s"], 1))
    yield Text(number(one["tokens_per_s"], 0))


def _worth(one: Json) -> str:
    """Colour of S: blue above break-even by its bounds, red below."""
    if one["S_high"] is not None and one["S_high"] < 1:
        return "red"
    return "blue" if one["S_low"] is not None and one["S_low"] > 1 else ""


def standing(one: Json) -> tuple[State, int, int]:
    """The worst state of its drafters, each as class and tenant leave it; how many have it, of how many."""
    keys = [(one["state"], part["state"], key["state"]) for part in one["classes"] for key in part["keys"]]
    states = [max(each, key=BEST_FIRST.index) for each in keys] or [one["state"]]
    worst = max(states, key=BEST_FIRST.index)
    return worst, states.count(worst), len(states)


def _range(values: Iterable[int | None]) -> str:
    known = {value for value in values if value is not None}
    if not known:
        return NONE
    low, high = min(known), max(known)
    return f"{low}" if low == high else f"{low}-{high}"


def number(value: float | None, digits: int) -> str:
    """With thousands separators; a dash for what is unknown."""
    return NONE if value is None else f"{value:,.{digits}f}"


def plain(text: str) -> str:
    """Without characters that a terminal would obey: names come from configurations of others."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
