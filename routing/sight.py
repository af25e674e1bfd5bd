"""What a tick sees of all units, from the evidence; math.md sections 4 and 5."""

from __future__ import annotations

from typing import Any

import numpy as np

from gammaray.routing.book import Book
from gammaray.routing.counting import CONTRACT_FR, GOOD_S
from gammaray.routing.evidence import TESTED, Evidence, Rows
from gammaray.routing.exits import PROBE_TESTED
from gammaray.routing.facts import Columns, depths, fallbacks, probes, rates, unknown
from gammaray.routing.screen import past
from gammaray.routing.states import SERVING, Level
from gammaray.routing.units import Units

TRIED = (*SERVING, "ramp", "probe")
ONLY_TESTED = slice(TESTED, TESTED + 1)


def look(book: Book, evidence: Evidence, touched: Rows, now: float) -> dict[Level, Columns]:
    """`touched`: rows with something new; the other units are only seen where the time of a probe is over."""
    keys = book.keys
    touched = touched[keys.column("used")[touched]]
    serving = touched[keys.within(SERVING)[touched]]
    tried = touched[keys.within(TRIED)[touched] & ~keys.column("candidate")[touched]]
    return {
        "tenant": _tenants(book, evidence, touched, tried, now),
        "class": _classes(book, evidence, serving, tried, now),
        "key": _keys(book, evidence, touched, now),
    }


def _tenants(book: Book, evidence: Evidence, touched: Rows, tried: Rows, now: float) -> Columns:
    columns, owner = unknown(len(book.tenant)), book.keys.column("owner")
    fallbacks(columns.fr_all, evidence, touched, owner[touched])
    fallbacks(columns.fr, evidence, tried, owner[tried])
    ramping = tried[book.tenant.within(["ramp"])[owner[tried]]]
    rates(columns, evidence, ramping, owner[ramping])
    _probes(columns, book, book.tenant, evidence, owner, now)
    return columns


def _classes(book: Book, evidence: Evidence, serving: Rows, tried: Rows, now: float) -> Columns:
    columns, parent = unknown(len(book.classes)), book.keys.column("parent")
    ramps = book.classes.within(["ramp"])[parent]
    ramping = tried[ramps[tried]]
    settled = serving[~ramps[serving] & ~book.keys.column("aside")[serving]]
    rates(columns, evidence, settled, parent[settled])
    rates(columns, evidence, ramping, parent[ramping])
    fallbacks(columns.fr, evidence, ramping, parent[ramping])
    _probes(columns, book, book.classes, evidence, parent, now)
    return columns


def _keys(book: Book, evidence: Evidence, touched: Rows, now: float) -> Columns:
    keys = book.keys
    columns = unknown(len(keys))
    rates(columns, evidence, touched, touched)
    fallbacks(columns.fr, evidence, touched, touched)
    trouble = (columns.s_low > GOOD_S) | (columns.s_high < 1.0) | (columns.fr > CONTRACT_FR)
    deciding = np.flatnonzero(trouble & keys.column("adaptive") & keys.within(["on"]))
    gamma, most = keys.column("gamma")[deciding], keys.column("most")[deciding]
    depths(columns, evidence, deciding, gamma, most)
    _probes(columns, book, keys, evidence, np.arange(len(keys)), now)
    return columns


def _probes(
    columns: Columns, book: Book, units: Units[Any], evidence: Evidence, unit: Rows, now: float
) -> None:
    """Of those that can be judged by all since they began; `unit` [rows] is the one that a key belongs to."""
    late = past(units, now)
    probing = units.column("used") & (units.within(["probe"]) | units.within(["ramp"]) & late)
    if not probing.any():
        return
    rows = np.flatnonzero(probing[unit] & book.keys.column("used"))
    if units is not book.keys:
        rows = rows[book.keys.within(TRIED)[rows] & ~book.keys.column("candidate")[rows]]
    tested = np.bincount(unit[rows], evidence.total(rows, ONLY_TESTED)[:, 0], len(units))
    ready = (tested >= PROBE_TESTED) | ((tested > 0) & late)
    rows = rows[ready[unit[rows]]]
    probes(columns, evidence, rows, unit[rows], units.column("most"))
