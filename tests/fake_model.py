"""A model without weights: fake K and V in real pages, and an engine around it.

``FakeRunner`` stores each token where the block table says and computes the next one from what it reads back,
so a page shared by two sequences, a stale block table or a wrong position changes the answer or raises.
``samples=True`` gives it logits and the reference sampler; else what it says is a hash, which is quick.
"""

from __future__ import annotations

import codecs
import itertools
import zlib
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import pytest

from samir_vllm.backends import CHOSEN
from samir_vllm.backends.reference_sampler import Adjustments, sample_row, settings_of
from samir_vllm.batch import Batch, build_batch
from samir_vllm.config import NAN_TOKEN, PAGE_SIZE, EngineConfig, ModelConfig
from samir_vllm.engine import Engine
from samir_vllm.errors import InvariantError
from samir_vllm.sampling import SamplingParams, TokenMasks, TokenSampling
from samir_vllm.sequence import ScheduledStep, Sequence, StepResult, TokenLogprobs

VOCAB_SIZE = 272
"""Of the model; the tokenizer knows 256 ids, so some tokens have no text, as with a padded vocabulary."""

PLAIN = SamplingParams()

STEPS_AHEAD = pytest.mark.parametrize("steps_ahead", [0, 1, 2])
"""For tests of what must not depend on how far steps run ahead of the results that are read."""


def next_token(token_ids: Seq[int]) -> int:
    """What the fake model says after these tokens."""
    return zlib.crc32(np.asarray(token_ids, np.int32).tobytes()) % VOCAB_SIZE


def next_logits(token_ids: Seq[int]) -> np.ndarray:
    """FP32 [VOCAB_SIZE], the model's opinion of what follows these tokens."""
    return np.random.default_rng(next_token(token_ids)).standard_normal(VOCAB_SIZE, np.float32) * 3


def answer(prompt: Seq[int], max_tokens: int, stop_ids: Seq[int] = ()) -> list[int]:
    """The whole answer of a request that runs undisturbed."""
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(next_token(ids))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def sampled_token(
    token_ids: list[int], num_prompt_tokens: int, sampling: TokenSampling, mask: np.ndarray | None = None
) -> int:
    """The token after these, by the reference sampler; what was said before is counted anew each time."""
    logits, settings = next_logits(token_ids), settings_of(sampling)
    adjustments = Adjustments(sampling, token_ids[:num_prompt_tokens])
    outputs = token_ids[num_prompt_tokens:]
    for count, token in enumerate(outputs, 1):
        adjustments.count(token, count)
    if sampling.params.adjusts_logits:
        adjustments.apply(logits, settings, len(outputs))
    if mask is not None:
        logits[~mask] = -np.inf
    return sample_row(logits, settings, len(token_ids))


def sampled_answer(prompt: Seq[int], params: SamplingParams, *, index: int = 0) -> list[int]:
    """The whole answer number ``index`` of a request with a seed; only ``stop_token_ids`` end it early."""
    assert params.seed is not None
    stop_ids = frozenset(params.stop_token_ids)
    sampling, ids = TokenSampling(params, params.seed, index, stop_ids), list(prompt)
    for _ in range(params.max_tokens):
        ids.append(sampled_token(ids, len(prompt), sampling))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def logprobs_of(token_ids: Seq[int], token: int, count: int) -> TokenLogprobs:
    """Of ``token`` after these, by log-softmax in FP64."""
    logits = next_logits(token_ids).astype(np.float64)
    values = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-values, kind="stable")[:count].tolist()
    return TokenLogprobs(token, float(values[token]), tuple((i, float(values[i])) for i in best))


