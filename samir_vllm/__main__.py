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
from samir_vllm.config import EngineConfig
from samir_vllm.errors import SamirVllmError

if TYPE_CHECKING:
    from samir_vllm.engine import Engine

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        command = self.prog.removesuffix(" COMMAND")
        raise SamirVllmError(f"{message} (see `{command} --help`)")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The options that every command with an engine shares; defaults are those of ``EngineConfig``."""
    default = EngineConfig()
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model", metavar="DIR|NAME", help="model folder, or a name under models/ (else $SAMIR_VLLM_MODEL)"
    )
    group.add_argument(
        "--device", default=default.device, help="auto, cpu, cuda or cuda:N (default: %(default)s)"
    )
    group.add_argument(
        "--kv-cache-mib",
        default=str(default.kv_cache_mib),
        metavar="N|auto",
        help="size of the KV page pool (default: %(default)s)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        default=default.max_num_seqs,
        metavar="N",
        help="running at once (%(default)s)",
    )
    group.add_argument(
        "--max-batched-tokens",
        type=int,
        default=default.max_batched_tokens,
        metavar="N",
        help="prompt tokens prefilled in one step (%(default)s)",
    )
    group.add_argument("--max-model-len", type=int, metavar="N", help="context shorter than the model's")
    group.add_argument(
        "--batching", default=default.batching, help="continuous or static (default: %(default)s)"
    )
    group.add_argument(
        "--dtype",
        default=default.dtype,
        help="bfloat16, or float32: no rounding, NumPy only (default: %(default)s)",
    )
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="the same numbers in any company, whatever that costs (NumPy: much; a GPU: mostly nothing)",
    )


def engine_options(args: argparse.Namespace) -> dict[str, object]:
    """Keyword options of ``Engine`` from parsed arguments."""
    kv: object = args.kv_cache_mib
    if args.kv_cache_mib != "auto":
        try:
            kv = int(args.kv_cache_mib)
        except ValueError:
            raise SamirVllmError(
                f"--kv-cache-mib must be a whole number or auto, not {args.kv_cache_mib!r}"
            ) from None
    return {
        "device": args.device,
        "kv_cache_mib": kv,
        "max_num_seqs": args.max_num_seqs,
        "max_batched_tokens": args.max_batched_tokens,
        "max_model_len": args.max_model_len,
        "batching": args.batching,
        "dtype": args.dtype,
        "batch_invariant": args.batch_invariant,
    }


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
    "pull": Command("samir_vllm.hub", "fetch a model into models/"),
    "tokenize": Command("samir_vllm.extras.tokenize", "show the tokens of a text or a dialog, or decode ids"),
    "doctor": Command(
        "samir_vllm.extras.doctor", "what the engine sees on this machine, and what is missing"
    ),
}
BENCHES = {
    "cpu": Command("samir_vllm.extras.bench_cpu", "the NumPy backend beside this machine's limits"),
    "startup": Command(
        "samir_vllm.extras.bench_startup", "process start to first token, kernel cache cold and warm"
    ),
    "scheduler": Command("samir_vllm.extras.bench_scheduler", "microseconds a step, on a fake model"),
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
        if name == "generate":
            add_engine_options(parser)
        parser.set_defaults(run=module.run)


def _dispatch(args: argparse.Namespace) -> int:
    if args.command != "generate":
        status: int = args.run(args)
        return status
    if args.trace is None and args.plot is None:
        return int(args.run(args, engine_options(args)))
    return _run_with_timeline(args)


def _run_with_timeline(args: argparse.Namespace) -> int:
    from samir_vllm.extras.timeline import Timeline, load_pyplot

    if args.plot is not None:
        load_pyplot(Path(args.plot))  # a mistake must show before the run, not after it
    timeline, engines = Timeline(), []

    def attach(engine: Engine) -> None:
        engine.on_step = timeline.add
        engines.append(engine)

    status: int = args.run(args, engine_options(args), on_load=attach)
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
        print(f"samir_vllm: {exc}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("samir_vllm: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) went away. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
