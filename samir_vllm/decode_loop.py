"""Decode steps, one after another, from what the device knows: tokens, positions and pages stay there.

The host says which sequences decode, and only when that changes. A step of a shape that has been met before
is replayed from a record (a CUDA graph, on a GPU). Knows the backend by its protocol, and neither scheduler
nor text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from samir_vllm.backends import Array, Backend
from samir_vllm.llama import LlamaWeights, hidden_states
from samir_vllm.sampling import TokenMasks
from samir_vllm.sequence import Sequence

MAX_RECORDS = 256
"""Shapes remembered; the one unused for longest goes first."""


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What a step leaves on the device, until the next one overwrites it."""

    inputs: Any
    hidden: Array  # BF16 [T, hidden], before the final norm
    logits: Array  # FP32 [L, vocab_size], perhaps adjusted
    token_ids: Array  # int32 [L]; None until they are chosen


def run_forward(backend: Backend, weights: LlamaWeights, inputs: Any) -> StepArrays:
    """From a step's inputs to its logits."""
    hidden = hidden_states(backend, weights, inputs)  # [T, hidden]
    logits = backend.logits(hidden, weights.norm, weights.lm_head, inputs.logit_rows)  # [L, vocab_size]
    return StepArrays(inputs, hidden, logits, None)


def choose(backend: Backend, arrays: StepArrays, masks: TokenMasks | None = None) -> StepArrays:
    """From a step's logits to its tokens, which the backend keeps for the next step."""
    token_ids = backend.choose_tokens(arrays.logits, arrays.inputs, masks)  # [L]
    backend.keep_tokens(token_ids, arrays.inputs)
    return replace(arrays, token_ids=token_ids)


def run_step(backend: Backend, weights: LlamaWeights, inputs: Any) -> StepArrays:
    """From a step's inputs to its tokens."""
    return choose(backend, run_forward(backend, weights, inputs))


class DecodeLoop:
    """One backend's decode steps."""

    def __init__(self, backend: Backend, weights: LlamaWeights) -> None:
        self._backend = backend
        self._weights = weights
        self._records: OrderedDict[Hashable, Callable[[], StepArrays]] = OrderedDict()
        self._sequences: list[Sequence] = []  # whose rows the backend has, where the next step takes them up
        self._position = 0  # of the first one's next input
        self._max_seq_len = 0  # in the next step

    def run(
        self, sequences: list[Sequence], run: Callable[[Backend, LlamaWeights, Any], StepArrays] = run_step
    ) -> StepArrays:
        """Launch one step of sequences whose prompts are in their pages; rows behind theirs are padding.

        Args:
            sequences: at least one; the same list as long as they are the same.
            run: ``run_step``, or ``run_forward``: then somebody calls ``choose`` before the next step.
        """
        goes_on = sequences is self._sequences and sequences[0].num_launched_tokens == self._position
        self._sequences = []  # what is interrupted may have moved the rows on, or not
        if not goes_on:
            self._set_rows(sequences)
        arrays = self._record(self._backend.decode_shape(self._max_seq_len), run)()
        self._position += 1
        self._max_seq_len += 1
        self._sequences = sequences
        return arrays

    def _set_rows(self, sequences: list[Sequence]) -> None:
        positions = np.array([seq.num_launched_tokens for seq in sequences], np.int32)
        self._backend.set_decode_rows(
            np.array([seq.slot for seq in sequences], np.int32),
            positions,
            np.array([seq.num_prompt_tokens for seq in sequences], np.int32),
        )
        self._position = int(positions[0])
        self._max_seq_len = int(positions.max()) + 1

    def _record(
        self, shape: Hashable, run: Callable[[Backend, LlamaWeights, Any], StepArrays]
    ) -> Callable[[], StepArrays]:
        key = (shape, run)
        record = self._records.get(key)
        if record is None:
            backend = self._backend
            record = backend.record(lambda: run(backend, self._weights, backend.begin_decode(shape)))
            self._records[key] = record
            if len(self._records) > MAX_RECORDS:
                self._records.popitem(last=False)
        self._records.move_to_end(key)
        return record
