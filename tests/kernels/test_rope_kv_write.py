"""RoPE and the page write against the twin, to the bit, over the whole KV cache.

No tolerance: products and sums of two FP32 numbers, from tables that both backends compute in the same way,
rounded to BF16 once. Every place of the cache starts with random bits, so a write to any wrong one shows.
"""

from __future__ import annotations

import numpy as np
import pytest
from twins import (
    HEADS,
    LARGE,
    LAYER,
    ROWS,
    HostPages,
    Part,
    Twins,
    assert_same_bits,
    large,
    make_batch,
    normal,
    over,
    read_pages,
    rng_for,
)

from samir_vllm.backends import Backend
from samir_vllm.batch import Batch
from samir_vllm.config import PAGE_SIZE


def random_pages(twins: Twins, lengths: list[int], rng: np.random.Generator) -> HostPages:
    pages = HostPages(twins.config, lengths, rng)
    pages.bits[...] = rng.integers(0, 1 << 16, pages.bits.shape, np.uint16)
    return pages


def check(twins: Twins, pages: HostPages, batch: Batch, rng: np.random.Generator) -> None:
    """q, and every bit of the cache, equal the oracle's; and exactly the slots of the tokens changed."""
    cfg = twins.config
    rows, heads = len(batch.token_ids), cfg.num_heads + 2 * cfg.num_kv_heads
    qkv = normal(rng, rows, heads * cfg.head_dim)

    def body(backend: Backend):
        pages.install(backend)
        return backend.rope_kv_write(backend.from_numpy(qkv), LAYER, backend.stage(batch))

    got, want = twins.both(body)
    assert_same_bits(got.reshape(rows, cfg.num_heads, cfg.head_dim), want)
    after = read_pages(twins.tested)
    np.testing.assert_array_equal(after, read_pages(twins.oracle))
    changed = (after != pages.bits).any(axis=(1, 2, 4))  # [num_pages, page_size]
    np.testing.assert_array_equal(changed, token_places(pages, batch))


def token_places(pages: HostPages, batch: Batch) -> np.ndarray:
    """bool [num_pages, page_size]: where the step's tokens go, token by token from the definition."""
    places = np.zeros((len(pages.bits), PAGE_SIZE), bool)
    for slot, seq_len, count in zip(batch.slots, batch.seq_lens, np.diff(batch.cu_seqlens_q), strict=True):
        for at in range(seq_len - count, seq_len):
            if (page_id := pages.tables[slot][LAYER, at // PAGE_SIZE]) >= 0:
                places[page_id, at % PAGE_SIZE] = True
    return places


@pytest.mark.parametrize("rows", ROWS)
@over(HEADS, leave_out=LARGE | {"ratio1_d64", "ratio8_d64"})
def test_prompt(twins: Twins, rows: int) -> None:
    rng = rng_for("rope prompt", rows)
    check(twins, random_pages(twins, [40, rows], rng), make_batch([Part(1, rows)]), rng)


@pytest.mark.parametrize(("start", "count"), [(1, 1), (15, 2), (16, 16), (31, 18), (255, 1), (600, 100)])
@over(HEADS, leave_out=LARGE | {"ratio1_d64", "ratio8_d64"})
def test_chunk_behind_a_prefix(twins: Twins, start: int, count: int) -> None:
    rng = rng_for("rope chunk", start, count)
    check(twins, random_pages(twins, [start + count], rng), make_batch([Part(0, count, start)]), rng)


@pytest.mark.parametrize("rows", [1, 19, *large(99, 256)])
@over(HEADS, leave_out=LARGE | {"ratio1_d64", "ratio8_d64"})
def test_decodes(twins: Twins, rows: int) -> None:
    rng = rng_for("rope decodes", rows)
    lengths = rng.integers(1, 400, rows).tolist()
    order = rng.permutation(rows).tolist()  # slots in any order
    batch = make_batch([Part(slot, 1, lengths[slot] - 1) for slot in order], num_decodes=rows)
    check(twins, random_pages(twins, lengths, rng), batch, rng)


@over(HEADS, leave_out=LARGE | {"ratio1_d64", "ratio8_d64"})
def test_mixed_step(twins: Twins) -> None:
    rng = rng_for("rope mixed")
    parts = [Part(4, 1, 16), Part(0, 1, 99), Part(3, 1), Part(1, 33, 15), Part(5, 200), Part(2, 17, 300)]
    check(twins, random_pages(twins, [400] * 6, rng), make_batch(parts, num_decodes=2), rng)


@over(HEADS, leave_out=LARGE | {"ratio1_d64", "ratio8_d64"})
def test_positions_that_jump(twins: Twins) -> None:
    """Positions only turn the rotation; where K and V go is the token's index in its sequence."""
    rng = rng_for("rope jump")
    positions = np.concatenate([[9000], np.arange(8), [9000, 16383, 3, 12000], np.arange(5000, 5040)])
    batch = make_batch([Part(1, 1, 70), Part(0, 52, 30)], num_decodes=1, positions=positions)
    check(twins, random_pages(twins, [100, 100], rng), batch, rng)


@pytest.mark.parametrize("decode", [False, True])
@over(HEADS, leave_out=LARGE | {"ratio1_d64", "ratio8_d64"})
def test_tokens_without_a_page_are_skipped(twins: Twins, decode: bool) -> None:
    """Page id -1: q comes out, K and V go nowhere."""
    rng = rng_for("rope skip")
    rows = 1 if decode else 60
    pages = random_pages(twins, [60], rng)
    pages.tables[0][LAYER, [3] if decode else [1, 3]] = -1
    check(twins, pages, make_batch([Part(0, rows, 60 - rows)], num_decodes=int(decode)), rng)
