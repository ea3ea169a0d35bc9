"""What CUDA finds on this machine: CuPy, driver, run-time compiler, cuBLAS and GPUs.

Every probe works where its own part is there, whatever else is missing: the compiler needs no GPU, the
driver no CuPy. What can't be used raises `Unavailable`, which names the cause and the remedy. Knows nothing
of models or kernels, keeps no state, and imports CuPy only inside the functions.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import shutil
import site
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from samir_vllm.errors import DeviceError, one_line

MIN_COMPUTE_CAPABILITY = (8, 0)  # BF16 tensor cores and cp.async came with Ampere
MIN_CUDA_MAJOR = 12
CUDA_ERROR_NO_DEVICE = 100  # cudaErrorNoDevice of driver_types.h; CuPy has no name for it
CPU_REMEDY = "or run with --device cpu"
TEST_KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }'


class Unavailable(DeviceError):
    """A part of CUDA that can't be used; the message is ``cause; remedy``."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause, remedy)
        self.cause, self.remedy = cause, remedy

    def __str__(self) -> str:
        return f"{self.cause}; {self.remedy}"


class CompileError(DeviceError):
    """A source that the compiler refuses; the message is its log, of several lines."""


@dataclass(frozen=True, slots=True)
class CupyInstall:
    """The CuPy in use."""

    distribution: str
    version: str
    cuda_major: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU; ``free_bytes`` is None where the GPU wouldn't tell (no context could be made)."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    free_bytes: int | None
    total_bytes: int
    max_shared_bytes: int = 0  # shared memory that a block may ask for

    @property
    def supported(self) -> bool:
        """Whether our kernels run on it."""
        return self.compute_capability >= MIN_COMPUTE_CAPABILITY


# CuPy


def cupy_distributions() -> dict[str, str]:
    """Name to version of every installed distribution that brings the module ``cupy``."""
    found: dict[str, str] = {}
    # By the names of their folders: metadata.distributions() would read what every package says of itself.
    for info in (p for folder in _search_path() for p in Path(folder).glob("cupy*-info")):
        dist = metadata.PathDistribution(info)
        name = re.sub(r"[-_.]+", "-", dist.metadata["Name"] or "").lower()  # PEP 503
        if re.fullmatch(r"cupy(-cuda\d+x?|-rocm-[\d-]+)?", name):
            found.setdefault(name, dist.version)
    return found


def _search_path() -> list[str]:
    return sys.path


def cuda_major() -> int | None:
    """CUDA's major version by the name of CuPy's distribution; None if that says nothing (or two things)."""
    majors = {int(m[1]) for name in cupy_distributions() if (m := re.fullmatch(r"cupy-cuda(\d+)x", name))}
    return majors.pop() if len(majors) == 1 else None


def cupy_install() -> CupyInstall:
    """The CuPy that ``import cupy`` gives, and the CUDA it was built for.

    Raises:
        Unavailable: none, several at once (their files overwrite each other), broken, or for another CUDA.
    """
    found = cupy_distributions()
    if len(found) > 1:
        names = " ".join(sorted(found))
        raise Unavailable(
            f"several CuPys are installed over each other: {names.replace(' ', ', ')}",
            f"pip uninstall -y {names}, then pip install cupy-cuda12x",
        )
    cupy = _import_cupy()
    name, version = next(iter(found.items()), ("cupy", cupy.__version__))
    try:
        major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    except Exception as exc:
        raise Unavailable(
            f"{name} {version} has no CUDA runtime: {one_line(exc)}", _reinstall(name)
        ) from None
    if cupy.cuda.runtime.is_hip or major < MIN_CUDA_MAJOR:
        built_for = "ROCm" if cupy.cuda.runtime.is_hip else f"CUDA {major}"
        raise Unavailable(
            f"{name} {version} is built for {built_for}, not CUDA {MIN_CUDA_MAJOR} or later",
            f"pip uninstall -y {name}, then pip install cupy-cuda12x",
        )
    return CupyInstall(name, version, major)


