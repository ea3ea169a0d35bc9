"""The bench commands run and count right; what they time is nobody's business here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import TINY
from samir_vllm.__main__ import main
from samir_vllm.config import ModelConfig
from samir_vllm.extras.bench import cpu, scheduler, startup


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
    monkeypatch.setattr(cpu, "RULER_BYTES", 1 << 22)
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
    assert main(["bench", "startup", "--model", str(TINY), "--runs", "0"]) == 2


def test_unknown_bench_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "frobnicate"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
