"""Biases, penalties and ``min_tokens`` against NumPy: the same FP32 operations in one order, so equal.

Which zero is +0, and what a NaN carries, is left open. Restored logits are the raw ones to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from sampled_rows import KINDS, Kind, Row, normal, seat, spread, step_of, tiny, wish, with_nan
from twins import Twins, over, rng_for, small_config

from samir_vllm.backends import Backend

VOCABS = {f"vocab_{n}": small_config(vocab_size=n) for n in (7, 1003, 128_256)}
SMALL = {"vocab_1003": VOCABS["vocab_1003"]}


def step(backend: Backend, rows: Sequence[Row], logits: np.ndarray) -> np.ndarray:
    """The adjusted logits of a step, FP32; afterwards they are restored, which is checked."""
    with backend.active():
        inputs, values = backend.stage(step_of(rows)), spread(backend, logits)
        backend.adjust_logits(values, inputs)
        adjusted = np.array(backend.to_numpy(values))
        backend.restore_logits(values, inputs)
        restored = backend.to_numpy(values)
    np.testing.assert_array_equal(restored.view(np.uint32), logits.view(np.uint32))
    return adjusted


def both_step(twins: Twins, rows: Sequence[Row], logits: np.ndarray) -> np.ndarray:
    """A step of the sequences that are seated, on both backends."""
    got, want = (step(backend, rows, logits) for backend in (twins.tested, twins.oracle))
    np.testing.assert_array_equal(got, want)
    return got


def seat_both(twins: Twins, rows: Sequence[Row]) -> None:
    for backend in (twins.tested, twins.oracle):
        with backend.active():
            seat(backend, rows)


def wish_anew(twins: Twins, rows: Sequence[Row], i: int) -> None:
    """What the slot of row ``i`` holds from now on."""
    slot = int(step_of(rows).logit_slots[i])
    for backend in (twins.tested, twins.oracle):
        with backend.active():
            backend.set_sampling(slot, rows[i].sampling, rows[i].prompt)


def goes_on(row: Row, token: int) -> Row:
    return replace(row, last_token=token, num_outputs=row.num_outputs + 1)


def random_row(rng: np.random.Generator, vocab: int) -> Row:
    """Some of everything."""

    def ids(count: int) -> list[int]:
        return rng.integers(0, vocab, count).tolist()

    params: dict[str, object] = {"temperature": 1.0, "min_tokens": int(rng.integers(0, 5))}
    if rng.random() < 0.7:
        params["logit_bias"] = {i: float(rng.uniform(-100, 100)) for i in ids(5)}
    if rng.random() < 0.7:
        params["repetition_penalty"] = float(rng.choice([0.01, 0.7, 1.1, 3, 100]))
    if rng.random() < 0.7:
        params["presence_penalty"] = float(rng.uniform(-2, 2))
    if rng.random() < 0.7:
        params["frequency_penalty"] = float(rng.uniform(-2, 2))
    return Row(wish(stop_ids=ids(3), **params), prompt=tuple(ids(int(rng.choice([1, 20, 700])))))


def quick(kind: Kind) -> object:
    return pytest.param(kind, marks=[] if kind in (normal, tiny) else pytest.mark.emulated_slow)


@pytest.mark.parametrize("kind", [quick(kind) for kind in KINDS])
@over(VOCABS, ["vocab_128256"])
def test_random_requests_over_several_steps(twins: Twins, kind: Kind) -> None:
    """Tokens come anew, again, and from the prompt; one row in five wants nothing."""
    vocab, rng = twins.config.vocab_size, rng_for("adjust", kind.__name__)
    rows = [Row(None) if i % 5 == 4 else random_row(rng, vocab) for i in range(19)]
    seat_both(twins, rows)
    for _ in range(6):
        both_step(twins, rows, kind(rng, len(rows), vocab))
        recent = rng.integers(0, min(vocab, 5), len(rows))
        rows = [goes_on(row, int(token)) for row, token in zip(rows, recent, strict=True)]
        rows[0] = replace(rows[0], last_token=vocab - 1)


@over(SMALL)
def test_the_order_of_operations(twins: Twins) -> None:
    """By hand: bias first, then repetition by the sign of that sum, frequency, presence."""
    sampling = wish(
        logit_bias={1: 6, 2: -6, 3: 6}, repetition_penalty=2, frequency_penalty=0.5, presence_penalty=0.25
    )
    row = Row(sampling, prompt=(2, 4, 4))
    logits = np.full((1, 1003), 2, np.float32)
    logits[0, 6] = -2
    seat_both(twins, [row])
    for token in (1, 6, 1):
        both_step(twins, [row], logits)
        row = goes_on(row, token)
    got = both_step(twins, [row], logits)[0]
    assert got[1] == (2 + 6) / 2 - 2 * 0.5 - 0.25  # twice in the output
    assert got[2] == (2 - 6) * 2  # in the prompt, below 0 by its bias
    assert got[3] == 2 + 6
    assert got[4] == 2 / 2  # twice in the prompt counts once
    assert got[6] == -2 * 2 - 0.5 - 0.25
    np.testing.assert_array_equal(np.delete(got, [1, 2, 3, 4, 6]), 2)


@over(SMALL)
def test_a_step_that_runs_twice_counts_once(twins: Twins) -> None:
    row = Row(wish(frequency_penalty=1))
    logits = np.zeros((1, 1003), np.float32)
    seat_both(twins, [row])
    for expected, token in ((0, 5), (-1, 5), (-2, 5)):
        for _ in range(3):
            assert both_step(twins, [row], logits)[0, 5] == expected
        row = goes_on(row, token)


@over(VOCABS, ["vocab_128256"])
def test_the_ends_of_the_vocabulary(twins: Twins) -> None:
    vocab = twins.config.vocab_size
    sampling = wish(logit_bias={0: 1, vocab - 1: 2}, presence_penalty=1, min_tokens=2, stop_ids=[vocab - 1])
    row = Row(sampling)
    logits = np.zeros((1, vocab), np.float32)
    seat_both(twins, [row])
    for token in (vocab - 1, 0):
        assert both_step(twins, [row], logits)[0, vocab - 1] == -np.inf
        row = goes_on(row, token)
    assert both_step(twins, [row], logits)[0, [0, vocab - 1]].tolist() == [0, 1]


@over(SMALL)
def test_min_tokens_ends_with_its_number(twins: Twins) -> None:
    """With three tokens said the fourth may end the answer; a bias can't bring it forward."""
    stops = [3, 900]
    rows = [Row(wish(min_tokens=3, stop_ids=stops, logit_bias={3: 100}), num_outputs=n) for n in (0, 2, 3, 4)]
    seat_both(twins, rows)
    got = both_step(twins, rows, np.ones((4, 1003), np.float32))
    assert (got[:2, stops] == -np.inf).all()
    assert (got[2:, stops] == [101, 1]).all()
    np.testing.assert_array_equal(np.delete(got, stops, axis=1), 1)


