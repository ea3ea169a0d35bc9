"""Plants mistakes in the kernels, one at a time in a copy, and shows which test sees each.

    python tools/mutate_kernels.py [--only PATTERN] [--jobs N] [--all] [--gpu] [--list] [--table FILE.md]

A test that can't fail shows nothing. Here stands what a kernel test must see: barriers dropped, masks
shifted, heads exchanged. Each is planted alone in a copy of what the tests need; the tests of the kernels it
changes run there, on the emulator (marker ``emulated``) and through the compiler, up to the first failure.
Every test file must first pass in a copy with nothing planted. ``--gpu`` uses the tests marked ``gpu``
instead, on a machine with one. Exit status: 0 every mistake was seen, 1 not, 2 a mistake of the user's. Knows
the kernels' text and pytest's report, not what a kernel means. The checkout itself is only read.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent

Means = Literal["emulated", "compile", "gpu"]


class Edit(NamedTuple):
    """One place of a file: ``find`` occurs there once, or this is its ``nth`` occurrence (from 1)."""

    find: str
    replace: str
    nth: int = 0

    def apply(self, text: str) -> str:
        """The text with this edit.

        Raises:
            ValueError: ``find`` isn't there, or is in several places and none is named.
        """
        starts = self.starts(text)
        if len(starts) < max(1, self.nth) or (len(starts) > 1 and not self.nth):
            raise ValueError(f"occurs {len(starts)} times: {self.find!r}")
        start = starts[max(0, self.nth - 1)]
        return text[:start] + self.replace + text[start + len(self.find) :]

    def starts(self, text: str) -> list[int]:
        """Where ``find`` occurs."""
        return [match.start() for match in re.finditer(re.escape(self.find), text)]


@dataclass(frozen=True)
class Mutation:
    """A mistake to plant in one file of ``cuda_src``, and who is there to see it."""

    file: str
    name: str
    edits: tuple[Edit, ...]
    seen_by: Means = "emulated"
    reason: str = ""  # why the emulator can't see it, where only a GPU might
    racecheck: str = ""  # pytest -k: what compute-sanitizer's racecheck runs, where no test loses the race
    by_chance: bool = False  # a GPU may show it or not, so that it counts nowhere as missing

    @property
    def title(self) -> str:
        return f"{self.file}: {self.name}"

    def apply(self, text: str) -> str:
        """The file's text with the mistake; ValueError where an edit has no place."""
        for edit in self.edits:
            try:
                text = edit.apply(text)
            except ValueError as exc:
                raise ValueError(f"{self.title}: {exc}") from None
        return text


def mutation(file: str, name: str, find: str, replace: str = "", *, nth: int = 0) -> Mutation:
    """One edit that the emulator's tests see; without ``replace`` the text is dropped."""
    return Mutation(file, name, (Edit(find, replace, nth),))


def for_gpu(file: str, name: str, find: str, replace: str = "", *, reason: str) -> Mutation:
    """One edit that nothing but a GPU can show."""
    return Mutation(file, name, (Edit(find, replace),), "gpu", reason)


def by_chance(file: str, name: str, find: str, replace: str = "", *, reason: str) -> Mutation:
    """One edit that a GPU may show, on a bad day."""
    return Mutation(file, name, (Edit(find, replace),), "gpu", reason, by_chance=True)


def for_compiler(file: str, name: str, find: str, replace: str) -> Mutation:
    """One edit that the compiler, or what it reports, gives away."""
    return Mutation(file, name, (Edit(find, replace),), "compile")


BETWEEN_BLOCKS = "blocks run one after another on the emulator"
TOO_LARGE = "takes more memory, or rows, than the emulator has time for"
PLAIN_MEANING = "the emulator runs the plain meaning, not the PTX"

EMBEDDING = (
    mutation("embedding.cu", "last 8 values of a row not copied", "i < HIDDEN_SIZE;", "i < HIDDEN_SIZE - 8;"),
    mutation("embedding.cu", "row ids ignored", "ids[blockIdx.x]", "ids[0]"),
    mutation(
        "embedding.cu",
        "an output row one off",
        "out + static_cast<long long>(blockIdx.x)",
        "out + static_cast<long long>((blockIdx.x + 1) % gridDim.x)",
    ),
)

COMMON = (
    mutation(
        "common.cuh",
        "barrier of block_sum dropped",
        "    __syncthreads();\n    float sum = warp_sums[0];",
        "    float sum = warp_sums[0];",
    ),
    mutation("common.cuh", "first step of the butterfly missing", "int offset = 16", "int offset = 8"),
    mutation("common.cuh", "sum of the last warp not added", "w < THREADS / 32", "w < THREADS / 32 - 1"),
    mutation(
        "common.cuh", "second segment skipped", "int s = 1; s < num_segments", "int s = 2; s < num_segments"
    ),
    mutation("common.cuh", "upper value keeps the lower one's bits", "words[i] & 0xffff0000u", "words[i]"),
    mutation(
        "common.cuh",
        "pairs of 8 packed values exchanged",
        "pack_bf16(values[4], values[5]), pack_bf16(values[6], values[7])",
        "pack_bf16(values[6], values[7]), pack_bf16(values[4], values[5])",
    ),
)

RMSNORM = (
    mutation("rmsnorm.cu", "sum not written back", "        if (!row_ids) store8(x + at, rounded);\n"),
    mutation(
        "rmsnorm.cu",
        "sum written back where only some rows are asked for",
        "if (!row_ids) store8(x + at, rounded)",
        "store8(x + at, rounded)",
    ),
    mutation(
        "rmsnorm.cu",
        "row ids ignored by rmsnorm",
        "row_ids ? row_ids[blockIdx.x] : blockIdx.x",
        "blockIdx.x",
        nth=1,
    ),
    mutation(
        "rmsnorm.cu",
        "row ids ignored by add_rmsnorm",
        "row_ids ? row_ids[blockIdx.x] : blockIdx.x",
        "blockIdx.x",
        nth=2,
    ),
    mutation("rmsnorm.cu", "epsilon forgotten", "__fadd_rn(mean, RMS_EPS)", "mean"),
    mutation(
        "rmsnorm.cu",
        "weight of the neighbouring 8 values",
        "load8(weight + start)",
        "load8(weight + (start ^ 8))",
    ),
    mutation(
        "rmsnorm.cu",
        "norm of the sum before it is rounded",
        "        unpack8(rounded, values[c]);\n",
        "        for (int i = 0; i < 8; ++i) values[c][i] = sum[i];\n",
    ),
)

LINEAR = (
    mutation("linear.cu", "last step of K missing", "k < (s + 1) * length;", "k + 16 < (s + 1) * length;"),
    mutation(
        "linear.cu",
        "only the last segment kept",
        "s == 0 ? part[n][e] : sum[n][e] + part[n][e]",
        "part[n][e]",
    ),
    mutation(
        "linear.cu",
        "second 8 tokens taken for the first",
        "pair_at(x, token + 8, T, k, K),",
        "pair_at(x, token, T, k, K),",
    ),
    mutation("linear.cu", "rows that don't exist are read", "return row < rows ?", "return true ?"),
    mutation("linear.cu", "columns that don't exist are written", "row < T && column < N", "row < T"),
    mutation("linear.cu", "residual not added", "sum[i] += r[i]", "sum[i] += 0.0f"),
    mutation("linear.cu", "end of the rows not minded by add_segments", "    if (chunk >= chunks) return;\n"),
    mutation("linear.cu", "equal elements counted as different", "a[i] != b[i]", "a[i] == b[i]"),
    mutation("linear.cu", "first element not compared", "if (i < n && a[i]", "if (i > 0 && i < n && a[i]"),
    mutation("linear.cu", "last element not compared", "if (i < n && a[i]", "if (i + 1 < n && a[i]"),
)

ROPE = (
    mutation(
        "rope_kv_write.cu",
        "page index off by one",
        "kv_index[token] / PAGE_SIZE]",
        "(kv_index[token] + 1) / PAGE_SIZE]",
    ),
    mutation("rope_kv_write.cu", "layer forgotten", "NUM_LAYERS + layer_idx", "NUM_LAYERS"),
    mutation("rope_kv_write.cu", "slot forgotten", "(token_slots[token])", "(0)"),
    mutation(
        "rope_kv_write.cu",
        "sign of the rotation",
        "__fsub_rn(__fmul_rn(a[i], c[i])",
        "__fadd_rn(__fmul_rn(a[i], c[i])",
    ),
    mutation(
        "rope_kv_write.cu",
        "place in the sequence taken for the position",
        "(positions[token])",
        "(kv_index[token])",
    ),
    mutation("rope_kv_write.cu", "V stored to K", "place(1, head)", "place(0, head)"),
    mutation("rope_kv_write.cu", "K taken for V", "(NUM_HEADS + NUM_KV_HEADS + head)", "(NUM_HEADS + head)"),
    mutation(
        "rope_kv_write.cu",
        "K stored where there is no page",
        "            if (!is_q && page < 0) continue;\n",
    ),
    mutation("rope_kv_write.cu", "V stored where there is no page", "} else if (page >= 0) {", "} else {"),
    for_gpu(
        "rope_kv_write.cu",
        "offsets into the pages cut to 32 bits",
        "const long long block = (static_cast<long long>(page) * 2 + kv)",
        "const int block = (page * 2 + kv)",
        reason=TOO_LARGE,
    ),
)

