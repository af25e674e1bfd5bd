"""The device transport between two processes over gloo, with a real target's hidden states."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from support.two_ends import deaf, endless, keep
from support.two_ranks import PROCESSES, start
from tiny import tiny_llama

from gammaray.actors.features import FeatureLink, Shape
from gammaray.engine.batch import Row
from gammaray.engine.loading import load_runner
from gammaray.engine.ranks import host

SHAPE = Shape(tokens=12, width=96, sequences=3, dtype=torch.bfloat16)  # three layers of a tiny Llama


@contextmanager
def linked(work: Any, timeout_s: float = 30.0) -> Iterator[tuple[FeatureLink, Any, BaseProcess]]:
    """A target's link, and a pipe to the worker that is at its other end."""
    seat = host(2, timeout_s=timeout_s)
    ours, theirs = PROCESSES.Pipe()
    worker = start(work, seat.meeting, SHAPE, theirs)
    try:
        link = FeatureLink(seat, SHAPE)
        assert ours.recv() == "ready"
        yield link, ours, worker
        link.close()
    finally:
        worker.kill()
        worker.join()


def test_a_targets_hidden_states_arrive_bit_by_bit() -> None:
    runner = load_runner(tiny_llama(layers=3), "bfloat16", block_size=4, num_blocks=8)
    rounds = [
        [Row([1, 2, 3, 4], 0, [3], logits=4), Row([5, 6], 0, [5, 6], [7, 8, 9], [-1, 0, 0])],
        [Row([5], 4, [3, 1])],
        [Row([9, 8], 5, [3, 1], logits=0)],  # nothing that is wanted
        [Row(range(12), 0, [0, 2, 4], logits=12)],  # as many as fit
    ]
    with linked(keep) as (link, told, _):
        for rows in rounds:
            counts = [len(row.pending) + len(row.tree_tokens) for row in rows]
            _, features = runner.forward_features(rows, (0, 1, 3))
            link.send(features, counts)
            sent = features.view(torch.uint8).numpy().tobytes()
            assert told.recv() == (sent, (sum(counts), 96), counts)


@pytest.mark.parametrize(
    "features, counts, message",
    [
        (torch.zeros(2, 95, dtype=torch.bfloat16), [2], r"carries \[N, 96\]"),
        (torch.zeros(2, 96), [2], "float32, the link carries .* torch.bfloat16"),
        (torch.zeros(2, 96, dtype=torch.bfloat16), [1], "2 rows for 1 sequences that have 1"),
        (torch.zeros(13, 96, dtype=torch.bfloat16), [13], "carries 12 rows"),
        (torch.zeros(4, 96, dtype=torch.bfloat16), [1, 1, 1, 1], "for 3"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_link_lives(
    features: torch.Tensor, counts: list[int], message: str
) -> None:
    with linked(keep) as (link, told, _):
        with pytest.raises(ValueError, match=message):
            link.send(features, counts)
        link.send(torch.ones(1, 96, dtype=torch.bfloat16), [1])
        assert told.recv()[2] == [1]


def test_a_killed_worker_is_noticed_at_once() -> None:
    with linked(keep) as (link, _, worker):
        worker.kill()
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="gone or stuck"):
            for _ in range(1000):
                link.send(torch.zeros(12, 96, dtype=torch.bfloat16), [12])
        assert time.monotonic() - began < 1.0


def test_a_worker_that_takes_nothing_costs_the_timeout() -> None:
    with linked(deaf, timeout_s=0.2) as (link, _, _):
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="gone or stuck"):
            for _ in range(1000):
                link.send(torch.zeros(12, 96, dtype=torch.bfloat16), [12])
        assert 0.15 < time.monotonic() - began < 1.5


def test_a_killed_target_ends_the_workers_wait() -> None:
    ours, theirs = PROCESSES.Pipe()
    target = start(endless, SHAPE, theirs)
    told, telling = PROCESSES.Pipe()
    worker = start(keep, ours.recv(), SHAPE, telling)
    assert told.recv() == "ready"
    assert told.recv()[2] == [1]
    target.kill()
    worker.join(1.0)
    assert worker.exitcode == 1