@over(SMALL)
def test_a_prompt_of_every_token(twins: Twins) -> None:
    """More entries than a block has threads, and no place for more: the output's tokens are among them."""
    rng = rng_for("prompt")
    ids = rng.permutation(np.repeat(np.arange(1003), 2)).tolist()
    row = Row(wish(repetition_penalty=4, frequency_penalty=1), prompt=tuple(ids))
    logits = np.ones((1, 1003), np.float32)
    seat_both(twins, [row])
    for token in (1002, 300, 1002):
        both_step(twins, [row], logits)
        row = goes_on(row, token)
    got = both_step(twins, [row], logits)[0]
    assert got[[1002, 300]].tolist() == [0.25 - 2, 0.25 - 1]
    assert (np.delete(got, [1002, 300]) == 0.25).all()


@over(SMALL)
def test_tables_grow_around_those_in_use(twins: Twins) -> None:
    """More requests at a time, then longer ones: what was counted stays."""
    logits = normal(rng_for("grow"), 5, 1003)
    rows = [Row(None)] * 5
    seat_both(twins, rows)
    prompts = [(1,), (2, 3), tuple(range(600)), (5,), tuple(range(900))]
    for i, prompt in enumerate(prompts):
        rows[i] = Row(wish(repetition_penalty=1.5, frequency_penalty=0.5, max_tokens=9 + i), prompt=prompt)
        wish_anew(twins, rows, i)
        for token in (700 + i, 700):
            both_step(twins, rows, logits)
            rows = [goes_on(row, token) if row.sampling else row for row in rows]
    both_step(twins, rows, logits)


