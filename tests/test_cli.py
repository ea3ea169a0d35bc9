"""The command line as a user runs it: real processes, their output, errors and exit statuses."""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from talking_model import put_in_place

from harness import GOLDEN, TINY
from samir_vllm import commandline
from samir_vllm.__main__ import main
from samir_vllm.extras import generate
from samir_vllm.sampling import SamplingParams

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
        ('{"prompt": "a", "cls": 1}', ["p.jsonl:2", "cls"]),
        ('{"prompt": 7}', ["p.jsonl:2", "text"]),
        ('{"prompt": "a", "max_tokens": 0}', ["p.jsonl:2", "max_tokens", "0"]),
        ('{"prompt": "a", "temperature": NaN}', ["p.jsonl:2", "temperature", "nan"]),
        ('{"prompt": "a", "logit_bias": {"b": 1}}', ["p.jsonl:2", "logit_bias", "'b'"]),
        ('{"prompt": "a", "logit_bias": [1]}', ["p.jsonl:2", "logit_bias"]),
        ('{"prompt": "a", "min_tokens": 129}', ["p.jsonl:2", "min_tokens", "128", "129"]),
    ],
)
def test_broken_prompt_files(
    tmp_path: Path, line: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    one_line_error((main(["generate", "--prompts", str(file)]), *capsys.readouterr()), *words)


# Sampling options


def params_of(*words: str) -> SamplingParams:
    """Of the one prompt of ``generate "hi" ...``."""
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    (job,) = generate.collect_jobs(parser.parse_args(["hi", *words]))
    return job.params


FLAGS: list[tuple[list[str], dict[str, Any]]] = [
    (["7"], {"max_tokens": 7}),
    (["--temperature", "0.5"], {"temperature": 0.5}),
    (["--top-k", "40"], {"top_k": 40}),
    (["--top-p", "0.9"], {"top_p": 0.9}),
    (["--min-p", ".05"], {"min_p": 0.05}),
    (["--repetition-penalty", "1.1"], {"repetition_penalty": 1.1}),
    (["--presence-penalty", "-0.5"], {"presence_penalty": -0.5}),
    (["--frequency-penalty", "0.25"], {"frequency_penalty": 0.25}),
    (["--logit-bias", "5=-2.5,6=1", "--logit-bias", "70=100"], {"logit_bias": {5: -2.5, 6: 1, 70: 100}}),
    (["--seed", str(2**64 - 1)], {"seed": 2**64 - 1}),
    (["--min-tokens", "3"], {"min_tokens": 3}),
    (["--stop", "a b", "--stop", r"\n\t\r\\n\u00e9"], {"stop": ("a b", "\n\t\r\\né")}),
    (["--stop", r"\ud83d\ude00!"], {"stop": ("😀!",)}),
    (["--stop-token-id", "3,4", "--stop-token-id", "5"], {"stop_token_ids": (3, 4, 5)}),
    (["--ignore-eos"], {"ignore_eos": True}),
    (["--n", "3"], {"n": 3}),
    (["--logprobs", "0"], {"logprobs": 0}),
    (["--prompt-logprobs", "5"], {"prompt_logprobs": 5}),
]


@pytest.mark.parametrize(("words", "expected"), FLAGS, ids=lambda value: " ".join(value))
def test_each_flag_reaches_the_sampling_parameters(words: list[str], expected: dict[str, Any]) -> None:
    assert params_of(*words) == SamplingParams(**expected)


def test_every_sampling_parameter_has_a_flag() -> None:
    assert params_of() == SamplingParams()
    assert {name for _, expected in FLAGS for name in expected} == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--temperature", "nan"], ["temperature", "0 to 100", "nan"]),
        (["--temperature", "hot"], ["--temperature", "hot"]),
        (["--top-p", "1.5"], ["top_p", "0 to 1", "1.5"]),
        (["--top-k", "-1"], ["top_k", "at least 0", "-1"]),
        (["--seed", "1.5"], ["--seed", "1.5"]),
        (["--seed", str(2**64)], ["seed", str(2**64 - 1)]),
        (["--logit-bias", "5"], ["--logit-bias", "'5'", "ID=X"]),
        (["--logit-bias", "5=much"], ["--logit-bias", "5=much", "ID=X"]),
        (["--logit-bias", "5=1,-3=1"], ["--logit-bias", "-3=1", "ID=X"]),
        (["--logit-bias", "5=101"], ["logit_bias", "100", "101"]),
        (["--stop", ""], ["stop"]),
        (["--stop", r"a\q"], ["--stop", r"'\q'", "backslash"]),
        (["--stop", "a\\"], ["--stop", "backslash"]),
        (["--stop", r"a\ud83d"], ["--stop", "half a character"]),
        (["--stop-token-id", "3,x"], ["--stop-token-id", "'x'"]),
        (["--n", "0"], ["n must be", "1 to 64", "0"]),
        (["--logprobs", "21"], ["logprobs", "20", "21"]),
        (["--max-tokens", "5", "--min-tokens", "6"], ["min_tokens", "5 (max_tokens)", "6"]),
        (["--ignore-eos=yes"], ["--ignore-eos"]),
    ],
)
def test_sampling_mistakes_are_one_line_before_a_model_is_looked_for(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["generate", "hi", "--model", "/nowhere/at/all", *words])
    one_line_error((status, *capsys.readouterr()), *parts)