DECODE_FILE = "paged_attention_decode.cu"
_VISIBLE = "{count - warp * KV_TILE, count - warp * KV_TILE}"
DECODE = (
    mutation(
        DECODE_FILE,
        "mask one token too late",
        _VISIBLE,
        "{count + 1 - warp * KV_TILE, count + 1 - warp * KV_TILE}",
    ),
    mutation(
        DECODE_FILE,
        "mask one token too early",
        _VISIBLE,
        "{count - 1 - warp * KV_TILE, count - 1 - warp * KV_TILE}",
    ),
    mutation(DECODE_FILE, "one token too many read", "row < count);", "row <= count);"),
    mutation(DECODE_FILE, "tokens that don't exist are read", "* 8, row < count);", "* 8, true);"),
    mutation(DECODE_FILE, "rest of the last tile not zeroed", "num_tiles() * KV_TILE;", "count;"),
    mutation(DECODE_FILE, "K taken for V", "(page * 2 + kv)", "(page * 2)"),
    mutation(DECODE_FILE, "V of a wrong head", "* NUM_KV_HEADS + head;", "* NUM_KV_HEADS + (head ^ kv);"),
    mutation(
        DECODE_FILE, "pages exchanged", "[i * ROWS_AT_ONCE / PAGE_SIZE]", "[i * ROWS_AT_ONCE / PAGE_SIZE ^ 1]"
    ),
    for_gpu(
        DECODE_FILE,
        "offsets into the pages cut to 32 bits",
        "const long long block = (page * 2 + kv)",
        "const int block = ((int)page * 2 + kv)",
        reason=TOO_LARGE,
    ),
    mutation(
        DECODE_FILE,
        "last split taken for a full one",
        "count = min(KV_SPLIT, seq_len - split * KV_SPLIT);",
        "count = KV_SPLIT;",
    ),
    mutation(
        DECODE_FILE,
        "a last split that is not full not counted",
        "num_splits = (seq_len + KV_SPLIT - 1) / KV_SPLIT",
        "num_splits = seq_len / KV_SPLIT",
    ),
    mutation(
        DECODE_FILE,
        "an empty split behind full ones",
        "num_splits = (seq_len + KV_SPLIT - 1) / KV_SPLIT",
        "num_splits = seq_len / KV_SPLIT + 1",
    ),
    mutation(DECODE_FILE, "blocks without a split go on", "    if (split >= num_splits) return;\n"),
    mutation(
        DECODE_FILE,
        "a block goes on to splits of others",
        "takes_all ? num_splits : blockIdx.z + 1",
        "num_splits",
    ),
    mutation(
        DECODE_FILE,
        "the first split alone where one block takes all",
        "takes_all ? num_splits : blockIdx.z + 1",
        "blockIdx.z + 1",
    ),
    mutation(
        DECODE_FILE,
        "last split left out by a block that takes all",
        "takes_all ? num_splits :",
        "takes_all ? num_splits - 1 :",
    ),
    mutation(DECODE_FILE, "wait for K dropped", "        cp_async_wait<V_WAITS_FOR_K ? 0 : 1>();\n"),
    mutation(
        DECODE_FILE,
        "wait for K one group too lax",
        "cp_async_wait<V_WAITS_FOR_K ? 0 : 1>();",
        "cp_async_wait<V_WAITS_FOR_K ? 0 : 2>();",
    ),
    mutation(
        DECODE_FILE,
        "wait for K too lax where V waits for it",
        "cp_async_wait<V_WAITS_FOR_K ? 0 : 1>();",
        "cp_async_wait<1>();",
    ),
    mutation(
        DECODE_FILE,
        "wait for V one group too lax while the next K comes",
        "cp_async_wait<1>();",
        "cp_async_wait<2>();",
    ),
    mutation(DECODE_FILE, "wait for V one group too lax", "cp_async_wait<0>();", "cp_async_wait<1>();"),
    mutation(
        DECODE_FILE,
        "V not waited for where it came to K's place",
        "if (!V_WAITS_FOR_K && is_more) {",
        "if (is_more) {",
    ),
    mutation(DECODE_FILE, "barrier before the scores dropped", "        __syncthreads();  // K is there\n"),
    mutation(
        DECODE_FILE,
        "barrier after the maxima dropped",
        "        __syncthreads();  // the maxima are there, and K is done with\n",
    ),
    mutation(
        DECODE_FILE,
        "next K comes while the last one is read",
        "        Scores scores;\n",
        "        Scores scores;\n        if (is_more) next.load(k_tiles, kv_cache, 0, head);\n",
    ),
    mutation(
        DECODE_FILE,
        "barrier before V dropped",
        "        __syncthreads();  // V and the probabilities are there\n",
    ),
    mutation(
        DECODE_FILE,
        "barrier before V's place is taken again dropped",
        "        __syncthreads();  // V and the probabilities are done with\n",
    ),
    mutation(DECODE_FILE, "this split's K for the next", "next.load(k_tiles,", "here.load(k_tiles,"),
    mutation(DECODE_FILE, "next K never loaded", "            next.load(k_tiles, kv_cache, 0, head);\n"),
    mutation(DECODE_FILE, "next split never taken", "        here = next;\n"),
    mutation(DECODE_FILE, "this split's V for the next", "next.load(V_WAITS", "here.load(V_WAITS"),
    mutation(
        DECODE_FILE, "this split's pages for the next", "next.find(table, split + 1", "next.find(table, split"
    ),
    mutation(
        DECODE_FILE,
        "next V comes into K's place",
        "(V_WAITS_FOR_K ? k_tiles : v_tiles,",
        "(k_tiles,",
    ),
    mutation(
        DECODE_FILE,
        "K comes into V's place",
        "kv_cache, !V_WAITS_FOR_K, head);",
        "kv_cache, 0, head);",
    ),
    mutation(
        DECODE_FILE,
        "V comes where K is waited for",
        "kv_cache, !V_WAITS_FOR_K, head);",
        "kv_cache, 1, head);",
    ),
    mutation(
        DECODE_FILE,
        "splits of one block not merged",
        "            total.merge(state);",
        "            total = state;",
    ),
    mutation(
        DECODE_FILE,
        "splits of one block merged in the other order",
        "            total.merge(state);",
        "            state.merge(total), total = state;",
    ),
    mutation(
        DECODE_FILE,
        "splits merged from the last",
        "(first + s) * step",
        "(first + num_splits - 1 - s) * step",
    ),
    mutation(
        DECODE_FILE,
        "a block that takes all stores a part",
        "is_whole = takes_all || num_splits == 1",
        "is_whole = num_splits == 1",
    ),
    mutation(
        DECODE_FILE,
        "barrier before the last block is known dropped",
        "    __syncthreads();\n    if (is_last) {",
        "    if (is_last) {",
    ),
    by_chance(
        DECODE_FILE,
        "barrier before the arrival is counted dropped",
        "    __syncthreads();\n    if (threadIdx.x == 0) {",
        "    if (threadIdx.x == 0) {",
        reason=BETWEEN_BLOCKS,
    ),
    by_chance(
        DECODE_FILE,
        "fence before the arrival dropped",
        "    __threadfence();  // this block's part is there before its arrival is counted\n",
        reason=BETWEEN_BLOCKS,
    ),
    by_chance(
        DECODE_FILE, "fence before the merge dropped", "        __threadfence();\n", reason=BETWEEN_BLOCKS
    ),
    mutation(DECODE_FILE, "last split not merged", "s < num_splits; ++s", "s < num_splits - 1; ++s"),
    mutation(DECODE_FILE, "counter not reset", "        if (is_last) *counter = 0;\n"),
    mutation(
        DECODE_FILE,
        "wrong KV head",
        "const int head = blockIdx.y / ROW_TILES;",
        "const int head = blockIdx.y / ROW_TILES ^ 1;",
    ),
    mutation(
        DECODE_FILE,
        "V not loaded where it waits for K's place",
        "        if (V_WAITS_FOR_K) {",
        "        if (false) {",
    ),
    mutation(
        DECODE_FILE,
        "second 16 query heads taken for the first",
        "/ ROW_TILES * GROUP + tile * 16;",
        "/ ROW_TILES * GROUP;",
    ),
    mutation(
        DECODE_FILE,
        "query heads beyond the KV head's group",
        "rows = GROUP - tile * 16 < 16 ? GROUP - tile * 16 : 16;",
        "rows = 16;",
    ),
    mutation(
        DECODE_FILE,
        "sum of a lane's second row taken from its first",
        "tile_sum[warp][g + 8] = sum[1]",
        "tile_sum[warp][g + 8] = sum[0]",
    ),
    mutation(
        DECODE_FILE,
        "every split reads the first one's pages",
        "table + split * SPLIT_PAGES + i",
        "table + i",
    ),
    mutation(DECODE_FILE, "slot forgotten", "(load_here(slots + rows.sequence))", "(rows.sequence)"),
    mutation(DECODE_FILE, "layer forgotten", "NUM_LAYERS + layer_idx", "NUM_LAYERS"),
    mutation(
        DECODE_FILE,
        "splits of all sequences in one place",
        "(first_split[rows.sequence]) + split",
        "(0) + split",
    ),
    mutation(
        DECODE_FILE,
        "parts of all splits in one place",
        "(first_split[rows.sequence]) + split",
        "(first_split[rows.sequence])",
    ),
    mutation(
        DECODE_FILE,
        "parts of the first sequence merged for all",
        "merge_splits(rows, first_split[rows.sequence],",
        "merge_splits(rows, 0,",
    ),
    mutation(
        DECODE_FILE,
        "one counter for all sequences",
        "arrived + rows.sequence * gridDim.y + blockIdx.y",
        "arrived + blockIdx.y",
    ),
    mutation(
        DECODE_FILE,
        "splits merged by the last block but one",
        "atomicAdd(counter, 1u) == num_splits - 1",
        "atomicAdd(counter, 1u) == num_splits - 2",
    ),
    mutation(
        DECODE_FILE,
        "an output row one off where splits are merged",
        "out + rows.offset(row) + column) =\n            pack",
        "out + rows.offset(row ^ 1) + column) =\n            pack",
    ),
    mutation(
        DECODE_FILE,
        "an output row one off",
        "out + rows.offset(row) + column) =\n                    pack",
        "out + rows.offset(row ^ 1) + column) =\n                    pack",
    ),
    for_compiler(
        DECODE_FILE, "too few registers", "__launch_bounds__(THREADS)", "__launch_bounds__(THREADS, 12)"
    ),
)

