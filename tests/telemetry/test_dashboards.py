"""Dashboards and rules ask for what there is, in a language that Prometheus speaks."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from support.everything import everything
from support.observed import queries
from support.promtool import prometheus

from gammaray.telemetry import names
from gammaray.telemetry.endpoint import Endpoint
from gammaray.telemetry.sockets import gather

FOLDER = Path(__file__).parents[2] / "telemetry" / "dashboards"
BOARDS = sorted(FOLDER.glob("*.json"))
RULES = FOLDER / "rules.yaml"
SCRAPES, SCRAPE_S = 8, 0.5
WAIT_S = 60.0
NEVER_BY_DAY = "gammaray:alpha:quantile1d"  # once an hour; its values are in rules_week_test.yaml


def panels(board: Path) -> Iterator[dict[str, Any]]:
    yield from (panel for panel in json.loads(board.read_text())["panels"] if panel["type"] != "row")


def rules() -> list[dict[str, str]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


QUERIES = queries(tenant="chat")
EXPRESSIONS = QUERIES + [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
RECORDED = {rule["record"] for rule in rules() if "record" in rule}
SERIES = {series: metric for metric in names.METRICS for series in metric.series}


def asked(expression: str) -> set[str]:
    """The series that it asks for."""
    return set(
        re.findall(r"\bgammaray:[a-z0-9_:]+|\b(?:gammaray|gen_ai|http)_[a-z0-9_]+(?=[{\[) ]|$)", expression)
    ) - {label for labels in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for label in labels.split(", ")}


def test_there_are_some() -> None:
    assert {board.stem for board in BOARDS} == {"overview", "tenant"} and len(EXPRESSIONS) > 80


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_it_is_promql_over_metrics_that_exist(where: str, expression: str) -> None:
    promql_parser.parse(expression)
    assert asked(expression), "it asks for nothing of ours"
    assert asked(expression) <= SERIES.keys() | RECORDED


def test_every_metric_is_on_a_dashboard() -> None:
    used = {SERIES[series] for _, expression in QUERIES for series in asked(expression) & SERIES.keys()}
    assert [m.name for m in names.METRICS if m not in used] == [names.INTERVAL.name]  # an alert needs that


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_it_is_a_dashboard_that_grafana_can_place(board: Path) -> None:
    data = json.loads(board.read_text())
    ids = [panel["id"] for panel in data["panels"]]
    assert len(ids) == len(set(ids)) and data["uid"] and data["schemaVersion"] >= 39
    places = [panel["gridPos"] for panel in data["panels"]]
    cells = [
        (x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert all(p["x"] + p["w"] <= 24 for p in places)
    variables = {variable["name"] for variable in data["templating"]["list"]}
    text = json.dumps(data["panels"])
    assert set(re.findall(r"\$\{?([a-z]+)", text)) <= variables


def test_a_real_prometheus_has_a_series_for_every_query(tmp_path: Path) -> None:
    with everything() as (processes, directory):
        processes.live(time.time())  # the first increase needs a value to start from
        endpoint = Endpoint("127.0.0.1", 0, lambda: gather(directory))
        try:
            with prometheus(tmp_path, endpoint.port, RULES) as server:
                for _ in range(SCRAPES):
                    time.sleep(SCRAPE_S)
                    processes.live(time.time())
                asking = [(where, q) for where, q in QUERIES if NEVER_BY_DAY not in q]
                asking += [(name, name) for name in RECORDED - {NEVER_BY_DAY}]
                ends = time.monotonic() + WAIT_S
                while asking := [(where, q) for where, q in asking if not answered(server.query(q))]:
                    assert time.monotonic() < ends, asking
                    processes.live(time.time())
                    time.sleep(SCRAPE_S)
        finally:
            endpoint.close()


def answered(series: list[Any]) -> bool:
    """There is one, and it is a number."""
    return any(one["value"][1] != "NaN" for one in series)
