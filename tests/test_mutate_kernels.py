"""tools/mutate_kernels.py: the list fits today's kernels, and the tool tells what is seen from what isn't."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness import load_tool
from samir_vllm.backends.cuda_compile import KERNELS, RULERS

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tools" / "mutate_kernels.py"
SOURCES = sorted(path for path in (ROOT / "cuda_src").iterdir() if path.suffix in {".cu", ".cuh"})

needs_emulator = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


tool = load_tool("mutate_kernels")


def text_of(file: str) -> str:
    return (ROOT / "cuda_src" / file).read_text(encoding="utf-8")


# The list


@pytest.mark.parametrize("planted", tool.MUTATIONS, ids=lambda planted: planted.title)
def test_a_mutation_has_its_place_and_changes_it(planted: Any) -> None:
    text = text_of(planted.file)
    assert planted.apply(text) != text
    assert not planted.racecheck or planted.file.endswith(".cu")
    assert (planted.seen_by == "gpu") == bool(planted.reason)


def test_titles_name_one_mutation_each() -> None:
    assert [t for t, n in Counter(m.title for m in tool.MUTATIONS).items() if n > 1] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_file_has_several(path: Path) -> None:
    assert sum(planted.file == path.name for planted in tool.MUTATIONS) >= 3


def starts(planted: Any) -> list[int]:
    """Where a mutation's edits begin, in the file as it is."""
    return [edit.starts(text_of(planted.file))[max(0, edit.nth - 1)] for edit in planted.edits]


@pytest.mark.parametrize(
    ("stem", "kernel"), [(stem, k) for stem, names in (KERNELS | RULERS).items() for k in names]
)
def test_every_kernel_has_several(stem: str, kernel: str) -> None:
    """In its own text, or in what all kernels of its file share; one at least in its own."""
    text = text_of(f"{stem}.cu")
    own = re.search(rf"^extern[^;{{}}]*?\b{kernel}\(.*?^}}", text, re.MULTILINE | re.DOTALL)
    assert own is not None
    all_kernels = [m.span() for m in re.finditer(r"^extern.*?^}", text, re.MULTILINE | re.DOTALL)]
    places = [at for m in tool.MUTATIONS if m.file == f"{stem}.cu" for at in starts(m)]
    inside = [at for at in places if own.start() <= at < own.end()]
    shared = [at for at in places if not any(first <= at < stop for first, stop in all_kernels)]
    assert len(inside) >= 1
    assert len(inside) + len(shared) >= 2


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_barrier_is_dropped_once(path: Path) -> None:
    text = text_of(path.name)
    barriers = [match.start() for match in re.finditer(r"__syncthreads\w*\(", text)]
    dropped = []
    for planted in (m for m in tool.MUTATIONS if m.file == path.name):
        for edit, start in zip(planted.edits, starts(planted), strict=True):
            if "__syncthreads" in edit.find and "__syncthreads" not in edit.replace:
                dropped += [at for at in barriers if start <= at < start + len(edit.find)]
    assert sorted(dropped) == barriers


def test_every_kernel_file_has_tests() -> None:
    assert tool.TESTS.keys() == (KERNELS | RULERS).keys()
    files = {file for table in (tool.TESTS, tool.GPU_TESTS) for files in table.values() for file in files}
    assert {file for file in files if not (ROOT / "tests" / "kernels" / f"{file}.py").is_file()} == set()


def test_headers_concern_those_that_include_them() -> None:
    assert tool.stems_of("argmax.cu") == ["argmax"]
    assert tool.stems_of("attention.cuh") == ["paged_attention_decode", "paged_attention_prefill"]
    assert set(tool.stems_of("ptx.cuh")) == set(KERNELS)


# Edits


def test_an_edit_is_unambiguous() -> None:
    assert tool.Edit("b", "c").apply("abd") == "acd"
    assert tool.Edit("b", "c", 2).apply("abab") == "abac"
    for edit in (tool.Edit("x", ""), tool.Edit("b", ""), tool.Edit("b", "", 3)):
        with pytest.raises(ValueError, match=r"occurs [02] times"):
            edit.apply("abab")


# Verdicts


def judged(tmp_path: Path, cases: str, tests: int = 2, skipped: int = 0) -> Any:
    report = tmp_path / "report.xml"
    report.write_text(
        f'<testsuites><testsuite tests="{tests}" skipped="{skipped}">{cases}</testsuite></testsuites>'
    )
    return tool.judge(tool.Check("emulated", "test_some"), report)


def case(inside: str = "") -> str:
    return f'<testcase classname="tests.kernels.test_some" name="test_it[1]">{inside}</testcase>'


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ('<failure message="AssertionError: assert 1 == 2">E</failure>', "assert 1 == 2"),
        (
            '<failure message="AssertionError">a.py:3: in f\n    assert x\nE   AssertionError</failure>',
            "assert x",
        ),
        (
            '<failure message="emulated.EmulatorError: argmax: emulator: argmax: a race"/>',
            "argmax: a race",
        ),
        (
            '<failure message="emulated.EmulatorError: f: ERROR: AddressSanitizer: overflow on address 0x1 '
            'at pc 0x2&#10;read of size 4&#10;in forward order&#10;  linear.cu:29 in pair_at"/>',
            "f: AddressSanitizer: overflow read of size 4 in forward order linear.cu:29 in pair_at",
        ),
        (
            '<error message="failed on setup with &quot;k: emulator&quot;"/>',
            'failed on setup with "k: emulator"',
        ),
    ],
)
def test_a_failed_test_has_seen_it(tmp_path: Path, found: str, says: str) -> None:
    outcome = judged(tmp_path, case() + case(found))
    assert outcome.test == "test_some::test_it[1]"
    assert outcome.message == says
    assert not outcome.problem