class FakeRunner:
    """Implements ``engine.Runner``.

    With ``steps_ahead`` it remembers what it said, as a GPU does, and the engine must launch steps whose
    tokens only it knows. Each step's work is done when it is launched, as on a stream.

    ``nan_at``: request id -> the output token (0 the first) that comes out NaN. ``raise_at``: number of the
    run (0 the first) -> what it raises, once K and V of the step are written; whom the step admitted it then
    forgets. ``raise_late``: what it raises when the result is asked for, the first time. ``says``: token ids
    it says over and over, if any. ``steps``: (decodes, prefills) of each run.
    """

    def __init__(self, num_pages: int, *, samples: bool = False, steps_ahead: int = 0) -> None:
        self.samples = samples
        self.steps_ahead = steps_ahead
        self.kv = np.full((num_pages, PAGE_SIZE), -1, np.int64)
        self.block_tables: dict[int, np.ndarray] = {}
        self.nan_at: dict[str, int] = {}
        self.raise_at: dict[int, BaseException] = {}
        self.raise_late: dict[int, BaseException] = {}
        self.raise_forward: dict[int, BaseException] = {}
        self._half_launched = False
        self._masks: dict[int, np.ndarray] = {}  # by row of the step's logits, bool [VOCAB_SIZE]
        self.says: list[int] = []
        self.steps: list[tuple[list[str], list[tuple[str, int]]]] = []
        self._numbers = itertools.count()
        self._unread: set[int] = set()
        # (slot, even or odd place) -> token, CHOSEN after the end
        self._kept: dict[tuple[int, int], int] = {}

    def launch(self, step: ScheduledStep) -> Callable[[], StepResult]:
        self._begin(step)
        return self._launch(step, build_batch(step))

    def launch_forward(self, step: ScheduledStep) -> Callable[[TokenMasks | None], Callable[[], StepResult]]:
        """What the step does is done when it goes on; ``raise_forward``: runs -> what it raises before."""
        self._begin(step)
        batch = build_batch(step)  # now: it says how far the sequences are
        if (exc := self.raise_forward.pop(len(self.steps), None)) is not None:
            raise exc

        def go_on(masks: TokenMasks | None) -> Callable[[], StepResult]:
            if self._unread:
                raise InvariantError("tokens are to be chosen although those before are not known")
            self._half_launched = False
            self._masks = {}
            if masks is not None:
                bits = np.unpackbits(masks.allowed.view(np.uint8), axis=1, bitorder="little") != 0
                self._masks = dict(zip(masks.rows.tolist(), bits[:, :VOCAB_SIZE], strict=True))
            try:
                return self._launch(step, batch)
            finally:
                self._masks = {}

        self._half_launched = True
        return go_on

    def _begin(self, step: ScheduledStep) -> None:
        if step.is_empty:
            raise InvariantError("the engine launches a step with nothing to run")
        if len(self._unread) > self.steps_ahead:
            raise InvariantError("the engine runs further ahead than it may")
        if self._half_launched:
            raise InvariantError("a step is launched on top of one whose tokens aren't chosen")
        self._admit(step)

    def _launch(self, step: ScheduledStep, batch: Batch) -> Callable[[], StepResult]:
        run, number = len(self.steps), next(self._numbers)
        result = self._run(step, batch)
        self._unread.add(number)

        def read() -> StepResult:
            if number in self._unread and number > min(self._unread):
                raise InvariantError("the engine reads a step before an older one")
            if (exc := self.raise_late.pop(run, None)) is not None:
                if isinstance(exc, Exception):
                    self._unread.discard(number)
                raise exc
            self._unread.discard(number)
            return result

        return read

    def _run(self, step: ScheduledStep, batch: Batch) -> StepResult:
        self.steps.append(
            ([s.request_id for s in step.decodes], [(s.request_id, chunk) for s, chunk in step.prefills])
        )
        result = self._forward(step, batch)
        if (exc := self.raise_at.get(len(self.steps) - 1)) is not None:
            for seq, _ in step.admitted:  # it must be told again
                self.block_tables.pop(seq.slot, None)
            raise exc
        return result

    def _admit(self, step: ScheduledStep) -> None:
        live = [*step.decodes, *(seq for seq, _ in step.prefills), *(seq for seq, _ in step.admitted)]
        if any(seq.slot < 0 for seq in live):
            raise InvariantError("a sequence without a slot is scheduled")
        for seq, page_ids in step.admitted:
            self.block_tables[seq.slot] = page_ids
            for parity in range(2):
                self._kept.pop((seq.slot, parity), None)
            behind = np.arange(seq.num_cached_tokens, page_ids.shape[1] * PAGE_SIZE)
            self.kv[page_ids[:, behind // PAGE_SIZE], behind % PAGE_SIZE] = -1

    def _forward(self, step: ScheduledStep, batch: Batch) -> StepResult:
        outputs = dict(zip(batch.logit_rows.tolist(), batch.num_outputs.tolist(), strict=True))
        result = StepResult([])
        logprobs: list[TokenLogprobs | None] = []
        sequences = [*step.decodes, *(seq for seq, _ in step.prefills)]
        for i, (seq, slot) in enumerate(zip(sequences, batch.slots.tolist(), strict=True)):
            start, stop = batch.cu_seqlens_q[i : i + 2].tolist()
            positions, table = batch.positions[start:stop], self.block_tables[slot]
            token_ids = batch.token_ids[start:stop].copy()
            if positions[-1] > seq.num_prompt_tokens + seq.max_tokens - 2:
                raise InvariantError(f"{seq.request_id} runs although its last token is made already")
            if token_ids[0] == CHOSEN:
                token_ids[0] = self._kept[slot, positions[0] % 2]
            if token_ids[0] < 0:  # it ended in a step before: padding
                self._kept[slot, (positions[0] + 1) % 2] = CHOSEN
                result.token_ids.append(NAN_TOKEN)
                logprobs.append(None)
                continue
            self.kv[table[:, positions // PAGE_SIZE], positions % PAGE_SIZE] = token_ids
            params = PLAIN if seq.sampling is None else seq.sampling.params
            if stop - 1 not in outputs and params.prompt_logprobs is None:
                continue
            seen = self.kv[table].reshape(len(table), -1)[:, : batch.seq_lens[i]]
            if (seen < 0).any() or (seen != seen[0]).any():
                raise InvariantError(f"slot {slot} reads K and V that it did not write: {seen.tolist()}")
            ids = seen[0].tolist()
            if stop - 1 in outputs:
                mask = self._masks.get(len(result.token_ids))
                token, count = self._choose(seq, ids, outputs[stop - 1], mask), params.logprobs
                self._kept[slot, len(ids) % 2] = CHOSEN if token in seq.stop_ids else token
                result.token_ids.append(token)
                logprobs.append(None if count is None or token < 0 else logprobs_of(ids, token, count))
            if i >= len(step.decodes) and params.prompt_logprobs is not None:
                places = range(int(positions[0]) + 1, min(len(ids) + 1, seq.num_prompt_tokens))
                found = [logprobs_of(ids[:p], seq.token_ids[p], params.prompt_logprobs) for p in places]
                result.prompt_logprobs.append((seq, found))
        if any(logprobs):
            result.logprobs = logprobs
        return result

    def _choose(self, seq: Sequence, token_ids: list[int], num_outputs: int, mask: np.ndarray | None) -> int:
        if self.nan_at.get(seq.request_id) == num_outputs:
            return NAN_TOKEN
        if self.samples:
            sampling = seq.sampling or TokenSampling(PLAIN, 0)
            return sampled_token(token_ids, seq.num_prompt_tokens, sampling, mask)
        token = self.says[num_outputs % len(self.says)] if self.says else next_token(token_ids)
        least = 0 if seq.sampling is None else seq.sampling.params.min_tokens
        while num_outputs < least and token in seq.stop_ids:
            token = (token + 1) % VOCAB_SIZE
        while mask is not None and mask.any() and not mask[token]:
            token = (token + 1) % VOCAB_SIZE
        return token


class ByteTokenizer:
    """A token is a byte of UTF-8; ``pieces`` are further tokens of several, with the ids from 256."""

    adds_bos = False

    def __init__(self, pieces: Seq[bytes] = ()) -> None:
        self._table = [bytes([i]) for i in range(256)] + list(pieces)
        self.vocab_size = len(self._table)

    def encode(self, text: str, *, allow_special: bool = False, add_bos: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Seq[int], *, skip_special: bool = False) -> str:
        return b"".join(self._table[i] for i in ids if i < self.vocab_size).decode(errors="replace")

    def stream_decoder(self, *, skip_special: bool = True) -> ByteDecoder:
        return ByteDecoder(self._table)


class ByteDecoder:
    """Holds back an incomplete character."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._table[token_id])

    def flush(self) -> str:
        return self._decode(b"", True)


def tiny_config(
    vocab_size: int, num_layers: int, context: int, eos_token_ids: tuple[int, ...]
) -> ModelConfig:
    """Of a model without weights."""
    return ModelConfig(
        hidden_size=64,
        intermediate_size=64,
        num_layers=num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        vocab_size=vocab_size,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        eos_token_ids=eos_token_ids,
    )


def make_engine(
    *,
    num_pages: int = 64,
    num_layers: int = 2,
    context: int = 256,
    eos_token_ids: tuple[int, ...] = (),
    samples: bool = False,
    steps_ahead: int = 0,
    pieces: Seq[bytes] = (),
    **options: object,
) -> tuple[Engine, FakeRunner]:
    """An engine on a fresh fake model; ``options`` are those of ``EngineConfig``."""
    model_config = tiny_config(VOCAB_SIZE, num_layers, context, eos_token_ids)
    runner = FakeRunner(num_pages, samples=samples, steps_ahead=steps_ahead)
    config = EngineConfig.from_options(**options)
    engine = Engine.from_parts(
        config,
        model_config,
        ByteTokenizer(pieces),  # type: ignore[arg-type]
        runner,
        num_pages=num_pages,
    )
    return engine, runner
