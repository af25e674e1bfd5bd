"""The async shell around an Engine: one thread steps it, coroutines read their chunks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

from gammaray.engine.engine import Engine
from gammaray.errors import EngineFailure
from gammaray.types import GenerateRequest, ModelInfo, PolicySnapshot, StepReport, TokenChunk

log = logging.getLogger(__name__)


Item = TokenChunk | EngineFailure


@dataclass(slots=True)
class _Stream:
    """A reader: chunks cross from the engine's thread into the reader's event loop."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)

    def put(self, item: Item) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed, and with it the reader
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncEngine:
    """Owns the engine from now on. Every engine call but submit, abort and apply happens on its thread."""

    def __init__(self, engine: Engine, listener: Callable[[StepReport], None] = lambda report: None) -> None:
        self.info: ModelInfo = engine.info
        self._engine = engine
        self._listener = listener
        self._streams: dict[str, _Stream] = {}  # by the engine's request id
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._wake = threading.Condition()
        self._stopping = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Chunks of all sequences as rounds produce them. Closing the generator aborts the request.

        Raises InvalidRequest before the first chunk, EngineFailure when the engine fails the request.
        """
        # An id of our own: the client's may be in use, or may still be on its way out of the engine.
        own = replace(request, request_id=f"{request.request_id}#{next(self._ids)}")
        stream = self._open(own.request_id)
        unfinished = request.n
        try:
            self._engine.submit(own)
            self._notify()
            while unfinished:
                item = await stream.queue.get()
                if isinstance(item, EngineFailure):
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

    def check_health(self) -> None:
        """Raises EngineFailure when the engine's thread is gone."""
        if self._stopped:
            raise EngineFailure("the engine has stopped")

    def shutdown(self) -> None:
        """Stop stepping; open streams end with an error."""
        self._stopping = True
        self._notify()
        self._thread.join()

    def _open(self, request_id: str) -> _Stream:
        """Under the lock, so that a stream either is refused or is there when the thread ends."""
        stream = _Stream(asyncio.get_running_loop())
        with self._lock:
            self.check_health()
            self._streams[request_id] = stream
        return stream

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                self._step()
        finally:
            reason = "the server is shutting down" if self._stopping else "the engine has failed"
            with self._lock:
                self._stopped = True
                streams, self._streams = self._streams, {}
            for stream in streams.values():
                stream.put(EngineFailure(reason))

    def _wait(self) -> bool:
        """Until there is work; False when there will be none any more."""
        with self._wake:
            while self._engine.idle and not self._stopping:
                self._wake.wait()
        return not self._stopping

    def _step(self) -> None:
        try:
            output = self._engine.step()
        except Exception as error:
            log.exception("engine step failed")
            self._deliver(self._engine.fail_all(f"engine step failed: {type(error).__name__}"))
            return
        self._deliver(output.chunks)
        try:
            self._listener(output.report)
        except Exception:
            log.exception("the listener failed on a step report")

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            with self._lock:
                stream = self._streams.get(chunk.request_id)
            if stream is not None:
                stream.put(chunk)
