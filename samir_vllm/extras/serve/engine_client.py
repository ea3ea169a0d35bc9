"""The engine's process as the front sees it: requests go there, what comes back wakes who waits for it.

All that is sent in one turn of the event loop goes as one message. A process that dies takes its requests
with it, and another is started. Knows nothing of HTTP beyond the errors it raises, and nothing of text.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from samir_vllm.errors import SamirVllmError
from samir_vllm.extras.serve.api_errors import ApiError, bad_request
from samir_vllm.extras.serve.channel import Unpacker, packed
from samir_vllm.extras.serve.wire import Abort, Add, Begin, Ending, Failed, Load, Ready, Refusal, Report
from samir_vllm.sampling import SamplingParams
from samir_vllm.sequence import TokenLogprobs

MAX_BEHIND = 8192
"""Tokens that may wait for a client that doesn't read. Whoever lags further behind is given up."""

RETRY_SECONDS = 1

log = logging.getLogger("samir_vllm.serve")

Piece = tuple[int, str, TokenLogprobs | None, Ending | None]
"""Which of all answers to an HTTP request, new text, the token's log-probabilities, and its end."""


class Job(NamedTuple):
    """One prompt with its answers; as `Add`."""

    prompt: list[int]
    params: SamplingParams
    grammar: str | None
    streams: bool
    retain_kv: bool


class ReaderGone(Exception):
    """The client went away: nobody needs an answer any more."""


class Stream:
    """What comes back for one HTTP request, of one prompt or several. One task reads it."""

    __slots__ = ("_client", "_error", "_keys", "_pieces", "_waiter", "is_sending", "num_open")

    def __init__(self, client: EngineClient, num_answers: int) -> None:
        self.num_open = num_answers
        self.is_sending = False  # the reader waits for its client to take what it has sent
        self._client = client
        self._keys: list[int] = []
        self._pieces: list[Piece] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    @property
    def has_pieces(self) -> bool:
        """``next`` has something at once, an error included."""
        return bool(self._pieces) or self._error is not None

    async def next(self) -> list[Piece]:
        """All that has come since the last call, in order; waits for the first.

        Raises:
            ApiError: the request was refused or failed.
            ReaderGone: `leave` was called.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces, self._pieces = self._pieces, []
        return pieces

    def close(self) -> None:
        """Abort what still runs of it."""
        self._client.abort(self._keys)
        self._keys = []

    def leave(self) -> None:
        """The client has gone."""
        self._fail(ReaderGone())

    def _put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        if piece[3] is not None:
            self.num_open -= 1
        # Behind one that does read, they pile up only while everybody else waits, too.
        if self.is_sending and len(self._pieces) > MAX_BEHIND:
            self._fail(ApiError(408, "the stream is read too slowly: it was given up", "timeout_error"))
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self.close()
        self._pieces = []
        self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True)
class _Request:
    """A live request."""

    stream: Stream
    first_index: int  # of its answers among all of the stream's
    num_open: int


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told what happens, for figures."""

    ended: Callable[[Ending], None]
    aborted: Callable[[int], None]  # so many answers
    died: Callable[[], None]  # the engine's process; another is started
    closed: Callable[[str], None]  # there is no engine any more, and why


