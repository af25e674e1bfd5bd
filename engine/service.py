"""The async shell around an Engine: one thread steps it, coroutines read their chunks."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from gammaray.engine.engine import Engine
from gammaray.errors import EngineFailure, InvalidRequest
from gammaray.types import GenerateRequest, ModelInfo, PolicySnapshot, StepReport, TokenChunk

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stream:
    """A reader: chunks cross from the engine's thread into the reader's event loop."""

    loop: asyncio.AbstractEventLoop
    unfinished: int
    queue: asyncio.Queue[TokenChunk] = field(default_factory=asyncio.Queue)


class AsyncEngine:
    """Owns the engine from now on. Every engine call but submit/abort/apply happens on its thread."""

    def __init__(self, engine: Engine, listener: Callable[[StepReport], None] = lambda report: None) -> None:
        self.info: ModelInfo = engine.info
        self._engine = engine
        self._listener = listener
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Chunks of all sequences as rounds produce them. Closing the generator aborts the request.

        Raises InvalidRequest before the first chunk, EngineFailure when the engine fails the request.
        """
        self.check_health()
        stream = _Stream(asyncio.get_running_loop(), unfinished=request.n)
        with self._lock:
            if request.request_id in self._streams:
                raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
            self._streams[request.request_id] = stream
        try:
            self._engine.submit(request)
            self._notify()
            while stream.unfinished:
                chunk = await stream.queue.get()
                if chunk.finish == "error":
                    raise EngineFailure(chunk.error or "the engine failed this request")
                stream.unfinished -= chunk.finish is not None
                yield chunk
        finally:
            with self._lock:
                del self._streams[request.request_id]
            if stream.unfinished:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        self._notify()

    def apply(self, policy: PolicySnapshot) -> None:
        self._engine.apply(policy)
        self._notify()

    def check_health(self) -> None:
        """Raises EngineFailure when the engine's thread is gone."""
        if not self._thread.is_alive():
            raise EngineFailure("the engine has stopped")

    def shutdown(self) -> None:
        """Stop stepping; open streams end with an error."""
        self._stopping = True
        self._notify()
        self._thread.join()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _run(self) -> None:
        while not self._stopping:
            with self._wake:
                while self._engine.idle and not self._stopping:
                    self._wake.wait()
            if not self._stopping:
                self._step()
        self._deliver(self._engine.fail_all("the server is shutting down"))

    def _step(self) -> None:
        try:
            output = self._engine.step()
        except Exception as error:
            log.exception("engine step failed")
            self._deliver(self._engine.fail_all(f"engine step failed: {type(error).__name__}"))
            return
        self._deliver(output.chunks)
        self._listener(output.report)

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            with self._lock:
                stream = self._streams.get(chunk.request_id)
            if stream is not None and not stream.loop.is_closed():
                stream.loop.call_soon_threadsafe(stream.queue.put_nowait, chunk)
