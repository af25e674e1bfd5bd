"""`make fuzz`: schemathesis against the OpenAPI document of a tiny server. ARGS go to schemathesis.

Passes when at least 5,000 requests were answered, none with 5xx or after the time limit, and the server ended
alive, idle and without a KV block in use.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from typing import Any

from environments import HERE, WORK, plain_environment, python_with
from server import Server, free_port, running

REQUESTS = 5000
SLOWEST_S = 30.0
LIMIT_S = 3600.0


def main(options: list[str]) -> int:
    schemathesis = python_with("requirements-fuzz.txt").with_name("st")
    log = WORK / "tiny-server.log"
    port = free_port()
    with running([sys.executable, HERE / "tiny_server.py", str(port)], port, log, threads=1) as server:
        code = fuzz(server, [str(schemathesis)], options)
        alive = server.process.poll() is None
    seen = json.loads(log.read_text().splitlines()[-1]) if alive else {}
    faults = [fault for fault, there in judge(seen, code, alive).items() if there]
    print(json.dumps(seen))
    print("failed: " + ", ".join(faults) if faults else "ok")
    return bool(faults)


def fuzz(server: Server, schemathesis: list[str], options: list[str]) -> int:
    with urllib.request.urlopen(f"{server.url}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    command = [
        *schemathesis,
        "--config-file",
        str(HERE / "schemathesis.toml"),
        "run",
        f"{server.url}/openapi.json",
    ]
    environment = {**plain_environment(), "FUZZ_MODEL": model, "PYTHONPATH": str(HERE)}
    return subprocess.run([*command, *options], cwd=WORK, env=environment, timeout=LIMIT_S).returncode


def judge(seen: dict[str, Any], code: int, alive: bool) -> dict[str, bool]:
    """Each possible fault, and whether it happened."""
    return {
        "schemathesis found something": code != 0,
        "the server is gone": not alive,
        f"fewer than {REQUESTS} requests": alive and seen["requests"] < REQUESTS,
        "an answer with 5xx": alive and any(status >= "500" for status in seen["statuses"]),
        f"an answer after more than {SLOWEST_S} s": alive and seen["slowest_s"] > SLOWEST_S,
        "KV blocks in use at the end": alive and seen["kv_held"] > 0,
        "requests in the engine at the end": alive and not seen["idle"],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
