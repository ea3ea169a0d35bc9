"""What a request asks for beyond greedy: seeds, n answers, stops, min_tokens, K and V kept for the next turn.

On the fake model, where everything can be judged by whole answers; and on a small Llama in NumPy, where the
logits of a request are the same bits in any company, so that its tokens must be too. How far steps run ahead
must not show.
"""

from __future__ import annotations

import codecs
import gc
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fake_model import STEPS_AHEAD, VOCAB_SIZE, ByteTokenizer, answer, make_engine, sampled_answer
from harness import RecordingBackend, make_tiny_engine
from samir_vllm import Engine, RequestError, RequestOutput, SamplingParams, StepOutput
from samir_vllm.answers import Answer, Request
from samir_vllm.backends.reference_sampler import Adjustments, sample_row, settings_of
from samir_vllm.sampling import TokenSampling
from samir_vllm.sequence import Sequence


def step(engine: Engine) -> dict[str, RequestOutput]:
    """One step; the results that came with it, by id."""
    return {out.request_id: out.result for out in engine.step() if out.result is not None}


def drain(engine: Engine) -> dict[str, RequestOutput]:
    """Steps until nothing is left; the results by id."""
    results: dict[str, RequestOutput] = {}
    while engine.has_work:
        results |= step(engine)
    return results


def assert_whole(engine: Engine) -> None:
    """Nobody is live, and every page is free but for what is retained."""
    engine.drop_retained_kv()
    engine.pool.check_integrity()
    assert engine.pool.num_used == 0
    assert not engine.has_work
    assert engine._requests == {}
    assert engine._answers == {}


# Seeds, in any company

MIXED = [
    SamplingParams(max_tokens=12, temperature=1.0, seed=1),
    SamplingParams(max_tokens=9, temperature=0.7, top_p=0.8, top_k=30, seed=2**64 - 1),
    SamplingParams(max_tokens=14),
    SamplingParams(max_tokens=12, temperature=2.0, min_p=0.05, seed=1),
    SamplingParams(max_tokens=10, temperature=1.0, repetition_penalty=3.0, frequency_penalty=0.5, seed=3),
    SamplingParams(max_tokens=8, presence_penalty=1.5, logit_bias={7: 5.0}, seed=4),
    SamplingParams(max_tokens=12, temperature=0.1, seed=0),
]
PROMPTS = [[1], [5, 6, 7], list(range(16)), [5, 6, 7], list(range(3, 260, 6)), [4, 5], list(range(17))]


def expected_fake() -> list[list[int]]:
    # Without a seed nothing is drawn: any seed does for the reference.
    return [sampled_answer(ids, replace(p, seed=p.seed or 0)) for ids, p in zip(PROMPTS, MIXED, strict=True)]


@STEPS_AHEAD
@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("max_batched_tokens", [5, 512])
def test_seeded_answers_equal_the_reference_in_any_company(
    batching: str, max_batched_tokens: int, steps_ahead: int
) -> None:
    engine, _ = make_engine(
        steps_ahead=steps_ahead,
        samples=True,
        batching=batching,
        max_batched_tokens=max_batched_tokens,
        max_num_seqs=4,
    )
    results = engine.generate(PROMPTS, MIXED)
    assert [r.token_ids for r in results] == expected_fake()
    assert [r.seed for r in results] == [p.seed for p in MIXED]
    assert_whole(engine)


def run_tiny(
    order: Seq[int], *, apart: int = 0, steps_ahead: int = 0, **options: object
) -> dict[int, list[int]]:
    """Tokens of the requests ``order``, ``apart`` steps between one and the next."""
    engine, results = make_tiny_engine(**options), {}
    engine._runner.steps_ahead = steps_ahead  # type: ignore[misc]
    for i in order:
        params = replace(MIXED[i], ignore_eos=True)
        engine.add_request(PROMPTS[i], params, request_id=str(i))
        for _ in range(apart):
            results |= step(engine)
    results |= drain(engine)
    assert_whole(engine)
    return {i: results[str(i)].token_ids for i in order}


