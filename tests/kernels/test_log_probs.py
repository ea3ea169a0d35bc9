"""Log-probabilities against NumPy, and against log-softmax in FP64; ids of the likeliest are equal.

Tolerance: of the sum of exponentials a thread adds one value after another, at most 251 of Llama's 128,256,
each rounded to 2^-24 of itself, as is each exponential to 2^-22: 2e-5 of the sum, so of its logarithm. The
result rounds twice, to 2^-23 of itself together.
"""

from __future__ import annotations

import numpy as np
import pytest
from sampled_rows import KINDS, Kind, masked, normal, spread, ties, with_nan
from twins import Twins, large, over, rng_for, small_config

from samir_vllm.backends import Backend
from samir_vllm.sampling import MAX_LOGPROBS

VOCABS = {f"vocab_{n}": small_config(vocab_size=n) for n in (1, 7, 33, 1003, 2048, 9001, 32_003, 128_256)}
"""Smaller than a warp, odd, a whole number of everything, more than a warp loads at a time, Llama's own."""

ATOL, RTOL = 2e-5, 2.0**-22

SLOW_COUNTS = [pytest.param(n, marks=pytest.mark.emulated_slow) for n in (1, 2)]

Found = tuple[np.ndarray, np.ndarray, np.ndarray]


def run(backend: Backend, logits: np.ndarray, token_ids: np.ndarray, count: int, *, dense: bool) -> Found:
    with backend.active():
        values = backend.from_numpy(logits) if dense else spread(backend, logits)
        chosen, top_ids, top = backend.log_probs(values, backend.from_numpy(token_ids), count)
        return backend.to_numpy(chosen), backend.to_numpy(top_ids), backend.to_numpy(top)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """FP64; of infinite logits all share the probability."""
    x = logits.astype(np.float64)
    greatest = x.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        x = np.where(x == greatest, 0, x - greatest)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def check(
    twins: Twins, logits: np.ndarray, token_ids: np.ndarray, count: int = 0, *, dense: bool = False
) -> Found:
    """Of rows without NaN."""
    assert not np.isnan(logits).any()
    token_ids = token_ids.astype(np.int32)
    with twins.tested.active():
        twins.tested.poison()
    got = run(twins.tested, logits, token_ids, count, dense=dense)
    want = run(twins.oracle, logits, token_ids, count, dense=dense)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    np.testing.assert_array_equal(got[1], want[1])
    in_fp64 = np.clip(log_softmax(logits), -np.finfo(np.float32).max, 0)
    chosen = np.where(token_ids < 0, np.nan, in_fp64[np.arange(len(logits)), token_ids])
    exact = (chosen, None, np.take_along_axis(in_fp64, want[1], axis=1))
    for i in (0, 2):
        assert not (got[i] > 0).any()
        for found in (got[i], want[i]):  # what FP32 has no number for is -inf
            near = np.clip(found.astype(np.float64), -np.finfo(np.float32).max, None)
            np.testing.assert_allclose(near, exact[i], rtol=RTOL, atol=ATOL)
    return got


