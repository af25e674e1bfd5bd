"""Starts Ray and the application, and stops what it started."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from typing import Any

import httpx

from gammaray.cluster import local
from gammaray.config import NO_KEYS, Config, Server
from gammaray.errors import ConfigError, GammarayError

APP = "gammaray"
OBJECT_STORE_BYTES = 128 * 2**20  # chunks are small; Ray would reserve a third of the memory
READY_TIMEOUT_S = 60.0
QUIET = {"enable_access_log": False, "log_level": "WARNING"}


def run(config: Config, address: str | None = None, **factories: Any) -> None:
    """Serves until Ctrl-C or SIGTERM. Raises ConfigError when the configuration cannot be served.

    `factories`: see `app.build`.
    """
    began = time.monotonic()
    print(f"starting {config.target.model} ...", file=sys.stderr, flush=True)
    for tenant in config.unreachable_tenants():
        print(f"warning: tenant {tenant!r}: {NO_KEYS}", file=sys.stderr, flush=True)
    try:
        with running(config, address, **factories) as url:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            seconds = time.monotonic() - began
            print(ready_text(url, config.target.model, served_dtype(url), seconds), flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)


@contextmanager
def running(config: Config, address: str | None = None, **factories: Any) -> Iterator[str]:
    """The application on a Ray cluster of this machine, or on the one at `address`; yields its URL.

    Leaving it stops what entering it started, and nothing else. `factories`: see `app.build`.
    """
    if address is None:
        local.check_port(config.server)
        local.check_loopback(os.environ, sys.modules)
    else:
        local.check_address(address)
    os.environ.update(local.environment(os.environ, local=address is None))
    with _ray(address), _serve(config.server):
        _deploy(config, loopback=address is None, **factories)
        yield _wait_until_ready(config.server)


@contextmanager
def _ray(address: str | None) -> Iterator[None]:
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
    else:
        _connect(address, quiet)
    try:
        yield
    finally:
        with _quietly():
            ray.shutdown()


def _quietly() -> AbstractContextManager[object]:
    """Ray's driver prints what the raylet says of actors that we end ourselves."""
    return redirect_stdout(io.StringIO())


def _connect(address: str, options: dict[str, Any]) -> None:
    import ray

    try:
        ray.init(address, **options)
    except Exception as error:
        raise ConfigError(f"cannot join the Ray cluster at {address!r}: {error}") from error


@contextmanager
def _serve(server: Server) -> Iterator[None]:
    """Serve itself stays when it was there before; our application goes in any case."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    was_there = bool(serve.status().proxies)
    if not was_there:
        http = {"host": server.host, "port": server.port}
        serve.start(http_options=http, proxy_location="HeadOnly", logging_config=QUIET)
    try:
        yield
    finally:
        with _quietly():
            serve.delete(APP) if was_there else serve.shutdown()


def _deploy(config: Config, loopback: bool, **factories: Any) -> None:
    from ray import serve

    from gammaray.cluster.app import build

    try:
        application = build(config, loopback=loopback, **factories)
        serve.run(application, name=APP, route_prefix="/", logging_config=QUIET)
    except RuntimeError as error:
        parts = serve.status().applications[APP].deployments.values()
        raise start_error("\n".join([str(error), *(part.message for part in parts)])) from None


def start_error(report: str) -> GammarayError:
    """The reason in Serve's report of a failed start, which holds the replica's traceback as text."""
    ours = re.findall(r"^gammaray\.errors\.\w+: (.+)$", report, re.MULTILINE)
    if ours:
        return ConfigError(ours[-1])
    others = re.findall(r"^\w[\w.]*: .+$", report, re.MULTILINE)
    reason = others[-1] if others else report.strip()
    return GammarayError(f"the application did not start: {reason} (traceback: Ray's logs/serve/replica_*)")


def _wait_until_ready(server: Server) -> str:
    """Polls over HTTP: the proxy learns its routes a moment after the replicas run."""
    url = f"http://{_reachable(server.host)}:{server.port}"
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/readyz", timeout=10, trust_env=False).status_code == 200:
                return url
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise GammarayError(f"the application runs, but {url} does not answer; does Serve listen elsewhere?")


def _reachable(host: str) -> str:
    """Where this machine finds a server that listens on `host`."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def served_dtype(url: str) -> str:
    """What `auto` became."""
    return str(httpx.get(f"{url}/readyz", timeout=10, trust_env=False).json()["dtype"])


def ready_text(url: str, model: str, dtype: str, seconds: float) -> str:
    """One line with the address, and a command to try."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return (
        f"ready: {model} ({dtype}) at {url} (started in {seconds:.1f} s; Ctrl-C stops it)\n"
        f"try:   curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    )
