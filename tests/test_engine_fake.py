"""The engine on a fake model: what each request gets, whatever happens to the others.

How far steps run ahead of the results that are read must not show; ``test_engine_ahead`` looks closer.
"""

from __future__ import annotations

import itertools
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_model import STEPS_AHEAD, VOCAB_SIZE, ByteTokenizer, answer, make_engine
from samir_vllm.engine import Engine, RequestOutput, StepOutput
from samir_vllm.errors import InvariantError, RequestError
from samir_vllm.sampling import SamplingParams

SOME_IDS = list(range(0, VOCAB_SIZE, 9))
PROMPTS = [[1], [5, 6, 7], list(range(16)), list(range(17)), [9] * 40]


def limit(max_tokens: int, **others: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **others)  # type: ignore[arg-type]


def drain(engine: Engine) -> dict[str, RequestOutput]:
    """Steps until nothing is left; the results by id."""
    results = {}
    while engine.has_work:
        for out in engine.step():
            if out.result is not None:
                results[out.request_id] = out.result
    return results


def assert_whole(engine: Engine) -> None:
    """Nobody is live, nothing is held back and every page is free."""
    engine.pool.check_integrity()
    assert engine.pool.num_used == 0
    assert not engine.has_work
    assert engine._requests == {}


def text_of(token_ids: list[int]) -> str:
    return ByteTokenizer().decode(token_ids)


# The same, whatever the company


@STEPS_AHEAD
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_alone_or_together(batching: str, steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead, batching=batching, max_batched_tokens=24)
    expected = [answer(prompt, 20) for prompt in PROMPTS]
    alone = [engine.generate(prompt, limit(20)) for prompt in PROMPTS]
    together = engine.generate(PROMPTS, limit(20))
    for outputs in (alone, together):
        assert [out.token_ids for out in outputs] == expected
        assert [out.text for out in outputs] == [text_of(ids) for ids in expected]
        assert [out.prompt_token_ids for out in outputs] == PROMPTS
        assert {(out.finish_reason, out.error) for out in outputs} == {("length", None)}
    assert_whole(engine)


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[list[int], int, bool, int]]:
    """(prompt, new tokens, whether one of nine ids ends it, steps before the next one comes)."""
    prompt = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40)
    arrival = st.tuples(prompt, st.integers(1, 24), st.booleans(), st.integers(0, 8))
    return draw(st.lists(arrival, min_size=1, max_size=10))


@settings(max_examples=60, deadline=None)
@given(
    arriving=arrivals(),
    batching=st.sampled_from(["continuous", "static"]),
    num_pages=st.integers(8, 40),
    max_num_seqs=st.integers(1, 5),
    max_batched_tokens=st.integers(1, 60),
    steps_ahead=st.integers(0, 2),
)
def test_any_order_of_arrival(
    arriving: list[tuple[list[int], int, bool, int]],
    batching: str,
    num_pages: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    steps_ahead: int,
) -> None:
    engine, _ = make_engine(
        steps_ahead=steps_ahead,
        num_pages=num_pages,
        batching=batching,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
    )
    expected, tokens = {}, {}

    def step() -> None:
        for out in engine.step():
            tokens.setdefault(out.request_id, []).append(out.token_id)
            if out.result is not None:
                assert out.result.token_ids == tokens[out.request_id]

    for prompt, new, stops, steps in arriving:
        stop_ids = SOME_IDS if stops else ()
        request_id = engine.add_request(prompt, limit(new, stop_token_ids=stop_ids))
        expected[request_id] = answer(prompt, new, stop_ids)
        for _ in range(steps):
            step()
    while engine.has_work:
        step()
    assert tokens == expected
    assert_whole(engine)


@STEPS_AHEAD
def test_a_request_joins_a_running_one(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead)
    first = engine.add_request([1, 2, 3], limit(12))
    for _ in range(4):
        engine.step()
    second = engine.add_request([4, 5], limit(12))
    results = drain(engine)
    assert results[first].token_ids == answer([1, 2, 3], 12)
    assert results[second].token_ids == answer([4, 5], 12)
    assert ([first], [(second, 2)]) in runner.steps
    assert ([first, second], []) in runner.steps
    assert_whole(engine)


