"""The threads that bring weights to the GPU, over a stand-in for CUDA; and, marked gpu, over the real one.

The stand-in does an asynchronous copy as late as it may, when its event or stream is waited for: a ring that
is filled again too early, or an end that doesn't wait, then sends wrong bytes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from samir_vllm.errors import DeviceError

pytest.importorskip("cupy")
from samir_vllm.backends import cuda_upload

CHUNK = 1 << 12
QUEUED = 32 * CHUNK


class Stream:
    """Copies wait here, in order."""

    every: ClassVar[dict[int, Stream]] = {}

    def __init__(self, non_blocking: bool) -> None:
        self.ptr, self.queued, self.done = id(self), [], 0
        Stream.every[self.ptr] = self

    def run_to(self, count: int) -> None:
        while self.done < count:
            ctypes.memmove(*self.queued[self.done])
            self.done += 1

    def synchronize(self) -> None:
        self.run_to(len(self.queued))


class Event:
    def __init__(self, disable_timing: bool) -> None:
        self.stream, self.count = None, 0

    def record(self, stream: Stream) -> None:
        self.stream, self.count = stream, len(stream.queued)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run_to(self.count)


class Pinned:
    def __init__(self, memory: Any, offset: int) -> None:
        self.memory, self.ptr = memory, ctypes.addressof(memory) + offset


class Cuda:
    """What cuda_upload asks CuPy for."""

    def __init__(self) -> None:
        self.fail_at: int | None = None  # index of a copy that fails
        self.copies = 0
        self.gate: threading.Event | None = None  # copies wait for it
        self.runtime = SimpleNamespace(
            setDevice=lambda index: None, memcpyAsync=self.copy, memcpyHostToDevice=1
        )
        self.cuda = SimpleNamespace(
            runtime=self.runtime,
            Stream=Stream,
            Event=Event,
            PinnedMemory=ctypes.create_string_buffer,
            PinnedMemoryPointer=Pinned,
        )

    def copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        if self.gate is not None:
            assert self.gate.wait(20)
        index, self.copies = self.copies, self.copies + 1
        if index == self.fail_at:
            raise RuntimeError("the GPU\nfell off the bus")
        Stream.every[stream].queued.append((target, source, nbytes))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    fake = Cuda()
    monkeypatch.setattr(cuda_upload, "cupy", fake)
    monkeypatch.setattr(cuda_upload, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(cuda_upload, "QUEUED_BYTES", QUEUED)
    before = threading.active_count()
    yield fake
    assert threading.active_count() == before


def some_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_every_byte_arrives(threads: int) -> None:
    sizes = [0, 2, CHUNK - 2, CHUNK, CHUNK + 2, 2, 40 * CHUNK + 6, 7 * CHUNK]
    sources = [some_bytes(size, seed) for seed, size in enumerate(sizes)]
    targets = [np.zeros(size, np.uint8) for size in sizes]
    with cuda_upload.WeightUploader(0, threads) as uploader:
        for source, target in zip(sources, targets, strict=True):
            uploader.copy(source.view(np.uint16), target.ctypes.data)
    for source, target in zip(sources, targets, strict=True):
        np.testing.assert_array_equal(target, source)


@pytest.mark.usefixtures("cuda")
def test_matrices_and_read_only_views() -> None:
    source = some_bytes(64 * CHUNK).view(np.uint16).reshape(64, -1)
    source.flags.writeable = False
    target = np.zeros_like(source)
    with cuda_upload.WeightUploader(0, 2) as uploader:
        uploader.copy(source, target.ctypes.data)
    np.testing.assert_array_equal(target, source)


@pytest.mark.usefixtures("cuda")
def test_an_array_may_be_forgotten_once_it_is_queued() -> None:
    """A tensor of another dtype is rounded into a copy that nobody else holds."""
    target = np.zeros(400 * CHUNK, np.uint8)
    with cuda_upload.WeightUploader(0, 2) as uploader:
        for i in range(100):
            uploader.copy(np.full(4 * CHUNK, i, np.uint8), target.ctypes.data + 4 * CHUNK * i)
    np.testing.assert_array_equal(target, np.repeat(np.arange(100), 4 * CHUNK))


@pytest.mark.usefixtures("cuda")
def test_a_transposed_array_arrives_as_it_reads() -> None:
    source = some_bytes(64 * CHUNK).reshape(64, CHUNK)
    target = np.zeros((CHUNK, 64), np.uint8)
    with cuda_upload.WeightUploader(0, 2) as uploader:
        uploader.copy(source.T, target.ctypes.data)
    np.testing.assert_array_equal(target, source.T)


@pytest.mark.parametrize("fail_at", [0, 3, 99])
def test_a_failed_copy_is_one_line_at_the_end(cuda: Cuda, fail_at: int) -> None:
    """Also where far more is queued behind it than the queue holds: nobody waits for ever."""
    cuda.fail_at = fail_at
    source, target = some_bytes(100 * CHUNK), np.zeros(100 * CHUNK, np.uint8)
    with pytest.raises(DeviceError) as caught, cuda_upload.WeightUploader(1, 2) as uploader:
        uploader.copy(source, target.ctypes.data)
    assert str(caught.value).startswith("weights can't be copied to cuda:1: the GPU fell off the bus; see")


class Gated(cuda_upload.WeightUploader):
    """Copies wait until what is queued is dropped."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__(0, 1)
        self.gate = cuda.gate = threading.Event()

    def _drop(self) -> None:
        super()._drop()
        self.gate.set()