@pytest.fixture(scope="module")
def tiny_alone() -> dict[int, list[int]]:
    found = {}
    for i in range(len(MIXED)):
        found |= run_tiny([i], max_num_seqs=1)
    return found


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize(
    ("order", "apart", "max_batched_tokens"),
    [(range(7), 0, 512), (range(6, -1, -1), 0, 7), ([3, 1, 6, 0, 2, 5, 4], 2, 3)],
)
def test_the_same_seed_gives_the_same_tokens_in_any_batch(
    tiny_alone: dict[int, list[int]],
    batching: str,
    order: Seq[int],
    apart: int,
    max_batched_tokens: int,
    steps_ahead: int,
) -> None:
    """Other slots, other neighbours (greedy ones too), other chunks of the prompt, other moments."""
    found = run_tiny(
        order,
        apart=apart,
        steps_ahead=steps_ahead,
        batching=batching,
        max_num_seqs=4,
        max_batched_tokens=max_batched_tokens,
    )
    assert found == tiny_alone


def test_seeds_and_temperature_change_the_answer(tiny_alone: dict[int, list[int]]) -> None:
    """Else all of the above would hold for a sampler that is greedy."""
    assert tiny_alone[1][:9] != tiny_alone[3][:9]
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    engine = make_tiny_engine()
    outs = engine.generate([[1, 2]] * 8, [replace(params, seed=seed) for seed in range(8)])
    assert len({tuple(r.token_ids) for r in outs}) == 8


@pytest.mark.parametrize("number", range(len(MIXED)))
def test_tokens_are_the_reference_samplers_choice_from_the_raw_logits(number: int) -> None:
    """Whole path in NumPy: seed, position, index, prompt and output reach the sampler."""
    prompt, params = PROMPTS[number], replace(MIXED[number], ignore_eos=True)
    engine = make_tiny_engine(backend_class=RecordingBackend)
    result = engine.generate(prompt, params)
    raw = engine._runner.backend.raw  # type: ignore[attr-defined]
    sampling, said = TokenSampling(params, params.seed or 0), []
    adjustments, row_settings = Adjustments(sampling, prompt), settings_of(sampling)
    for (logits,), token in zip(raw, result.token_ids, strict=True):
        adjustments.apply(logits, row_settings, len(said))
        assert sample_row(logits, row_settings, len(prompt) + len(said)) == token
        said.append(token)
        adjustments.count(token, len(said))


def test_a_slot_forgets_who_was_there() -> None:
    """One slot: penalties and biases of the one before must not touch the next, be it greedy or not."""
    engine, fresh = make_tiny_engine(max_num_seqs=1), [make_tiny_engine(max_num_seqs=1) for _ in range(3)]
    first = SamplingParams(max_tokens=10, temperature=1.0, seed=9, logit_bias={3: 100.0}, ignore_eos=True)
    assert engine.generate([1, 2], first).token_ids == [3] * 10
    for other, params in zip(
        fresh,
        [
            SamplingParams(max_tokens=10, ignore_eos=True),
            SamplingParams(max_tokens=10, temperature=1.0, seed=9, ignore_eos=True),
            SamplingParams(max_tokens=10, repetition_penalty=2.0, ignore_eos=True),
        ],
        strict=True,
    ):
        assert engine.generate([1, 2], params).token_ids == other.generate([1, 2], params).token_ids


def test_a_drawn_seed_is_in_the_result_and_gives_the_answer_again() -> None:
    engine, _ = make_engine(samples=True)
    params = SamplingParams(max_tokens=12, temperature=1.0)
    one, other = engine.generate([1, 2], params), engine.generate([1, 2], params)
    assert one.seed is not None
    assert 0 <= one.seed < 2**63
    assert one.seed != other.seed
    assert one.token_ids != other.token_ids
    assert engine.generate([1, 2], replace(params, seed=one.seed)).token_ids == one.token_ids


def test_greedy_names_a_seed_only_if_given() -> None:
    engine, _ = make_engine()
    assert engine.generate([1], SamplingParams(max_tokens=1)).seed is None
    assert engine.generate([1], SamplingParams(max_tokens=1, seed=7)).seed == 7


@STEPS_AHEAD
def test_an_interrupted_step_draws_no_other_tokens(steps_ahead: int) -> None:
    for run in range(7):
        engine, runner = make_engine(steps_ahead=steps_ahead, samples=True, max_batched_tokens=8)
        runner.raise_at = {run: KeyboardInterrupt()}
        ids = [engine.add_request(p, q) for p, q in zip(PROMPTS, MIXED, strict=True)]
        with pytest.raises(KeyboardInterrupt):
            drain(engine)
        results = drain(engine)
        assert [results[i].token_ids for i in ids] == expected_fake()
        assert_whole(engine)


