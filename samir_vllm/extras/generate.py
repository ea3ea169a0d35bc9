"""``generate``: prompts from arguments, a file or standard input; answers to standard output.

Answers go to standard output, everything else (progress, figures, errors) to standard error. Knows the engine
only by its public names.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from samir_vllm.commandline import (
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    Interrupts,
    add_engine_options,
    add_sampling_options,
    engine_options,
    error_console,
    json_sampling_options,
    load_engine,
    logprobs_table,
    print_notice,
    sampling_notices,
    sampling_options,
    token_text,
    user_error,
)
from samir_vllm.engine import Completion, Engine, Prompt, RequestOutput, StepOutput, refused
from samir_vllm.errors import ChatError, OptionError, RequestError, SamirVllmError
from samir_vllm.sampling import SamplingParams
from samir_vllm.sequence import TokenLogprobs
from samir_vllm.timing import StartupTimes, process_seconds
from samir_vllm.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = SamplingParams().max_tokens


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt as the user gave it."""

    prompt: Prompt
    params: SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="text; - reads standard input")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="new tokens at most (default: 128)")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="a prompt a line (.txt), or .jsonl with prompt or messages and sampling options; - for stdin",
    )
    parser.add_argument("--date", metavar="TEXT", help='today for the chat format, such as "26 Jul 2024"')
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--raw", action="store_true", help="the prompt as it is, without the model's chat format"
    )
    parser.add_argument("--json", action="store_true", help="a JSON line for each answer, with its figures")
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
    add_sampling_options(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace, on_load: Callable[[Engine], None] = lambda engine: None) -> int:
    """Run the command; returns the exit status: 2 if any prompt was refused or failed, 130 after Ctrl-C.

    ``on_load`` sees the engine before its first step.
    """
    engine_options(args)  # a mistake in them shows before standard input is read
    jobs = collect_jobs(args)
    console = error_console()
    for notice in sampling_notices(job.params for job in jobs):
        print_notice(console, notice)
    start = StartReport()
    engine = load_engine(args, console, quiet=args.quiet)
    start.loaded(engine)
    on_load(engine)
    started = time.perf_counter()
    answers = Answers(args, engine, jobs)
    interrupted = False
    try:
        with Interrupts() as interrupts:
            _drive(engine, jobs, answers, console, args, start, interrupts)
            interrupted = interrupts.requested
    except KeyboardInterrupt:
        interrupted = True
    if interrupted:
        answers.interrupt()
    answers.close()
    if not args.quiet and any(r.prompt_token_ids for r in answers.results()):  # not if all were refused
        console.print(figures(engine, answers, time.perf_counter() - started), style="dim")
    if args.timing:
        console.print(json.dumps(start.as_dict()) if args.json else start.as_text())
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_USER_ERROR if any(c.error for r in answers.results() for c in r.completions) else 0


# Prompts


def collect_jobs(args: argparse.Namespace) -> list[Job]:
    """The prompts of arguments, ``--prompts`` and standard input, each with its sampling parameters."""
    texts, count = split_count(args.prompt, alone=args.prompts is not None or not _stdin_is_terminal())
    if count is None:
        count = DEFAULT_MAX_TOKENS if args.max_tokens is None else args.max_tokens
    elif args.max_tokens is not None:
        raise OptionError(f"the token count is given twice: {count} and --max-tokens {args.max_tokens}")
    if count < 1:
        raise OptionError(f"the token count must be at least 1, not {count}")
    options = sampling_options(args) | {"max_tokens": count}
    params = SamplingParams(**options)
    jobs = [Job(_dialog(sys.stdin.read() if t == "-" else t, args), params) for t in texts]
    if args.prompts is not None:
        jobs += read_prompts(args.prompts, options, args)
    elif not texts:
        if _stdin_is_terminal():
            raise OptionError("no prompt: give one as an argument, with --prompts FILE, or on standard input")
        jobs.append(Job(_dialog(sys.stdin.read(), args), params))
    if not jobs:
        raise OptionError(f"{args.prompts}: no prompts in it")
    return jobs


def split_count(words: list[str], *, alone: bool) -> tuple[list[str], int | None]:
    """Takes a last word that is a whole number as the token count.

    A lone number is a prompt, unless prompts come from elsewhere (``alone``).
    """
    if words and re.fullmatch(r"[+-]?\d+", words[-1]) and (len(words) > 1 or alone):
        return words[:-1], int(words[-1])
    return words, None


