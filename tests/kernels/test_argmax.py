"""Greedy ids against NumPy: no arithmetic, so equal. Lowest id on a tie, -1 for a row with NaN."""

from __future__ import annotations

import numpy as np
import pytest
from twins import ROWS, Twins, over, rng_for, small_config

from samir_vllm.config import NAN_TOKEN

VOCABS = {f"vocab_{n}": small_config(vocab_size=n) for n in (1, 7, 33, 1003, 2048, 32_003, 128_256)}
"""Smaller than a warp, odd, a whole number of tiles, Llama's own."""


def check(twins: Twins, logits: np.ndarray) -> np.ndarray:
    got, want = twins.both(lambda b: b.argmax(b.from_numpy(logits)))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)
    return got


def flat(twins: Twins, rows: int, value: float = -1.0) -> np.ndarray:
    return np.full((rows, twins.config.vocab_size), value, np.float32)


def places(vocab: int) -> np.ndarray:
    """Every residue of a power of two, both ends, and some between."""
    powers = 2 ** np.arange(17)
    some = rng_for(vocab).integers(0, vocab, 50)
    near = np.concatenate([powers - 1, powers, powers + 1, vocab - powers, [0, vocab // 2], some])
    return np.unique(near[(near >= 0) & (near < vocab)])


@pytest.mark.parametrize("rows", ROWS)
@over(VOCABS)
def test_rows(twins: Twins, rows: int) -> None:
    check(twins, rng_for("argmax", rows).standard_normal((rows, twins.config.vocab_size), np.float32))


@over(VOCABS)
def test_winner_in_every_place(twins: Twins) -> None:
    at = places(twins.config.vocab_size)
    logits = rng_for("winner").uniform(-9, 0, (len(at), twins.config.vocab_size)).astype(np.float32)
    logits[np.arange(len(at)), at] = 1e-6
    np.testing.assert_array_equal(check(twins, logits), at)


@over(VOCABS)
def test_lowest_id_wins_a_tie(twins: Twins) -> None:
    at = places(twins.config.vocab_size)
    logits = flat(twins, len(at))
    for row, lowest in zip(logits, at, strict=True):
        row[lowest] = 5
        row[at[at > lowest]] = 5
    np.testing.assert_array_equal(check(twins, logits), at)


@pytest.mark.parametrize("value", [0.0, -7.5, np.inf, -np.inf, 3e38, -3e38, 1e-40])
@over(VOCABS)
def test_all_equal(twins: Twins, value: float) -> None:
    assert not check(twins, flat(twins, 3, value)).any()


@over(VOCABS)
def test_zeros_of_both_signs_are_a_tie(twins: Twins) -> None:
    vocab = twins.config.vocab_size
    logits = flat(twins, 2)
    logits[0, vocab // 3], logits[0, vocab - 1] = -0.0, 0.0
    logits[1, vocab // 3], logits[1, vocab - 1] = 0.0, -0.0
    check(twins, logits)


@over(VOCABS)
def test_infinities(twins: Twins) -> None:
    """Rows masked but for one id; a row that holds both infinities."""
    at = places(twins.config.vocab_size)
    logits = flat(twins, len(at) + 1, -np.inf)
    logits[np.arange(len(at)), at] = -100
    logits[-1, -1] = np.inf
    check(twins, logits)


@pytest.mark.parametrize("company", ["plain", "inf", "minus_inf"])
@over(VOCABS)
def test_nan_in_every_place(twins: Twins, company: str) -> None:
    """A NaN of either sign beats even infinity; the row below it keeps its winner."""
    at = places(twins.config.vocab_size)
    logits = flat(twins, 2 * len(at), {"plain": -1.0, "inf": np.inf, "minus_inf": -np.inf}[company])
    logits[1::2] = -1
    nans = np.where(np.arange(len(at)) % 2, np.float32(np.nan), -np.float32(np.nan))
    logits[np.arange(0, 2 * len(at), 2), at] = nans
    logits[np.arange(1, 2 * len(at), 2), at] = 1
    got = check(twins, logits)
    assert (got[::2] == NAN_TOKEN).all()
    np.testing.assert_array_equal(got[1::2], at)


@over(VOCABS)
def test_rows_of_nothing_but_nan(twins: Twins) -> None:
    assert (check(twins, flat(twins, 19, np.nan)) == NAN_TOKEN).all()
