"""HTTP requests by tenant, route and status; nothing that a client chooses can grow without bound."""

from __future__ import annotations

import pytest
from support.scraped import samples, value

from gammaray.telemetry import names
from gammaray.telemetry.ingress import ROUTES, IngressRecorder
from gammaray.telemetry.meters import Meters


def recorder(tenants: int = 200) -> tuple[Meters, IngressRecorder]:
    meters = Meters("ingress")
    return meters, IngressRecorder(meters, tenants, lambda: 4)


def test_a_request_counts_by_tenant_route_and_status() -> None:
    meters, ingress = recorder()
    for status, seconds in ((200, 0.3), (200, 0.5), (429, 0.001)):
        ingress.record("chat", "POST", "/v1/completions", status, seconds)
    text = meters.text()
    labels = {"tenant": "chat", "http_route": "/v1/completions", "http_request_method": "POST"}
    assert value(text, names.HTTP.series[2], http_response_status_code="200", **labels) == 2
    assert value(text, names.HTTP.series[1], http_response_status_code="200", **labels) == pytest.approx(0.8)
    assert value(text, names.HTTP.series[2], http_response_status_code="429", **labels) == 1
    assert value(text, names.OPEN.prometheus) == 4


def test_clients_cannot_make_new_series() -> None:
    meters, ingress = recorder(tenants=2)
    for i in range(500):
        ingress.record(f"t{i}", f"METHOD{i}", f"/route-{i}", 404, 0.1)
        ingress.record(None, "GET", None, 404, 0.1)
    counts = samples(meters.text(), names.HTTP.series[2])
    assert {labels["tenant"] for labels, _ in counts} == {"t0", "t1", "other", ""}
    assert {labels["http_request_method"] for labels, _ in counts} == {"GET", "_OTHER"}
    assert len({labels["http_route"] for labels, _ in counts}) == ROUTES + 2  # other, and none
    assert sum(count for _, count in counts) == 1000
