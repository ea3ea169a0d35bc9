"""How a token is chosen, in NumPy: what every backend's sampler equals, token by token, on equal logits.

Probabilities become whole numbers (masses), so that sums are exact and no order of adding can move a
token; their exponential is a fixed row of FP32 operations, the same bits on every device; the random number
is Philox 4x32-10 (Salmon et al., 2011), keyed by the seed and counted by the token's position. So a token
depends on its logits, the request and the position, and on nothing else. Knows no batch and no device.

For a row of logits, of which biases, penalties and ``min_tokens`` are already part (`Adjustments`), the token
is that of the greatest, the lowest id on a tie, if the temperature is 0 or the greatest is infinite. Else:

1. e(i) = 2^((logit(i) - greatest) * log2(e) / temperature), at most 1; the mass is floor(e * 2^43).
2. ``top_k`` keeps the first k tokens by logit, lower ids first on a tie. ``min_p`` keeps e >= min_p.
3. ``top_p`` keeps, of those, the shortest beginning whose mass is at least top_p of theirs; at least a token.
4. With r = floor(random * mass of what is kept / 2^64), the token is the first, by id, at which the kept
   masses add up to more than r.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from samir_vllm.config import NAN_TOKEN
from samir_vllm.sampling import TokenSampling

MASS_BITS = 43
"""Of the greatest mass; a vocabulary of 2^20 sums to less than 2^64."""

MAX_VOCAB = 1 << 20

EXP2 = (0.693147, 0.24022242, 0.055507336, 0.009671513, 0.0013264727)
"""2^f = 1 + f (c0 + f (c1 + ...)) for f in [-1/2, 1/2], to 2e-7; fitted for the least relative error."""

LEAST_EXPONENT = -60.0
"""Below it, as below -43, the mass is 0; e stays a normal number."""

SMALLEST_NORMAL = np.float32(2.0**-126)

SETTINGS = np.dtype(
    [
        ("scale", "f4"),  # log2(e) / temperature; 0: the greatest logit
        ("min_p", "f4"),
        ("top_k", "u4"),  # 0: all
        ("index", "u4"),  # which of the request's answers
        ("top_p", "u8"),  # in units of 2^-32
        ("seed", "u8"),
        ("repetition", "f4"),
        ("presence", "f4"),
        ("frequency", "f4"),
        ("min_tokens", "i4"),
        ("table", "u4"),  # of its adjustments, where the CUDA backend has them, counted from 1; 0: none
        ("padding", "i4", (3,)),
    ]
)
"""One sequence's settings, 64 bytes; ``cuda_src/sampling.cuh`` has the same."""

IN_PROMPT, ENDS_ANSWER, ONE_OUTPUT = 1, 2, 4
"""Of an adjustment's state: two flags, and above them the count in the output."""


def settings_of(sampling: TokenSampling | None) -> np.ndarray:
    """The numbers that the arithmetic uses, SETTINGS []; None: the greatest logit."""
    found = np.zeros((), SETTINGS)
    if sampling is None:
        return found
    params = sampling.params
    if params.temperature > 0:
        # Neither 0 nor infinite in FP32, whatever the temperature: 0 * inf would be NaN.
        scale = math.log2(math.e) / params.temperature
        found["scale"] = min(max(scale, float(SMALLEST_NORMAL)), 3e38)
    found["min_p"], found["top_k"] = params.min_p, min(params.top_k, 2**32 - 1)
    found["top_p"] = round(params.top_p * 2**32)
    found["seed"], found["index"] = sampling.seed, sampling.index
    found["repetition"], found["min_tokens"] = params.repetition_penalty, min(params.min_tokens, 2**31 - 1)
    found["presence"], found["frequency"] = params.presence_penalty, params.frequency_penalty
    return found


