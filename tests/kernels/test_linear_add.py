"""The GEMM that adds to the residual: against its twin, and against the ordered kernel to the bit.

Tolerance: as for the plain GEMM, one BF16 step plus what two FP32 orders may differ by.
"""

from __future__ import annotations

import numpy as np
import pytest
from test_linear import row_counts
from twins import (
    ROWS,
    HostPages,
    Part,
    Twins,
    assert_near,
    assert_same_bits,
    large,
    make_batch,
    normal,
    over_gemms,
    product_slack,
    rng_for,
    rounded,
)

from samir_vllm.config import ModelConfig

PROJECTIONS = ("o", "down")


def data(config: ModelConfig, projection: str, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [rows, K], weight [hidden, K] and the residual [rows, hidden]."""
    k = config.num_heads * config.head_dim if projection == "o" else config.intermediate_size
    rng = rng_for("linear_add", projection, rows)
    return (
        normal(rng, rows, k),
        normal(rng, config.hidden_size, k, scale=k**-0.5),
        normal(rng, rows, config.hidden_size, scale=4),
    )


def ordered_sum(twins: Twins, x: np.ndarray, weight: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """The FP32 sum of ordered product and residual, rounded once."""
    product = twins.test(lambda b: b.ordered_linear(b.from_numpy(x), b.upload([weight])))
    return rounded(product + residual.astype(np.float32))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("projection", PROJECTIONS)
@over_gemms()
def test_rows(twins: Twins, projection: str, rows: int) -> None:
    x, weight, residual = data(twins.config, projection, rows)
    got, want = twins.both(
        lambda b: b.linear_add(b.from_numpy(x), b.upload([weight]), b.from_numpy(residual))
    )
    assert_near(got, want, steps=1, slack=product_slack(x, weight))


@pytest.mark.parametrize("projection", PROJECTIONS)
@over_gemms()
def test_every_row_count_sums_in_the_one_order(twins: Twins, projection: str) -> None:
    x, weight, residual = data(twins.config, projection, max(row_counts(twins)))
    want = ordered_sum(twins, x, weight, residual)
    for rows in row_counts(twins):
        first = 7 * rows % (len(x) - rows + 1)
        part = slice(first, first + rows)
        got = twins.test(
            lambda b, part=part: b.linear_add(
                b.from_numpy(x[part]), b.upload([weight]), b.from_numpy(residual[part])
            )
        )
        assert_same_bits(got, want[part])


@pytest.mark.parametrize("rows", [1, 19, *large(300)])
@pytest.mark.parametrize("projection", PROJECTIONS)
@over_gemms()
class TestWhoReadsTheSum:
    """Each reader of the result, which may still be a sum to take, finds the rounded sum."""

    def test_rmsnorm(self, twins: Twins, projection: str, rows: int) -> None:
        x, weight, residual = data(twins.config, projection, rows)
        norm = normal(rng_for("norm"), twins.config.hidden_size)
        plain = ordered_sum(twins, x, weight, residual).astype(residual.dtype)

        def after_sum(backend):
            summed = backend.linear_add(
                backend.from_numpy(x), backend.upload([weight]), backend.from_numpy(residual)
            )
            return backend.rmsnorm(summed, backend.upload([norm]))

        want = twins.test(lambda b: b.rmsnorm(b.from_numpy(plain), b.upload([norm])))
        assert_same_bits(twins.test(after_sum), want)

    def test_rmsnorm_leaves_the_sum_readable(self, twins: Twins, projection: str, rows: int) -> None:
        x, weight, residual = data(twins.config, projection, rows)
        norm = normal(rng_for("norm"), twins.config.hidden_size)

        def sum_after_norm(backend):
            summed = backend.linear_add(
                backend.from_numpy(x), backend.upload([weight]), backend.from_numpy(residual)
            )
            backend.rmsnorm(summed, backend.upload([norm]))
            return summed

        assert_same_bits(twins.test(sum_after_norm), ordered_sum(twins, x, weight, residual))

    def test_linear_add(self, twins: Twins, projection: str, rows: int) -> None:
        x, weight, residual = data(twins.config, projection, rows)

        def twice(backend):
            inputs, matrix = backend.from_numpy(x), backend.upload([weight])
            return backend.linear_add(
                inputs, matrix, backend.linear_add(inputs, matrix, backend.from_numpy(residual))
            )

        once = ordered_sum(twins, x, weight, residual)
        assert_same_bits(twins.test(twice), ordered_sum(twins, x, weight, once))

    def test_take_rows(self, twins: Twins, projection: str, rows: int) -> None:
        x, weight, residual = data(twins.config, projection, rows)
        wanted = np.array([rows - 1, 0, rows // 2])
        batch = make_batch([Part(0, rows)], logit_rows=wanted)
        pages = HostPages(twins.config, [rows], rng_for("pages"))

        def taken(backend):
            pages.install(backend)
            taken = backend.stage(batch).logit_rows
            summed = backend.linear_add(
                backend.from_numpy(x), backend.upload([weight]), backend.from_numpy(residual)
            )
            return backend.take_rows(summed, taken)

        assert_same_bits(twins.test(taken), ordered_sum(twins, x, weight, residual)[wanted])

    def test_logits(self, twins: Twins, projection: str, rows: int) -> None:
        x, weight, residual = data(twins.config, projection, rows)
        cfg, rng = twins.config, rng_for("head")
        norm, head = normal(rng, cfg.hidden_size), normal(rng, cfg.vocab_size, cfg.hidden_size, scale=0.02)
        batch = make_batch([Part(0, rows)], logit_rows=np.unique([0, rows // 2, rows - 1]))
        pages = HostPages(cfg, [rows], rng)
        plain = ordered_sum(twins, x, weight, residual).astype(residual.dtype)

        def of_the_sum(backend):
            pages.install(backend)
            taken = backend.stage(batch).logit_rows
            summed = backend.linear_add(
                backend.from_numpy(x), backend.upload([weight]), backend.from_numpy(residual)
            )
            return backend.logits(summed, backend.upload([norm]), backend.upload([head]), taken)

        def of_the_rounded(backend):
            pages.install(backend)
            taken = backend.stage(batch).logit_rows
            return backend.logits(
                backend.from_numpy(plain), backend.upload([norm]), backend.upload([head]), taken
            )

        assert_same_bits(twins.test(of_the_sum), twins.test(of_the_rounded))

    def test_logits_of_some_rows_leave_the_sum_readable(
        self, twins: Twins, projection: str, rows: int
    ) -> None:
        """Rows written back would be added to a second time."""
        x, weight, residual = data(twins.config, projection, rows)
        cfg, rng = twins.config, rng_for("head")
        norm, head = normal(rng, cfg.hidden_size), normal(rng, cfg.vocab_size, cfg.hidden_size, scale=0.02)
        batch = make_batch([Part(0, rows)], logit_rows=np.unique([0, rows // 2, rows - 1]))
        pages = HostPages(cfg, [rows], rng)

        def sum_after_logits(backend):
            pages.install(backend)
            taken = backend.stage(batch).logit_rows
            summed = backend.linear_add(
                backend.from_numpy(x), backend.upload([weight]), backend.from_numpy(residual)
            )
            backend.logits(summed, backend.upload([norm]), backend.upload([head]), taken)
            return summed

        assert_same_bits(twins.test(sum_after_logits), ordered_sum(twins, x, weight, residual))