def some_ids(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Any; the first and the last of the vocabulary; none."""
    ids = rng.integers(0, vocab, rows)
    ids[: min(rows, 3)] = [vocab - 1, 0, -1][:rows]
    return ids


def quick(kind: Kind) -> object:
    return pytest.param(kind, marks=[] if kind in (normal, ties, masked) else pytest.mark.emulated_slow)


@pytest.mark.parametrize("kind", [quick(kind) for kind in KINDS if kind is not with_nan])
@over(VOCABS)
def test_every_kind_of_logits(twins: Twins, kind: Kind) -> None:
    vocab, rng = twins.config.vocab_size, rng_for("log_probs", kind.__name__)
    check(twins, kind(rng, 4, vocab), some_ids(rng, 4, vocab), MAX_LOGPROBS)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("count", [0, *SLOW_COUNTS, *large(3, 19), 20])
@pytest.mark.parametrize("rows", [1, 19, *large(256)])
@over({name: VOCABS[name] for name in ("vocab_7", "vocab_1003", "vocab_128256")}, ["vocab_128256"])
def test_counts_and_rows(twins: Twins, rows: int, count: int, dense: bool) -> None:
    """Beyond the vocabulary a count is the vocabulary; rows side by side begin where they will."""
    if rows == 256 and (count != 20 or dense):
        pytest.skip("one case of so many rows is enough")
    vocab, rng = twins.config.vocab_size, rng_for("counts", rows)
    _, top_ids, top = check(twins, ties(rng, rows, vocab), some_ids(rng, rows, vocab), count, dense=dense)
    assert top_ids.shape == top.shape == (rows, min(count, vocab))


@over(VOCABS)
def test_the_likeliest_in_every_place(twins: Twins) -> None:
    """The 20 likeliest lie in one thread's part, one after the other, or each in another's."""
    vocab = twins.config.vocab_size
    count = min(vocab, MAX_LOGPROBS)
    logits = np.full((6, vocab), -9, np.float32)
    values = np.arange(count, dtype=np.float32)
    logits[0, :count] = values
    logits[1, -count:] = values
    logits[2, :: max(1, vocab // count)][:count] = values
    logits[3, (np.arange(count) * 128 + np.arange(count) % 4) % vocab] = values
    logits[4, vocab // 2 :][:count] = values[: len(logits[4, vocab // 2 :])]
    logits[5, :] = np.arange(vocab, 0, -1)
    check(twins, logits, np.zeros(6), MAX_LOGPROBS)


@over(VOCABS)
def test_lower_ids_come_first_on_a_tie(twins: Twins) -> None:
    """Zeros of both signs are equal; so are all ids of a flat row."""
    vocab = twins.config.vocab_size
    logits = np.full((3, vocab), -3.5, np.float32)
    logits[1, vocab // 2 :: 2], logits[1, vocab // 2 + 1 :: 2] = -0.0, 0.0
    logits[2, [0, vocab - 1]] = 3e38
    _, top_ids, _ = check(twins, logits, np.array([0, vocab - 1, 0]), MAX_LOGPROBS)
    np.testing.assert_array_equal(top_ids[0], np.arange(min(vocab, MAX_LOGPROBS)))
    assert vocab == 1 or top_ids[2, :2].tolist() == [0, vocab - 1]


@over(VOCABS)
def test_certainty_is_exactly_0(twins: Twins) -> None:
    """Never above it, and not -1e-8 either; -inf has no probability at all."""
    vocab = twins.config.vocab_size
    logits = np.full((2, vocab), -np.inf, np.float32)
    logits[1] = -200
    logits[:, vocab - 1] = 5
    chosen, _, top = check(twins, logits, np.array([vocab - 1, vocab - 1]), 2)
    np.testing.assert_array_equal(chosen, 0)
    np.testing.assert_array_equal(top[:, 0], 0)
    assert vocab == 1 or check(twins, logits, np.array([0, 0]))[0][0] == -np.inf


@over(VOCABS)
def test_infinite_logits(twins: Twins) -> None:
    vocab = twins.config.vocab_size
    logits = np.zeros((3, vocab), np.float32)
    logits[0] = -np.inf
    logits[1, vocab // 2 :] = np.inf
    logits[2, 0], logits[2, vocab - 1] = -np.inf, np.inf
    check(twins, logits, np.array([0, vocab - 1, vocab - 1]), MAX_LOGPROBS)


@over(VOCABS)
def test_rows_with_nan(twins: Twins) -> None:
    """Their log-probabilities are NaN, their ids those of other values, or none; other rows don't mind."""
    vocab, rng = twins.config.vocab_size, rng_for("nan")
    logits = normal(rng, 4, vocab)
    logits[0, vocab // 2] = np.nan
    logits[2] = -np.float32(np.nan)
    ids = np.zeros(4, np.int32)
    with twins.tested.active():
        twins.tested.poison()
    chosen, top_ids, top = run(twins.tested, logits, ids, MAX_LOGPROBS, dense=False)
    assert np.isnan(chosen[[0, 2]]).all()
    assert np.isnan(top[[0, 2]]).all()
    assert (top_ids[2] == -1).all()
    count = min(vocab - 1, MAX_LOGPROBS)
    others = np.argsort(-logits[0], kind="stable")  # NaN last
    np.testing.assert_array_equal(top_ids[0, :count], others[:count])
    expected = check(twins, logits[[1, 3]], ids[:2], MAX_LOGPROBS)
    for found, alone in zip((chosen, top_ids, top), expected, strict=True):
        np.testing.assert_array_equal(found[[1, 3]], alone)
