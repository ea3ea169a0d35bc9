"""Compares our logits with those of Hugging Face transformers, in FP32 and in BF16, on one checkpoint.

    python tools/compare_transformers.py MODEL_DIR [--prompts 8] [--tokens 2000] [--device cuda] [--json FILE]

For random prompts (the shortest of one token, the longest of ``--tokens``) the last position's logits are
judged against transformers' FP32 run on the same BF16 weights; its own BF16 run is the peer. Passes if every
cosine is at least 0.9999 and our largest error over all prompts is not above the peer's. Exit status: 0
passed, 1 failed, 2 a mistake of the user's. Needs torch and transformers. Knows the backends by their
protocol.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

if __name__ == "__main__":  # run from a checkout that isn't installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from samir_vllm.backends import select_backend
from samir_vllm.backends.cuda_probe import free_unused_memory
from samir_vllm.batch import build_batch
from samir_vllm.config import EngineConfig, ModelConfig
from samir_vllm.errors import OptionError, SamirVllmError
from samir_vllm.llama import forward
from samir_vllm.model_runner import ModelRunner
from samir_vllm.sequence import ScheduledStep, Sequence
from samir_vllm.weights import open_weights

MIN_COSINE = 0.9999


class Row(NamedTuple):
    """One prompt: our logits and the peer's against the reference's."""

    length: int
    cosine: float
    error: float
    peer_error: float
    same_argmax: bool


def make_prompts(count: int, longest: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids; lengths 1, ``longest``, and random ones between, in ascending order."""
    rng = np.random.default_rng(seed)
    between = rng.integers(1, longest + 1, max(0, count - 2)).tolist()
    lengths = sorted([1, longest, *between])[-count:]
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]


def our_logits(
    model_dir: Path, config: ModelConfig, prompts: list[list[int]], device: str
) -> list[np.ndarray]:
    """FP32 [vocab_size] of each prompt's last position, each prefilled alone in one step."""
    longest = max(map(len, prompts))
    engine_config = EngineConfig(
        device=device,
        kv_cache_mib="auto",  # no bound on the context
        max_batched_tokens=longest,
        max_model_len=longest,
    )
    backend = select_backend(engine_config, config)
    sequences = [Sequence(str(i), ids, max_tokens=1) for i, ids in enumerate(prompts)]
    pages = max(seq.pages_per_layer for seq in sequences)
    page_ids = np.arange(config.num_layers * pages, dtype=np.int32).reshape(config.num_layers, pages)
    runner = ModelRunner(
        backend,
        config,
        open_weights(model_dir, config),
        num_pages=page_ids.size,
        max_num_seqs=1,
        max_pages_per_seq=pages,
    )
    logits = []
    with backend.active():
        backend.set_block_table(0, page_ids)
        for seq in sequences:
            seq.slot = 0
            step = ScheduledStep([], [(seq, len(seq.token_ids))], [])
            out = forward(backend, runner.weights, backend.stage(build_batch(step)))
            logits.append(backend.to_numpy(out)[-1])
    return logits


def transformers_logits(
    model_dir: Path, prompts: list[list[int]], dtype: str, device: str
) -> list[np.ndarray]:
    """The same from LlamaForCausalLM in ``float32`` or ``bfloat16``."""
    import torch
    from transformers import LlamaForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    # The dtype is given at loading: a later .to(dtype) would round the RoPE frequencies too.
    model: Any = LlamaForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True
    )
    model = model.to(device).eval()
    logits = []
    with torch.inference_mode():
        for ids in prompts:
            out = model(torch.tensor([ids], device=device), use_cache=False, logits_to_keep=1).logits
            logits.append(out[0, -1].float().cpu().numpy())
    return logits


def judge(ours: np.ndarray, peer: np.ndarray, reference: np.ndarray, length: int) -> Row:
    """Figures of one prompt; all FP32 [vocab_size]."""
    a, b = ours.astype(np.float64), reference.astype(np.float64)
    cosine = float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
    error, peer_error = (float(np.abs(x - b).max()) for x in (a, peer))
    return Row(length, cosine, error, peer_error, int(a.argmax()) == int(b.argmax()))


def passes(rows: list[Row]) -> bool:
    """The whole verdict; a NaN anywhere fails."""
    close = all(row.cosine >= MIN_COSINE for row in rows)
    return close and bool(np.max([row.error for row in rows]) <= np.max([row.peer_error for row in rows]))


def report(rows: list[Row]) -> None:
    """One line a prompt, and the verdict."""
    print(f"{'tokens':>6} {'cosine':>10} {'max |error|':>12} {'transformers BF16':>18}  argmax")
    for row in rows:
        same = "equal" if row.same_argmax else "differs"
        print(f"{row.length:6} {row.cosine:10.7f} {row.error:12.5f} {row.peer_error:18.5f}  {same}")
    lowest = min(row.cosine for row in rows)
    ours, peer = max(row.error for row in rows), max(row.peer_error for row in rows)
    print(
        f"{'PASS' if passes(rows) else 'FAIL'}: lowest cosine {lowest:.7f} (at least {MIN_COSINE}), "
        f"largest error {ours:.5f} (at most transformers' {peer:.5f})"
    )


def check_arguments(args: argparse.Namespace, config: ModelConfig) -> None:
    """``OptionError`` for what can't be run."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise OptionError(f"{name} is not installed: pip install torch transformers")
    if args.prompts < 1 or not 1 <= args.tokens <= config.max_position_embeddings:
        raise OptionError(f"give at least one prompt, of 1 to {config.max_position_embeddings} tokens")


def main(argv: list[str] | None = None) -> int:
    """Compare and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="how many (%(default)s)")
    parser.add_argument("--tokens", type=int, default=2000, metavar="N", help="the longest (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda", help="for both: cuda, cuda:N, cpu (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    try:
        config = ModelConfig.from_dir(args.model_dir)
        check_arguments(args, config)
        prompts = make_prompts(args.prompts, args.tokens, config.vocab_size, args.seed)
        # Ours first: torch brings a cuBLAS of its own, and the one loaded first counts.
        ours = our_logits(args.model_dir, config, prompts, args.device)
        free_unused_memory()  # torch has an allocator of its own
        reference, peer = (
            transformers_logits(args.model_dir, prompts, dtype, args.device)
            for dtype in ("float32", "bfloat16")
        )
        rows = [judge(*x) for x in zip(ours, peer, reference, map(len, prompts), strict=True)]
        report(rows)
        if args.json is not None:
            args.json.write_text(
                json.dumps({"passed": passes(rows), "rows": [row._asdict() for row in rows]}, indent=2) + "\n"
            )
    except (SamirVllmError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if passes(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
