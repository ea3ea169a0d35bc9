"""The reference sampler against its definitions: in exact arithmetic, in float64, and by its statistics.

Seeds are fixed, so that every run judges the same tokens.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odds import (
    assert_fits,
    assert_independent,
    cells_of,
    chi_square_limit,
    in_cells,
    misfit,
    probabilities,
)

from samir_vllm.backends import reference_sampler
from samir_vllm.backends.reference_sampler import (
    MASS_BITS,
    MAX_VOCAB,
    SETTINGS,
    SMALLEST_NORMAL,
    Adjustments,
    exponentials,
    flushed,
    kept_ids,
    random_bits,
    sample_row,
    settings_of,
)
from samir_vllm.config import NAN_TOKEN
from samir_vllm.sampling import SamplingParams, TokenSampling

INF = np.float32(np.inf)
LLAMA_VOCAB = 128_256


def settings(seed: int = 0, index: int = 0, **params: Any) -> np.ndarray:
    return settings_of(TokenSampling(SamplingParams(**params), seed, index))


# The generator


def philox(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Philox 4x32-10 in the paper's notation: uint32 [n, 4] under keys uint32 [n, 2] -> [n, 4].

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011. Each round multiplies the
    right word of either pair (L, R): L' = low(R * M), R' = high(R * M) ^ key ^ L; then the R change places.
    """
    (l0, r0), (l1, r1) = ((counters[:, i + 1], counters[:, i]) for i in (0, 2))
    for number in range(10):
        bump = np.array([number * 0x9E3779B9 % 2**32, number * 0xBB67AE85 % 2**32], np.uint32)
        key = keys + bump
        p0, p1 = r0.astype(np.uint64) * 0xD2511F53, r1.astype(np.uint64) * 0xCD9E8D57
        new_r0 = np.bitwise_xor.reduce([(p0 >> np.uint64(32)).astype(np.uint32), key[:, 1], l1])
        new_r1 = np.bitwise_xor.reduce([(p1 >> np.uint64(32)).astype(np.uint32), key[:, 0], l0])
        l0, l1 = p1.astype(np.uint32), p0.astype(np.uint32)
        r0, r1 = new_r1, new_r0
    return np.stack([r0, l0, r1, l1], axis=1)


def many_random_bits(seeds: Any, positions: Any, indices: Any) -> np.ndarray:
    """`random_bits` of each triple, uint64 [n], by the other implementation."""
    seeds, positions, indices = np.broadcast_arrays(
        np.asarray(seeds, np.uint64), np.asarray(positions, np.uint32), np.asarray(indices, np.uint32)
    )
    zeros = np.zeros_like(positions)
    counters = np.stack([positions, indices, zeros, zeros], axis=1)
    keys = np.stack([seeds & np.uint64(2**32 - 1), seeds >> np.uint64(32)], axis=1).astype(np.uint32)
    words = philox(counters, keys).astype(np.uint64)
    return words[:, 0] | words[:, 1] << np.uint64(32)


KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
"""Counter, key and result, of the authors' own library (Random123, kat_vectors)."""


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_the_other_implementation_gives_the_known_answers(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    found = philox(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert found.tolist() == [expected]


def test_random_bits_are_the_first_two_words() -> None:
    assert random_bits(0, 0, 0) == 0xE169C58D_6627E8D5


def test_random_bits_equal_the_other_implementation() -> None:
    rng = np.random.default_rng(1)
    edges = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1]
    cases = list(itertools.product(edges, [0, 1, 15, 131_071, 2**31 - 1], [0, 1, 63]))
    cases += [
        (int(rng.integers(2**64, dtype=np.uint64)), int(rng.integers(2**31)), int(rng.integers(64)))
        for _ in range(2000)
    ]
    expected = many_random_bits(*(np.array(x, np.uint64) for x in zip(*cases, strict=True)))
    assert [random_bits(*case) for case in cases] == expected.tolist()


def test_every_bit_of_seed_position_and_index_matters() -> None:
    """A flipped bit flips half of the 64, give or take 5 deviations of 4."""
    for seed, position, index in [
        (0, 0, 0),
        (2**64 - 1, 2**32 - 1, 2**32 - 1),
        (0x0123_4567_89AB_CDEF, 77, 3),
    ]:
        base = random_bits(seed, position, index)
        changed = [random_bits(seed ^ 1 << bit, position, index) for bit in range(64)]
        changed += [random_bits(seed, position ^ 1 << bit, index) for bit in range(32)]
        changed += [random_bits(seed, position, index ^ 1 << bit) for bit in range(32)]
        assert len({base, *changed}) == 129
        flips = np.array([(base ^ bits).bit_count() for bits in changed])
        assert flips.min() >= 64 / 2 - 5 * 4
        assert flips.max() <= 64 / 2 + 5 * 4
        assert abs(flips.mean() - 32) < 5 * 4 / math.sqrt(len(flips))


def test_each_random_bit_is_fair() -> None:
    bits = many_random_bits(99, np.arange(100_000), 0)
    for place in range(64):
        ones = int((bits >> np.uint64(place) & np.uint64(1)).sum())
        assert abs(ones - 50_000) < 5 * math.sqrt(100_000) / 2, place


# Settings


def test_settings_without_sampling_are_the_greatest_logit() -> None:
    assert settings_of(None).tobytes() == bytes(64)
    assert settings(temperature=0.0, top_p=0.5, top_k=3, seed=5)["scale"] == 0


def test_settings_hold_what_was_asked_for() -> None:
    found = settings(
        2**64 - 1, 63, temperature=0.5, top_k=7, top_p=0.75, min_p=0.125, repetition_penalty=1.25,
        presence_penalty=-1.5, frequency_penalty=2, min_tokens=9,
    )  # fmt: skip
    assert found["scale"] == np.float32(2 * math.log2(math.e))
    wanted = {"seed": 2**64 - 1, "index": 63, "top_k": 7, "top_p": 3 << 30, "min_p": 0.125}
    wanted |= {"repetition": 1.25, "presence": -1.5, "frequency": 2, "min_tokens": 9, "table": 0}
    assert {name: found[name].item() for name in wanted} == wanted


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 1e-3, 1.0, 100.0])
def test_scale_is_a_finite_normal_number(temperature: float) -> None:
    scale = settings(temperature=temperature)["scale"]
    assert SMALLEST_NORMAL <= scale < INF
    if temperature >= 1e-38:
        assert scale == np.float32(math.log2(math.e) / temperature)


