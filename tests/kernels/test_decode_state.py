"""What the device knows of sequences that decode, against NumPy and against plain Python, to the bit.

Rows of padding, which only the GPU has, must leave no trace: not in pages, not in tokens, not in other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
from attention import WAYS
from twins import (
    LAYER,
    SMALL,
    Part,
    Twins,
    assert_same_bits,
    make_batch,
    make_kv,
    normal,
    over,
    pages_with,
    read_pages,
    rng_for,
)

from samir_vllm.backends import CHOSEN, KV_SPLIT, rope_cos_sin
from samir_vllm.backends.numpy_backend import NumpyInputs
from samir_vllm.config import NAN_TOKEN, PAGE_SIZE
from samir_vllm.errors import InvariantError
from samir_vllm.sampling import SamplingParams, TokenSampling

BUCKETS = [
    *((1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (31, 32), (33, 48), (255, 256), (256, 256)),
    *((300, 304), (600, 608)),
]
"""Sequences that decode, and the rows of their step: beyond 256 its one block goes through them in turns."""

SLOTS = 640
PLACES = (1, 2, 15, 16, 17, 31, 32, 33, 254, 255, 256, 257, 511, 512, 513)
"""Of next inputs: even and odd, around the borders of pages and of splits."""

WIDTH = -(-(PLACES[-1] + 20) // PAGE_SIZE)
VOCAB = 1003
STOP_IDS = (5, 1002)
PADDING_TOKEN = 321
"""What padding chooses here."""

DEVICE_ARRAYS = (
    *("token_ids", "positions", "kv_index", "token_slots", "slots", "seq_lens", "first_split"),
    *("logit_rows", "logit_slots", "num_outputs"),
)


@dataclass
class Decoding:
    """A sequence, as plain Python knows it."""

    slot: int
    place: int  # of its next input
    prompt_len: int
    token: int  # that input; below 0 where the sequence has ended

    @property
    def seq_len(self) -> int:
        return 0 if self.token < 0 else self.place + 1

    def go_on(self, token: int, stop_ids: tuple[int, ...] = STOP_IDS) -> None:
        self.place, self.token = self.place + 1, -1 if token in stop_ids else token


def other_token(rng: np.random.Generator) -> int:
    """One that ends nothing."""
    return int(rng.integers(STOP_IDS[0] + 1, STOP_IDS[1]))


def sequences_at(places: list[int], rng: np.random.Generator, slots: int = SLOTS) -> list[Decoding]:
    """In any order of slots; every fourth has ended."""
    taken = rng.permutation(slots)[: len(places)].tolist()
    tokens = [-1 if i % 4 == 2 else other_token(rng) for i in range(len(places))]
    return [
        Decoding(slot, place, int(rng.integers(1, place + 1)), token)
        for slot, place, token in zip(taken, places, tokens, strict=True)
    ]


# Both backends at once


def on_both(twins: Twins, body: Callable[[Any], Any]) -> tuple[Any, Any]:
    """``body`` on the backend under test and on the oracle."""
    results = []
    for backend in (twins.tested, twins.oracle):
        with backend.active():
            results.append(body(backend))
    return results[0], results[1]


def make_room(twins: Twins, slots: int = SLOTS, stop_ids: tuple[int, ...] = STOP_IDS) -> None:
    """Block tables whose ids tell slot, layer and page; the same stop ids everywhere."""
    layers = twins.config.num_layers
    ids = np.arange(slots * layers * WIDTH, dtype=np.int32).reshape(slots, layers, WIDTH)

    def body(backend: Any) -> None:
        backend.allocate_kv_cache(4, slots, WIDTH)
        for slot in range(slots):
            backend.set_block_table(slot, ids[slot])
            backend.set_stop_ids(slot, stop_ids)

    on_both(twins, body)


def keep_on(backend: Any, sequences: list[Decoding]) -> None:
    """Each one's next input, as if it had just been chosen; one that has ended chose a NaN."""
    for start in range(0, len(sequences), 200):
        some = sequences[start : start + 200]
        inputs = backend.stage(make_batch([Part(s.slot, 1, s.place - 1) for s in some]))
        backend.keep_tokens(backend.from_numpy(np.array([s.token for s in some], np.int32)), inputs)


