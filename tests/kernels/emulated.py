"""The CUDA backend without a GPU: its real host code, its real kernels, built by g++ and run on the CPU.

`load_cuda_backend` loads ``cuda_backend.py`` a second time, under another name, with NumPy in place of CuPy
and cuBLAS; a kernel is an executable (``emulator/``), run for every launch in three orders whose results must
agree. What goes wrong in it (a race, an overrun, a deadlock) is an `EmulatorError`. All happens at once but
for what a stream captures: that happens when its graph is launched. Knows no kernel.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from samir_vllm.backends import cuda_compile, cuda_launch, cuda_probe
from samir_vllm.backends.cuda_probe import Gpu
from samir_vllm.config import ModelConfig

FOLDER = Path(__file__).parent / "emulator"
COMPILER = shutil.which("g++")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
COMMON_FLAGS = ("-std=c++17", "-DEMULATED", "-fno-omit-frame-pointer", f"-I{FOLDER}")
KERNEL_FLAGS = (
    *("-O1", "-g1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-ftrivial-auto-var-init=pattern"),
    *(*SANITIZERS, "-fsanitize-sections=emulated_shared"),
)
UNUSED_SECONDS = 14 * 24 * 3600.0
"""After which a program is thrown away: every change of a kernel makes new ones."""

ALIGNMENT = 256
"""Of every allocation, as of CUDA's; a view's address keeps its place in it."""

MAX_SHARED_BYTES = 227 << 10
"""Of a block, unless a test says otherwise: as on an H100."""

MAX_THREADS = 1024
MAX_GRID = (2**31 - 1, 65535, 65535)
"""Of any launch on any GPU."""

NO_COMPILER = "g++, which builds kernels for the CPU, is not installed"
needs_compiler = pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER)

launches: Counter[str] = Counter()
"""How often each kernel ran in this process."""


class EmulatorError(Exception):
    """A kernel did on the CPU what it must not do: the message says what, where and in which order."""


# Building


class Builder:
    """Builds programs, each once, several at a time; keeps them in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for file in folder.iterdir():
            with suppress(FileNotFoundError):  # another process may be quicker
                if time.time() - file.stat().st_mtime > UNUSED_SECONDS:
                    shutil.rmtree(file, ignore_errors=True) if file.is_dir() else file.unlink()
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._programs: dict[str, Future[Path]] = {}

    def program(self, source: str, kernels: Iterable[str], options: Iterable[str]) -> Future[Path]:
        """A program with these kernels of ``source``; ``options`` are ``-DNAME=VALUE``."""
        code = re.sub(r"//[^\n]*", "", source)
        used = [o for o in options if re.search(rf"\b{o[2:].split('=')[0]}\b", code)]
        entries = "".join(f"    EMULATED_KERNEL({name}, {_launch_bounds(code, name)}),\n" for name in kernels)
        # In an anonymous namespace the shared variables of templates may lie in a section, too.
        text = (
            f'#include "emulator.h"\nnamespace {{\n{source}\n}}\n#line 1 "entries"\n'
            f"extern const emulator::Kernel emulated_kernels[] = {{\n{entries}    {{}}}};\n"
        )
        key = _digest(text, *used, *KERNEL_FLAGS, self._runtime_key)
        if key not in self._programs:
            self._programs[key] = self._pool.submit(self._build, key, text, used)
        return self._programs[key]

    def _build(self, key: str, text: str, used: list[str]) -> Path:
        program = self.folder / key
        if program.exists():
            program.touch()  # in use
        else:
            with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                source, out = Path(scratch) / "kernel.cpp", Path(scratch) / "program"
                source.write_text(text, encoding="utf-8")
                _compile(*KERNEL_FLAGS, *used, str(source), str(self._runtime), "-o", str(out))
                out.replace(program)  # whole or not at all, whoever else builds it
        return program

    @functools.cached_property
    def _runtime_key(self) -> str:
        version = subprocess.run([str(COMPILER), "--version"], capture_output=True, text=True, check=True)
        return _digest(version.stdout, *(p.read_text() for p in sorted(FOLDER.iterdir())), *COMMON_FLAGS)

    @functools.cached_property
    def _runtime(self) -> Path:
        """``emulator.cpp``, compiled once and without checks of its own."""
        target = self.folder / f"{self._runtime_key}.o"
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                out = Path(scratch) / "emulator.o"
                _compile("-O2", "-c", str(FOLDER / "emulator.cpp"), "-o", str(out))
                out.replace(target)
        return target


