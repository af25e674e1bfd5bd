"""Whole frames over a socket: a Unix socket on one node, TCP between nodes."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

SIZE = struct.Struct("<I")
MOST_BYTES = 64 * 2**20  # of a frame; the tokens of 32 prompts of 128k are 16 MiB
MOST_UNSENT = 64 * 2**20  # bytes for a peer that does not read
GREETING_BYTES = 4096  # the most that a stranger may send
PIECE = 2**18


class ChannelLost(Exception):
    """The other end is gone, or does not speak the protocol any more."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker listens: the path of a Unix socket, or host and port. `secret` opens it."""

    place: str | tuple[str, int]
    secret: bytes = field(repr=False)


class Channel(Protocol):
    """What a link is made of. Both raise ChannelLost."""

    def send(self, frame: bytes) -> None:
        """Without waiting for the other end."""

    def receive(self, until: float) -> bytes | None:
        """The next frame, or None when there is none by `until` (a time of the link's clock)."""

    def close(self) -> None: ...


class SocketChannel:
    """Never waits on `send`: what the peer does not take yet is kept, up to a limit."""

    def __init__(
        self,
        sock: socket.socket,
        clock: Callable[[], float] = time.perf_counter,
        most_bytes: int = MOST_BYTES,
        most_unsent: int = MOST_UNSENT,
    ) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # frames are small and awaited
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock, self._clock = sock, clock
        self.most_bytes, self._most_unsent = most_bytes, most_unsent
        self._poll = select.poll()
        self._read, self._unsent = bytearray(), bytearray()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, frame: bytes) -> None:
        self._unsent += SIZE.pack(len(frame)) + frame
        self.flush()
        if len(self._unsent) > self._most_unsent:
            raise ChannelLost("the other end of a draft link does not read")

    def flush(self) -> None:
        """Hand on what the kernel takes now."""
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelLost(f"a draft link broke: {error.strerror or error}") from None

    def receive(self, until: float) -> bytes | None:
        while (frame := self._frame()) is None:
            self.flush()
            self._poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            events = self._poll.poll(max(0.0, until - self._clock()) * 1000)
            if not events:
                return None
            if events[0][1] & ~select.POLLOUT:
                self._fill()
        return frame

    def take(self) -> list[bytes]:
        """The frames that are complete with what comes in one read: nobody can keep it busy."""
        self._fill()
        return list(iter(self._frame, None))

    def close(self) -> None:
        self._sock.close()

    def _fill(self) -> None:
        try:
            piece = self._sock.recv(PIECE)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelLost(f"a draft link broke: {error.strerror or error}") from None
        if not piece:
            raise ChannelLost("the other end of a draft link is gone")
        self._read += piece

    def _frame(self) -> bytes | None:
        if len(self._read) < SIZE.size:
            return None
        (size,) = SIZE.unpack_from(self._read)
        if size > self.most_bytes:
            raise ChannelLost("the other end of a draft link sends no frames")
        if len(self._read) < SIZE.size + size:
            return None
        frame = bytes(self._read[SIZE.size : SIZE.size + size])
        del self._read[: SIZE.size + size]
        return frame


def connect(address: Address, timeout_s: float) -> SocketChannel:
    """Raises ChannelLost."""
    try:
        if isinstance(address.place, str):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(timeout_s)
            sock.connect(address.place)
        else:
            sock = socket.create_connection(address.place, timeout_s)
    except OSError as error:
        raise ChannelLost(f"no draft worker answers: {error.strerror or error}") from None
    return SocketChannel(sock)


def listen(place: str | tuple[str, int]) -> socket.socket:
    """Port 0: any free one. Raises OSError."""
    if isinstance(place, tuple):
        family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        return socket.create_server(place, family=family)
    with suppress(FileNotFoundError):
        Path(place).unlink()
    sock = socket.socket(socket.AF_UNIX)
    old = os.umask(0o177)  # for this user only
    try:
        sock.bind(place)
    finally:
        os.umask(old)
    sock.listen()
    return sock
