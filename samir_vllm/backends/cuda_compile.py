"""Finds ``cuda_src`` and builds its kernels for one model and one GPU with NVRTC.

The sources include only each other, so they need no CUDA headers. ``#include`` lines are expanded here, so
that the text which is compiled is all that a cached kernel depends on. Knows nothing of launches.
"""

from __future__ import annotations

import functools
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samir_vllm.backends import KV_SPLIT, cuda_probe
from samir_vllm.backends.cuda_cache import Cache
from samir_vllm.backends.cuda_probe import CompileError, Gpu, Unavailable, one_line
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
    "decode_state": ("begin_decode", "fill_tokens", "keep_tokens"),
    "adjust_logits": ("adjust_logits", "restore_logits"),
    "mask_logits": ("mask_logits",),
    "sample": ("segment_maxima", "sample"),
    "log_probs": ("log_probs",),
}
"""The kernels of each file ``cuda_src/<stem>.cu``."""

STEMS = tuple(KERNELS)

RULERS: dict[str, tuple[str, ...]] = {"roofline": ("read_all", "nothing")}
"""The same of files that no engine needs: a measurement compiles them when it wants them."""

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
"""KV tokens of a tile of attention; ``attention.cuh`` has it too, and ``common.cuh`` has ``KV_SPLIT``."""

CUDA_ERROR_OUT_OF_MEMORY = 2  # of cuda.h

DECODE_STATIC_BYTES = 10 << 10  # what paged_attention_decode has beside K and V, with room to spare

OPTIONS = ("-std=c++17", "-ftz=true", "--ptxas-options=-v")

CACHE_FORMAT = 1
"""Goes up when a cached kernel must not be used any more, for a reason that its key doesn't show."""

