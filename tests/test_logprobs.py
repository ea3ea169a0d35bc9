"""Log-probabilities: of new tokens and of the prompt's, against FP64 and an independent implementation."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fake_model import STEPS_AHEAD, logprobs_of, make_engine, sampled_answer
from harness import TINY, RecordingBackend, make_tiny_engine
from samir_vllm import Engine, RequestOutput, SamplingParams, TokenLogprobs
from samir_vllm.backends import LOGPROB_ROWS
from samir_vllm.backends.numpy_backend import NumpyBackend
from samir_vllm.sampling import MAX_LOGPROBS

# Log-softmax in FP32 of logits up to about 10, over 512 tokens: some units in the last place of 10.
FP32_ATOL = 1e-5
# FP32 through 3 layers in another order of summation, as the logits themselves (test_llama.py).
GOLDEN_ATOL = 5e-4


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """FP64, over the last axis."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def assert_is(found: TokenLogprobs | None, token: int, logits: np.ndarray, count: int) -> None:
    """The log-probabilities that a row of raw logits gives."""
    assert found is not None
    expected = log_softmax(logits)
    assert found.token_id == token
    assert found.logprob == pytest.approx(expected[token], abs=FP32_ATOL)
    assert [i for i, _ in found.top] == np.argsort(-logits, kind="stable")[:count].tolist()
    for i, value in found.top:
        assert value == pytest.approx(expected[i], abs=FP32_ATOL)
        assert value <= 0
    assert found.logprob <= 0


def drain(engine: Engine) -> dict[str, RequestOutput]:
    """Steps until nothing is left; the results by id."""
    results: dict[str, RequestOutput] = {}
    while engine.has_work:
        results |= {out.request_id: out.result for out in engine.step() if out.result is not None}
    return results


def recording_engine(**options: Any) -> tuple[Engine, list[np.ndarray]]:
    engine = make_tiny_engine(backend_class=RecordingBackend, **options)
    return engine, engine._runner.backend.raw  # type: ignore[attr-defined]


# New tokens

WISHES = {
    "greedy": SamplingParams(),
    "greedy, biased": SamplingParams(logit_bias={3: 50.0, 4: -50.0}),
    "greedy, min_tokens": SamplingParams(min_tokens=5, stop_token_ids=list(range(100))),
    "sampled": SamplingParams(temperature=1.0, seed=3),
    "filtered": SamplingParams(temperature=0.8, top_k=5, top_p=0.5, min_p=0.1, seed=4),
    "penalised": SamplingParams(
        temperature=1.0, repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0, seed=5
    ),
}


@pytest.mark.parametrize("count", [0, 1, 7, MAX_LOGPROBS])
@pytest.mark.parametrize("name", WISHES)
def test_logprobs_are_log_softmax_of_the_raw_logits(name: str, count: int) -> None:
    engine, raw = recording_engine()
    params = replace(WISHES[name], max_tokens=8, ignore_eos=True, logprobs=count)
    result = engine.generate([1, 2, 3], params)
    assert result.logprobs is not None
    assert len(result.logprobs) == len(result.token_ids) == len(raw)
    for found, token, logits in zip(result.logprobs, result.token_ids, raw, strict=True):
        assert_is(found, token, logits[0], count)
    without = make_tiny_engine().generate([1, 2, 3], replace(params, logprobs=None))
    assert without.token_ids == result.token_ids
    assert without.logprobs is None


def test_each_request_of_a_batch_gets_its_own() -> None:
    """Different counts, and none, greedy and not, side by side: as if alone."""
    all_params = [
        SamplingParams(max_tokens=6, logprobs=3),
        SamplingParams(max_tokens=6),
        SamplingParams(max_tokens=6, temperature=1.0, repetition_penalty=1.5, seed=1, logprobs=0),
        SamplingParams(max_tokens=6, temperature=1.0, seed=2),
        SamplingParams(max_tokens=4, temperature=1.0, seed=3, logprobs=20, prompt_logprobs=2),
        SamplingParams(max_tokens=6, prompt_logprobs=0),
    ]
    all_params = [replace(p, ignore_eos=True) for p in all_params]
    prompts = [[i, 2 * i, 7] * (i + 1) for i in range(6)]
    together = make_tiny_engine(max_batched_tokens=10).generate(prompts, all_params)
    for prompt, params, result in zip(prompts, all_params, together, strict=True):
        alone = make_tiny_engine().generate(prompt, params)
        assert result.token_ids == alone.token_ids
        assert result.logprobs == alone.logprobs
        assert result.prompt_logprobs == alone.prompt_logprobs
        assert (result.logprobs is None) == (params.logprobs is None)


def test_a_slot_forgets_who_wanted_them() -> None:
    engine = make_tiny_engine(max_num_seqs=1)
    first = engine.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2))
    second = engine.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    assert first.logprobs is not None
    assert second.logprobs is None
    assert not engine._runner._logprob_seqs  # type: ignore[attr-defined]


