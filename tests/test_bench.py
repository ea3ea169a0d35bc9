"""The bench commands run and count right; what they time is nobody's business here."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_model import make_engine as fake_engine
from harness import TINY
from samir_vllm.__main__ import BENCHES, main
from samir_vllm.config import ModelConfig
from samir_vllm.engine import Engine
from samir_vllm.errors import SamirVllmError
from samir_vllm.extras.bench import (
    cpu,
    decode,
    kernels,
    limits,
    model,
    peers,
    prefill,
    report,
    scheduler,
    startup,
    timed_runner,
)
from samir_vllm.extras.bench.limits import Limits, StepWork
from samir_vllm.llama import LayerWeights, LlamaWeights
from samir_vllm.weights import expected_tensors


def test_scheduler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(scheduler, "RUNNING", (1, 4))
    monkeypatch.setattr(scheduler, "WAITING", (0, 50))
    monkeypatch.setattr(scheduler, "admission_us", lambda count: 1.0)
    assert main(["bench", "scheduler", "--steps", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(r["running"], r["waiting"]) for r in rows] == [(1, 0), (1, 50), (4, 0), (4, 50)]
    assert all(r["engine_step_us"] > 0 for r in rows)
    assert main(["bench", "scheduler", "--steps", "3"]) == 0
    assert "Engine" in capsys.readouterr().out


def test_admission_ends_every_request() -> None:
    assert scheduler.admission_us(600) > 0


@pytest.mark.demo
def test_cpu(
    demo_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 22)
    monkeypatch.setattr(cpu, "TEXT_BYTES", 1 << 16)
    assert main(["bench", "cpu", "--model", str(demo_model_dir), "--new", "4", "--runs", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    # 30 layers of 3,538,944 weights and 1,152 norms, the final norm, and 49,152 x 576 of the head, in FP32
    assert report["weight_bytes"] == 4 * (30 * (3_538_944 + 1_152) + 576 + 49_152 * 576)
    assert report["decode_share_of_limit"] > 0
    assert report["encode"]["tokens"] == report["encode"]["tiktoken_tokens"]


def add_stage(name: str, seconds: float, *, background: bool = False) -> dict[str, object]:
    return {"name": name, "seconds": seconds, "detail": "", "background": background}


def test_startup_counts_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians of the warm starts, stage by stage; memory beside the mapping."""
    nbytes = 2 * ModelConfig.from_dir(TINY).num_parameters

    def start(kernels: float, weights: float) -> startup.Start:
        stages = [add_stage("context", 0.4, background=True), add_stage("kernels", kernels)]
        stages += [add_stage("weights", weights)]
        return startup.Start("numpy", kernels + weights, stages, nbytes + 1000)

    report = startup.make_report(TINY, start(9, 1), [start(2, 1), start(1, 3), start(3, 2)])
    assert (report["cold_seconds"], report["warm_seconds"]) == (10, 4)
    assert report["warm_seconds_each"] == [3, 4, 5]
    kernels = next(s for s in report["stages"] if s["name"] == "kernels")
    assert (kernels["cold_seconds"], kernels["seconds"]) == (9, 2)
    assert report["weights_bytes_per_second"] == nbytes / 2
    assert report["peak_host_bytes_beside_mapping"] == 1000
    assert "pinned_bytes_per_second" not in report  # no GPU in it


