"""Launches that may begin while the kernel before them still runs: programmatic dependent launch.

From sm_90 on a kernel's blocks can be on their way when the one before ends; the kernel itself waits before
it touches anything (``wait_for_previous_kernel`` in ``ptx.cuh``). CuPy has no such launch: this one goes to
the driver, by ctypes, and costs the host more than CuPy's, so it is for graphs. Knows no kernel.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; ``cuda.h``.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from samir_vllm.backends import cuda_probe
from samir_vllm.backends.cuda_probe import Gpu
from samir_vllm.errors import DeviceError

CAPABILITY = (9, 0)
DRIVER = (12, 4)
"""The first CUDA that is sure to record such launches in a graph."""

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # of CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.cache
def can_overlap(gpu: Gpu) -> bool:
    """Whether GPU and driver know such launches, in graphs too."""
    return gpu.compute_capability >= CAPABILITY and cuda_probe.driver_version() >= DRIVER


class OverlappingLauncher:
    """Launches on one stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        self._launch.argtypes = [ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], threads: int, args: tuple[Any, ...], shared_bytes: int
    ) -> None:
        """Launch a CuPy kernel.

        Args:
            kernel: of a RawModule.
            grid: one to three sizes.
            threads: of a block.
            args: arrays of the device, and NumPy scalars of the parameters' own types.
            shared_bytes: dynamic shared memory of a block.

        Raises:
            DeviceError: the driver refuses.
        """
        attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", (ctypes.c_int * 16)(1))
        config = _Config(
            (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid))),
            (ctypes.c_uint * 3)(threads, 1, 1),
            shared_bytes,
            self._stream.ptr,
            ctypes.pointer(attribute),
            1,
        )
        values = [np.array(a if isinstance(a, np.generic) else a.data.ptr) for a in args]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        status = self._launch(ctypes.byref(config), kernel.kernel.ptr, pointers, None)
        if status != 0:
            raise DeviceError(
                f"a launch failed with status {status}: see CUresult in the driver's documentation"
            )
