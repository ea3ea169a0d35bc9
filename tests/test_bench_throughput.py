"""``bench throughput``: the same lengths each time, arrivals on time, and counts that can be done by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import fake_model
from harness import TINY
from samir_vllm.__main__ import main
from samir_vllm.errors import SamirVllmError
from samir_vllm.extras.bench import peers, throughput
from samir_vllm.extras.bench.limits import Limits, StepWork, step_bytes, step_flops
from samir_vllm.extras.bench.model import pages_per_seq
from samir_vllm.extras.bench.throughput import (
    Arrivals,
    Lengths,
    Served,
    draw_lengths,
    request_figures,
    serve,
    step_works,
    token_times,
    warm_up,
)
from samir_vllm.extras.bench.timed_runner import runner_of
from samir_vllm.outputs import StepOutput, StepRecord
from samir_vllm.sequence import ScheduledStep

LIMITS = Limits("a test's", 2e9, 1e9, 2e9, 1e-6, None)
"""With them a step of four tokens is bound by its operations, one of a single token by its bytes."""
SMALL = ["--requests", "5", "--shortest", "3", "--longest", "9", "--long-prompt", "12", "--long-new", "3"]


def bench(*options: str) -> int:
    """The command on the golden model."""
    return main(["bench", "throughput", "--model", str(TINY), "--device", "cpu", *options])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of a machine that nobody has to measure."""
    monkeypatch.setattr(throughput, "measure_limits", lambda backend: LIMITS)


# The workload


def test_lengths_are_the_same_everywhere() -> None:
    lengths = draw_lengths(256, 100, 1024, seed=0)
    assert lengths[:2] == [Lengths(886, 689), Lengths(572, 349)]
    assert sum(r.prompt for r in lengths) == 145_184
    assert sum(r.new for r in lengths) == 152_466
    assert draw_lengths(256, 100, 1024, seed=1) != lengths
    assert draw_lengths(3, 100, 1024, seed=0) == lengths[:3]


def test_both_bounds_are_drawn() -> None:
    lengths = draw_lengths(100, 3, 5, seed=0)
    assert {r.prompt for r in lengths} == {r.new for r in lengths} == {3, 4, 5}
    assert {r.prompt for r in draw_lengths(10, 7, 7, seed=0)} == {7}


# Serving


def ticks(step: float) -> Any:
    """A clock that is read at the start and after every step, and moves by ``step`` each time."""
    return itertools.count(10, step).__next__


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_arrivals_are_due_each_second(steps_ahead: int) -> None:
    engine, runner = fake_model.make_engine(num_pages=600, steps_ahead=steps_ahead)
    served = serve(engine, [Lengths(5, 9)] * 2, Arrivals(Lengths(20, 4), 1.0), ticks(0.4))
    # Prefill and eight decodes: nine steps, told at 10.4, 10.8, ... 13.6; 11.2, 12.0 and 13.2 see arrivals.
    assert (served.started, served.ended) == (10, pytest.approx(13.6))
    assert list(served.due.values()) == [11, 12, 13]
    # Those that had not ended went with the others; what was under way runs to its end.
    assert len(runner.steps) <= 9 + 2 * steps_ahead
    assert not engine.has_work
    assert engine.pool.num_used == 0
    times = token_times(served)
    told = [times[request_id] for request_id in served.due]
    # The first is submitted at 11.2, so the next step prefills it, unless others are under way.
    late = 0.0 if steps_ahead == 0 else told[0][0] - 11.6
    assert 0 <= late < 1
    assert told[0] == pytest.approx([11.6 + late, 12.0 + late, 12.4 + late, 12.8 + late])
    assert told[1][0] == pytest.approx(12.4 + late)
    assert served.prompts[next(iter(served.due))] == 20


def test_a_long_step_makes_no_arrival_late() -> None:
    engine, _ = fake_model.make_engine(num_pages=600)
    served = serve(engine, [Lengths(5, 3)], Arrivals(Lengths(20, 4), 1.0), ticks(2.5))
    assert list(served.due.values()) == [11, 12, 13, 14, 15]
    assert served.ended == 17.5


def test_without_arrivals() -> None:
    engine, _ = fake_model.make_engine(num_pages=600, max_num_seqs=2)
    served = serve(engine, [Lengths(5, 3), Lengths(40, 1), Lengths(2, 7)], clock=ticks(1.0))
    assert served.due == {}
    assert [len(times) for times in token_times(served).values()] == [3, 1, 7]
    assert engine.on_step is None


@pytest.mark.parametrize("longest", [2, 3, 40, 256, 257, 700])
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_a_warm_up_fits(longest: int, batching: str) -> None:
    """Into pages for no more than requests of this length; and the engine is idle again."""
    engine, runner = fake_model.make_engine(
        num_pages=pages_per_seq(longest) * 2 * 3, context=longest, max_num_seqs=3, batching=batching
    )
    warm_up(engine, longest)
    assert runner.steps
    assert not engine.has_work
    assert engine.pool.num_used == 0


