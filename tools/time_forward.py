"""Times whole steps of the model runner, host work and readback included, beside what memory would allow.

    python tools/time_forward.py MODEL_DIR [--device cuda] [--batches 1 32 128] [--steps 20] [--json FILE]

Decode: steps of several sequences, each with a prompt of 128 tokens already in its pages. Prefill: one prompt
of 2,000 tokens. Times are wall clock, the median after warm-up. The floor of a decode step is the bytes of
weights and of K and V that it must read, over the bandwidth of a large copy (bytes read plus bytes written)
measured in the same run; for prefill the rate of floating-point operations is printed. Knows the runner and
what a step is; no scheduler and no text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":  # run from a checkout that isn't installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from samir_vllm.backends import Backend, select_backend
from samir_vllm.config import EngineConfig, ModelConfig
from samir_vllm.errors import OptionError, SamirVllmError
from samir_vllm.extras.bench.cpu import weight_bytes
from samir_vllm.model_runner import ModelRunner
from samir_vllm.sampling import TokenSampling
from samir_vllm.sequence import ScheduledStep, Sequence
from samir_vllm.weights import open_weights

PROMPT_TOKENS = 128
WARM_UP = 3
COPY_BYTES = {"cuda": 1 << 30, "numpy": 256 << 20}  # far beyond any cache


def copy_rate(backend: Backend) -> float:
    """Bytes a second, read plus written, of a large copy on the backend's device: the median of nine."""
    nbytes = COPY_BYTES[backend.name]
    if backend.name == "cuda":
        import cupy

        source, target = cupy.cuda.alloc(nbytes), cupy.cuda.alloc(nbytes)
        stream = cupy.cuda.get_current_stream()

        def copy() -> None:
            target.copy_from_device_async(source, nbytes, stream)
            stream.synchronize()
    else:
        ones, copied = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)

        def copy() -> None:
            np.copyto(copied, ones)

    return 2 * nbytes / median_seconds(copy, 9)


def median_seconds(run: Callable[[], object], steps: int) -> float:
    """Wall clock of the median run, after warm-up."""
    times = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def admit(
    count: int,
    prompt_tokens: int,
    new_tokens: int,
    config: ModelConfig,
    sampling: TokenSampling | None = None,
) -> ScheduledStep:
    """A step that prefills ``count`` new sequences with random prompts, in pages of their own from page 0."""
    rng = np.random.default_rng(0)
    prefills, admitted, first = [], [], 0
    for slot in range(count):
        ids = rng.integers(0, config.vocab_size, prompt_tokens).tolist()
        seq = Sequence(str(slot), ids, max_tokens=new_tokens, sampling=sampling)
        seq.slot = slot
        pages = np.arange(seq.pages_per_layer * config.num_layers, dtype=np.int32) + first
        first += len(pages)
        prefills.append((seq, prompt_tokens))
        admitted.append((seq, pages.reshape(config.num_layers, -1)))
    return ScheduledStep([], prefills, admitted)