# n answers


@STEPS_AHEAD
def test_n_answers_differ_and_each_is_that_of_its_index(steps_ahead: int) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=5, n=4)
    engine, _ = make_engine(steps_ahead=steps_ahead, samples=True, max_num_seqs=3)
    result = engine.generate([1, 2, 3], params)
    assert [c.index for c in result.completions] == [0, 1, 2, 3]
    expected = [sampled_answer([1, 2, 3], params, index=i) for i in range(4)]
    assert [c.token_ids for c in result.completions] == expected
    assert len({tuple(ids) for ids in expected}) == 4
    assert {c.seed for c in result.completions} == {5}
    assert result.token_ids == expected[0] == engine.generate([1, 2, 3], replace(params, n=1)).token_ids
    assert_whole(engine)


@STEPS_AHEAD
def test_n_answers_of_a_list_of_prompts(steps_ahead: int) -> None:
    params = [SamplingParams(max_tokens=6, temperature=1.0, seed=i, n=1 + i % 3) for i in range(5)]
    engine, _ = make_engine(steps_ahead=steps_ahead, samples=True, num_pages=24, max_num_seqs=4)
    prompts = [[i, 7] for i in range(5)]
    for prompt, p, result in zip(prompts, params, engine.generate(prompts, params), strict=True):
        expected = [sampled_answer(prompt, p, index=i) for i in range(p.n)]
        assert [c.token_ids for c in result.completions] == expected
    assert_whole(engine)


def every(n: int) -> list[int]:
    """Stop ids, one in ``n``: one answer ends early, another late."""
    return list(range(0, VOCAB_SIZE, n))


def by_answer(outputs: Seq[StepOutput]) -> dict[int, list[StepOutput]]:
    found: dict[int, list[StepOutput]] = {}
    for out in outputs:
        found.setdefault(out.index, []).append(out)
    return found


@STEPS_AHEAD
def test_n_answers_stream_each_with_its_index(steps_ahead: int) -> None:
    """Their ends come one after another: `completion` with each, `result` with the last alone."""
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=2, n=3, stop_token_ids=every(9))
    engine, _ = make_engine(steps_ahead=steps_ahead, samples=True)
    outputs = list(engine.stream([1, 2], params))
    assert [out.result is not None for out in outputs] == [False] * (len(outputs) - 1) + [True]
    result = outputs[-1].result
    assert result is not None
    for index, mine in by_answer(outputs).items():
        *before, last = mine
        assert all(out.completion is None for out in before)
        assert last.completion is result.completions[index]
        assert [out.token_id for out in mine] == last.completion.token_ids
        assert "".join(out.text for out in mine) == last.completion.text
    assert len({len(c.token_ids) for c in result.completions}) > 1
    assert_whole(engine)


@STEPS_AHEAD
@pytest.mark.parametrize(("steps", "ended"), [(0, 0), (1, 0), (1, 1), (1, 2)])
def test_abort_ends_all_answers_that_still_run(steps: int, ended: int, steps_ahead: int) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=3, stop_token_ids=every(5))
    engine, _ = make_engine(steps_ahead=steps_ahead, samples=True, max_num_seqs=2)
    whole = make_engine(samples=True)[0].generate([6, 6], params)
    request_id = engine.add_request([6, 6], params)
    other = engine.add_request([1], SamplingParams(max_tokens=4))
    outputs: list[StepOutput] = []
    for _ in range(steps):
        outputs += engine.step()
    while sum(out.request_id == request_id and out.completion is not None for out in outputs) < ended:
        outputs += engine.step()
    results = {out.request_id: out.result for out in outputs if out.result is not None}
    result = engine.abort(request_id)
    assert result is not None
    assert [c.finish_reason for c in result.completions].count("abort") == 3 - ended
    for mine, full in zip(result.completions, whole.completions, strict=True):
        if mine.finish_reason == "abort":
            assert mine.token_ids == full.token_ids[: len(mine.token_ids)]
            assert mine.stop_reason is None
        else:
            assert mine.token_ids == full.token_ids
            assert (mine.finish_reason, mine.stop_reason) == (full.finish_reason, full.stop_reason)
    assert engine.abort(request_id) is None
    results |= drain(engine)
    assert results.keys() == {other}
    assert_whole(engine)


