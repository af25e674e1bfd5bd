"""Runs the checks of one client in its own process: `python <name>_client.py URL MODEL`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
URL, MODEL = sys.argv[1:3]
API = f"{URL}/v1"
KEY = "none"  # clients insist on one; the server asks for none
LIMIT_S = 60.0  # per request

# Shorter than one KV block with the template: a repeated request computes what the first one computed.
PROMPT = "one two three one two three one"
QUESTION = "Name three colours."
MESSAGES = [{"role": "user", "content": QUESTION}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": PERSON, "strict": True},
}


def run(version: str, checks: Sequence[Callable[[], None]]) -> None:
    """Runs every check, prints each failure and a last line for the caller, and exits with 0 or 1."""
    failed = 0
    for check in checks:
        try:
            check()
        except Exception as error:
            failed += 1
            print(f"{check.__name__}: {explain(error)}")
    print(f"{version}, {len(checks) - failed} of {len(checks)} checks")
    sys.exit(failed > 0)


def explain(error: Exception) -> str:
    """The error, and the line of this folder that met it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent == HERE]
    return f"{type(error).__name__}: {error}\n    line {frames[-1].lineno}: {frames[-1].line}"
