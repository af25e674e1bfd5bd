"""The async shell around an Engine: one thread steps it, coroutines read their chunks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gammaray.engine.capture import Capture
from gammaray.engine.discreet import described
from gammaray.engine.engine import TOKEN_BUDGET, Engine
from gammaray.errors import EngineFailure, ReplicaLost
from gammaray.types import (
    DraftLinks,
    GenerateRequest,
    Health,
    ModelInfo,
    PolicySnapshot,
    StepReport,
    TokenChunk,
)

log = logging.getLogger(__name__)

STEP_LIMIT_S = 120.0  # of a step of TOKEN_BUDGET tokens; a 7B model on two cores takes about 40
JOIN_S = 10.0  # for the step that runs when the engine is told to stop

Item = TokenChunk | ReplicaLost


def step_limit(token_budget: int) -> float:
    """Seconds after which a step that may feed so many tokens counts as stuck."""
    return STEP_LIMIT_S * max(1.0, token_budget / TOKEN_BUDGET)


@dataclass(slots=True)
class _Stream:
    """A reader: chunks cross from the engine's thread into the reader's event loop."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)

    def put(self, item: Item) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed, and with it the reader
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncEngine:
    """Owns the engine from now on. Every engine call but submit, abort and apply happens on its thread.

    `clock` in seconds; a step that takes `stuck_after_s` (None: by the engine's token budget) is taken for
    one that never ends. `links`: how its draft workers are, for `health`. `projection`: see ModelRunner.
    """

    def __init__(
        self,
        engine: Engine,
        listener: Callable[[StepReport], None] = lambda report: None,
        stuck_after_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        links: Callable[[], tuple[DraftLinks, ...]] = tuple,
        projection: NDArray[np.float16] | None = None,
    ) -> None:
        self.projection = projection
        self.info: ModelInfo = engine.info
        self._engine = engine
        self._listener = listener
        self._stuck_after_s = stuck_after_s or step_limit(engine.options.token_budget)
        self._clock = clock
        self._links = links
        self._step_began: float | None = None  # None between steps
        self._step_ended = clock()
        self._report: StepReport | None = None
        self._streams: dict[str, _Stream] = {}  # by the engine's request id
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._wake = threading.Condition()
        self._capture = Capture()
        self._stopping = False
        self._stopped = False
        self._lost: str | None = None  # why nobody is served any more
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Chunks of all sequences as rounds produce them. Closing the generator aborts the request.

        Raises InvalidRequest before the first chunk, EngineFailure when the engine fails the request, and
        ReplicaLost when it ends with the request unfinished.
        """
        # An id of our own: the client's may be in use, or may still be on its way out of the engine.
        own = replace(request, request_id=f"{request.request_id}#{next(self._ids)}")
        stream = self._open(own.request_id)
        unfinished = request.n
        try:
            grammar = own.sampling.grammar
            # In a thread: others' chunks must go on meanwhile.
            matcher = await asyncio.to_thread(self._engine.compile, grammar) if grammar else None
            self._engine.submit(own, matcher)
            self._notify()
            while unfinished:
                item = await stream.queue.get()
                if isinstance(item, ReplicaLost):
                    raise item
                if item.finish == "error":
                    raise EngineFailure(item.error or "the engine failed this request")
                unfinished -= item.finish is not None
                yield replace(item, request_id=request.request_id)
        finally:
            with self._lock:
                self._streams.pop(own.request_id, None)
            if unfinished:
                self._engine.abort(own.request_id)
                self._notify()

    def apply(self, policy: PolicySnapshot) -> None:
        """Use this policy from the next step on."""
        self._engine.apply(policy)
        self._notify()

    async def profile(self, steps: int, timeout_s: float) -> str:
        """Captures the next steps with torch's profiler, and tells the file. Raises Overloaded."""
        return await asyncio.to_thread(self._capture.order, steps, timeout_s)

    def health(self) -> Health:
        """From any thread, also while a step runs."""
        report, pool = self._report, self._engine.cache.pool
        return Health(
            state="stopped" if self._stopped else "stuck" if self._stuck() else "ok",
            since_step_s=self._clock() - self._step_ended,
            running=report.running if report else 0,
            waiting=report.waiting if report else 0,
            kv_used_blocks=report.kv_used_blocks if report else 0,
            kv_total_blocks=pool.num_blocks,
            links=self._links(),
        )

    def check_health(self) -> None:
        """Raises EngineFailure when the engine's thread is gone, or is in a step that does not end.

        In the second case it gives up: open streams end with ReplicaLost, so that they can go on elsewhere.
        """
        if self._stopped:
            raise EngineFailure("the engine has stopped")
        if self._stuck():
            self._stopping = True
            self._end("the engine is stuck")
            raise EngineFailure(f"the engine's step has not ended for {self._stuck_after_s:g} s")

    def shutdown(self, timeout_s: float = JOIN_S) -> None:
        """Stop stepping; open streams end with ReplicaLost. A step that does not end is left behind."""
        self._stopping = True
        self._notify()
        self._thread.join(timeout_s)
        self._end("the server is shutting down")

    def _stuck(self) -> bool:
        began = self._step_began
        return began is not None and self._clock() - began >= self._stuck_after_s

    def _open(self, request_id: str) -> _Stream:
        """Under the lock, so that a stream either is refused or is there when the engine ends."""
        stream = _Stream(asyncio.get_running_loop())
        with self._lock:
            if self._lost:
                raise ReplicaLost(self._lost)
            self._streams[request_id] = stream
        return stream

    def _end(self, reason: str) -> None:
        with self._lock:
            reason = self._lost = self._lost or reason
            streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(ReplicaLost(reason))

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _run(self) -> None:
        reason = "the engine has failed"
        try:
            while self._wait():
                self._step_began = self._clock()
                self._step()
                self._step_ended, self._step_began = self._clock(), None
        except ReplicaLost as error:
            reason = error.message
            log.error("the engine ends: %s", reason)
        finally:
            self._stopped = True
            self._end("the server is shutting down" if self._stopping else reason)

    def _wait(self) -> bool:
        """Until there is work; False when there will be none any more."""
        with self._wake:
            while self._engine.idle and not self._stopping:
                self._wake.wait()
        return not self._stopping

    def _step(self) -> None:
        self._capture.before()
        try:
            output = self._engine.step()
        except ReplicaLost:  # its requests are not failed: they go on elsewhere
            raise
        except Exception as error:
            log.error("engine step failed (%s)\n%s", *described(error))
            self._deliver(self._engine.fail_all(f"engine step failed: {type(error).__name__}"))
            return
        self._capture.after()
        self._deliver(output.chunks)
        self._report = output.report
        try:
            self._listener(output.report)
        except Exception as error:
            log.error("the listener failed on a step report (%s)\n%s", *described(error))

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            with self._lock:
                stream = self._streams.get(chunk.request_id)
            if stream is not None:
                stream.put(chunk)
