"""The NumPy backend: the oracle of every kernel, and the engine where there is no GPU.

Values live in FP32 arrays; at each point of the numerics contract they are rounded to BF16 (nearest
even) and held in FP32 again, so BLAS can work on them. Told not to round, it is a plain FP32 forward
pass. K and V lie in real pages behind real block tables. Knows no sequence and no scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from samir_vllm.backends import CHOSEN, KV_SPLIT, Backend, BatchArrays, rope_cos_sin
from samir_vllm.backends.host_memory import host_memory
from samir_vllm.backends.reference_sampler import Adjustments, sample_row, settings_of
from samir_vllm.config import NAN_TOKEN, PAGE_SIZE, ModelConfig
from samir_vllm.sampling import TokenSampling

BF16 = np.dtype(ml_dtypes.bfloat16)
_PLAIN = settings_of(None)


@dataclass(frozen=True, slots=True)
class NumpyInputs:
    """A step's arrays as the operations want them."""

    token_ids: np.ndarray  # int32 [T]
    cos: np.ndarray  # FP32 [T, 1, D / 2]
    sin: np.ndarray  # FP32 [T, 1, D / 2]
    page_ids: np.ndarray  # int32 [num_layers, T]: the page each token's K and V go to
    offsets: np.ndarray  # int32 [T]: the place in that page
    cu_seqlens_q: list[int]
    seq_lens: list[int]
    slots: list[int]
    logit_rows: np.ndarray  # int32 [L]
    logit_slots: list[int]
    num_outputs: list[int]
    last_tokens: list[int]  # of the sequences whose logits are wanted
    next_positions: list[int]  # of the tokens to choose
    next_places: list[int]  # the same in the sequences' KV
    num_decodes: int
    is_argmax: bool  # nobody wants but the greatest of the raw logits


