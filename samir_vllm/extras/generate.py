"""``generate``: prompts from arguments, a file or standard input; answers to standard output.

Answers go to standard output, everything else (progress, figures, errors) to standard error. Knows the engine
only by its public names.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from samir_vllm.engine import Engine, Prompt, RequestOutput, refused
from samir_vllm.errors import ChatError, RequestError, SamirVllmError
from samir_vllm.sampling import SamplingParams
from samir_vllm.timing import StartupTimes, process_seconds

DEFAULT_MAX_TOKENS = SamplingParams().max_tokens
EXIT_SOME_FAILED = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt as the user gave it."""

    prompt: Prompt
    max_tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command, those of the engine apart."""
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="text; - reads standard input")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="new tokens at most (default: 128)")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="a prompt a line (.txt), or .jsonl with prompt or messages; - for stdin",
    )
    parser.add_argument("--date", metavar="TEXT", help='today for the chat format, such as "26 Jul 2024"')
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--raw", action="store_true", help="the prompt as it is, without the model's chat format"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    parser.add_argument("--json", action="store_true", help="a JSON line for each prompt, with its figures")
    parser.add_argument("--ids", action="store_true", help="token ids instead of text")
    parser.add_argument("--no-stream", action="store_true", help="print the answer when it is complete")
    parser.add_argument("--trace", metavar="FILE", help="write the run's timeline as Chrome trace events")
    parser.add_argument("--plot", metavar="FILE", help="draw pool occupancy and batch size (.png or .svg)")
    parser.add_argument("--quiet", action="store_true", help="no figures, no progress")
    parser.add_argument(
        "--timing",
        action="store_true",
        help="where the time from the process start to the first token went, on standard error (with --json: "
        "as a JSON line)",
    )


def run(
    args: argparse.Namespace,
    options: dict[str, object],
    on_load: Callable[[Engine], None] = lambda engine: None,
) -> int:
    """Run the command; returns the exit status: 2 if any prompt was refused or failed, 130 after Ctrl-C.

    ``on_load`` sees the engine before its first step.
    """
    jobs = collect_jobs(args)
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    start = StartReport()
    engine = load_engine(args.model, options, console, quiet=args.quiet)
    start.loaded(engine)
    on_load(engine)
    stream = len(jobs) == 1 and not (args.json or args.ids or args.no_stream)
    started = time.perf_counter()
    answers = Answers(args, engine, single=len(jobs) == 1, streamed=stream)
    interrupted = False
    try:
        _drive(engine, jobs, answers, console, args, start)
    except KeyboardInterrupt:
        interrupted = True
        answers.interrupt()
    answers.close()
    if not args.quiet and any(r.prompt_token_ids for r in answers.results()):  # not if all were refused
        console.print(figures(engine, answers.results(), time.perf_counter() - started), style="dim")
    if args.timing:
        console.print(json.dumps(start.as_dict()) if args.json else start.as_text())
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_SOME_FAILED if any(r.error for r in answers.results()) else 0


# Prompts


def collect_jobs(args: argparse.Namespace) -> list[Job]:
    """The prompts of arguments, ``--prompts`` and standard input, with their token counts."""
    texts, count = split_count(args.prompt, alone=args.prompts is not None or not _stdin_is_terminal())
    if count is None:
        count = DEFAULT_MAX_TOKENS if args.max_tokens is None else args.max_tokens
    elif args.max_tokens is not None:
        raise SamirVllmError(f"the token count is given twice: {count} and --max-tokens {args.max_tokens}")
    if count < 1:
        raise SamirVllmError(f"the token count must be at least 1, not {count}")
    jobs = [Job(_dialog(sys.stdin.read() if t == "-" else t, args), count) for t in texts]
    if args.prompts is not None:
        jobs += read_prompts(args.prompts, count, args)
    elif not texts:
        if _stdin_is_terminal():
            raise SamirVllmError(
                "no prompt: give one as an argument, with --prompts FILE, or on standard input"
            )
        jobs.append(Job(_dialog(sys.stdin.read(), args), count))
    if not jobs:
        raise SamirVllmError(f"{args.prompts}: no prompts in it")
    return jobs


def split_count(words: list[str], *, alone: bool) -> tuple[list[str], int | None]:
    """Takes a last word that is a whole number as the token count.

    A lone number is a prompt, unless prompts come from elsewhere (``alone``).
    """
    if words and re.fullmatch(r"[+-]?\d+", words[-1]) and (len(words) > 1 or alone):
        return words[:-1], int(words[-1])
    return words, None


def read_prompts(name: str, count: int, args: argparse.Namespace) -> Iterator[Job]:
    """Jobs of a file.

    A ``.jsonl`` file has objects with ``prompt`` or ``messages``, and perhaps ``max_tokens``; any other
    file has a prompt a line.
    """
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise SamirVllmError(f"can't read prompts from {name}: {reason}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if name.endswith(".jsonl"):
            yield _json_job(line, f"{name}:{number}", count, args)
        else:
            yield Job(_dialog(line, args), count)


def _json_job(line: str, where: str, count: int, args: argparse.Namespace) -> Job:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        raise SamirVllmError(f"{where}: not JSON") from None
    if isinstance(item, str):
        item = {"prompt": item}
    if not isinstance(item, dict) or ("prompt" in item) == ("messages" in item):
        raise SamirVllmError(f'{where}: needs an object with either "prompt" or "messages"')
    unknown = sorted(item.keys() - {"prompt", "messages", "max_tokens"})
    if unknown:
        raise SamirVllmError(f"{where}: unknown key {unknown[0]!r}; known are prompt, messages, max_tokens")
    max_tokens = item.get("max_tokens", count)
    if type(max_tokens) is not int or max_tokens < 1:
        raise SamirVllmError(f"{where}: max_tokens must be a whole number of at least 1, not {max_tokens!r}")
    if "messages" in item:
        if not isinstance(item["messages"], list):
            raise SamirVllmError(f"{where}: messages must be a list")
        return Job(item["messages"], max_tokens)
    if not isinstance(item["prompt"], str):
        raise SamirVllmError(f"{where}: prompt must be text")
    return Job(_dialog(item["prompt"], args), max_tokens)


def _dialog(text: str, args: argparse.Namespace) -> Prompt:
    if args.raw or not text:  # an empty prompt stays empty, and is refused by the engine
        return text
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    return [*system, {"role": "user", "content": text}]


def _is_dialog(prompt: Prompt) -> TypeGuard[list[dict[str, Any]]]:
    return not isinstance(prompt, str)  # the jobs hold text or dialogs, no ids


def _stdin_is_terminal() -> bool:
    return sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()


# Running


def load_engine(model: str | None, options: dict[str, object], console: Console, *, quiet: bool) -> Engine:
    """An engine, with a progress bar on a terminal and its notices on standard error."""
    columns = (
        TextColumn("loading"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} layers"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("loading", total=None)
        engine = Engine(
            model, progress=lambda done, total: bar.update(task, completed=done, total=total), **options
        )
    for notice in engine.notices:
        console.print(f"samir_vllm: {notice}", style="yellow")
    return engine


def _drive(
    engine: Engine,
    jobs: list[Job],
    answers: Answers,
    console: Console,
    args: argparse.Namespace,
    start: StartReport,
) -> None:
    for i, job in enumerate(jobs):
        try:
            params = SamplingParams(max_tokens=job.max_tokens, ignore_eos=args.ignore_eos)
            prompt = job.prompt
            if args.date is not None and engine.chat_format is not None and _is_dialog(prompt):
                prompt = engine.chat_format.encode(prompt, date=args.date)
            answers.expect(i, engine.add_request(prompt, params))
        except (RequestError, ChatError) as exc:
            answers.refuse(i, refused(str(exc)))
    columns = (
        TextColumn("{task.completed}/{task.total} prompts"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    hidden = args.quiet or len(jobs) == 1 or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=len(jobs), completed=len(answers.results()), state="")
        started, tokens = time.perf_counter(), 0
        while engine.has_work:
            outputs = engine.step()
            if outputs:
                start.first_token()
            for out in outputs:
                answers.take(out)
            tokens += len(outputs)
            if not hidden:
                sched, pool = engine.scheduler, engine.pool
                rate = tokens / (time.perf_counter() - started)
                state = (
                    f"{rate:.1f} tokens/s, {sched.num_running} running, {sched.num_waiting} waiting, "
                    f"{pool.num_used}/{pool.num_pages} pages"
                )
                bar.update(task, completed=len(answers.results()), state=state)


class StartReport:
    """Where the time from the start of the process to the first token went; made before the engine is."""

    def __init__(self) -> None:
        self._made = time.perf_counter()
        self._age = process_seconds()  # None: counted from here
        self._first_token: float | None = None

    def loaded(self, engine: Engine) -> None:
        """The engine is ready."""
        self._loaded = time.perf_counter()
        self._times, self._backend = engine.startup_times, engine.backend_name

    def first_token(self) -> None:
        """A step gave tokens; only the first call counts."""
        self._first_token = self._first_token or time.perf_counter()

    def times(self) -> StartupTimes:
        """The engine's stages, and what the engine doesn't see."""
        now = self._first_token or self._loaded
        rest = self._loaded - self._made - self._times.total()
        whole = StartupTimes()
        whole.add("Python, imports", self._age or 0.0)
        whole.stages += self._times.stages
        whole.add("the rest of loading", max(0.0, rest))
        whole.add("prompt to first token", now - self._loaded)
        return whole

    def as_dict(self) -> dict[str, Any]:
        """The backend's name, the total and the stages, seconds."""
        times = self.times()
        return {
            "backend": self._backend,
            "seconds_to_first_token": times.total(),
            "stages": [asdict(stage) for stage in times.stages],
        }

    def as_text(self) -> str:
        """A line for each stage."""
        times = self.times()
        lines = [f"{times.total():.2f} s from process start to first token"]
        for stage in times.stages:
            detail = f" ({stage.detail})" if stage.detail else ""
            beside = " [beside the others]" if stage.background else ""
            lines.append(f"  {stage.seconds:6.3f} s  {stage.name}{detail}{beside}")
        return "\n".join(lines)


