"""The soak's requests, its readers, and what a stream must be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
from clients.chaos_stream import Heard, listen

from gammaray.types import GenerateRequest, SamplingParams

from .decoding import Outcome
from .draft_process import VOCAB
from .soak_parts import plainly

LEAVES = 0.15  # of the readers, early
MOST_EVENTS = 20  # that these wait for
PATIENCE_S = 300.0  # for a stream
MAX_GAMMA, MAX_WIDTH = 4, 3


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and what each of its choices says undisturbed."""

    tenant: str
    body: Mapping[str, Any]
    expected: Sequence[Outcome]


def cases(count: int, seed: int, model: str, tenants: Sequence[str]) -> list[Case]:
    """Greedy and seeded, chains, trees and none, one choice or two, with and without a stop string."""
    draws = Random(seed)
    requests = [_request(f"{i}", draws) for i in range(count)]
    said = plainly(requests)
    return [
        Case(
            draws.choice(tenants),
            {**_body(request, model), "speculation": _speculation(draws)},
            [said[request.request_id, k] for k in range(request.n)],
        )
        for request in requests
    ]


def _request(name: str, draws: Random) -> GenerateRequest:
    letters = [chr(ord("a") + i) for i in range(VOCAB)]
    sampling = SamplingParams(
        temperature=draws.choice((0.0, 1.0)),
        top_p=draws.choice((1.0, 0.9)),
        seed=draws.getrandbits(32),
        max_tokens=draws.randint(40, 160),
        stop=("".join(draws.choices(letters, k=2)),) if draws.random() < 0.3 else (),
    )
    prompt = tuple(draws.choices(range(VOCAB), k=draws.randint(4, 60)))
    return GenerateRequest(name, prompt, sampling, n=draws.choice((1, 1, 2)))


def _body(request: GenerateRequest, model: str) -> dict[str, Any]:
    sampling = request.sampling
    same = {name: getattr(sampling, name) for name in ("temperature", "top_p", "seed", "max_tokens")}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    more = {"prompt": list(request.prompt), "stop": list(sampling.stop), "n": request.n}
    return {"model": model, **same, **more, **stream}


def _speculation(draws: Random) -> dict[str, Any]:
    if draws.random() < 0.1:
        return {"enabled": False}
    return {"gamma": draws.randint(1, MAX_GAMMA), "width": draws.randint(1, MAX_WIDTH)}


@dataclass(slots=True)
class Tally:
    """Of all streams that ended. `faults` is what must not be."""

    whole: int = 0
    left: int = 0  # by readers that did not wait for the end
    tokens: int = 0  # of the whole ones
    longest_gap_s: float = 0.0  # between two events of a choice
    refused: list[str] = field(default_factory=list)  # ends that the server itself announced as an error
    faults: list[str] = field(default_factory=list)

    def add(self, case: Case, heard: Heard) -> None:
        gaps = (end - begin for begin, end in heard.gaps)
        self.longest_gap_s = max([self.longest_gap_s, *gaps])
        if heard.error and not heard.fault:
            self.refused.append(f"{_times(heard)}: status {heard.status}, {heard.error}")
        elif fault := heard.fault or _difference(case, heard):
            self.faults.append(f"{_times(heard)}: {fault}: {case.tenant}, {dict(case.body)}")
        elif heard.left:
            self.left += 1
        else:
            self.whole += 1
            self.tokens += sum(len(outcome.ids) for outcome in case.expected)


def _times(heard: Heard) -> str:
    """To find what the killer did at that time."""
    ago = time.monotonic() - heard.began
    return f"{time.strftime('%H:%M:%S', time.localtime(time.time() - ago))}, {ago:.1f} s"


def _difference(case: Case, heard: Heard) -> str | None:
    """A token is a letter, so equal texts are equal tokens."""
    for index, choice in heard.choices.items():
        text = case.expected[index].text
        if not text.startswith(choice.text):
            return f"choice {index} said {choice.text!r} instead of {text!r}"
    if heard.left:
        return None
    ends = [(choice.text, choice.finish) for _, choice in sorted(heard.choices.items())]
    if not heard.done or ends != [(outcome.text, outcome.finish) for outcome in case.expected]:
        return f"ended with {ends}, [DONE] {heard.done}, instead of {case.expected}"
    counted, tokens = heard.usage, sum(len(outcome.ids) for outcome in case.expected)
    if counted is None or counted["completion_tokens"] != tokens:
        return f"counted {counted} instead of {tokens} tokens"
    return None


async def crowd(
    url: str,
    cases: Sequence[Case],
    keys: Mapping[str, str],
    seed: int,
    readers: int,
    goes_on: Callable[[], bool],
) -> Tally:
    """So many readers at a time, each of which begins one stream after the other, and ends the last one."""
    tally = Tally()
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:

        async def reader(number: int) -> None:
            draws = Random(f"{seed} {number}")
            while goes_on():
                case, heard = draws.choice(cases), Heard()
                most = draws.randint(1, MOST_EVENTS) if draws.random() < LEAVES else None
                await listen(http, "/v1/completions", case.body, keys[case.tenant], heard, most)
                tally.add(case, heard)

        await asyncio.gather(*map(reader, range(readers)))
    return tally