class NumpyBackend(Backend):
    """Runs on any machine; see the module's opening."""

    name = "numpy"

    def __init__(
        self, config: ModelConfig, *, round_bf16: bool = True, batch_invariant: bool = False
    ) -> None:
        """A backend without weights or pages yet.

        Args:
            config: the model.
            round_bf16: round at the contract's points; False keeps everything in FP32 (pages too).
            batch_invariant: multiply one row at a time. Slow, but a row's bits then don't depend on the
                other rows (BLAS chooses its summation order by the number of rows).
        """
        super().__init__(config)
        self._round_bf16 = round_bf16
        self._batch_invariant = batch_invariant
        self._kv_dtype = BF16 if round_bf16 else np.dtype(np.float32)
        self.kv_itemsize = self._kv_dtype.itemsize
        self._inv_freq = config.inv_freq()
        self._eps = np.float32(config.rms_norm_eps)
        self._scale = np.float32(config.head_dim**-0.5)
        self._settings: dict[int, np.ndarray] = {}  # by slot; plain argmax where there is none
        self._adjustments: dict[int, Adjustments] = {}

    def _round(self, x: np.ndarray) -> np.ndarray:
        return x.astype(BF16).astype(np.float32) if self._round_bf16 else x

    def _matmul(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """x [T, K] times weight [N, K] transposed, FP32 [T, N], not rounded."""
        if self._batch_invariant and len(x) > 1:
            out = np.empty((len(x), len(weight)), np.float32)
            for row, y in zip(x, out, strict=True):
                np.dot(weight, row, out=y)
            return out
        if len(x) == 1:  # the same GEMV as above: alone and row by row give the same bits
            return np.dot(weight, x[0])[None]
        return x @ weight.T

    # Memory

    def upload(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        rows = sum(len(t) for t in tensors)
        out = np.empty((rows, *tensors[0].shape[1:]), np.float32)
        start = 0
        for tensor in tensors:
            # BF16 is the upper half of an FP32: a shift converts it exactly, faster than a cast.
            bits = out[start : start + len(tensor)].view(np.uint32)
            np.left_shift(tensor.view(np.uint16), 16, out=bits, dtype=np.uint32)
            start += len(tensor)
        return out

    def free_bytes(self) -> int:
        memory = host_memory()
        # Half, because the weights come later; and a guess where the system doesn't tell.
        return 2**30 if memory is None else memory[0] // 2

    def allocate_kv_cache(self, num_pages: int, max_num_seqs: int, max_pages_per_seq: int) -> None:
        cfg = self.config
        self.kv_cache = np.zeros((num_pages, 2, cfg.num_kv_heads, PAGE_SIZE, cfg.head_dim), self._kv_dtype)
        self._nobody = max_num_seqs  # the slot of padding: it has no pages
        self.block_tables = np.full((max_num_seqs + 1, cfg.num_layers, max_pages_per_seq), -1, np.int32)
        self._kept = np.full((max_num_seqs + 1, 2), -1, np.int32)  # tokens for even and odd places
        self._stop_ids: dict[int, Collection[int]] = {}  # by slot

    def set_block_table(self, slot: int, page_ids: np.ndarray) -> None:
        self.block_tables[slot] = -1
        self.block_tables[slot, :, : page_ids.shape[1]] = page_ids

    def set_sampling(
        self, slot: int, sampling: TokenSampling | None, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._settings.pop(slot, None)
        self._adjustments.pop(slot, None)
        if sampling is None or sampling.is_argmax:
            return
        self._settings[slot] = settings_of(sampling)
        if sampling.params.adjusts_logits:
            self._adjustments[slot] = Adjustments(sampling, prompt_token_ids)

    def set_stop_ids(self, slot: int, stop_ids: Collection[int]) -> None:
        self._stop_ids[slot] = stop_ids

    def stage(self, batch: BatchArrays) -> NumpyInputs:
        return self._inputs(
            batch.token_ids.copy(),
            batch.positions,
            batch.cu_seqlens_q,
            batch.seq_lens.copy(),
            batch.slots.copy(),
            batch.logit_rows,
            batch.logit_slots.copy(),
            batch.num_outputs,
            batch.num_decodes,
        )

    def _inputs(
        self,
        token_ids: np.ndarray,
        positions: np.ndarray,
        cu_seqlens_q: np.ndarray,
        seq_lens: np.ndarray,
        slots: np.ndarray,
        logit_rows: np.ndarray,
        logit_slots: np.ndarray,
        num_outputs: np.ndarray,
        num_decodes: int,
    ) -> NumpyInputs:
        """From arrays of its own; rows of decode whose token is CHOSEN get it, or become padding."""
        lens_q = np.diff(cu_seqlens_q)
        # Where a token lies in its sequence's KV; `positions` only turn the rotation (they may jump).
        kv_index = np.arange(len(token_ids), dtype=np.int32) + np.repeat(seq_lens - cu_seqlens_q[1:], lens_q)
        chosen = np.flatnonzero(token_ids == CHOSEN)
        token_ids[chosen] = self._kept[slots[chosen], kv_index[chosen] % 2]
        ended = np.flatnonzero(token_ids < 0)
        self._kept[slots[ended], (kv_index[ended] + 1) % 2] = CHOSEN  # they stay ended
        token_ids[ended] = seq_lens[ended] = 0
        slots[ended] = logit_slots[ended] = self._nobody
        owner = np.repeat(slots, lens_q)
        cos, sin = rope_cos_sin(self._inv_freq, positions)
        return NumpyInputs(
            token_ids=token_ids,
            cos=cos[:, None, :],
            sin=sin[:, None, :],
            page_ids=self.block_tables[owner, :, kv_index // PAGE_SIZE].T,
            offsets=kv_index % PAGE_SIZE,
            cu_seqlens_q=cu_seqlens_q.tolist(),
            seq_lens=seq_lens.tolist(),
            slots=slots.tolist(),
            logit_rows=logit_rows,
            logit_slots=logit_slots.tolist(),
            num_outputs=num_outputs.tolist(),
            last_tokens=token_ids[logit_rows].tolist(),
            next_positions=(positions[logit_rows] + 1).tolist(),
            next_places=(kv_index[logit_rows] + 1).tolist(),
            num_decodes=num_decodes,
            is_argmax=self._settings.keys().isdisjoint(logit_slots.tolist()),
        )

    def set_decode_rows(self, slots: np.ndarray, positions: np.ndarray, prompt_lens: np.ndarray) -> None:
        self._decode_slots, self._decode_positions = slots, positions.copy()
        self._decode_prompts = prompt_lens

    def begin_decode(self, shape: Any) -> NumpyInputs:
        positions = self._decode_positions.copy()
        rows = np.arange(len(positions), dtype=np.int32)
        self._decode_positions += 1
        return self._inputs(
            np.full(len(rows), CHOSEN, np.int32),
            positions,
            np.arange(len(rows) + 1, dtype=np.int32),
            positions + 1,
            self._decode_slots.copy(),
            rows,
            self._decode_slots.copy(),
            positions + 1 - self._decode_prompts,
            len(rows),
        )

    def keep_tokens(self, token_ids: np.ndarray, inputs: NumpyInputs) -> None:
        rows = zip(token_ids.tolist(), inputs.logit_slots, inputs.next_places, strict=True)
        for token, slot, place in rows:
            if slot != self._nobody:
                is_last = token in self._stop_ids.get(slot, ())
                self._kept[slot, place % 2] = CHOSEN if is_last else token

    def read_later(self, *arrays: np.ndarray) -> Callable[[], list[np.ndarray]]:
        hosts = [self.to_numpy(array) for array in arrays]  # an operation never writes to an older result
        return lambda: hosts

    # Small operations

    def embedding(self, table: np.ndarray, inputs: NumpyInputs) -> np.ndarray:
        return table[inputs.token_ids]

    def rmsnorm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        mean_square = np.einsum("ij,ij->i", x, x) * np.float32(1 / x.shape[-1])
        y = x * (np.float32(1) / np.sqrt(mean_square + self._eps))[:, None]
        y *= weight
        return self._round(y)

    def linear(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return self._round(self._matmul(x, weight))

    def linear_add(self, x: np.ndarray, weight: np.ndarray, residual: np.ndarray) -> np.ndarray:
        y = self._matmul(x, weight)
        y += residual
        return self._round(y)

    def rope_kv_write(self, qkv: np.ndarray, layer_idx: int, inputs: NumpyInputs) -> np.ndarray:
        cfg = self.config
        heads = qkv.reshape(len(qkv), cfg.num_heads + 2 * cfg.num_kv_heads, cfg.head_dim)
        qk = heads[:, : cfg.num_heads + cfg.num_kv_heads]  # [T, H + Hkv, D]
        half = cfg.head_dim // 2
        first, second = qk[..., :half], qk[..., half:]
        rotated = np.empty_like(qk)
        np.subtract(first * inputs.cos, second * inputs.sin, out=rotated[..., :half])
        np.add(second * inputs.cos, first * inputs.sin, out=rotated[..., half:])
        rotated = self._round(rotated)
        pages, offsets = inputs.page_ids[layer_idx], inputs.offsets
        k, v = rotated[:, cfg.num_heads :], heads[:, cfg.num_heads + cfg.num_kv_heads :]
        if (pages < 0).any():  # no page, nothing to store
            stored = pages >= 0
            pages, offsets, k, v = pages[stored], offsets[stored], k[stored], v[stored]
        self.kv_cache[pages, 0, :, offsets] = k
        self.kv_cache[pages, 1, :, offsets] = v
        return rotated[:, : cfg.num_heads]

    def paged_attention_decode(self, q: np.ndarray, layer_idx: int, inputs: NumpyInputs) -> np.ndarray:
        return self._paged_attention(q, layer_idx, inputs, range(inputs.num_decodes))

    def paged_attention_prefill(self, q: np.ndarray, layer_idx: int, inputs: NumpyInputs) -> np.ndarray:
        return self._paged_attention(q, layer_idx, inputs, range(inputs.num_decodes, len(inputs.seq_lens)))

    def _paged_attention(
        self, q: np.ndarray, layer_idx: int, inputs: NumpyInputs, sequences: range
    ) -> np.ndarray:
        out = np.empty_like(q)  # [rows, H, D]
        first = inputs.cu_seqlens_q[sequences.start]
        for i in sequences:
            rows = slice(inputs.cu_seqlens_q[i] - first, inputs.cu_seqlens_q[i + 1] - first)
            table = self.block_tables[inputs.slots[i], layer_idx]
            seq_len = inputs.seq_lens[i]
            n = rows.stop - rows.start
            if seq_len == 0:  # padding
                out[rows] = 0
                continue
            if n == 1 or self._batch_invariant:
                for j in range(n):
                    out[rows.start + j] = self._attend_one(q[rows.start + j], table, seq_len - n + j + 1)
            else:
                out[rows] = self._attend(q[rows], table, seq_len)
        return self._round(out.reshape(len(q), -1))

    def _attend_one(self, q: np.ndarray, table: np.ndarray, seq_len: int) -> np.ndarray:
        """One query q [H, D], the last of ``seq_len`` tokens; the heads of one KV head lie together."""
        grouped = (q * self._scale).reshape(self.config.num_kv_heads, -1, q.shape[-1])  # [Hkv, G, D]
        parts = [self._softmax_part(grouped, k, v) for _, k, v in self._kv_splits(table, seq_len)]
        peak, total, acc = parts[0]
        for part_peak, part_total, part_acc in parts[1:]:
            new_peak = np.maximum(peak, part_peak)
            fade, part_fade = np.exp(peak - new_peak), np.exp(part_peak - new_peak)
            total = total * fade + part_total * part_fade
            acc = acc * fade + part_acc * part_fade
            peak = new_peak
        return (acc / total).reshape(q.shape)

    @staticmethod
    def _softmax_part(
        q: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Greatest score, sum of exp(score - greatest) [Hkv, G, 1] and their product with v [Hkv, G, D]."""
        p = q @ k.swapaxes(1, 2)  # [Hkv, G, m]
        peak = p.max(axis=-1, keepdims=True)
        p -= peak
        np.exp(p, out=p)
        return peak, p.sum(axis=-1, keepdims=True), p @ v

    def _attend(self, q: np.ndarray, table: np.ndarray, seq_len: int) -> np.ndarray:
        """One sequence's queries q [n, H, D], its last n tokens, over its ``seq_len`` KV tokens."""
        n, num_heads, head_dim = q.shape
        kv_heads = self.config.num_kv_heads
        # Query heads of one KV head lie together: [Hkv, n, G, D].
        q = (q * self._scale).reshape(n, kv_heads, -1, head_dim).swapaxes(0, 1)
        start = seq_len - n  # KV index of the first query
        acc = np.zeros(q.shape, np.float32)
        peak = np.full((*q.shape[:3], 1), -np.inf, np.float32)
        total = np.zeros_like(peak)
        for lo, k, v in self._kv_splits(table, seq_len):
            seen = max(0, lo - start)  # queries before this split see none of it
            m = k.shape[1]
            scores = (q[:, seen:].reshape(kv_heads, -1, head_dim) @ k.swapaxes(1, 2)).reshape(
                kv_heads, n - seen, -1, m
            )
            if lo + m - 1 > start + seen:
                hidden = np.arange(lo, lo + m) > np.arange(start + seen, seq_len)[:, None]  # [n - seen, m]
                np.copyto(scores, -np.inf, where=hidden[:, None, :])
            new_peak = np.maximum(peak[:, seen:], scores.max(axis=-1, keepdims=True))
            scores -= new_peak
            np.exp(scores, out=scores)
            fade = np.exp(peak[:, seen:] - new_peak)
            peak[:, seen:] = new_peak
            total[:, seen:] *= fade
            total[:, seen:] += scores.sum(axis=-1, keepdims=True)
            acc[:, seen:] *= fade
            acc[:, seen:] += (scores.reshape(kv_heads, -1, m) @ v).reshape(kv_heads, n - seen, -1, head_dim)
        return (acc / total).swapaxes(0, 1).reshape(n, num_heads, head_dim)

    def _kv_splits(self, table: np.ndarray, seq_len: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(first KV index, k, v) of each split; k and v FP32 [Hkv, m, D]. Never reads past ``seq_len``."""
        for lo in range(0, seq_len, KV_SPLIT):
            hi = min(lo + KV_SPLIT, seq_len)
            pages = self.kv_cache[table[lo // PAGE_SIZE : -(-hi // PAGE_SIZE)]]  # [p, 2, Hkv, 16, D]
            kv = pages.transpose(1, 2, 0, 3, 4).astype(np.float32, order="C")
            kv = kv.reshape(2, self.config.num_kv_heads, -1, self.config.head_dim)[:, :, : hi - lo]
            yield lo, kv[0], kv[1]

    def silu_mul(self, gate_up: np.ndarray) -> np.ndarray:
        half = gate_up.shape[1] // 2
        gate, up = gate_up[:, :half], gate_up[:, half:]
        with np.errstate(over="ignore"):  # where exp is infinite, SiLU is 0
            y = np.exp(-gate)
        y += np.float32(1)
        np.divide(gate, y, out=y)
        y *= up
        return self._round(y)

    def take_rows(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return x[rows]

    def lm_head(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return self._matmul(x, weight)

    def argmax(self, logits: np.ndarray) -> np.ndarray:
        ids = np.argmax(logits, axis=-1).astype(np.int32)
        # np.argmax returns the first NaN's index, so one look at the winner finds every bad row.
        ids[np.isnan(logits[np.arange(len(ids)), ids])] = NAN_TOKEN
        return ids

    def adjust_logits(self, logits: np.ndarray, inputs: NumpyInputs) -> None:
        for row, slot, token, outputs in zip(
            logits, inputs.logit_slots, inputs.last_tokens, inputs.num_outputs, strict=True
        ):
            if (adjustments := self._adjustments.get(slot)) is not None:
                adjustments.count(token, outputs)
                adjustments.apply(row, self._settings[slot], outputs)

    def restore_logits(self, logits: np.ndarray, inputs: NumpyInputs) -> None:
        for row, slot in zip(logits, inputs.logit_slots, strict=True):
            if (adjustments := self._adjustments.get(slot)) is not None:
                adjustments.restore(row)

    def mask_logits(self, logits: np.ndarray, rows: np.ndarray, masks: np.ndarray) -> None:
        as_bytes = masks.astype("<u4", copy=False).view(np.uint8)
        for row, mask in zip(rows.tolist(), as_bytes, strict=True):
            allowed = np.unpackbits(mask, count=logits.shape[1], bitorder="little").view(bool)
            np.copyto(logits[row], -np.inf, where=~(allowed | np.isnan(logits[row])))

    def sample(self, logits: np.ndarray, inputs: NumpyInputs) -> np.ndarray:
        rows = zip(logits, inputs.logit_slots, inputs.next_positions, strict=True)
        return np.array([sample_row(x, self._settings.get(s, _PLAIN), p) for x, s, p in rows], np.int32)

    def log_probs(
        self, logits: np.ndarray, token_ids: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        with np.errstate(invalid="ignore", over="ignore"):  # where the greatest is infinite, NaN or huge
            greatest = logits.max(axis=1, keepdims=True)
            x = np.where(logits == greatest, np.float32(0), logits - greatest)
            x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
        # The likeliest, lower ids first on a tie: only what may be among them is sorted.
        count = min(count, logits.shape[1])
        top_ids = np.empty((len(logits), count), np.int32)
        for row, ids in zip(logits, top_ids, strict=True):
            if count:
                least = -np.partition(-row, count - 1)[count - 1]
                among = np.flatnonzero(~(row < least))
                ids[:] = among[np.argsort(-row[among], kind="stable")][:count]
        chosen = np.take_along_axis(x, token_ids[:, None], 1)[:, 0]
        chosen[token_ids < 0] = np.nan
        return chosen, top_ids, np.take_along_axis(x, top_ids, 1)

    def copy_rows(self, x: np.ndarray) -> np.ndarray:
        return x.copy()

    def concat_rows(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)

    def from_numpy(self, x: np.ndarray) -> np.ndarray:
        return x.copy() if x.dtype == np.int32 else x.astype(np.float32)

    def to_numpy(self, x: np.ndarray) -> np.ndarray:
        return x if x.dtype == np.int32 else x.astype(np.float32)