@STEPS_AHEAD
def test_one_answers_error_is_not_the_others(steps_ahead: int) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=1, n=3)
    engine, runner = make_engine(steps_ahead=steps_ahead, samples=True)
    runner.nan_at = {"r#1": 3}
    engine.add_request([1], params, request_id="r")
    completions = drain(engine)["r"].completions
    assert [c.finish_reason for c in completions] == ["length", "error", "length"]
    assert "NaN" in (completions[1].error or "")
    assert [c.token_ids for c in completions] == [
        sampled_answer([1], params, index=i)[: 3 if i == 1 else 8] for i in range(3)
    ]
    assert_whole(engine)


@STEPS_AHEAD
def test_a_failing_step_ends_the_answers_in_it(steps_ahead: int) -> None:
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=1, n=3)
    engine, runner = make_engine(steps_ahead=steps_ahead, samples=True, max_num_seqs=2)
    runner.raise_at = {1: RuntimeError("out")}
    completions = engine.generate([1], params).completions
    assert [c.finish_reason for c in completions] == ["error", "error", "length"]
    assert_whole(engine)


def test_a_live_id_of_any_answer_is_refused_and_leaves_nothing() -> None:
    engine, _ = make_engine()
    two = SamplingParams(max_tokens=4, n=2)
    engine.add_request([1], SamplingParams(max_tokens=4), request_id="a#1")
    with pytest.raises(RequestError, match="'a#1' is already live"):
        engine.add_request([2], two, request_id="a")
    engine.add_request([2], two, request_id="b")
    for taken in ("b", "b#0"):
        with pytest.raises(RequestError, match=f"'{taken}' is already live"):
            engine.add_request([3], SamplingParams(max_tokens=4), request_id=taken)
    assert set(drain(engine)) == {"a#1", "b"}
    assert_whole(engine)


def test_all_answers_are_queued_or_none() -> None:
    engine, _ = make_engine()
    add, calls = engine.scheduler.add, []

    def failing(seq: object) -> None:
        calls.append(seq)
        if len(calls) == 3:
            raise RequestError("no more")
        add(seq)  # type: ignore[arg-type]

    engine.scheduler.add = failing  # type: ignore[method-assign,assignment]
    with pytest.raises(RequestError, match="no more"):
        engine.add_request([1], SamplingParams(max_tokens=4, n=4))
    assert_whole(engine)


@STEPS_AHEAD
def test_a_closed_stream_of_n_answers_leaves_nothing(steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead, samples=True)
    stream = engine.stream([1], SamplingParams(max_tokens=9, temperature=1.0, n=3))
    next(stream)
    next(stream)
    stream.close()
    assert list(stream) == []
    assert_whole(engine)


@STEPS_AHEAD
def test_a_future_comes_with_the_last_answer(steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead, samples=True, max_num_seqs=1)
    params = SamplingParams(max_tokens=3, temperature=1.0, seed=3, n=3)
    future = engine.submit([1, 2], params)
    drain(engine)
    completions = future.result(0).completions
    assert [c.token_ids for c in completions] == [sampled_answer([1, 2], params, index=i) for i in range(3)]
    cancelled = engine.submit([1, 2], params)
    engine.step()
    assert cancelled.cancel()
    engine.step()
    assert_whole(engine)


@STEPS_AHEAD
def test_what_has_ended_goes_at_once(steps_ahead: int) -> None:
    """Without the garbage collector, whose pauses would come in the middle of somebody's answer."""

    def live() -> int:
        return sum(isinstance(o, Answer | Request | Sequence) for o in gc.get_objects())

    engine, _ = make_engine(steps_ahead=steps_ahead, samples=True)
    params = SamplingParams(max_tokens=4, temperature=1.0, n=3, stop="zz", logprobs=1, prompt_logprobs=1)
    gc.collect()
    before = live()
    gc.disable()
    try:
        engine.generate([[1, 2], [3]], params)
        engine.add_request([4], params, request_id="aborted")
        engine.step()
        assert live() > before
        engine.abort("aborted")
        if steps_ahead:  # steps under way know whose they are, until they are read
            engine.generate([5], SamplingParams(max_tokens=1))
        assert live() == before
    finally:
        gc.enable()


# Stops

