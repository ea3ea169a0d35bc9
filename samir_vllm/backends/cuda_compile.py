"""Finds ``cuda_src`` and builds its kernels for one model and one GPU with NVRTC.

The sources include only each other, so they need no CUDA headers. ``#include`` lines are expanded here:
CuPy's cache knows the text it compiles, not the files that text includes. Knows nothing of launches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samir_vllm.backends import KV_SPLIT, cuda_probe
from samir_vllm.backends.cuda_probe import CompileError, Unavailable, one_line
from samir_vllm.config import PAGE_SIZE, ModelConfig
from samir_vllm.errors import DeviceError

KERNELS: dict[str, tuple[str, ...]] = {
    "embedding": ("embedding",),
    "rmsnorm": ("rmsnorm", "add_rmsnorm"),
    "linear": ("add_segments", "ordered_linear", "count_differences"),
    "rope_kv_write": ("rope_kv_write",),
    "paged_attention_decode": ("paged_attention_decode",),
    "paged_attention_prefill": ("paged_attention_prefill",),
    "silu_mul": ("silu_mul",),
    "argmax": ("argmax",),
}
"""The kernels of each file ``cuda_src/<stem>.cu``."""

STEMS = tuple(KERNELS)

MAX_SHARED_BYTES = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90a": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
}
"""Shared memory that one block may ask for (CUDA C++ Programming Guide, "Technical Specifications")."""

KV_TILE = 64
"""KV tokens of a tile of attention; ``attention.cuh`` has it too, and ``KV_SPLIT``."""

DECODE_STATIC_BYTES = 10 << 10  # what paged_attention_decode has beside K and V, with room to spare

OPTIONS = ("-std=c++17",)


def kernel_source(stem: str) -> str:
    """The text of ``<stem>.cu`` with its includes in place of their lines, each once."""
    folder = cuda_probe.find_cuda_src()
    if folder is None:
        raise Unavailable("no folder cuda_src, in the package or beside it", "reinstall samir-vllm")
    return _expand(folder, f"{stem}.cu", set())


def _expand(folder: Path, name: str, seen: set[str]) -> str:
    if name in seen:
        return ""
    seen.add(name)
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((folder / name).read_text(encoding="utf-8").splitlines(), start=1):
        if found := re.fullmatch(r'#include "([\w.]+)"', line):
            lines += [_expand(folder, found[1], seen), f'#line {number + 1} "{name}"']
        else:
            lines.append("" if line == "#pragma once" else line)
    return "\n".join(lines)


def norm_threads(config: ModelConfig) -> int:
    """Threads of a block that holds one row of the hidden state, 8 values each."""
    return min(1024, -(-config.hidden_size // 256) * 32)


def decode_shared_bytes(config: ModelConfig, max_shared_bytes: int) -> int:
    """Dynamic shared memory of ``paged_attention_decode``: K and V of a split, or room for one of them."""
    both = 2 * KV_SPLIT * config.head_dim * 2
    return both if both + DECODE_STATIC_BYTES <= max_shared_bytes else both // 2


def prefill_shared_bytes(config: ModelConfig) -> int:
    """Dynamic shared memory of ``paged_attention_prefill``: two stages of K and V in BF16, an FP32 output."""
    return 2 * 2 * KV_TILE * config.head_dim * 2 + KV_TILE * config.head_dim * 4


def definitions(config: ModelConfig, max_shared_bytes: int) -> tuple[str, ...]:
    """The compiler options that make the model's sizes constants of the kernels."""
    values = {
        "HIDDEN_SIZE": config.hidden_size,
        "INTERMEDIATE_SIZE": config.intermediate_size,
        "NUM_LAYERS": config.num_layers,
        "NUM_HEADS": config.num_heads,
        "NUM_KV_HEADS": config.num_kv_heads,
        "HEAD_DIM": config.head_dim,
        "VOCAB_SIZE": config.vocab_size,
        "PAGE_SIZE": PAGE_SIZE,
        "NORM_THREADS": norm_threads(config),
        "V_WAITS_FOR_K": int(decode_shared_bytes(config, max_shared_bytes) < 4 * KV_SPLIT * config.head_dim),
        "RMS_EPS": _float_literal(config.rms_norm_eps),
        "ATTENTION_SCALE": _float_literal(config.head_dim**-0.5),
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


def _float_literal(value: float) -> str:
    return f"{float(np.float32(value))!r}f"


def load_kernels(config: ModelConfig, max_shared_bytes: int) -> dict[str, Any]:
    """Every kernel by name, compiled for the current device.

    Raises:
        DeviceError: no compiler, or a kernel that doesn't compile or load.
    """
    import cupy

    cuda_probe.nvrtc_version()  # says what to install where there is no compiler
    cuda_probe.check_headers()
    options = OPTIONS + definitions(config, max_shared_bytes)
    kernels = {}
    for stem, names in KERNELS.items():
        module = cupy.RawModule(code=kernel_source(stem), backend="nvrtc", options=options)
        try:
            module.compile()  # else it waits for the first launch
            for name in names:
                kernels[name] = module.get_function(name)
        except (cupy.cuda.compiler.CompileException, cupy.cuda.driver.CUDADriverError) as exc:
            raise DeviceError(
                f"cuda_src/{stem}.cu can't be built: {one_line(exc, 600)}; "
                "report it with what python -m samir_vllm doctor prints, or run with --device cpu"
            ) from None
    kernels["paged_attention_decode"].max_dynamic_shared_size_bytes = decode_shared_bytes(
        config, max_shared_bytes
    )
    kernels["paged_attention_prefill"].max_dynamic_shared_size_bytes = prefill_shared_bytes(config)
    return kernels


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What ``ptxas`` says one kernel uses."""

    name: str
    registers: int
    shared_bytes: int  # static
    spill_bytes: int
    stack_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """One file's machine code; ``log`` is "" where the compiler had nothing to say but the resources."""

    cubin: bytes
    log: str
    resources: list[KernelResources]


def compile_cubin(stem: str, config: ModelConfig, arch: str, max_shared_bytes: int | None = None) -> Compiled:
    """Compiles ``<stem>.cu`` for ``arch`` (``sm_90a``) without a GPU.

    Raises:
        DeviceError: it doesn't compile; the message holds the compiler's log.
    """
    if max_shared_bytes is None:
        max_shared_bytes = MAX_SHARED_BYTES[arch]
    return compile_source(kernel_source(stem), f"{stem}.cu", arch, definitions(config, max_shared_bytes))


def compile_source(source: str, name: str, arch: str, options: tuple[str, ...]) -> Compiled:
    """As `compile_cubin`, for any text."""
    # CuPy adds -ftz=true to what it compiles.
    options = (*OPTIONS, *options, f"-arch={arch}", "-ftz=true", "--ptxas-options=-v")
    try:
        cubin, log = cuda_probe.run_nvrtc(source, name, options)
    except CompileError as exc:
        raise DeviceError(f"{name} doesn't compile for {arch}: {exc}") from None
    return Compiled(cubin, _complaints(log), _resources(log))


def _complaints(log: str) -> str:
    quiet = re.compile(
        r"\s*(ptxas )?info\s*:|.*(bytes stack frame|Function properties for|Compile time)|\s*\x00?\s*$"
    )
    return "\n".join(line for line in log.splitlines() if not quiet.match(line))


def _resources(log: str) -> list[KernelResources]:
    """From ``ptxas -v``: a paragraph for each kernel."""
    found = []
    for part in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'(\w+)'", part)
        used = re.search(r"Used (\d+) registers", part)
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        if not (name and used and stack):
            raise DeviceError(f"the compiler's report can't be read: {one_line(part)}")
        shared = re.search(r"(\d+) bytes smem", part)
        found.append(
            KernelResources(
                name[1],
                int(used[1]),
                int(shared[1]) if shared else 0,
                int(stack[2]) + int(stack[3]),
                int(stack[1]),
            )
        )
    return found
