"""One HTTP request from its first byte to its line in the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from gammaray.api.answer import Answer
from gammaray.api.auth import UNKNOWN, Identity
from gammaray.errors import TimedOut

KEY = "gammaray.visit"


@dataclass(slots=True)
class Visit:
    """Filled in on the way: `identity` by the gate, the rest by the route. Times in s of the loop's clock."""

    id: str
    began: float
    seconds: float  # that it may take
    identity: Identity = UNKNOWN
    model: str | None = None
    prompt: Any = None  # the body's field
    answer: Answer | None = None
    first_token: float | None = None
    error: str | None = None  # its code

    @property
    def deadline(self) -> float:
        return self.began + self.seconds

    def shorten(self, wanted: float | None) -> tuple[str, ...]:
        """Takes the client's own `timeout` (s), or notes that it exceeds the server's."""
        if wanted is None:
            return ()
        if wanted > self.seconds:
            return (f"timeout {wanted:g} was cut to {self.seconds:g} s, the limit of this server",)
        self.seconds = wanted
        return ()

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """What runs inside is cancelled at the deadline. Raises TimedOut, also when that has passed."""
        if asyncio.get_running_loop().time() >= self.deadline:
            raise self.over()
        try:
            async with asyncio.timeout_at(self.deadline) as timer:
                yield
        except TimeoutError:
            if timer.expired():
                raise self.over() from None
            raise

    def over(self) -> TimedOut:
        message = f"the request was not done after {self.seconds:g} s"
        return TimedOut(message, param="timeout", code="timeout")


def of(scope: Scope) -> Visit:
    """The visit that `Record` put into the scope."""
    visit: Visit = scope[KEY]
    return visit


def note(scope: Scope, code: str) -> None:
    """Keeps the code of the error that ends a request, if anybody asks."""
    if KEY in scope:
        of(scope).error = code
