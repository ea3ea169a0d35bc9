"""Constrained answers: what may come next depends on what came, however far steps run ahead.

The constraint of these tests is a small automaton that knows nothing of text, so that what an answer must be
can be said token by token; the fake model stores K and V in real pages.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_model import STEPS_AHEAD, VOCAB_SIZE, make_engine, next_token, sampled_token
from harness import make_tiny_engine
from samir_vllm.engine import Engine
from samir_vllm.errors import RequestError
from samir_vllm.outputs import RequestOutput
from samir_vllm.sampling import SamplingParams, TokenSampling


class Choosy:
    """Allows a seventh of all tokens, which depends on those so far; complete after ``length``."""

    def __init__(self, length: int = 1000, salt: int = 0) -> None:
        self.length, self.salt = length, salt
        self.token_ids: list[int] = []
        self.fails_at: tuple[str, int] | None = None  # what, and after how many tokens

    def allows(self, token_id: int) -> bool:
        return zlib.crc32(bytes(str((self.salt, token_id, self.token_ids)), "ascii")) % 7 == 0

    def fill_mask(self, mask: np.ndarray) -> None:
        if self.fails_at == ("mask", len(self.token_ids)):
            raise RuntimeError("no mask\ntoday")
        bits = np.zeros(len(mask) * 32, bool)
        bits[:VOCAB_SIZE] = [self.allows(i) for i in range(VOCAB_SIZE)]
        if self.fails_at == ("nothing", len(self.token_ids)):
            bits[:] = False
        mask[:] = np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token_id: int) -> bool:
        if self.fails_at == ("accept", len(self.token_ids)):
            raise RuntimeError("can't go on")
        if self.fails_at == ("nothing", len(self.token_ids)):
            return False
        assert self.allows(token_id)
        self.token_ids.append(token_id)
        return True

    @property
    def is_complete(self) -> bool:
        return len(self.token_ids) >= self.length


def expected(prompt: Sequence[int], max_tokens: int, constraint: Choosy) -> list[int]:
    """Token by token."""
    ids = list(prompt)
    while len(ids) - len(prompt) < max_tokens and not constraint.is_complete:
        token = next_token(ids)
        while not constraint.allows(token):
            token = (token + 1) % VOCAB_SIZE
        constraint.accept(token)
        ids.append(token)
    return ids[len(prompt) :]


def run(engine: Engine) -> dict[str, RequestOutput]:
    results = {}
    while engine.has_work:
        for out in engine.step():
            if out.result is not None:
                results[out.request_id] = out.result
    engine.pool.check_integrity()
    assert engine.pool.num_used == 0
    assert engine._num_constrained == 0
    return results


@STEPS_AHEAD
def test_an_answer_is_made_of_what_is_allowed(steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=40), constraint=Choosy)
    (result,) = run(engine).values()
    assert result.token_ids == expected([1, 2, 3], 40, Choosy())
    assert result.finish_reason == "length"


@STEPS_AHEAD
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 30), st.booleans()), min_size=1, max_size=8
    ),
    max_num_seqs=st.integers(1, 6),
)
def test_in_company(steps_ahead: int, lengths: list[tuple[int, int, bool]], max_num_seqs: int) -> None:
    """Constrained or not, everybody gets what it would get alone."""
    engine, _ = make_engine(steps_ahead=steps_ahead, num_pages=40, max_num_seqs=max_num_seqs)
    want = {}
    for salt, (length, max_tokens, is_constrained) in enumerate(lengths):
        prompt = [salt, *range(length)]
        make = partial(Choosy, length, salt)
        name = engine.add_request(
            prompt, SamplingParams(max_tokens=max_tokens), constraint=make if is_constrained else None
        )
        if is_constrained:
            want[name] = (
                expected(prompt, max_tokens, make()),
                "stop" if length <= max_tokens else "length",
            )
        else:
            ids = list(prompt)
            for _ in range(max_tokens):
                ids.append(next_token(ids))
            want[name] = (ids[len(prompt) :], "length")
    found = {name: (result.token_ids, result.finish_reason) for name, result in run(engine).items()}
    assert found == want


@STEPS_AHEAD
def test_a_complete_answer_ends_with_its_last_token_in_the_text(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead)
    stream = engine.stream([7], SamplingParams(max_tokens=50), constraint=lambda: Choosy(4))
    outputs = list(stream)
    result = outputs[-1].result
    assert result is not None
    assert (len(result.token_ids), result.finish_reason, result.stop_reason) == (4, "stop", None)
    assert "".join(out.text for out in outputs) == result.text
    assert result.text == engine.tokenizer.decode(result.token_ids)
    assert len(runner.steps) <= 4 + steps_ahead


@STEPS_AHEAD
def test_complete_at_the_last_token_is_no_cut(steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead)
    result = next(iter(_results(engine, [7], SamplingParams(max_tokens=4), Choosy(4))))
    assert result.finish_reason == "stop"


def _results(
    engine: Engine, prompt: list[int], params: SamplingParams, constraint: Choosy
) -> list[RequestOutput]:
    engine.add_request(prompt, params, constraint=lambda: constraint)
    return list(run(engine).values())


@STEPS_AHEAD
def test_sampled_answers_each_with_a_constraint_of_its_own(steps_ahead: int) -> None:
    engine, _ = make_engine(samples=True, steps_ahead=steps_ahead)
    params = SamplingParams(max_tokens=20, temperature=1.2, seed=5, n=3, presence_penalty=1.5)
    engine.add_request([9, 8], params, constraint=Choosy)
    (result,) = run(engine).values()
    for index, completion in enumerate(result.completions):
        constraint, ids = Choosy(), [9, 8]
        for _ in range(20):
            mask = np.array([constraint.allows(i) for i in range(VOCAB_SIZE)])
            ids.append(sampled_token(ids, 2, TokenSampling(params, 5, index), mask))
            constraint.accept(ids[-1])
        assert completion.token_ids == ids[2:]


@STEPS_AHEAD
@pytest.mark.parametrize(
    ("fails_at", "error"),
    [
        (("mask", 3), "its constraint failed: no mask today"),
        (("accept", 3), "its constraint refused the token that was chosen"),
        (("nothing", 3), "its constraint refused the token that was chosen"),
        (("mask", 0), "its constraint failed: no mask today"),
    ],
)
def test_a_constraint_that_fails_ends_its_own_answer_only(
    steps_ahead: int, fails_at: tuple[str, int], error: str
) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead)
    bad = Choosy(salt=1)
    bad.fails_at = fails_at
    params = SamplingParams(max_tokens=12)
    names = [engine.add_request([i], params, constraint=c) for i, c in enumerate([Choosy, lambda: bad, None])]  # type: ignore[list-item]
    results = run(engine)
    first, broken, free = (results[name] for name in names)
    assert first.token_ids == expected([0], 12, Choosy())
    assert (broken.finish_reason, broken.error) == ("error", error)
    assert broken.token_ids[:3] == expected([1], 3, Choosy(salt=1))[: fails_at[1]]
    assert free.finish_reason == "length"


@STEPS_AHEAD
@pytest.mark.parametrize("how", ["raise_at", "raise_late", "raise_forward"])
@pytest.mark.parametrize("run_number", [0, 1, 4])
def test_a_step_that_fails(steps_ahead: int, how: str, run_number: int) -> None:
    """Its own sequences end; who comes later is served."""
    engine, runner = make_engine(steps_ahead=steps_ahead, max_num_seqs=2)
    getattr(runner, how)[run_number] = RuntimeError("broke")
    params = SamplingParams(max_tokens=8)
    names = [engine.add_request([i], params, constraint=Choosy if i % 2 else None) for i in range(4)]
    results = run(engine)
    assert [results[name].finish_reason for name in names] == ["error"] * 2 + ["length"] * 2
    assert results[names[3]].token_ids == expected([3], 8, Choosy())


@STEPS_AHEAD
def test_many_at_once(steps_ahead: int) -> None:
    """One of them fails."""
    engine, _ = make_engine(steps_ahead=steps_ahead, num_pages=100)
    made = [Choosy(salt=i) for i in range(21)]
    made[13].fails_at = ("mask", 2)
    params = SamplingParams(max_tokens=6)
    names = [engine.add_request([i], params, constraint=lambda i=i: made[i]) for i in range(21)]  # type: ignore[misc]
    results = run(engine)
    assert results[names.pop(13)].error == "its constraint failed: no mask today"
    for i, name in zip([*range(13), *range(14, 21)], names, strict=True):
        assert results[name].token_ids == expected([i], 6, Choosy(salt=i))


@STEPS_AHEAD
def test_aborts(steps_ahead: int) -> None:
    """At every moment; the other answer isn't touched."""
    for moment in range(8):
        engine, _ = make_engine(steps_ahead=steps_ahead)
        params = SamplingParams(max_tokens=10)
        victim, other = (engine.add_request([i], params, constraint=Choosy) for i in range(2))
        results = {}
        for number in range(100):
            if number == moment:
                engine.abort(victim)
            if not engine.has_work:
                break
            results.update({out.request_id: out.result for out in engine.step() if out.result})
        assert results[other].token_ids == expected([1], 10, Choosy())
        assert engine.pool.num_used == 0


