"""ModelConfig against configs of real shape, broken ones and noise; EngineConfig against its bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samir_vllm.config import PAGE_SIZE, EngineConfig, ModelConfig, RopeScaling
from samir_vllm.errors import ConfigError, OptionError

GOLDEN = Path(__file__).parent / "golden"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA32_1B: dict[str, Any] = {
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3_ROPE,
    "tie_word_embeddings": True,
    "pretraining_tp": 1,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
ABSENT = object()


def changed(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (LLAMA32_1B | changes).items() if value is not ABSENT}


def refusal(**changes: Any) -> str:
    """The message for the 1B config with ``changes``: one line that names the file."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(changed(**changes), source="some/config.json")
    message = str(caught.value)
    assert message.startswith("some/config.json: ")
    assert "\n" not in message
    return message


def check_line(message: str) -> None:
    assert "\n" not in message
    message.encode("utf-8")  # printable: no lone surrogates


# ---- what runs


def test_llama_32_1b() -> None:
    config = ModelConfig.from_dict(LLAMA32_1B)
    assert config == ModelConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=128256,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    )
    assert config.num_parameters == 1_235_814_400  # as the model card counts them
    assert config.page_bytes() == 2 * PAGE_SIZE * 8 * 64 * 2 == 32768
    assert config.page_bytes(page_size=1, itemsize=4) == 4096
    assert hash(config) == hash(ModelConfig.from_dict(LLAMA32_1B))


def test_untied_parameters_count_the_head() -> None:
    tied, untied = (ModelConfig.from_dict(changed(tie_word_embeddings=tie)) for tie in (True, False))
    assert untied.num_parameters - tied.num_parameters == 128256 * 2048


def test_inv_freq_matches_float64_reference() -> None:
    reference = json.loads((GOLDEN / "llama3_tokenizer.json").read_text())["rope_llama32_1b"]
    scaled = ModelConfig.from_dict(LLAMA32_1B).inv_freq()
    assert scaled.dtype == np.float32
    assert scaled.shape == (32,)
    # Float32 powers: 2 units in the last place, 2.4e-7, at most.
    np.testing.assert_allclose(scaled, reference["inv_freq"], rtol=5e-7)
    plain = ModelConfig.from_dict(changed(rope_scaling=None)).inv_freq()
    np.testing.assert_allclose(plain, reference["unscaled"], rtol=5e-7)


def test_inv_freq_matches_golden_model() -> None:
    config = ModelConfig.from_dir(GOLDEN / "tiny-llama3")
    expected = json.loads((GOLDEN / "tiny-llama3" / "inv_freq.json").read_text())["inv_freq"]
    np.testing.assert_allclose(config.inv_freq(), expected, rtol=5e-7)


def test_both_rope_spellings_agree() -> None:
    newer = changed(
        rope_theta=ABSENT, rope_scaling=ABSENT, rope_parameters=LLAMA3_ROPE | {"rope_theta": 500000.0}
    )
    older_key = {("type" if key == "rope_type" else key): value for key, value in LLAMA3_ROPE.items()}
    both = changed(rope_parameters=LLAMA3_ROPE | {"rope_theta": 500000})
    for spelling in (newer, changed(rope_scaling=older_key), both):
        assert ModelConfig.from_dict(spelling) == ModelConfig.from_dict(LLAMA32_1B)


@pytest.mark.parametrize("rope_scaling", [None, ABSENT, {}, {"rope_type": "default"}, {"type": "default"}])
def test_default_rope(rope_scaling: Any) -> None:
    assert ModelConfig.from_dict(changed(rope_scaling=rope_scaling)).rope_scaling is None


def test_older_llamas() -> None:
    config = ModelConfig.from_dict(
        changed(
            num_key_value_heads=ABSENT,
            head_dim=None,
            tie_word_embeddings=ABSENT,
            rope_scaling=ABSENT,
            pretraining_tp=2,
        )
    )
    assert (config.num_kv_heads, config.head_dim, config.tie_word_embeddings) == (32, 64, False)


def test_head_dim_may_differ_from_the_quotient() -> None:
    assert ModelConfig.from_dict(changed(head_dim=128)).head_dim == 128


