"""Rows of logits as a step has them, for the operations that know whose row each is.

A row's sequence sits in some slot, its last token somewhere in the step. Also what logits may look like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from twins import MAX_SEQS, Part, Twins, make_batch, rng_for

from samir_vllm.backends import Array, Backend
from samir_vllm.batch import Batch
from samir_vllm.sampling import SamplingParams, TokenSampling


@dataclass(frozen=True)
class Row:
    """A row of logits: the wishes of its sequence (None: greedy), and how far that has come."""

    sampling: TokenSampling | None
    position: int = 5  # of the last token
    prompt: tuple[int, ...] = ()
    last_token: int = 0
    num_outputs: int = 0


def wish(seed: int = 7, *, index: int = 0, stop_ids: Sequence[int] = (), **params: object) -> TokenSampling:
    """What one sequence wants; ``params`` are those of SamplingParams."""
    return TokenSampling(SamplingParams(**params), seed, index, frozenset(stop_ids))  # type: ignore[arg-type]


def step_of(rows: Sequence[Row]) -> Batch:
    """A step whose chunks are of 1, 2 and 3 tokens, only the last of each wanted; slots are shuffled."""
    slots = rng_for("slots", len(rows)).permutation(MAX_SEQS)[: len(rows)].tolist()
    parts = [Part(slot, 1 + i % 3) for i, slot in enumerate(slots)]
    ends = np.cumsum([part.count for part in parts])
    token_ids, positions = np.zeros(ends[-1], np.int64), np.zeros(ends[-1], np.int64)
    token_ids[ends - 1] = [row.last_token for row in rows]
    positions[ends - 1] = [row.position for row in rows]
    batch = make_batch(parts, token_ids=token_ids, positions=positions, logit_rows=ends - 1)
    return replace(batch, num_outputs=np.array([row.num_outputs for row in rows], np.int32))


def seat(backend: Backend, rows: Sequence[Row]) -> Batch:
    """Gives the rows' sequences their slots, and says how they want their tokens chosen."""
    batch = step_of(rows)
    backend.allocate_kv_cache(2, MAX_SEQS, 1)
    for slot, row in zip(batch.logit_slots.tolist(), rows, strict=True):
        backend.set_sampling(slot, row.sampling, row.prompt)
    return batch


def spread(backend: Backend, logits: np.ndarray) -> Array:
    """The logits on the backend, as the LM head leaves them: rows begin at multiples of 16 bytes.

    What lies between them beats every logit.
    """
    rows, vocab = logits.shape
    whole = np.full((rows, (vocab + 8) // 4 * 4), np.inf, np.float32)
    whole[:, :vocab] = logits
    return backend.from_numpy(whole)[:, :vocab]


def sample(twins: Twins, logits: np.ndarray, rows: Sequence[Row], *, dense: bool = False) -> np.ndarray:
    """The tokens for FP32 logits [len(rows), vocab_size], int32; the oracle's are the same.

    Args:
        twins: the backends.
        logits: one for each of ``rows``.
        rows: whose they are.
        dense: rows lie side by side, wherever that begins them.
    """

    def body(backend: Backend) -> Array:
        inputs = backend.stage(seat(backend, rows))
        values = backend.from_numpy(logits) if dense else spread(backend, logits)
        return backend.sample(values, inputs)

    got, want = twins.both(body)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)
    return got


# Logits


def normal(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    return rng.standard_normal((rows, vocab), np.float32) * np.float32(2.5)


def peaked(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    return normal(rng, rows, vocab) * np.float32(6)


def ties(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    return np.round(normal(rng, rows, vocab))


def equal(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    return np.full((rows, vocab), -3.5, np.float32)


def masked(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """-inf, but for a third, a few, or nothing at all."""
    x = normal(rng, rows, vocab)
    x[rng.random((rows, vocab)) > rng.choice([0.33, 3 / vocab, 0], (rows, 1))] = -np.inf
    return x


def infinite(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """One +inf, or many, beside both."""
    x = masked(rng, rows, vocab)
    x[rng.random((rows, vocab)) < rng.choice([1 / vocab, 0.2], (rows, 1))] = np.inf
    return x


def huge(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Up to the greatest FP32 number: differences overflow."""
    return np.clip(normal(rng, rows, vocab).astype(np.float64) * 1e38, -3.4e38, 3.4e38).astype(np.float32)


def tiny(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Around the smallest normal number."""
    return normal(rng, rows, vocab) * np.float32(1e-38)


def zeros(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Of both signs."""
    return np.where(rng.random((rows, vocab)) < 0.5, np.float32(0), -np.float32(0))


def with_nan(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """One, of either sign, in every other row."""
    x = infinite(rng, rows, vocab)
    at = np.arange(0, rows, 2)
    x[at, rng.integers(0, vocab, len(at))] = np.where(at % 4, np.float32(np.nan), -np.float32(np.nan))
    return x


Kind = Callable[[np.random.Generator, int, int], np.ndarray]
"""Makes FP32 [rows, vocab]."""

KINDS: list[Kind] = [normal, peaked, ties, equal, masked, infinite, huge, tiny, zeros, with_nan]
