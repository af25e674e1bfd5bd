"""The script that `helm test` runs, against the real HTTP application with an engine of a few lines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import yaml
from support.helm import CHART, rendered
from support.page import serving
from support.serving import INFO, ByteTokenizer

from gammaray.api.app import create_app
from gammaray.api.auth import fingerprint
from gammaray.config import parse
from gammaray.errors import Overloaded
from gammaray.routing.plan import Router
from gammaray.types import GenerateRequest, Health, ModelInfo, SpeculationStats, TokenChunk

KEY = "gr-chat"
CONFIG = {
    "target": {"model": "tiny"},
    "tenants": {"default": {"api_keys": [{"name": "web", "sha256": fingerprint(KEY.encode())}]}},
    "server": {"require_api_key": True},
}


class Engine:
    """Answers with one text; `finish` error breaks the stream off, `ready` False is a model that loads."""

    def __init__(self, text: str, finish: str, ready: bool) -> None:
        self.text, self.finish, self.ready = text, finish, ready

    async def info(self) -> ModelInfo:
        if not self.ready:
            raise Overloaded("the model loads")
        return INFO

    async def health(self) -> Health:
        return Health("ok", 0.0, 0, 0, 0, 1)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        stats = SpeculationStats(2, 12, 10, 3, 6, 6, 3, lengths=(0, 1, 1), tries=(6,), first_hits=3)
        failed = "boom" if self.finish == "error" else None
        finish: Any = self.finish
        yield TokenChunk(request.request_id, 0, 0, (1, 2), self.text)
        yield TokenChunk(request.request_id, 0, 2, (3,), "", finish=finish, stats=stats, error=failed)


def chat(
    text: str = "Paris", finish: str = "stop", ready: bool = True, key: str | None = KEY
) -> subprocess.CompletedProcess[str]:
    """What the script of the rendered pod does."""
    (pod,) = [o for o in rendered("4") if o["kind"] == "Pod"]
    (container,) = pod["spec"]["containers"]
    config = parse(CONFIG, "test")
    app = create_app(Engine(text, finish, ready), ByteTokenizer(), Router(config), config)
    with serving(app) as url:
        environ = {"GAMMARAY_URL": url, "GAMMARAY_SECONDS": "1"} | ({"GAMMARAY_KEY": key} if key else {})
        assert {entry["name"] for entry in container["env"]} == {"GAMMARAY_URL", "GAMMARAY_SECONDS"}
        command = [sys.executable, *container["command"][1:]]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, env=environ)


def test_an_answer_is_good() -> None:
    done = chat()
    assert (done.returncode, done.stderr) == (0, "") and "'Paris' in 2 rounds" in done.stdout


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"text": "  "}, "no answer"),
        ({"finish": "error"}, 'broke off: [\'{"error":{"message":"boom"'),
        ({"ready": False}, "is not ready after 1 s"),
        ({"key": "gr-other"}, "HTTP 401"),
        ({"key": None}, "HTTP 401"),
    ],
)
def test_anything_else_fails_and_says_why(case: dict[str, Any], why: str) -> None:
    """A test of a release that cannot fail says nothing about it."""
    done = chat(**case)
    assert done.returncode == 1 and why in done.stderr, done.stdout + done.stderr


def test_the_pod_has_a_key_where_one_is_asked_for() -> None:
    """From the Secret that the values name, and never in its text."""
    set_ = "config.server.require_api_key=true,tests.existingSecret=chat-keys,tests.secretKey=web"
    set_ += ",keys.tenants.default.existingSecret=chat-keys"
    (pod,) = [o for o in rendered("4", "--set", set_) if o["kind"] == "Pod"]
    env = {entry["name"]: entry for entry in pod["spec"]["containers"][0]["env"]}
    assert env["GAMMARAY_KEY"]["valueFrom"] == {"secretKeyRef": {"name": "chat-keys", "key": "web"}}


def test_the_script_asks_where_the_service_is() -> None:
    (pod,) = [o for o in rendered("4", "--set", "service.port=80") if o["kind"] == "Pod"]
    env = {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]}
    assert env["GAMMARAY_URL"] == "http://demo-gammaray-serve-svc:80"
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert env["GAMMARAY_SECONDS"] == str(values["tests"]["timeoutSeconds"])
