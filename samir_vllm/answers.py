"""A live request and its answers: tokens become text, stop strings cut it, log-probabilities pile up.

Knows the tokenizer's decoder and the request's wishes, but neither who schedules the answers nor what device
runs them.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from samir_vllm.outputs import Completion, RequestMetrics, RequestOutput
from samir_vllm.sampling import SamplingParams
from samir_vllm.sequence import FinishReason, Sequence, TokenLogprobs
from samir_vllm.stopping import StopMatcher
from samir_vllm.tokenizer import StreamDecoder


@dataclass(slots=True, eq=False)
class Request:
    """A request until the last of its answers has ended."""

    request_id: str
    prompt_token_ids: list[int]
    answers: list[Answer] = field(default_factory=list)
    completions: dict[int, Completion] = field(default_factory=dict)  # of those that have ended, by index
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    future: Future[RequestOutput] | None = None

    def book_prompt_logprobs(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Keep those of a chunk that began at prompt token ``start``: of the tokens after each of its own.

        A chunk that runs again, because its step was interrupted, changes nothing.
        """
        if self.prompt_logprobs is not None:
            self.prompt_logprobs[start + 1 : start + 1 + len(logprobs)] = logprobs

    def pending(self) -> list[Answer]:
        """The answers that have not ended."""
        return [a for a in self.answers if a.index not in self.completions]

    def book(self, completion: Completion) -> RequestOutput | None:
        """Keep an answer that has ended; the request's result if it is the last."""
        self.completions[completion.index] = completion
        if len(self.completions) < len(self.answers):
            return None
        completions = [self.completions[i] for i in range(len(self.answers))]
        return RequestOutput(self.request_id, self.prompt_token_ids, completions, self.prompt_logprobs)


class Answer:
    """One of a request's answers while it runs."""

    __slots__ = (
        "_decoder",
        "_matcher",
        "_texts",
        "_vocab_size",
        "index",
        "logprobs",
        "params",
        "request_id",
        "seed",
        "seq",
        "stop_string",
    )

    def __init__(
        self,
        request_id: str,
        seq: Sequence,
        index: int,
        params: SamplingParams,
        seed: int | None,
        *,
        decoder: StreamDecoder,
        vocab_size: int,
        matcher: StopMatcher | None,
    ) -> None:
        """An answer without a token. It refers to its request by name only, so that nothing goes in circles.

        Args:
            request_id: whose it is.
            seq: its tokens.
            index: which of the request's n.
            params: the request's wishes.
            seed: the user's, or the one drawn; None: no chance in it.
            decoder: turns tokens into text.
            vocab_size: the tokenizer's; a model's may be padded beyond it, and such an id has no text.
            matcher: looks for stop strings; None: there are none.
        """
        self.request_id = request_id
        self.seq = seq
        self.index = index
        self.params = params
        self.seed = seed
        self.stop_string: str | None = None  # the one that ended it
        self.logprobs: list[TokenLogprobs] = []
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._matcher = matcher
        self._texts: list[str] = []

    def push(self, token: int) -> str:
        """The text that the sequence's newest token lets go; may set ``stop_string``."""
        text = self._decoder.push(token) if token < self._vocab_size else ""
        if self._matcher is not None:
            text = self._search(self._matcher, text)
        if text:
            self._texts.append(text)
        return text

    def _search(self, matcher: StopMatcher, text: str) -> str:
        may_stop = self.seq.num_output_tokens >= self.params.min_tokens
        text = matcher.push(text, may_stop=may_stop)
        self.stop_string = matcher.matched
        return text

    def book_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Keep those of the token that the sequence gets next."""
        del self.logprobs[self.seq.num_output_tokens :]  # of a step that was interrupted and ran again
        self.logprobs.append(logprobs)

    def newest_logprobs(self) -> TokenLogprobs | None:
        """Those of the sequence's newest token, where they are wanted."""
        return self.logprobs[self.seq.num_output_tokens - 1] if self.params.logprobs is not None else None

    def finish(self, num_pages: int) -> tuple[str, Completion]:
        """The last text, and the answer; the sequence has ended.

        Args:
            num_pages: KV pages it had reserved, over all layers.
        """
        seq = self.seq
        text = self._rest() if self.stop_string is None else ""
        reason, stop_reason = self._why()
        return text, Completion(
            index=self.index,
            token_ids=seq.output_token_ids,
            text="".join(self._texts),
            finish_reason=reason,
            stop_reason=stop_reason,
            seed=self.seed,
            logprobs=None if self.params.logprobs is None else self.logprobs[: seq.num_output_tokens],
            error=seq.error,
            metrics=_metrics(seq, num_pages),
        )

    def _rest(self) -> str:
        """What the end lets go: the last token's text if it has one, and all that was held back."""
        text = self.push(self.seq.token_ids[-1]) if self._ends_in_text() else ""
        rest = self._decoder.flush() if self.stop_string is None else ""
        if self._matcher is not None and self.stop_string is None:
            rest = self._search(self._matcher, rest)
            if self.stop_string is None:
                rest += self._matcher.flush()
        self._texts.append(rest)
        return text + rest

    def _ends_in_text(self) -> bool:
        """Whether the last token is one that nobody has seen, and not one that only ends the answer."""
        reason, last = self.seq.finish_reason, self.seq.token_ids[-1]
        return reason == "length" or (reason == "stop" and last not in self.seq.stop_ids)

    def _why(self) -> tuple[FinishReason, int | str | None]:
        """Finish reason and stop reason."""
        reason = self.seq.finish_reason
        assert reason is not None
        if reason in ("abort", "error"):
            return reason, None
        if self.stop_string is not None:  # also where its token reached max_tokens
            return "stop", self.stop_string
        return reason, self.seq.token_ids[-1] if not self._ends_in_text() else None


def _metrics(seq: Sequence, num_pages: int) -> RequestMetrics:
    first, end = seq.first_token_time, seq.finished_time
    assert end is not None
    later_tokens = seq.num_output_tokens - 1
    return RequestMetrics(
        queue_time=None if seq.admitted_time is None else seq.admitted_time - seq.arrival_time,
        time_to_first_token=None if first is None else first - seq.arrival_time,
        time_per_output_token=(end - first) / later_tokens
        if first is not None and later_tokens > 0
        else None,
        total_time=end - seq.arrival_time,
        num_pages=num_pages,
        num_cached_tokens=seq.num_cached_tokens,
    )