def read_prompts(name: str, options: dict[str, Any], args: argparse.Namespace) -> Iterator[Job]:
    """Jobs of a file; ``options`` are the fields of ``SamplingParams`` where a line says nothing else.

    A ``.jsonl`` file has objects with ``prompt`` or ``messages``, and perhaps fields of ``SamplingParams``;
    any other file has a prompt a line.
    """
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise SamirVllmError(f"can't read prompts from {name}: {reason}") from None
    params = SamplingParams(**options)
    # JSON may hold other characters that end a line, such as U+2028.
    for number, line in enumerate(text.split("\n") if name.endswith(".jsonl") else text.splitlines(), 1):
        if not line.strip():
            continue
        if not name.endswith(".jsonl"):
            yield Job(_dialog(line, args), params)
            continue
        try:
            yield _json_job(line, options, args)
        except SamirVllmError as exc:
            raise OptionError(f"{name}:{number}: {exc}") from None


def _json_job(line: str, options: dict[str, Any], args: argparse.Namespace) -> Job:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        raise OptionError("not JSON") from None
    if isinstance(item, str):
        item = {"prompt": item}
    if not isinstance(item, dict) or ("prompt" in item) == ("messages" in item):
        raise OptionError('needs an object with either "prompt" or "messages"')
    own = {key: value for key, value in item.items() if key not in ("prompt", "messages")}
    params = SamplingParams(**(options | json_sampling_options(own)))
    if "messages" in item:
        if not isinstance(item["messages"], list):
            raise OptionError("messages must be a list")
        return Job(item["messages"], params)
    if not isinstance(item["prompt"], str):
        raise OptionError("prompt must be text")
    return Job(_dialog(item["prompt"], args), params)


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


def _drive(
    engine: Engine,
    jobs: list[Job],
    answers: Answers,
    console: Console,
    args: argparse.Namespace,
    start: StartReport,
    interrupts: Interrupts,
) -> None:
    for i, job in enumerate(jobs):
        try:
            prompt = job.prompt
            if args.date is not None and engine.chat_format is not None and _is_dialog(prompt):
                prompt = engine.chat_format.encode(prompt, date=args.date)
            answers.expect(i, engine.add_request(prompt, job.params))
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
        while engine.has_work and not interrupts.requested:
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

    def __init__(self, args: argparse.Namespace, engine: Engine, jobs: list[Job]) -> None:
        self._args = args
        self._engine = engine
        self._jobs = jobs
        self._single = len(jobs) == 1
        params = jobs[0].params
        whole = args.json or args.ids or args.no_stream or params.n > 1
        wants_table = params.logprobs is not None or params.prompt_logprobs is not None
        self._streamed = self._single and not whole and not wants_table
        self._index: dict[str, int] = {}
        self._done: dict[int, RequestOutput] = {}
        self._printed = 0
        self._num_shown = 0  # characters of the streamed answer

    def expect(self, index: int, request_id: str) -> None:
        """The request of prompt ``index`` is live."""
        self._index[request_id] = index

    def refuse(self, index: int, result: RequestOutput) -> None:
        """Prompt ``index`` was never queued."""
        self._done[index] = result
        self._flush()

    def take(self, out: StepOutput) -> None:
        """One output of a step."""
        if self._streamed:
            sys.stdout.write(out.text)
            sys.stdout.flush()
            self._num_shown += len(out.text)
        if out.result is not None:
            self._done[self._index.pop(out.request_id)] = out.result
            self._flush()

    def interrupt(self) -> None:
        """Ctrl-C: what is running ends with what it has, what waits ends with nothing."""
        for request_id, index in list(self._index.items()):
            result = self._engine.abort(request_id)
            if result is not None:
                self._done[index] = result
                if self._streamed:  # what was held back while a stop string might have come
                    sys.stdout.write(result.text[self._num_shown :])
        self._index.clear()
        self._flush()

    def results(self) -> list[RequestOutput]:
        """Everything that has ended, in the order of the prompts."""
        return [self._done[i] for i in sorted(self._done)]

    def drawn_seeds(self) -> list[int]:
        """The seeds that the engine drew, in the order of the prompts."""
        ended = [(self._jobs[i].params.seed, self._done[i].seed) for i in sorted(self._done)]
        return [seed for given, seed in ended if given is None and seed is not None]

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
        if result.prompt_logprobs is not None and not self._args.json and result.error is None:
            table = logprobs_table(result.prompt_logprobs, result.prompt_token_ids, self._engine.tokenizer)
            print(table if self._single else f"[{index + 1}] prompt\n{table}", end="\n\n", flush=True)
        several = len(result.completions) > 1
        for completion in result.completions:
            if completion.error is not None:
                where = "" if self._single else f"prompt {index + 1}: "
                user_error(where + (f"answer {completion.index + 1}: " if several else "") + completion.error)
            if self._args.json:
                line = answer_as_json(index, result, completion, self._engine.tokenizer)
                print(json.dumps(line, ensure_ascii=False, allow_nan=False), flush=True)
            elif not self._streamed and completion.error is None:
                self._print_answer(index, several, completion)

    def _print_answer(self, index: int, several: bool, completion: Completion) -> None:
        labelled = several or not self._single
        if self._args.ids:
            text = " ".join(map(str, completion.token_ids))
        elif labelled:
            number = f"{index + 1}.{completion.index + 1}" if several else str(index + 1)
            text = f"[{number}] {completion.text}\n"
        else:
            text = completion.text
        if completion.logprobs is not None:
            text += "\n" if not text.endswith("\n") else ""
            text += "\n" + logprobs_table(completion.logprobs, completion.token_ids, self._engine.tokenizer)
            text += "\n" if labelled else ""
        print(text, flush=True)


