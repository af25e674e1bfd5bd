"""AIPerf, NVIDIA's benchmark tool: one small profile. `aiperf_client.py URL MODEL TOKENIZER-FOLDER`."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from checks import MODEL, URL, run

REQUESTS, OUTPUT_TOKENS = 4, 64  # long enough for a text that repeats itself, and so is drafted for


@cache
def report() -> dict[str, Any]:
    """What it measured. Raises RuntimeError with its output when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            Path(sys.executable).with_name("aiperf"),
            "profile",
            *("--model", MODEL, "--url", URL, "--tokenizer", sys.argv[3]),
            *("--endpoint-type", "chat", "--streaming"),
            *("--request-count", str(REQUESTS), "--concurrency", "2"),
            *("--extra-inputs", "temperature:0"),
            *("--isl", "32", "--osl", str(OUTPUT_TOKENS), "--random-seed", "1"),
            *("--ui", "none", "--no-gpu-telemetry", "--output-artifact-dir", folder),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}\n{done.stdout[-3000:]}")
        found: dict[str, Any] = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
        return found


def no_request_failed() -> None:
    assert report()["request_count"]["avg"] == REQUESTS
    assert report()["request_error_rate"]["avg"] == 0
    assert report()["error_summary"] == []
    assert report()["usage_completion_tokens"]["max"] <= OUTPUT_TOKENS


def acceptance_is_read() -> None:
    """From `metrics.speculative_decoding` of each answer."""
    assert report()["spec_decode_acceptance_length"]["min"] >= 1
    assert report()["total_spec_decode_steps"]["avg"] > 0


if __name__ == "__main__":
    run(importlib.metadata.version("aiperf"), [no_request_failed, acceptance_is_read])
