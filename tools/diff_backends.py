"""Compares the CUDA backend with the NumPy backend on one checkpoint, buffer by buffer.

    python tools/diff_backends.py MODEL_DIR [--tokens 100 | --prompt TEXT] [--decode 4] [--lockstep]

A prompt (random ids, unless given) is prefilled in one step and some tokens are decoded; every operation
runs on both backends. By default each goes on with its own results, and errors add up as they do in use.
With ``--lockstep`` the other side gets the reference's input of every operation, which shows where an error
is born and not where it spreads. Exit status: 0 all within tolerance, 1 not (the first buffer is named),
2 a mistake of the user's. Knows the backends by their protocol and ``kv_cache``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":  # run from a checkout that isn't installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from samir_vllm.backends import Backend, select_backend
from samir_vllm.backends.numpy_backend import NumpyBackend
from samir_vllm.batch import build_batch
from samir_vllm.config import EngineConfig, ModelConfig
from samir_vllm.errors import OptionError, SamirVllmError
from samir_vllm.llama import forward, load_weights
from samir_vllm.sequence import ScheduledStep, Sequence
from samir_vllm.tokenizer import load_tokenizer
from samir_vllm.weights import open_weights

BF16 = np.dtype(ml_dtypes.bfloat16)
BF16_NAN = 0x7FC0  # in the uint16 arrays that hold BF16 on the GPU
ULP = 2.0**-7  # the spacing of BF16 numbers, relative to the power of two below them
SLOT = 1  # not 0, so that a slot taken for granted shows


@dataclass
class Both:
    """A value on the reference's side and on the other."""

    sides: list[Any]

    @property
    def logit_rows(self) -> Both:
        """Of the inputs of a step."""
        return Both([side.logit_rows for side in self.sides])