PREFILL_FILE = "paged_attention_prefill.cu"
PREFILL = (
    mutation(PREFILL_FILE, "mask one token too late", "prefix + token + 1 : 0", "prefix + token + 2 : 0"),
    mutation(PREFILL_FILE, "mask one token too early", "prefix + token + 1 : 0", "prefix + token : 0"),
    mutation(PREFILL_FILE, "wait for a tile one group too lax", "cp_async_wait<1>();", "cp_async_wait<2>();"),
    mutation(
        PREFILL_FILE,
        "barrier before a tile is used dropped",
        "        __syncthreads();  // this tile is there\n",
    ),
    Mutation(
        PREFILL_FILE,
        "barrier before a stage is reused dropped",
        (Edit("        __syncthreads();  // before the next but one takes its place\n", ""),),
        racecheck="ratio4_d64 and test_prompt and 257",
    ),
    mutation(
        PREFILL_FILE, "next tile never loaded", "        if (tile + 1 < num_tiles) load_tile(tile + 1);\n"
    ),
    mutation(
        PREFILL_FILE,
        "the other stage read",
        "const bf16* const stage = stages + tile % 2",
        "const bf16* const stage = stages + (tile + 1) % 2",
    ),
    mutation(PREFILL_FILE, "K of a wrong head", "tile_pages, 0, head,", "tile_pages, 0, head ^ 1,"),
    mutation(PREFILL_FILE, "V of a wrong head", "tile_pages, 1, head,", "tile_pages, 1, head ^ 1,"),
    mutation(
        PREFILL_FILE,
        "query heads of the KV heads interleaved",
        "head * GROUP + row % GROUP",
        "row % GROUP * NUM_KV_HEADS + head",
    ),
    mutation(
        PREFILL_FILE,
        "splits of 512",
        "(first + KV_TILE) % KV_SPLIT == 0",
        "(first + KV_TILE) % (2 * KV_SPLIT) == 0",
    ),
    mutation(PREFILL_FILE, "last split not merged", " || tile + 1 == num_tiles", ""),
    mutation(PREFILL_FILE, "state of a split kept for the next", "            split.clear();\n", ""),
    mutation(PREFILL_FILE, "a warp's last token left out", "/ GROUP + 1, chunk)", "/ GROUP, chunk)"),
    mutation(
        PREFILL_FILE,
        "rows of the next block computed too",
        "row < QUERY_TOKENS * GROUP && token < chunk",
        "token < chunk",
    ),
    mutation(
        PREFILL_FILE,
        "rows of decodes not skipped",
        "chunk_start - skipped_rows + token",
        "chunk_start + token",
    ),
    mutation(PREFILL_FILE, "an output row one off", "out + offset[i] + n * 8", "out + offset[i ^ 1] + n * 8"),
    mutation(PREFILL_FILE, "layer forgotten", "NUM_LAYERS + layer_idx", "NUM_LAYERS"),
    for_compiler(
        PREFILL_FILE, "too few registers", "__launch_bounds__(THREADS, 2)", "__launch_bounds__(THREADS, 8)"
    ),
)

ATTENTION = (
    mutation("attention.cuh", "one token too many read", "valid = row < count;", "valid = row <= count;"),
    mutation(
        "attention.cuh",
        "zero fill of invalid rows dropped",
        "valid ? from : kv_cache, valid)",
        "valid ? from : kv_cache, true)",
    ),
    mutation(
        "attention.cuh", "page index off by one", "pages[row / PAGE_SIZE]", "pages[(row + 1) / PAGE_SIZE]"
    ),
    mutation("attention.cuh", "K taken for V", "(page * 2 + kv)", "(page * 2)"),
    mutation(
        "attention.cuh",
        "pieces of a row exchanged",
        "chunk = k * 2 + lane / 8 % 2;",
        "chunk = k * 2 + 1 - lane / 8 % 2;",
    ),
    mutation(
        "attention.cuh", "second 8 columns masked as the first", "column + 8 < visible", "column < visible"
    ),
    mutation(
        "attention.cuh",
        "maximum of half the lanes",
        "        max[i] = fmaxf(max[i], __shfl_xor_sync(FULL_MASK, max[i], 2));\n",
    ),
    mutation(
        "attention.cuh",
        "sum of half the lanes",
        "        sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(FULL_MASK, sum[i], 2));\n",
    ),
    mutation(
        "attention.cuh",
        "sum not faded",
        "__fmaf_rn(sum[i], fade[i], tile_sum[i])",
        "__fadd_rn(sum[i], tile_sum[i])",
    ),
    mutation("attention.cuh", "output not faded", "__fmul_rn(out[n][e], fade[e / 2])", "out[n][e]"),
    mutation("attention.cuh", "earlier splits not faded", "__fmul_rn(value_before, before)", "value_before"),
    mutation(
        "attention.cuh",
        "sum not faded where splits are merged",
        "sum[i] = weights.merge(sum[i], split.sum[i]);",
        "sum[i] = sum[i] + split.sum[i];",
    ),
    mutation(
        "attention.cuh",
        "maximum of the earlier splits kept",
        "            max[i] = weights.max;\n            sum[i] = weights",
        "            sum[i] = weights",
    ),
    mutation(
        "attention.cuh",
        "every second column of merged splits left out",
        "e < i * 2 + 2; ++e",
        "e < i * 2 + 1; ++e",
    ),
    mutation("attention.cuh", "a row that has seen nothing forgotten", "max == NO_SCORE ? 0.0f : max", "max"),
    for_gpu(
        "attention.cuh",
        "offsets into the pages cut to 32 bits",
        "const long long block = (page * 2 + kv)",
        "const int block = ((int)page * 2 + kv)",
        reason=TOO_LARGE,
    ),
)

SILU = (
    mutation(
        "silu_mul.cu",
        "up 8 values off",
        "load8(from + INTERMEDIATE_SIZE)",
        "load8(from + INTERMEDIATE_SIZE - 8)",
    ),
    mutation(
        "silu_mul.cu",
        "exponent clamped",
        "exp2_approx(-gate[i] * LOG2_E)",
        "exp2_approx(fminf(-gate[i] * LOG2_E, 126.0f))",
    ),
    mutation(
        "silu_mul.cu",
        "sign of the exponent",
        "exp2_approx(-gate[i] * LOG2_E)",
        "exp2_approx(gate[i] * LOG2_E)",
    ),
    mutation("silu_mul.cu", "end of the row not minded", "    if (start >= INTERMEDIATE_SIZE) return;\n"),
    for_gpu(
        "silu_mul.cu",
        "rows beyond 65,536 taken for the first",
        "row = blockIdx.x;",
        "row = blockIdx.x & 0xffffu;",
        reason=TOO_LARGE,
    ),
)

PTX = (
    for_gpu(
        "ptx.cuh",
        "halves of a pair exchanged",
        '"f"(high), "f"(low)',
        '"f"(low), "f"(high)',
        reason=PLAIN_MEANING,
    ),
    for_gpu("ptx.cuh", "BF16 cut, not rounded", "cvt.rn.bf16x2", "cvt.rz.bf16x2", reason=PLAIN_MEANING),
    for_gpu(
        "ptx.cuh", "operands of mma exchanged", '"r"(b0), "r"(b1)', '"r"(b1), "r"(b0)', reason=PLAIN_MEANING
    ),
    for_gpu("ptx.cuh", "matrices not transposed", "x4.trans.shared", "x4.shared", reason=PLAIN_MEANING),
    for_gpu(
        "ptx.cuh", "zero fill of cp.async dropped", '"r"(valid ? 16 : 0)', '"r"(16)', reason=PLAIN_MEANING
    ),
    by_chance(
        "ptx.cuh", "every wait one group too lax", '"n"(PENDING)', '"n"(PENDING + 1)', reason=PLAIN_MEANING
    ),
    for_compiler("ptx.cuh", "a layout that mma doesn't have", "m16n8k16.row.col", "m16n8k16.col.col"),
)

LOGITS = (
    Mutation(
        "logits.cuh",
        "higher id wins a tie",
        (
            Edit("<< 32 | ~static_cast<unsigned int>(id)", "<< 32 | static_cast<unsigned int>(id)"),
            Edit(
                "static_cast<int>(~static_cast<unsigned int>(key))",
                "static_cast<int>(static_cast<unsigned int>(key))",
            ),
        ),
    ),
    mutation(
        "logits.cuh",
        "NaN not seen",
        "(__float_as_uint(logit) & 0x7fffffffu) > 0x7f800000u ? NAN_KEY : number_key",
        "false ? NAN_KEY : number_key",
    ),
    mutation(
        "logits.cuh",
        "negative NaN not seen",
        "(__float_as_uint(logit) & 0x7fffffffu) > 0x7f800000u",
        "__float_as_uint(logit) > 0x7f800000u && __float_as_uint(logit) < 0x80000000u",
    ),
    mutation("logits.cuh", "zeros of both signs differ", "    if (bits == 0x80000000u) bits = 0;\n"),
    mutation(
        "logits.cuh",
        "value of a key below 0 wrong",
        "rank ^ 0x80000000u : ~rank",
        "rank ^ 0x80000000u : rank",
    ),
    mutation("logits.cuh", "first step of the butterfly missing", "int offset = 16", "int offset = 8"),
    mutation("logits.cuh", "rows taken for aligned", "stride % 4 == 0}", "true}"),
    mutation(
        "logits.cuh",
        "last 4 values of a row not among the maxima",
        "i < quads; i += step",
        "i < quads - 1; i += step",
    ),
    mutation(
        "logits.cuh",
        "a part's second 4 values not among the maxima",
        "i < quads; i += step",
        "i < min(quads, step); i += step",
    ),
    mutation(
        "logits.cuh",
        "last value of a row not among the maxima",
        "i < VOCAB_SIZE; i += step",
        "i < VOCAB_SIZE - 1; i += step",
    ),
    mutation(
        "logits.cuh",
        "values read twice behind the first loads",
        "ahead[AHEAD - 1] = quad_at(row, at + AHEAD * 128, end);",
        "ahead[AHEAD - 1] = quad_at(row, at + (AHEAD - 1) * 128, end);",
    ),
    mutation(
        "logits.cuh",
        "first loads all of one place",
        "for (int i = 0; i < AHEAD; ++i) ahead[i] = quad_at(row, at + i * 128, end);",
        "for (int i = 0; i < AHEAD; ++i) ahead[i] = quad_at(row, at, end);",
    ),
    mutation(
        "logits.cuh",
        "values behind a part's end visited",
        "visit(values, at, min(4, end - at))",
        "visit(values, at, 4)",
    ),
    mutation(
        "logits.cuh",
        "last value of a part not visited",
        "for (; at < end; at += 128)",
        "for (; at < end - 1; at += 128)",
    ),
    mutation(
        "logits.cuh",
        "a row's last values read 16 bytes at a time",
        "row.aligned && at + 4 <= end",
        "row.aligned",
    ),
    mutation("logits.cuh", "owner of a value is a wrong lane", "(id - begin) / 4 % 32", "(id - begin) % 32"),
    mutation(
        "logits.cuh", "parts of a row too short", "(end - begin + parts - 1) / parts", "(end - begin) / parts"
    ),
    mutation("logits.cuh", "parts begin anywhere", "/ parts + 3) & ~3;", "/ parts + 3);"),
)

