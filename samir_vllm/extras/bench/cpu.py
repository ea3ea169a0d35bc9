"""``bench cpu``: the NumPy backend beside this machine's limits, measured in the same run.

Decoding at batch 1 must read every FP32 weight once a token, so its floor is those bytes over the best read
bandwidth. Encoding is timed beside tiktoken where that is installed. Knows the engine by its public names,
and the runner for the weights' sizes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pydoc_data import topics
from typing import Any

from rich.table import Table

from samir_vllm.engine import Engine
from samir_vllm.errors import OptionError
from samir_vllm.extras.bench.limits import host_read_rates, weight_bytes
from samir_vllm.extras.bench.report import number, print_table
from samir_vllm.sampling import SamplingParams
from samir_vllm.tokenizer import GPT2_SPLIT, LLAMA3_SPLIT, Tokenizer, load_tokenizer

TEXT_BYTES = 2**20
PROMPT_TOKENS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--model", metavar="DIR|NAME", help="as for generate")
    parser.add_argument(
        "--new", type=number, default=64, metavar="N", help="tokens decoded in a run (%(default)s)"
    )
    parser.add_argument(
        "--runs",
        type=number,
        default=5,
        metavar="N",
        help="runs of limit and decode; the median counts (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    if args.new < 2:
        raise OptionError("--new must be 2 or more: the first token comes with the prompt")
    started = time.perf_counter()
    engine = Engine(args.model, device="cpu")
    load_seconds = time.perf_counter() - started
    token_bytes = weight_bytes(engine._runner.weights)  # type: ignore[attr-defined]
    # Limit and measurement alternate, so that both meet the same neighbours on a shared machine.
    pairs = []
    for _ in range(args.runs):
        rulers = host_read_rates(engine.model_config.hidden_size)
        pairs.append((rulers, decode_seconds(engine, args.new)))
    rulers = {name: statistics.median(r[name] for r, _ in pairs) for name in pairs[0][0]}
    shares = [token_bytes / seconds / max(r.values()) for r, seconds in pairs]
    seconds = statistics.median(seconds for _, seconds in pairs)
    report: dict[str, Any] = {
        "model": str(engine.model_dir),
        "load_seconds": load_seconds,
        "weight_bytes": token_bytes,
        "read_bandwidth": rulers,
        "decode_seconds_per_token": seconds,
        "decode_tokens_per_second": 1 / seconds,
        "decode_share_of_limit": statistics.median(shares),
        "decode_shares": shares,
        "encode": encode_report(engine),
    }
    if args.json:
        print(json.dumps(report))
    else:
        print_table(_table(report))
    return 0


def decode_seconds(engine: Engine, new_tokens: int) -> float:
    """Median seconds of a decode step at batch 1."""
    steps: list[float] = []
    engine.on_step = lambda rec: steps.append(rec.ended - rec.started) if rec.decodes else None
    engine.generate(
        list(range(100, 100 + PROMPT_TOKENS)), SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    )
    engine.on_step = None
    return statistics.median(steps)


def sample_text() -> str:
    """A megabyte of English and code that every Python carries: the language reference's help topics."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    while len(text.encode()) < TEXT_BYTES:
        text += text
    return text.encode()[:TEXT_BYTES].decode(errors="ignore")


def encode_report(engine: Engine) -> dict[str, Any]:
    """Seconds to encode a megabyte, with a fresh cache, and tiktoken's on the same vocabulary."""
    text = sample_text()
    tokenizer = load_tokenizer(engine.model_dir)
    seconds, tokens = _timed_encode(tokenizer.encode, text)
    report: dict[str, Any] = {"seconds": seconds, "tokens": tokens}
    peer = _tiktoken_peer(tokenizer)
    if peer is not None:
        peer_seconds, peer_tokens = _timed_encode(peer.encode_ordinary, text)
        report |= {"tiktoken_seconds": peer_seconds, "tiktoken_tokens": peer_tokens}
    return report


def _timed_encode(encode: Callable[[str], list[int]], text: str) -> tuple[float, int]:
    start = time.perf_counter()
    ids = encode(text)
    return time.perf_counter() - start, len(ids)


def _tiktoken_peer(tokenizer: Tokenizer) -> Any:
    """tiktoken over the same tokens; ids serve as ranks, which holds for Llama 3 and the demo model."""
    try:
        import tiktoken
    except ImportError:
        return None
    ordinary = (i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i))
    ranks = {tokenizer.id_to_bytes(i): rank for rank, i in enumerate(ordinary)}
    llama3 = "<|start_header_id|>" in tokenizer.special_tokens
    return tiktoken.Encoding(
        "peer", pat_str=LLAMA3_SPLIT if llama3 else GPT2_SPLIT, mergeable_ranks=ranks, special_tokens={}
    )


def _table(report: dict[str, Any]) -> Table:
    table = Table(title=f"NumPy backend, {report['model']}")
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_column("limit or peer", justify="right")
    table.add_column("ratio", justify="right")
    table.add_row("load (tokenizer, weights to FP32)", f"{report['load_seconds']:.2f} s", "", "")
    for name, rate in report["read_bandwidth"].items():
        table.add_row(f"read bandwidth: {name}", f"{rate / 1e9:.1f} GB/s", "", "")
    best = max(report["read_bandwidth"].values())
    table.add_row(
        f"decode, batch 1: {report['weight_bytes'] / 1e6:.0f} MB a token",
        f"{report['decode_tokens_per_second']:.1f} tokens/s",
        f"{best / report['weight_bytes']:.1f} tokens/s",
        f"{report['decode_share_of_limit']:.0%}",
    )
    encode = report["encode"]
    peer = encode.get("tiktoken_seconds")
    table.add_row(
        f"encode 1 MiB of text, {encode['tokens']:,} tokens",
        f"{encode['seconds']:.2f} s",
        "tiktoken missing" if peer is None else f"{peer:.2f} s ({encode['tiktoken_tokens']:,} tokens)",
        "" if peer is None else f"{encode['seconds'] / peer:.1f}x",
    )
    return table
