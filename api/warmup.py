"""Sends synthetic requests through the ingress's own path, so that drafters and caches are warm.

They stay out of the way of real requests: few at once; the last in their tenant's queue; short; a new one
only while nothing waits for the engine; and none at all once the server drains. They belong to the class
`warmup`, whose numbers are in no alert, in no bill and in no other class's acceptance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

from gammaray.api import job
from gammaray.api.chunks import chunks
from gammaray.api.client import EngineClient, Planner
from gammaray.api.drain import Drain
from gammaray.api.fields import MAX_INT
from gammaray.api.job import Terms
from gammaray.api.prompt import Inputs, chat_inputs, completion_inputs
from gammaray.api.schema import ChatBody, CompletionBody
from gammaray.api.tokens import Vocabulary
from gammaray.errors import GammarayError, InvalidRequest, NotFound, Overloaded, Unprocessable
from gammaray.types import NO_FORECAST, WARMUP_CLASS, ModelInfo

Messages = Sequence[tuple[str, str]]  # role, content
AT_ONCE = 2
MAX_TOKENS = 64  # of one answer: a place that a real request may need is free again soon
PAUSE_S = 1.0  # before another look at a busy engine

State = Literal["running", "done", "cancelled"]
DONE: State = "done"
CANCELLED: State = "cancelled"


@dataclass(frozen=True, slots=True)
class Progress:
    """Of a tenant's warm-up. `reason`: the last failure's."""

    state: State
    total: int
    done: int = 0
    failed: int = 0
    tokens: int = 0  # emitted
    reason: str | None = None


class WarmUps:
    """At most one a tenant. The event loop of the ingress calls it."""

    def __init__(
        self,
        client: EngineClient,
        vocabulary: Vocabulary,
        planner: Planner,
        drain: Drain,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._client, self._vocabulary, self._planner = client, vocabulary, planner
        self._drain, self._sleep = drain, sleep
        self._progress: dict[str, Progress] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, tenant: str, conversations: Sequence[Messages], drafter: str | None = None) -> Progress:
        """Begins in the background, with that drafter or the tenant's own.

        Raises InvalidRequest while the tenant's last warm-up runs.
        """
        if tenant in self._tasks:
            message = f"a warm-up of {tenant!r} is running; cancel it or wait for its end"
            raise InvalidRequest(message, param="tenant", code="warmup_runs")
        self._progress[tenant] = Progress("running", len(conversations))
        task = asyncio.create_task(self._run(tenant, conversations, drafter))
        self._tasks[tenant] = task
        task.add_done_callback(lambda _: self._tasks.pop(tenant))
        return self._progress[tenant]

    def progress(self, tenant: str) -> Progress:
        """Raises NotFound when there was none."""
        if tenant not in self._progress:
            raise NotFound(f"no warm-up of {tenant!r} was started here", param="tenant", code="no_warmup")
        return self._progress[tenant]

    async def cancel(self, tenant: str) -> Progress:
        """Ends a running one; its open requests are aborted. Raises NotFound when there was none."""
        if task := self._tasks.get(tenant):
            task.cancel()
            await asyncio.wait([task])
        return self.progress(tenant)

    async def _run(self, tenant: str, conversations: Iterable[Messages], drafter: str | None) -> None:
        todo, state = iter(conversations), CANCELLED
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(self._work(tenant, todo, drafter))
            state = CANCELLED if self._drain.closed else DONE
        finally:
            self._note(tenant, state=state)

    async def _work(self, tenant: str, todo: Iterator[Messages], drafter: str | None) -> None:
        for messages in todo:
            await self._until_free()
            if self._drain.closed:
                return
            try:
                whole = await self._ask(tenant, messages, drafter)
            except GammarayError as error:
                self._note(tenant, failed=self._progress[tenant].failed + 1, reason=error.message)
            else:
                self._note(tenant, done=self._progress[tenant].done + whole)

    async def _until_free(self) -> None:
        while not self._drain.closed and await self._is_busy():
            await self._sleep(PAUSE_S)

    async def _is_busy(self) -> bool:
        try:
            return (await self._client.health()).waiting > 0
        except Overloaded:
            return True

    async def _ask(self, tenant: str, messages: Messages, drafter: str | None) -> bool:
        """One request, like any of the tenant's. False: the server drained before its end."""
        info = await self._client.info()
        body, inputs = await asyncio.to_thread(_inputs, messages, drafter, self._vocabulary, info)
        asked = job.ask(body, inputs, tenant, {})
        with self._planner.open(asked) as planned:
            pass  # not open while it runs: it must not be the probe that a real request waits for
        terms = Terms(tenant, None, None, ())
        made = job.build(body, inputs, asked, planned, info, terms)
        tagged = tuple(replace(r, request_class=WARMUP_CLASS, forecast=NO_FORECAST) for r in made.requests)
        async with aclosing(chunks(self._client, replace(made, requests=tagged))) as stream:
            async for _, chunk in stream:
                if self._drain.closed:
                    return False
                self._note(tenant, tokens=self._progress[tenant].tokens + len(chunk.ids))
        return True

    def _note(self, tenant: str, **changes: Any) -> None:
        self._progress[tenant] = replace(self._progress[tenant], **changes)


def _inputs(
    messages: Messages, drafter: str | None, vocabulary: Vocabulary, info: ModelInfo
) -> tuple[ChatBody | CompletionBody, Inputs]:
    """As a chat, or as a plain text where the checkpoint has no template for this one."""
    common: dict[str, Any] = {"model": info.name, "max_tokens": MAX_TOKENS, "priority": MAX_INT}
    if drafter is not None:
        common["speculation"] = {"enabled": True, "drafter": drafter}
    turns = [{"role": role, "content": content} for role, content in messages]
    try:
        chat = ChatBody.model_validate({**common, "messages": turns})
        return chat, chat_inputs(chat, vocabulary, info)
    except Unprocessable:
        text = "\n\n".join(content for _, content in messages)
        plain = CompletionBody.model_validate({**common, "prompt": text})
        return plain, completion_inputs(plain, vocabulary, info)
