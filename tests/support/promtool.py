"""Prometheus and its tool, where they are installed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

READY_S = 30.0
CONFIG = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ['{rules}']
scrape_configs:
  - job_name: gammaray
    static_configs: [{{targets: ['127.0.0.1:{port}']}}]
"""


def binary(name: str) -> str:
    """Skips the test where there is none."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name} (apt install prometheus)")
    return path


def promtool(*arguments: object) -> str:
    """What it prints. Fails the test when it says no."""
    done = subprocess.run(
        [binary("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Server:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        return httpx.get(f"{self._url}{path}", params=parameters, timeout=30, trust_env=False)

    def query(self, expression: str) -> list[Any]:
        """The series that it has now."""
        answer = self.get("/api/v1/query", query=expression).json()
        assert answer["status"] == "success", answer
        found: list[Any] = answer["data"]["result"]
        return found

    def ready(self) -> bool:
        try:
            return bool(self.get("/-/ready").status_code == 200)
        except httpx.TransportError:
            return False


@contextmanager
def prometheus(folder: Path, port: int, rules: Path) -> Iterator[Server]:
    """Scrapes 127.0.0.1:`port` each second."""
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(rules=rules, port=port))
    listen = free_port()
    command = [binary("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{listen}", "--log.level=error"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server, ends = Server(listen), time.monotonic() + READY_S
        while not server.ready():
            assert process.poll() is None and time.monotonic() < ends, "Prometheus does not start"
            time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
