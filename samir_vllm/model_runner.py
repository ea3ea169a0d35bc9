"""Owns the weights and the KV cache, and turns a scheduled step into token ids and log-probabilities.

Knows the backend only by its protocol, and nothing of text or of who waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from samir_vllm.backends import LOGPROB_ROWS, Array, Backend
from samir_vllm.batch import build_batch
from samir_vllm.config import NAN_TOKEN, ModelConfig
from samir_vllm.llama import gemm_shapes, hidden_states, load_weights
from samir_vllm.sequence import ScheduledStep, Sequence, StepResult, TokenLogprobs
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
        # A step must not ask each sequence what it wants: plain greedy ones would pay for it.
        self._sampling_slots: set[int] = set()  # where the backend has something to forget
        self._logprob_seqs: dict[int, Sequence] = {}  # by slot, those that want log-probabilities
        times = times or StartupTimes()
        with backend.active():
            # Pages first: where memory doesn't suffice it shows before the long part.
            with times.stage("KV pages"):
                backend.allocate_kv_cache(num_pages, max_num_seqs, max_pages_per_seq)
            with times.stage("weights"):
                self.weights = load_weights(backend, config, tensors, progress)
            backend.check_gemm_order(gemm_shapes(self.weights))

    def run(self, step: ScheduledStep) -> StepResult:
        """One forward pass."""
        if step.is_empty:
            return StepResult([])
        backend = self.backend
        with backend.active():
            if self._logprob_seqs:
                self._logprob_seqs = {i: s for i, s in self._logprob_seqs.items() if not s.is_finished}
            for seq, page_ids in step.admitted:
                backend.set_block_table(seq.slot, page_ids)
                self._set_sampling(seq)
            inputs = backend.stage(build_batch(step))
            x = hidden_states(backend, self.weights, inputs)  # [T, hidden]
            logits = self._logits(x, inputs.logit_rows)  # [L, vocab_size]
            chosen = backend.choose_tokens(logits, inputs)  # [L]
            result = StepResult(backend.to_numpy(chosen).tolist())
            if self._logprob_seqs:
                result.logprobs = self._logprobs(step, result.token_ids, logits, chosen, inputs)
                result.prompt_logprobs = self._prompt_logprobs(step, x)  # last: into the memory of `logits`
        return result

    def _set_sampling(self, seq: Sequence) -> None:
        """Tell the backend how the slot's new sequence chooses; it knows where all have been greedy."""
        slot, sampling = seq.slot, seq.sampling
        if sampling is not None and not sampling.is_argmax:
            self._sampling_slots.add(slot)
            self.backend.set_sampling(slot, sampling, seq.token_ids[: seq.num_prompt_tokens])
        elif slot in self._sampling_slots:
            self.backend.set_sampling(slot, None)
            self._sampling_slots.remove(slot)
        if sampling is not None and (sampling.params.logprobs is not None or _wants_prompt(seq)):
            self._logprob_seqs[slot] = seq

    def _logits(self, x: Array, rows: Array) -> Array:
        return self.backend.logits(x, self.weights.norm, self.weights.lm_head, rows)

    def _logprobs(
        self, step: ScheduledStep, token_ids: list[int], logits: Array, chosen: Array, inputs: Any
    ) -> list[TokenLogprobs | None] | None:
        """Of the chosen tokens, from the raw logits; None for NaN, and for those who don't want them."""
        wanted = [None if s.sampling is None else s.sampling.params.logprobs for s in step.sampled()]
        if all(count is None for count in wanted):
            return None
        backend = self.backend
        if not inputs.is_argmax:
            backend.restore_logits(logits, inputs)
        if NAN_TOKEN in token_ids:  # no row can be asked for it
            chosen = backend.from_numpy(np.maximum(np.array(token_ids, np.int32), 0))
        rows = self._log_probs(logits, chosen, max(count or 0 for count in wanted))
        return [
            None if count is None or token == NAN_TOKEN else rows.of(i, token, count)
            for i, (token, count) in enumerate(zip(token_ids, wanted, strict=True))
        ]

    def _prompt_logprobs(self, step: ScheduledStep, x: Array) -> list[tuple[Sequence, list[TokenLogprobs]]]:
        """Of the prompt tokens that follow those of each chunk, for the sequences that want them."""
        found = []
        row = len(step.decodes)
        for seq, chunk in step.prefills:
            if _wants_prompt(seq):
                found.append((seq, self._chunk_logprobs(x, row, seq, chunk)))
            row += chunk
        return found

    def _chunk_logprobs(self, x: Array, row: int, seq: Sequence, chunk: int) -> list[TokenLogprobs]:
        """Of a chunk whose first token is row ``row`` of ``x``; its last may predict none of the prompt."""
        assert seq.sampling is not None
        start = seq.num_computed_tokens
        targets = seq.token_ids[start + 1 : min(start + chunk + 1, seq.num_prompt_tokens)]
        found: list[TokenLogprobs] = []
        for i in range(0, len(targets), LOGPROB_ROWS):
            token_ids = targets[i : i + LOGPROB_ROWS]
            rows = np.arange(row + i, row + i + len(token_ids), dtype=np.int32)
            logits = self._logits(x, self.backend.from_numpy(rows))
            ids = self.backend.from_numpy(np.array(token_ids, np.int32))
            count = seq.sampling.params.prompt_logprobs or 0
            found_here = self._log_probs(logits, ids, count)
            found += [found_here.of(n, token, count) for n, token in enumerate(token_ids)]
        return found

    def _log_probs(self, logits: Array, ids: Array, count: int) -> _Rows:
        return _Rows(*map(self.backend.to_numpy, self.backend.log_probs(logits, ids, count)))


@dataclass(frozen=True, slots=True)
class _Rows:
    """``Backend.log_probs`` on the host."""

    own: np.ndarray  # FP32 [L]
    top_ids: np.ndarray  # int32 [L, count]
    top: np.ndarray  # FP32 [L, count]

    def of(self, row: int, token_id: int, count: int) -> TokenLogprobs:
        """One row's, with so many of the likeliest."""
        top = zip(self.top_ids[row, :count].tolist(), self.top[row, :count].tolist(), strict=True)
        return TokenLogprobs(token_id, float(self.own[row]), tuple(top))


def _wants_prompt(seq: Sequence) -> bool:
    """Whether the prompt's log-probabilities come from this sequence: from one of a request's answers."""
    sampling = seq.sampling
    return sampling is not None and sampling.params.prompt_logprobs is not None and sampling.index == 0
