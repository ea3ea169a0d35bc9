"""The rulers of a GPU: that they count right, on a GPU made up for it; and that they run on a real one.

The made-up GPU has a clock of its own, which every operation moves on by what it would take.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness import TINY, load_tool
from samir_vllm.__main__ import main
from samir_vllm.extras.bench import limits

cuda_measure = pytest.importorskip("samir_vllm.backends.cuda_measure", reason="CuPy is not installed")
time_sampling = load_tool("time_sampling")

READ, COPY, GEMM = 4.5e12, 4.2e12, 7e14  # bytes, and floating-point operations, a second
NODE = 1e-6  # a kernel that does nothing
START = 5e-6  # before the first node of a graph


class MadeUpStream:
    """Work happens at once, or is written down while a graph is captured."""

    ptr = 0

    def __init__(self) -> None:
        self.clock = 0.0
        self.capturing: list[float] | None = None

    def work(self, seconds: float) -> None:
        if self.capturing is None:
            self.clock += seconds
        else:
            self.capturing.append(seconds)

    def synchronize(self) -> None:
        assert self.capturing is None, "nobody may wait during a capture"

    def begin_capture(self) -> None:
        self.capturing = []

    def end_capture(self) -> list[float]:
        assert self.capturing is not None
        nodes, self.capturing = self.capturing, None
        return nodes


class MadeUpEvent:
    def record(self, stream: MadeUpStream) -> None:
        self.seconds = stream.clock

    def synchronize(self) -> None:
        pass


class MadeUpArray:
    """Has no memory."""

    def __init__(self, *shape: int, itemsize: int) -> None:
        self.shape = shape
        self.nbytes = itemsize * int(np.prod(shape))
        self.data = SimpleNamespace(ptr=0)
        self._itemsize = itemsize

    def reshape(self, *shape: int) -> MadeUpArray:
        return MadeUpArray(*shape, itemsize=self._itemsize)


class MadeUpBackend:
    """What the rulers need of one; so many bytes are free."""

    name = "cuda"

    def __init__(self, free: int = 141 << 30) -> None:
        self.stream, self._free = MadeUpStream(), free
        self._gpu = SimpleNamespace(name="a GPU", num_sms=132)
        self._cublas = SimpleNamespace(matmul=self._matmul)
        self.taken: list[int] = []

    def _matmul(self, x: Any, weight: Any, out: Any) -> None:
        assert (x.shape[0], weight.shape[0]) == out.shape
        self.stream.work(2 * x.shape[0] * x.shape[1] * weight.shape[0] / GEMM)

    def record(self, run: Callable[[], object]) -> Callable[[], object]:
        self.stream.begin_capture()
        run()
        seconds = START + sum(self.stream.end_capture())
        return lambda: self.stream.work(seconds)

    def _free_memory(self) -> int:
        return self._free

    def _zeros(self, size: int, dtype: Any) -> MadeUpArray:
        array = MadeUpArray(size, itemsize=np.dtype(dtype).itemsize)
        self.taken.append(array.nbytes)
        return array

    def from_numpy(self, x: np.ndarray) -> MadeUpArray:
        assert x.dtype == np.uint16
        return MadeUpArray(*x.shape, itemsize=2)


def read_all(grid: tuple[int], block: tuple[int], args: tuple[Any, ...], *, stream: MadeUpStream) -> None:
    data, chunks, sums = args
    assert 16 * chunks == data.nbytes
    assert 4 * grid[0] * block[0] // 32 == sums.nbytes
    stream.work(data.nbytes / READ * (2 if grid[0] == 132 else 1))


def nothing(grid: tuple[int], block: tuple[int], args: tuple[Any, ...], *, stream: MadeUpStream) -> None:
    assert len(args) == 6
    stream.work(NODE)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., MadeUpBackend]:
    """Makes backends."""
    backends: list[MadeUpBackend] = []

    def make(**options: Any) -> MadeUpBackend:
        backends.append(MadeUpBackend(**options))
        return backends[-1]

    def copy(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert kind == 3
        backends[-1].stream.work(2 * nbytes / COPY)

    def elapsed(first: MadeUpEvent, last: MadeUpEvent) -> float:
        return 1e3 * (last.seconds - first.seconds)

    runtime = SimpleNamespace(memcpyDeviceToDevice=3, memcpyAsync=copy)
    cuda = SimpleNamespace(Event=MadeUpEvent, get_elapsed_time=elapsed, runtime=runtime)
    monkeypatch.setattr(cuda_measure, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(cuda_measure, "_kernels", lambda gpu: {"read_all": read_all, "nothing": nothing})
    return make


def test_memory(gpu: Callable[..., MadeUpBackend]) -> None:
    assert cuda_measure.read_rate(gpu()) == pytest.approx(READ)  # the better of two grids
    assert cuda_measure.copy_rate(gpu()) == pytest.approx(COPY)


@pytest.mark.parametrize("free", [10 << 20, (3 << 30) + 12345])
def test_half_of_what_is_free_at_most(gpu: Callable[..., MadeUpBackend], free: int) -> None:
    for ruler, rate in ((cuda_measure.read_rate, READ), (cuda_measure.copy_rate, COPY)):
        backend = gpu(free=free)
        assert ruler(backend) == pytest.approx(rate)
        assert sum(n for n in backend.taken if n >= 1 << 20) <= free // 2
        assert max(backend.taken) % 16 == 0


@pytest.mark.parametrize("size", [(8192, 8192, 8192), (2048, 3072, 2048), (64, 96, 32)])
def test_gemm(gpu: Callable[..., MadeUpBackend], size: tuple[int, int, int], monkeypatch: Any) -> None:
    monkeypatch.setattr(cuda_measure, "_random_bits", lambda b, *shape: MadeUpArray(*shape, itemsize=2))
    monkeypatch.setattr(cuda_measure, "GEMM_SECONDS_AT_LEAST", 1e-4)
    assert cuda_measure.gemm_rate(gpu(), *size) == pytest.approx(GEMM)


def test_operands_are_random_and_of_ordinary_size(gpu: Callable[..., MadeUpBackend]) -> None:
    backend, seen = gpu(), []
    backend.from_numpy = seen.append  # type: ignore[assignment]
    cuda_measure._random_bits(backend, 96, 64)
    [bits] = seen
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    assert values.shape == (96, 64)
    assert (values < 0).mean() == pytest.approx(0.5, abs=0.05)
    assert 0.125 <= np.abs(values).min() < np.abs(values).max() < 2
    assert len(np.unique(values, axis=0)) == 96


def test_launches(gpu: Callable[..., MadeUpBackend]) -> None:
    backend = gpu()
    assert 0 < cuda_measure.launch_seconds(backend) < 1
    # The start of a graph is spread over at least 2,000 of its nodes.
    assert cuda_measure.graph_node_seconds(gpu()) == pytest.approx(NODE + START / 2000)


@pytest.mark.parametrize("each", [1e-7, 1e-5, 3e-3])
def test_graphs_are_long_enough_to_be_timed(gpu: Callable[..., MadeUpBackend], each: float) -> None:
    backend, other = gpu(), 2e-7
    launches = [lambda: backend.stream.work(each), lambda: backend.stream.work(other)]
    found = cuda_measure.graph_seconds(backend, launches)
    assert each + other <= found <= (each + other) * 1.03 + START / 1000


# On a GPU


@pytest.mark.gpu
def test_limits_of_a_real_gpu() -> None:
    from samir_vllm.backends.cuda_backend import CudaBackend
    from samir_vllm.config import ModelConfig

    backend = CudaBackend(ModelConfig.from_dir(TINY), max_tokens=1, max_num_seqs=1)
    found = limits.measure_limits(backend)
    assert found.device
    assert found.read_bytes_per_second > 1e10
    assert found.copy_bytes_per_second > 1e10
    assert found.gemm_flops_per_second > 1e12
    assert found.launch_seconds > 0
    assert found.graph_node_seconds is not None
    assert found.graph_node_seconds > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "words",
    [
        ["roofline"],
        ["decode", "--batch", "1,5", "--prompt", "20", "--new", "9", "--runs", "1"],
        ["prefill", "--tokens", "5,100", "--runs", "1"],
        ["kernels", "--batch", "3", "--context", "300"],
    ],
    ids=lambda words: words[0],
)
def test_commands_on_a_real_gpu(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words, "--model", str(TINY), "--device", "cuda", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["limits"]["graph_node_seconds"] > 0
    for row in found.get("rows", []):
        assert row["gpu_seconds"] > 0
        assert row["gpu_idle"] is None or 0 <= row["gpu_idle"] < 1
    for kind in found.get("kernels", []):
        assert kind["seconds"] > 0
    if words[0] == "kernels":
        products = {
            k["name"]: k["count"] for k in found["kernels"] if k["flops"] and "attention" not in k["name"]
        }
        roles = [name.rpartition(", ")[2] for name in products]
        assert sorted(roles) == ["down", "gate_up", "lm_head", "o", "qkv"]
        assert {k["name"] for k in found["kernels"]} >= {"begin_decode", "keep_tokens"}
        assert found["step_seconds"] > 0


@pytest.mark.gpu
def test_sampling_on_a_real_gpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["--model", str(TINY), "--batch", "1,5", "--new", "5", "--json", str(report)]
    assert time_sampling.main(words) == 0
    found = json.loads(report.read_text())
    assert all(row["seconds"] > 0 for row in found["rows"] + found["decodes"])
    assert len(found["decodes"]) == 2 * len(time_sampling.DECODES)
    assert len(found["rows"]) == 2 * (len(time_sampling.CASES) + 2)
