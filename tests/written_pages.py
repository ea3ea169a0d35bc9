"""K and V as what they stand for: in a page's every place, which token of which layer was written there last.

Shared by the tests of the scheduler. Plays the runner as far as pages go; computes nothing.
"""

from __future__ import annotations

import numpy as np

from samir_vllm.config import PAGE_SIZE
from samir_vllm.scheduler import Scheduler
from samir_vllm.sequence import ScheduledStep

NOBODY = -1


class WrittenPages:
    """The pages of a scheduler's pool."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.places = np.full((scheduler.pool.num_pages, PAGE_SIZE), NOBODY)
        self.tables: dict[str, np.ndarray] = {}  # request id -> int32 [num_layers, pages_per_layer]

    def run(self, step: ScheduledStep) -> None:
        """Write what the step computes, and find all that its sequences read to be their own tokens."""
        self.places[self.scheduler.pool._stack[: self.scheduler.pool.num_free]] = NOBODY
        for seq, table in step.admitted:
            assert table.dtype == np.int32
            assert table.shape == (self.scheduler.num_layers, seq.pages_per_layer)
            assert len(np.unique(table)) == table.size
            self.tables[seq.request_id] = table
            everything = np.arange(table.shape[1] * PAGE_SIZE)
            self._write(table, everything[seq.num_computed_tokens :], NOBODY)
        for seq, count in [*((seq, 1) for seq in step.decodes), *step.prefills]:
            table, start = self.tables[seq.request_id], seq.num_computed_tokens
            positions = np.arange(start, start + count)
            self._write(table, positions, self._expected(seq.token_ids)[:, positions])
            self.check(table, seq.token_ids[: start + count])

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
