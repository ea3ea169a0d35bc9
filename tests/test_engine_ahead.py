"""Steps that are launched before the results of earlier ones are read: in which order, and what goes wrong.

That nobody's answer depends on it, ``test_engine_fake`` and its neighbours show.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_model import (
    STEPS_AHEAD,
    VOCAB_SIZE,
    ByteTokenizer,
    FakeRunner,
    answer,
    logprobs_of,
    make_engine,
    sampled_answer,
)
from samir_vllm import Engine, SamplingParams, StepOutput
from samir_vllm.outputs import RequestOutput, StepRecord
from samir_vllm.sequence import ScheduledStep, StepResult

AHEAD = pytest.mark.parametrize("steps_ahead", [1, 2])
EVERY_NINTH = list(range(0, VOCAB_SIZE, 9))


def limit(max_tokens: int, **others: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **others)  # type: ignore[arg-type]


def drain(engine: Engine) -> list[StepOutput]:
    """All that is told, whatever Ctrl-C comes in between."""
    outputs = []
    for _ in range(1000):
        if not engine.has_work:
            break
        with suppress(KeyboardInterrupt):
            outputs += engine.step()
    return outputs


def results_of(outputs: list[StepOutput]) -> dict[str, RequestOutput]:
    found = [out.result for out in outputs if out.result is not None]
    assert len({result.request_id for result in found}) == len(found)
    return {result.request_id: result for result in found}


def tokens_of(outputs: list[StepOutput], request_id: str) -> list[int]:
    return [out.token_id for out in outputs if out.request_id == request_id and out.token_id is not None]


def assert_whole(engine: Engine) -> None:
    """Nobody is live, and every page is free but for what is retained."""
    engine.drop_retained_kv()
    engine.pool.check_integrity()
    assert engine.pool.num_used == 0
    assert not engine.has_work
    assert engine._requests == {}
    assert engine._answers == {}


# In which order


class Diary:
    """Writes down when steps are launched and read, and when a token becomes text."""

    def __init__(self, engine: Engine, runner: FakeRunner) -> None:
        self.events: list[str] = []
        self._launch = runner.launch
        self._steps, self._texts = itertools.count(), itertools.count()
        self._make_decoder = engine.tokenizer.stream_decoder
        runner.launch = self.launch  # type: ignore[method-assign]
        engine.tokenizer.stream_decoder = self.stream_decoder  # type: ignore[method-assign,assignment]

    def launch(self, step: ScheduledStep) -> Callable[[], StepResult]:
        number, result = next(self._steps), self._launch(step)
        self.events.append(f"launch {number}")

        def read() -> StepResult:
            self.events.append(f"read {number}")
            return result()

        return read

    def stream_decoder(self) -> object:
        decoder = self._make_decoder()
        push = decoder.push

        def push_and_tell(token_id: int) -> str:
            self.events.append(f"text {next(self._texts)}")
            return push(token_id)

        decoder.push = push_and_tell  # type: ignore[method-assign]
        return decoder


@pytest.mark.parametrize(
    ("steps_ahead", "expected"),
    [
        (
            0,
            "launch 0, read 0, text 0, launch 1, read 1, text 1, "
            "launch 2, read 2, text 2, launch 3, read 3, text 3",
        ),
        (
            1,
            "launch 0, launch 1, read 0, launch 2, text 0, read 1, launch 3, text 1, "
            "read 2, text 2, read 3, text 3",
        ),
        (
            2,
            "launch 0, launch 1, launch 2, read 0, launch 3, text 0, read 1, text 1, "
            "read 2, text 2, read 3, text 3",
        ),
    ],
)
def test_the_next_step_is_launched_before_results_are_read_and_text_is_made(
    steps_ahead: int, expected: str
) -> None:
    """Four tokens, four steps: none is launched that could only make a fifth."""
    engine, runner = make_engine(steps_ahead=steps_ahead)
    diary = Diary(engine, runner)
    request_id = engine.add_request([1, 2], limit(4))
    told = []
    for _ in range(4):
        outputs = engine.step()
        assert len(outputs) == 1  # a step's results come with its call
        told += outputs
    assert not engine.has_work
    assert ", ".join(diary.events) == expected
    assert tokens_of(told, request_id) == answer([1, 2], 4)


@STEPS_AHEAD
def test_a_step_has_only_those_whose_last_token_is_not_under_way(steps_ahead: int) -> None:
    """They join and leave at the same steps however far these run ahead; the fourth waits for a result."""
    engine, runner = make_engine(steps_ahead=steps_ahead, max_num_seqs=3)
    for name, new in [("a", 1), ("b", 3), ("c", 5), ("d", 2)]:
        engine.add_request([ord(name)], limit(new), request_id=name)
    outputs = drain(engine)
    for name, new in [("a", 1), ("b", 3), ("c", 5), ("d", 2)]:
        assert tokens_of(outputs, name) == answer([ord(name)], new)
        assert sum(name in decodes for decodes, _ in runner.steps) == new - 1
    assert runner.steps[0] == ([], [("a", 1), ("b", 1), ("c", 1)])
    admission = next(i for i, (_, prefills) in enumerate(runner.steps) if ("d", 1) in prefills)
    assert admission == 1 + steps_ahead  # the first launch after the result of step 0
    assert_whole(engine)


@STEPS_AHEAD
@pytest.mark.parametrize("place", [0, 1, 5])
def test_a_stop_id_costs_the_steps_under_way_and_no_page(place: int, steps_ahead: int) -> None:
    prompt = [3, 1, 4]
    whole = answer(prompt, 40)
    stop = whole[place]
    expected = whole[: whole.index(stop) + 1]
    engine, runner = make_engine(steps_ahead=steps_ahead)
    request_id = engine.add_request(prompt, limit(40, stop_token_ids=[stop]))
    outputs = drain(engine)
    assert results_of(outputs)[request_id].token_ids == expected
    assert len(runner.steps) == len(expected) + steps_ahead
    table = runner.block_tables[0]
    stored = runner.kv[table].reshape(len(table), -1)
    written = [*prompt, *expected[:-1]]
    assert (stored[:, : len(written)] == written).all()
    assert (stored[:, len(written) :] == -1).all()
    assert_whole(engine)


@STEPS_AHEAD
def test_a_stop_string_costs_the_steps_launched_before_the_text_was_made(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead)
    runner.says = [*b"abcdef"]
    result = engine.generate([1], limit(50, stop="cd"))
    assert (result.text, len(result.token_ids)) == ("ab", 4)
    assert len(runner.steps) == 4 + (steps_ahead + 1 if steps_ahead else 0)
    assert_whole(engine)


@STEPS_AHEAD
def test_times_come_in_order(steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead, max_num_seqs=1)
    for result in engine.generate([[1, 2], [3]], limit(5)):
        m = result.metrics
        assert None not in (m.queue_time, m.time_to_first_token, m.time_per_output_token)
        assert 0 <= m.queue_time <= m.time_to_first_token <= m.total_time  # type: ignore[operator]
        later = m.time_per_output_token * 4  # type: ignore[operator]
        assert m.time_to_first_token + later == pytest.approx(m.total_time)  # type: ignore[operator]
        assert m.num_pages == 2


# Steps that are under way for nobody


@AHEAD
def test_idle_with_dead_steps_under_way(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead)
    engine.add_request([1], limit(50), request_id="dead")
    engine.add_request([2], limit(50), request_id="dead, too")
    engine.step()
    for name in ("dead", "dead, too"):
        assert engine.abort(name) is not None
    assert len(engine._launched) == steps_ahead + 1
    assert_whole(engine)
    assert not engine.wait_for_work(0)
    engine.add_request([3], limit(5), request_id="lives")
    assert engine.wait_for_work(0)
    outputs = drain(engine)
    assert {out.request_id for out in outputs} == {"lives"}
    assert tokens_of(outputs, "lives") == answer([3], 5)
    assert all("dead" not in decodes for decodes, _ in runner.steps[2 + steps_ahead :])
    assert_whole(engine)
    assert not engine._launched


@AHEAD
def test_a_step_of_an_idle_engine_tells_nothing(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead)
    engine.stream([1], limit(50)).close()
    stream = engine.stream([1], limit(50))
    next(stream)
    stream.close()
    launched = len(runner.steps)
    for _ in range(steps_ahead + 2):
        assert engine.step() == []
    assert len(runner.steps) == launched
    assert not engine._launched


@AHEAD
def test_a_failure_for_nobody_is_nobodys(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead)
    runner.raise_late = {1: RuntimeError("too late")}
    engine.add_request([1], limit(50), request_id="dead")
    engine.step()
    engine.abort("dead")
    engine.add_request([2], limit(5), request_id="dead")
    outputs = drain(engine)
    assert tokens_of(outputs, "dead") == answer([2], 5)
    assert results_of(outputs)["dead"].finish_reason == "length"
    assert_whole(engine)


@AHEAD
@pytest.mark.parametrize("end", ["abort", "stop id", "stop string", "NaN"])
def test_an_id_is_free_at_once(end: str, steps_ahead: int) -> None:
    """Its heir takes id, slot and pages while steps are under way that have tokens for the old one."""
    engine, runner = make_engine(steps_ahead=steps_ahead, max_num_seqs=1, num_pages=8, samples=True)
    wishes = {"temperature": 1.0, "seed": 3, "logprobs": 1, "prompt_logprobs": 0}
    old = sampled_answer([1, 2], limit(40, **wishes))
    wish = {
        "stop id": {"stop_token_ids": [old[3]]},
        "stop string": {"stop": ByteTokenizer().decode(old[1:4])},
    }.get(end, {})
    if end == "NaN":
        runner.nan_at = {"name": 3}
    engine.add_request([1, 2], limit(40, **wishes, **wish), request_id="name")
    outputs: list[StepOutput] = []
    while len(tokens_of(outputs, "name")) < 3:
        outputs += engine.step()
    if end == "abort":
        assert engine.abort("name") is not None
    else:
        outputs += engine.step()
        assert "name" in results_of(outputs)
    assert engine._launched
    runner.nan_at = {}
    prompt = [7] * 20
    params = limit(9, **wishes | {"logprobs": 2})
    engine.add_request(prompt, params, request_id="name")
    outputs = drain(engine)
    expected = sampled_answer(prompt, params)
    result = results_of(outputs)["name"]
    assert result.token_ids == tokens_of(outputs, "name") == expected
    said = [*prompt, *expected]
    assert result.logprobs == [logprobs_of(said[:i], said[i], 2) for i in range(20, 29)]
    assert result.prompt_logprobs == [None, *(logprobs_of(said[:i], said[i], 0) for i in range(1, 20))]
    assert_whole(engine)


@AHEAD
@pytest.mark.parametrize("has_heir", [False, True])
def test_prompt_logprobs_under_way_at_the_end_are_nobodys(has_heir: bool, steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead, max_batched_tokens=8)
    engine.add_request(list(range(60)), limit(5, prompt_logprobs=2), request_id="name")
    engine.step()
    engine.step()
    result = engine.abort("name")
    assert result is not None
    known = [p is not None for p in result.prompt_logprobs or []]
    assert known == [False] + [True] * 16 + [False] * 43
    engine.add_request([9] * 40, limit(3, prompt_logprobs=1), request_id="name" if has_heir else "another")
    [result] = results_of(drain(engine)).values()
    assert result.prompt_logprobs == [None, *(logprobs_of([9] * i, 9, 1) for i in range(1, 40))]
    assert_whole(engine)


@STEPS_AHEAD
@pytest.mark.parametrize("steps", range(7))
def test_retained_kv_may_be_dropped_at_any_moment(steps: int, steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead)
    prompt = list(range(40))
    *_, last = engine.stream(prompt, limit(5), retain_kv=True)
    said = [*prompt, *last.result.token_ids]  # type: ignore[union-attr]
    first = engine.add_request([*said, 1], limit(4), retain_kv=True)
    second = engine.add_request([*said, 2], limit(6), retain_kv=True)
    outputs = []
    for _ in range(steps):
        outputs += engine.step()
        if engine.abort("other") is None:
            engine.add_request(said[:30], limit(30), request_id="other", retain_kv=True)
    engine.drop_retained_kv()
    engine.pool.check_integrity()
    outputs += drain(engine)
    assert tokens_of(outputs, first) == answer([*said, 1], 4)
    assert tokens_of(outputs, second) == answer([*said, 2], 6)
    if steps % 2:
        assert results_of(outputs)["other"].token_ids == answer(said[:30], 30)
    assert_whole(engine)


# Failures


@STEPS_AHEAD
@pytest.mark.parametrize("failing", range(6))
@pytest.mark.parametrize("when", ["launch", "result"])
def test_a_failure_ends_those_in_the_step_and_loses_no_token(
    when: str, failing: int, steps_ahead: int
) -> None:
    """Tokens of the steps before it count, also of those under way; ``late`` waits, and is in none before."""
    engine, runner = make_engine(steps_ahead=steps_ahead, max_num_seqs=2)
    raises = runner.raise_at if when == "launch" else runner.raise_late
    raises[failing] = RuntimeError("the device\nis on fire")
    for name in ("a", "b", "late"):
        engine.add_request([ord(name[0])], limit(8), request_id=name)
    outputs = drain(engine)
    results = results_of(outputs)
    for name in ("a", "b"):
        assert results[name].finish_reason == "error"
        assert results[name].error == "RuntimeError: the device is on fire"
        assert results[name].token_ids == answer([ord(name)], failing)
    assert results["late"].token_ids == answer([ord("l")], 8)
    for name, result in results.items():
        assert tokens_of(outputs, name) == result.token_ids
        assert "".join(out.text for out in outputs if out.request_id == name) == result.text
    if when == "launch":  # nothing goes on top of what will fail
        for decodes, prefills in runner.steps[failing + 1 :]:
            assert {*decodes, *(name for name, _ in prefills)} == {"late"}
    assert_whole(engine)


@AHEAD
@pytest.mark.parametrize("when", ["launch", "result"])
def test_who_joined_above_a_failing_step_goes_on(when: str, steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead)
    engine.add_request([1], limit(20), request_id="old")
    engine.step()
    failing = len(runner.steps) - 1 if when == "result" else len(runner.steps)
    (runner.raise_late if when == "result" else runner.raise_at)[failing] = RuntimeError("broken")
    outputs: list[StepOutput] = []
    if when == "launch":
        outputs += engine.step()
    engine.add_request([2], limit(20), request_id="new")
    outputs += drain(engine)
    assert (["old"], [("new", 1)] if when == "result" else []) in runner.steps
    results = results_of(outputs)
    assert (results["old"].finish_reason, results["new"].finish_reason) == ("error", "length")
    assert results["old"].token_ids == answer([1], failing)
    assert results["new"].token_ids == answer([2], 20)
    assert_whole(engine)


@STEPS_AHEAD
def test_who_ended_before_the_failing_step_has_ended_well(steps_ahead: int) -> None:
    """Its stop id is in a step that is under way when the next one can't be launched."""
    prompt = [3, 1, 4]
    stop = answer(prompt, 9)[3]
    engine, runner = make_engine(steps_ahead=steps_ahead)
    runner.raise_at = {4: RuntimeError("broken")}
    engine.add_request(prompt, limit(9, stop_token_ids=[stop]), request_id="ends")
    engine.add_request([1], limit(9), request_id="fails")
    results = results_of(drain(engine))
    assert results["ends"].finish_reason == "stop"
    assert results["ends"].token_ids == answer(prompt, 4)
    assert results["fails"].finish_reason == "error"
    assert results["fails"].token_ids == answer([1], 4)
    assert_whole(engine)


