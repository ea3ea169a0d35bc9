"""What a request asks for: its limits and what ends it.

The token itself is greedy, the argmax of the raw FP32 logits, and chosen by the backend. Knows nothing of
batches, pages or text.
"""

from __future__ import annotations

from dataclasses import dataclass

from samir_vllm.errors import RequestError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Limits of one request.

    Args:
        max_tokens: new tokens at most (>= 1); the context's end may come earlier.
        stop_token_ids: ids that end the answer, besides the model's own end-of-sequence ids.
        ignore_eos: go on past the model's end-of-sequence ids (for measurements).

    Raises:
        RequestError: a value of the wrong type or out of bounds.
    """

    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, int) or isinstance(self.max_tokens, bool) or self.max_tokens < 1:
            raise RequestError(f"max_tokens must be a whole number of at least 1, not {self.max_tokens!r}")
        stops = self.stop_token_ids
        if not isinstance(stops, (list, tuple, set, frozenset)) or any(type(i) is not int for i in stops):
            raise RequestError(f"stop_token_ids must be a list of token ids, not {stops!r}")
        object.__setattr__(self, "stop_token_ids", tuple(stops))
