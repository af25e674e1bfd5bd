"""Asks every node of a Ray cluster something that only code on that node can see."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray

from gammaray.actors.place import NODE_ID, VISIBLE

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Answer(Generic[Found]):
    """`environ`: CUDA_VISIBLE_DEVICES of the raylet, if it has one, which narrows what its actors may use."""

    found: Found
    environ: Mapping[str, str]


def ask(
    probe: Callable[[], Found], nodes: Iterable[str], timeout_s: float
) -> dict[str, Answer[Found] | Exception]:
    """What `probe` says on each node, by the node's id, all at the same time.

    A node that is too slow or fails has the exception instead: TimeoutError, or what Ray makes of it.
    """
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_run)
    calls = {node: task.options(label_selector={NODE_ID: node}).remote(probe) for node in nodes}
    done, late = ray.wait([*calls.values()], num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
    for call in late:
        ray.cancel(call, force=True)
    return {node: _result(call, call in done) for node, call in calls.items()}


def _run(probe: Callable[[], Found]) -> Answer[Found]:
    return Answer(probe(), {VISIBLE: os.environ[VISIBLE]} if VISIBLE in os.environ else {})


def _result(call: ray.ObjectRef[Answer[Found]], done: bool) -> Answer[Found] | Exception:
    if not done:
        return TimeoutError("no answer in time")
    try:
        answer: Answer[Found] = ray.get(call)
    except Exception as error:
        return error
    return answer