@pytest.mark.demo
def test_startup(demo_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "startup", "--model", str(demo_model_dir), "--device", "cpu", "--runs", "1"]
    assert main([*args, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["backend"] == "numpy"
    assert report["cold_seconds"] > report["stages"][0]["cold_seconds"]
    assert [s["name"] for s in report["stages"]][-1] == "prompt to first token"
    total = sum(s["seconds"] for s in report["stages"] if not s["background"])
    assert total == pytest.approx(report["warm_seconds"])
    assert report["peak_host_bytes"] > report["weight_bytes"]


def test_startup_passes_the_error_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "startup", "--model", str(TINY), "--device", "cuda:99", "--runs", "1"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("samir_vllm: ")


def test_unknown_bench_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "frobnicate"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["bench", name, "--help"])
    assert e.value.code == 0
    assert "--json" in capsys.readouterr().out


# What a step must move and compute, by hand, for Llama 3.2 1B

LAYER = 2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048  # q, o; k, v; gate, up, down
MATRICES = 16 * LAYER
HEAD = 128256 * 2048
KV_TOKEN = 16 * 2 * 8 * 64  # values: layers, K and V, heads, their width


def matrix(*shape: int) -> Any:
    """BF16 that takes no memory."""
    return np.broadcast_to(np.uint16(0), shape)


def weights_1b() -> LlamaWeights:
    layer = LayerWeights(
        matrix(2048),
        matrix(3072, 2048),
        matrix(2048, 2048),
        matrix(2048),
        matrix(16384, 2048),
        matrix(2048, 8192),
    )
    embeddings = matrix(128256, 2048)
    return LlamaWeights(embeddings, [layer] * 16, matrix(2048), embeddings)


def test_the_1b_shape() -> None:
    assert MATRICES == 973_078_528
    assert model.LLAMA_1B.num_parameters == MATRICES + HEAD + 33 * 2048 == 1_235_814_400


def test_bytes_of_a_step() -> None:
    weights = 2 * (MATRICES + 33 * 2048 + HEAD)
    assert weights == 2_471_628_800

    def nbytes(tokens: int, kv_tokens: int, kv_itemsize: int = 2, logit_rows: int = 1) -> int:
        work = StepWork(tokens, kv_tokens, attended=0, logit_rows=logit_rows)
        return limits.step_bytes(weights_1b(), model.LLAMA_1B, work, kv_itemsize)

    assert nbytes(tokens=0, kv_tokens=0) == weights
    assert nbytes(tokens=0, kv_tokens=0, logit_rows=0) == weights - 2 * HEAD
    assert nbytes(tokens=1, kv_tokens=128) == weights + 2 * 2048 + 2 * KV_TOKEN * 129 == 2_475_859_968
    assert nbytes(tokens=32, kv_tokens=32 * 128) == weights + 32 * 2 * 2048 + 2 * KV_TOKEN * 32 * 129
    assert nbytes(tokens=1, kv_tokens=9, kv_itemsize=4) == weights + 2 * 2048 + 4 * KV_TOKEN * 10


def flops(config: ModelConfig = model.LLAMA_1B, *, tokens: int, attended: int, logit_rows: int) -> int:
    return limits.step_flops(config, StepWork(tokens, 0, attended, logit_rows))


def test_operations_of_a_step() -> None:
    assert flops(tokens=1, attended=0, logit_rows=0) == 2 * MATRICES
    assert flops(tokens=0, attended=0, logit_rows=3) == 6 * HEAD
    # A pair costs each of 32 heads a product of 64 with k, and one with v.
    assert flops(tokens=0, attended=1, logit_rows=0) == 16 * 32 * 2 * 2 * 64
    assert flops(tokens=1, attended=129, logit_rows=1) == 2_488_401_920
    assert limits.causal_pairs(1) == 1
    assert limits.causal_pairs(4) == 1 + 2 + 3 + 4


def test_every_matrix_counts_once() -> None:
    config = ModelConfig.from_dir(TINY)
    matrices = sum(int(np.prod(shape)) for shape in expected_tensors(config).values() if len(shape) > 1)
    for shape in (config, replace(config, tie_word_embeddings=False)):
        assert flops(shape, tokens=1, attended=0, logit_rows=1) == 2 * matrices


LIMITS = Limits("a test", 1e3, 1e3, 1e6, 1e-6, 1e-6)


def test_the_floor_is_the_slower_of_two() -> None:
    assert limits.floor_seconds(LIMITS, 500, 1e5) == 0.5
    assert limits.floor_seconds(LIMITS, 500, 3e6) == 3


# The model


def test_random_weights() -> None:
    config = ModelConfig.from_dir(TINY)
    tensors = model.random_tensors(config)
    assert {name: t.shape for name, t in tensors.items()} == expected_tensors(config)
    matrices = [t for t in tensors.values() if t.ndim == 2]
    assert all(np.shares_memory(t, t.base) and t.base is matrices[0].base for t in matrices)
    assert matrices[0].base.size <= max(t.size for t in matrices) + model.BLOCK
    for t in matrices:
        values = t.astype(np.float32)
        assert values.std() == pytest.approx(0.02, rel=0.05)
        assert len(np.unique(values[:, :8], axis=0)) == len(values)  # no row like another
    assert all((t == 1).all() for t in tensors.values() if t.ndim == 1)


def test_rows_differ_where_the_numbers_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "BLOCK", 1000)
    config = ModelConfig.from_dir(TINY)
    embeddings = model.random_tensors(config)["model.embed_tokens.weight"].astype(np.float32)
    assert len(np.unique(embeddings[:64], axis=0)) == 64


