"""The Backend protocol: the operations a forward pass is made of, their shapes and dtypes.

``llama.py`` is written once over the coarse operations (``norm_qkv`` ... ``logits``). Each is a seam: its
default composes the small operations, and a backend overrides it only where fusing pays. Arrays are
the backend's own kind; nothing above looks inside them. Knows no sequence, no pool and no text.

Shapes use: T tokens of S sequences in this step, L rows whose logits are wanted, H heads, Hkv KV heads,
D head_dim, I intermediate_size. "BF16" means rounded at that point of the numerics contract
(docs/architecture.md), whatever dtype the backend holds the values in.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from samir_vllm.config import PAGE_SIZE, EngineConfig, ModelConfig
from samir_vllm.errors import DeviceError
from samir_vllm.sampling import TokenMasks, TokenSampling
from samir_vllm.timing import StartupTimes

if TYPE_CHECKING:
    from samir_vllm.backends.cuda_context import EarlyContext

KV_SPLIT = 256
"""KV tokens that one partial softmax covers, at absolute positions: the split of the numerics contract."""

LOGPROB_ROWS = 64
"""Rows of a prompt that meet the LM head at once where their log-probabilities are wanted: the logits of a
whole prompt would be tokens x vocabulary."""

CHOSEN = -1
"""In place of a token id of a decode row: what the device itself has chosen for this sequence, which the host
may not know yet. Where that ended the sequence the row is padding."""

T = TypeVar("T")

Array = Any
"""An array of the backend's own kind (NumPy or CuPy)."""


class BatchArrays(Protocol):
    """The host arrays of one step, all int32; see ``samir_vllm.batch.Batch``."""

    @property
    def token_ids(self) -> np.ndarray: ...  # [T], CHOSEN in some of the first num_decodes
    @property
    def positions(self) -> np.ndarray: ...  # [T]
    @property
    def cu_seqlens_q(self) -> np.ndarray: ...  # [S + 1]
    @property
    def seq_lens(self) -> np.ndarray: ...  # [S]
    @property
    def slots(self) -> np.ndarray: ...  # [S]
    @property
    def logit_rows(self) -> np.ndarray: ...  # [L]
    @property
    def logit_slots(self) -> np.ndarray: ...  # [L]
    @property
    def num_outputs(self) -> np.ndarray: ...  # [L]
    @property
    def num_decodes(self) -> int: ...