# Ctrl-C


@STEPS_AHEAD
@pytest.mark.parametrize("moment", range(7))
@pytest.mark.parametrize("where", ["launch", "twice in the launch", "result", "schedule"])
def test_an_interruption_loses_nothing_and_tells_nothing_twice(
    where: str, moment: int, steps_ahead: int
) -> None:
    """Also where the results of one step are booked, and the interrupted launch is that of another."""
    engine, runner = make_engine(steps_ahead=steps_ahead, max_batched_tokens=8)
    numbers = [moment, moment + 1] if where.startswith("twice") else [moment]
    if where == "result":
        runner.raise_late = {number: KeyboardInterrupt() for number in numbers}
    elif where == "schedule":
        interrupt_schedule(engine, set(numbers))
    else:
        runner.raise_at = {number: KeyboardInterrupt() for number in numbers}
    for name, prompt in [("a", [1] * 12), ("b", [2] * 3)]:
        engine.add_request(prompt, limit(5), request_id=name)
    outputs = drain(engine)
    for name, prompt in [("a", [1] * 12), ("b", [2] * 3)]:
        assert tokens_of(outputs, name) == answer(prompt, 5)
        assert results_of(outputs)[name].token_ids == answer(prompt, 5)
    assert_whole(engine)


def interrupt_schedule(engine: Engine, calls: set[int]) -> None:
    """Ctrl-C in these calls of the scheduler, counted from 0: for the runner it comes between two steps."""
    schedule, numbers = engine.scheduler.schedule, itertools.count()

    def interrupted() -> ScheduledStep:
        if next(numbers) in calls:
            raise KeyboardInterrupt
        return schedule()

    engine.scheduler.schedule = interrupted  # type: ignore[method-assign]