def test_text_is_made_of_every_token() -> None:
    decoder = model.PieceTokenizer(300).stream_decoder()
    assert "".join(decoder.push(i) for i in (0, 16, 299)) == " 0 10 12b"


def test_pages() -> None:
    assert [model.pages_per_seq(n) for n in (1, 2, 17, 18, 384)] == [1, 1, 1, 2, 24]


# Commands on the tiny model

TINY_CPU = ("--model", str(TINY), "--device", "cpu")


@pytest.fixture
def small_rulers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rulers that cost nothing, and tell nothing."""
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "HOST_GEMM", 64)
    monkeypatch.setattr(limits, "REPEATS", 2)


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What ``bench WORDS --json`` prints."""
    assert main(["bench", *words, *TINY_CPU, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["limits"].keys() == {f.name for f in fields(Limits)}
    assert found["limits"]["graph_node_seconds"] is None
    assert found["limits"]["read_bytes_per_second"] > 0
    return found


ROW = {"name", "seconds", "tokens", "bytes", "flops", "floor_seconds", "gpu_idle", "peer_seconds"}
ROW |= {"tokens_per_second", "share_of_floor", "mean_seconds", "gpu_seconds"}


@pytest.mark.usefixtures("small_rulers")
def test_decode(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "decode", "--batch", "1,3", "--prompt", "5", "--new", "4", "--runs", "2")
    assert (found["bench"], found["model"], found["peer"]) == ("decode", "tiny-llama3", None)
    config = ModelConfig.from_dir(TINY)
    for row, batch in zip(found["rows"], (1, 3), strict=True):
        assert row.keys() == ROW | {"steps"}
        assert row["tokens"] == batch
        assert row["steps"] == 2 * 3  # the first of the 4 tokens comes with the prompt
        # Steps read the K and V of 5, 6 and 7 tokens.
        assert row["flops"] == flops(config, tokens=batch, attended=batch * 7, logit_rows=batch)
        weights = sum(int(np.prod(shape)) for shape in expected_tensors(config).values())
        kv = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
        assert row["bytes"] == 4 * (weights + batch * config.hidden_size) + kv * batch * 7
        assert row["share_of_floor"] == pytest.approx(row["floor_seconds"] / row["seconds"])
        assert row["tokens_per_second"] == pytest.approx(batch / row["seconds"])
        assert row["gpu_idle"] is row["gpu_seconds"] is row["peer_seconds"] is None


@pytest.mark.usefixtures("small_rulers")
def test_prefill(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "prefill", "--tokens", "3,40", "--runs", "2")
    config = ModelConfig.from_dir(TINY)
    for row, tokens in zip(found["rows"], (3, 40), strict=True):
        assert row.keys() == ROW | {"runs", "flops_per_second"}
        assert row["tokens"] == tokens
        pairs = tokens * (tokens + 1) // 2
        assert row["flops"] == flops(config, tokens=tokens, attended=pairs, logit_rows=1)


@pytest.mark.usefixtures("small_rulers")
def test_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "roofline")
    [gemm] = found["gemms"]
    assert (gemm["rows"], gemm["features"], gemm["depth"]) == (64, 64, 64)
    assert gemm["flops_per_second"] == found["limits"]["gemm_flops_per_second"] > 0


@pytest.mark.usefixtures("small_rulers")
def test_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "kernels", "--batch", "2", "--context", "9")
    assert (found["batch"], found["context"]) == (2, 9)
    config = ModelConfig.from_dir(TINY)
    layers = config.num_layers
    once = ("embedding", "take_rows", "lm_head, lm_head", "argmax", "keep_tokens")
    each_layer = (
        "linear, qkv",
        "rope_kv_write",
        "paged_attention_decode",
        "linear_add, o",
        "linear, gate_up",
    )
    counts = dict.fromkeys(once, 1) | dict.fromkeys((*each_layer, "silu_mul", "linear_add, down"), layers)
    counts["rmsnorm"] = 2 * layers + 1
    assert {kind["name"]: kind["count"] for kind in found["kernels"]} == counts
    kinds = {kind["name"]: kind for kind in found["kernels"]}
    head = config.vocab_size * config.hidden_size
    assert kinds["lm_head, lm_head"]["flops"] == 2 * 2 * head
    assert kinds["lm_head, lm_head"]["bytes"] == 4 * (head + 2 * config.hidden_size)
    assert kinds["embedding"]["bytes"] == 4 * 2 * config.hidden_size
    products = sum(kind["flops"] for kind in found["kernels"])
    assert products == flops(config, tokens=2, attended=2 * 10, logit_rows=2)


