"""The wrappers of ``ptx.cuh``: what they mean on the CPU, and that a GPU means the same.

Equal to the bit, but for ``exp2_approx`` (2 units in the last place by its definition) and ``mma_m16n8k16``:
a tensor core aligns its terms to the largest and truncates, and loses at most 2^-23 of the sum of their
absolute values at each step (`product_slack`); here it may lose twice that, because c counts as a term.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulated
import numpy as np
import pytest
from twins import BF16, normal, rng_for

from samir_vllm.backends import cuda_compile, cuda_probe

KERNELS = ("pack", "power_of_two", "multiply", "load_matrices_both_ways", "copy_rows", "take_turns", "ring")

Launch = Callable[..., None]


def source() -> str:
    """``wrappers.cu``, its include in place."""
    text = (Path(__file__).parent / "wrappers.cu").read_text(encoding="utf-8")
    before, include, behind = text.partition('#include "common.cuh"\n')
    assert include
    line = before.count("\n") + 2
    return f'{before}{emulated.header("common.cuh")}\n#line {line} "wrappers.cu"\n{behind}'


def run_on_cpu(name: str, *args: Any, threads: int = 32, shared: int = 0) -> None:
    """Runs one kernel on host arrays, in place."""
    program = emulated.builder().program(source(), KERNELS, ()).result()
    on_device = [emulated.empty(a.shape, a.dtype) if isinstance(a, np.ndarray) else a for a in args]
    for host, device in zip(args, on_device, strict=True):
        if isinstance(host, np.ndarray):
            device.set(host)
    emulated.run(program, name, (1,), (threads,), tuple(on_device), shared)
    for host, device in zip(args, on_device, strict=True):
        if isinstance(host, np.ndarray):
            host[...] = device


@functools.cache
def gpu_module() -> Any:
    import cupy

    arch = cuda_compile.arch_of(cuda_probe.require_gpu(0))
    module = cupy.cuda.function.Module()
    module.load(cuda_compile.compile_source(source(), "wrappers.cu", arch, ()).cubin)
    return module


def run_on_gpu(name: str, *args: Any, threads: int = 32, shared: int = 0) -> None:
    """As `run_on_cpu`."""
    import cupy

    if name == "ring" and cuda_probe.require_gpu(0).compute_capability < (9, 0):
        pytest.skip("bulk copies came with compute capability 9.0")
    on_device = [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
    gpu_module().get_function(name)((1,), (threads,), tuple(on_device), shared_mem=shared)
    for host, device in zip(args, on_device, strict=True):
        if isinstance(host, np.ndarray):
            host[...] = device.get()


@pytest.fixture(
    params=[
        pytest.param(run_on_cpu, id="emulated", marks=pytest.mark.emulated),
        pytest.param(run_on_gpu, id="cuda", marks=pytest.mark.gpu),
    ]
)
def launch(request: pytest.FixtureRequest) -> Launch:
    if request.param is run_on_cpu and emulated.COMPILER is None:
        pytest.skip(emulated.NO_COMPILER)
    return request.param


def bits_of(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint16).copy()


def test_pack_bf16(launch: Launch) -> None:
    """Ties to even, overflow to infinity, both zeros, subnormals; any NaN becomes a NaN."""
    ties = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000], np.uint32)
    ends = np.array([0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000], np.uint32)
    small = np.array([0, 0x80000000, 0x00800000, 0x80800000], np.uint32)
    nans = np.array([0x7F800001, 0x7FC00000, 0xFFC00001, 0xFFFFFFFF], np.uint32)
    some = rng_for("pack").integers(0x00800000, 0x7F000000, 1000).astype(np.uint32)
    low = np.concatenate([ties, ends, small, nans, some]).view(np.float32)
    high = low[::-1].copy()
    pairs = np.zeros(len(low), np.uint32)
    launch("pack", low, high, pairs, np.int32(len(low)))
    for got, x in ((pairs & 0xFFFF, low), (pairs >> 16, high)):
        is_nan = np.isnan(x)
        np.testing.assert_array_equal(got[is_nan], 0x7FFF)
        want = x[~is_nan].astype(BF16).view(np.uint16)
        np.testing.assert_array_equal(got[~is_nan], want)


def test_exp2_approx(launch: Launch) -> None:
    x = np.concatenate([np.linspace(-140, 127, 5000), [0, -0.0, -np.inf, np.inf, 128, 1e30, -1e30, -3e38]])
    x = x.astype(np.float32)
    y = np.zeros_like(x)
    launch("power_of_two", x, y, np.int32(len(x)))
    with np.errstate(over="ignore"):
        want = np.exp2(x.astype(np.float64)).astype(np.float32)
    want[x < -126] = 0
    np.testing.assert_allclose(y, want, rtol=2.0**-22)
    launch("power_of_two", x[:1] * np.float32(np.nan), y, np.int32(1))
    assert np.isnan(y[0])


@pytest.mark.parametrize("case", ["integers", "normal", "far apart"])
def test_mma(launch: Launch, case: str) -> None:
    rng = rng_for("mma", case)
    for _ in range(5):
        if case == "integers":  # exact, so equal: what lies where
            a, b = (rng.integers(-128, 128, shape).astype(BF16) for shape in ((16, 16), (8, 16)))
        else:
            a, b = normal(rng, 16, 16), normal(rng, 8, 16)
        if case == "far apart":
            a = (a.astype(np.float32) * np.exp2(rng.integers(-20, 20, a.shape))).astype(BF16)
        c = rng.integers(-1000, 1000, (16, 8)).astype(np.float32)
        want = c + a.astype(np.float64) @ b.astype(np.float64).T
        size = np.abs(c) + np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T
        launch("multiply", bits_of(a), bits_of(b), c)
        assert (np.abs(c - want) <= (0 if case == "integers" else 2 * size * 2.0**-23)).all()


def test_ldmatrix_both_ways(launch: Launch) -> None:
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8) * np.uint16(7)
    registers = np.zeros((2, 32, 4), np.uint32)
    launch("load_matrices_both_ways", matrices.copy(), registers)
    for way, source_of in enumerate((matrices, matrices.swapaxes(1, 2))):
        halves = registers[way].view(np.uint16).reshape(32, 4, 2)  # of lane, matrix
        want = source_of.reshape(4, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4, 2)
        np.testing.assert_array_equal(halves, want)


def test_cp_async(launch: Launch) -> None:
    """An invalid row becomes zeros, whatever lies there."""
    rng = rng_for("cp_async")
    rows = rng.integers(1, 2**32, (32, 4), np.uint32)
    valid = (rng.random(32) < 0.6).astype(np.int32)
    out = np.zeros_like(rows)
    launch("copy_rows", rows.copy(), valid.copy(), out, shared=512)
    np.testing.assert_array_equal(out, (rows * valid[:, None])[::-1])


def test_named_barriers(launch: Launch) -> None:
    order = np.zeros(64, np.int32)
    launch("take_turns", order, threads=64)
    np.testing.assert_array_equal(order, [6] * 32 + [5] * 32)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 50])
def test_ring_of_bulk_copies(launch: Launch, rows: int) -> None:
    x = rng_for("ring", rows).integers(-99, 99, (rows, 64)).astype(np.float32)
    sums = np.zeros(64, np.float32)
    launch("ring", x.copy(), sums, np.int32(rows), threads=96)
    np.testing.assert_array_equal(sums, x.sum(axis=0))


@pytest.mark.emulated
@emulated.needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("            if (round > 0) mbarrier_wait(&empty[stage], (round - 1) % 2);\n", ""),
        ("            mbarrier_wait(&full[stage], row / STAGES % 2);\n", ""),
        ("row / STAGES % 2", "row / STAGES % 2 ^ 1"),
        ("mbarrier_arrive_expect_tx(&full[stage], sizeof stages[stage]);", "mbarrier_arrive(&full[stage]);"),
        ("            mbarrier_arrive(&empty[stage]);\n", ""),
        ("mbarrier_init(&empty[i], 64)", "mbarrier_init(&empty[i], 63)"),
        ("        async_fence();\n    }\n    __syncthreads();", "        async_fence();\n    }"),
    ],
    ids=["no empty", "no full", "parity", "no bytes", "no arrival", "count", "no barrier"],
)
def test_a_broken_ring_is_found(right: str, wrong: str) -> None:
    text = source()
    assert right in text
    program = emulated.builder().program(text.replace(right, wrong), KERNELS, ()).result()
    x, sums = emulated.empty((20, 64), np.float32), emulated.empty((64,), np.float32)
    x[...] = np.arange(20 * 64).reshape(20, 64)
    with pytest.raises(emulated.EmulatorError):
        emulated.run(program, "ring", (1,), (96,), (x, sums, np.int32(20)))
