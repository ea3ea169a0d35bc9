"""The child of ``--peers``: whatever it does, the bench goes on, and says in a line what was missing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import TINY
from samir_vllm.config import ModelConfig
from samir_vllm.extras.bench import peers
from samir_vllm.extras.bench.peers import PeerTime, transformers_results

CONFIG = ModelConfig.from_dir(TINY)
WORKS = [{"name": "batch 2", "kind": "decode", "batch": 2, "prompt": 8, "new": 4}]

Lines = list[str]


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program in place of the one that needs torch."""
    monkeypatch.setattr(peers, "missing_packages", list)
    monkeypatch.setattr(peers, "PROGRAM", tmp_path / "child.py")
    return lambda source: peers.PROGRAM.write_text(f"import json, os, sys\n{source}\n") and None


def ask(works: list[dict[str, Any]] = WORKS, **options: Any) -> tuple[dict[str, PeerTime] | None, Lines]:
    """Results and notices."""
    notices: Lines = []
    return transformers_results(CONFIG, works, notify=notices.append, **options), notices


def test_the_best_of_several_counts(child: Callable[[str], None]) -> None:
    child(
        """
for seconds, how in ((0.5, "eager"), (0.25, "compiled"), (0.75, "again")):
    print(json.dumps({"name": "batch 2", "seconds": seconds, "how": how}))
print(json.dumps({"name": "128 tokens", "seconds": 3.0, "how": "eager"}))
print(json.dumps({"notice": "something\\nodd"}))
"""
    )
    results, notices = ask()
    assert results == {"batch 2": PeerTime(0.25, "compiled"), "128 tokens": PeerTime(3.0, "eager")}
    assert notices == ["transformers: something odd"]


def test_what_the_child_is_given(child: Callable[[str], None]) -> None:
    child('task = json.load(sys.stdin); task["path"] = sys.path; task["group"] = os.getpgrp()\n')
    with peers.PROGRAM.open("a") as file:
        file.write(f"open({str(peers.PROGRAM.with_suffix('.json'))!r}, 'w').write(json.dumps(task))")
    assert ask(device="cuda:1") == ({}, [])
    task = peers.json.loads(peers.PROGRAM.with_suffix(".json").read_text())
    assert (task["device"], task["works"]) == ("cuda:1", WORKS)
    assert (task["config"]["num_layers"], task["config"]["rope_scaling"]["factor"]) == (3, 32.0)
    assert task["group"] == os.getpgrp()  # Ctrl-C reaches both
    assert str(peers.PROGRAM.parent) not in task["path"]  # its neighbours shadow nobody's modules


@pytest.mark.parametrize("seconds", ['"1"', "0.0", "-1.0", "NaN", "Infinity", "true", "null"])
def test_no_time_is_no_result(child: Callable[[str], None], seconds: str) -> None:
    child(f"""print('{{"name": "batch 2", "seconds": {seconds}, "how": "eager"}}')""")
    results, notices = ask()
    assert results == {}
    assert len(notices) == 1


@pytest.mark.parametrize("line", ["Loading ...", "[1, 2]", '{"name": "batch 2"}', '"text"', "\\0\\xff{"])
def test_garbage(child: Callable[[str], None], line: str) -> None:
    child(
        f"""
print(json.dumps({{"name": "batch 2", "seconds": 0.5, "how": "eager"}}))
print({line!r})
print(json.dumps({{"name": "batch 2", "seconds": 0.1, "how": "eager"}}))
"""
    )
    results, notices = ask()
    assert results == {"batch 2": PeerTime(0.5, "eager")}
    assert len(notices) == 1
    assert "\n" not in notices[0]
    assert notices[0].startswith("transformers: no result but ")


def test_failure_is_a_line(child: Callable[[str], None]) -> None:
    child(
        """
print(json.dumps({"name": "batch 2", "seconds": 0.5, "how": "eager"}))
sys.exit("Traceback ...\\n  File ...\\nRuntimeError: \\x1b[1mno GPU\\n")
"""
    )
    results, notices = ask()
    assert results == {"batch 2": PeerTime(0.5, "eager")}
    assert notices == ["transformers failed: RuntimeError: [1mno GPU"]


def test_silent_failure(child: Callable[[str], None]) -> None:
    child("os._exit(3)")  # with much of its standard input unread
    works = [{"name": f"work {i}", "kind": "decode"} for i in range(10_000)]
    assert ask(works) == ({}, ["transformers failed: exit status 3"])


def test_stopped_at_its_limit(child: Callable[[str], None], tmp_path: Path) -> None:
    child("import threading; threading.Event().wait()")
    assert ask(seconds=0.5) == ({}, ["transformers was stopped at its limit of 0.5 s without batch 2"])


def test_what_it_had_by_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "missing_packages", list)
    lines = ['{"name": "batch 1", "seconds": 0.5, "how": "eager"}', '{"name": "batch 2", "seco']
    monkeypatch.setattr(peers, "_run_child", lambda task, seconds: peers._Ended(None, lines, ""))
    results, notices = ask([{"name": "batch 1"}, {"name": "batch 2"}, {"name": "batch 4"}], seconds=60)
    assert results == {"batch 1": PeerTime(0.5, "eager")}
    assert notices == ["transformers was stopped at its limit of 60 s without batch 2; batch 4"]


def test_ctrl_c_ends_the_child(child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def communicate(self, *args: Any, **kwargs: Any) -> Any:
            started.append(self)
            raise KeyboardInterrupt

    child("sys.stdin.read()")
    monkeypatch.setattr(peers.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask()
    assert started[0].returncode == -9


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "NEEDED", ("json", "no_such_package", "nor_this_one"))
    monkeypatch.setattr(peers, "_run_child", lambda *args: pytest.fail("nothing is to be started"))
    notice = "--peers transformers is left out: no_such_package and nor_this_one not installed here"
    assert ask() == (None, [notice])


@pytest.mark.slow
@pytest.mark.skipif(bool(peers.missing_packages()), reason="torch and transformers aren't installed")
def test_the_real_child() -> None:
    """Eager, on the CPU; without a terminal and a GPU everything else is the same."""
    works = [
        *WORKS,
        {"name": "16 tokens", "kind": "prefill", "tokens": 16},
        {"name": "many", "kind": "throughput", "requests": [[5, 3], [9, 6], [2, 2]], "batches": [2, 8]},
        {"name": "none", "kind": "prefill", "tokens": -1},
    ]
    results, notices = ask(works, device="cpu", seconds=240)
    assert results is not None
    assert list(results) == ["batch 2", "16 tokens", "many"], notices
    assert results["batch 2"].how == "eager"
    assert any(notice.startswith("transformers: none: ") for notice in notices)
