"""The safetensors reader against the safetensors library, damaged files of every kind, and noise."""

from __future__ import annotations

import json
import math
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from test_config import LLAMA32_1B

from harness import load_tool
from samir_vllm import weights as weights_module
from samir_vllm.config import ModelConfig
from samir_vllm.errors import WeightsError
from samir_vllm.weights import expected_tensors, open_weights

TINY = Path(__file__).parent / "golden" / "tiny-llama3"
INDEX = "model.safetensors.index.json"
SMALL = ModelConfig(
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=10,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
SMALL_TIED = replace(SMALL, tie_word_embeddings=True)
NORM = "model.norm.weight"
Arrays = dict[str, np.ndarray]
CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "int64": "I64"}


def random_arrays(config: ModelConfig, dtype: Any = ml_dtypes.bfloat16) -> Arrays:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in expected_tensors(config).items()}


def layout(arrays: Arrays) -> tuple[dict[str, Any], bytes]:
    """(header, data) of a sound file."""
    header, data = {}, b""
    for name, array in arrays.items():
        raw = array.tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": CODES[array.dtype.name], "shape": [*array.shape], "data_offsets": offsets}
        data += raw
    return header, data


def write(path: Path, header: object, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def save(folder: Path, arrays: Arrays, name: str = "model.safetensors") -> None:
    write(folder / name, *layout(arrays))


def save_shards(folder: Path, arrays: Arrays) -> dict[str, str]:
    """Two shards and their index; returns its weight_map."""
    names = list(arrays)
    files = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
    for file, part in files.items():
        save(folder, {name: arrays[name] for name in part}, file)
    weight_map = {name: file for file, part in files.items() for name in part}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def refusal(folder: Path, config: ModelConfig = SMALL) -> str:
    with pytest.raises(WeightsError) as caught:
        open_weights(folder, config)
    message = str(caught.value)
    assert str(folder) in message
    check_line(message)
    return message


def check_line(message: str) -> None:
    assert "\n" not in message
    assert len(message) < 1000
    message.encode("utf-8")  # printable: no lone surrogates


# ---- what loads


def test_golden_model_bit_by_bit_as_read_only_views() -> None:
    config = ModelConfig.from_dir(TINY)
    reference = load_file(TINY / "model.safetensors")
    with open_weights(TINY, config) as weights:
        assert weights.names() == list(expected_tensors(config)) == list(weights)
        assert set(weights.names()) == set(reference)
        assert weights.nbytes == 2 * config.num_parameters
        assert weights.notices == []
        for name, array in weights.items():
            assert array.dtype == ml_dtypes.bfloat16
            assert array.base is not None  # a view, not a copy
            assert not array.flags.writeable
            np.testing.assert_array_equal(array.view(np.uint16), reference[name].view(np.uint16))


def test_views_outlive_close(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL)
    save(tmp_path, arrays)
    with open_weights(tmp_path, SMALL) as weights:
        norm = weights[NORM]
    np.testing.assert_array_equal(norm, arrays[NORM])
    with pytest.raises(KeyError):
        weights[NORM]


def test_untied_head_and_unaligned_data(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL)
    header, data = layout(arrays)
    raw = json.dumps(header).encode()
    write(tmp_path / "model.safetensors", raw + b" " * (1 - len(raw) % 2), data)  # data at an odd offset
    weights = open_weights(tmp_path, SMALL)
    assert weights.names()[-1] == "lm_head.weight"
    for name, array in arrays.items():
        np.testing.assert_array_equal(weights[name], array)


def test_tied_head_is_the_embeddings_whether_stored_or_not(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL)  # with an lm_head of its own
    for stored in (arrays, {name: array for name, array in arrays.items() if name != "lm_head.weight"}):
        save(tmp_path, stored)
        weights = open_weights(tmp_path, SMALL_TIED)
        np.testing.assert_array_equal(weights["lm_head.weight"], arrays["model.embed_tokens.weight"])
        assert "lm_head.weight" not in weights.names()
        assert weights.nbytes == 2 * SMALL_TIED.num_parameters


def bf16_by_hand(array: np.ndarray) -> np.ndarray:
    """Round to nearest even on the bits; for finite values."""
    bits = array.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize(("dtype", "code"), [(np.float16, "F16"), (np.float32, "F32")])
def test_other_floats_are_rounded_to_nearest_even(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any, code: str
) -> None:
    monkeypatch.setattr(weights_module, "_CONVERT_ELEMENTS", 7)  # so that blocks and a rest occur
    arrays = random_arrays(SMALL, dtype)
    # Ties go to the even neighbour: down, up, and down just below the tie.
    arrays[NORM] = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 - 2**-10, -1 - 2**-8, 0, 1, 2, 3], dtype)
    save(tmp_path, arrays)
    weights = open_weights(tmp_path, SMALL)
    for name, array in arrays.items():
        assert not weights[name].flags.writeable
        np.testing.assert_array_equal(weights[name].view(np.uint16), bf16_by_hand(array))
    assert weights[NORM][:3].tolist() == [1.0, 1 + 2**-6, 1.0]
    assert weights.nbytes == 2 * SMALL.num_parameters
    assert len(weights.notices) == 1
    assert code in weights.notices[0]