def answer_as_json(
    index: int, result: RequestOutput, completion: Completion, tokenizer: Tokenizer
) -> dict[str, Any]:
    """What a line of ``--json`` holds: one answer, and the prompt that it answers."""
    answer = {
        name: getattr(completion, name) for name in ("text", "token_ids", "finish_reason", "stop_reason")
    }
    return {
        "index": index,
        "completion": completion.index,
        "request_id": result.request_id,
        "prompt_token_ids": result.prompt_token_ids,
        **answer,
        "seed": completion.seed,
        "logprobs": _logprobs_as_json(completion.logprobs, tokenizer),
        "prompt_logprobs": _logprobs_as_json(result.prompt_logprobs, tokenizer),
        "error": completion.error,
        "metrics": asdict(completion.metrics),
    }


def _logprobs_as_json(
    tokens: Sequence[TokenLogprobs | None] | None, tokenizer: Tokenizer
) -> list[dict[str, Any] | None] | None:
    if tokens is None:
        return None

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        # JSON has no infinities: null is a probability of 0.
        shown = logprob if math.isfinite(logprob) else None
        return {"token_id": token_id, "token": token_text(tokenizer, token_id), "logprob": shown}

    return [
        None if t is None else entry(t.token_id, t.logprob) | {"top": [entry(i, p) for i, p in t.top]}
        for t in tokens
    ]


def figures(engine: Engine, answers: Answers, seconds: float) -> str:
    """One line about the run."""
    results = answers.results()
    completions = [c for r in results for c in r.completions]
    prompt_tokens = sum(len(r.prompt_token_ids) for r in results)
    new_tokens = sum(len(c.token_ids) for c in completions)
    first = [t for c in completions if (t := c.metrics.time_to_first_token) is not None]
    parts = [f"{prompt_tokens} prompt tokens", f"{new_tokens} new tokens"]
    if first:
        name = "time to first token" if len(completions) == 1 else "mean time to first token"
        parts.append(f"{name} {sum(first) / len(first):.2f} s")
    parts.append(f"{new_tokens / seconds:.1f} tokens/s")
    used = ""
    if len(completions) > 1:
        by_prompts = len(completions) == len(results)
        used = f" by {len(results)} prompts" if by_prompts else f" by {len(completions)} answers"
    pages = sum(c.metrics.num_pages for c in completions)
    parts.append(f"{pages} KV pages used{used} (pool: {engine.pool.num_pages})")
    if seeds := answers.drawn_seeds():
        parts.append(f"seed {seeds[0]} (drawn)" if len(results) == 1 else "seeds drawn (see --json)")
    return ", ".join(parts) + f" [{engine.backend_name}]"
