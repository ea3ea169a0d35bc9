"""What the tests of decode and prefill attention share: running a step, and the one tolerance.

Tolerance: the output is rounded to BF16 on both sides (one step), and on the GPU each probability enters
P x V as BF16, off by at most 2^-8 of itself. That moves the result by at most 2^-8 of the mean of |v| under
the same probabilities, which the oracle computes from pages that hold |V|. A tenth more covers FP32: exp, and
sums in another order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import numpy as np
from twins import LAYER, HostPages, Twins, assert_near, assert_same_bits, normal

from samir_vllm.backends import Array, Backend
from samir_vllm.batch import Batch

PROBABILITY_ROUNDING = 1.1 * 2.0**-8

WAYS: dict[str, Callable[[int, int], int]] = {
    "one block": lambda rows, max_splits: 1,
    # And one without a split: a recorded step has blocks for longer sequences, too.
    "a block for each split": lambda rows, max_splits: max_splits + 1,
}
"""How many blocks of decode attention share a sequence, from the step's rows and its most splits."""


def attend(backend: Backend, pages: HostPages, batch: Batch, q: np.ndarray) -> Array:
    """The step's attention, by the operation that its rows call for: all decodes, all prefill, or both."""
    pages.install(backend)
    inputs = backend.stage(batch)
    if batch.num_decodes == 0:
        operation = backend.paged_attention_prefill
    elif batch.num_decodes == len(q):
        operation = backend.paged_attention_decode
    else:
        operation = backend.attention
    return operation(backend.from_numpy(q), LAYER, inputs)


def attend_in_each_way(twins: Twins, pages: HostPages, batch: Batch, q: np.ndarray) -> dict[str, np.ndarray]:
    """Decode attention of the backend under test, by the names of ``WAYS``."""
    got = {}
    for name, way in WAYS.items():
        with mock.patch.object(twins.tested, "_splits_at_once", side_effect=way) as choice:
            got[name] = twins.test(lambda b: attend(b, pages, batch, q))
        choice.assert_called()
    return got


def make_q(twins: Twins, rows: int, rng: np.random.Generator, scale: float = 1.0) -> np.ndarray:
    """BF16 [rows, H, D]."""
    return normal(rng, rows, twins.config.num_heads, twins.config.head_dim, scale=scale)


def check(twins: Twins, pages: HostPages, batch: Batch, q: np.ndarray) -> np.ndarray:
    """The step on both backends, compared; returns what the backend under test gave."""
    got = twins.test(lambda b: attend(b, pages, batch, q))
    assert_near_oracle(twins, pages, batch, q, got)
    return got


def check_each_way(twins: Twins, pages: HostPages, batch: Batch, q: np.ndarray) -> np.ndarray:
    """As `check`, of a step of decodes, whose bits are the same in each way."""
    got, *others = attend_in_each_way(twins, pages, batch, q).values()
    assert_near_oracle(twins, pages, batch, q, got)
    for other in others:
        assert_same_bits(other, got)
    return got


def assert_near_oracle(twins: Twins, pages: HostPages, batch: Batch, q: np.ndarray, got: np.ndarray) -> None:
    """See the opening."""
    want = twins.expect(lambda b: attend(b, pages, batch, q))
    absolute = copy.copy(pages)
    absolute.bits = pages.bits.copy()
    absolute.bits[:, 1] &= 0x7FFF  # the sign bit of V
    mean_abs_v = twins.expect(lambda b: attend(b, absolute, batch, q))
    assert_near(got, want, steps=1, slack=PROBABILITY_ROUNDING * mean_abs_v)