ARGMAX = (
    mutation("argmax.cu", "barrier dropped", "    __syncthreads();\n"),
    mutation(
        "argmax.cu",
        "NaN taken for a token",
        "winner == NAN_KEY ? -1 : id_of(winner)",
        "id_of(winner) & 0x7fffffff",
    ),
    mutation("argmax.cu", "counter not reset", "    arrived[row] = 0;\n"),
    mutation("argmax.cu", "maximum not reset", "atomicExch(&best[row], 0ull)", "atomicMax(&best[row], 0ull)"),
    mutation("argmax.cu", "last warp not asked", "w < blockDim.x / 32;", "w < blockDim.x / 32 - 1;"),
    by_chance(
        "argmax.cu",
        "fence before the arrival dropped",
        "    __threadfence();  // the maximum is there before the arrival is counted\n",
        reason=BETWEEN_BLOCKS,
    ),
    by_chance(
        "argmax.cu",
        "fence before the winner is taken dropped",
        "return;\n    __threadfence();\n",
        "return;\n",
        reason=BETWEEN_BLOCKS,
    ),
)

SAMPLING = (
    mutation(
        "sampling.cuh",
        "min_p and top_k exchanged",
        "float min_p;\n    unsigned int top_k;",
        "unsigned int top_k;\n    float min_p;",
    ),
    mutation(
        "sampling.cuh",
        "top_p and seed exchanged",
        "unsigned long long top_p;  // in units of 2^-32\n    unsigned long long seed;",
        "unsigned long long seed;\n    unsigned long long top_p;",
    ),
    mutation(
        "sampling.cuh", "presence and frequency exchanged", "presence, frequency", "frequency, presence"
    ),
    mutation(
        "sampling.cuh",
        "flags of an adjustment exchanged",
        "IN_PROMPT = 1, ENDS_ANSWER = 2",
        "IN_PROMPT = 2, ENDS_ANSWER = 1",
    ),
    mutation("sampling.cuh", "count of an adjustment begins on a flag", "ONE_OUTPUT = 4", "ONE_OUTPUT = 2"),
)

ADJUST = (
    mutation(
        "adjust_logits.cu",
        "barrier before the last token is looked for dropped",
        "found = 0;\n        __syncthreads();\n",
        "found = 0;\n",
    ),
    mutation(
        "adjust_logits.cu",
        "barrier after it was looked for dropped",
        "        __syncthreads();\n        const bool is_new",
        "        const bool is_new",
    ),
    mutation(
        "adjust_logits.cu",
        "barrier behind a new entry dropped",
        "        size += is_new;\n        __syncthreads();\n",
        "        size += is_new;\n",
    ),
    mutation("adjust_logits.cu", "bias not added", "__fadd_rn(entry.raw, entry.bias)", "entry.raw"),
    mutation("adjust_logits.cu", "prompt not penalised", "entry.state & IN_PROMPT || count > 0", "count > 0"),
    mutation(
        "adjust_logits.cu",
        "output not penalised",
        "entry.state & IN_PROMPT || count > 0",
        "entry.state & IN_PROMPT",
    ),
    mutation("adjust_logits.cu", "logits below 0 divided too", "l > 0 ? __fdiv_rn", "true ? __fdiv_rn"),
    mutation(
        "adjust_logits.cu",
        "frequency taken once",
        "__fmul_rn(static_cast<float>(count), s.frequency)",
        "__fmul_rn(count > 0, s.frequency)",
    ),
    mutation(
        "adjust_logits.cu",
        "presence of all tokens",
        "return count > 0 ? __fsub_rn",
        "return true ? __fsub_rn",
    ),
    mutation(
        "adjust_logits.cu",
        "min_tokens one too many",
        "num_outputs < s.min_tokens",
        "num_outputs <= s.min_tokens",
    ),
    mutation(
        "adjust_logits.cu",
        "min_tokens for every token",
        "entry.state & ENDS_ANSWER && num_outputs",
        "num_outputs",
    ),
    mutation(
        "adjust_logits.cu",
        "last token counted at each run",
        "counts && head->state < outputs",
        "counts && outputs > 0",
    ),
    mutation(
        "adjust_logits.cu",
        "first token of the step taken for the row's last",
        "token_ids[token_rows[row]]",
        "token_ids[row]",
    ),
    mutation("adjust_logits.cu", "slot forgotten by adjust_logits", "settings[slots[row]]", "settings[row]"),
    mutation(
        "adjust_logits.cu",
        "a new token takes the last one's place",
        "entries[size] = {last",
        "entries[size - 1] = {last",
    ),
    mutation("adjust_logits.cu", "a new token forgotten", "head->id = size + is_new;", "head->id = size;"),
    mutation(
        "adjust_logits.cu",
        "a known token entered anew",
        "const bool is_new = !found;",
        "const bool is_new = true;",
    ),
    mutation(
        "adjust_logits.cu",
        "entries beyond the block's threads forgotten",
        "i < size; i += blockDim.x) {\n        Adjustment",
        "i < min(size, 256); i += blockDim.x) {\n        Adjustment",
    ),
    mutation("adjust_logits.cu", "raw logit not remembered", "entries[i].raw = entry.raw =", "entry.raw ="),
    mutation(
        "adjust_logits.cu",
        "last entry not restored",
        "i < head->id; i += blockDim.x) values",
        "i < head->id - 1; i += blockDim.x) values",
    ),
    mutation(
        "adjust_logits.cu",
        "slot forgotten by restore_logits",
        "settings[slots[blockIdx.x]].table",
        "settings[blockIdx.x].table",
    ),
)

MASK = (
    mutation("mask_logits.cu", "word of 64 tokens", "mask[id / 32]", "mask[id / 64]"),
    mutation("mask_logits.cu", "a word one off", "mask[id / 32]", "mask[(id + 1) / 32]"),
    mutation("mask_logits.cu", "bits from the other end", ">> id % 32 & 1", ">> 31 - id % 32 & 1"),
    mutation("mask_logits.cu", "bytes from the other end", ">> id % 32 & 1", ">> (id % 32 ^ 24) & 1"),
    mutation("mask_logits.cu", "allowed and forbidden exchanged", "!(words", "(words"),
    mutation("mask_logits.cu", "NaN lost", " && old[i] == old[i]"),
    mutation("mask_logits.cu", "the mask's number taken for the row", "rows[blockIdx.x]", "blockIdx.x"),
    mutation("mask_logits.cu", "the first mask for all", "(blockIdx.x) * MASK_WORDS", "(0) * MASK_WORDS"),
    mutation(
        "mask_logits.cu",
        "rows as wide as the vocabulary",
        "(rows[blockIdx.x]) * stride",
        "(rows[blockIdx.x]) * VOCAB_SIZE",
    ),
    mutation("mask_logits.cu", "last word left out", "(VOCAB_SIZE + 31) / 32", "VOCAB_SIZE / 32"),
    mutation(
        "mask_logits.cu", "values behind the vocabulary written", "id < VOCAB_SIZE && ", "id < stride && "
    ),
    mutation("mask_logits.cu", "words behind the mask read", ", VOCAB_SIZE - 1u)", ", VOCAB_SIZE + 31u)"),
    mutation("mask_logits.cu", "last token left out", "id < VOCAB_SIZE && ", "id < VOCAB_SIZE - 1 && "),
    mutation("mask_logits.cu", "parts overlap", "blockIdx.y * EACH * blockDim.x", "blockIdx.y * blockDim.x"),
    mutation("mask_logits.cu", "fewer tokens of a thread than the host means", "EACH = 4", "EACH = 3"),
    mutation(
        "mask_logits.cu",
        "the lowest number for -inf",
        "-__uint_as_float(0x7f800000u)",
        "-__uint_as_float(0x7f7fffffu)",
    ),
)

