"""``bench scheduler``: what the host does in a step, on a model that costs nothing.

Times schedule, launched and commit, and the whole ``Engine.step``, for numbers running and waiting.
Knows no backend and no weights: the fake runner returns one token for everybody.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from samir_vllm.batch import build_batch
from samir_vllm.config import EngineConfig
from samir_vllm.engine import Engine
from samir_vllm.errors import OptionError
from samir_vllm.extras.bench.model import LLAMA_1B, pages_per_seq
from samir_vllm.extras.bench.report import number, print_table
from samir_vllm.sampling import SamplingParams, TokenMasks
from samir_vllm.sequence import ScheduledStep, StepResult

RUNNING = (1, 16, 256)
WAITING = (100, 10_000, 100_000)
PROMPT = [1, 2, 3]
REPEATS = 5
MOST_STEPS = 400
TARGET_US = 3.0
"""Microseconds a running sequence at 256: together a third of a GPU's decode step of 2.2 ms."""


class FakeRunner:
    """Builds a batch, as a real runner must where there is prefill, and gives everybody the same token."""

    steps_ahead = 0

    def launch(self, step: ScheduledStep) -> Callable[[], StepResult]:
        batch = build_batch(step)
        return lambda: StepResult([65] * len(batch.logit_rows))

    def launch_forward(self, step: ScheduledStep) -> Callable[[TokenMasks | None], Callable[[], StepResult]]:
        return lambda masks: self.launch(step)


class FakeTokenizer:
    """A token is a byte; what a real decoder does for each token, near enough."""

    vocab_size = 256
    adds_bos = False

    def stream_decoder(self) -> FakeDecoder:
        return FakeDecoder()


class FakeDecoder:
    """ASCII."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; microseconds."""

    running: int
    waiting: int
    add_us: float  # for each request queued
    scheduler_step_us: float  # schedule, launched, commit
    engine_step_us: float  # Engine.step, the fake runner and text included


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--steps", type=number, default=100, metavar="N", help="steps in a run (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    if args.steps > MOST_STEPS:
        raise OptionError(f"--steps must be at most {MOST_STEPS}, not {args.steps}")
    rows = [measure(running, waiting, args.steps) for running in RUNNING for waiting in WAITING]
    admission = {count: admission_us(count) for count in (1_000, 10_000, 100_000)}
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "admission_us": admission}))
        return 0
    print_table(_table(rows))
    for count, us in admission.items():
        print(f"{count:,} requests queued, admitted, run for one token and ended: {us:.1f} us each")
    return 0


def make_engine(running: int, new_tokens: int) -> Engine:
    """An engine on the fake model, with Llama 3.2 1B's pages for ``running`` sequences and no more."""
    vocab_size = FakeTokenizer.vocab_size
    model_config = replace(LLAMA_1B, vocab_size=vocab_size, bos_token_id=None, eos_token_ids=())
    tokenizer: Any = FakeTokenizer()
    config = EngineConfig(max_num_seqs=running)
    num_pages = running * model_config.num_layers * pages_per_seq(len(PROMPT) + new_tokens)
    return Engine.from_parts(config, model_config, tokenizer, FakeRunner(), num_pages=num_pages)


def measure(running: int, waiting: int, steps: int) -> Row:
    """The cost of a decode step with so many running and waiting."""
    new_tokens = 2 * REPEATS * steps + 2  # one of the prefill, and one that is never reached
    engine = make_engine(running, new_tokens)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    for _ in range(running + waiting):
        engine.add_request(PROMPT, params)
    add = (time.perf_counter() - start) / (running + waiting)
    engine.step()  # admits and prefills; from here on every step is `running` decodes
    scheduler = engine.scheduler

    def scheduler_step() -> None:
        step = scheduler.schedule()
        scheduler.launched(step)
        scheduler.commit(step, [65] * len(step.sampled()))

    scheduler_us = _median_us(scheduler_step, steps)
    engine_us = _median_us(engine.step, steps)
    assert (scheduler.num_running, scheduler.num_waiting) == (running, waiting)
    return Row(running, waiting, add * 1e6, scheduler_us, engine_us)


def _median_us(step: Callable[[], object], steps: int) -> float:
    means = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(steps):
            step()
        means.append((time.perf_counter() - start) / steps * 1e6)
    return statistics.median(means)


def admission_us(count: int) -> float:
    """Microseconds a request, from ``add_request`` to its end after one token, 256 at a time."""
    engine = make_engine(256, new_tokens=1)
    params = SamplingParams(max_tokens=1)
    start = time.perf_counter()
    for _ in range(count):
        engine.add_request(PROMPT, params)
    while engine.has_work:
        engine.step()
    return (time.perf_counter() - start) / count * 1e6


def _table(rows: list[Row]) -> Table:
    table = Table(title=f"host time of a decode step, microseconds (target: {TARGET_US:g} a sequence at 256)")
    for name in ("running", "waiting", "add_request", "scheduler", "a sequence", "Engine.step", "a sequence"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.running:,}",
            f"{row.waiting:,}",
            f"{row.add_us:.1f}",
            f"{row.scheduler_step_us:.1f}",
            f"{row.scheduler_step_us / row.running:.2f}",
            f"{row.engine_step_us:.1f}",
            f"{row.engine_step_us / row.running:.2f}",
        )
    return table
