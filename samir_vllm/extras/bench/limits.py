"""What a machine can do at best, measured in the run that is judged by it, and what a step must do.

The floor of a piece of work is the longer of two times: its bytes at the best read bandwidth, and its
floating-point operations at the best rate of a GEMM. Knows no engine and no peer.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from samir_vllm.backends import Backend
from samir_vllm.backends.cuda_probe import free_unused_memory
from samir_vllm.config import ModelConfig
from samir_vllm.llama import LlamaWeights

READ_BYTES = 512 << 20  # of the host's, as COPY_BYTES: far beyond any cache
COPY_BYTES = 256 << 20
HOST_GEMM = 2048  # rows, features and depth
GEMM_ROWS = 2048  # the rows at which the model's own matrices are multiplied
SQUARE = 8192  # rows, features and depth of the GEMM that is nobody's
REPEATS = 9


@dataclass(frozen=True, slots=True)
class Limits:
    """The best rates of one device, bytes, floating-point operations and seconds."""

    device: str
    read_bytes_per_second: float
    copy_bytes_per_second: float  # bytes read plus bytes written
    gemm_flops_per_second: float  # of the fastest GEMM
    launch_seconds: float  # the host's time to start one operation
    graph_node_seconds: float | None  # a kernel that does nothing, in a replayed CUDA graph; None on NumPy


def measure_limits(backend: Backend, gemms: Mapping[tuple[int, int, int], float] | None = None) -> Limits:
    """The rates of the backend's device, now; takes about a second.

    Args:
        backend: on the device.
        gemms: what ``gemm_rates`` has just found; None: it is called.

    Raises:
        DeviceError: too little memory is free.
    """
    best_gemm = max((gemms or gemm_rates(backend)).values())
    return _gpu_limits(backend, best_gemm) if backend.name == "cuda" else _host_limits(best_gemm)


def gemm_rates(backend: Backend) -> dict[tuple[int, int, int], float]:
    """Floating-point operations a second of GEMMs (rows, features, depth): BF16 on a GPU, FP32 on NumPy.

    Raises:
        DeviceError: too little memory is free.
    """
    if backend.name != "cuda":
        return {(HOST_GEMM,) * 3: _host_gemm_rate()}
    with _rulers_of(backend) as rulers:
        return {size: rulers.gemm_rate(backend, *size) for size in gemm_sizes(backend.config)}


def _gpu_limits(backend: Backend, best_gemm: float) -> Limits:
    with _rulers_of(backend) as rulers:
        return Limits(
            device=rulers.device_name(backend),
            read_bytes_per_second=rulers.read_rate(backend),
            copy_bytes_per_second=rulers.copy_rate(backend),
            gemm_flops_per_second=best_gemm,
            launch_seconds=rulers.launch_seconds(backend),
            graph_node_seconds=rulers.graph_node_seconds(backend),
        )


@contextmanager
def _rulers_of(backend: Backend) -> Iterator[Any]:
    """The module that measures a GPU; what memory it took is free afterwards."""
    from samir_vllm.backends import cuda_measure

    try:
        with backend.active():
            yield cuda_measure
    finally:
        free_unused_memory()


def _host_limits(best_gemm: float) -> Limits:
    from_memory, to_memory = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    one = np.zeros(1, np.float32)
    return Limits(
        device=f"CPU, {len(os.sched_getaffinity(0))} cores",
        read_bytes_per_second=max(host_read_rates(8192).values()),
        copy_bytes_per_second=2 * COPY_BYTES / median_seconds(lambda: np.copyto(to_memory, from_memory)),
        gemm_flops_per_second=best_gemm,
        launch_seconds=median_seconds(lambda: [np.add(one, one, out=one) for _ in range(1000)]) / 1000,
        graph_node_seconds=None,
    )


def host_read_rates(width: int) -> dict[str, float]:
    """Bytes a second that the host reads, by several means: GEMVs of rows of 8192 and of ``width``, max."""
    data = np.ones(READ_BYTES // 4, np.float32)
    rates = {}
    for columns in sorted({8192, width}):
        matrix = data[: len(data) // columns * columns].reshape(-1, columns)
        multiply = functools.partial(np.dot, matrix, np.ones(columns, np.float32))
        rates[f"GEMV, rows of {columns}"] = matrix.nbytes / median_seconds(multiply)
    with ThreadPoolExecutor() as pool:
        parts = np.array_split(data, pool._max_workers)
        rates["max, all threads"] = data.nbytes / median_seconds(lambda: list(pool.map(np.max, parts)))
    return rates


def _host_gemm_rate() -> float:
    x, weight = np.ones((HOST_GEMM, HOST_GEMM), np.float32), np.ones((HOST_GEMM, HOST_GEMM), np.float32)
    out = np.empty_like(x)
    return 2 * HOST_GEMM**3 / median_seconds(lambda: np.matmul(x, weight.T, out=out))


def gemm_sizes(config: ModelConfig) -> list[tuple[int, int, int]]:
    """(rows, features, depth) of a GPU's GEMMs: a large square, and those of a prefill of the model."""
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    own = [(qkv, hidden), (hidden, config.num_heads * config.head_dim), (2 * inner, hidden), (hidden, inner)]
    return [(SQUARE, SQUARE, SQUARE), *((GEMM_ROWS, features, depth) for features, depth in own)]


