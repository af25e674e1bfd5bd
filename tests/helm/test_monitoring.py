"""Prometheus finds the metrics, may read them, and has the rules and dashboards of the checkout."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from support.charts import EVERY, arguments, objects, one, pools, selected
from support.helm import refused, rendered, with_values

from gammaray.telemetry.endpoint import listening_host

DASHBOARDS = Path(__file__).resolve().parents[2] / "telemetry" / "dashboards"
ALL = {"head", "ingress", "h100"}
ON = {"enabled": True}


def ports_of(group: str) -> dict[str, int]:
    (container,) = pools(EVERY)[group]["template"]["spec"]["containers"]
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def test_monitors_ask_ports_that_pods_have() -> None:
    """A target of a port that no pod has is dropped without a word; so is one that listens on 127.0.0.1."""
    for role in ("head", "worker"):
        monitor = one(EVERY, "PodMonitor", f"everything-{role}")["spec"]
        asked = {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]}
        assert "gammaray" in asked
        for group in selected(EVERY, monitor["selector"]["matchLabels"]):
            assert asked <= ports_of(group).keys()
    assert listening_host(arguments(EVERY)["config"]["server"]["host"]) == "0.0.0.0"


def test_a_service_for_who_cannot_monitor_pods() -> None:
    """Of ready pods alone, of the workers alone, or one that its monitor does not find."""
    service = one(EVERY, "Service", "everything-metrics")
    spec = service["spec"]
    assert selected(EVERY, spec["selector"]) == ALL and spec["publishNotReadyAddresses"]
    assert spec["ports"] == [{"name": "gammaray", "port": ports_of("h100")["gammaray"]}]
    monitor = one(EVERY, "ServiceMonitor", "everything")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} == {"gammaray"}


def test_prometheus_has_a_key_where_one_is_asked_for() -> None:
    """With server.protect_metrics every scrape would be a 401."""
    spec = one(EVERY, "PodMonitor", "everything-worker")["spec"]
    ours = {endpoint["port"]: endpoint for endpoint in spec["podMetricsEndpoints"]}
    assert ours["gammaray"]["authorization"] == {
        "credentials": {"name": "operator-keys", "key": "prometheus"}
    }
    assert "authorization" not in ours["metrics"]  # Ray's, which has no use for it
    assert "authorization" in one(EVERY, "ServiceMonitor", "everything")["spec"]["endpoints"][0]


def test_no_metrics_no_targets(tmp_path: Path) -> None:
    """Monitors of Ray alone, which look as if all were watched."""
    values = {"config": {"telemetry": {"prometheus_port": 0}}}
    assert rendered("4", *with_values(values, tmp_path))
    for monitor in ("podMonitor", "serviceMonitor"):
        monitored = values | {"monitoring": {monitor: ON}}
        assert "Ray alone" in refused("4", *with_values(monitored, tmp_path))


def test_rules_and_dashboards_are_those_of_telemetry() -> None:
    """Helm reads {{ $labels.tenant }} as its own where a file is a template."""
    rules = yaml.safe_load((DASHBOARDS / "rules.yaml").read_text())
    assert one(EVERY, "PrometheusRule", "everything")["spec"] == rules
    files = sorted(DASHBOARDS.glob("*.json"))
    assert len(files) > 1
    for file in files:
        data = one(EVERY, "ConfigMap", f"everything-{file.stem}")["data"]
        assert json.loads(data[f"gammaray-{file.name}"]) == json.loads(file.read_text())


def test_the_network_policy_lets_in_who_must() -> None:
    policy = one(EVERY, "NetworkPolicy", "everything")["spec"]
    (ours, http, metrics) = policy["ingress"]
    assert "ports" not in ours and selected(EVERY, ours["from"][0]["podSelector"]["matchLabels"]) == ALL
    ports = ports_of("head")
    assert [port["port"] for port in http["ports"]] == [ports["serve"]]
    wanted = {ports[name] for name in ("gammaray", "metrics", "as-metrics", "dash-metrics")}
    assert {port["port"] for port in metrics["ports"]} == wanted
    (back, names, extra) = policy["egress"]
    assert back["to"] == ours["from"] and {port["port"] for port in names["ports"]} == {53}
    assert extra == {"ports": [{"port": 443}]}
    chat = next(o for o in objects("4", EVERY) if o["kind"] == "Pod")  # kept out, where httpFrom names others
    assert policy["podSelector"]["matchLabels"].items() <= chat["metadata"]["labels"].items()


def test_the_operator_and_the_autoscaler_reach_what_they_need() -> None:
    """The operator could not deploy; the autoscaler, which is on the head alone, could not ask for pods."""
    head, ports = one(EVERY, "NetworkPolicy", "everything-head")["spec"], ports_of("head")
    assert selected(EVERY, head["podSelector"]["matchLabels"]) == {"head"}
    (operator,), (api,) = head["ingress"], head["egress"]
    assert {port["port"] for port in operator["ports"]} == {ports["dashboard"], ports["serve"]}
    assert api["to"] == [{"ipBlock": {"cidr": "10.0.0.1/32"}}]
    found = rendered("4", "--set", "networkPolicy.enabled=true")
    plain = {o["metadata"]["name"]: o["spec"] for o in found if o["kind"] == "NetworkPolicy"}
    assert "egress" not in plain["demo-gammaray-head"]
    assert plain["demo-gammaray"]["ingress"][1]["from"] == [{"podSelector": {}}]
    (peer,) = plain["demo-gammaray-head"]["ingress"][0]["from"]
    assert peer["namespaceSelector"] == {}
    assert peer["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}
