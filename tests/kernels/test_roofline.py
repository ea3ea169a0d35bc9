"""The rulers' kernels: what `read_all` reads is every word, once.

Sums of 32-bit words modulo 2^32 are exact in any order, so equality is to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import emulated
import numpy as np
import pytest
from test_compile import ARCHS, needs_compiler
from twins import REAL

from samir_vllm.backends import cuda_compile

KERNELS = cuda_compile.RULERS["roofline"]

Launch = Callable[[str, int, int, tuple[Any, ...]], None]


def launch_emulated(name: str, blocks: int, threads: int, args: tuple[Any, ...]) -> None:
    """Arrays are changed in place."""
    program = emulated.builder().program(cuda_compile.kernel_source("roofline"), KERNELS, ()).result()
    on_device = [emulated.empty(a.shape, a.dtype) if isinstance(a, np.ndarray) else a for a in args]
    for host, device in zip(args, on_device, strict=True):
        if isinstance(host, np.ndarray):
            device.set(host)
    emulated.run(program, name, (blocks,), (threads,), tuple(on_device))
    for host, device in zip(args, on_device, strict=True):
        if isinstance(host, np.ndarray):
            host[...] = device


def launch_on_gpu(name: str, blocks: int, threads: int, args: tuple[Any, ...]) -> None:
    """The same."""
    import cupy

    from samir_vllm.backends import cuda_measure, cuda_probe

    on_device = [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
    cuda_measure._kernels(cuda_probe.require_gpu(0))[name]((blocks,), (threads,), tuple(on_device))
    for host, device in zip(args, on_device, strict=True):
        if isinstance(host, np.ndarray):
            host[...] = device.get()


@pytest.fixture(
    params=[
        pytest.param(launch_emulated, id="emulated", marks=[pytest.mark.emulated, emulated.needs_compiler]),
        pytest.param(launch_on_gpu, id="cuda", marks=pytest.mark.gpu),
    ]
)
def launch(request: pytest.FixtureRequest) -> Launch:
    found: Launch = request.param
    return found


def sums_by_warp(words: np.ndarray, blocks: int, threads: int) -> np.ndarray:
    """What each warp of the grid is to read: 4 chunks of 16 bytes a thread, tile after tile of its block."""
    chunks = words.reshape(-1, 4).sum(axis=1, dtype=np.uint32)
    place = np.arange(len(chunks))
    block = place // (4 * threads) % blocks
    warp = block * (threads // 32) + place % threads // 32
    sums = np.zeros(blocks * threads // 32, np.uint32)
    np.add.at(sums, warp, chunks)
    return sums


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("chunks", [0, 1, 31, 64, 255, 256, 257, 1000, 3 * 256, 3 * 256 + 5])
def test_every_word_is_read_once(launch: Launch, chunks: int, blocks: int) -> None:
    threads = 64  # 256 chunks in a tile
    words = np.random.default_rng(chunks).integers(0, 1 << 32, 4 * chunks, np.uint32)
    sums = np.full(blocks * threads // 32, 0xDEADBEEF, np.uint32)
    launch("read_all", blocks, threads, (words, np.int64(chunks), sums))
    assert sums.tolist() == sums_by_warp(words, blocks, threads).tolist()
    assert sums.sum(dtype=np.uint32) == words.sum(dtype=np.uint32)


def test_the_block_that_is_measured_with(launch: Launch) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, 4 * 5000, np.uint32)
    sums = np.zeros(32, np.uint32)
    launch("read_all", 1, 1024, (words, np.int64(5000), sums))
    assert sums.sum(dtype=np.uint32) == words.sum(dtype=np.uint32)


def test_nothing_does_nothing(launch: Launch) -> None:
    word = np.full(1, 7, np.uint32)
    launch("nothing", 2, 32, (word, word, *[np.int32(0)] * 4))
    assert word[0] == 7


@needs_compiler
@pytest.mark.parametrize("arch", ARCHS)
def test_a_block_of_1024_has_registers(arch: str) -> None:
    """65,536 in an SM, on every architecture."""
    compiled = cuda_compile.compile_cubin("roofline", REAL["llama_1b"], arch)
    registers = {kernel.name: kernel.registers for kernel in compiled.resources}
    assert registers["read_all"] * 1024 <= 65536
