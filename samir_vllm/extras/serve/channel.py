"""Messages between the server's two processes: pickled objects, each behind its length, over a socket pair.

Both ends are ours, started by one command, so that pickle's trust is in place. Knows nothing of what is said.
"""

from __future__ import annotations

import pickle
import select
import socket
from collections.abc import Iterator
from typing import Any

HEAD_BYTES = 4
READ_BYTES = 1 << 20


def packed(message: object) -> bytes:
    """A message as it goes over the socket."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(HEAD_BYTES, "little") + body


class Unpacker:
    """Messages out of bytes that arrive in any pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are whole now."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= HEAD_BYTES:
            body = start + HEAD_BYTES
            end = body + int.from_bytes(buffer[start:body], "little")
            if len(buffer) < end:
                break
            message = pickle.loads(memoryview(buffer)[body:end].tobytes())
            start = end
            yield message
        del buffer[:start]


class Channel:
    """The engine's end, which never waits for a reader: what can't be sent yet goes with the next message.

    How much piles up is bounded by what the requests under way may still say.
    """

    def __init__(self, sock: socket.socket) -> None:
        """An end of a socket pair of type ``SOCK_STREAM``."""
        self._sock = sock
        self._unpacker = Unpacker()
        self._unsent = bytearray()

    def send(self, message: object) -> None:
        """Send a message, or keep it for later."""
        self._unsent += packed(message)
        self.flush()

    def flush(self) -> bool:
        """Send of what was kept as much as goes; whether all of it went.

        Raises:
            ConnectionError: nobody is at the other end any more.
        """
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            del self._unsent[:sent]
        return True

    def receive(self, *, wait: bool) -> list[Any]:
        """The messages that are there; with ``wait`` at least one, unless what was kept has to go first.

        Raises:
            ConnectionError: nobody is at the other end any more.
        """
        messages: list[Any] = []
        blocks = wait and self.flush()
        if wait and not blocks:
            # Not by a timeout of the socket's: with one, every later call would wait that long.
            select.select((self._sock,), (self._sock,), ())
        while True:
            try:
                data = self._sock.recv(READ_BYTES, 0 if blocks and not messages else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            if not data:
                raise ConnectionResetError("the other process has gone")
            messages += self._unpacker.feed(data)
            if messages and len(data) < READ_BYTES:
                return messages
