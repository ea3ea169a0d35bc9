"""The server when things go wrong: clients that leave, stall or lie, processes that die, early ends.

Whatever happens, what was reserved is given back, others go on, and the log has no traceback. Steps are
counted rather than timed, and nothing waits for a fixed time. Knows the fake model's one sentence.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serving import (
    ENDING_SECONDS,
    REPLY_SECONDS,
    SERVING_PACKAGES,
    STARTING_SECONDS,
    Reply,
    Server,
    children,
    is_running,
    read_events,
    running_server,
    serve_command,
    starting_server,
    wait_for,
)

for name in SERVING_PACKAGES:
    pytest.importorskip(name, reason="serving needs it: pip install 'samir-vllm[serve]'")

pytestmark = pytest.mark.slow

from samir_vllm.extras.serve.channel import Channel, packed  # noqa: E402
from samir_vllm.extras.serve.fake_model import SENTENCE  # noqa: E402

TEXT = SENTENCE.decode()
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SHORT: dict[str, Any] = {"model": "fake", "prompt": "Say it", "max_tokens": 100}
ENDLESS: dict[str, Any] = {**SHORT, "max_tokens": 8000, "ignore_eos": True}
CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Say it"}]}
STREAM = {"stream": True}
MIB = 1 << 20
JSON = "Content-Type: application/json\r\n"


@pytest.fixture(scope="module")
def quick() -> Iterator[Server]:
    """As fast as it can."""
    with checked_server("--max-body-mib", "1") as server:
        yield server


@pytest.fixture(scope="module")
def paced() -> Iterator[Server]:
    """An endless answer takes minutes. Two run, three wait."""
    options = ("--fake-step-ms", "20", "--max-num-seqs", "2", "--max-waiting", "3", "--drain-seconds", "0")
    with checked_server(*options) as server:
        yield server


@contextmanager
def checked_server(*options: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A server whose log must not hold a traceback in the end."""
    with running_server(*options, env=env) as server:
        yield server
    check_log(server)


def check_log(server: Server) -> None:
    assert not [line for line in server.log if "Traceback" in line], "".join(server.log)


class Wire:
    """A connection, byte by byte."""

    def __init__(self, server: Server, *, receive_buffer: int | None = None) -> None:
        self._socket = socket.socket()
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.settimeout(REPLY_SECONDS)
        self._socket.connect(server.address)
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        """All of it."""
        self._socket.sendall(data)

    def post(self, body: dict[str, Any], path: str = COMPLETIONS) -> None:
        """A whole request."""
        self.send(post_bytes(body, path))

    def next_event(self) -> Any:
        """The next event of a stream."""
        while not (line := self._file.readline()).startswith(b"data: "):
            assert line, "the stream has ended"
        assert self._file.readline() == b"\n"
        return json.loads(line.removeprefix(b"data: "))

    def reply(self) -> Reply:
        """The next response, with all of its body."""
        status = self._file.readline().split()
        assert status, "the connection was closed"
        assert status[0] == b"HTTP/1.1"
        headers = {}
        while line := self._file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while size := int(self._file.readline(), 16):
                body += self._file.read(size)
                self._file.readline()
            self._file.readline()
        else:
            body = self._file.read(int(headers["content-length"]))
        return Reply(int(status[1]), headers, body)

    def rest_of_stream(self) -> bytes:
        """The events that are left of a stream."""
        data = b""
        while not data.endswith(b"\r\n0\r\n\r\n"):
            piece = self._file.read1(1 << 20)
            assert piece, "the stream was cut"
            data += piece
        return unchunked(data)

    def rest(self) -> bytes:
        """Whatever comes until the server closes the connection, be it with a reset."""
        data = b""
        try:
            while piece := self._file.read1(1 << 16):
                data += piece
        except ConnectionError:
            pass
        return data

    def reset(self) -> None:
        """Leave without a word (RST rather than FIN)."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """Leave."""
        self._file.close()
        self._socket.close()


def post_bytes(body: dict[str, Any], path: str = COMPLETIONS, more_headers: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n{more_headers}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def unchunked(data: bytes) -> bytes:
    """A chunked body's content, from the end of a line on; in events there is no CR."""
    return re.sub(rb"\r\n[0-9a-f]+\r\n", b"", data.removesuffix(b"\r\n0\r\n\r\n"))


