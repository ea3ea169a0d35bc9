"""SiLU(gate) * up against its twin.

Tolerance: one BF16 step; the GPU's exp and division differ from NumPy's by a few FP32 units. Where SiLU
vanishes (gate below -80) only its size counts: 1e-30 is far below any number that matters here.
"""

from __future__ import annotations

import numpy as np
import pytest
from twins import (
    ROWS,
    SHAPES,
    SMALL,
    Twins,
    assert_near,
    assert_same_bits,
    bf16,
    large,
    normal,
    over,
    over_gemms,
    rng_for,
)

VANISHED = 1e-30


@pytest.mark.parametrize("rows", ROWS)
@over(SHAPES)
def test_rows(twins: Twins, rows: int) -> None:
    gate_up = normal(rng_for("silu_mul", rows), rows, 2 * twins.config.intermediate_size, scale=2)
    got, want = twins.both(lambda b: b.silu_mul(b.from_numpy(gate_up)))
    assert got.shape == (rows, twins.config.intermediate_size)
    assert_near(got, want, steps=1, slack=VANISHED)


@over(SHAPES)
def test_extreme_gates(twins: Twins) -> None:
    """No overflow on the way, whatever the sign: exp(200) is infinite in FP32."""
    width = twins.config.intermediate_size
    gates = [0.0, -0.0, 1e-20, -1e-20, 20, -20, 87, -87, 89, -89, 200, -200, 1e4, -1e4, 1e30, -1e30, -3e38]
    gate = np.resize(np.float32(gates), (19, width))
    up = np.resize(np.float32([1, -2, 0, 3e4, 1e-3]), (19, width))
    gate_up = bf16(np.concatenate([gate, up], axis=1))
    got, want = twins.both(lambda b: b.silu_mul(b.from_numpy(gate_up)))
    assert_near(got, want, steps=1, slack=VANISHED)
    exact = gate_up[:, :width].astype(np.float64)
    exact = exact / (1 + np.exp(np.minimum(-exact, 700))) * gate_up[:, width:].astype(np.float64)
    exact = np.clip(exact, -3.3e38, 3.3e38)  # FP32 has no more
    assert_near(got, exact, steps=1, slack=VANISHED)


@over({"small": SMALL["small"]}, leave_out=["small"])
def test_more_rows_than_a_grid_is_high(twins: Twins) -> None:
    """65,535 blocks are the most in y and z."""
    from samir_vllm.backends.cuda_backend import CudaBackend

    rows = 65_537
    many = Twins.of(CudaBackend(twins.config, max_tokens=rows))
    gate_up = np.tile(normal(rng_for("silu many"), 1, 2 * twins.config.intermediate_size), (rows, 1))
    got, want = many.both(lambda b: b.silu_mul(b.from_numpy(gate_up)))
    assert_near(got, want, steps=1, slack=VANISHED)


@over(SHAPES)
def test_nan_stays_in_its_place(twins: Twins) -> None:
    width = twins.config.intermediate_size
    gate_up = normal(rng_for("silu nan"), 3, 2 * width)
    gate_up[0, 5] = np.nan
    gate_up[1, width + 7] = np.nan
    got = twins.test(lambda b: b.silu_mul(b.from_numpy(gate_up)))
    assert [tuple(at) for at in np.argwhere(np.isnan(got))] == [(0, 5), (1, 7)]


@pytest.mark.parametrize("rows", [1, *large(99)])
@over_gemms()
def test_norm_mlp_is_its_three_operations(twins: Twins, rows: int) -> None:
    """Fused or not, the same points are rounded, so the same bits come out."""
    cfg, rng = twins.config, rng_for("norm_mlp", rows)
    x, norm = normal(rng, rows, cfg.hidden_size), normal(rng, cfg.hidden_size)
    weight = normal(rng, 2 * cfg.intermediate_size, cfg.hidden_size, scale=cfg.hidden_size**-0.5)
    got = twins.test(lambda b: b.norm_mlp(b.from_numpy(x), b.upload([norm]), b.upload([weight])))
    composed = twins.test(
        lambda b: b.silu_mul(b.linear(b.rmsnorm(b.from_numpy(x), b.upload([norm])), b.upload([weight])))
    )
    assert_same_bits(got, composed)
