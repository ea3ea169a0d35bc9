"""Decode steps that follow one another without the host: on NumPy, whose rows are set and moved as a GPU's.

Logits are the same bits in any company (row by row), so all comparisons are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness import TINY, make_tiny_engine
from samir_vllm import SamplingParams, decode_loop
from samir_vllm.backends import Array
from samir_vllm.backends.numpy_backend import NumpyBackend, NumpyInputs
from samir_vllm.batch import build_batch
from samir_vllm.config import ModelConfig
from samir_vllm.decode_loop import DecodeLoop, run_step
from samir_vllm.llama import load_weights
from samir_vllm.outputs import RequestOutput
from samir_vllm.sampling import TokenMasks, TokenSampling
from samir_vllm.sequence import ScheduledStep, Sequence
from samir_vllm.weights import open_weights

SLOTS, PAGES = 6, 5
"""Of these loops: sequences, and pages of each in each layer."""


class WatchedBackend(NumpyBackend):
    """Counts what it is asked for, and can be interrupted.

    ``interrupt_at``: "set" once it has taken rows, "before" a step, "inside" it when a token is kept, or
    "after" it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_sets = 0
        self.recorded: list[Hashable] = []
        self.shapes: list[Hashable] = []  # of the steps to come; None where there are none
        self.longest: list[int] = []  # KV length of each step
        self.interrupt_at = ""

    def interrupt(self, here: str) -> None:
        if self.interrupt_at == here:
            self.interrupt_at = ""
            raise KeyboardInterrupt

    def set_decode_rows(self, slots: np.ndarray, positions: np.ndarray, prompt_lens: np.ndarray) -> None:
        super().set_decode_rows(slots, positions, prompt_lens)
        self.num_sets += 1
        self.interrupt("set")

    def decode_shape(self, max_seq_len: int) -> Hashable:
        self.longest.append(max_seq_len)
        return self.shapes.pop(0) if self.shapes else None

    def begin_decode(self, shape: Any) -> NumpyInputs:
        self.begun = shape
        return super().begin_decode(shape)

    def keep_tokens(self, token_ids: Array, inputs: NumpyInputs) -> None:
        super().keep_tokens(token_ids, inputs)
        self.interrupt("inside")

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        self.recorded.append(len(self.recorded))

        def replay() -> Any:
            self.interrupt("before")
            out = run()
            self.interrupt("after")
            return out

        return replay


class Loop:
    """A loop on the golden model, and its sequences' progress, which a scheduler would book."""

    def __init__(self) -> None:
        config = ModelConfig.from_dir(TINY)
        self.backend = WatchedBackend(config, round_bf16=False, batch_invariant=True)
        self.weights = load_weights(self.backend, config, open_weights(TINY, config))
        layers = config.num_layers
        self.backend.allocate_kv_cache(SLOTS * layers * PAGES, SLOTS, PAGES)
        self.backend.kv_cache[...] = np.nan
        for slot, ids in enumerate(np.arange(SLOTS * layers * PAGES).reshape(SLOTS, layers, PAGES)):
            self.backend.set_block_table(slot, ids)
        self.loop = DecodeLoop(self.backend, self.weights)

    def sequence(self, slot: int, prompt_len: int, **options: Any) -> Sequence:
        """One whose prompt is in its pages."""
        prompt = np.random.default_rng(prompt_len).integers(0, 512, prompt_len).tolist()
        seq = Sequence(f"{slot}", prompt, max_tokens=40, **options)
        seq.slot = slot
        self.backend.set_sampling(slot, seq.sampling, prompt)
        self.backend.set_stop_ids(slot, seq.stop_ids)
        self.mixed([], [(seq, prompt_len)])
        return seq

    def mixed(self, decodes: list[Sequence], prefills: list[tuple[Sequence, int]]) -> list[int]:
        """A step beside the loop; its tokens."""
        batch = build_batch(ScheduledStep(decodes, prefills, []))
        tokens = run_step(self.backend, self.weights, self.backend.stage(batch)).token_ids.tolist()
        for seq, count in [*((seq, 1) for seq in decodes), *prefills]:
            seq.num_launched_tokens += count
        return tokens

    def step(self, sequences: list[Sequence]) -> tuple[list[int], bytes]:
        """Tokens, and the bits of the logits."""
        arrays = self.loop.run(sequences)
        for seq in sequences:
            seq.num_launched_tokens += 1
        return arrays.token_ids.tolist(), arrays.logits.tobytes()


