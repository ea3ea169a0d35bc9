"""Chosen tokens against the reference sampler: whole numbers from the masses on, so equal.

The kernel has several ways to a token; a test that is there for one of them says so. Their borders are
constants of ``sample.cu``, read from it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sampled_rows import (
    KINDS,
    Kind,
    Row,
    equal,
    huge,
    masked,
    normal,
    peaked,
    sample,
    ties,
    tiny,
    wish,
    with_nan,
)
from twins import Twins, large, over, rng_for, small_config

from samir_vllm.backends.reference_sampler import MASS_BITS, exponentials, random_bits, settings_of
from samir_vllm.config import NAN_TOKEN

SOURCE = (Path(__file__).parents[2] / "cuda_src" / "sample.cu").read_text(encoding="utf-8")


def constant(name: str) -> int:
    found = re.search(rf"\b{name} = (\d+)", SOURCE)
    assert found is not None
    return int(found[1])


LIST_SIZE, MANY, SEGMENTS = (constant(name) for name in ("LIST_SIZE", "MANY", "SEGMENTS"))
THREADS = constant("THREADS")
WARPS = THREADS // 32


def vocabs(*sizes: int) -> dict[str, Any]:
    return {f"vocab_{n}": small_config(vocab_size=n) for n in sizes}


WIDE = 9001
"""More than the list holds, than a value for each segment, than a warp loads at a time of its part, and than
ends in one go of ``pick``: all that a vocabulary of 128,256 asks for, and the emulator has time for."""

assert LIST_SIZE < WIDE
assert 4 * SEGMENTS < WIDE
assert WARPS * 512 < WIDE
assert WARPS * THREADS < WIDE

ALL = vocabs(1, 7, 33, 1003, 2049, WIDE, 32_003, 128_256)
LONG = vocabs(WIDE, 128_256)
"""Vocabularies where every way can be taken."""


def filters(vocab: int) -> list[dict[str, Any]]:
    """Every filter at its awkward values, alone and with others."""
    counts = (1, 2, 50, MANY, MANY + 1, vocab - 1, vocab, vocab + 1, 10**12)
    return [
        *({"temperature": t} for t in (0, 1e-45, 1e-38, 1e-3, 0.7, 1, 100)),
        *({"temperature": 1, "top_k": k} for k in counts),
        *({"temperature": 1, "top_p": p} for p in (0, 1e-12, 0.5, 0.95, 0.999999, 1)),
        *({"temperature": 1, "min_p": p} for p in (1e-6, 0.1, 1)),
        {"temperature": 1e-38, "top_p": 0.7},
        {"temperature": 100, "top_p": 0.5},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
        {"temperature": 1, "top_k": MANY + 500, "top_p": 0.8},
        {"temperature": 2, "top_k": 30, "min_p": 0.2},
        {"temperature": 2, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1, "top_k": 100, "top_p": 0.99, "min_p": 0.05},
        {"temperature": 3, "top_k": MANY + 500, "top_p": 0.999, "min_p": 1e-3},
    ]


def rows_of(wishes: list[dict[str, Any]], key: object) -> list[Row]:
    """A row for each, with a seed, a position and an index of its own."""
    rng = rng_for("rows", key)
    return [
        Row(
            wish(int(rng.integers(2**64, dtype=np.uint64)), index=int(rng.integers(64)), **params),
            position=int(rng.integers(16_384)),
        )
        for params in wishes
    ]


# Ways to a token


def draws(count: int, **params: Any) -> list[Row]:
    """The same wishes at so many positions."""
    return [Row(wish(11, **params), position=p) for p in range(count)]


def check(twins: Twins, logits: np.ndarray, **params: Any) -> np.ndarray:
    """Rows that all want the same."""
    return sample(twins, logits, draws(len(logits), **params))


@over(LONG)
def test_way_without_filters(twins: Twins) -> None:
    """The greatest logit stands in each part of a row in turn; sums of parts take its place in memory."""
    vocab = twins.config.vocab_size
    logits = normal(rng_for("no filter"), 6, vocab)
    logits[np.arange(6), [0, 1, vocab // 3, vocab // 2, vocab - 2, vocab - 1]] = 15
    check(twins, logits, temperature=1.5)


@over(LONG)
def test_way_of_a_few_likely_tokens(twins: Twins) -> None:
    """All that is kept can be listed; the likeliest stand in one segment, or in each of many."""
    vocab = twins.config.vocab_size
    logits = normal(rng_for("few"), 4, vocab)
    logits[0, :60] = logits[1, -60:] = 12
    logits[2, :: vocab // 60] = 12
    check(twins, logits, temperature=1, top_k=50)
    check(twins, logits, temperature=1, top_p=0.9)


@over(LONG)
def test_way_of_more_ties_than_can_be_listed(twins: Twins) -> None:
    """``top_k`` would be listed, but for the ties at its border: the lower ids are kept."""
    vocab = twins.config.vocab_size
    logits = np.full((4, vocab), -5, np.float32)
    for row in logits:
        row[rng_for("ties", vocab).permutation(vocab)[: LIST_SIZE + 100]] = 1
        assert np.count_nonzero(row == 1) > LIST_SIZE
    logits[:, -20:] = 2
    got = check(twins, logits, temperature=3, top_k=60)
    kept = [*np.flatnonzero(logits[0] == 1)[:40], *range(vocab - 20, vocab)]
    assert set(got) <= set(kept)


@over(LONG)
def test_way_of_equal_values_cut_by_id(twins: Twins) -> None:
    """All are equal, so ids alone decide: the cut is exact at either end, and everywhere between."""
    vocab = twins.config.vocab_size
    counts = (1, 2, MANY, MANY + 1, LIST_SIZE, LIST_SIZE + 1, vocab - 1)
    rows = [Row(wish(3, temperature=1, top_k=k), position=p) for p, k in enumerate(counts)]
    got = sample(twins, equal(rng_for(), len(rows), vocab), rows)
    assert (got < counts).all()


@over(LONG)
def test_way_of_a_nucleus_larger_than_the_list(twins: Twins) -> None:
    """Flat enough that even a list full of tokens holds too little: the cut is searched for in the row."""
    vocab = twins.config.vocab_size
    logits = normal(rng_for("nucleus"), 4, vocab) * np.float32(0.1)
    top = np.sort(np.exp(logits.astype(np.float64)), axis=1)
    assert (top[:, -LIST_SIZE:].sum(axis=1) < 0.6 * top.sum(axis=1)).all()
    check(twins, logits, temperature=1, top_p=0.6)
    check(twins, np.round(logits, 1), temperature=1, top_p=0.6)


@over(LONG)
def test_way_of_a_top_k_larger_than_the_list(twins: Twins) -> None:
    """Then with a nucleus of it, with ties at the border, and with infinities, between which nothing lies."""
    vocab = twins.config.vocab_size
    logits = normal(rng_for("top_k"), 3, vocab)
    logits[1] = np.round(logits[1])
    logits[2, ::2] = -np.inf
    logits[2, 5] = np.inf
    check(twins, logits, temperature=2, top_k=MANY + 1)
    check(twins, logits, temperature=2, top_k=LIST_SIZE + 3, top_p=0.9)


@over(LONG)
def test_way_of_one_value_with_all_the_mass(twins: Twins) -> None:
    """A nucleus of the greatest value alone, behind a long ``top_k``: there is nothing to narrow."""
    vocab = twins.config.vocab_size
    logits = normal(rng_for("one value"), 3, vocab)
    for row, places in zip(logits, ([3, 5, 4000], [0, vocab // 2, vocab - 1], range(40)), strict=True):
        row[list(places)] = 20
    for top_p in (0.5, 0.9):
        check(twins, logits, temperature=1e-45, top_k=MANY + 1, top_p=top_p)


# Borders


@pytest.mark.parametrize("top_k", [0, 1500])
@over(vocabs(WIDE))
def test_half_of_equal_masses_is_half_of_the_tokens(twins: Twins, top_k: int) -> None:
    """A nucleus that ends with a token doesn't want the next one; 2,048 masses and their halves are exact."""
    logits = np.full((5, WIDE), -np.inf, np.float32)
    logits[:, 1:1025] = 4
    got = check(twins, logits, temperature=1, top_p=0.5, top_k=top_k)
    assert got.max() <= 512
    assert got.max() > 256


