"""The one cuBLAS handle of a backend: its stream, its workspace, and one row-major BF16 matmul.

Driven by ctypes on the library that CuPy has loaded: CuPy's own bindings refuse to run while a stream is
being captured into a graph, and can't set a workspace. Knows no buffers and no model.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from samir_vllm.backends import cuda_probe
from samir_vllm.backends.cuda_probe import one_line
from samir_vllm.errors import DeviceError

WORKSPACE_BYTES = 64 << 20  # as much as the reduction order was measured with

# library_types.h and cublas_api.h
_BF16, _FP32 = 14, 0
_COMPUTE_FP32 = 68
_DEFAULT_ALGORITHM = -1
_NORMAL, _TRANSPOSED = 0, 1


class Cublas:
    """A handle on the current device; lives as long as its backend."""

    def __init__(self, stream: Any, workspace: Any) -> None:
        """Make the handle.

        Args:
            stream: the CuPy stream that every product runs on.
            workspace: CuPy array that cuBLAS may write to; without one of its own it would allocate.

        Raises:
            DeviceError: the library can't be loaded or initialised.
        """
        cuda_probe.cublas_version()  # says what to install where there is none
        from cupy_backends.cuda.libs import cublas

        self._lib = cuda_probe.loaded_library("libcublas.so")
        p, i, strided = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
        self._lib.cublasSetStream_v2.argtypes = [p, p]
        self._lib.cublasSetWorkspace_v2.argtypes = [p, p, ctypes.c_size_t]
        operand: list[Any] = [p, i, i, strided]  # pointer, type, rows apart, batches apart
        self._gemm = self._lib.cublasGemmStridedBatchedEx
        self._gemm.argtypes = [p, i, i, i, i, i, p, *operand, *operand, p, *operand, i, i, i]
        try:
            self._handle = cublas.create()
        except cublas.CUBLASError as exc:
            raise DeviceError(f"cuBLAS can't start: {one_line(exc)}; free memory on the GPU") from None
        weakref.finalize(self, cublas.destroy, self._handle)
        self._workspace = workspace  # kept alive
        self._check(self._lib.cublasSetStream_v2(self._handle, stream.ptr))
        # After the stream: setting that resets the workspace.
        self._check(self._lib.cublasSetWorkspace_v2(self._handle, workspace.data.ptr, workspace.nbytes))
        self._one, self._zero = np.array(1, np.float32), np.array(0, np.float32)

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
        """out = x weight^T, all row-major, summed in FP32 over K or over equal segments of K.

        Args:
            x: BF16 [T, K].
            weight: BF16 [N, K].
            out: BF16 or FP32 [T, N]; FP32 [segments, T, N] where all of several segments are wanted.
            add: add to what an FP32 ``out`` holds rather than overwrite it.
            segments: into how many K is cut.
            segment: the only one to multiply; None for all, each into its own part of ``out``.
        """
        rows, depth = x.shape
        features = weight.shape[0]
        length = depth // segments
        skipped = 2 * length * (segment or 0)  # bytes before the first segment of a row
        # cuBLAS counts columns first: a row-major matrix is its transpose there, so out^T = weight x^T.
        self._check(
            self._gemm(
                self._handle, _TRANSPOSED, _NORMAL, features, rows, length,
                self._one.ctypes.data,
                weight.data.ptr + skipped, _BF16, depth, length,
                x.data.ptr + skipped, _BF16, depth, length,
                (self._one if add else self._zero).ctypes.data,
                out.data.ptr, _FP32 if out.dtype == np.float32 else _BF16, features, features * rows,
                segments if segment is None else 1, _COMPUTE_FP32, _DEFAULT_ALGORITHM,
            )
        )  # fmt: skip

    def _check(self, status: int) -> None:
        if status != 0:
            raise DeviceError(f"cuBLAS failed with status {status}: see cublasStatus_t in its documentation")
