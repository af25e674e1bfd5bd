"""The process of a machine that Prometheus asks, in a real cluster."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support import serving
from support.scraped import value

from gammaray.config import Config, parse

pytestmark = pytest.mark.ray


def config(port: int) -> Config:
    return parse({"target": {"model": "tiny"}, "telemetry": {"prometheus_port": port}}, "test")


@pytest.mark.usefixtures("cluster")
def test_processes_of_the_machine_are_gathered() -> None:
    import ray

    from gammaray.actors.metrics import Exposure, session_folder

    @ray.remote(num_cpus=0)
    class Replica:
        def __init__(self) -> None:
            from opentelemetry.metrics import Observation

            from gammaray.telemetry.meters import Meters
            from gammaray.telemetry.names import RUNNING

            self._meters = Meters("target-7")
            self._meters.watch(RUNNING, lambda: [Observation(5)])
            self._meters.serve(session_folder())

        def ready(self) -> bool:
            return True

    replica: Any = Replica.remote()  # type: ignore[attr-defined]
    assert ray.get(replica.ready.remote(), timeout=60)
    port, said = serving.free_port(), list[str]()
    exposure = Exposure(config(port), said.append)
    [address] = exposure.start()
    assert address == f"http://127.0.0.1:{port}/metrics"
    assert exposure.start() == [address]  # the same one, asked again
    text = httpx.get(address, trust_env=False).content
    assert value(text, "gammaray_engine_running", service_instance_id="target-7") == 5
    assert said == []
    exposure.stop()
    assert not session_folder().exists()


def test_a_port_that_is_taken_is_told_and_is_no_reason_to_stop(cluster: serving.Cluster) -> None:
    from gammaray.actors.metrics import Exposure

    said = list[str]()
    assert Exposure(config(httpx.URL(cluster.url).port or 0), said.append).start() == []
    [line] = said
    assert line.startswith("warning: no metrics of ") and "choose another telemetry.prometheus_port" in line


def test_port_zero_starts_nothing() -> None:
    from gammaray.actors.metrics import Exposure

    said = list[str]()
    assert Exposure(config(0), said.append).start() == [] and said == []
