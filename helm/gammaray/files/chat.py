"""Chats once with a release, over a stream, and checks the answer: `helm test`. Needs no package.

GAMMARAY_URL, GAMMARAY_SECONDS (to be ready, and for the answer) and, where keys are asked for, GAMMARAY_KEY.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

URL, KEY = os.environ["GAMMARAY_URL"], os.environ.get("GAMMARAY_KEY")
SECONDS = float(os.environ["GAMMARAY_SECONDS"])
PAUSE_S = 2.0
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy knows a cluster's own names


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    """The response to a GET, or to a POST of `body`. Raises OSError."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {KEY}"} if KEY else {})
    data = None if body is None else json.dumps(body).encode()
    return OPENER.open(urllib.request.Request(URL + path, data, headers), timeout=SECONDS)


def wait() -> None:
    """Until the model answers."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            ask("/readyz").close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"{URL} is not ready after {SECONDS:.0f} s: {error}")
            time.sleep(PAUSE_S)


def chat() -> list[dict[str, Any]]:
    """The events of a short answer."""
    model = json.load(ask("/v1/models"))["data"][0]["id"]
    message = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": model, "messages": [message], "max_tokens": 32, "temperature": 0, "stream": True}
    lines = [line.decode().strip() for line in ask("/v1/chat/completions", body)]
    sent = [line.removeprefix("data: ") for line in lines if line]
    if not sent or sent[-1] != "[DONE]":
        sys.exit(f"the stream broke off: {sent[-1:]}")
    return [json.loads(event) for event in sent[:-1]]


def check(events: list[dict[str, Any]]) -> str:
    """The text, and how it came about."""
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    if not text.strip() or reasons not in (["stop"], ["length"]):
        sys.exit(f"no answer: text {text!r}, finish_reason {reasons}")
    told = [event["metrics"]["speculative_decoding"] for event in events if event.get("metrics")]
    if not told or told[-1]["rounds"] < 1:
        sys.exit(f"no metrics of the decoding: {told}")
    return f"{text!r} in {told[-1]['rounds']} rounds of {told[-1]['tau']:.2f} tokens"


if __name__ == "__main__":
    wait()
    try:
        print(check(chat()))
    except urllib.error.HTTPError as refused:
        sys.exit(f"HTTP {refused.code}: {refused.read().decode(errors='replace')}")