def test_fields_of_a_line_go_before_those_of_the_command(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a"},
        {"prompt": "b", "temperature": 2, "stop": "x", "logit_bias": {"7": 1.5}, "n": 2},
        {"messages": [], "max_tokens": 3, "seed": None, "stop_token_ids": [4, 5]},
        {"prompt": "c", "stop": "\u2028"},
    ]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    command = ["--prompts", str(file), "9", "--temperature", "1", "--seed", "8", "--stop", "y"]
    jobs = generate.collect_jobs(parser.parse_args(command))
    given = {"max_tokens": 9, "temperature": 1, "seed": 8, "stop": "y"}
    assert [job.params for job in jobs] == [
        SamplingParams(**given),
        SamplingParams(**given | {"temperature": 2, "stop": "x", "logit_bias": {7: 1.5}, "n": 2}),
        SamplingParams(**given | {"max_tokens": 3, "seed": None, "stop_token_ids": (4, 5)}),
        SamplingParams(**given | {"stop": "\u2028"}),
    ]


def test_notices_name_what_has_no_effect() -> None:
    notices = commandline.sampling_notices
    assert notices([SamplingParams(), SamplingParams(temperature=1.0, top_k=5, seed=3, n=2)]) == []
    assert notices([SamplingParams(repetition_penalty=2.0, min_tokens=3)]) == []
    (vain,) = notices([SamplingParams(top_k=5), SamplingParams(min_p=0.5), SamplingParams(seed=0)])
    assert vain.startswith("top_k, min_p, seed have no effect at temperature 0")
    (same,) = notices([SamplingParams(n=2)])
    assert "the same at temperature 0" in same