REPORT_REMEDY = "report it with what python -m samir_vllm doctor prints, or run with --device cpu"


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
    try:
        text = (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise Unavailable(f"{folder / name} can't be read: {one_line(exc)}", "reinstall samir-vllm") from None
    for number, line in enumerate(text.splitlines(), start=1):
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


@dataclass(frozen=True, slots=True)
class BuiltKernels:
    """The machine code (cubin) of every file of ``cuda_src``, by stem."""

    cubins: dict[str, bytes]
    compiled: int  # files that were compiled now
    cached: int  # files whose machine code was there


@dataclass(frozen=True, slots=True)
class LoadedKernels:
    """Every kernel by name, ready to launch, and what that took; numbers as in `BuiltKernels`."""

    kernels: dict[str, Any]
    compiled: int
    cached: int


def load_kernels(config: ModelConfig, gpu: Gpu, cache: Cache) -> LoadedKernels:
    """Every kernel for the current device, which is ``gpu``; what ``cache`` lacks is compiled and kept there.

    Raises:
        DeviceError: no compiler, one that doesn't know the GPU, a kernel that doesn't compile, or a driver
            that doesn't load it.
    """
    built = build_kernels(config, arch_of(gpu), gpu.max_shared_bytes, cache)
    kernels: dict[str, Any] = {}
    for stem, cubin in built.cubins.items():
        kernels |= _load(stem, cubin)
    allow_shared_bytes(kernels, config, gpu.max_shared_bytes)
    return LoadedKernels(kernels, built.compiled, built.cached)


def allow_shared_bytes(kernels: dict[str, Any], config: ModelConfig, max_shared_bytes: int) -> None:
    """Lets the kernels that need more than 48 KiB of dynamic shared memory have it."""
    decode, prefill = kernels["paged_attention_decode"], kernels["paged_attention_prefill"]
    decode.max_dynamic_shared_size_bytes = decode_shared_bytes(config, max_shared_bytes)
    prefill.max_dynamic_shared_size_bytes = prefill_shared_bytes(config)


def arch_of(gpu: Gpu) -> str:
    """The compiler's name for the GPU's architecture, with all that is special to it."""
    major, minor = gpu.compute_capability
    return f"sm_{major}{minor}" + "a" * (gpu.compute_capability == (9, 0))


def build_kernels(config: ModelConfig, arch: str, max_shared_bytes: int, cache: Cache) -> BuiltKernels:
    """The machine code of all files, from ``cache`` or compiled in parallel; needs no GPU.

    Raises:
        DeviceError: no compiler, one that doesn't know ``arch``, or a file that doesn't compile.
    """
    sources = {stem: kernel_source(stem) for stem in STEMS}
    options = compiler_options(arch, definitions(config, max_shared_bytes))
    compiler = cuda_probe.nvrtc_build()
    cubins: dict[str, bytes] = {}
    for stem, source in sources.items():
        if cubin := cache.read(stem, cache_key(source, options, compiler), "cubin"):
            cubins[stem] = cubin
    missing = {stem: source for stem, source in sources.items() if stem not in cubins}
    if missing:
        cubins |= _compile_all(missing, options)
        compiler = cuda_probe.nvrtc_build()  # of the library that is loaded now, and did the work
        for stem, source in missing.items():
            cache.write(stem, cache_key(source, options, compiler), "cubin", cubins[stem])
    return BuiltKernels(cubins, len(missing), len(STEMS) - len(missing))


def kernel_key(stem: str, config: ModelConfig, gpu: Gpu) -> str:
    """All that the machine code of ``<stem>.cu`` depends on."""
    options = compiler_options(arch_of(gpu), definitions(config, gpu.max_shared_bytes))
    return cache_key(kernel_source(stem), options, cuda_probe.nvrtc_build())


def cache_key(source: str, options: tuple[str, ...], compiler: str) -> str:
    """All that machine code depends on: the source, the options (one is the architecture), the compiler."""
    return "\0".join((str(CACHE_FORMAT), compiler, *options, source))


def _compile_all(sources: dict[str, str], options: tuple[str, ...]) -> dict[str, bytes]:
    """Machine code by stem. NVRTC compiles in parallel, and CuPy releases the GIL while it does."""
    cuda_probe.nvrtc_version()  # says what to install where there is no compiler, and loads it once
    pool = ThreadPoolExecutor(min(len(sources), len(os.sched_getaffinity(0))))
    try:
        # The longest first: the last to end decides how long all take.
        stems = sorted(sources, key=lambda stem: len(sources[stem]), reverse=True)
        futures = {stem: pool.submit(_compile, stem, sources[stem], options) for stem in stems}
        return {stem: future.result() for stem, future in futures.items()}
    finally:
        pool.shutdown(cancel_futures=True)


def _compile(stem: str, source: str, options: tuple[str, ...]) -> bytes:
    try:
        return cuda_probe.run_nvrtc(source, f"{stem}.cu", options)[0]
    except CompileError as exc:
        if "--gpu-architecture" in str(exc):
            arch = next(option for option in options if option.startswith("-arch="))
            version = "{}.{}".format(*cuda_probe.nvrtc_version())
            raise DeviceError(
                f"NVRTC {version} doesn't know this GPU ({arch.removeprefix('-arch=')}); "
                f"{cuda_probe.newer_nvrtc()}, or run with --device cpu"
            ) from None
        raise DeviceError(
            f"cuda_src/{stem}.cu can't be built: {one_line(exc, 600)}; {REPORT_REMEDY}"
        ) from None


def _load(stem: str, cubin: bytes) -> dict[str, Any]:
    """The kernels of one file by name."""
    import cupy

    module = cupy.RawModule(path=_memory_file(stem, cubin))
    try:
        module.compile()  # loads it, else that waits for the first launch
        return {name: module.get_function(name) for name in KERNELS[stem]}
    except cupy.cuda.driver.CUDADriverError as exc:
        if exc.status == CUDA_ERROR_OUT_OF_MEMORY:  # a matter of the GPU, not of the code
            raise
        raise DeviceError(
            f"the NVIDIA driver refuses the machine code of cuda_src/{stem}.cu: {one_line(exc)}; "
            "update the driver, or run with --device cpu"
        ) from None


@functools.cache
def _memory_file(name: str, content: bytes) -> str:
    """A path that gives ``content``, and never anything else, for as long as the process lives.

    CuPy and the driver take paths, and CuPy remembers what it loaded by path. A file of the cache won't do:
    another process may replace or remove it after we have verified its content. Needs no folder to write to.
    """
    descriptor = os.memfd_create(name)  # never closed, else the path would be free for other content
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return f"/proc/self/fd/{descriptor}"


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
    try:
        cubin, log = cuda_probe.run_nvrtc(source, name, compiler_options(arch, options))
    except CompileError as exc:
        raise DeviceError(f"{name} doesn't compile for {arch}: {exc}") from None
    return Compiled(cubin, _complaints(log), _resources(log))


def compiler_options(arch: str, options: tuple[str, ...]) -> tuple[str, ...]:
    """Every option that NVRTC gets; ``options`` are those of the file."""
    return (*OPTIONS, *options, f"-arch={arch}")


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
