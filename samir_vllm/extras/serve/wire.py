"""What the server's two processes tell each other: plain data. Knows neither HTTP nor how anything is done.

To the engine goes `Begin`, and from then on, at most once in a turn of the front's loop, a list of `Add` and
`Abort`. From it comes `Ready` or `Failed`, then one `Report` for each step that has something to tell.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import NamedTuple

from samir_vllm.outputs import RequestMetrics
from samir_vllm.sampling import SamplingParams
from samir_vllm.sequence import FinishReason, TokenLogprobs


class Add(NamedTuple):
    """A request; its answers are told under ``key``."""

    key: int
    prompt: list[int]
    params: SamplingParams
    grammar: str | None  # what its answers must keep to
    streams: bool  # wants its text as it comes, not only at the end
    retain_kv: bool  # leaves its K and V to a later turn of the same dialog


class Abort(NamedTuple):
    """End a request that may have ended already; nothing more is told of it."""

    key: int


class Ending(NamedTuple):
    """How an answer ended. Text and log-probabilities are the whole ones, if the request doesn't stream."""

    finish_reason: FinishReason
    is_stop_token: bool  # the last token is one that ends answers, and says nothing
    error: str | None
    num_tokens: int
    metrics: RequestMetrics
    text: str
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None  # with the last of a request's answers


Output = tuple[int, int, str, TokenLogprobs | None, Ending | None]
"""What a step gave an answer: the request's key, which of its answers, new text, the new token's
log-probabilities where wanted, and how it ended if it did. A plain tuple: there is one for each token."""


class Refusal(NamedTuple):
    """A request that was not taken."""

    key: int
    message: str
    status: int  # as HTTP has it: 400, something is wrong with it; 429, too many wait; 500, with the engine


class Load(NamedTuple):
    """How busy the engine is."""

    num_running: int
    num_waiting: int  # for pages, or for their grammars
    num_used_pages: int  # by what runs, not by what is kept for later turns of a dialog
    cpu_seconds: float  # of the engine process, since its start


class Report(NamedTuple):
    """One step's news."""

    load: Load
    outputs: list[Output]
    refusals: list[Refusal]


@dataclass(frozen=True, slots=True)
class Begin:
    """What the engine's process is to load, and how it serves."""

    args: argparse.Namespace  # of the command line
    max_waiting: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is loaded."""

    context_len: int
    vocab_size: int
    num_pages: int
    pool_tokens: int  # that fit into the pool, prompt and answer


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine couldn't be loaded."""

    message: str
