"""``bench serve``: a server under load, by what its clients see and by what a token costs the CPU.

Clients: an open loop at several request rates. Requests come at random times, as from many people who know
nothing of each other, and don't wait for earlier answers. CPU: so many streams at once, each process's CPU
time over their tokens; not wall time, as the load runs on the same cores. Both talk HTTP, to a server that
runs already or to one of their own. Know the server by its command line, its API and its metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich import box
from rich.table import Table

from samir_vllm.backends import gpu_index
from samir_vllm.backends.cuda_probe import require_gpu
from samir_vllm.commandline import add_engine_options, load_pyplot, save_figure
from samir_vllm.config import EngineConfig
from samir_vllm.errors import OptionError, SamirVllmError
from samir_vllm.extras.bench.report import (
    add_output_arguments,
    check_output,
    number,
    numbers,
    print_table,
    progress,
)
from samir_vllm.extras.bench.serve_client import OK, Answer, Server, all_at_once, open_loop

RATES = [1.0, 2.0, 4.0, 8.0, 16.0]
MAX_ARRIVALS = 1_000_000
FRONT_TARGET_US = 50.0
ENGINE_TARGET_US = 5.0
PERCENTILES = (50, 90, 99)
IDS = range(32, 256)  # any vocabulary has them, and none of ours has a control token there
OTHER_FILES = 64  # that this process may have open beside its connections
ENDING_SECONDS = 90.0  # longer than a server drains
DYING_SECONDS = 1.0  # from when a process answers no more until its status is there
KEY_VARIABLE = "SAMIR_VLLM_API_KEY"
READY = re.compile(r"samir_vllm: serving .+ at (http://\S+)")
FRONT_CPU = "process_cpu_seconds_total"
ENGINE_CPU = "samir_vllm_engine_cpu_seconds"

T = TypeVar("T")


# Options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    option = parser.add_argument
    option("--url", metavar="URL", help="of a running server (default: one is started, by the options below)")
    option("--api-key", metavar="KEY", help=f"of the server (else ${KEY_VARIABLE}, which `ps` doesn't show)")
    option(
        "--rates",
        type=_rates,
        metavar="X[,X...]",
        help=f"requests a second ({','.join(f'{rate:g}' for rate in RATES)}, unless --streams is given)",
    )
    option("--seconds", type=float, default=20.0, metavar="S", help="in which they come (%(default)g)")
    option(
        "--patience", type=float, default=30.0, metavar="S", help="for the last to be answered (%(default)g)"
    )
    option("--streams", type=numbers, metavar="N[,N...]", help="so many at once, for the CPU time of a token")
    option("--prompt-tokens", type=number, default=128, metavar="N", help="of each (%(default)s)")
    option("--new-tokens", type=number, default=128, metavar="N", help="of each (%(default)s)")
    option("--seed", type=int, default=0, metavar="N", help="of arrivals and prompts (%(default)s)")
    option("--slo-ttft-ms", type=float, default=500.0, metavar="X", help="first token by then (%(default)g)")
    option(
        "--slo-tpot-ms",
        type=float,
        default=50.0,
        metavar="X",
        help="and so long for each other (%(default)g)",
    )
    option("--max-open", type=number, default=4096, metavar="N", help="connections at once (%(default)s)")
    add_output_arguments(parser, peers=False)
    add_server_options(parser)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``serve`` that a server of our own may get; the engine's among them."""
    add_engine_options(parser)
    group = parser.add_argument_group("server", "Of one that is started here; see `serve --help`.")
    group.add_argument("--fake-model", action="store_true", help="no weights: what the server itself costs")
    group.add_argument("--fake-step-ms", type=float, metavar="X", help="how long each of its steps takes")
    group.add_argument("--max-waiting", type=int, metavar="N", help="who comes after them gets 429")


