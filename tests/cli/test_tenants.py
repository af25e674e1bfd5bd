"""`gammaray tenants` against a server in this process, over real HTTP; `replay` without any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from support.operations import LocalOperations
from support.serving import ByteTokenizer, free_port

from gammaray.actors.journal import AuditLog, Journal
from gammaray.api.app import create_app
from gammaray.api.auth import fingerprint
from gammaray.config import parse
from gammaray.errors import InvalidRequest
from gammaray.routing.orders import Order
from gammaray.routing.plan import Router
from gammaray.tenants_cli import patch

KEY = "gr-operator"
CONFIG = {
    "target": {"model": "tiny"},
    "drafters": {"lookup": {"method": "ngram"}},
    "tenants": {"bank": {"drafter": "lookup"}},
    "server": {"operator_keys": [{"name": "ops", "sha256": fingerprint(KEY.encode())}]},
}


class Case:
    """A controller behind HTTP."""

    def __init__(self) -> None:
        config = parse(CONFIG, "test")
        self.operations = LocalOperations(config, time.time)
        app = create_app(None, ByteTokenizer(), Router(config), config, operations=self.operations)  # type: ignore[arg-type]
        self.port = free_port()
        self.server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="warning"))

    def run(
        self, *arguments: str, key: str | None = KEY, url: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return gammaray("tenants", *arguments, "--url", url or f"http://127.0.0.1:{self.port}", key=key)

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)


def gammaray(*arguments: str, key: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "GAMMARAY_OPERATOR_KEY"}
    if key is not None:
        environment["GAMMARAY_OPERATOR_KEY"] = key
    command = [sys.executable, "-m", "gammaray.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@pytest.fixture
def case() -> Iterator[Case]:
    case = Case()
    thread = threading.Thread(target=case.server.run, daemon=True)
    thread.start()
    while not case.server.started:
        time.sleep(0.01)
    yield case
    case.server.should_exit = True
    thread.join(10)


def test_a_tenant_from_its_first_to_its_last_day(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text("shop: {drafter: lookup, limits: {tokens_per_day: 1000}}\n")
    assert case.json("add", str(file))["tenants"][0]["revision"] == 1
    lines = case.run("list").stdout.splitlines()
    assert [line.split() for line in lines if line.startswith(("tenant", "shop"))] == [
        ["tenant", "state", "drafter", "keys", "tokens_today", "tokens_per_day"],
        ["shop", "on", "lookup", "0", "0", "1000"],
    ]
    key = case.run("rotate-key", "shop").stdout.splitlines()
    assert key[0].startswith("key:  gr-") and key[1] == "name: main"
    assert case.run("set", "shop", "speculation.gamma=3", "limits.tokens_per_day=null").returncode == 0
    shown = case.json("show", "shop")
    assert shown["settings"]["speculation"] == {"gamma": 3}
    assert "limits" not in shown["settings"] or shown["settings"]["limits"] == {}
    assert "gamma: 3" in case.run("show", "shop").stdout
    assert case.json("remove", "shop")["removed"]
    assert case.run("show", "shop").returncode == 2


def test_a_file_with_a_fault_says_what_was_done_before_it(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("good: {drafter: lookup}\nbad: {drafter: nope}\n")
    done = case.run("add", str(file))
    assert done.returncode == 2
    assert "bad: " in done.stderr and "(done before it: good)" in done.stderr
    assert case.json("show", "good")["tenant"] == "good"


def test_a_reset_begins_anew(case: Case) -> None:
    assert case.json("pin-off", "bank", "--drafter", "lookup")["changed"] == 1
    assert case.run("reset", "bank", "--drafter", "lookup").stdout.startswith("bank: reset (policy ")


def test_pins_and_the_kill_switch(case: Case) -> None:
    assert case.json("pin-off", "bank")["changed"] == 1
    assert case.json("show", "bank")["state"] == "pinned_off"
    assert case.run("unpin", "bank").stdout.startswith("bank: unpinned (policy ")
    assert case.json("pin-off", "bank", "--drafter", "lookup")["drafter"] == "lookup"
    assert case.run("kill-switch", "on").stdout == "nobody speculates\n"
    assert not case.operations.desk.policy.speculation
    assert case.json("kill-switch", "off") == {
        "on": False,
        "changed": 1,
        "version": case.operations.desk.policy.version,
    }
    assert case.run("usage").stdout.splitlines()[1].split() == [
        "tenant",
        "sequences",
        "prompt_tokens",
        "output_tokens",
        "tokens",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["set", "bank", "speculation.gama=3"], 2, "did you mean 'gamma'?"),
        (["set", "bank", "gamma"], 2, "write a setting as KEY=VALUE"),
        (["show", "nobody"], 2, "there is no tenant 'nobody'"),
        (["kill-switch", "maybe"], 2, "on or off"),
        (["usage", "--day", "monday"], 2, "day: Input should be a valid date"),
        (["add", "/nowhere.yaml"], 2, "cannot read '/nowhere.yaml'"),
    ],
)
def test_bad_input(case: Case, arguments: list[str], code: int, says: str) -> None:
    done = case.run(*arguments)
    assert done.returncode == code
    assert says in done.stderr and "Traceback" not in done.stderr


def test_who_may_not_and_what_is_not_there(case: Case) -> None:
    assert "API key is needed" in (done := case.run("list", key=None)).stderr and done.returncode == 2
    assert "nobody has this API key" in (done := case.run("list", key="gr-x")).stderr and done.returncode == 2
    done = case.run("list", url="http://127.0.0.1:9")
    assert done.returncode == 1 and "no server answers at" in done.stderr
    case.operations.gone = True
    done = case.run("list")
    assert done.returncode == 1 and "controller does not answer" in done.stderr


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of two servers, one after the other, in one file."""
    path = tmp_path / "audit.jsonl"
    for _ in range(2):
        operations = LocalOperations(parse(CONFIG, "test"), time.time)
        operations.desk._journal = Journal(operations.desk._journal._kv, AuditLog(str(path)))
        operations.desk.order(Order("pin_off", "bank"))
        operations.desk.order(Order("unpin", "bank"))
    return path