@pytest.mark.usefixtures("small_rulers")
@pytest.mark.parametrize(
    "words",
    [
        ["decode", "--batch", "1,2", "--prompt", "3", "--new", "3", "--runs", "1"],
        ["decode", "--batch", "2", "--prompt", "3", "--new", "3", "--runs", "1", "--constrained"],
        ["prefill", "--tokens", "3", "--runs", "1"],
        ["kernels"],
        ["roofline"],
    ],
    ids=lambda words: words[0],
)
def test_tables_and_pictures(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, begins in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        path = tmp_path / name
        assert main(["bench", *words, *TINY_CPU, "--plot", str(path)]) == 0
        assert path.read_bytes().startswith(begins)
    out, err = capsys.readouterr()
    assert err == ""
    assert "B/s" in out
    assert words == ["roofline"] or "tiny-llama3" in out


# What is timed


def make_tiny_engine(
    *, batch: int, tokens: int, max_batched_tokens: int = 64, tensors: dict[str, Any] | None = None
) -> Engine:
    config = ModelConfig.from_dir(TINY)
    pages = model.pages_per_seq(tokens)
    return model.make_engine(
        argparse.Namespace(device="cpu"),
        config,
        tensors or model.random_tensors(config),
        num_pages=pages * config.num_layers * batch,
        max_num_seqs=batch,
        max_batched_tokens=max_batched_tokens,
        max_pages_per_seq=pages,
        runner_class=timed_runner.TimedRunner,
    )


def test_only_whole_decode_steps_count() -> None:
    """Prompts that go in over several steps: while they do, some decode already, and some end earlier."""
    engine = make_tiny_engine(batch=3, tokens=10 + 8, max_batched_tokens=10)
    runner = timed_runner.runner_of(engine)
    runner.begin(lambda step: len(step.decodes) == 3 and not step.prefills)
    times = decode.generate(engine, 3, 10, 8)
    marks = runner.end()
    # Tokens come in steps 1 to 8, 2 to 9 and 3 to 10: 4 to 8 are those of all three, and of no prompt.
    assert len(times) == len(marks) == 5
    assert [mark.kv_tokens for mark in marks] == [n + (n - 1) + (n - 2) for n in range(12, 17)]
    with pytest.raises(SamirVllmError, match="raise --new"):
        decode.generate(engine, 3, 10, 2)


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("max_batched_tokens", [64, 5])
def test_steps_ahead_change_no_count(steps_ahead: int, max_batched_tokens: int) -> None:
    """As on a GPU: a step's tokens come a call later, once each."""
    engine, runner = fake_engine(num_pages=64, steps_ahead=steps_ahead, max_batched_tokens=max_batched_tokens)
    for _ in range(2):
        runner.steps.clear()
        times = decode.generate(engine, 3, 5, 9)
        whole = [decodes for decodes, prefills in runner.steps if len(decodes) == 3 and not prefills]
        assert len(times) == len(whole) == (8 if max_batched_tokens == 64 else 6)
        assert not engine.has_work


def test_a_longest_sequence_fits() -> None:
    """The last new token needs no page."""
    for tokens in (17, 18, 32, 33):
        engine = make_tiny_engine(batch=1, tokens=tokens)
        assert len(decode.generate(engine, 1, 5, tokens - 5)) == tokens - 6


def test_sampling_reaches_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = fake_engine(num_pages=64)
    add, seen = engine.add_request, []

    def see(prompt: list[int], params: Any, constraint: object) -> str:
        seen.append((params.temperature, params.max_tokens, params.ignore_eos, constraint))
        return add(prompt, params)

    monkeypatch.setattr(engine, "add_request", see)
    decode.generate(engine, 2, 5, 3, temperature=0.5)
    decode.generate(engine, 1, 5, 3, constrained=True)
    assert seen == [*[(0.5, 3, True, None)] * 2, (0.0, 3, True, decode.EveryOther)]


def test_a_request_that_fails_is_no_measurement() -> None:
    tensors = model.random_tensors(ModelConfig.from_dir(TINY))
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    engine = make_tiny_engine(batch=2, tokens=9, tensors=tensors)
    with pytest.raises(SamirVllmError, match="a request failed: NaN in the logits"):
        decode.generate(engine, 2, 5, 4)
    engine = make_tiny_engine(batch=1, tokens=9, tensors=tensors)
    with pytest.raises(SamirVllmError, match="a request failed: NaN in the logits"):
        prefill.first_token_seconds(engine, 5)


def test_idle_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are their seconds here."""
    measure = pytest.importorskip("samir_vllm.backends.cuda_measure")
    monkeypatch.setattr(measure, "seconds_between", lambda first, last: last - first)
    marks = [timed_runner.Mark(0, start, start + 2) for start in (10, 13, 16, 18)]
    assert timed_runner.gpu_seconds(marks) == 2
    assert timed_runner.gpu_idle(marks) == pytest.approx(1 - 8 / 10)
    assert timed_runner.gpu_idle(marks[2:]) == 0
    assert timed_runner.gpu_idle([]) is timed_runner.gpu_idle([timed_runner.Mark(0, None, None)]) is None


@pytest.mark.usefixtures("small_rulers")
def test_a_peer_stands_beside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[dict[str, Any]] = []

    def results(config: ModelConfig, works: list[dict[str, Any]], **options: Any) -> Any:
        assert options["device"] == "cpu"
        asked.extend(works)
        return {works[0]["name"]: peers.PeerTime(2.5, "eager")}

    monkeypatch.setattr(report, "transformers_results", results)
    words = [
        "decode",
        "--batch",
        "1,2",
        "--prompt",
        "3",
        "--new",
        "2",
        "--runs",
        "1",
        "--peers",
        "transformers",
    ]
    found = bench(capsys, *words)
    assert found["peer"] == "transformers"
    assert [row["peer_seconds"] for row in found["rows"]] == [2.5, None]
    assert found["rows"][0]["peer_how"] == "eager"
    assert asked == [
        {"name": f"batch {n}", "kind": "decode", "batch": n, "prompt": 3, "new": 2} for n in (1, 2)
    ]
    assert main(["bench", *words, *TINY_CPU]) == 0
    assert "2.5 s" in capsys.readouterr().out
    found = bench(capsys, "prefill", "--tokens", "3", "--runs", "1", "--peers", "transformers")
    assert found["rows"][0]["peer_seconds"] == 2.5
    assert asked[-1] == {"name": "3 tokens", "kind": "prefill", "tokens": 3}
    monkeypatch.setattr(report, "transformers_results", lambda *args, **options: None)
    assert bench(capsys, *words)["peer"] is None


# Mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["decode", "--batch", "1,x"], "'x' should be a whole number"),
        (["decode", "--batch", ""], "should be a whole number"),
        (["decode", "--batch", "1,,2"], "should be a whole number"),
        (["decode", "--batch", "0"], "'0' should be a whole number"),
        (["decode", "--prompt", "-3"], "should be a whole number"),
        (["decode", "--new", "1"], "--new must be 2 or more"),
        (["decode", "--batch", "1", "--prompt", "200000"], "longer than the model's context of"),
        (["decode", "--peers", "vllm"], "invalid choice"),
        (["prefill", "--tokens", "9999999"], "longer than the model's context of"),
        (["prefill", "--plot", "picture.jpg"], "must end in .png or .svg"),
        (["kernels", "--context", "9999999"], "longer than the model's context of"),
        (["roofline", "--plot", "picture"], "must end in .png or .svg"),
        (["decode", "--device", "gpu"], "device must be auto, cpu, cuda or cuda:N"),
        (["roofline", "--device", "cuda:99"], "cpu"),
        (["decode", "--model", "no-such-model"], "no model 'no-such-model'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*words[:1], *TINY_CPU, *words[1:]]
    assert main(["bench", *given]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cpu", "--new", "1"], "--new must be 2 or more"),
        (["cpu", "--runs", "0"], "'0' should be a whole number"),
        (["scheduler", "--steps", "401"], "--steps must be at most 400"),
        (["startup", "--runs", "0"], "'0' should be a whole number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_without_a_device(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.usefixtures("small_rulers")
def test_a_picture_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "prefill", "--tokens", "3", "--runs", "1", *TINY_CPU]
    assert main([*words, "--plot", str(tmp_path / "none" / "a.png")]) == 2
    assert "can't write the picture" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(prefill, "open_model", lambda args: pytest.fail("it was measured first"))
    assert main([*words, "--plot", str(tmp_path / "a.png")]) == 2
    assert "pip install 'samir-vllm[plot]'" in capsys.readouterr().err


# Words


def test_units() -> None:
    assert [report.duration(s) for s in (2, 0.25, 1.2345e-3, 7.1e-7)] == [
        "2 s",
        "250 ms",
        "1.234 ms",
        "0.71 us",
    ]
    assert [report.rate(x, "B/s") for x in (4.52e12, 7e9, 12, 0)] == [
        "4.52 TB/s",
        "7 GB/s",
        "12 B/s",
        "0 B/s",
    ]
    assert (report.share(None), report.share(0.123)) == ("", "12.3%")
    assert report.numbers("1, 8,32") == [1, 8, 32]


def test_a_table_names_what_bounds_a_row() -> None:
    rows = [
        report.Row("by bytes", 2.0, 1, 1000, 1e3, 1.0, gpu_idle=0.25),
        report.Row("by operations", 4.0, 8, 10, 2e6, 2.0, peer_seconds=8.0),
    ]
    found = report.table_of(report.Report("decode", "m", LIMITS, rows, "transformers"))
    columns = {str(c.header): list(c.cells) for c in found.columns}
    assert columns["rate"] == ["500 B/s", "500 kFLOP/s"]
    assert columns["floor / time"] == ["50.0%", "50.0%"]
    assert columns["GPU idle"] == ["25.0%", ""]
    assert (columns["transformers"], columns["times ours"]) == (["", "8 s"], ["", "2.00"])
    assert columns["tokens/s"] == ["0.5", "2"]


def test_what_moves_the_step_on_is_timed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ran after it would find the sequences beyond their pages."""
    recorded = [
        kernels.Launch(kind, lambda: None, 1, 0) for kind in ("begin_decode", "linear", "rope", "linear")
    ]
    replayed: list[list[str]] = []

    def replay(runner: Any, launches: list[kernels.Launch]) -> float:
        replayed.append([launch.kind for launch in launches])
        return float(len(launches))

    monkeypatch.setattr(kernels, "record_step", lambda *args: recorded)
    monkeypatch.setattr(kernels, "measure_limits", lambda backend: LIMITS)
    monkeypatch.setattr(kernels, "replay_seconds", replay)
    args = argparse.Namespace(device="cpu", batch=1, context=3)
    config = ModelConfig.from_dir(TINY)
    found = kernels.measure_step(args, config, model.random_tensors(config))
    assert replayed == [["linear", "rope", "linear"], ["linear", "linear"], ["rope"], ["begin_decode"]]
    assert found.seconds == 3 + 1
    assert [kind.name for kind in found.kinds] == ["linear", "rope", "begin_decode"]


def test_the_sum_of_kinds() -> None:
    kinds = [kernels.Kind("a", 2, 1.0, 10, 100, 0.5), kernels.Kind("b", 3, 2.0, 20, 0, 1.0)]
    assert kernels.sum_of(kinds) == kernels.Kind("sum", 5, 3.0, 30, 100, 1.5)