# How a request ends


@STEPS_AHEAD
@pytest.mark.parametrize("source", ["params", "model"])
def test_a_stop_id_ends_the_answer(source: str, steps_ahead: int) -> None:
    prompt = [3, 1, 4]
    whole = answer(prompt, 30)
    stop = whole[10]
    expected = whole[: whole.index(stop) + 1]
    engine, _ = make_engine(steps_ahead=steps_ahead, eos_token_ids=(stop,) if source == "model" else ())
    out = engine.generate(prompt, limit(30, stop_token_ids=[stop] if source == "params" else []))
    assert out.token_ids == expected
    assert out.finish_reason == "stop"
    assert out.text == text_of(expected[:-1])
    out = engine.generate(prompt, limit(30, ignore_eos=True))
    assert out.token_ids == whole
    assert out.finish_reason == "length"
    assert_whole(engine)


@STEPS_AHEAD
def test_ignore_eos_leaves_the_users_stop_ids(steps_ahead: int) -> None:
    prompt = [3, 1, 4]
    stop = answer(prompt, 30)[5]
    engine, _ = make_engine(steps_ahead=steps_ahead)
    out = engine.generate(prompt, limit(30, ignore_eos=True, stop_token_ids=[stop]))
    assert out.token_ids == answer(prompt, 30, [stop])
    assert out.finish_reason == "stop"


@STEPS_AHEAD
@pytest.mark.parametrize("prompt_len", [1, 30, 31])
def test_the_context_cuts_max_tokens(prompt_len: int, steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead, context=32)
    prompt = [2] * prompt_len
    out = engine.generate(prompt, limit(1000))
    assert out.token_ids == answer(prompt, 32 - prompt_len)
    assert out.finish_reason == "length"
    assert_whole(engine)


@STEPS_AHEAD
def test_nan_ends_its_request_alone(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead)
    runner.nan_at = {"in prefill": 0, "in decode": 3}
    for name, prompt in zip(["in prefill", "in decode", "well"], PROMPTS, strict=False):
        engine.add_request(prompt, limit(10), request_id=name)
    results = drain(engine)
    for name, said in [("in prefill", 0), ("in decode", 3)]:
        assert results[name].finish_reason == "error"
        assert "NaN" in results[name].error
        assert results[name].token_ids == answer(results[name].prompt_token_ids, 10)[:said]
    assert results["well"].token_ids == answer(PROMPTS[2], 10)
    assert results["well"].error is None
    assert_whole(engine)


@STEPS_AHEAD
def test_a_failing_step_ends_those_in_it(steps_ahead: int) -> None:
    """Two run, one of them in the middle of its prompt; the third waits and must not notice."""
    engine, runner = make_engine(steps_ahead=steps_ahead, max_num_seqs=2, max_batched_tokens=8)
    runner.raise_at = {2: RuntimeError("the device\nis on fire")}
    for name, prompt in [("a", [1, 2]), ("b", [3] * 40), ("waiting", [4, 5])]:
        engine.add_request(prompt, limit(10), request_id=name)
    results = drain(engine)
    assert runner.steps[2] == (["a"], [("b", 8)])
    for name in ("a", "b"):
        assert results[name].finish_reason == "error"
        assert results[name].error == "RuntimeError: the device is on fire"
    assert results["a"].token_ids == answer([1, 2], 2)
    assert results["waiting"].token_ids == answer([4, 5], 10)
    assert_whole(engine)


@STEPS_AHEAD
def test_who_was_admitted_but_not_in_the_failing_step_goes_on(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead, max_batched_tokens=8)
    runner.raise_at = {0: RuntimeError("once")}
    engine.add_request([1] * 8, limit(4), request_id="in it")
    engine.add_request([2, 3], limit(4), request_id="not in it")
    results = drain(engine)
    assert results["in it"].finish_reason == "error"
    assert results["not in it"].token_ids == answer([2, 3], 4)
    assert_whole(engine)


