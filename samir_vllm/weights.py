"""Memory-mapped safetensors: checks every name, shape, dtype and byte range of a checkpoint; hands out BF16.

Tensors are read-only views of the mapped file, so opening reads the headers alone and a tensor's bytes
come from the disk when somebody touches them. Deliberately knows nothing of devices, of what a tensor is
for, or of how a checkpoint got into its folder.

File format (safetensors specification): 8 bytes of little-endian header length, a JSON object
``{name: {"dtype", "shape", "data_offsets": [start, end]}}``, then the data, to which offsets are relative;
the ranges tile the data without holes or overlaps.
"""

from __future__ import annotations

import fnmatch
import json
import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self, TypeGuard

import ml_dtypes
import numpy as np

from samir_vllm.config import MAX_JSON_BYTES, ModelConfig, show, show_path
from samir_vllm.errors import WeightsError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS = 8

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_EMBEDDINGS, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Bytes of one element. The sizes of dtypes we don't run are needed too: an ignored buffer may have one.
_WIDTHS = dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1)
_WIDTHS |= dict.fromkeys(("U16", "I16", "F16", "BF16"), 2) | dict.fromkeys(("U32", "I32", "F32"), 4)
_WIDTHS |= dict.fromkeys(("U64", "I64", "F64"), 8)