def median_seconds(run: Callable[[], object]) -> float:
    """Wall clock of the median run, after one that doesn't count."""
    times = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


# What a step must move and compute


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step runs, of all its sequences."""

    tokens: int  # rows of the embeddings, and K and V written
    kv_tokens: int  # K and V read: those written by earlier steps
    attended: int  # pairs of a query token and a KV token that it sees, its own included
    logit_rows: int  # rows that meet the LM head


def weight_bytes(weights: LlamaWeights) -> int:
    """Bytes one token reads: every matrix and norm once; of the embeddings, as the head, all rows."""
    layers = sum(getattr(layer, f.name).nbytes for layer in weights.layers for f in fields(layer))
    return int(layers + weights.norm.nbytes + weights.lm_head.nbytes)


def step_bytes(weights: LlamaWeights, config: ModelConfig, work: StepWork, kv_itemsize: int) -> int:
    """Bytes that one step must move; activations, which stay in the caches, don't count.

    Args:
        weights: on their device, which decides what an element takes there.
        config: the model.
        work: of the step.
        kv_itemsize: bytes of one K or V value in a page.
    """
    matrices = weight_bytes(weights)
    if work.logit_rows == 0:  # in the middle of a prompt
        matrices -= weights.lm_head.nbytes
    rows = work.tokens * weights.embed_tokens.nbytes // len(weights.embed_tokens)
    kv_token = config.page_bytes(1, kv_itemsize) * config.num_layers
    return matrices + rows + kv_token * (work.kv_tokens + work.tokens)


def step_flops(config: ModelConfig, work: StepWork) -> int:
    """Floating-point operations of the matrix products of one step, a multiplication and an addition each."""
    embeddings = config.vocab_size * config.hidden_size
    # Every parameter of a layer but its two norms, and no other, is an element of a matrix.
    norms = (2 * config.num_layers + 1) * config.hidden_size
    layers = config.num_parameters - embeddings * (1 if config.tie_word_embeddings else 2) - norms
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * work.attended
    return 2 * layers * work.tokens + attention + 2 * embeddings * work.logit_rows


def causal_pairs(tokens: int) -> int:
    """``StepWork.attended`` of a prompt that is prefilled from its beginning."""
    return tokens * (tokens + 1) // 2


def floor_seconds(limits: Limits, nbytes: float, flops: float) -> float:
    """The least time for so many bytes and floating-point operations on this device."""
    return max(nbytes / limits.read_bytes_per_second, flops / limits.gemm_flops_per_second)
