"""Writes a Llama checkpoint with random weights: config, weights and a byte-level tokenizer, in a folder.

    python tools/make_random_checkpoint.py models/random-1b --shape llama-3.2-1b

For timing and for comparing backends where the real weights aren't at hand: shapes, bytes and kernels are
those of the real model, the text is noise. A tensor depends on its name, its shape and the seed, not on the
tensors before it (the scale of o_proj and down_proj depends on the number of layers too). Writes the
safetensors layout itself, to hold one chunk in memory instead of the model. Knows nothing of devices.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

if __name__ == "__main__":  # run from a checkout that isn't installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from samir_vllm.config import ModelConfig
from samir_vllm.errors import ConfigError, OptionError, SamirVllmError
from samir_vllm.weights import expected_tensors

CHUNK_ELEMENTS = 1 << 23  # 16 MiB of BF16: what one step holds in memory, and of random indices as much again

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA32 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA3_ROPE,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "num_key_value_heads": 8,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _LLAMA32
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
    },
    "llama-3.2-3b": _LLAMA32
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
    },
    "tiny": _LLAMA32
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
        "bos_token_id": 256,
        "eos_token_id": [257],
    },
}

# 65,536 normal quantiles: a random uint16 picks one, which is faster than drawing normals; the tails end at
# 4.3 standard deviations.
_QUANTILES = np.array([NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(65536)], np.float32)


def distribution(name: str, shape: tuple[int, ...], num_layers: int) -> tuple[float, float]:
    """(mean, standard deviation) of a tensor's elements, such that activations stay alike at any depth.

    Matrices keep the variance of what they multiply (std = 1 / sqrt(fan_in)), so the tied embeddings make
    logits of about 1 and a residual stream that starts at 1 / sqrt(hidden_size). The two that add to the
    stream are smaller by that and by sqrt(2 x layers), so that its variance about doubles over all layers
    (the scheme of Radford et al., "Language Models are Unsupervised Multitask Learners", 2019). Norm weights
    lie around 1.
    """
    if len(shape) == 1:
        return 1.0, 0.05
    std = 1 / math.sqrt(shape[1])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * num_layers * shape[0])
    return 0.0, std


def random_tensor(name: str, shape: tuple[int, ...], num_layers: int, seed: int) -> Iterator[np.ndarray]:
    """The tensor's elements in order, as 1-D BF16 chunks of at most ``CHUNK_ELEMENTS``."""
    mean, std = distribution(name, shape, num_layers)
    table = (mean + std * _QUANTILES).astype(ml_dtypes.bfloat16)
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    size = math.prod(shape)
    for start in range(0, size, CHUNK_ELEMENTS):
        count = min(CHUNK_ELEMENTS, size - start)
        yield table[np.frombuffer(rng.bytes(2 * count), "<u2")]


def write_weights(path: Path, config: ModelConfig, seed: int) -> None:
    """``model.safetensors``: the header first, then each tensor chunk by chunk; appears when complete."""
    tensors = expected_tensors(config)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # so that the data starts aligned
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    partial = path.with_suffix(".part")
    with partial.open("wb") as file, Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(path.name, total=end)
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name, shape in tensors.items():
            for chunk in random_tensor(name, shape, config.num_layers, seed):
                file.write(chunk.view(np.uint8).data)
                progress.advance(task, chunk.nbytes)
    partial.replace(path)


def byte_alphabet() -> list[str]:
    """The printable character that a ByteLevel tokenizer writes for each byte 0..255.

    Printable Latin-1 stands for itself; the others take U+0100 and on, in order (as GPT-2's vocabulary does).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_in = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(stand_in)) for byte in range(256)]


def make_tokenizer(vocab_size: int, bos_token_id: int, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """A Hugging Face ``tokenizer.json``: bytes and special tokens, no merges, every other id a placeholder.

    Bytes take the lowest ids that aren't special; the placeholder of id 300 is the text ``x00300``, which no
    encoding ever yields but which decodes. Raises ``OptionError`` for a vocabulary too small for the bytes.
    """
    ends = [token_id for token_id in eos_token_ids if token_id != bos_token_id]
    special = {bos_token_id: "<|begin_of_text|>"}
    special |= {token_id: f"<|end_{i}|>" if i else "<|end_of_text|>" for i, token_id in enumerate(ends)}
    plain_ids = [token_id for token_id in range(vocab_size) if token_id not in special]
    if len(plain_ids) < 256:
        raise OptionError(f"vocab_size {vocab_size} leaves no room for 256 bytes: choose a larger one")
    vocab = dict(zip(byte_alphabet(), plain_ids, strict=False))
    vocab |= {f"x{token_id:05d}": token_id for token_id in plain_ids[256:]}
    # In the vocabulary too: the Hugging Face library renumbers an added token that it doesn't find there.
    vocab |= {text: token_id for token_id, text in special.items()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": text} | flags for token_id, text in sorted(special.items())
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
        | {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
        | {"vocab": vocab, "merges": []},
    }


def write_checkpoint(out_dir: Path, raw_config: dict[str, Any], seed: int) -> None:
    """All four files; refuses, with ``OptionError``, a folder that already holds weights."""
    config = ModelConfig.from_dict(raw_config)
    if (out_dir / "model.safetensors").exists():
        raise OptionError(f"{out_dir} already holds model.safetensors: choose another folder or remove it")
    bos_token_id = 256 if config.bos_token_id is None else config.bos_token_id
    eos_token_ids = config.eos_token_ids or (257,)
    tokenizer = make_tokenizer(config.vocab_size, bos_token_id, eos_token_ids)
    generation = {"bos_token_id": bos_token_id, "eos_token_id": list(eos_token_ids)}
    out_dir.mkdir(parents=True, exist_ok=True)
    files = {"config.json": raw_config, "generation_config.json": generation, "tokenizer.json": tokenizer}
    for name, content in files.items():
        (out_dir / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_weights(out_dir / "model.safetensors", config, seed)


def main(argv: list[str] | None = None) -> int:
    """0, or 2 after a user mistake, told in one line on stderr."""
    parser = argparse.ArgumentParser(description="Write a Llama checkpoint with random weights.")
    parser.add_argument("out_dir", type=Path)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    source.add_argument("--config", type=Path, help="a config.json to take the shape from")
    parser.add_argument("--layers", type=int, help="number of layers, in place of the shape's own")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        raw_config = SHAPES[args.shape] if args.config is None else read_config(args.config)
        if args.layers is not None:
            raw_config = raw_config | {"num_hidden_layers": args.layers}
        if args.seed < 0:
            raise OptionError(f"--seed must be 0 or more, not {args.seed}")
        write_checkpoint(args.out_dir, raw_config, args.seed)
    except (SamirVllmError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; ``ConfigError`` where there is none."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}): give a model's config.json") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path} holds no JSON object: give a model's config.json")
    return parsed


if __name__ == "__main__":
    sys.exit(main())
