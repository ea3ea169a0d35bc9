"""Prefill attention against its twin, and against decode attention to the bit; tolerance: ``attention.py``.

Whatever no sequence has written is NaN, or so large that one more term would show.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attention import attend, check, make_q
from twins import (
    HEADS,
    LAYER,
    POISON,
    Part,
    Twins,
    assert_same_bits,
    bf16,
    large,
    make_batch,
    make_kv,
    over,
    pages_with,
    poisoned,
    rng_for,
)

from samir_vllm.backends import Backend

PROMPTS = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257, *large(700))
"""Around the edges of pages (16), tiles (64) and splits (256)."""


def check_prefill(twins: Twins, parts: list[Part], rng: np.random.Generator, poison: float) -> None:
    """Sequences that end where their part of the step ends; slot i is the i-th."""
    lengths = [part.stop for part in sorted(parts, key=lambda p: p.slot)]
    pages = pages_with(twins.config, [make_kv(twins.config, n, rng) for n in lengths], rng, poison)
    q = make_q(twins, sum(part.count for part in parts), rng)
    check(twins, pages, make_batch(parts), q)


@poisoned
@pytest.mark.parametrize("length", PROMPTS)
@over(HEADS)
def test_prompt(twins: Twins, length: int, poison: float) -> None:
    check_prefill(twins, [Part(0, length)], rng_for("prompt", length), poison)


@poisoned
@pytest.mark.parametrize(
    ("start", "count"),
    [
        *((1, 1), (15, 1), (16, 16), (17, 47), (63, 2), (64, 64)),
        *large((65, 191)),
        (255, 2),
        *large((256, 256), (257, 400)),
    ],
)
@over(HEADS)
def test_chunk_behind_a_prefix(twins: Twins, start: int, count: int, poison: float) -> None:
    check_prefill(twins, [Part(0, count, start)], rng_for("chunk", start, count), poison)


@over(HEADS, leave_out=HEADS.keys() - {"ratio1_d64"})
def test_third_split(twins: Twins) -> None:
    """The last of 530 tokens, over two splits and over three; decode gives the same bits."""
    rng = rng_for("third split")
    pages = pages_with(twins.config, [make_kv(twins.config, 530, rng)], rng)
    q = make_q(twins, 25, rng)
    got = check(twins, pages, make_batch([Part(0, 25, 505)]), q)
    pages.tables *= 3
    rows = np.array([0, 7, 24])
    batch = make_batch([Part(i, 1, 505 + int(row)) for i, row in enumerate(rows)], num_decodes=3)
    assert_same_bits(twins.test(lambda b: attend(b, pages, batch, q[rows])), got[rows])


@poisoned
@over(HEADS, leave_out=HEADS)
def test_packed_sequences(twins: Twins, poison: float) -> None:
    """Prompts, chunks and single tokens side by side, the slots in any order."""
    parts = [
        Part(3, 17),
        Part(0, 1, 300),
        Part(6, 64),
        Part(1, 255, 1),
        Part(5, 1),
        Part(2, 33, 500),
        Part(4, 257),
        Part(7, 2, 63),
    ]
    check_prefill(twins, parts, rng_for("packed"), poison)


@poisoned
@over(HEADS)
def test_prefill_beside_decodes(twins: Twins, poison: float) -> None:
    """A mixed step: decode rows first; each kind's own operation gives the rows of the whole step."""
    parts = [Part(2, 1, 16), Part(0, 1, 700), Part(4, 1, 255), Part(1, 65), Part(3, 100, 200)]
    rng = rng_for("mixed")
    kv = [make_kv(twins.config, n, rng) for n in (701, 65, 17, 300, 256)]
    pages = pages_with(twins.config, kv, rng, poison)
    batch, q = make_batch(parts, num_decodes=3), make_q(twins, 168, rng)
    whole = check(twins, pages, batch, q)

    def decodes(backend: Backend):
        pages.install(backend)
        return backend.paged_attention_decode(backend.from_numpy(q[:3]), LAYER, backend.stage(batch))

    def prefills(backend: Backend):
        pages.install(backend)
        return backend.paged_attention_prefill(backend.from_numpy(q[3:]), LAYER, backend.stage(batch))

    assert_same_bits(twins.test(decodes), whole[:3])
    assert_same_bits(twins.test(prefills), whole[3:])