@over(SMALL)
def test_a_slot_is_its_present_owners(twins: Twins) -> None:
    """A plain request in place of one with penalties; then another with penalties, which begins anew."""
    logits = np.ones((2, 1003), np.float32)
    rows = [Row(wish(presence_penalty=1), num_outputs=1, last_token=i) for i in (4, 5)]
    seat_both(twins, rows)
    assert both_step(twins, rows, logits)[:, [4, 5]].tolist() == [[0, 1], [1, 0]]
    rows[0] = Row(None)
    wish_anew(twins, rows, 0)
    assert both_step(twins, rows, logits)[:, [4, 5]].tolist() == [[1, 1], [1, 0]]
    rows[0] = Row(wish(presence_penalty=2, temperature=1))
    wish_anew(twins, rows, 0)
    assert both_step(twins, rows, logits)[:, [4, 5]].tolist() == [[1, 1], [1, 0]]
    rows[0] = goes_on(rows[0], 9)
    assert both_step(twins, rows, logits)[:, [4, 9]].tolist() == [[1, -1], [1, 1]]
    rows[0] = Row(wish(temperature=1))
    wish_anew(twins, rows, 0)
    assert both_step(twins, rows, logits)[:, [4, 9, 5]].tolist() == [[1, 1, 1], [1, 1, 0]]


@over(SMALL)
def test_where_nobody_wants_anything(twins: Twins) -> None:
    logits = with_nan(rng_for("plain"), 2, 1003)
    for sampling in (None, wish(temperature=1)):
        rows = [Row(sampling)] * 2
        seat_both(twins, rows)
        both_step(twins, rows, logits)


@over(SMALL)
def test_raw_values_come_back_whatever_they_are(twins: Twins) -> None:
    """NaN with what it carries, subnormals, zeros of both signs, infinities; all of them adjusted."""
    bits = [0x7FC00123, 0xFFC00000, 0x00000001, 0x807FFFFF, 0, 0x80000000, 0x7F800000, 0xFF800000]
    logits = np.zeros((1, 1003), np.float32)
    logits[0, : len(bits)] = np.array(bits, np.uint32).view(np.float32)
    row = Row(wish(logit_bias=dict.fromkeys(range(8), 3), repetition_penalty=2), prompt=tuple(range(8)))
    seat_both(twins, [row])
    both_step(twins, [row], logits)


@over(SMALL)
def test_a_table_is_as_long_as_its_request_may_need(twins: Twins) -> None:
    """A head, what is known at the start, and the output's tokens if they count; a power of two in all."""
    for sampling, entries in (
        (wish(logit_bias={1: 1, 2: 1}, max_tokens=50), 2),
        (wish(logit_bias={1: 1}, presence_penalty=1, max_tokens=50), 1 + 50),
        (wish(presence_penalty=1, max_tokens=5000), 1003),
    ):
        seat_both(twins, [Row(sampling)])
        size = 1 << entries.bit_length()
        assert twins.tested._sampling.tables.shape == (1, size, 4)  # type: ignore[attr-defined]


@over(SMALL)
def test_choose_tokens(twins: Twins) -> None:
    """Adjusted and then sampled, at temperature 0 too; where nothing is asked for, the greatest raw logit."""
    logits = normal(rng_for("choose"), 4, 1003)
    best = logits.argmax(axis=1)
    rows = [
        Row(None),
        Row(wish(logit_bias={int(best[1]): -100})),
        Row(wish(temperature=1, top_k=3)),
        Row(wish(presence_penalty=2), num_outputs=1, last_token=int(best[3])),
    ]
    logits[3, best[3]] = np.delete(logits[3], best[3]).max() + 1

    def chosen(backend: Backend) -> object:
        inputs = backend.stage(seat(backend, rows))
        assert not inputs.is_argmax
        return backend.choose_tokens(spread(backend, logits), inputs)

    def plain(backend: Backend) -> object:
        inputs = backend.stage(seat(backend, [Row(None), Row(wish(top_k=5, seed=1))] * 2))
        assert inputs.is_argmax
        return backend.choose_tokens(spread(backend, logits), inputs)

    got, want = twins.both(chosen)
    np.testing.assert_array_equal(got, want)
    assert got[0] == best[0]
    assert (got[[1, 3]] != best[[1, 3]]).all()
    np.testing.assert_array_equal(twins.test(plain), logits.argmax(axis=1))