@pytest.mark.parametrize(
    ("params", "name", "value"),
    [
        ({"top_p": 1.0}, "top_p", 2**32),
        ({"top_p": 0.0}, "top_p", 0),
        ({"top_p": 1e-300}, "top_p", 0),
        ({"top_p": 2.0**-32}, "top_p", 1),
        ({"top_k": 2**32 - 1}, "top_k", 2**32 - 1),
        ({"top_k": 2**32}, "top_k", 2**32 - 1),
        ({"top_k": 10**30}, "top_k", 2**32 - 1),
        ({"max_tokens": 10**12, "min_tokens": 10**12}, "min_tokens", 2**31 - 1),
    ],
)
def test_settings_at_the_bounds(params: dict[str, Any], name: str, value: int) -> None:
    assert settings(temperature=1.0, **params)[name] == value


def test_settings_lie_as_the_kernels_read_them() -> None:
    source = (Path(__file__).parent.parent / "cuda_src" / "sampling.cuh").read_text()
    body = re.search(r"struct __align__\(16\) Settings \{(.*?)\};", source, re.DOTALL)
    assert body is not None
    types = {"float": "f4", "unsigned int": "u4", "int": "i4", "unsigned long long": "u8"}
    fields: list[Any] = []
    for kind, names in re.findall(r"^\s*([a-z ]+?) ((?:\w+(?:\[\d+\])?(?:, )?)+);", body[1], re.MULTILINE):
        for name, count in re.findall(r"(\w+)(?:\[(\d+)\])?(?:, )?", names):
            fields.append((name, types[kind], (int(count),)) if count else (name, types[kind]))
    assert np.dtype(fields, align=True) == SETTINGS
    assert SETTINGS.itemsize == 64


# Exponentials


def test_exponentials_are_near_float64() -> None:
    """To 2e-7, as ``EXP2`` promises: 1.1e-7 of the polynomial, and roundings, most of them of small terms."""
    x = np.concatenate([np.linspace(-60, 0, 400_001), -np.geomspace(1e-30, 60, 100_001)]).astype(np.float32)
    x[0] = 0
    found = exponentials(x, np.float32(1)).astype(np.float64)
    error = np.abs(found / np.exp2(x.astype(np.float64)) - 1)
    assert error.max() < 2e-7


@pytest.mark.parametrize("temperature", [1e-3, 0.3, 1.0, 2.0, 100.0])
def test_exponentials_are_near_softmax(temperature: float) -> None:
    """As before, and two roundings of the exponent x: |x| 2^-23 in it, times ln(2) in the result."""
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal(20_000) * 5 * max(temperature, 0.01)).astype(np.float32)
    values = logits.astype(np.float64)
    wanted = np.exp((values - values.max()) / temperature)
    found = exponentials(logits, settings(temperature=temperature)["scale"]).astype(np.float64)
    exponent = np.log2(np.maximum(wanted, 2.0**-60))
    near = np.abs(found - wanted) <= wanted * (2e-7 - exponent * 2.0**-23)
    assert (near | ((wanted < 2.0**-59.9) & (found < 2.0**-59.8))).all()