@STEPS_AHEAD
def test_a_broken_invariant_is_not_swallowed(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead)
    runner.raise_at = {0: InvariantError("a bug of ours")}
    engine.add_request([1], limit(1))
    with pytest.raises(InvariantError, match="a bug of ours"):
        engine.step()


@STEPS_AHEAD
@pytest.mark.parametrize("run", range(6))
def test_an_interrupted_step_runs_again(run: int, steps_ahead: int) -> None:
    """In the first prompt's first chunk, its last, a decode beside a prompt ..."""
    engine, runner = make_engine(steps_ahead=steps_ahead, max_batched_tokens=8)
    runner.raise_at = {run: KeyboardInterrupt()}
    for name, prompt in [("a", [1] * 12), ("b", [2] * 9)]:
        engine.add_request(prompt, limit(5), request_id=name)
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    late = engine.add_request([3, 4], limit(5))
    results = drain(engine)
    assert results["a"].token_ids == answer([1] * 12, 5)
    assert results["b"].token_ids == answer([2] * 9, 5)
    assert results[late].token_ids == answer([3, 4], 5)
    assert_whole(engine)


# Abort


@STEPS_AHEAD
@pytest.mark.parametrize(("steps", "said"), [(0, 0), (1, 0), (3, 1), (6, 4)])
def test_abort_in_each_state(steps: int, said: int, steps_ahead: int) -> None:
    """Waiting, in the middle of the prompt, at its end, decoding; beside one that must not notice."""
    engine, _ = make_engine(steps_ahead=steps_ahead, max_batched_tokens=8)
    engine.add_request([7] * 20, limit(12), request_id="victim")
    engine.add_request([8, 9], limit(12), request_id="other")
    for _ in range(steps):
        engine.step()
    out = engine.abort("victim")
    assert out is not None
    assert out.finish_reason == "abort"
    assert out.token_ids == answer([7] * 20, 12)[:said]
    assert out.text == text_of(out.token_ids)
    others_pages = 2 * 1  # ceil((2 + 12 - 1) / 16) in each of two layers
    assert engine.pool.num_used == (others_pages if steps else 0)
    assert engine.abort("victim") is None
    results = drain(engine)
    assert list(results) == ["other"]
    assert results["other"].token_ids == answer([8, 9], 12)
    assert_whole(engine)


def test_abort_after_the_end_and_of_nobody() -> None:
    engine, _ = make_engine()
    engine.add_request([1], limit(2), request_id="done")
    drain(engine)
    assert engine.abort("done") is None
    assert engine.abort("nobody") is None


@STEPS_AHEAD
def test_a_freed_place_goes_to_the_next_at_once(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead, max_num_seqs=1)
    engine.add_request([1], limit(100), request_id="long")
    engine.add_request([2], limit(3), request_id="next")
    engine.step()
    engine.abort("long")
    engine.step()
    assert runner.steps[-1] == ([], [("next", 1)])


# Ids and refusals


@STEPS_AHEAD
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_live_id_is_refused(steps: int, steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead, max_batched_tokens=8)
    engine.add_request([1] * 12, limit(9), request_id="name")
    for _ in range(steps):
        engine.step()
    with pytest.raises(ValueError, match="'name' is already live"):
        engine.add_request([2], limit(1), request_id="name")
    assert drain(engine)["name"].token_ids == answer([1] * 12, 9)
    engine.add_request([2], limit(1), request_id="name")
    assert drain(engine)["name"].token_ids == answer([2], 1)


def test_made_up_ids_avoid_live_ones() -> None:
    engine, _ = make_engine()
    engine.add_request([1], limit(2), request_id="request-0")
    made_up = engine.add_request([2], limit(2))
    assert made_up != "request-0"
    assert len(drain(engine)) == 2


REFUSED: list[tuple[object, str]] = [
    ("", "empty"),
    ([], "empty"),
    ([1] * 64, "64 tokens but the context holds 64"),
    ([VOCAB_SIZE], f"0 to {VOCAB_SIZE - 1}"),
    ([-1], "not -1"),
    ([1] * 33, "6 KV pages"),
]