def _import_cupy() -> Any:
    try:
        # What is done for the first import is global, and no business of threads that come later.
        with nullcontext() if sys.modules.get("cupy") else _first_import():
            import cupy
    except Exception as exc:
        name = next(iter(cupy_distributions()), None)
        if name is None and isinstance(exc, ModuleNotFoundError) and exc.name == "cupy":
            raise Unavailable("CuPy isn't installed", f"pip install cupy-cuda12x, {CPU_REMEDY}") from None
        raise Unavailable(
            f"CuPy can't be imported: {one_line(exc)}", _reinstall(name or "cupy-cuda12x")
        ) from None
    return cupy


@contextmanager
def _first_import() -> Iterator[None]:
    with _room_for_cupys_cache(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns of a toolkit it didn't find; we look ourselves
        yield


@contextmanager
def _room_for_cupys_cache() -> Iterator[None]:
    """Inside it CuPy can be imported whatever the home folder is like.

    Importing it makes the folder of its own kernel cache, and fails where that can't be (CuPy 14.2). Our
    kernels never go there, so a temporary one does as well.
    """
    if has_room_for_cupys_cache():
        yield
        return
    given = os.environ.get("CUPY_CACHE_DIR")
    try:
        os.environ["CUPY_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="cupy-")
    except OSError:  # no room anywhere: CuPy shall say what it lacks
        yield
        return
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        yield
    finally:  # CuPy has read it; the programs we start need not
        if given is None:
            del os.environ["CUPY_CACHE_DIR"]
        else:
            os.environ["CUPY_CACHE_DIR"] = given


def has_room_for_cupys_cache() -> bool:
    """Makes CuPy's folder, as CuPy would; where that fails, importing it changes the environment."""
    folder = os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))
    if folder.startswith("~"):  # no home is known, and CuPy would make a folder of that name here
        return False
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return True


def _reinstall(name: str) -> str:
    return f"pip install --force-reinstall {name}"


# Driver


def driver_version() -> tuple[int, int]:
    """The newest CUDA, (major, minor), that the NVIDIA driver serves. Needs neither CuPy nor a GPU.

    Raises:
        Unavailable: no driver, or only the stub library of a toolkit.
    """
    remedy = f"install an NVIDIA driver (in a container: start it with GPUs), {CPU_REMEDY}"
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        absent = "No such file" in str(exc)
        detail = "there is no libcuda.so.1" if absent else one_line(exc)
        raise Unavailable(f"no NVIDIA driver ({detail})", remedy) from None
    version = ctypes.c_int()
    status = libcuda.cuDriverGetVersion(ctypes.byref(version))
    if status != 0 or version.value == 0:
        raise Unavailable(f"libcuda.so.1 has no driver behind it (status {status})", remedy)
    return version.value // 1000, version.value % 1000 // 10


def check_driver(driver: tuple[int, int], major: int) -> None:
    """Raises Unavailable if the driver is older than CUDA ``major``.

    Within a major version any driver will do: we load machine code, which CUDA's minor-version
    compatibility covers (CUDA Compatibility guide).
    """
    if driver[0] < major:
        other = f", or pip install cupy-cuda{driver[0]}x" if driver[0] >= MIN_CUDA_MAJOR else ""
        raise Unavailable(
            f"the driver is too old: it serves CUDA {driver[0]}.{driver[1]}, CuPy needs {major}.0",
            f"update the NVIDIA driver{other}, {CPU_REMEDY}",
        )


