"""The application on Ray, over HTTP: one cluster for all of these tests."""

from __future__ import annotations

import json

import httpx
import psutil
import pytest
from support.serving import eventually, listeners, reachable_from_elsewhere

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),  # in Ray itself
]


def body(**change: object) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5} | change


def test_whole_and_streamed(cluster) -> None:
    whole = httpx.post(f"{cluster.url}/v1/chat/completions", json=body()).json()
    assert whole["choices"][0]["message"]["content"] == "the quick brown fox the "
    assert whole["usage"]["completion_tokens"] == 5
    with httpx.stream("POST", f"{cluster.url}/v1/chat/completions", json=body(stream=True)) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"]["content"] for event in events[:-1]]
    assert deltas == ["", "the ", "quick ", "brown ", "fox ", "the "]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine_keep_status_and_shape(cluster, stream) -> None:
    response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body(seed=13, stream=stream))
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "13 brings bad luck",
        "type": "invalid_request_error",
        "param": "seed",
        "code": "superstition",
    }
    broken = httpx.post(f"{cluster.url}/v1/chat/completions", json=body(seed=1000, stream=stream))
    assert broken.status_code == 500
    assert "bug" not in broken.text


def test_error_in_a_stream(cluster) -> None:
    response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body(seed=1002, stream=True))
    assert response.status_code == 200
    assert "error" in json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert httpx.get(f"{cluster.url}/readyz").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_the_engine(cluster, stream) -> None:
    before = cluster.lines()
    request = {"json": body(max_tokens=3000, stream=stream)}
    with httpx.Client() as client:
        if stream:
            with client.stream("POST", f"{cluster.url}/v1/chat/completions", **request) as response:
                assert next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{cluster.url}/v1/chat/completions", **request, timeout=2.0)
    eventually(lambda: cluster.lines()[len(before) :] == ["started", "aborted"])


def test_other_errors(cluster) -> None:
    assert httpx.get(f"{cluster.url}/v1/nothing").json()["error"]["code"] == "unknown_url"
    assert httpx.post(f"{cluster.url}/v1/completions", json={}).status_code == 400


def test_nothing_listens_beyond_this_machine(cluster) -> None:
    listening = listeners(psutil.Process())
    assert len(listening) > 5  # the HTTP proxy, GCS, raylet, replicas
    assert reachable_from_elsewhere(listening) == []