def test_exponentials_hardly_ever_fall_where_the_logits_rise() -> None:
    """By two units in the last place at most, of different roundings."""
    x = np.unique(np.concatenate([np.linspace(-60, 0, 500_001), -np.geomspace(1e-30, 60, 100_001)]))
    found = exponentials(x.astype(np.float32), np.float32(1)).astype(np.float64)
    assert found.max() == found[-1] == 1
    assert (found[1:] >= found[:-1] * (1 - 2.0**-22)).all()


@pytest.mark.parametrize("scale", [float(SMALLEST_NORMAL), 1.0, 3e38])
def test_exponentials_lie_between_their_bounds(scale: float) -> None:
    """The greatest is exactly 1, whatever the logits; all are normal numbers."""
    rng = np.random.default_rng(4)
    rows = [
        rng.standard_normal(500).astype(np.float32) * np.float32(10.0**power) for power in range(-44, 39, 3)
    ]
    rows += [np.array([3.4e38, -3.4e38, 0, -INF], np.float32)[:n] for n in (1, 2, 3, 4)]
    for logits in rows:
        e = exponentials(logits, np.float32(scale))
        assert e.dtype == np.float32
        assert (e[logits == logits.max()] == 1).all()
        assert ((e >= 2.0**-60) & (e <= 1)).all()


def test_exponentials_flush_subnormal_numbers() -> None:
    tiny, scale = np.float32(1e-40), np.float32(3e38)
    assert (exponentials(np.array([tiny, 0, -tiny, -0.0], np.float32), scale) == 1).all()
    # Normal numbers whose difference isn't.
    near = np.array([1.5, 1.25, 1.0], np.float32) * SMALLEST_NORMAL
    assert (exponentials(near, scale) == 1).all()
    # A subnormal number, which is 0 before the difference is taken, and so farther away.
    apart = np.array([1.5, 0.75], np.float32) * SMALLEST_NORMAL
    assert exponentials(apart, scale)[1] == pytest.approx(2 ** (-1.5 * 2.0**-126 * 3e38), rel=1e-5)


@pytest.mark.parametrize("scale", [float(SMALLEST_NORMAL), 1.0, 3e38])
def test_exponentials_of_infinite_differences(scale: float) -> None:
    """2^-60, which has no mass."""
    for logits in ([0, -INF, -0.0], [3e38, -3e38, 3e38], [-3e38, -INF, -3e38]):
        e = exponentials(np.array(logits, np.float32), np.float32(scale))
        assert e.tolist() == [1, 2.0**-60, 1]


# The filters, and the choice, in exact arithmetic


def ranked_by_definition(
    logits: np.ndarray, e: np.ndarray, masses: np.ndarray, found: np.ndarray
) -> list[int]:
    """What ``top_k`` and ``min_p`` keep, and what has a mass, the likeliest first."""
    ranked = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if found["top_k"]:
        ranked = ranked[: int(found["top_k"])]
    return [i for i in ranked if e[i] >= found["min_p"] and masses[i] > 0]


def kept_by_definition(
    logits: np.ndarray, e: np.ndarray, masses: np.ndarray, found: np.ndarray
) -> dict[int, int]:
    """Masses by id, ids ascending: `reference_sampler`'s steps 2 and 3 in rational numbers."""
    ranked = {i: int(masses[i]) for i in ranked_by_definition(logits, e, masses, found)}
    wanted = sum(ranked.values()) * Fraction(int(found["top_p"]), 2**32)
    kept: dict[int, int] = {}
    for token, mass in ranked.items():
        if kept and sum(kept.values()) >= wanted:
            break
        kept[token] = mass
    return dict(sorted(kept.items()))


def token_by_definition(kept: dict[int, int], bits: int) -> int:
    """Step 4."""
    r = math.floor(Fraction(bits, 2**64) * sum(kept.values()))
    for token, mass in kept.items():
        if r < mass:
            return token
        r -= mass
    raise AssertionError("the random number is beyond the masses")


def masses_of(e: np.ndarray) -> np.ndarray:
    return np.array([math.floor(Fraction(float(x)) * 2**MASS_BITS) for x in e], np.uint64)