PIECES = [
    b" the end",
    "grün".encode(),
    "ü".encode()[:1],
    "ü".encode()[1:],
    b"\xe2\x82",
    b"\xac!",
    b"STOP",
    b"\n\n",
]
LETTERS = [*b"abST", 256, 257, 258, 259, 260, 261, 262, 263, 271]  # 271 has no text


def reference(
    token_ids: list[int], stops: Seq[str], stop_ids: Seq[int], max_tokens: int, min_tokens: int
) -> tuple[list[int], str, str, int | str | None]:
    """Tokens, text, finish reason and stop reason of what the model says, judged over whole texts."""
    table = [bytes([i]) for i in range(256)] + PIECES
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    text = ""
    for count, token in enumerate(token_ids[:max_tokens], 1):
        by_id, at_end = token in stop_ids, count == max_tokens
        piece = "" if by_id or token >= len(table) else decode(table[token])
        piece += decode(b"", True) if by_id or at_end else ""
        for char in piece:
            text += char
            complete = [stop for stop in stops if text.endswith(stop)]
            if complete and count >= min_tokens:
                longest = max(complete, key=len)
                return token_ids[:count], text.removesuffix(longest), "stop", longest
        if by_id:
            return token_ids[:count], text, "stop", token
    return token_ids[:max_tokens], text, "length", None


@st.composite
def stopping_cases(draw: st.DrawFn) -> tuple[list[int], list[str], list[int], int, int]:
    """What the model says; stop strings cut from it or made of its letters; stop ids; limits."""
    said = draw(st.lists(st.sampled_from(LETTERS), min_size=1, max_size=40))
    text = ByteTokenizer(PIECES).decode(said)
    cut = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 12)).map(
        lambda t: text[t[0] :][: t[1]]
    )
    stops = draw(st.lists(st.one_of(cut, st.text("abST üend€", min_size=1, max_size=4)), max_size=4))
    stop_ids = draw(st.lists(st.sampled_from(LETTERS), max_size=1))
    max_tokens = draw(st.integers(1, 50))
    return said, [s for s in stops if s], stop_ids, max_tokens, draw(st.integers(0, max_tokens))


