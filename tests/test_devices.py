"""Which device runs: each thing that can be wrong with a GPU is one line for ``cuda``, a notice for ``auto``.

Nothing here needs a GPU or meets one: a machine of fakes answers CuPy's questions, and each test breaks one
thing of it.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_doctor import CudaError, add_model

from harness import TINY
from samir_vllm import Engine, EngineConfig
from samir_vllm.__main__ import main
from samir_vllm.backends import begin_context, cuda_compile, cuda_probe, select_backend
from samir_vllm.backends.numpy_backend import NumpyBackend
from samir_vllm.config import ModelConfig
from samir_vllm.errors import DeviceError, SamirVllmError

GIB = 2**30
CONFIG = ModelConfig.from_dir(TINY)
import_cupy, driver_version = cuda_probe._import_cupy, cuda_probe.driver_version


@dataclass
class Machine:
    """What the fakes answer: two good GPUs, unless a test says otherwise."""

    driver: tuple[int, int] = (12, 8)
    distributions: tuple[str, ...] = ("cupy-cuda12x",)
    num_gpus: int = 2
    capability: tuple[int, int] = (9, 0)
    busy: bool = False  # no context can be made
    free_bytes: int = 3 * GIB

    def properties(self, index: int) -> dict[str, Any]:
        major, minor = self.capability
        sizes = {"totalGlobalMem": 80 * GIB, "sharedMemPerBlockOptin": 227 << 10, "multiProcessorCount": 132}
        return sizes | {"name": f"GPU {index}".encode(), "major": major, "minor": minor}

    def device(self, index: int) -> AbstractContextManager[Any]:
        if self.busy:
            raise CudaError(2)
        device: Any = nullcontext()
        device.id = index
        return device


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Fakes below `cuda_probe` and in place of the ``cupy`` of `cuda_backend`; memory can't be allocated."""
    cupy = pytest.importorskip("cupy")
    from samir_vllm.backends import cuda_backend

    machine = Machine()
    memory = cupy.cuda.memory
    runtime = SimpleNamespace(
        is_hip=False,
        CUDARuntimeError=CudaError,
        runtimeGetVersion=lambda: 12090,
        getDeviceCount=lambda: machine.num_gpus,
        getDeviceProperties=machine.properties,
        memGetInfo=lambda: (machine.free_bytes, 80 * GIB),
    )

    def no_memory(shape: tuple[int, ...], dtype: Any) -> None:
        raise memory.OutOfMemoryError(0, 0)

    fake = SimpleNamespace(
        __version__="14.2.0",
        cuda=SimpleNamespace(
            runtime=runtime,
            driver=cupy.cuda.driver,
            memory=memory,
            Device=machine.device,
            Stream=lambda non_blocking: nullcontext(),
        ),
        empty=no_memory,
        get_default_memory_pool=lambda: SimpleNamespace(free_bytes=lambda: GIB),
    )
    monkeypatch.setattr(cuda_probe, "driver_version", lambda: machine.driver)
    monkeypatch.setattr(
        cuda_probe, "cupy_distributions", lambda: dict.fromkeys(machine.distributions, "14.2.0")
    )
    monkeypatch.setattr(cuda_probe, "_import_cupy", lambda: fake)
    monkeypatch.setattr(cuda_backend, "cupy", fake)
    monkeypatch.setenv("SAMIR_VLLM_CACHE_DIR", str(tmp_path / "cache"))  # with no kernel in it
    return machine


def assert_refused(*words: str, config: ModelConfig = CONFIG) -> None:
    """``cuda`` raises one line with these words; ``auto`` runs on NumPy, with a notice of one line."""
    with pytest.raises(DeviceError) as caught:
        select_backend(EngineConfig(device="cuda"), config)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    backend = select_backend(EngineConfig(device="auto"), config)
    assert isinstance(backend, NumpyBackend)
    [notice] = backend.notices
    assert "\n" not in notice
    assert notice.startswith(f"running on the CPU: {words[0]}")


def fail(exception: Exception) -> Callable[..., Any]:
    def raise_it(*_: object, **__: object) -> Any:
        raise exception

    return raise_it


# The machine


