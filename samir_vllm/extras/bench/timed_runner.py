"""A model runner that marks its steps on the GPU's clock, and what the marks tell.

Knows which steps are launched, and no engine's clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from samir_vllm.engine import Engine
from samir_vllm.model_runner import ModelRunner
from samir_vllm.sampling import TokenMasks
from samir_vllm.sequence import ScheduledStep, StepResult


@dataclass(frozen=True, slots=True)
class Mark:
    """A step that was launched; the marks are None where there is no GPU."""

    kv_tokens: int  # of its decoding sequences, written by earlier steps
    started: Any
    ended: Any


class TimedRunner(ModelRunner):
    """Marks the steps that are wanted on the GPU's clock; otherwise a runner like any other."""

    _is_wanted: Callable[[ScheduledStep], bool] | None = None
    _marks: list[Mark]

    def begin(self, is_wanted: Callable[[ScheduledStep], bool] = lambda step: True) -> None:
        """Mark these steps from now on."""
        self._is_wanted, self._marks = is_wanted, []

    def end(self) -> list[Mark]:
        """Mark no more; the marks so far, in the order in which their steps were launched."""
        self._is_wanted = None
        return self._marks

    def launch(self, step: ScheduledStep) -> Callable[[], StepResult]:
        """See ``ModelRunner``."""
        if self._is_wanted is None or not self._is_wanted(step):
            return super().launch(step)
        kv_tokens = sum(seq.num_launched_tokens for seq in step.decodes)
        started = self._event()
        result = super().launch(step)
        self._marks.append(Mark(kv_tokens, started, self._event()))
        return result

    def launch_forward(self, step: ScheduledStep) -> Callable[[TokenMasks | None], Callable[[], StepResult]]:
        """See ``ModelRunner``."""
        if self._is_wanted is None or not self._is_wanted(step):
            return super().launch_forward(step)
        kv_tokens = sum(seq.num_launched_tokens for seq in step.decodes)
        started = self._event()
        go_on = super().launch_forward(step)

        def go_on_marked(masks: TokenMasks | None) -> Callable[[], StepResult]:
            result = go_on(masks)
            self._marks.append(Mark(kv_tokens, started, self._event()))
            return result

        return go_on_marked

    def _event(self) -> Any:
        if self.backend.name != "cuda":
            return None
        from samir_vllm.backends import cuda_measure

        with self.backend.active():
            return cuda_measure.event(self.backend)


def runner_of(engine: Engine) -> TimedRunner:
    """The runner of an engine that was made with ``TimedRunner``."""
    runner = engine._runner
    assert isinstance(runner, TimedRunner)
    return runner


def gpu_seconds(marks: list[Mark]) -> float | None:
    """Mean of what the GPU took for one of these steps; None without a GPU."""
    if not marks or marks[0].started is None:
        return None
    from samir_vllm.backends import cuda_measure

    return statistics.mean(cuda_measure.seconds_between(mark.started, mark.ended) for mark in marks)


def gpu_idle(marks: list[Mark]) -> float | None:
    """Share of the time, from the first step's start to the last one's end, in which none of them ran.

    A step that finds the GPU waiting is marked a moment before its first kernel comes, so that of the GPU's
    waiting a little counts as work.
    """
    seconds = gpu_seconds(marks)
    if seconds is None:
        return None
    from samir_vllm.backends import cuda_measure

    whole = cuda_measure.seconds_between(marks[0].started, marks[-1].ended)
    return max(0.0, 1 - len(marks) * seconds / whole)