def test_whole_numbers_become_floats() -> None:
    config = ModelConfig.from_dict(changed(rope_theta=500000, rope_scaling=LLAMA3_ROPE | {"factor": 32}))
    assert type(config.rope_theta) is float
    assert config.rope_scaling is not None
    assert type(config.rope_scaling.factor) is float


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (7, None, (7,)),
        ([9, 7, 7], None, (7, 9)),
        (None, {"eos_token_id": [9, 7]}, (7, 9)),
        (7, {"eos_token_id": 3}, (3, 7)),
        (ABSENT, {"eos_token_id": None}, ()),
        (ABSENT, {}, ()),
    ],
)
def test_eos_is_the_union(eos: Any, generation: Any, expected: tuple[int, ...]) -> None:
    assert ModelConfig.from_dict(changed(eos_token_id=eos), generation).eos_token_ids == expected


def test_bos_falls_back_to_the_generation_config() -> None:
    assert ModelConfig.from_dict(changed(bos_token_id=None)).bos_token_id is None
    assert ModelConfig.from_dict(changed(bos_token_id=None), {"bos_token_id": 5}).bos_token_id == 5


@pytest.mark.parametrize(
    "harmless",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": None},
        {"quantization_config": None},
        {"layer_types": ["full_attention"] * 16},
        {"partial_rotary_factor": 1.0},
        {"attention_dropout": 0.1, "transformers_version": "9", "rope_interleaved": False},
    ],
)
def test_harmless_keys(harmless: dict[str, Any]) -> None:
    assert ModelConfig.from_dict(changed(**harmless)) == ModelConfig.from_dict(LLAMA32_1B)


# ---- what is refused


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mistral"),
        ("model_type", ABSENT),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "gptq"}),
        ("sliding_window", 4096),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("final_logit_softcapping", 30.0),
        ("logits_scaling", 8.0),
        ("num_local_experts", 8),
    ],
)
def test_other_models_are_refused_by_key(key: str, value: Any) -> None:
    assert key in refusal(**{key: value})


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "su", 3])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_other_rope_types_are_refused_by_name(kind: Any, key: str) -> None:
    assert repr(kind) in refusal(rope_scaling={key: kind, "factor": 2.0})


@pytest.mark.parametrize(
    "rope",
    [
        {"factor": 2.0},
        {"rope_type": "llama3", "type": "default"},
        "llama3",
        [LLAMA3_ROPE],
        *({key: value for key, value in LLAMA3_ROPE.items() if key != left_out} for left_out in LLAMA3_ROPE),
        LLAMA3_ROPE | {"factor": 0.5},
        LLAMA3_ROPE | {"factor": "32"},
        LLAMA3_ROPE | {"high_freq_factor": 1.0},
        LLAMA3_ROPE | {"low_freq_factor": 0},
        LLAMA3_ROPE | {"original_max_position_embeddings": 8192.0},
        LLAMA3_ROPE | {"partial_rotary_factor": 0.25},
        LLAMA3_ROPE | {"rope_theta": 10000.0},
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_broken_rope(key: str, rope: Any) -> None:
    refusal(**({"rope_scaling": ABSENT} | {key: rope}))


def test_contradicting_rope_spellings() -> None:
    assert "contradict" in refusal(rope_parameters=LLAMA3_ROPE | {"factor": 8.0})


def test_rope_theta_has_no_default() -> None:
    assert "rope_theta is missing" in refusal(rope_theta=ABSENT)


NUMBERS = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
]


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize(
    "value", [-1, 0, True, "64", [64], {}, float("nan"), float("inf"), 1 << 80, 10**400], ids=str
)
def test_bad_numbers_are_refused_by_key(key: str, value: Any) -> None:
    assert key in refusal(**{key: value})


@pytest.mark.parametrize("key", [key for key in NUMBERS if key not in ("head_dim", "num_key_value_heads")])
def test_missing_numbers_are_named(key: str) -> None:
    assert f"{key} is missing" in refusal(**{key: ABSENT})


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"num_key_value_heads": 5}, "multiple"),
        ({"num_key_value_heads": 64}, "multiple"),
        ({"head_dim": 63}, "odd"),
        ({"hidden_size": 2049, "head_dim": None}, "multiple"),
        ({"hidden_size": 2048.0}, "integer"),
        ({"rms_norm_eps": 2.0}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"bos_token_id": 128256}, "bos_token_id"),
        ({"bos_token_id": [1]}, "bos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"eos_token_id": 128256}, "eos_token_id"),
        ({"eos_token_id": [1, True]}, "eos_token_id"),
        ({"eos_token_id": [[1]]}, "eos_token_id"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_contradictions(changes: dict[str, Any], fragment: str) -> None:
    assert fragment in refusal(**changes)


# ---- files


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"  \n",
        b"{",
        b"[]",
        b"7",
        b"null",
        b'{"a": }',
        b"\xff\xfe\x00",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"hidden_size": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda content: repr(content[:8]),
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA32_1B))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dir(tmp_path)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_folder_file_and_directory_in_its_place(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match=r"config\.json is missing"):
            ModelConfig.from_dir(path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)


