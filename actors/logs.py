"""What our rooms log in a replica, in the file that Serve keeps for that replica."""

from __future__ import annotations

import logging

from ray import serve
from ray.serve.exceptions import RayServeException


def log_beside_serve() -> None:
    """In a replica Serve takes standard error, where Python's warnings would go, for its own debugging.

    Elsewhere nothing changes.
    """
    try:
        serve.get_replica_context()
    except RayServeException:
        return
    logger = logging.getLogger("gammaray")
    logger.handlers = list(logging.getLogger("ray.serve").handlers)
    logger.propagate = False