@AHEAD
def test_the_last_token_is_told_after_an_interruption(steps_ahead: int) -> None:
    """Nothing waits and nothing runs any more, but one has not heard of its end."""
    engine, _ = make_engine(steps_ahead=steps_ahead)
    request_id = engine.add_request([1, 2], limit(1))
    interrupt_schedule(engine, {2})  # 0: the step; 1: no other beside it; 2: nor after it
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.has_work
    assert engine.wait_for_work(0)
    assert tokens_of(engine.step(), request_id) == answer([1, 2], 1)
    assert_whole(engine)


@AHEAD
def test_work_remains_while_the_last_result_is_to_come(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead)
    runner.raise_late = {0: KeyboardInterrupt()}
    request_id = engine.add_request([1, 2], limit(1))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.has_work
    assert tokens_of(engine.step(), request_id) == answer([1, 2], 1)
    assert len(runner.steps) == 1
    assert_whole(engine)


@AHEAD
def test_a_failure_is_told_after_an_interruption(steps_ahead: int) -> None:
    """One step can't be launched, and Ctrl-C comes while the one before is waited for."""
    engine, runner = make_engine(steps_ahead=steps_ahead)
    runner.raise_at = {1: RuntimeError("broken")}
    runner.raise_late = {0: KeyboardInterrupt()}
    request_id = engine.add_request([1, 2], limit(5))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    outputs = drain(engine)
    assert results_of(outputs)[request_id].finish_reason == "error"
    assert tokens_of(outputs, request_id) == answer([1, 2], 1)
    assert_whole(engine)