@over(HEADS, leave_out=HEADS)
def test_peaked_softmax(twins: Twins) -> None:
    """Scores in the tens: the greatest one moves from tile to tile, and most probabilities vanish."""
    rng = rng_for("prefill peaks")
    kv = make_kv(twins.config, 600, rng)
    kv[:, 0] = bf16(kv[:, 0].astype(np.float32) * np.linspace(0.1, 3, 600)[:, None, None])
    pages = pages_with(twins.config, [kv], rng)
    check(twins, pages, make_batch([Part(0, 600)]), make_q(twins, 600, rng, scale=6))


@over({"ratio4_d64": HEADS["ratio4_d64"]})
def test_short_sequences_side_by_side(twins: Twins) -> None:
    """As the packed ones above, short enough for any backend; and another batch beside it changes no bit."""
    rng = rng_for("side by side")
    lengths = [17, 70, 1, 96]
    kv = [make_kv(twins.config, n, rng) for n in lengths]
    q = make_q(twins, sum(lengths), rng)
    pages = pages_with(twins.config, kv, rng, POISON["nan"])
    together = check(
        twins, pages, make_batch([Part(2, 1), Part(0, 17), Part(3, 33, 63), Part(1, 70)]), q[:121]
    )
    alone = pages_with(twins.config, [kv[3]], rng, POISON["huge"])
    got = twins.test(lambda b: attend(b, alone, make_batch([Part(0, 33, 63)]), q[18:51]))
    assert_same_bits(got, together[18:51])


# One reduction order: these compare the backend under test with itself, to the bit.

LONG = 1100
EMULATED_LONG = 290  # still more than one split
EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 289, 290)


def length_of(twins: Twins) -> int:
    return LONG if twins.max_rows >= LONG else EMULATED_LONG


def long_case(twins: Twins):
    """K and V of a sequence of 1,100 tokens, its queries, and its rows from one prefill."""
    rng, length = rng_for("long"), length_of(twins)
    kv, q = make_kv(twins.config, length, rng), make_q(twins, length, rng)
    pages = pages_with(twins.config, [kv], rng)
    whole = twins.test(lambda b: attend(b, pages, make_batch([Part(0, length)]), q))
    return kv, q, pages, whole


@over(HEADS)
def test_decode_rows_equal_prefill_rows(twins: Twins) -> None:
    """Every length from 1 to 1,100, in batches of slots that share the pages of the one sequence.

    Few slots, because a backend need not have scratch for more splits than its pages could hold unshared. The
    emulator takes the lengths at the edges only.
    """
    _, q, pages, whole = long_case(twins)
    pages.tables *= 50
    lengths = range(1, LONG + 1) if length_of(twins) == LONG else EDGES
    for first in range(0, len(lengths), 50):
        rows = np.array(lengths[first : first + 50]) - 1
        batch = make_batch([Part(i, 1, int(row)) for i, row in enumerate(rows)], num_decodes=len(rows))
        got = twins.test(lambda b, batch=batch, rows=rows: attend(b, pages, batch, q[rows]))
        assert_same_bits(got, whole[rows])


@pytest.mark.parametrize("chunk", [*large(16, 64, 100, 255, 256, 257, 1099), "mixed"])
@over(HEADS)
def test_chunks_equal_the_whole(twins: Twins, chunk: int | str) -> None:
    _, q, pages, whole = long_case(twins)
    length = length_of(twins)
    if chunk == "mixed":
        edges = [at for at in (0, 1, 2, 17, 80, 81, 300, 512, 900) if at < length] + [length]
    else:
        edges = [*range(0, length, chunk), length]
    for first, stop in itertools.pairwise(edges):
        batch = make_batch([Part(0, stop - first, first)])
        got = twins.test(lambda b, batch=batch, rows=slice(first, stop): attend(b, pages, batch, q[rows]))
        assert_same_bits(got, whole[first:stop])


@over(HEADS, leave_out=HEADS)
def test_company_and_page_ids_change_no_bit(twins: Twins) -> None:
    cfg = twins.config
    kv, q, _, whole = long_case(twins)
    others = [make_kv(cfg, n, rng_for("other", n)) for n in (1, 65, 700)]
    parts = [Part(0, 1), Part(2, 37, 663), Part(3, 800, 300), Part(1, 65)]
    company = make_q(twins, sum(p.count for p in parts), rng_for("company"))
    company[38:838] = q[300:]
    pages = pages_with(cfg, [*others, kv], rng_for("other pages"), POISON["huge"])
    got = twins.test(lambda b: attend(b, pages, make_batch(parts), company))
    assert_same_bits(got[38:838], whole[300:])