def _launch_bounds(code: str, kernel: str) -> str:
    """What stands in the kernel's ``__launch_bounds__``; first the most threads that a block may have."""
    bounds = r"__launch_bounds__\s*\(((?:[^()]|\([^()]*\))*)\)"
    found = re.search(rf"{bounds}\s*(?:void\s+)?{kernel}\s*\(", code)
    return found[1] if found else str(MAX_THREADS)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


def _compile(*words: str) -> None:
    done = subprocess.run([str(COMPILER), *COMMON_FLAGS, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"g++ {' '.join(words)}:\n{done.stderr[:4000]}")


@functools.cache
def builder() -> Builder:
    """The one that all share; `use_folder` chooses where programs are kept."""
    return Builder(_folder or Path(_temporary().name))


_folder: Path | None = None


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """Gone when the process ends."""
    return tempfile.TemporaryDirectory(prefix="emulated-kernels-")


def use_folder(folder: Path) -> None:
    """Keep programs here, for later runs too; before the first is built."""
    global _folder
    _folder = folder


def header(name: str) -> str:
    """The text of a header of ``cuda_src``, its own includes in place of their lines."""
    folder = cuda_probe.find_cuda_src()
    assert folder is not None
    return cuda_compile._expand(folder, name, set())


def stem_program(stem: str, config: ModelConfig, max_shared_bytes: int) -> Future[Path]:
    """The program of ``cuda_src/<stem>.cu`` for one model."""
    options = cuda_compile.definitions(config, max_shared_bytes)
    return builder().program(cuda_compile.kernel_source(stem), cuda_compile.KERNELS[stem], options)


# Launching


class Kernel:
    """Callable as CuPy's kernels are; the program is built at the first call, if it isn't yet."""

    def __init__(self, name: str, program: Callable[[], Future[Path]], max_shared_bytes: int) -> None:
        self.name = name
        self._program = program
        self._max_shared_bytes = max_shared_bytes
        self.max_dynamic_shared_size_bytes = 48 << 10

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
        stream: Any = None,
    ) -> None:
        """Run it; arrays are changed in place.

        Raises:
            EmulatorError: the kernel, or the launch, is wrong.
        """
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise EmulatorError(f"{self.name}: {shared_mem} bytes of shared memory weren't asked for")
        _submit(self._launch, grid, block, shared_mem, *args)

    def _launch(self, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int, *args: Any) -> None:
        program = self._program().result()
        launches[self.name] += 1
        run(program, self.name, grid, block, args, shared_bytes, self._max_shared_bytes)


def run(
    program: Path,
    name: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: tuple[Any, ...],
    shared_bytes: int = 0,
    max_shared_bytes: int = MAX_SHARED_BYTES,
) -> None:
    """One launch in all orders; see `Kernel`."""
    within = all(0 < n <= most for n, most in zip((*grid, 1, 1), MAX_GRID, strict=False))
    if not within or min(block) < 1 or np.prod(block) > MAX_THREADS:
        raise EmulatorError(f"{name}: CUDA refuses a grid of {grid} blocks of {block} threads")
    spans = _spans([a for a in args if isinstance(a, np.ndarray)])
    words = [_argument(name, i, arg, spans) for i, arg in enumerate(args)]
    head = [*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3], shared_bytes, max_shared_bytes, len(args), len(spans)]
    start = 8 * (len(head) + 2 + 5 * len(args) + 3 * len(spans))
    places, at = [], start
    for first, stop in spans:
        places += [stop - first, first % ALIGNMENT, at]
        at += stop - first
    numbers = np.array([*head, start, at - start, *itertools.chain(*words), *places], np.int64)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.NamedTemporaryFile(prefix="launch-", dir=memory) as file:
        file.write(numbers.tobytes())
        for first, stop in spans:
            file.write((ctypes.c_char * (stop - first)).from_address(first))
        file.flush()
        done = subprocess.run(
            [program, name, file.name], capture_output=True, text=True, errors="replace", env=_environment()
        )
        if done.returncode:
            raise EmulatorError(essence(name, done.stderr))
        file.seek(start)
        for first, stop in spans:
            file.readinto((ctypes.c_char * (stop - first)).from_address(first))