LOG_PROBS = (
    mutation(
        "log_probs.cu",
        "barrier behind the warps' best dropped",
        "    tell_best();\n    __syncthreads();\n",
        "    tell_best();\n",
    ),
    mutation(
        "log_probs.cu",
        "barrier before the next best dropped",
        "        __syncthreads();  // all have seen the winner\n",
    ),
    mutation(
        "log_probs.cu",
        "barrier behind the next best dropped",
        "            tell_best();\n        }\n        __syncthreads();\n",
        "            tell_best();\n        }\n",
    ),
    mutation("log_probs.cu", "NaN is the greatest", "if (i < n && key != NAN_KEY)", "if (i < n)"),
    mutation("log_probs.cu", "last warp not asked", "w < WARPS; ++w) best", "w < WARPS - 1; ++w) best"),
    mutation(
        "log_probs.cu",
        "infinity minus infinity",
        "value == greatest ? 0.0f : value - greatest",
        "value - greatest",
    ),
    mutation(
        "log_probs.cu", "greatest not taken off", "value == greatest ? 0.0f : value - greatest", "value"
    ),
    mutation("log_probs.cu", "base of the exponential", "LOG2_E = 1.44269504f", "LOG2_E = 1.44f"),
    mutation(
        "log_probs.cu",
        "a token read where there is none",
        "token < 0 ? __uint_as_float(0x7fc00000u) : below",
        "below",
    ),
    mutation("log_probs.cu", "the first row's token for all", "token_ids[blockIdx.x]", "token_ids[0]"),
    mutation(
        "log_probs.cu",
        "sum not taken off the likeliest",
        "below(value_at(rank_of(key))) - log_sum",
        "below(value_at(rank_of(key)))",
    ),
    mutation(
        "log_probs.cu",
        "an output row one off",
        "static_cast<long long>(blockIdx.x) * count + i",
        "static_cast<long long>(blockIdx.x) * 20 + i",
    ),
    mutation("log_probs.cu", "the winner found again", "if (other < key) next", "if (other <= key) next"),
    mutation(
        "log_probs.cu",
        "next best of another lane's part",
        "(lane * 32 + owner) * 4",
        "(lane * 32 + (owner ^ 1)) * 4",
    ),
    mutation(
        "log_probs.cu",
        "next best of the first values alone",
        "at < end; at += 32 * 128",
        "at < begin + 512; at += 32 * 128",
    ),
    mutation(
        "log_probs.cu",
        "next best kept by every lane",
        "            if (lane == owner) own_best = next;\n",
        "            own_best = next;\n",
    ),
)

SAMPLE = (
    mutation(
        "sample.cu",
        "barrier of block_scan dropped",
        "    if (lane == 31) warp_totals[warp] = sum;\n    __syncthreads();\n",
        "    if (lane == 31) warp_totals[warp] = sum;\n    \n",
    ),
    mutation(
        "sample.cu",
        "barrier of threshold dropped",
        "        __syncthreads();  // one is enough: the next turn writes to the other half\n",
    ),
    mutation(
        "sample.cu", "barrier before a sort dropped", "keys[i] = 0;\n    __syncthreads();\n", "keys[i] = 0;\n"
    ),
    mutation(
        "sample.cu",
        "barrier between two steps of a sort dropped",
        "            }\n            __syncthreads();\n",
        "            }\n",
    ),
    mutation(
        "sample.cu",
        "barrier before keys are listed dropped",
        "list.size = 0;\n    __syncthreads();\n",
        "list.size = 0;\n",
    ),
    mutation(
        "sample.cu", "barrier behind the list dropped", "    });\n    __syncthreads();\n}", "    });\n}"
    ),
    mutation(
        "sample.cu",
        "barrier behind a list's measures dropped",
        "<< ID_BITS | id;\n    }\n    __syncthreads();\n",
        "<< ID_BITS | id;\n    }\n",
    ),
    mutation(
        "sample.cu",
        "barrier before the place is known dropped",
        "    __syncthreads();\n    sum = reached;",
        "    sum = reached;",
    ),
    mutation(
        "sample.cu",
        "barrier behind the parts' sums dropped",
        "parts[warp] = own;\n    __syncthreads();\n",
        "parts[warp] = own;\n",
    ),
    mutation(
        "sample.cu",
        "barrier before smaller parts dropped",
        "        __syncthreads();  // all have read the parts\n",
    ),
    mutation(
        "sample.cu",
        "barrier before the token is known by pick dropped",
        "picked = id;\n    __syncthreads();\n",
        "picked = id;\n",
    ),
    mutation(
        "sample.cu",
        "barrier before the token is known by pick_listed dropped",
        "picked = list.id(i);\n    }\n    __syncthreads();\n",
        "picked = list.id(i);\n    }\n",
    ),
    mutation(
        "sample.cu",
        "barrier behind the pivots dropped",
        "        }\n        __syncthreads();\n        unsigned int counts",
        "        }\n        unsigned int counts",
    ),
    mutation(
        "sample.cu",
        "barrier before the warps' sums meet dropped",
        "        __syncthreads();\n        if (threadIdx.x < 2 * PIVOTS)",
        "        if (threadIdx.x < 2 * PIVOTS)",
    ),
    mutation(
        "sample.cu",
        "barrier before the bounds move dropped",
        "        __syncthreads();\n        const u64 above",
        "        const u64 above",
    ),
    mutation(
        "sample.cu",
        "barrier before the next bounds dropped",
        "        __syncthreads();  // all have read the sums\n",
    ),
    mutation(
        "sample.cu",
        "barrier before the greatest is known dropped",
        "= best;\n    __syncthreads();\n",
        "= best;\n",
    ),
    mutation(
        "sample.cu",
        "maxima of a row's parts in one place",
        "blockIdx.y * blockDim.x + threadIdx.x] = key",
        "threadIdx.x] = key",
    ),
    mutation(
        "sample.cu",
        "maxima of the first row for all",
        "maxima += static_cast<long long>(blockIdx.x) * SEGMENTS;",
        "maxima += 0;",
    ),
    mutation(
        "sample.cu",
        "words of the generator exchanged",
        "static_cast<u64>(c1) << 32 | c0",
        "static_cast<u64>(c0) << 32 | c1",
    ),
    mutation("sample.cu", "a round of the generator missing", "round < 10", "round < 9"),
    mutation(
        "sample.cu", "upper half of the seed ignored", "k1 = static_cast<unsigned int>(seed >> 32)", "k1 = 0"
    ),
    mutation("sample.cu", "index ignored", "c1 = index, c2", "c1 = 0, c2"),
    mutation(
        "sample.cu",
        "position of the last token, not the next",
        "[token_rows[blockIdx.x]] + 1",
        "[token_rows[blockIdx.x]]",
    ),
    mutation(
        "sample.cu",
        "position of another row's token",
        "positions[token_rows[blockIdx.x]]",
        "positions[blockIdx.x]",
    ),
    mutation("sample.cu", "slot forgotten", "settings[slots[blockIdx.x]]", "settings[blockIdx.x]"),
    mutation(
        "sample.cu",
        "temperature forgotten",
        "__fmul_rn(__fsub_rn(value, greatest), scale)",
        "__fsub_rn(value, greatest)",
    ),
    mutation(
        "sample.cu", "a product and a sum fused", "__fadd_rn(__fmul_rn(y, f), 1.0f)", "__fmaf_rn(y, f, 1.0f)"
    ),
    mutation("sample.cu", "exponent cut too early", "scale), -60.0f)", "scale), -40.0f)"),
    mutation("sample.cu", "masses one bit off", "- 127 - 23 + MASS_BITS", "- 127 - 22 + MASS_BITS"),
    mutation(
        "sample.cu",
        "masses below 2^20 of the wrong size",
        "significand >> min(max(-shift, 0), 31)",
        "significand >> min(max(-shift - 1, 0), 31)",
    ),
    mutation("sample.cu", "min_p drops its own border", "e >= min_p ?", "e > min_p ?"),
    mutation(
        "sample.cu",
        "sum of the first warp not counted",
        "for (int w = 0; w < WARPS; ++w) {\n        if (w < warp)",
        "for (int w = 1; w < WARPS; ++w) {\n        if (w < warp)",
    ),
    mutation(
        "sample.cu",
        "one segment too few above the threshold",
        "if (count >= wanted) {",
        "if (count >= wanted - 1) {",
    ),
    mutation(
        "sample.cu",
        "places behind the last segment counted",
        "rank_of(maxima[at]) : 0;",
        "rank_of(maxima[at]) : 0xffffffffu;",
    ),
    mutation("sample.cu", "sorted the wrong way round", "((i & size) == 0)", "((i & size) != 0)"),
    mutation(
        "sample.cu",
        "padding of a list left out",
        "i < padded; i += THREADS) keys[i] = 0;",
        "i < padded; i += THREADS) ;",
    ),
    mutation("sample.cu", "measure of what lies below the cut", ">= from ? own : 0", ">= 0 ? own : 0"),
    mutation("sample.cu", "the token at the cut dropped", ">= from ? own : 0", "> from ? own : 0"),
    mutation(
        "sample.cu",
        "a quad with one listed value skipped",
        "fmaxf(fmaxf(values[0], values[1]), fmaxf(values[2], values[3])) < least",
        "fminf(fminf(values[0], values[1]), fminf(values[2], values[3])) < least",
    ),
    mutation("sample.cu", "lowest key not listed", "key < low || key > high", "key <= low || key > high"),
    mutation("sample.cu", "keys above the highest listed", "key < low || key > high", "key < low"),
    mutation(
        "sample.cu",
        "list written beyond its end",
        "if (place < LIST_SIZE) list.keys[place] = key;",
        "list.keys[place] = key;",
    ),
    mutation(
        "sample.cu",
        "the sum must exceed the amount",
        "if (so_far >= amount) place",
        "if (so_far > amount) place",
    ),
    mutation(
        "sample.cu",
        "what lies above the list not counted",
        "so_far = base + block_scan(own, total)",
        "so_far = block_scan(own, total)",
    ),
    mutation(
        "sample.cu",
        "sum not known where nothing reaches the amount",
        "    if (threadIdx.x == 0 && base + total < amount) reached = base + total;\n",
    ),
    mutation(
        "sample.cu",
        "a part's last ids not measured",
        "min(first + width, end), [&]",
        "min(first + width, end - 1), [&]",
    ),
    mutation(
        "sample.cu", "the last part never picked", "part < WARPS - 1 && r >=", "part < WARPS - 2 && r >="
    ),
    mutation(
        "sample.cu",
        "random part of the last sum, not of the first",
        "if (whole) r = __umul64hi(random, total);",
        "r = __umul64hi(random, total);",
    ),
    mutation(
        "sample.cu",
        "smaller parts searched from the row's start",
        "sum_parts(row, begin, end, parts, measure);",
        "sum_parts(row, 0, end - begin, parts, measure);",
    ),
    mutation(
        "sample.cu",
        "no smaller parts",
        "whole || end - begin > THREADS;",
        "whole || end - begin > 4 * THREADS;",
    ),
    mutation(
        "sample.cu",
        "lowest id of equal values forgotten",
        "b.high >> 32 << 32 | 0xffffffffu - VOCAB_SIZE",
        "b.high >> 32 << 32 | 0xffffffffu - VOCAB_SIZE / 2",
    ),
    mutation(
        "sample.cu",
        "no way by the middle of the keys",
        "usable ? key : b.low + (b.high - b.low + 1) / 2",
        "usable ? key : b.low",
    ),
    mutation(
        "sample.cu",
        "a pivot's own mass not counted",
        "measures[p] += keys[i] >= pivots[p] ?",
        "measures[p] += keys[i] > pivots[p] ?",
    ),
    mutation(
        "sample.cu",
        "what lies above the bounds counted again",
        "if (i >= n || keys[i] > b.high) keys[i] = 0;",
        "if (i >= n) keys[i] = 0;",
    ),
    mutation(
        "sample.cu",
        "values behind a row's end counted",
        "if (i >= n || keys[i] > b.high) keys[i] = 0;",
        "if (keys[i] > b.high) keys[i] = 0;",
    ),
    mutation(
        "sample.cu",
        "sums of the last warp not added",
        "for (int w = 1; w < WARPS; ++w) sums",
        "for (int w = 1; w < WARPS - 1; ++w) sums",
    ),
    mutation("sample.cu", "upper bound stays on the pivot", "b.high = pivots[p] - 1", "b.high = pivots[p]"),
    mutation(
        "sample.cu", "what lies above the bounds forgotten", "measured = above + sums", "measured = sums"
    ),
    mutation(
        "sample.cu",
        "count above the bounds forgotten",
        "count = num_before + static_cast",
        "count = static_cast",
    ),
    mutation("sample.cu", "nucleus not rounded up", " + ((low & 0xffffffffu) != 0)"),
    mutation("sample.cu", "nucleus of nothing", "return target ? target : 1;", "return target;"),
    mutation(
        "sample.cu", "an overfull list taken for a whole one", "    if (list.size > LIST_SIZE) return -1;\n"
    ),
    mutation(
        "sample.cu",
        "more than top_k listed tokens kept",
        "counted ? min(list.size, static_cast<int>(s.top_k)) : list.size",
        "list.size",
    ),
    mutation(
        "sample.cu",
        "nucleus of all that is listed",
        "if (counted) first_reaching(list, kept",
        "if (true) first_reaching(list, kept",
    ),
    mutation(
        "sample.cu",
        "a list with too little mass taken for enough",
        "    if (last == kept) return -1;\n",
        "    if (last == kept) --kept;\n",
    ),
    mutation(
        "sample.cu",
        "the token that reaches top_p not kept",
        "kept = last + 1;",
        "kept = last > 0 ? last : 1;",
    ),
    mutation("sample.cu", "listed tokens not in order of their ids", "list.id(j) < list.id(i) ?", "j < i ?"),
    mutation("sample.cu", "ids of the list cut", "(1 << ID_BITS) - 1", "(1 << ID_BITS - 8) - 1"),
    mutation("sample.cu", "infinite logits not seen", " || fabsf(greatest) > 3.402823466e38f"),
    mutation(
        "sample.cu", "NaN not reported", "best == NAN_KEY ? -1 : id_of(best)", "id_of(best) & 0x7fffffff"
    ),
    mutation(
        "sample.cu",
        "a part's greatest key forgotten",
        "i < SEGMENTS; i += THREADS) best",
        "i < SEGMENTS - THREADS; i += THREADS) best",
    ),
    mutation(
        "sample.cu", "every vocabulary counted", "s.top_k > 0 && s.top_k < VOCAB_SIZE", "s.top_k < VOCAB_SIZE"
    ),
    mutation(
        "sample.cu",
        "nucleus looked for among too few",
        "(MASS_BITS + 1) / s.scale",
        "(MASS_BITS - 41) / s.scale",
    ),
    mutation(
        "sample.cu", "nucleus forgotten behind a long top_k", "stage += by_mass ? 1 : 2) {", "stage += 2) {"
    ),
    mutation(
        "sample.cu",
        "masses in place of counts",
        "measure.is_count = stage == 0;",
        "measure.is_count = false;",
    ),
    mutation("sample.cu", "tokens picked by their number", "        measure.is_count = false;\n"),
)

