"""The command line as a user runs it: real processes, their output, errors and exit statuses."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import GOLDEN, TINY

CAPITAL = "What is the capital of France?"
STORY = "Once upon a time, there was a"
SMOLLM2 = json.loads((GOLDEN / "smollm2_greedy.json").read_text())
ANSWER = "The capital of France is Paris."


def start(
    *args: str, cwd: Path | None = None, env: dict[str, str] | None = None, **kwargs
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "samir_vllm", *args],
        cwd=cwd,
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=kwargs.pop("stdin", subprocess.DEVNULL),
        text=True,
        **kwargs,
    )


def cli(
    *args: str, stdin: str = "", cwd: Path | None = None, env: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    process = start(*args, cwd=cwd, env=env, stdin=subprocess.PIPE)
    out, err = process.communicate(stdin, timeout=120)
    assert "Traceback" not in err
    return process.returncode, out, err


@pytest.fixture
def demo(demo_model_dir: Path) -> list[str]:
    return ["--model", str(demo_model_dir), "--device", "cpu"]


def one_line_error(result: tuple[int, str, str], *words: str) -> None:
    status, out, err = result
    assert status == 2
    assert out == ""
    assert err.startswith("samir_vllm: ")
    assert err.count("\n") == 1, err
    for word in words:
        assert word in err, err


# Without a model


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["frobnicate"], ["frobnicate"]),
        ([], ["COMMAND"]),
        (["generate", "hi", "--frobnicate"], ["--frobnicate"]),
        (["generate", "hi", "0"], ["token count", "at least 1", "0"]),
        (["generate", "hi", "-3"], ["token count", "-3"]),
        (["generate", "hi", "5", "--max-tokens", "6"], ["twice"]),
        (["generate", "hi", "--kv-cache-mib", "lots"], ["--kv-cache-mib", "lots"]),
        (["generate", "hi", "--kv-cache-mib", "0"], ["kv_cache_mib", "0"]),
        (["generate", "hi", "--batching", "magic"], ["batching", "magic"]),
        (["generate", "hi", "--device", "tpu"], ["device", "tpu"]),
        (["generate", "hi", "--model", "/nowhere/at/all"], ["/nowhere/at/all"]),
        (["generate", "--prompts", "/nowhere.txt"], ["/nowhere.txt"]),
        (["pull", "no-such-model"], ["no-such-model", "smollm2-135m-instruct"]),
    ],
)
def test_user_mistakes_are_one_line(args: list[str], words: list[str]) -> None:
    one_line_error(cli(*args), *words)


def test_no_model_says_how_to_get_one(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "SAMIR_VLLM_MODEL": "no-such-model"}
    one_line_error(
        cli("generate", "hi", cwd=tmp_path, env=env), "no-such-model", "pull smollm2-135m-instruct"
    )


def test_model_without_tokenizer_is_named() -> None:
    one_line_error(cli("generate", "hi", "--model", str(TINY)), "tokenizer.json")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["p.jsonl:2", "not JSON"]),
        ("[1]", ["p.jsonl:2", "prompt"]),
        ('{"prompt": "a", "messages": []}', ["p.jsonl:2", "either"]),
        ('{"prompt": "a", "temprature": 1}', ["p.jsonl:2", "temprature"]),
        ('{"prompt": 7}', ["p.jsonl:2", "text"]),
        ('{"prompt": "a", "max_tokens": 0}', ["p.jsonl:2", "max_tokens", "0"]),
    ],
)
def test_broken_prompt_files(tmp_path: Path, line: str, words: list[str]) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    one_line_error(cli("generate", "--prompts", str(file)), *words)


def test_version_and_help() -> None:
    assert cli("--version")[1].startswith("samir_vllm 0.")
    status, out, _ = cli("generate", "--help")
    assert status == 0
    assert "--kv-cache-mib" in out


# With the demo model


@pytest.mark.demo
def test_timing_adds_up(demo: list[str]) -> None:
    """A line for each stage on standard error, and the first line is their sum."""
    status, out, err = cli("generate", "Hi", "1", "--raw", "--quiet", "--timing", *demo)
    assert status == 0
    assert out.count("\n") == 1
    first, *lines = err.splitlines()
    assert first.endswith(" s from process start to first token")
    stages = {line.split(" s  ")[1].split(" (")[0]: float(line.split()[0]) for line in lines}
    assert {"Python, imports", "tokenizer, files of weights", "weights"} <= stages.keys()
    assert sum(stages.values()) == pytest.approx(float(first.split()[0]), abs=0.02)


@pytest.mark.demo
def test_generate_streams_the_answer_and_its_figures(demo: list[str]) -> None:
    status, out, err = cli("generate", CAPITAL, *demo)
    assert status == 0
    assert out == ANSWER + "\n"
    for words in (
        "37 prompt tokens",
        "8 new tokens",
        "time to first token",
        "tokens/s",
        "KV pages",
        "[numpy]",
    ):
        assert words in err


@pytest.mark.demo
def test_model_is_found_by_environment(demo_model_dir: Path, tmp_path: Path) -> None:
    env = {"SAMIR_VLLM_MODEL": str(demo_model_dir)}
    status, out, err = cli("generate", CAPITAL, "4", "--device", "cpu", "--quiet", cwd=tmp_path, env=env)
    assert (status, out, err) == (0, "The capital of France\n", "")


@pytest.mark.demo
def test_several_prompts_and_a_bad_one(demo: list[str]) -> None:
    status, out, err = cli("generate", CAPITAL, "", "x " * 9000, "What is 2 + 2?", "12", "--quiet", *demo)
    assert status == 2
    assert out.startswith(f"[1] {ANSWER}\n\n[4] ")
    errors = err.splitlines()
    assert "prompt 2: the prompt is empty" in errors[0]
    assert "prompt 3: the prompt has 90" in errors[1]
    assert "8192" in errors[1]
    assert len(errors) == 2


@pytest.mark.demo
def test_prompt_larger_than_the_pool_names_the_remedy(demo: list[str]) -> None:
    result = cli("generate", "a " * 900, "100", "--kv-cache-mib", "12", *demo)
    # 900 tokens and the chat format, 100 new ones: 65 pages in each of 30 layers
    one_line_error(result, "1950 KV pages", "1024 in all", "--kv-cache-mib 23")
    assert cli("generate", "a " * 900, "1", "--kv-cache-mib", "23", "--quiet", *demo)[0] == 0


@pytest.mark.demo
def test_pool_of_what_is_free(demo: list[str]) -> None:
    status, _, err = cli("generate", "Hi", "2", "--kv-cache-mib", "auto", "--max-num-seqs", "1", *demo)
    assert status == 0
    assert "(pool: 15360)" in err  # 8,192 tokens of context: 512 pages in 30 layers, and no more for one slot


@pytest.mark.demo
def test_refused_prompts_are_one_line(demo: list[str]) -> None:
    one_line_error(cli("generate", "", *demo), "empty")
    one_line_error(cli("generate", "hello", "--max-model-len", "10", *demo), "31 tokens", "holds 10")
    one_line_error(cli("generate", "hi", "--device", "cuda:99", *demo[:2]), "--device cpu")


@pytest.mark.demo
def test_json_lines_in_input_order(demo: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": "Explain the KV cache in two sentences.", "max_tokens": 20},
        {"messages": [{"role": "user", "content": CAPITAL}]},
        {"messages": [{"role": "user"}]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    status, out, _ = cli("generate", "--prompts", str(file), "--json", "--quiet", *demo)
    assert status == 2
    results = [json.loads(line) for line in out.splitlines()]
    assert [r["index"] for r in results] == [0, 1, 2]
    assert len(results[0]["token_ids"]) == 20
    assert results[0]["finish_reason"] == "length"
    assert results[1]["text"] == ANSWER
    assert results[1]["finish_reason"] == "stop"
    assert results[1]["metrics"]["num_pages"] == 30 * 11  # ceil((37 + 128 - 1) / 16) pages in 30 layers
    assert results[2]["finish_reason"] == "error"
    assert "content" in results[2]["error"]


@pytest.mark.demo
def test_standard_input_raw_and_ids(demo: list[str]) -> None:
    golden = next(c for c in SMOLLM2["cases"] if c["text"] == STORY)
    status, out, _ = cli("generate", "8", "--raw", "--quiet", "--ids", *demo, stdin=STORY)
    assert status == 0
    assert [int(i) for i in out.split()][:4] == golden["greedy_ids"][:4]
    status, text, _ = cli("generate", "-", "8", "--raw", "--quiet", *demo, stdin=STORY)
    assert status == 0
    assert text.strip()
    assert golden["decoded"].startswith(text[:4])


@pytest.mark.demo
def test_control_tokens_in_a_prompt_are_text(demo: list[str]) -> None:
    _, out, _ = cli("generate", "say <|im_end|>", "1", "--json", "--quiet", *demo)
    ids = json.loads(out)["prompt_token_ids"]
    # system and user turn end once each: the user's own "<|im_end|>" (id 2) is spelt out
    assert ids.count(2) == 2


@pytest.mark.demo
def test_ctrl_c_ends_cleanly_with_what_was_generated(demo: list[str]) -> None:
    # A test run in the background of a script ignores SIGINT, and its children would inherit that.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = start("generate", "Tell me a long story.", "4000", "--ignore-eos", *demo, preexec_fn=heed)
    assert process.stdout is not None
    first = process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert len(first) == 10
    assert "Traceback" not in err
    assert "new tokens" in err
    assert (first + out).endswith("\n")


@pytest.mark.demo
def test_reader_that_goes_away(demo: list[str]) -> None:
    process = start("generate", "Tell me a long story.", "4000", "--ignore-eos", *demo)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.returncode == 1
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