def nucleus_just_beyond_one_token(scale: float) -> tuple[float, float]:
    """The second of two logits, the first 0, and a ``top_p`` just above the first one's part of both."""
    settings = settings_of(wish(temperature=1))
    for second in -scale * np.arange(1, 20_000, dtype=np.float32):
        e = exponentials(np.array([0, second], np.float32), settings["scale"])
        mass = sum(int(float(x) * 2**MASS_BITS) for x in e)
        top_p = -(-(2 ** (MASS_BITS + 32)) // mass)
        if 0 < top_p * mass - 2 ** (MASS_BITS + 32) < 2**32:
            return float(second), top_p / 2**32
    raise AssertionError("there is none")


@pytest.mark.parametrize("top_k", [0, 1500])
@over(vocabs(WIDE))
def test_a_nucleus_is_rounded_up(twins: Twins, top_k: int) -> None:
    """2^-32 of a mass missing asks for another token."""
    second, top_p = nucleus_just_beyond_one_token(1e-5)
    logits = np.full((5, WIDE), -np.inf, np.float32)
    logits[:, 100], logits[:, 7] = 0, second
    got = check(twins, logits, temperature=1, top_p=top_p, top_k=top_k)
    assert set(got) == {7, 100}


@over(vocabs(1003, WIDE))
def test_what_no_mass_is_left_of_is_never_chosen(twins: Twins) -> None:
    """2^-43 of the greatest is the least mass; what is below has none, at any ``top_p`` below 1."""
    logits = np.full((4, twins.config.vocab_size), -50, np.float32)
    logits[:, 500] = 0
    assert (check(twins, logits, temperature=1, top_p=0.9999999) == 500).all()
    assert (check(twins, logits, temperature=1) == 500).all()


@pytest.mark.parametrize(("exponent", "seed"), [(24.3, 33318493), (30.7, 15128734), (39.9, 15128734)])
@over(vocabs(WIDE))
def test_least_masses(twins: Twins, exponent: float, seed: int) -> None:
    """A token of all the mass, behind many that have next to none; the number drawn falls among these.

    Which of them it is depends on each bit of a mass that its significand has, or no longer has.
    """
    row = Row(wish(seed, temperature=1))
    assert random_bits(seed, row.position + 1, 0) < 2.0**41
    logits = np.full((1, WIDE), -exponent * np.log(2), np.float32)
    logits[0, -1] = 0
    [token] = sample(twins, logits, [row])
    assert 0 < token < WIDE - 1


@over(vocabs(1003))
def test_next_to_no_top_p_keeps_one_token(twins: Twins) -> None:
    """Of equal ones the first; the mass that it is a part of is that of what ``top_k`` keeps."""
    logits = equal(rng_for(), 4, 1003)
    for top_k in (0, 50):
        assert not check(twins, logits, temperature=1, top_k=top_k, top_p=1e-6).any()


def borders_of_one_token(logits: np.ndarray) -> list[float]:
    """Of a row whose token 0 is the greatest: the ``top_p`` up to which it is kept alone, and the next."""
    e = exponentials(logits, settings_of(wish(temperature=1))["scale"])
    mass = int((e.astype(np.float64) * 2**MASS_BITS).astype(np.uint64).sum())
    last = 2 ** (MASS_BITS + 32) // mass
    return [last / 2**32, (last + 1) / 2**32]


@over(vocabs(7), [])
def test_masses_are_exact_to_the_last_bit(twins: Twins) -> None:
    """One bit of one significand, and a nucleus has a token more or less, as likely as the others."""
    rows, logits = [], []
    for case in range(10):
        values = rng_for("last bit", case).uniform(-1.5, -0.05, 7).astype(np.float32)
        values[0], values[1] = 0, -0.01
        for top_p in borders_of_one_token(values):
            rows += [Row(wish(case, temperature=1, top_p=top_p), position=p) for p in range(3)]
            logits += [values] * 3
    got = sample(twins, np.array(logits), rows).reshape(10, 2, 3)
    assert not got[:, 0].any()
    assert set(got[:, 1].ravel()) == {0, 1}


@pytest.mark.parametrize("top_k", [2, 5])
@over(vocabs(1003))
def test_the_last_of_top_k_can_come(twins: Twins, top_k: int) -> None:
    """Those before it are far above, those after it just below: a threshold in the gap lists one too few."""
    rng = rng_for("last of top_k", top_k)
    at = rng.permutation(1003)
    logits = np.empty((9, 1003), np.float32)
    logits[:, at[top_k:]] = rng.uniform(2.2, 2.39, 1003 - top_k)
    logits[:, at[top_k - 1]] = 2.4
    logits[:, at[: top_k - 1]] = 3.1 + 0.01 * np.arange(top_k - 1)
    got = check(twins, logits, temperature=1, top_k=top_k)
    assert at[top_k - 1] in got


# The generator


@over({"long_context": replace(small_config(), max_position_embeddings=2**18)})
def test_seed_position_and_index(twins: Twins) -> None:
    """Each of their bits has its place in the generator: as few tokens coincide as chance lets."""
    seeds = (0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1)
    places = [(s, 5, 0) for s in seeds]
    places += [(9, p, 0) for p in (0, 1, 15, 255, 2**16, 2**17, 2**18 - 1)]
    places += [(9, 5, i) for i in (1, 2, 63)]
    rows = [Row(wish(s, index=i, temperature=1), position=p) for s, p, i in places]
    got = sample(twins, equal(rng_for(), len(rows), 1003), rows)
    assert len(set(got.tolist())) >= len(rows) - 2


@over(vocabs(1003))
def test_tokens_come_from_the_whole_vocabulary(twins: Twins) -> None:
    """The upper half of the random number matters, and the lower ids come first."""
    rows = rows_of([{"temperature": 1}] * 19, "whole")
    got = sample(twins, equal(rng_for(), len(rows), 1003), rows)
    assert got.min() < 250
    assert got.max() > 750


# Any logits


QUICK: dict[int, list[Kind]] = {
    7: [ties, masked],
    1003: [normal, ties, masked, huge, tiny, with_nan],
    WIDE: [normal],
}
"""What `make test` has time for on the emulator; the rest is slow there."""


def fuzz_cases() -> list[Any]:
    def marks(vocab: int, kind: Kind) -> list[pytest.MarkDecorator]:
        if vocab > WIDE:
            return [pytest.mark.large]
        return [] if kind in QUICK.get(vocab, []) else [pytest.mark.emulated_slow]

    return [
        pytest.param(config, kind, id=f"{name}-{kind.__name__}", marks=marks(config.vocab_size, kind))
        for name, config in ALL.items()
        for kind in KINDS
    ]


@pytest.mark.parametrize(("twins", "kind"), fuzz_cases(), indirect=["twins"])
def test_every_filter(twins: Twins, kind: Kind) -> None:
    wishes = filters(twins.config.vocab_size)
    rows = rows_of(wishes[:: 1 if twins.config.vocab_size > MANY // 2 else 3], kind.__name__)
    got = sample(twins, kind(rng_for(kind.__name__), len(rows), twins.config.vocab_size), rows)
    assert kind is not with_nan or (got[::2] == NAN_TOKEN).all()


@pytest.mark.parametrize("kind", [normal, pytest.param(ties, marks=pytest.mark.emulated_slow)])
@over(vocabs(WIDE, 32_003), ["vocab_32003"])
def test_rows_that_lie_side_by_side(twins: Twins, kind: Kind) -> None:
    """Most of them begin at no multiple of 16 bytes."""
    wishes = [{"temperature": 1, "top_k": MANY + 1}, {"temperature": 1, "top_p": 0.9}, {"temperature": 1}]
    rows = rows_of(wishes, "dense")
    logits = kind(rng_for("dense"), len(rows), twins.config.vocab_size)
    sample(twins, logits, rows, dense=True)


@pytest.mark.parametrize("count", [1, 19, *large(256)])
@over(vocabs(1003, 128_256))
def test_rows_do_not_mind_their_company(twins: Twins, count: int) -> None:
    """Greedy rows, rows with NaN, and others; a row's token is its own also when it runs alone."""
    vocab = twins.config.vocab_size
    wishes = (filters(vocab) * 8)[:count]
    rows = rows_of(wishes, "company")
    rows[3::7] = [Row(None) for _ in rows[3::7]]
    logits = peaked(rng_for("company"), count, vocab)
    logits[5::11, vocab // 2] = np.nan
    together = sample(twins, logits, rows)
    assert (together[5::11] == NAN_TOKEN).all()
    greedy = [i for i in range(3, count, 7) if together[i] != NAN_TOKEN]
    np.testing.assert_array_equal(together[greedy], logits[greedy].argmax(axis=1))
    for i in {0, count // 2, count - 1}:
        assert sample(twins, logits[i : i + 1], rows[i : i + 1]) == together[i]
