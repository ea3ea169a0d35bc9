"""The bench commands run and count right; what they time is nobody's business here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samir_vllm.__main__ import main
from samir_vllm.extras import bench_cpu, bench_scheduler


def test_scheduler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_scheduler, "RUNNING", (1, 4))
    monkeypatch.setattr(bench_scheduler, "WAITING", (0, 50))
    monkeypatch.setattr(bench_scheduler, "admission_us", lambda count: 1.0)
    assert main(["bench", "scheduler", "--steps", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(r["running"], r["waiting"]) for r in rows] == [(1, 0), (1, 50), (4, 0), (4, 50)]
    assert all(r["engine_step_us"] > 0 for r in rows)
    assert main(["bench", "scheduler", "--steps", "3"]) == 0
    assert "Engine" in capsys.readouterr().out


def test_admission_ends_every_request() -> None:
    assert bench_scheduler.admission_us(600) > 0


@pytest.mark.demo
def test_cpu(
    demo_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_cpu, "RULER_BYTES", 1 << 22)
    monkeypatch.setattr(bench_cpu, "TEXT_BYTES", 1 << 16)
    assert main(["bench", "cpu", "--model", str(demo_model_dir), "--new", "4", "--runs", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    # 30 layers of 3,538,944 weights and 1,152 norms, the final norm, and 49,152 x 576 of the head, in FP32
    assert report["weight_bytes"] == 4 * (30 * (3_538_944 + 1_152) + 576 + 49_152 * 576)
    assert report["decode_share_of_limit"] > 0
    assert report["encode"]["tokens"] == report["encode"]["tiktoken_tokens"]


def test_unknown_bench_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "frobnicate"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