def _rates(text: str) -> list[float]:
    """An argument that must be a list of requests a second."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0.001 <= rate <= 100_000 for rate in found):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} should be numbers, 0.001 to 100,000, such as 1,2.5")
    return found


def server_words(args: argparse.Namespace) -> list[str]:
    """The options of ``add_server_options`` that differ from their defaults, for a command line."""
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    words = []
    for name, default in vars(parser.parse_args([])).items():
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if value != default:
            words.append(flag if value is True else f"{flag}={value}")
    return words


def _check(args: argparse.Namespace) -> None:
    check_output(args)
    if args.rates is None:
        args.rates = [] if args.streams else RATES
    for name in ("seconds", "patience", "slo_ttft_ms", "slo_tpot_ms"):
        if not 0 < getattr(args, name) <= 1e6:
            raise OptionError(f"--{name.replace('_', '-')} must be more than 0, and at most 1,000,000")
    if args.seed < 0:
        raise OptionError("--seed must be 0 or more")
    if args.seconds * max(args.rates, default=0) > MAX_ARRIVALS:
        raise OptionError(f"that is more than {MAX_ARRIVALS:,} requests: lower --rates or --seconds")
    if args.plot is not None and not args.rates:
        raise OptionError("--plot draws what --rates finds: give both, or neither")
    if args.url is not None and (words := server_words(args)):
        raise OptionError(f"{words[0]} is for a server that is started here: drop it, or drop --url")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(args.max_open if args.rates else 0, *(args.streams or [0])) + OTHER_FILES
    if most != resource.RLIM_INFINITY and wanted > most:
        raise OptionError(
            f"{wanted - OTHER_FILES} connections are more than `ulimit -Hn`, {most}, allows: "
            "lower --max-open or --streams, or raise that"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# The command


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    _check(args)
    if args.api_key is None:
        args.api_key = os.environ.get(KEY_VARIABLE)
    if args.url is not None:
        report = measure(args, Server(args.url, args.api_key))
    else:
        with own_server(server_words(args), args.api_key) as url:
            report = measure(args, Server(url, args.api_key))
    report |= {"machine": machine(args), "server": server_name(args)}
    if args.json:
        print(json.dumps(report))
    else:
        for table in tables_of(report):
            print_table(table)
    if args.plot is not None:
        draw(report, Path(args.plot))
    return 0


def machine(args: argparse.Namespace) -> str:
    """What the engine runs on; as far as this process can know."""
    cores = f"CPU, {len(os.sched_getaffinity(0))} cores"
    if args.url is not None:
        return f"load from a {cores}"
    if not args.fake_model and args.device != "cpu":
        try:
            return f"{require_gpu(gpu_index(EngineConfig(device=args.device))).name}, {cores}"
        except SamirVllmError:
            pass  # `auto` took the CPU; any other device would have been an error before
    return cores


def server_name(args: argparse.Namespace) -> str:
    """Its command line, or its address."""
    return args.url or " ".join(["serve", *server_words(args)])


def measure(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    """All that was asked for, as it goes into the JSON: seconds, microseconds, and numbers a second."""
    try:
        model = json.loads(server.get("/v1/models"))["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise OptionError(f"{server.url}/v1/models names no model: is that such a server?") from None
    requests = Requests(server, model, args)
    rates, streams = [], []
    with progress(1 + len(args.rates) + len(args.streams or [])) as begin:
        begin("warm-up")
        _all_well(_in_loop(all_at_once(server, [requests(0)])))
        for rate in args.rates:
            begin(f"{rate:g} requests/s")
            rates.append(measure_rate(args, server, requests, rate))
        for count in args.streams or []:
            begin(f"{count} streams")
            streams.append(measure_streams(server, requests, count))
    report = {"bench": "serve", "model": model, "rates": rates, "streams": streams}
    for name in ("prompt_tokens", "new_tokens", "seconds", "slo_ttft_ms", "slo_tpot_ms", "seed"):
        report[name] = getattr(args, name)
    return report


class Requests:
    """All alike in size, and no two with the same prompt."""

    def __init__(self, server: Server, model: str, args: argparse.Namespace) -> None:
        self._server, self._model = server, model
        self._prompt_tokens, self._new_tokens, self._seed = args.prompt_tokens, args.new_tokens, args.seed

    def __call__(self, number: int) -> bytes:
        """That of a number."""
        rng = np.random.default_rng((self._seed, number))
        prompt = rng.integers(IDS.start, IDS.stop, self._prompt_tokens).tolist()
        return self._server.completion(self._model, prompt, self._new_tokens)


def _in_loop(work: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:  # a server elsewhere needs none here
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _all_well(answers: Iterable[Answer]) -> None:
    """Raises SamirVllmError where one failed."""
    for answer in answers:
        if answer.outcome != OK:
            raise SamirVllmError(f"a request failed, {answer.outcome}: {answer.message}")


# A server of our own


@contextmanager
def own_server(words: Sequence[str], api_key: str | None) -> Iterator[str]:
    """The address of a server with these options, which ends with the block, however that ends.

    Raises:
        SamirVllmError: it couldn't start, died, or ended with another status than 0.
    """
    command = [sys.executable, "-m", "samir_vllm", "serve", "--port", "0", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    if api_key is not None:
        environment[KEY_VARIABLE] = api_key
    with _signals_interrupt():
        # In a process group of its own, so that a terminal's Ctrl-C comes here alone.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )
        try:
            address = _address(process)
            try:
                yield address
            except SamirVllmError:
                _check_alive(process, DYING_SECONDS)  # its death says more than what followed from it
                raise
            _check_alive(process)
            process.terminate()
            if status := process.wait(ENDING_SECONDS):
                raise SamirVllmError(f"the server ended with status {status} after SIGTERM, not 0")
        finally:
            _end(process)


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """What would kill this process interrupts it instead, so that it ends its server."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(n, lambda *_: signal.raise_signal(signal.SIGINT)) for n in numbers]
    try:
        yield
    finally:
        for n, handler in zip(numbers, before, strict=True):
            signal.signal(n, handler)