@settings(max_examples=400, deadline=None)
@given(stopping_cases(), st.integers(0, 2))
@example(([256], ["he e"], [], 3, 0), 0)  # inside one token
@example(([258, 259, 256], ["ü t"], [], 3, 0), 0)  # over tokens that are no characters
@example(([*b"aab"], ["aab", "ab"], [], 3, 0), 0)  # both complete in one place: the longer counts
@example(([*b"abT"], ["abS"], [], 3, 0), 0)  # held back in vain
@example(([*b"ab", 271], ["abS"], [271], 9, 0), 1)  # released by a stop id
@example(([*b"abS"], ["abS"], [], 3, 0), 1)  # in the token that reaches max_tokens
@example(([*b"abS"], ["abS"], [], 9, 4), 1)  # too early, and again in time
@example(([258], ["\ufffd"], [], 1, 0), 0)  # what is left incomplete at the end is text, too
def test_stops_equal_a_reading_of_the_whole_text(
    case: tuple[list[int], list[str], list[int], int, int], steps_ahead: int
) -> None:
    said, stops, stop_ids, max_tokens, min_tokens = case
    if min_tokens and stop_ids:
        min_tokens = 0  # the fake model would have to say something else: below
    engine, runner = make_engine(pieces=PIECES, steps_ahead=steps_ahead)
    runner.says = said
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop=stops, stop_token_ids=stop_ids)
    outputs = list(engine.stream([1], params))
    result = outputs[-1].result
    assert result is not None
    repeated = (said * (max_tokens // len(said) + 1))[:max_tokens]
    found = (result.token_ids, result.text, result.finish_reason, result.stop_reason)
    assert found == reference(repeated, stops, stop_ids, max_tokens, min_tokens)
    assert "".join(out.text for out in outputs) == result.text
    assert [out.token_id for out in outputs] == result.token_ids
    assert_whole(engine)


def say(text: str, max_tokens: int = 40, **wishes: object) -> list[StepOutput]:
    engine, runner = make_engine(eos_token_ids=(0,))
    runner.says = [*text.encode(), 0]
    outputs = list(engine.stream([1], SamplingParams(max_tokens=max_tokens, **wishes)))  # type: ignore[arg-type]
    assert_whole(engine)
    return outputs


def test_text_comes_as_early_as_it_can() -> None:
    """Only what may become a stop string waits, and it comes with the token that decides."""
    assert [out.text for out in say("a<b<e><", stop="<end>")] == ["a", "", "<b", "", "", "<e>", "", "<"]


@STEPS_AHEAD
def test_any_eos_ends_it_beside_stop_strings_and_stop_ids(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead, eos_token_ids=(200, 201))
    for eos in (200, 201):
        runner.says = [97, 98, eos]
        out = engine.generate([1], SamplingParams(max_tokens=9, stop="bx", stop_token_ids=[50]))
        assert (out.text, out.finish_reason, out.stop_reason) == ("ab", "stop", eos)
        out = engine.generate([1], SamplingParams(max_tokens=7, stop="bx", ignore_eos=True))
        assert (out.finish_reason, out.stop_reason) == ("length", None)


@STEPS_AHEAD
def test_held_text_is_released_by_every_end(steps_ahead: int) -> None:
    def end_of(name: str) -> StepOutput:
        engine, runner = make_engine(steps_ahead=steps_ahead, eos_token_ids=(0,))
        runner.says = [*b"ab<e", 0]
        if name == "error":
            runner.nan_at = {"request-0": 4}
        if name == "failure":
            runner.raise_at = {4: RuntimeError("broken")}
        stream = engine.stream([1], SamplingParams(max_tokens=4 if name == "length" else 9, stop="<end>"))
        outputs = []
        for out in stream:
            outputs.append(out)
            if name == "abort" and len(outputs) == 4:
                engine.abort(out.request_id)
        assert_whole(engine)
        assert "".join(out.text for out in outputs) == "ab<e"
        return outputs[-1]

    ends = {name: end_of(name) for name in ("stop", "length", "abort", "error", "failure")}
    for name, out in ends.items():
        assert out.result is not None
        assert out.result.text == "ab<e"
        assert out.result.finish_reason == ("error" if name == "failure" else name)
        assert out.result.stop_reason == (0 if name == "stop" else None)
    assert ends["stop"].text == "<e"
    assert ends["abort"].token_id is None


@STEPS_AHEAD
def test_a_stop_string_frees_its_place_at_once(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead, max_num_seqs=1)
    runner.says = [*b"abc"]
    first = engine.add_request([1], SamplingParams(max_tokens=50, stop="bc"))
    second = engine.add_request([2], SamplingParams(max_tokens=2))
    for _ in range(3):
        engine.step()
    assert engine.pool.num_used == 0
    engine.step()
    assert runner.steps[-1] == ([], [(second, 1)])
    assert first not in engine._requests


@STEPS_AHEAD
def test_answers_stop_each_on_its_own(steps_ahead: int) -> None:
    """Matchers share the stop strings and nothing else."""
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=12, n=6)
    engine, _ = make_engine(steps_ahead=steps_ahead, samples=True)
    texts = [c.text for c in engine.generate([1], params).completions]
    stops = [texts[0][20:22], texts[3][8:10], texts[5][40:41]]
    for text, c in zip(texts, engine.generate([1], replace(params, stop=stops)).completions, strict=True):
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        if not ends:
            assert (c.text, c.finish_reason) == (text, "length")
            continue
        stop = max((s for s in stops if text[: min(ends)].endswith(s)), key=len)
        assert (c.text, c.finish_reason, c.stop_reason) == (text[: min(ends) - len(stop)], "stop", stop)
    assert_whole(engine)


# min_tokens


@STEPS_AHEAD
@pytest.mark.parametrize("min_tokens", [0, 1, 5, 20])
def test_min_tokens_holds_off_stop_ids(min_tokens: int, steps_ahead: int) -> None:
    stop_ids = every(5)
    params = SamplingParams(
        max_tokens=30, temperature=1.5, seed=6, min_tokens=min_tokens, stop_token_ids=stop_ids, n=8
    )
    engine, _ = make_engine(steps_ahead=steps_ahead, samples=True, num_pages=128)
    lengths = set()
    for i, c in enumerate(engine.generate([3], params).completions):
        assert c.token_ids == sampled_answer([3], params, index=i)
        assert not set(c.token_ids[:min_tokens]) & set(stop_ids)
        assert c.stop_reason == (c.token_ids[-1] if c.finish_reason == "stop" else None)
        lengths.add(len(c.token_ids))
    assert min(lengths) == min_tokens + 1  # the first that may end it, in one of eight


@pytest.mark.parametrize("source", ["params", "model"])
def test_min_tokens_on_the_small_llama(source: str) -> None:
    """Greedy: what it would say first ends the answer, and may not before min_tokens."""
    free = make_tiny_engine().generate([1, 2], SamplingParams(max_tokens=8, ignore_eos=True)).token_ids
    stop = free[0]
    eos, ids = ((stop,), []) if source == "model" else ((), [stop])
    engine = make_tiny_engine(eos_token_ids=eos)
    assert engine.generate([1, 2], SamplingParams(max_tokens=8, stop_token_ids=ids)).token_ids == [stop]
    out = engine.generate([1, 2], SamplingParams(max_tokens=8, min_tokens=3, stop_token_ids=ids))
    assert stop not in out.token_ids[:3]
    assert len(out.token_ids) >= 3
    if source == "model":
        params = SamplingParams(max_tokens=8, min_tokens=3, ignore_eos=True)
        assert engine.generate([1, 2], params).token_ids == free


def test_min_tokens_holds_off_stop_strings() -> None:
    early = say("abab", stop="ab")[-1].result
    late = say("abab", stop="ab", min_tokens=3)[-1].result
    assert early is not None
    assert late is not None
    assert (early.text, len(early.token_ids)) == ("", 2)
    assert (late.text, len(late.token_ids), late.stop_reason) == ("ab", 4, "ab")


def test_min_tokens_beyond_the_context_is_refused() -> None:
    engine, _ = make_engine(context=32)
    engine.generate([1] * 20, SamplingParams(max_tokens=99, min_tokens=12))
    with pytest.raises(RequestError, match="min_tokens is 13 but the context has room for 12") as refusal:
        engine.generate([1] * 20, SamplingParams(max_tokens=99, min_tokens=13))
    assert "\n" not in str(refusal.value)
    assert_whole(engine)


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 10**9, pytest.param(10**9000, id="huge")])
@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_ids_beyond_the_vocabulary_are_refused(name: str, token_id: int) -> None:
    engine, _ = make_engine()
    value = {token_id: 1.0} if name == "logit_bias" else [token_id]
    with pytest.raises(RequestError, match=f"{name}.* 0 to {VOCAB_SIZE - 1}") as refusal:
        engine.add_request([1], SamplingParams(**{name: value}))  # type: ignore[arg-type]
    assert len(str(refusal.value)) < 200
    assert_whole(engine)