class Backend(ABC):
    """One device's arrays and operations for one model."""

    name: str
    """``numpy`` or ``cuda``."""

    kv_itemsize: int
    """Bytes of one K or V value in a page."""

    steps_ahead = 0
    """How many steps may be launched before the results of an earlier one are read: operations may return
    before the device has done them."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.notices: list[str] = []  # lines for the user: what runs otherwise than was asked

    def active(self) -> AbstractContextManager[Any]:
        """Inside it this backend's device is the thread's; every call below is made there."""
        return nullcontext()

    # Memory

    @abstractmethod
    def upload(self, tensors: Sequence[np.ndarray]) -> Array:
        """Move BF16 tensors, [rows_i, cols] or all [n], to the device, stacked along axis 0."""

    def uploading(self) -> AbstractContextManager[Any]:
        """Inside it ``upload`` may return before the data is there; at its end all of it is.

        The tensors must stay as they are until then.

        Raises:
            DeviceError: at its end, or from an ``upload``: a copy failed.
        """
        return nullcontext()

    def check_gemm_order(self, matrices: Sequence[Array]) -> None:  # noqa: B027  (most have nothing to see)
        """See that a GEMM row's bits don't depend on the other rows; a notice where they do.

        Args:
            matrices: one weight [N, K] of each shape that the model multiplies by, the LM head last.
        """

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory free for the KV cache now."""

    @abstractmethod
    def allocate_kv_cache(self, num_pages: int, max_num_seqs: int, max_pages_per_seq: int) -> None:
        """Make the pages, and block tables int32 [max_num_seqs, num_layers, max_pages_per_seq] of -1.

        Pages are [num_pages, 2 (K, V), Hkv, page_size, D]: what one head reads of a page is contiguous.
        """

    @abstractmethod
    def set_block_table(self, slot: int, page_ids: np.ndarray) -> None:
        """Set row ``slot`` of the block tables to int32 [num_layers, n], -1 behind them."""

    @abstractmethod
    def set_sampling(
        self, slot: int, sampling: TokenSampling | None, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """How the sequence now in ``slot`` chooses its tokens; None: the greatest logit.

        The prompt's ids count for ``repetition_penalty``.
        """

    @abstractmethod
    def set_stop_ids(self, slot: int, stop_ids: Collection[int]) -> None:
        """The tokens that end the sequence now in ``slot``, so that the device sees it before the host does.

        A backend may know a few only: one step later the host sees any.
        """

    @abstractmethod
    def stage(self, batch: BatchArrays) -> Any:
        """Bring a step's arrays to the device; the result is the ``inputs`` of the operations below."""

    # Decoding, step after step, with what the device knows. A row of padding belongs to nobody: it stores no
    # K and V, attends to nothing, and what is chosen for it is dropped.

    @abstractmethod
    def set_decode_rows(self, slots: np.ndarray, positions: np.ndarray, prompt_lens: np.ndarray) -> None:
        """The sequences that decode from the next step on, a row each; ``begin_decode`` moves all on by one.

        Args:
            slots: int32 [n], n >= 1.
            positions: int32 [n], of the next input in the sequence: as many of its K and V are there.
            prompt_lens: int32 [n], tokens of their prompts.
        """

    def decode_shape(self, max_seq_len: int) -> Hashable:
        """What of the next decode step is fixed: steps of equal shape may be replayed from one record.

        Args:
            max_seq_len: the longest sequence's KV length, the next step's token included.
        """
        return None

    @abstractmethod
    def begin_decode(self, shape: Any) -> Any:
        """The ``inputs`` of a decode step of this shape: rows with the tokens kept for them, then padding."""

    @abstractmethod
    def keep_tokens(self, token_ids: Array, inputs: Any) -> None:
        """Remember the tokens just chosen, int32 [L], for the next step; one that ends a sequence pads it.

        The last two of each sequence are kept apart, so that a step may run twice.
        """

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Something that does what ``run`` does, faster: it may call it now, or at each call, or both.

        ``run`` is operations of this backend only, on arrays that stay where they are.
        """
        return run

    @abstractmethod
    def read_later(self, *arrays: Array) -> Callable[[], list[np.ndarray]]:
        """Start copies of int32 and FP32 arrays to the host; what is returned waits for them.

        Later operations may write to the arrays at once.
        """

    # Small operations

    @abstractmethod
    def embedding(self, table: Array, inputs: Any) -> Array:
        """Rows of ``table`` [vocab_size, hidden_size] for the step's token ids -> BF16 [T, hidden_size]."""

    @abstractmethod
    def rmsnorm(self, x: Array, weight: Array) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight, all in FP32 -> BF16, the shape of ``x``.

        Source: Zhang and Sennrich, 2019.
        """

    @abstractmethod
    def linear(self, x: Array, weight: Array) -> Array:
        """x [T, K] times weight [N, K] transposed -> BF16 [T, N]."""

    @abstractmethod
    def linear_add(self, x: Array, weight: Array, residual: Array) -> Array:
        """residual + x times weight transposed, summed in FP32 and rounded once -> BF16 [T, N].

        The result may take the place of ``residual``.
        """

    @abstractmethod
    def rope_kv_write(self, qkv: Array, layer_idx: int, inputs: Any) -> Array:
        """Rotate q and k (split halves, FP32), store k and v in their pages; page id -1 stores nothing.

        Args:
            qkv: BF16 [T, (H + 2 Hkv) * D].

        Returns:
            q after RoPE, BF16 [T, H, D] (Su et al., 2021).
        """

    @abstractmethod
    def paged_attention_decode(self, q: Array, layer_idx: int, inputs: Any) -> Array:
        """One query token of each sequence over its own pages; q [S, H, D] -> BF16 [S, H * D]."""

    @abstractmethod
    def paged_attention_prefill(self, q: Array, layer_idx: int, inputs: Any) -> Array:
        """Causal attention of packed chunks, each over its own pages (prefix and chunk).

        Softmax is FP32 and online, in splits of 256 KV tokens at absolute positions, merged in order.

        Args:
            q: BF16 [T - num_decodes, H, D].

        Returns:
            BF16 [T - num_decodes, H * D].
        """

    @abstractmethod
    def silu_mul(self, gate_up: Array) -> Array:
        """SiLU(gate) * up of BF16 [T, 2 I] (gate first) -> BF16 [T, I] (Shazeer, 2020)."""

    @abstractmethod
    def take_rows(self, x: Array, rows: Array) -> Array:
        """Rows int32 [L] of ``x`` [T, n] -> [L, n]."""

    @abstractmethod
    def lm_head(self, x: Array, weight: Array) -> Array:
        """x [L, hidden_size] times weight [vocab_size, hidden_size] transposed -> FP32 [L, vocab_size]."""

    @abstractmethod
    def argmax(self, logits: Array) -> Array:
        """Greedy ids int32 [L] of FP32 [L, vocab_size]; lowest id on a tie, -1 for a row with NaN."""

    @abstractmethod
    def adjust_logits(self, logits: Array, inputs: Any) -> None:
        """Biases, penalties and ``min_tokens`` of each row's sequence, in place; raw values are remembered.

        In FP32, for every token that is concerned: + bias; where it is in the prompt or the output:
        / repetition penalty if above 0, else times it; - count in the output * frequency penalty; - presence
        penalty where that count isn't 0; then -inf for what would end an answer of fewer than ``min_tokens``
        tokens. A sequence's last token is counted here, once, however often its step is run.
        """

    @abstractmethod
    def restore_logits(self, logits: Array, inputs: Any) -> None:
        """Undo the last ``adjust_logits`` of these rows."""

    @abstractmethod
    def mask_logits(self, logits: Array, rows: np.ndarray, masks: np.ndarray) -> None:
        """Make the logits of all tokens that may not come -inf, in some rows; never while ``record`` records.

        It comes between ``adjust_logits`` and the choice, and isn't undone. A NaN stays, so that the choice
        still tells of it.

        Args:
            logits: FP32 [L, vocab_size], changed in place, in these rows only.
            rows: int32 [M], M >= 1, on the host: different rows of ``logits``.
            masks: uint32 [M, ceil(vocab_size / 32)], on the host: bit i % 32 of word i // 32 is 1 where token
                i may come; bits behind the vocabulary mean nothing. Both arrays may change afterwards.
        """

    @abstractmethod
    def sample(self, logits: Array, inputs: Any) -> Array:
        """A token for each row of (adjusted) FP32 logits [L, vocab_size] -> int32 [L], -1 for a row with NaN.

        Each row by its sequence's temperature, ``top_k``, ``min_p``, ``top_p`` and seed; see
        ``reference_sampler``, which every backend equals on equal logits.
        """

    @abstractmethod
    def log_probs(self, logits: Array, token_ids: Array, count: int) -> tuple[Array, Array, Array]:
        """Log-softmax, in FP32, of a token of each row and of the ``count`` likeliest.

        Args:
            logits: FP32 [L, vocab_size].
            token_ids: int32 [L]; a negative one gives NaN.
            count: 0 to ``MAX_LOGPROBS``; beyond the vocabulary it is the vocabulary.

        Returns:
            FP32 [L]; int32 [L, count], best first, lower ids first on a tie; FP32 [L, count]. Never above 0.
        """

    @abstractmethod
    def copy_rows(self, x: Array) -> Array:
        """A copy of FP32 ``x`` [n, m] in memory of its own, which may be made anew at each call."""

    @abstractmethod
    def concat_rows(self, parts: Sequence[Array]) -> Array:
        """[n_i, m] arrays one below the other."""

    @abstractmethod
    def from_numpy(self, x: np.ndarray) -> Array:
        """An array of this backend with the values of int32, FP32 or BF16 ``x``."""

    @abstractmethod
    def to_numpy(self, x: Array) -> np.ndarray:
        """A host copy: int32 as it is, everything else FP32."""

    # Coarse operations: what llama.py calls

    def norm_qkv(self, x: Array, norm: Array, qkv_proj: Array) -> Array:
        """RMSNorm, then q, k and v in one GEMM -> BF16 [T, (H + 2 Hkv) * D]."""
        return self.linear(self.rmsnorm(x, norm), qkv_proj)

    def attention(self, q: Array, layer_idx: int, inputs: Any) -> Array:
        """Attention of the whole step over the pages; q [T, H, D] -> BF16 [T, H * D]."""
        decodes = inputs.num_decodes
        if decodes == 0:
            return self.paged_attention_prefill(q, layer_idx, inputs)
        if decodes == q.shape[0]:
            return self.paged_attention_decode(q, layer_idx, inputs)
        return self.concat_rows(
            [
                self.paged_attention_decode(q[:decodes], layer_idx, inputs),
                self.paged_attention_prefill(q[decodes:], layer_idx, inputs),
            ]
        )

    def norm_mlp(self, x: Array, norm: Array, gate_up_proj: Array) -> Array:
        """RMSNorm, gate and up in one GEMM, SiLU(gate) * up -> BF16 [T, I]."""
        return self.silu_mul(self.linear(self.rmsnorm(x, norm), gate_up_proj))

    def logits(self, x: Array, norm: Array, head: Array, rows: Array) -> Array:
        """Final norm and LM head of the rows int32 [L] of x only -> FP32 [L, vocab_size]."""
        return self.lm_head(self.rmsnorm(self.take_rows(x, rows), norm), head)

    def choose_tokens(self, logits: Array, inputs: Any, masks: TokenMasks | None = None) -> Array:
        """The next token of each row -> int32 [L], -1 for a row with NaN. May leave the logits changed."""
        if not inputs.is_argmax:
            self.adjust_logits(logits, inputs)
        if masks is not None:
            self.mask_logits(logits, masks.rows, masks.allowed)
        return self.argmax(logits) if inputs.is_argmax else self.sample(logits, inputs)


def rope_cos_sin(inv_freq: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """FP32 tables [n, D / 2] of cos and sin for int32 ``positions`` [n].

    The angle is an FP32 product, as in the reference implementation: at position 9,000 its rounding is
    visible, and every backend must share it.
    """
    angles = positions.astype(np.float32)[:, None] * inv_freq[None, :]
    return np.cos(angles), np.sin(angles)


def wants_gpu(engine: EngineConfig) -> bool:
    """Whether a GPU is asked for, or would be taken. Unrounded arithmetic is NumPy's alone."""
    return engine.device.startswith("cuda") or (engine.device == "auto" and engine.dtype == "bfloat16")


def begin_context(engine: EngineConfig) -> EarlyContext | None:
    """Has the driver start on the GPU that may be used, for ``select_backend`` to find it ready."""
    if not wants_gpu(engine):
        return None
    from samir_vllm.backends.cuda_context import EarlyContext

    return EarlyContext(gpu_index(engine))


def gpu_index(engine: EngineConfig) -> int:
    """The number of the GPU that would be taken; ``auto`` and ``cuda`` mean the first."""
    return int(engine.device.partition(":")[2] or 0)


def select_backend(
    engine: EngineConfig,
    model: ModelConfig,
    *,
    context: EarlyContext | None = None,
    times: StartupTimes | None = None,
) -> Backend:
    """The backend that ``engine.device`` names; ``auto`` is the first GPU if it can be used, else NumPy.

    Args:
        engine: the options.
        model: the model.
        context: from ``begin_context``, if it was called.
        times: where the stages of the start are booked.

    Raises:
        DeviceError: the device can't be used; never for ``auto``, where NumPy comes with a notice.
    """
    times = times or StartupTimes()
    if not wants_gpu(engine):
        return _numpy_backend(engine, model)
    try:
        return _cuda_backend(engine, model, context, times)
    except DeviceError as exc:
        if engine.device != "auto":
            raise
        reason = str(exc)
    # Here the exception is gone, and with it what it kept alive on the GPU.
    if context is not None:
        context.release()
    return fall_back(engine, model, reason)


def fall_back(engine: EngineConfig, model: ModelConfig, reason: str) -> Backend:
    """The NumPy backend in place of a GPU that can't be used, with a notice that says why."""
    from samir_vllm.backends.cuda_probe import free_unused_memory

    free_unused_memory()
    backend = _numpy_backend(engine, model)
    why = re.sub(r"[,;] (or )?run with --device cpu$", "", reason)
    backend.notices.append(f"running on the CPU: {why}")
    return backend


def _numpy_backend(engine: EngineConfig, model: ModelConfig) -> Backend:
    from samir_vllm.backends.numpy_backend import NumpyBackend

    return NumpyBackend(model, round_bf16=engine.dtype == "bfloat16", batch_invariant=engine.batch_invariant)


def _cuda_backend(
    engine: EngineConfig, model: ModelConfig, context: EarlyContext | None, times: StartupTimes
) -> Backend:
    from samir_vllm.backends.cuda_probe import driver_version, has_room_for_cupys_cache, require_gpu

    with times.stage("CuPy, driver, context") as stage:
        driver_version()  # where there is none, nothing is made in the user's home for CuPy
        if context is not None and not has_room_for_cupys_cache():
            context.wait()  # the driver reads the environment, in which the import then changes something
        gpu = require_gpu(gpu_index(engine))  # where there is none, CuPy isn't imported
        from samir_vllm.backends.cuda_backend import CudaBackend

        stage.detail = gpu.name
        if context is not None:
            context.wait()
            times.add("driver and context", context.seconds or 0.0, background=True)

    positions = engine.context_len(model)
    if engine.kv_cache_mib != "auto":  # a sequence can't be longer than the pool
        pages = engine.kv_cache_mib * 2**20 // model.page_bytes(itemsize=CudaBackend.kv_itemsize)
        positions = min(positions, pages // model.num_layers * PAGE_SIZE)
    return CudaBackend(
        model,
        device=gpu,
        max_tokens=engine.max_batched_tokens + engine.max_num_seqs,  # a step's prefill and its decodes
        max_num_seqs=engine.max_num_seqs,
        max_positions=max(1, positions),
        batch_invariant=engine.batch_invariant,
        times=times,
    )
