"""A running application under an operator, whose controller is killed: real Ray and HTTP, a small engine."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support import controlled, serving
from support.serving import eventually, word

from gammaray.api.auth import fingerprint
from gammaray.config import parse
from gammaray.routing import audit

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),  # in Ray itself
]
OPERATOR, WEB = "gr-operator", "gr-web"
WORDS = 250  # of the stream that runs meanwhile: 5 s at least
INTERVAL_S = 0.5


class Application:
    def __init__(self, url: str, log: Path, audit_log: Path) -> None:
        self.url, self.log, self.audit_log = url, log, audit_log

    def operate(self, method: str, path: str, body: object = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {OPERATOR}"}
        sent = {} if body is None else {"json": body}
        return httpx.request(method, f"{self.url}/gammaray/v1{path}", headers=headers, timeout=60, **sent)

    def told(self, path: str) -> Any:
        response = self.operate("GET", path)
        assert response.status_code == 200, response.text
        return response.json()

    def ask(self, key: str = WEB, words: int = 2, seed: int = 5) -> httpx.Response:
        body = {"model": "tiny", "prompt": "hi", "max_tokens": words, "seed": seed}
        return httpx.post(
            f"{self.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60
        )

    def stream(self) -> str:
        """The whole text of a long answer."""
        body = {"model": "tiny", "prompt": "hi", "max_tokens": WORDS, "seed": 5, "stream": True}
        headers = {"authorization": f"Bearer {WEB}"}
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", json=body, headers=headers, timeout=60
        ) as answer:
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert events[-1] == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])

    def policies(self) -> list[tuple[int, bool, list[str]]]:
        """That the engine was given: version, speculation, and tenants that are stopped."""
        lines = [line.split(" ") for line in self.log.read_text().splitlines() if line.startswith("policy ")]
        return [(int(version), on == "True", stopped.split(",")) for _, version, on, stopped in lines]

    def records(self) -> list[dict[str, Any]]:
        return list(audit.read(self.audit_log.read_text().splitlines()))


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    import ray

    from gammaray.cluster.run import running

    for module in (serving, controlled):
        ray.cloudpickle.register_pickle_by_value(module)  # workers cannot import it
    folder = tmp_path_factory.mktemp("control")
    config = parse(
        {
            "target": {"model": "tiny"},
            "drafters": {"lookup": {"method": "ngram"}},
            "tenants": {
                "bank": {
                    "api_keys": [{"name": "web", "sha256": fingerprint(WEB.encode())}],
                    "drafter": "lookup",
                }
            },
            "server": {
                "port": serving.free_port(),
                "operator_keys": [{"name": "ops", "sha256": fingerprint(OPERATOR.encode())}],
                "require_api_key": True,
            },
            "controller": {"interval_s": INTERVAL_S, "audit_log": str(folder / "audit.jsonl")},
            "telemetry": {"prometheus_port": 0},
        },
        "test",
    )
    with running(
        config,
        engine_factory=controlled.factory(folder / "log"),
        tokenizer_factory=lambda _: serving.ByteTokenizer(),
    ) as url:
        yield Application(url, folder / "log", folder / "audit.jsonl")
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def controller() -> psutil.Process:
    """Its process, once it is there."""
    found: list[psutil.Process] = []

    def look() -> bool:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::ControllerActor"):
                    found.append(process)
        return bool(found)

    eventually(look)
    return found[0]


def kill() -> None:
    process = controller()
    process.send_signal(signal.SIGKILL)
    eventually(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def test_a_tenant_comes_pays_and_goes_without_a_restart(app: Application) -> None:
    assert app.operate("PUT", "/tenants/shop", {"drafter": "lookup"}).status_code == 200
    key = app.operate("POST", "/tenants/shop/rotate-key").json()["key"]
    eventually(lambda: app.ask(key, words=7).status_code == 200)
    eventually(lambda: app.told("/usage")["tenants"].get("shop", {}).get("output_tokens") == 7)
    used = app.told("/usage")["tenants"]["shop"]
    assert (used["sequences"], used["prompt_tokens"], used["tokens"]) == (1, 2, 9)
    assert app.operate("PATCH", "/tenants/shop", {"limits": {"tokens_per_day": 9}}).status_code == 200
    eventually(lambda: app.ask(key).status_code == 429)
    refused = app.ask(key)
    assert refused.json()["error"]["code"] == "tokens_per_day"
    assert 0 < int(refused.headers["retry-after"]) <= 86_400
    other = app.operate("POST", "/tenants/shop/rotate-key").json()["key"]
    eventually(lambda: (app.ask(key).status_code, app.ask(other).status_code) == (401, 429))
    assert app.operate("DELETE", "/tenants/shop").status_code == 200
    eventually(lambda: app.ask(other).status_code == 401)
    assert app.ask().status_code == 200


def test_the_kill_switch_reaches_the_engine(app: Application) -> None:
    assert app.operate("POST", "/kill-switch", {"on": True}).json()["on"]
    eventually(lambda: app.policies()[-1][1] is False)
    assert app.operate("POST", "/kill-switch", {"on": False}).json()["on"] is False
    eventually(lambda: app.policies()[-1][1] is True)


def test_a_tenant_whose_requests_fall_back_is_turned_off(app: Application) -> None:
    assert app.told("/tenants/bank")["state"] == "on"
    with ThreadPoolExecutor(8) as pool:
        assert {answer.status_code for answer in pool.map(lambda _: app.ask(seed=666), range(40))} == {200}
    eventually(lambda: app.told("/tenants/bank")["state"] == "off")
    eventually(lambda: app.policies()[-1][2] == ["bank"])
    seen = app.told("/overview")
    assert len(seen["replicas"]) == 1
    assert next(one for one in seen["tenants"] if one["tenant"] == "bank")["state"] == "off"
    assert app.records()[-1]["key"][0] == "bank"
    app.operate("POST", "/tenants/bank/unpin")


def pin(app: Application) -> None:
    assert app.operate("POST", "/tenants/bank/pin-off").status_code == 200


def add(app: Application) -> None:
    assert app.operate("PUT", "/tenants/new", {"region": "north"}).status_code == 200


def wait(app: Application) -> None:
    time.sleep(INTERVAL_S)


@pytest.mark.parametrize("moments", [[pin, add], [wait, pin, add], [pin, wait, wait, add, wait]])
def test_a_killed_controller_loses_nothing_and_no_stream_notices(
    app: Application, moments: list[Callable[[Application], None]]
) -> None:
    for path in ("/tenants/bank/unpin", "/tenants/bank/pin-off"):
        app.operate("POST", path)
    app.operate("DELETE", "/tenants/new")
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(app.stream)
        for moment in moments:
            version = app.told("/policies")["version"]
            moment(app)
            kill()
            assert app.told("/policies")["version"] > version
        assert app.told("/tenants/bank")["state"] == "pinned_off"
        assert app.told("/tenants/new")["settings"] == {"region": "north"}
        assert stream.result() == "".join(word(5, i) for i in range(WORDS))
    records = app.records()
    assert [one["number"] for one in records] == list(range(1, len(records) + 1))
    assert audit.replay(records) == []
    assert [one["number"] for one in app.told("/audit?limit=3")["records"]] == [
        len(records) - i for i in range(3)
    ]
    newest = app.told("/policies")["version"]
    eventually(lambda: app.policies()[-1][0] >= newest)
    versions = [version for version, *_ in app.policies()]
    assert versions == sorted(versions)


def test_tokens_count_once_over_kills(app: Application) -> None:
    app.operate("PUT", "/tenants/counted", {})
    key = app.operate("POST", "/tenants/counted/rotate-key").json()["key"]
    eventually(lambda: app.ask(key, words=10).status_code == 200)
    for _ in range(2):
        kill()
        assert app.ask(key, words=10).status_code == 200
    eventually(lambda: app.told("/usage")["tenants"].get("counted", {}).get("sequences") == 3)
    time.sleep(3 * INTERVAL_S)
    used = app.told("/usage")["tenants"]["counted"]
    assert (used["sequences"], used["prompt_tokens"], used["output_tokens"]) == (3, 6, 30)


def test_without_a_controller_requests_go_on(app: Application) -> None:
    """The last test: nothing brings this controller back."""
    import ray

    from gammaray.actors.crew import NAMESPACE
    from gammaray.actors.line import NAME

    policies = app.policies()
    ray.kill(ray.get_actor(NAME, NAMESPACE))
    eventually(lambda: app.operate("GET", "/overview").status_code == 503)
    refused = app.operate("POST", "/kill-switch", {"on": True})
    assert refused.json()["error"]["code"] == "no_controller"
    assert app.ask().status_code == 200
    assert app.policies() == policies