@AHEAD
@pytest.mark.parametrize("where", ["launch", "result"])
def test_abort_after_an_interruption_tells_what_was_booked(where: str, steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead)
    first_unread = 1 + steps_ahead  # launched with the results of step 0
    if where == "launch":
        runner.raise_at = {first_unread: KeyboardInterrupt()}
    else:
        runner.raise_late = {1: KeyboardInterrupt()}
    engine.add_request([1], limit(9), request_id="aborted")
    engine.add_request([2], limit(9), request_id="other")
    outputs: list[StepOutput] = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for _ in range(2):
            outputs += engine.step()
    result = engine.abort("aborted")
    assert result is not None
    assert result.token_ids == answer([1], 1)
    outputs += drain(engine)
    assert tokens_of(outputs, "aborted") == answer([1], 1)
    assert tokens_of(outputs, "other") == answer([2], 9)
    assert_whole(engine)


@AHEAD
@pytest.mark.parametrize("moment", range(6))
@pytest.mark.parametrize("where", ["launch", "result"])
def test_a_stream_goes_on_after_an_interruption(where: str, moment: int, steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead)
    (runner.raise_at if where == "launch" else runner.raise_late)[moment] = KeyboardInterrupt()
    stream = engine.stream([1], limit(6))
    told: list[int | None] = []
    interruptions = 0
    while True:
        try:
            told.append(next(stream).token_id)
        except KeyboardInterrupt:
            interruptions += 1
        except StopIteration:
            break
    assert interruptions == 1
    assert told == answer([1], 6)
    assert_whole(engine)


