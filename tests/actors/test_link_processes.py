"""The draft link between real processes, over a Unix socket and TCP: greetings, deaths, and stopped workers.

Exact times are asserted in simulated time (test_link.py). Here only texts, and that nothing hangs.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.decoding import Driver
from support.draft_process import VOCAB, connected, device, language, remote, worker
from support.rig import requests
from support.simlink import NAME, SECRET
from support.tape import Letters

from gammaray.actors.link.channel import Address, ChannelLost, SocketChannel, connect, listen
from gammaray.actors.link.frames import Asked, Change, Hello, Kind, Reader, Update, pack_draft, pack_hello
from gammaray.actors.link.remote import RemoteDrafter
from gammaray.engine.drafters.base import DraftView
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.types import PLAIN, SamplingParams

Place = str | tuple[str, int]


@pytest.fixture(params=["unix", "tcp"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "unix":
        return str(tmp_path / "draft")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return "127.0.0.1", probe.getsockname()[1]


def engine(drafter: RemoteDrafter) -> Engine:
    options = EngineOptions(max_batch=8, token_budget=256, oracle=True)
    return Engine(device(language(), 0.002), Letters(), drafters={"small": drafter}, options=options)


def texts(driver: Driver) -> dict[tuple[str, int], list[int]]:
    return {key: outcome.ids for key, outcome in driver.outcomes.items()}


def expected(tokens: int) -> dict[tuple[str, int], list[int]]:
    from dataclasses import replace

    plain = Driver(Engine(device(language(), 0.0), Letters()))
    plain.submit(replace(request, plan=PLAIN) for request in requests(tokens=tokens))
    plain.finish()
    return texts(plain)


def test_texts_are_the_same_and_drafts_were_made_ahead(place: Place) -> None:
    with worker(place):
        drafter = connected(remote(place))
        driver = Driver(engine(drafter))
        driver.submit(requests(tokens=100))
        driver.finish()
        assert texts(driver) == expected(100)
        assert drafter.drafts > 20
        drafter.link.close()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize("fault", [kill, stop])
def test_a_worker_that_goes_away_in_the_midst_of_a_text(place: Place, fault: Callable[[int], None]) -> None:
    with worker(place) as process:
        drafter = connected(remote(place))
        driver = Driver(engine(drafter))
        driver.submit(requests(tokens=150))
        for _ in range(8):
            driver.step()
        assert drafter.drafts > 0
        fault(process.pid or 0)
        driver.finish()
        assert texts(driver) == expected(150)
        drafter.link.close()


def test_a_stopped_worker_that_goes_on_is_used_again(tmp_path: Path) -> None:
    place = str(tmp_path / "draft")
    with worker(place) as process:
        drafter = connected(remote(place))
        driver = Driver(engine(drafter))
        driver.submit(requests(tokens=400))
        for _ in range(8):
            driver.step()
        os.kill(process.pid or 0, signal.SIGSTOP)
        for _ in range(5):
            driver.step()
        drafted = drafter.drafts
        os.kill(process.pid or 0, signal.SIGCONT)
        time.sleep(0.3)
        driver.finish()
        assert drafter.drafts > drafted
        assert texts(driver) == expected(400)
        drafter.link.close()


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[str]:
    place = str(tmp_path / "draft")
    with worker(place):
        connected(remote(place)).link.close()
        yield place


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello(b"wrong", VOCAB, NAME), "secret"),
        (Hello(SECRET, VOCAB + 1, NAME), f"vocabulary of {VOCAB + 1}"),
        (Hello(SECRET, VOCAB, "other"), "runs drafter 'small'"),
        (Hello(SECRET, VOCAB, NAME, protocol=99), "protocol 99"),
    ],
)
def test_a_stranger_is_turned_away_with_a_reason(listening: str, hello: Hello, reason: str) -> None:
    channel = connect(Address(listening, SECRET), 5)
    channel.send(pack_hello(hello, 0))
    frame = channel.receive(time.perf_counter() + 10)
    assert frame is not None
    reader = Reader(frame)
    assert reader.kind is Kind.REFUSED
    assert reason in reader.raw().decode()
    with pytest.raises(ChannelLost):
        channel.receive(time.perf_counter() + 10)


def test_garbage_does_not_disturb_others(listening: str) -> None:
    drafter = connected(remote(listening))
    for noise in (b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\x08\x00\x00\x00garbage!"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(listening)
            stranger.sendall(noise)
    driver = Driver(engine(drafter))
    driver.submit(requests(tokens=30))
    driver.finish()
    assert texts(driver) == expected(30)
    assert drafter.drafts > 5
    drafter.link.close()


def test_who_comes_and_goes_does_not_disturb_others(listening: str) -> None:
    drafter = connected(remote(listening))
    driver = Driver(engine(drafter))
    driver.submit(requests(tokens=60))
    while not driver.engine.idle:
        driver.step()
        for _ in range(5):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(listening)
    assert texts(driver) == expected(60)
    assert drafter.link.losses == 0 and drafter.drafts > 10
    drafter.link.close()


def ask(depth: int = 2, width: int = 1, tokens: tuple[int, ...] = (1, 2, 3)) -> bytes:
    view = DraftView("", len(tokens), depth, width, SamplingParams(), 0)
    return pack_draft(0, 1, [Update(Change.BEGIN, 1, 0, tokens)], [Asked(1, view)])


@pytest.mark.parametrize(
    "question",
    [ask(depth=255), ask(depth=255, width=255), ask(depth=0), ask(tokens=(4_000_000_000,)), ask(tokens=())],
    ids=["deep", "wide", "flat", "no token", "empty"],
)
def test_what_no_replica_asks_is_refused_and_disturbs_nobody(listening: str, question: bytes) -> None:
    drafter = connected(remote(listening))
    channel = connect(Address(listening, SECRET), 5)
    channel.send(pack_hello(Hello(SECRET, VOCAB, NAME), 0))
    assert channel.receive(time.perf_counter() + 10) is not None
    channel.send(question)
    frame = channel.receive(time.perf_counter() + 10)
    assert frame is not None and Reader(frame).kind is Kind.REFUSED
    driver = Driver(engine(drafter))
    driver.submit(requests(tokens=20))
    driver.finish()
    assert drafter.link.losses == 0 and drafter.drafts > 2
    drafter.link.close()
    channel.close()


def test_a_stranger_may_not_send_much(listening: str) -> None:
    channel = connect(Address(listening, SECRET), 5)
    channel.send(bytes(100_000))
    with pytest.raises(ChannelLost):
        channel.receive(time.perf_counter() + 10)
    channel.close()


def test_a_socket_of_this_user_only(tmp_path: Path) -> None:
    place = str(tmp_path / "draft")
    with listen(place):
        assert os.stat(place).st_mode & 0o077 == 0
    with listen(place):  # also where a dead one left its file
        pass


def test_a_peer_that_does_not_read_is_not_waited_for() -> None:
    one, two = socket.socketpair()
    channel = SocketChannel(one)
    began = time.monotonic()
    with pytest.raises(ChannelLost):
        for _ in range(100):
            channel.send(b"x" * 2**20)
    assert time.monotonic() - began < 30
    two.close()
    channel.close()


def test_frames_arrive_in_pieces_and_together() -> None:
    one, two = socket.socketpair()
    channel = SocketChannel(two)
    data = b"\x03\x00\x00\x00abc\x00\x00\x00\x00\x02\x00\x00\x00de"
    for piece in (data[:2], data[2:6], data[6:]):
        one.sendall(piece)
        if piece is data[:2]:
            assert channel.receive(time.perf_counter()) is None
    found = [channel.receive(time.perf_counter() + 5) for _ in range(3)]
    assert found == [b"abc", b"", b"de"]
    one.close()
    with pytest.raises(ChannelLost):
        channel.receive(time.perf_counter() + 5)
    channel.close()
