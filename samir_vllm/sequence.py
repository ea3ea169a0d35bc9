"""One request on its way through the engine (its tokens, its state, its clock), and the step it runs in.

Knows no device and no text; the scheduler moves it, the engine words it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from samir_vllm.config import PAGE_SIZE
from samir_vllm.sampling import TokenConstraint, TokenSampling

FinishReason = Literal["stop", "length", "abort", "error"]


class SequenceStatus(enum.Enum):
    """Where a sequence is; running means prefill or decode."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Sequence:
    """Token ids and progress of one request.

    ``token_ids`` holds the prompt and then the output, as far as it is known here. ``num_computed_tokens``
    counts tokens whose K and V are written, by steps whose results have been read: during decode it is always
    ``len(token_ids) - 1``, the newest token being the next input. ``num_launched_tokens`` counts those of
    steps under way, too: it may run ahead of the tokens that are known. ``num_cached_tokens`` were there at
    admission, taken over from a sequence that had ended.
    Times are seconds of the engine's clock, None until they happen.
    """

    __slots__ = (
        "admitted_time",
        "arrival_time",
        "constraint",
        "error",
        "finish_reason",
        "finished_time",
        "first_token_time",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_launched_tokens",
        "num_prompt_tokens",
        "request_id",
        "retain_kv",
        "reuse_kv",
        "sampling",
        "slot",
        "status",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        *,
        max_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        sampling: TokenSampling | None = None,
        constraint: TokenConstraint | None = None,
        arrival_time: float = 0.0,
        retain_kv: bool = False,
        reuse_kv: bool = True,
    ) -> None:
        """A waiting sequence.

        Args:
            request_id: unique among live requests.
            prompt_token_ids: at least one id.
            max_tokens: new tokens at most (>= 1), cut to what the context has room for.
            stop_ids: every id that ends the answer (the model's, unless ignored, and the user's).
            sampling: how tokens are chosen; None: the greatest logit.
            constraint: which tokens may come; None: any.
            arrival_time: seconds.
            retain_kv: keep K and V at the end, for a later sequence that begins with the same tokens.
            reuse_kv: take over retained K and V of a common beginning. False runs every prompt token.
        """
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.sampling = sampling
        self.constraint = constraint
        self.retain_kv = retain_kv
        self.reuse_kv = reuse_kv
        self.num_computed_tokens = 0
        self.num_launched_tokens = 0
        self.num_cached_tokens = 0
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.slot = -1  # row of the block tables while running
        self.arrival_time = arrival_time
        self.admitted_time: float | None = None
        self.first_token_time: float | None = None
        self.finished_time: float | None = None

    @property
    def num_output_tokens(self) -> int:
        """New tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The new tokens so far, a stop id included."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def pages_per_layer(self) -> int:
        """Pages of each layer that the sequence can ever touch.

        The last new token is never an input, so its K and V are never stored: hence the -1.
        """
        return -(-(self.num_prompt_tokens + self.max_tokens - 1) // PAGE_SIZE)

    @property
    def num_needed_steps(self) -> int:
        """Decode steps still to be launched, should nothing end it early; its prompt's are."""
        return self.num_prompt_tokens + self.max_tokens - 1 - self.num_launched_tokens

    @property
    def is_finished(self) -> bool:
        """True once a finish reason is set."""
        return self.finish_reason is not None


@dataclass(slots=True)
class ScheduledStep:
    """What one step runs.

    ``decodes`` take one token each. ``prefills`` are (sequence, number of prompt tokens in this step's
    chunk). ``admitted`` are the sequences whose block tables are new in this step, with their
    page ids, int32 [num_layers, pages_per_layer].
    """

    decodes: list[Sequence]  # the same list as in the step before where the same sequences decode
    prefills: list[tuple[Sequence, int]]
    admitted: list[tuple[Sequence, np.ndarray]]
    prefill_starts: list[int] = field(init=False, repr=False)  # place of each chunk's first token
    _ends: list[Sequence] = field(init=False, repr=False)  # those whose prompt is complete in this step

    def __post_init__(self) -> None:
        # Now: when the results are read, later steps may have been launched.
        self.prefill_starts = [s.num_launched_tokens for s, _ in self.prefills]
        self._ends = [s for s, n in self.prefills if s.num_launched_tokens + n == s.num_prompt_tokens]

    @property
    def is_empty(self) -> bool:
        """Nothing to run."""
        return not (self.decodes or self.prefills)

    def sequences(self) -> list[Sequence]:
        """All that have tokens in this step."""
        return [*self.decodes, *(seq for seq, _ in self.prefills)]

    def sampled(self) -> list[Sequence]:
        """The sequences that get a token from this step, in the order of the batch's logits rows."""
        return self.decodes + self._ends


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities that come with one token: log-softmax in FP32 of the raw logits, never above 0."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability) of the likeliest, best first


@dataclass(slots=True)
class StepResult:
    """What a step gave."""

    token_ids: list[int]  # one for each of ``step.sampled()``, -1 where the logits hold a NaN
    logprobs: list[TokenLogprobs | None] | None = None  # in the same order; None: nobody asked
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprobs]]] = field(default_factory=list)  # of the chunks