def test_metas_own_format_gets_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text('{"dim": 2048}')
    with pytest.raises(ConfigError, match="Hugging Face"):
        ModelConfig.from_dir(tmp_path)


def test_oversized_file_is_not_parsed(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ConfigError, match="MiB"):
        ModelConfig.from_dir(tmp_path)


def test_a_path_cannot_break_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dir(tmp_path / "two\nlines")
    assert "\n" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ROPE_KEYS = st.sampled_from([*LLAMA3_ROPE, "type", "rope_theta", "partial_rotary_factor"])
ROPE = st.dictionaries(ROPE_KEYS, JSON | st.sampled_from([*LLAMA3_ROPE.values()]), max_size=7)
KEYS = st.sampled_from(
    [*LLAMA32_1B, "rope_parameters", "sliding_window", "layer_types", "quantization_config"]
)


@settings(max_examples=600, deadline=None)
@given(st.dictionaries(KEYS, JSON | ROPE | st.just(ABSENT), max_size=4), JSON)
def test_noise_gives_a_config_or_config_error(changes: dict[str, Any], eos: Any) -> None:
    try:
        config = ModelConfig.from_dict(changed(**changes), {"eos_token_id": eos})
    except ConfigError as error:
        check_line(str(error))
        return
    assert config.num_heads % config.num_kv_heads == 0
    assert np.isfinite(config.inv_freq()).all()
    assert all(0 <= token_id < config.vocab_size for token_id in config.eos_token_ids)


# ---- EngineConfig


def test_engine_defaults_and_choices() -> None:
    assert EngineConfig().kv_cache_mib == 128
    options = EngineConfig.from_options(
        device="cuda:1", kv_cache_mib="auto", batching="static", max_model_len=64
    )
    assert (options.device, options.kv_cache_mib, options.max_model_len) == ("cuda:1", "auto", 64)
    assert EngineConfig(device="cpu", dtype="float32").dtype == "float32"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("device", value) for value in ("gpu", "cuda:", "cuda:-1", "cuda:x", "cpu\n", None, 0)),
        *(("kv_cache_mib", value) for value in (0, -1, 1.5, "128", True, None, 1 << 21)),
        *(("max_num_seqs", value) for value in (0, -1, True, 1 << 20, None)),
        *(("max_batched_tokens", value) for value in (0, -1, True, 1 << 30, None)),
        *(("max_model_len", value) for value in (0, -1, 1.0, True)),
        *(("batching", value) for value in ("dynamic", "", None, ["static"])),
        *(("dtype", value) for value in ("float16", None)),
        *(("batch_invariant", value) for value in (1, "no", None)),
    ],
)
def test_engine_options_out_of_bounds(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name) as caught:
        EngineConfig.from_options(**{name: value})
    assert "\n" not in str(caught.value)


def test_float32_needs_the_numpy_backend() -> None:
    with pytest.raises(OptionError, match="CPU"):
        EngineConfig(device="cuda:0", dtype="float32")


def test_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean max_num_seqs"):
        EngineConfig.from_options(max_num_seq=4)
    with pytest.raises(OptionError, match="the options are device"):
        EngineConfig.from_options(zzz=4)


def test_what_cannot_be_printed_is_refused_in_one_line() -> None:
    for value, shown in ((10**5000, "a huge int"), (np.eye(3), "array([[1.")):
        with pytest.raises(OptionError) as caught:
            EngineConfig.from_options(max_num_seqs=value)
        assert shown in str(caught.value)
        assert "\n" not in str(caught.value)
