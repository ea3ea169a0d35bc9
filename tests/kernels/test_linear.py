"""The GEMM against its twin within a tolerance, and against the ordered kernel to the bit.

Tolerance: two FP32 sums of the same products in another order, each rounded to BF16: one BF16 step, plus what
the orders themselves may differ by (``product_slack``).
"""

from __future__ import annotations

import numpy as np
import pytest
from twins import (
    ROWS,
    Twins,
    assert_near,
    assert_same_bits,
    large,
    normal,
    over_gemms,
    product_slack,
    rng_for,
    rounded,
)

from samir_vllm.config import ModelConfig

ROW_COUNTS = (1, 2, 3, 4, 8, 16, 17, 24, 32, 64, 100, 128, 200, 256, 512, 1024, 2048, 2304)
"""Where a GEMM library changes its kernel; the last is more than the order is known for in one call."""

PROJECTIONS = ("qkv", "gate_up")


def row_counts(twins: Twins) -> list[int]:
    return [rows for rows in ROW_COUNTS if rows <= twins.max_rows]


def shape(config: ModelConfig, projection: str) -> tuple[int, int]:
    """N and K of a projection's weight."""
    if projection == "qkv":
        return (config.num_heads + 2 * config.num_kv_heads) * config.head_dim, config.hidden_size
    return 2 * config.intermediate_size, config.hidden_size


def data(config: ModelConfig, projection: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """x [rows, K] and a weight [N, K] that keeps the variance."""
    n, k = shape(config, projection)
    rng = rng_for("linear", projection, rows)
    return normal(rng, rows, k), normal(rng, n, k, scale=k**-0.5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("projection", PROJECTIONS)
@over_gemms()
def test_rows(twins: Twins, projection: str, rows: int) -> None:
    x, weight = data(twins.config, projection, rows)
    got, want = twins.both(lambda b: b.linear(b.from_numpy(x), b.upload([weight])))
    assert_near(got, want, steps=1, slack=product_slack(x, weight))


@over_gemms()
def test_stacked_weights(twins: Twins) -> None:
    """q, k and v uploaded as three tensors are one weight."""
    x, weight = data(twins.config, "qkv", 19)
    edge = twins.config.num_heads * twins.config.head_dim
    pieces = np.split(weight, [edge, (edge + len(weight)) // 2])
    whole = twins.test(lambda b: b.linear(b.from_numpy(x), b.upload([weight])))
    stacked = twins.test(lambda b: b.linear(b.from_numpy(x), b.upload(pieces)))
    assert_same_bits(stacked, whole)


@pytest.mark.parametrize("projection", PROJECTIONS)
@over_gemms()
def test_ordered_kernel_computes_the_product(twins: Twins, projection: str) -> None:
    """The judge of the next test is itself a product, to FP32 accuracy."""
    x, weight = data(twins.config, projection, 99)
    got = twins.test(lambda b: b.ordered_linear(b.from_numpy(x), b.upload([weight])))
    want = x.astype(np.float64) @ weight.astype(np.float64).T
    assert_near(got, want, steps=0, slack=product_slack(x, weight))


@pytest.mark.parametrize("projection", PROJECTIONS)
@over_gemms()
def test_every_row_count_sums_in_the_one_order(twins: Twins, projection: str) -> None:
    x, weight = data(twins.config, projection, max(row_counts(twins)))
    want = rounded(twins.test(lambda b: b.ordered_linear(b.from_numpy(x), b.upload([weight]))))
    for rows in row_counts(twins):
        first = 7 * rows % (len(x) - rows + 1)  # the same row has another place in each company
        part = slice(first, first + rows)
        got = twins.test(lambda b, part=part: b.linear(b.from_numpy(x[part]), b.upload([weight])))
        assert_same_bits(got, want[part])


@pytest.mark.parametrize("rows", [1, *large(99)])
@over_gemms()
def test_norm_qkv_is_its_two_operations(twins: Twins, rows: int) -> None:
    """Fused or not, the same points are rounded, so the same bits come out."""
    x, weight = data(twins.config, "qkv", rows)
    norm = normal(rng_for("norm weight"), twins.config.hidden_size)
    got = twins.test(lambda b: b.norm_qkv(b.from_numpy(x), b.upload([norm]), b.upload([weight])))
    composed = twins.test(
        lambda b: b.linear(b.rmsnorm(b.from_numpy(x), b.upload([norm])), b.upload([weight]))
    )
    assert_same_bits(got, composed)
