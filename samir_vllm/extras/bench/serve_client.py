"""Streamed completions over HTTP, many at once, with as little work for each token as Python allows.

A connection for each request, HTTP/1.1 and server-sent events read by hand, no thread and no task for a
token: so that the server is measured, not this. Knows the API's bodies, and nothing of the server behind it.

Sources: RFC 9112 section 7.1 (chunked bodies), https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from samir_vllm.errors import OptionError, SamirVllmError, one_line

CONNECT_SECONDS = 10.0
MAX_HEAD = 1 << 16  # bytes of a response's head that is surely none
MAX_MESSAGE = 1 << 16  # bytes of an error that are read

OK = "ok"
NOT_SENT = "not sent"  # its time to be sent never came: too many connections were open
UNFINISHED = "unfinished"  # it was still running when the waiting ended
NO_CONNECTION = "no connection"
CUT_OFF = "cut off"
NOT_UNDERSTOOD = "not understood"
FAILED = "failed midway"  # an error event in a stream that had begun


@dataclass(slots=True)
class Answer:
    """What became of one request. Times are ``time.perf_counter``'s; 0 where it didn't come that far."""

    due: float = 0.0  # when it should be sent
    sent: float = 0.0
    first: float = 0.0  # its first text arrived
    last: float = 0.0  # its last text arrived
    ended: float = 0.0
    tokens: int = 0  # by the server's count
    events: int = 0  # that carried text
    was_held: bool = False  # too many were open when it was due
    outcome: str = NOT_SENT  # OK, another of the above, or the HTTP status
    message: str = ""  # the server's, or the system's, where it failed

    @property
    def first_token_seconds(self) -> float:
        """From when it was due, so that a late client doesn't flatter the server."""
        return self.first - self.due

    @property
    def seconds_per_token(self) -> float | None:
        """Mean over the tokens after the first; None where there is none."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def total_seconds(self) -> float:
        """From when it was due to its end."""
        return self.ended - self.due


class Server:
    """Where requests go."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """The server at ``url``, such as ``http://127.0.0.1:8000``, with or without ``/v1`` behind it.

        Raises:
            OptionError: that is no URL of a server, or nobody answers there.
        """
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except ValueError:
            scheme, host, port = "", None, None
        if scheme not in ("http", "https") or not host:
            raise OptionError(f"{url[:80]!r} is no address of a server, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._base = urlsplit(self.url).path
        self._host, self._netloc = host, parts.netloc.rpartition("@")[2]
        self._ssl = ssl.create_default_context() if scheme == "https" else None
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise OptionError("an API key has printable ASCII characters only")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._address = self._reach(host, port or (443 if scheme == "https" else 80))

    def _reach(self, host: str, port: int) -> tuple[str, int]:
        """The address that answers, of those which the name has."""
        try:
            with socket.create_connection((host, port), CONNECT_SECONDS) as sock:
                address, number = sock.getpeername()[:2]
                return address, number
        except (OSError, UnicodeError) as exc:
            raise self._unreachable(exc) from None

    def _unreachable(self, exc: Exception) -> OptionError:
        return OptionError(f"no server answers at {self.url}: {one_line(exc)}; start one, or drop --url")

    def get(self, path: str) -> bytes:
        """The body at a path such as ``/metrics``; waits for it.

        Raises:
            SamirVllmError: nobody answers, or not with 200.
        """
        # Without the proxies of the environment: the load takes none, either.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(
                urllib.request.Request(self.url + path, headers=self._headers), timeout=CONNECT_SECONDS
            ) as response:
                body: bytes = response.read()
                return body
        except urllib.error.HTTPError as exc:
            raise SamirVllmError(
                f"{self.url}{path} answers {exc.code}: {_message(exc.read(MAX_MESSAGE))}"
            ) from None
        except (OSError, ValueError) as exc:
            raise self._unreachable(exc) from None

    def completion(self, model: str, prompt: Sequence[int], new_tokens: int) -> bytes:
        """A request for a streamed completion of exactly ``new_tokens``, as it goes over the wire."""
        body = json.dumps(
            {
                "model": model,
                "prompt": prompt,
                "max_tokens": new_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            separators=(",", ":"),
        ).encode()
        headers = {
            "Host": self._netloc,
            **self._headers,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
        }
        lines = [f"POST {self._base}/v1/completions HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def ask(self, request: bytes, answer: Answer) -> None:
        """Send a request of `completion`, and write down what comes back; an error is an outcome."""
        answer.sent, answer.outcome = time.perf_counter(), UNFINISHED
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        try:
            transport, _ = await loop.create_connection(
                lambda: _Stream(request, answer, done),
                *self._address,
                ssl=self._ssl,
                server_hostname=self._host if self._ssl else None,
            )
        except OSError as exc:
            answer.outcome, answer.message = NO_CONNECTION, one_line(exc)
            return
        try:
            await done
        finally:
            transport.abort()


class _Stream(asyncio.Protocol):
    """One request and its response."""

    def __init__(self, request: bytes, answer: Answer, done: asyncio.Future[None]) -> None:
        self._request, self._answer, self._done = request, answer, done
        self._status = 0  # none yet
        self._is_chunked = False
        self._is_over = False  # the last chunk has come
        self._head = self._unread = self._event = b""  # what has come of these so far

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._done.done():
            return
        try:
            if not self._status:
                data = self._read_head(data)
            if self._status:
                content = self._unchunked(data) if self._is_chunked else data
                if self._status == 200:
                    self._read_events(content)
                else:
                    self._event += content[: MAX_MESSAGE - len(self._event)]
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            self._end(NOT_UNDERSTOOD, one_line(exc))
            self._is_over = True
        if self._is_over:
            self._close()

    def _read_head(self, data: bytes) -> bytes:
        """What follows the head, once that is whole."""
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end:
            if len(head) > MAX_HEAD:
                raise ValueError("no HTTP response")
            return b""
        version, _, status = head.partition(b"\r\n")[0].partition(b" ")
        if not version.startswith(b"HTTP/1."):
            raise ValueError("no HTTP response")
        self._status = int(status[:3])
        self._is_chunked = b"\r\ntransfer-encoding: chunked" in head.lower()
        return rest

    def _unchunked(self, data: bytes) -> bytes:
        """The content of the chunks that are whole now."""
        if self._unread:
            data = self._unread + data
        contents, start = [], 0
        while (line_end := data.find(b"\r\n", start)) >= 0:
            size = int(data[start:line_end].partition(b";")[0], 16)
            end = line_end + 2 + size
            if len(data) < end + 2:
                break
            contents.append(data[line_end + 2 : end])
            start = end + 2
            if not size:
                self._is_over = True
                break
        self._unread = data[start:]
        return contents[0] if len(contents) == 1 else b"".join(contents)

    def _read_events(self, data: bytes) -> None:
        if not data:
            return
        now, answer = time.perf_counter(), self._answer
        *events, self._event = (self._event + data).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data:"):
                continue  # a comment, to keep the connection alive
            content = event[5:].strip()
            if content == b"[DONE]":
                self._end(OK if answer.tokens else NOT_UNDERSTOOD, "" if answer.tokens else "no usage came")
                continue
            told: dict[str, Any] = json.loads(content)
            if (choices := told.get("choices")) and choices[0]["text"]:
                answer.events += 1
                answer.last = now
                answer.first = answer.first or now
            if usage := told.get("usage"):
                answer.tokens = int(usage["completion_tokens"])
            if "error" in told:
                self._end(FAILED, _message(content))

    def _end(self, outcome: str, message: str = "") -> None:
        answer = self._answer
        if answer.outcome == UNFINISHED:
            answer.ended, answer.outcome, answer.message = time.perf_counter(), outcome, message

    def _close(self) -> None:
        """Nothing more is to be read."""
        if self._done.done():
            return  # perhaps because nobody waits any more
        if self._status not in (0, 200):
            self._end(str(self._status), _message(self._event))
        else:
            self._end(CUT_OFF, "the server closed the connection")
        self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._close()


def _message(body: bytes) -> str:
    """An error's message, in one line."""
    try:
        return one_line(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return one_line(body.decode("utf-8", "replace")) or "nothing"


# Loads


async def open_loop(
    server: Server,
    request: Callable[[int], bytes],
    arrivals: Sequence[float],
    *,
    max_open: int,
    seconds: float,
) -> list[Answer]:
    """Send each request when it is due, whatever became of those before.

    Args:
        server: where they go.
        request: makes the request of a number.
        arrivals: when each is due, in seconds from now, ascending.
        max_open: connections at most. A request that finds so many waits, and is marked as held: from there
            on the loop isn't open any more.
        seconds: after these whatever still runs is cut.

    Returns:
        What became of each, in order.
    """
    started = time.perf_counter()
    answers = [Answer(due=started + due) for due in arrivals]
    room = asyncio.Semaphore(max_open)
    tasks = []

    async def ask(number: int) -> None:
        try:
            await server.ask(request(number), answers[number])
        finally:
            room.release()

    try:
        async with asyncio.timeout(seconds):
            for number, answer in enumerate(answers):
                await asyncio.sleep(max(0.0, answer.due - time.perf_counter()))
                answer.was_held = room.locked()
                await room.acquire()
                tasks.append(asyncio.create_task(ask(number)))
            await asyncio.gather(*tasks)
    except TimeoutError:
        pass
    finally:
        await _cancel(tasks)
    return answers


async def all_at_once(server: Server, requests: Sequence[bytes]) -> list[Answer]:
    """Send all requests now, and wait for the last answer."""
    now = time.perf_counter()
    answers = [Answer(due=now) for _ in requests]
    tasks = [asyncio.create_task(server.ask(*pair)) for pair in zip(requests, answers, strict=True)]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)
    return answers


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
