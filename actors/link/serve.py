"""Runs a DraftServer on a listening socket, on the calling thread."""

from __future__ import annotations

import itertools
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress

from gammaray.actors.link.channel import GREETING_BYTES, MOST_BYTES, ChannelLost, SocketChannel
from gammaray.actors.link.server import DraftServer, Framed

UNSENT_S = 0.001  # between two attempts to hand on what a client does not take
POLL_S = 0.1  # how often an idle worker looks whether it shall stop
MOST_UNSENT = 8 * 2**20  # bytes of answers for a client that does not read
SILENT_S = 30.0  # a client says something every second; one that does not is gone


class Serving:
    """Clients by number. What arrives while the model computes waits in the kernel, and is then one batch."""

    def __init__(self, listener: socket.socket, server: DraftServer, clock: Callable[[], float]) -> None:
        self._listener, self._server, self._clock = listener, server, clock
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, SocketChannel] = {}
        self._heard: dict[int, float] = {}
        self._numbers = itertools.count()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def turn(self) -> None:
        """Answers what there is, else drafts ahead, else waits a moment."""
        ahead = self._server.wants_time()
        for client in [c for c, channel in self._clients.items() if channel.unsent]:
            self._send(client)
        unsent = any(channel.unsent for channel in self._clients.values())
        frames = self._frames(0.0 if ahead else UNSENT_S if unsent else POLL_S)
        if frames:
            for client, frame in self._server.handle(frames):
                self._send(client, frame) if frame else self._drop(client)
            for client in {client for client, _ in frames} & self._clients.keys():
                if self._server.knows(client):
                    self._clients[client].most_bytes = MOST_BYTES
        elif ahead:
            self._server.draft_ahead()
        for client in [c for c, heard in self._heard.items() if self._clock() - heard > SILENT_S]:
            self._drop(client)

    def close(self) -> None:
        for client in list(self._clients):
            self._drop(client)
        self._selector.close()
        self._listener.close()

    def _frames(self, wait_s: float) -> list[Framed]:
        frames = []
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                self._accept()
            else:
                frames += self._read(key.data)
        return frames

    def _accept(self) -> None:
        with suppress(OSError):
            sock, _ = self._listener.accept()
            client = next(self._numbers)
            channel = SocketChannel(sock, self._clock, GREETING_BYTES, MOST_UNSENT)
            self._clients[client] = channel
            self._heard[client] = self._clock()
            self._selector.register(channel, selectors.EVENT_READ, client)

    def _read(self, client: int) -> list[Framed]:
        try:
            frames = self._clients[client].take()
        except ChannelLost:
            self._drop(client)
            return []
        if frames:
            self._heard[client] = self._clock()
        return [(client, frame) for frame in frames]

    def _send(self, client: int, frame: bytes | None = None) -> None:
        """None: only what was not taken before."""
        if (channel := self._clients.get(client)) is None:
            return
        try:
            channel.send(frame) if frame is not None else channel.flush()
        except ChannelLost:
            self._drop(client)

    def _drop(self, client: int) -> None:
        if (channel := self._clients.pop(client, None)) is None:
            return
        del self._heard[client]
        self._selector.unregister(channel)
        channel.close()
        self._server.leave(client)


def serve(
    listener: socket.socket, server: DraftServer, stopped: Callable[[], bool], clock: Callable[[], float]
) -> None:
    """Until `stopped`."""
    serving = Serving(listener, server, clock)
    try:
        while not stopped():
            serving.turn()
    finally:
        serving.close()