class Answers:
    """Prints answers in the order of the prompts, as early as that order allows."""

    def __init__(self, args: argparse.Namespace, engine: Engine, *, single: bool, streamed: bool) -> None:
        self._args = args
        self._engine = engine
        self._single = single
        self._streamed = streamed
        self._index: dict[str, int] = {}
        self._done: dict[int, RequestOutput] = {}
        self._printed = 0

    def expect(self, index: int, request_id: str) -> None:
        """The request of prompt ``index`` is live."""
        self._index[request_id] = index

    def refuse(self, index: int, result: RequestOutput) -> None:
        """Prompt ``index`` was never queued."""
        self._done[index] = result
        self._flush()

    def take(self, out: Any) -> None:
        """One output of a step."""
        if self._streamed:
            sys.stdout.write(out.text)
            sys.stdout.flush()
        if out.result is not None:
            self._done[self._index.pop(out.request_id)] = out.result
            self._flush()

    def interrupt(self) -> None:
        """Ctrl-C: what is running ends with what it has, what waits ends with nothing."""
        for request_id, index in list(self._index.items()):
            result = self._engine.abort(request_id)
            if result is not None:
                self._done[index] = result
        self._index.clear()
        self._flush()

    def results(self) -> list[RequestOutput]:
        """Everything that has ended, in the order of the prompts."""
        return [self._done[i] for i in sorted(self._done)]

    def close(self) -> None:
        """End the streamed line, if there is one."""
        if self._streamed and any(r.token_ids for r in self._done.values()):
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _flush(self) -> None:
        while (result := self._done.get(self._printed)) is not None:
            self._print(self._printed, result)
            self._printed += 1

    def _print(self, index: int, result: RequestOutput) -> None:
        where = "" if self._single else f"prompt {index + 1}: "
        if result.error is not None:
            print(f"samir_vllm: {where}{result.error}", file=sys.stderr)
        if self._args.json:
            print(json.dumps({"index": index, **asdict(result)}, ensure_ascii=False), flush=True)
        elif self._streamed or result.error is not None:
            return
        else:
            text = " ".join(map(str, result.token_ids)) if self._args.ids else result.text
            print(text if self._single or self._args.ids else f"[{index + 1}] {text}\n", flush=True)


def figures(engine: Engine, results: list[RequestOutput], seconds: float) -> str:
    """One line about the run."""
    prompt_tokens = sum(len(r.prompt_token_ids) for r in results)
    new_tokens = sum(len(r.token_ids) for r in results)
    first = [r.metrics.time_to_first_token for r in results if r.metrics.time_to_first_token is not None]
    pages = sum(r.metrics.num_pages for r in results)
    parts = [f"{prompt_tokens} prompt tokens", f"{new_tokens} new tokens"]
    if first:
        name = "time to first token" if len(results) == 1 else "mean time to first token"
        parts.append(f"{name} {sum(first) / len(first):.2f} s")
    parts.append(f"{new_tokens / seconds:.1f} tokens/s")
    used = "" if len(results) == 1 else f" by {len(results)} prompts"
    parts.append(f"{pages} KV pages used{used} (pool: {engine.pool.num_pages})")
    return ", ".join(parts) + f" [{engine.backend_name}]"