_BF16 = np.dtype(ml_dtypes.bfloat16)
_DTYPES = {"BF16": _BF16, "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
_CONVERT_ELEMENTS = 1 << 22  # bounds the FP32 scratch of a conversion to 16 MiB

# Tables that old exporters saved with the weights; we compute our own.
_HARMLESS = ("*.rotary_emb.inv_freq", "*.rotary_emb.cos_cached", "*.rotary_emb.sin_cached")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where one tensor lies: its file and the offset of its first byte in it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Weights(Mapping[str, np.ndarray]):
    """The checkpoint's tensors by Hugging Face name; made by ``open_weights``.

    ``weights[name]`` is a read-only ``ml_dtypes.bfloat16`` array, a view of the mapped file where the file
    holds BF16, else a fresh copy rounded to nearest even. ``weights["lm_head.weight"]`` is the embeddings
    where they are tied. ``notices`` are lines a user should be told. The files must not shrink while open.
    """

    def __init__(self, tensors: dict[str, _Tensor], maps: dict[Path, mmap.mmap], notices: list[str]) -> None:
        self._tensors = tensors
        self._maps = maps
        self.notices = notices

    def __getitem__(self, name: str) -> np.ndarray:
        if name == _LM_HEAD and name not in self._tensors:
            name = _EMBEDDINGS
        tensor = self._tensors[name]
        view: np.ndarray = np.ndarray(
            tensor.shape, _DTYPES[tensor.dtype], self._maps[tensor.path], offset=tensor.offset
        )
        return view if tensor.dtype == "BF16" else _to_bf16(view)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def names(self) -> list[str]:
        """What iteration gives: each tensor in use, in the model's order (no tied ``lm_head.weight``)."""
        return list(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as BF16."""
        return sum(math.prod(tensor.shape) * _BF16.itemsize for tensor in self._tensors.values())

    def close(self) -> None:
        """Forgets the files; a mapping goes once the last array that views it has gone."""
        self._tensors, self._maps = {}, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape ([out_features, in_features] for matrices) of all that a Llama of this config stores."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    expected: dict[str, tuple[int, ...]] = {_EMBEDDINGS: (config.vocab_size, hidden)}
    for layer_idx in range(config.num_layers):
        expected |= {f"model.layers.{layer_idx}.{name}.weight": shape for name, shape in layer.items()}
    expected["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        expected[_LM_HEAD] = (config.vocab_size, hidden)
    return expected


def open_weights(model_dir: Path, config: ModelConfig) -> Weights:
    """Maps the checkpoint in ``model_dir`` and checks it against ``config``; reads no tensor data.

    Files: the shards that ``model.safetensors.index.json`` names, if it is there; else ``model.safetensors``.
    With both there and a shard missing (an interrupted download), the single file is taken, with a notice.
    The index decides which shard's copy of a tensor counts. With tied embeddings a stored
    ``lm_head.weight`` is checked but not used, as in the Hugging Face implementation.

    Raises ``WeightsError`` naming file and tensor: missing or damaged files; tensors missing, unexpected
    (old RoPE tables apart), of another shape, or of a dtype other than BF16, F16 and F32.
    """
    model_dir = Path(model_dir)
    notices: list[str] = []
    placed = _find_files(model_dir, notices)
    maps: dict[Path, mmap.mmap] = {}
    headers: dict[Path, dict[str, _Tensor]] = {}
    files = [model_dir / _SINGLE_FILE] if placed is None else sorted(set(placed.values()))
    for path in files:
        headers[path], maps[path] = _map_file(path)
    found = {name: tensor for path in files for name, tensor in headers[path].items()}
    if placed is not None:
        found = _follow_index(model_dir / _INDEX_FILE, placed, headers, found)
    tensors = _check_tensors(model_dir, found, config)
    converted = sorted({tensor.dtype for tensor in tensors.values()} - {"BF16"})
    if converted:
        notices.append(f"{' and '.join(converted)} weights are rounded to bfloat16 as they load")
    return Weights(tensors, maps, notices)


def _to_bf16(view: np.ndarray) -> np.ndarray:
    """A read-only BF16 copy of an F16 or F32 array, rounded to nearest even, in blocks."""
    out = np.empty(view.shape, _BF16)
    source, target = view.reshape(-1), out.reshape(-1)
    for start in range(0, source.size, _CONVERT_ELEMENTS):
        block = slice(start, start + _CONVERT_ELEMENTS)
        target[block] = source[block].astype(np.float32)
    out.flags.writeable = False
    return out


# Which files


def _find_files(model_dir: Path, notices: list[str]) -> dict[str, Path] | None:
    """Tensor name to shard as the index says, or None for the single file."""
    index, single = model_dir / _INDEX_FILE, model_dir / _SINGLE_FILE
    if not os.path.lexists(index):
        if not os.path.lexists(single):
            _refuse_folder(model_dir)
        return None
    placed = _read_index(index)
    missing = sorted({path.name for path in placed.values() if not os.path.exists(path)})
    if not missing:
        return placed
    if os.path.exists(single):
        notices.append(f"{_INDEX_FILE} names {show(missing[0])}, which is missing: {_SINGLE_FILE} is used")
        return None
    shard = model_dir / missing[0]
    if shard.is_symlink():
        return placed  # opening it will say where the link leads
    raise WeightsError(f"{show_path(index)} names {show(missing[0])}, which is missing: download it again")


def _refuse_folder(model_dir: Path) -> NoReturn:
    shown = show_path(model_dir)
    try:
        names = sorted(os.listdir(model_dir))
    except OSError as error:
        raise WeightsError(f"{shown} is no readable folder ({error.strerror}): check the path") from None
    other = [name for name in names if re.fullmatch(r"(consolidated|pytorch_model).*\.(pth|bin)", name)]
    if other:
        raise WeightsError(
            f"{shown} holds {show(other[0])}, a format that isn't read: get the model's safetensors files"
        )
    if any(re.fullmatch(r"model-\d+-of-\d+\.safetensors", name) for name in names):
        raise WeightsError(f"{shown} holds shards but no {_INDEX_FILE}: download that file too")
    raise WeightsError(f"{shown} holds no {_SINGLE_FILE}: download the weights into it")


def _read_index(index: Path) -> dict[str, Path]:
    """``weight_map`` of the index, each file name checked to stay inside the folder."""
    shown = show_path(index)
    try:
        if not os.path.isfile(index) or index.stat().st_size > MAX_JSON_BYTES:
            raise WeightsError(
                f"{shown} must be a file of up to {MAX_JSON_BYTES >> 20} MiB: download it again"
            )
        raw = index.read_bytes()
    except OSError as error:
        raise WeightsError(f"{shown} can't be read ({error.strerror}): download it again") from None
    parsed = _parse_json(raw, shown)
    weight_map = parsed.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{shown} has no weight_map: download it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.+-]{1,200}\.safetensors", file, re.ASCII):
            raise WeightsError(
                f"{shown}: tensor {show(name)} lies in {show(file)}, which is no plain *.safetensors name: "
                "download the index again"
            )
    return {name: index.parent / file for name, file in weight_map.items()}


def _follow_index(
    index: Path, placed: dict[str, Path], headers: dict[Path, dict[str, _Tensor]], found: dict[str, _Tensor]
) -> dict[str, _Tensor]:
    """The copies that the index names; a tensor in a shard that the index leaves out is an error later on."""
    for name, path in placed.items():
        if name not in headers[path]:
            raise WeightsError(
                f"{show_path(path)} lacks tensor {show(name)}, which {index.name} places there: "
                "download both again"
            )
    return found | {name: headers[path][name] for name, path in placed.items()}


# One file


def _map_file(path: Path) -> tuple[dict[str, _Tensor], mmap.mmap]:
    """The checked header of a safetensors file, and its read-only mapping."""
    shown = show_path(path)
    if path.is_symlink() and not os.path.exists(path):
        raise WeightsError(f"{shown} links to {show(os.readlink(path))}, which is missing: download it again")
    try:
        if not path.is_file():
            raise WeightsError(f"{shown} is not a file: download the weights again")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(_header_length(file.read(8), size, shown))
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise WeightsError(f"{shown} can't be read ({error.strerror}): check its rights") from None
    if not header.startswith(b"{"):
        raise WeightsError(f"{shown}: the header is no JSON object: download the file again")
    return _parse_header(path, header, size), mapped


def _header_length(prefix: bytes, size: int, shown: str) -> int:
    if size < 8 or len(prefix) < 8:
        raise WeightsError(f"{shown} has {size} bytes, too few for a safetensors file: download it again")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise WeightsError(
            f"{shown}: a header of {length} bytes is over the format's limit of {MAX_HEADER_BYTES}: "
            "not a safetensors file, or damaged; download it again"
        )
    if 8 + length > size:
        raise WeightsError(
            f"{shown} ends inside its header ({size} bytes, header of {length}): download it again"
        )
    return length


def _parse_header(path: Path, raw: bytes, size: int) -> dict[str, _Tensor]:
    """Every tensor of one file, its byte range proven to lie in the file."""
    shown = show_path(path)
    header = _parse_json(raw, f"{shown}: the header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WeightsError(f"{shown}: __metadata__ must map names to text: download the file again")
    data_start = 8 + len(raw)
    tensors, ranges = {}, []
    for name, entry in header.items():
        try:
            dtype, shape, start, end = _parse_entry(entry, size - data_start)
        except ValueError as error:
            raise WeightsError(f"{shown}: tensor {show(name)}: {error}: download the file again") from None
        tensors[name] = _Tensor(path, dtype, shape, data_start + start)
        ranges.append((start, end, name))
    reached, previous = 0, "the header"  # where the last range ended, and whose it was
    for start, end, name in sorted(ranges):
        if start != reached:
            fault = "overlaps" if start < reached else "leaves a hole after"
            raise WeightsError(f"{shown}: tensor {show(name)} {fault} {previous}: download the file again")
        reached, previous = end, show(name)
    if reached != size - data_start:
        raise WeightsError(
            f"{shown} has {size - data_start - reached} bytes after {previous}, its last: "
            "download the file again"
        )
    return tensors


def _parse_entry(entry: object, data_size: int) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, start, end) of a header entry, start and end relative to the data.

    Raises ``ValueError`` with the cause alone; the caller adds file and tensor.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"the entry is {show(entry)}, not an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _WIDTHS:
        raise ValueError(f"unknown dtype {show(dtype)}")
    if not _is_sizes(shape) or len(shape) > MAX_DIMS:
        raise ValueError(f"the shape {show(shape)} is no list of up to {MAX_DIMS} sizes")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"data_offsets {show(offsets)} is no pair of byte positions")
    start, end = offsets
    if end < start:
        raise ValueError(f"it ends at byte {end}, before its start {start}")
    if end > data_size:
        raise ValueError(f"it ends at byte {end}, past the file's {data_size} bytes of data (cut short?)")
    if math.prod(shape) * _WIDTHS[dtype] != end - start:
        raise ValueError(f"shape {show(shape)} of {dtype} does not fill its {end - start} bytes")
    return dtype, tuple(shape), start, end


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    """A list of plain integers (bool isn't one) in 0..2**63 - 1."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _parse_json(raw: bytes, shown: str) -> dict[str, Any]:
    """A JSON object without duplicate keys; ``WeightsError`` starting with ``shown`` otherwise."""
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        cause = "nested too deeply" if isinstance(error, RecursionError) else show(str(error))
        raise WeightsError(f"{shown} is not valid JSON ({cause}): download the file again") from None
    if not isinstance(parsed, dict):
        raise WeightsError(f"{shown} must be a JSON object, not {show(parsed)}: download the file again")
    return parsed


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {show(twice)}")
    return unique


# The whole


def _check_tensors(model_dir: Path, found: dict[str, _Tensor], config: ModelConfig) -> dict[str, _Tensor]:
    """The tensors the model uses, in its order, after comparing all of ``found`` with the config."""
    expected = expected_tensors(config)
    shown = show_path(model_dir)
    missing = [name for name in expected if name not in found]
    if missing:
        raise WeightsError(
            f"{shown}: tensor {missing[0]} is missing{_and_more(missing)}: "
            "download the weights again, or correct config.json"
        )
    allowed = expected | {_LM_HEAD: (config.vocab_size, config.hidden_size)}
    for name, tensor in found.items():
        if name not in allowed:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in _HARMLESS):
                continue
            raise WeightsError(
                f"{show_path(tensor.path)}: tensor {show(name)} doesn't belong to the Llama that config.json "
                "describes: check that both files come from the same model"
            )
        if tensor.shape != allowed[name]:
            raise WeightsError(
                f"{show_path(tensor.path)}: tensor {name} has shape {list(tensor.shape)}, but config.json "
                f"asks for {list(allowed[name])}: check that both files come from the same model"
            )
        if tensor.dtype not in _DTYPES:
            raise WeightsError(
                f"{show_path(tensor.path)}: tensor {name} has dtype {tensor.dtype}, which isn't supported: "
                "get the model in BF16, F16 or F32"
            )
    return {name: found[name] for name in expected}


def _and_more(names: Sequence[str]) -> str:
    others = len(names) - 1
    return f" (and {others} more)" if others else ""
