"""RMSNorm against its twin.

Tolerance: one BF16 step. The sum of squares is taken in another order (FP32, relative error below 1e-5),
which can only push a value across the middle between two BF16 neighbours.
"""

from __future__ import annotations

import numpy as np
import pytest
from twins import ROWS, SHAPES, Twins, assert_near, assert_same_bits, bf16, normal, over, rng_for


@pytest.mark.parametrize("rows", ROWS)
@over(SHAPES)
def test_rows(twins: Twins, rows: int) -> None:
    rng, width = rng_for("rmsnorm", rows), twins.config.hidden_size
    x, weight = normal(rng, rows, width, scale=3), normal(rng, width)
    got, want = twins.both(lambda b: b.rmsnorm(b.from_numpy(x), b.upload([weight])))
    assert_near(got, want, steps=1)


@over(SHAPES)
def test_extreme_rows(twins: Twins) -> None:
    """Zeros; rows so small that epsilon decides; rows whose squares come near FP32's end; one lone peak."""
    rng, width = rng_for("extreme rows"), twins.config.hidden_size
    x = rng.standard_normal((6, width), np.float32)
    x[0] = 0
    x[1] *= 1e-3
    x[2] *= 1e-12
    x[3] *= 1e15
    x[4] = 0
    x[4, -1] = 1e4
    x = bf16(x)
    weight = normal(rng, width)
    got, want = twins.both(lambda b: b.rmsnorm(b.from_numpy(x), b.upload([weight])))
    assert not got[0].any()
    assert_near(got, want, steps=1)


@over(SHAPES)
def test_a_row_alone_has_the_same_bits(twins: Twins) -> None:
    rng, width = rng_for("rmsnorm alone"), twins.config.hidden_size
    x, weight = normal(rng, 200, width), normal(rng, width)
    company = twins.test(lambda b: b.rmsnorm(b.from_numpy(x), b.upload([weight])))
    for row in (0, 1, 57, 199):
        alone = twins.test(lambda b, row=row: b.rmsnorm(b.from_numpy(x[row : row + 1]), b.upload([weight])))
        assert_same_bits(alone, company[row : row + 1])


@over(SHAPES)
def test_nan_stays_in_its_row(twins: Twins) -> None:
    rng, width = rng_for("rmsnorm nan"), twins.config.hidden_size
    x, weight = normal(rng, 19, width), normal(rng, width)
    x[7, width // 2] = np.nan
    got, want = twins.both(lambda b: b.rmsnorm(b.from_numpy(x), b.upload([weight])))
    assert np.isnan(got[7]).all()
    others = np.arange(19) != 7
    assert_near(got[others], want[others], steps=1)
