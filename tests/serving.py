"""A server in its own process, for tests that talk HTTP to it. Knows its command line, no client library."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

STARTING_SECONDS = 120
ENDING_SECONDS = 60
REPLY_SECONDS = 60

SERVING_PACKAGES = ("starlette", "uvicorn", "httptools", "uvloop", "prometheus_client", "llguidance")
"""What the server needs; a test module skips where one is missing."""

_READY = re.compile(r"samir_vllm: serving \S+ at (http://\S+)")
_SAMPLE = re.compile(r"(?P<name>[a-z_]+(?:\{[^}]*\})?) (?P<value>\S+)")


class Reply(NamedTuple):
    """An HTTP response with all of its body."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        """The body's JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """What an error's body holds; anything else in it is a failure."""
        (error,) = self.json.values()
        assert self.json == {"error": error}
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert "\n" not in error["message"]
        return error


@dataclass
class Server:
    """A running server; unpacks as its address and its process."""

    url: str  # http://127.0.0.1:45678
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)  # its lines on stderr so far

    def __iter__(self) -> Iterator[Any]:
        yield self.url
        yield self.process

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        assert parts.hostname
        assert parts.port
        return parts.hostname, parts.port

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """One request on a connection of its own; a ``body`` that isn't bytes goes as JSON."""
        connection = http.client.HTTPConnection(*self.address, timeout=REPLY_SECONDS)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            kind = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, data, {**kind, **(headers or {})})
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, names, response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Reply:
        """GET."""
        return self.ask("GET", path)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
        """POST."""
        return self.ask("POST", path, body, headers)

    def health(self) -> dict[str, Any]:
        """What /health says, whatever its status."""
        return self.get("/health").json

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics, by name and labels as they are written there."""
        found = map(_SAMPLE.fullmatch, self.get("/metrics").body.decode().splitlines())
        return {sample["name"]: float(sample["value"]) for sample in found if sample}

    def engine_pid(self) -> int:
        """Of the engine's process: the front has one child."""
        (child,) = children(self.process.pid)
        return child

    def wait_until_idle(self) -> None:
        """Until nothing runs, nothing waits, and all pages are free.

        Raises:
            AssertionError: that does not come about.
        """
        idle = {"running": 0, "waiting": 0, "status": "ok"}

        def is_idle() -> bool:
            health = self.health()
            return {name: health[name] for name in idle} == idle and health["kv_pages"]["used"] == 0

        wait_for(is_idle, lambda: f"still busy: {self.health()}")


@contextmanager
def running_server(*options: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server that is ready. SIGTERM ends it, unless the test has.

    It has the fake model unless ``options`` name a ``--model``, a free port unless they name a ``--port``.
    ``env`` goes on top of this process's environment.

    Raises:
        AssertionError: it ended before it was ready; what it wrote on stderr says why.
    """
    with starting_server(*options, env=env) as (address, server):
        server.url = address.result(STARTING_SECONDS)
        yield server


@contextmanager
def starting_server(
    *options: str, env: Mapping[str, str] | None = None
) -> Iterator[tuple[Future[str], Server]]:
    """The same, at once: the address comes when it is ready. Ends it as `running_server` does."""
    process = subprocess.Popen(
        serve_command(*options),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
        start_new_session=True,  # the test's Ctrl-C is not the server's
    )
    assert process.stderr is not None
    server, address = Server("", process), Future[str]()
    reader = threading.Thread(target=_read, args=(process.stderr, address, server.log), daemon=True)
    reader.start()
    try:
        yield address, server
    finally:
        engines = children(process.pid)
        process.terminate()
        try:
            process.wait(ENDING_SECONDS)
        finally:
            process.kill()  # it does nothing to one that has ended
            process.wait()
            for engine in filter(is_running, engines):
                os.kill(engine, signal.SIGKILL)
            reader.join(ENDING_SECONDS)  # an engine that a test has orphaned may hold the other end
            if not reader.is_alive():
                process.stderr.close()


def serve_command(*options: str) -> list[str]:
    """The command line of a server; see `running_server`."""
    model = [] if "--model" in options else ["--fake-model"]
    port = [] if "--port" in options else ["--port", "0"]
    return [sys.executable, "-m", "samir_vllm", "serve", *port, *model, *options]


def _read(stderr: IO[str], address: Future[str], log: list[str]) -> None:
    """To its end, so that the server never waits for a reader; what isn't about being ready is passed on."""
    for line in stderr:
        log.append(line)
        if (ready := _READY.match(line)) and not address.done():
            address.set_result(ready[1])
        else:
            print(line, end="", file=sys.stderr)
    if not address.done():
        address.set_exception(AssertionError(f"the server ended before it was ready:\n{''.join(log)}"))


def wait_for(
    is_so: Callable[[], bool], complaint: Callable[[], str] = lambda: "it didn't come about"
) -> None:
    """Ask again and again, for `REPLY_SECONDS` at most.

    Raises:
        AssertionError: with the complaint, when they are over.
    """
    deadline = time.monotonic() + REPLY_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """The processes that this one has started and that are there."""
    text = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for child in text.split()]


def is_running(pid: int) -> bool:
    """Whether a process is there, and has not just ended (a zombie)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def read_events(body: bytes) -> list[Any]:
    """The events of a whole stream: JSON objects, and last ``[DONE]``, of which only these are given.

    Raises:
        AssertionError: a byte is not as it has to be.
    """
    assert body.endswith(b"\n\n"), body[-100:]
    body.decode("ascii")
    events = body[:-2].split(b"\n\n")
    assert all(event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event for event in events)
    assert events[-1] == b"data: [DONE]"
    return [json.loads(event[len(b"data: ") :]) for event in events[:-1]]