@STEPS_AHEAD
@pytest.mark.parametrize(("prompt", "words"), REFUSED)
def test_a_refusal_touches_nothing(prompt: object, words: str, steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead, num_pages=4, context=64)
    engine.add_request([1, 2], limit(8), request_id="well")
    engine.step()
    with pytest.raises(RequestError, match=words) as refusal:
        engine.add_request(prompt, limit(8))  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)
    assert drain(engine)["well"].token_ids == answer([1, 2], 8)
    assert_whole(engine)


@STEPS_AHEAD
def test_too_large_for_the_pool_names_the_remedy(steps_ahead: int) -> None:
    """16 + 17 tokens are 2 pages a layer, 17 + 17 are 3; a page of this model is 4 KiB."""
    engine, _ = make_engine(steps_ahead=steps_ahead, num_pages=4)
    assert engine.generate([1] * 16, limit(17)).token_ids == answer([1] * 16, 17)
    with pytest.raises(RequestError, match=r"6 KV pages.*4 in all.*--kv-cache-mib 1$"):
        engine.generate([1] * 17, limit(17))
    assert engine.generate([2] * 16, limit(17)).token_ids == answer([2] * 16, 17)
    assert_whole(engine)


def test_generate_answers_a_list_around_its_refused_prompts() -> None:
    engine, _ = make_engine(num_pages=4, context=64)
    prompts = [[1, 2], *(prompt for prompt, _ in REFUSED), "hello", [3] * 20]
    outputs = engine.generate(prompts, limit(8))
    assert [out.finish_reason for out in outputs] == ["length", *["error"] * len(REFUSED), "length", "length"]
    for out, (_, words) in zip(outputs[1:], REFUSED, strict=False):
        assert words in out.error
    assert outputs[0].token_ids == answer([1, 2], 8)
    assert outputs[-2].token_ids == answer(list(b"hello"), 8)
    assert outputs[-1].token_ids == answer([3] * 20, 8)
    assert_whole(engine)


@STEPS_AHEAD
def test_params_for_each_prompt(steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead)
    outputs = engine.generate(PROMPTS[:3], [limit(2), limit(5), limit(1)])
    assert [len(out.token_ids) for out in outputs] == [2, 5, 1]
    with pytest.raises(RequestError, match="3 prompts but 2"):
        engine.generate(PROMPTS[:3], [limit(2), limit(5)])
    assert engine.generate([]) == []
    assert_whole(engine)


@STEPS_AHEAD
def test_generate_interrupted_leaves_nothing(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead, max_num_seqs=2)
    runner.raise_at = {3: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, limit(20))
    assert_whole(engine)
    assert engine.generate(PROMPTS[0], limit(5)).token_ids == answer(PROMPTS[0], 5)


# Streams


@STEPS_AHEAD
def test_stream_gives_token_by_token(steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead)
    outputs = list(engine.stream("grüß dich", limit(20)))
    expected = answer(list("grüß dich".encode()), 20)
    assert [out.token_id for out in outputs] == expected
    assert "".join(out.text for out in outputs) == text_of(expected)
    assert [out.result is None for out in outputs] == [True] * 19 + [False]
    assert outputs[-1].result.token_ids == expected
    assert_whole(engine)


def test_stream_refuses_at_the_call() -> None:
    engine, _ = make_engine()
    with pytest.raises(RequestError, match="empty"):
        engine.stream("")


@STEPS_AHEAD
@pytest.mark.parametrize("taken", [1, 5])
def test_a_stream_closed_early_aborts(taken: int, steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead)
    stream = engine.stream([1, 2], limit(50))
    for _ in range(taken):
        next(stream)
    assert engine.pool.num_used > 0
    stream.close()
    assert_whole(engine)


@STEPS_AHEAD
def test_others_go_on_beside_a_stream(steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead)
    other = engine.add_request([5], limit(4))
    streamed = [out.token_id for out in engine.stream([1, 2], limit(9))]
    assert streamed == answer([1, 2], 9)
    outputs = engine.step()
    assert [out.token_id for out in outputs if out.request_id == other] == answer([5], 4)
    assert_whole(engine)


