"""An engine and a tokenizer of a few lines, for the real application on a real Ray cluster."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import psutil

from gammaray.errors import InvalidRequest
from gammaray.types import GenerateRequest, ModelInfo, TokenChunk

INFO = ModelInfo("tiny", vocab_size=256, max_model_len=4096, dtype="float32", device="cpu", drafters=())
WORDS = "the quick brown fox "


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
        if request.sampling.seed == 13:
            raise InvalidRequest("13 brings bad luck", param="seed", code="superstition")
        self._write("started")
        finished = False
        try:
            for number in range(request.sampling.max_tokens):
                if number == request.sampling.seed - 1000:
                    raise RuntimeError("a bug in the engine")
                await asyncio.sleep(0.02)
                last = number == request.sampling.max_tokens - 1
                word = WORDS.split(" ")[number % 4] + " "
                yield TokenChunk(request.request_id, 0, number, (1,), word, "length" if last else None)
            finished = True
        finally:
            self._write("finished" if finished else "aborted")

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self._write("shut down")


class ByteTokenizer:
    bos_token_id = 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(
        self, conversation: Sequence[dict[str, str]], *, add_generation_prompt: bool, return_dict: bool
    ) -> list[int]:
        return self.encode("".join(turn["content"] for turn in conversation))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