def time_decode(
    runner: ModelRunner, batch: int, steps: int, sampling: TokenSampling | None = None
) -> dict[str, Any]:
    """Median decode step of ``batch`` sequences, and the bytes it reads."""
    config = runner.config
    whole = admit(batch, PROMPT_TOKENS, WARM_UP + steps + 1, config, sampling)
    sequences = [seq for seq, _ in whole.prefills]
    for prefill, admitted in zip(whole.prefills, whole.admitted, strict=True):
        advance([prefill[0]], runner.run(ScheduledStep([], [prefill], [admitted])).token_ids)
    step = ScheduledStep(sequences, [], [])
    seconds = median_seconds(lambda: advance(sequences, runner.run(step).token_ids), steps)
    kv_tokens = batch * (PROMPT_TOKENS + WARM_UP + (steps + 1) // 2)  # in the middle of the timed steps
    kv_bytes = config.page_bytes(1, runner.backend.kv_itemsize) * config.num_layers * kv_tokens
    return {
        "name": f"decode, batch {batch}",
        "seconds": seconds,
        "tokens_per_second": batch / seconds,
        "bytes": weight_bytes(runner.weights) + kv_bytes,
    }


def advance(sequences: list[Sequence], token_ids: list[int]) -> None:
    """Book a step as the scheduler would."""
    for seq, token in zip(sequences, token_ids, strict=True):
        if token < 0:
            raise OptionError("NaN in the logits: the weights may be damaged, get them again")
        seq.num_launched_tokens = len(seq.token_ids)
        seq.token_ids.append(token)


def time_prefill(runner: ModelRunner, tokens: int, steps: int) -> dict[str, Any]:
    """Median prefill of one prompt in one step, and its floating-point operations."""
    config = runner.config
    step = admit(1, tokens, 1, config)  # never booked, so that it can run again
    seconds = median_seconds(lambda: runner.run(step), steps)
    embeddings = config.vocab_size * config.hidden_size
    matrices = config.num_parameters - embeddings * (1 if config.tie_word_embeddings else 2)
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * tokens * (tokens + 1)  # causal
    return {
        "name": f"prefill, {tokens} tokens",
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "flops": 2 * matrices * tokens + attention + 2 * embeddings,  # one row meets the LM head
    }


def make_runner(args: argparse.Namespace, config: ModelConfig) -> ModelRunner:
    """With pages for the largest case."""
    engine_config = EngineConfig(
        device=args.device,
        kv_cache_mib="auto",  # no bound on the context
        max_model_len=max(args.prefill, PROMPT_TOKENS) + WARM_UP + args.steps + 1,
        max_batched_tokens=max(args.prefill, PROMPT_TOKENS),
        max_num_seqs=max(args.batches),
    )
    backend = select_backend(engine_config, config)
    new_tokens = WARM_UP + args.steps + 1
    cases = [admit(max(args.batches), PROMPT_TOKENS, new_tokens, config), admit(1, args.prefill, 1, config)]
    pages = [[page_ids for _, page_ids in case.admitted] for case in cases]
    return ModelRunner(
        backend,
        config,
        open_weights(args.model_dir, config),
        num_pages=max(sum(p.size for p in case) for case in pages),
        max_num_seqs=max(args.batches),
        max_pages_per_seq=max(p.shape[1] for case in pages for p in case),
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    config = ModelConfig.from_dir(args.model_dir)
    new_tokens = WARM_UP + args.steps + 1
    if min(args.batches) < 1 or args.steps < 1 or args.prefill < 1:
        raise OptionError("--batches, --steps and --prefill must be 1 or more")
    if max(args.prefill, PROMPT_TOKENS) + new_tokens > config.max_position_embeddings:
        raise OptionError(f"the model's context of {config.max_position_embeddings} tokens is too short")
    runner = make_runner(args, config)
    with runner.backend.active():
        rate = copy_rate(runner.backend)
    rows = [time_decode(runner, batch, args.steps) for batch in args.batches]
    for row in rows:
        row["floor_seconds"] = row["bytes"] / rate
    prefill = time_prefill(runner, args.prefill, args.steps)
    return {
        "model": str(args.model_dir),
        "backend": runner.backend.name,
        "copy_bytes_per_second": rate,
        "rows": [*rows, prefill],
    }


def table_of(report: dict[str, Any]) -> Table:
    """For people."""
    rate = report["copy_bytes_per_second"] / 1e9
    table = Table("step", "ms", "tokens/s", "floor or rate", "floor / measured", box=box.SIMPLE)
    table.title = f"{report['backend']}, {report['model']}; copy {rate:,.0f} GB/s"
    for row in report["rows"]:
        ms = 1e3 * row["seconds"]
        if "bytes" in row:
            floor = 1e3 * row["floor_seconds"]
            last = (f"{floor:.3f} ms ({row['bytes'] / 1e6:,.0f} MB)", f"{floor / ms:.0%}")
        else:
            last = (f"{row['flops'] / row['seconds'] / 1e12:,.1f} TFLOP/s", "")
        table.add_row(row["name"], f"{ms:.3f}", f"{row['tokens_per_second']:,.0f}", *last)
    return table


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 0, or 2 after a mistake of the user's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (%(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128], metavar="N")
    parser.add_argument("--prefill", type=int, default=2000, metavar="N", help="its tokens (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed for each (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    try:
        report = measure(args)
        if args.json is not None:
            args.json.write_text(json.dumps(report, indent=2) + "\n")
    except (SamirVllmError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console(highlight=False, width=100).print(table_of(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
