"""Times the choice of tokens on a GPU, beside argmax, what memory allows, and whole decode steps.

    python tools/time_sampling.py [--model DIR|NAME] [--batch 1,32,256] [--new 64] [--json FILE]

Whole steps: those of an engine, as in ``bench decode``, greedy and sampled; the median of rounds in which
the cases take turns. Kernels: random logits, each case replayed from a CUDA graph, so that the host's time
doesn't count; their floor is one reading of the logits. Knows the bench, and a GPU's backend.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

if __name__ == "__main__":  # run from a checkout that isn't installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from samir_vllm.engine import Engine
from samir_vllm.errors import OptionError, SamirVllmError
from samir_vllm.extras.bench.decode import generate, make_decode_engine
from samir_vllm.extras.bench.limits import Limits, measure_limits
from samir_vllm.extras.bench.model import add_model_arguments, check_context, open_model
from samir_vllm.extras.bench.report import number, numbers, print_notices, print_table, rate
from samir_vllm.extras.bench.timed_runner import runner_of
from samir_vllm.sampling import MAX_LOGPROBS, SamplingParams, TokenSampling

PROMPT_TOKENS = 128
ROUNDS = 5  # of decode steps
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
DECODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top_k 50, top_p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "with 5 log-probabilities": {"logprobs": 5},
}


def time_decodes(engine: Engine, batch: int, new_tokens: int) -> list[dict[str, Any]]:
    """Whole decode steps of a batch, seconds, in each of DECODES."""
    rounds: dict[str, list[float]] = {name: [] for name in DECODES}
    for turn in range(1 + ROUNDS):  # the host's speed drifts, so each case has its turn in each round
        for name, sampling in DECODES.items():
            seconds = statistics.median(generate(engine, batch, PROMPT_TOKENS, new_tokens, **sampling))
            if turn > 0:  # in the first, graphs are recorded
                rounds[name].append(seconds)
    return [
        {"name": name, "batch": batch, "seconds": statistics.median(seconds), "rounds": seconds}
        for name, seconds in rounds.items()
    ]


def time_kernels(backend: Any, batches: list[int], limits: Limits) -> list[dict[str, Any]]:
    """What chooses the tokens of each batch, seconds, in each of CASES; and log-probabilities."""
    from samir_vllm.backends import cuda_measure

    most, vocab_size = max(batches), backend.config.vocab_size
    rows: list[dict[str, Any]] = []

    def add(name: str, batch: int, run: Callable[[], object]) -> None:
        floor = 4 * batch * vocab_size / limits.read_bytes_per_second
        seconds = cuda_measure.graph_seconds(backend, [run])
        rows.append({"name": name, "batch": batch, "seconds": seconds, "floor_seconds": floor})

    with backend.active():
        ids = backend.from_numpy(np.zeros(most, np.int32))
        for deviation in (PEAKED, FLAT):
            random = np.random.default_rng(0).standard_normal((most, vocab_size), np.float32)
            logits = backend.from_numpy(random * np.float32(deviation))
            for (name, _, options), batch in product((c for c in CASES if c[1] == deviation), batches):
                inputs = begin_decode(backend, batch, SamplingParams(**options))
                add(name, batch, partial(backend.choose_tokens, logits[: len(inputs.logit_rows)], inputs))
            for count, batch in product((0, MAX_LOGPROBS) if deviation == PEAKED else (), batches):
                name = f"log-probabilities, {count} of the likeliest"
                add(name, batch, partial(backend.log_probs, logits[:batch], ids[:batch], count))
    return rows


def begin_decode(backend: Any, batch: int, params: SamplingParams) -> Any:
    """Inputs of a decode step of so many sequences that choose alike."""
    for slot in range(batch):
        backend.set_sampling(slot, TokenSampling(params, seed=slot), range(100))
    slots, places = np.arange(batch, dtype=np.int32), np.full(batch, PROMPT_TOKENS, np.int32)
    backend.set_decode_rows(slots, places, places)
    return backend.begin_decode(backend.decode_shape(PROMPT_TOKENS + 1))


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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    if not args.device.startswith("cuda"):
        raise OptionError(f"only a GPU has kernels, not --device {args.device}: leave it out, or say cuda:N")
    config, tensors = open_model(args)
    check_context(config, args.prompt + args.new)
    engine = make_decode_engine(args, config, tensors)
    print_notices(engine.notices)
    backend = runner_of(engine).backend
    limits = measure_limits(backend)
    decodes = [row for batch in args.batch for row in time_decodes(engine, batch, args.new)]
    kernels = time_kernels(backend, args.batch, limits)  # last: the runner doesn't know what they choose
    return {"limits": asdict(limits), "rows": kernels, "decodes": decodes}


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 0, or 2 after a mistake of the user's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_model_arguments(parser)
    parser.add_argument("--batch", type=numbers, default=[1, 32, 256], metavar="N[,N...]", help="(1,32,256)")
    parser.add_argument("--new", type=number, default=64, metavar="N", help="tokens of a round (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.set_defaults(device="cuda", prompt=PROMPT_TOKENS)
    args = parser.parse_args(argv)
    try:
        report = measure(args)
        if args.json is not None:
            args.json.write_text(json.dumps(report, indent=2) + "\n")
    except (SamirVllmError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    read = rate(report["limits"]["read_bytes_per_second"], "B/s")
    title = f"us on the device; in brackets one reading at {read}"
    print_table(table_of(title, report["rows"], args.batch, 1e6))
    print_table(table_of("ms, a whole decode step", report["decodes"], args.batch, 1e3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