def test_no_driver(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_probe, "driver_version", driver_version)
    monkeypatch.setattr(ctypes, "CDLL", fail(OSError("libcuda.so.1: cannot open\nshared object file")))
    assert_refused("no NVIDIA driver", "libcuda.so.1", "--device cpu")


def test_a_driver_too_old(machine: Machine) -> None:
    machine.driver = (11, 8)
    assert_refused("the driver is too old", "CUDA 11.8", "12.0", "update the NVIDIA driver", "--device cpu")


def test_no_cupy(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.distributions = ()
    monkeypatch.setattr(cuda_probe, "_import_cupy", import_cupy)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert_refused("CuPy isn't installed", "pip install cupy-cuda12x", "--device cpu")


def test_several_cupys(machine: Machine) -> None:
    machine.distributions = ("cupy-cuda12x", "cupy-cuda13x")
    assert_refused("several CuPys", "pip uninstall -y cupy-cuda12x cupy-cuda13x")


def test_no_gpu(machine: Machine) -> None:
    machine.num_gpus = 0
    assert_refused("there is no GPU cuda:0 (CUDA shows no GPU)", "CUDA_VISIBLE_DEVICES", "--device cpu")


@pytest.mark.parametrize(
    ("num_gpus", "there"), [(1, "CUDA shows 1, cuda:0 to cuda:0"), (4, "CUDA shows 4, cuda:0 to cuda:3")]
)
def test_a_gpu_that_is_not_there(machine: Machine, num_gpus: int, there: str) -> None:
    machine.num_gpus = num_gpus
    with pytest.raises(DeviceError) as caught:
        select_backend(EngineConfig(device="cuda:4"), CONFIG)
    message = str(caught.value)
    assert "no GPU cuda:4" in message
    assert there in message
    assert "\n" not in message


def test_a_gpu_too_old(machine: Machine) -> None:
    machine.capability = (7, 5)
    assert_refused("cuda:0 (GPU 0) has compute capability 7.5", "8.0", "--device cpu")


def test_a_gpu_that_can_not_be_used_now(machine: Machine) -> None:
    machine.busy = True
    assert_refused("cuda:0 (GPU 0) can't be used now", "free it", "--device cpu")


# The model, the kernels and the memory


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"head_dim": 32}, ["head_dim 32", "64", "128"]),
        ({"head_dim": 96}, ["head_dim 96", "64", "128"]),
        ({"hidden_size": 40}, ["hidden_size 40", "16"]),
        ({"intermediate_size": 200}, ["intermediate_size 200", "16"]),
        ({"num_heads": 130, "num_kv_heads": 2}, ["65 query heads", "64"]),
    ],
)
def test_a_model_the_kernels_are_not_made_for(sizes: dict[str, int], words: list[str]) -> None:
    cause = "the GPU's kernels aren't made for this model: "
    assert_refused(cause, *words, "--device cpu", config=replace(CONFIG, **sizes))


@pytest.mark.usefixtures("machine")
def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy_backends.cuda import libs

    broken = SimpleNamespace(getVersion=fail(RuntimeError("Failure finding\nlibnvrtc.so.12")))
    monkeypatch.setattr(libs, "nvrtc", broken, raising=False)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", broken)
    assert_refused("NVRTC can't be loaded", "libnvrtc.so.12", "pip install nvidia-cuda-nvrtc-cu12")


