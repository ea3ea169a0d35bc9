"""Owns the weights and the KV cache, and turns a scheduled step into token ids and log-probabilities.

Knows the backend only by its protocol, and nothing of text or of who waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from samir_vllm.backends import LOGPROB_ROWS, Array, Backend
from samir_vllm.batch import build_batch
from samir_vllm.config import NAN_TOKEN, ModelConfig
from samir_vllm.decode_loop import DecodeLoop, StepArrays, choose, run_forward, run_step
from samir_vllm.llama import LlamaWeights, gemm_shapes, load_weights
from samir_vllm.sampling import TokenMasks
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
        self.steps_ahead = backend.steps_ahead
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
        self._decode_loop = DecodeLoop(backend, self.weights)

    def launch(self, step: ScheduledStep) -> Callable[[], StepResult]:
        """Start one forward pass; what is returned waits for its results."""
        with self.backend.active():
            return self._read_later(step, self._run(step, run_step))

    def launch_forward(self, step: ScheduledStep) -> Callable[[TokenMasks | None], Callable[[], StepResult]]:
        """Start one forward pass up to its logits; what is returned goes on from there, as ``launch`` does.

        It must be called before the next step is launched.
        """
        backend = self.backend
        with backend.active():
            arrays = self._run(step, run_forward)

        def go_on(masks: TokenMasks | None) -> Callable[[], StepResult]:
            with backend.active():
                # Masks can't be taken out of the logits again, which log-probabilities are made of.
                is_wanted = masks is not None and self._logprob_seqs
                raw = backend.copy_rows(arrays.logits) if is_wanted else arrays.logits
                return self._read_later(step, replace(choose(backend, arrays, masks), logits=raw))

        return go_on

    def _run(
        self, step: ScheduledStep, run: Callable[[Backend, LlamaWeights, Any], StepArrays]
    ) -> StepArrays:
        """A step of decodes alone as it was recorded; one with prefill in it operation by operation."""
        for seq, page_ids in step.admitted:
            self._admit(seq, page_ids)
        if not step.prefills:
            return self._decode_loop.run(step.decodes, run)
        return run(self.backend, self.weights, self.backend.stage(build_batch(step)))

    def _read_later(self, step: ScheduledStep, arrays: StepArrays) -> Callable[[], StepResult]:
        backend = self.backend
        read_tokens = backend.read_later(arrays.token_ids[: len(step.sampled())])
        read_logprobs = read_prompts = None
        if self._logprob_seqs:
            self._logprob_seqs = {i: s for i, s in self._logprob_seqs.items() if not s.is_finished}
            read_logprobs = self._logprobs(step, arrays)
            read_prompts = self._prompt_logprobs(step, arrays)  # last: into the memory of the logits

        def result() -> StepResult:
            with backend.active():
                token_ids = read_tokens()[0].tolist()
                logprobs = read_logprobs(token_ids) if read_logprobs else None
                return StepResult(token_ids, logprobs, read_prompts() if read_prompts else [])

        return result

    def run(self, step: ScheduledStep) -> StepResult:
        """One forward pass, and its results."""
        return self.launch(step)()

    def _admit(self, seq: Sequence, page_ids: np.ndarray) -> None:
        """Tell the backend of the slot's new sequence; it knows where all have chosen greedily."""
        slot, sampling = seq.slot, seq.sampling
        self.backend.set_block_table(slot, page_ids)
        self.backend.set_stop_ids(slot, seq.stop_ids)
        if sampling is not None and not sampling.is_argmax:
            self._sampling_slots.add(slot)
            self.backend.set_sampling(slot, sampling, seq.token_ids[: seq.num_prompt_tokens])
        elif slot in self._sampling_slots:
            self.backend.set_sampling(slot, None)
            self._sampling_slots.remove(slot)
        if sampling is not None and (sampling.params.logprobs is not None or _wants_prompt(seq)):
            self._logprob_seqs[slot] = seq

    def _logprobs(
        self, step: ScheduledStep, arrays: StepArrays
    ) -> Callable[[list[int]], list[TokenLogprobs | None]] | None:
        """Of the chosen tokens, from the raw logits; None for NaN, and for those who don't want them."""
        wanted = [None if s.sampling is None else s.sampling.params.logprobs for s in step.sampled()]
        if all(count is None for count in wanted):
            return None
        if not arrays.inputs.is_argmax:
            self.backend.restore_logits(arrays.logits, arrays.inputs)
        read = self._log_probs(arrays.logits, arrays.token_ids, max(count or 0 for count in wanted))

        def result(token_ids: list[int]) -> list[TokenLogprobs | None]:
            rows = read()
            return [
                None if count is None or token == NAN_TOKEN else rows.of(i, token, count)
                for i, (token, count) in enumerate(zip(token_ids, wanted, strict=True))
            ]

        return result

    def _prompt_logprobs(
        self, step: ScheduledStep, arrays: StepArrays
    ) -> Callable[[], list[tuple[Sequence, list[TokenLogprobs]]]]:
        """Of the prompt tokens that follow those of each chunk, for the sequences that want them."""
        reads = []
        row = len(step.decodes)
        for (seq, chunk), start in zip(step.prefills, step.prefill_starts, strict=True):
            if _wants_prompt(seq):
                places = range(start, start + chunk)
                reads.append((seq, self._chunk_logprobs(arrays.hidden, row, seq, places)))
            row += chunk
        return lambda: [(seq, read()) for seq, read in reads]

    def _chunk_logprobs(
        self, x: Array, row: int, seq: Sequence, places: range
    ) -> Callable[[], list[TokenLogprobs]]:
        """Of the tokens at ``places``, in the rows of ``x`` from ``row`` on; the last may predict none."""
        assert seq.sampling is not None
        count = seq.sampling.params.prompt_logprobs or 0
        targets = seq.token_ids[places.start + 1 : min(places.stop + 1, seq.num_prompt_tokens)]
        reads = []
        for i in range(0, len(targets), LOGPROB_ROWS):
            token_ids = targets[i : i + LOGPROB_ROWS]
            rows = np.arange(row + i, row + i + len(token_ids), dtype=np.int32)
            logits = self.backend.logits(
                x, self.weights.norm, self.weights.lm_head, self.backend.from_numpy(rows)
            )
            ids = self.backend.from_numpy(np.array(token_ids, np.int32))
            reads.append((token_ids, self._log_probs(logits, ids, count)))

        def result() -> list[TokenLogprobs]:
            found = [(ids, read()) for ids, read in reads]
            return [rows.of(n, token, count) for ids, rows in found for n, token in enumerate(ids)]

        return result

    def _log_probs(self, logits: Array, ids: Array, count: int) -> Callable[[], _Rows]:
        read = self.backend.read_later(*self.backend.log_probs(logits, ids, count))
        return lambda: _Rows(*read())


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