def some_sequences(loop: Loop) -> list[Sequence]:
    """A greedy one, one with chance, and one with penalties; at even and odd places."""
    sampled = TokenSampling(SamplingParams(temperature=1, seed=3), seed=3)
    penalties = SamplingParams(temperature=0.7, frequency_penalty=1, repetition_penalty=1.3)
    return [
        loop.sequence(0, 15),
        loop.sequence(3, 8, sampling=sampled),
        loop.sequence(1, 30, sampling=TokenSampling(penalties, seed=4)),
    ]


# Rows


def test_rows_are_set_when_the_sequences_change_and_only_then() -> None:
    loop = Loop()
    both = some_sequences(loop)[:2]
    other = loop.sequence(5, 3)
    for expected, sequences in [(1, both), (1, both), (2, three := [*both, other]), (2, three), (3, [other])]:
        loop.step(sequences)
        assert loop.backend.num_sets == expected


def test_rows_are_set_after_a_step_beside_the_loop() -> None:
    """Which has moved the sequences on, but not their rows."""
    loop, plain = Loop(), Loop()
    pair, again = some_sequences(loop)[:2], some_sequences(plain)[:2]
    loop.step(pair)
    loop.mixed(pair, [])
    assert loop.step(pair) == [plain.step(again) for _ in range(3)][-1]
    assert (loop.backend.num_sets, plain.backend.num_sets) == (2, 1)


def test_tokens_are_those_of_steps_beside_the_loop() -> None:
    """Staged by the host, which leaves every token to the backend: so do the steps of the loop."""
    loop, staged = Loop(), Loop()
    sequences, others = some_sequences(loop), some_sequences(staged)
    for _ in range(20):
        assert loop.step(sequences)[0] == staged.mixed(others, [])


def test_one_that_has_ended_is_padding_and_the_others_go_on() -> None:
    loop, plain = Loop(), Loop()
    sequences, others = some_sequences(loop), some_sequences(plain)
    tokens = [plain.step(others)[0] for _ in range(6)]
    stop = tokens[3][1]
    assert all(step[1] != stop for step in tokens[:3])
    loop.backend.set_stop_ids(sequences[1].slot, frozenset({stop}))
    pages = loop.backend.block_tables[sequences[1].slot]
    for want in tokens[:4]:
        assert loop.step(sequences)[0] == want
    stored = loop.backend.kv_cache[pages].copy()
    got = loop.step(sequences)[0]  # launched before its end was known
    assert [got[0], got[2]] == [tokens[4][0], tokens[4][2]]
    np.testing.assert_array_equal(loop.backend.kv_cache[pages], stored)
    assert loop.step([sequences[0], sequences[2]])[0] == [tokens[5][0], tokens[5][2]]


# Interruptions