def test_an_error_of_the_caller_ends_the_work(cuda: Cuda) -> None:
    """A tensor that is missing: what is queued is dropped, and the error stays what it was."""
    source, target = some_bytes(8 * CHUNK), np.zeros(8 * CHUNK, np.uint8)

    def load() -> None:
        with Gated(cuda) as uploader:
            uploader.copy(source, target.ctypes.data)
            raise KeyError("no such tensor")

    with pytest.raises(KeyError):
        load()
    assert cuda.copies <= 2  # those that were claimed


def test_ctrl_c_while_it_waits_for_the_end(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread goes on to write to memory that somebody else may have by then."""
    source, target = some_bytes(8 * CHUNK), np.zeros(8 * CHUNK, np.uint8)

    class Interrupted(Gated):
        interrupted = False

        def _join(self) -> None:
            if not self.interrupted:
                self.interrupted = True
                raise KeyboardInterrupt
            super()._join()

    with pytest.raises(KeyboardInterrupt), Interrupted(cuda) as uploader:
        uploader.copy(source, target.ctypes.data)
    assert cuda.copies <= 2


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("most", [0, 1, 3])
def test_where_no_more_threads_can_be_started(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def in_background(work: Any, name: str) -> threading.Thread | None:
        if len(started) == most:
            return None
        started.append(threading.Thread(target=work))
        started[-1].start()
        return started[-1]

    monkeypatch.setattr(cuda_upload, "in_background", in_background)
    source, target = some_bytes(20 * CHUNK), np.zeros(20 * CHUNK, np.uint8)

    def load() -> None:
        with cuda_upload.WeightUploader(0, 8) as uploader:
            uploader.copy(source, target.ctypes.data)

    if most == 0:
        with pytest.raises(DeviceError, match="no thread can be started: "):
            load()
    else:
        load()
        np.testing.assert_array_equal(target, source)


def test_whoever_queues_waits_for_the_copies(cuda: Cuda) -> None:
    """So that progress means copies, not promises."""
    cuda.gate = threading.Event()
    queued: list[int] = []
    full = threading.Event()
    source = some_bytes(CHUNK)
    target = np.zeros(CHUNK, np.uint8)

    def queue_all() -> None:
        with cuda_upload.WeightUploader(0, 1) as uploader:
            for i in range(42):
                uploader.copy(source, target.ctypes.data)
                queued.append(i)
                if i == 31:
                    full.set()

    thread = threading.Thread(target=queue_all)
    thread.start()
    assert full.wait(20)
    thread.join(0.2)  # it can't end, but might go on
    assert len(queued) <= 33  # one is under way
    cuda.gate.set()
    thread.join(20)
    assert len(queued) == 42


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    """Tensors of odd sizes, stacked, many at once: every byte, through rings that are filled many times."""
    from harness import TINY
    from samir_vllm.backends.cuda_backend import CudaBackend
    from samir_vllm.config import ModelConfig

    backend: Any = CudaBackend(ModelConfig.from_dir(TINY))
    rng = np.random.default_rng(1)
    stacks = [
        [np.frombuffer(rng.bytes(2 * rows * 1000), np.uint16).reshape(rows, 1000) for rows in (1, 77, 3000)]
        for _ in range(40)
    ]
    with backend.active():
        with backend.uploading():
            arrays = [backend.upload(stack) for stack in stacks]
        copies = next(s for s in backend._times.stages if s.name == "copies to the GPU")
        assert copies.background
        assert copies.detail.startswith("246 MB, ")  # 40 stacks of 3,078 rows, padded to 3,080
        for array, stack in zip(arrays, stacks, strict=True):
            np.testing.assert_array_equal(array.get(), np.concatenate(stack))
        # Outside of `uploading` a tensor is there at once.
        for stack in stacks[:5]:
            np.testing.assert_array_equal(
                backend.upload(stack).get(stream=backend.stream), np.concatenate(stack)
            )


@pytest.mark.gpu
def test_pinned_rate_is_a_rate() -> None:
    assert 1e8 < cuda_upload.pinned_rate(0, 256 << 20) < 1e13