def row_of(kind: str, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Logits of some kind, FP32 [vocab]."""
    x = rng.standard_normal(vocab).astype(np.float32) * 3
    some, others = rng.random(vocab) < 0.4, rng.random(vocab) < 0.2
    match kind:
        case "ties":
            x = np.round(x)
        case "equal":
            x[:] = x[0]
        case "masked":
            x[some] = -INF
        case "infinite":
            x[some], x[others] = -INF, INF
        case "huge":
            x *= np.float32(2e37)
        case "tiny":
            x = x * np.float32(1e-38) * rng.choice([1, 0.01, 0], vocab).astype(np.float32)
        case "zeros":
            x = np.where(some, np.float32(-0.0), np.float32(0.0))
            x[others] = -1
        case "far":
            x *= 10
    return x.astype(np.float32)


KINDS = ["normal", "ties", "equal", "masked", "infinite", "huge", "tiny", "zeros", "far"]


def some_params(vocab: int, rng: np.random.Generator) -> dict[str, Any]:
    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    return {
        "temperature": one_of(1e-45, 1e-3, 0.3, 1.0, 2.0, 100.0),
        "top_k": one_of(0, 0, 1, 2, 3, max(1, vocab - 1), vocab, vocab + 1, 10**6, 2**40),
        "top_p": one_of(1.0, 1.0, 0.0, 1e-300, 1e-9, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999999, 1 - 1e-12),
        "min_p": one_of(0.0, 0.0, 1e-9, 0.05, 0.5, 1.0),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_filters_and_choice_are_those_of_exact_arithmetic(kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(150):
        vocab = int(rng.choice([1, 2, 3, 7, 20, 40]))
        logits, params = row_of(kind, vocab, rng), some_params(vocab, rng)
        seed, position = int(rng.integers(2**64, dtype=np.uint64)), int(rng.integers(10**5))
        found = settings(seed, 2, **params)
        if math.isinf(logits.max()):
            expected = logits.tolist().index(logits.max())
        else:
            e = exponentials(logits, found["scale"])
            masses = masses_of(e)
            kept = kept_by_definition(logits, e, masses, found)
            assert kept_ids(logits, e, masses, found).tolist() == list(kept), params
            expected = token_by_definition(kept, random_bits(seed, position, 2))
        assert sample_row(logits, found, position) == expected, params


def test_masses_at_the_edge_of_the_nucleus() -> None:
    """A nucleus that is reached exactly ends there; a hair more takes one token more."""
    logits = np.zeros(8, np.float32)
    e = exponentials(logits, np.float32(1))
    for eighths, ids in [(2, 2), (3, 3), (7, 7)]:
        for nudge in (-1, 0, 1):
            found = settings(temperature=1.0)
            found["top_p"] = eighths * 2**29 + nudge
            assert kept_ids(logits, e, masses_of(e), found).tolist() == list(range(ids + (nudge > 0)))


def test_the_nucleus_of_small_masses() -> None:
    """Half of 7 is 3.5, which 3 doesn't reach: where masses are small, every rounding shows."""
    rng = np.random.default_rng(8)
    for _ in range(300):
        masses = rng.integers(1, 6, 8).astype(np.uint64)
        logits = e = masses.astype(np.float32) / np.float32(8)
        found = settings(temperature=1.0, top_k=int(rng.choice([0, 3, 6])))
        found["top_p"] = rng.choice([0, 1, 2**29, 2**30, 2**31, 3 << 30, 2**32 - 1])
        kept = kept_by_definition(logits, e, masses, found)
        assert kept_ids(logits, e, masses, found).tolist() == list(kept)


@pytest.mark.parametrize("params", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-45}])
def test_extremes_keep_the_likeliest_alone(params: dict[str, Any]) -> None:
    logits = np.array([0, 3, -1, 2.9999, -INF], np.float32)
    found = settings(7, **({"temperature": 1.0} | params))
    assert {sample_row(logits, found, position) for position in range(50)} == {1}


@pytest.mark.parametrize("params", [{"top_p": 0.0}, {"top_k": 1}])
def test_of_equal_logits_the_lower_id_is_kept(params: dict[str, Any]) -> None:
    logits = np.array([-5, 1, 1, 0, 1], np.float32)
    assert {sample_row(logits, settings(7, temperature=1.0, **params), p) for p in range(50)} == {1}


@pytest.mark.parametrize("top_k", [5, 6, 10**9])
def test_top_k_of_the_vocabulary_or_more_is_off(top_k: int) -> None:
    logits = np.random.default_rng(5).standard_normal(5).astype(np.float32)
    with_it, without = settings(7, temperature=2.0, top_k=top_k), settings(7, temperature=2.0)
    tokens = [sample_row(logits, without, position) for position in range(100)]
    assert [sample_row(logits, with_it, position) for position in range(100)] == tokens
    assert len(set(tokens)) == 5


@pytest.mark.parametrize("params", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_what_is_masked_is_never_chosen(params: dict[str, Any]) -> None:
    logits = np.full(9, -INF, np.float32)
    logits[[2, 5]] = 0, 0.1
    found = settings(7, temperature=100.0, **params)
    tokens = {sample_row(logits, found, position) for position in range(100)}
    assert tokens == ({5} if params == {"top_p": 0.5} else {2, 5})


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 2, "top_p": 0.5}])
def test_a_nan_is_told(params: dict[str, Any]) -> None:
    for place in (0, 3, 6):
        logits = np.array([1, 5, INF, 2, -INF, 0, 3], np.float32)
        logits[place] = np.nan
        assert sample_row(logits, settings(7, **params), 1) == NAN_TOKEN