# All of it together


@dataclass(frozen=True)
class Wish:
    """A request, and what comes after it."""

    prompt: list[int]
    max_tokens: int
    stops: bool  # one of nine ids ends it
    nan_at: int | None
    retain_kv: bool
    steps: int  # until the next request
    aborts: int | None  # then: which one of those so far, counted from the last


@dataclass(frozen=True)
class Disaster:
    """What goes wrong in a run, by the number of the launch, or of the call of the scheduler."""

    at_launch: dict[int, str] = field(default_factory=dict)  # "failure" or "Ctrl-C"
    at_result: dict[int, str] = field(default_factory=dict)
    at_schedule: set[int] = field(default_factory=set)


WISHES = st.lists(
    st.builds(
        Wish,
        prompt=st.one_of(
            st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20),
            st.integers(1, 50).map(lambda n: list(range(n))),
        ),
        max_tokens=st.integers(1, 12),
        stops=st.booleans(),
        nan_at=st.one_of(st.none(), st.none(), st.integers(0, 6)),
        retain_kv=st.booleans(),
        steps=st.integers(0, 6),
        aborts=st.one_of(st.none(), st.none(), st.integers(0, 4)),
    ),
    min_size=1,
    max_size=8,
)
BLOWS = st.dictionaries(st.integers(0, 25), st.sampled_from(["failure", "Ctrl-C"]), max_size=4)
DISASTERS = st.builds(
    Disaster, at_launch=BLOWS, at_result=BLOWS, at_schedule=st.sets(st.integers(0, 30), max_size=4)
)


