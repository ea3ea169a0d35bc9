"""The tokens that the kernels choose, by their statistics: every filter against its exact probabilities, and
the rows of a step and the steps against each other.

Knows nothing of how the reference samples: a mistake that both shared would show here. One step holds all
cases, each in several slots, each slot with a seed (and index) of its own; all have the same positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from odds import assert_independent, cells_of, in_cells, misfit, probabilities, uniforms
from twins import MAX_ROWS, MAX_SEQS, Part, Twins, make_batch, over, rng_for, small_config

from samir_vllm.backends import Backend
from samir_vllm.backends.numpy_backend import NumpyBackend
from samir_vllm.config import PAGE_SIZE
from samir_vllm.sampling import SamplingParams, TokenSampling

CASES: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "long_top_k": {"temperature": 1.0, "top_k": 1100},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "long_top_p": {"temperature": 2.0, "top_p": 0.999},
    "top_k_min_p": {"temperature": 1.0, "top_k": 20, "min_p": 0.1},
    "top_k_top_p": {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    "min_p_top_p": {"temperature": 1.3, "min_p": 0.02, "top_p": 0.9},
    "all": {"temperature": 1.5, "top_k": 50, "min_p": 0.01, "top_p": 0.95},
}
"""The long ones keep more than fits a block's list of candidates, where the vocabulary is large."""

VOCABS = {f"vocab_{n}": small_config(vocab_size=n) for n in (1003, 128_256)}


@dataclass(frozen=True)
class Size:
    """How many tokens are drawn: in each of ``steps`` steps ``each`` for every one of ``slots``."""

    slots: int  # two for each case, or a multiple: the second has the first's seed and another index
    each: int
    steps: int


def sampling_of(slot: int) -> TokenSampling:
    """Slot s has case s modulo their number."""
    turn, case = divmod(slot, len(CASES))
    params = SamplingParams(**list(CASES.values())[case])
    return TokenSampling(params, seed=1000 + turn // 2 * len(CASES) + case, index=turn % 2)


def rows_of_logits(vocab: int) -> np.ndarray:
    """One row for each case, FP32 [cases, vocab]: some likely ids, and a long tail."""
    rng = rng_for("statistics", vocab)
    logits = rng.normal(0, 2, (len(CASES), vocab))
    for row in logits:
        likely = rng.choice(vocab, min(vocab, max(30, vocab // 300)), replace=False)
        row[likely] = rng.uniform(4, 9, len(likely))
    return logits.astype(np.float32)


def draw(backend: Backend, logits: np.ndarray, size: Size) -> np.ndarray:
    """Tokens int32 [slots, steps * each], one position after the other, for logits [cases, vocab]."""
    steps: list[np.ndarray] = []
    with backend.active():
        backend.allocate_kv_cache(1, MAX_SEQS, -(-size.each // PAGE_SIZE))
        for slot in range(size.slots):
            backend.set_sampling(slot, sampling_of(slot))
        owners = np.repeat(np.arange(size.slots), size.each)
        on_device = backend.from_numpy(logits[owners % len(CASES)])
        for step in range(size.steps):
            # The token's own position is one more.
            positions = np.tile(np.arange(step * size.each, (step + 1) * size.each), size.slots)
            batch = make_batch([Part(slot, size.each) for slot in range(size.slots)], positions=positions)
            tokens = backend.to_numpy(backend.sample(on_device, backend.stage(batch)))
            steps.append(tokens.reshape(size.slots, size.each))
    return np.concatenate(steps, axis=1)


def check(backend: Backend, size: Size) -> None:
    logits = rows_of_logits(backend.config.vocab_size)
    tokens = draw(backend, logits, size)
    u, wrong = np.empty(tokens.shape), {}
    for case, (name, params) in enumerate(CASES.items()):
        expected = probabilities(logits[case], SamplingParams(**params))
        drawn = tokens[case :: len(CASES)]
        if found := wrong_frequencies(drawn.ravel(), expected):
            wrong[name] = found
        u[case :: len(CASES)] = uniforms(drawn.ravel(), expected, rng_for(name)).reshape(drawn.shape)
    assert not wrong
    cells = min(100, u.size // 20)
    found = misfit(np.bincount((u.ravel() * cells).astype(int), minlength=cells), np.full(cells, 1 / cells))
    assert not found, f"all cases together: {found}"
    for what, first, second in neighbours(u):
        squares = int(min(16, max(2, np.sqrt(first.size / 20))))
        try:
            assert_independent(first.ravel(), second.ravel(), squares)
        except AssertionError as exc:
            pytest.fail(f"{what} depend on each other: {exc}")


def wrong_frequencies(tokens: np.ndarray, expected: np.ndarray) -> str | None:
    counts = np.bincount(tokens, minlength=len(expected))
    impossible = np.flatnonzero((expected == 0) & (counts > 0))
    if len(impossible):
        return f"{counts[impossible].sum()} tokens that have no probability, {impossible[:9]} among them"
    cells = cells_of(expected)
    return misfit(in_cells(counts, cells), in_cells(expected, cells))


def neighbours(u: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Pairs of what must be independent; ``u`` [slots, positions] are the tokens' `uniforms`."""
    for start in (0, 1):  # so that no number is in two pairs
        yield "neighbouring positions", u[:, start:-1:2], u[:, start + 1 :: 2]
    yield "slots of neighbouring seeds", u[::2], u[1::2]
    turns = u.reshape(-1, len(CASES), u.shape[1])
    yield "answers of one seed", turns[::2], turns[1::2]


@over(VOCABS)
def test_every_filter_in_one_step(twins: Twins) -> None:
    """On a GPU 21,600 tokens of each case; on the emulator 96 of all cases together."""
    if twins.max_rows < MAX_ROWS:
        size = Size(slots=24, each=4, steps=1)
    elif twins.config.vocab_size < 2000:
        size = Size(slots=240, each=8, steps=135)
    else:
        size = Size(slots=240, each=1, steps=1080)
    check(twins.tested, size)


@pytest.mark.emulated_only
@pytest.mark.emulated_slow
@over({"vocab_1003": VOCABS["vocab_1003"]})
def test_more_tokens_on_the_emulator(twins: Twins) -> None:
    check(twins.tested, Size(slots=24, each=10, steps=10))


@pytest.mark.parametrize("vocab", [33, 1003])
def test_every_filter_of_the_oracle(vocab: int) -> None:
    """The same body where it can run at once: 400 tokens of each case."""
    check(NumpyBackend(small_config(vocab_size=vocab)), Size(slots=24, each=8, steps=25))
