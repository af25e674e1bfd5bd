"""What is logged in a replica, by our rooms and by Serve, in the file that Serve keeps for that replica."""

from __future__ import annotations

import logging

from ray import serve
from ray.serve.exceptions import RayServeException

from gammaray.engine.discreet import described


class Discreet(logging.Filter):
    """Errors lose their messages, which might hold tokens or text: Serve logs those of failed requests."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Exception):
            kind, frames = described(error)
            record.msg, record.args = f"{record.getMessage()} ({kind})\n{frames}", ()
            record.exc_info = record.exc_text = None
        return True


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
    for handler in logger.handlers:
        handler.addFilter(Discreet())
