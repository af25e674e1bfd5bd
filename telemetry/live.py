"""The files of the live page, as package data. They hold no data of a server, so anybody may read them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

INDEX = "index.html"
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # else a page outlives the server that it came with
}


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    media_type: str


@cache
def assets() -> dict[str, Asset]:
    """File name -> what a browser gets. Read once: a name in a request never becomes a path."""
    found = files("gammaray.telemetry").joinpath("page").iterdir()
    return {file.name: Asset(file.read_bytes(), TYPES[file.name.rpartition(".")[2]]) for file in found}
