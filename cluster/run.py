"""Starts Ray and the application, and stops what it started."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from gammaray.cluster import local, processes, proxy, stop
from gammaray.config import NO_KEYS, Config, Server
from gammaray.errors import ConfigError, GammarayError
from gammaray.telemetry import tracing

if TYPE_CHECKING:  # Ray reads its variables when it is imported, and this module sets them
    from gammaray.actors.draft import LinkFactory
    from gammaray.cluster.layout import Layout
    from gammaray.cluster.nodes import Probe

APP = "gammaray"
OBJECT_STORE_BYTES = 128 * 2**20  # chunks are small; Ray would reserve a third of the memory
READY_TIMEOUT_S = 60.0
DEPLOY_POLL_S = 0.1
NO_SIGNALS = stop.Signals()  # never installed
QUIET = {"enable_access_log": False, "log_level": "WARNING"}


def run(config: Config, address: str | None = None, **factories: Any) -> None:
    """Serves until a signal: SIGINT, SIGTERM or SIGHUP. Open requests then finish first (docs/operation.md).

    Raises ConfigError when the configuration cannot be served, and GammarayError when requests had to be
    cut off. `factories`: see `app.build`.
    """
    signals = stop.Signals()
    signals.install()
    began, cut = time.monotonic(), 0
    _say(f"starting {config.target.model} ...")
    for tenant in config.unreachable_tenants():
        _say(f"warning: tenant {tenant!r}: {NO_KEYS}")
    with suppress(stop.Stopped), running(config, address, signals, **factories) as url:
        seconds = time.monotonic() - began
        needs_key = config.server.require_api_key
        print(ready_text(url, config.target.model, served_dtype(url), seconds, needs_key), flush=True)
        while not signals.count:
            time.sleep(stop.POLL_S)
        limit_s = stop.drain_limit(config.server)
        cut = stop.drain(stop.ServeEntrances(APP), limit_s, lambda: signals.count > 1, _say)
        if cut:
            raise stop.Stopped  # in a hurry
    if cut:
        raise GammarayError(f"stopped; {stop.requests(cut)} cut off before the end")
    _say("stopped")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def running(
    config: Config,
    address: str | None = None,
    signals: stop.Signals = NO_SIGNALS,
    probe: Probe | None = None,
    link_factory: LinkFactory | None = None,
    **factories: Any,
) -> Iterator[str]:
    """The application on a Ray cluster of this machine, or on the one at `address`; yields its URL.

    Leaving it stops what entering it started, and nothing else: in order, or at once on stop.Stopped, which
    it raises itself when a signal comes before it yields. `probe`: see `prepare`; `link_factory`: what
    draft workers run; `factories`: see `app.build`.
    """
    if address is None:
        local.check_port(config.server)
        local.check_loopback(os.environ, sys.modules)
        local.check_audit_log(config.controller)
    else:
        local.check_address(address)
    os.environ.update(local.environment(os.environ, local=address is None))
    os.environ.update(tracing.environment(config.telemetry))
    if address is None:
        os.environ.update(proxy.environment(config.server))
    with (
        _ray(address, signals),
        _exposed(config),
        _placed(config, probe, link_factory, signals) as (layout, until_drafts),
        _controlled(config, layout),
        _serve(config.server, ours=address is None),
    ):
        signals.check()
        _deploy(config, layout, **factories)
        _wait_until_running(signals)
        url = _wait_until_ready(config.server, signals)
        until_drafts()
        yield url


@contextmanager
def _ray(address: str | None, signals: stop.Signals) -> Iterator[None]:
    import ray

    with processes.none_left() if address is None else nullcontext(set[psutil.Process]()) as ours:
        signals.check()
        try:
            with signals.kept():
                _init(address)
            signals.check()
            yield
        finally:
            ours.update(processes.descendants())  # after the raylet, its workers may be nobody's children
            with _quietly():
                ray.shutdown()


def _quietly() -> AbstractContextManager[object]:
    """Ray's driver prints what the raylet says of actors that we end ourselves."""
    return redirect_stdout(io.StringIO())


