"""Frozen, validated settings: ``ModelConfig`` (what the checkpoint is) and ``EngineConfig`` (how we run it).

Both are validated once, at construction; nothing downstream checks them again. Knows nothing of
weights, devices or requests.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from samir_vllm.errors import ConfigError, OptionError

PAGE_SIZE = 16
"""Tokens in one KV page."""

NAN_TOKEN = -1
"""What the sampler gives for a row of logits that holds NaN: no token id, so it can't be taken for one."""

MAX_JSON_BYTES = 16 << 20

# field: (key in config.json, largest value). The bounds lie far above any real Llama; they stop a damaged
# file before a size computed from it is allocated.
_SIZES = {
    "hidden_size": ("hidden_size", 1 << 18),
    "intermediate_size": ("intermediate_size", 1 << 20),
    "num_layers": ("num_hidden_layers", 1 << 12),
    "num_heads": ("num_attention_heads", 1 << 12),
    "num_kv_heads": ("num_key_value_heads", 1 << 12),
    "head_dim": ("head_dim", 1 << 12),
    "vocab_size": ("vocab_size", 1 << 24),
    "max_position_embeddings": ("max_position_embeddings", 1 << 26),
}

_THETA_BOUNDS = (1.0, 1e15)

# Keys that change the computation, with the values that leave it plain Llama (null and absent always do).
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "hidden_act": ("silu", "swish"),
    "quantization_config": (),
    "sliding_window": (),
    "attention_chunk_size": (),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "pruned_heads": ({},),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretch of the RoPE wavelengths beyond the context length of pre-training.

    Raises ``ConfigError`` for a factor outside its bounds or bands that cross.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _check_float("factor", self.factor, 1.0, 1e6)
        _check_float("low_freq_factor", self.low_freq_factor, 1e-6, 1e6)
        _check_float("high_freq_factor", self.high_freq_factor, 1e-6, 1e6)
        _check_int("original_max_position_embeddings", self.original_max_position_embeddings, 1, 1 << 26)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"high_freq_factor {self.high_freq_factor} must exceed low_freq_factor {self.low_freq_factor}"
            )
        _as_floats(self, "factor", "low_freq_factor", "high_freq_factor")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of a Llama checkpoint; ``ConfigError`` where they contradict each other.

    ``eos_token_ids`` is sorted and unique. Field names are ours; error messages use config.json's keys.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field, (key, largest) in _SIZES.items():
            _check_int(key, getattr(self, field), 1, largest)
        # An eps that is not a normal float32 would vanish in the kernels.
        _check_float("rms_norm_eps", self.rms_norm_eps, 1e-30, 1.0)
        _check_float("rope_theta", self.rope_theta, *_THETA_BOUNDS)
        if type(self.tie_word_embeddings) is not bool:
            raise ConfigError(
                f"tie_word_embeddings must be true or false, not {show(self.tie_word_embeddings)}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd, but RoPE rotates pairs")
        if self.bos_token_id is not None:
            _check_int("bos_token_id", self.bos_token_id, 0, self.vocab_size - 1)
        for token_id in self.eos_token_ids:
            _check_int("eos_token_id", token_id, 0, self.vocab_size - 1)
        _as_floats(self, "rms_norm_eps", "rope_theta")
        object.__setattr__(self, "eos_token_ids", tuple(sorted(set(self.eos_token_ids))))

    @classmethod
    def from_dir(cls, path: Path) -> Self:
        """Reads ``config.json`` and, where present, ``generation_config.json`` of a model folder.

        Raises ``ConfigError``, naming the file, for one that is missing, damaged or not a model we run.
        """
        path = Path(path)
        config_path, generation_path = path / "config.json", path / "generation_config.json"
        if not os.path.exists(config_path) and os.path.exists(path / "params.json"):
            raise ConfigError(
                f"{show_path(path)} holds Meta's own format (params.json), not the Hugging Face one: "
                "get the folder with config.json and model.safetensors, or convert it"
            )
        generation = _read_json(generation_path) if os.path.lexists(generation_path) else None
        return cls.from_dict(_read_json(config_path), generation, source=show_path(config_path))

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        source: str = "config.json",
    ) -> Self:
        """From the parsed JSON objects; raises ``ConfigError`` starting with ``source``.

        Absent keys take a default only where every Llama agrees on it: ``head_dim`` (hidden_size / heads),
        ``num_key_value_heads`` (heads) and ``tie_word_embeddings`` (false).
        """
        try:
            _refuse_other_models(config)
            return cls(**_model_fields(config, generation_config or {}))
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    def inv_freq(self) -> np.ndarray:
        """RoPE's inverse frequencies, float32 [head_dim / 2], in radians a token, Llama 3 scaling applied.

        Frequencies: Su et al., "RoFormer" (2021). Scaling (Llama 3.1 model release): wavelengths shorter than
        original / high_freq_factor stay, those longer than original / low_freq_factor stretch by ``factor``,
        between them a linear blend. Float32 throughout, as the models were trained.
        """
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        inv_freq = np.float32(1) / np.float32(self.rope_theta) ** exponents
        scaling = self.rope_scaling
        if scaling is None:
            return inv_freq
        # Turns of each pair over the original context: few turns = a long wavelength.
        turns = scaling.original_max_position_embeddings * inv_freq / np.float32(2 * math.pi)
        band = np.float32(scaling.high_freq_factor - scaling.low_freq_factor)
        keep = np.clip((turns - np.float32(scaling.low_freq_factor)) / band, np.float32(0), np.float32(1))
        return (1 - keep) * (inv_freq / np.float32(scaling.factor)) + keep * inv_freq

    def page_bytes(self, page_size: int = PAGE_SIZE, itemsize: int = 2) -> int:
        """Bytes of one KV page: K and V of ``page_size`` tokens of one layer."""
        return 2 * page_size * self.num_kv_heads * self.head_dim * itemsize

    @property
    def num_parameters(self) -> int:
        """Weights in the checkpoint; tied embeddings count once."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return embeddings + self.num_layers * layer + self.hidden_size


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to run a model. Raises ``OptionError``, with the bounds, for a value outside them.

    ``dtype``: "bfloat16" rounds at the points of the numerics contract; "float32" does not round at all
    (NumPy backend only). ``max_model_len``: a context limit below the model's own, in tokens.
    ``kv_cache_mib``: size of the shared page pool in MiB, or "auto" for what is free. ``batch_invariant``:
    only the one reduction order, never a faster variant beside it.
    """

    device: str = "auto"
    kv_cache_mib: int | Literal["auto"] = 128
    max_num_seqs: int = 256
    max_batched_tokens: int = 2048
    batching: str = "continuous"
    max_model_len: int | None = None
    dtype: str = "bfloat16"
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if type(self.device) is not str or not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", self.device):
            raise OptionError(f"device must be auto, cpu, cuda or cuda:N, not {show(self.device)}")
        if self.kv_cache_mib != "auto":
            _check_option("kv_cache_mib", self.kv_cache_mib, 1 << 20, or_else=" or 'auto'")
        _check_option("max_num_seqs", self.max_num_seqs, 1 << 14)
        _check_option("max_batched_tokens", self.max_batched_tokens, 1 << 20)
        if self.max_model_len is not None:
            _check_option("max_model_len", self.max_model_len, 1 << 26, or_else=" or None")
        _check_choice("batching", self.batching, ("continuous", "static"))
        _check_choice("dtype", self.dtype, ("bfloat16", "float32"))
        if self.dtype == "float32" and self.device.startswith("cuda"):
            raise OptionError(f"dtype float32 runs on the CPU only, not on {self.device}: choose device cpu")
        if type(self.batch_invariant) is not bool:
            raise OptionError(f"batch_invariant must be True or False, not {show(self.batch_invariant)}")

    def context_len(self, model: ModelConfig) -> int:
        """Tokens a sequence of this model may have, prompt and output."""
        limit = model.max_position_embeddings
        return limit if self.max_model_len is None else min(limit, self.max_model_len)

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """``EngineConfig(**options)``; for an unknown name, an ``OptionError`` that suggests the nearest."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                remedy = f"did you mean {near[0]}?" if near else f"the options are {', '.join(known)}"
                raise OptionError(f"unknown option {show(name)}: {remedy}")
        return cls(**options)


_picture = reprlib.Repr()
_picture.maxstring = 120


def show(value: object) -> str:
    """A short, one-line picture, for a message, of a value that may be huge, nested or hostile."""
    try:
        return " ".join(_picture.repr(value).split())  # that of an array has several lines
    except ValueError:  # of an integer of thousands of digits
        return f"a huge {type(value).__name__}"


def show_path(path: Path) -> str:
    """The path for a message; quoted and escaped only where it would break the line."""
    return str(path) if str(path).isprintable() else repr(str(path))


def _check_int(key: str, value: object, low: int, high: int) -> None:
    if type(value) is not int:  # bool is an int to isinstance
        raise ConfigError(f"{key} must be an integer, not {show(value)}")
    if not low <= value <= high:
        raise ConfigError(f"{key} must lie in {low}..{high}, not {show(value)}")


def _check_float(key: str, value: object, low: float, high: float) -> None:
    if type(value) not in (int, float):
        raise ConfigError(f"{key} must be a number, not {show(value)}")
    if not low <= value <= high:  # type: ignore[operator]  # NaN fails too
        raise ConfigError(f"{key} must lie in {low:g}..{high:g}, not {show(value)}")


def _as_floats(frozen: object, *names: str) -> None:
    """JSON may spell 500000.0 as 500000; what reads the config meets floats alone."""
    for name in names:
        object.__setattr__(frozen, name, float(getattr(frozen, name)))


def _check_option(name: str, value: object, high: int, or_else: str = "") -> None:
    if type(value) is not int or not 1 <= value <= high:
        raise OptionError(f"{name} must be an integer in 1..{high}{or_else}, not {show(value)}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if type(value) is not str or value not in choices:
        raise OptionError(f"{name} must be {' or '.join(choices)}, not {show(value)}")


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a small file; ``ConfigError`` naming the file where there is none."""
    shown = show_path(path)
    try:
        if not path.is_file():
            raise ConfigError(f"{shown} is missing: a model folder holds config.json and model.safetensors")
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
        if len(raw) > MAX_JSON_BYTES:
            raise ConfigError(f"{shown} is larger than {MAX_JSON_BYTES >> 20} MiB: not a model's file")
        if not raw.strip():
            raise ConfigError(f"{shown} is empty: download it again")
        parsed = json.loads(raw)
    except OSError as error:
        raise ConfigError(
            f"{shown} can't be read ({error.strerror}): check the path and its rights"
        ) from None
    except (ValueError, RecursionError) as error:
        cause = "nested too deeply" if isinstance(error, RecursionError) else show(str(error))
        raise ConfigError(f"{shown} is not JSON ({cause}): download it again") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{shown} must hold a JSON object, not {show(parsed)}: download it again")
    return parsed


