"""K and V as what they stand for: in a page's every place, which token of which layer was written there last.

Shared by the tests of the scheduler. Plays the device as far as pages and tokens go: it works in the order of
the launches, and knows what a sequence has said before the scheduler does. Computes nothing.
"""

from __future__ import annotations

import numpy as np

from samir_vllm.config import NAN_TOKEN, PAGE_SIZE
from samir_vllm.scheduler import Scheduler
from samir_vllm.sequence import ScheduledStep, Sequence

NOBODY = -1


class WrittenPages:
    """The pages of a scheduler's pool."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.places = np.full((scheduler.pool.num_pages, PAGE_SIZE), NOBODY)
        self.tables: dict[Sequence, np.ndarray] = {}  # int32 [num_layers, pages_per_layer]
        self.texts: dict[Sequence, list[int]] = {}  # prompt and answer; NAN_TOKEN wherever it has ended

    def run(self, step: ScheduledStep, said: list[int]) -> None:
        """Write what the step computes, and find all that its sequences read to be their own tokens.

        For a step that is about to be launched, or is interrupted and comes again.

        Args:
            step: not empty.
            said: the token of each of ``step.sampled()``; of one that has ended it counts for nothing.
        """
        self.places[self.scheduler.pool._stack[: self.scheduler.pool.num_free]] = NOBODY
        for seq, table in step.admitted:
            self._admit(seq, table)
        tokens = dict(zip(step.sampled(), said, strict=True))
        for seq in step.decodes:
            self._decode(seq, tokens[seq])
        for seq, count in step.prefills:
            start = seq.num_launched_tokens
            assert start + count <= seq.num_prompt_tokens
            self._compute(seq, start, count)
            if seq in tokens:
                self.texts[seq][seq.num_prompt_tokens :] = [tokens[seq]]

    def _admit(self, seq: Sequence, table: np.ndarray) -> None:
        assert table.dtype == np.int32
        assert table.shape == (self.scheduler.num_layers, seq.pages_per_layer)
        assert len(np.unique(table)) == table.size
        self.tables[seq] = table
        self.texts[seq] = seq.token_ids.copy()
        everything = np.arange(table.shape[1] * PAGE_SIZE)
        self._write(table, everything[seq.num_cached_tokens :], NOBODY)

    def _decode(self, seq: Sequence, token: int) -> None:
        start, text = seq.num_launched_tokens, self.texts[seq]
        assert seq.num_prompt_tokens <= start < seq.num_prompt_tokens + seq.max_tokens - 1
        assert text[: len(seq.token_ids)] == seq.token_ids
        if text[start] == NAN_TOKEN or text[start] in seq.stop_ids:  # a row of padding
            token = NAN_TOKEN
        else:
            self._compute(seq, start, 1)
        text[start + 1 :] = [token]

    def _compute(self, seq: Sequence, start: int, count: int) -> None:
        table, positions, token_ids = self.tables[seq], np.arange(start, start + count), self.texts[seq]
        self._write(table, positions, self._expected(token_ids)[:, positions])
        self.check(table, token_ids[: start + count])

    def _write(self, table: np.ndarray, positions: np.ndarray, what: np.ndarray | int) -> None:
        self.places[table[:, positions // PAGE_SIZE], positions % PAGE_SIZE] = what

    def _expected(self, token_ids: list[int]) -> np.ndarray:
        """[num_layers, tokens]"""
        num_layers = self.scheduler.num_layers
        return np.array(token_ids) * num_layers + np.arange(num_layers)[:, None]

    def check(self, table: np.ndarray, token_ids: list[int]) -> None:
        """Each layer's pages hold its K and V of these tokens."""
        seen = self.places[table].reshape(len(table), -1)[:, : len(token_ids)]
        expected = self._expected(token_ids)
        assert (seen == expected).all(), f"layers x tokens: {seen}, not {expected}"

    def check_retained(self) -> None:
        """What is retained holds what it says it holds."""
        for retained in self.scheduler._retained:
            pages = self.scheduler.pool._owned[retained]
            self.check(pages.reshape(self.scheduler.num_layers, -1), retained.token_ids.tolist())
