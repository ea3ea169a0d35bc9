"""The LM head against its twin within a tolerance, and against the ordered kernel to the bit.

Tolerance: logits stay FP32, so only what two summation orders may differ by (``product_slack``).
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
    over,
    over_gemms,
    product_slack,
    rng_for,
    small_config,
)

from samir_vllm.config import ModelConfig

WIDE = {"llama_vocab": small_config(vocab_size=128_256)}


def data(config: ModelConfig, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng, k = rng_for("lm_head", rows), config.hidden_size
    return normal(rng, rows, k), normal(rng, config.vocab_size, k, scale=k**-0.5)


@pytest.mark.parametrize("rows", ROWS)
@over_gemms()
def test_rows(twins: Twins, rows: int) -> None:
    x, weight = data(twins.config, rows)
    got, want = twins.both(lambda b: b.lm_head(b.from_numpy(x), b.upload([weight])))
    assert_near(got, want, steps=0, slack=product_slack(x, weight))


@pytest.mark.parametrize("rows", [1, 19])
@over(WIDE)
def test_whole_vocabulary(twins: Twins, rows: int) -> None:
    x, weight = data(twins.config, rows)
    got, want = twins.both(lambda b: b.lm_head(b.from_numpy(x), b.upload([weight])))
    assert_near(got, want, steps=0, slack=product_slack(x, weight))


@over_gemms()
def test_every_row_count_sums_in_the_one_order(twins: Twins) -> None:
    x, weight = data(twins.config, max(row_counts(twins)))
    want = twins.test(lambda b: b.ordered_linear(b.from_numpy(x), b.upload([weight])))
    for rows in row_counts(twins):
        first = 7 * rows % (len(x) - rows + 1)
        part = slice(first, first + rows)
        got = twins.test(lambda b, part=part: b.lm_head(b.from_numpy(x[part]), b.upload([weight])))
        assert_same_bits(got, want[part])


@pytest.mark.parametrize("rows", [1, *large(99)])
@over_gemms()
def test_logits_are_their_three_operations(twins: Twins, rows: int) -> None:
    """Rows taken before the norm or after it, fused or not: the same bits."""
    cfg = twins.config
    x, weight = data(cfg, rows)
    norm = normal(rng_for("final norm"), cfg.hidden_size)
    wanted = np.unique([0, rows // 2, rows - 1])
    batch = make_batch([Part(0, rows)], logit_rows=wanted)
    pages = HostPages(cfg, [rows], rng_for("pages"))

    def fused(backend):
        pages.install(backend)
        taken = backend.stage(batch).logit_rows
        return backend.logits(backend.from_numpy(x), backend.upload([norm]), backend.upload([weight]), taken)

    def composed(backend):
        normed = backend.rmsnorm(backend.from_numpy(x[wanted]), backend.upload([norm]))
        return backend.lm_head(normed, backend.upload([weight]))

    assert_same_bits(twins.test(fused), twins.test(composed))