def _init(address: str | None) -> None:
    import ray

    from gammaray.actors.crew import NAMESPACE

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": NAMESPACE}
    if address is None:
        ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
        return
    try:
        ray.init(address, **quiet)
    except Exception as error:
        raise ConfigError(f"cannot join the Ray cluster at {address!r}: {error}") from error


@contextmanager
def _placed(
    config: Config, probe: Probe | None, link_factory: LinkFactory | None, signals: stop.Signals
) -> Iterator[tuple[Layout, Callable[[], None]]]:
    """Where everything goes; its GPUs are held and its draft workers on their way, for which one may wait."""
    from gammaray.cluster import drafts
    from gammaray.cluster.lease import leased
    from gammaray.cluster.prepare import prepare

    layout, nodes = prepare(config, probe, _say)
    with leased(layout.gpus, nodes), drafts.working(config, layout.posts, link_factory) as staff:
        yield layout, lambda: drafts.wait(staff, config, layout.posts, signals.check, _say)


@contextmanager
def _exposed(config: Config) -> Iterator[None]:
    """Prometheus finds what the processes of each machine count."""
    from gammaray.actors.metrics import Exposure

    exposure = Exposure(config, _say)
    exposure.start()
    try:
        yield
    finally:
        exposure.stop()


def _controlled(config: Config, layout: Layout) -> AbstractContextManager[None]:
    from gammaray.cluster.control import controlled

    return controlled(config, layout)


@contextmanager
def _serve(server: Server, ours: bool) -> Iterator[None]:
    """Serve itself stays when it was there before; our application goes in any case. `ours`: the cluster."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    was_there = bool(serve.status().proxies)
    hurry = False
    try:
        if not was_there:
            http = {"host": server.host, "port": server.port}
            serve.start(http_options=http, proxy_location="HeadOnly", logging_config=QUIET)
        yield
    except stop.Stopped:
        hurry = True
        raise
    finally:
        if not (
            hurry and ours
        ):  # else the whole of Ray goes, and nobody waits for a replica that still loads
            with _quietly():
                serve.delete(APP, _blocking=not hurry) if was_there else serve.shutdown()


def _deploy(config: Config, layout: Layout, **factories: Any) -> None:
    from ray import serve

    from gammaray.cluster.app import build
    from gammaray.cluster.nodes import on_this_machine

    application = build(config, loopback=on_this_machine(), layout=layout, **factories)
    target = serve.RunTarget(application, name=APP, route_prefix="/", logging_config=QUIET)
    serve.run_many([target], wait_for_applications_running=False)


def _wait_until_running(signals: stop.Signals) -> None:
    """Raises ConfigError or GammarayError with the reason when a replica does not start."""
    from ray import serve

    while (state := serve.status().applications[APP]).status != "RUNNING":
        signals.check()
        if state.status == "DEPLOY_FAILED":
            parts = state.deployments.values()
            raise start_error("\n".join([state.message, *(part.message for part in parts)]))
        time.sleep(DEPLOY_POLL_S)


def start_error(report: str) -> GammarayError:
    """The reason in Serve's report of a failed start, which holds the replica's traceback as text."""
    ours = re.findall(r"^gammaray\.errors\.\w+: (.+)$", report, re.MULTILINE)
    if ours:
        return ConfigError(ours[-1])
    others = re.findall(r"^\w[\w.]*: .+$", report, re.MULTILINE)
    reason = others[-1] if others else report.strip()
    return GammarayError(f"the application did not start: {reason} (traceback: Ray's logs/serve/replica_*)")


def _wait_until_ready(server: Server, signals: stop.Signals) -> str:
    """Polls over HTTP: the proxy learns its routes a moment after the replicas run."""
    url = f"http://{_reachable(server.host)}:{server.port}"
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        signals.check()
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


def ready_text(url: str, model: str, dtype: str, seconds: float, needs_key: bool = False) -> str:
    """One line with the address, and a command to try."""
    key = "-H 'Authorization: Bearer KEY' " if needs_key else ""
    messages = [{"role": "user", "content": "Name three rivers."}]
    body = json.dumps({"model": model, "messages": messages, "temperature": 0})
    return (
        f"ready: {model} ({dtype}) at {url} (started in {seconds:.1f} s; Ctrl-C stops it)\n"
        f"try:   curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'"
    )