@STEPS_AHEAD
def test_n_answers_have_their_own(steps_ahead: int) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=5, n=3, logprobs=2, prompt_logprobs=1)
    engine, _ = make_engine(steps_ahead=steps_ahead, samples=True, max_num_seqs=2)
    result = engine.generate([1, 2, 3], params)
    for index, c in enumerate(result.completions):
        assert c.token_ids == sampled_answer([1, 2, 3], params, index=index)
        ids = [1, 2, 3]
        for token, found in zip(c.token_ids, c.logprobs or [], strict=True):
            assert found == logprobs_of(ids, token, 2)
            ids.append(token)
    assert result.logprobs == result.completions[0].logprobs
    assert result.prompt_logprobs == [None, logprobs_of([1], 2, 1), logprobs_of([1, 2], 3, 1)]


@STEPS_AHEAD
def test_they_end_with_the_tokens(steps_ahead: int) -> None:
    """One for each token, what ended it included; none for a NaN."""
    engine, runner = make_engine(steps_ahead=steps_ahead, eos_token_ids=(0,))
    runner.says = [*b"abcd", 0]
    wishes = SamplingParams(max_tokens=9, logprobs=1)
    for params, count in [(wishes, 5), (replace(wishes, stop="bc"), 3), (replace(wishes, max_tokens=2), 2)]:
        result = engine.generate([1], params)
        assert result.logprobs is not None
        assert [p.token_id for p in result.logprobs] == result.token_ids
        assert len(result.token_ids) == count
    runner.nan_at = {"bad": 2}
    engine.add_request([1], wishes, request_id="bad")
    engine.add_request([2], wishes, request_id="good")
    results = drain(engine)
    assert (results["bad"].finish_reason, len(results["bad"].logprobs or [])) == ("error", 2)
    assert len(results["good"].logprobs or []) == 5


def test_a_row_of_nan_has_none_and_spoils_no_other() -> None:
    """In NumPy, where the backend meets it: the token -1 is no index."""
    engine = make_tiny_engine()
    healthy = engine.generate([5, 6], SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2))
    backend = engine._runner.backend  # type: ignore[attr-defined]
    choose = backend.choose_tokens

    def choose_nan(logits: np.ndarray, inputs: Any, masks: Any) -> np.ndarray:
        if len(logits) == 2 and inputs.num_outputs[0] == 2:
            logits[0] = np.nan
        return choose(logits, inputs, masks)

    backend.choose_tokens = choose_nan
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2)
    bad, good = engine.generate([[1, 2], [5, 6]], params)
    assert (bad.finish_reason, len(bad.logprobs or [])) == ("error", 2)
    assert (good.token_ids, good.logprobs) == (healthy.token_ids, healthy.logprobs)


@STEPS_AHEAD
@pytest.mark.parametrize("run", range(5))
def test_a_step_that_runs_again_counts_once(run: int, steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead, max_batched_tokens=8)
    params = SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=1)
    expected = engine.generate(list(range(20)), params)
    runner.raise_at = {len(runner.steps) + run: KeyboardInterrupt()}
    request_id = engine.add_request(list(range(20)), params)
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    results = drain(engine)
    assert results[request_id].logprobs == expected.logprobs
    assert results[request_id].prompt_logprobs == expected.prompt_logprobs


@STEPS_AHEAD
def test_a_step_interrupted_once_it_has_run_counts_once(steps_ahead: int) -> None:
    """Between the run and its booking in the scheduler."""
    engine, _ = make_engine(steps_ahead=steps_ahead, max_batched_tokens=8)
    params = SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=1)
    expected = engine.generate(list(range(20)), params)
    commit, calls = engine.scheduler.commit, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) % 2:
            raise KeyboardInterrupt
        return commit(*args)

    engine.scheduler.commit = interrupted  # type: ignore[method-assign]
    engine.add_request(list(range(20)), params)
    results: list[RequestOutput] = []
    for _ in range(20):
        with suppress(KeyboardInterrupt):
            results += [out.result for out in engine.step() if out.result is not None]
    assert not engine.has_work
    assert results[0].token_ids == expected.token_ids
    assert results[0].logprobs == expected.logprobs
    assert results[0].prompt_logprobs == expected.prompt_logprobs


# The prompt's tokens


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(TINY / "golden.npz"))


@pytest.mark.parametrize("case", ["short", "page_16", "page_33", "long"])
@pytest.mark.parametrize("max_batched_tokens", [512, 100, 13])
def test_prompt_logprobs_equal_golden(
    golden: dict[str, np.ndarray], case: str, max_batched_tokens: int
) -> None:
    """Whole and in chunks, against logits of an independent implementation at every position."""
    ids, count = golden[f"{case}_ids"].tolist(), 4
    expected = log_softmax(golden[f"{case}_logits"])
    engine = make_tiny_engine(num_pages=3 * 40, max_batched_tokens=max_batched_tokens)
    result = engine.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=count))
    assert result.prompt_logprobs is not None
    first, *others = result.prompt_logprobs
    assert first is None
    assert len(others) == len(ids) - 1
    for found, token, row in zip(others, ids[1:], expected[:-1], strict=True):
        assert found is not None
        assert found.token_id == token
        assert found.logprob == pytest.approx(row[token], abs=GOLDEN_ATOL)
        for (i, value), best in zip(found.top, np.sort(row)[::-1][:count], strict=True):
            assert value == pytest.approx(row[i], abs=GOLDEN_ATOL)
            assert value == pytest.approx(best, abs=GOLDEN_ATOL)  # another id only on a near tie
            assert value <= 0


