"""The command ``serve``: options, two processes, signals, and an orderly end. Knows no endpoint."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from samir_vllm.commandline import EXIT_INTERRUPTED, add_engine_options, user_error
from samir_vllm.errors import OptionError

if TYPE_CHECKING:
    from samir_vllm.extras.serve.app import App
    from samir_vllm.extras.serve.model import TextParts
    from samir_vllm.extras.serve.wire import Ready

T = TypeVar("T")

MODEL = "samir_vllm.extras.serve.model"
FAKE_MODEL = "samir_vllm.extras.serve.fake_model"
KEY_VARIABLE = "SAMIR_VLLM_API_KEY"
BACKLOG = 2048  # connections that the system takes before we do
KEEP_ALIVE_SECONDS = 65  # longer than usual proxies keep theirs
LAST_SECONDS = 5  # after --drain-seconds, to tell clients that their answers are cut


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_engine_options(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what clients call the model; repeatable (default: its folder's name)",
    )
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"lets in only who has it; repeatable (else ${KEY_VARIABLE}, which `ps` doesn't show)",
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="pages from there may use this server, * from anywhere; repeatable (default: none)",
    )
    group.add_argument(
        "--max-body-mib", type=int, default=2, metavar="N", help="longest request (default: %(default)s)"
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        default=1024,
        metavar="N",
        help="answers that may wait for admission; who comes after them gets 429 (default: %(default)s)",
    )
    group.add_argument(
        "--default-max-tokens",
        type=int,
        default=1024,
        metavar="N",
        help="of a chat that names no bound: pages for so many are reserved (default: %(default)s)",
    )
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="for running answers to end after SIGTERM (default: %(default)g)",
    )
    group.add_argument("--access-log", action="store_true", help="a line for each request")
    group.add_argument(
        "--fake-model", action="store_true", help="no weights, one sentence: to try clients, and to measure"
    )
    group.add_argument(
        "--fake-step-ms", type=float, default=0.0, metavar="X", help="how long each of its steps takes"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit status."""
    _check(args)
    try:
        import llguidance  # noqa: F401
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as exc:
        raise OptionError(f"serving needs {exc.name}: pip install 'samir-vllm[serve]'") from None
    logging.basicConfig(format="samir_vllm: %(levelname)s: %(message)s", level=logging.WARNING)
    _allow_many_connections()
    listener = _listen(args.host, args.port)
    with listener:
        return _run_loop(_serve(args, FAKE_MODEL if args.fake_model else MODEL, listener))


def _check(args: argparse.Namespace) -> None:
    for name, least in (
        *(("port", 0), ("max_body_mib", 1), ("max_waiting", 0), ("default_max_tokens", 1)),
        *(("drain_seconds", 0), ("fake_step_ms", 0)),
    ):
        value = getattr(args, name)
        if not least <= value < math.inf:
            raise OptionError(f"--{name.replace('_', '-')} must be a number of at least {least}, not {value}")
    if args.port > 65535:
        raise OptionError(f"--port must be at most 65535, not {args.port}")
    if args.api_key is None:
        args.api_key = [key] if (key := os.environ.get(KEY_VARIABLE)) else []
    if not all(args.api_key):
        raise OptionError("--api-key must not be empty")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as exc:
        cause = os.strerror(exc.errno) if exc.errno else exc
        raise OptionError(f"can't listen at {host}:{port}: {cause}; give another --host or --port") from None


def _allow_many_connections() -> None:
    """As many as the system lets a user have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _run_loop(main: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:  # not on every system
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def _serve(args: argparse.Namespace, module: str, listener: socket.socket) -> int:
    from samir_vllm.extras.serve.engine_client import EngineClient, Listener
    from samir_vllm.extras.serve.metrics import Metrics
    from samir_vllm.extras.serve.wire import Begin

    metrics, closed = Metrics(), asyncio.Event()
    problems: list[str] = []

    def on_closed(message: str) -> None:
        problems.append(message)
        closed.set()

    told = Listener(metrics.ended, metrics.aborted, metrics.restarted, on_closed)
    engine = EngineClient(Begin(args, args.max_waiting), module, told)
    metrics.watch(engine)
    stops = _Stops()
    try:
        loading = asyncio.to_thread(importlib.import_module(module).load_text, args)
        loaded = await _until(asyncio.gather(engine.start(), loading), stops)
        if loaded is None:
            return EXIT_INTERRUPTED
        ready, text = loaded
        app = _make_app(args, text, engine, metrics, ready)
        await _run_server(args, app, listener, stops, closed)
    finally:
        await engine.stop()
    if problems:
        user_error(problems[0])
        return 1
    return 0


class _Stops:
    """SIGTERM and SIGINT: the first asks for an orderly end, another for one at once."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        self.on_second: Callable[[], None] = lambda: None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signal)

    def _signal(self) -> None:
        if self.wanted.is_set():
            self.on_second()
        self.wanted.set()


async def _until(work: asyncio.Future[T], stops: _Stops) -> T | None:
    """The result; None if a signal came first."""
    stop = asyncio.ensure_future(stops.wanted.wait())
    try:
        await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        stop.cancel()
        await asyncio.gather(work, stop, return_exceptions=True)


def _make_app(args: argparse.Namespace, text: TextParts, engine: Any, metrics: Any, ready: Ready) -> App:
    from samir_vllm.extras.serve.app import App, AppOptions
    from samir_vllm.extras.serve.bodies import ModelFacts
    from samir_vllm.extras.serve.grammar import Grammars

    name, *aliases = args.served_model_name or [text.name]
    facts = ModelFacts(name, tuple(aliases), ready.context_len, ready.vocab_size, args.default_max_tokens)
    grammars = Grammars(text.tokenizer, text.eos_token_ids, ready.vocab_size)
    options = AppOptions(args.max_body_mib << 20, tuple(args.api_key), tuple(args.cors_origin))
    return App(engine, text, facts, metrics, grammars, options)


async def _run_server(
    args: argparse.Namespace, app: App, listener: socket.socket, stops: _Stops, closed: asyncio.Event
) -> None:
    import uvicorn

    from samir_vllm.extras.serve.http_protocol import Protocol

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are ours

    config = uvicorn.Config(
        app.asgi(),
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=args.access_log,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(args.drain_seconds) + LAST_SECONDS,
    )
    if args.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    server = Server(config)

    def force() -> None:
        server.force_exit = True
        app.give_up()

    stops.on_second = force
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"samir_vllm: serving {app.facts.name} at http://{shown}:{port}", file=sys.stderr, flush=True)
    ends = [asyncio.ensure_future(event.wait()) for event in (stops.wanted, closed)]
    await asyncio.wait((serving, *ends), return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    app.is_draining = server.should_exit = True
    await asyncio.wait((serving,), timeout=args.drain_seconds)
    app.give_up()
    await serving
