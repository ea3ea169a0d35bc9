"""The int32 arrays of one step, and their builder.

Decode rows come first, then the prefill chunks in order. Knows no device: a backend copies what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from samir_vllm.backends import CHOSEN
from samir_vllm.sequence import ScheduledStep


@dataclass(frozen=True, slots=True)
class Batch:
    """What a forward pass reads; all arrays int32.

    T tokens of S sequences, L rows whose logits are wanted.
    """

    token_ids: np.ndarray  # [T]      CHOSEN where only the device knows it
    positions: np.ndarray  # [T]      absolute RoPE position of each token
    cu_seqlens_q: np.ndarray  # [S + 1]  prefix sums of the tokens each sequence has in this step
    seq_lens: np.ndarray  # [S]      KV length, this step's tokens included
    slots: np.ndarray  # [S]      row of the block tables
    logit_rows: np.ndarray  # [L]      rows (of T) that meet the LM head
    logit_slots: np.ndarray  # [L]      the slots of their sequences
    num_outputs: np.ndarray  # [L]      new tokens those have so far
    num_decodes: int  # the first sequences, with one token each


def build_batch(step: ScheduledStep) -> Batch:
    """Arrays for a step that is not empty."""
    decodes, prefills = step.decodes, step.prefills
    # Lists of all decodes at once, converted once: the cost per sequence is what bounds a large batch.
    positions = [s.num_launched_tokens for s in decodes]
    token_ids = [
        s.token_ids[p] if p < len(s.token_ids) else CHOSEN for s, p in zip(decodes, positions, strict=True)
    ]
    seq_lens = [p + 1 for p in positions]
    slots = [s.slot for s in decodes]
    ends = list(range(1, len(decodes) + 1))
    logit_rows = list(range(len(decodes)))
    logit_slots = slots.copy()
    num_outputs = [p + 1 - s.num_prompt_tokens for s, p in zip(decodes, positions, strict=True)]
    for seq, chunk in prefills:
        start = seq.num_launched_tokens
        stop = start + chunk
        token_ids += seq.token_ids[start:stop]
        positions += range(start, stop)
        seq_lens.append(stop)
        slots.append(seq.slot)
        ends.append(len(token_ids))
        if stop == seq.num_prompt_tokens:
            logit_rows.append(len(token_ids) - 1)
            logit_slots.append(seq.slot)
            num_outputs.append(0)
    return Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        cu_seqlens_q=np.array([0, *ends], np.int32),
        seq_lens=np.array(seq_lens, np.int32),
        slots=np.array(slots, np.int32),
        logit_rows=np.array(logit_rows, np.int32),
        logit_slots=np.array(logit_slots, np.int32),
        num_outputs=np.array(num_outputs, np.int32),
        num_decodes=len(decodes),
    )