class EngineClient(asyncio.Protocol):
    """One engine process, and its successors."""

    def __init__(self, begin: Begin, module: str, listener: Listener) -> None:
        """Nothing is started yet.

        Args:
            begin: what the process is told first.
            module: name of the module whose ``load_engine`` it calls.
            listener: is told.
        """
        self.ready: Ready | None = None
        self.load = Load(0, 0, 0, 0.0)
        self.is_up = False
        self._begin, self._module, self._listener = begin, module, listener
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._is_stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._first: asyncio.Future[Any] | None = None  # the process's first message
        self._unpacker = Unpacker()
        self._outgoing: list[Add | Abort] = []
        self._requests: dict[int, _Request] = {}
        self._next_key = 0
        self._cpu_before = 0.0  # of processes that have ended, seconds

    @property
    def cpu_seconds(self) -> float:
        """Of the engine's process and its predecessors, as far as they told."""
        return self._cpu_before + self.load.cpu_seconds

    async def start(self) -> Ready:
        """Start the process, and wait until it is loaded.

        Raises:
            SamirVllmError: it could not be loaded, or died.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "samir_vllm.extras.serve.engine_process"]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), self._module],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C is for the front, which tells the engine by closing
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
            )
        self._first = loop.create_future()
        self._unpacker = Unpacker()
        ours.setblocking(False)
        await loop.create_connection(lambda: self, sock=ours)
        assert self._transport is not None
        self._transport.write(packed(self._begin))
        first = await self._first
        if not isinstance(first, Ready):
            raise SamirVllmError(first.message)
        self.ready, self.is_up = first, True
        return first

    async def stop(self) -> None:
        """End the process."""
        self._is_stopping = True
        if not self.is_up and self._process is not None:
            self._process.kill()  # it is loading, and would hear of it afterwards only
        self.is_up = False
        if self._transport is not None:
            self._transport.close()
        for task in self._tasks:
            task.cancel()
        if self._process is not None:
            await asyncio.to_thread(_end, self._process)

    def submit(self, jobs: list[Job]) -> Stream:
        """Send requests whose answers come back in one stream, numbered through.

        Raises:
            ApiError: too many wait, or there is no engine just now.
        """
        if not self.is_up:
            raise ApiError(
                503,
                "the engine is starting: try again later",
                "server_error",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        # What has been sent since may be admitted at once: the engine turns away who can't be.
        if self.load.num_waiting > self._begin.max_waiting:
            raise _queue_full("too many requests wait already: try again later")
        stream = Stream(self, sum(job.params.n for job in jobs))
        first_index = 0
        for job in jobs:
            key, self._next_key = self._next_key, self._next_key + 1
            self._requests[key] = _Request(stream, first_index, job.params.n)
            stream._keys.append(key)
            first_index += job.params.n
            self._send(Add(key, *job))
        return stream

    def abort(self, keys: list[int]) -> None:
        """End those of the requests that haven't ended."""
        for key in keys:
            request = self._requests.pop(key, None)
            if request is not None:
                self._listener.aborted(request.num_open)
                self._send(Abort(key))

    def fail_all(self, message: str, status: int = 503) -> None:
        """End all that is live with an error."""
        for request in list(self._requests.values()):
            request.stream._fail(ApiError(status, message, "server_error"))

    def _send(self, command: Add | Abort) -> None:
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(command)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self.is_up and self._transport is not None:
            self._transport.write(packed(outgoing))

    # From the process

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        for message in self._unpacker.feed(data):
            if isinstance(message, Report):
                self._take(message)
            elif self._first is not None and not self._first.done():
                self._first.set_result(message)

    def _take(self, report: Report) -> None:
        self.load = report.load
        requests = self._requests
        for key, index, text, logprobs, ending in report.outputs:
            request = requests.get(key)
            if request is None:
                continue  # aborted
            if ending is not None:
                self._listener.ended(ending)
                request.num_open -= 1
                if request.num_open == 0:
                    del requests[key]
            request.stream._put((request.first_index + index, text, logprobs, ending))
        for refusal in report.refusals:
            self._refuse(refusal)

    def _refuse(self, refusal: Refusal) -> None:
        request = self._requests.pop(refusal.key, None)
        if request is not None:
            if refusal.status == 429:
                error = _queue_full(refusal.message)
            elif refusal.status == 400:
                error = bad_request(refusal.message)
            else:
                error = ApiError(refusal.status, refusal.message, "server_error")
            request.stream._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        was_up, self.is_up = self.is_up, False
        self._transport = None
        if self._first is not None and not self._first.done():
            self._first.set_result(Failed("the engine's process ended while it was starting"))
        self._cpu_before += self.load.cpu_seconds
        self.load = Load(0, 0, 0, 0.0)
        self.fail_all("the engine's process ended: try again", 500)
        if was_up and not self._is_stopping:
            self._listener.died()
            task = asyncio.get_running_loop().create_task(self._restart())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _restart(self) -> None:
        assert self._process is not None
        status = await asyncio.to_thread(_end, self._process)
        log.error("the engine's process ended with status %s; another is started", status)
        try:
            await self.start()
        except (SamirVllmError, OSError) as exc:
            self._listener.closed(str(exc))


def _queue_full(message: str) -> ApiError:
    return ApiError(
        429, message, "rate_limit_error", code="queue_full", headers={"Retry-After": str(RETRY_SECONDS)}
    )


def _end(process: subprocess.Popen[bytes]) -> int:
    """Waits for a process that should end by itself, and ends one that doesn't; its status."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(5)
    process.kill()
    return process.wait()
