"""`make clients`: real clients, unmodified, against `gammaray serve`. One line each; 0 when all are content.

ARGS: `--url URL` uses a server that runs already, `--only NAME` (repeatable) leaves the others out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from environments import HERE, WORK, node_with, plain_environment, python_with
from server import free_port, running

LIMIT_S = 180.0  # per client
Command = list[str | Path]


def openai_python(url: str, model: str) -> Command:
    return [python_with("requirements.txt"), HERE / "openai_client.py", url, model]


def openai_node(url: str, model: str) -> Command:
    if shutil.which("npm") is None:
        raise RuntimeError("npm is not installed")
    return ["node", node_with("package.json", "openai_client.mjs") / "openai_client.mjs", url, model]


def langchain(url: str, model: str) -> Command:
    return [python_with("requirements.txt"), HERE / "langchain_client.py", url, model]


def litellm(url: str, model: str) -> Command:
    return [python_with("requirements.txt"), HERE / "litellm_client.py", url, model]


def aiperf(url: str, model: str) -> Command:
    """It counts tokens with the served model's tokenizer, which it would otherwise fetch from a hub."""
    from gammaray.engine.loading import load_tokenizer

    folder = WORK / "tokenizer"
    load_tokenizer(model).save_pretrained(folder)
    return [python_with("requirements-aiperf.txt"), HERE / "aiperf_client.py", url, model, folder]


CLIENTS: dict[str, Callable[[str, str], Command]] = {
    "openai": openai_python,
    "openai-node": openai_node,
    "langchain-openai": langchain,
    "litellm": litellm,
    "aiperf": aiperf,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--only", action="append", choices=CLIENTS, help="this client, and others so named")
    options = parser.parse_args()
    with server_at(options.url) as url:
        with urllib.request.urlopen(f"{url}/v1/models") as response:
            model = json.load(response)["data"][0]["id"]
        good = [check(name, url, model) for name in options.only or CLIENTS]
    return not all(good)


@contextmanager
def server_at(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    port = free_port()
    command = [Path(sys.executable).with_name("gammaray"), "serve", "--port", str(port)]
    with running(command, port, WORK / "server.log", threads=2) as server:
        yield server.url
    if server.code or server.orphans:
        raise RuntimeError(f"the server ended with {server.code} and left {server.orphans}")


def check(name: str, url: str, model: str) -> bool:
    """Runs one client in its own process group and prints how it went."""
    try:
        code, output = bounded(CLIENTS[name](url, model))
    except (RuntimeError, subprocess.CalledProcessError) as error:
        code, output = 1, str(error)
    lines = output.strip().splitlines() or ["no output"]
    print(f"{'failed' if code else 'ok':<8}{name:<18}{lines[-1]}", flush=True)
    if code:
        print("\n".join(f"        {line}" for line in lines[-80:-1]), flush=True)
    return code == 0


def bounded(command: Command) -> tuple[int, str]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=plain_environment(),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return 1, f"{output}\nno end after {LIMIT_S:.0f} s"
    return process.returncode, output


if __name__ == "__main__":
    sys.exit(main())