@pytest.mark.parametrize(
    ("cases", "tests", "skipped", "says"),
    [
        (case('<error message="collection failure">ImportError</error>'), 1, 0, "can't be collected"),
        (
            case('<failure message="emulated.EmulatorError: g++ -c\nk.cpp:3:1: error: no such"/>'),
            1,
            0,
            "g++ refuses",
        ),
        (case('<skipped message="no GPU"/>'), 1, 1, "no test ran: no GPU"),
        ("", 0, 0, "no test ran"),
    ],
)
def test_what_is_no_verdict(tmp_path: Path, cases: str, tests: int, skipped: int, says: str) -> None:
    outcome = judged(tmp_path, cases, tests, skipped)
    assert not outcome.test
    assert says in outcome.problem


def test_passed_tests_have_seen_nothing(tmp_path: Path) -> None:
    outcome = judged(tmp_path, case() + case())
    assert (outcome.test, outcome.problem) == ("", "")


def test_half_a_report_is_none(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    check = tool.Check("emulated", "test_some")
    assert tool.judge(check, report) is None
    report.write_text("<testsuites><testsuite")
    assert tool.judge(check, report) is None


def row(seen_by: str = "emulated", means: str = "emulated", **outcome: str) -> Any:
    planted = tool.Mutation("a|b.cu", "x", (), seen_by, "why" * (seen_by == "gpu"))
    return tool.Row(planted, tool.Outcome(tool.Check(means, "test_some"), **outcome))


def test_what_counts_as_missing() -> None:
    assert row().missing
    assert row(problem="no end").missing
    assert row("compile", "compile").missing
    assert row("gpu", "gpu").missing
    assert not row("gpu").missing
    assert not row(test="t").missing
    assert (
        not row("gpu", "gpu")
        ._replace(planted=tool.Mutation("a", "x", (), "gpu", "why", by_chance=True))
        .missing
    )
    rows = [row(), row(test="t")]
    assert tool.summary(rows, [], 3.2) == "2 planted in 3 s, seen: 1 by no test, 1 by emulated"
    assert tool.summary(rows, [rows[0].planted], 3.2).endswith("; 1 left to a GPU")


def test_the_table_is_markdown() -> None:
    text = tool.markdown([row(test="t", message="1 | 2"), row("gpu")], [row("gpu").planted])
    assert text.splitlines()[2:] == [
        r"| `a\|b.cu` | x | emulated: `t` | 1 \| 2 |",
        r"| `a\|b.cu` | x | no test | why |",
        r"| `a\|b.cu` | x | left to a GPU | why |",
    ]


# The command line


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--list", "--only", "splits OF 512"]) == 0
    assert capsys.readouterr().out == "emulated  paged_attention_prefill.cu: splits of 512\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "no such"], "no mutation has such a name"),
        (["--only", "("], "--only ("),
        (["--only", "cut to 32 bits"], "for --gpu alone"),
        (["--only", "splits of 512", "--gpu"], "not for a GPU alone"),
        (["--jobs", "0"], "positive"),
        (["--table", "no/such/folder/t.md"], "no such folder"),
    ],
)
def test_mistakes_of_the_user(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(arguments) == 2
    assert says in capsys.readouterr().err


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert tool.main([]) == 2
    assert "g++" in capsys.readouterr().err


def test_what_each_mode_tries() -> None:
    here = {m.title for m in tool.choose("", gpu=False, everything=False)}
    gpu = {m.title for m in tool.choose("", gpu=True, everything=False)}
    assert here | gpu == {m.title for m in tool.MUTATIONS}
    assert here & gpu == {"paged_attention_prefill.cu: barrier before a stage is reused dropped"}
    assert len(tool.choose("", gpu=True, everything=True)) == len(tool.MUTATIONS)


# The tool at work


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@needs_emulator
def test_a_mistake_is_seen_and_a_comment_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)  # so that TMPDIR is read again
    before = [(path, path.read_bytes()) for path in SOURCES]
    seen = next(m for m in tool.MUTATIONS if m.title == "embedding.cu: row ids ignored")
    comment = tool.mutation(
        "embedding.cu", "nothing but a comment", "16 bytes at a time", "sixteen bytes at a time"
    )
    refused = tool.mutation("embedding.cu", "no C++", "store8(to", "store9(to")
    monkeypatch.setattr(tool, "MUTATIONS", (seen, comment, refused))
    table = tmp_path / "table.md"
    assert tool.main(["--table", str(table)]) == 1
    out = capsys.readouterr().out
    assert "row ids ignored: test_embedding::test_rows_of_a_prompt[emulated-" in out
    assert "nothing but a comment: no test" in out
    assert "no C++: no verdict" in out
    assert "seen: 1 by emulated, 1 by no test, 1 without a verdict" in out
    assert "g++ refuses it" in table.read_text()
    assert files(tmp_path) == [table]
    assert [(path, path.read_bytes()) for path in SOURCES] == before


@pytest.mark.slow
@needs_emulator
def test_tests_that_do_not_run_prove_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        tool, "checks_of", lambda *_: [tool.Check("emulated", "test_embedding", "no_such_test")]
    )
    assert tool.main(["--only", "embedding"]) == 1
    assert "with nothing planted: no test ran" in capsys.readouterr().err


@pytest.mark.slow
@needs_emulator
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_leaves_nothing(sign: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--only", "embedding"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("[1/3]")  # and now the next one is under way
        process.send_signal(sign)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert errors == "stopped\n"
    assert list(tmp_path.iterdir()) == []
