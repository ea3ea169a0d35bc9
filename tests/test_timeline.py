"""The timeline of a run: trace events and pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fake_model import make_engine
from samir_vllm import OptionError, SamplingParams
from samir_vllm.extras.timeline import Timeline, load_pyplot


@pytest.fixture
def timeline() -> Timeline:
    """Three requests, the second aborted while it decodes, the third while it waits."""
    timeline = Timeline()
    engine, _ = make_engine(num_pages=16, num_layers=2, max_num_seqs=2, max_batched_tokens=8)
    engine.on_step = timeline.add
    for name, prompt_tokens in (("a", 20), ("b", 3), ("c", 5)):
        engine.add_request(list(range(prompt_tokens)), SamplingParams(max_tokens=6), request_id=name)
    for _ in range(4):
        engine.step()
    engine.abort("b")
    engine.abort("c")
    while engine.has_work:
        engine.step()
    return timeline


def events(timeline: Timeline, path: Path) -> list[dict[str, Any]]:
    timeline.write_trace(path, 16)
    return json.loads(path.read_text())["traceEvents"]


def test_trace_tells_what_happened(timeline: Timeline, tmp_path: Path) -> None:
    found = events(timeline, tmp_path / "run.json")
    rows = {e["args"]["name"]: e["tid"] for e in found if e["ph"] == "M"}
    assert set(rows) == {"steps", "a", "b"}  # c was never admitted

    def names(request: str) -> list[str]:
        return [e["name"] for e in found if e["tid"] == rows[request] and e["ph"] in "iX"]

    assert names("a") == ["admitted"] + ["prefill"] * 3 + ["decode"] * 5 + ["finished"]
    prefills = [e["args"]["tokens"] for e in found if e["name"] == "prefill" and e["tid"] == rows["a"]]
    assert prefills == [8, 8, 4]
    assert names("b")[0] == "admitted"
    ends = {(e["tid"], e["args"]["reason"]) for e in found if e["name"] == "finished"}
    assert ends == {(rows["a"], "length"), (rows["b"], "abort"), (0, "abort")}


def test_counters_and_times(timeline: Timeline, tmp_path: Path) -> None:
    found = events(timeline, tmp_path / "run.json")
    pages = [e["args"] for e in found if e["name"] == "KV pages"]
    assert {p["used"] + p["free"] for p in pages} == {16}
    assert pages[0]["used"] == 2 * 2 + 2 * 1  # ceil(25 / 16) and ceil(8 / 16) pages in two layers
    assert pages[-1]["used"] == 0
    steps = [e for e in found if e["ph"] == "X" and e["tid"] == 0]
    assert steps[0]["ts"] == 0
    assert all(a["ts"] + a["dur"] <= b["ts"] + 0.2 for a, b in pairwise(steps))
    assert steps[0]["args"]["tokens"] == 8


@pytest.mark.parametrize("name", ["run.png", "run.svg"])
def test_picture(timeline: Timeline, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    timeline.draw(path, 16, "a run")
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") or b"<?xml" in start
    Timeline().draw(path, 16, "nothing ran")


def test_bad_names_are_one_line(timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"run\.jpg.*\.png or \.svg"):
        load_pyplot(tmp_path / "run.jpg")
    with pytest.raises(OptionError, match="can't write"):
        timeline.write_trace(tmp_path / "no" / "run.json", 16)


@pytest.mark.demo
def test_command_line(demo_model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, picture = tmp_path / "run.json", tmp_path / "run.svg"
    command = [
        sys.executable,
        "-m",
        "samir_vllm",
        "generate",
        "Hi",
        "Ho",
        "4",
        "--model",
        str(demo_model_dir),
    ]
    more = ["--device", "cpu", "--quiet", "--trace", str(trace), "--plot", str(picture)]
    subprocess.run([*command, *more], check=True, capture_output=True)
    assert "decode" in {e["name"] for e in json.loads(trace.read_text())["traceEvents"]}
    assert "continuous batching" in picture.read_text() or picture.stat().st_size > 5000
    wrong = subprocess.run([*command, "--plot", "x.jpg"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