def _refuse_other_models(config: Mapping[str, Any]) -> None:
    """Refuses, by name, what would make the forward pass something other than Llama's."""
    if config.get("model_type") != "llama":
        raise ConfigError(f"model_type is {show(config.get('model_type'))}, but only 'llama' runs here")
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if key == "sliding_window" and config.get("use_sliding_window") is False:
            continue
        if value is not None and value not in neutral:
            expected = " or ".join(show(choice) for choice in neutral) or "absent"
            raise ConfigError(f"{key} is {show(value)}, which isn't supported: it must be {expected}")
    layer_types = config.get("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
    ):
        raise ConfigError(f"layer_types is {show(layer_types)}, but only 'full_attention' runs here")


def _model_fields(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """``ModelConfig``'s keyword arguments; values are checked there."""
    found = {field: config.get(key) for field, (key, _) in _SIZES.items()}
    optional = ("num_key_value_heads", "head_dim")
    for key in ("rms_norm_eps", *(key for key, _ in _SIZES.values() if key not in optional)):
        if config.get(key) is None:
            raise ConfigError(f"{key} is missing: add it, with the model's value")
    if found["num_kv_heads"] is None:
        found["num_kv_heads"] = found["num_heads"]
    if found["head_dim"] is None:
        found["head_dim"] = _default_head_dim(found["hidden_size"], found["num_heads"])
    rope_theta, rope_scaling = _rope(config)
    tie = config.get("tie_word_embeddings")
    bos = config.get("bos_token_id")
    return found | {
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": False if tie is None else tie,
        "bos_token_id": generation.get("bos_token_id") if bos is None else bos,
        "eos_token_ids": _token_ids(config.get("eos_token_id")) + _token_ids(generation.get("eos_token_id")),
    }


def _default_head_dim(hidden_size: Any, num_heads: Any) -> int:
    _check_int("hidden_size", hidden_size, 1, _SIZES["hidden_size"][1])
    _check_int("num_attention_heads", num_heads, 1, _SIZES["num_heads"][1])
    if hidden_size % num_heads:
        raise ConfigError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}: add head_dim"
        )
    return hidden_size // num_heads