def test_every_decision_comes_out_again(log: Path) -> None:
    done = gammaray("tenants", "replay", str(log))
    assert (done.returncode, done.stdout) == (0, "4 decisions, 0 come out differently\n")
    with log.open("a") as file:
        file.write('{"number": 5, "ru')  # the controller was killed
    assert gammaray("tenants", "replay", str(log)).returncode == 0


def test_a_decision_that_does_not_follow_is_found(log: Path) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[2]["new"]["state"] = "ramp"
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = gammaray("tenants", "replay", str(log), "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["decisions"] == 4
    assert [one["line"] for one in found["mismatches"]] == [3, 4]


def test_what_is_no_audit_log(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    file.write_text("no JSON\n{}\n")
    done = gammaray("tenants", "replay", str(file))
    assert done.returncode == 2 and "line 1 of the audit log is not JSON" in done.stderr
    assert gammaray("tenants", "replay", str(tmp_path / "nothing")).returncode == 2


@pytest.mark.parametrize(
    ("settings", "tree"),
    [
        (["a.b=3", "a.c=null"], {"a": {"b": 3, "c": None}}),
        (["limits={max_tokens: 5}"], {"limits": {"max_tokens": 5}}),
        (["name=a=b"], {"name": "a=b"}),
        (["on=false", "list=[1, x]"], {"on": False, "list": [1, "x"]}),
    ],
)
def test_settings_as_a_patch(settings: list[str], tree: object) -> None:
    assert patch(settings) == tree


@pytest.mark.parametrize("setting", ["", "=3", "a", "a..b=3", ".a=3", "a.=3"])
def test_what_is_no_setting(setting: str) -> None:
    with pytest.raises(InvalidRequest, match="KEY=VALUE"):
        patch([setting])


@pytest.mark.parametrize("settings", [["a=0", "a.b=1"], ["a.b=1", "a=0"], ["a.b=1", "a={c: 2}"]])
def test_settings_that_contradict_each_other(settings: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="contradicts another setting"):
        patch(settings)


@given(
    st.dictionaries(
        st.from_regex("[a-z]{1,3}(\\.[a-z]{1,3}){0,2}", fullmatch=True), st.integers(), max_size=4
    )
)
def test_every_setting_arrives_or_the_contradiction_is_named(values: dict[str, int]) -> None:
    try:
        tree = patch(f"{path}={value}" for path, value in values.items())
    except InvalidRequest:
        inner = {path.rpartition(".")[0] for path in values} | {path.split(".")[0] for path in values}
        assert inner & set(values)
        return
    for path, value in values.items():
        found: Any = tree
        for part in path.split("."):
            found = found[part] if isinstance(found, dict) else None
        assert found == value
