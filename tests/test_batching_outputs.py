"""The same prompts alone, in a static batch and in a continuous batch with arrivals, on the NumPy backend.

BLAS chooses its order of summation by the number of rows, so an FP32 logit moves by about 1e-5 with its
company; tokens must agree wherever the best two logits are further apart than that. Multiplied row by row,
the logits agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harness import RecordingBackend, make_tiny_engine
from samir_vllm import Engine, SamplingParams
from samir_vllm.model_runner import ModelRunner
from samir_vllm.sequence import ScheduledStep, StepResult

NEW_TOKENS = 24
# FP32 logits of up to about 10 through 3 layers, in another order of summation: 1e-4 at most.
GAP = 1e-3


class RecordingRunner(ModelRunner):
    """Keeps every row of logits under its request and step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: dict[str, list[np.ndarray]] = {}

    def launch(self, step: ScheduledStep) -> Callable[[], StepResult]:
        result = super().launch(step)
        for seq, row in zip(step.sampled(), self.backend.raw[-1], strict=True):
            self.rows.setdefault(seq.request_id, []).append(row.copy())
        return result


def make_engine(
    batching: str, *, batch_invariant: bool, max_num_seqs: int = 4
) -> tuple[Engine, RecordingRunner]:
    engine = make_tiny_engine(
        backend_class=RecordingBackend,
        runner_class=RecordingRunner,
        batch_invariant=batch_invariant,
        batching=batching,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=20,
    )
    runner: Any = engine._runner
    return engine, runner


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(5, 512, n).tolist() for n in (1, 15, 16, 17, 31, 33, 48, 64)]


def run_all(mode: str, *, batch_invariant: bool) -> dict[str, list[np.ndarray]]:
    """Logits rows by request, in one of three companies."""
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    alone = mode == "alone"
    engine, runner = make_engine(
        "continuous" if alone else mode, batch_invariant=batch_invariant, max_num_seqs=1 if alone else 4
    )
    for i, ids in enumerate(prompts()):
        engine.add_request(ids, params, request_id=str(i))
        if mode == "continuous":  # arrivals while others run
            for _ in range(3):
                engine.step()
    while engine.has_work:
        engine.step()
        engine.pool.check_integrity()
    assert engine.pool.num_used == 0
    assert all(len(rows) == NEW_TOKENS for rows in runner.rows.values())
    return runner.rows


@pytest.mark.parametrize("mode", ["static", "continuous"])
def test_row_by_row_logits_are_the_same_bits(mode: str) -> None:
    alone, together = (run_all(m, batch_invariant=True) for m in ("alone", mode))
    for request_id, rows in alone.items():
        np.testing.assert_array_equal(np.array(together[request_id]), np.array(rows))


@pytest.mark.parametrize("mode", ["static", "continuous"])
def test_tokens_agree_where_the_gap_is_safe(mode: str) -> None:
    alone, together = (run_all(m, batch_invariant=False) for m in ("alone", mode))
    compared = 0
    for request_id, rows in alone.items():
        for mine, other in zip(rows, together[request_id], strict=True):
            second, best = np.sort(mine)[-2:]
            if best - second <= GAP:
                break  # from here on the texts may differ, and rightly
            assert mine.argmax() == other.argmax()
            compared += 1
    assert compared > 150  # of 192
