"""One streamed answer, as its reader hears it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

DONE = "[DONE]"


@dataclass(slots=True)
class Choice:
    """`times` of its events, in s of the monotonic clock; `numbers`: log-probabilities, in an order that does
    not depend on ties."""

    text: str = ""
    finish: str | None = None
    times: list[float] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Heard:
    """Filled in as it comes. Times in s of the monotonic clock."""

    began: float = field(default_factory=time.monotonic)
    last: float = 0.0  # event
    events: int = 0
    status: int | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    error: dict[str, Any] | None = None
    fault: str | None = None  # against the protocol
    done: bool = False
    left: bool = False  # its reader did not wait for the end

    @property
    def first(self) -> float:
        """When text began to come."""
        return min(choice.times[0] for choice in self.choices.values())

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """From each event of a choice to its next."""
        return [gap for choice in self.choices.values() for gap in pairwise(choice.times)]


async def listen(
    http: httpx.AsyncClient,
    path: str,
    body: Mapping[str, Any],
    key: str,
    heard: Heard,
    most_events: int | None = None,
) -> None:
    """Reads to the end, or leaves after so many events. What goes wrong on the way is noted."""
    headers = {"Authorization": f"Bearer {key}"}
    heard.began = time.monotonic()
    try:
        async with http.stream("POST", path, json=body, headers=headers) as response:
            heard.status = response.status_code
            if heard.status != 200:
                heard.error = json.loads(await response.aread())["error"]
                heard.last = time.monotonic()
                return
            async for line in response.aiter_lines():
                if line:
                    take(line.removeprefix("data: "), heard)
                if heard.events == most_events:
                    heard.left = not heard.done
                    return
    except (httpx.HTTPError, ValueError, KeyError) as error:
        heard.fault = heard.fault or f"{type(error).__name__}: {error}"


def take(data: str, heard: Heard) -> None:
    """One event."""
    heard.last = time.monotonic()
    heard.events += 1
    if heard.done or heard.error:
        heard.fault = "an event behind the last one"
    elif data == DONE:
        heard.done = True
    elif "error" in (event := json.loads(data)):
        heard.error = event["error"]
    else:
        heard.usage = event["usage"] or heard.usage
        for part in event["choices"]:
            _add(part, heard)


def _add(part: dict[str, Any], heard: Heard) -> None:
    choice = heard.choices.setdefault(part["index"], Choice())
    if choice.finish is not None:
        heard.fault = f"choice {part['index']} goes on after its end"
    choice.times.append(heard.last)
    choice.text += part["text"] if "text" in part else part["delta"]["content"]
    choice.finish = part["finish_reason"]
    if (found := part["logprobs"]) is not None:
        _add_logprobs(found, choice)


def _add_logprobs(found: dict[str, Any], choice: Choice) -> None:
    if "content" in found:
        for entry in found["content"]:
            choice.tokens.append(entry["token"])
            choice.numbers += [entry["logprob"], *(best["logprob"] for best in entry["top_logprobs"])]
        return
    choice.tokens += found["tokens"]
    choice.offsets += found["text_offset"]
    for own, best in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
        choice.numbers += [own or 0.0, *sorted((best or {}).values())]  # a prompt's first token has none