# With a model that says what it is told


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """``generate`` in this process on the talking model: exit status, standard output, standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        put_in_place(monkeypatch)
        return (main(["generate", *words]), *capsys.readouterr())

    return run


def test_several_answers_are_numbered(talk: Callable[..., Any]) -> None:
    sampled = ["options", "--temperature", "1", "--seed", "7", "--n", "2"]
    status, out, err = talk(*sampled)
    assert status == 0
    assert out == "[1.1] seed 7, answer 0\n\n[1.2] seed 7, answer 1\n\n"
    assert "10 prompt tokens" not in err  # one prompt, counted once
    assert "12 prompt tokens, 34 new tokens, mean time to first token" in err
    assert "KV pages used by 2 answers" in err
    assert "drawn" not in err
    status, out, _ = talk("hello", *sampled)
    assert "[1.2] heard u:hello\n\n[2.1] seed 7, answer 0\n\n[2.2] seed 7, answer 1\n\n" in out
    assert talk(*sampled, "--ids", "--quiet")[1].count("\n") == 2


def test_drawn_seed_is_named(talk: Callable[..., Any]) -> None:
    _, out, err = talk("options", "--temperature", "1")
    seed = out.split()[1].rstrip(",")
    assert f"seed {seed} (drawn) [" in err
    assert "seeds drawn (see --json)" in talk("options", "options", "--temperature", "1")[2]
    assert "seed" not in talk("hello")[2]


def test_json_has_a_line_for_each_answer(talk: Callable[..., Any]) -> None:
    words = ["--temperature", "1", "--n", "2", "--logprobs", "2", "--prompt-logprobs", "1", "--stop", "one"]
    status, out, _ = talk("say a~", "say anyone", "--json", *words)
    assert status == 0
    lines = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert [(line["index"], line["completion"]) for line in lines] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    first, *_, last = lines
    assert first.keys() == {
        *("index", "completion", "request_id", "prompt_token_ids", "text", "token_ids", "finish_reason"),
        *("stop_reason", "seed", "logprobs", "prompt_logprobs", "error", "metrics"),
    }
    assert (first["text"], first["token_ids"], first["stop_reason"]) == ("a~", [97, 126, 30], 30)
    assert (last["text"], last["finish_reason"], last["stop_reason"]) == ("any", "stop", "one")
    assert first["seed"] == lines[1]["seed"] != last["seed"]
    tokens = [("a", 97, -12.125), ("b", 98, -13.125), ("~", 126, None), ("\x7f", 127, None)]
    a, b, tilde, after = ({"token": t, "token_id": i, "logprob": p} for t, i, p in tokens)
    assert first["logprobs"][:2] == [a | {"top": [a, b]}, tilde | {"top": [tilde, after]}]
    assert len(first["prompt_logprobs"]) == len(first["prompt_token_ids"])
    assert first["prompt_logprobs"][0] is None
    assert first["prompt_logprobs"][1]["token"] == ":"
    assert len(first["prompt_logprobs"][1]["top"]) == 1
    assert first["metrics"]["num_cached_tokens"] == 0


def test_json_of_a_plain_and_of_a_refused_prompt(talk: Callable[..., Any]) -> None:
    status, out, err = talk("hello", "", "--json")
    assert status == 2
    plain, refused = map(json.loads, out.splitlines())
    assert (plain["logprobs"], plain["prompt_logprobs"], plain["seed"], plain["error"]) == (None,) * 4
    assert (refused["index"], refused["completion"], refused["finish_reason"]) == (1, 0, "error")
    assert "empty" in refused["error"]
    assert "prompt 2: the prompt is empty" in err


def test_log_probabilities_come_as_a_table(talk: Callable[..., Any]) -> None:
    assert talk("say a~", "--logprobs", "2", "--quiet")[1].splitlines() == [
        "a~",
        "",
        "#   id  token    logprob  likeliest",
        "0   97  'a'     -12.1250  'a' -12.1250  'b' -13.1250",
        r"1  126  '~'         -inf  '~' -inf  '\x7f' -inf",
        r"2   30  '\x1e'   -3.7500  '\x1e' -3.7500  '\x1f' -4.7500",
    ]
    lines = talk("hi", "--raw", "--prompt-logprobs", "0", "--quiet")[1].splitlines()
    assert lines == [
        "#   id  token   logprob  likeliest",
        "0  104  'h'",
        "1  105  'i'    -13.1250",
        "",
        "heard hi",
    ]
    both = talk("say a", "say b", "--prompt-logprobs", "0", "--logprobs", "0", "--quiet")[1]
    head = "# id token logprob likeliest"
    assert [" ".join(line.split()) for line in both.splitlines() if not re.match(r" *\d", line)] == [
        *("[1] prompt", head, "", "[1] a", "", head, ""),
        *("[2] prompt", head, "", "[2] b", "", head, ""),
    ]


def test_wide_characters_keep_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["a", "b"], ["日本", "c"], ["xyz", "d"]]
    assert commandline._aligned(rows, right=()) == "a     b\n日本  c\nxyz   d"
    assert commandline._aligned(rows, right=(0,)) == "   a  b\n日本  c\n xyz  d"


def test_streamed_answer_ends_before_a_stop_string(talk: Callable[..., Any]) -> None:
    assert talk("say one. Two.", "--stop", ". T", "--quiet")[1] == "one\n"
    assert talk("say one. two.", "--stop", ". T", "--quiet")[1] == "one. two.\n"


def test_ctrl_c_lets_the_step_end_and_shows_what_was_held_back(
    talk: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(io.StringIO):
        num_tokens = 0

        def write(self, text: str) -> int:
            self.num_tokens += 1
            if self.num_tokens == 8:  # "la la la": the last "la" may begin the stop string, and is held back
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(sys, "stdout", shown := Stream())
        status, _, err = talk("on and on", "100", "--stop", "la!")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, heeded)
    assert status == 130
    assert shown.getvalue() == "la la la\n"
    assert "8 new tokens" in err


# Ctrl-C


def test_interrupts_wish_first_and_raise_then() -> None:
    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with commandline.Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            assert interrupts.requested
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            with interrupts.immediate():
                assert not interrupts.requested
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert interrupts.requested
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with commandline.Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            assert not interrupts.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, heeded)


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
def test_stop_string_and_log_probabilities_of_a_real_model(demo: list[str]) -> None:
    status, out, err = cli("generate", CAPITAL, "--stop", " Par", "--logprobs", "2", *demo)
    assert status == 0
    text, _, _, *rows = out.splitlines()
    assert text == "The capital of France is"
    columns = [re.split("  +", row.strip()) for row in rows]
    assert [token for _, _, token, *_ in columns] == ["'The'", *(f"' {w}'" for w in ANSWER[4:-1].split())]
    for _, _, token, logprob, likeliest, _ in columns:
        assert likeliest == f"{token} {logprob}"  # greedy
    assert "6 new tokens" in err


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


@pytest.mark.slow
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
