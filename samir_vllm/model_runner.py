"""Owns the weights and the KV cache, and turns a scheduled step into token ids.

Knows the backend only by its protocol, and nothing of text or of who waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from samir_vllm.backends import Backend
from samir_vllm.batch import build_batch
from samir_vllm.config import ModelConfig
from samir_vllm.llama import forward, gemm_shapes, load_weights
from samir_vllm.sequence import ScheduledStep
from samir_vllm.timing import StartupTimes


class ModelRunner:
    """One model on one backend."""

    def __init__(
        self,
        backend: Backend,
        config: ModelConfig,
        tensors: Mapping[str, np.ndarray],
        *,
        num_pages: int,
        max_num_seqs: int,
        max_pages_per_seq: int,
        progress: Callable[[int], None] = lambda done: None,
        times: StartupTimes | None = None,
    ) -> None:
        """Load the weights and make the pages.

        Args:
            backend: where everything runs.
            config: the model.
            tensors: BF16 arrays by their Hugging Face names.
            num_pages: physical pages, over all layers.
            max_num_seqs: rows of the block tables.
            max_pages_per_seq: their width.
            progress: called with the number of layers loaded.
            times: where the stages of the start are booked.
        """
        self.backend = backend
        self.config = config
        times = times or StartupTimes()
        with backend.active():
            # Pages first: where memory doesn't suffice it shows before the long part.
            with times.stage("KV pages"):
                backend.allocate_kv_cache(num_pages, max_num_seqs, max_pages_per_seq)
            with times.stage("weights"):
                self.weights = load_weights(backend, config, tensors, progress)
            backend.check_gemm_order(gemm_shapes(self.weights))

    def run(self, step: ScheduledStep) -> list[int]:
        """One forward pass.

        Returns:
            A token id for each of ``step.sampled()``, in that order; -1 where the logits hold a NaN.
        """
        if step.is_empty:
            return []
        with self.backend.active():
            for seq, page_ids in step.admitted:
                self.backend.set_block_table(seq.slot, page_ids)
            inputs = self.backend.stage(build_batch(step))
            logits = forward(self.backend, self.weights, inputs)
            ids: list[int] = self.backend.to_numpy(self.backend.argmax(logits)).tolist()
        return ids
