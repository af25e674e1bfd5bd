"""Reading server-sent events as the standard (WHATWG HTML, 9.2.6) says, without the code that writes them."""

from __future__ import annotations

import json
import re
from typing import Any


def data(stream: bytes) -> list[str]:
    """The data of each event, in order. Any other field is an error here."""
    text = stream.decode("utf-8")
    found, lines = [], []
    for line in re.split("\r\n|\n|\r", text):
        if line:
            field, _, value = line.partition(":")
            assert field == "data", f"an unexpected field {field!r}"
            lines.append(value.removeprefix(" "))
        elif lines:
            found.append("\n".join(lines))
            lines = []
    assert not lines, "the stream ends inside an event"
    return found


def events(stream: bytes) -> list[Any]:
    """The JSON of each event; the last must be [DONE]."""
    *found, last = data(stream)
    assert last == "[DONE]"
    return [json.loads(item) for item in found]