def text_of(reply: Reply) -> str:
    """Of a stream's first answer."""
    assert reply.status == 200, reply.body
    return "".join(event["choices"][0]["text"] for event in read_events(reply.body))


def last_event(body: bytes) -> Any:
    """Of a stream that ended with an error."""
    assert body.endswith(b"\n\n")
    return json.loads(body[:-2].rpartition(b"\n\n")[2].removeprefix(b"data: "))


def resident_mib(pid: int) -> float:
    (kib,) = re.findall(r"VmRSS:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kib) / 1024


# --- clients that leave -------------------------------------------------------------------------------------


def leave_mid_stream(server: Server) -> None:
    with Wire(server) as wire:
        wire.post(ENDLESS | STREAM)
        wire.next_event()


def leave_by_reset(server: Server) -> None:
    wire = Wire(server)
    wire.post(ENDLESS | STREAM)
    wire.next_event()
    wire.reset()


def leave_before_the_answer(server: Server) -> None:
    with Wire(server) as wire:
        wire.post(ENDLESS)
        wait_for(lambda: server.health()["running"] == 1)


def leave_several_answers(server: Server) -> None:
    with Wire(server) as wire:
        wire.post(ENDLESS | STREAM | {"n": 2, "prompt": ["One", "Two"]})
        wire.next_event()
        assert server.health()["waiting"] == 2


def leave_a_chat(server: Server) -> None:
    with Wire(server) as wire:
        wire.post(CHAT | STREAM | {"max_tokens": 8000, "ignore_eos": True, "logprobs": True}, CHATS)
        wire.next_event()


def leave_a_pipelined_stream(server: Server) -> None:
    with Wire(server) as wire:
        wire.post(ENDLESS | STREAM)
        wire.next_event()
        wire.post(SHORT)
        wire.next_event()


def leave_a_pipelined_answer(server: Server) -> None:
    with Wire(server) as wire:
        wire.post(ENDLESS)
        wait_for(lambda: server.health()["running"] == 1)
        wire.post(SHORT)  # while the first is being answered: it isn't even parsed


def leave_half_a_body(server: Server) -> None:
    with Wire(server) as wire:
        wire.send(post_bytes(SHORT)[:-9])


def leave_half_the_headers(server: Server) -> None:
    with Wire(server) as wire:
        wire.send(post_bytes(SHORT)[:30])


def leave_before_anything(server: Server) -> None:
    Wire(server).close()


@pytest.mark.parametrize(
    "leave",
    [
        leave_mid_stream,
        leave_by_reset,
        leave_before_the_answer,
        leave_several_answers,
        leave_a_chat,
        leave_a_pipelined_stream,
        leave_a_pipelined_answer,
        leave_half_a_body,
        leave_half_the_headers,
        leave_before_anything,
    ],
)
def test_who_leaves_gives_everything_back(paced: Server, leave: Callable[[Server], None]) -> None:
    leave(paced)
    paced.wait_until_idle()
    assert paced.post(COMPLETIONS, SHORT | {"max_tokens": 2}).json["choices"][0]["text"] == "No"
    check_log(paced)


def test_who_leaves_the_queue_disturbs_nobody(paced: Server) -> None:
    with Wire(paced) as first, Wire(paced) as second:
        for wire in (first, second):
            wire.post(SHORT | STREAM)
            assert wire.next_event()["choices"][0]["text"] == "N"
        with Wire(paced) as waiting:
            waiting.post(SHORT | STREAM)
            wait_for(lambda: paced.health()["waiting"] == 1)
        wait_for(lambda: paced.health()["waiting"] == 0)
        for wire in (first, second):
            text = "N"
            while (choice := wire.next_event()["choices"][0])["finish_reason"] is None:
                text += choice["text"]
            assert text == TEXT
    paced.wait_until_idle()


def test_who_leaves_is_aborted_within_a_step_or_two() -> None:
    """Another stream's tokens count the steps: one is under way, the next one is launched already."""
    with checked_server("--fake-step-ms", "200", "--drain-seconds", "0") as server, Wire(server) as other:
        leaving = Wire(server)
        leaving.post(ENDLESS | STREAM)
        leaving.next_event()
        other.post(ENDLESS | STREAM)
        other.next_event()  # from here on, nothing of it has gone unread
        both = server.health()["kv_pages"]["used"]
        leaving.close()
        tokens = 0
        while server.health()["running"] == 2:
            tokens += len(other.next_event()["choices"][0]["text"])
            assert tokens <= 3
        assert server.health()["kv_pages"]["used"] == both // 2


# --- clients that stall -------------------------------------------------------------------------------------


def test_a_slow_reader_gets_everything_in_the_end(quick: Server) -> None:
    with Wire(quick, receive_buffer=4096) as slow:
        wishes = {"max_tokens": 6000, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
        slow.post(CHAT | STREAM | wishes, CHATS)
        assert slow.next_event()["choices"][0]["delta"]["role"] == "assistant"
        quick.wait_until_idle()  # all is said, and nobody has read it
        events = read_events(slow.rest_of_stream())
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == (SENTENCE * 99)[:6000].decode("utf-8", "replace")
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_who_never_reads_is_given_up_and_costs_little(quick: Server) -> None:
    before = resident_mib(quick.process.pid)
    with Wire(quick, receive_buffer=4096) as slow:
        slow.post(ENDLESS | STREAM | {"n": 8, "logprobs": 5})
        slow.next_event()
        with ThreadPoolExecutor(4) as pool:  # meanwhile the others go on
            for reply in pool.map(lambda _: quick.post(COMPLETIONS, SHORT | STREAM), range(40)):
                assert text_of(reply) == TEXT
        quick.wait_until_idle()
        assert resident_mib(quick.process.pid) - before < 150
        assert last_event(slow.rest_of_stream())["error"]["type"] == "timeout_error"
    check_log(quick)


def test_a_front_that_stalls_leaves_no_timeout_behind() -> None:
    """With one on its socket, every later look for messages would take that long, in every step."""
    front, engine = socket.socketpair()
    with front, engine:
        channel = Channel(engine)
        channel.send(b"x" * (8 * MIB))
        front.sendall(packed("hello"))
        assert channel.receive(wait=True) == ["hello"]
        assert engine.gettimeout() is None


def test_half_a_request_holds_nothing(quick: Server) -> None:
    with Wire(quick) as body, Wire(quick) as head:
        body.send(post_bytes(SHORT)[:-9])
        head.send(post_bytes(SHORT)[:30])
        assert text_of(quick.post(COMPLETIONS, SHORT | STREAM)) == TEXT
        quick.wait_until_idle()
        body.send(post_bytes(SHORT)[-9:])
        head.send(post_bytes(SHORT)[30:])
        for wire in (body, head):
            assert wire.reply().json["choices"][0]["text"] == TEXT


# --- many ---------------------------------------------------------------------------------------------------


def test_a_thousand_streams_at_once(quick: Server) -> None:
    async def say(count: int, everybody_is_here: asyncio.Barrier) -> None:
        reader, writer = await asyncio.open_connection(*quick.address)
        async with everybody_is_here:
            writer.write(
                post_bytes(SHORT | STREAM | {"max_tokens": count}, more_headers="Connection: close\r\n")
            )
        head, _, chunks = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200 "), head
        body = unchunked(b"\r\n" + chunks)
        expected = SENTENCE[:count].decode("utf-8", "replace")
        assert text_of(Reply(200, {}, body)) == expected

    async def main() -> None:
        barrier = asyncio.Barrier(1000)
        async with asyncio.timeout(REPLY_SECONDS):
            await asyncio.gather(*(say(1 + i % len(SENTENCE), barrier) for i in range(1000)))

    asyncio.run(main())
    quick.wait_until_idle()
    check_log(quick)


def test_a_full_queue_sends_back_who_comes_and_keeps_who_is_there(paced: Server) -> None:
    with ThreadPoolExecutor(5) as pool:
        body = SHORT | STREAM | {"max_tokens": 30}
        there = [pool.submit(paced.post, COMPLETIONS, body) for _ in range(5)]
        wait_for(lambda: paced.health()["waiting"] == 3)
        for body in (SHORT, SHORT | STREAM, SHORT | {"n": 3}):
            reply = paced.post(COMPLETIONS, body)
            assert (reply.status, reply.error["code"]) == (429, "queue_full")
            assert int(reply.headers["retry-after"]) >= 1
        assert [text_of(reply.result()) for reply in there] == [TEXT[:30]] * 5
    paced.wait_until_idle()


def test_who_wants_more_pages_than_there_are_is_told_so() -> None:
    with checked_server("--kv-cache-mib", "1") as server:
        reply = server.post(COMPLETIONS, ENDLESS)
        assert reply.status == 400
        assert "kv-cache-mib" in reply.error["message"]
        bodies = [SHORT | STREAM] * 30  # of which only some fit at once
        with ThreadPoolExecutor(30) as pool:
            for reply in pool.map(lambda body: server.post(COMPLETIONS, body), bodies):
                assert text_of(reply) == TEXT
        server.wait_until_idle()


# --- bodies and heads ---------------------------------------------------------------------------------------


def test_a_body_over_the_limit(quick: Server) -> None:
    blank = b" " * (2 * MIB)
    assert quick.post(COMPLETIONS, blank).status == 413
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
    with Wire(quick) as wire:
        wire.send(chunked + b"200000\r\n" + blank + b"\r\n0\r\n\r\n")
        assert wire.reply().error["type"] == "invalid_request_error"
    fitting = json.dumps(SHORT).encode()
    assert quick.post(COMPLETIONS, b" " * (MIB - len(fitting)) + fitting).status == 200
    assert quick.post(COMPLETIONS, b" " * (MIB - len(fitting) + 1) + fitting).status == 413


def test_a_body_that_says_it_is_too_long_is_not_waited_for(quick: Server) -> None:
    for more in ("", "Expect: 100-continue\r\n"):
        with Wire(quick) as wire:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\n{more}{JSON}"
            wire.send(f"{head}Content-Length: {1 << 40}\r\n\r\n".encode())
            assert wire.reply().status == 413


def test_an_endless_upload_costs_little(quick: Server) -> None:
    before = resident_mib(quick.process.pid)
    with Wire(quick) as wire:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n"
        wire.send(head.encode())
        try:
            for _ in range(64):
                wire.send(b"100000\r\n" + b" " * MIB + b"\r\n")
        except ConnectionError:
            return  # it may well be cut off
        assert wire.reply().status == 413
        assert resident_mib(quick.process.pid) - before < 40


@pytest.mark.parametrize("piece", [b"a" * MIB, b"X-A: b\r\n" * (MIB // 8)], ids=["one", "many"])
def test_endless_headers_are_cut_off(quick: Server, piece: bytes) -> None:
    before = resident_mib(quick.process.pid)
    with Wire(quick) as wire:
        wire.send(b"GET /health HTTP/1.1\r\nHost: here\r\nX-First: ")
        with pytest.raises(ConnectionError):
            wire.send(piece * 16)
    assert resident_mib(quick.process.pid) - before < 40
    assert quick.health()["status"] == "ok"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"{} {}", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b'{"prompt": "\x00"}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"a":' * 100_000, "invalid_json"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b"[]", "invalid_type"),
        (b"null", "invalid_type"),
        (b'"prompt"', "invalid_type"),
        (b"{}", "missing_required_parameter"),
        (b"\xef\xbb\xbf{}", "missing_required_parameter"),
        (b'{"model": "fake", "prompt": "\\ud800"}', "invalid_value"),
        (b'{"model": "fake", "prompt": "x", "temperature": NaN}', "invalid_value"),
        (b'{"model": "fake", "prompt": "x", "logit_bias": {"1": Infinity}}', "invalid_value"),
        (b'{"model": "fake", "prompt": "x", "max_tokens": 1e999}', "invalid_type"),
        (b'{"model": "fake", "prompt": []}', "invalid_type"),
        (b'{"model": "fake", "prompt": ""}', None),
    ],
)
def test_bad_bodies(quick: Server, data: bytes, code: str | None) -> None:
    reply = quick.post(COMPLETIONS, data)
    assert (reply.status, reply.error["code"]) == (400, code)
    assert reply.error["type"] == "invalid_request_error"


def test_a_body_of_another_kind(quick: Server) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert quick.post(COMPLETIONS, SHORT, {"Content-Type": kind}).status == 415
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/problem+json"):
        assert quick.post(COMPLETIONS, SHORT, {"Content-Type": kind}).status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
        b"GET /health HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: elsewhere\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(quick: Server, data: bytes) -> None:
    with Wire(quick) as wire:
        wire.send(data)
        assert wire.rest().startswith(b"HTTP/1.1 400 ")


# --- connections --------------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order(quick: Server) -> None:
    with Wire(quick) as wire:
        wire.send(
            post_bytes(SHORT | STREAM)
            + post_bytes(SHORT | {"max_tokens": 2})
            + b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
            + post_bytes({})
            + post_bytes(SHORT | STREAM | {"max_tokens": 3})
        )
        assert text_of(wire.reply()) == TEXT
        assert wire.reply().json["choices"][0]["text"] == "No"
        assert wire.reply().json["status"] == "ok"
        assert wire.reply().status == 400
        assert text_of(wire.reply()) == "No "


def test_a_connection_serves_many_requests(quick: Server) -> None:
    with Wire(quick) as wire:
        for count in range(1, 30):
            wire.post(SHORT | {"max_tokens": count, "stream": count % 3 == 0})
            reply = wire.reply()
            text = text_of(reply) if count % 3 == 0 else reply.json["choices"][0]["text"]
            assert text == TEXT[:count]
            wire.post({**SHORT, "prompt": 7})
            assert wire.reply().status == 400
            wire.send(post_bytes(SHORT | {"model": "nobody"}))
            assert wire.reply().status == 404


def test_methods_that_are_not_for_a_path(quick: Server) -> None:
    for path in ("/", "/health", "/metrics", "/v1/models", "/v1/models/fake"):
        reply = quick.ask("HEAD", path)
        assert (reply.status, reply.body) == (200, b"")
        assert "GET" in quick.ask("OPTIONS", path).headers["allow"]
        assert quick.ask("DELETE", path).error["type"] == "invalid_request_error"
    for path in (COMPLETIONS, CHATS, "/v1/tokenize", "/v1/detokenize"):
        for method in ("GET", "HEAD", "OPTIONS", "PUT"):
            reply = quick.ask(method, path)
            assert (reply.status, reply.headers["allow"]) == (405, "POST")
    for path in ("/v1", "/v1/", "/v2/models", "/v1/completions/x", "/%ff", "/..", "/v1/models/"):
        assert quick.get(path).status == 404


def test_pages_from_elsewhere_are_kept_out_unless_named(quick: Server) -> None:
    asked = {"Origin": "https://page", "Access-Control-Request-Method": "POST"}
    for reply in (quick.ask("OPTIONS", CHATS, None, asked), quick.ask("GET", "/v1/models", None, asked)):
        assert not [name for name in reply.headers if name.startswith("access-control")]
    # What openai's client sends in a browser.
    wanted = {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang"}
    with checked_server("--cors-origin", "https://page", "--api-key", "key") as server:
        preflight = server.ask("OPTIONS", CHATS, None, asked | wanted)
        assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (200, "https://page")
        assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"].lower()
        assert server.ask("OPTIONS", CHATS, None, {**asked, "Origin": "https://other"}).status == 400
        for key, status in (("key", 200), ("nokey", 401)):
            headers = {"Origin": "https://page", "Authorization": f"Bearer {key}"}
            reply = server.post(CHATS, CHAT, headers)
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, "https://page")
        other = server.post(CHATS, CHAT, {"Origin": "https://other", "Authorization": "Bearer key"})
        assert "access-control-allow-origin" not in other.headers


def test_keys() -> None:
    with checked_server(env={"SAMIR_VLLM_API_KEY": "schlüssel"}) as server:
        for path in ("/", "/health", "/metrics"):
            assert server.get(path).status == 200
        for path in ("/v1/models", "/v1/models/fake", COMPLETIONS, CHATS, "/v1/tokenize", "/v1/nowhere"):
            assert server.get(path).error["code"] == "invalid_api_key"
        for given in (
            "",
            "Bearer",
            "Bearer ",
            "Basic schlüssel",
            "schlüssel",
            "Bearer schlüsse",
            "Bearer schlüssel2",
        ):
            header = given.encode().decode("latin-1")
            reply = server.post(COMPLETIONS, SHORT, {"Authorization": header})
            assert (reply.status, reply.error["type"]) == (401, "authentication_error")
        for given in ("Bearer schlüssel", "bearer  schlüssel "):
            header = given.encode().decode("latin-1")
            assert server.post(COMPLETIONS, SHORT, {"Authorization": header}).status == 200


# --- processes that die -------------------------------------------------------------------------------------


def test_an_engine_that_dies_is_replaced() -> None:
    options = ("--fake-step-ms", "20", "--max-num-seqs", "2", "--drain-seconds", "0")
    with checked_server(*options) as server, ThreadPoolExecutor(3) as pool:
        streamed = Wire(server)
        streamed.post(ENDLESS | STREAM)
        streamed.next_event()
        others = [pool.submit(server.post, COMPLETIONS, ENDLESS | more) for more in ({}, STREAM, {})]
        wait_for(lambda: (server.health()["running"], server.health()["waiting"]) == (2, 2))
        before = server.engine_pid()
        os.kill(before, signal.SIGKILL)
        assert last_event(streamed.rest_of_stream())["error"]["type"] == "server_error"
        streamed.close()
        for reply in others:  # one of them may have begun to stream
            result = reply.result()
            error = result.error if result.status == 500 else last_event(result.body)["error"]
            assert error["type"] == "server_error"
        refused = server.post(COMPLETIONS, SHORT)
        if refused.status != 200:  # else another is there already
            assert (refused.status, int(refused.headers["retry-after"])) == (503, 1)
        server.wait_until_idle()
        assert text_of(server.post(COMPLETIONS, SHORT | STREAM)) == TEXT
        assert server.engine_pid() != before
        assert server.metrics()["samir_vllm_engine_restarts_total"] == 1
        assert server.metrics()["samir_vllm_engine_up"] == 1
        assert any("another is started" in line for line in server.log)


@pytest.mark.parametrize("body", [ENDLESS | STREAM, SHORT | STREAM | {"max_tokens": 1}], ids=["busy", "idle"])
def test_an_engine_goes_when_its_front_dies(body: dict[str, Any]) -> None:
    with running_server("--fake-step-ms", "20") as server, Wire(server) as wire:
        wire.post(body)
        wire.next_event()
        engine = server.engine_pid()
        server.process.kill()
        server.process.wait(ENDING_SECONDS)
        wait_for(lambda: not is_running(engine))
        port = str(server.address[1])
        with checked_server("--port", port) as successor:
            assert successor.url == server.url
            assert text_of(successor.post(COMPLETIONS, SHORT | STREAM)) == TEXT


# --- ends ---------------------------------------------------------------------------------------------------


def is_refused(server: Server) -> bool:
    try:
        socket.create_connection(server.address, REPLY_SECONDS).close()
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_runs_may_end(number: signal.Signals) -> None:
    with checked_server("--fake-step-ms", "20", "--max-num-seqs", "1") as server:
        with Wire(server) as running, Wire(server) as waiting, Wire(server) as unused, Wire(server) as half:
            running.post(SHORT | STREAM)
            assert running.next_event()["choices"][0]["text"] == "N"
            waiting.post(SHORT | {"max_tokens": 3})
            half.send(post_bytes(SHORT)[:30])
            wait_for(lambda: server.health()["waiting"] == 1)
            server.process.send_signal(number)
            wait_for(lambda: is_refused(server))
            assert unused.rest() == half.rest() == b""
            events = read_events(running.rest_of_stream())
            assert "N" + "".join(event["choices"][0]["text"] for event in events) == TEXT
            assert waiting.reply().json["choices"][0]["text"] == "No "
        assert server.process.wait(ENDING_SECONDS) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_runs_too_long_is_ended(number: signal.Signals) -> None:
    options = ("--fake-step-ms", "20", "--drain-seconds", "1", "--max-num-seqs", "1")
    with checked_server(*options) as server:
        with Wire(server) as streamed, Wire(server) as whole:
            streamed.post(ENDLESS | STREAM)
            streamed.next_event()
            whole.post(ENDLESS)
            wait_for(lambda: server.health()["waiting"] == 1)
            server.process.send_signal(number)
            assert last_event(streamed.rest_of_stream())["error"]["type"] == "server_error"
            assert whole.reply().status == 503
        assert server.process.wait(ENDING_SECONDS) == 0


def test_who_stalls_does_not_hold_up_the_end() -> None:
    with (
        checked_server("--drain-seconds", "0") as server,
        Wire(server) as half,
        Wire(server, receive_buffer=4096) as slow,
    ):
        half.send(post_bytes(SHORT)[:-9])
        slow.post(ENDLESS | STREAM | {"n": 8, "logprobs": 5})
        slow.next_event()
        server.wait_until_idle()  # it was given up, and there is no room to tell that
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(ENDING_SECONDS) == 0


def test_a_second_signal_ends_it_at_once() -> None:
    with checked_server("--fake-step-ms", "20", "--drain-seconds", "100000") as server:
        with Wire(server) as wire:
            wire.post(ENDLESS | STREAM)
            wire.next_event()
            server.process.send_signal(signal.SIGINT)
            wait_for(lambda: is_refused(server))
            assert wire.next_event()["choices"][0]["text"]
            engine = server.engine_pid()
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(ENDING_SECONDS) == 0
        assert not is_running(engine)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_loads(number: signal.Signals) -> None:
    """As a terminal sends it, to the engine's process, too."""
    with starting_server() as (address, server):
        wait_for(lambda: bool(children(server.process.pid)))
        engine = server.engine_pid()
        wait_for(lambda: "numpy" in Path(f"/proc/{engine}/maps").read_text())  # amid its imports
        os.killpg(server.process.pid, number)
        assert server.process.wait(ENDING_SECONDS) == 130
        with pytest.raises(AssertionError, match="ended before it was ready"):
            address.result(STARTING_SECONDS)
    assert not is_running(engine)
    check_log(server)


def test_a_port_that_is_taken(quick: Server) -> None:
    told = subprocess.run(
        serve_command("--port", str(quick.address[1])),
        capture_output=True,
        text=True,
        timeout=STARTING_SECONDS,
    )
    assert told.returncode == 2
    (line,) = told.stderr.splitlines()
    assert "--port" in line
