"""The guide for operators knows every alert, as the rules have it, and no other one."""

from __future__ import annotations

import re

import yaml
from support.pages import ROOT

PAGE = (ROOT / "docs" / "operators.md").read_text()
RULES = yaml.safe_load((ROOT / "telemetry" / "dashboards" / "rules.yaml").read_text())
ALERTS = {own["alert"]: own for group in RULES["groups"] for own in group["rules"] if "alert" in own}
PARTS = ("**Means.**", "**By itself.**", "**Do.**")


def sections() -> dict[str, str]:
    """What is said of each alert; some share a section."""
    found = re.split(r"^### (.+)$", PAGE, flags=re.MULTILINE)[1:]
    pairs = zip(found[::2], found[1::2], strict=True)
    return {name: text.partition("\n## ")[0] for names, text in pairs for name in names.split(", ")}


def test_every_alert_has_its_section_with_meaning_and_action() -> None:
    assert sections().keys() == ALERTS.keys()
    bare = {name: [part for part in PARTS if part not in text] for name, text in sections().items()}
    assert {name: parts for name, parts in bare.items() if parts} == {}


def test_the_table_says_what_the_rules_say() -> None:
    rows = re.findall(r"^\| `(Gammaray\w+)` \| (\w+) \| ([\w ]+) \|", PAGE, re.MULTILINE)
    expected = [(name, own["labels"]["severity"], own.get("for", "at once")) for name, own in ALERTS.items()]
    assert sorted(rows) == sorted(expected)