class TwoBackends:
    """Stands where a ``Backend`` is expected and makes every call on two; arrays are ``Both``."""

    def __init__(self, reference: Backend, other: Backend) -> None:
        self.sides: list[Any] = [reference, other]

    def __getattr__(self, name: str) -> Callable[..., Both]:
        def call(*args: Any) -> Both:
            return Both(
                [
                    getattr(backend, name)(*(a.sides[i] if isinstance(a, Both) else a for a in args))
                    for i, backend in enumerate(self.sides)
                ]
            )

        return call

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Uploads of both sides."""
        with ExitStack() as stack:
            for backend in self.sides:
                stack.enter_context(backend.uploading())
            yield

    def to_numpy(self, x: Both) -> list[np.ndarray]:
        """Host copies of both sides."""
        return [backend.to_numpy(side) for backend, side in zip(self.sides, x.sides, strict=True)]


class Errors(NamedTuple):
    """Relative errors, or their tolerances: in the Euclidean norm, and the largest of one element."""

    l2: float
    largest: float


class Row(NamedTuple):
    """One buffer in one step."""

    step: int  # 0 is the prefill
    layer_idx: int  # -1 outside the layers
    name: str
    errors: Errors
    tolerance: Errors

    @property
    def agrees(self) -> bool:
        """Both errors are within their tolerances."""
        return all(error <= most for error, most in zip(self.errors, self.tolerance, strict=True))


def relative_errors(want: np.ndarray, got: np.ndarray) -> Errors:
    """|got - want| / |want| in the Euclidean and in the maximum norm, of the worst row of [n, m] arrays.

    NaN on both sides (places of a page not written yet) is equal; on one side it is an infinite error.
    """
    same_nan = np.isnan(want) & np.isnan(got)
    want, got = np.where(same_nan, 0, want), np.where(same_nan, 0, got)
    error = np.nan_to_num(np.abs(got - want), nan=np.inf)

    def worst(norm: Callable[[np.ndarray], np.ndarray]) -> float:
        e, scale = norm(error), norm(np.nan_to_num(want))
        return float(np.max(np.divide(e, scale, out=np.where(e > 0, np.inf, 0.0), where=scale > 0)))

    return Errors(worst(lambda x: np.linalg.norm(x, axis=1)), worst(lambda x: np.abs(x).max(axis=1)))


def tolerance_of(name: str, layer_idx: int, num_layers: int, lockstep: bool) -> Errors:
    """What rounding alone may do to a buffer.

    Embedding copies. In lockstep, RoPE and the page write agree exactly too. Everything else sums in another
    order, so that some elements fall on the other side of a rounding (one ULP; measured for two NumPy
    backends with different orders and P rounded to BF16: 0.4 ULP in L2, 1.0 in one element). Running free,
    each layer adds independent errors of that kind, a random walk that grows with the square root of the
    depth; measured: up to 1.6 ULP x sqrt(depth) in L2, 7 in one element, where softmax or a massive
    activation amplifies them. A wrong page or mask is an error of about 1, which is 128 ULP.
    """
    if name == "embedding" or (lockstep and name in ("q", "kv")):
        return Errors(0, 0)
    if lockstep:
        return Errors(ULP, 2 * ULP)
    depth = num_layers if layer_idx < 0 else layer_idx + 1
    return Errors(4 * ULP * math.sqrt(depth), 16 * ULP * math.sqrt(depth))


def compare(
    reference: Backend,
    other: Backend,
    tensors: Mapping[str, np.ndarray],
    prompt_ids: list[int],
    *,
    decode: int,
    lockstep: bool,
) -> list[Row]:
    """Every buffer of a prefill and ``decode`` steps, in the order of execution.

    The tokens decoded are the reference's greedy ones, on both sides. In lockstep an error is that of the
    worst row (one wrong token among thousands shows); else of the whole buffer, because errors that add up
    over a deep model's layers may make single rows useless while both backends are right.
    """
    config = reference.config
    both = TwoBackends(reference, other)
    seq = Sequence("diff", prompt_ids, max_tokens=decode + 1)
    seq.slot = SLOT
    page_ids = make_pages(both, config, seq.pages_per_layer)
    rows: list[Row] = []

    def see(name: str, layer_idx: int, x: Both) -> None:
        add_row(name, layer_idx, *both.to_numpy(x))
        if name == "q":  # and K and V, which went to their pages in the same operation
            first, last = page_ids[layer_idx].min(), page_ids[layer_idx].max()
            add_row("kv", layer_idx, *(b.to_numpy(b.kv_cache[first : last + 1]) for b in both.sides))
        if lockstep and name != "logits":
            x.sides[1] = other.from_numpy(reference.to_numpy(x.sides[0]).astype(BF16))

    def add_row(name: str, layer_idx: int, want: np.ndarray, got: np.ndarray) -> None:
        shape = (-1, want.shape[-1]) if lockstep else (1, -1)
        errors = relative_errors(want.reshape(shape), got.reshape(shape))
        tolerance = tolerance_of(name, layer_idx, config.num_layers, lockstep)
        rows.append(Row(seq.num_output_tokens, layer_idx, name, errors, tolerance))

    weights = load_weights(cast(Backend, both), config, tensors)
    step = ScheduledStep([], [(seq, len(prompt_ids))], [])
    for _ in range(decode + 1):
        inputs = both.stage(build_batch(step))
        logits = forward(cast(Backend, both), weights, inputs, see)
        seq.num_launched_tokens = len(seq.token_ids)
        seq.token_ids.append(int(reference.argmax(logits.sides[0])[-1]))
        step = ScheduledStep([seq], [], [])
    return rows


def make_pages(both: TwoBackends, config: ModelConfig, pages_per_layer: int) -> np.ndarray:
    """Pages full of NaN, so that an over-read is loud; int32 [num_layers, pages_per_layer].

    A layer's pages lie together, shuffled.
    """
    rng = np.random.default_rng(0)
    page_ids = np.arange(config.num_layers * pages_per_layer, dtype=np.int32).reshape(config.num_layers, -1)
    page_ids = rng.permuted(page_ids, axis=1)
    both.allocate_kv_cache(page_ids.size, SLOT + 1, pages_per_layer)
    for backend in both.sides:
        backend.kv_cache[...] = BF16_NAN if backend.kv_cache.dtype == np.uint16 else np.nan
    both.set_block_table(SLOT, page_ids)
    return page_ids


def show(errors: Errors) -> str:
    """``L2 / largest``."""
    return f"{errors.l2:.1e} / {errors.largest:.1e}"


def report(rows: list[Row], console: Console) -> bool:
    """Print the table, and the first buffer over its tolerance; tells whether all agree."""
    table = Table("layer", "buffer", "prefill", "decode, worst", "tolerance", "", box=box.SIMPLE)
    table.title = "relative errors: L2 / largest element"
    by_buffer: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        by_buffer.setdefault((row.layer_idx, row.name), []).append(row)
    for (layer_idx, name), (prefill, *decodes) in by_buffer.items():
        worst = Errors(*map(max, zip(*(row.errors for row in decodes), strict=True))) if decodes else None
        agrees = all(row.agrees for row in (prefill, *decodes))
        layer = "" if layer_idx < 0 else str(layer_idx)
        cells = (show(prefill.errors), show(worst) if worst else "", show(prefill.tolerance))
        table.add_row(layer, name, *cells, "" if agrees else "OVER")
    console.print(table)
    first = next((row for row in rows if not row.agrees), None)
    if first is None:
        console.print(f"all {len(rows)} buffers within their tolerances")
        return True
    step = f"decode step {first.step}" if first.step else "prefill"
    layer = f"layer {first.layer_idx}, " if first.layer_idx >= 0 else ""
    errors = f"{show(first.errors)}, tolerance {show(first.tolerance)}"
    console.print(f"first over its tolerance: {step}, {layer}{first.name}: {errors}")
    return False


def prompt_of(args: argparse.Namespace, config: ModelConfig) -> list[int]:
    """Token ids of ``--prompt``, or ``--tokens`` random ones; ``OptionError`` if they can't be run."""
    if args.prompt is not None:
        tokenizer = load_tokenizer(args.model_dir)
        ids = tokenizer.encode(args.prompt, add_bos=tokenizer.adds_bos)
    else:
        ids = np.random.default_rng(args.seed).integers(0, config.vocab_size, max(args.tokens, 0)).tolist()
    if not ids or args.decode < 0 or len(ids) + args.decode > config.max_position_embeddings:
        raise OptionError(
            f"{len(ids)} prompt tokens and {args.decode} decode steps can't be run: give at least one token, "
            f"and {config.max_position_embeddings} in all at most"
        )
    return ids


def main(argv: list[str] | None = None) -> int:
    """Compare and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--tokens", type=int, default=100, help="random prompt tokens (%(default)s)")
    parser.add_argument("--prompt", help="text, in place of random tokens")
    parser.add_argument("--decode", type=int, default=4, help="decode steps after the prefill (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lockstep", action="store_true", help="feed every operation the reference's input")
    parser.add_argument("--device", default="cuda", help="the other side: cuda, cuda:N, cpu (%(default)s)")
    args = parser.parse_args(argv)
    try:
        config = ModelConfig.from_dir(args.model_dir)
        ids = prompt_of(args, config)
        tensors = open_weights(args.model_dir, config)
        engine_config = EngineConfig(
            device=args.device,
            kv_cache_mib="auto",  # no bound on the context
            max_batched_tokens=len(ids),
            max_model_len=len(ids) + args.decode,
        )
        other = select_backend(engine_config, config)
        with other.active():
            rows = compare(
                NumpyBackend(config), other, tensors, ids, decode=args.decode, lockstep=args.lockstep
            )
    except (SamirVllmError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if report(rows, Console(highlight=False, width=100)) else 1


if __name__ == "__main__":
    sys.exit(main())
