"""What `bench kernels` writes down of a step on a GPU: every launch, once, and what it moves."""

from __future__ import annotations

import emulated
import pytest

from harness import TINY
from samir_vllm.config import ModelConfig
from samir_vllm.extras.bench.kernels import record_step
from samir_vllm.model_runner import ModelRunner
from samir_vllm.weights import open_weights


@pytest.mark.emulated
@emulated.needs_compiler
def test_every_launch_of_a_step_is_seen() -> None:
    config = ModelConfig.from_dir(TINY)
    backend = emulated.cuda_backend_class()(config, max_tokens=32, max_num_seqs=2)
    pages = config.num_layers * 2 * 2
    runner = ModelRunner(
        backend, config, open_weights(TINY, config), num_pages=pages, max_num_seqs=2, max_pages_per_seq=2
    )
    before = emulated.launches.copy()
    launches = record_step(runner, 2, 17)
    ran = emulated.launches - before
    products = [launch for launch in launches if launch.kind.startswith("cuBLAS, ")]
    assert len(launches) - len(products) == ran.total()
    kinds = [launch.kind for launch in launches]
    layers = config.num_layers
    for role, count in {"qkv": layers, "o": layers, "gate_up": layers, "down": layers, "lm_head": 1}.items():
        assert kinds.count(f"cuBLAS, {role}") == count
    assert kinds.count("paged_attention_decode") == layers
    assert kinds.count("embedding") == kinds.count("argmax") == 1
    # Nothing is left on the backend that would see more.
    assert "_launch" not in vars(backend)
    assert "matmul" not in vars(backend._cublas)
    [attention] = {(one.bytes, one.flops) for one in launches if one.kind == "paged_attention_decode"}
    assert attention[1] == 4 * config.num_heads * config.head_dim * 2 * 18
    assert attention[0] >= 2 * 18 * 2 * config.num_kv_heads * config.head_dim * 2
    for launch in launches:
        launch.run()
    assert (emulated.launches - before).total() == 2 * ran.total()
