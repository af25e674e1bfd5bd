"""Settings that the documentation shows are settings that there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter
from support.pages import PAGES, ROOT, blocks

from gammaray.config import Class, Config, Tenant, parse

DOTTED = re.compile(r"`((?:target|server|telemetry|controller|placement)\.[a-z_.]+)(?:: [^`]*)?`")
SPECULATION = re.compile(r"`(speculation\.[a-z_.]+)(?:: [^`]*)?`")
SETTINGS = [
    (f"{block.place}", yaml.safe_load(block.text))
    for page in PAGES
    if page.parent.name != "gammaray"  # the chart's values have a schema of their own
    for block in blocks(page)
    if block.language == "yaml"
]


def exists(name: str, model: type[BaseModel]) -> bool:
    """Whether a dotted name leads to a field."""
    own: Any = model
    for part in name.split("."):
        fields = getattr(own, "model_fields", {})
        if part not in fields:
            return False
        own = fields[part].annotation
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_named_setting_exists(page: Path) -> None:
    text = page.read_text()
    wrong = [name for name in DOTTED.findall(text) if not exists(name, Config)]
    assert wrong + [name for name in SPECULATION.findall(text) if not exists(name, Tenant)] == []


def test_a_setting_that_does_not_exist_is_seen() -> None:
    assert DOTTED.findall("`target.kv.prefix_cache: false`, `server.prot`") == [
        "target.kv.prefix_cache",
        "server.prot",
    ]
    assert exists("target.kv.prefix_cache", Config) and not exists("server.prot", Config)


@pytest.mark.parametrize(("place", "shown"), SETTINGS, ids=[place for place, _ in SETTINGS])
def test_shown_settings_are_accepted(place: str, shown: dict[str, Any]) -> None:
    """Parts of a configuration, of a tenant, or the chart's values, of which `config` is looked at."""
    values = configuration_in(shown)
    if {*values} <= {*Config.model_fields}:
        named = {name: {"method": "ngram"} for name in ("lookup", "small", "head", "independent")}
        drafters = named | values.get("drafters", {})
        parse({"target": {"model": "x"}, **values, "drafters": drafters}, place)
    elif {*values} <= {"classes"}:
        TypeAdapter(list[Class]).validate_python(values["classes"])
    else:
        Tenant.model_validate(values)


def configuration_in(shown: dict[str, Any]) -> dict[str, Any]:
    """Of the chart's values (keys come from Secrets) or of a declaration to Ray Serve; else all of it."""
    if "applications" in shown:
        return configuration_in(shown["applications"][0]["args"])
    if not {"image", "pools", "keys"} & {*shown}:
        return shown
    config: dict[str, Any] = shown.get("config", {})
    return config | {"server": {**config.get("server", {}), "require_api_key": False}}
