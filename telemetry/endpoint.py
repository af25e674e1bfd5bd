"""One HTTP address a node for Prometheus: GET /metrics."""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
from collections.abc import Callable, Collection
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address

from gammaray.errors import ConfigError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CONNECTION_S = 10.0  # of a client that says nothing


def listening_host(host: str) -> str:
    """Where metrics listen when HTTP listens on `host`: nowhere but here, unless that is open too."""
    try:
        return "127.0.0.1" if ip_address(host).is_loopback else host
    except ValueError:  # a name
        return "127.0.0.1" if host == "localhost" else host


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, gather: Callable[[], bytes], keys: Collection[str]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.gather, self.keys = gather, tuple(keys)
        super().__init__((host, port), _Handler)

    def admits(self, authorization: str) -> bool:
        sent = hashlib.sha256(authorization.removeprefix("Bearer ").encode()).hexdigest()
        return not self.keys or any(hmac.compare_digest(sent, key) for key in self.keys)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CONNECTION_S

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._send(HTTPStatus.NOT_FOUND, b"metrics are at /metrics\n")
        elif not self.server.admits(self.headers.get("authorization", "")):
            self._send(HTTPStatus.UNAUTHORIZED, b"an operator key is needed: Authorization: Bearer KEY\n")
        else:
            self._send(HTTPStatus.OK, self.server.gather())

    def _send(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a scrape every few seconds is no news."""


class Endpoint:
    """Answers from a thread until closed."""

    def __init__(self, host: str, port: int, gather: Callable[[], bytes], keys: Collection[str] = ()) -> None:
        """Port 0: any. `keys`: SHA-256 of those that may ask; none: all. Raises ConfigError."""
        try:
            self._server = _Server(host, port, gather, keys)
        except OSError as error:
            reason = f"metrics cannot listen on {host}:{port}: {error.strerror or error}"
            raise ConfigError(f"{reason}; choose another telemetry.prometheus_port (0: none)") from None
        self.host, self.port = host, int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True, name="metrics-http").start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
