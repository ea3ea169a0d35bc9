"""Masks of allowed tokens against a rule read bit by bit: no arithmetic, so equal to the bit.

Only where a forbidden token's logit is NaN any NaN will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import emulated
import numpy as np
import pytest
from sampled_rows import KINDS, Kind, Row, infinite, normal, seat, wish, with_nan
from twins import Twins, large, over, rng_for, small_config

from samir_vllm.backends import Array, Backend
from samir_vllm.config import NAN_TOKEN
from samir_vllm.errors import DeviceError, InvariantError

VOCABS = {f"vocab_{n}": small_config(vocab_size=n) for n in (7, 32, 1003, 4099, 128_256)}
"""Less than a word, one, several with the last begun, more than two blocks take of a row, Llama's own."""

SMALL = {"vocab_1003": VOCABS["vocab_1003"]}

Masks = Sequence[tuple[np.ndarray, np.ndarray]]
"""Rows int32 [M] and masks uint32 [M, words], one after the other."""


def words_of(vocab: int) -> int:
    return -(-vocab // 32)


def allowing(vocab: int, *ids: Sequence[int]) -> np.ndarray:
    """Masks with the bits of these tokens; those behind the vocabulary are 1."""
    masks = np.zeros((len(ids), words_of(vocab)), np.uint32)
    for mask, allowed in zip(masks, ids, strict=True):
        for i in (*allowed, *range(vocab, 32 * len(mask))):
            mask[i // 32] |= np.uint32(1 << i % 32)
    return masks


def random_masks(rng: np.random.Generator, count: int, vocab: int) -> np.ndarray:
    """Half of the tokens, few, or nearly all."""
    masks = rng.integers(0, 2**32, (3, count, words_of(vocab)), np.uint32)
    kinds = np.arange(count) % 3
    few, many = masks[0] & masks[1] & masks[2], masks[0] | masks[1] | masks[2]
    return np.choose(kinds[:, None], [masks[0], few, many]).astype(np.uint32)


def is_allowed(masks: np.ndarray, vocab: int) -> np.ndarray:
    """bool [M, vocab]."""
    ids = np.arange(vocab)
    return (masks[:, ids // 32] >> (ids % 32).astype(np.uint32) & np.uint32(1)).astype(bool)


def mask(backend: Backend, values: Array, rows: np.ndarray, masks: np.ndarray) -> None:
    """The backend gets copies, which are something else as soon as it has had them."""
    rows, masks = rows.astype(np.int32), masks.copy()
    backend.mask_logits(values, rows, masks)
    rows[:] = -1
    masks[:] = ~masks


def masked_rows(twins: Twins, logits: np.ndarray, steps: Masks, *, dense: bool = False) -> np.ndarray:
    """Logits [L, vocab] after some masks, FP32; both backends give what the bits say.

    Args:
        twins: the backends.
        logits: FP32 [L, vocab].
        steps: what is masked, one call after another.
        dense: rows lie side by side; else some infinities lie between them, which must stay.
    """
    vocab = twins.config.vocab_size
    want, is_open = logits.copy(), np.zeros(logits.shape, bool)
    for rows, masks in steps:
        forbidden = ~is_allowed(masks, vocab)
        is_open[rows] |= forbidden & np.isnan(logits[rows])
        want[rows] = np.where(forbidden & ~np.isnan(want[rows]), np.float32(-np.inf), want[rows])
    whole = np.full((len(logits), vocab if dense else (vocab + 8) // 4 * 4), np.inf, np.float32)
    whole[:, :vocab] = logits

    def body(backend: Backend) -> Array:
        values = backend.from_numpy(whole)
        for rows, masks in steps:
            mask(backend, values[:, :vocab], rows, masks)
        return values

    for got in twins.both(body):
        assert (got[:, vocab:] == np.inf).all()
        assert np.isnan(got[:, :vocab][is_open]).all()
        differ = (got[:, :vocab].copy().view(np.uint32) != want.view(np.uint32)) & ~is_open
        assert np.argwhere(differ)[:9].tolist() == []
    return got[:, :vocab]


def quick(kind: Kind) -> object:
    return pytest.param(kind, marks=[] if kind in (normal, with_nan) else pytest.mark.emulated_slow)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("kind", [quick(kind) for kind in KINDS])
@over(VOCABS, ["vocab_128256"])
def test_every_kind_of_logits(twins: Twins, kind: Kind, dense: bool) -> None:
    """Some rows, in any order; the others stay as they are."""
    vocab, rng = twins.config.vocab_size, rng_for("mask", kind.__name__)
    rows = rng.permutation(19)[:13]
    masked_rows(twins, kind(rng, 19, vocab), [(rows, random_masks(rng, 13, vocab))], dense=dense)


@pytest.mark.parametrize("count", [1, *large(19, 256, 2304)])
@over(VOCABS, ["vocab_128256"])
def test_all_rows(twins: Twins, count: int) -> None:
    """As many as there is room for, in one call."""
    vocab, rng = twins.config.vocab_size, rng_for("rows", count)
    if count == 2304 and vocab == 128_256:
        pytest.skip("the host would compare gigabytes")
    masks = random_masks(rng, count, vocab)
    masked_rows(twins, normal(rng, count, vocab), [(rng.permutation(count), masks)])


@over(VOCABS, ["vocab_128256"])
def test_one_token_at_every_edge(twins: Twins) -> None:
    """Allowed alone, and alone forbidden; the ends of words, of what a block takes, of the vocabulary."""
    vocab = twins.config.vocab_size
    near = [0, 1, 30, 31, 32, 33, 63, 64, 255, 256, 1023, 1024, 1025, 2048, vocab // 2, vocab - 2, vocab - 1]
    ids = [i for i in sorted(set(near)) if i < vocab]
    only = allowing(vocab, *([i] for i in ids))
    masks = np.concatenate([only, ~only])
    got = masked_rows(twins, np.zeros((len(masks), vocab), np.float32), [(np.arange(len(masks)), masks)])
    for row, but_one, i in zip(got[: len(ids)], got[len(ids) :], ids, strict=True):
        assert np.flatnonzero(row == 0).tolist() == [i]
        assert np.flatnonzero(but_one != 0).tolist() == [i]


@over(VOCABS, ["vocab_128256"])
def test_all_and_none(twins: Twins) -> None:
    """All allowed changes no bit; none leaves nothing but NaN."""
    vocab, rng = twins.config.vocab_size, rng_for("all")
    logits = with_nan(rng, 4, vocab)
    masks = allowing(vocab, range(vocab), [], range(vocab), [])
    got = masked_rows(twins, logits, [(np.arange(4)[::-1].copy(), masks)])
    assert np.isneginf(got[[0, 2]][~np.isnan(logits[[0, 2]])]).all()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(logits))


@pytest.mark.parametrize("beyond", [0, 2**32 - 1])
@over(VOCABS, ["vocab_128256"])
def test_bits_behind_the_vocabulary(twins: Twins, beyond: int) -> None:
    """They may be anything, and what lies behind a row stays."""
    vocab, rng = twins.config.vocab_size, rng_for("beyond")
    masks = random_masks(rng, 3, vocab)
    if vocab % 32:
        inside = np.uint32(2 ** (vocab % 32) - 1)
        masks[:, -1] = masks[:, -1] & inside | np.uint32(beyond) & ~inside
    masked_rows(twins, normal(rng, 3, vocab), [(np.arange(3), masks)])


@over(SMALL)
def test_what_a_value_is(twins: Twins) -> None:
    """Zeros, subnormals, infinities, NaN with what they carry: the same where allowed, else -inf, or NaN."""
    bits = [0, 0x80000000, 1, 0x807FFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000]
    nans = [0x7FC00123, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF]
    logits = np.zeros((2, 1003), np.float32)
    logits[:, 500 : 500 + 11] = np.array([*bits, *nans], np.uint32).view(np.float32)
    got = masked_rows(twins, logits, [(np.array([1]), allowing(1003, [0]))])
    assert np.isneginf(got[1, 500 : 500 + 7]).all()
    assert np.isnan(got[1, 500 + 7 : 500 + 11]).all()


@over(SMALL)
def test_several_calls(twins: Twins) -> None:
    """Each has masks of its own, whatever lies there of the one before; a row's meet in what all allow."""
    rng = rng_for("calls")
    counts = (13, 1, 5, 19)
    steps = [(rng.permutation(19)[:n], random_masks(rng, n, 1003)) for n in counts]
    masked_rows(twins, infinite(rng, 19, 1003), steps)


def chosen_of(
    twins: Twins, logits: np.ndarray, rows: Sequence[Row], steps: Masks, sampled: bool
) -> np.ndarray:
    """Tokens int32 [L] of adjusted and masked logits; the oracle's are the same."""
    vocab = twins.config.vocab_size

    def body(backend: Backend) -> Array:
        inputs = backend.stage(seat(backend, rows))
        whole = np.full((len(logits), (vocab + 8) // 4 * 4), np.inf, np.float32)
        whole[:, :vocab] = logits
        values = backend.from_numpy(whole)[:, :vocab]
        backend.adjust_logits(values, inputs)
        for numbers, masks in steps:
            mask(backend, values, numbers, masks)
        return backend.sample(values, inputs) if sampled else backend.argmax(values)

    got, want = twins.both(body)
    np.testing.assert_array_equal(got, want)
    return got


PARAMS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 1.0},
    {"temperature": 1.0, "logit_bias": {3: 50.0, 900: 50.0}},
    {"temperature": 0.0, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sample"])
@over(SMALL | {"vocab_128256": VOCABS["vocab_128256"]}, ["vocab_128256"])
def test_only_what_is_allowed_is_chosen(twins: Twins, sampled: bool) -> None:
    """With every way to choose, and biases for what is forbidden; a row without a mask has its own token."""
    vocab, rng = twins.config.vocab_size, rng_for("chosen")
    count = 4 * len(PARAMS)
    rows = [Row(wish(i, **PARAMS[i % len(PARAMS)]), prompt=(1, 2), position=9 + i) for i in range(count)]
    logits = normal(rng, count, vocab)
    ids = [rng.permutation(np.delete(np.arange(vocab), [3, 900]))[:n].tolist() for n in (1, 2, 30, 500)]
    numbers = rng.permutation(count)[: count - 3]
    allowed = [ids[i % 4] for i in range(len(numbers))]
    plain = chosen_of(twins, logits, rows, [], sampled)
    got = chosen_of(twins, logits, rows, [(numbers, allowing(vocab, *allowed))], sampled)
    for row, tokens in zip(numbers.tolist(), allowed, strict=True):
        assert got[row] in tokens
    others = np.setdiff1d(np.arange(count), numbers)
    np.testing.assert_array_equal(got[others], plain[others])
    assert (got != plain).sum() > count // 2  # the masks had something to say


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sample"])
@over(SMALL)
def test_a_forbidden_nan_still_shows(twins: Twins, sampled: bool) -> None:
    """And one in an allowed place; a row where nothing may come has the token that NumPy takes."""
    logits = normal(rng_for("nan"), 4, 1003)
    logits[0, 700], logits[1, 5] = np.nan, -np.float32(np.nan)
    rows = [Row(wish(temperature=1))] * 4
    masks = allowing(1003, [5, 6], [5, 6], [5, 6], [])
    got = chosen_of(twins, logits, rows, [(np.arange(4), masks)], sampled)
    assert (got[:2] == NAN_TOKEN).all()
    assert got[2] in (5, 6)


@over(SMALL)
def test_a_wrong_call_changes_nothing(twins: Twins) -> None:
    """What a kernel would take for something else is refused in one line."""
    backend, logits = twins.tested, normal(rng_for("wrong"), 3, 1003)
    rows, masks = np.array([0, 2], np.int32), np.zeros((2, 32), np.uint32)
    wide = np.zeros((2, 64), np.uint32)
    with backend.active():
        values = backend.from_numpy(logits)
        for rows_given, masks_given, says in (
            (rows.astype(np.int64), masks, "rows is int64"),
            (rows[:, None], masks, "rows is int32 (2, 1)"),
            (np.zeros(4, np.int32)[::2], masks, "rows is int32 (2,), not contiguous"),
            (rows, masks.view(np.int32), "masks is int32"),
            (rows, wide, "masks is uint32 (2, 64)"),
            (rows, masks[:1], "masks is uint32 (1, 32)"),
            (rows, wide[:, :32], "masks is uint32 (2, 32), not contiguous"),
            (np.array([0, 3], np.int32), masks, "masks for 2 rows, 0 to 3, of 3 rows"),
            (np.array([-1, 0], np.int32), masks, "masks for 2 rows, -1 to 0, of 3 rows"),
            (rows[:0], masks[:0], "masks for 0 rows"),
        ):
            with pytest.raises(InvariantError) as caught:
                backend.mask_logits(values, rows_given, masks_given)
            assert str(caught.value).startswith(says)
            assert "\n" not in str(caught.value)
        with pytest.raises(InvariantError, match=r"logits are float32 \(3, 1000\)"):
            backend.mask_logits(values[:, :1000], rows, masks)
        np.testing.assert_array_equal(backend.to_numpy(values), logits)


@pytest.mark.emulated
@emulated.needs_compiler
def test_memory_for_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocated when it is first wanted, for every call to come; one that finds no room changes nothing."""
    module = emulated.load_cuda_backend()
    backend = module.CudaBackend(SMALL["vocab_1003"], max_tokens=16, max_num_seqs=4, max_logit_rows=4096)
    rows, masks = np.arange(2, dtype=np.int32), np.zeros((2, 32), np.uint32)
    values = backend.from_numpy(np.zeros((3, 1003), np.float32))
    no_memory = type("NoMemory", (Exception,), {})
    room = 4096 * 4  # for the numbers of rows, but no masks

    def empty(shape: Any, dtype: Any) -> Any:
        if np.prod(shape) * np.dtype(dtype).itemsize > room:
            raise no_memory
        return emulated.empty(shape, dtype)

    monkeypatch.setattr(module.cupy.cuda, "memory", SimpleNamespace(OutOfMemoryError=no_memory))
    monkeypatch.setattr(module.cupy, "empty", empty)
    for _ in range(2):
        with pytest.raises(DeviceError) as caught:
            backend.mask_logits(values, rows, masks)
        assert str(caught.value).startswith("out of memory on cuda:0: a buffer for masks needs 1 MiB")
        assert str(caught.value).endswith("; lower --max-num-seqs")
    assert not backend.to_numpy(values).any()
    room = 1 << 20
    backend.mask_logits(values, rows[1:], masks[1:])
    np.testing.assert_array_equal(backend.to_numpy(values)[:, 5], [0, -np.inf, 0])
    room = 0
    backend.mask_logits(values, rows, masks)
    np.testing.assert_array_equal(backend.to_numpy(values)[:, 5], [-np.inf, -np.inf, 0])
