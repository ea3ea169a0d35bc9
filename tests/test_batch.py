"""The arrays of a step: exact for steps made by hand, and equal to an obvious loop on random ones."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from samir_vllm.batch import Batch, build_batch
from samir_vllm.sequence import ScheduledStep, Sequence


def sequence(prompt: list[int], output: list[int], computed: int, slot: int) -> Sequence:
    seq = Sequence(f"slot-{slot}", prompt, max_tokens=100)
    seq.token_ids += output
    seq.num_launched_tokens = computed
    seq.slot = slot
    return seq


def as_lists(batch: Batch) -> dict[str, object]:
    arrays = {f.name: getattr(batch, f.name) for f in fields(batch)}
    num_decodes = arrays.pop("num_decodes")
    for name, array in arrays.items():
        assert array.dtype == np.int32, name
        assert array.ndim == 1, name
    return {name: array.tolist() for name, array in arrays.items()} | {"num_decodes": num_decodes}


def test_decodes_then_chunks() -> None:
    step = ScheduledStep(
        decodes=[sequence([10, 11, 12], [13, 14], 4, slot=5), sequence([20], [21], 1, slot=0)],
        prefills=[
            (sequence([30, 31, 32, 33, 34], [], 2, slot=3), 3),  # the end of a prompt
            (sequence([40], [], 0, slot=7), 1),  # a whole prompt
            (sequence([50, 51, 52, 53], [], 1, slot=2), 2),  # a middle: no logits
        ],
        admitted=[],
    )
    assert as_lists(build_batch(step)) == {
        "token_ids": [14, 21, 32, 33, 34, 40, 51, 52],
        "positions": [4, 1, 2, 3, 4, 0, 1, 2],
        "cu_seqlens_q": [0, 1, 2, 5, 6, 8],
        "seq_lens": [5, 2, 5, 1, 3],
        "slots": [5, 0, 3, 7, 2],
        "logit_rows": [0, 1, 4, 5],
        "logit_slots": [5, 0, 3, 7],
        "num_outputs": [2, 1, 0, 0],
        "num_decodes": 2,
    }


def test_decodes_alone() -> None:
    step = ScheduledStep([sequence([1, 2], [3], 2, slot=9)], [], [])
    assert as_lists(build_batch(step)) == {
        "token_ids": [3],
        "positions": [2],
        "cu_seqlens_q": [0, 1],
        "seq_lens": [3],
        "slots": [9],
        "logit_rows": [0],
        "logit_slots": [9],
        "num_outputs": [1],
        "num_decodes": 1,
    }


def test_a_chunk_without_logits() -> None:
    step = ScheduledStep([], [(sequence([1, 2, 3], [], 0, slot=1), 2)], [])
    assert as_lists(build_batch(step)) == {
        "token_ids": [1, 2],
        "positions": [0, 1],
        "cu_seqlens_q": [0, 2],
        "seq_lens": [2],
        "slots": [1],
        "logit_rows": [],
        "logit_slots": [],
        "num_outputs": [],
        "num_decodes": 0,
    }


tokens = st.lists(st.integers(0, 127_999), min_size=1, max_size=40)


@st.composite
def steps(draw: st.DrawFn) -> ScheduledStep:
    slots = draw(st.permutations(range(12)))
    decodes, prefills = [], []
    for slot in slots[: draw(st.integers(0, 6))]:
        prompt, output = draw(tokens), draw(tokens)
        decodes.append(sequence(prompt, output, len(prompt) + len(output) - 1, slot))
    for slot in slots[6 : draw(st.integers(6 if decodes else 7, 12))]:
        prompt = draw(tokens)
        start = draw(st.integers(0, len(prompt) - 1))
        prefills.append((sequence(prompt, [], start, slot), draw(st.integers(1, len(prompt) - start))))
    return ScheduledStep(decodes, prefills, [])


def obvious(step: ScheduledStep) -> dict[str, object]:
    """Token by token, one sequence after the other."""
    arrays: dict[str, list[int]] = {name: [] for name in ("token_ids", "positions", "seq_lens", "slots")}
    ends = [0]
    logit_rows, logit_slots, num_outputs = [], [], []
    for seq, count in [*((seq, 1) for seq in step.decodes), *step.prefills]:
        position = seq.num_launched_tokens
        for _ in range(count):
            arrays["token_ids"].append(seq.token_ids[position])
            arrays["positions"].append(position)
            position += 1
        arrays["seq_lens"].append(position)
        arrays["slots"].append(seq.slot)
        ends.append(ends[-1] + count)
        if position == len(seq.token_ids):
            logit_rows.append(ends[-1] - 1)
            logit_slots.append(seq.slot)
            num_outputs.append(len(seq.output_token_ids))
    arrays |= {"logit_rows": logit_rows, "logit_slots": logit_slots, "num_outputs": num_outputs}
    return arrays | {"cu_seqlens_q": ends, "num_decodes": len(step.decodes)}


@settings(max_examples=100, deadline=None)
@given(steps())
def test_random_steps_equal_the_obvious_loop(step: ScheduledStep) -> None:
    batch = build_batch(step)
    assert as_lists(batch) == obvious(step)
    rows = [seq.request_id for seq in step.sampled()]
    owner_of_row = np.searchsorted(batch.cu_seqlens_q, batch.logit_rows, side="right") - 1
    assert rows == [f"slot-{batch.slots[i]}" for i in owner_of_row]
