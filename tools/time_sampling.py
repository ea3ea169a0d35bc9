"""Times the choice of tokens on a GPU, beside argmax, what memory allows, and a decode step.

    python tools/time_sampling.py [MODEL_DIR] [--batches 1 32 256] [--vocab 128256] [--json FILE]

Kernels: random logits, each case captured in a CUDA graph, so that the host's time doesn't count; the median
of several launches. The floor is one reading of the logits at the bandwidth of a large copy of the same run.
With MODEL_DIR also whole decode steps of the model runner, greedy and sampled. Knows the backend and the
runner; no scheduler and no text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":  # run from a checkout that isn't installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from time_forward import PROMPT_TOKENS, copy_rate, make_runner, time_decode

from samir_vllm.batch import Batch
from samir_vllm.config import ModelConfig
from samir_vllm.errors import SamirVllmError
from samir_vllm.sampling import MAX_LOGPROBS, SamplingParams, TokenSampling

REPEATS, LAUNCHES = 20, 9  # of a case in a graph, of a graph
ROUNDS = 9  # of decode steps
PEAKED, FLAT = 2.5, 0.5
"""Standard deviations of random logits: an answer's, and a model's of random weights."""

CASES: list[tuple[str, float, dict[str, Any]]] = [
    ("argmax", PEAKED, {}),
    ("temperature", PEAKED, {"temperature": 1.0}),
    ("top_k 50, top_p 0.9", PEAKED, {"temperature": 1.0, "top_k": 50, "top_p": 0.9}),
    ("top_k 1000", PEAKED, {"temperature": 1.0, "top_k": 1000}),
    ("top_p 0.9 at temperature 0.6", PEAKED, {"temperature": 0.6, "top_p": 0.9}),
    ("top_p 0.9, nucleus of thousands", PEAKED, {"temperature": 1.0, "top_p": 0.9}),
    ("top_p 0.9, flat", FLAT, {"temperature": 1.0, "top_p": 0.9}),
    ("top_k 5000, flat", FLAT, {"temperature": 1.0, "top_k": 5000}),
    ("min_p 0.05", PEAKED, {"temperature": 1.0, "min_p": 0.05}),
    ("penalties, greedy", PEAKED, {"repetition_penalty": 1.1, "frequency_penalty": 0.5}),
]
DECODES = {
    "greedy": None,
    "top_k 50, top_p 0.9": SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
    "top_p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "with 5 log-probabilities": SamplingParams(logprobs=5),
}


def make_batch(rows: int) -> Batch:
    """A decode step of ``rows`` sequences in slots of their own."""
    each = np.arange(rows, dtype=np.int32)
    return Batch(
        token_ids=each,
        positions=np.full(rows, PROMPT_TOKENS, np.int32),
        cu_seqlens_q=np.arange(rows + 1, dtype=np.int32),
        seq_lens=np.ones(rows, np.int32),
        slots=each,
        logit_rows=each,
        logit_slots=each,
        num_outputs=np.ones(rows, np.int32),
        num_decodes=rows,
    )


def graph_seconds(backend: Any, run: Callable[[], object]) -> float:
    """One ``run`` on the device: the median launch of a graph of several, over their number."""
    import cupy

    run()  # whatever happens only once
    backend.stream.synchronize()
    backend.stream.begin_capture()
    for _ in range(REPEATS):
        run()
    graph = backend.stream.end_capture()
    times = []
    for _ in range(2 + LAUNCHES):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(backend.stream)
        graph.launch(backend.stream)
        end.record(backend.stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return statistics.median(times[2:]) / REPEATS


def time_kernels(vocab_size: int, batches: list[int]) -> dict[str, Any]:
    """Every case at every batch size, seconds, beside one reading of the logits."""
    from samir_vllm.backends.cuda_backend import CudaBackend

    config = ModelConfig(
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        vocab_size=vocab_size,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
    )
    most = max(batches)
    backend = CudaBackend(config, max_tokens=most, max_num_seqs=most)
    rng, rows = np.random.default_rng(0), []
    with backend.active():
        backend.allocate_kv_cache(most, most, 1)
        rate = copy_rate(backend)
        for deviation in (PEAKED, FLAT):
            host = rng.standard_normal((most, vocab_size), np.float32) * np.float32(deviation)
            logits = backend.from_numpy(host)
            for name, of, options in CASES:
                if of == deviation:
                    rows += [_time_case(backend, logits[:batch], name, options) for batch in batches]
            for count in (0, MAX_LOGPROBS) if deviation == PEAKED else ():
                rows += [_time_log_probs(backend, logits[:batch], count) for batch in batches]
    for row in rows:
        # A copy reads and writes: its rate counts both.
        row["floor_seconds"] = row["batch"] * vocab_size * 4 / rate
    return {"copy_bytes_per_second": rate, "rows": rows}


def _time_case(backend: Any, logits: Any, name: str, options: dict[str, Any]) -> dict[str, Any]:
    batch = len(logits)
    for slot in range(batch):
        backend.set_sampling(slot, TokenSampling(SamplingParams(**options), seed=slot), range(100))
    inputs = backend.stage(make_batch(batch))
    seconds = graph_seconds(backend, lambda: backend.choose_tokens(logits, inputs))
    return {"name": name, "batch": batch, "seconds": seconds}


def _time_log_probs(backend: Any, logits: Any, count: int) -> dict[str, Any]:
    ids = backend.from_numpy(np.zeros(len(logits), np.int32))
    seconds = graph_seconds(backend, lambda: backend.log_probs(logits, ids, count))
    return {"name": f"log-probabilities, {count} of the likeliest", "batch": len(logits), "seconds": seconds}


def time_decodes(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Whole decode steps, seconds, greedy and sampled: the median of rounds that take turns."""
    runner = make_runner(args, ModelConfig.from_dir(args.model_dir))
    found = []
    for batch in args.batches:
        rounds: dict[str, list[float]] = {name: [] for name in DECODES}
        for _ in range(ROUNDS):  # the host's speed drifts, so each case has its turn in each round
            for name, params in DECODES.items():
                sampling = None if params is None else TokenSampling(params, seed=1)
                rounds[name].append(time_decode(runner, batch, args.steps, sampling)["seconds"])
        found += [
            {"name": name, "batch": batch, "seconds": statistics.median(seconds), "rounds": seconds}
            for name, seconds in rounds.items()
        ]
    return found


