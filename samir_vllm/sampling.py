"""What a request asks for: how its tokens are chosen, what ends it, what comes with them.

Knows the wishes and their bounds, not how they are carried out: tokens are chosen by the backend, text is
searched for stop strings by the engine. Knows nothing of batches, pages or text.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from samir_vllm.config import show
from samir_vllm.errors import RequestError

MAX_LOGPROBS = 20
"""Most alternatives whose log-probabilities come with a token."""

MAX_LOGIT_BIAS = 1024
"""Most tokens that one request may bias."""

MAX_STOPS = 64
"""Most stop strings of one request."""

MAX_STOP_CHARS = 1024
"""Longest stop string, in characters."""

MAX_ANSWERS = 64
"""Most answers to one request."""

WHOLE_BOUNDS: dict[str, tuple[int, int | None]] = {
    "max_tokens": (1, None),
    "top_k": (0, None),
    "n": (1, MAX_ANSWERS),
}
OPTIONAL_WHOLE_BOUNDS = {
    "seed": (0, 2**64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
NUMBER_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    # A division by less, or a product with more, decides on its own, and takes large logits out of FP32.
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
BIAS_BOUNDS = (-100.0, 100.0)
_NO_NUMBERS = (bool, np.timedelta64)  # isinstance takes both for integers


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's wishes: greedy as they stand, with everything else off.

    A row's logits go through these in order: ``logit_bias``; the repetition, frequency and presence penalty;
    ``min_tokens``; ``temperature``; ``top_k``; ``min_p``; ``top_p`` over what those left, renormalised. At
    temperature 0 the greatest of the logits after ``min_tokens`` is taken, and the filters don't matter.
    Equal logits rank by the lower token id. Any NumPy number may stand for a Python one.

    Args:
        max_tokens: new tokens at most (>= 1); the context's end may come earlier.
        temperature: 0 to 100; the logits are divided by it. 0: no chance, the greatest logit. A value above
            0, however small, is not 0.
        top_k: >= 0; only the k likeliest tokens. 0: off; beyond the vocabulary it is the vocabulary.
        top_p: 0 to 1; only the likeliest tokens that together reach this probability, the one that reaches it
            included (nucleus sampling: Holtzman et al., 2020). 1: off; 0: the likeliest alone.
        min_p: 0 to 1; only tokens at least this many times as likely as the likeliest (Nguyen et al., 2024).
            0: off.
        repetition_penalty: 0.01 to 100; of tokens in the prompt or the output, logits above 0 are divided by
            it, others multiplied (Keskar et al., "CTRL", 2019). 1: off; below 1 it favours repetition.
        presence_penalty: -2 to 2; taken from the logit of every token that is in the output. 0: off.
        frequency_penalty: -2 to 2; taken from a token's logit as often as the output holds it. 0: off.
        logit_bias: token id -> -100 to 100, added to its logit; at most ``MAX_LOGIT_BIAS`` ids. Empty: off.
        seed: 0 to 2^64 - 1. On equal logits, the same request and seed give the same tokens whatever runs
            beside it: the token at position p of answer i is chosen by number (p, i) of the seed's
            counter-based generator (Philox 4x32-10: Salmon et al., 2011). None: one is drawn, and is in the
            result.
        min_tokens: 0 to ``max_tokens``; before so many new tokens nothing ends the answer: ids that would are
            not chosen, stop strings don't count. 0: off.
        stop: a string of 1 to ``MAX_STOP_CHARS`` characters, or a list or tuple of at most ``MAX_STOPS``. The
            answer ends where the first is complete, its text where that one begins. Kept as a tuple.
        stop_token_ids: ids that end the answer, besides the model's own end-of-sequence ids. Kept as a tuple.
        ignore_eos: go on past the model's end-of-sequence ids (for measurements).
        n: 1 to ``MAX_ANSWERS`` answers to the one prompt.
        logprobs: 0 to ``MAX_LOGPROBS``; with each new token come its log-probability and those of so many
            likeliest tokens: log-softmax in FP32 of the raw logits, before all of the above. None: off.
        prompt_logprobs: the same for the prompt's tokens after the first. None: off.

    Raises:
        RequestError: a value of the wrong type or out of bounds, or a name that is none of these. Whether ids
            lie in the vocabulary is not known here.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # a dict has no hash
    seed: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    if not TYPE_CHECKING:  # type checkers shall see the fields, not this

        def __new__(cls, /, *values: Any, **options: Any) -> SamplingParams:
            _check_names(options, cls.__match_args__)
            return object.__new__(cls)  # slots=True makes the class anew: super() would mean the old one

    def __post_init__(self) -> None:
        settle = partial(object.__setattr__, self)
        for name, (least, most) in WHOLE_BOUNDS.items():
            settle(name, _whole(name, getattr(self, name), least, most))
        for name, (least, most) in OPTIONAL_WHOLE_BOUNDS.items():
            value = getattr(self, name)
            if value is not None:
                settle(name, _whole(name, value, least, most, "None or "))
        for name, bounds in NUMBER_BOUNDS.items():
            settle(name, _number(name, getattr(self, name), *bounds))
        settle(
            "min_tokens", _whole("min_tokens", self.min_tokens, 0, self.max_tokens, most_is=" (max_tokens)")
        )
        settle("logit_bias", _logit_bias(self.logit_bias))
        settle("stop", _stop_strings(self.stop))
        settle("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool | np.bool_):
            raise RequestError(f"ignore_eos must be True or False, not {show(self.ignore_eos)}")
        settle("ignore_eos", bool(self.ignore_eos))

    @property
    def adjusts_logits(self) -> bool:
        """Whether anything changes the logits of single tokens: a bias, a penalty, ``min_tokens``."""
        return bool(
            self.logit_bias
            or self.min_tokens
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
        )


@dataclass(frozen=True, slots=True)
class TokenSampling:
    """How one sequence chooses its tokens: the request's wishes, and what was settled when it was queued."""

    params: SamplingParams
    seed: int  # 0 to 2^64 - 1; given, or drawn
    index: int = 0  # which of the request's n answers
    stop_ids: frozenset[int] = frozenset()  # what ends the answer, and may not come before min_tokens

    @property
    def is_argmax(self) -> bool:
        """The greatest of the raw logits, and nothing else."""
        return self.params.temperature == 0 and not self.params.adjusts_logits


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """Which tokens may be chosen for some of a step's rows of logits."""

    rows: np.ndarray  # int32 [M], M >= 1
    allowed: np.ndarray  # uint32 [M, ceil(vocab_size / 32)], see `TokenConstraint.fill_mask`


