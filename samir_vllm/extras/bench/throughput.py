"""``bench throughput``: many requests of uneven lengths at once, then the same with long prompts among them.

Wall time is that of a caller of ``Engine.step``, text included. The floor of a run is the sum of its steps'
floors, each counted from what the step ran: weights once, K and V by the sequences' lengths. So it holds for
these steps: a scheduler that needs fewer would have a lower one. Knows the engine by its public names, and
the runner for the weights' sizes and the GPU's clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from samir_vllm.backends import KV_SPLIT
from samir_vllm.config import ModelConfig
from samir_vllm.engine import Engine
from samir_vllm.errors import OptionError
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
    duration,
    number,
    print_notices,
    print_table,
    progress,
    with_peer,
    write_report,
)
from samir_vllm.extras.bench.timed_runner import TimedRunner, gpu_idle, gpu_seconds, runner_of
from samir_vllm.outputs import StepOutput, StepRecord
from samir_vllm.sampling import SamplingParams

MAX_RUNNING = 1024  # requests at once, where nobody says otherwise
LONG_ROOM = 16  # long prompts that can run beside them
LONG_SEED = 1 << 20  # of the long prompts; smaller ones are the requests' own
PEER_BATCHES = [128, 64, 32]  # sizes of static batches that a peer tries


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of one request, tokens."""

    prompt: int
    new: int


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Further requests, all alike, one after each interval."""

    lengths: Lengths
    interval: float  # seconds


@dataclass(slots=True)
class Served:
    """What happened until the requests had ended; times are the clock's."""

    started: float
    ended: float = 0.0
    prompts: dict[str, int] = field(default_factory=dict)  # tokens, by request id
    due: dict[str, float] = field(default_factory=dict)  # when each long prompt arrived
    records: list[StepRecord] = field(default_factory=list)
    heard: list[tuple[float, list[StepOutput]]] = field(default_factory=list)  # when, and what a step told

    @property
    def seconds(self) -> float:
        """Wall time."""
        return self.ended - self.started


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_model_arguments(parser)
    option = parser.add_argument
    option("--requests", type=number, default=256, metavar="N", help="submitted at once (%(default)s)")
    option("--seed", type=int, default=0, metavar="N", help="of the lengths (%(default)s)")
    option("--shortest", type=number, default=100, metavar="N", help="prompt, and output (%(default)s)")
    option("--longest", type=number, default=1024, metavar="N", help="prompt, and output (%(default)s)")
    option("--batching", default="continuous", help="continuous or static (%(default)s)")
    option("--long-prompt", type=number, default=2000, metavar="N", help="those of the mix (%(default)s)")
    option("--long-new", type=number, default=128, metavar="N", help="their new tokens (%(default)s)")
    option("--interval", type=float, default=1.0, metavar="SECONDS", help="between them (%(default)s)")
    option("--max-num-seqs", type=number, metavar="N", help="running at once (default: all)")
    option(
        "--max-batched-tokens",
        type=number,
        default=2048,
        metavar="N",
        help="prompt tokens prefilled in one step (%(default)s)",
    )
    option(
        "--kv-cache-mib",
        type=number,
        metavar="N",
        help="size of the KV page pool, BF16 pages (default: for all that run at once)",
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    check_output(args)
    if args.shortest > args.longest:
        raise OptionError(f"--shortest {args.shortest} is more than --longest {args.longest}")
    if args.seed < 0 or not 0.001 <= args.interval <= 1e6:
        raise OptionError("--seed must be 0 or more, and --interval 0.001 to 1,000,000 seconds")
    config, tensors = open_model(args)
    requests = draw_lengths(args.requests, args.shortest, args.longest, args.seed)
    limits, rows = measure(args, config, tensors, requests)
    lengths = [[r.prompt, r.new] for r in requests]
    work = {"name": rows[0].name, "kind": "throughput", "requests": lengths, "batches": PEER_BATCHES}
    report = with_peer(Report("throughput", model_name(args), limits, rows), args, config, [work])
    write_report(report, args)
    if not args.json:
        table = table_of(report.rows)
        if (how := report.rows[0].details.get("peer_how")) is not None:
            table.caption = f"{report.peer}: {how}"
        print_table(table)
    return 0


def draw_lengths(count: int, shortest: int, longest: int, seed: int) -> list[Lengths]:
    """Prompts and outputs, each uniform in ``shortest`` to ``longest`` tokens, both included."""
    drawn = np.random.default_rng(seed).integers(shortest, longest, (count, 2), endpoint=True)
    return [Lengths(prompt, new) for prompt, new in drawn.tolist()]


def make_loaded_engine(
    args: argparse.Namespace, config: ModelConfig, tensors: Any, requests: list[Lengths], long: Lengths
) -> Engine:
    """With pages for the largest requests that can run at once, unless the arguments say how many."""
    running = args.max_num_seqs or min(len(requests), MAX_RUNNING) + LONG_ROOM
    pages = sorted((pages_per_seq(r.prompt + r.new) for r in [*requests, *[long] * LONG_ROOM]), reverse=True)
    num_pages = sum(pages[:running]) * config.num_layers
    if args.kv_cache_mib is not None:
        num_pages = args.kv_cache_mib * 2**20 // config.page_bytes()
        least = -(-pages[0] * config.num_layers * config.page_bytes() // 2**20)
        if args.kv_cache_mib < least:
            raise OptionError(f"--kv-cache-mib {args.kv_cache_mib}: the longest request needs {least}")
    return make_engine(
        args,
        config,
        tensors,
        num_pages=num_pages,
        max_num_seqs=running,
        max_batched_tokens=args.max_batched_tokens,
        max_pages_per_seq=pages[0],
        runner_class=TimedRunner,
        batching=args.batching,
    )


def measure(
    args: argparse.Namespace, config: ModelConfig, tensors: Any, requests: list[Lengths]
) -> tuple[Limits, list[Row]]:
    """Both runs, with one engine, which is gone afterwards."""
    long = Lengths(args.long_prompt, args.long_new)
    longest = max(lengths.prompt + lengths.new for lengths in [*requests, long])
    check_context(config, longest)
    engine = make_loaded_engine(args, config, tensors, requests, long)
    print_notices(engine.notices)
    runner = runner_of(engine)
    mix = f"and {long.prompt:,} tokens every {args.interval:g} s"
    cases: dict[str, Arrivals | None] = {f"{len(requests)} at once": None}
    cases[f"{len(requests)}, {mix}"] = Arrivals(long, args.interval)
    rows = []
    with progress(2 + len(cases)) as begin:
        begin("limits")
        limits = measure_limits(runner.backend)
        begin("warm-up")
        warm_up(engine, longest)
        for name, arrivals in cases.items():
            begin(name)
            runner.begin()
            served = serve(engine, requests, arrivals)
            rows.append(make_row(name, served, limits, engine, runner.end()))
    return limits, rows


def warm_up(engine: Engine, longest: int) -> None:
    """Decode steps of all sizes, at short and at long KV lengths: graphs are recorded, kernels are loaded.

    A graph serves KV lengths up to a power of two, and numbers of rows up to a multiple of eight or more.

    Args:
        engine: idle.
        longest: tokens of a request, at most.
    """
    powers = [KV_SPLIT << i for i in range((longest // KV_SPLIT).bit_length())]
    for tokens in [*(power for power in powers if power < longest), longest]:
        beside = min(engine.config.max_num_seqs - 1, tokens - 3)
        # Steps between the end of each and that of the last: the last ones go one by one, others in eights.
        steps = [i if i < 32 else 28 + i // 8 for i in range(beside)]
        lasting = min(max(steps, default=0) + 3, tokens - 1)
        short = [Lengths(1, lasting - 1 - n) for n in steps]
        serve(engine, [Lengths(tokens - lasting, lasting), *short])


# Serving


def serve(
    engine: Engine,
    requests: Sequence[Lengths],
    arrivals: Arrivals | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Served:
    """Submits all requests and steps until they have ended; ``arrivals`` come meanwhile, and end then.

    Raises:
        SamirVllmError: a request was refused, or failed.
    """
    prompts = [random_prompt(engine.model_config, r.prompt, seed=i) for i, r in enumerate(requests)]
    long = random_prompt(engine.model_config, arrivals.lengths.prompt, LONG_SEED) if arrivals else []
    served = Served(started=clock())
    engine.on_step = served.records.append
    for prompt, lengths in zip(prompts, requests, strict=True):
        served.prompts[submit(engine, prompt, lengths.new)] = len(prompt)
    now, left = served.started, len(requests)
    while left:
        while arrivals and now >= (due := served.started + (len(served.due) + 1) * arrivals.interval):
            request_id = submit(engine, long, arrivals.lengths.new)
            served.prompts[request_id], served.due[request_id] = len(long), due
        outputs = engine.step()
        now = clock()
        served.heard.append((now, outputs))
        left -= sum(out.result is not None and out.request_id not in served.due for out in outputs)
    served.ended, engine.on_step = now, None
    check_outputs(out for _, outputs in served.heard for out in outputs)
    for request_id in served.due:
        engine.abort(request_id)
    while engine.has_work:  # a step may still be under way
        engine.step()
    return served


def submit(engine: Engine, prompt: list[int], new_tokens: int) -> str:
    """One request that nothing ends early; its id."""
    return engine.add_request(prompt, SamplingParams(max_tokens=new_tokens, ignore_eos=True))


# Counting


def step_works(served: Served) -> Iterator[StepWork]:
    """The work of each step that ran anything, in order."""
    computed = dict.fromkeys(served.prompts, 0)  # tokens whose K and V earlier steps have written
    for record in served.records:
        tokens = len(record.decodes)
        kv_tokens = sum(computed[seq] for seq in record.decodes)
        attended, logit_rows = kv_tokens + tokens, tokens
        for seq in record.decodes:
            computed[seq] += 1
        for seq, chunk in record.prefills:
            before = computed[seq]
            computed[seq] += chunk
            tokens += chunk
            kv_tokens += before
            attended += chunk * before + causal_pairs(chunk)
            logit_rows += computed[seq] == served.prompts[seq]
        if tokens:
            yield StepWork(tokens, kv_tokens, attended, logit_rows)


def token_times(served: Served) -> dict[str, list[float]]:
    """When each request's new tokens were told."""
    times: dict[str, list[float]] = {request_id: [] for request_id in served.prompts}
    for when, outputs in served.heard:
        for out in outputs:
            if out.token_id is not None:
                times[out.request_id].append(when)
    return times


def make_row(name: str, served: Served, limits: Limits, engine: Engine, marks: list[Any]) -> Row:
    """The figures of one run."""
    runner, config = runner_of(engine), engine.model_config
    nbytes = flops = floor = 0.0
    for work in step_works(served):
        step_nbytes = step_bytes(runner.weights, config, work, runner.backend.kv_itemsize)
        step_operations = step_flops(config, work)
        nbytes, flops = nbytes + step_nbytes, flops + step_operations
        floor += floor_seconds(limits, step_nbytes, step_operations)
    times = token_times(served)
    return Row(
        name=name,
        seconds=served.seconds,
        tokens=sum(map(len, times.values())),
        bytes=nbytes,
        flops=flops,
        floor_seconds=floor,
        gpu_idle=gpu_idle(marks),
        details={**request_figures(served, times), "gpu_seconds_per_step": gpu_seconds(marks)},
    )


def request_figures(served: Served, times: dict[str, list[float]]) -> dict[str, float | None]:
    """What the requests' owners see; seconds, percentiles over all pairs of neighbouring tokens."""
    prompt_tokens = sum(chunk for record in served.records for _, chunk in record.prefills)
    new_tokens = sum(map(len, times.values()))
    requests = sum(out.result is not None for _, outputs in served.heard for out in outputs)
    gaps = [
        after - before
        for request_id, heard in times.items()
        if request_id not in served.due
        for before, after in pairwise(heard)
    ]
    waits = [times[request_id][0] - due for request_id, due in served.due.items() if times[request_id]]
    return {
        "requests": requests,
        "requests_per_second": requests / served.seconds,
        "prompt_tokens": prompt_tokens,
        "total_tokens_per_second": (prompt_tokens + new_tokens) / served.seconds,
        "steps": len(served.records),
        "between_tokens_p50_seconds": percentile(gaps, 50),
        "between_tokens_p99_seconds": percentile(gaps, 99),
        "long_prompts": len(served.due),
        "long_prompts_started": len(waits),
        "long_first_token_p50_seconds": percentile(waits, 50),
        "long_first_token_max_seconds": max(waits, default=None),
    }


def percentile(values: Iterable[float], percent: float) -> float | None:
    """None of nothing."""
    found = list(values)
    return float(np.percentile(found, percent)) if found else None


FIGURES = {
    "requests/s": "requests_per_second",
    "prompt and new tokens/s": "total_tokens_per_second",
    "steps": "steps",
    "time between tokens, median": "between_tokens_p50_seconds",
    "99th percentile": "between_tokens_p99_seconds",
    "long prompts": "long_prompts",
    "to their first token, median": "long_first_token_p50_seconds",
    "longest": "long_first_token_max_seconds",
}


def table_of(rows: list[Row]) -> Table:
    """What the requests' owners see, for people."""
    table = Table("", box=box.SIMPLE)
    for row in rows:
        table.add_column(row.name, justify="right")
    for title, key in FIGURES.items():
        cells = []
        for row in rows:
            value = row.details[key]
            if value is None:
                cells.append("")
            else:
                cells.append(duration(value) if key.endswith("_seconds") else f"{value:,.4g}")
        table.add_row(title, *cells)
    return table
