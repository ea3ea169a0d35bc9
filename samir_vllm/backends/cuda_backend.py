"""The CUDA backend: checks arguments, chooses grids, launches the kernels of ``cuda_src`` and cuBLAS.

All memory is allocated once, for the largest step: an operation writes into its own buffer, which its next
call overwrites, so a steady step allocates nothing. BF16 values are bits in uint16 arrays. Everything runs on
one stream of one device. Knows no sequence and no scheduler.
"""

from __future__ import annotations

import gc
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cupy
import ml_dtypes
import numpy as np

from samir_vllm.backends import (
    CHOSEN,
    KV_SPLIT,
    LOGPROB_ROWS,
    Backend,
    BatchArrays,
    cublas,
    cuda_compile,
    cuda_launch,
    cuda_probe,
    rope_cos_sin,
)
from samir_vllm.backends.cublas import WORKSPACE_BYTES, Cublas
from samir_vllm.backends.cuda_cache import Cache
from samir_vllm.backends.cuda_context import in_background
from samir_vllm.backends.cuda_launch import OverlappingLauncher
from samir_vllm.backends.cuda_probe import Gpu
from samir_vllm.backends.cuda_upload import WeightUploader
from samir_vllm.backends.reference_sampler import MAX_VOCAB, SETTINGS, Adjustments, settings_of
from samir_vllm.config import PAGE_SIZE, ModelConfig
from samir_vllm.errors import DeviceError, InvariantError, one_line
from samir_vllm.interrupts import uninterrupted
from samir_vllm.sampling import MAX_LOGPROBS, TokenSampling
from samir_vllm.timing import StartupTimes

BF16 = np.dtype(np.uint16)  # the bits
SEGMENT_K = 2048
"""Longest stretch of K that one accumulator sums: the segments of the numerics contract."""
MAX_GEMM_ROWS = 2048  # cuBLAS keeps the reduction order up to here (measured); more rows go in slices
SEGMENTS_BYTES = 64 << 20  # FP32 segments of a GEMM; what needs more goes in slices of rows
ROW_PARTS = 8  # blocks that share a row of logits
SEGMENTS = 2048  # of a row, whose greatest logits the sampler starts from; sample.cu has it too
SAMPLE_THREADS = 320  # of a block, which has a row of logits; sample.cu has it too
LOG_PROBS_THREADS = 512  # the same, in log_probs.cu
MASKED_TOKENS = 4  # of a thread of mask_logits; mask_logits.cu has it too
QUERY_ROWS = 64  # of a block of paged_attention_prefill
ELEMENTWISE_THREADS = 256
FEW_SPLITS = 4  # that one block of paged_attention_decode takes though the GPU has blocks to spare
STOP_IDS = 8  # of a sequence, that the device knows; decode_state.cu has it too
DECODE_STATE_THREADS = 256  # of the block of begin_decode; decode_state.cu has it too
CHECKED_ROWS = (1, 2, 4, 8, 16, 17, 32, 64, 100, 128, 200, 256, 512, 1024, 2048)
"""Numbers of rows at which check_gemm_order looks: where libraries like to change their kernels."""
GEMM_ORDER = "gemm-order"  # the cache's name for what check_gemm_order found
COPIES = "copies to the GPU"  # a stage of a start, beside cuBLAS's first products
NULL = np.uintp(0)  # a null pointer in a kernel's arguments

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CudaInputs:
    """A step's arrays on the device, all int32."""

    num_decodes: int
    max_splits: int  # of a decoding sequence
    is_argmax: bool  # nobody wants but the greatest of the raw logits
    token_ids: Any  # [T]
    positions: Any  # [T]
    kv_index: Any  # [T]  place in the sequence's KV
    token_slots: Any  # [T]  row of the block tables
    cu_seqlens_q: Any  # [S + 1]
    seq_lens: Any  # [S]
    slots: Any  # [S]
    first_split: Any  # [num_decodes]  where a sequence's splits begin in the decode kernel's scratch
    query_tiles: Any  # [2 * tiles]  sequence, and first token in its chunk
    logit_rows: Any  # [L]
    logit_slots: Any  # [L]
    num_outputs: Any  # [L]


class DecodeShape(NamedTuple):
    """What a graph of a decode step is made for."""

    rows: int
    max_splits: int
    is_argmax: bool
    tables: int  # where the tables of penalties are; 0 where nobody needs them, or there are none
    table_size: int


class PendingSum:
    """A residual stream [T, hidden_size] to which FP32 segments of a GEMM are still to be added.

    ``rmsnorm`` adds them on its way; whoever else needs the sum calls ``CudaBackend.settle``. The segments
    lie in the backend's scratch, so that must happen before its next GEMM of several segments.
    """

    def __init__(self, residual: Any, segments: Any) -> None:
        self.residual = residual  # BF16 [T, hidden_size]
        self.segments = segments  # FP32 [s, T, hidden_size]; None once added
        self.shape = residual.shape


