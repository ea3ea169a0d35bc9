"""Decode attention against its twin; see ``attention.py`` for the tolerance.

Whatever no sequence has written is NaN, or so large that one more term would show.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attention import attend, attend_in_each_way, check, check_each_way, make_q
from twins import (
    HEADS,
    LARGE,
    MANY_HEADS,
    MAX_ROWS,
    MAX_SEQS,
    POISON,
    SMALL,
    Part,
    Twins,
    assert_same_bits,
    bf16,
    either_poison,
    large,
    make_batch,
    make_kv,
    normal,
    over,
    pages_with,
    poisoned,
    rng_for,
)

from samir_vllm.backends import Backend
from samir_vllm.config import ModelConfig

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 700, 768, 769, 1000)
"""Around the edges of pages (16), tiles (64) and splits (256)."""

FIVE_SPLITS, FORTY_SPLITS = 4 * 256 + 1, 39 * 256 + 1

EMULATED_LENGTHS = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 513, 769, FIVE_SPLITS)


def decodes_of(lengths: list[int], slots: list[int] | None = None):
    """One query, the last token, of each sequence; slot i holds the i-th length."""
    slots = list(range(len(lengths))) if slots is None else slots
    return make_batch([Part(slot, 1, lengths[slot] - 1) for slot in slots], num_decodes=len(slots))


@poisoned
@pytest.mark.parametrize(
    "length",
    [n if n in EMULATED_LENGTHS else large(n)[0] for n in (*LENGTHS, FIVE_SPLITS, FORTY_SPLITS)],
)
@over(HEADS)
def test_one_sequence(twins: Twins, length: int, poison: float) -> None:
    """By one block, by a block for each split, and as the last row of a prompt."""
    rng = rng_for("decode", length)
    pages = pages_with(twins.config, [make_kv(twins.config, length, rng)], rng, poison)
    q = make_q(twins, 1, rng)
    got = check_each_way(twins, pages, decodes_of([length]), q)
    last_row = make_batch([Part(0, 1, length - 1)])
    assert_same_bits(twins.test(lambda b: attend(b, pages, last_row, q)), got)


@either_poison
@pytest.mark.parametrize("rows", [19, *large(99, 256)])
@over(HEADS, leave_out=LARGE | {"ratio1_d64", "ratio8_d64"})
def test_mixed_lengths(twins: Twins, rows: int, poison: float) -> None:
    """Lengths of 1 to 1,025 in one batch, the slots in any order."""
    rng = rng_for("decode mix", rows)
    lengths = [*LENGTHS[:17], 769, FIVE_SPLITS, *rng.integers(1, 1001, rows - 19).tolist()]
    pages = pages_with(twins.config, [make_kv(twins.config, n, rng) for n in lengths], rng, poison)
    batch = decodes_of(lengths, rng.permutation(rows).tolist())
    check_each_way(twins, pages, batch, make_q(twins, rows, rng))


@over(HEADS)
def test_peaked_softmax(twins: Twins) -> None:
    """Scores in the tens: the greatest one moves from tile to tile, and most probabilities vanish."""
    rng = rng_for("decode peaks")
    kv = [make_kv(twins.config, n, rng) for n in (64, 300, 1000)]
    for sequence in kv:
        growth = np.linspace(0.1, 3, len(sequence))[:, None, None]
        sequence[:, 0] = bf16(sequence[:, 0].astype(np.float32) * growth)
    pages = pages_with(twins.config, kv, rng)
    check_each_way(twins, pages, decodes_of([len(x) for x in kv]), make_q(twins, 3, rng, scale=6))


@over(HEADS)
def test_equal_scores_average_v(twins: Twins) -> None:
    """A query of zeros gives the plain mean of V, whatever K holds."""
    cfg, rng = twins.config, rng_for("decode mean")
    kv = make_kv(cfg, 600, rng)
    pages = pages_with(cfg, [kv], rng)
    got = check(twins, pages, decodes_of([600]), make_q(twins, 1, rng, scale=0))
    mean = kv[:, 1].astype(np.float32).mean(axis=0)  # [Hkv, D]
    expected = np.repeat(mean, cfg.num_heads // cfg.num_kv_heads, axis=0).reshape(1, -1)
    np.testing.assert_allclose(got, expected, atol=2e-3)  # means of about 0.04, rounded to BF16


@over(SMALL)
def test_order_in_which_splits_are_merged(twins: Twins) -> None:
    """The second split takes away what the first one gave: what is left is a rounding error of the merge."""
    cfg, rng = twins.config, rng_for("order")
    kv = np.zeros((512, 2, cfg.num_kv_heads, cfg.head_dim), np.float32)
    kv[256:, 0] = 1 / 16  # K; the queries are ones
    fade = 2.0 ** -(cfg.head_dim**0.5 / 16 * np.log2(np.e))
    kv[:256, 1] = normal(rng, cfg.num_kv_heads, cfg.head_dim)
    for token in range(256, 260):  # BF16 has 8 bits
        kv[token, 1] = bf16(-(kv[:256, 1].sum(0) * fade + kv[256:token, 1].sum(0)))
    pages, q = pages_with(cfg, [bf16(kv)], rng), bf16(np.ones((1, cfg.num_heads, cfg.head_dim)))
    got = check_each_way(twins, pages, decodes_of([512]), q)
    assert np.abs(got).max() < 1e-5 < np.abs(kv[:256, 1]).max()
    assert_same_bits(twins.test(lambda b: attend(b, pages, make_batch([Part(0, 1, 511)]), q)), got)


@over(HEADS)
def test_company_and_page_ids_change_no_bit(twins: Twins) -> None:
    cfg, rng = twins.config, rng_for("decode company")
    lengths = [*LENGTHS, *rng.integers(1, 1001, 60).tolist()]
    if twins.max_rows < MAX_ROWS:
        lengths = lengths[:18]
    kv = [make_kv(cfg, n, rng) for n in lengths]
    q = make_q(twins, len(lengths), rng)
    together = twins.test(lambda b: attend(b, pages_with(cfg, kv, rng_for("pages")), decodes_of(lengths), q))
    for i in (i for i in (0, 5, 12, 16, 18, 20, 70) if i < len(lengths)):
        alone = twins.test(
            lambda b, i=i: attend(
                b, pages_with(cfg, [kv[i]], rng_for("other pages", i)), decodes_of([lengths[i]]), q[i : i + 1]
            )
        )
        assert_same_bits(alone, together[i : i + 1])


@over(MANY_HEADS)
def test_many_query_heads_to_a_kv_head(twins: Twins) -> None:
    """Against the twin, and the rows of one prefill to the bit."""
    rng = rng_for("many heads")
    lengths = [1, 64, 257, 700]
    pages = pages_with(twins.config, [make_kv(twins.config, n, rng) for n in lengths], rng, POISON["nan"])
    check_each_way(twins, pages, decodes_of(lengths), make_q(twins, len(lengths), rng))
    longest = min(700, twins.max_rows // 4 * 3)
    q = make_q(twins, longest, rng)
    whole = twins.test(lambda b: attend(b, pages, make_batch([Part(3, longest)]), q))
    for last in (0, 15, 63, 255, 256, longest - 1):
        batch = make_batch([Part(3, 1, last)], num_decodes=1)
        row = twins.test(lambda b, batch=batch, last=last: attend(b, pages, batch, q[last : last + 1]))
        assert_same_bits(row, whole[last : last + 1])


@over(SMALL)
def test_rows_without_kv_are_left_alone(twins: Twins) -> None:
    """Padding, and a sequence that has ended: nothing is written, and others' bits are as without them."""
    rng, nobody = rng_for("padding"), MAX_SEQS  # its slot has no pages
    lengths = [600, 1, FIVE_SPLITS, 256, 40]
    kv = [make_kv(twins.config, n, rng) for n in lengths]
    pages = pages_with(twins.config, kv, rng)
    slots = [nobody, 2, 0, nobody, nobody, 4, 3, 1, nobody]
    starts = [-1 if slot in (nobody, 4) else lengths[slot] - 1 for slot in slots]
    live = [i for i, start in enumerate(starts) if start >= 0]
    q = make_q(twins, len(slots), rng)
    batch = make_batch([Part(*part) for part in zip(slots, [1] * 9, starts, strict=True)], num_decodes=9)
    alone = check_each_way(twins, pages, decodes_of(lengths, [slots[i] for i in live]), q[live])
    for got in attend_in_each_way(twins, pages, batch, q).values():
        assert_same_bits(got[live], alone)
        left_alone = np.delete(got, live, axis=0)
        np.testing.assert_array_equal(left_alone.view(np.uint32), 0xFFFF0000)  # as poisoned


