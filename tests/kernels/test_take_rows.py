"""Row selection against its twin: a copy, so equal to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from twins import ROWS, SHAPES, HostPages, Part, Twins, assert_same_bits, make_batch, normal, over, rng_for


@pytest.mark.parametrize("wanted", ["last", "first", "some", "all"])
@pytest.mark.parametrize("rows", ROWS)
@over(SHAPES)
def test_rows(twins: Twins, rows: int, wanted: str) -> None:
    cfg, rng = twins.config, rng_for("take_rows", rows)
    x = normal(rng, rows, cfg.hidden_size)
    logit_rows = {
        "last": np.array([rows - 1]),
        "first": np.array([0]),
        "some": np.sort(rng.choice(rows, -(-rows // 3), replace=False)),
        "all": np.arange(rows),
    }[wanted]
    batch = make_batch([Part(0, rows)], logit_rows=logit_rows)
    pages = HostPages(cfg, [rows], rng)

    def body(backend):
        pages.install(backend)
        return backend.take_rows(backend.from_numpy(x), backend.stage(batch).logit_rows)

    got, want = twins.both(body)
    assert_same_bits(got, want)
