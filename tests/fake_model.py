"""A model without weights: fake K and V in real pages, and an engine around it.

``FakeRunner`` stores each token where the block table says and computes the next one from what it reads back,
so a page shared by two sequences, a stale block table or a wrong position changes the answer or raises.
"""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Sequence as Seq

import numpy as np

from samir_vllm.batch import build_batch
from samir_vllm.config import NAN_TOKEN, PAGE_SIZE, EngineConfig, ModelConfig
from samir_vllm.engine import Engine
from samir_vllm.errors import InvariantError
from samir_vllm.sequence import ScheduledStep

VOCAB_SIZE = 272
"""Of the model; the tokenizer knows 256 ids, so some tokens have no text, as with a padded vocabulary."""

IDLE_STEPS = 100
"""So many steps in a row with nothing to run mean that somebody waits for what never comes."""


def next_token(token_ids: Seq[int]) -> int:
    """What the fake model says after these tokens."""
    return zlib.crc32(np.asarray(token_ids, np.int32).tobytes()) % VOCAB_SIZE


def answer(prompt: Seq[int], max_tokens: int, stop_ids: Seq[int] = ()) -> list[int]:
    """The whole answer of a request that runs undisturbed."""
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(next_token(ids))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


class FakeRunner:
    """Implements ``engine.Runner``.

    ``nan_at``: request id -> the output token (0 the first) that comes out NaN. ``raise_at``: number of the
    run (0 the first; empty steps don't count) -> what it raises, once K and V of the step are written.
    ``steps``: (decodes, prefills) of each run.
    """

    def __init__(self, num_pages: int) -> None:
        self.kv = np.full((num_pages, PAGE_SIZE), -1, np.int64)
        self.block_tables: dict[int, np.ndarray] = {}
        self.nan_at: dict[str, int] = {}
        self.raise_at: dict[int, BaseException] = {}
        self.steps: list[tuple[list[str], list[tuple[str, int]]]] = []
        self._num_runs = 0
        self._idle_steps = 0

    def run(self, step: ScheduledStep) -> list[int]:
        if step.is_empty:
            self._idle_steps += 1
            if self._idle_steps > IDLE_STEPS:
                raise InvariantError("the engine steps on and on with nothing to run")
            return []
        self._idle_steps = 0
        self.steps.append(
            ([s.request_id for s in step.decodes], [(s.request_id, chunk) for s, chunk in step.prefills])
        )
        live = [*step.decodes, *(seq for seq, _ in step.prefills), *(seq for seq, _ in step.admitted)]
        if any(seq.slot < 0 for seq in live):
            raise InvariantError("a sequence without a slot is scheduled")
        for seq, page_ids in step.admitted:
            self.block_tables[seq.slot] = page_ids
            self.kv[page_ids] = -1
        tokens = self._forward(step)
        self._num_runs += 1
        if (exc := self.raise_at.get(self._num_runs - 1)) is not None:
            raise exc
        for i, seq in enumerate(step.sampled()):
            if self.nan_at.get(seq.request_id) == seq.num_output_tokens:
                tokens[i] = NAN_TOKEN
        return tokens

    def _forward(self, step: ScheduledStep) -> list[int]:
        batch = build_batch(step)
        wanted, tokens = set(batch.logit_rows.tolist()), []
        for i, slot in enumerate(batch.slots.tolist()):
            start, stop = batch.cu_seqlens_q[i : i + 2].tolist()
            positions, table = batch.positions[start:stop], self.block_tables[slot]
            self.kv[table[:, positions // PAGE_SIZE], positions % PAGE_SIZE] = batch.token_ids[start:stop]
            if stop - 1 in wanted:
                seen = self.kv[table].reshape(len(table), -1)[:, : batch.seq_lens[i]]
                if (seen < 0).any() or (seen != seen[0]).any():
                    raise InvariantError(f"slot {slot} reads K and V that it did not write: {seen.tolist()}")
                tokens.append(next_token(seen[0].tolist()))
        return tokens


class ByteTokenizer:
    """A token is a byte of UTF-8."""

    vocab_size = 256
    adds_bos = False

    def encode(self, text: str, *, allow_special: bool = False, add_bos: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Seq[int], *, skip_special: bool = False) -> str:
        return bytes(i for i in ids if i < self.vocab_size).decode(errors="replace")

    def stream_decoder(self, *, skip_special: bool = True) -> ByteDecoder:
        return ByteDecoder()


class ByteDecoder:
    """Holds back an incomplete character."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(bytes([token_id]))

    def flush(self) -> str:
        return self._decode(b"", True)


def make_engine(
    *,
    num_pages: int = 64,
    num_layers: int = 2,
    context: int = 256,
    eos_token_ids: tuple[int, ...] = (),
    **options: object,
) -> tuple[Engine, FakeRunner]:
    """An engine on a fresh fake model; ``options`` are those of ``EngineConfig``."""
    model_config = ModelConfig(
        hidden_size=64,
        intermediate_size=64,
        num_layers=num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        eos_token_ids=eos_token_ids,
    )
    runner = FakeRunner(num_pages)
    config = EngineConfig.from_options(**options)
    engine = Engine.from_parts(
        config,
        model_config,
        ByteTokenizer(),  # type: ignore[arg-type]
        runner,
        num_pages=num_pages,
    )
    return engine, runner