def test_old_rope_tables_of_any_dtype_are_ignored(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL)
    save(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2)} | arrays)
    assert open_weights(tmp_path, SMALL).names() == list(arrays)


def test_metadata_and_padding_are_allowed(tmp_path: Path) -> None:
    header, data = layout(random_arrays(SMALL))
    raw = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    write(tmp_path / "model.safetensors", raw + b"   ", data)
    open_weights(tmp_path, SMALL)


def test_llama_32_1b_is_mapped_not_read(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(LLAMA32_1B)
    header, end = {}, 0
    for name, shape in expected_tensors(config).items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    path = tmp_path / "model.safetensors"
    write(path, header, b"")
    data_start = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(data_start + end)  # sparse
        file.seek(-4096, 2)
        file.write(np.ones(2048, ml_dtypes.bfloat16).tobytes())
    tracemalloc.start()
    try:
        weights = open_weights(tmp_path, config)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(weights) == 146
    assert weights.nbytes == end == 2_471_628_800
    assert (weights[NORM] == 1).all()
    assert weights["model.layers.15.mlp.down_proj.weight"].shape == (2048, 8192)
    assert weights["lm_head.weight"].shape == (128256, 2048)
    assert peak < 4 << 20


# ---- which files


def test_shards(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL)
    save_shards(tmp_path, arrays)
    weights = open_weights(tmp_path, SMALL)
    assert weights.names() == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(weights[name], array)


def test_index_decides_between_two_copies(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL)
    for file, norm in (("a.safetensors", 1), ("b.safetensors", 2), ("c.safetensors", 3)):
        save(tmp_path, arrays | {NORM: np.full(8, norm, ml_dtypes.bfloat16)}, file)
    for wanted, file in enumerate(("a.safetensors", "b.safetensors", "c.safetensors"), 1):
        placed = dict.fromkeys(arrays, "b.safetensors") | {NORM: file, "lm_head.weight": "c.safetensors"}
        placed["model.embed_tokens.weight"] = "a.safetensors"
        write_index(tmp_path, placed)
        assert open_weights(tmp_path, SMALL)[NORM].tolist() == [wanted] * 8


def test_index_wins_over_a_single_file_unless_a_shard_is_missing(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL)
    save_shards(tmp_path, arrays)
    save(tmp_path, arrays | {NORM: np.ones(8, ml_dtypes.bfloat16)})
    np.testing.assert_array_equal(open_weights(tmp_path, SMALL)[NORM], arrays[NORM])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    weights = open_weights(tmp_path, SMALL)
    assert weights[NORM].tolist() == [1] * 8
    assert "model-00002-of-00002.safetensors" in weights.notices[0]


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_shards(tmp_path, random_arrays(SMALL))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "x.bin", "a\n.safetensors", 3,
     None, "x\0.safetensors", "x" * 300 + ".safetensors", "a\\b.safetensors", ["model.safetensors"]],
)  # fmt: skip
def test_index_may_only_name_files_of_its_folder(tmp_path: Path, file: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    arrays = random_arrays(SMALL)
    save(tmp_path, arrays, "x.safetensors")
    write_index(folder, dict.fromkeys(arrays, file))
    assert INDEX in refusal(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": []}', b"\xff", b"[" * 200_000,
     b'{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}'],
    ids=lambda content: repr(content[:20]),
)  # fmt: skip
def test_broken_index(tmp_path: Path, content: bytes) -> None:
    save(tmp_path, random_arrays(SMALL))
    (tmp_path / INDEX).write_bytes(content)
    assert INDEX in refusal(tmp_path)


def test_index_and_shard_disagree(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL)
    weight_map = save_shards(tmp_path, arrays)
    write_index(tmp_path, weight_map | {NORM: "model-00001-of-00002.safetensors"})
    message = refusal(tmp_path)
    assert NORM in message
    assert "model-00001-of-00002.safetensors" in message
    write_index(tmp_path, {name: file for name, file in weight_map.items() if name != "lm_head.weight"})
    open_weights(tmp_path, SMALL_TIED)


def test_symlinks_are_followed_and_dangling_ones_named(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "model"
    blobs.mkdir()
    folder.mkdir()
    save(blobs, random_arrays(SMALL))
    (folder / "model.safetensors").symlink_to(blobs / "model.safetensors")
    open_weights(folder, SMALL)
    (blobs / "model.safetensors").unlink()
    assert "blobs/model.safetensors" in refusal(folder)
    write_index(folder, dict.fromkeys(expected_tensors(SMALL), "model.safetensors"))
    assert "blobs/model.safetensors" in refusal(folder)


@pytest.mark.parametrize(
    ("present", "fragment"),
    [
        (None, "model.safetensors"),
        ("consolidated.00.pth", "safetensors"),
        ("pytorch_model.bin", "safetensors"),
        ("model-00001-of-00002.safetensors", INDEX),
    ],
)
def test_folder_without_weights(tmp_path: Path, present: str | None, fragment: str) -> None:
    if present:
        (tmp_path / present).touch()
    message = refusal(tmp_path)
    assert fragment in message
    assert (present or "") in message or present == "model-00001-of-00002.safetensors"


def test_no_folder_and_no_file(tmp_path: Path) -> None:
    assert "nowhere" in refusal(tmp_path / "nowhere")
    (tmp_path / "model.safetensors").mkdir()
    refusal(tmp_path)


# ---- damaged files


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        b"\xff" * 8,
        b"\xff" * 64,
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 1 << 63) + b"{}",
    ],
    ids=lambda raw: repr(raw[:10]),
)
def test_bad_lengths(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    assert "model.safetensors" in refusal(tmp_path)


def test_huge_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001) + b"{}")
        file.truncate(1 << 32)  # sparse
    tracemalloc.start()
    try:
        assert "100000001" in refusal(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"x",
        b"{",
        b"[]",
        b"null",
        b'{"a": 1, "a": 2}',
        b'{"a": {"dtype": "BF16", "dtype": "F32"}}',
        b"\xff\xff",
        b'{"a":' * 200_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b"  {}",
        b"{}",
    ],
    ids=lambda header: repr(header[:20]),
)
def test_bad_headers(tmp_path: Path, header: bytes) -> None:
    write(tmp_path / "model.safetensors", header, b"")
    assert refusal(tmp_path)


