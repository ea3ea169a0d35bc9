"""Embedding against its twin: a copy of rows, so equal to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from twins import ROWS, SHAPES, HostPages, Part, Twins, assert_same_bits, make_batch, normal, over, rng_for


@pytest.mark.parametrize("rows", ROWS)
@over(SHAPES)
def test_rows_of_a_prompt(twins: Twins, rows: int) -> None:
    cfg, rng = twins.config, rng_for("embedding", rows)
    table = normal(rng, cfg.vocab_size, cfg.hidden_size)
    ids = rng.integers(0, cfg.vocab_size, rows)
    ids[0], ids[-1] = 0, cfg.vocab_size - 1  # both ends of the table
    batch = make_batch([Part(0, rows)], token_ids=ids)
    pages = HostPages(cfg, [rows], rng)

    def body(backend):
        pages.install(backend)
        return backend.embedding(backend.upload([table]), backend.stage(batch))

    got, want = twins.both(body)
    assert_same_bits(got, want)


@over(SHAPES)
def test_rows_of_decodes_and_chunks(twins: Twins) -> None:
    cfg, rng = twins.config, rng_for("embedding of a mixed step")
    table = normal(rng, cfg.vocab_size, cfg.hidden_size)
    parts = [Part(2, 1, 30), Part(0, 1, 5), Part(1, 33, 16), Part(3, 17)]
    ids = rng.integers(0, cfg.vocab_size, sum(p.count for p in parts))
    batch = make_batch(parts, num_decodes=2, token_ids=ids)
    pages = HostPages(cfg, [64] * 4, rng)

    def body(backend):
        pages.install(backend)
        return backend.embedding(backend.upload([table]), backend.stage(batch))

    got, want = twins.both(body)
    assert_same_bits(got, want)
    np.testing.assert_array_equal(want, table[ids].astype(np.float32))