def keep(twins: Twins, sequences: list[Decoding]) -> None:
    on_both(twins, lambda backend: keep_on(backend, sequences))


def set_rows(backend: Any, sequences: list[Decoding]) -> None:
    columns = [(s.slot, s.place, s.prompt_len) for s in sequences]
    backend.set_decode_rows(*np.array(columns, np.int32).T.copy())


def begin(backend: Any, sequences: list[Decoding]) -> Any:
    return backend.begin_decode(backend.decode_shape(max(s.place for s in sequences) + 1))


def choose(backend: Any, inputs: Any, tokens: list[int]) -> None:
    """Keep these tokens, and what padding has chosen."""
    rows = len(inputs.logit_rows)
    padded = [*tokens, *[PADDING_TOKEN] * (rows - len(tokens))]
    backend.keep_tokens(backend.from_numpy(np.array(padded, np.int32)), inputs)


def choose_on_both(twins: Twins, inputs: tuple[Any, Any], tokens: list[int]) -> None:
    for backend, of_step in zip((twins.tested, twins.oracle), inputs, strict=True):
        with backend.active():
            choose(backend, of_step, tokens)


def set_rows_of_both(twins: Twins, sequences: list[Decoding]) -> None:
    on_both(twins, lambda backend: set_rows(backend, sequences))


def kept_of(backend: Any) -> np.ndarray:
    """int32 [slots + 1, 2]; the last row is nobody's."""
    return backend.to_numpy(backend._kept).reshape(-1, 2).copy()


def fill_kept(backend: Any, values: np.ndarray) -> None:
    if isinstance(backend._kept, np.ndarray):
        backend._kept[...] = values.reshape(backend._kept.shape)
    else:
        backend._kept.set(np.ascontiguousarray(values.ravel()))


# What the inputs must be