@pytest.mark.parametrize("length", [3, 9, 10, 11])
def test_header_cut_short(tmp_path: Path, length: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    assert "ends inside its header" in refusal(tmp_path)


@pytest.mark.parametrize("metadata", [7, None, [], {"a": 7}, {"a": {}}])
def test_bad_metadata_before_sound_tensors(tmp_path: Path, metadata: Any) -> None:
    header, data = layout(random_arrays(SMALL))
    write(tmp_path / "model.safetensors", {"__metadata__": metadata} | header, data)
    assert "__metadata__" in refusal(tmp_path)


def test_header_must_be_utf8(tmp_path: Path) -> None:
    header, data = layout(random_arrays(SMALL))
    write(tmp_path / "model.safetensors", json.dumps(header).encode("utf-16-le"), data)
    assert "JSON" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "fragment"),
    [
        ("dtype", "BF15", "unknown dtype"),
        ("dtype", None, "unknown dtype"),
        ("dtype", ["BF16"], "unknown dtype"),
        ("dtype", "F32", "does not fill"),
        ("shape", [7], "does not fill"),
        ("shape", [9], "does not fill"),
        ("shape", [-8], "no list"),
        ("shape", [8.0], "no list"),
        ("shape", [True, 8], "no list"),
        ("shape", [1] * 9, "no list"),
        ("shape", [1 << 63], "no list"),
        ("shape", [1 << 62, 1 << 62], "does not fill"),
        ("shape", 8, "no list"),
        ("shape", None, "no list"),
        ("shape", [2, 4], "has shape [2, 4]"),
        ("data_offsets", [0], "no pair"),
        ("data_offsets", [0, 8, 16], "no pair"),
        ("data_offsets", [-16, 0], "no pair"),
        ("data_offsets", [False, 16], "no pair"),
        ("data_offsets", [0.0, 16.0], "no pair"),
        ("data_offsets", [0, 1 << 70], "no pair"),
        ("data_offsets", [16, 0], "before its start"),
        ("data_offsets", [0, 16], "overlaps"),
        ("data_offsets", [1 << 40, (1 << 40) + 16], "past the file"),
        ("data_offsets", None, "no pair"),
    ],
)
def test_bad_entries_name_file_and_tensor(tmp_path: Path, field: str, value: Any, fragment: str) -> None:
    header, data = layout(random_arrays(SMALL))
    header[NORM][field] = value
    write(tmp_path / "model.safetensors", header, data)
    message = refusal(tmp_path)
    assert fragment in message
    assert "model.safetensors: tensor" in message
    # An overlap is reported at whichever of the two comes second.
    assert NORM in message or fragment == "overlaps"