def _address(process: subprocess.Popen[str]) -> str:
    """Where it serves, once it does; from then on what it says is passed on."""
    assert process.stderr is not None
    line = ""
    for line in process.stderr:
        if ready := READY.match(line):
            threading.Thread(target=_pass_on, args=(process,), daemon=True).start()
            return ready[1]
        if not line.startswith("samir_vllm: "):
            print(line, end="", file=sys.stderr)
    process.wait()
    raise SamirVllmError(line.strip().removeprefix("samir_vllm: ") or "the server said nothing, and ended")


def _pass_on(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            print(line, end="", file=sys.stderr)


def _check_alive(process: subprocess.Popen[str], seconds: float = 0.0) -> None:
    """Raises SamirVllmError if it has ended by then."""
    with suppress(subprocess.TimeoutExpired):
        status = process.wait(seconds)
        raise SamirVllmError(f"the server ended with status {status} in the middle of a measurement")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(ENDING_SECONDS)
    finally:
        process.kill()  # it does nothing to one that has ended
        process.wait()


# Request rates


def poisson_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """When requests come within ``seconds`` from 0, at random with exponential gaps of mean ``1 / rate``.

    The same seed gives the same times, and at another rate the same ones closer together or further apart.
    """
    rng = np.random.default_rng(seed)
    found: list[float] = []
    time_of_last = 0.0
    while time_of_last < seconds:
        gaps = rng.exponential(size=256) / rate
        times = time_of_last + np.cumsum(gaps)
        found += times.tolist()
        time_of_last = found[-1]
    return [t for t in found if t < seconds]


def measure_rate(args: argparse.Namespace, server: Server, requests: Requests, rate: float) -> dict[str, Any]:
    """What clients see at one rate."""
    arrivals = poisson_arrivals(rate, args.seconds, args.seed)
    started, cpu = time.perf_counter(), time.process_time()
    answers = _in_loop(
        open_loop(server, requests, arrivals, max_open=args.max_open, seconds=args.seconds + args.patience)
    )
    cpu = time.process_time() - cpu
    server.get("/v1/models")  # it must be there still
    row: dict[str, Any] = {"rate": rate}
    row |= rate_figures(answers, started, args.seconds, args.slo_ttft_ms / 1e3, args.slo_tpot_ms / 1e3)
    tokens = sum(answer.tokens for answer in answers)
    row["client_us_per_token"] = cpu / tokens * 1e6 if tokens else None
    return row


def rate_figures(
    answers: Sequence[Answer], started: float, seconds: float, slo_ttft: float, slo_tpot: float
) -> dict[str, Any]:
    """Figures of an open loop.

    Goodput is of the requests that came: how many a second were answered in full, and within both bounds.
    What was done a second is of the time to the last answer's end, often long after the last request.

    Args:
        answers: to each request.
        started: when the first might have come.
        seconds: in which they came.
        slo_ttft: seconds to the first token at most.
        slo_tpot: seconds for each token after it at most, in the mean.
    """
    done = [answer for answer in answers if answer.outcome == OK]
    lasted = max([seconds, *(answer.ended - started for answer in done)])
    per_token = [tpot for answer in done if (tpot := answer.seconds_per_token) is not None]
    good = sum(a.first_token_seconds <= slo_ttft and (a.seconds_per_token or 0.0) <= slo_tpot for a in done)
    tokens, events = sum(a.tokens for a in done), sum(a.events for a in done)
    return {
        "requests": len(answers),
        "offered_requests_per_second": len(answers) / seconds,
        "succeeded": len(done),
        "errors": dict(Counter(a.outcome for a in answers if a.outcome != OK).most_common()),
        "held_back": sum(a.was_held for a in answers),
        "seconds": lasted,
        "requests_per_second": len(done) / lasted,
        "tokens_per_second": tokens / lasted,
        "goodput_requests_per_second": good / seconds,
        "tokens_per_event": tokens / events if events else None,
        **percentiles("ttft", [a.first_token_seconds for a in done]),
        **percentiles("tpot", per_token),
        **percentiles("total", [a.total_seconds for a in done]),
        **percentiles("sent_late", [a.sent - a.due for a in answers if a.sent]),
    }


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """``NAME_p50_seconds`` and so on; None of nothing."""
    found = np.percentile(seconds, PERCENTILES).tolist() if seconds else [None] * len(PERCENTILES)
    return {f"{name}_p{p}_seconds": value for p, value in zip(PERCENTILES, found, strict=True)}


# CPU time


def measure_streams(server: Server, requests: Requests, count: int) -> dict[str, Any]:
    """What a token costs while so many streams run; what a request costs is spread over its tokens."""
    asked = [requests(i) for i in range(count)]
    before, cpu = cpu_seconds(server), time.process_time()
    answers = _in_loop(all_at_once(server, asked))
    cpu, after = time.process_time() - cpu, cpu_seconds(server)
    _all_well(answers)
    return stream_figures(answers, before, after, cpu)


def stream_figures(
    answers: Sequence[Answer], before: dict[str, float], after: dict[str, float], client_seconds: float
) -> dict[str, Any]:
    """Figures of streams that were all answered; ``before`` and ``after`` as of `cpu_seconds`."""
    tokens, events = sum(a.tokens for a in answers), sum(a.events for a in answers)
    lasted = max(a.ended for a in answers) - min(a.due for a in answers)

    def per_token(name: str) -> float | None:
        return (after[name] - before[name]) / tokens * 1e6 if name in before and name in after else None

    return {
        "streams": len(answers),
        "tokens": tokens,
        "seconds": lasted,
        "tokens_per_second": tokens / lasted,
        "events": events,
        "tokens_per_event": tokens / events if events else None,
        "front_us_per_token": per_token(FRONT_CPU),
        "engine_us_per_token": per_token(ENGINE_CPU),
        "client_us_per_token": client_seconds / tokens * 1e6,
    }


def cpu_seconds(server: Server) -> dict[str, float]:
    """Of the server's two processes since their start, by the metrics' names; nothing of another server."""
    try:
        text = server.get("/metrics").decode(errors="replace")
    except SamirVllmError:
        server.get("/v1/models")  # it has no metrics, or it has gone
        return {}
    found = re.findall(rf"^({FRONT_CPU}|{ENGINE_CPU}) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


# For people


def tables_of(report: dict[str, Any]) -> list[Table]:
    """One of the rates, one of the streams; those that there are."""
    tables = []
    if report["rates"]:
        tables.append(rates_table(report))
    if report["streams"]:
        tables.append(streams_table(report))
    sizes = f"{report['prompt_tokens']} prompt and {report['new_tokens']} new tokens"
    tables[0].title = f"serve: {report['model']}, {sizes}; {report['machine']}\n{report['server']}"
    return tables


def rates_table(report: dict[str, Any]) -> Table:
    """What clients see."""
    table = Table(box=box.SIMPLE)
    ttft, tpot = report["slo_ttft_ms"], report["slo_tpot_ms"]
    table.caption = (
        f"ms: p50 / p90 / p99. TTFT: to the first token; TPOT: for each one after it. "
        f"good: TTFT at most {ttft:g} ms and TPOT {tpot:g}."
    )
    titles = ["requests/s", "came", "done/s", "tokens/s", "TTFT, ms", "TPOT, ms", "in all, ms", "good/s"]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("errors")
    for row in report["rates"]:
        errors = ", ".join(f"{count} x {name}" for name, count in row["errors"].items())
        table.add_row(
            f"{row['rate']:g}",
            f"{row['requests']:,}",
            f"{row['requests_per_second']:.4g}",
            f"{row['tokens_per_second']:,.0f}",
            *(_three(row, name) for name in ("ttft", "tpot", "total")),
            f"{row['goodput_requests_per_second']:.4g}",
            errors,
        )
    notes = [
        f"{row['rate']:g} requests/s: {row['held_back']} found too many connections open (--max-open) "
        "and had to wait, so that this loop wasn't open"
        for row in report["rates"]
        if row["held_back"]
    ]
    table.caption = "\n".join([table.caption, *notes])
    return table


def streams_table(report: dict[str, Any]) -> Table:
    """What a token costs."""
    table = Table(box=box.SIMPLE)
    table.caption = (
        "us: CPU time of a process for each token, requests included. Targets: the fake model, 256 streams, "
        "a token in each event\n(--fake-step-ms paces the engine; 1.1 is the least, as some tokens are parts "
        "of characters)."
    )
    titles = ["streams", "tokens/s", "tokens/event", "front, us", "target", "engine, us", "target"]
    for title in [*titles, "this client, us"]:
        table.add_column(title, justify="right")
    for row in report["streams"]:
        table.add_row(
            f"{row['streams']:,}",
            f"{row['tokens_per_second']:,.0f}",
            _shown(row["tokens_per_event"]),
            _shown(row["front_us_per_token"]),
            f"{FRONT_TARGET_US:g}",
            _shown(row["engine_us_per_token"]),
            f"{ENGINE_TARGET_US:g}",
            _shown(row["client_us_per_token"]),
        )
    return table


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _three(row: dict[str, Any], name: str) -> str:
    """The percentiles in milliseconds."""
    values = [row[f"{name}_p{p}_seconds"] for p in PERCENTILES]
    return (
        ""
        if values[0] is None
        else " / ".join(f"{1e3 * value:.3g}" if value < 1 else f"{1e3 * value:.0f}" for value in values)
    )


def draw(report: dict[str, Any], path: Path) -> None:
    """Percentiles and goodput by request rate.

    Raises:
        OptionError: no matplotlib, another ending than ``PICTURES``, or the file can't be written.
    """
    plt = load_pyplot(path)
    figure, (ttft, tpot, good) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    rows = sorted(report["rates"], key=lambda row: row["rate"])
    rates = [row["rate"] for row in rows]
    for axes, name, title in ((ttft, "ttft", "time to first token"), (tpot, "tpot", "time per output token")):
        for p in PERCENTILES:
            values = [row[f"{name}_p{p}_seconds"] for row in rows]
            milliseconds = [float("nan") if value is None else 1e3 * value for value in values]
            axes.plot(rates, milliseconds, marker="o", label=f"p{p}")
        bound = report[f"slo_{name}_ms"]
        axes.axhline(bound, color="grey", linestyle="--", label=f"good: {bound:g} ms")
        axes.set(title=title, ylabel="milliseconds", yscale="log")
    for label, key in (("came", "offered"), ("done", ""), ("good", "goodput")):
        values = [row["_".join(filter(None, (key, "requests_per_second")))] for row in rows]
        good.plot(rates, values, marker="o", linestyle=":" if key == "offered" else "-", label=label)
    good.set(title="goodput", ylabel="requests/s", ylim=(0, None))
    for axes in (ttft, tpot, good):
        axes.set(xlabel="requests/s", xscale="log", xticks=rates, xticklabels=[f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    sizes = f"{report['prompt_tokens']} prompt and {report['new_tokens']} new tokens"
    figure.suptitle(
        f"serve: {report['model']}, {sizes}; {report['machine']}\n{report['server']}", fontsize=10
    )
    save_figure(plt, figure, path)