def test_temperature_0_is_the_greatest_logit() -> None:
    found = settings(7, temperature=0.0, top_k=2, top_p=0.1, min_p=0.5)
    assert sample_row(np.array([1, 4, 2, 4], np.float32), found, 3) == 1
    assert sample_row(np.array([1e-40, 2e-40], np.float32), found, 3) == 1


@pytest.mark.parametrize("params", [{}, {"top_k": 2, "top_p": 0.9}, {"min_p": 0.5}])
def test_an_infinite_greatest_logit_is_taken_at_any_temperature(params: dict[str, Any]) -> None:
    found = settings(7, temperature=2.0, **params)
    for position in range(20):
        assert sample_row(np.array([5, INF, 3e38, INF, -INF], np.float32), found, position) == 1
        assert sample_row(np.full(5, -INF, np.float32), found, position) == 0


def test_random_numbers_at_the_edges_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token has the random numbers from the sum of the masses before it to just before its own."""
    logits = np.log2(np.array([1, 5, 2, 0.125, 8], np.float32))
    found = settings(temperature=1.0)
    found["scale"] = 1
    masses = [math.floor(w * 2**40) for w in (1, 5, 2, 0.125, 8)]
    e = exponentials(logits, found["scale"])
    assert np.allclose(masses_of(e).astype(float), masses, rtol=1e-6)
    sums = list(itertools.accumulate(masses_of(e).tolist()))
    for token, (begin, end) in enumerate(zip([0, *sums], sums, strict=False)):
        for r in (begin, begin + 1, end - 1):
            bits = -(-r * 2**64 // sums[-1])  # the least with this r
            monkeypatch.setattr(reference_sampler, "random_bits", lambda *_, b=bits: b)
            assert sample_row(logits, found, 0) == token


@pytest.mark.parametrize(("exponent", "token"), [(-42.99, 1), (-43.0, 1), (-43.01, 0), (-43.9, 0)])
def test_masses_are_rounded_down(monkeypatch: pytest.MonkeyPatch, exponent: float, token: int) -> None:
    """The least mass is 1, of 2^-43 and a little more; it has the last random number."""
    monkeypatch.setattr(reference_sampler, "random_bits", lambda *_: 2**64 - 1)
    found = settings(temperature=1.0)
    found["scale"] = 1
    assert sample_row(np.array([0, exponent], np.float32), found, 0) == token


@pytest.mark.parametrize(("bits", "token"), [(0, 0), (2**63, MAX_VOCAB // 2), (2**64 - 1, MAX_VOCAB - 1)])
def test_the_largest_vocabulary_overflows_nothing(
    monkeypatch: pytest.MonkeyPatch, bits: int, token: int
) -> None:
    monkeypatch.setattr(reference_sampler, "random_bits", lambda *_: bits)
    logits = np.zeros(MAX_VOCAB, np.float32)
    assert sample_row(logits, settings(temperature=1.0), 0) == token
    assert sample_row(logits, settings(temperature=1.0, top_p=0.5), 0) == token // 2


# Adjustments


def step_by_step(
    logit: np.float32, bias: float, found: np.ndarray, in_prompt: bool, count: int, masked: bool
) -> np.float32:
    """One logit adjusted by the protocol's words; each FP32 result rounded, each subnormal one flushed."""

    def flush(x: np.float32) -> np.float32:
        return np.float32(0) if abs(x) < SMALLEST_NORMAL else x

    x = flush(flush(logit) + np.float32(bias))
    if in_prompt or count:
        x = flush(x / found["repetition"]) if x > 0 else flush(x * found["repetition"])
    x = flush(x - flush(np.float32(count) * found["frequency"]))
    if count:
        x = flush(x - found["presence"])
    return -INF if masked else x


