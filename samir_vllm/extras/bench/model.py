"""The model that is measured, and an engine around it: random weights of the Llama 3.2 1B shape, or a folder.

What a forward pass costs doesn't depend on what the weights say, so anybody can repeat a measurement without
a checkpoint. Knows no figure and no peer.
"""

from __future__ import annotations

import argparse
import gc
import math
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from samir_vllm.backends import select_backend
from samir_vllm.config import PAGE_SIZE, EngineConfig, ModelConfig, RopeScaling
from samir_vllm.engine import Engine
from samir_vllm.errors import OptionError, SamirVllmError
from samir_vllm.hub import resolve_model
from samir_vllm.model_runner import ModelRunner
from samir_vllm.outputs import StepOutput
from samir_vllm.tokenizer import StreamDecoder
from samir_vllm.weights import expected_tensors, open_weights

LLAMA_1B = ModelConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=128256,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
    tie_word_embeddings=True,
    bos_token_id=128000,
    eos_token_ids=(128001, 128008, 128009),
)
"""Llama 3.2 1B, as its ``config.json`` has it."""

DEVIATION = 0.02
"""Standard deviation of random matrices: that of Llama's own at the start of its training."""

BLOCK = (1 << 22) + 24
"""Random numbers that all matrices repeat; no multiple of any row's length, so that rows differ."""


class PieceTokenizer:
    """In place of a checkpoint's tokenizer: each id has bytes of its own, and decoding is the real one.

    Prompts must be token ids.
    """

    adds_bos = False

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._pieces = [f" {token_id:x}".encode() for token_id in range(vocab_size)]
        self._texts: dict[int, str] = {}

    def stream_decoder(self) -> StreamDecoder:
        """A decoder for one stream of tokens."""
        return StreamDecoder(self._pieces, self._texts)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured, and where."""
    parser.add_argument(
        "--model", metavar="DIR|NAME", help="as for generate (default: random weights of the 1B shape)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")


def open_model(args: argparse.Namespace) -> tuple[ModelConfig, Mapping[str, np.ndarray]]:
    """The model that ``add_model_arguments`` names: its config, and BF16 tensors by Hugging Face names.

    Raises:
        SamirVllmError: no such model, or a damaged one.
    """
    config = model_config(args)
    if args.model is None:
        return config, random_tensors(config)
    return config, open_weights(resolve_model(args.model), config)


def model_config(args: argparse.Namespace) -> ModelConfig:
    """The config alone; raises as ``open_model``."""
    return LLAMA_1B if args.model is None else ModelConfig.from_dir(resolve_model(args.model))


def model_name(args: argparse.Namespace) -> str:
    """For titles."""
    if args.model is None:
        return "random weights, Llama 3.2 1B shape"
    return resolve_model(args.model).resolve().name


def random_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    """BF16 arrays by Hugging Face names: norms are ones, matrices are drawn from N(0, DEVIATION^2).

    All matrices are views of one array, no larger than the largest of them, which repeats BLOCK numbers.
    """
    shapes = expected_tensors(config)
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    most = max(math.prod(shape) for shape in matrices.values())
    draws = np.random.default_rng(0).standard_normal(min(BLOCK, most), np.float32)
    numbers = np.resize((DEVIATION * draws).astype(ml_dtypes.bfloat16), most)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        if name in matrices:
            size = math.prod(shape)
            room = (most - size) // 8 + 1  # beginnings on 16 bytes, so that copies are plain ones
            start = 8 * (zlib.crc32(name.encode()) % room)
            tensors[name] = numbers[start : start + size].reshape(shape)
        else:
            tensors[name] = np.ones(shape, ml_dtypes.bfloat16)
    return tensors


def make_engine(
    args: argparse.Namespace,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    num_pages: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    max_pages_per_seq: int,
    runner_class: type[ModelRunner] = ModelRunner,
    batching: str = "continuous",
) -> Engine:
    """An engine on the device of ``add_model_arguments``; its ``notices`` are for the user.

    Args:
        args: parsed arguments.
        config: the model.
        tensors: its weights, from ``open_model``.
        num_pages: of the pool, over all layers.
        max_num_seqs: sequences that run together at most.
        max_batched_tokens: prompt tokens that one step prefills at most.
        max_pages_per_seq: of one layer.
        runner_class: to measure from within.
        batching: ``continuous`` or ``static``.

    Raises:
        SamirVllmError: the device can't be used, or lacks memory.
    """
    # Room for the last new token, whose K and V are never stored.
    longest = min(max_pages_per_seq * PAGE_SIZE + 1, config.max_position_embeddings)
    options = EngineConfig(
        device=args.device,
        kv_cache_mib="auto",  # the pool is ours
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        max_model_len=longest,
        batching=batching,
    )
    backend = select_backend(options, config)
    runner = runner_class(
        backend,
        config,
        tensors,
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        max_pages_per_seq=max_pages_per_seq,
    )
    tokenizer: Any = PieceTokenizer(config.vocab_size)
    engine = Engine.from_parts(options, config, tokenizer, runner, num_pages=num_pages)
    engine.backend_name = backend.name
    engine.notices += backend.notices
    gc.freeze()  # as the command line does
    return engine


def check_outputs(outputs: Iterable[StepOutput]) -> None:
    """Raises SamirVllmError where a request has failed: its time means nothing."""
    for out in outputs:
        if out.completion is not None and out.completion.error is not None:
            raise SamirVllmError(f"a request failed: {out.completion.error}")


def pages_per_seq(tokens: int) -> int:
    """KV pages of each layer that a sequence of so many tokens, prompt and output, reserves."""
    return -(-(tokens - 1) // PAGE_SIZE) if tokens > 1 else 1


def check_context(config: ModelConfig, tokens: int) -> None:
    """Raises OptionError for a sequence, prompt and output, that the model can't hold."""
    most = config.max_position_embeddings
    if tokens > most:
        raise OptionError(f"a sequence of {tokens} tokens is longer than the model's context of {most}")


def random_prompt(config: ModelConfig, tokens: int, seed: int = 0) -> list[int]:
    """So many token ids."""
    ids: list[int] = np.random.default_rng(seed).integers(0, config.vocab_size, tokens).tolist()
    return ids
