"""The end of a server, decision by decision; test_run.py sees the whole of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from support.serving import eventually

from gammaray.cluster import processes, stop
from gammaray.config import Server


class Ingress:
    """Requests end at the times in `ends`, of a clock that sleeping moves; after `cut` within a second."""

    def __init__(self, *ends: float) -> None:
        self.ends, self.now = list(ends), 0.0
        self.calls: list[str] = []
        self.signal_at = float("inf")
        self.deaf = False  # requests that do not end when they are cut
        self.said: list[str] = []

    def drain(self) -> int:
        self.calls.append("drain")
        return sum(end > self.now for end in self.ends)

    def cut(self) -> None:
        self.calls.append("cut")
        if not self.deaf:
            self.ends = [min(end, self.now + 1) for end in self.ends]

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def drain(ingress: Ingress, limit_s: float = 600.0) -> int:
    return stop.drain(
        ingress,
        limit_s,
        lambda: ingress.now >= ingress.signal_at,
        ingress.said.append,
        lambda: ingress.now,
        ingress.sleep,
    )


def test_nothing_open_is_over_at_once() -> None:
    ingress = Ingress()
    assert drain(ingress) == 0
    assert ingress.now == 0
    assert ingress.calls == ["drain"]
    assert ingress.said == []


def test_what_is_open_is_waited_for() -> None:
    ingress = Ingress(3.0, 100.0)
    assert drain(ingress) == 0
    assert 100 <= ingress.now < 100 + 2 * stop.POLL_S
    assert "cut" not in ingress.calls
    assert ingress.said == ["draining: 2 requests open, new ones get 503; signal again to stop now"]


def test_a_second_signal_cuts() -> None:
    ingress = Ingress(100.0)
    ingress.signal_at = 5.0
    assert drain(ingress) == 1
    assert 6 <= ingress.now < 6 + 4 * stop.POLL_S


def test_the_time_limit_cuts() -> None:
    ingress = Ingress(1.0, 1e9, 1e9)
    assert drain(ingress, limit_s=30.0) == 2
    assert 31 <= ingress.now < 31 + 4 * stop.POLL_S


def test_requests_that_do_not_end_are_left_behind() -> None:
    ingress = Ingress(1e9)
    ingress.signal_at, ingress.deaf = 0.0, True
    assert drain(ingress) == 1
    assert ingress.now < stop.CUT_S + 4 * stop.POLL_S


def test_a_drain_is_longer_than_any_request() -> None:
    from gammaray.api.gate import GRACE_S

    assert stop.drain_limit(Server(request_timeout_s=100.0)) > 100 + GRACE_S


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in stop.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_signals_are_counted_and_raise_only_where_asked(handlers: None, number: signal.Signals) -> None:
    signals = stop.Signals()
    signals.install()
    signals.check()
    for count in (1, 2):
        os.kill(os.getpid(), number)
        assert signals.count == count
    with pytest.raises(stop.Stopped):
        signals.check()


def test_what_is_ignored_stays_ignored(handlers: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = stop.Signals()
    signals.install()
    os.kill(os.getpid(), signal.SIGHUP)
    assert signals.count == 0


def test_ray_cannot_take_the_signals(handlers: None) -> None:
    import ray  # noqa: F401
    from ray._private import utils

    original = utils.set_sigterm_handler
    signals = stop.Signals()
    signals.install()
    with signals.kept():
        utils.set_sigterm_handler(signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # what its core does
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.count == 1
    assert utils.set_sigterm_handler is original


def test_without_handlers_of_ours_ray_has_its_own() -> None:
    from ray._private import utils

    original = utils.set_sigterm_handler
    with stop.Signals().kept():
        assert utils.set_sigterm_handler is original


IMPATIENT = """
import os, signal, subprocess, sys, time
from gammaray.cluster import stop
signals = stop.Signals()
signals.install()
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
seen = 0
while True:
    time.sleep(0.01)
    if signals.count != seen:
        seen = signals.count
        print(seen, flush=True)
"""


def test_a_third_signal_leaves_nothing_behind() -> None:
    process = subprocess.Popen([sys.executable, "-c", IMPATIENT], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    for count in range(1, stop.IMPATIENT):
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == f"{count}\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 1
    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


ORPHANS = """
import subprocess, sys
from gammaray.cluster import processes
processes.adopt_orphans()
before = processes.descendants()
child = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
subprocess.run([sys.executable, "-c", child])
processes.end(processes.descendants() - before, 0.0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_what_a_child_left_behind_is_ended_too() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True, check=True)
    assert not psutil.pid_exists(int(done.stdout))


def test_what_ends_by_itself_is_not_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
    processes.end({psutil.Process(process.pid)}, 30.0)
    assert process.wait() == 0
