"""``bench decode``: steps of a batch whose sequences decode together, beside what memory allows.

Wall time is what a caller of ``Engine.step`` sees, text included: from one step's outputs to the next one's.
On a GPU a run of its own, whose steps are marked on the GPU's clock, tells in which share of the time the GPU
did nothing. Knows the engine by its public names, and the runner for what it launches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from samir_vllm.commandline import error_console, print_notice
from samir_vllm.engine import Engine
from samir_vllm.errors import OptionError, SamirVllmError
from samir_vllm.extras.bench.limits import Limits, floor_seconds, measure_limits, step_bytes, step_flops
from samir_vllm.extras.bench.model import (
    add_model_arguments,
    check_context,
    make_engine,
    model_name,
    open_model,
    pages_per_seq,
    random_prompt,
)
from samir_vllm.extras.bench.report import (
    Report,
    Row,
    add_output_arguments,
    check_output,
    number,
    numbers,
    progress,
    with_peer,
    write_report,
)
from samir_vllm.model_runner import ModelRunner
from samir_vllm.sampling import SamplingParams
from samir_vllm.sequence import ScheduledStep, StepResult

BATCHES = [1, 8, 32, 64, 128, 256]
PREFILL_TOKENS = 8192  # of one step: how fast prompts go in is another bench's matter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_model_arguments(parser)
    parser.add_argument(
        "--batch",
        type=numbers,
        default=BATCHES,
        metavar="N[,N...]",
        help=f"sequences that decode together ({','.join(map(str, BATCHES))})",
    )
    parser.add_argument(
        "--prompt", type=number, default=128, metavar="N", help="tokens of each (%(default)s)"
    )
    parser.add_argument(
        "--new", type=number, default=256, metavar="N", help="tokens each decodes (%(default)s)"
    )
    parser.add_argument("--runs", type=number, default=3, metavar="N", help="timed runs (%(default)s)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    check_output(args)
    if args.new < 2:
        raise OptionError("--new must be 2 or more: the first token comes with the prompt")
    config, tensors = open_model(args)
    check_context(config, args.prompt + args.new)
    pages, most = pages_per_seq(args.prompt + args.new), max(args.batch)
    engine = make_engine(
        args,
        config,
        tensors,
        num_pages=pages * config.num_layers * most,
        max_num_seqs=most,
        max_batched_tokens=min(PREFILL_TOKENS, most * args.prompt),
        max_pages_per_seq=pages,
        runner_class=TimedRunner,
    )
    runner = runner_of(engine)
    console = error_console()
    for notice in engine.notices:
        print_notice(console, notice)
    with progress(1 + len(args.batch)) as begin:
        begin("limits")
        limits = measure_limits(runner.backend)
        rows = []
        for batch in args.batch:
            begin(f"batch {batch}")
            rows.append(measure(engine, limits, batch, args))
    report = Report("decode", model_name(args), limits, rows)
    if args.peers is not None:
        del engine, runner  # the peer needs the GPU's memory
        works = [peer_work(row, args) for row in rows]
        report = with_peer(report, args, config, works)
    write_report(report, args)
    return 0


def peer_work(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """The same work, in the words of ``peers``."""
    work = {"kind": "decode", "batch": row.tokens, "prompt": args.prompt, "new": args.new}
    return {"name": row.name, **work}


def measure(engine: Engine, limits: Limits, batch: int, args: argparse.Namespace) -> Row:
    """One batch size."""
    runner, config = runner_of(engine), engine.model_config
    generate(engine, batch, args.prompt, args.new)  # graphs are recorded, kernels are loaded
    times = [seconds for _ in range(args.runs) for seconds in generate(engine, batch, args.prompt, args.new)]
    runner.begin(lambda step: len(step.decodes) == batch and not step.prefills)
    generate(engine, batch, args.prompt, args.new)
    marks = runner.end()
    seconds, kv_tokens = statistics.median(times), statistics.mean(mark.kv_tokens for mark in marks)
    nbytes = step_bytes(
        runner.weights,
        config,
        tokens=batch,
        kv_tokens=round(kv_tokens),
        kv_itemsize=runner.backend.kv_itemsize,
    )
    flops = step_flops(config, tokens=batch, attended=round(kv_tokens) + batch, logit_rows=batch)
    return Row(
        name=f"batch {batch}",
        seconds=seconds,
        tokens=batch,
        bytes=nbytes,
        flops=flops,
        floor_seconds=floor_seconds(limits, nbytes, flops),
        gpu_idle=gpu_idle(marks),
        details={
            "mean_seconds": statistics.mean(times),
            "gpu_seconds": gpu_seconds(marks),
            "steps": len(times),
        },
    )


def generate(engine: Engine, batch: int, prompt_tokens: int, new_tokens: int) -> list[float]:
    """Runs a batch from prompts to end; seconds of every step in which all decoded and none was prefilled.

    Raises:
        SamirVllmError: a step failed.
    """
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    for i in range(batch):
        engine.add_request(random_prompt(engine.model_config, prompt_tokens, seed=i), params)
    ends: list[float] = []  # of the steps that gave every sequence a token: the first one ends the prefill
    while engine.has_work:
        outputs = engine.step()
        check(outputs)
        if len(outputs) == batch:
            ends.append(time.perf_counter())
    if len(ends) < 2:
        raise OptionError(
            f"no step has all {batch} sequences decoding: their prompts take too many steps; raise --new"
        )
    return [end - start for start, end in pairwise(ends)]


def check(outputs: list[Any]) -> None:
    """Raises SamirVllmError where a request has failed: its time means nothing."""
    for out in outputs:
        if out.completion is not None and out.completion.error is not None:
            raise SamirVllmError(f"a request failed: {out.completion.error}")


# The GPU's clock


@dataclass(frozen=True, slots=True)
class Mark:
    """A step that was launched; the marks are None where there is no GPU."""

    kv_tokens: int  # of its decoding sequences, written by earlier steps
    started: Any
    ended: Any


class TimedRunner(ModelRunner):
    """Marks the steps that are wanted on the GPU's clock; otherwise a runner like any other."""

    _is_wanted: Callable[[ScheduledStep], bool] | None = None
    _marks: list[Mark]

    def begin(self, is_wanted: Callable[[ScheduledStep], bool]) -> None:
        """Mark these steps from now on."""
        self._is_wanted, self._marks = is_wanted, []

    def end(self) -> list[Mark]:
        """Mark no more; the marks so far, in the order in which their steps were launched."""
        self._is_wanted = None
        return self._marks

    def launch(self, step: ScheduledStep) -> Callable[[], StepResult]:
        """See ``ModelRunner``."""
        if self._is_wanted is None or not self._is_wanted(step):
            return super().launch(step)
        kv_tokens = sum(seq.num_launched_tokens for seq in step.decodes)
        started = self._event()
        result = super().launch(step)
        self._marks.append(Mark(kv_tokens, started, self._event()))
        return result

    def _event(self) -> Any:
        if self.backend.name != "cuda":
            return None
        from samir_vllm.backends import cuda_measure

        with self.backend.active():
            return cuda_measure.event(self.backend)


def runner_of(engine: Engine) -> TimedRunner:
    """The runner of an engine that was made with ``TimedRunner``."""
    runner = engine._runner
    assert isinstance(runner, TimedRunner)
    return runner


def gpu_seconds(marks: list[Mark]) -> float | None:
    """Mean of what the GPU took for one of these steps; None without a GPU."""
    if not marks or marks[0].started is None:
        return None
    from samir_vllm.backends import cuda_measure

    return statistics.mean(cuda_measure.seconds_between(mark.started, mark.ended) for mark in marks)


def gpu_idle(marks: list[Mark]) -> float | None:
    """Share of the time, from the first step's start to the last one's end, in which none of them ran.

    A step that finds the GPU waiting is marked a moment before its first kernel comes, so that of the GPU's
    waiting a little counts as work.
    """
    seconds = gpu_seconds(marks)
    if seconds is None:
        return None
    from samir_vllm.backends import cuda_measure

    whole = cuda_measure.seconds_between(marks[0].started, marks[-1].ended)
    return max(0.0, 1 - len(marks) * seconds / whole)