def _token_ids(value: object) -> tuple[Any, ...]:
    """eos_token_id is a number, a list of them, or null; the ids themselves are checked later."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list) else (value,)
    for token_id in ids:
        if type(token_id) is not int:
            raise ConfigError(f"eos_token_id must be an integer or a list of them, not {show(value)}")
    return ids


def _rope(config: Mapping[str, Any]) -> tuple[Any, RopeScaling | None]:
    """(rope_theta, scaling) from ``rope_theta`` + ``rope_scaling`` or the newer ``rope_parameters``."""
    spellings = {
        key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key) is not None
    }
    for key, value in spellings.items():
        if not isinstance(value, dict):
            raise ConfigError(f"{key} must be an object, not {show(value)}")
    thetas = [
        place["rope_theta"] for place in (config, *spellings.values()) if place.get("rope_theta") is not None
    ]
    if not thetas:
        raise ConfigError("rope_theta is missing: add it, with the model's value (10000.0 for Llama 1 and 2)")
    for theta in thetas:
        _check_float("rope_theta", theta, *_THETA_BOUNDS)
    if len(set(thetas)) > 1:
        raise ConfigError(f"rope_theta is given twice and differs: {show(thetas)}; keep the model's value")
    scalings = [_rope_scaling(key, value) for key, value in spellings.items()]
    if any(scaling != scalings[0] for scaling in scalings):
        raise ConfigError("rope_scaling and rope_parameters contradict each other: keep one of them")
    return thetas[0], scalings[0] if scalings else None


def _rope_scaling(key: str, rope: dict[str, Any]) -> RopeScaling | None:
    kinds = [rope[name] for name in ("rope_type", "type") if rope.get(name) is not None]
    for kind in kinds:
        if kind not in ("default", "llama3"):
            raise ConfigError(f"{key}: rope_type {show(kind)} isn't supported, only 'default' and 'llama3'")
    if any(kind != kinds[0] for kind in kinds):
        raise ConfigError(
            f"{key}: rope_type {show(kinds[0])} and type {show(kinds[1])} contradict each other"
        )
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(
            f"{key}: partial_rotary_factor {show(rope['partial_rotary_factor'])} isn't supported"
        )
    if not kinds and rope.get("factor") is not None:
        raise ConfigError(f"{key}: factor is given without a rope_type; add the model's rope_type")
    if not kinds or kinds[0] == "default":
        return None
    names = [field.name for field in fields(RopeScaling)]
    for name in names:
        if rope.get(name) is None:
            raise ConfigError(f"{key}: {name} is missing, which rope_type 'llama3' needs")
    try:
        return RopeScaling(**{name: rope[name] for name in names})
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
