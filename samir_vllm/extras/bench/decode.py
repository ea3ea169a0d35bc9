"""``bench decode``: steps of a batch whose sequences decode together, beside what memory allows.

Wall time is what a caller of ``Engine.step`` sees, text included: from one step's outputs to the next one's.
On a GPU a run of its own, whose steps are marked on the GPU's clock, tells in which share of the time the GPU
did nothing. Knows the engine by its public names, and the runner for what it launches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from samir_vllm.config import ModelConfig
from samir_vllm.engine import Engine
from samir_vllm.errors import OptionError
from samir_vllm.extras.bench.limits import (
    Limits,
    StepWork,
    floor_seconds,
    measure_limits,
    step_bytes,
    step_flops,
)
from samir_vllm.extras.bench.model import (
    add_model_arguments,
    check_context,
    check_outputs,
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
    print_notices,
    progress,
    with_peer,
    write_report,
)
from samir_vllm.extras.bench.timed_runner import TimedRunner, gpu_idle, gpu_seconds, runner_of
from samir_vllm.sampling import SamplingParams

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
    parser.add_argument(
        "--constrained",
        action="store_true",
        help="every token chosen among those that a mask of its own allows, as for answers by a grammar",
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
    limits, rows = measure_all(args, config, tensors)
    work = {"kind": "decode", "prompt": args.prompt, "new": args.new}
    works = [work | {"name": row.name, "batch": row.tokens} for row in rows]
    report = Report("decode", model_name(args), limits, rows)
    write_report(with_peer(report, args, config, works), args)
    return 0


def measure_all(
    args: argparse.Namespace, config: ModelConfig, tensors: Mapping[str, np.ndarray]
) -> tuple[Limits, list[Row]]:
    """All batch sizes, with one engine, which is gone afterwards."""
    engine = make_decode_engine(args, config, tensors)
    print_notices(engine.notices)
    with progress(1 + len(args.batch)) as begin:
        begin("limits")
        limits = measure_limits(runner_of(engine).backend)
        rows = []
        for batch in args.batch:
            begin(f"batch {batch}")
            rows.append(measure(engine, limits, batch, args))
    return limits, rows


def make_decode_engine(
    args: argparse.Namespace, config: ModelConfig, tensors: Mapping[str, np.ndarray]
) -> Engine:
    """With pages for the largest ``batch`` of ``prompt`` and ``new`` tokens."""
    pages, most = pages_per_seq(args.prompt + args.new), max(args.batch)
    return make_engine(
        args,
        config,
        tensors,
        num_pages=pages * config.num_layers * most,
        max_num_seqs=most,
        max_batched_tokens=min(PREFILL_TOKENS, most * args.prompt),
        max_pages_per_seq=pages,
        runner_class=TimedRunner,
    )


def measure(engine: Engine, limits: Limits, batch: int, args: argparse.Namespace) -> Row:
    """One batch size."""
    runner, config = runner_of(engine), engine.model_config

    def generate_once() -> list[float]:
        return generate(engine, batch, args.prompt, args.new, constrained=args.constrained)

    generate_once()  # graphs are recorded, kernels are loaded
    times = [seconds for _ in range(args.runs) for seconds in generate_once()]
    runner.begin(lambda step: len(step.decodes) == batch and not step.prefills)
    generate_once()
    marks = runner.end()
    seconds, kv_tokens = statistics.median(times), round(statistics.mean(mark.kv_tokens for mark in marks))
    work = StepWork(batch, kv_tokens, attended=kv_tokens + batch, logit_rows=batch)
    nbytes = step_bytes(runner.weights, config, work, runner.backend.kv_itemsize)
    flops = step_flops(config, work)
    return Row(
        name=f"batch {batch}, constrained" if args.constrained else f"batch {batch}",
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


class EveryOther:
    """A constraint that costs next to nothing itself: every other token may come."""

    is_complete = False

    def fill_mask(self, mask: np.ndarray) -> None:
        """See ``TokenConstraint``."""
        mask[:] = 0x55555555

    def accept(self, token_id: int) -> bool:
        """See ``TokenConstraint``."""
        return token_id % 2 == 0


def generate(
    engine: Engine,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    *,
    constrained: bool = False,
    **sampling: Any,
) -> list[float]:
    """Runs a batch from prompts to end; seconds of every step in which all decoded and none was prefilled.

    Args:
        engine: idle.
        batch: sequences.
        prompt_tokens: of each.
        new_tokens: of each.
        constrained: each has a mask of its own at every step.
        sampling: further fields of ``SamplingParams``.

    Raises:
        SamirVllmError: a step failed.
    """
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, **sampling)
    for i in range(batch):
        prompt = random_prompt(engine.model_config, prompt_tokens, seed=i)
        engine.add_request(prompt, params, constraint=EveryOther if constrained else None)
    ends: list[float] = []  # of the steps that gave every sequence a token: the first one ends the prefill
    while engine.has_work:
        outputs = engine.step()
        check_outputs(outputs)
        if len(outputs) == batch:
            ends.append(time.perf_counter())
    if len(ends) < 2:
        raise OptionError(
            f"no step has all {batch} sequences decoding: their prompts take too many steps; raise --new"
        )
    return [end - start for start, end in pairwise(ends)]
