"""`gammaray top`: the tenants of a running server in the terminal, from the operator's overview."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from gammaray.errors import Forbidden, GammarayError, InvalidRequest, Unauthorized
from gammaray.telemetry.screen import plain, screen

Json = dict[str, Any]

PATH = "/gammaray/v1/overview"
TIMEOUT_S = 10.0
HOW = "give an operator key with --operator-key or GAMMARAY_OPERATOR_KEY"


def top(
    url: str,
    key: str | None = None,
    *,
    once: bool = False,
    as_json: bool = False,
    interval_s: float = 2.0,
    console: Console | None = None,
    transport: httpx.BaseTransport | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Shows the overview every `interval_s` until Ctrl-C, or `once`; `as_json`: as a line of JSON.

    Raises GammarayError when no server answers at `url`, or it wants another key. A view that runs waits
    for a server that is lost meanwhile.
    """
    with _client(url, key, transport) as http, suppress(KeyboardInterrupt):
        data = fetch(http)
        if as_json:
            _print_lines(http, data, once, lambda: sleep(interval_s))
        elif once:
            (console or Console()).print(screen(data))
        else:
            _watch(http, data, console or Console(), lambda: sleep(interval_s))


def _print_lines(http: httpx.Client, data: Json, once: bool, pause: Callable[[], None]) -> None:
    print(json.dumps(data), flush=True)
    while not once:
        pause()
        print(json.dumps(fetch(http)), flush=True)


def _watch(http: httpx.Client, data: Json, console: Console, pause: Callable[[], None]) -> None:
    with Live(screen(data), console=console, screen=True, auto_refresh=False) as live:
        for view in _views(http, data):
            live.update(view, refresh=True)
            pause()


def _views(http: httpx.Client, data: Json) -> Iterator[Group]:
    """The screen again and again; while the server is lost, the last one with the reason above."""
    trouble = ""
    while True:
        yield Group(Text(plain(trouble), "bold red"), screen(data)) if trouble else screen(data)
        try:
            data, trouble = fetch(http), ""
        except (Unauthorized, Forbidden):
            raise
        except GammarayError as error:
            trouble = error.message


def _client(url: str, key: str | None, transport: httpx.BaseTransport | None) -> httpx.Client:
    if key and not (key.isascii() and key.isprintable()):
        raise InvalidRequest("the key has characters that no key has")  # httpx's own error would show it
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, transport=transport)


def fetch(http: httpx.Client) -> Json:
    """The overview. Raises Unauthorized, Forbidden, or GammarayError when there is none."""
    try:
        response = http.get(PATH)
        if response.is_success:
            overview: Json = response.json()
            return overview
        reason = _reason(response)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        message = f"no model server answers at {http.base_url}: {error}; start one with `gammaray serve`"
        raise GammarayError(message) from None
    if response.status_code == 401:
        raise Unauthorized(f"{reason}; {HOW}")
    if response.status_code == 403:
        raise Forbidden(f"{reason}; {HOW}")
    raise GammarayError(f"the server at {http.base_url} has no overview: {reason}")


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {response.status_code}"