@STEPS_AHEAD
def test_two_streams_take_turns(steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead)
    pairs = list(zip(engine.stream([1], limit(6)), engine.stream([2], limit(6)), strict=True))
    assert [a.token_id for a, _ in pairs] == answer([1], 6)
    assert [b.token_id for _, b in pairs] == answer([2], 6)
    assert_whole(engine)


@STEPS_AHEAD
def test_generate_beside_a_stream(steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead)
    stream = engine.stream([1], limit(6))
    tokens = [next(stream).token_id]
    assert engine.generate([2], limit(9)).token_ids == answer([2], 9)
    tokens += [out.token_id for out in stream]
    assert tokens == answer([1], 6)
    assert_whole(engine)


@STEPS_AHEAD
def test_a_stream_ends_when_its_request_is_aborted(steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead)
    stream = engine.stream([1], limit(6))
    request_id = next(stream).request_id
    engine.abort(request_id)
    assert [out.result.finish_reason for out in stream if out.result is not None] == ["abort"]
    assert_whole(engine)


def test_a_stream_never_started_aborts_too() -> None:
    engine, _ = make_engine()
    engine.stream([1], limit(6)).close()
    assert_whole(engine)


@STEPS_AHEAD
def test_an_interrupted_step_keeps_what_was_held_for_others(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead)
    other = engine.add_request([5], limit(3))
    list(engine.stream([1, 2], limit(4)))
    late = engine.add_request([6], limit(3))
    runner.raise_at = {len(runner.steps): KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert set(drain(engine)) == {other, late}


@STEPS_AHEAD
def test_a_stream_dropped_in_the_middle_of_a_step(steps_ahead: int) -> None:
    """As the garbage collector may do it; here the clock does, which the scheduler reads while it admits."""
    engine, _ = make_engine(steps_ahead=steps_ahead)
    streams = [engine.stream([1], limit(6))]
    other = engine.add_request([2], limit(6))

    def clock() -> float:
        streams.clear()
        return 0.0

    engine.scheduler._clock = clock
    assert drain(engine)[other].token_ids == answer([2], 6)
    assert_whole(engine)


# Long


def soak(engine: Engine, rng: random.Random, num_requests: int) -> int:
    """Random requests, a few at each step, a tenth of them aborted at a random moment; counts the rest.

    Half of them may end before their last token.
    """
    live: list[str] = []
    expected: dict[str, list[int]] = {}
    completed = 0

    def see(outputs: list[StepOutput]) -> None:
        nonlocal completed
        for result in (out.result for out in outputs if out.result is not None):
            assert result.token_ids == expected.pop(result.request_id)
            completed += 1

    for i in range(num_requests):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 48))]
        new = rng.randint(1, 24)
        stop_ids = SOME_IDS if rng.random() < 0.5 else ()
        request_id = engine.add_request(prompt, limit(new, stop_token_ids=stop_ids))
        expected[request_id] = answer(prompt, new, stop_ids)
        live.append(request_id)
        if rng.random() < 0.1:
            victim = live.pop(rng.randrange(max(0, len(live) - 30), len(live)))
            engine.abort(victim)
            expected.pop(victim, None)
        if i % 3 == 0:
            see(engine.step())
    while engine.has_work:
        see(engine.step())
    assert expected == {}
    return completed


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_soak(batching: str) -> None:
    """20,000 requests leave the pool whole and the memory where it was, however far steps run ahead."""
    engine, runner = make_engine(
        num_pages=160, max_num_seqs=24, max_batched_tokens=100, batching=batching, eos_token_ids=()
    )
    rng = random.Random(1)
    tracemalloc.start()
    try:
        in_use, completed = [], 0
        for _ in range(10):
            runner.steps_ahead = rng.randrange(3)
            completed += soak(engine, rng, 2000)
            assert_whole(engine)
            runner.steps.clear()
            in_use.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert completed > 17_000
    # The first round fills caches of the interpreter; one leaked sequence a round in ten would show.
    growth = [later - earlier for earlier, later in itertools.pairwise(in_use[1:])]
    assert sum(growth) < 64 * 1024, in_use
