"""The operator's routes over the real controller, without Ray; and the gate, which follows its tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from support.asgi import connect
from support.operations import LocalOperations

from gammaray.actors.briefer import Briefer
from gammaray.api.app import create_app
from gammaray.api.auth import fingerprint
from gammaray.api.tenancy import Tenancy
from gammaray.config import parse
from gammaray.routing.bulletin import Origin
from gammaray.routing.orders import Order
from gammaray.routing.plan import Router
from gammaray.routing.warmup import conversations
from gammaray.routing.window import COLUMN, WIDTH, Window
from gammaray.types import Finished, SpeculationStats

pytestmark = pytest.mark.anyio

OPERATOR, WEB = "gr-operator", "gr-web"
NOON = 1_795_780_800.0  # 2026-11-27 12:00 UTC
CONFIG = {
    "target": {"model": "tiny"},
    "drafters": {"lookup": {"method": "ngram"}},
    "tenants": {
        "bank": {"api_keys": [{"name": "web", "sha256": fingerprint(WEB.encode())}], "drafter": "lookup"}
    },
    "server": {
        "operator_keys": [{"name": "ops", "sha256": fingerprint(OPERATOR.encode())}],
        "require_api_key": True,
    },
}
ASK = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
PREFIX = "/gammaray/v1"


class House:
    """An ingress and a controller in one process. `poll`: as the ingress does once a second."""

    def __init__(self, engine: Any, tokenizer: Any) -> None:
        self.now = NOON
        config = parse(CONFIG, "test")
        router = Router(config)
        tenancy = Tenancy(config, wall=lambda: self.now)
        self.operations = LocalOperations(config, lambda: self.now)
        self.briefer = Briefer(self.operations.desk, router.brief, tenancy)
        self.app = create_app(
            engine,
            tokenizer,
            router,
            config,
            tenancy=tenancy,
            operations=self.operations,
            conversations=lambda count, seed: [one.messages for one in conversations(count, seed)],
        )
        self.number = 0

    def poll(self) -> None:
        self.briefer.round()

    def use(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        self.number += 1
        counts = np.zeros((1, WIDTH))
        counts[0, [COLUMN["finished"], COLUMN["prompt_tokens"], COLUMN["output_tokens"]]] = (
            1,
            prompt_tokens,
            output_tokens,
        )
        window = Window("r", self.number, ((tenant, "default", None),), counts)
        self.operations.desk.tell(Origin("r"), (window,))
        self.operations.desk.tick()

    async def ask(self, key: str) -> httpx.Response:
        async with connect(self.app, key) as http:
            return await http.post("/v1/completions", json=ASK)


@pytest.fixture
def house(engine, tokenizer) -> House:
    return House(engine, tokenizer)


@pytest.fixture
async def ops(house: House) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(house.app, OPERATOR) as http:
        yield http


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


ROUTES = [
    ("GET", "/overview"),
    ("GET", "/tenants"),
    ("GET", "/tenants/bank"),
    ("PUT", "/tenants/bank"),
    ("PATCH", "/tenants/bank"),
    ("DELETE", "/tenants/bank"),
    ("POST", "/tenants/bank/pin-off"),
    ("POST", "/tenants/bank/unpin"),
    ("POST", "/tenants/bank/reset"),
    ("POST", "/tenants/bank/rotate-key"),
    ("POST", "/tenants/bank/roll-back"),
    ("POST", "/tenants/bank/suggestion"),
    ("POST", "/kill-switch"),
    ("GET", "/usage"),
    ("GET", "/policies"),
    ("GET", "/audit"),
    ("GET", "/histograms"),
    ("GET", "/topology"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_operators_only_and_503_without_a_controller(house: House, ops, method: str, path: str) -> None:
    body = {"on": True} if path == "/kill-switch" else {"what": "policy"} if "roll" in path else {}
    sent = {"json": body} if method != "GET" else {}
    async with connect(house.app, WEB) as http:
        assert code(await http.request(method, PREFIX + path, **sent)) == (403, "wrong_key")
    house.operations.gone = True
    assert code(await ops.request(method, PREFIX + path, **sent)) == (503, "no_controller")
    assert (await house.ask(WEB)).status_code == 200  # requests do not notice


async def test_a_tenant_comes_works_and_goes(house: House, ops) -> None:
    made = await ops.put(f"{PREFIX}/tenants/shop", json={"drafter": "lookup"})
    assert made.status_code == 200
    assert "no request can reach it" in made.json()["notes"][0]
    rotated = (await ops.post(f"{PREFIX}/tenants/shop/rotate-key")).json()
    key = rotated["key"]
    assert rotated["name"] == "main" and rotated["sha256"] == fingerprint(key.encode())
    assert (await house.ask(key)).status_code == 401
    house.poll()
    answer = await house.ask(key)
    assert answer.status_code == 200
    assert (await ops.delete(f"{PREFIX}/tenants/shop")).json()["removed"] is True
    assert (await house.ask(key)).status_code == 200  # not heard of yet
    house.poll()
    assert code(await house.ask(key)) == (401, "invalid_api_key")
    assert (await house.ask(WEB)).status_code == 200
    assert code(await ops.delete(f"{PREFIX}/tenants/shop")) == (404, "no_tenant")


async def test_an_open_request_of_a_removed_tenant_finishes(house: House, ops, engine) -> None:
    engine.stop_at = 1
    running = asyncio.create_task(house.ask(WEB))
    while not engine.requests:
        await asyncio.sleep(0)
    await ops.patch(f"{PREFIX}/tenants/default", json={"api_keys": [{"name": "x", "sha256": "0" * 64}]})
    assert (await ops.delete(f"{PREFIX}/tenants/bank")).status_code == 200
    house.poll()
    assert (await house.ask(WEB)).status_code == 401
    engine.go.set()
    assert (await running).status_code == 200


async def test_a_rotated_key_stays_good_for_its_grace(house: House, ops) -> None:
    fresh = (await ops.post(f"{PREFIX}/tenants/bank/rotate-key", json={"grace_s": 60.0})).json()["key"]
    house.poll()
    assert [(await house.ask(key)).status_code for key in (WEB, fresh)] == [200, 200]
    house.now += 61
    house.operations.desk.tick()
    house.poll()
    assert [(await house.ask(key)).status_code for key in (WEB, fresh)] == [401, 200]


async def test_a_key_is_told_once_and_kept_nowhere(house: House, ops) -> None:
    key = (await ops.post(f"{PREFIX}/tenants/bank/rotate-key")).json()["key"]
    told = [(await ops.get(PREFIX + path)).text for method, path in ROUTES if method == "GET"]
    assert key not in "".join(told)
    assert not any(key.encode() in value for value in house.operations.desk._journal._kv.values.values())


async def test_settings_change_without_a_restart(house: House, ops, engine) -> None:
    changed = await ops.patch(
        f"{PREFIX}/tenants/bank", json={"speculation": {"gamma": 2}, "limits": {"max_tokens": 3}}
    )
    assert changed.json()["settings"]["speculation"]["gamma"] == 2
    house.poll()
    refused = await house.ask(WEB)
    assert refused.status_code == 400 and "exceeds 3" in refused.json()["error"]["message"]
    await ops.patch(f"{PREFIX}/tenants/bank", json={"limits": None})
    house.poll()
    assert (await house.ask(WEB)).status_code == 200
    assert engine.requests[-1].plan.gamma == 2


async def test_draft_shapes_roll_back(house: House, ops) -> None:
    async def gamma() -> int:
        house.poll()
        policy = (await ops.get(f"{PREFIX}/tenants/bank")).json()["settings"].get("speculation", {})
        return policy.get("gamma", 4)

    for depth in (2, 7):
        await ops.patch(f"{PREFIX}/tenants/bank", json={"speculation": {"gamma": depth}})
    seen = [await gamma()]
    for _ in range(2):
        back = await ops.post(f"{PREFIX}/tenants/bank/roll-back", json={"what": "policy"})
        assert back.status_code == 200
        seen.append(await gamma())
    assert seen == [7, 2, 4]
    back = await ops.post(f"{PREFIX}/tenants/bank/roll-back", json={"what": "policy"})
    assert code(back) == (404, "no_previous_policy")
    back = await ops.post(f"{PREFIX}/tenants/bank/roll-back", json={"what": "drafter"})
    assert code(back) == (404, "no_previous_version")


async def test_what_the_heat_map_suggests_becomes_a_class(house: House, ops) -> None:
    assert code(await ops.post(f"{PREFIX}/tenants/bank/suggestion")) == (404, "no_suggestion")
    ended = tuple(finished(tokens, 60 if tokens < 4000 else 5) for tokens in range(100, 8000, 40))
    window = Window("r", 1, (), np.zeros((0, WIDTH)), ended)
    house.operations.desk.tell(Origin("r"), (window,))
    house.operations.desk.tick()
    suggested = next(one for one in (await ops.get(f"{PREFIX}/overview")).json()["heatmap"] if one["flagged"])
    applied = await ops.post(f"{PREFIX}/tenants/bank/suggestion")
    first = applied.json()["settings"]["classes"][0]
    tokens = suggested["suggestion"]["prompt_tokens_over"]
    assert first == {"name": "long", "when": {"prompt_tokens_over": tokens}}
    assert 3000 < tokens < 5000


def finished(prompt_tokens: int, accepted: int) -> Finished:
    stats = SpeculationStats(rounds=30, tries=(100,), first_hits=accepted)
    key = {"tenant": "bank", "request_class": "default", "drafter": "lookup"}
    return Finished(
        **key,
        state="on",
        shadow=False,
        reason="stop",
        fallback=None,
        index=0,
        prompt_tokens=prompt_tokens,
        cached_tokens=0,
        output_tokens=30,
        stats=stats,
        total_s=1.0,
    )


async def test_a_warm_up_begins_waits_for_a_busy_engine_and_is_cancelled(ops, engine) -> None:
    started = await ops.post(f"{PREFIX}/tenants/bank/warm-up", json={"requests": 3})
    assert (started.status_code, started.json()["total"]) == (200, 3)
    await asyncio.sleep(0.01)
    assert (await ops.get(f"{PREFIX}/tenants/bank/warm-up")).json()["state"] == "running"
    assert (await ops.delete(f"{PREFIX}/tenants/bank/warm-up")).json()["state"] == "cancelled"
    assert engine.requests == []  # others wait for this engine
    assert code(await ops.post(f"{PREFIX}/tenants/nobody/warm-up")) == (404, "no_tenant")
    assert code(await ops.delete(f"{PREFIX}/tenants/default/warm-up")) == (404, "no_warmup")


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("PUT", "/tenants/shop", {"speculation": {"gama": 3}}, "tenants.shop.speculation.gama"),
        ("PATCH", "/tenants/bank", {"drafter": "nobody"}, "tenants.bank.drafter"),
        ("PUT", "/tenants/a%20b", {}, "tenant"),
        ("PUT", "/tenants/shop", {"pool": {"workers": 3}}, "pool"),
        ("POST", "/tenants/bank/rotate-key", {"grace": 3}, "grace"),
        ("POST", "/kill-switch", {}, "on"),
        ("POST", "/profile", {"steps": 0}, "steps"),
    ],
)
async def test_what_is_wrong_is_named(ops, method: str, path: str, body: object, param: str) -> None:
    response = await ops.request(method, PREFIX + path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/tenants/nobody", "/tenants/bank/nothing"])
async def test_what_there_is_not(ops, path: str) -> None:
    assert (await ops.get(PREFIX + path)).status_code in (404, 405)


async def test_the_tokens_of_a_day(house: House, ops) -> None:
    await ops.patch(f"{PREFIX}/tenants/bank", json={"limits": {"tokens_per_day": 100}})
    house.use("bank", 60, 39)
    house.poll()
    assert (await house.ask(WEB)).status_code == 200
    house.use("bank", 1, 0)
    house.poll()
    over = await house.ask(WEB)
    assert code(over) == (429, "tokens_per_day")
    assert over.headers["retry-after"] == str(12 * 3600)
    assert (await ops.get(f"{PREFIX}/usage")).json()["tenants"]["bank"] == {
        "sequences": 2,
        "prompt_tokens": 61,
        "output_tokens": 39,
        "tokens": 100,
    }
    house.now = NOON + 12 * 3600  # midnight, and nobody told the ingress yet
    assert (await house.ask(WEB)).status_code == 200
    house.operations.desk.tick()
    house.poll()
    assert (await house.ask(WEB)).status_code == 200
    assert (await ops.get(f"{PREFIX}/usage")).json()["tenants"] == {}
    yesterday = (await ops.get(f"{PREFIX}/usage", params={"day": "2026-11-27"})).json()
    assert yesterday["tenants"]["bank"]["tokens"] == 100
    assert (await ops.get(f"{PREFIX}/usage", params={"day": "today"})).json()["error"]["param"] == "day"


async def test_the_kill_switch_and_pins_reach_the_next_plan(house: House, ops, engine) -> None:
    async def drafter() -> str | None:
        house.poll()
        assert (await house.ask(WEB)).status_code == 200
        return engine.requests[-1].plan.drafter

    assert await drafter() == "lookup"
    assert (await ops.post(f"{PREFIX}/kill-switch", json={"on": True})).json()["on"] is True
    assert await drafter() is None
    assert (await ops.post(f"{PREFIX}/kill-switch", json={"on": False})).json()["on"] is False
    assert await drafter() == "lookup"
    assert (await ops.post(f"{PREFIX}/tenants/bank/pin-off")).json()["changed"] == 1
    assert await drafter() is None
    assert (await ops.get(f"{PREFIX}/tenants/bank")).json()["state"] == "pinned_off"
    assert (await ops.post(f"{PREFIX}/tenants/bank/unpin")).json()["changed"] == 1
    assert await drafter() == "lookup"  # a probe
    rules = [record["rule"] for record in (await ops.get(f"{PREFIX}/audit")).json()["records"]]
    assert rules == ["operator"] * 4
    assert len((await ops.get(f"{PREFIX}/audit", params={"limit": 2})).json()["records"]) == 2


async def test_a_class_or_a_drafter_is_pinned_alone(house: House, ops) -> None:
    await ops.put(f"{PREFIX}/tenants/shop", json={"drafter": "lookup", "classes": [{"name": "long"}]})
    await ops.post(f"{PREFIX}/tenants/shop/pin-off", json={"class": "long"})
    keys = (await ops.get(f"{PREFIX}/policies")).json()["keys"]
    assert {(key["tenant"], key["class"]) for key in keys if key["state"] == "pinned_off"} == {
        ("shop", "long")
    }


async def test_a_violated_gate_holds_until_a_reset(house: House, ops) -> None:
    key = {"class": "default", "drafter": "lookup"}
    house.operations.desk.order(Order("violation", "bank", "default", "lookup"))

    async def state() -> str:
        keys = (await ops.get(f"{PREFIX}/policies")).json()["keys"]
        return next((one["state"] for one in keys if one["tenant"] == "bank" and one["drafter"]), "on")

    assert await state() == "off"
    assert (await ops.post(f"{PREFIX}/tenants/bank/unpin", json=key)).json()["changed"] == 0
    assert await state() == "off"
    assert (await ops.post(f"{PREFIX}/tenants/bank/reset", json=key)).json()["changed"] == 1
    assert await state() == "on"


@pytest.mark.parametrize(
    "query",
    ["audit?limit=0", "audit?limit=1001", "overview?limit=-1", "usage?day=2026-13-45", "usage?day=monday"],
)
async def test_a_query_that_makes_no_sense_is_a_400(ops, query: str) -> None:
    response = await ops.get(f"{PREFIX}/{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("limit", "day")


async def test_metrics_are_text(engine, tokenizer) -> None:
    config = parse(CONFIG, "test")
    app = create_app(engine, tokenizer, Router(config), config, metrics=lambda: b"up 1\n")
    async with connect(app) as http:
        response = await http.get("/metrics")
    assert response.content == b"up 1\n"
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
