"""What a machine can do at best, measured in the run that is judged by it, and what a step must do.

The floor of a piece of work is the longer of two times: its bytes at the best read bandwidth, and its
floating-point operations at the best rate of a GEMM. Knows no engine and no peer.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from samir_vllm.backends import Backend
from samir_vllm.backends.cuda_probe import free_unused_memory
from samir_vllm.config import ModelConfig
from samir_vllm.extras.bench import cpu
from samir_vllm.llama import LlamaWeights

COPY_BYTES = 256 << 20  # of the host's: far beyond any cache
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
    from samir_vllm.backends import cuda_measure

    try:
        with backend.active():
            return {size: cuda_measure.gemm_rate(backend, *size) for size in gemm_sizes(backend.config)}
    finally:
        free_unused_memory()


def _gpu_limits(backend: Backend, best_gemm: float) -> Limits:
    from samir_vllm.backends import cuda_measure

    try:
        with backend.active():
            return Limits(
                device=cuda_measure.device_name(backend),
                read_bytes_per_second=cuda_measure.read_rate(backend),
                copy_bytes_per_second=cuda_measure.copy_rate(backend),
                gemm_flops_per_second=best_gemm,
                launch_seconds=cuda_measure.launch_seconds(backend),
                graph_node_seconds=cuda_measure.graph_node_seconds(backend),
            )
    finally:
        free_unused_memory()


def _host_limits(best_gemm: float) -> Limits:
    from_memory, to_memory = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    one = np.zeros(1, np.float32)
    return Limits(
        device=f"CPU, {len(os.sched_getaffinity(0))} cores",
        read_bytes_per_second=max(cpu.read_rulers(8192).values()),
        copy_bytes_per_second=2 * COPY_BYTES / median_seconds(lambda: np.copyto(to_memory, from_memory)),
        gemm_flops_per_second=best_gemm,
        launch_seconds=median_seconds(lambda: [np.add(one, one, out=one) for _ in range(1000)]) / 1000,
        graph_node_seconds=None,
    )


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


def median_seconds(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Wall clock of the median run, after one that doesn't count."""
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


# What a step must move and compute


def step_bytes(
    weights: LlamaWeights, config: ModelConfig, *, tokens: int, kv_tokens: int, kv_itemsize: int = 2
) -> int:
    """Bytes that one step must move; activations, which stay in the caches, don't count.

    Args:
        weights: on their device, which decides what an element takes there.
        config: the model.
        tokens: of all sequences in the step: rows of the embeddings, and K and V written.
        kv_tokens: K and V read, of all sequences: those written by earlier steps.
        kv_itemsize: bytes of one K or V value in a page.
    """
    rows = tokens * weights.embed_tokens.nbytes // len(weights.embed_tokens)
    kv_token = config.page_bytes(1, kv_itemsize) * config.num_layers
    return cpu.weight_bytes(weights) + rows + kv_token * (kv_tokens + tokens)


def step_flops(config: ModelConfig, *, tokens: int, attended: int, logit_rows: int) -> int:
    """Floating-point operations of the matrix products of one step, a multiplication and an addition each.

    Args:
        config: the model.
        tokens: of all sequences in the step.
        attended: pairs of a query token and a KV token that it sees, its own included.
        logit_rows: rows that meet the LM head.
    """
    embeddings = config.vocab_size * config.hidden_size
    # Every parameter of a layer but its two norms, and no other, is an element of a matrix.
    norms = (2 * config.num_layers + 1) * config.hidden_size
    layers = config.num_parameters - embeddings * (1 if config.tie_word_embeddings else 2) - norms
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * attended
    return 2 * layers * tokens + attention + 2 * embeddings * logit_rows


def causal_pairs(tokens: int) -> int:
    """What ``step_flops`` calls attended, of a prompt that is prefilled from its beginning."""
    return tokens * (tokens + 1) // 2


def floor_seconds(limits: Limits, nbytes: float, flops: float) -> float:
    """The least time for so many bytes and floating-point operations on this device."""
    return max(nbytes / limits.read_bytes_per_second, flops / limits.gemm_flops_per_second)
