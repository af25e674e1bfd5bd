"""The alerts, by Prometheus' own tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.promtool import promtool

HERE = Path(__file__).parent
RULES = HERE.parents[1] / "telemetry" / "dashboards" / "rules.yaml"
CASES = sorted(HERE.glob("rules*_test.yaml"))


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_they_are_valid() -> None:
    assert "SUCCESS" in promtool("check", "rules", RULES)


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_they_fire_when_they_should(cases: Path) -> None:
    assert "SUCCESS" in promtool("test", "rules", cases)


def test_every_alert_has_a_case() -> None:
    cases = "".join(path.read_text() for path in CASES)
    assert [rule["alert"] for rule in alerts() if rule["alert"] not in cases] == []


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_every_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    assert {"summary", "description", "runbook"} <= rule["annotations"].keys()
