"""The check at load time that cuBLAS keeps the one reduction order, and the GEMM that takes its place.

Of the CUDA backend alone: the others have no library to judge.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twins import SHAPES, Twins, assert_same_bits, normal, over, rng_for, rounded

from samir_vllm.backends.cuda_cache import Cache
from samir_vllm.config import ModelConfig

pytestmark = pytest.mark.gpu


class OnlyKernels(Cache):
    """Keeps no judgement of cuBLAS, which is broken on purpose here."""

    def read(self, name: str, key: str, suffix: str) -> bytes | None:
        return super().read(name, key, suffix) if suffix == "cubin" else None

    def write(self, name: str, key: str, suffix: str, content: bytes) -> Path | None:
        return super().write(name, key, suffix, content) if suffix == "cubin" else None


def fresh_backend(config: ModelConfig, *, batch_invariant: bool, cache: Cache | None = None) -> Any:
    from samir_vllm.backends.cuda_backend import CudaBackend

    backend = CudaBackend(
        config, max_logit_rows=300, batch_invariant=batch_invariant, cache=cache or OnlyKernels()
    )
    with backend.active():
        backend.poison()  # compute-sanitizer's initcheck doesn't see what cuBLAS stores, and would complain
    return backend


def matrices(config: ModelConfig) -> list[np.ndarray]:
    """A weight [N, K] of each shape that the model multiplies by."""
    hidden, inner = config.hidden_size, config.intermediate_size
    width = config.num_heads * config.head_dim
    shapes = [
        (width + 2 * config.num_kv_heads * config.head_dim, hidden),
        (hidden, width),
        (2 * inner, hidden),
        (hidden, inner),
        (config.vocab_size, hidden),
    ]
    return [normal(rng_for(n, k), n, k, scale=k**-0.5) for n, k in shapes]


def one_element_wrong(matmul: Callable[..., None]) -> Callable[..., None]:
    """cuBLAS as it might be elsewhere: from 16 rows on, one element, the last, is another."""

    def wrong(x: Any, weight: Any, out: Any, **options: Any) -> None:
        matmul(x, weight, out, **options)
        if len(x) >= 16 and not options.get("add"):
            # The top bit of the fraction, whether the element is BF16 or FP32: rounding can't hide it.
            bits = out.reshape(-1)[-1:].view(np.uint16)[-1:]
            bits.set(bits.get() ^ np.uint16(1 << 6))

    return wrong


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_nothing_to_say_where_the_order_is_kept(config: ModelConfig) -> None:
    backend = fresh_backend(config, batch_invariant=False)
    with backend.active():
        backend.check_gemm_order([backend.upload([weight]) for weight in matrices(config)])
    assert backend.notices == []


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_another_order_is_noticed(
    config: ModelConfig, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = fresh_backend(config, batch_invariant=batch_invariant)
    monkeypatch.setattr(backend._cublas, "matmul", one_element_wrong(backend._cublas.matmul))
    with backend.active():
        backend.check_gemm_order([backend.upload([weight]) for weight in matrices(config)])
    [notice] = backend.notices
    assert ("takes its place" in notice) == batch_invariant
    for n, k in (weight.shape for weight in matrices(config)):
        assert f"16 x {n} x {k}" in notice


SMALL_CONFIG = SHAPES["small"]


def check(cache: Cache, matmul: Callable[[Any], Callable[..., None]] | None = None) -> tuple[list[str], str]:
    """(notices, how it was found out) of a new backend, whose cuBLAS ``matmul`` may replace."""
    backend = fresh_backend(SMALL_CONFIG, batch_invariant=False, cache=cache)
    if matmul is not None:
        backend._cublas.matmul = matmul(backend._cublas.matmul)
    with backend.active():
        backend.check_gemm_order([backend.upload([weight]) for weight in matrices(SMALL_CONFIG)])
    return backend.notices, backend._times.stages[-1].detail


def never(matmul: Callable[..., None]) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it measured")

    return refuse


def test_what_was_found_is_remembered(tmp_path: Path) -> None:
    assert check(Cache(tmp_path / "good")) == ([], "measured")
    assert check(Cache(tmp_path / "good"), never) == ([], "from the cache")
    found = check(Cache(tmp_path / "bad"), one_element_wrong)
    assert len(found[0]) == 1
    assert check(Cache(tmp_path / "bad"), never) == (found[0], "from the cache")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"nonsense", b"\xff"])
def test_a_memory_that_makes_no_sense_is_no_memory(tmp_path: Path, content: bytes) -> None:
    class Nonsense(Cache):
        def write(self, name: str, key: str, suffix: str, _: bytes) -> Path | None:
            return super().write(name, key, suffix, _ if suffix == "cubin" else content)

    check(Nonsense(tmp_path))
    assert check(Cache(tmp_path)) == ([], "measured")
    assert check(Cache(tmp_path), never) == ([], "from the cache")


def test_other_libraries_are_checked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(Cache(tmp_path))
    monkeypatch.setattr("samir_vllm.backends.cuda_probe.loaded_build", lambda name: f"{name}.99")
    assert check(Cache(tmp_path)) == ([], "measured")


@over(SHAPES)
def test_our_own_gemm_gives_the_same_bits(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower GEMM, switched on by a broken order, is the ordered kernel at every point of use."""
    qkv, o, _, down, head = matrices(twins.config)
    own = fresh_backend(twins.config, batch_invariant=True)
    monkeypatch.setattr(own._cublas, "matmul", one_element_wrong(own._cublas.matmul))
    with own.active():
        own.check_gemm_order([own.upload([qkv]), own.upload([head])])
    own_twins = Twins.of(own)
    rows = 99
    rng = rng_for("own gemm")
    hidden = twins.config.hidden_size
    x, residual = normal(rng, rows, hidden), normal(rng, rows, hidden)
    ordered = twins.test(lambda b: b.ordered_linear(b.from_numpy(x), b.upload([qkv])))
    got = own_twins.test(lambda b: b.linear(b.from_numpy(x), b.upload([qkv])))
    assert_same_bits(got, rounded(ordered))
    ordered = twins.test(lambda b: b.ordered_linear(b.from_numpy(x), b.upload([head])))
    got = own_twins.test(lambda b: b.lm_head(b.from_numpy(x), b.upload([head])))
    assert_same_bits(got, ordered)
    for weight in (o, down):
        inner = normal(rng, rows, weight.shape[1])
        ordered = twins.test(
            lambda b, inner=inner, weight=weight: b.ordered_linear(b.from_numpy(inner), b.upload([weight]))
        )
        got = own_twins.test(
            lambda b, inner=inner, weight=weight: b.linear_add(
                b.from_numpy(inner), b.upload([weight]), b.from_numpy(residual)
            )
        )
        assert_same_bits(got, rounded(ordered + residual.astype(np.float32)))