class Uploads:
    """Copies of small arrays to the device that nobody waits for: each keeps its pinned memory until done."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._underway: deque[tuple[Any, np.ndarray]] = deque()  # what comes after a copy, and its source

    def send(self, values: np.ndarray, target: Any) -> None:
        """Start the copy to where an array on the device begins."""
        while self._underway and self._underway[0][0].done:
            self._underway.popleft()
        source, runtime = _pinned(values.shape, values.dtype), cupy.cuda.runtime
        source[...] = values
        done = cupy.cuda.Event(disable_timing=True)
        with uninterrupted():
            runtime.memcpyAsync(
                *(target.data.ptr, source.ctypes.data, values.nbytes),
                *(runtime.memcpyHostToDevice, self._stream.ptr),
            )
            done.record(self._stream)
            self._underway.append((done, source))


class _Reading:
    """Copies to the host that are under way; see `Backend.read_later`."""

    def __init__(self, stream: Any, arrays: Sequence[Any]) -> None:
        self._hosts = [_pinned(array.shape, array.dtype) for array in arrays]
        self._done = cupy.cuda.Event(disable_timing=True)
        with uninterrupted():
            for array, host in zip(arrays, self._hosts, strict=True):
                _start_download(array, host, stream)
            self._done.record(stream)

    def __call__(self) -> list[np.ndarray]:
        self._done.synchronize()
        return self._hosts

    def __del__(self) -> None:
        # Not asked for: its pinned memory must not serve another copy before this one is done.
        with suppress(Exception):
            self._done.synchronize()


class CudaBackend(Backend):
    """One GPU; see the module's opening."""

    name = "cuda"
    kv_itemsize = 2
    steps_ahead = 1

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: int | Gpu = 0,
        max_tokens: int = 2304,
        max_num_seqs: int = 256,
        max_logit_rows: int | None = None,
        max_positions: int | None = None,
        batch_invariant: bool = False,
        times: StartupTimes | None = None,
        cache: Cache | None = None,
    ) -> None:
        """Compile the kernels and allocate every buffer but weights and pages.

        Args:
            config: the model.
            device: index of the GPU, or what `cuda_probe.require_gpu` found of it.
            max_tokens: most tokens of one step.
            max_num_seqs: most sequences of one step.
            max_logit_rows: most rows whose logits are wanted in one step; None: ``max_num_seqs``, and what
                log-probabilities of a prompt take.
            max_positions: RoPE positions below this may occur; None: all the model's.
            batch_invariant: where cuBLAS is found not to keep the one reduction order, use our own GEMM,
                which is slower.
            times: where the stages of the start are booked.
            cache: where compiled kernels are kept; None for the usual place.

        Raises:
            DeviceError: the GPU can't run this model, or not now; one line with cause and remedy.
        """
        super().__init__(config)
        _check_config(config)
        self._gpu = device if isinstance(device, Gpu) else cuda_probe.require_gpu(device)
        self._device = cupy.cuda.Device(self._gpu.index)
        self._times = times or StartupTimes()
        self._cache = cache or Cache()
        self._uploader: WeightUploader | None = None  # while weights go up in the background
        self._max_tokens, self._max_num_seqs = max_tokens, max_num_seqs
        self._max_logit_rows = max(max_num_seqs, LOGPROB_ROWS) if max_logit_rows is None else max_logit_rows
        self._max_positions = config.max_position_embeddings if max_positions is None else max_positions
        self._batch_invariant = batch_invariant
        self._ordered_gemm = False  # our own GEMM in place of cuBLAS
        self._uploaded_bytes = 0
        self._partials: tuple[Any, ...] = ()
        self._overlap: OverlappingLauncher | None = None  # while a graph is recorded, where the GPU can do it
        self._decode_shared_bytes = cuda_compile.decode_shared_bytes(config, self._gpu.max_shared_bytes)
        with self._errors_in_words():
            self._start()

    def _start(self) -> None:
        with self._device:
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self._uploads = Uploads(self.stream)
            with self.stream:
                with self._times.stage("kernels") as stage:
                    loaded = cuda_compile.load_kernels(self.config, self._gpu, self._cache)
                    self._kernels = loaded.kernels
                    stage.detail = f"{loaded.cached} files from the cache, {loaded.compiled} compiled"
                with self._times.stage("buffers, cuBLAS"):
                    self._allocate_buffers()
                    self._cublas = Cublas(self.stream, self._workspace)
                    self.stream.synchronize()

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._device, self.stream, self._errors_in_words():
            yield

    @contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        try:
            yield
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as exc:
            raise DeviceError(
                f"cuda:{self._gpu.index} ({self._gpu.name}) can't be used: {one_line(exc)}; "
                "see what else runs on it, or run with --device cpu"
            ) from None

    # Memory

    def _allocate(self, shape: tuple[int, ...], dtype: Any, what: str, remedy: str) -> Any:
        try:
            return cupy.empty(shape, dtype)
        except cupy.cuda.memory.OutOfMemoryError:
            needed = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            raise DeviceError(
                f"out of memory on cuda:{self._device.id}: {what} needs {_mib(needed)} MiB, "
                f"{_mib(self._free_memory())} MiB are free; {remedy}"
            ) from None

    def _allocate_buffers(self) -> None:
        cfg, tokens, rows = self.config, self._max_tokens, self._max_logit_rows
        self._qkv_features = (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim
        attention_width = cfg.num_heads * cfg.head_dim
        widest = max(self._qkv_features, 2 * cfg.intermediate_size)

        def buffer(*shape: int, dtype: Any = BF16) -> Any:
            made = self._allocate(
                shape, dtype, "a buffer of activations", "lower --max-batched-tokens or --max-num-seqs"
            )
            self._buffers.append(made)
            return made

        self._buffers: list[Any] = []
        self._x = buffer(tokens, cfg.hidden_size)
        self._normed = buffer(tokens, cfg.hidden_size)
        self._linear = buffer(tokens * widest)
        self._q = buffer(tokens, cfg.num_heads, cfg.head_dim)
        self._attention = buffer(tokens, attention_width)
        self._mlp = buffer(tokens, cfg.intermediate_size)
        self._rows = buffer(rows, cfg.hidden_size)
        self._logits = buffer(rows, _padded(cfg.vocab_size), dtype=np.float32)
        self._ids = buffer(rows, dtype=np.int32)
        self._maxima = buffer(rows, SEGMENTS, dtype=np.uint64)
        self._log_probs = buffer(rows, dtype=np.float32)
        self._top_ids = buffer(rows * MAX_LOGPROBS, dtype=np.int32)
        self._top = buffer(rows * MAX_LOGPROBS, dtype=np.float32)
        self._segments = buffer(SEGMENTS_BYTES // 4, dtype=np.float32)
        # Scratch that must stay as it is between calls, so `poison` leaves it alone.
        self._argmax_best = self._zeros(rows, np.uint64)
        self._argmax_arrived = self._zeros(rows, np.uint32)
        self._row_tiles = cfg.num_kv_heads * -(-(cfg.num_heads // cfg.num_kv_heads) // 16)
        self._decode_arrived = self._zeros(self._max_num_seqs * self._row_tiles, np.uint32)
        self._workspace = self._allocate(
            (WORKSPACE_BYTES,), np.uint8, "cuBLAS's workspace", "free memory on the GPU"
        )
        cos, sin = rope_cos_sin(cfg.inv_freq(), np.arange(self._max_positions, dtype=np.int32))
        self._cos, self._sin = self.from_numpy(cos), self.from_numpy(sin)
        self._query_tokens = QUERY_ROWS // (cfg.num_heads // cfg.num_kv_heads)
        most_tiles = tokens // self._query_tokens + self._max_num_seqs + 1
        step_size = 4 * tokens + 4 * self._max_num_seqs + 1 + 3 * rows + 2 * most_tiles
        self._step_arrays = self._allocate((step_size,), np.int32, "a buffer", "lower --max-batched-tokens")
        self._pending: PendingSum | None = None
        self._masks: tuple[Any, Any] | None = None  # of mask_logits, once it was called

    def _zeros(self, size: int, dtype: Any) -> Any:
        array = self._allocate((size,), dtype, "a buffer", "free memory on the GPU")
        array.data.memset_async(0, array.nbytes, self.stream)
        return array

    def poison(self) -> None:
        """Fill every activation buffer with NaN (ids: -1), so that an output no kernel wrote shows."""
        for buffer in (*self._buffers, *self._partials):
            buffer.data.memset_async(0xFF, buffer.nbytes, self.stream)

    def upload(self, tensors: Sequence[np.ndarray]) -> Any:
        rows = sum(len(t) for t in tensors)
        shape = (_padded(rows), *tensors[0].shape[1:])
        whole = self._allocate(shape, BF16, "a weight", "free memory on the GPU or take a smaller model")
        out, padding = whole[:rows], whole[rows:]
        padding.data.memset_async(0, padding.nbytes, self.stream)
        self.stream.synchronize()  # what lay in this memory before may still be read
        with nullcontext(self._uploader) if self._uploader else self._new_uploader() as uploader:
            offset = 0
            for tensor in tensors:
                uploader.copy(tensor, out.data.ptr + offset)
                offset += tensor.nbytes
        self._uploaded_bytes += whole.nbytes
        return out

    def _new_uploader(self) -> WeightUploader:
        return WeightUploader(self._device.id)

    @contextmanager
    def uploading(self) -> Iterator[None]:
        first_products = in_background(self._first_products, "first-products")
        started, before = time.perf_counter(), self._uploaded_bytes
        try:
            with self._new_uploader() as self._uploader:
                yield
            seconds, nbytes = time.perf_counter() - started, self._uploaded_bytes - before
            rate = f"{nbytes / 1e6:,.0f} MB, {nbytes / seconds / 1e9:.1f} GB/s"
            self._times.add(COPIES, seconds, rate, background=True)
        finally:
            self._uploader = None
            if first_products is not None:
                first_products.join()

    def _first_products(self) -> None:
        """One product of zeros for each shape of a layer.

        The first takes cuBLAS a tenth of a second, to load its kernels: better now than in the first step.
        """
        cfg, rows, started = self.config, min(16, self._max_tokens), time.perf_counter()
        x, weights = self._mlp, self._segments.view(BF16)
        shapes = (  # features, depth, and whether the product is added to the residual
            (self._qkv_features, cfg.hidden_size, False),
            (2 * cfg.intermediate_size, cfg.hidden_size, False),
            (cfg.hidden_size, cfg.num_heads * cfg.head_dim, True),
            (cfg.hidden_size, cfg.intermediate_size, True),
        )
        with suppress(Exception), self.active():  # what fails here fails again where its message is heard
            for zeros in (x, weights):
                zeros.data.memset_async(0, zeros.nbytes, self.stream)
            for features, depth, is_added in shapes:
                if features * depth > weights.size or rows * depth > x.size:
                    continue
                operands = (
                    x.reshape(-1)[: rows * depth].reshape(rows, depth),
                    weights[: features * depth].reshape(features, depth),
                )
                if is_added:
                    segments = gemm_segments(depth)
                    out = self._logits.reshape(-1)[: segments * rows * features]
                    self._cublas.matmul(*operands, out.reshape(segments, rows, features), segments=segments)
                else:
                    self._cublas.matmul(*operands, self._linear[: rows * features].reshape(rows, features))
        self._times.add("cuBLAS loads kernels", time.perf_counter() - started, background=True)

    def from_numpy(self, x: np.ndarray) -> Any:
        bits = x.view(BF16) if x.dtype == ml_dtypes.bfloat16 else x
        array = self._allocate(bits.shape, bits.dtype, "an array", "free memory on the GPU")
        array.set(np.ascontiguousarray(bits), stream=self.stream)
        self.stream.synchronize()  # the host array may go away
        return array

    def to_numpy(self, x: Any) -> np.ndarray:
        host = self._download(self.settle(x))
        return host.view(ml_dtypes.bfloat16).astype(np.float32) if host.dtype == BF16 else host

    def _download(self, array: Any) -> np.ndarray:
        """A host copy of an array whose rows may lie apart."""
        if array.flags.c_contiguous:
            return array.get(stream=self.stream)
        host = np.empty(array.shape, array.dtype)
        _start_download(array, host, self.stream)
        self.stream.synchronize()
        return host

    def _free_memory(self) -> int:
        return int(cupy.cuda.runtime.memGetInfo()[0]) + cupy.get_default_memory_pool().free_bytes()

    def free_bytes(self) -> int:
        with self.active():
            to_come = max(0, 2 * self.config.num_parameters - self._uploaded_bytes)
            return max(0, int(0.9 * (self._free_memory() - to_come)))

    def allocate_kv_cache(self, num_pages: int, max_num_seqs: int, max_pages_per_seq: int) -> None:
        self.stream.synchronize()  # a buffer of an earlier cache may still be read
        cfg = self.config
        remedy = "lower --kv-cache-mib"
        shape = (num_pages, 2, cfg.num_kv_heads, PAGE_SIZE, cfg.head_dim)
        self.kv_cache = self._allocate(shape, BF16, "the KV cache", remedy)
        # Zeros, as in the NumPy backend: finite, whatever lay there before.
        self.kv_cache.data.memset_async(0, self.kv_cache.nbytes, self.stream)
        self._nobody = max_num_seqs  # the slot of padding: it has no pages
        tables = (max_num_seqs + 1, cfg.num_layers, max_pages_per_seq)
        self.block_tables = self._allocate(tables, np.int32, "the block tables", remedy)
        self.block_tables.data.memset_async(0xFF, self.block_tables.nbytes, self.stream)
        self._sampling = SlotSampling(self, max_num_seqs + 1)
        self._allocate_decode_state(max_num_seqs)
        # Splits of all sequences together: each has one that is not full, and full ones hold pages.
        splits = max_num_seqs * -(-max_pages_per_seq * PAGE_SIZE // KV_SPLIT)
        splits = min(splits, max_num_seqs + num_pages // cfg.num_layers * PAGE_SIZE // KV_SPLIT)
        parts = splits * self._row_tiles * 16
        # Output, greatest score and sum of a row of queries in one split.
        self._partials = tuple(
            self._allocate(shape, np.float32, "attention's scratch", remedy)
            for shape in ((parts, cfg.head_dim), (parts,), (parts,))
        )
        self._max_splits = splits

    def _allocate_decode_state(self, max_num_seqs: int) -> None:
        """See decode_state.cu."""
        self._kept = self._zeros((max_num_seqs + 1) * 2, np.int32)
        self._stop_ids = self._zeros((max_num_seqs + 1) * STOP_IDS, np.int32)
        for array in (self._kept, self._stop_ids):
            array.data.memset_async(0xFF, array.nbytes, self.stream)
        self._known_stop_ids: list[Collection[int]] = [()] * max_num_seqs  # of each slot
        self._decode_capacity = max_num_seqs
        self._decode_rows = self._zeros(3 * max_num_seqs, np.int32)
        self._decode_inputs = self._zeros(6 * max_num_seqs, np.int32).reshape(6, max_num_seqs)
        self._row_numbers = self.from_numpy(np.arange(max_num_seqs, dtype=np.int32))
        self._num_decode_rows = 0
        self._decode_is_argmax = True

    def set_block_table(self, slot: int, page_ids: np.ndarray) -> None:
        row = np.full(self.block_tables.shape[1:], -1, np.int32)
        row[:, : page_ids.shape[1]] = page_ids
        self._uploads.send(row, self.block_tables[slot])

    def set_sampling(
        self, slot: int, sampling: TokenSampling | None, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._sampling.set(slot, sampling, prompt_token_ids)

    def set_stop_ids(self, slot: int, stop_ids: Collection[int]) -> None:
        if stop_ids == self._known_stop_ids[slot]:
            return
        row = np.full(STOP_IDS, -1, np.int32)
        few = list(itertools.islice(stop_ids, STOP_IDS))
        row[: len(few)] = few
        self._uploads.send(row, self._stop_ids[slot * STOP_IDS :])
        self._known_stop_ids[slot] = stop_ids

    def stage(self, batch: BatchArrays) -> CudaInputs:
        lens_q = np.diff(batch.cu_seqlens_q)
        tokens = len(batch.token_ids)
        decodes = batch.num_decodes
        splits = -(-batch.seq_lens[:decodes] // KV_SPLIT)
        self._check_batch(batch, int(splits.sum()))
        # Where a token lies in its sequence's KV; `positions` only turn the rotation (they may jump).
        kv_index = np.arange(tokens, dtype=np.int32) + np.repeat(
            batch.seq_lens - batch.cu_seqlens_q[1:], lens_q
        )
        parts = (
            batch.token_ids,
            batch.positions,
            kv_index,
            np.repeat(batch.slots, lens_q),
            batch.cu_seqlens_q,
            batch.seq_lens,
            batch.slots,
            np.cumsum(splits, dtype=np.int32) - splits,
            self._query_tiles(lens_q, decodes),
            batch.logit_rows,
            batch.logit_slots,
            batch.num_outputs,
        )
        self._pending = None
        self._uploads.send(np.concatenate([part.ravel() for part in parts]), self._step_arrays)
        ends = np.cumsum([part.size for part in parts]).tolist()
        views = [self._step_arrays[e - part.size : e] for part, e in zip(parts, ends, strict=True)]
        is_argmax = bool(self._sampling.is_argmax[batch.logit_slots].all())
        inputs = CudaInputs(decodes, int(splits.max(initial=0)), is_argmax, *views)
        if (batch.token_ids[:decodes] == CHOSEN).any():
            args = (
                *(inputs.token_ids, inputs.kv_index, inputs.token_slots, inputs.slots, inputs.seq_lens),
                *(inputs.logit_slots, np.int32(decodes), np.int32(self._nobody), self._kept),
            )
            self._launch("fill_tokens", _grid_over(decodes), ELEMENTWISE_THREADS, args)
        return inputs

    def _query_tiles(self, lens_q: np.ndarray, decodes: int) -> np.ndarray:
        """int32 [tiles, 2]: sequence and first token of each tile of the prefill kernel."""
        counts = -(-lens_q[decodes:] // self._query_tokens)
        sequences = np.repeat(np.arange(decodes, len(lens_q), dtype=np.int32), counts)
        before = np.cumsum(counts, dtype=np.int32) - counts
        index = np.arange(len(sequences), dtype=np.int32) - np.repeat(before, counts)
        return np.stack([sequences, index * np.int32(self._query_tokens)], axis=1).astype(np.int32)

    def _check_batch(self, batch: BatchArrays, splits: int) -> None:
        for what, found, most in (
            ("tokens", len(batch.token_ids), self._max_tokens),
            ("sequences", len(batch.seq_lens), self._max_num_seqs),
            ("rows of logits", len(batch.logit_rows), self._max_logit_rows),
            ("positions", int(batch.positions.max(initial=-1)) + 1, self._max_positions),
            (
                "KV tokens of one sequence",
                int(batch.seq_lens.max(initial=0)),
                self.block_tables.shape[2] * PAGE_SIZE,
            ),
            ("KV splits", splits, self._max_splits),
        ):
            if found > most:
                raise InvariantError(f"a step of {found} {what}, but buffers for {most}")

    # Decoding, step after step

    def set_decode_rows(self, slots: np.ndarray, positions: np.ndarray, prompt_lens: np.ndarray) -> None:
        count = len(slots)
        if count > self._decode_capacity:
            raise InvariantError(f"{count} sequences decode, but buffers for {self._decode_capacity}")
        rows = np.full((3, self._decode_capacity), self._nobody, np.int32)
        rows[:, :count] = slots, positions, prompt_lens
        self._uploads.send(rows, self._decode_rows)
        self._num_decode_rows = count
        self._decode_is_argmax = bool(self._sampling.is_argmax[slots].all())

    def decode_shape(self, max_seq_len: int) -> DecodeShape:
        if max_seq_len > min(self._max_positions, self.block_tables.shape[2] * PAGE_SIZE):
            raise InvariantError(f"a step at KV length {max_seq_len}, but no room for it")
        rows = min(decode_bucket(self._num_decode_rows), self._decode_capacity)
        splits = 1 << (-(-max_seq_len // KV_SPLIT) - 1).bit_length()  # blocks without a split end at once
        splits = self._splits_at_once(rows, splits)
        tables = None if self._decode_is_argmax else self._sampling.tables
        where = (0, 0) if tables is None else (tables.data.ptr, tables.shape[1])
        return DecodeShape(rows, splits, self._decode_is_argmax, *where)

    def begin_decode(self, shape: DecodeShape) -> CudaInputs:
        rows, self._pending = shape.rows, None
        args = (
            *(self._decode_rows, np.int32(self._decode_capacity), np.int32(rows), np.int32(self._nobody)),
            *(self._kept, self._decode_inputs),
        )
        self._launch("begin_decode", (1,), DECODE_STATE_THREADS, args)
        token_ids, places, slots, seq_lens, first_split, outputs = (row[:rows] for row in self._decode_inputs)
        numbers, nothing = self._row_numbers[:rows], self._row_numbers[:0]
        return CudaInputs(
            *(rows, shape.max_splits, shape.is_argmax, token_ids, places, places, slots),
            *(nothing, seq_lens, slots, first_split, nothing, numbers, slots, outputs),
        )

    def keep_tokens(self, token_ids: Any, inputs: CudaInputs) -> None:
        rows = len(inputs.logit_rows)
        _check("token ids", token_ids, np.int32, (rows,))
        args = (
            *(token_ids, inputs.logit_slots, inputs.logit_rows, inputs.kv_index, np.int32(rows)),
            *(np.int32(self._nobody), self._stop_ids, self._kept),
        )
        self._launch("keep_tokens", _grid_over(rows), ELEMENTWISE_THREADS, args)

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        with self._recording():
            try:
                self.stream.begin_capture()
                out = run()
            except BaseException:
                with suppress(Exception):  # what is wrong already is what counts
                    self.stream.end_capture()
                raise
            graph = self.stream.end_capture()

        def replay() -> T:
            graph.launch(self.stream)
            return out

        return replay

    @contextmanager
    def _recording(self) -> Iterator[None]:
        collects = gc.isenabled()
        try:
            gc.disable()  # an engine that it finds would be closed now, by calls that end a capture
            if cuda_launch.can_overlap(self._gpu):
                self._overlap = OverlappingLauncher(self.stream)
            yield
        finally:
            self._overlap = None
            if collects:
                gc.enable()

    def read_later(self, *arrays: Any) -> Callable[[], list[np.ndarray]]:
        return _Reading(self.stream, arrays)

    # Small operations

    def _launch(
        self, name: str, grid: tuple[int, ...], threads: int, args: tuple[Any, ...], shared: int = 0
    ) -> None:
        if 0 in grid:
            return
        if self._overlap is not None:
            self._overlap(self._kernels[name], grid, threads, args, shared)
        else:
            self._kernels[name](grid, (threads,), args, shared_mem=shared, stream=self.stream)

    def embedding(self, table: Any, inputs: CudaInputs) -> Any:
        return self._gather(table, inputs.token_ids, self._x)

    def take_rows(self, x: Any, rows: Any) -> Any:
        return self._gather(self.settle(x), rows, self._rows)

    def _gather(self, table: Any, ids: Any, out: Any) -> Any:
        _check("a table", table, BF16, (None, self.config.hidden_size))
        rows = _rows_of(out, len(ids))
        threads = min(256, -(-self.config.hidden_size // 256) * 32)
        self._launch("embedding", (len(ids),), threads, (table, ids, rows))
        return rows

    def rmsnorm(self, x: Any, weight: Any) -> Any:
        return self._norm(x, weight, None, x.shape[0])

    def _norm(self, x: Any, weight: Any, row_ids: Any, rows: int) -> Any:
        """RMSNorm of the rows ``row_ids`` of x; None for all, which settles x."""
        hidden, threads = self.config.hidden_size, cuda_compile.norm_threads(self.config)
        _check("a norm weight", weight, BF16, (hidden,))
        ids = NULL if row_ids is None else row_ids
        out = _rows_of(self._normed, rows)
        if isinstance(x, PendingSum) and x.segments is not None:
            sizes = (np.int32(x.segments.shape[0]), np.int64(x.shape[0] * hidden))
            self._launch("add_rmsnorm", (rows,), threads, (x.segments, *sizes, x.residual, ids, weight, out))
            if row_ids is None:
                x.segments = None
        else:
            source = self.settle(x)
            _check("x", source, BF16, (None, hidden))
            self._launch("rmsnorm", (rows,), threads, (source, ids, weight, out))
        return out

    def settle(self, x: Any) -> Any:
        """The BF16 array of ``x``, what a `PendingSum` waits for added."""
        if not isinstance(x, PendingSum):
            return x
        if x.segments is not None:
            self._add_segments(x.segments, x.residual, x.residual)
            x.segments = None
        return x.residual

    def _add_segments(self, segments: Any, residual: Any, out: Any) -> None:
        """out = BF16(segments [s, n, m] added in order + residual [n, m], or None)."""
        chunks = out.size // 8
        args = (
            segments,
            np.int32(segments.shape[0]),
            np.int64(out.size),
            NULL if residual is None else residual,
            out,
            np.int64(chunks),
        )
        self._launch("add_segments", (-(-chunks // ELEMENTWISE_THREADS),), ELEMENTWISE_THREADS, args)

    def linear(self, x: Any, weight: Any) -> Any:
        rows, features = _check_gemm(x, weight)
        if rows * features > self._linear.size:
            raise InvariantError(f"a product of {rows} x {features}, but a buffer for {self._linear.size}")
        out = self._linear[: rows * features].reshape(rows, features)
        self._gemm(x, weight, out)
        return out

    def linear_add(self, x: Any, weight: Any, residual: Any) -> Any:
        # Not by cuBLAS's own addition: to a BF16 output it adds a product already rounded to BF16 (measured).
        target = self.settle(residual)
        rows, features = _check_gemm(x, weight)
        _check("the residual", target, BF16, (rows, features))
        segments = gemm_segments(x.shape[1])
        step = self._rows_at_once(segments, features)
        if rows <= step:
            self._pending = PendingSum(target, self._multiply_segments(x, weight, segments))
            return self._pending
        for start in range(0, rows, step):
            part, out = x[start : start + step], target[start : start + step]
            self._add_segments(self._multiply_segments(part, weight, segments), out, out)
        return target

    def _rows_at_once(self, segments: int, features: int) -> int:
        """Most rows of a product whose FP32 segments go through the scratch."""
        return min(MAX_GEMM_ROWS, self._segments.size // (segments * features))

    def _multiply_segments(self, x: Any, weight: Any, segments: int) -> Any:
        """x times weight transposed, FP32 [s, T, N] in the scratch; our own kernel gives s = 1."""
        if self._pending is not None and self._pending.segments is not None:
            raise InvariantError("a GEMM would overwrite segments that no one has added yet")
        parts = 1 if self._ordered_gemm else segments
        rows, features = x.shape[0], weight.shape[0]
        out = self._segments[: parts * rows * features].reshape(parts, rows, features)
        if self._ordered_gemm:
            self._ordered(x, weight, out[0], segments)
        else:
            self._cublas.matmul(x, weight, out, segments=segments)
        return out

    def _gemm(self, x: Any, weight: Any, out: Any, *, through_scratch: bool = False) -> None:
        """out = x weight^T, BF16 or FP32, in slices of rows; a BF16 one through FP32 where it must be."""
        rows, features = out.shape
        segments = gemm_segments(x.shape[1])
        if out.dtype == BF16 and (segments > 1 or self._ordered_gemm):
            through_scratch = True
        step = self._rows_at_once(segments, features) if through_scratch else MAX_GEMM_ROWS
        for start in range(0, rows, step):
            part, target = x[start : start + step], out[start : start + step]
            if through_scratch:
                self._add_segments(self._multiply_segments(part, weight, segments), None, target)
            elif self._ordered_gemm:
                self._ordered(part, weight, target, segments)
            else:  # in FP32, adding a segment to the output is adding in order
                for i in range(segments):
                    self._cublas.matmul(part, weight, target, add=i > 0, segments=segments, segment=i)

    def _ordered(self, x: Any, weight: Any, out: Any, segments: int) -> None:
        """FP32 out [T, N] by our own kernel in the one reduction order."""
        (rows, depth), features = x.shape, weight.shape[0]
        sizes = (np.int32(rows), np.int32(features), np.int32(depth), np.int32(segments))
        self._launch("ordered_linear", (-(-features // 128), -(-rows // 16)), 128, (x, weight, out, *sizes))

    def ordered_linear(self, x: Any, weight: Any) -> Any:
        """x [T, K] times weight [N, K] transposed by our own kernel -> FP32 [T, N], a new array."""
        rows, features = _check_gemm(x, weight)
        out = self._allocate((rows, features), np.float32, "a product", "free memory on the GPU")
        self._ordered(x, weight, out, gemm_segments(x.shape[1]))
        return out

    def rope_kv_write(self, qkv: Any, layer_idx: int, inputs: CudaInputs) -> Any:
        tokens = len(inputs.token_ids)
        _check("qkv", qkv, BF16, (tokens, self._qkv_features))
        q = _rows_of(self._q, tokens)
        args = (
            qkv,
            self._cos,
            self._sin,
            inputs.positions,
            inputs.kv_index,
            inputs.token_slots,
            self.block_tables,
            np.int32(self.block_tables.shape[2]),
            np.int32(layer_idx),
            q,
            self.kv_cache,
        )
        self._launch("rope_kv_write", (tokens,), ELEMENTWISE_THREADS, args)
        return q

    def attention(self, q: Any, layer_idx: int, inputs: CudaInputs) -> Any:
        decodes = inputs.num_decodes
        if decodes > 0:
            self._decode(q[:decodes], layer_idx, inputs, self._attention)
        if decodes < len(q):
            self._prefill(q[decodes:], layer_idx, inputs, self._attention[decodes:])
        return self._attention[: len(q)]

    def paged_attention_decode(self, q: Any, layer_idx: int, inputs: CudaInputs) -> Any:
        self._decode(q, layer_idx, inputs, self._attention)
        return self._attention[: len(q)]

    def paged_attention_prefill(self, q: Any, layer_idx: int, inputs: CudaInputs) -> Any:
        self._prefill(q, layer_idx, inputs, self._attention)
        return self._attention[: len(q)]

    def _decode(self, q: Any, layer_idx: int, inputs: CudaInputs, out: Any) -> None:
        self._check_q(q, inputs.num_decodes)
        if inputs.num_decodes > self._max_num_seqs:
            raise InvariantError(
                f"{inputs.num_decodes} sequences decode, but buffers for {self._max_num_seqs}"
            )
        args = (
            *(q, self.kv_cache, self.block_tables),
            *(np.int32(self.block_tables.shape[2]), np.int32(layer_idx)),
            *(inputs.seq_lens, inputs.slots, inputs.first_split),
            *(*self._partials, self._decode_arrived, out),
        )
        rows = inputs.num_decodes
        grid = (rows, self._row_tiles, self._splits_at_once(rows, inputs.max_splits))
        self._launch("paged_attention_decode", grid, 128, args, self._decode_shared_bytes)

    def _splits_at_once(self, rows: int, max_splits: int) -> int:
        """Blocks that share a sequence's splits: one for each split, or one alone, which gives the same bits.

        A few splits are sooner done one after another than merged by way of memory.
        """
        fills_gpu = rows * self._row_tiles >= self._gpu.num_sms
        return 1 if fills_gpu or max_splits <= FEW_SPLITS else max_splits

    def _prefill(self, q: Any, layer_idx: int, inputs: CudaInputs, out: Any) -> None:
        self._check_q(q, len(inputs.token_ids) - inputs.num_decodes)
        args = (
            *(q, self.kv_cache, self.block_tables),
            *(np.int32(self.block_tables.shape[2]), np.int32(layer_idx), np.int32(inputs.num_decodes)),
            *(inputs.query_tiles, inputs.cu_seqlens_q, inputs.seq_lens, inputs.slots, out),
        )
        grid = (len(inputs.query_tiles) // 2, self.config.num_kv_heads)
        self._launch(
            "paged_attention_prefill", grid, 128, args, cuda_compile.prefill_shared_bytes(self.config)
        )

    def _check_q(self, q: Any, rows: int) -> None:
        _check("q", q, BF16, (rows, self.config.num_heads, self.config.head_dim))

    def silu_mul(self, gate_up: Any) -> Any:
        rows, width = gate_up.shape[0], self.config.intermediate_size
        _check("gate_up", gate_up, BF16, (None, 2 * width))
        out = _rows_of(self._mlp, rows)
        grid = (rows, -(-width // (8 * ELEMENTWISE_THREADS)))
        self._launch("silu_mul", grid, ELEMENTWISE_THREADS, (gate_up, out))
        return out

    def lm_head(self, x: Any, weight: Any) -> Any:
        _check_gemm(x, weight)
        _check("the LM head", weight, BF16, (self.config.vocab_size, self.config.hidden_size))
        out = _rows_of(self._logits, x.shape[0])
        self._gemm(x, padded_rows(weight), out)
        return out[:, : self.config.vocab_size]

    def logits(self, x: Any, norm: Any, head: Any, rows: Any) -> Any:
        return self.lm_head(self._norm(x, norm, rows, len(rows)), head)

    def argmax(self, logits: Any) -> Any:
        rows = self._check_logits(logits)
        ids = _rows_of(self._ids, rows)
        args = (*_with_stride(logits), self._argmax_best, self._argmax_arrived, ids)
        self._launch("argmax", (rows, ROW_PARTS), ELEMENTWISE_THREADS, args)
        return ids

    def _check_logits(self, logits: Any, inputs: CudaInputs | None = None) -> int:
        """The number of rows."""
        rows, vocab_size = logits.shape
        if logits.dtype != np.float32 or vocab_size != self.config.vocab_size or logits.strides[1] != 4:
            raise InvariantError(f"logits are {logits.dtype} {logits.shape}, strides {logits.strides}")
        if inputs is not None and rows != len(inputs.logit_rows):
            raise InvariantError(f"{rows} rows of logits, but the step has {len(inputs.logit_rows)}")
        return int(rows)

    def adjust_logits(self, logits: Any, inputs: CudaInputs) -> None:
        rows, sampling = self._check_logits(logits, inputs), self._sampling
        if sampling.tables is None:
            return
        args = (
            *(*_with_stride(logits), inputs.logit_slots, inputs.num_outputs, inputs.logit_rows),
            *(inputs.token_ids, sampling.settings, sampling.tables, np.int32(sampling.tables.shape[1])),
        )
        self._launch("adjust_logits", (rows,), ELEMENTWISE_THREADS, args)

    def restore_logits(self, logits: Any, inputs: CudaInputs) -> None:
        rows, sampling = self._check_logits(logits, inputs), self._sampling
        if sampling.tables is None:
            return
        args = (
            *(*_with_stride(logits), inputs.logit_slots, sampling.settings),
            *(sampling.tables, np.int32(sampling.tables.shape[1])),
        )
        self._launch("restore_logits", (rows,), ELEMENTWISE_THREADS, args)

    def mask_logits(self, logits: Any, rows: np.ndarray, masks: np.ndarray) -> None:
        there, vocab_size = self._check_logits(logits), self.config.vocab_size
        _check("rows", rows, np.int32, (None,))
        _check("masks", masks, np.uint32, (len(rows), -(-vocab_size // 32)))
        least, last = int(rows.min(initial=there)), int(rows.max(initial=0))
        if not 0 <= least <= last < there:
            raise InvariantError(f"masks for {len(rows)} rows, {least} to {last}, of {there} rows of logits")
        if self._masks is None:
            self._masks = self._allocate_masks(masks.shape[1])
        on_device = tuple(_rows_of(buffer, len(rows)) for buffer in self._masks)
        for values, target in zip((rows, masks), on_device, strict=True):
            self._uploads.send(values, target)
        grid = (len(rows), -(-vocab_size // (MASKED_TOKENS * ELEMENTWISE_THREADS)))
        self._launch("mask_logits", grid, ELEMENTWISE_THREADS, (*_with_stride(logits), *on_device))

    def _allocate_masks(self, words: int) -> tuple[Any, Any]:
        """Places for row numbers and for masks of so many words; few engines ever need them."""
        most, what, remedy = self._max_logit_rows, "a buffer for masks", "lower --max-num-seqs"
        numbers = self._allocate((most,), np.int32, what, remedy)
        return numbers, self._allocate((most, words), np.uint32, what, remedy)

    def sample(self, logits: Any, inputs: CudaInputs) -> Any:
        rows = self._check_logits(logits, inputs)
        ids, maxima = _rows_of(self._ids, rows), _rows_of(self._maxima, rows)
        threads = SEGMENTS // ROW_PARTS
        self._launch("segment_maxima", (rows, ROW_PARTS), threads, (*_with_stride(logits), maxima))
        args = (
            *(*_with_stride(logits), maxima, inputs.logit_slots, inputs.logit_rows),
            *(inputs.positions, self._sampling.settings, ids),
        )
        self._launch("sample", (rows,), SAMPLE_THREADS, args)
        return ids

    def log_probs(self, logits: Any, token_ids: Any, count: int) -> tuple[Any, Any, Any]:
        rows, count = self._check_logits(logits), min(count, self.config.vocab_size)
        _check("token ids", token_ids, np.int32, (rows,))
        if count > MAX_LOGPROBS:
            raise InvariantError(f"{count} log-probabilities of a row, but buffers for {MAX_LOGPROBS}")
        chosen = _rows_of(self._log_probs, rows)
        top_ids, top = (_rows_of(b, rows * count).reshape(rows, count) for b in (self._top_ids, self._top))
        args = (*_with_stride(logits), token_ids, np.int32(count), chosen, top_ids, top)
        self._launch("log_probs", (rows,), LOG_PROBS_THREADS, args)
        return chosen, top_ids, top

    def copy_rows(self, x: Any) -> Any:
        out = self._allocate(x.shape, x.dtype, "a copy of the logits", "free memory on the GPU")
        runtime, width = cupy.cuda.runtime, out.nbytes // len(out)  # bytes of a row
        runtime.memcpy2DAsync(
            *(out.data.ptr, width, x.data.ptr, x.strides[0], width, len(out)),
            *(runtime.memcpyDeviceToDevice, self.stream.ptr),
        )
        return out

    def concat_rows(self, parts: Sequence[Any]) -> Any:
        # By copies: CuPy's own concatenation would have to be compiled first.
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        out = self._allocate(shape, parts[0].dtype, "an array", "free memory on the GPU")
        runtime, target = cupy.cuda.runtime, out.data.ptr
        for part in parts:
            _check("a part", part, out.dtype, (None, *shape[1:]))
            runtime.memcpyAsync(
                target, part.data.ptr, part.nbytes, runtime.memcpyDeviceToDevice, self.stream.ptr
            )
            target += part.nbytes
        return out

    def check_gemm_order(self, matrices: Sequence[Any]) -> None:
        with self._times.stage("check of cuBLAS's order") as stage:
            key = self._gemm_order_key(matrices)
            wrong = _remembered_shapes(self._cache.read(GEMM_ORDER, key, "json"))
            stage.detail = "from the cache"
            if wrong is None:
                wrong = self._unordered_shapes(matrices)
                stage.detail = "measured"
                self._cache.write(GEMM_ORDER, key, "json", json.dumps(wrong).encode())
        if wrong:
            self._notice_order(wrong)
        self.notices += self._cache.notices  # nothing is read from it or written to it after this

    def _gemm_order_key(self, matrices: Sequence[Any]) -> str:
        """What the order may depend on: GPU, libraries, shapes, and how we multiply and compare."""
        parts = (
            *(self._gpu.name, self._gpu.compute_capability, self._gpu.num_sms, cuda_probe.driver_version()),
            *(cuda_probe.loaded_build("libcublas.so"), cuda_probe.loaded_build("libcublasLt.so")),
            *([m.shape for m in matrices], self._max_logit_rows, self._max_tokens),
            *(Path(__file__).read_bytes(), Path(cublas.__file__).read_bytes()),
            cuda_compile.kernel_key("linear", self.config, self._gpu),
        )
        return repr(parts)

    def _unordered_shapes(self, matrices: Sequence[Any]) -> list[str]:
        """The shapes at which cuBLAS and the ordered kernel differ in any bit, as text."""
        rows = {depth: self._some_rows(depth) for depth in {m.shape[1] for m in matrices}}
        heads = [weight is matrices[-1] for weight in matrices]
        checks = zip(matrices, heads, strict=True)
        return [shape for m, head in checks if (shape := self._unordered(m, rows[m.shape[1]], is_head=head))]

    def _notice_order(self, wrong: list[str]) -> None:
        self._ordered_gemm = self._batch_invariant
        instead = (
            "our own slower GEMM takes its place"
            if self._batch_invariant
            else "a request's numbers may depend on what runs beside it; --batch-invariant prevents that"
        )
        self.notices.append(f"cuBLAS adds in an unknown order on this GPU ({', '.join(wrong)}): {instead}")

    def _unordered(self, weight: Any, x: Any, *, is_head: bool) -> str | None:
        """The first shape at which cuBLAS and the ordered kernel differ in any bit, as text."""
        matrix = padded_rows(weight) if is_head else weight
        features, depth = matrix.shape
        buffer = self._logits if is_head else self._linear
        most = buffer.size // features
        # The last 16 rows are compared, each time behind others.
        want = self._allocate((16, features), buffer.dtype, "a check", "free memory on the GPU")
        self._ordered_gemm = True
        self._gemm(x[-16:], matrix, want)
        self._ordered_gemm = False
        # The LM head gives FP32; the others BF16, at once (linear) or by way of FP32 (linear_add).
        routes = [False] if is_head else [False, True]
        for rows, through_scratch in itertools.product(CHECKED_ROWS, routes):
            if rows > most:
                break
            got = buffer.reshape(-1)[: rows * features].reshape(rows, features)
            self._gemm(x[-rows:], matrix, got, through_scratch=through_scratch)
            n = min(rows, 16)
            if self._count_differences(got[-n:], want[-n:]):
                return f"{rows} x {weight.shape[0]} x {depth}"
        return None

    def _some_rows(self, width: int) -> Any:
        """BF16 [largest of CHECKED_ROWS, width] of both signs, from 1/8 to 2."""
        bits = np.frombuffer(np.random.default_rng(0).bytes(2 * CHECKED_ROWS[-1] * width), np.uint16)
        return self.from_numpy((bits & np.uint16(0x81FF) | np.uint16(0x3E00)).reshape(-1, width))

    def _count_differences(self, a: Any, b: Any) -> int:
        count = self._zeros(1, np.uint32)
        words = a.nbytes // 4
        args = (a, b, np.int64(words), count)
        self._launch("count_differences", (-(-words // ELEMENTWISE_THREADS),), ELEMENTWISE_THREADS, args)
        return int(count.get(stream=self.stream)[0])


class SlotSampling:
    """How the sequence in each slot chooses its tokens: its settings, and its table of adjustments.

    Tables are made when a sequence that needs one is admitted, and grow with the number and the length of
    those that run at a time: 16 bytes for each token concerned, in each table. Where there is no memory for
    one, the step fails.
    """

    def __init__(self, backend: CudaBackend, num_slots: int) -> None:
        self._backend = backend
        self.is_argmax = np.ones(num_slots, bool)  # of each slot: nothing but the greatest raw logit
        words = SETTINGS.itemsize // 4
        self.settings = backend._zeros(num_slots * words, np.int32).reshape(num_slots, words)
        self.tables: Any = None  # int32 [tables, 1 + entries, 4], see sampling.cuh
        self._table_of: dict[int, int] = {}  # by slot
        self._free: list[int] = []

    def set(self, slot: int, sampling: TokenSampling | None, prompt_token_ids: Sequence[int]) -> None:
        """See `Backend.set_sampling`."""
        if (table := self._table_of.pop(slot, None)) is not None:
            self._free.append(table)
        is_argmax = sampling is None or sampling.is_argmax
        if is_argmax and self.is_argmax[slot]:
            return
        settings = settings_of(None if is_argmax else sampling)
        if sampling is not None and sampling.params.adjusts_logits:
            settings["table"] = 1 + self._new_table(slot, sampling, prompt_token_ids)
        self._backend._uploads.send(np.frombuffer(settings.tobytes(), np.int32), self.settings[slot])
        self.is_argmax[slot] = is_argmax  # last: a step that was interrupted comes here again

    def _new_table(self, slot: int, sampling: TokenSampling, prompt_token_ids: Sequence[int]) -> int:
        entries = Adjustments(sampling, prompt_token_ids)
        size = most = len(entries.ids)
        if entries.counts_outputs:
            most_outputs = min(sampling.params.max_tokens, self._backend._max_positions)
            most = min(self._backend.config.vocab_size, size + most_outputs)
        if not self._free or self.tables.shape[1] <= most:
            self._grow(most)
        table = self._table_of[slot] = self._free.pop()
        host = np.zeros((1 + size, 4), np.int32)
        host[0, 0] = size
        host[1:, 0], host[1:, 1], host[1:, 2] = entries.ids, entries.states, entries.biases.view(np.int32)
        self._backend._uploads.send(host, self.tables[table])
        return table

    def _grow(self, entries: int) -> None:
        """Room for one table more, and for so many entries in each."""
        old, backend = self.tables, self._backend
        count, width = (0, 0) if old is None else old.shape[:2]
        new_count = count if self._free else max(1, 2 * count)
        # Graphs that read the tables are recorded anew wherever those move: so they grow by doubling.
        shape = (new_count, max(width, 1 << entries.bit_length()), 4)
        new = backend._allocate(shape, np.int32, "a table of penalties", "lower --max-num-seqs")
        new.data.memset_async(0, new.nbytes, backend.stream)
        if count:
            runtime, row = cupy.cuda.runtime, width * 16  # bytes
            runtime.memcpy2DAsync(
                *(new.data.ptr, new.strides[0], old.data.ptr, row, row, count),
                *(runtime.memcpyDeviceToDevice, backend.stream.ptr),
            )
        self._free += range(count, new_count)
        self.tables = new


def decode_bucket(rows: int) -> int:
    """How many rows a decode step of so many sequences has: few numbers, each with a graph of its own."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 32 else 16
    return -(-rows // step) * step


def _grid_over(items: int) -> tuple[int]:
    """Blocks with a thread for each item."""
    return (-(-items // ELEMENTWISE_THREADS),)


def _pinned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Pinned host memory. CuPy's pool keeps freed pieces by their sizes, so there are few of those."""
    size = int(np.prod(shape, dtype=np.int64))
    nbytes = size * np.dtype(dtype).itemsize
    memory = cupy.cuda.alloc_pinned_memory(1 << max(12, (nbytes - 1).bit_length()))
    return np.frombuffer(memory, dtype, size).reshape(shape)


def _start_download(array: Any, host: np.ndarray, stream: Any) -> None:
    """Starts a copy to ``host`` of an array [n, ...] whose rows may lie apart."""
    runtime = cupy.cuda.runtime
    if array.flags.c_contiguous:
        if array.nbytes:
            source, target = array.data.ptr, host.ctypes.data
            runtime.memcpyAsync(target, source, array.nbytes, runtime.memcpyDeviceToHost, stream.ptr)
        return
    width = array.nbytes // len(array)  # bytes of a row
    runtime.memcpy2DAsync(
        *(host.ctypes.data, width, array.data.ptr, array.strides[0], width, len(array)),
        *(runtime.memcpyDeviceToHost, stream.ptr),
    )


def _with_stride(logits: Any) -> tuple[Any, np.int32]:
    """The logits and how many values lie between their rows, as kernels take them."""
    return logits, np.int32(logits.strides[0] // 4)


def gemm_segments(depth: int) -> int:
    """Into how many equal segments, multiples of 16, the numerics contract cuts K, a multiple of 16.

    Few for the sizes that models have; a K such as 2096 (16 times a prime) gives slow, tiny ones.
    """
    least = -(-depth // SEGMENT_K)
    return next(s for s in range(least, depth + 1) if depth % s == 0 and depth // s % 16 == 0)


def _remembered_shapes(entry: bytes | None) -> list[str] | None:
    """What an earlier check_gemm_order wrote; None if it is not there, or makes no sense."""
    try:
        shapes = json.loads(entry or b"")
    except ValueError:
        return None
    return shapes if isinstance(shapes, list) and all(isinstance(s, str) for s in shapes) else None


def _rows_of(buffer: Any, rows: int) -> Any:
    """The first ``rows`` rows of a buffer that may be too small for them."""
    if rows > len(buffer):
        raise InvariantError(f"{rows} rows, but a buffer for {len(buffer)}")
    return buffer[:rows]


def padded_rows(weight: Any) -> Any:
    """A weight from ``upload`` with the zero rows behind it that make their number a multiple of 8.

    cuBLAS wants it of the LM head: with an odd vocabulary it has neither fast kernels nor the one order.
    """
    rows, depth = weight.shape
    if rows % 8 == 0:
        return weight
    whole = weight.base
    if whole is None or whole.shape != (_padded(rows), depth) or whole.data.ptr != weight.data.ptr:
        raise InvariantError("this weight did not come from upload")
    return whole


def _padded(rows: int) -> int:
    return -(-rows // 8) * 8


def _check_config(config: ModelConfig) -> None:
    """Raises DeviceError for a model the kernels aren't made for."""
    ratio = config.num_heads // config.num_kv_heads
    if config.vocab_size > MAX_VOCAB:
        raise DeviceError(
            f"the GPU's kernels aren't made for a vocabulary of {config.vocab_size}, more than {MAX_VOCAB}; "
            "run with --device cpu"
        )
    found = [
        f"{what} {size} is not a multiple of 16"
        for what, size in (
            ("hidden_size", config.hidden_size),
            ("intermediate_size", config.intermediate_size),
            ("num_attention_heads x head_dim", config.num_heads * config.head_dim),
        )
        if size % 16
    ]
    if config.head_dim not in (64, 128):
        found.append(f"head_dim {config.head_dim} is neither 64 nor 128")
    if ratio > QUERY_ROWS:
        found.append(f"{ratio} query heads share a KV head, more than {QUERY_ROWS}")
    if found:
        raise DeviceError(f"the GPU's kernels aren't made for this model: {found[0]}; run with --device cpu")


def _check(what: str, array: Any, dtype: Any, shape: tuple[int | None, ...]) -> None:
    """A kernel takes any pointer: see that it gets the array it means. None in ``shape`` is any size."""
    fits = len(array.shape) == len(shape) and all(
        n in (None, m) for n, m in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype != dtype or not array.flags.c_contiguous:
        raise InvariantError(
            f"{what} is {array.dtype} {array.shape}{'' if array.flags.c_contiguous else ', not contiguous'}, "
            f"but must be {dtype} {shape}"
        )


def _check_gemm(x: Any, weight: Any) -> tuple[int, int]:
    """(T, N) of a product of BF16 x [T, K] and weight [N, K]."""
    _check("x", x, BF16, (None, None))
    _check("a weight", weight, BF16, (None, x.shape[1]))
    return x.shape[0], weight.shape[0]


def _mib(nbytes: int) -> str:
    return f"{-(-nbytes >> 20):,}"
