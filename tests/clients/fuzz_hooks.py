"""Loaded by schemathesis: makes requests that would stop at the first check reach the engine."""

from __future__ import annotations

import os
from typing import Any

import schemathesis
from schemathesis import GenerationMode

MODEL = os.environ["FUZZ_MODEL"]
VOCABULARY = 257
SHORT = 64


@schemathesis.hook
def before_call(_: Any, case: schemathesis.Case, __: Any) -> None:
    """The served model's name for any, and in valid bodies token ids of its vocabulary."""
    body = case.body
    if not isinstance(body, dict) or not isinstance(body.get("model"), str) or len(body["model"]) > SHORT:
        return  # a name too long to be valid may be the very fault
    body["model"] = MODEL
    valid = case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE
    if valid and "prompt" in body:
        body["prompt"] = _inside(body["prompt"])


def _inside(prompt: Any) -> Any:
    if isinstance(prompt, list):
        return [_inside(item) for item in prompt]
    return prompt % VOCABULARY if type(prompt) is int else prompt