# K and V kept for the next turn


def test_turns_of_a_conversation_reuse_their_kv() -> None:
    """Each turn's tokens are those of an engine that has never seen the ones before."""
    rng = np.random.default_rng(0)
    engine = make_tiny_engine(num_pages=3 * 20)
    history: list[int] = []
    for turn in range(5):
        history += rng.integers(5, 512, 11 + turn).tolist()
        params = SamplingParams(
            max_tokens=9, temperature=turn % 2 * 1.0, repetition_penalty=1.2, seed=turn, ignore_eos=True
        )
        *_, last = engine.stream(history, params, retain_kv=True)
        assert last.result is not None
        fresh = make_tiny_engine(num_pages=3 * 20).generate(history, params)
        assert last.result.token_ids == fresh.token_ids
        # All that ran in the turn before: its prompt, and its answer but for the last token.
        cached = len(history) - (11 + turn) - 1 if turn else 0
        assert last.result.metrics.num_cached_tokens == cached
        assert fresh.metrics.num_cached_tokens == 0
        history += last.result.token_ids
    assert engine.scheduler.num_retained_pages > 0
    assert_whole(engine)


@STEPS_AHEAD
@pytest.mark.parametrize("end", ["stop", "length", "abort"])
def test_kv_is_kept_whatever_ends_the_answer(end: str, steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead)
    prompt = list(range(20))
    stop = {"stop": ByteTokenizer().decode(answer(prompt, 30))[-3:-1]}.get(end, ())
    stream = engine.stream(prompt, SamplingParams(max_tokens=30, stop=stop), retain_kv=True)
    outputs = []
    for out in stream:
        outputs.append(out)
        if end == "abort" and len(outputs) == 10:
            engine.abort(out.request_id)
    result = outputs[-1].result
    assert result is not None
    assert result.finish_reason == end
    said = [*prompt, *result.token_ids]
    runner.steps.clear()
    *_, last = engine.stream([*said, 1, 2], SamplingParams(max_tokens=5), retain_kv=True)
    out = last.result
    assert out is not None
    assert out.token_ids == answer([*said, 1, 2], 5)
    assert out.metrics.num_cached_tokens == len(said) - 1
    assert runner.steps[0] == ([], [(out.request_id, 3)])
    assert_whole(engine)