def random_bits(seed: int, position: int, index: int) -> int:
    """64 random bits: two words of Philox 4x32-10, its key ``seed``, its counter (position, index, 0, 0)."""
    counter = (position & 0xFFFFFFFF, index, 0, 0)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    for _ in range(10):
        low, high = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = (
            (high >> 32) ^ counter[1] ^ key[0],
            high & 0xFFFFFFFF,
            (low >> 32) ^ counter[3] ^ key[1],
            low & 0xFFFFFFFF,
        )
        key = ((key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF)
    return counter[0] | counter[1] << 32


def sample_row(logits: np.ndarray, settings: np.ndarray, position: int) -> int:
    """The token at ``position`` for adjusted FP32 logits [vocab_size]; NAN_TOKEN where one is NaN."""
    first = int(np.argmax(logits))  # of the first NaN, if there is one
    if np.isnan(logits[first]):
        return NAN_TOKEN
    if settings["scale"] == 0 or np.isinf(logits[first]):
        return first
    e = exponentials(logits, settings["scale"])
    masses = (e.astype(np.float64) * 2.0**MASS_BITS).astype(np.uint64)
    ids = kept_ids(logits, e, masses, settings)
    sums = np.cumsum(masses[ids])
    bits = random_bits(int(settings["seed"]), position, int(settings["index"]))
    r = bits * int(sums[-1]) >> 64
    return int(ids[np.searchsorted(sums, np.uint64(r), side="right")])


def exponentials(logits: np.ndarray, scale: np.ndarray | np.float32) -> np.ndarray:
    """e(i), FP32 [vocab_size], 2^-60 to 1; the greatest logit is finite.

    Each operation rounds as a GPU's does that flushes subnormals.
    """
    values = flushed(logits)
    with np.errstate(over="ignore"):
        x = flushed(values - values.max()) * scale
    x = np.maximum(x, np.float32(LEAST_EXPONENT))
    whole = np.rint(x)
    f = x - whole
    y = np.full_like(f, np.float32(EXP2[-1]))
    for coefficient in EXP2[-2::-1]:
        y = y * f + np.float32(coefficient)
    return np.ldexp(y * f + np.float32(1), whole.astype(np.int32))


def flushed(x: np.ndarray) -> np.ndarray:
    """Subnormal numbers become 0, as they do in the kernels."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.float32(0), x)


def kept_ids(logits: np.ndarray, e: np.ndarray, masses: np.ndarray, settings: np.ndarray) -> np.ndarray:
    """The ids that the filters keep and that have a mass, ascending."""
    kept = (e >= settings["min_p"]) & (masses > 0)
    k = int(settings["top_k"])
    if 0 < k < len(logits):
        kth = -np.partition(-logits, k - 1)[k - 1]
        above = logits > kth
        ties = np.flatnonzero(logits == kth)[: k - np.count_nonzero(above)]
        above[ties] = True
        kept &= above
    ids = np.flatnonzero(kept)
    top_p = int(settings["top_p"])
    if top_p < 1 << 32:
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        sums = np.cumsum(masses[ids])
        target = max(1, -(-int(sums[-1]) * top_p >> 32))  # rounded up: -(-x >> n)
        ids = np.sort(ids[: np.searchsorted(sums, np.uint64(target), side="left") + 1])
    return ids


class Adjustments:
    """What changes single logits of one sequence: one entry for each token concerned."""

    def __init__(self, sampling: TokenSampling, prompt_token_ids: Sequence[int]) -> None:
        """Entries for biases, stop ids (with ``min_tokens``) and the prompt (with a repetition penalty).

        Args:
            sampling: of the sequence.
            prompt_token_ids: its prompt.
        """
        params = sampling.params
        states = dict.fromkeys(map(int, params.logit_bias), 0)
        if params.repetition_penalty != 1:
            states |= dict.fromkeys(map(int, prompt_token_ids), IN_PROMPT)
        if params.min_tokens:
            for token in sampling.stop_ids:
                states[token] = states.get(token, 0) | ENDS_ANSWER
        self.counts_outputs = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self.ids = np.array(list(states), np.int32)
        self.states = np.array(list(states.values()), np.int32)
        self.biases = np.array([params.logit_bias.get(i, 0) for i in states], np.float32)
        self._raw = np.empty(0, np.float32)
        self._num_counted = 0

    def count(self, token: int, num_outputs: int) -> None:
        """The output's ``num_outputs`` tokens end with ``token``; it counts once, even if called again."""
        if not self.counts_outputs or self._num_counted >= num_outputs:
            return
        self._num_counted = num_outputs
        at = np.flatnonzero(self.ids == token)
        if len(at):
            self.states[at] += ONE_OUTPUT
        else:
            self.ids = np.append(self.ids, np.int32(token))
            self.states = np.append(self.states, np.int32(ONE_OUTPUT))
            self.biases = np.append(self.biases, np.float32(0))

    def apply(self, logits: np.ndarray, settings: np.ndarray, num_outputs: int) -> None:
        """Change a row of FP32 logits [vocab_size] in place, as `Backend.adjust_logits` says."""
        self._raw = logits[self.ids]
        counts = self.states // ONE_OUTPUT
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            x = flushed(flushed(self._raw) + self.biases)
            seen = (counts > 0) | (self.states & IN_PROMPT > 0)
            repetition = settings["repetition"]
            x = np.where(seen, flushed(np.where(x > 0, x / repetition, x * repetition)), x)
            x = flushed(x - flushed(counts.astype(np.float32) * settings["frequency"]))
            x = np.where(counts > 0, flushed(x - settings["presence"]), x)
        if num_outputs < settings["min_tokens"]:
            x[self.states & ENDS_ANSWER > 0] = -np.inf
        logits[self.ids] = x

    def restore(self, logits: np.ndarray) -> None:
        """Undo the last ``apply``."""
        logits[self.ids] = self._raw