def table_of(title: str, rows: list[dict[str, Any]], batches: list[int], unit: float) -> Table:
    """A row for each case, a column for each batch size; with floors, the ratio to them."""
    table = Table(title, *(f"batch {batch}" for batch in batches), box=box.SIMPLE)
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = []
        for row in (r for r in rows if r["name"] == name):
            ratio = f" ({row['floor_seconds'] / row['seconds']:.0%})" if "floor_seconds" in row else ""
            cells.append(f"{row['seconds'] * unit:,.2f}{ratio}")
        table.add_row(name, *cells)
    return table


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 0, or 2 after a mistake of the user's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model_dir", type=Path, nargs="?")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256], metavar="N")
    parser.add_argument("--vocab", type=int, default=128_256, metavar="N", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="decode steps timed (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    args.device, args.prefill = "cuda", PROMPT_TOKENS
    console = Console(highlight=False, width=110)
    try:
        report = time_kernels(args.vocab, args.batches)
        rate = report["copy_bytes_per_second"] / 1e9
        title = f"us on the device; in brackets one reading at the {rate:,.0f} GB/s of a copy"
        console.print(table_of(title, report["rows"], args.batches, 1e6))
        if args.model_dir is not None:
            report["decodes"] = time_decodes(args)
            console.print(table_of("ms, a whole decode step", report["decodes"], args.batches, 1e3))
        if args.json is not None:
            args.json.write_text(json.dumps(report, indent=2) + "\n")
    except (SamirVllmError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
