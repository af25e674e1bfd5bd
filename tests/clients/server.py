"""A server in a process of its own: started, waited for, stopped, and looked at for what it left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

START_S = 180.0
STOP_S = 90.0


@dataclass
class Server:
    """`orphans`: processes that were still there after it had stopped; `stop_s`: what that took. Set on the
    way out, like `code`."""

    url: str
    process: subprocess.Popen[str]
    code: int | None = None
    stop_s: float = 0.0
    orphans: list[str] = field(default_factory=list)
    known: set[psutil.Process] = field(default_factory=set)

    def family(self) -> list[psutil.Process]:
        """Every process that it started, at this moment. It must take all of them with it."""
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        self.known.update(found)
        return found


@contextmanager
def running(command: Sequence[str | Path], port: int, log: Path, threads: int) -> Iterator[Server]:
    """Starts `command`, which listens on `port` of 127.0.0.1, and stops it by SIGTERM.

    `log` takes what it prints. Raises RuntimeError with the log's end when it does not come up in time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment
        )
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        _wait_until_ready(server, log)
        yield server
    finally:
        _stop(server)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_until_ready(server: Server, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.process.poll() is None:
        if answers(f"{server.url}/readyz"):
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server did not become ready; the end of {log}:\n{log.read_text()[-2000:]}")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _stop(server: Server) -> None:
    if server.process.poll() is None:
        server.family()
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    try:
        server.code = server.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.code = server.process.wait()
    server.stop_s = time.monotonic() - began
    _, alive = psutil.wait_procs(server.known, timeout=10)
    server.orphans = [_name(process) for process in alive]
    for process in alive:
        process.kill()


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:80]}"
    except psutil.Error:
        return str(process.pid)