@pytest.mark.parametrize("place", ["set", "before", "inside", "after"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_interrupted_step_is_repeated(place: str, at: int) -> None:
    """However far it came: its tokens, and all later ones, are those of a loop that nothing disturbs."""
    loop, plain = Loop(), Loop()
    sequences, others = some_sequences(loop), some_sequences(plain)
    want = [plain.step(others) for _ in range(6)]
    for i in range(6):
        if i == at:
            if place == "set":
                sequences = sequences.copy()  # as after a change
            for _ in range(2):
                loop.backend.interrupt_at = place
                with pytest.raises(KeyboardInterrupt):
                    loop.step(sequences)
        assert loop.step(sequences) == want[i]


@pytest.mark.parametrize("place", ["before", "inside", "after"])
def test_an_interrupted_step_whose_sequences_change(place: str) -> None:
    """One is aborted before the step is repeated."""
    loop, plain = Loop(), Loop()
    sequences, others = some_sequences(loop), some_sequences(plain)
    assert loop.step(sequences) == plain.step(others)
    loop.backend.interrupt_at = place
    with pytest.raises(KeyboardInterrupt):
        loop.step(sequences)
    rest, other_rest = sequences[1:], others[1:]
    for _ in range(3):
        assert loop.step(rest) == plain.step(other_rest)


# Records


def test_the_longest_kv_is_told_for_each_step() -> None:
    """Of the sequences of the step, whichever they are: their prompts have 15, 8 and 30 tokens."""
    loop = Loop()
    sequences = some_sequences(loop)
    for some in (sequences, sequences, sequences[:2], sequences[:2], sequences[1:]):
        loop.step(some)
    assert loop.backend.longest == [31, 32, 18, 19, 33]


def test_each_shape_is_recorded_once() -> None:
    loop = Loop()
    loop.backend.shapes = ["a", "b", "a", "a", "b", "c"]
    pair = some_sequences(loop)[:2]
    begun = []
    for _ in range(6):
        loop.step(pair)
        begun.append(loop.backend.begun)
    assert begun == ["a", "b", "a", "a", "b", "c"]
    assert len(loop.backend.recorded) == 3


def test_the_record_unused_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_loop, "MAX_RECORDS", 2)
    loop = Loop()
    pair = some_sequences(loop)[:2]
    #                       b is forgotten, then a, then c
    steps = [
        ("a", 1),
        ("b", 2),
        ("a", 2),
        ("c", 3),
        ("a", 3),
        ("c", 3),
        ("b", 4),
        ("c", 4),
        ("a", 5),
        ("b", 6),
    ]
    for shape, recorded in steps:
        loop.backend.shapes = [shape]
        loop.step(pair)
        assert len(loop.backend.recorded) == recorded, shape
        assert len(loop.loop._records) <= 2


def test_what_fails_while_it_is_recorded_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, plain = Loop(), Loop()
    sequences, others = some_sequences(loop), some_sequences(plain)
    record = loop.backend.record

    def fails(run: Callable[[], Any]) -> Callable[[], Any]:
        run()  # some of it may have been done
        raise MemoryError

    monkeypatch.setattr(loop.backend, "record", fails)
    with pytest.raises(MemoryError):
        loop.step(sequences)
    monkeypatch.setattr(loop.backend, "record", record)
    for _ in range(3):
        assert loop.step(sequences) == plain.step(others)


# An engine on a backend that is launched ahead, and pads


class PaddingBackend(NumpyBackend):
    """As a GPU's: steps are launched ahead, in buckets of rows; results are gone with the next step."""

    steps_ahead = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps = self.padded_steps = self.ended_rows = 0
        self._old: list[np.ndarray] = []

    def set_decode_rows(self, slots: np.ndarray, positions: np.ndarray, prompt_lens: np.ndarray) -> None:
        self.count = len(slots)
        padding = (1 << (self.count - 1).bit_length()) - self.count
        nobody, zeros = np.full(padding, self._nobody, np.int32), np.zeros(padding, np.int32)
        super().set_decode_rows(
            np.append(slots, nobody), np.append(positions, zeros), np.append(prompt_lens, zeros)
        )

    def decode_shape(self, max_seq_len: int) -> Hashable:
        return len(self._decode_slots)

    def begin_decode(self, shape: Any) -> NumpyInputs:
        inputs = super().begin_decode(shape)
        assert len(inputs.token_ids) == shape
        self._decode_positions[self.count :] = 0  # nobody gets on
        ended = [slot == self._nobody for slot in inputs.slots[: self.count]]
        assert (inputs.page_ids[:, : self.count].min(axis=0) < 0).tolist() == ended  # no step beyond the last
        self.steps += 1
        self.padded_steps += shape > self.count
        self.ended_rows += sum(ended)
        return inputs

    def choose_tokens(
        self, logits: np.ndarray, inputs: NumpyInputs, masks: TokenMasks | None = None
    ) -> np.ndarray:
        """Into one place; what the step before has left is spoilt, as soon as this one is launched."""
        for old in self._old:
            old[...] = 7
        tokens = super().choose_tokens(logits, inputs, masks)
        self._old = [tokens, logits]
        return tokens

    def read_later(self, *arrays: np.ndarray) -> Callable[[], list[np.ndarray]]:
        return super().read_later(*(array.copy() for array in arrays))


GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=25, temperature=0.9, top_p=0.9, top_k=40, seed=11, ignore_eos=True)
PENALISED = SamplingParams(
    max_tokens=28,
    temperature=0.8,
    seed=5,
    frequency_penalty=1.5,
    presence_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias={100: 3, 200: -5},
    min_tokens=4,
)
WISHES = {
    "greedy": [GREEDY],
    "sampled": [SAMPLED],
    "penalties": [PENALISED],
    "logprobs": [replace(GREEDY, logprobs=3), replace(SAMPLED, logprobs=0), replace(PENALISED, logprobs=2)],
    "prompt logprobs": [replace(PENALISED, prompt_logprobs=2), GREEDY],
    "several answers": [replace(SAMPLED, n=3), GREEDY],
    "everything": [
        GREEDY,
        SAMPLED,
        PENALISED,
        replace(PENALISED, logprobs=1, n=2),
        replace(GREEDY, max_tokens=1),
    ],
}