ROOFLINE = (
    mutation(
        "roofline.cu", "reads behind the end", "at < chunks ? words[at] : make_uint4(0, 0, 0, 0)", "words[at]"
    ),
    mutation(
        "roofline.cu", "a tile left out", "first += gridDim.x * tile", "first += (gridDim.x + 1) * tile"
    ),
    mutation(
        "roofline.cu", "a thread's last load left out", "i < LOADS; ++i) sum", "i < LOADS - 1; ++i) sum"
    ),
    mutation("roofline.cu", "first step of the butterfly missing", "int offset = 16", "int offset = 8"),
    mutation(
        "roofline.cu",
        "every block's sums in the first one's place",
        "(blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x) / 32",
        "threadIdx.x / 32",
    ),
    mutation(
        "roofline.cu",
        "the kernel that does nothing does something",
        "nothing(const unsigned int*, unsigned int*, int, int, int, int) {",
        "nothing(const unsigned int*, unsigned int* word, int, int, int, int) {\n    ++*word;",
    ),
    mutation(
        "roofline.cu",
        "one parameter less",
        "unsigned int*, int, int, int, int)",
        "unsigned int*, int, int, int)",
    ),
)

DECODE_STATE = (
    mutation(
        "decode_state.cu",
        "a barrier before the warps' totals are added dropped",
        "    __syncthreads();\n    int before",
        "    int before",
    ),
    mutation(
        "decode_state.cu",
        "barrier before the next turn dropped",
        "        __syncthreads();  // all have read the totals\n",
    ),
    mutation("decode_state.cu", "first step of the scan missing", "int offset = 1;", "int offset = 2;"),
    mutation("decode_state.cu", "own warp's total counted, too", "if (w < warp)", "if (w <= warp)"),
    mutation("decode_state.cu", "splits of earlier turns forgotten", "        num_splits += total;\n"),
    mutation(
        "decode_state.cu",
        "a split that is not full not counted",
        "(seq_len + KV_SPLIT - 1) / KV_SPLIT",
        "seq_len / KV_SPLIT",
    ),
    mutation(
        "decode_state.cu",
        "token of the place before",
        "kept[slot * 2 + place % 2]",
        "kept[slot * 2 + (place + 1) % 2]",
    ),
    mutation("decode_state.cu", "slot of another row", "exists ? rows[row]", "exists ? rows[start]"),
    mutation(
        "decode_state.cu",
        "places read where there are as many rows as fit",
        "place = rows[capacity + row]",
        "place = rows[num_rows + row]",
    ),
    mutation(
        "decode_state.cu",
        "prompts read where there are as many rows as fit",
        "rows[2 * capacity + row]",
        "rows[2 * num_rows + row]",
    ),
    mutation(
        "decode_state.cu", "rows stay where they are", "            rows[capacity + row] = place + 1;\n"
    ),
    mutation(
        "decode_state.cu", "newest output token not counted", "outputs = place + 1 -", "outputs = place -"
    ),
    mutation(
        "decode_state.cu", "a token read that padding has chosen", "if (slot != nobody) {", "if (exists) {"
    ),
    mutation(
        "decode_state.cu",
        "a sequence that has ended writes to its pages",
        "        if (token < 0) slot = nobody;\n",
    ),
    mutation(
        "decode_state.cu",
        "a sequence that has ended attends to its KV",
        "token < 0 ? 0 : place + 1",
        "place + 1",
    ),
    mutation("decode_state.cu", "the step's own token not seen", ": place + 1;\n", ": place;\n"),
    mutation("decode_state.cu", "no token as an id", "{max(token, 0), place", "{token, place"),
    mutation("decode_state.cu", "threads without a row write one", "if (exists) {\n", "if (true) {\n"),
    mutation(
        "decode_state.cu",
        "inputs written close together",
        "inputs[i * capacity + row]",
        "inputs[i * num_rows + row]",
    ),
    mutation(
        "decode_state.cu",
        "staged token of the place before",
        "kv_index[row] % 2",
        "(kv_index[row] + 1) % 2",
    ),
    mutation("decode_state.cu", "tokens of the host overwritten", " || token_ids[row] >= 0"),
    mutation(
        "decode_state.cu",
        "no staged token as an id",
        "token_ids[row] = max(token, 0)",
        "token_ids[row] = token",
    ),
    mutation(
        "decode_state.cu",
        "staged rows beyond the first block left out",
        "blockIdx.x * blockDim.x + threadIdx.x",
        "threadIdx.x",
        nth=1,
    ),
    mutation(
        "decode_state.cu",
        "a staged row that has ended writes to its pages",
        "token_slots[row] = slots",
        "slots",
    ),
    mutation(
        "decode_state.cu", "a staged row that has ended keeps its slot", "= slots[row] = logit", "= logit"
    ),
    mutation(
        "decode_state.cu",
        "what a staged row that has ended chooses is kept",
        "= logit_slots[row] = nobody",
        "= nobody",
    ),
    mutation("decode_state.cu", "a staged row that has ended attends", "    seq_lens[row] = 0;\n"),
    mutation(
        "decode_state.cu",
        "chosen tokens beyond the first block not kept",
        "blockIdx.x * blockDim.x + threadIdx.x",
        "threadIdx.x",
        nth=2,
    ),
    mutation("decode_state.cu", "what padding has chosen is kept", "    if (slot == nobody) return;\n"),
    mutation("decode_state.cu", "eighth stop id forgotten", "i < STOP_IDS;", "i < STOP_IDS - 1;"),
    mutation(
        "decode_state.cu", "stop ids of another slot", "stop_ids[slot * STOP_IDS", "stop_ids[row * STOP_IDS"
    ),
    mutation("decode_state.cu", "only the last stop id counts", "ends |= stop_ids", "ends = stop_ids"),
    mutation("decode_state.cu", "an end forgotten", "ends ? -1 : token", "token"),
    mutation(
        "decode_state.cu",
        "token kept for the input's place",
        "[logit_rows[row]] + 1) % 2",
        "[logit_rows[row]]) % 2",
    ),
    mutation("decode_state.cu", "place of another row's token", "kv_index[logit_rows[row]]", "kv_index[row]"),
)

