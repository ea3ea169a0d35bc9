"""Two backends of one model, the NumPy oracle and the one under test, fed the same BF16 numbers.

Knows pages and how results compare; knows no kernel and no device. The backend under test is reached only
through the Backend protocol, ``poison()`` and the two page helpers here, so that any backend can stand there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from samir_vllm.backends import Array, Backend
from samir_vllm.backends.numpy_backend import NumpyBackend
from samir_vllm.batch import Batch
from samir_vllm.config import PAGE_SIZE, ModelConfig, RopeScaling

BF16 = np.dtype(ml_dtypes.bfloat16)

MAX_ROWS = 2304
"""As many as the largest step has tokens."""


def large(*values: Any) -> list[Any]:
    """Parameters for a GPU only: on the emulator they take too long for what they add."""
    each = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*value, marks=pytest.mark.large) for value in each]


ROWS = (1, 19, *large(99, 989))
"""Row counts that fit no tile."""

MAX_SEQS = 256
"""Rows of the block tables."""

LAYER = 1
"""The layer the paged operations run at: an index that forgets the layer reads or writes layer 0."""

POISON = {"nan": float("nan"), "huge": 3e38}
"""What unused places of the pages hold: a product with the first, and a sum with the second, shows."""

poisoned = pytest.mark.parametrize(
    "poison", [POISON["nan"], pytest.param(POISON["huge"], marks=pytest.mark.emulated_slow)], ids=POISON
)
either_poison = pytest.mark.parametrize("poison", POISON.values(), ids=POISON)

# Models


def small_config(
    *,
    ratio: int = 4,
    head_dim: int = 64,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    vocab_size: int = 1003,
) -> ModelConfig:
    """Two layers and two KV heads, each with ``ratio`` query heads."""
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=2,
        num_heads=2 * ratio,
        num_kv_heads=2,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=16384,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
    )


def _real(hidden: int, inner: int, layers: int, heads: tuple[int, int], dim: int, vocab: int) -> ModelConfig:
    config = small_config(head_dim=dim, hidden_size=hidden, intermediate_size=inner, vocab_size=vocab)
    return replace(config, num_layers=layers, num_heads=heads[0], num_kv_heads=heads[1])


REAL = {
    "smollm2": _real(576, 1536, 30, (9, 3), 64, 49_152),
    "llama_1b": _real(2048, 8192, 16, (32, 8), 64, 128_256),
    "llama_3b": _real(3072, 8192, 28, (24, 8), 128, 128_256),
}
"""Sizes of real models (their RoPE and epsilon don't matter here)."""

SMALL = {"small": small_config()}

SHAPES = SMALL | {
    "smollm2": replace(REAL["smollm2"], num_layers=2, vocab_size=1003),
    "llama_1b": replace(REAL["llama_1b"], num_layers=2, vocab_size=4000),
    "llama_3b": replace(REAL["llama_3b"], num_layers=2, vocab_size=2049),
}
"""Real widths, K of 576 to 8,192; small vocabularies, odd ones among them (fine-tuned models add tokens)."""

SEGMENTED = {"segmented": small_config(intermediate_size=2080)}
"""Of the emulator alone, which is too slow for real widths: K of the down projection is cut in segments."""

HEADS = {
    f"ratio{ratio}_d{head_dim}": small_config(ratio=ratio, head_dim=head_dim)
    for head_dim in (64, 128)
    for ratio in (1, 3, 4, 8)
}
"""Each number of query heads to a KV head, with each head size."""

MANY_HEADS = {
    "ratio17_d64": small_config(ratio=17),
    "ratio64_d128": small_config(ratio=64, head_dim=128),
}
"""More query heads to a KV head than one block of decode attention takes."""


LARGE = {
    *("llama_1b", "vocab_7", "vocab_33", "vocab_32003", "vocab_128256", "llama_vocab"),
    *("ratio1_d128", "ratio3_d64", "ratio4_d128", "ratio8_d128", "ratio64_d128"),
}
"""Configs that the emulator leaves out; what remains has every ratio, and both head sizes."""


def over(configs: Mapping[str, ModelConfig], leave_out: Iterable[str] = LARGE) -> pytest.MarkDecorator:
    """Runs a test on the twins of each config; ``leave_out`` names those the emulator has no time for."""
    cases = [
        pytest.param(config, id=name, marks=[pytest.mark.large] if name in leave_out else [])
        for name, config in configs.items()
    ]
    return pytest.mark.parametrize("twins", cases, indirect=True)


def over_gemms() -> pytest.MarkDecorator:
    """`over` the real shapes; on the emulator over a small one, and one with segments."""
    cases = [
        pytest.param(config, id=name, marks=[pytest.mark.large] if name in REAL else [])
        for name, config in SHAPES.items()
    ]
    cases += [pytest.param(c, id=name, marks=pytest.mark.emulated_only) for name, c in SEGMENTED.items()]
    return pytest.mark.parametrize("twins", cases, indirect=True)


# Numbers


def rng_for(*key: object) -> np.random.Generator:
    """The same numbers for the same test case in every run."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(BF16)


def rounded(x: np.ndarray) -> np.ndarray:
    """FP32 rounded to BF16 (nearest even), held in FP32."""
    return x.astype(BF16).astype(np.float32)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """BF16 normal numbers."""
    return bf16(rng.standard_normal(shape, np.float32) * np.float32(scale))


# The two backends


@dataclass(frozen=True)
class Twins:
    """The oracle and the backend under test, for one config."""

    config: ModelConfig
    oracle: Backend
    tested: Backend
    max_rows: int = MAX_ROWS  # what the tested one has buffers, and time, for

    @classmethod
    def of(cls, tested: Backend, max_rows: int = MAX_ROWS) -> Twins:
        return cls(tested.config, NumpyBackend(tested.config), tested, max_rows)

    def test(self, body: Callable[[Backend], Array]) -> np.ndarray:
        """``body`` on the backend under test, every buffer NaN before it: an unwritten output shows."""
        with self.tested.active():
            self.tested.poison()
            return self.tested.to_numpy(body(self.tested))

    def expect(self, body: Callable[[Backend], Array]) -> np.ndarray:
        """``body`` on the oracle."""
        with self.oracle.active():
            return self.oracle.to_numpy(body(self.oracle))

    def both(self, body: Callable[[Backend], Array]) -> tuple[np.ndarray, np.ndarray]:
        """What the backend under test gives, and what the oracle gives."""
        return self.test(body), self.expect(body)


# Steps and pages


@dataclass(frozen=True)
class Part:
    """The tokens of one sequence in one step: KV indices ``start`` to ``start + count``."""

    slot: int
    count: int
    start: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.count


def make_batch(
    parts: list[Part],
    num_decodes: int = 0,
    *,
    token_ids: np.ndarray | None = None,
    positions: np.ndarray | None = None,
    logit_rows: np.ndarray | None = None,
) -> Batch:
    """A step of these sequences; positions are KV indices, and all rows are wanted, unless given."""
    ends = np.cumsum([part.count for part in parts])
    total = int(ends[-1])
    if token_ids is None:
        token_ids = np.zeros(total, np.int32)
    if positions is None:
        positions = np.concatenate([np.arange(p.start, p.stop) for p in parts])
    if logit_rows is None:
        logit_rows = np.arange(total)
    return Batch(
        token_ids=token_ids.astype(np.int32),
        positions=positions.astype(np.int32),
        cu_seqlens_q=np.array([0, *ends], np.int32),
        seq_lens=np.array([p.stop for p in parts], np.int32),
        slots=np.array([p.slot for p in parts], np.int32),
        logit_rows=logit_rows.astype(np.int32),
        logit_slots=np.repeat([p.slot for p in parts], [p.count for p in parts])[logit_rows].astype(np.int32),
        num_outputs=np.zeros(len(logit_rows), np.int32),
        num_decodes=num_decodes,
    )


def read_pages(backend: Backend) -> np.ndarray:
    """BF16 bits of the whole KV cache, uint16 [num_pages, 2, Hkv, page_size, D]; a copy."""
    pages: Any = backend.kv_cache
    with backend.active():
        host = pages.copy() if isinstance(pages, np.ndarray) else pages.get()
    return host.view(np.uint16)


def fill_pages(backend: Backend, bits: np.ndarray) -> None:
    """Overwrite the whole KV cache with such bits."""
    pages: Any = backend.kv_cache
    with backend.active():
        if isinstance(pages, np.ndarray):
            pages.view(np.uint16)[...] = bits
        else:
            pages.set(np.ascontiguousarray(bits))


class HostPages:
    """A picture of the KV cache: the bits of every page, and who owns which, in shuffled order."""

    def __init__(
        self, config: ModelConfig, lengths: Iterable[int], rng: np.random.Generator, fill: float = np.nan
    ) -> None:
        """Pages for one sequence of each length (slots 0, 1, ...) in every layer, and three that no one owns.

        Args:
            config: the model.
            lengths: KV tokens each sequence may hold.
            rng: shuffles the page ids.
            fill: what every place holds.
        """
        counts = [-(-n // PAGE_SIZE) for n in lengths]
        layers = config.num_layers
        num_pages = layers * sum(counts) + 3
        ids = rng.permutation(num_pages).astype(np.int32)
        self.tables: list[np.ndarray] = []  # for each slot, int32 [num_layers, pages]
        start = 0
        for count in counts:
            self.tables.append(ids[start : start + layers * count].reshape(layers, count))
            start += layers * count
        self.width = max(counts) + 2
        shape = (num_pages, 2, config.num_kv_heads, PAGE_SIZE, config.head_dim)
        self.bits = np.full(shape, fill, np.float32).astype(BF16).view(np.uint16)

    def put(self, slot: int, kv: np.ndarray) -> None:
        """BF16 K and V [n, 2, Hkv, D] as the first n tokens of a sequence, at ``LAYER``."""
        at = np.arange(len(kv))
        self.bits[self.tables[slot][LAYER, at // PAGE_SIZE], :, :, at % PAGE_SIZE] = kv.view(np.uint16)

    def install(self, backend: Backend) -> None:
        """Make the backend's cache and block tables equal to the picture."""
        backend.allocate_kv_cache(len(self.bits), MAX_SEQS, self.width)
        for slot, table in enumerate(self.tables):
            backend.set_block_table(slot, table)
        fill_pages(backend, self.bits)


def make_kv(config: ModelConfig, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """BF16 K and V of one sequence, [tokens, 2, Hkv, D]."""
    return normal(rng, tokens, 2, config.num_kv_heads, config.head_dim)


def pages_with(
    config: ModelConfig,
    sequences: list[np.ndarray],
    rng: np.random.Generator,
    poison: float = np.nan,
) -> HostPages:
    """Pages that hold these sequences' K and V at ``LAYER``, and poison everywhere else."""
    pages = HostPages(config, [len(kv) for kv in sequences], rng, poison)
    for slot, kv in enumerate(sequences):
        pages.put(slot, kv)
    return pages


# Comparison


def bf16_step(x: np.ndarray) -> np.ndarray:
    """Distance of neighbouring BF16 numbers (8 significant bits) at |x|."""
    _, exponent = np.frexp(x)
    return np.where(x == 0, 0, np.ldexp(np.float64(1), exponent - 8))


def product_slack(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """How far two FP32 summation orders of x [T, K] times weight [N, K] transposed may lie apart.

    A tensor core adds 16 products at a time and truncates: at each of K / 16 steps it loses at most 2^-23
    of what the sum of absolute values has reached. NumPy's own error is smaller.
    """
    absolute = np.abs(x.astype(np.float32)) @ np.abs(weight.astype(np.float32)).T
    return absolute * np.float32(-(-x.shape[1] // 16) * 2.0**-23)


def assert_near(got: np.ndarray, want: np.ndarray, *, steps: float, slack: np.ndarray | float = 0) -> None:
    """Every element within ``steps`` BF16 steps plus ``slack``; NaN is never near."""
    assert got.shape == want.shape
    limit = steps * bf16_step(np.maximum(np.abs(got), np.abs(want))) + slack
    with np.errstate(invalid="ignore"):  # NaN, if there is one, is what we are after
        excess = np.abs(got.astype(np.float64) - want) - limit
    wrong = ~(excess <= 0)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        rows = np.unique(np.argwhere(wrong)[:, 0])
        pytest.fail(
            f"{wrong.sum()} of {wrong.size} elements are off, in rows {rows[:20]}; the first at {at}: "
            f"got {got[at]}, expected {want[at]}, too far by {excess[at]:.3g}"
        )


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Equal to the last bit, and no NaN or infinity on either side."""
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    differ = got.view(np.uint32) != want.view(np.uint32)
    if differ.any():
        at = tuple(int(i) for i in np.argwhere(differ)[0])
        pytest.fail(
            f"{differ.sum()} of {differ.size} elements differ; the first at {at}: got {got[at]!r}, "
            f"expected {want[at]!r}"
        )
