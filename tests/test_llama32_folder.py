"""A folder laid out as Llama 3.2 1B Instruct comes: real config, tokenizer, tensor names and shapes.

The weights are a sparse file of zeros: 2.47 GB that take no room on the disk.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import GOLDEN
from samir_vllm import Engine, SamplingParams
from samir_vllm.chat import load_chat_format
from samir_vllm.config import ModelConfig
from samir_vllm.tokenizer import load_tokenizer
from samir_vllm.weights import expected_tensors, open_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA3 = json.loads((GOLDEN / "llama3_tokenizer.json").read_text())
CAPITAL = next(d for d in LLAMA3["dialogs"] if d["name"] == "user_only")


def write_sparse_weights(folder: Path, config: ModelConfig) -> None:
    header, end = {}, 0
    for name, shape in expected_tensors(config).items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, llama3_rank_path: Path) -> Path:
    path = tmp_path_factory.mktemp("hub") / "llama-3.2-1b-instruct"
    (path / "original").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [128001, 128008, 128009]}))
    shutil.copy(llama3_rank_path, path / "original" / "tokenizer.model")
    write_sparse_weights(path, ModelConfig.from_dir(path))
    return path


def test_every_part_loads(folder: Path) -> None:
    config = ModelConfig.from_dir(folder)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.num_parameters == 1_235_814_400
    assert config.page_bytes() == 32 * 1024
    weights = open_weights(folder, config)
    assert len(weights) == 146
    assert weights.nbytes == 2_471_628_800
    tokenizer = load_tokenizer(folder)
    chat = load_chat_format(folder, tokenizer)
    assert chat is not None
    assert chat.name == "llama3"
    assert chat.encode(CAPITAL["messages"]) == CAPITAL["ids"]


def test_tokenize_command(folder: Path) -> None:
    command = [sys.executable, "-m", "samir_vllm", "tokenize", "--model", str(folder), "--json"]
    result = subprocess.run(
        [*command, "--chat", CAPITAL["messages"][0]["content"]], capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout)["ids"] == CAPITAL["ids"]


@pytest.mark.slow
@pytest.mark.skipif(
    os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 12 * 2**30, reason="needs 12 GiB of memory"
)
def test_engine_runs_the_real_shape(folder: Path) -> None:
    """Zero weights give zero logits, so the lowest id, "!", each time; 256 pages a layer in 128 MiB."""
    engine = Engine(folder, device="cpu")
    assert engine.pool.num_pages == 4096
    result = engine.generate(CAPITAL["messages"], SamplingParams(max_tokens=3))
    assert result.prompt_token_ids == CAPITAL["ids"]
    assert (result.text, result.token_ids, result.finish_reason) == ("!!!", [0, 0, 0], "length")
    assert result.metrics.num_pages == 16 * math.ceil((17 + 3 - 1) / 16)