MUTATIONS: tuple[Mutation, ...] = (
    *(*EMBEDDING, *COMMON, *RMSNORM, *LINEAR, *ROPE),
    *(*DECODE, *PREFILL, *ATTENTION, *SILU, *PTX),
    *(*LOGITS, *ARGMAX, *SAMPLING, *ADJUST, *MASK, *LOG_PROBS, *SAMPLE, *ROOFLINE, *DECODE_STATE),
)

TESTS: dict[str, tuple[str, ...]] = {
    "embedding": ("test_embedding", "test_take_rows"),
    "rmsnorm": ("test_rmsnorm", "test_linear_add", "test_lm_head"),
    "silu_mul": ("test_silu_mul",),
    "argmax": ("test_argmax",),
    "decode_state": ("test_decode_state",),
    "adjust_logits": ("test_adjust_logits",),
    "mask_logits": ("test_mask_logits",),
    "log_probs": ("test_log_probs",),
    "sample": ("test_sample",),
    "rope_kv_write": ("test_rope_kv_write",),
    "linear": ("test_linear", "test_linear_add", "test_emulated_backend"),
    "paged_attention_decode": ("test_paged_attention_decode", "test_paged_attention_prefill"),
    "paged_attention_prefill": ("test_paged_attention_prefill",),
    "roofline": ("test_roofline",),
}
"""The files in ``tests/kernels`` that judge a kernel file, the likeliest first; quick ones come first."""

GPU_TESTS: dict[str, tuple[str, ...]] = {
    "linear": ("test_gemm_order",),
    "rope_kv_write": ("test_far_pages",),
    "paged_attention_decode": ("test_far_pages",),
    "paged_attention_prefill": ("test_far_pages",),
}
"""What judges it beside them on a GPU."""


def stems_of(file: str) -> list[str]:
    """The kernel files that have a source file's text in theirs, in the order of ``TESTS``."""

    def included(name: str) -> set[str]:
        text = (ROOT / "cuda_src" / name).read_text(encoding="utf-8")
        found = set(re.findall(r'^#include "([\w.]+)"', text, re.MULTILINE))
        return {name}.union(*(included(other) for other in found))

    return [stem for stem in TESTS if file in included(f"{stem}.cu")]


# Checks


