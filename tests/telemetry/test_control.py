"""Gauges say what the controller's overview says, and nothing that it no longer does."""

from __future__ import annotations

from math import inf

from support.everything import Decision
from support.reports import key, overview, tenant
from support.scraped import samples, value

from gammaray.telemetry import names
from gammaray.telemetry.control import ControlRecorder
from gammaray.telemetry.meters import Meters

LOOKUP = {"tenant": "chat", "class": "default", "drafter": "lookup", "state": "on", "region": "eu"}


def recorder(tenants: int = 200) -> tuple[Meters, ControlRecorder]:
    meters = Meters("controller")
    return meters, ControlRecorder(meters, tenants)


def test_every_number_of_a_key_is_a_gauge() -> None:
    meters, control = recorder()
    control.record(overview([tenant("chat", key(bimodal=True, S=0.9), key("small", state="probe"))]))
    text = meters.text()
    told = key(bimodal=True, S=0.9)
    for field, metric in names.KEY_GAUGES.items():
        assert value(text, metric.prometheus, **LOOKUP) == told[field], field
    assert value(text, names.KEY_STATE.prometheus, **LOOKUP) == 0
    assert value(text, names.KEY_STATE.prometheus, drafter="small", state="probe") == 4
    assert value(text, names.ALPHA_QUANTILE.prometheus, quantile="0.95", drafter="small") == 0.8


def test_every_number_of_a_tenant_is_a_gauge() -> None:
    meters, control = recorder()
    control.record(overview([tenant("chat", state="off", FR=0.2), tenant("code", region=None)]))
    text = meters.text()
    told = tenant("chat", FR=0.2)
    for field, metric in names.TENANT_GAUGES.items():
        assert value(text, metric.prometheus, tenant="chat", state="off", region="eu") == told[field], field
    assert value(text, names.TENANT_STATE.prometheus, tenant="chat") == 7
    assert value(text, names.TENANT_STATE.prometheus, tenant="code", region="") == 0


def test_what_is_not_known_has_no_value() -> None:
    meters, control = recorder()
    phases = {"draft_per_token_over_AR": None}
    unknown = key(S=None, alpha=None, quantiles=dict.fromkeys(("p5", "p50", "p95", "p99")))
    control.record(overview([tenant("chat", unknown, S=None, requests_per_s=None)], phases=phases, memory={}))
    text = meters.text()
    absent = (
        names.KEY_GAUGES["S"],
        names.KEY_GAUGES["alpha"],
        names.TENANT_GAUGES["S"],
        names.ALPHA_QUANTILE,
    )
    assert [samples(text, metric.prometheus) for metric in (*absent, names.DRAFT_TARGET, *names.POOL)] == [
        []
    ] * 8
    assert value(text, names.KEY_GAUGES["tau"].prometheus) == 2.5


def test_a_key_that_changes_its_state_or_goes_leaves_nothing_behind() -> None:
    meters, control = recorder()
    control.record(overview([tenant("chat"), tenant("code")]))
    meters.text()
    control.record(overview([tenant("chat", key(state="off"))]))
    text = meters.text()
    assert [labels["state"] for labels, _ in samples(text, names.KEY_GAUGES["S"].prometheus)] == ["off"]
    assert [labels["tenant"] for labels, _ in samples(text, names.TENANT_GAUGES["S"].prometheus)] == ["chat"]


def test_the_controller_itself() -> None:
    meters, control = recorder()
    memory = {
        "target_kv_used": 30,
        "target_kv_total": 100,
        "draft_kv_used": 1,
        "draft_kv_total": 4,
        "draft_krr": 0.5,
    }
    control.record(overview([], speculation=False, memory=memory))
    text = meters.text()
    told = [value(text, metric.prometheus) for metric in names.CONTROLLER]
    assert told == [0.12, 1_700_000_000.0 - 2, 5.0, 7, 0]
    assert [value(text, metric.prometheus, memory="draft") for metric in names.POOL] == [1, 4, 0.5]


def test_one_that_never_decided_has_no_last_decision() -> None:
    meters, control = recorder()
    control.record(overview([], controller={"state": "silent", "age_s": None}))
    assert samples(meters.text(), names.LAST_TICK.prometheus) == []


def test_the_controller_may_say_the_states_of_more_than_it_shows() -> None:
    meters, control = recorder()
    control.record(overview([tenant("chat")], states={"on": 9000, "off": 1000}))
    assert value(meters.text(), names.KEYS.prometheus, state="on") == 9000
    assert value(meters.text(), names.KEYS.prometheus, state="ramp") == 0


def test_decisions_are_counted_by_rule_and_level() -> None:
    meters, control = recorder()
    control.record(overview([]), [Decision(), Decision(), Decision("speedup", "key")])
    control.record(overview([]), [Decision()])
    text = meters.text()
    assert value(text, names.DECISIONS.series[0], rule="fallback_rate", level="tenant") == 3
    assert value(text, names.DECISIONS.series[0], rule="speedup", level="key") == 1


def test_of_ten_thousand_tenants_the_busiest_are_told_and_all_are_counted() -> None:
    meters, control = recorder(tenants=2)
    every = [
        tenant(f"t{i}", key(state="on" if i % 2 else "off"), requests_per_s=float(i)) for i in range(10_000)
    ]
    control.record(overview(every))
    text = meters.text()
    assert {labels["tenant"] for labels, _ in samples(text, names.KEY_STATE.prometheus)} == {"t9998", "t9999"}
    assert value(text, names.KEYS.prometheus, state="on") == 5000
    assert value(text, names.KEYS.prometheus, state="off") == 5000
    assert value(text, names.KEYS.prometheus, state="shadow") == 0
    assert len(text.splitlines()) < 200


def test_a_tenant_that_was_told_stays_until_it_is_removed() -> None:
    meters, control = recorder(tenants=1)
    told: list[str] = []
    quiet, busy = tenant("quiet", requests_per_s=0.1), tenant("busy", requests_per_s=inf)
    for tenants in ([quiet], [quiet, busy], [busy]):
        control.record(overview(tenants))
        [(labels, _)] = samples(meters.text(), names.TENANT_STATE.prometheus)
        told.append(labels["tenant"])
    assert told == ["quiet", "quiet", "busy"]