@over(SMALL)
def test_blocks_that_share_a_sequence(twins: Twins) -> None:
    """One where its splits are few, or where there are blocks enough for the GPU; else one for each split."""
    tested: Any = twins.tested
    few = inspect.getmodule(type(tested)).FEW_SPLITS
    enough = -(-tested._gpu.num_sms // twins.config.num_kv_heads)  # rows: each has a block for each KV head
    assert [tested._splits_at_once(1, splits) for splits in (1, few, few + 1, 40)] == [1, 1, few + 1, 40]
    assert [tested._splits_at_once(rows, 40) for rows in (enough - 1, enough, 256)] == [40, 1, 1]


@over({name: HEADS[name] for name in ("ratio3_d128", "ratio8_d128")})
def test_less_shared_memory_changes_no_bit(
    twins: Twins, less_shared_memory: Callable[[ModelConfig], Backend]
) -> None:
    """A GPU with 99 KiB a block (sm_86, 89, 120), where V comes into K's place."""
    small = Twins.of(less_shared_memory(twins.config))
    rng = rng_for("less shared memory")
    lengths = [1, 64, 65, 255, 256, 257, FIVE_SPLITS]
    pages = pages_with(twins.config, [make_kv(twins.config, n, rng) for n in lengths], rng, POISON["nan"])
    batch, q = decodes_of(lengths), make_q(twins, len(lengths), rng)
    got = check_each_way(small, pages, batch, q)
    assert_same_bits(got, twins.test(lambda b: attend(b, pages, batch, q)))
