"""What a caller gets: a step's outputs, an ended request with its answers, and their figures.

Plain data. Knows no engine, no scheduler and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from samir_vllm.sequence import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Figures of one answer, seconds; None for what never happened."""

    queue_time: float | None  # arrival to admission
    time_to_first_token: float | None  # arrival to the first new token
    time_per_output_token: float | None  # mean over the tokens after the first
    total_time: float  # arrival to end
    num_pages: int  # KV pages reserved, over all layers
    num_cached_tokens: int  # prompt tokens whose K and V were there already


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer that has ended."""

    index: int  # which of the request's n
    token_ids: list[int]  # everything generated, what ended it included
    text: str  # nothing of a stop id or a stop string
    finish_reason: FinishReason
    stop_reason: int | str | None  # the id or the string that ended it; None where nothing did
    seed: int | None  # the request's, or the one drawn for it; None for greedy without one
    logprobs: list[TokenLogprobs] | None  # one for each of token_ids; None: not asked for
    error: str | None  # one line, where finish_reason is "error"
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request all of whose answers have ended.

    With one answer, its fields can be had from here; with several, these are the first one's.
    """

    request_id: str
    prompt_token_ids: list[int]
    completions: list[Completion]  # by index
    prompt_logprobs: list[TokenLogprobs | None] | None
    """One for each prompt token; None for the first, which nothing precedes, and for what never ran."""

    @property
    def token_ids(self) -> list[int]:
        """Everything the first answer generated."""
        return self.completions[0].token_ids

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.completions[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first answer ended."""
        return self.completions[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """What ended the first answer."""
        return self.completions[0].stop_reason

    @property
    def seed(self) -> int | None:
        """The seed, the same for all answers."""
        return self.completions[0].seed

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """The first answer's log-probabilities."""
        return self.completions[0].logprobs

    @property
    def error(self) -> str | None:
        """The first answer's error."""
        return self.completions[0].error

    @property
    def metrics(self) -> RequestMetrics:
        """The first answer's figures."""
        return self.completions[0].metrics


@dataclass(slots=True)  # not frozen: one is made for each token, and freezing triples what that costs
class StepOutput:
    """What one step gave one answer."""

    request_id: str
    index: int  # which of the request's n answers
    token_id: int | None  # None where the answer ended without a new token
    text: str  # new text; may be empty while a character is incomplete or a stop string may be coming
    completion: Completion | None  # set when the answer ended
    result: RequestOutput | None  # set when the last of the request's answers ended
    logprobs: TokenLogprobs | None = None  # of ``token_id``, where they are wanted


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step did, for a timeline; times are seconds of ``time.perf_counter``.

    Sequences go by their ids: the request's, with ``#`` and the answer's index where it has several.
    """

    started: float
    ended: float
    admitted: list[str]
    prefills: list[tuple[str, int]]  # sequence id, prompt tokens
    decodes: list[str]
    finished: list[tuple[str, FinishReason]]  # aborts since the last step included
    num_running: int  # after the step, like the counts below
    num_waiting: int
    num_used_pages: int


def refused(error: str) -> RequestOutput:
    """The result of a request that was never queued."""
    metrics = RequestMetrics(None, None, None, 0.0, 0, 0)
    completion = Completion(0, [], "", "error", None, None, None, error, metrics)
    return RequestOutput("", [], [completion], None)
