"""Errors as logs may have them."""

from __future__ import annotations

import traceback


def described(error: BaseException) -> tuple[str, str]:
    """Kind and frames of an error, for a log, without its message: that might hold tokens or text."""
    return type(error).__name__, "".join(traceback.format_tb(error.__traceback__))
