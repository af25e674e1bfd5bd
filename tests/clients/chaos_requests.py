"""The requests of `make chaos`: a mix of everything that a seed or temperature 0 makes repeatable."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

MODEL = "smollm2-135m-instruct"
SHARES = {"crowd": 8, "team": 1, "plain": 1}  # of the requests, by tenant
DRAFTERS = ("long", "short")
QUESTIONS = (
    "Name three colours of a {thing}.",
    "Write a short story about a {thing}.",
    "Repeat this line four times: the {thing} is by the {thing}.",
    "List everything that a {thing} is good for.",
)
TEXTS = (
    "one {thing}, two {thing}, one {thing}, two {thing}, one",
    "The {thing} of the old town was known for",
    "def count_{thing}(items):\n    total = 0\n    for item in items:\n",
    "monday {thing} tuesday {thing} wednesday",
)
THINGS = ("river", "lamp", "clock", "garden", "boat", "letter", "window", "horse", "bridge", "stone")
STOPS = (".", "\n", " the", ", ", "and", " is")
REGEXES = (
    "(red|green|blue)(, (red|green|blue)){1,5}",
    "[A-Z][a-z]{2,8}( [a-z]{2,8}){2,6}",
    "[0-9]{1,3}(, [0-9]{1,3}){3,8}",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2030},
    },
    "required": ["city", "year"],
    "additionalProperties": False,
}
FORMATS = (
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}},
)


@dataclass(frozen=True, slots=True)
class Trouble:
    """What befalls a request of the disturbed run. At most one is set; none: it survives."""

    timeout_s: float | None = None
    leaves_after_s: float | None = None
    leaves_after_events: int | None = None
    leaves_after_kill: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    index: int
    tenant: str
    path: str
    body: dict[str, Any]
    trouble: Trouble


def mix(count: int, seed: int) -> list[Case]:
    """The same for the same seed."""
    random = Random(seed)
    return [_case(index, random) for index in range(count)]


def _case(index: int, random: Random) -> Case:
    tenant = random.choices(list(SHARES), list(SHARES.values()))[0]
    chat = random.random() < 0.5
    body = {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": random.randint(8, 48),
        **(_chat(random) if chat else _completion(random)),
        **_sampling(random),
        **_shape(random),
        **_speculation(random),
    }
    return Case(index, tenant, "/v1/chat/completions" if chat else "/v1/completions", body, _trouble(random))


def _chat(random: Random) -> dict[str, Any]:
    messages = [{"role": "user", "content": _filled(QUESTIONS, random)}]
    tops = {"logprobs": True, "top_logprobs": random.randint(0, 3)} if random.random() < 0.3 else {}
    return {"messages": messages, **tops}


def _completion(random: Random) -> dict[str, Any]:
    prompts = [_filled(TEXTS, random) for _ in range(random.choice((1, 1, 1, 2)))]
    body: dict[str, Any] = {"prompt": prompts}
    if random.random() < 0.3:
        body["logprobs"] = random.randint(0, 3)
    if random.random() < 0.2:
        body["echo"] = True
    return body


def _filled(texts: tuple[str, ...], random: Random) -> str:
    return random.choice(texts).format(thing=random.choice(THINGS))


def _sampling(random: Random) -> dict[str, Any]:
    body: dict[str, Any] = {"temperature": 0}
    if random.random() < 0.5:
        body = {"temperature": round(random.uniform(0.5, 1.3), 2), "seed": random.getrandbits(32)}
        body |= random.choice(({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}))
    if random.random() < 0.3:
        body["presence_penalty"] = round(random.uniform(-1, 1), 1)
        body["frequency_penalty"] = round(random.uniform(0, 1), 1)
    if random.random() < 0.2:
        body["repetition_penalty"] = round(random.uniform(1, 1.3), 2)
    if random.random() < 0.1:
        body["logit_bias"] = {f"{random.randrange(49_000)}": random.randint(-5, 5) for _ in range(3)}
    return body


def _shape(random: Random) -> dict[str, Any]:
    """How the text may look, and how many there are."""
    body: dict[str, Any] = {}
    if random.random() < 0.25:
        body["n"] = 2
    if random.random() < 0.3:
        body["stop"] = random.sample(STOPS, random.randint(1, 2))
    if random.random() < 0.3:
        body["priority"] = random.randint(-2, 2)
    if random.random() < 0.25:
        regex = {"structured_outputs": {"regex": random.choice(REGEXES)}}
        return body | random.choice((regex, {"response_format": random.choice(FORMATS)}))
    # None of these together with a grammar, which they could leave without a next token.
    return body | random.choice(({}, {"min_tokens": 6}, {"ignore_eos": True}, {"bad_words": [" the", "a"]}))


def _speculation(random: Random) -> dict[str, Any]:
    if random.random() < 0.2:
        return {}
    if random.random() < 0.2:
        return {"speculation": {"enabled": False}}
    wish = {"drafter": random.choice(DRAFTERS), "gamma": random.randint(0, 8), "width": random.randint(1, 2)}
    return {"speculation": wish}


def _trouble(random: Random) -> Trouble:
    share = random.random()
    if share < 0.12:
        return Trouble(timeout_s=round(0.5 * 40 ** random.random(), 2))  # as many below 3 s as up to 20 s
    if share < 0.17:
        return Trouble(leaves_after_s=0.2 * 100 ** random.random())
    if share < 0.22:
        return Trouble(leaves_after_events=random.randint(1, 6))
    return Trouble(leaves_after_kill=share < 0.27)