@STEPS_AHEAD
def test_nothing_is_kept_unasked_and_prompt_logprobs_run_every_row(steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead)
    prompt = list(range(40))
    engine.generate(prompt, SamplingParams(max_tokens=5))
    assert engine.pool.num_used == 0
    list(engine.stream(prompt, SamplingParams(max_tokens=5), retain_kv=True))
    assert engine.pool.num_used == engine.scheduler.num_retained_pages > 0
    *_, last = engine.stream(prompt, SamplingParams(max_tokens=5, prompt_logprobs=0), retain_kv=True)
    out = last.result
    assert out is not None
    assert out.metrics.num_cached_tokens == 0
    assert out.prompt_logprobs is not None
    assert None not in out.prompt_logprobs[1:]
    assert_whole(engine)


# All of it together


@st.composite
def mixed_arrivals(draw: st.DrawFn) -> list[tuple[list[int], SamplingParams, bool, int, bool]]:
    """(prompt, params, retain_kv, steps before the next comes, whether it is aborted then)."""
    dialogs = [list(range(50)), list(range(20)) + [99] * 30]  # prompts begin alike, up to here or there
    arrivals = []
    for _ in range(draw(st.integers(1, 8))):
        prompt = draw(st.sampled_from(dialogs))[: draw(st.integers(1, 50))]
        params = SamplingParams(
            max_tokens=draw(st.integers(1, 12)),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.5])),
            seed=draw(st.integers(0, 3)),
            n=draw(st.integers(1, 3)),
            stop_token_ids=draw(st.sampled_from([(), tuple(every(9))])),
            logprobs=draw(st.sampled_from([None, 1])),
            prompt_logprobs=draw(st.sampled_from([None, None, 0])),
        )
        arrivals.append(
            (prompt, params, draw(st.booleans()), draw(st.integers(0, 6)), draw(st.integers(0, 4)) == 0)
        )
    return arrivals


@settings(max_examples=60, deadline=None)
@given(
    arriving=mixed_arrivals(),
    batching=st.sampled_from(["continuous", "static"]),
    num_pages=st.integers(8, 40),
    max_num_seqs=st.integers(1, 5),
    max_batched_tokens=st.integers(1, 60),
    steps_ahead=st.integers(0, 2),
)
def test_any_mixture_in_any_order(
    arriving: list[tuple[list[int], SamplingParams, bool, int, bool]],
    batching: str,
    num_pages: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    steps_ahead: int,
) -> None:
    """Every answer is that of the request alone, whoever left K and V behind."""
    engine, _ = make_engine(
        steps_ahead=steps_ahead,
        samples=True,
        num_pages=num_pages,
        batching=batching,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
    )
    results: dict[str, RequestOutput] = {}
    for number, (prompt, params, retain_kv, steps, aborted) in enumerate(arriving):
        engine.add_request(prompt, params, request_id=str(number), retain_kv=retain_kv)
        for _ in range(steps):
            results |= step(engine)
            engine.pool.check_integrity()
        if aborted and (result := engine.abort(str(number))) is not None:
            results[str(number)] = result
    results |= drain(engine)
    for number, (prompt, params, *_) in enumerate(arriving):
        result = results[str(number)]
        assert [c.index for c in result.completions] == list(range(params.n))
        for c in result.completions:
            expected = sampled_answer(prompt, params, index=c.index)
            assert c.token_ids == (expected[: len(c.token_ids)] if c.finish_reason == "abort" else expected)
            places = [None if p is None else p.token_id for p in c.logprobs or []]
            assert places == ([] if params.logprobs is None else c.token_ids)
        if params.prompt_logprobs is not None and result.finish_reason != "abort":
            assert [p and p.token_id for p in result.prompt_logprobs or []] == [None, *prompt[1:]]
    assert_whole(engine)
