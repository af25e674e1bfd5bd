"""A chat in the terminal with a running server: the client side of `/v1/chat/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from gammaray.errors import GammarayError, InvalidRequest

Turn = dict[str, str]
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(slots=True)
class Reply:
    """One answer, as far as it came."""

    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def summary(self) -> str:
        """Tokens, tokens per second of the whole exchange, and tau."""
        tokens, tau = self.usage.get("completion_tokens"), self.metrics.get("tau")
        if not tokens:
            return ""
        speed = f"{tokens} tokens, {tokens / self.seconds:.1f} tok/s"
        return speed if tau is None else f"{speed}, tau {tau:.2f}"


def talk(
    url: str,
    key: str | None = None,
    read: Callable[[str], str] = input,
    show: Callable[[str], None] = lambda text: print(text, end="", flush=True),
    transport: httpx.BaseTransport | None = None,
) -> None:
    """Reads lines until /exit or the end of input; `key` is the tenant's API key.

    Raises GammarayError when no server answers at `url`, or it wants another key.
    """
    timeout = httpx.Timeout(10, read=None)
    with httpx.Client(base_url=url, headers=_headers(key), timeout=timeout, transport=transport) as http:
        model = _model(http)
        show(f"{model} at {url}: /reset forgets the conversation, /exit leaves, Ctrl-C stops an answer\n")
        turns: list[Turn] = []
        while (line := _line(read)) != "/exit":
            if line == "/reset":
                turns = []
            elif line:
                turns = _exchange(http, model, [*turns, {"role": "user", "content": line}], show)
    show("\n")


def _headers(key: str | None) -> dict[str, str]:
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequest("the key has characters that no key has")  # httpx's own error would show it
    return {"Authorization": f"Bearer {key}"}


def _line(read: Callable[[str], str]) -> str:
    try:
        return read("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return "/exit"


def _exchange(http: httpx.Client, model: str, turns: list[Turn], show: Callable[[str], None]) -> list[Turn]:
    """The conversation after one more answer; without the question when the server refused it."""
    reply = Reply()
    try:
        _stream(http, {"model": model, "messages": turns, **STREAM}, reply, show)
        show(f"\n[{reply.summary()}]\n")
    except KeyboardInterrupt:
        show("\n[stopped]\n")
    except (GammarayError, httpx.HTTPError) as error:
        show(f"\n[{error}]\n")
    if not reply.text:
        return turns[:-1]
    return [*turns, {"role": "assistant", "content": reply.text}]


def _stream(http: httpx.Client, body: dict[str, Any], reply: Reply, show: Callable[[str], None]) -> None:
    began = time.monotonic()
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise GammarayError(_reason(response.read()))
        for line in response.iter_lines():
            if line.startswith("data: {"):
                _take(json.loads(line.removeprefix("data: ")), reply, show)
    reply.seconds = time.monotonic() - began


def _take(event: dict[str, Any], reply: Reply, show: Callable[[str], None]) -> None:
    if "error" in event:
        raise GammarayError(event["error"]["message"])
    for choice in event["choices"]:
        text = choice["delta"].get("content") or ""
        reply.text += text
        show(text)
    reply.usage = event.get("usage") or reply.usage
    reply.metrics = event.get("metrics", {}).get("speculative_decoding") or reply.metrics


def _model(http: httpx.Client) -> str:
    try:
        response = http.get("/v1/models")
        if response.status_code in (401, 403):
            raise GammarayError(f"{_reason(response.content)}; give it with --tenant-key or GAMMARAY_API_KEY")
        name: str = response.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        message = f"no model server answers at {http.base_url}: {error}; start one with `gammaray serve`"
        raise GammarayError(message) from None
    return name


def _reason(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return content.decode(errors="replace")[:200]
