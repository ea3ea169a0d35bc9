"""The timeline of a run: trace events and pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fake_model import STEPS_AHEAD, make_engine
from samir_vllm import OptionError, SamplingParams
from samir_vllm.commandline import load_pyplot
from samir_vllm.extras.timeline import Timeline


@pytest.fixture(params=[0, 1, 2], ids="{} ahead".format)
def timeline(request: pytest.FixtureRequest) -> Timeline:
    """Three requests, the second aborted while it decodes, the third while it waits.

    Steps of the second may be under way then, and are in the timeline as any other.
    """
    timeline = Timeline()
    sizes = {"num_pages": 16, "num_layers": 2, "max_num_seqs": 2, "max_batched_tokens": 8}
    engine, _ = make_engine(steps_ahead=request.param, **sizes)
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


@STEPS_AHEAD
@pytest.mark.parametrize("failing", [0, 1, 2, 4])
@pytest.mark.parametrize("when", ["launch", "result", "interrupted launch", "interrupted wait"])
def test_trace_of_a_run_with_a_failing_step(
    tmp_path: Path, failing: int, when: str, steps_ahead: int
) -> None:
    """Every step that gave somebody something, once and in the order of the launches."""
    timeline = Timeline()
    engine, runner = make_engine(steps_ahead=steps_ahead, max_num_seqs=2, max_batched_tokens=8)
    engine.on_step = timeline.add
    raises = runner.raise_at if when.endswith("launch") else runner.raise_late
    raises[failing] = KeyboardInterrupt() if when.startswith("interrupted") else RuntimeError("broken")
    for name, prompt_tokens in (("a", 3), ("b", 20), ("c", 5)):
        engine.add_request(list(range(prompt_tokens)), SamplingParams(max_tokens=6), request_id=name)
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
    assert [name for rec in timeline.records for name in rec.admitted] == ["a", "b", "c"]
    assert sorted(name for rec in timeline.records for name, _ in rec.finished) == ["a", "b", "c"]
    for earlier, later in pairwise(timeline.records):
        assert earlier.started <= earlier.ended <= later.started <= later.ended
    found = events(timeline, tmp_path / "run.json")
    rows = {e["args"]["name"]: e["tid"] for e in found if e["ph"] == "M"}
    ends = {e["tid"]: e["args"]["reason"] for e in found if e["name"] == "finished"}
    assert list(ends.values()).count("error") == (0 if when.startswith("interrupted") else 2)
    for name, prompt_tokens in (("a", 3), ("b", 20), ("c", 5)):
        if ends[rows[name]] == "length":
            mine = [e for e in found if e["tid"] == rows[name]]
            assert [e["name"] for e in mine].count("decode") == 5
            assert sum(e["args"]["tokens"] for e in mine if e["name"] == "prefill") == prompt_tokens


@STEPS_AHEAD
def test_trace_of_who_was_admitted_in_a_step_that_came_to_nothing(tmp_path: Path, steps_ahead: int) -> None:
    """It has no tokens for the one it admits, for the other took all; and that is aborted meanwhile."""
    timeline = Timeline()
    engine, _ = make_engine(steps_ahead=steps_ahead, max_batched_tokens=8)
    engine.on_step = timeline.add
    engine.add_request([1] * 80, SamplingParams(max_tokens=6), request_id="takes all")
    engine.step()
    engine.add_request([2], SamplingParams(max_tokens=6), request_id="waits")
    for _ in range(steps_ahead):
        engine.step()  # the last one launches a step that admits it
    engine.abort("takes all")
    while engine.has_work:
        engine.step()
    assert [name for rec in timeline.records for name in rec.admitted] == ["takes all", "waits"]
    found = events(timeline, tmp_path / "run.json")
    assert [e["name"] for e in found].count("decode") == 5


def test_trace_of_who_ended_before_it_was_heard_of(tmp_path: Path) -> None:
    """Under way when "c" is aborted: the step that admits it, and one that has it beside a living one."""
    timeline = Timeline()
    engine, runner = make_engine(steps_ahead=1, max_num_seqs=2, max_batched_tokens=1)
    engine.on_step = timeline.add
    engine.add_request([1], SamplingParams(max_tokens=3), request_id="a")
    for name, new in (("b", 1), ("c", 2), ("d", 1)):
        engine.add_request([1], SamplingParams(max_tokens=new), request_id=name)
        engine.step()
    assert runner.steps[-2:] == [([], [("c", 1)]), (["c"], [("d", 1)])]
    engine.abort("c")
    while engine.has_work:
        engine.step()
    found = events(timeline, tmp_path / "run.json")
    assert {e["args"]["name"] for e in found if e["ph"] == "M"} == {"steps", "a", "b", "d"}


def test_trace_of_who_was_admitted_in_a_step_that_failed(tmp_path: Path) -> None:
    """The first prompt takes all of it: the second one has a row from the next step on, and one alone."""
    timeline = Timeline()
    engine, runner = make_engine(max_batched_tokens=8)
    engine.on_step = timeline.add
    runner.raise_at = {0: RuntimeError("broken")}
    engine.add_request([1] * 8, SamplingParams(max_tokens=6), request_id="fails")
    engine.add_request([2], SamplingParams(max_tokens=6), request_id="goes on")
    while engine.has_work:
        engine.step()
    assert [rec.admitted for rec in timeline.records[:2]] == [["fails"], ["goes on"]]
    found = events(timeline, tmp_path / "run.json")
    assert [e["args"]["name"] for e in found if e["ph"] == "M"] == ["steps", "fails", "goes on"]


@pytest.mark.parametrize("name", ["run.png", "run.svg"])
@pytest.mark.parametrize("timeline", [1], indirect=True)
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


@pytest.mark.slow
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
