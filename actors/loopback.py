"""Keeps Ray Serve's own gRPC port on this machine."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def bind_replica_to_loopback() -> None:
    """Serve opens a gRPC port on every interface in each replica, and offers no setting for it.

    To be called by a replica's constructor: the port is opened right after it. A cluster of one
    machine needs nothing but 127.0.0.1.
    """
    replica: Any = import_module("ray.serve._private.replica")
    original = replica.add_port_to_grpc_server

    def bind(server: Any, address: str) -> int:
        port: int = original(server, address.replace("[::]", "127.0.0.1"))
        return port

    replica.add_port_to_grpc_server = bind
