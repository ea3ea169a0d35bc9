"""tools/time_sampling.py: cases take turns, and mistakes are one line; on a GPU see test_bench_gpu."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from harness import TINY, load_tool
from samir_vllm.config import ModelConfig
from samir_vllm.extras.bench import decode, model

time_sampling = load_tool("time_sampling")


def test_cases_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def generate(engine: Any, batch: int, prompt: int, new: int, **sampling: Any) -> list[float]:
        asked.append(sampling)
        assert (batch, prompt, new) == (3, time_sampling.PROMPT_TOKENS, 7)
        return [float(len(asked))] * 6

    monkeypatch.setattr(time_sampling, "generate", generate)
    monkeypatch.setattr(time_sampling, "ROUNDS", 3)
    rows = time_sampling.time_decodes(None, 3, 7)
    cases = time_sampling.DECODES
    assert asked == list(cases.values()) * 4
    assert [row["name"] for row in rows] == list(cases)
    # The first round doesn't count: with four cases the first one's are calls 5, 9 and 13.
    assert rows[0] == {"name": "greedy", "batch": 3, "seconds": 9, "rounds": [5, 9, 13]}


def test_every_case_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_sampling, "ROUNDS", 1)
    monkeypatch.setattr(time_sampling, "PROMPT_TOKENS", 5)
    config = ModelConfig.from_dir(TINY)
    args = argparse.Namespace(device="cpu", batch=[2], prompt=5, new=3)
    engine = decode.make_decode_engine(args, config, model.random_tensors(config))
    rows = time_sampling.time_decodes(engine, 2, 3)
    assert all(row["seconds"] > 0 for row in rows)
    table = time_sampling.table_of("ms", rows, [2], 1e3)
    assert list(table.columns[0].cells) == list(time_sampling.DECODES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cpu"], "only a GPU has kernels"),
        (["--device", "auto"], "only a GPU has kernels"),
        (["--model", "no-such-model"], "no model 'no-such-model'"),
        (["--model", str(TINY), "--device", "cuda:99"], "run with --device cpu"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert time_sampling.main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
