"""The command line: ``python -m samir_vllm COMMAND``.

Parses, dispatches and turns our errors into one line and exit status 2. Each command's work lies in its own
module, imported when the command runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from samir_vllm import __version__
from samir_vllm.commandline import EXIT_INTERRUPTED, EXIT_USER_ERROR, user_error
from samir_vllm.errors import SamirVllmError

if TYPE_CHECKING:
    from samir_vllm.engine import Engine


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        command = self.prog.removesuffix(" COMMAND")
        raise SamirVllmError(f"{message} (see `{command} --help`)")


@dataclass(frozen=True, slots=True)
class Command:
    """A command whose work lies in a module with ``add_arguments(parser)`` and ``run(args) -> status``."""

    module: str
    help: str
    description: str = ""


COMMANDS = {
    "generate": Command(
        "samir_vllm.extras.generate",
        "answer one prompt or several",
        "Answer one prompt (streamed) or several (together). A last whole number is the count of new tokens "
        "at most. Without a prompt, standard input is the prompt.",
    ),
    "chat": Command(
        "samir_vllm.extras.chat",
        "a conversation in the terminal",
        "A conversation: with every turn the model gets the whole dialog, and reuses its K and V. "
        "/help lists the commands. Where standard input is no terminal, each of its lines is a turn.",
    ),
    "serve": Command(
        "samir_vllm.extras.serve.command",
        "an OpenAI-compatible server",
        "Serve OpenAI's API (chat, completions, models) over HTTP, and a page to chat at /. The engine runs "
        "in a process of its own. SIGTERM ends both in order.",
    ),
    "pull": Command("samir_vllm.hub", "fetch a model into models/"),
    "tokenize": Command("samir_vllm.extras.tokenize", "show the tokens of a text or a dialog, or decode ids"),
    "doctor": Command(
        "samir_vllm.extras.doctor", "what the engine sees on this machine, and what is missing"
    ),
}
BENCHES = {
    "cpu": Command("samir_vllm.extras.bench.cpu", "the NumPy backend beside this machine's limits"),
    "startup": Command(
        "samir_vllm.extras.bench.startup", "process start to first token, kernel cache cold and warm"
    ),
    "scheduler": Command("samir_vllm.extras.bench.scheduler", "microseconds a step, on a fake model"),
    "roofline": Command("samir_vllm.extras.bench.roofline", "what this device can do at best"),
    "decode": Command("samir_vllm.extras.bench.decode", "decode steps of a batch, beside their floor"),
    "prefill": Command("samir_vllm.extras.bench.prefill", "one prompt to its first token, beside its floor"),
    "throughput": Command(
        "samir_vllm.extras.bench.throughput",
        "many requests at once, and with long prompts arriving among them",
    ),
    "kernels": Command("samir_vllm.extras.bench.kernels", "a decode step, kernel by kernel"),
    "serve": Command(
        "samir_vllm.extras.bench.serve", "a server under load: latencies by request rate, CPU time by token"
    ),
}


def _build_parser(argv: Sequence[str]) -> Parser:
    """Every command by name; only the one that ``argv`` asks for is imported for its arguments."""
    parser = Parser(prog="python -m samir_vllm", description="Llama 3.2 inference in Python and CUDA C++.")
    parser.add_argument("--version", action="version", version=f"samir_vllm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_commands(commands, COMMANDS, argv[:1])
    bench = commands.add_parser("bench", help="measure, beside a limit or a peer of the same run")
    benches = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    _add_commands(benches, BENCHES, argv[1:2])
    return parser


def _add_commands(parsers: Any, commands: Mapping[str, Command], wanted: Sequence[str]) -> None:
    for name, command in commands.items():
        parser = parsers.add_parser(name, help=command.help, description=command.description or command.help)
        if name not in wanted:
            continue
        module = importlib.import_module(command.module)
        module.add_arguments(parser)
        parser.set_defaults(run=module.run)


def _dispatch(args: argparse.Namespace) -> int:
    if args.command == "generate" and (args.trace is not None or args.plot is not None):
        return _run_with_timeline(args)
    status: int = args.run(args)
    return status


def _run_with_timeline(args: argparse.Namespace) -> int:
    from samir_vllm.commandline import load_pyplot
    from samir_vllm.extras.timeline import Timeline

    if args.plot is not None:
        load_pyplot(Path(args.plot))  # a mistake must show before the run, not after it
    timeline, engines = Timeline(), []

    def attach(engine: Engine) -> None:
        engine.on_step = timeline.add
        engines.append(engine)

    status: int = args.run(args, on_load=attach)
    num_pages = engines[0].pool.num_pages
    if args.trace is not None:
        timeline.write_trace(Path(args.trace), num_pages)
    if args.plot is not None:
        timeline.draw(Path(args.plot), num_pages, f"{args.batching} batching, {num_pages} KV pages")
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        words = sys.argv[1:] if argv is None else argv
        return _dispatch(_build_parser(words).parse_args(words))
    except SamirVllmError as exc:
        user_error(exc)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        user_error("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) went away. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
