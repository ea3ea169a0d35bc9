"""What ``bench kernels`` writes down of a step on a GPU: every launch, once, and what it moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import emulated
import numpy as np
import pytest

from harness import TINY, load_tool
from samir_vllm.config import ModelConfig
from samir_vllm.decode_loop import run_step
from samir_vllm.extras.bench.kernels import MOVING, record_step
from samir_vllm.extras.bench.limits import Limits, StepWork, step_flops
from samir_vllm.extras.bench.model import pages_per_seq
from samir_vllm.model_runner import ModelRunner
from samir_vllm.sampling import MAX_LOGPROBS
from samir_vllm.weights import open_weights

pytestmark = [pytest.mark.emulated, emulated.needs_compiler, pytest.mark.slow]

BATCH, CONTEXT = 3, 20
CONFIG = ModelConfig.from_dir(TINY)


@pytest.fixture(scope="module", params=[2048, 128])
def segment_k(request: pytest.FixtureRequest) -> int:
    """The contract's longest stretch of K, and one so short that every product takes two or more."""
    length: int = request.param
    return length


@pytest.fixture(scope="module")
def runner(segment_k: int) -> ModelRunner:
    module = emulated.load_cuda_backend()
    module.SEGMENT_K = segment_k  # type: ignore[attr-defined]
    pages = pages_per_seq(CONTEXT + 2)
    return ModelRunner(
        module.CudaBackend(CONFIG, max_tokens=2 * BATCH, max_num_seqs=BATCH, max_positions=600),
        CONFIG,
        open_weights(TINY, CONFIG),
        num_pages=pages * BATCH * CONFIG.num_layers,
        max_num_seqs=BATCH,
        max_pages_per_seq=pages,
    )


def test_every_launch_of_a_step_is_seen(runner: ModelRunner, segment_k: int) -> None:
    launches = record_step(runner, BATCH, CONTEXT)
    backend: Any = runner.backend
    before = emulated.launches.copy()
    backend.set_decode_rows(np.arange(BATCH), np.full(BATCH, CONTEXT), np.full(BATCH, CONTEXT))
    run_step(backend, runner.weights, backend.begin_decode(backend.decode_shape(CONTEXT + 1)))
    ran = emulated.launches - before
    kinds = [launch.kind for launch in launches]
    products = [kind for kind in kinds if kind.startswith("cuBLAS, ")]
    assert len(launches) - len(products) == ran.total()
    layers = CONFIG.num_layers
    counts = dict.fromkeys(("qkv", "o", "gate_up", "down"), layers) | {
        "lm_head": -(-CONFIG.hidden_size // segment_k)
    }
    assert {role: products.count(f"cuBLAS, {role}") for role in counts} == counts
    assert len(products) == sum(counts.values())
    assert kinds.count("paged_attention_decode") == layers
    assert kinds.count(MOVING) == kinds.count("embedding") == kinds.count("argmax") == 1
    # Nothing is left on the backend that would see more.
    assert "_launch" not in vars(backend)
    assert "matmul" not in vars(backend._cublas)
    for launch in launches:
        launch.run()
    assert (emulated.launches - before).total() == 2 * ran.total()


def state(backend: Any) -> tuple[Any, ...]:
    """Of the rows that decode: tokens, places, slots, KV lengths ..., and what came out of them."""
    return backend._decode_inputs.tolist(), backend._logits[:BATCH].tolist(), backend._ids[:BATCH].tolist()


def test_a_step_may_be_repeated(runner: ModelRunner) -> None:
    """All but what moves the sequences on, which it does."""
    moving, *staying = record_step(runner, BATCH, CONTEXT)
    assert moving.kind == MOVING
    backend: Any = runner.backend
    before = state(backend)
    assert backend._decode_inputs[[1, 2, 3]].tolist() == [[CONTEXT] * 3, [0, 1, 2], [CONTEXT + 1] * 3]
    assert len(set(before[2])) > 1  # each has a prompt of its own
    backend.record(lambda: [launch.run() for launch in [*staying, *staying]])()
    assert state(backend) == before
    moving.run()
    assert backend._decode_inputs[3].tolist() == [CONTEXT + 2] * 3


def test_counts(runner: ModelRunner, segment_k: int) -> None:
    launches = record_step(runner, BATCH, CONTEXT)
    pairs = BATCH * (CONTEXT + 1)
    work = StepWork(BATCH, BATCH * CONTEXT, attended=pairs, logit_rows=BATCH)
    assert sum(launch.flops for launch in launches) == step_flops(CONFIG, work)
    hidden, vocab_size = CONFIG.hidden_size, CONFIG.vocab_size
    nbytes = {launch.kind: 0.0 for launch in launches}
    for launch in launches:
        nbytes[launch.kind] += launch.bytes
    out = 4 * vocab_size * BATCH * -(-hidden // segment_k)  # each segment is added to it
    assert nbytes["cuBLAS, lm_head"] == 2 * hidden * (vocab_size + BATCH) + out
    assert nbytes["embedding"] == 4 * BATCH + 2 * (2 * BATCH * hidden)  # ids; rows read, and written
    [attention] = {(one.bytes, one.flops) for one in launches if one.kind == "paged_attention_decode"}
    assert attention[1] == 4 * CONFIG.num_heads * CONFIG.head_dim * pairs
    assert attention[0] >= pairs * 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 2


@pytest.mark.parametrize("segment_k", [128], indirect=True)
def test_choices_of_tokens(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tools/time_sampling.py``: every case runs, and is recorded on rows that want what it says."""
    measure = pytest.importorskip("samir_vllm.backends.cuda_measure", reason="CuPy is not installed")
    tool, backend, sampled = load_tool("time_sampling"), runner.backend, []

    def graph_seconds(backend: Any, launches: list[Callable[[], Any]]) -> float:
        before = emulated.launches["sample"]
        backend.record(lambda: [launch() for launch in launches])()
        sampled.append(emulated.launches["sample"] - before)
        return 1.0

    monkeypatch.setattr(measure, "graph_seconds", graph_seconds)
    monkeypatch.setattr(tool, "PROMPT_TOKENS", CONTEXT)
    rows = tool.time_kernels(backend, [1, BATCH], Limits("a test", 4e3, 1, 1, 1, 1))
    names = [name for name, deviation, _ in tool.CASES if deviation == tool.PEAKED]
    names += [f"log-probabilities, {n} of the likeliest" for n in (0, MAX_LOGPROBS)]
    names += [name for name, deviation, _ in tool.CASES if deviation == tool.FLAT]
    assert [(row["name"], row["batch"]) for row in rows] == [(n, b) for n in names for b in (1, BATCH)]
    greedy = [name == "argmax" or name.startswith("log-prob") for name in names for _ in range(2)]
    assert [count == 0 for count in sampled] == greedy
    assert {row["floor_seconds"] for row in rows} == {b * CONFIG.vocab_size / 1e3 for b in (1, BATCH)}