def _environment() -> dict[str, str]:
    return os.environ | {
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:handle_abort=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def _extent(array: np.ndarray) -> tuple[int, int]:
    """Addresses from an array's first byte to behind its last."""
    if array.size == 0:
        return array.ctypes.data, array.ctypes.data
    steps = ((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
    return array.ctypes.data, array.ctypes.data + sum(steps) + array.itemsize


def _spans(arrays: list[np.ndarray]) -> list[tuple[int, int]]:
    """The arrays' addresses; one span for all that overlap."""
    spans: list[tuple[int, int]] = []
    for first, stop in sorted({_extent(a) for a in arrays}):
        if spans and first < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
        else:
            spans.append((first, stop))
    return spans


def _argument(name: str, i: int, arg: Any, spans: list[tuple[int, int]]) -> list[int]:
    """Buffer or -1, place in it, bytes of an element; or size and bits of a number."""
    if isinstance(arg, np.ndarray):
        at, stop = _extent(arg)
        index = next(n for n, (first, end) in enumerate(spans) if first <= at and stop <= end)
        return [index, at - spans[index][0], arg.itemsize, 0, 0]
    if isinstance(arg, np.uintp) and arg == 0:
        return [-1, 0, 0, 0, 0]
    if isinstance(arg, np.generic):
        return [-1, 0, 0, arg.itemsize, int.from_bytes(arg.tobytes(), "little", signed=True)]
    raise EmulatorError(f"{name}: argument {i} is a {type(arg).__name__}, which CuPy would pass as 64 bits")


def essence(name: str, log: str) -> str:
    """Of a program's report: what is wrong, and where in the kernel's text."""
    found = re.search(r"emulator: .*?(?=\n +#|\Z)", log, re.DOTALL)
    if found:
        first = found[0].strip()
    else:
        line = re.search(r"(?:ERROR: AddressSanitizer|[^\n]*runtime error:)[^\n]*", log)
        first = re.sub(r"\S*/", "", line[0]) if line else log[-1500:]
    access = re.search(r"^(READ|WRITE) of size \d+", log, re.MULTILINE)
    order = re.search(r"in (\w+) order:", log)
    stack = log.split("\n\n")[0]
    frames = re.findall(r"#\d+ 0x\w+ in (.+?) (?:\S*/)?([\w.]+\.cuh?:\d+)", stack)
    what = [f"{name}: {first}"]
    if access:
        what.append(access[0].lower())
    if order:
        what.append(f"in {order[1]} order")
    what += [
        f"  {place} in {function.replace('(anonymous namespace)::', '')}" for function, place in frames[:5]
    ]
    return "\n".join(what)


# Capturing


@dataclass(frozen=True)
class _Address:
    """What a graph knows of an array: where it lies, and nothing that keeps its memory."""

    memory: weakref.ref[np.ndarray]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, array: np.ndarray) -> _Address:
        memory = array
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        offset = array.ctypes.data - memory.ctypes.data
        return cls(weakref.ref(memory), offset, array.shape, array.strides, array.dtype)

    def array(self) -> DeviceArray:
        memory = self.memory()
        if memory is None:
            raise EmulatorError(f"a graph uses an array {self.dtype} {self.shape} whose memory is free again")
        return DeviceArray(self.shape, self.dtype, memory.data, self.offset, self.strides)


_captured: list[tuple[Callable[..., None], tuple[Any, ...]]] | None = None
"""What came to the stream that is capturing; None where there is none."""


def _submit(work: Callable[..., None], *args: Any) -> None:
    """Do it now; or later, if a stream is capturing."""
    if _captured is None:
        work(*args)
    else:
        _captured.append((work, tuple(_Address.of(a) if isinstance(a, np.ndarray) else a for a in args)))


def _not_while_capturing(what: str) -> None:
    """CUDA refuses it, or what is captured would be done with memory that has another's content by then."""
    if _captured is not None:
        raise EmulatorError(f"{what} while a stream is capturing")


class Graph:
    """As CuPy's: what was captured, done once more by each launch."""

    def __init__(self, work: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        self._work = work

    def launch(self, stream: Any = None) -> None:
        for work, args in self._work:
            _submit(work, *(a.array() if isinstance(a, _Address) else a for a in args))


# In place of CuPy


class DeviceArray(np.ndarray):
    """A NumPy array with what the backend uses of CuPy's."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        def memset_async(value: int, nbytes: int, stream: Any = None) -> None:
            assert nbytes <= self.nbytes
            _submit(_memset, self, value, nbytes)

        return SimpleNamespace(ptr=self.ctypes.data, memset_async=memset_async)

    def set(self, values: np.ndarray, stream: Any = None) -> None:
        _not_while_capturing("a copy from the host")
        assert values.shape == self.shape
        assert values.dtype == self.dtype
        self[...] = values

    def get(self, stream: Any = None) -> np.ndarray:
        _not_while_capturing("a copy to the host")
        return np.array(self, subok=False)


def _memset(array: np.ndarray, value: int, nbytes: int) -> None:
    ctypes.memset(array.ctypes.data, value, nbytes)


def empty(shape: Any, dtype: Any) -> DeviceArray:
    """Aligned as CuPy's arrays are, and full of NaN where those hold anything."""
    _not_while_capturing("an array made")
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.full(nbytes + ALIGNMENT, 0xFF, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape).view(DeviceArray)


class _Nothing:
    """A device or an event: all happens at once."""

    id = ptr = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    @property
    def done(self) -> bool:
        _not_while_capturing("a question for the end of an event")
        return True

    def synchronize(self) -> None:
        _not_while_capturing("a wait")

    def record(self, stream: Any = None) -> None:
        pass


class Stream(_Nothing):
    """One that can capture, one at a time."""

    def begin_capture(self) -> None:
        global _captured
        _not_while_capturing("another capture")
        _captured = []

    def end_capture(self) -> Graph:
        global _captured
        if _captured is None:
            raise EmulatorError("a capture ends that hasn't begun")
        graph, _captured = Graph(_captured), None
        return graph


class _NeverRaised(Exception):
    pass


def _memcpy(target: int, source: int, nbytes: int, kind: int, stream: int = 0) -> None:
    _not_while_capturing("a copy from one address to another")
    ctypes.memmove(target, source, nbytes)


def _memcpy_2d(
    target: int,
    to_pitch: int,
    source: int,
    from_pitch: int,
    width: int,
    height: int,
    *_: int,
) -> None:
    _not_while_capturing("a copy from one address to another")
    for row in range(height):
        ctypes.memmove(target + row * to_pitch, source + row * from_pitch, width)


def _cupy() -> ModuleType:
    cupy = ModuleType("cupy")
    pool = SimpleNamespace(free_bytes=lambda: 0)
    runtime = SimpleNamespace(
        CUDARuntimeError=_NeverRaised,
        memcpyAsync=_memcpy,
        memcpy2DAsync=_memcpy_2d,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        memcpyDeviceToDevice=3,
        memGetInfo=lambda: (8 << 30, 8 << 30),
    )
    members = {
        "empty": empty,
        "get_default_memory_pool": lambda: pool,
        "cuda": SimpleNamespace(
            Device=_Nothing,
            Stream=Stream,
            Event=_Nothing,
            runtime=runtime,
            driver=SimpleNamespace(CUDADriverError=_NeverRaised),
            memory=SimpleNamespace(OutOfMemoryError=_NeverRaised),
            alloc_pinned_memory=lambda nbytes: bytearray(nbytes),
        ),
    }
    vars(cupy).update(members)
    return cupy


# In place of cuBLAS and what brings weights to the device


class Cublas:
    """Products in the one reduction order: m16n8k16 steps in K order, each exact and rounded with the sum."""

    def __init__(self, *args: Any) -> None:
        pass

    def matmul(
        self,
        x: Any,
        weight: Any,
        out: Any,
        *,
        add: bool = False,
        segments: int = 1,
        segment: int | None = None,
    ) -> None:
        _submit(self._multiply, x, weight, out, add, segments, segment)

    def _multiply(self, x: Any, weight: Any, out: Any, add: bool, segments: int, segment: int | None) -> None:
        length = x.shape[1] // segments
        wanted = range(segments) if segment is None else [segment]
        parts = [self._product(x, weight, range(i * length, (i + 1) * length, 16)) for i in wanted]
        result = np.stack(parts) if len(parts) > 1 else parts[0]
        target = out.view(np.ndarray).reshape(result.shape)
        if add:
            target += result
        elif out.dtype == np.float32:
            target[...] = result
        else:
            target[...] = result.astype(ml_dtypes.bfloat16).view(np.uint16)

    @staticmethod
    def _product(x: np.ndarray, weight: np.ndarray, steps: range) -> np.ndarray:
        """The columns from each step on, 16 at a time: FP32 [T, N]."""
        a, b = (m.view(np.ndarray).view(ml_dtypes.bfloat16).astype(np.float64) for m in (x, weight.T))
        total = np.zeros((len(a), b.shape[1]), np.float32)
        for k in steps:
            total = (total + a[:, k : k + 16] @ b[k : k + 16]).astype(np.float32)
        return total


class OverlappingLauncher:
    """Launches that don't overlap."""

    def __init__(self, stream: Any) -> None:
        pass

    def __call__(
        self, kernel: Kernel, grid: tuple[int, ...], threads: int, args: tuple[Any, ...], shared_bytes: int
    ) -> None:
        kernel(grid, (threads,), args, shared_mem=shared_bytes)


class WeightUploader(_Nothing):
    """Copies at once."""

    def copy(self, array: np.ndarray, target: int) -> None:
        source = np.ascontiguousarray(array)
        ctypes.memmove(target, source.ctypes.data, source.nbytes)


class Cache:
    """Keeps nothing: a check here must not stand for one on a GPU."""

    notices: tuple[str, ...] = ()

    def __init__(self, *args: Any) -> None:
        pass

    def read(self, name: str, key: str, suffix: str) -> None:
        return None

    def write(self, name: str, key: str, suffix: str, content: bytes) -> None:
        pass


# The backend


class _Overlay(ModuleType):
    """A module, some of whose names mean something else."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        super().__init__(module.__name__)
        vars(self).update(names)
        self.__module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__module, name)


def load_kernels(config: ModelConfig, gpu: Gpu, cache: Any) -> cuda_compile.LoadedKernels:
    """As `cuda_compile.load_kernels`."""
    most = gpu.max_shared_bytes
    kernels = {
        name: Kernel(name, functools.partial(stem_program, stem, config, most), most)
        for stem, names in cuda_compile.KERNELS.items()
        for name in names
    }
    cuda_compile.allow_shared_bytes(kernels, config, most)
    return cuda_compile.LoadedKernels(kernels, 0, 0)


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Whoever imports CuPy here gets ours; what of the package was imported meanwhile is forgotten again."""
    before = dict(sys.modules)
    replaced = {name for name in sys.modules if name.partition(".")[0] == "cupy"}
    for name in replaced:
        del sys.modules[name]
    sys.modules["cupy"] = _cupy()
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if name.startswith("samir_vllm.backends.") or name.partition(".")[0] == "cupy":
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                if parent in sys.modules:
                    vars(sys.modules[parent]).pop(child, None)
        sys.modules.update({name: before[name] for name in replaced})


def load_cuda_backend(max_shared_bytes: int = MAX_SHARED_BYTES) -> ModuleType:
    """``cuda_backend.py`` as a module of its own, for a GPU with so much shared memory for a block."""
    gpu = Gpu(0, "a CPU that stands in for a GPU", (9, 0), 132, 8 << 30, 8 << 30, max_shared_bytes)
    path = Path(cuda_compile.__file__).with_name("cuda_backend.py")
    spec = importlib.util.spec_from_file_location(f"emulated_cuda_backend_{max_shared_bytes}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    with _stand_ins():
        spec.loader.exec_module(module)
    names: dict[str, Any] = {
        "cuda_probe": _Overlay(cuda_probe, require_gpu=lambda index: gpu, driver_version=lambda: (12, 0)),
        "cuda_compile": _Overlay(cuda_compile, load_kernels=load_kernels),
        "cuda_launch": _Overlay(cuda_launch, can_overlap=lambda gpu: True),
        "OverlappingLauncher": OverlappingLauncher,
        "Cublas": Cublas,
        "WeightUploader": WeightUploader,
        "Cache": Cache,
        "SEGMENTS_BYTES": 4 << 20,  # buffers that every test fills anew, so no larger than need be
        "WORKSPACE_BYTES": 4,
    }
    assert names.keys() <= vars(module).keys()
    vars(module).update(names)
    return module


@functools.cache
def cuda_backend_class(max_shared_bytes: int = MAX_SHARED_BYTES) -> Any:
    """``CudaBackend`` on the emulator."""
    return load_cuda_backend(max_shared_bytes).CudaBackend