@pytest.mark.parametrize("entry", [None, [], 7, "BF16", {}])
def test_entry_of_another_type(tmp_path: Path, entry: Any) -> None:
    header, data = layout(random_arrays(SMALL))
    header[NORM] = entry
    write(tmp_path / "model.safetensors", header, data)
    assert NORM in refusal(tmp_path)


def test_truncation_holes_and_trailing_bytes(tmp_path: Path) -> None:
    header, data = layout(random_arrays(SMALL))
    path = tmp_path / "model.safetensors"
    write(path, header, data[:-1])
    message = refusal(tmp_path)
    assert "lm_head.weight" in message
    assert "past the file" in message
    write(path, header, data + b"\0")
    assert "1 bytes after" in refusal(tmp_path)
    for entry in list(header.values())[3:]:
        entry["data_offsets"] = [offset + 2 for offset in entry["data_offsets"]]
    write(path, header, data + b"\0\0")
    message = refusal(tmp_path)
    assert "hole" in message
    assert list(header)[3] in message
    for entry in list(header.values())[3:]:
        entry["data_offsets"] = [offset - 4 for offset in entry["data_offsets"]]
    write(path, header, data[:-2])
    assert "overlaps" in refusal(tmp_path)


# ---- against the config


def test_missing_tensor(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL)
    for name in (NORM, "model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        save(tmp_path, {key: array for key, array in arrays.items() if key != name})
        assert f"tensor {name} is missing" in refusal(tmp_path)
    save(tmp_path, {})
    assert "20 more" in refusal(tmp_path)


def test_unexpected_tensor(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL)
    for name in ("model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "x\ny\ud800"):
        save(tmp_path, arrays | {name: np.zeros(2, ml_dtypes.bfloat16)})
        message = refusal(tmp_path)
        assert "doesn't belong" in message
        assert repr(name) in message


def test_unexpected_tensor_in_a_shard_that_the_index_does_not_list(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL)
    save(tmp_path, arrays | {"model.extra": arrays[NORM]}, "a.safetensors")
    write_index(tmp_path, dict.fromkeys(arrays, "a.safetensors"))
    assert "model.extra" in refusal(tmp_path)


@pytest.mark.parametrize("name", list(expected_tensors(SMALL)))
def test_wrong_shape(tmp_path: Path, name: str) -> None:
    arrays = random_arrays(SMALL)
    arrays[name] = arrays[name][:-1]
    save(tmp_path, arrays)
    message = refusal(tmp_path)
    assert name in message
    assert str(list(expected_tensors(SMALL)[name])) in message


def test_transposed_matrix_is_refused(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL)
    name = "model.layers.0.mlp.down_proj.weight"
    save(tmp_path, arrays | {name: arrays[name].T.copy()})
    assert name in refusal(tmp_path)


def test_wrong_shape_of_an_unused_head(tmp_path: Path) -> None:
    arrays = random_arrays(SMALL)
    save(tmp_path, arrays | {"lm_head.weight": arrays["lm_head.weight"][1:]})
    assert "lm_head.weight" in refusal(tmp_path, SMALL_TIED)


@pytest.mark.parametrize(("dtype", "code"), [(np.float64, "F64"), (np.int64, "I64")])
def test_unsupported_dtype_is_named(tmp_path: Path, dtype: Any, code: str) -> None:
    arrays = random_arrays(SMALL)
    save(tmp_path, arrays | {NORM: np.ones(8, dtype)})
    message = refusal(tmp_path)
    assert NORM in message
    assert code in message


def test_golden_shapes() -> None:
    shapes = expected_tensors(replace(SMALL, num_heads=6, num_kv_heads=2))
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (24, 8)
    assert shapes["model.layers.1.self_attn.v_proj.weight"] == (8, 8)
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (8, 24)


# ---- noise: a sound load or a WeightsError, and never much memory


def load_noise(folder: Path) -> bool:
    """True where the files loaded; every tensor must then be readable."""
    tracemalloc.start()
    try:
        weights = open_weights(folder, SMALL)
        for name in [*weights.names(), "lm_head.weight"]:
            weights[name].astype(np.float32)
        loaded = True
    except WeightsError as error:
        check_line(str(error))
        loaded = False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2 << 20
    return loaded


NOISE = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NUMBER = st.integers(-2, 1 << 66) | st.sampled_from([0, 2, 8, 16, 160, True, None, -1.5, float("nan"), "8"])
FIELD = st.one_of(
    st.tuples(st.just("dtype"), st.sampled_from(["BF16", "F16", "F32", "F64", "U8", "bf16", None, 1])),
    st.tuples(st.just("shape"), st.lists(NUMBER, max_size=3) | NUMBER),
    st.tuples(st.just("data_offsets"), st.lists(NUMBER, max_size=3) | NUMBER),
    st.tuples(st.text(max_size=3), NUMBER),
)
TENSOR_NAMES = st.sampled_from(list(expected_tensors(SMALL)))


@NOISE
@given(
    edits=st.lists(st.tuples(TENSOR_NAMES, FIELD), max_size=3),
    dropped=st.lists(TENSOR_NAMES, max_size=1),
    added=st.dictionaries(st.text(max_size=4), NUMBER | st.just({"dtype": "U8", "shape": [0]}), max_size=1),
    cut=st.integers(-4, 4),
)
def test_mutated_headers(tmp_path: Path, edits: list, dropped: list, added: dict, cut: int) -> None:
    header, data = layout(random_arrays(SMALL))
    for name, (field, value) in edits:
        header[name][field] = value
    for name in dropped:
        del header[name]
    write(
        tmp_path / "model.safetensors", header | added, data[: len(data) + min(cut, 0)] + b"\0" * max(cut, 0)
    )
    loaded = load_noise(tmp_path)
    assert loaded or edits or dropped or added or cut


@NOISE
@given(flips=st.lists(st.tuples(st.integers(0, 2500), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    header, data = layout(random_arrays(SMALL))
    raw = bytearray(struct.pack("<Q", len(json.dumps(header))) + json.dumps(header).encode() + data)
    for position, value in flips:
        raw[position % len(raw)] = value
    (tmp_path / "model.safetensors").write_bytes(raw)
    load_noise(tmp_path)


@NOISE
@given(raw=st.binary(max_size=64), length=st.none() | st.integers(0, 70))
def test_raw_bytes(tmp_path: Path, raw: bytes, length: int | None) -> None:
    prefix = b"" if length is None else struct.pack("<Q", length)
    (tmp_path / "model.safetensors").write_bytes(prefix + raw)
    assert not load_noise(tmp_path)


@NOISE
@given(
    changes=st.dictionaries(TENSOR_NAMES | st.text(max_size=4), st.text(max_size=9) | NUMBER, max_size=2),
    flips=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=2),
)
def test_mutated_index(tmp_path: Path, changes: dict, flips: list[tuple[int, int]]) -> None:
    weight_map = save_shards(tmp_path, random_arrays(SMALL))
    write_index(tmp_path, weight_map | changes)
    raw = bytearray((tmp_path / INDEX).read_bytes())
    for position, value in flips:
        raw[position % len(raw)] = value
    (tmp_path / INDEX).write_bytes(raw)
    loaded = load_noise(tmp_path)
    assert loaded or changes or flips


# ---- tools/make_random_checkpoint.py


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("make_random_checkpoint")


def test_random_checkpoint_loads_and_is_sane(tool: ModuleType, tmp_path: Path) -> None:
    assert tool.main([str(tmp_path), "--shape", "tiny"]) == 0
    config = ModelConfig.from_dir(tmp_path)
    assert (config.num_layers, config.bos_token_id, config.eos_token_ids) == (2, 256, (257,))
    weights = open_weights(tmp_path, config)
    assert weights.notices == []
    for name, array in weights.items():
        mean, std = tool.distribution(name, array.shape, config.num_layers)
        values = array.astype(np.float64)
        assert values.mean() == pytest.approx(mean, abs=5 * std / math.sqrt(array.size))
        assert values.std() == pytest.approx(std, rel=0.2 if array.ndim == 1 else 0.02)
    q_proj = weights["model.layers.0.self_attn.q_proj.weight"]
    assert len(np.unique(q_proj.view(np.uint16), axis=0)) == len(q_proj)  # no repeated rows
    assert not np.array_equal(q_proj, weights["model.layers.1.self_attn.q_proj.weight"])


def test_random_checkpoint_is_reproducible(tool: ModuleType, tmp_path: Path) -> None:
    runs: list[tuple[str, ...]] = [(), (), ("--seed", "1"), ("--layers", "1")]
    loaded = []
    for i, options in enumerate(runs):
        folder = tmp_path / str(i)
        assert tool.main([str(folder), "--shape", "tiny", *options]) == 0
        weights = open_weights(folder, ModelConfig.from_dir(folder))
        loaded.append({name: array.tobytes() for name, array in weights.items()})
    first, again, other_seed, one_layer = loaded
    assert first == again
    assert all(first[name] != other_seed[name] for name in first)
    assert len(one_layer) == len(first) - 9
    assert all(
        raw == first[name] for name, raw in one_layer.items() if "o_proj" not in name and "down" not in name
    )


def test_random_tensors_come_in_bounded_chunks(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "CHUNK_ELEMENTS", 64)
    chunks = list(tool.random_tensor("a.weight", (10, 20), 1, seed=0))
    assert [chunk.size for chunk in chunks] == [64, 64, 64, 8]


@pytest.mark.parametrize(("bos", "eos"), [(256, (257,)), (1, (2, 3, 4)), (300, (300,))])
def test_random_checkpoints_tokenizer_covers_every_id_once(
    tool: ModuleType, bos: int, eos: tuple[int, ...]
) -> None:
    tokenizer = tool.make_tokenizer(512, bos, eos)
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert sorted(vocab.values()) == list(range(512))
    assert special.items() <= vocab.items()
    assert special["<|begin_of_text|>"] == bos
    assert special.get("<|end_of_text|>", bos) == eos[0]
    alphabet = tool.byte_alphabet()
    assert len(set(alphabet)) == 256
    assert (alphabet[ord("a")], alphabet[ord(" ")], alphabet[ord("\n")]) == ("a", "Ġ", "Ċ")
    assert [text for text in sorted(vocab, key=vocab.__getitem__) if text not in special][:256] == alphabet


def test_random_checkpoints_mistakes_are_one_line(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, {})
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tool.SHAPES["tiny"] | {"vocab_size": 258}))
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for options in (
        [str(tmp_path), "--shape", "tiny"],
        [str(tmp_path / "a"), "--layers", "0"],
        [str(tmp_path / "a"), "--seed", "-1"],
        [str(tmp_path / "a"), "--config", str(tmp_path / "nowhere.json")],
        [str(tmp_path / "a"), "--config", str(broken)],
    ):
        assert tool.main(options) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    assert tool.main([str(tmp_path / "b"), "--config", str(config)]) == 0
    config.write_text(json.dumps(tool.SHAPES["tiny"] | {"vocab_size": 257, "eos_token_id": 256}))
    assert tool.main([str(tmp_path / "c"), "--config", str(config)]) == 0
    config.write_text(
        json.dumps(tool.SHAPES["tiny"] | {"vocab_size": 200, "eos_token_id": 1, "bos_token_id": 0})
    )
    assert tool.main([str(tmp_path / "d"), "--config", str(config)]) == 2
    assert not (tmp_path / "d").exists()