@pytest.mark.parametrize("most", [1, 9, 100])
def test_a_warm_up_meets_every_graph(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_backend = pytest.importorskip("samir_vllm.backends.cuda_backend", reason="CuPy is not installed")
    longest, kv_lens = 700, (256, 512, 1024)  # one, two and up to four splits
    met: set[tuple[int, int]] = set()
    engine, runner = fake_model.make_engine(
        num_pages=pages_per_seq(longest) * 2 * most, context=longest, max_num_seqs=most, steps_ahead=1
    )
    launch = runner.launch

    def see(step: ScheduledStep) -> Any:
        if step.decodes and not step.prefills:
            kv_len = 1 + max(seq.num_launched_tokens for seq in step.decodes)
            met.add((cuda_backend.decode_bucket(len(step.decodes)), next(n for n in kv_lens if kv_len <= n)))
        return launch(step)

    monkeypatch.setattr(runner, "launch", see)
    warm_up(engine, longest)
    assert met == {(cuda_backend.decode_bucket(n), kv) for n in range(1, most + 1) for kv in kv_lens}


def test_a_failed_request_is_no_measurement() -> None:
    engine, runner = fake_model.make_engine(num_pages=600)
    runner.raise_at[2] = RuntimeError("broken")
    with pytest.raises(SamirVllmError, match="broken"):
        serve(engine, [Lengths(5, 5)], clock=ticks(1.0))


# Counting


def record(prefills: list[tuple[str, int]], decodes: list[str]) -> StepRecord:
    """Of a step."""
    return StepRecord(0.0, 0.0, [], prefills, decodes, [], 0, 0, 0)


def test_the_work_of_each_step() -> None:
    served = Served(0.0, prompts={"a": 3, "b": 5})
    served.records = [
        record([("a", 3), ("b", 1)], []),
        record([("b", 2)], ["a"]),
        record([("b", 2)], ["a"]),
        record([], []),  # nothing ran
        record([], ["a", "b"]),
    ]
    assert list(step_works(served)) == [
        # a: 1 + 2 + 3 pairs, and its first token; b: 1 pair
        StepWork(tokens=4, kv_tokens=0, attended=7, logit_rows=1),
        # a: the 4th token sees 4; b: the 2nd and 3rd see 2 and 3
        StepWork(tokens=3, kv_tokens=3 + 1, attended=4 + 5, logit_rows=1),
        # a: the 5th sees 5; b: the 4th and 5th see 4 and 5, and it has its first token
        StepWork(tokens=3, kv_tokens=4 + 3, attended=5 + 9, logit_rows=2),
        StepWork(tokens=2, kv_tokens=5 + 5, attended=6 + 6, logit_rows=2),
    ]


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_the_work_of_a_run(batching: str, steps_ahead: int) -> None:
    """However it is scheduled, all tokens but each last one are run, and see those before them."""
    engine, _ = fake_model.make_engine(
        num_pages=80, max_num_seqs=4, max_batched_tokens=16, batching=batching, steps_ahead=steps_ahead
    )
    lengths = draw_lengths(12, 1, 40, seed=3)
    works = list(step_works(serve(engine, lengths, clock=ticks(1.0))))
    run = [r.prompt + r.new - 1 for r in lengths]
    assert sum(work.tokens for work in works) == sum(run)
    assert sum(work.attended for work in works) == sum(n * (n + 1) // 2 for n in run)
    assert sum(work.logit_rows for work in works) == sum(r.new for r in lengths)


def test_figures_of_the_requests() -> None:
    def told(*request_ids: str) -> list[StepOutput]:
        return [StepOutput(request_id, 0, 65, "A", None, None) for request_id in request_ids]

    served = Served(10.0, 20.0, prompts={"a": 3, "b": 5, "c": 50, "d": 50}, due={"c": 11.0, "d": 15.0})
    served.heard = [(12.0, told("a")), (13.0, told("a", "b")), (15.0, told("b", "c")), (18.0, told("b", "c"))]
    ended: Any = object()
    served.heard.append((20.0, [StepOutput("a", 0, 66, "B", ended, ended)]))
    served.records = [record([("a", 3), ("c", 20)], [])]
    figures = request_figures(served, token_times(served))
    assert (figures["requests"], figures["requests_per_second"]) == (1, 0.1)
    assert figures["total_tokens_per_second"] == (23 + 8) / 10
    assert figures["between_tokens_p50_seconds"] == 2.5  # of 1 and 7 (a), 2 and 3 (b); c's 3 doesn't count
    assert figures["between_tokens_p99_seconds"] == pytest.approx(3 + 0.97 * 4)
    assert (figures["long_prompts"], figures["long_prompts_started"]) == (2, 1)
    assert figures["long_first_token_p50_seconds"] == figures["long_first_token_max_seconds"] == 4


def test_no_figures_of_what_never_happened() -> None:
    figures = request_figures(Served(0.0, 1.0), {})
    assert figures["between_tokens_p99_seconds"] is None
    assert figures["long_first_token_max_seconds"] is None


# The command


def rows_of(text: str) -> list[dict[str, Any]]:
    """Of the command's JSON."""
    rows: list[dict[str, Any]] = json.loads(text)["rows"]
    return rows


@pytest.mark.usefixtures("quick")
def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*SMALL, "--interval", "0.001", "--max-batched-tokens", "4", "--json") == 0
    at_once, mix = rows_of(capsys.readouterr().out)
    lengths = draw_lengths(5, 3, 9, seed=0)
    assert (at_once["name"], mix["name"]) == ("5 at once", "5, and 12 tokens every 0.001 s")
    assert (at_once["requests"], at_once["long_prompts"]) == (5, 0)
    assert at_once["prompt_tokens"] == sum(r.prompt for r in lengths)
    assert at_once["tokens"] == sum(r.new for r in lengths)
    assert at_once["gpu_idle"] is None
    assert mix["long_prompts"] > 0
    for row in (at_once, mix):
        assert row["requests_per_second"] == row["requests"] / row["seconds"]
        assert 0 < row["between_tokens_p50_seconds"] <= row["between_tokens_p99_seconds"] < row["seconds"]
        assert row["floor_seconds"] >= 0.999 * max(row["bytes"], row["flops"]) / 2e9
        assert row["share_of_floor"] == row["floor_seconds"] / row["seconds"]


@pytest.mark.usefixtures("quick")
def test_bytes_and_operations(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One request, whose prompt takes two steps: the first of them needs no LM head."""
    kept: list[Any] = []

    def keep(*args: Any, **options: Any) -> Any:
        kept.append(runner_of(engine := make(*args, **options)))
        return engine

    make = throughput.make_engine
    monkeypatch.setattr(throughput, "make_engine", keep)
    one = ["--requests", "1", "--shortest", "6", "--longest", "6", "--max-batched-tokens", "4"]
    one += ["--long-prompt", "6", "--long-new", "6"]
    assert bench(*one, "--interval", "1000", "--json") == 0
    row = rows_of(capsys.readouterr().out)[0]
    works = [StepWork(4, 0, 10, 0), StepWork(2, 4, 11, 1)]
    works += [StepWork(1, n, n + 1, 1) for n in range(6, 11)]
    weights, config, itemsize = kept[0].weights, kept[0].config, kept[0].backend.kv_itemsize
    nbytes = [step_bytes(weights, config, work, itemsize) for work in works]
    flops = [step_flops(config, work) for work in works]
    assert (row["bytes"], row["flops"], row["steps"]) == (sum(nbytes), sum(flops), len(works))
    assert flops[0] > nbytes[0]
    assert flops[-1] < nbytes[-1]
    assert row["floor_seconds"] == pytest.approx(sum(map(max, nbytes, flops)) / 2e9)


@pytest.mark.usefixtures("quick")
def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*SMALL, "--interval", "0.001", "--batching", "static") == 0
    out, err = capsys.readouterr()
    assert err == ""
    for word in ("5 at once", "every 0.001 s", "floor", "requests/s", "99th percentile", "long prompts"):
        assert word in out


@pytest.mark.usefixtures("quick")
def test_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It gets the requests that were drawn, and its time stands beside that of the same work alone."""
    program = tmp_path / "child.py"
    program.write_text(
        "import json, sys\n"
        "(work,) = json.load(sys.stdin)['works']\n"
        "seconds = float(sum(prompt + 1000 * new for prompt, new in work['requests']))\n"
        "print(json.dumps({'name': work['name'], 'seconds': seconds, 'how': str(work['batches'])}))\n"
    )
    monkeypatch.setattr(peers, "PROGRAM", program)
    monkeypatch.setattr(peers, "missing_packages", list)
    assert bench(*SMALL, "--peers", "transformers", "--json") == 0
    out, err = capsys.readouterr()
    at_once, mix = rows_of(out)
    expected = sum(r.prompt + 1000 * r.new for r in draw_lengths(5, 3, 9, seed=0))
    assert (at_once["peer_seconds"], mix["peer_seconds"]) == (expected, None)
    assert json.loads(out)["peer"] == "transformers"
    assert (at_once["peer_how"], err) == ("[128, 64, 32]", "")


@pytest.mark.usefixtures("quick")
def test_no_peer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peers, "NEEDED", ("no_such_package",))
    assert bench(*SMALL, "--peers", "transformers", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["peer"] is None
    assert err == "samir_vllm: --peers transformers is left out: no_such_package not installed here\n"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--requests", "0"], "--requests"),
        (["--shortest", "9", "--longest", "8"], "--longest 8"),
        (["--seed", "-1"], "--seed"),
        (["--interval", "0"], "--interval"),
        (["--interval", "nan"], "--interval"),
        (["--batching", "dynamic"], "continuous or static"),
        (["--max-num-seqs", "99999"], "max_num_seqs"),
        (["--long-prompt", "131072"], "131200 tokens"),
        (["--kv-cache-mib", "1"], "--kv-cache-mib 1: the longest request needs 4"),
        (["--peers", "nobody"], "--peers"),
        (["--plot", "picture.txt"], "picture.txt"),
        (["--model", "no-such-model"], "no-such-model"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_mistakes_are_one_line(options: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*options) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert word in err
