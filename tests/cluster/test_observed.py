"""What monitoring sees of a live server under load: Prometheus, traces, page, terminal, a profile."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import observed_parts, serving, soak
from support.observed import OPERATOR, Live, keys_of, of_trace, queries
from support.observed_parts import GOOD, POOR
from support.otlp import Receiver, receiver
from support.promtool import prometheus
from support.serving import eventually
from typer.testing import CliRunner

from gammaray import cli
from gammaray.config import Config, parse
from gammaray.telemetry import names

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),  # in Ray itself
]
BANK, SHOP = "bank", "shop"
TENANTS = {BANK: GOOD, SHOP: POOR}  # and the drafter of each
PROMPT = "this is what all of them begin with, so that its KV is kept: "
TOKENS = 64
READERS = 2  # of each tenant
INTERVAL_S = 0.5  # of the controller
RULES = Path(__file__).parents[2] / "telemetry" / "dashboards" / "rules.yaml"
PROXY = "proxy_http_request"  # Serve's span
PHASES = {names.SPAN_SCHEDULE, names.SPAN_DRAFT, names.SPAN_VERIFY, names.SPAN_ACCEPT}


@dataclass(frozen=True)
class Observed:
    live: Live
    collector: Receiver


@pytest.fixture(scope="module")
def observed() -> Iterator[Observed]:
    """Requests come all the time."""
    import ray

    from gammaray.cluster.run import running

    assert not ray.is_initialized(), "another cluster's fixture is still there"
    keys, hashes = keys_of(TENANTS)
    with receiver() as collector, soak.surroundings():
        config = settings(hashes, collector.endpoint)
        factories: dict[str, Any] = {
            "engine_factory": observed_parts.engine,
            "tokenizer_factory": observed_parts.tokenizer,
        }
        with running(config, **factories) as url:
            live = Live(url, config.target.model, config.telemetry.prometheus_port, keys)
            with load(live):
                yield Observed(live, collector)


def settings(hashes: Mapping[str, Any], endpoint: str) -> Config:
    return parse(
        {
            "target": {"model": "tiny"},
            "drafters": {name: {"method": "ngram"} for name in TENANTS.values()},
            "tenants": {
                name: {"drafter": drafter, "api_keys": hashes[name], "region": "north"}
                for name, drafter in TENANTS.items()
            },
            "server": {
                "port": serving.free_port(),
                "require_api_key": True,
                "operator_keys": hashes[OPERATOR],
            },
            "controller": {"interval_s": INTERVAL_S},
            "telemetry": {
                "otlp_endpoint": endpoint,
                "trace_ratio": 1.0,
                "prometheus_port": serving.free_port(),
            },
        },
        "test",
    )


@contextmanager
def load(live: Live) -> Iterator[None]:
    """Readers of every tenant, until the end."""
    ended = threading.Event()

    def read(tenant: str, number: int) -> None:
        while not ended.is_set():
            assert live.ask(tenant, f"{PROMPT}{number}", max_tokens=TOKENS, seed=number).status_code == 200

    with ThreadPoolExecutor(len(TENANTS) * READERS) as pool:
        readers = [pool.submit(read, tenant, i) for tenant in TENANTS for i in range(READERS)]
        try:
            yield
        finally:
            ended.set()
    for reader in readers:
        reader.result()


def test_the_page_and_the_terminal_show_the_tenants(observed: Observed) -> None:
    """The first test: a tenant that speculates badly is soon turned off, and its numbers are of a minute."""
    live = observed.live
    eventually(lambda: has_numbers(live.operate("GET", "/gammaray/v1/overview").json()))
    command = ["top", "--url", live.url, "--operator-key", live.keys[OPERATOR], "--once", "--json"]
    shown = CliRunner().invoke(cli.app, command)
    assert shown.exit_code == 0, shown.output
    first, second = (json.loads(event) for event in live.events(2))
    assert first["time"] < second["time"]
    for seen in (json.loads(shown.output), first, second):
        assert has_numbers(seen)
        assert seen["controller"]["state"] == "ok" and seen["interval_s"] == INTERVAL_S
        assert len(seen["replicas"]) == 1 and any(tick["tokens_per_s"] for tick in seen["throughput"])
        tenants = {one["tenant"]: one for one in seen["tenants"]}
        assert tenants[BANK]["alpha"] > 0.6 > 0.3 > tenants[SHOP]["alpha"]
        assert tenants[BANK]["tau"] > tenants[SHOP]["tau"] >= 1
        for tenant, drafter in TENANTS.items():
            [key] = [key for one in tenants[tenant]["classes"] for key in one["keys"]]
            assert (key["drafter"], key["method"], key["version"]) == (drafter, "ngram", "1")
            assert key["alpha"] == tenants[tenant]["alpha"]
            assert tenants[tenant]["tpot_ms"]["p50"] > 0 and tenants[tenant]["ttft_ms"]["p99"] > 0


def has_numbers(seen: dict[str, Any]) -> bool:
    """Of every tenant that is asked for something."""
    told = ("alpha", "tau", "S", "S_low", "S_high", "FR", "SE", "requests_per_s", "tokens_per_s")
    asked = [one for one in seen["tenants"] if one["tenant"] in TENANTS]
    return all(isinstance(one[name], float) for one in asked for name in told)


def test_every_query_of_the_dashboards_has_a_series(observed: Observed, tmp_path: Path) -> None:
    """Of the tenant `bank`. Requests of `shop` break before an acceptance of their own can be told."""
    for order in ("pin-off", "unpin"):  # something is decided, whatever the controller thinks
        assert observed.live.operate("POST", f"/gammaray/v1/tenants/{SHOP}/{order}").status_code == 200
    with prometheus(tmp_path, observed.live.port, RULES) as server:
        asking, ends = queries(tenant=BANK), time.monotonic() + serving.PATIENCE_S
        while asking := [(where, query) for where, query in asking if not numbers(server.query(query))]:
            assert time.monotonic() < ends, asking
            time.sleep(INTERVAL_S)
        alphas = numbers(server.query("max by (tenant) (gammaray_tenant_alpha)"))
    assert alphas[BANK] > 0.6


def numbers(series: list[Any]) -> dict[str, float]:
    """By tenant, if they are told apart."""
    found = {one["metric"].get("tenant", ""): float(one["value"][1]) for one in series}
    return {tenant: value for tenant, value in found.items() if value == value}


def test_a_trace_goes_from_the_proxy_to_the_rounds_of_the_engine(observed: Observed) -> None:
    trace_id, client = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace_id}-{client}-01"}
    assert observed.live.ask(BANK, PROMPT, max_tokens=TOKENS, headers=headers).status_code == 200
    last = {PROXY, names.SPAN_REQUEST, names.SPAN_DECODE}  # to end, of each process
    eventually(
        lambda: last <= {kind(span) for sent in of_trace(observed.collector, trace_id) for span in sent}
    )
    exports = of_trace(observed.collector, trace_id)
    spans = {span.span_id: span for sent in exports for span in sent}

    def way(span: Any) -> list[str]:
        """From the client to this span."""
        parent = spans.get(span.parent_span_id)
        return [*(way(parent) if parent else [span.parent_span_id.hex()]), kind(span)]

    [request] = [span for span in spans.values() if kind(span) == names.SPAN_REQUEST]
    assert way(request)[:2] == [client, PROXY]
    below = [way(span)[len(way(request)) :] for span in spans.values() if names.SPAN_REQUEST in way(span)]
    once = [[names.SPAN_QUEUE], [names.SPAN_PREFILL], [names.SPAN_DECODE]]
    assert [one for one in below if one in once] == once
    rounds = [one for one in below if one[:1] == [names.SPAN_ROUND]]
    assert rounds.count([names.SPAN_ROUND]) >= 4
    assert {one[1] for one in rounds if len(one) == 2} == PHASES
    # Three processes sent them:
    sent = [{kind(span) for span in export} for export in exports]
    assert not any(len(kinds & last) > 1 for kinds in sent)


def kind(span: Any) -> str:
    """Serve puts the deployment and the route behind it."""
    return str(span.name.split(" ")[0])


def test_a_profile_is_a_trace_of_kernels_without_values(observed: Observed) -> None:
    answer = observed.live.operate("POST", "/gammaray/v1/profile", {"steps": 20})
    assert answer.status_code == 200, answer.text
    events = json.loads(Path(answer.json()["file"]).read_text())["traceEvents"]
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    assert len(operators) > 100 and all(event["dur"] >= 0 for event in operators)
    told = {name for event in events for name in event.get("args", {})}
    assert told and not [name for name in told if "Input" in name or "Concrete" in name or "Stack" in name]


def test_the_kill_switch_is_seen(observed: Observed) -> None:
    live = observed.live
    assert live.count("gammaray_controller_speculation") == 1
    version = live.count("gammaray_controller_policy")
    assert live.operate("POST", "/gammaray/v1/kill-switch", {"on": True}).status_code == 200
    eventually(lambda: live.count("gammaray_controller_speculation") == 0)
    assert live.count("gammaray_controller_policy") > version
    drafted = -1.0

    def quiet() -> bool:
        """No draft since the last look."""
        nonlocal drafted
        before, drafted = drafted, live.count("gammaray_spec_drafted_total")
        return bool(before == drafted)

    eventually(quiet)
    emitted = live.count("gammaray_spec_emitted_total")
    eventually(lambda: live.count("gammaray_spec_emitted_total") > emitted + 10 * TOKENS)
    assert live.count("gammaray_spec_drafted_total") == drafted
