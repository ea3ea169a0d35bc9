"""Rulers of a GPU: what its memory, its tensor cores and its launches can do, and clocks for work on it.

All of it runs on a backend's stream, inside its ``active()``, and is timed by CUDA events; figures are
medians after a warm-up. Its memory stays in CuPy's pool (``cuda_probe.free_unused_memory`` gives it back).
Knows the backend's memory, stream and cuBLAS handle; no model, no step, and no figure measured before.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np

from samir_vllm.backends import cuda_compile
from samir_vllm.backends.cuda_probe import Gpu

REPEATS, WARM_UP = 9, 2
READ_BYTES = 2 << 30  # far beyond any cache
READ_THREADS = 1024  # of a block
READ_BLOCKS = (1, 2)  # of an SM; the better one counts
GEMM_SECONDS_AT_LEAST = 2e-3  # of one timing, at PETAFLOP: events are only exact to a microsecond or so
PETAFLOP = 1e15
BLOCK = (1 << 22) + 24  # random numbers that operands repeat; no multiple of a row's length
LAUNCHES = 500  # timed together; a stream takes more than that before it makes the host wait
GRAPH_NODES = 100
GRAPH_SECONDS_AT_LEAST, GRAPH_NODES_AT_MOST = 2e-3, 2000  # of a graph that is timed


def device_name(backend: Any) -> str:
    """The GPU's own."""
    name: str = backend._gpu.name
    return name


# Clocks


def event(backend: Any) -> Any:
    """A mark on the backend's stream; see ``seconds_between``."""
    mark = cupy.cuda.Event()
    mark.record(backend.stream)
    return mark


def seconds_between(first: Any, last: Any) -> float:
    """From one mark to a later one, waiting for that."""
    last.synchronize()
    return float(cupy.cuda.get_elapsed_time(first, last)) / 1e3


def gpu_seconds(backend: Any, run: Callable[[], object]) -> float:
    """The GPU's time for what ``run`` puts on the stream: the median."""
    times = []
    for _ in range(WARM_UP + REPEATS):
        first = event(backend)
        run()
        times.append(seconds_between(first, event(backend)))
    return statistics.median(times[WARM_UP:])


def graph_seconds(backend: Any, launches: Sequence[Callable[[], object]]) -> float:
    """The GPU's time for one round of ``launches``, replayed from a CUDA graph: the host's doesn't count.

    Args:
        backend: what records them.
        launches: each puts work on the stream, allocates nothing, and may be repeated.
    """
    most, rounds = -(-GRAPH_NODES_AT_MOST // len(launches)), 1

    def run() -> None:
        for _ in range(rounds):
            for launch in launches:
                launch()

    while True:
        seconds = gpu_seconds(backend, backend.record(run)) / rounds
        if seconds * rounds >= GRAPH_SECONDS_AT_LEAST or rounds >= most:
            return seconds
        # What a short graph takes is in part its start: one that is long enough tells the truth.
        rounds = min(math.ceil(1.2 * GRAPH_SECONDS_AT_LEAST / seconds), most)


# Memory


def read_rate(backend: Any) -> float:
    """Bytes a second that the GPU can read, and do nothing else.

    Raises:
        DeviceError: no memory is free.
    """
    kernel = _kernels(backend._gpu)["read_all"]
    data = backend._zeros(_fitting(backend, READ_BYTES), np.uint8)
    rates = []
    for blocks in READ_BLOCKS:
        grid = backend._gpu.num_sms * blocks
        sums = backend._zeros(grid * READ_THREADS // 32, np.uint32)
        args = (data, np.int64(data.nbytes // 16), sums)
        run = functools.partial(kernel, (grid,), (READ_THREADS,), args, stream=backend.stream)
        rates.append(data.nbytes / gpu_seconds(backend, run))
    return max(rates)


def copy_rate(backend: Any) -> float:
    """Bytes a second, read plus written, of a copy within the GPU's memory.

    Raises:
        DeviceError: no memory is free.
    """
    nbytes = _fitting(backend, READ_BYTES) // 2
    source, target = backend._zeros(nbytes, np.uint8), backend._zeros(nbytes, np.uint8)
    kind = cupy.cuda.runtime.memcpyDeviceToDevice

    def copy() -> None:
        cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, nbytes, kind, backend.stream.ptr)

    return 2 * nbytes / gpu_seconds(backend, copy)


def _fitting(backend: Any, nbytes: int) -> int:
    """So many bytes, or half of what is free; whole MiB, one at least."""
    return max(1 << 20, min(nbytes, backend._free_memory() // 2) >> 20 << 20)


# Tensor cores


def gemm_rate(backend: Any, rows: int, features: int, depth: int) -> float:
    """Floating-point operations a second of cuBLAS: BF16 [rows, depth] times [features, depth] transposed.

    Operands are random: on zeros a GPU draws less power and runs faster than it ever will on a model.

    Raises:
        DeviceError: too little memory is free.
    """
    x = _random_bits(backend, rows, depth)
    weight = _random_bits(backend, features, depth)
    out = backend._zeros(rows * features, np.uint16).reshape(rows, features)
    flops = 2 * rows * features * depth
    products = math.ceil(GEMM_SECONDS_AT_LEAST * PETAFLOP / flops)

    def multiply() -> None:
        for _ in range(products):
            backend._cublas.matmul(x, weight, out)

    return products * flops / gpu_seconds(backend, multiply)


def _random_bits(backend: Any, rows: int, columns: int) -> Any:
    """BF16 [rows, columns] of both signs, from 1/8 to 2."""
    size = rows * columns
    random = np.frombuffer(np.random.default_rng(0).bytes(2 * min(BLOCK, size)), np.uint16)
    values = np.resize(random & np.uint16(0x81FF) | np.uint16(0x3E00), size)
    return backend.from_numpy(values.reshape(rows, columns))


# Launches


def launch_seconds(backend: Any) -> float:
    """The host's time to launch a kernel of six parameters from Python."""
    launch = _nothing(backend)
    times = []
    for _ in range(WARM_UP + REPEATS):
        backend.stream.synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            launch()
        times.append((time.perf_counter() - start) / LAUNCHES)
    backend.stream.synchronize()
    return statistics.median(times[WARM_UP:])


def graph_node_seconds(backend: Any) -> float:
    """The GPU's time for a kernel that does nothing, one of many in a replayed graph."""
    return graph_seconds(backend, [_nothing(backend)] * GRAPH_NODES) / GRAPH_NODES


def _nothing(backend: Any) -> Callable[[], object]:
    kernel, word = _kernels(backend._gpu)["nothing"], backend._zeros(1, np.uint32)
    args = (word, word, np.int32(0), np.int32(0), np.int32(0), np.int32(0))
    return functools.partial(kernel, (1,), (32,), args, stream=backend.stream)


@functools.cache
def _kernels(gpu: Gpu) -> dict[str, Any]:
    """The kernels of ``roofline.cu`` by name, for the current device, which is ``gpu``."""
    source, arch = cuda_compile.kernel_source("roofline"), cuda_compile.arch_of(gpu)
    cubin = cuda_compile.compile_source(source, "roofline.cu", arch, ()).cubin
    module = cupy.RawModule(path=cuda_compile._memory_file("roofline", cubin))
    return {name: module.get_function(name) for name in cuda_compile.RULERS["roofline"]}
