"""What a Ray cluster of this one machine needs: nothing that listens elsewhere, or writes into HOME."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Container, Mapping

from gammaray.config import Controller, Server
from gammaray.errors import ConfigError, GammarayError

CONNECT_TIMEOUT_S = 5.0
LOOPBACK = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray's core then listens on 127.0.0.1 alone
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}
SERVE = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",  # a chunk costs less than through actor calls
    # A stuck engine ends no stream by itself: its replica would be drained for minutes.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def environment(current: Mapping[str, str], local: bool) -> dict[str, str]:
    """Variables to set before Ray starts; what the user set stays. `local`: we start the cluster."""
    wanted = dict(QUIET)
    if local:
        wanted |= {LOOPBACK[0]: LOOPBACK[1], **SERVE}
        if not any(name in current for name in AUTH):
            # Ray guards a new cluster by a token, and would write one to ~/.ray. This one ends with the run.
            wanted["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return {name: value for name, value in wanted.items() if name not in current}


def check_loopback(current: Mapping[str, str], imported: Container[str]) -> None:
    """Raises GammarayError when Ray would not see LOOPBACK, which it reads once, when it is imported."""
    name, value = LOOPBACK
    if current.get(name, value) != value or ("ray" in imported and name not in current):
        message = f"Ray would listen on every interface: set {name}={value} before ray is imported"
        raise GammarayError(message)


def check_port(server: Server) -> None:
    """Raises ConfigError when HTTP could not listen there. Asked before Ray starts, which takes seconds."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((server.host, server.port))
    except OSError as error:
        reason = f"cannot listen on {server.host}:{server.port}: {error.strerror or error}"
        raise ConfigError(f"{reason}; choose another address with --host or --port") from None


def check_address(address: str) -> None:
    """Raises ConfigError when nothing listens at `host:port`; Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return  # "auto", or a scheme that Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"no Ray cluster answers at {address}: {reason}") from None


def check_audit_log(controller: Controller) -> None:
    """Of a cluster that is this machine. Raises ConfigError when it cannot be written."""
    file = controller.audit_log
    try:
        if file is not None and controller.enabled:
            open(file, "a").close()
    except OSError as error:
        raise ConfigError(f"controller.audit_log: cannot write {file!r}: {error.strerror}") from None