# Compiler


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the run-time compiler that CuPy loads.

    Raises:
        Unavailable: no CuPy, or no library.
    """
    return _nvrtc().getVersion()


def nvrtc_build() -> str:
    """Tells one build of the run-time compiler from any other, whose machine code may differ.

    Doesn't load the library where it is clear which one CuPy would load: from a cold disk that takes 0.2 s.

    Raises:
        Unavailable: no CuPy, or no library.
    """
    paths = _mapped_files("libnvrtc.so") or _nvrtc_of_a_wheel()
    if not paths:
        nvrtc_version()
        paths = _mapped_files("libnvrtc.so")
    return _builds(paths)


def loaded_build(name: str) -> str:
    """Tells the build of a library that is loaded, by the beginning of its name, from any other."""
    return _builds(_mapped_files(name))


def _builds(paths: set[str]) -> str:
    try:
        stats = [(path, os.stat(path)) for path in sorted(paths)]
    except OSError:  # replaced on disk since it was loaded
        stats = []
    # A library that can't be named is like no other, so that nothing is taken for its work.
    parts = [f"{Path(path).name} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats]
    return ", ".join(parts) or os.urandom(16).hex()


def _mapped_files(name: str) -> set[str]:
    """The files of a library, by the beginning of its name, that this process has loaded."""
    with open("/proc/self/maps") as maps:
        return {line.rstrip("\n").split(maxsplit=5)[5] for line in maps if f"/{name}" in line}


def _nvrtc_of_a_wheel() -> set[str]:
    """What the one wheel with a compiler has, which CuPy prefers to all others; empty if none, or several."""
    folders = site.getsitepackages() + [site.getusersitepackages()] * bool(site.ENABLE_USER_SITE)
    found = {str(p.resolve()) for f in folders for p in Path(f).glob("nvidia/*/lib/libnvrtc.so.*")}
    return found if len(found) == 1 else set()


def _nvrtc() -> Any:
    _import_cupy()
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()  # the library loads with the first call
    except Exception as exc:
        raise Unavailable(
            f"NVRTC can't be loaded: {one_line(exc)}", _install("nvidia-cuda-nvrtc-cu12")
        ) from None
    return nvrtc


def _install(cu12_wheel: str) -> str:
    """The remedy for a missing wheel; CUDA 13 renamed them, and CuPy's extra names the right set."""
    if (major := cuda_major()) and major > 12:
        return f'pip install "cupy-cuda{major}x[ctk]"'
    return f"pip install {cu12_wheel}"


def newer_nvrtc() -> str:
    """The remedy for a compiler that is too old."""
    return _install("--upgrade nvidia-cuda-nvrtc-cu12")


def compile_test_kernel(arch: str = "sm_90") -> int:
    """Compiles a small kernel for ``arch`` without a GPU -> bytes of the machine code.

    Raises:
        Unavailable: no compiler, or one that fails.
    """
    try:
        cubin, _ = run_nvrtc(TEST_KERNEL, "twice.cu", (f"-arch={arch}", "-std=c++17"))
    except CompileError as exc:
        remedy = _install("--force-reinstall nvidia-cuda-nvrtc-cu12")
        raise Unavailable(f"NVRTC fails on a test kernel: {one_line(exc)}", remedy) from None
    return len(cubin)


