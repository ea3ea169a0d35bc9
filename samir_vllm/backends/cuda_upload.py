"""Weights from host memory to a GPU: several threads, each with a small pinned ring of its own.

A copy from a mapped file is bound by page faults and one core's memory copies, so several cores work at it.
Pinning memory is slow (half a second a GiB), so each thread has two chunks of it: one fills while the other
is sent. Knows addresses and bytes; no tensors and no files.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from types import TracebackType
from typing import NamedTuple, Self

import cupy
import numpy as np

from samir_vllm.backends.cuda_context import in_background
from samir_vllm.errors import DeviceError, one_line

CHUNK_BYTES = 2 << 20  # with 8 threads the best of 1 to 8 MiB on an H200's host
MAX_THREADS = 8  # more only wait for each other's page faults
QUEUED_BYTES = 128 << 20  # enough to keep all busy


class _Stretch(NamedTuple):
    """Bytes to copy. Plain addresses: what is done for each chunk is done under the interpreter's lock."""

    array: np.ndarray  # whose memory it is, kept alive
    source: int  # address
    target: int  # address on the device
    nbytes: int


class WeightUploader:
    """Copies bytes to one GPU in the background. A context manager: at its end all copies are done.

    Raises at its end, or from a later ``copy``:
        DeviceError: the first copy that failed; those queued behind it are dropped.
    """

    def __init__(self, device: int, max_threads: int | None = None) -> None:
        """Make an uploader; its threads start with the work.

        Args:
            device: index of the GPU.
            max_threads: None for as many as pay on this machine.
        """
        self._device = device
        self._max_threads = max_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._threads: list[threading.Thread] = []
        # All below is guarded by the condition, which is notified when any of it may let somebody go on.
        self._changed = threading.Condition()
        self._queued: deque[_Stretch] = deque()
        self._queued_bytes = 0
        self._ended = False
        self._failure: Exception | None = None

    def copy(self, source: np.ndarray, target: int) -> None:
        """Queue the copy of a contiguous array to a device address; the array must stay as it is.

        Returns when at most QUEUED_BYTES are left to copy: whoever queues sees how far the copies are.
        """
        source = np.ascontiguousarray(source)
        with self._changed:
            if source.nbytes and self._failure is None:
                self._queued.append(_Stretch(source, source.ctypes.data, target, source.nbytes))
                self._queued_bytes += source.nbytes
                self._start_threads()
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queued_bytes <= QUEUED_BYTES)
            self._raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._ended = True
            if kind is not None:
                self._drop()
            self._changed.notify_all()
        try:
            self._join()
        except BaseException:  # Ctrl-C: what has the memory next must not be written to
            with self._changed:
                self._drop()
            self._join()
            raise
        if kind is None:
            self._raise_failure()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise DeviceError(
                f"weights can't be copied to cuda:{self._device}: {one_line(self._failure)}; "
                "see what else runs on it, or run with --device cpu"
            ) from self._failure

    def _start_threads(self) -> None:
        """As many as there are chunks to copy, up to the most."""
        wanted = min(self._max_threads, -(-self._queued_bytes // CHUNK_BYTES))
        while len(self._threads) < wanted:
            thread = in_background(self._work, "weight-upload")
            if thread is not None:
                self._threads.append(thread)
            elif self._threads:
                return  # fewer will do
            else:
                raise DeviceError("no thread can be started: raise the limit on processes (ulimit -u)")

    def _work(self) -> None:
        try:
            ring: _PinnedRing | None = None
            while (chunk := self._claim()) is not None:
                ring = ring or _PinnedRing(self._device)
                ring.send(chunk)
            if ring is not None:
                ring.finish()
        except Exception as exc:
            with self._changed:
                self._failure = self._failure or exc
                self._drop()

    def _claim(self) -> _Stretch | None:
        """The next chunk; None when there will be no more."""
        with self._changed:
            while not self._queued:
                if self._ended:
                    return None
                self._changed.wait()
            array, source, target, nbytes = self._queued[0]
            size = min(CHUNK_BYTES, nbytes)
            if size == nbytes:
                self._queued.popleft()
            else:
                self._queued[0] = _Stretch(array, source + size, target + size, nbytes - size)
            over = self._queued_bytes > QUEUED_BYTES
            self._queued_bytes -= size
            if over and self._queued_bytes <= QUEUED_BYTES:
                self._changed.notify_all()
            return _Stretch(array, source, target, size)

    def _drop(self) -> None:
        """Nothing more is copied."""
        self._queued.clear()
        self._queued_bytes = 0
        self._ended = True
        self._changed.notify_all()


class _PinnedRing:
    """Two pinned chunks and a stream, of the thread that makes it."""

    def __init__(self, device: int) -> None:
        cupy.cuda.runtime.setDevice(device)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        # Not from CuPy's pool, which would keep them pinned.
        self._chunks = [
            cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(CHUNK_BYTES), 0) for _ in range(2)
        ]
        self._sent = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        self._turn = 0

    def send(self, stretch: _Stretch) -> None:
        pinned, sent = self._chunks[self._turn].ptr, self._sent[self._turn]
        self._turn = 1 - self._turn
        sent.synchronize()
        runtime, nbytes = cupy.cuda.runtime, stretch.nbytes
        ctypes.memmove(pinned, stretch.source, nbytes)  # without the interpreter's lock
        runtime.memcpyAsync(stretch.target, pinned, nbytes, runtime.memcpyHostToDevice, self._stream.ptr)
        sent.record(self._stream)

    def finish(self) -> None:
        """Wait until all is there; the pinned memory may go then."""
        self._stream.synchronize()


def pinned_rate(device: int, nbytes: int = 1 << 30) -> float:
    """Bytes a second from pinned memory to the GPU: the limit of every upload, as this machine has it now."""
    with cupy.cuda.Device(device):
        chunk = 64 << 20
        host = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(chunk), 0)
        target = cupy.cuda.alloc(chunk)
        stream = cupy.cuda.Stream(non_blocking=True)
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        rates = []
        for _ in range(3):
            start.record(stream)
            for _ in range(nbytes // chunk):
                target.copy_from_host_async(host.ptr, chunk, stream)
            end.record(stream)
            end.synchronize()
            rates.append(nbytes // chunk * chunk / cupy.cuda.get_elapsed_time(start, end) * 1e3)
        return max(rates)