@pytest.mark.parametrize("max_batched_tokens", [512, 64, 7, 1])
def test_prompt_logprobs_are_the_same_for_every_chunking(
    golden: dict[str, np.ndarray], max_batched_tokens: int
) -> None:
    ids = golden["page_33_ids"].tolist()
    params = SamplingParams(max_tokens=2, temperature=1.0, seed=0, logprobs=1, prompt_logprobs=5)
    whole = make_tiny_engine().generate(ids, params)
    chunked = make_tiny_engine(max_batched_tokens=max_batched_tokens).generate([ids, ids[:20]], params)
    assert chunked[0].prompt_logprobs == whole.prompt_logprobs
    assert chunked[0].logprobs == whole.logprobs
    assert chunked[1].prompt_logprobs == (whole.prompt_logprobs or [])[:20]


def test_prompt_logprobs_never_hold_tokens_times_vocabulary(golden: dict[str, np.ndarray]) -> None:
    """600 tokens in one chunk: no call of the LM head has more than LOGPROB_ROWS rows, and each has one."""
    ids = golden["long_ids"].tolist()
    engine, raw = recording_engine(num_pages=3 * 40, max_batched_tokens=1024)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    result = engine.generate(ids, params)
    assert None not in (result.prompt_logprobs or [None])[1:]
    rows = [len(logits) for logits in raw]
    assert max(rows) == LOGPROB_ROWS
    assert sum(rows) == len(ids) - 1 + 1  # the prompt's, and the new token's
    raw.clear()
    engine.generate(ids, replace(params, prompt_logprobs=None))
    assert [len(logits) for logits in raw] == [1]
    raw.clear()
    engine.generate(ids[:40], replace(params, n=3))  # of three answers one is asked for the prompt's
    assert sum(len(logits) for logits in raw) == 39 + 3


def test_a_prompt_of_one_token_has_none() -> None:
    result = make_tiny_engine().generate([7], SamplingParams(max_tokens=2, prompt_logprobs=3))
    assert result.prompt_logprobs == [None]
    assert make_tiny_engine().generate([7], SamplingParams(max_tokens=2)).prompt_logprobs is None


@STEPS_AHEAD
def test_an_aborted_prompt_has_what_ran(steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead, max_batched_tokens=8)
    request_id = engine.add_request(list(range(20)), SamplingParams(prompt_logprobs=1))
    engine.step()
    result = engine.abort(request_id)
    assert result is not None
    assert [p is None for p in result.prompt_logprobs or []] == [True] + [False] * 8 + [True] * 11
    assert (result.prompt_logprobs or [])[8] == logprobs_of(list(range(8)), 8, 1)


def test_more_than_the_vocabulary_is_the_vocabulary() -> None:
    engine, raw = recording_engine()
    backend = engine._runner.backend  # type: ignore[attr-defined]
    engine.generate([1, 2], SamplingParams(max_tokens=1))
    _, ids, values = backend.log_probs(raw[0][:, :9], np.zeros(1, np.int32), MAX_LOGPROBS)
    assert ids.shape == values.shape == (1, 9)


# Cost


def test_greedy_steps_ask_nothing_of_the_backend() -> None:
    """No sampling is set, no logits are restored, nothing is fetched but the ids, once a step."""

    class Strict(NumpyBackend):
        fetched = 0

        def set_sampling(self, *args: Any) -> None:
            raise AssertionError("a plain request is no news")

        adjust_logits = restore_logits = sample = log_probs = set_sampling  # type: ignore[assignment]

        def to_numpy(self, x: np.ndarray) -> np.ndarray:
            self.fetched += 1
            return super().to_numpy(x)

    engine = make_tiny_engine(backend_class=Strict)
    results = engine.generate(
        [[1], [2, 3]], SamplingParams(max_tokens=5, ignore_eos=True, seed=1, stop="\0\0")
    )
    assert [len(r.token_ids) for r in results] == [5, 5]
    assert engine._runner.backend.fetched == 5  # type: ignore[attr-defined]


def test_what_is_never_above_zero_is_a_number() -> None:
    """A token that all but certainly follows has 0, not -0 or more."""
    backend = make_tiny_engine()._runner.backend  # type: ignore[attr-defined]
    logits = np.array([[100.0, 0.0, -np.inf], [1e30, 1e30, 0.0]], np.float32)
    own, _, top = backend.log_probs(logits, np.array([0, 1], np.int32), 3)
    assert own[0] == 0
    assert own[1] == pytest.approx(-math.log(2))
    assert (top <= 0).all()
    assert top[0, 2] == -np.inf