class Ordeal:
    """A run with its disasters, and what everybody was told."""

    def __init__(self, disaster: Disaster, **options: object) -> None:
        self.engine, self.runner = make_engine(**options)  # type: ignore[arg-type]
        raised: dict[str, Callable[[], BaseException]] = {
            "failure": lambda: RuntimeError("broken"),
            "Ctrl-C": KeyboardInterrupt,
        }
        self.runner.raise_at = {i: raised[what]() for i, what in disaster.at_launch.items()}
        self.runner.raise_late = {i: raised[what]() for i, what in disaster.at_result.items()}
        interrupt_schedule(self.engine, disaster.at_schedule)
        self.disaster = disaster
        self.records: list[StepRecord] = []
        self.engine.on_step = self.records.append
        self.outputs: list[StepOutput] = []
        self.aborted: dict[str, RequestOutput] = {}

    def step(self) -> None:
        with suppress(KeyboardInterrupt):
            self.outputs += self.engine.step()
        self.engine.pool.check_integrity()

    def run(self, wishes: list[Wish]) -> None:
        for number, wish in enumerate(wishes):
            name = str(number)
            if wish.nan_at is not None:
                self.runner.nan_at[name] = wish.nan_at
            params = limit(wish.max_tokens, stop_token_ids=EVERY_NINTH if wish.stops else [])
            self.engine.add_request(wish.prompt, params, request_id=name, retain_kv=wish.retain_kv)
            for _ in range(wish.steps):
                self.step()
            if wish.aborts is not None:
                victim = str(max(0, number - wish.aborts))
                result = self.engine.abort(victim)
                if result is not None:
                    self.aborted[victim] = result
        for _ in range(1000):
            if not self.engine.has_work:
                break
            self.step()
        assert_whole(self.engine)

    def check(self, name: str, wish: Wish) -> None:
        """It ended once and as it should, and every token was told once and in order."""
        mine = [out for out in self.outputs if out.request_id == name]
        ends = [out.result for out in mine if out.result is not None]
        if name in self.aborted:
            assert ends == []
            result = self.aborted[name]
            assert result.finish_reason == "abort"
        else:
            [result] = ends
            assert mine[-1].result is result
            assert "".join(out.text for out in mine) == result.text
        assert tokens_of(mine, name) == result.token_ids
        expected = answer(wish.prompt, wish.max_tokens, EVERY_NINTH if wish.stops else ())
        if wish.nan_at is not None:
            expected = expected[: wish.nan_at]
        if result.finish_reason in ("stop", "length"):
            assert result.token_ids == expected
            assert wish.nan_at is None or wish.nan_at >= len(result.token_ids)
        else:
            assert result.token_ids == expected[: len(result.token_ids)]
        if result.error is not None and "NaN" in result.error:
            assert len(result.token_ids) == wish.nan_at
        elif result.finish_reason == "error":
            assert name in self.failed()

    def failed(self) -> set[str]:
        """Those in a step that failed."""
        found: set[str] = set()
        for number, (decodes, prefills) in enumerate(self.runner.steps):
            if "failure" in (self.disaster.at_launch.get(number), self.disaster.at_result.get(number)):
                found |= {*decodes, *(name for name, _ in prefills)}
        return found

    def check_records(self) -> None:
        """Steps are told of once, in the order of the launches, but for those who had ended by then."""
        steps = iter(
            step
            for number, step in enumerate(self.runner.steps)
            if self.disaster.at_launch.get(number) != "Ctrl-C"
        )
        for rec in self.records:
            told = {*rec.decodes, *rec.prefills}
            assert any(told <= {*decodes, *prefills} for decodes, prefills in steps), "not in order, or twice"
        for earlier, later in itertools.pairwise(self.records):
            assert earlier.started <= earlier.ended <= later.started <= later.ended
        admitted: list[str] = []
        for rec in self.records:
            admitted += rec.admitted
            assert {*rec.decodes, *(name for name, _ in rec.prefills)} <= set(admitted)
        assert len(set(admitted)) == len(admitted)
        finished = [name for rec in self.records for name, _ in rec.finished]
        assert len(set(finished)) == len(finished)

    def check_recorded(self, name: str, wish: Wish) -> None:
        """The records have every step that gave it a token, and its prompt."""
        [num_tokens] = {len(r.token_ids) for r in self.results() if r.request_id == name}
        decodes = sum(name in rec.decodes for rec in self.records)
        assert decodes >= num_tokens - 1
        prefilled = sum(chunk for rec in self.records for who, chunk in rec.prefills if who == name)
        if num_tokens:
            [metrics] = {r.metrics for r in self.results() if r.request_id == name}
            assert prefilled == len(wish.prompt) - metrics.num_cached_tokens

    def results(self) -> list[RequestOutput]:
        return [*self.aborted.values(), *(out.result for out in self.outputs if out.result is not None)]


RUNS = given(
    wishes=WISHES,
    disaster=DISASTERS,
    steps_ahead=st.integers(0, 2),
    batching=st.sampled_from(["continuous", "static"]),
    num_pages=st.integers(8, 40),
    max_num_seqs=st.integers(1, 4),
    max_batched_tokens=st.integers(1, 60),
)


def suffer(wishes: list[Wish], disaster: Disaster, **options: object) -> None:
    ordeal = Ordeal(disaster, **options)
    ordeal.run(wishes)
    for number, wish in enumerate(wishes):
        ordeal.check(str(number), wish)
        ordeal.check_recorded(str(number), wish)
    ordeal.check_records()


@settings(max_examples=150, deadline=None)
@RUNS
def test_whatever_goes_wrong_everybody_is_told_everything_once(
    wishes: list[Wish], disaster: Disaster, **options: object
) -> None:
    suffer(wishes, disaster, **options)


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None)
@RUNS
def test_everybody_is_told_everything_once_in_thousands_of_runs(
    wishes: list[Wish], disaster: Disaster, **options: object
) -> None:
    suffer(wishes, disaster, **options)