def run_all(
    backend_class: type[NumpyBackend], wishes: list[SamplingParams], stop_ids: tuple[int, ...]
) -> tuple[list[RequestOutput], Any]:
    """Nine prompts, of which some arrive late and wait for a slot; chunks of prompts run beside decodes."""
    engine = make_tiny_engine(
        backend_class=backend_class, eos_token_ids=stop_ids, max_num_seqs=6, max_batched_tokens=20
    )
    rng = np.random.default_rng(8)
    results: dict[str, RequestOutput] = {}
    arrivals = [
        (i, rng.integers(0, 512, n).tolist()) for i, n in enumerate((3, 17, 40, 15, 16, 5, 33, 1, 31))
    ]
    while arrivals or engine.has_work:
        for i, prompt in arrivals[:2]:
            params = wishes[i % len(wishes)]
            if i % 2:  # the ids end these, by chance, after some tokens
                params = replace(params, ignore_eos=False)
            engine.add_request(prompt, params, request_id=str(i))
        arrivals = arrivals[2:]
        for _ in range(5):
            for out in engine.step():
                if out.result is not None:
                    results[out.request_id] = out.result
            engine.pool.check_integrity()
    assert engine.pool.num_used == 0
    runner: Any = engine._runner
    return [results[key] for key in sorted(results)], runner.backend


@pytest.mark.parametrize("kind", WISHES)
def test_launched_ahead_and_padded_the_answers_are_the_same(kind: str) -> None:
    stop_ids = tuple(range(0, 512, 17))
    want, _ = run_all(NumpyBackend, WISHES[kind], stop_ids)
    got, backend = run_all(PaddingBackend, WISHES[kind], stop_ids)
    assert len(got) == 9
    for a, b in zip(got, want, strict=True):
        assert a.prompt_logprobs == b.prompt_logprobs
        for mine, other in zip(a.completions, b.completions, strict=True):
            assert mine.token_ids == other.token_ids
            assert (mine.finish_reason, mine.stop_reason) == (other.finish_reason, other.stop_reason)
            assert mine.logprobs == other.logprobs
            assert mine.text == other.text
    reasons = {c.finish_reason for out in got for c in out.completions}
    assert reasons == {"stop", "length"}
    assert 0 < backend.padded_steps < backend.steps
    assert backend.ended_rows > 0  # ends that the backend saw before the engine
