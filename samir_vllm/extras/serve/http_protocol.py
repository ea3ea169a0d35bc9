"""HTTP/1.1 on a connection: uvicorn's, with bounds on what a client may send before its request is known.

Without them one endless header keeps the process busy for minutes, and fills its memory. And whoever leaves
is missed by all of a connection's requests, not the newest alone. Knows no route, and nothing of answers.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from samir_vllm.extras.serve.api_errors import ApiError

MAX_HEAD_BYTES = 1 << 16
"""Bytes of a request's line and headers, and of whatever else in it is neither those nor a body."""

HEAD_SECONDS = 60.0
"""Headers must be complete within these."""

MAX_PIPELINED = 16
"""Requests that may wait on a connection for those before them; while there are more, nothing is read."""


class Protocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._idle_bytes = 0  # received since the last piece of a request that got us further
        self._cycles: list[RequestResponseCycle] = []  # of requests that aren't answered yet
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See ``asyncio.Protocol``."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._stop_timer()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._idle_bytes += len(data)
        super().data_received(data)
        if self._idle_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def on_message_begin(self) -> None:
        """See ``httptools``."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """See ``httptools``."""
        self._idle_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # uvicorn has just stopped it: nobody would see the client leave

    def on_body(self, body: bytes) -> None:
        """See ``httptools``."""
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See ``httptools``."""
        self._idle_bytes = 0
        super().on_message_complete()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_head(self) -> None:
        if all(cycle.response_complete for cycle in self._cycles):
            error = ApiError(431, f"the headers have more than {MAX_HEAD_BYTES} bytes")
            body = json.dumps(error.body()).encode()
            head = (
                "HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
