"""``bench serve``: arithmetic by hand, streams in any pieces, small loads on a real server's fake model."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from samir_vllm.__main__ import main
from samir_vllm.errors import OptionError, SamirVllmError
from samir_vllm.extras.bench import serve
from samir_vllm.extras.bench.serve_client import (
    CUT_OFF,
    FAILED,
    NO_CONNECTION,
    NOT_SENT,
    NOT_UNDERSTOOD,
    OK,
    UNFINISHED,
    Answer,
    Server,
    _Stream,
    all_at_once,
    open_loop,
)
from serving import running_server

KEY = "a key"
SMALL = ["--prompt-tokens", "5", "--new-tokens", "4", "--json"]
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server("--api-key", KEY) as (address, _):
        yield address


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """The processes that the bench starts."""
    found: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> subprocess.Popen[str]:
        found.append(popen(*args, **options))
        return found[-1]

    monkeypatch.setattr(serve.subprocess, "Popen", start)
    return found


def report_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The JSON of a bench that succeeds."""
    assert main(["bench", "serve", *SMALL, *words]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a bench that the user did wrong."""
    assert main(["bench", "serve", *SMALL, *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    return told.err


# Figures


def answer(first: float, last: float, ended: float, tokens: int = 3, **others: Any) -> Answer:
    """One that was due at 100 and came through; times from then on."""
    times = {"due": 100.0, "sent": 100.0, "first": 100 + first, "last": 100 + last, "ended": 100 + ended}
    return Answer(**(times | {"tokens": tokens, "events": tokens, "outcome": OK} | others))


def test_what_a_request_saw() -> None:
    seen = answer(first=0.5, last=2.5, ended=2.75, tokens=5, sent=100.25)  # late, but that is no excuse
    assert (seen.first_token_seconds, seen.seconds_per_token, seen.total_seconds) == (0.5, 0.5, 2.75)
    assert answer(1, 1, 1, tokens=1).seconds_per_token is None


def test_figures_of_a_rate() -> None:
    answers = [
        answer(0.25, 0.75, 1, sent=100.125, was_held=True),
        answer(0.25, 0.25, 5, tokens=1, events=1),  # no token after the first: that bound can't be missed
        answer(1.0, 1.5, 2),  # its first token is late
        answer(0.25, 2.25, 3, events=1),  # its others are
        answer(0, 0, 9, outcome="429"),
        answer(0, 0, 9, outcome="429"),
        Answer(due=101),  # was never sent
    ]
    found = serve.rate_figures(answers, 100.0, seconds=4.0, slo_ttft=0.25, slo_tpot=0.25)
    assert found["requests"] == 7
    assert found["succeeded"] == 4
    assert found["errors"] == {"429": 2, NOT_SENT: 1}
    assert found["held_back"] == 1
    assert found["offered_requests_per_second"] == 7 / 4
    assert found["goodput_requests_per_second"] == 2 / 4
    assert found["seconds"] == 5  # until the last good answer's end, not the last refusal's
    assert found["requests_per_second"] == 4 / 5
    assert found["tokens_per_second"] == 10 / 5
    assert found["tokens_per_event"] == 10 / 8
    assert found["ttft_p50_seconds"] == 0.25
    assert found["ttft_p90_seconds"] == pytest.approx(0.25 + 0.7 * 0.75)  # rank 2.7 of 0 to 3
    assert found["tpot_p50_seconds"] == 0.25  # of three: one had no second token
    assert found["total_p50_seconds"] == 2.5
    assert found["sent_late_p99_seconds"] == pytest.approx(0.94 * 0.125 + 0.01 * 0, rel=0.05)


def test_figures_of_nothing() -> None:
    found = serve.rate_figures([Answer(due=100)], 100.0, 2.0, 1.0, 1.0)
    assert (found["succeeded"], found["requests_per_second"], found["goodput_requests_per_second"]) == (
        0,
        0,
        0,
    )
    assert found["seconds"] == 2  # a short run's rates are of the time in which requests came
    assert found["ttft_p50_seconds"] is found["tokens_per_event"] is None
    assert serve.rate_figures([], 100.0, 2.0, 1.0, 1.0)["errors"] == {}


def test_percentiles_interpolate() -> None:
    assert serve.percentiles("x", [float(i) for i in range(101)]) == {
        "x_p50_seconds": 50,
        "x_p90_seconds": 90,
        "x_p99_seconds": 99,
    }


def test_figures_of_streams() -> None:
    answers = [answer(1, 2, 2, tokens=30, events=10), answer(1, 4, 4, tokens=10, events=10)]
    before = {serve.FRONT_CPU: 1.0, serve.ENGINE_CPU: 2.0}
    after = {serve.FRONT_CPU: 1.004, serve.ENGINE_CPU: 2.0002}
    found = serve.stream_figures(answers, before, after, client_seconds=0.0004)
    assert found["front_us_per_token"] == pytest.approx(100)
    assert found["engine_us_per_token"] == pytest.approx(5)
    assert found["client_us_per_token"] == pytest.approx(10)
    assert (found["tokens_per_event"], found["tokens_per_second"]) == (2, 10)
    assert serve.stream_figures(answers, {}, after, 1.0)["front_us_per_token"] is None  # another's server


# Arrivals


def test_arrivals_are_the_same_everywhere() -> None:
    times = serve.poisson_arrivals(2.0, 20.0, seed=0)
    assert times[:2] == pytest.approx([0.339966, 0.849765], abs=1e-6)
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 20
    assert times == serve.poisson_arrivals(2.0, 20.0, seed=0)
    assert times != serve.poisson_arrivals(2.0, 20.0, seed=1)


def test_arrivals_scale_with_the_rate() -> None:
    slow, fast = serve.poisson_arrivals(1.0, 400.0, seed=3), serve.poisson_arrivals(4.0, 100.0, seed=3)
    assert [t / 4 for t in slow] == pytest.approx(fast)
    assert serve.poisson_arrivals(4.0, 10.0, seed=3) == [t for t in fast if t < 10]


def test_gaps_are_exponential() -> None:
    times = serve.poisson_arrivals(50.0, 400.0, seed=0)
    assert len(times) == pytest.approx(20_000, rel=0.03)  # four standard deviations of a Poisson count
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    longer = sum(gap > 1 / 50 for gap in gaps) / len(gaps)
    assert longer == pytest.approx(0.3679, abs=0.014)  # 1 / e


# One stream


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text_event(text: str) -> bytes:
    return event(choices=[{"index": 0, "text": text}], usage=None)


USAGE = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 7})
DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def chunk(content: bytes, extension: bytes = b"") -> bytes:
    return b"%x%s\r\n%s\r\n" % (len(content), extension, content)


def read(*pieces: bytes, closes: bool = True) -> Answer:
    """What a response in these pieces amounts to."""
    loop = asyncio.new_event_loop()
    found = Answer(outcome=UNFINISHED)
    done: asyncio.Future[None] = loop.create_future()
    stream = _Stream(b"", found, done)
    for piece in pieces:
        stream.data_received(piece)
    if closes:
        stream.connection_lost(None)
    assert done.done() or not closes
    loop.close()
    return found


WHOLE = CHUNKED + b"".join(
    [
        chunk(text_event("a\n\n")),
        chunk(b": still here\n\n" + text_event("") + text_event("b"), b";x=1"),
        chunk(text_event("c")[:20]),
        chunk(text_event("c")[20:] + USAGE + DONE),
        chunk(b""),
    ]
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, len(WHOLE)])
def test_a_stream_in_any_pieces(size: int) -> None:
    found = read(*(WHOLE[i : i + size] for i in range(0, len(WHOLE), size)), closes=False)
    assert (found.outcome, found.tokens, found.events) == (OK, 7, 3)
    assert 0 < found.first <= found.last <= found.ended


def test_a_stream_without_chunks() -> None:
    found = read(HEAD + b"\r\n" + text_event("a"), text_event("b") + USAGE + DONE)
    assert (found.outcome, found.tokens, found.events) == (OK, 7, 2)


@pytest.mark.parametrize(
    ("response", "outcome", "message"),
    [
        (b"", CUT_OFF, "closed"),
        (CHUNKED + chunk(text_event("a")), CUT_OFF, "closed"),
        (CHUNKED + chunk(text_event("a")) + chunk(b""), CUT_OFF, "closed"),  # no [DONE]
        (CHUNKED + chunk(text_event("a") + DONE) + chunk(b""), NOT_UNDERSTOOD, "no usage"),
        (CHUNKED + chunk(event(error={"message": "it\nbroke"})) + chunk(b""), FAILED, "it broke"),
        (CHUNKED + chunk(b"data: {\n\n"), NOT_UNDERSTOOD, "Expecting"),
        (CHUNKED + b"zz\r\n", NOT_UNDERSTOOD, "zz"),
        (b"SSH-2.0-x\r\n\r\n", NOT_UNDERSTOOD, "no HTTP"),
        (b"x" * 70_000, NOT_UNDERSTOOD, "no HTTP"),
        (b'HTTP/1.1 429 No\r\n\r\n{"error": {"message": "later"}}', "429", "later"),
        (
            b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b'{"error"') + chunk(b": 1}"),
            "500",
            '{"error": 1}',
        ),
        (b"HTTP/1.1 503 No\r\n\r\n", "503", "nothing"),
    ],
)
def test_what_can_go_wrong(response: bytes, outcome: str, message: str) -> None:
    found = read(response)
    assert found.outcome == outcome
    assert message in found.message
    assert "\n" not in found.message


# Loads, on a server that does as it is told

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def on_server(handler: Handler, load: Callable[[Server], Awaitable[list[Answer]]]) -> list[Answer]:
    """The answers to a load on a server of our own making."""

    async def both() -> list[Answer]:
        running = await asyncio.start_server(handler, "127.0.0.1", 0)
        port = running.sockets[0].getsockname()[1]
        server = await asyncio.to_thread(Server, f"http://127.0.0.1:{port}")
        try:
            return await asyncio.wait_for(load(server), WAIT_SECONDS)
        finally:
            running.close()

    return asyncio.run(both())


async def has_request(reader: asyncio.StreamReader) -> bool:
    """Reads its head; False for the connection that only looks whether somebody is there."""
    try:
        await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return False
    return True


class Gate:
    """A server that answers nobody until ``count`` have asked."""

    def __init__(self, count: int) -> None:
        self.missing, self.is_open = count, asyncio.Event()
        self.num_open = self.most_open = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await has_request(reader):
            self.missing -= 1
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            if self.missing <= 0:
                self.is_open.set()
            await self.is_open.wait()
            writer.write(WHOLE)
            self.num_open -= 1
        writer.close()


def test_the_open_loop_waits_for_no_answer() -> None:
    """Were it closed, the server would never answer, and the wait would end all."""
    gate = Gate(20)
    arrivals = [0.001 * i for i in range(20)]
    answers = on_server(
        gate, lambda server: open_loop(server, lambda i: b"\r\n\r\n", arrivals, max_open=20, seconds=50)
    )
    assert [a.outcome for a in answers] == [OK] * 20
    assert not any(a.was_held for a in answers)
    dues = [a.due - answers[0].due for a in answers]
    assert dues == pytest.approx(arrivals)
    assert all(a.sent >= a.due for a in answers)
    assert gate.most_open == 20


def test_never_more_connections_than_allowed() -> None:
    gate = Gate(0)
    answers = on_server(
        gate, lambda server: open_loop(server, lambda i: b"\r\n\r\n", [0.0] * 30, max_open=3, seconds=50)
    )
    assert [a.outcome for a in answers] == [OK] * 30
    assert gate.most_open <= 3
    assert [a.was_held for a in answers[:3]] == [False] * 3
    assert answers[3].was_held


def test_the_wait_for_the_last_is_bounded() -> None:
    answers = on_server(
        Gate(100),
        lambda server: open_loop(server, lambda i: b"\r\n\r\n", [0.0] * 5, max_open=2, seconds=0.3),
    )
    assert [a.outcome for a in answers] == [UNFINISHED] * 2 + [NOT_SENT] * 3


def test_nobody_there_any_more() -> None:
    async def load(server: Server) -> list[Answer]:
        server._address = ("127.0.0.1", 1)
        return await all_at_once(server, [b"", b""])

    answers = on_server(Gate(0), load)
    assert [a.outcome for a in answers] == [NO_CONNECTION] * 2
    assert "Connect call failed" in answers[0].message


# The command, on the real server


def test_rates_and_streams(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rates", "200,100", "--seconds", "0.2", "--streams", "3,8", "--seed", "1"]
    report = report_of(capsys, "--url", url, "--api-key", KEY, *words)
    assert (report["bench"], report["model"], report["server"]) == ("serve", "fake", url)
    assert "cores" in report["machine"]
    assert [row["rate"] for row in report["rates"]] == [200, 100]
    for row in report["rates"]:
        assert row["requests"] == row["succeeded"] == len(serve.poisson_arrivals(row["rate"], 0.2, 1)) > 0
        assert row["errors"] == {}
        assert 0 < row["ttft_p50_seconds"] <= row["ttft_p99_seconds"] <= row["total_p99_seconds"]
        assert row["client_us_per_token"] > 0
    assert [(row["streams"], row["tokens"]) for row in report["streams"]] == [(3, 12), (8, 32)]
    for row in report["streams"]:
        assert row["engine_us_per_token"] > 0
        assert row["front_us_per_token"] >= 0  # the system counts it in hundredths of a second
        assert 1 <= row["tokens_per_event"] <= 4


def test_tables(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rates", "50", "--seconds", "0.1", "--streams", "2", "--new-tokens", "3", "--max-open", "1"]
    assert main(["bench", "serve", "--url", url, "--api-key", KEY, *words]) == 0
    told = capsys.readouterr().out
    for text in (url, "TTFT", "good/s", "front, us", "engine, us", "3 new tokens"):
        assert text in told


@pytest.mark.slow
def test_a_server_of_its_own_under_too_much(
    started: list[subprocess.Popen[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whom the server turns away is counted by status; the picture is there; and nobody is left behind."""
    picture = tmp_path / "rates.svg"
    options = ["--fake-model", "--max-num-seqs", "1", "--max-waiting", "0", "--fake-step-ms", "2"]
    load = ["--rates", "300,5", "--seconds", "0.3", "--new-tokens", "30", "--plot", str(picture)]
    report = report_of(capsys, *options, "--api-key", KEY, *load)
    assert report["server"] == "serve --max-num-seqs=1 --fake-model --fake-step-ms=2.0 --max-waiting=0"
    crowded = report["rates"][0]
    assert set(crowded["errors"]) == {"429"}
    assert crowded["errors"]["429"] + crowded["succeeded"] == crowded["requests"]
    assert crowded["succeeded"] > 0
    assert "time to first token" in picture.read_text()
    (process,) = started
    assert process.returncode == 0
    assert KEY not in " ".join(map(str, process.args))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_server_that_does_not_start(
    started: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "max_num_seqs" in error_of(capsys, "--fake-model", "--max-num-seqs", "0")
    assert started[0].returncode == 2


@pytest.mark.slow
def test_a_signal_ends_the_server_too(
    started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of streams, and of a wait for more of them."""
    before, make = signal.getsignal(signal.SIGTERM), serve.Requests.__call__

    def request(self: serve.Requests, number: int) -> bytes:
        if number == 2:
            signal.raise_signal(signal.SIGTERM)
        return make(self, number)

    monkeypatch.setattr(serve.Requests, "__call__", request)
    server, load = ["--fake-model", "--fake-step-ms", "20"], ["--rates", "100", "--new-tokens", "4"]
    assert main(["bench", "serve", *server, *load]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert started[0].returncode == 0
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_a_server_that_dies(
    started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill(*args: Any) -> dict[str, Any]:
        os.kill(started[0].pid, signal.SIGKILL)
        args[1].get("/v1/models")
        return {}

    monkeypatch.setattr(serve, "measure_rate", kill)
    assert "status -9 in the middle" in error_of(capsys, "--fake-model", "--rates", "1")


FAILS_AT_THE_END = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("samir_vllm: serving it at http://127.0.0.1:1", file=sys.stderr, flush=True)
signal.sigwait([signal.SIGTERM])
sys.exit(3)
"""


def test_a_server_that_fails_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen
    command = [sys.executable, "-c", FAILS_AT_THE_END]
    monkeypatch.setattr(serve.subprocess, "Popen", lambda _, **options: popen(command, **options))
    addresses = []
    with pytest.raises(SamirVllmError, match="status 3 after SIGTERM"), serve.own_server([], None) as address:
        addresses.append(address)
    assert addresses == ["http://127.0.0.1:1"]


def test_a_server_that_has_gone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are counted as failed, but what they amount to is no measurement."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(["--url", url, "--seconds", "0.1", "--new-tokens", "2"])
    server = Server(url, KEY)
    requests = serve.Requests(server, "fake", args)
    assert serve.measure_rate(args, server, requests, 50)["errors"] == {}
    server._address = ("127.0.0.1", 1)
    server.url = "http://127.0.0.1:1"
    with pytest.raises(SamirVllmError, match="no server answers"):
        serve.measure_rate(args, server, requests, 50)


@pytest.mark.slow
def test_streams_must_all_come_through(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--fake-model", "--max-num-seqs", "1", "--max-waiting", "0", "--streams", "30"]
    assert "a request failed, 429" in error_of(capsys, *words)


def test_a_wrong_key(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    assert "401: a valid API key is needed" in error_of(capsys, "--url", url)
    assert "printable" in error_of(capsys, "--url", url, "--api-key", "a\nb")


def test_a_request_that_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = error_of(capsys, "--url", url, "--api-key", KEY, "--prompt-tokens", "9000")
    assert "400" in said
    assert "9000 tokens" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "localhost:8000"], "is no address"),
        (["--url", "http://[::1"], "is no address"),
        (["--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["--url", "http://127.0.0.1:1", "--fake-model"], "--fake-model is for a server that is started"),
        (["--rates", "1,x"], "'1,x' should be numbers"),
        (["--rates", "0"], "should be numbers"),
        (["--rates", "nan"], "should be numbers"),
        (["--rates", "100000", "--seconds", "11"], "1,000,000 requests"),
        (["--seconds", "nan"], "--seconds must be"),
        (["--slo-ttft-ms", "0"], "--slo-ttft-ms must be"),
        (["--patience", "-1"], "--patience must be"),
        (["--seed", "-1"], "--seed must be"),
        (["--streams", "0"], "should be a whole number"),
        (["--streams", "4", "--plot", "x.png"], "--plot draws"),
        (["--plot", "x.gif"], "must end in"),
        (["--max-open", "9999999"], "ulimit -Hn"),
        (["--streams", "9999999"], "ulimit -Hn"),
    ],
)
def test_mistakes(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], started: list[subprocess.Popen[str]]
) -> None:
    assert message in error_of(capsys, *words)
    assert not started


def test_what_answers_is_no_such_server() -> None:
    async def wrong(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await has_request(reader):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async def load(server: Server) -> list[Answer]:
        args = argparse.Namespace(rates=[1.0], streams=None)
        with pytest.raises(OptionError, match="names no model"):
            await asyncio.to_thread(serve.measure, args, server)
        return []

    on_server(wrong, load)


def test_options_reach_the_server() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    given = ["--model", "-x y", "--batch-invariant", "--kv-cache-mib", "auto", "--max-waiting", "0"]
    given[:2] = ["--model=-x y"]
    words = serve.server_words(parser.parse_args(given))
    assert words == ["--model=-x y", "--kv-cache-mib=auto", "--batch-invariant", "--max-waiting=0"]
    assert serve.server_words(parser.parse_args(["--rates", "3"])) == []


def test_a_failed_stream_is_an_error() -> None:
    with pytest.raises(SamirVllmError, match="a request failed, 503: it broke"):
        serve._all_well([answer(1, 1, 1), Answer(outcome="503", message="it broke")])