@dataclass(frozen=True)
class Check:
    """One run of pytest: a file in ``tests/kernels``, and what of it."""

    means: Means
    test_file: str
    keyword: str = ""  # -k
    racecheck: bool = False

    @property
    def title(self) -> str:
        words = [
            "racecheck" if self.racecheck else self.means,
            self.test_file,
            self.keyword and f"-k '{self.keyword}'",
        ]
        return " ".join(filter(None, words))

    def command(self, report: Path, cache: Path) -> list[str]:
        marker = {"gpu": "gpu", "emulated": "emulated and not slow", "compile": "not gpu and not slow"}[
            self.means
        ]
        command = [
            *(sys.executable, "-m", "pytest", "-x", "-q", "-m", marker, "--tb=short"),
            *("-o", f"cache_dir={cache}", f"--junitxml={report}", f"tests/kernels/{self.test_file}.py"),
            *(["-k", self.keyword] if self.keyword else []),
        ]
        sanitizer = ["compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "99"]
        return [*sanitizer, *command] if self.racecheck else command


def checks_of(planted: Mutation, gpu: bool) -> list[Check]:
    """What may see a mutation, in the order to try."""
    stems = stems_of(planted.file)
    if gpu:
        files = [file for stem in stems for file in (*TESTS[stem], *GPU_TESTS.get(stem, ()))]
        if planted.file == "ptx.cuh":
            files.insert(0, "test_wrappers")
        checks = [Check("gpu", file) for file in dict.fromkeys(files) if file != "test_emulated_backend"]
        if planted.racecheck:
            checks.append(Check("gpu", TESTS[stems[0]][0], planted.racecheck, racecheck=True))
        return checks
    compiled = [Check("compile", "test_compile", f"test_kernels_compile_clean and {stem}") for stem in stems]
    run = [Check("emulated", file) for file in dict.fromkeys(file for stem in stems for file in TESTS[stem])]
    return compiled + run if planted.seen_by == "compile" else run + compiled


class Outcome(NamedTuple):
    """Of one check or one mutation. ``test`` is "" where every test passed."""

    check: Check
    test: str = ""
    message: str = ""
    seconds: float = 0.0
    problem: str = ""  # why there is no verdict


def judge(check: Check, report: Path) -> Outcome | None:
    """What pytest's report says; None while it isn't written."""
    try:
        suite = ET.parse(report).getroot().find("testsuite")
    except (OSError, ET.ParseError):
        return None
    if suite is None:
        return None
    for case in suite.iter("testcase"):
        for found in (*case.findall("failure"), *case.findall("error")):
            message = essence(found.get("message", ""), found.text or "")
            if found.get("message") == "collection failure":
                return Outcome(check, problem=f"the tests can't be collected: {message}")
            if re.search(r"EmulatorError: g\+\+ ", found.get("message", "")):
                return Outcome(check, problem=f"g++ refuses it: {message}")
            where = case.get("classname", "").removeprefix("tests.kernels.").replace(".", "::")
            name = f"{where}::{case.get('name')}"
            return Outcome(check, name, message)
    if int(suite.get("tests", 0)) == int(suite.get("skipped", 0)):
        reason = next((s.get("message", "") for s in suite.iter("skipped")), "none is selected")
        return Outcome(check, problem=f"no test ran: {reason}")
    return Outcome(check)


def essence(message: str, traceback: str, limit: int = 110) -> str:
    """A failure's message as one line, without the exception's name or the compiler's command."""
    errors = [line for line in message.splitlines() if re.search(r"\berror\b: ", line)]
    if message.startswith("emulated.EmulatorError: g++") and errors:
        return re.sub(r"^\S*/", "", errors[0])[:limit]
    if re.fullmatch(r"\w+Error", message):  # a bare assert: what it asserts
        lines = traceback.split("\nE ")[0].splitlines()[-1:]
    else:
        lines = message.partition("\nMismatch at ")[0].partition("\nFirst 5 mismatches")[0].splitlines()
    noise = r"^(?:[\w.]+Error|Failed):|ERROR: (?=AddressSanitizer)| on address 0x.*| address 0x\w+"
    named = (re.sub(noise, "", line.strip()).strip() for line in lines)
    line = re.sub(r"^\w+: emulator: ", "", " ".join(filter(None, named)))  # which says whose it is, too
    return line if len(line) <= limit else line[: limit - 3] + "..."


# Running


class Stopped(Exception):
    """The user has stopped the tool."""


class BrokenBaseline(Exception):
    """Tests that fail, or don't run, with nothing planted."""


class Workshop:
    """Copies of the checkout in a scratch folder, one a job, and runs of pytest in them; `close` ends all."""

    FOLDERS = ("samir_vllm", "cuda_src", "tests/kernels")
    FILES = ("pyproject.toml", "tests/conftest.py", "tests/fake_model.py", "tests/harness.py")
    READ_ONLY = ("tests/golden",)

    def __init__(self, scratch: Path, jobs: int, timeout: float) -> None:
        self._scratch = scratch
        self._timeout = timeout
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False
        self._baselines: dict[Check, threading.Lock] = {}
        self._passed: set[Check] = set()
        self._copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for name in ("cache", "tmp"):
            (self._scratch / name).mkdir()
        for i in range(jobs):
            self._copies.put(self._copy(self._scratch / f"copy{i}"))

    def _copy(self, target: Path) -> Path:
        for name in self.FOLDERS:
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in self.FILES:
            shutil.copy(ROOT / name, target / name)
        for name in self.READ_ONLY:
            (target / name).symlink_to(ROOT / name)
        return target

    def close(self) -> None:
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            end(process, gently=True)

    @contextlib.contextmanager
    def _free_copy(self) -> Iterator[Path]:
        copy = self._copies.get()
        try:
            yield copy
        finally:
            self._copies.put(copy)

    def try_out(self, planted: Mutation, gpu: bool) -> Outcome:
        """Plants a mutation and runs its checks up to the first that sees it, each first without it.

        Raises:
            BrokenBaseline: a check fails without it.
            Stopped: `close` came between.
        """
        start = time.monotonic()
        outcome = None
        for check in checks_of(planted, gpu):
            self._require_baseline(check)
            outcome = self._run_check(check, planted)
            if outcome.test or outcome.problem:
                break
        assert outcome is not None
        return outcome._replace(seconds=time.monotonic() - start)

    def _require_baseline(self, check: Check) -> None:
        with self._lock:
            mine = self._baselines.setdefault(check, threading.Lock())
        with mine:
            if check in self._passed:
                return
            outcome = self._run_check(check, None)
            if outcome.problem or outcome.test:
                what = outcome.problem or f"{outcome.test}: {outcome.message}"
                raise BrokenBaseline(f"{check.title}, with nothing planted: {what}")
            self._passed.add(check)

    def _run_check(self, check: Check, planted: Mutation | None) -> Outcome:
        with self._free_copy() as copy:
            if planted is None:
                return self._pytest(check, copy)
            path = copy / "cuda_src" / planted.file
            original = path.read_text(encoding="utf-8")
            try:
                path.write_text(planted.apply(original), encoding="utf-8")
                return self._pytest(check, copy)
            finally:
                path.write_text(original, encoding="utf-8")

    def _pytest(self, check: Check, copy: Path) -> Outcome:
        report, log = copy / "report.xml", copy / "log.txt"
        report.unlink(missing_ok=True)
        with log.open("wb") as output:
            with self._lock:
                if self._stopped:
                    raise Stopped
                # A session of its own: Ctrl-C reaches this program alone, which ends all that a run started.
                process = subprocess.Popen(
                    check.command(report, self._scratch / "cache"),
                    cwd=copy,
                    env=self._environment(copy),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._running.add(process)
            try:
                outcome = self._await(check, process, report)
            finally:
                end(process)
                with self._lock:
                    self._running.discard(process)
        if self._stopped:
            raise Stopped
        if outcome is None:
            tail = " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-300:]
            return Outcome(check, problem=f"pytest ended without a report: {tail}")
        if check.racecheck and not outcome.test and process.returncode == 99:
            summary = re.findall(
                r"RACECHECK SUMMARY: (.*)", log.read_text(encoding="utf-8", errors="replace")
            )
            return Outcome(check, "racecheck", " ".join(summary))
        return outcome

    def _await(self, check: Check, process: subprocess.Popen[bytes], report: Path) -> Outcome | None:
        """The verdict as soon as it is written: pytest itself still waits for the builds it began."""
        end_at = time.monotonic() + self._timeout
        while time.monotonic() < end_at:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            ended = process.returncode is not None
            if ended or not check.racecheck:
                outcome = judge(check, report)
                if outcome or ended:
                    return outcome
        return Outcome(check, problem=f"no end after {self._timeout:.0f} s")

    def _environment(self, copy: Path) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONSAFEPATH"))}
        return inherited | {
            "PYTHONPATH": str(copy),  # before an installed package, whatever that is
            "TMPDIR": str(self._scratch / "tmp"),
            "SAMIR_VLLM_CACHE_DIR": str(self._scratch / "cache" / "cubins"),
        }

    def check_import(self) -> None:
        """The copy's package and kernels are those that are tested.

        Raises:
            BrokenBaseline: others are.
        """
        code = (
            "import samir_vllm; from samir_vllm.backends.cuda_probe import find_cuda_src; "
            "print(samir_vllm.__file__, find_cuda_src(), sep='\\n')"
        )
        with self._free_copy() as copy:
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=copy,
                env=self._environment(copy),
                capture_output=True,
                text=True,
            )
            found = [Path(line) for line in done.stdout.split("\n")[:2]]
            if done.returncode or not all(path.is_relative_to(copy.resolve()) for path in found):
                raise BrokenBaseline(f"Python imports {found}, not the copy in {copy}\n{done.stderr}")


def end(process: subprocess.Popen[bytes], *, gently: bool = False) -> None:
    """Ends a run that hasn't ended, and all it has started; pytest may get a moment to tidy up."""
    signals = [(signal.SIGINT, 5.0), (signal.SIGKILL, 10.0)]
    for sign, seconds in signals if gently else signals[1:]:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


# The program


class Row(NamedTuple):
    """A line of the result."""

    planted: Mutation
    outcome: Outcome

    @property
    def seen(self) -> bool:
        return bool(self.outcome.test)

    @property
    def by(self) -> str:
        if self.seen:
            return "racecheck" if self.outcome.check.racecheck else self.outcome.check.means
        return "no verdict" if self.outcome.problem else "no test"

    @property
    def missing(self) -> bool:
        """Nobody saw what the tests in use are there to see."""
        due = self.planted.seen_by != "gpu" or self.outcome.check.means == "gpu"
        return not self.seen and due and not self.planted.by_chance

    @property
    def what(self) -> str:
        return self.outcome.message or self.outcome.problem or self.planted.reason


def try_all(chosen: Sequence[Mutation], gpu: bool, jobs: int, timeout: float) -> list[Row]:
    """Tries mutations, several at a time, and tells of each as it ends; see `Workshop.try_out`."""
    rows: dict[Mutation, Row] = {}
    with tempfile.TemporaryDirectory(prefix="mutate-kernels-", ignore_cleanup_errors=True) as scratch:
        workshop, pool = Workshop(Path(scratch), jobs, timeout), ThreadPoolExecutor(jobs)
        try:
            workshop.check_import()
            tasks = {pool.submit(workshop.try_out, planted, gpu): planted for planted in chosen}
            for task in as_completed(tasks):
                row = rows[tasks[task]] = Row(tasks[task], task.result())
                count = f"{len(rows):{len(str(len(chosen)))}}/{len(chosen)}"
                whom = f"{row.outcome.test or row.by} ({row.outcome.seconds:.1f} s)"
                print(f"[{count}] {row.planted.title}: {whom}", flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            workshop.close()
            pool.shutdown()
    return [rows[planted] for planted in chosen]


def print_table(rows: Sequence[Row]) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("planted", "seen by", "test", "what it says"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        by = f"[bold red]{row.by}[/]" if row.missing else row.by
        table.add_row(*(escape(row.planted.title), by, escape(row.outcome.test), escape(row.what)))
    Console().print(table)


def markdown(rows: Sequence[Row], untried: Sequence[Mutation]) -> str:
    """The table of a run; ``untried`` are those that it left to a GPU."""
    table = [("file", "planted", "seen by", "what it says"), ("---",) * 4]
    for row in rows:
        by = f"{row.by}: `{row.outcome.test}`" if row.seen else row.by
        table.append((f"`{row.planted.file}`", row.planted.name, by, row.what))
    table += [(f"`{m.file}`", m.name, "left to a GPU", m.reason) for m in untried]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in table)


def summary(rows: Sequence[Row], untried: Sequence[Mutation], seconds: float) -> str:
    """How many were seen by whom, in one line."""
    counts = {by: sum(row.by == by for row in rows) for by in dict.fromkeys(row.by for row in rows)}
    parts = [
        f"{count} without a verdict" if by == "no verdict" else f"{count} by {by}"
        for by, count in counts.items()
    ]
    left = f"; {len(untried)} left to a GPU" if untried else ""
    return f"{len(rows)} planted in {seconds:.0f} s, seen: {', '.join(parts)}{left}"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description="Plants mistakes in the kernels, one at a time in a copy; shows which test sees each.",
        epilog="exit status: 0 every mistake was seen, 1 not, 2 a mistake of the user's",
    )
    result.add_argument(
        "--only", metavar="PATTERN", help="a regular expression: 'argmax', 'barrier', 'decode.*split'"
    )
    result.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time (1)")
    result.add_argument("--all", action="store_true", help="those too that others are there to see")
    result.add_argument(
        "--gpu", action="store_true", help="the tests marked gpu judge, of what only they can see"
    )
    result.add_argument("--list", action="store_true", help="name the mutations and try none")
    result.add_argument("--table", type=Path, metavar="FILE.md", help="write the table here, too")
    result.add_argument(
        "--timeout", type=float, default=600, metavar="SECONDS", help="for one run of pytest (600)"
    )
    return result


def choose(only: str, gpu: bool, everything: bool) -> list[Mutation]:
    """What the options ask for.

    Raises:
        ValueError: nothing, or no regular expression.
    """
    try:
        named = [m for m in MUTATIONS if re.search(only, m.title, re.IGNORECASE)]
    except re.error as exc:
        raise ValueError(f"--only {only}: {exc}") from None
    if not named:
        raise ValueError(f"--only {only}: no mutation has such a name; --list shows them")
    chosen = [m for m in named if everything or gpu == (m.seen_by == "gpu" or (gpu and bool(m.racecheck)))]
    if not chosen:
        raise ValueError(
            f"--only {only}: {'not for a GPU alone' if gpu else 'for --gpu alone'}; or add --all"
        )
    return chosen


def unable(chosen: Sequence[Mutation], gpu: bool) -> str:
    """What this machine lacks for them; "" if nothing."""
    if not gpu:
        return "" if shutil.which("g++") else "g++, which builds kernels for the CPU, isn't installed"
    if any(m.racecheck for m in chosen) and not shutil.which("compute-sanitizer"):
        return "compute-sanitizer, of the CUDA toolkit, isn't on the PATH"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        chosen = choose(options.only or "", options.gpu, options.all or options.list)
        if options.list:
            for planted in chosen:
                print(f"{planted.seen_by:8}  {planted.title}")
            return 0
        if options.jobs < 1 or options.timeout <= 0:
            raise ValueError("--jobs and --timeout are positive")
        if lack := unable(chosen, options.gpu):
            raise ValueError(lack)
        if options.table and not options.table.parent.is_dir():
            raise ValueError(f"--table {options.table}: no such folder")
    except ValueError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    start = time.monotonic()
    try:
        rows = try_all(chosen, options.gpu, options.jobs, options.timeout)
    except BrokenBaseline as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    everything = choose(options.only or "", options.gpu, everything=True)
    untried = [m for m in everything if m.seen_by == "gpu" and m not in chosen]
    print_table(rows)
    print(summary(rows, untried, time.monotonic() - start))
    if options.table:
        options.table.write_text(markdown(rows, untried), encoding="utf-8")
    return int(any(row.missing for row in rows))


def stop(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
