"""Stages of a start add up, and a process knows its age."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from samir_vllm.timing import StartupTimes, process_seconds


def test_stages_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 12.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    times = StartupTimes()
    with times.stage("first") as stage:
        stage.detail = "three files"
    times.add("beside", 7.0, background=True)
    with times.stage("second"):
        pass
    found = [(s.name, s.seconds, s.detail, s.background) for s in times.stages]
    assert found == [
        ("first", 1.0, "three files", False),
        ("beside", 7.0, "", True),
        ("second", 2.5, "", False),
    ]
    assert times.total() == 3.5


def test_a_stage_that_fails_counts() -> None:
    times = StartupTimes()
    with pytest.raises(ValueError), times.stage("broken"):
        raise ValueError
    assert [s.name for s in times.stages] == ["broken"]


def test_process_age() -> None:
    """A process younger than this one is younger; both count from their own start."""
    code = "from samir_vllm.timing import process_seconds as p; import json; print(json.dumps([p(), p()]))"
    command = [sys.executable, "-c", code]
    first, second = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    own = process_seconds()
    assert own is not None
    assert 0 <= first <= second < own