@pytest.mark.usefixtures("machine")
def test_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    log = 'embedding.cu(7): error: identifier "x" is undefined\n\n1 error detected'

    def run_nvrtc(source: str, name: str, options: tuple[str, ...]) -> tuple[bytes, str]:
        if name == "embedding.cu":
            raise cuda_probe.CompileError(log)
        return b"machine code", ""

    monkeypatch.setattr(cuda_probe, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(cuda_probe, "run_nvrtc", run_nvrtc)
    assert_refused("cuda_src/embedding.cu can't be built", 'embedding.cu(7): error: identifier "x"', "doctor")


@pytest.mark.usefixtures("machine")
def test_a_gpu_that_fails_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever CUDA says, in one line: here that another process has the GPU for itself."""

    def busy(*_: object) -> None:
        raise CudaError("cudaErrorDevicesUnavailable")

    monkeypatch.setattr(cuda_compile, "load_kernels", busy)
    assert_refused("cuda:0 (", "can't be used: ", "see what else runs on it")


@pytest.mark.usefixtures("machine")
def test_no_room_for_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CuPy's pool keeps is free too: 3 GiB and 1 GiB."""
    loaded = cuda_compile.LoadedKernels({}, 0, len(cuda_compile.STEMS))
    monkeypatch.setattr(cuda_compile, "load_kernels", lambda *_: loaded)
    options: dict[str, Any] = {"max_batched_tokens": 2**20 - 8, "max_num_seqs": 8}
    needed = 2**20 * CONFIG.hidden_size * 2 >> 20  # the first buffer: hidden states in BF16
    with pytest.raises(DeviceError) as caught:
        select_backend(EngineConfig(device="cuda:1", **options), CONFIG)
    message = str(caught.value)
    assert message.startswith("out of memory on cuda:1: ")
    for word in (f"needs {needed:,} MiB", "4,096 MiB are free", "--max-batched-tokens", "--max-num-seqs"):
        assert word in message
    assert_refused("out of memory on cuda:0: ", "4,096 MiB are free", "--max-batched-tokens")


@pytest.mark.usefixtures("machine")
def test_no_room_for_pages_or_weights() -> None:
    from samir_vllm.backends import cuda_backend

    backend = cuda_backend.CudaBackend.__new__(cuda_backend.CudaBackend)  # as if all buffers were there
    backend.config, backend._device = CONFIG, cuda_backend.cupy.cuda.Device(0)
    backend.stream = SimpleNamespace(synchronize=lambda: None)
    pages = GIB // CONFIG.page_bytes()
    with pytest.raises(DeviceError) as caught:
        backend.allocate_kv_cache(5 * pages, 4, 64)
    message = str(caught.value)
    assert message == (
        "out of memory on cuda:0: the KV cache needs 5,120 MiB, 4,096 MiB are free; lower --kv-cache-mib"
    )
    with pytest.raises(DeviceError, match="a weight needs 2 MiB, 4,096 MiB are free; "):
        backend.upload([np.zeros((1024, 512), np.uint16)] * 2)


# The context that is made early


class Driver:
    """A libcuda.so.1 with one GPU; notes the calls."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*_: object) -> int:
            self.calls.append(name)
            return 3 if name == self.refuses else 0

        return call


def test_early_context(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    context = begin_context(EngineConfig(device="cuda"))
    assert context is not None
    context.wait()
    assert context.seconds is not None
    assert driver.calls == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    context.release()
    context.release()
    assert driver.calls[3:] == ["cuDevicePrimaryCtxRelease_v2"]


@pytest.mark.parametrize("refuses", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_an_early_context_that_fails_is_silent(monkeypatch: pytest.MonkeyPatch, refuses: str) -> None:
    driver = Driver(refuses)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    context = begin_context(EngineConfig(device="auto"))
    assert context is not None
    context.release()
    assert context.seconds is None
    assert driver.calls[-1] == refuses


@pytest.mark.usefixtures("no_driver")
def test_auto_gives_the_early_context_back(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert Engine(model_dir).backend_name == "numpy"
    assert driver.calls[-1] == "cuDevicePrimaryCtxRelease_v2"


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_load_that_fails_gives_the_early_context_back(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    (model_dir / "tokenizer.json").write_text("{")
    with pytest.raises(SamirVllmError, match=r"tokenizer\.json"):
        Engine(model_dir, device=device)
    assert driver.calls[-1] == "cuDevicePrimaryCtxRelease_v2"


def test_where_no_more_threads_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    context = begin_context(EngineConfig(device="cuda"))
    assert context is not None
    context.release()
    assert context.seconds is None


def test_a_source_that_can_not_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_probe, "find_cuda_src", lambda: tmp_path)
    (tmp_path / "argmax.cu").write_bytes(b'#include "gone.cuh"\n')
    (tmp_path / "embedding.cu").write_bytes(b"\xff")
    for stem, file in (("argmax", "gone.cuh"), ("embedding", "embedding.cu"), ("silu_mul", "silu_mul.cu")):
        with pytest.raises(DeviceError, match=f"{file} can't be read: .*; reinstall samir-vllm"):
            cuda_compile.kernel_source(stem)


@pytest.mark.usefixtures("no_driver")
def test_without_a_driver_nothing_is_made_for_cupy(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    assert Engine(model_dir).backend_name == "numpy"
    assert list(home.iterdir()) == []


def test_the_cpu_asks_for_no_context() -> None:
    assert begin_context(EngineConfig(device="cpu")) is None
    assert begin_context(EngineConfig(device="auto", dtype="float32")) is None


# What the user sees


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return add_model(tmp_path, "tiny")


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    error = cuda_probe.Unavailable("no NVIDIA driver: gone", "install one, or run with --device cpu")
    monkeypatch.setattr(cuda_probe, "driver_version", fail(error))


@pytest.mark.usefixtures("no_driver")
def test_the_engine_keeps_the_notice(model_dir: Path) -> None:
    engine = Engine(model_dir)
    assert engine.backend_name == "numpy"
    # Not the advice to take what it has taken already.
    assert engine.notices == ["running on the CPU: no NVIDIA driver: gone; install one"]
    with pytest.raises(DeviceError, match="no NVIDIA driver: gone"):
        Engine(model_dir, device="cuda")
    assert Engine(model_dir, device="cpu").notices == []


@pytest.mark.usefixtures("no_driver")
def test_generate_prints_the_notice(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["generate", "hi", "1", "--raw", "--model", str(model_dir)]
    assert main(args) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("samir_vllm: running on the CPU: no NVIDIA driver: gone; install one") == 1
    assert main([*args, "--device", "cuda"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "samir_vllm: no NVIDIA driver: gone; install one, or run with --device cpu\n"


def test_auto_falls_back_where_the_pages_do_not_fit(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend could be made, but loading the model on it fails."""

    class Small(NumpyBackend):
        def allocate_kv_cache(self, num_pages: int, max_num_seqs: int, max_pages_per_seq: int) -> None:
            raise DeviceError("out of memory: the KV cache needs 2 MiB, 1 MiB are free; lower --kv-cache-mib")

    monkeypatch.setattr("samir_vllm.backends._cuda_backend", lambda engine, model, *_: Small(model))
    engine = Engine(model_dir)
    assert engine.backend_name == "numpy"
    [notice] = engine.notices
    assert notice.startswith("running on the CPU: out of memory: the KV cache needs 2 MiB")
    assert engine.generate("hi").finish_reason != "error"
    with pytest.raises(DeviceError, match="--kv-cache-mib"):
        Engine(model_dir, device="cuda")


def test_automatic_pages_want_room_for_one_a_layer(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = CONFIG.num_layers * CONFIG.page_bytes()
    monkeypatch.setattr(NumpyBackend, "free_bytes", lambda self: least - 1)
    with pytest.raises(DeviceError, match=r"2 of 8192 bytes fit, but 3 layers .*; free memory or give --kv-"):
        Engine(model_dir, device="cpu", kv_cache_mib="auto")
    monkeypatch.setattr(NumpyBackend, "free_bytes", lambda self: least)
    assert Engine(model_dir, device="cpu", kv_cache_mib="auto").pool.num_pages == CONFIG.num_layers


def test_unrounded_arithmetic_never_looks_at_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_probe, "driver_version", fail(AssertionError("it looked")))
    backend = select_backend(EngineConfig(device="auto", dtype="float32"), CONFIG)
    assert isinstance(backend, NumpyBackend)
    assert backend.notices == []


def test_cupy_is_not_imported_where_there_is_no_driver(model_dir: Path) -> None:
    """A real process: CuPy takes a second to import."""
    code = f"""
import ctypes, sys
from samir_vllm import Engine

def fail(name):
    raise OSError(name)

ctypes.CDLL = fail
engine = Engine({str(model_dir)!r})
assert "no NVIDIA driver" in engine.notices[0], engine.notices
assert "cupy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


# The segments of a GEMM


@pytest.mark.parametrize(
    ("depth", "segments"),
    [
        (16, 1),
        (576, 1),
        (2048, 1),
        (2064, 3),  # halves would be no multiple of 16
        (3072, 2),
        (4096, 2),
        (5632, 4),  # not divisible by 3
        (8192, 4),
        (14336, 7),
    ],
)
def test_gemm_segments(depth: int, segments: int) -> None:
    pytest.importorskip("cupy")
    from samir_vllm.backends.cuda_backend import gemm_segments

    assert gemm_segments(depth) == segments
