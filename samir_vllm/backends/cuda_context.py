"""Makes a GPU's context in a thread of its own, while Python imports and reads what it needs.

The driver takes a third of a second for it and needs neither CuPy nor the interpreter's lock. Whatever goes
wrong here is left to be found, and told in words, by the probes that follow. Knows nothing of CuPy.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

LIBRARY = "libcuda.so.1"


def in_background(work: Callable[[], None], name: str) -> threading.Thread | None:
    """A thread that does ``work``; None where the system gives no more threads."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


class EarlyContext:
    """The primary context of one GPU (CUDA driver API, "Primary Context Management"), being made."""

    def __init__(self, index: int) -> None:
        self.seconds: float | None = None  # that it took; None if there is none (yet)
        self._index = index
        self._retained: tuple[ctypes.CDLL, ctypes.c_int] | None = None
        self._thread = in_background(self._make, "cuda-context")

    def wait(self) -> None:
        """Return when the context is there, or can't be had."""
        if self._thread is not None:
            self._thread.join()

    def release(self) -> None:
        """Give it back, where the GPU isn't used after all."""
        self.wait()
        if self._retained is not None:
            cuda, device = self._retained
            cuda.cuDevicePrimaryCtxRelease_v2(device)
            self._retained = None

    def _make(self) -> None:
        started = time.perf_counter()
        try:
            cuda = ctypes.CDLL(LIBRARY)
        except OSError:
            return
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if (
            cuda.cuInit(0) == 0
            and cuda.cuDeviceGet(ctypes.byref(device), self._index) == 0
            and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        ):
            self._retained = cuda, device
            self.seconds = time.perf_counter() - started
