"""A profile of the next steps: one at a time, and none that stays in the way of the next."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gammaray.engine.capture import Capture
from gammaray.errors import Overloaded


def step(capture: Capture) -> None:
    capture.before()
    torch.ones(3).exp_()
    capture.after()


def ordered(capture: Capture) -> None:
    """Returns when an order has arrived."""
    while capture._order is None:
        time.sleep(0.001)


def test_it_holds_the_steps_that_were_ordered_and_no_more() -> None:
    capture = Capture()
    step(capture)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(capture.order, 3, 60.0)
        ordered(capture)
        for _ in range(5):
            step(capture)
        events = json.loads(Path(found.result()).read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::exp_" for event in events) == 3
    assert Path(found.result()).parent.stat().st_mode & 0o077 == 0


def test_of_many_orders_at_once_one_is_taken() -> None:
    capture, begin = Capture(), threading.Barrier(8)

    def order() -> str:
        begin.wait()
        try:
            return capture.order(1, 60.0)
        except Overloaded as error:
            return error.message

    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(order) for _ in range(8)]
        while sum(one.done() for one in found) < 7:
            time.sleep(0.001)
        step(capture)
        answers = [one.result() for one in found]
    assert sum("already" in answer for answer in answers) == 7


def test_an_order_that_an_idle_engine_did_not_begin_is_forgotten() -> None:
    capture = Capture()
    for _ in range(2):
        with pytest.raises(Overloaded, match="did not make 2 steps"):
            capture.order(2, 0.01)
    assert capture._order is None


def test_an_order_that_was_given_up_half_way_ends_with_the_next_step() -> None:
    capture = Capture()
    with ThreadPoolExecutor() as pool:
        given_up = pool.submit(capture.order, 9, 0.5)
        ordered(capture)
        step(capture)
        with pytest.raises(Overloaded, match="did not make 9 steps"):
            given_up.result()
        with pytest.raises(Overloaded, match="already"):
            capture.order(1, 60.0)
        step(capture)
        found = pool.submit(capture.order, 1, 60.0)
        ordered(capture)
        step(capture)
        assert Path(found.result()).exists()
