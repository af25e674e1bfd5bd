"""An engine and a tokenizer of a few lines, for the real application on a real Ray cluster."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import psutil

from gammaray.actors.draft import Load
from gammaray.actors.labels import ISLAND, NODE
from gammaray.actors.place import whereabouts
from gammaray.actors.target import Surroundings
from gammaray.errors import InvalidRequest
from gammaray.types import GenerateRequest, Health, ModelInfo, PolicySnapshot, TokenChunk

INFO = ModelInfo("tiny", vocab_size=256, max_model_len=4096, dtype="float32", device="cpu", drafters=())
PATIENCE_S = 60.0
WORDS = "the quick brown fox "


def word(seed: int, position: int) -> str:
    """What SlowEngine says at a position. A seed below 1000 shows in it."""
    return f"{seed}.{position} " if seed < 1000 else WORDS.split(" ")[position % 4] + " "


class SlowEngine:
    """Says one word every 20 ms for max_tokens rounds; writes started and aborted requests to a log."""

    info = INFO

    def __init__(self, log: Path) -> None:
        self.log = log
        self._write(f"threads {os.environ['OMP_NUM_THREADS']} torch {'torch' in sys.modules}")

    def _write(self, line: str) -> None:
        with self.log.open("a") as file:
            file.write(line + "\n")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        seed = request.sampling.seed
        if seed == 13:
            raise InvalidRequest("13 brings bad luck", param="seed", code="superstition")
        self._write("started")
        finished = False
        try:
            async for number in self._rounds(request):
                if number == seed - 1000:
                    raise RuntimeError("a bug in the engine")
                last = number == request.sampling.max_tokens - 1
                for k in range(request.n):
                    if number >= len(request.generated[k] if request.generated else ()):
                        ids = ((seed + number + k) % INFO.vocab_size,)
                        finish = "length" if last else None
                        yield TokenChunk(request.request_id, k, number, ids, word(seed, number), finish)
            finished = True
        finally:
            self._write("finished" if finished else "aborted")

    async def _rounds(self, request: GenerateRequest) -> AsyncGenerator[int, None]:
        """Positions, from the first that some sequence has not said yet."""
        for number in range(min(map(len, request.generated), default=0), request.sampling.max_tokens):
            await asyncio.sleep(0.02)
            yield number

    def apply(self, policy: PolicySnapshot) -> None:
        pass

    def health(self) -> Health:
        return Health("ok", 0.0, 0, 0, 0, 0)

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self._write("shut down")


class PlacedEngine(SlowEngine):
    """Also writes where it is, and whose draft workers it hears of."""

    def __init__(self, log: Path, around: Surroundings | None = None) -> None:
        super().__init__(log)
        here = whereabouts()
        node = "/".join(here.labels[key] for key in (NODE, ISLAND) if key in here.labels)
        where = {"pid": os.getpid(), "node": node, "devices": here.devices}
        self._write(json.dumps(where))
        self._around = around
        self._known = 0

    def check_health(self) -> None:
        """Serve asks every two seconds."""
        if self._around and self._around.resolve:
            known = sum(len(self._around.resolve(*pool)) for pool in self._around.pools)
            if known != self._known:
                self._known = known
                self._write(f"{os.getpid()} knows {known}")


class IdleLink:
    """The worker's end of a draft link over which nobody asks anything."""

    def __init__(self, drafter: str) -> None:
        self.address = (drafter, os.getpid())

    def load(self) -> Load:
        return Load()

    def check(self) -> None:
        pass


class ByteTokenizer:
    bos_token_id = 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return bytes(ids).decode(errors="replace")

    def convert_ids_to_tokens(self, ids: int) -> str:
        return f"<0x{ids:02X}>"

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(128)}

    def apply_chat_template(self, conversation: Sequence[dict[str, str]], **options: bool) -> list[int]:
        return self.encode("".join(turn["content"] for turn in conversation))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(check: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Cluster:
    """A running application and what its engine wrote."""

    def __init__(self, url: str, log: Path) -> None:
        self.url, self.log = url, log

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()


def listeners(root: psutil.Process) -> list[tuple[str, str]]:
    """(process, address) of every TCP socket that `root` and its descendants listen on."""
    return [
        (process.name(), connection.laddr.ip)
        for process in [root, *root.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]


def reachable_from_elsewhere(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [pair for pair in pairs if pair[1] not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")]
