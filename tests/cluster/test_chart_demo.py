"""What the chart's CPU demo declares, on raylets of this machine that stand for its pods."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
import yaml
from support import declared, helm, manifests, raylets, serving
from support.serving import eventually

from gammaray.cluster import local, service
from gammaray.config import parse

pytestmark = [
    pytest.mark.ray,
    pytest.mark.smollm2,
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),  # in Ray itself
]
NEWEST = "4"
LOADING_S = 180.0  # of the model, and of everything else, where cores are shared
Json = dict[str, Any]


@pytest.fixture(scope="module")
def released() -> Json:
    """The RayService of the demo."""
    objects = helm.rendered(NEWEST, "--values", helm.CHART / "ci/cpu-demo-values.yaml")
    (found,) = (one for one in objects if one["kind"] == "RayService")
    return found


def variables(pod: Mapping[str, Any]) -> dict[str, str]:
    """Those of a pod that do not depend on where it is."""
    return {one["name"]: one["value"] for one in pod["spec"]["containers"][0]["env"] if "value" in one}


def on_loopback(config: Json) -> Json:
    """The same for one machine: nothing listens elsewhere, and on free ports."""
    config["http_options"] = {"host": "127.0.0.1", "port": serving.free_port()}
    (app,) = config["applications"]
    told = app["args"]["config"]
    told["server"] |= config["http_options"]
    told["telemetry"] |= {"prometheus_port": serving.free_port()}
    return config


def test_every_pod_has_the_variables_that_its_processes_read(released: Json) -> None:
    (app,) = yaml.safe_load(released["spec"]["serveConfigV2"])["applications"]
    wanted = service.environment(parse(app["args"]["config"], "chart"))
    for pod in manifests.pods(released):
        assert {name: variables(pod).get(name) for name in wanted} == wanted


@pytest.fixture
def url(released: Json) -> Iterator[str]:
    """The demo, as the operator would have Ray's dashboard deploy it."""
    os.environ.update(local.environment(os.environ, local=True))
    import ray

    head, *others = manifests.pods(released)
    groups = dict(manifests.groups(released["spec"]["rayClusterConfig"]))
    config = on_loopback(yaml.safe_load(released["spec"]["serveConfigV2"]))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables(head).items():
            if name.startswith(("RAY_", "GAMMARAY_")):
                patch.setenv(name, value)
        pods = raylets.Raylets()
        try:
            for pod in others:
                pool = groups[pod["metadata"]["name"]]["labels"]["gammaray/pool"]
                assert variables(pod)["GAMMARAY_POOL"] == pool
                pods.add(f"demo-{pool}-abcde", 0, pool=pool)
            ray.init(pods.address, namespace="gammaray", log_to_driver=False)
            declared.deploy(config)
            address = "http://{host}:{port}".format(**config["http_options"])
            eventually(lambda: declared.ready(address), LOADING_S)
            yield address
        finally:
            declared.leave()
            pods.close()


def test_it_starts_and_answers_a_chat(url: str) -> None:
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=serving.PATIENCE_S).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert raylets.processes("ray::ServeReplica:gammaray:target")
    huge = httpx.post(f"{url}/v1/chat/completions", content=b"x" * (5 * 2**20), timeout=30)
    assert huge.status_code == 413  # by the middleware of the proxy, which a variable of the pods names