def penalised(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]
) -> np.ndarray:
    """Float64 [vocab_size] by the usual definitions, over whole vectors of counts."""
    vocab, x = len(logits), logits.astype(np.float64)
    in_prompt = np.bincount(np.array(prompt, np.int64), minlength=vocab) > 0
    counts = np.bincount(np.array(outputs, np.int64), minlength=vocab)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    repeated = in_prompt | (counts > 0)
    penalties = np.where(repeated, params.repetition_penalty, 1.0)
    x = np.where(x > 0, x / penalties, x * penalties)
    return x - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def some_sampling(vocab: int, rng: np.random.Generator) -> TokenSampling:
    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    biased = rng.choice(vocab, rng.integers(vocab + 1), replace=False)
    params = SamplingParams(
        temperature=one_of(0.0, 1.0),
        repetition_penalty=one_of(1.0, 0.01, 0.7, 1.3, 100.0),
        presence_penalty=one_of(0.0, 0.0, -2.0, 0.3, 1.7),
        frequency_penalty=one_of(0.0, 0.0, -1.1, 0.2, 2.0),
        logit_bias={int(i): float(rng.uniform(-100, 100)) for i in biased} if rng.random() < 0.6 else {},
        min_tokens=one_of(0, 1, 4),
    )
    stop_ids = frozenset(rng.choice(vocab, rng.integers(min(3, vocab) + 1), replace=False).tolist())
    return TokenSampling(params, 5, stop_ids=stop_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_adjustments_are_those_of_the_definitions(kind: str) -> None:
    """To the bit in FP32, and within the roundings of five operations of float64 without ``min_tokens``."""
    rng = np.random.default_rng(100 + KINDS.index(kind))
    for _ in range(60):
        vocab = int(rng.choice([1, 2, 9, 30]))
        sampling, prompt = some_sampling(vocab, rng), rng.integers(vocab, size=rng.integers(1, 12)).tolist()
        found = settings_of(sampling)
        adjustments, outputs = Adjustments(sampling, prompt), []
        for num_outputs in range(7):
            if num_outputs:
                outputs.append(int(rng.integers(vocab)))
            raw = row_of(kind, vocab, rng)
            logits = raw.copy()
            for _ in range(rng.integers(1, 3)):  # a step may be run again
                adjustments.count((prompt + outputs)[-1], num_outputs)
            adjustments.apply(logits, found, num_outputs)
            check_adjusted(raw, logits, sampling, prompt, outputs)
            adjustments.restore(logits)
            assert logits.tobytes() == raw.tobytes()


def check_adjusted(
    raw: np.ndarray, logits: np.ndarray, sampling: TokenSampling, prompt: list[int], outputs: list[int]
) -> None:
    params, found, counts = sampling.params, settings_of(sampling), Counter(outputs)
    masked = sampling.stop_ids if len(outputs) < params.min_tokens else frozenset()
    penalty = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    in_prompt = set(prompt) if penalty[0] != 1 else set()
    concerned = in_prompt | set(params.logit_bias) | (sampling.stop_ids if params.min_tokens else set())
    concerned |= set(outputs) if penalty != (1, 0, 0) else set()
    with np.errstate(over="ignore", under="ignore"):
        expected = raw.copy()
        for i in concerned:
            bias = params.logit_bias.get(i, 0)
            expected[i] = step_by_step(raw[i], bias, found, i in in_prompt, counts[i], i in masked)
        assert (logits.view(np.uint32) == expected.view(np.uint32)).all()
        wanted = penalised(raw, params, prompt, outputs)
    size = np.abs(raw.astype(np.float64)) + 100
    slack = size * max(1, penalty[0], 1 / penalty[0]) * 5 * 2.0**-24
    small = [i for i in range(len(raw)) if i not in masked and size[i] < 1e35]
    assert (np.abs(logits[small] - wanted[small]) <= slack[small]).all()
    assert (logits[sorted(masked)] == -INF).all()


def test_an_output_token_counts_once_however_often_its_step_is_run() -> None:
    sampling = TokenSampling(SamplingParams(frequency_penalty=1.0), 5)
    adjustments, found = Adjustments(sampling, [3, 3, 3]), settings_of(sampling)

    def adjusted(token: int, num_outputs: int) -> list[float]:
        logits = np.zeros(4, np.float32)
        adjustments.count(token, num_outputs)
        adjustments.apply(logits, found, num_outputs)
        return (-logits).tolist()

    assert adjusted(3, 0) == [0, 0, 0, 0]  # the prompt's last token is no output
    assert adjusted(3, 1) == adjusted(3, 1) == [0, 0, 0, 1]
    assert adjusted(3, 2) == adjusted(3, 2) == [0, 0, 0, 2]
    assert adjusted(0, 3) == [1, 0, 0, 2]


@pytest.mark.parametrize("params", [{"min_tokens": 2}, {"logit_bias": {0: 1.0}}])
def test_without_a_penalty_outputs_change_nothing(params: dict[str, Any]) -> None:
    sampling = TokenSampling(SamplingParams(**params), 5, stop_ids=frozenset({0}))
    adjustments = Adjustments(sampling, [1, 2])
    for num_outputs in range(1, 5):
        adjustments.count(3, num_outputs)
    assert adjustments.ids.tolist() == [0]


def test_ids_that_would_end_an_answer_are_masked_until_min_tokens() -> None:
    sampling = TokenSampling(
        SamplingParams(min_tokens=3, logit_bias={1: 100.0}), 5, stop_ids=frozenset({1, 2})
    )
    adjustments, found = Adjustments(sampling, [0]), settings_of(sampling)
    for num_outputs in range(6):
        logits = np.zeros(4, np.float32)
        adjustments.apply(logits, found, num_outputs)
        assert logits.tolist() == ([0, -INF, -INF, 0] if num_outputs < 3 else [0, 100, 0, 0])


# Statistics

FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "top_p": {"top_p": 0.8},
    "top_k_min_p": {"top_k": 6, "min_p": 0.2},
    "top_k_top_p": {"top_k": 6, "top_p": 0.85},
    "min_p_top_p": {"min_p": 0.02, "top_p": 0.9},
    "all": {"top_k": 10, "min_p": 0.05, "top_p": 0.95},
}
TEMPERATURES = (0.3, 1.0, 2.0)
DRAWS = 100_000