def test_min_tokens_and_a_constraint_contradict_each_other() -> None:
    engine, _ = make_engine()
    with pytest.raises(RequestError, match="min_tokens can't be combined with a constraint"):
        engine.add_request([1], SamplingParams(min_tokens=1), constraint=Choosy)


@STEPS_AHEAD
def test_nan_is_still_seen(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead)
    name = engine.add_request([1], SamplingParams(max_tokens=9), constraint=Choosy)
    runner.nan_at[name] = 2
    result = run(engine)[name]
    assert result.finish_reason == "error"
    assert "NaN" in (result.error or "")


class EvenTokens:
    """Allows even tokens, and completes never."""

    def fill_mask(self, mask: np.ndarray) -> None:
        mask[:] = 0x55555555

    def accept(self, token_id: int) -> bool:
        return token_id % 2 == 0

    is_complete = False


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_model_itself(temperature: float) -> None:
    """On the NumPy backend: log-probabilities are those of the raw logits, whatever was masked."""
    engine = make_tiny_engine()
    params = SamplingParams(
        max_tokens=12, temperature=temperature, seed=3, logprobs=3, prompt_logprobs=0, ignore_eos=True
    )
    free = engine.generate([5, 6, 7], params)
    names = [engine.add_request([5, 6, 7], params, constraint=c) for c in (EvenTokens, None)]  # type: ignore[list-item]
    results: dict[str, RequestOutput] = {}
    while engine.has_work:
        results.update({out.request_id: out.result for out in engine.step() if out.result})
    bound, other = (results[name] for name in names)
    assert (other.token_ids, other.logprobs) == (free.token_ids, free.logprobs)
    assert bound.prompt_logprobs == free.prompt_logprobs
    assert all(token % 2 == 0 for token in bound.token_ids)
    assert bound.logprobs is not None
    assert free.logprobs is not None
    assert bound.logprobs[0].top == free.logprobs[0].top
    best_even = [p.token_id == next((i for i, _ in p.top if i % 2 == 0), p.token_id) for p in bound.logprobs]
    assert temperature > 0 or all(best_even)