class TokenConstraint(Protocol):
    """Which tokens may come next in one answer, token after token: a grammar's, or anything else's."""

    def fill_mask(self, mask: np.ndarray) -> None:
        """Say which tokens may come next.

        Args:
            mask: uint32 [ceil(vocab_size / 32)] to be filled; bit i % 32 of word i // 32 is token i, 1 where
                it may come. ``vocab_size`` is the model's, which may be padded beyond the tokenizer's.
        """

    def accept(self, token_id: int) -> bool:
        """Go on by the token that was chosen; False: it may not come here."""

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may follow: the answer ends without a token that says so."""


def _check_names(options: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise RequestError(f"unknown sampling parameter {show(name)}: {remedy}")


def _whole(name: str, value: Any, least: int, most: int | None, or_else: str = "", most_is: str = "") -> int:
    number = int(value) if _is_whole(value) else None
    if number is None or number < least or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"{least} to {show(most)}{most_is}"
        raise RequestError(f"{name} must be {or_else}a whole number of {bounds}, not {show(value)}")
    return number


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, _NO_NUMBERS)


def _number(name: str, value: Any, least: float, most: float) -> float:
    number = None
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, _NO_NUMBERS):
        try:
            number = float(value)
        except OverflowError:  # an integer beyond any float
            number = np.inf
    if number is None or not least <= number <= most:  # NaN fails too
        raise RequestError(f"{name} must be a number of {least:g} to {most:g}, not {show(value)}")
    return number


def _logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, not be {show(bias)}")
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias must have at most {MAX_LOGIT_BIAS} tokens, not {len(bias)}")
    return {
        _whole("a token id of logit_bias", token_id, 0, None): _number(
            f"logit_bias of token {show(token_id)}", value, *BIAS_BOUNDS
        )
        for token_id, value in bias.items()
    }


def _stop_strings(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple):
        raise RequestError(f"stop must be a string or a list of strings, not {show(stop)}")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop must hold at most {MAX_STOPS} strings, not {len(stops)}")
    for text in stops:
        if not isinstance(text, str):
            raise RequestError(f"stop must be a string or a list of strings, not hold {show(text)}")
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise RequestError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters, not {len(text)}")
    return tuple(stops)


def _stop_token_ids(token_ids: Any) -> tuple[int, ...]:
    if not isinstance(token_ids, list | tuple | set | frozenset):
        raise RequestError(f"stop_token_ids must be a list of token ids, not {show(token_ids)}")
    return tuple(_whole("an id of stop_token_ids", i, 0, None) for i in token_ids)
