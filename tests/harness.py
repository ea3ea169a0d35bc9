"""Drives the forward pass without an engine: packed chunks of tokens in, logits of every token out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from samir_vllm.backends.numpy_backend import NumpyBackend
from samir_vllm.batch import Batch
from samir_vllm.config import ModelConfig
from samir_vllm.llama import LlamaWeights, Observer, forward, load_weights
from samir_vllm.weights import open_weights

GOLDEN = Path(__file__).parent / "golden"
TINY = GOLDEN / "tiny-llama3"
SLOT_PAGES = (45, 8, 6, 6)
"""Pages of each layer that the four slots of the block tables have."""


@dataclass
class Model:
    config: ModelConfig
    backend: NumpyBackend
    weights: LlamaWeights


def make_model(model_dir: Path, *, round_bf16: bool, batch_invariant: bool = False) -> Model:
    config = ModelConfig.from_dir(model_dir)
    backend = NumpyBackend(config, round_bf16=round_bf16, batch_invariant=batch_invariant)
    model = Model(config, backend, load_weights(backend, config, open_weights(model_dir, config)))
    fresh_pages(model)
    return model


def fresh_pages(model: Model, seed: int = 0) -> None:
    """Pages full of NaN, handed to four slots in shuffled order: reading an unwritten place shows."""
    layers = model.config.num_layers
    num_pages = layers * sum(SLOT_PAGES)
    model.backend.allocate_kv_cache(num_pages, len(SLOT_PAGES), max(SLOT_PAGES) + 2)
    model.backend.kv_cache[...] = np.nan
    pages = np.random.default_rng(seed).permutation(num_pages).astype(np.int32)
    start = 0
    for slot, count in enumerate(SLOT_PAGES):
        model.backend.set_block_table(slot, pages[start : start + layers * count].reshape(layers, count))
        start += layers * count


@dataclass
class Chunk:
    """Tokens of one sequence in one step."""

    slot: int
    ids: np.ndarray
    start: int = 0
    positions: np.ndarray | None = None


def run(
    model: Model, chunks: list[Chunk], num_decodes: int = 0, observe: Observer | None = None
) -> np.ndarray:
    """Logits of every token of the packed chunks, [T, vocab_size]."""
    lens = [len(c.ids) for c in chunks]
    positions = [
        np.arange(c.start, c.start + len(c.ids)) if c.positions is None else c.positions for c in chunks
    ]
    batch = Batch(
        token_ids=np.concatenate([c.ids for c in chunks]).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        cu_seqlens_q=np.cumsum([0, *lens]).astype(np.int32),
        seq_lens=np.array([c.start + len(c.ids) for c in chunks], np.int32),
        slots=np.array([c.slot for c in chunks], np.int32),
        logit_rows=np.arange(sum(lens), dtype=np.int32),
        num_decodes=num_decodes,
    )
    return forward(model.backend, model.weights, model.backend.stage(batch), observe)
