"""Drives the forward pass without an engine: packed chunks in, logits of every token out.

Makes engines on the golden model. Loads tools.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fake_model import ByteTokenizer
from samir_vllm import Engine, EngineConfig
from samir_vllm.backends import Backend
from samir_vllm.backends.numpy_backend import NumpyBackend
from samir_vllm.batch import Batch
from samir_vllm.config import ModelConfig
from samir_vllm.llama import LlamaWeights, Observer, forward, gemm_shapes, load_weights
from samir_vllm.model_runner import ModelRunner
from samir_vllm.weights import open_weights

GOLDEN = Path(__file__).parent / "golden"
TINY = GOLDEN / "tiny-llama3"
SLOT_PAGES = (45, 8, 6, 6)
"""Pages of each layer that the four slots of the block tables have."""


def load_tool(name: str) -> ModuleType:
    """``tools/<name>.py`` as a module."""
    path = Path(__file__).parents[1] / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@dataclass
class Model:
    config: ModelConfig
    backend: Any  # a Backend, and what tests look at beyond the protocol: its kv_cache
    weights: LlamaWeights


def make_model(model_dir: Path, *, round_bf16: bool, batch_invariant: bool = False) -> Model:
    config = ModelConfig.from_dir(model_dir)
    backend = NumpyBackend(config, round_bf16=round_bf16, batch_invariant=batch_invariant)
    return _load(model_dir, config, backend)


def make_cuda_model(
    model_dir: Path,
    *,
    max_tokens: int = 1024,
    max_positions: int | None = None,
    batch_invariant: bool = False,
) -> Model:
    """The model on the first GPU; up to ``max_tokens`` tokens a step, every one with its logits."""
    from samir_vllm.backends.cuda_backend import CudaBackend  # only here: it imports CuPy

    config = ModelConfig.from_dir(model_dir)
    backend = CudaBackend(
        config,
        max_tokens=max_tokens,
        max_num_seqs=len(SLOT_PAGES),
        max_logit_rows=max_tokens,
        max_positions=max_positions,
        batch_invariant=batch_invariant,
    )
    return _load(model_dir, config, backend)


def _load(model_dir: Path, config: ModelConfig, backend: Backend) -> Model:
    with backend.active():
        weights = load_weights(backend, config, open_weights(model_dir, config))
        backend.check_gemm_order(gemm_shapes(weights))
    model = Model(config, backend, weights)
    fresh_pages(model)
    return model


def fresh_pages(model: Model, seed: int = 0) -> None:
    """Pages full of NaN, handed to four slots in shuffled order: reading an unwritten place shows."""
    layers, backend = model.config.num_layers, model.backend
    num_pages = layers * sum(SLOT_PAGES)
    pages = np.random.default_rng(seed).permutation(num_pages).astype(np.int32)
    with backend.active():
        backend.allocate_kv_cache(num_pages, len(SLOT_PAGES), max(SLOT_PAGES) + 2)
        if backend.kv_cache.dtype == np.uint16:  # the bits of BF16, on a device
            backend.kv_cache.data.memset_async(0xFF, backend.kv_cache.nbytes, backend.stream)
        else:
            backend.kv_cache[...] = np.nan
        start = 0
        for slot, count in enumerate(SLOT_PAGES):
            backend.set_block_table(slot, pages[start : start + layers * count].reshape(layers, count))
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
    """Logits of every token of the packed chunks, [T, vocab_size].

    ``observe`` sees the backend's own arrays, and must copy (``backend.to_numpy``) what it keeps.
    """
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
        logit_slots=np.repeat([c.slot for c in chunks], lens).astype(np.int32),
        num_outputs=np.zeros(sum(lens), np.int32),
        num_decodes=num_decodes,
    )
    backend = model.backend
    with backend.active():
        logits = forward(backend, model.weights, backend.stage(batch), observe)
        return backend.to_numpy(logits)


class RecordingBackend(NumpyBackend):
    """Keeps the raw logits of every call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.raw: list[np.ndarray] = []

    def logits(self, *args: Any) -> np.ndarray:
        found = super().logits(*args)
        self.raw.append(found.copy())
        return found


def make_tiny_engine(
    *,
    num_pages: int = 3 * 24,
    backend_class: type[NumpyBackend] = NumpyBackend,
    runner_class: type[ModelRunner] = ModelRunner,
    batch_invariant: bool = True,
    eos_token_ids: tuple[int, ...] | None = None,
    **options: object,
) -> Engine:
    """An engine on the golden model in FP32; a token is a byte; ``options`` are those of ``EngineConfig``.

    ``batch_invariant``: logits are the same bits in any company. Pages are full of NaN: an over-read is loud.
    """
    model_config = ModelConfig.from_dir(TINY)
    if eos_token_ids is not None:
        model_config = replace(model_config, eos_token_ids=eos_token_ids)
    config = EngineConfig.from_options(**options)
    backend = backend_class(model_config, round_bf16=False, batch_invariant=batch_invariant)
    runner = runner_class(
        backend,
        model_config,
        open_weights(TINY, model_config),
        num_pages=num_pages,
        max_num_seqs=config.max_num_seqs,
        max_pages_per_seq=num_pages // model_config.num_layers,
    )
    backend.kv_cache[...] = np.nan
    tokenizer: Any = ByteTokenizer()
    return Engine.from_parts(config, model_config, tokenizer, runner, num_pages=num_pages)
