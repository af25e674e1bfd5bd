"""The processes of a node give one text, whatever some of them do."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.scraped import samples, value

from gammaray.telemetry.sockets import LONGEST_PATH, folder, gather, merge, register

UP = "gammaray_process_up"


@pytest.fixture
def directory() -> Iterator[Path]:
    """Shorter than pytest's own, whose length is not ours."""
    with TemporaryDirectory(prefix="gr-") as made:
        yield Path(made) / "m"


def text(name: str, number: int) -> bytes:
    return f'# HELP {name} Help of it\n# TYPE {name} counter\n{name}{{p="{number}"}} {number}\n'.encode()


def test_families_of_all_processes_come_once(directory: Path) -> None:
    for number in (1, 2):
        register(directory, f"p{number}", lambda n=number: text("a_total", n) + text("b_total", n))
    found = gather(directory)
    assert found.count(b"# TYPE a_total") == found.count(b"# HELP a_total") == 1
    assert [number for _, number in samples(found, "a_total")] == [1, 2]
    assert [number for _, number in samples(found, "b_total")] == [1, 2]
    assert value(found, UP, service_instance_id="p1") == 1


def test_a_large_text_comes_whole(directory: Path) -> None:
    lines = "".join(f'big{{i="{i}"}} {i}\n' for i in range(100_000))
    register(directory, "p", lambda: f"# HELP big Big\n# TYPE big gauge\n{lines}".encode())
    assert len(gather(directory).splitlines()) == 100_002 + 3


def test_a_histogram_stays_together() -> None:
    head = "# HELP h H\n# TYPE h histogram\n"
    parts = [f'{head}h_bucket{{le="+Inf",p="{i}"}} 1\nh_sum{{p="{i}"}} 1\n'.encode() for i in range(2)]
    lines = merge(parts).decode().splitlines()
    assert [line.partition("{")[0] for line in lines[2:]] == ["h_bucket", "h_sum", "h_bucket", "h_sum"]


def test_what_a_dead_process_left_is_removed(directory: Path) -> None:
    register(directory, "alive", lambda: text("a_total", 1))
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(directory / "dead.sock"))
    dead.close()
    found = gather(directory)
    assert [labels for labels, _ in samples(found, UP)] == [{"service_instance_id": "alive"}]
    assert [path.name for path in directory.iterdir()] == ["alive.sock"]


def test_a_process_that_does_not_answer_in_time_is_told_and_left_out(directory: Path) -> None:
    release = threading.Event()
    register(directory, "fast", lambda: text("a_total", 1))
    register(directory, "slow", lambda: text("a_total", 2) if release.wait(60) else b"")
    found = gather(directory, timeout_s=0.1)
    release.set()
    assert [number for _, number in samples(found, "a_total")] == [1]
    assert value(found, UP, service_instance_id="slow") == 0
    assert (directory / "slow.sock").exists()


def test_one_that_dribbles_is_cut_off_by_the_whole_time(directory: Path) -> None:
    """Each part comes in time; all of them would take for ever."""
    register(directory, "fast", lambda: text("a_total", 1))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "slow.sock"))
    listener.listen()

    def dribble() -> None:
        connection, _ = listener.accept()
        try:
            while True:
                connection.sendall(b"x")
        except OSError:
            connection.close()

    threading.Thread(target=dribble, daemon=True).start()
    ticks = iter(range(10_000))
    found = gather(directory, timeout_s=5, clock=lambda: float(next(ticks)))
    listener.close()
    assert value(found, UP, service_instance_id="slow") == 0


def test_a_text_that_breaks_off_is_left_out_whole(directory: Path) -> None:
    """Half a line would make Prometheus refuse all of it."""
    register(directory, "fast", lambda: text("a_total", 1))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "dying.sock"))
    listener.listen()

    def die() -> None:
        connection, _ = listener.accept()
        connection.sendall(text("a_total", 2)[:-3])
        connection.close()

    threading.Thread(target=die, daemon=True).start()
    found = gather(directory)
    listener.close()
    assert [number for _, number in samples(found, "a_total")] == [1]
    assert value(found, UP, service_instance_id="dying") == 0


def test_a_process_without_metrics_is_up(directory: Path) -> None:
    register(directory, "new", lambda: b"")
    assert value(gather(directory), UP, service_instance_id="new") == 1


def test_a_collector_that_fails_costs_its_own_text_alone(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> bytes:
        raise RuntimeError("secret of a request")

    register(directory, "broken", fail)
    register(directory, "fine", lambda: text("a_total", 1))
    for _ in range(2):
        found = gather(directory)
        assert value(found, UP, service_instance_id="broken") == 0
        assert value(found, UP, service_instance_id="fine") == 1
    assert "RuntimeError" in caplog.text and "secret" not in caplog.text


def test_the_next_process_of_a_name_takes_over(directory: Path) -> None:
    first = register(directory, "p", lambda: text("a_total", 1))
    register(directory, "p", lambda: text("a_total", 2))
    first.close()  # late: must not take the other's file away
    assert [number for _, number in samples(gather(directory), "a_total")] == [2]


def test_one_that_closes_is_gone(directory: Path) -> None:
    register(directory, "p", lambda: text("a_total", 1)).close()
    assert list(directory.iterdir()) == []
    assert samples(gather(directory), UP) == []


def test_only_this_user_may_read(directory: Path) -> None:
    register(directory, "p", lambda: b"")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "p.sock").stat().st_mode) == 0o600


def test_a_folder_of_others_is_refused(directory: Path, tmp_path: Path) -> None:
    directory.mkdir(mode=0o755)
    with pytest.raises(OSError, match="not a folder of this user alone"):
        register(directory, "p", lambda: b"")
    directory.rmdir()
    directory.symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(OSError, match="not a folder of this user alone"):
        register(directory, "p", lambda: b"")


def test_a_path_that_no_socket_can_have_is_refused(directory: Path) -> None:
    with pytest.raises(OSError, match="set TMPDIR"):
        register(directory, "x" * LONGEST_PATH, lambda: b"")


def test_sessions_have_short_folders_of_their_own() -> None:
    one, other = (
        folder("session_2026-11-30_10-00-00_123456_1"),
        folder("session_2026-11-30_10-00-00_123456_2"),
    )
    assert one != other and one == folder("session_2026-11-30_10-00-00_123456_1")
    assert len(os.fsencode(one.name)) < 40


def test_nothing_to_gather(directory: Path) -> None:
    assert samples(gather(directory), UP) == []