@functools.cache
def numbers() -> tuple[list[tuple[int, int]], list[int]]:
    """Seeds and positions, and the random bits that they give: one seed's positions, one position's seeds."""
    seeds = np.concatenate([np.full(DRAWS // 2, 1234), np.arange(DRAWS // 2)])
    positions = np.concatenate([np.arange(DRAWS // 2), np.full(DRAWS // 2, 4321)])
    pairs = list(zip(seeds.tolist(), positions.tolist(), strict=True))
    return pairs, many_random_bits(seeds, positions, 0).tolist()


def many_tokens(logits: np.ndarray, params: dict[str, Any], *, compared: int) -> np.ndarray:
    """`sample_row`'s tokens for all `numbers`, without going through the row for each.

    ``compared`` of them, evenly spread, are computed by `sample_row` too and must be the same.
    """
    found = settings(**params)
    e = exponentials(logits, found["scale"])
    masses = np.floor(e.astype(np.float64) * 2.0**MASS_BITS).astype(np.uint64)
    ids = kept_ids(logits, e, masses, found)
    sums = np.cumsum(masses[ids])
    total, (pairs, bits) = int(sums[-1]), numbers()
    r = np.array([number * total >> 64 for number in bits], np.uint64)
    tokens = ids[np.searchsorted(sums, r, side="right")]
    for i in range(0, DRAWS, DRAWS // compared):
        seed, position = pairs[i]
        found["seed"] = seed
        assert sample_row(logits, found, position) == tokens[i]
    return tokens


def small_row(vocab: int) -> np.ndarray:
    return np.random.default_rng(vocab).normal(0, 1.5, vocab).astype(np.float32)


def large_row() -> np.ndarray:
    """As a model's: most of the mass on some ids, a long tail."""
    rng = np.random.default_rng(6)
    logits = rng.normal(0, 2, LLAMA_VOCAB)
    logits[rng.choice(LLAMA_VOCAB, 400, replace=False)] += rng.uniform(3, 7, 400)
    return logits.astype(np.float32)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_frequencies_are_the_exact_probabilities(filters: dict[str, Any], temperature: float) -> None:
    for vocab in (2, 7, 50):
        params, logits = filters | {"temperature": temperature}, small_row(vocab)
        tokens = many_tokens(logits, params, compared=300)
        expected = probabilities(logits, SamplingParams(**params))
        assert_fits(np.bincount(tokens, minlength=vocab), expected)


def check_large(filters: dict[str, Any], temperature: float, *, compared: int) -> None:
    params, logits = filters | {"temperature": temperature}, large_row()
    tokens = many_tokens(logits, params, compared=compared)
    expected = probabilities(logits, SamplingParams(**params))
    counts = np.bincount(tokens, minlength=LLAMA_VOCAB)
    cells = cells_of(expected)
    assert_fits(in_cells(counts, cells), in_cells(expected, cells))


LARGE_FILTERS = FILTERS | {"long_top_k": {"top_k": 5000}, "long_top_p": {"top_p": 0.999}}


@pytest.mark.parametrize("name", ["none", "top_p", "top_k_top_p"])
def test_frequencies_on_a_large_vocabulary(name: str) -> None:
    check_large(FILTERS[name], 1.0, compared=10)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("filters", LARGE_FILTERS.values(), ids=LARGE_FILTERS)
def test_frequencies_of_every_filter_on_a_large_vocabulary(
    filters: dict[str, Any], temperature: float
) -> None:
    check_large(filters, temperature, compared=100)


def test_penalties_and_biases_change_the_odds() -> None:
    params = SamplingParams(
        temperature=1.0, top_p=0.9, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=-0.3,
        logit_bias={4: 2.0, 9: -1.0},
    )  # fmt: skip
    prompt, outputs, logits = [1, 2, 2], [2, 5, 5, 6], small_row(20)
    sampling = TokenSampling(params, 5)
    adjustments = Adjustments(sampling, prompt)
    for count, token in enumerate(outputs):
        adjustments.count(token, count + 1)
    adjusted = logits.copy()
    adjustments.apply(adjusted, settings_of(sampling), len(outputs))
    tokens = many_tokens(adjusted, {"temperature": 1.0, "top_p": 0.9}, compared=100)
    expected = probabilities(penalised(logits, params, prompt, outputs), params)
    assert_fits(np.bincount(tokens, minlength=20), expected)


# Independence


def fractions(seeds: Any, positions: Any, indices: Any = 0) -> np.ndarray:
    """The random numbers as float64 in [0, 1)."""
    return (many_random_bits(seeds, positions, indices) >> np.uint64(11)).astype(np.float64) * 2.0**-53


EVEN = np.arange(0, 2 * DRAWS, 2)


@pytest.mark.parametrize("distance", [1, 2, 16, 1000])
@pytest.mark.parametrize("seed", [0, 42, 2**63])
def test_positions_are_independent(seed: int, distance: int) -> None:
    """Each position is in one pair, so that the pairs are independent, too."""
    first = np.arange(DRAWS).reshape(-1, distance)[: DRAWS // distance // 2 * 2]
    first, second = first[::2].ravel(), first[1::2].ravel()
    assert (second - first == distance).all()
    assert_independent(fractions(seed, first), fractions(seed, second))


@pytest.mark.parametrize("position", [0, 1, 100_000])
def test_neighbouring_seeds_are_independent(position: int) -> None:
    assert_independent(fractions(EVEN, position), fractions(EVEN + 1, position))


def test_seeds_that_differ_in_the_upper_word_are_independent() -> None:
    upper = EVEN.astype(np.uint64) << np.uint64(32)
    assert_independent(fractions(upper, 5), fractions(upper + np.uint64(2**32), 5))
    assert_independent(fractions(EVEN, 5), fractions(upper, 5))


def test_a_request_s_answers_are_independent() -> None:
    answers = [fractions(77, np.arange(DRAWS), index) for index in range(5)]
    for first, second in itertools.combinations(answers, 2):
        assert_independent(first, second)
    assert_independent(fractions(77, 0, EVEN), fractions(77, 0, EVEN + 1))


def test_seed_position_and_index_don_t_stand_for_each_other() -> None:
    """A seed one higher is no position one further: streams that were shifted copies would be one answer."""
    at = np.arange(1, DRAWS)
    for first, second in [
        (fractions(5, at), fractions(6, at - 1)),
        (fractions(5, at, 1), fractions(5, at + 1, 0)),
        (fractions(5, 1, at), fractions(5, at, 1)),
        (fractions(at, 5), fractions(5, at)),
    ]:
        assert_independent(first, second)


@pytest.mark.parametrize("seed", [0, 42, 2**63])
def test_no_serial_correlation(seed: int) -> None:
    x = fractions(seed, np.arange(DRAWS)) - 0.5
    for lag in range(1, 33):
        correlation = (x[lag:] * x[:-lag]).sum() / (x * x).sum()
        assert abs(correlation) < 5 / math.sqrt(DRAWS), lag


def test_tokens_of_neighbouring_positions_are_independent() -> None:
    logits = np.zeros(8, np.float32)
    tokens = many_tokens(logits, {"temperature": 1.0}, compared=100)[: DRAWS // 2]
    assert_fits(np.bincount(tokens[::2] * 8 + tokens[1::2], minlength=64), np.full(64, 1 / 64))


# The tests' own means


@pytest.mark.parametrize(
    ("freedom", "deviations", "quantile"),
    [(1, 3.0902, 10.828), (10, 3.0902, 29.588), (100, 3.0902, 149.449), (10, -3.0902, 1.479)],
)
def test_the_limit_of_chi_square(freedom: int, deviations: float, quantile: float) -> None:
    """Tables' values for 1 and 99.9 in 1,000; the approximation is worst for one degree of freedom."""
    assert chi_square_limit(freedom, deviations) == pytest.approx(quantile, rel=0.07)


@pytest.mark.parametrize("vocab", [7, 50])
def test_probabilities_a_few_per_cent_off_are_seen(vocab: int) -> None:
    logits = small_row(vocab)
    tokens = many_tokens(logits, {"temperature": 1.0}, compared=1)
    counts = np.bincount(tokens, minlength=vocab)
    for temperature in (0.96, 1.04):
        wrong = probabilities(logits, SamplingParams(temperature=temperature))
        assert misfit(counts, wrong) is not None
    wrong = probabilities(logits, SamplingParams(temperature=1.0))
    wrong[::2] *= 1.05
    assert misfit(counts, wrong / wrong.sum()) is not None


def test_counts_that_fit_too_well_are_seen() -> None:
    assert misfit(np.full(100, 1000), np.full(100, 0.01)) is not None


def test_flushed_keeps_all_but_subnormal_numbers() -> None:
    x = np.array([0, -0.0, 1e-40, -1e-40, SMALLEST_NORMAL, -SMALLEST_NORMAL, INF, -INF, 1], np.float32)
    assert flushed(x).tolist() == [0, 0, 0, 0, SMALLEST_NORMAL, -SMALLEST_NORMAL, INF, -INF, 1]