def expected_inputs(sequences: list[Decoding], rows: int, nobody: int) -> dict[str, np.ndarray]:
    """int32 [rows] each, of sequences whose device-held rows come first, then padding."""
    padding = [Decoding(nobody, 0, 0, -1)] * (rows - len(sequences))
    both = [*sequences, *padding]
    seq_lens = np.array([s.seq_len for s in both], np.int32)
    splits = -(-seq_lens // KV_SPLIT)
    slots = np.array([nobody if s.token < 0 else s.slot for s in both], np.int32)
    places = np.array([s.place for s in both], np.int32)
    outputs = [0 if s in padding else s.place + 1 - s.prompt_len for s in both]
    return {
        "token_ids": np.array([max(s.token, 0) for s in both], np.int32),
        "positions": places,
        "kv_index": places,
        "token_slots": slots,
        "slots": slots,
        "seq_lens": seq_lens,
        "first_split": (np.cumsum(splits) - splits).astype(np.int32),
        "logit_rows": np.arange(rows, dtype=np.int32),
        "logit_slots": slots,
        "num_outputs": np.array(outputs, np.int32),
    }


def read_inputs(backend: Any, inputs: Any) -> dict[str, np.ndarray]:
    return {name: np.array(backend.to_numpy(getattr(inputs, name))) for name in DEVICE_ARRAYS}


def assert_equal_arrays(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    for name in DEVICE_ARRAYS:
        assert got[name].dtype == np.int32
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def assert_numpy_means(backend: Any, inputs: NumpyInputs, want: dict[str, np.ndarray]) -> None:
    """The oracle's inputs, which hold places and angles in another form, mean the same."""
    tokens, rows = slice(0, len(inputs.token_ids)), want["logit_rows"][: len(inputs.logit_rows)]
    places, positions = want["kv_index"][tokens], want["positions"][tokens]
    owners = want["token_slots"][tokens]
    sequences, wanted = slice(0, len(inputs.slots)), slice(0, len(rows))
    cos, sin = rope_cos_sin(backend.config.inv_freq(), positions)
    for name, got, expected in (
        ("token_ids", inputs.token_ids, want["token_ids"][tokens]),
        ("cos", inputs.cos[:, 0], cos),
        ("sin", inputs.sin[:, 0], sin),
        ("page_ids", inputs.page_ids, backend.block_tables[owners, :, places // PAGE_SIZE].T),
        ("offsets", inputs.offsets, places % PAGE_SIZE),
        ("seq_lens", inputs.seq_lens, want["seq_lens"][sequences]),
        ("slots", inputs.slots, want["slots"][sequences]),
        ("logit_rows", inputs.logit_rows, rows),
        ("logit_slots", inputs.logit_slots, want["logit_slots"][wanted]),
        ("num_outputs", inputs.num_outputs, want["num_outputs"][wanted]),
        ("last_tokens", inputs.last_tokens, want["token_ids"][rows]),
        ("next_positions", inputs.next_positions, want["positions"][rows] + 1),
        ("next_places", inputs.next_places, want["kv_index"][rows] + 1),
    ):
        np.testing.assert_array_equal(got, expected, err_msg=name)


def check_step(twins: Twins, sequences: list[Decoding], rows: int, slots: int = SLOTS) -> tuple[Any, Any]:
    """One step on both backends, every array of its inputs; they are what is returned."""
    tested: Any = twins.tested

    def body(backend: Any) -> Any:
        if backend is tested:
            backend._decode_inputs.data.memset_async(0xFF, backend._decode_inputs.nbytes, backend.stream)
        return begin(backend, sequences)

    got, want = on_both(twins, body)
    expected = expected_inputs(sequences, rows, nobody=slots)
    with tested.active():
        assert_equal_arrays(read_inputs(tested, got), expected)
        assert (tested.to_numpy(tested._decode_inputs)[:, rows:] == -1).all()
        assert [len(tested.to_numpy(a)) for a in (got.cu_seqlens_q, got.query_tiles)] == [0, 0]
    assert got.num_decodes == rows
    # Blocks that take a split each need one for each; or one takes all.
    assert got.max_splits == 1 or got.max_splits >= -(-max(s.seq_len for s in sequences) // KV_SPLIT)
    assert_numpy_means(twins.oracle, want, expected)
    assert want.num_decodes == len(sequences)
    assert want.cu_seqlens_q == list(range(len(sequences) + 1))
    return got, want


# begin_decode and keep_tokens


@pytest.mark.parametrize(("count", "rows"), BUCKETS)
@over(SMALL)
def test_a_step_among_sequences_that_have_ended(twins: Twins, count: int, rows: int) -> None:
    """Its inputs, and what is kept of what it chooses: every token of every slot."""
    rng = rng_for("decode state", count)
    make_room(twins)
    kept = rng.integers(0, VOCAB, (SLOTS + 1, 2), np.int32)  # nobody's too: it must not be read
    on_both(twins, lambda backend: fill_kept(backend, kept))
    sequences = sequences_at([PLACES[i % len(PLACES)] for i in range(count)], rng)
    keep(twins, sequences)
    set_rows_of_both(twins, sequences)
    inputs = check_step(twins, sequences, rows)
    tokens = rng.choice([*STOP_IDS, NAN_TOKEN, *rng.integers(0, VOCAB, 9)], count).tolist()
    for sequence, token in zip(sequences, tokens, strict=True):
        kept[sequence.slot, sequence.place % 2] = sequence.token
        ends = sequence.token < 0 or token in STOP_IDS  # it has ended, or does now
        kept[sequence.slot, (sequence.place + 1) % 2] = -1 if ends else token
    choose_on_both(twins, inputs, tokens)
    for backend in (twins.tested, twins.oracle):
        with backend.active():
            np.testing.assert_array_equal(kept_of(backend)[:SLOTS], kept[:SLOTS])
    with twins.tested.active():
        np.testing.assert_array_equal(kept_of(twins.tested)[SLOTS], kept[SLOTS])


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (9, 16), (300, 304)])
@over(SMALL)
def test_steps_in_a_row(twins: Twins, count: int, rows: int) -> None:
    """Rows move on by themselves, each from where it is; in the end some have ended."""
    rng = rng_for("steps in a row", count)
    make_room(twins)
    sequences = sequences_at([PLACES[i % len(PLACES)] for i in range(count)], rng)
    for sequence in sequences:
        sequence.token = other_token(rng)
    keep(twins, sequences)
    set_rows_of_both(twins, sequences)
    for turn in range(4):
        inputs = check_step(twins, sequences, rows)
        ends = [*STOP_IDS, NAN_TOKEN] if turn == 2 else []
        tokens = rng.choice([*ends, 0, 1, VOCAB - 2, other_token(rng)], count).tolist()
        choose_on_both(twins, inputs, tokens)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.go_on(token)


@pytest.mark.parametrize("place", PLACES)
@over(SMALL)
def test_a_step_runs_twice(twins: Twins, place: int) -> None:
    """After an interruption: the same inputs, although its tokens had been kept; and then other tokens."""
    make_room(twins)
    sequences = [Decoding(3, place, 1, 17), Decoding(1, place + 1, 1, 18), Decoding(2, place, 1, -1)]
    keep(twins, sequences)
    for tokens in ([40, 5, 41], [40, 5, 41], [5, 42, 43]):
        set_rows_of_both(twins, sequences)
        inputs = check_step(twins, sequences, rows=4)
        choose_on_both(twins, inputs, tokens)
    for sequence, token in zip(sequences[:2], (5, 42), strict=True):
        sequence.go_on(token)
    set_rows_of_both(twins, sequences[:2])
    check_step(twins, sequences[:2], rows=2)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 20])
@over(SMALL)
def test_stop_ids(twins: Twins, count: int) -> None:
    """Each of the first 8 ends its own slot's sequence and no other's; of the rest the host knows."""
    rng = rng_for("stop ids", count)
    ids = rng.permutation(VOCAB)[: count + 1].tolist()
    stop_ids, other = tuple(ids[:count]), ids[count]
    tokens = [*stop_ids[:8], other, 0 if 0 not in stop_ids[8:] else other]
    mine = [Decoding(2 * i + 1, 7 + i, 3, 100 + i) for i in range(len(tokens))]
    others = [Decoding(2 * i, 8 + i, 3, 200 + i) for i in range(len(tokens))]
    make_room(twins, stop_ids=tuple(range(300, 308)))  # an earlier sequence's

    def tell(backend: Any) -> None:
        for sequence in mine:
            backend.set_stop_ids(sequence.slot, stop_ids)
        for sequence in others:
            backend.set_stop_ids(sequence.slot, ())

    on_both(twins, tell)
    keep(twins, [*mine, *others])
    for known, sequences in ((stop_ids, mine), ((), others)):
        rows = 16 if len(sequences) > 8 else 8 if len(sequences) > 4 else 4 if len(sequences) > 2 else 2
        set_rows_of_both(twins, sequences)
        choose_on_both(twins, check_step(twins, sequences, rows), tokens)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.go_on(token, known)
        assert sum(s.token < 0 for s in sequences) == sum(token in known for token in tokens)
        check_step(twins, sequences, rows)


@over(SMALL)
def test_what_has_no_room(twins: Twins) -> None:
    make_room(twins, slots=3)
    tested: Any = twins.tested
    with tested.active():
        with pytest.raises(InvariantError, match="4 sequences decode, but buffers for 3"):
            set_rows(tested, [Decoding(0, 1, 1, 7)] * 4)
        set_rows(tested, [Decoding(i, 1, 1, 7) for i in range(3)])
        assert tested.decode_shape(WIDTH * PAGE_SIZE).rows == 3  # where the next bucket has no room
        with pytest.raises(InvariantError, match=rf"KV length {WIDTH * PAGE_SIZE + 1}, but no room"):
            tested.decode_shape(WIDTH * PAGE_SIZE + 1)


@over(SMALL)
def test_steps_of_one_shape_and_of_others(twins: Twins) -> None:
    """One record serves a bucket as long as it may; never one with others' kernels or tables."""
    make_room(twins, slots=16)
    tested: Any = twins.tested

    def shape(count: int, seq_len: int = 20) -> Any:
        set_rows(tested, [Decoding(i, 7, 3, 7) for i in range(count)])
        return tested.decode_shape(seq_len)

    def tell(slot: int, **wishes: Any) -> None:
        tested.set_sampling(slot, TokenSampling(SamplingParams(**wishes), seed=0), [1, 2])

    with tested.active():
        for slot in range(16):
            tested.set_sampling(slot, None)
        assert shape(9) == shape(15) == shape(16, KV_SPLIT)
        assert len({shape(count) for count in (1, 2, 3, 5, 9)}) == 5
        with mock.patch.object(tested, "_splits_at_once", side_effect=lambda rows, max_splits: max_splits):
            for seq_len in (1, 255, 256, 257, 511, 512, 513):  # there are blocks enough for all
                assert shape(1, seq_len).max_splits >= -(-seq_len // KV_SPLIT)
            assert shape(1, 1) == shape(1, KV_SPLIT) != shape(1, KV_SPLIT + 1) == shape(1, 2 * KV_SPLIT)
        plain = shape(4)
        tell(5, temperature=1)
        assert shape(4) == plain  # it decodes no more, or not yet
        tell(3, temperature=1)
        sampled = shape(4)
        assert sampled != plain
        tell(2, temperature=1, presence_penalty=1)
        with_table = shape(4)
        assert with_table not in (plain, sampled)
        tell(1, temperature=1, logit_bias=dict.fromkeys(range(300), 1))
        assert shape(4) not in (plain, sampled, with_table)  # tables have moved


# fill_tokens


@pytest.mark.parametrize("count", [1, 2, 9, 33, pytest.param(300, marks=pytest.mark.emulated_only)])
@over(SMALL)
def test_a_staged_step_with_tokens_that_only_the_device_knows(twins: Twins, count: int) -> None:
    """Beside tokens that the host knows, and a chunk of a prompt, which chooses one, and one that doesn't."""
    rng = rng_for("staged", count)
    make_room(twins)
    kept = rng.integers(0, VOCAB, (SLOTS + 1, 2), np.int32)
    on_both(twins, lambda backend: fill_kept(backend, kept))
    sequences = sequences_at([PLACES[i % len(PLACES)] for i in range(count)], rng)
    keep(twins, sequences)
    by_host = [i % 3 == 1 and s.token >= 0 for i, s in enumerate(sequences)]
    for sequence, known in zip(sequences, by_host, strict=True):
        if known:  # what it says counts, whatever the device has
            sequence.token = other_token(rng)
    ids = [s.token if known else CHOSEN for s, known in zip(sequences, by_host, strict=True)]
    free = [slot for slot in range(SLOTS) if slot not in {s.slot for s in sequences}]
    chunks = [Part(free[0], 4, 20), Part(free[1], 3, 0)]
    prompt_ids = rng.integers(0, VOCAB, 7)
    parts = [*(Part(s.slot, 1, s.place) for s in sequences), *chunks]
    batch = make_batch(
        parts, count, token_ids=np.array([*ids, *prompt_ids]), logit_rows=np.array([*range(count), count + 3])
    )
    before = [batch.token_ids.copy(), batch.seq_lens.copy(), batch.slots.copy(), batch.logit_slots.copy()]
    inputs = on_both(twins, lambda backend: backend.stage(batch))
    for array, was in zip(
        (batch.token_ids, batch.seq_lens, batch.slots, batch.logit_slots), before, strict=True
    ):
        np.testing.assert_array_equal(array, was)

    want = expected_staged(sequences, chunks, prompt_ids)
    with twins.tested.active():
        assert_equal_arrays(read_inputs(twins.tested, inputs[0]), want)
    assert_numpy_means(twins.oracle, inputs[1], want)

    tokens = [*rng.choice([*STOP_IDS, NAN_TOKEN, 0, other_token(rng)], count).tolist(), other_token(rng)]
    choose_on_both(twins, inputs, tokens)
    going_on = [s for s in sequences if s.token >= 0]
    for sequence, token in zip(sequences, tokens, strict=False):
        sequence.go_on(token)
    going_on.append(Decoding(chunks[0].slot, chunks[0].stop, chunks[0].stop, tokens[-1]))
    set_rows_of_both(twins, going_on)
    rows = len(on_both(twins, lambda backend: begin(backend, going_on))[0].token_ids)
    set_rows_of_both(twins, going_on)
    check_step(twins, going_on, rows)


def expected_staged(
    sequences: list[Decoding], chunks: list[Part], prompt_ids: np.ndarray
) -> dict[str, np.ndarray]:
    """Decodes, then chunks of which the first has its last row wanted; splits are those the host counts."""
    count = len(sequences)
    decodes = expected_inputs(sequences, count, SLOTS)
    places = np.concatenate([np.arange(c.start, c.stop) for c in chunks])
    slots = [c.slot for c in chunks]
    splits = np.array([s.place // KV_SPLIT + 1 for s in sequences])
    behind: dict[str, Any] = {
        "token_ids": prompt_ids,
        "positions": places,
        "kv_index": places,
        "token_slots": np.repeat(slots, [c.count for c in chunks]),
        "slots": slots,
        "seq_lens": [c.stop for c in chunks],
        "logit_rows": [count + chunks[0].count - 1],
        "logit_slots": slots[:1],
        "num_outputs": [0],
    }
    decodes |= {"first_split": np.cumsum(splits) - splits, "num_outputs": np.zeros(count)}
    return {name: np.array([*array, *behind.get(name, [])], np.int32) for name, array in decodes.items()}


# Padding in the operations of a step


def attend(backend: Any, qkv: np.ndarray, inputs: Any) -> Any:
    """K and V into their pages, and attention [rows, H * D]; rows of padding come with NaN."""
    padded = np.full((len(inputs.token_ids), qkv.shape[1]), np.nan, qkv.dtype)
    padded[: len(qkv)] = qkv
    q = backend.rope_kv_write(backend.from_numpy(padded), LAYER, inputs)
    return backend.attention(q, LAYER, inputs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 3, 9])
@over(SMALL)
def test_padding_stores_nothing_and_disturbs_nobody(twins: Twins, count: int, way: str) -> None:
    """Pages are the oracle's to the bit; attention of the other rows is that of a step without padding."""
    cfg, rng = twins.config, rng_for("padding", count)
    places = [257, 31, 255, 256, 512, 16, 1, 254, 32][:count]
    sequences = sequences_at(places, rng, slots=count)
    by_slot = sorted(sequences, key=lambda s: s.slot)
    pages = pages_with(cfg, [make_kv(cfg, s.place + 1, rng) for s in by_slot], rng)
    qkv = normal(rng, count, (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim)

    def run(backend: Any) -> Any:
        pages.install(backend)
        keep_on(backend, sequences)
        set_rows(backend, sequences)
        return attend(backend, qkv, begin(backend, sequences))

    with mock.patch.object(twins.tested, "_splits_at_once", side_effect=WAYS[way]):
        got, want = twins.both(run)
    stored = read_pages(twins.tested)
    np.testing.assert_array_equal(stored, read_pages(twins.oracle))
    live = [i for i, s in enumerate(sequences) if s.token >= 0]
    assert [i for i in range(count) if want[i].any()] == live

    def run_alone(backend: Any) -> Any:
        pages.install(backend)
        parts = [Part(sequences[i].slot, 1, sequences[i].place) for i in live]
        return attend(backend, qkv[live], backend.stage(make_batch(parts, len(parts))))

    assert_same_bits(got[live], twins.test(run_alone))
    np.testing.assert_array_equal(read_pages(twins.tested), stored)


# Records


@over(SMALL)
def test_a_recorded_step(twins: Twins) -> None:
    """Nothing happens while it is recorded; each call is one step of the sequences that are set by then."""
    rng = rng_for("recorded")
    make_room(twins)
    first = sequences_at([1, 255, 40], rng)
    second = sequences_at([16, 8, 300], rng)
    for sequence in (*first, *second):
        sequence.token = other_token(rng)
    tokens = np.array([other_token(rng), other_token(rng), other_token(rng), PADDING_TOKEN], np.int32)
    keep(twins, first)
    set_rows_of_both(twins, first)

    chosen = on_both(twins, lambda backend: backend.from_numpy(tokens))  # a graph keeps no memory

    def make_record(backend: Any) -> Callable[[], Any]:
        shape, of_step = backend.decode_shape(512), chosen[backend is twins.oracle]

        def step() -> Any:
            inputs = backend.begin_decode(shape)
            backend.keep_tokens(of_step[: len(inputs.logit_rows)], inputs)
            return inputs

        return backend.record(step)

    records = on_both(twins, make_record)
    for sequences in (first, second):
        keep(twins, sequences)
        set_rows_of_both(twins, sequences)
        for _ in range(3):
            expected = expected_inputs(sequences, 4, SLOTS)
            for backend, run in zip((twins.tested, twins.oracle), records, strict=True):
                with backend.active():
                    inputs = run()
                    if backend is twins.tested:
                        assert_equal_arrays(read_inputs(backend, inputs), expected)
                    else:
                        assert_numpy_means(backend, inputs, expected)
            for sequence, token in zip(sequences, tokens.tolist(), strict=False):
                sequence.go_on(token)