def run_nvrtc(source: str, name: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """(machine code, log) of a source; needs no GPU.

    Raises:
        Unavailable: no CuPy, or no compiler.
        CompileError: with the log.
    """
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(source, name, (), ())
    try:
        nvrtc.compileProgram(program, options)
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as exc:
        raise CompileError(nvrtc.getProgramLog(program).strip() or str(exc)) from None
    finally:
        nvrtc.destroyProgram(program)


# cuBLAS


def cublas_version() -> tuple[int, int, int]:
    """(major, minor, patch) of the cuBLAS that CuPy loads; needs no GPU.

    Raises:
        Unavailable: no CuPy, or no library.
    """
    _import_cupy()
    try:
        from cupy_backends.cuda.libs import cublas  # noqa: F401  (importing it loads the library)

        # CuPy's getVersion wants a handle, and a handle a GPU; the library's own property wants neither.
        library = loaded_library("libcublas.so")
        number = ctypes.c_int()
        parts = []
        for part in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL of library_types.h
            library.cublasGetProperty(part, ctypes.byref(number))
            parts.append(number.value)
    except Exception as exc:
        raise Unavailable(
            f"cuBLAS can't be loaded: {one_line(exc)}", _install("nvidia-cublas-cu12")
        ) from None
    return parts[0], parts[1], parts[2]


def loaded_library(name: str) -> ctypes.CDLL:
    """The copy that is in this process already, and never a second one of another version."""
    # By CuPy's major version: another library may have brought another cuBLAS into the process.
    major = _import_cupy().cuda.runtime.runtimeGetVersion() // 1000
    return ctypes.CDLL(f"{name}.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)


# GPUs


def gpus() -> list[Gpu]:
    """Every GPU that CUDA shows (see ``CUDA_VISIBLE_DEVICES``), old ones too; [] if it shows none.

    Asking for free memory makes a context on each.

    Raises:
        Unavailable: no CuPy, or no driver that it can talk to.
    """
    return [_gpu(_import_cupy(), index) for index in range(_gpu_count())]


def require_gpu(index: int) -> Gpu:
    """The GPU of that index, after a look at all that it needs; touches no other GPU.

    Raises:
        Unavailable: no CuPy, no driver or one too old, no such GPU, or one too old.
    """
    driver = driver_version()  # before CuPy: where there is no driver there is no need to import it
    check_driver(driver, cupy_install().cuda_major)
    count = _gpu_count()
    if index >= count:
        there = "CUDA shows no GPU" if count == 0 else f"CUDA shows {count}, cuda:0 to cuda:{count - 1}"
        raise Unavailable(
            f"there is no GPU cuda:{index} ({there})", f"see CUDA_VISIBLE_DEVICES, {CPU_REMEDY}"
        )
    gpu = _gpu(_import_cupy(), index)
    if not gpu.supported:
        found, least = (
            "{}.{}".format(*version) for version in (gpu.compute_capability, MIN_COMPUTE_CAPABILITY)
        )
        raise Unavailable(
            f"cuda:{index} ({gpu.name}) has compute capability {found}; BF16 tensor cores came with {least}",
            CPU_REMEDY.removeprefix("or "),
        )
    if gpu.free_bytes is None:
        raise Unavailable(f"cuda:{index} ({gpu.name}) can't be used now", f"free it, {CPU_REMEDY}")
    return gpu


def _gpu_count() -> int:
    driver_version()  # CUDA's own message is the same for no driver and an old one
    cupy = _import_cupy()
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as exc:
        if exc.status == CUDA_ERROR_NO_DEVICE:
            return 0
        raise Unavailable(
            f"CUDA can't list the GPUs: {one_line(exc)}", f"check the NVIDIA driver, {CPU_REMEDY}"
        ) from None


def _gpu(cupy: Any, index: int) -> Gpu:
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    try:
        with cupy.cuda.Device(index):
            free_bytes, _ = cupy.cuda.runtime.memGetInfo()
    except cupy.cuda.runtime.CUDARuntimeError:
        free_bytes = None
    return Gpu(
        index=index,
        name=properties["name"].decode(errors="replace"),
        compute_capability=(properties["major"], properties["minor"]),
        num_sms=properties["multiProcessorCount"],
        free_bytes=free_bytes,
        total_bytes=properties["totalGlobalMem"],
        max_shared_bytes=properties.get("sharedMemPerBlockOptin", 0),
    )


def free_unused_memory() -> None:
    """Give back what CuPy keeps of freed device memory, where CuPy was used at all."""
    if "cupy" in sys.modules:
        # A courtesy to others: where the GPU doesn't answer there is nothing to give.
        with suppress(Exception):
            sys.modules["cupy"].get_default_memory_pool().free_all_blocks()


# Sources and messages


def find_cuda_src() -> Path | None:
    """The folder of kernel sources: inside the package (wheel), or beside it (checkout); None if neither."""
    package = Path(__file__).resolve().parent.parent
    return next((p for p in (package / "cuda_src", package.parent / "cuda_src") if p.is_dir()), None)
