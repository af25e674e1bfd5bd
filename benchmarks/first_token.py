"""From a fresh clone to the first token, as a newcomer would: clone, `make install`, `gammaray serve`.

    python benchmarks/first_token.py [--no-serve] [--python python3] [--from .] [--note TEXT] [--out FOLDER]

Metric: seconds of each part, and their sum up to the first text that a client sees; one request, no baseline.
`--no-serve` asks `gammaray generate` instead, which starts no Ray. Clone, environment, pip's cache and the
converted model are in a new folder that is deleted at the end; what the system has read before may still be
in memory. Clones the last commit, not what is uncommitted. pip takes as long as its index is far away.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
MESSAGE = {"role": "user", "content": "Name three rivers."}
MODEL = "smollm2-135m-instruct"
PATIENCE_S = 600


def measured(source: str, python: str, serve: bool, folder: Path) -> dict[str, float]:
    """Seconds of each part, in order."""
    clone, env = folder / "gammaray", environment(folder)
    source = str(Path(source).resolve()) if Path(source).exists() else source
    gammaray = clone / ".venv" / "bin" / "gammaray"

    def run(*command: str | Path) -> float:
        began = time.perf_counter()
        subprocess.run(command, cwd=folder, env=env, check=True, stdout=sys.stderr)
        return time.perf_counter() - began

    parts = {
        "clone": run("git", "clone", "--quiet", "--no-local", source, clone),
        "make install": run("make", "-C", clone, "install", f"PYTHON={python}"),
    }
    if serve:
        parts["gammaray serve, to the first text of a stream"] = streamed(gammaray, env, folder)
    else:
        words = (gammaray, "generate", str(MESSAGE["content"]), "--max-tokens", "1")
        parts["gammaray generate, to one token"] = run(*words)
    return {name: round(taken, 1) for name, taken in parts.items()}


def environment(folder: Path) -> dict[str, str]:
    """No cache of ours or of pip, and none of this process's own environment."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_", "PYTHON"))}
    return ours | {"XDG_CACHE_HOME": str(folder / "cache"), "PIP_CACHE_DIR": str(folder / "pip")}


def streamed(gammaray: Path, env: dict[str, str], folder: Path) -> float:
    """Seconds from the command to the first text, asked for as soon as the server is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.perf_counter()
    with server([gammaray, "serve", "--port", str(port)], env, folder) as process:
        url = f"http://127.0.0.1:{port}"
        wait(f"{url}/readyz", process)
        body = json.dumps({"model": MODEL, "messages": [MESSAGE], "stream": True}).encode()
        call = urllib.request.Request(
            f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(call, timeout=PATIENCE_S) as answer:
            if any(map(content, answer)):
                return time.perf_counter() - began
    raise SystemExit("the stream had no text")


@contextmanager
def server(command: list[str | Path], env: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=sys.stderr)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


def wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit("the server did not become ready")


def content(line: bytes) -> str:
    """What a line of the stream adds to the text."""
    data = line.decode().removeprefix("data: ").strip()
    choices = json.loads(data)["choices"] if data.startswith("{") else []
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def machine() -> dict[str, object]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    }


def table(report: dict[str, object], parts: dict[str, float]) -> str:
    lines = [
        "# From a fresh clone to the first token",
        "",
        "No cache of pip, no converted model; one request at a time.",
        "",
        f"Machine: `{json.dumps(report['machine'])}`",
        f"Commit: `{report['commit']}`",
        f"Command: `{report['command']}`",
        "",
        "| part | seconds |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in parts.items()),
        "",
        f"From the start of the clone to the first token: **{report['first_token_s']} s**.",
        f"The environment is {report['environment_mib']} MiB. {report['note']}".rstrip(),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--no-serve", dest="serve", action="store_false", help="Start no Ray.")
    parser.add_argument("--python", default="python3")
    parser.add_argument("--from", dest="source", default=str(CHECKOUT), help="What to clone.")
    parser.add_argument("--note", default="", help="What else a reader should know.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    before = machine()  # its load is that of others
    with tempfile.TemporaryDirectory() as name:
        parts = measured(given.source, given.python, given.serve, Path(name))
        files = (path.lstat().st_size for path in (Path(name) / "gammaray" / ".venv").rglob("*"))
        size = sum(files) >> 20
    report: dict[str, object] = {
        "machine": before,
        "commit": git("rev-parse", "--short", "HEAD", folder=given.source),
        "command": " ".join(["python", "benchmarks/first_token.py", *sys.argv[1:]]),
        "seconds": parts,
        "first_token_s": round(sum(parts.values()), 1),
        "environment_mib": size,
        "note": given.note,
    }
    (given.out / "first_token.json").write_text(json.dumps(report, indent=1) + "\n")
    (given.out / "first_token.md").write_text(table(report, parts))
    print((given.out / "first_token.md").read_text())


def git(*words: str, folder: str) -> str:
    done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
