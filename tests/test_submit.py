"""``Engine.submit``: requests from other threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import pytest

from fake_model import STEPS_AHEAD, FakeRunner, answer, make_engine
from samir_vllm import Engine, RequestError, SamplingParams

TIMEOUT = 30


@pytest.fixture(params=[0, 1, 2], ids="{} ahead".format)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, FakeRunner]]:
    """An engine whose own thread runs it until the test ends, for each number of steps ahead."""
    engine, runner = make_engine(max_num_seqs=4, steps_ahead=request.param)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            if engine.wait_for_work(0.05):
                engine.step()

    thread = threading.Thread(target=serve)
    thread.start()
    yield engine, runner
    stop.set()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    engine.pool.check_integrity()
    assert engine.pool.num_used == 0
    assert not engine._requests


def test_many_threads_get_their_own_answers(served: tuple[Engine, FakeRunner]) -> None:
    engine, _ = served
    futures: dict[int, Future] = {}

    def client(number: int) -> None:
        for i in range(number, 60, 6):
            futures[i] = engine.submit([i + 1, 7], SamplingParams(max_tokens=1 + i % 20))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    for i in range(60):
        assert futures[i].result(TIMEOUT).token_ids == answer([i + 1, 7], 1 + i % 20)


def test_a_refused_request_is_the_futures_exception(served: tuple[Engine, FakeRunner]) -> None:
    engine, _ = served
    good = engine.submit([1, 2], SamplingParams(max_tokens=5))
    for bad in ([], [9999], "x" * 300):
        with pytest.raises(RequestError):
            engine.submit(bad).result(TIMEOUT)
    assert good.result(TIMEOUT).token_ids == answer([1, 2], 5)


@STEPS_AHEAD
def test_cancelling_aborts(steps_ahead: int) -> None:
    engine, runner = make_engine(steps_ahead=steps_ahead, max_num_seqs=1)
    running = engine.submit([1], SamplingParams(max_tokens=200))
    waiting = engine.submit([2], SamplingParams(max_tokens=5))
    never_taken = engine.submit([3], SamplingParams(max_tokens=5))
    never_taken.cancel()
    engine.step()
    engine.step()
    assert engine.pool.num_used
    assert running.cancel()
    engine.step()  # takes the cancellation up, and the slot passes on
    while engine.has_work:
        engine.step()
    with pytest.raises(CancelledError):
        running.result(0)
    assert waiting.result(0).token_ids == answer([2], 5)
    assert all("request-2" not in decodes for decodes, _ in runner.steps)  # the third never ran
    assert len(runner.steps) < 15
    assert engine.pool.num_used == 0


@STEPS_AHEAD
def test_a_result_can_no_longer_be_cancelled(steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead)
    future = engine.submit([1], SamplingParams(max_tokens=2))
    while engine.has_work:
        engine.step()
    assert not future.cancel()
    assert future.result(0).token_ids == answer([1], 2)


@STEPS_AHEAD
def test_wait_for_work_times_out_and_wakes(steps_ahead: int) -> None:
    engine, _ = make_engine(steps_ahead=steps_ahead)
    assert not engine.wait_for_work(0.01)
    threading.Timer(0.05, lambda: engine.submit([1], SamplingParams(max_tokens=1))).start()
    assert engine.wait_for_work(TIMEOUT)
    engine.step()
    assert not engine.has_work
