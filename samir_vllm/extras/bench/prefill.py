"""``bench prefill``: one prompt in one step, to its first token, beside what the tensor cores allow.

Wall time, from the call of ``Engine.step`` that starts the prompt to the output of its first token; making
the request isn't part of it. Knows the engine by its public names, and the runner for the GPU's clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from samir_vllm.config import ModelConfig
from samir_vllm.engine import Engine
from samir_vllm.extras.bench.limits import (
    Limits,
    StepWork,
    causal_pairs,
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
from samir_vllm.extras.bench.timed_runner import TimedRunner, gpu_seconds, runner_of
from samir_vllm.sampling import SamplingParams

TOKENS = [128, 512, 2000, 3968]
WARM_UP = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_model_arguments(parser)
    parser.add_argument(
        "--tokens",
        type=numbers,
        default=TOKENS,
        metavar="N[,N...]",
        help=f"lengths of the prompt ({','.join(map(str, TOKENS))})",
    )
    parser.add_argument(
        "--runs", type=number, default=9, metavar="N", help="of each; the median counts (%(default)s)"
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    check_output(args)
    config, tensors = open_model(args)
    check_context(config, max(args.tokens) + 1)
    limits, rows = measure_all(args, config, tensors)
    works = [{"name": row.name, "kind": "prefill", "tokens": row.tokens} for row in rows]
    report = Report("prefill", model_name(args), limits, rows)
    write_report(with_peer(report, args, config, works), args)
    return 0


def measure_all(
    args: argparse.Namespace, config: ModelConfig, tensors: Mapping[str, np.ndarray]
) -> tuple[Limits, list[Row]]:
    """All lengths, with one engine, which is gone afterwards."""
    longest = max(args.tokens)
    pages = pages_per_seq(longest + 1)
    engine = make_engine(
        args,
        config,
        tensors,
        num_pages=pages * config.num_layers,
        max_num_seqs=1,
        max_batched_tokens=longest,
        max_pages_per_seq=pages,
        runner_class=TimedRunner,
    )
    print_notices(engine.notices)
    with progress(1 + len(args.tokens)) as begin:
        begin("limits")
        limits = measure_limits(runner_of(engine).backend)
        rows = []
        for tokens in args.tokens:
            begin(f"{tokens} tokens")
            rows.append(measure(engine, limits, tokens, args.runs))
    return limits, rows


def measure(engine: Engine, limits: Limits, tokens: int, runs: int) -> Row:
    """One length."""
    runner, config = runner_of(engine), engine.model_config
    for _ in range(WARM_UP):
        first_token_seconds(engine, tokens)
    times = [first_token_seconds(engine, tokens) for _ in range(runs)]
    runner.begin()
    first_token_seconds(engine, tokens)
    marks = runner.end()
    work = StepWork(tokens, kv_tokens=0, attended=causal_pairs(tokens), logit_rows=1)
    nbytes = step_bytes(runner.weights, config, work, runner.backend.kv_itemsize)
    flops = step_flops(config, work)
    seconds = statistics.median(times)
    details = {"mean_seconds": statistics.mean(times), "gpu_seconds": gpu_seconds(marks)}
    return Row(
        name=f"{tokens} tokens",
        seconds=seconds,
        tokens=tokens,
        bytes=nbytes,
        flops=flops,
        floor_seconds=floor_seconds(limits, nbytes, flops),
        details=details | {"flops_per_second": flops / seconds, "runs": runs},
    )


def first_token_seconds(engine: Engine, tokens: int) -> float:
    """Seconds of a prompt of so many tokens, alone in the engine.

    Raises:
        SamirVllmError: the step failed.
    """
    engine.add_request(
        random_prompt(engine.model_config, tokens), SamplingParams(max_tokens=1, ignore_eos=True)
    )
    start = time.perf_counter()
    outputs: list[Any] = []
    while engine.has_work:
        outputs += engine.step()
    seconds = time.perf_counter() - start
    check_outputs(outputs)
    return seconds
