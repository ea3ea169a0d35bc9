"""Pages so far into a large pool that offsets in elements don't fit 32 bits: the same bits as from near ones.

Compares the backend under test with itself; needs 9 GB on its device, so it runs where that is a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from twins import LAYER, Part, assert_same_bits, make_batch, normal, rng_for, small_config

from samir_vllm.config import PAGE_SIZE

CONFIG = small_config()
TOKENS = 300  # more than one split
FAR = 2**32 // (2 * CONFIG.num_kv_heads * PAGE_SIZE * CONFIG.head_dim)
"""The first page that lies beyond 2^32 elements."""


def attend(backend: Any, first_page: int, qkv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A prompt whose K and V lie from ``first_page`` on: its prefill, and its last row by decode."""
    pages = -(-TOKENS // PAGE_SIZE)
    page_ids = first_page + np.arange(CONFIG.num_layers * pages, dtype=np.int32)
    backend.allocate_kv_cache(int(page_ids[-1]) + 1, 1, pages)
    backend.set_block_table(0, page_ids.reshape(CONFIG.num_layers, pages))
    backend.poison()
    inputs = backend.stage(make_batch([Part(0, TOKENS)]))
    q = backend.rope_kv_write(backend.from_numpy(qkv), LAYER, inputs)
    prefill = backend.to_numpy(backend.paged_attention_prefill(q, LAYER, inputs))
    last = backend.stage(make_batch([Part(0, 1, TOKENS - 1)], num_decodes=1))
    return prefill, backend.to_numpy(backend.paged_attention_decode(q[-1:], LAYER, last))


@pytest.mark.gpu
def test_far_pages_give_the_same_bits() -> None:
    from samir_vllm.backends.cuda_backend import CudaBackend

    backend = CudaBackend(CONFIG, max_logit_rows=TOKENS)
    width = (CONFIG.num_heads + 2 * CONFIG.num_kv_heads) * CONFIG.head_dim
    qkv = normal(rng_for("far pages"), TOKENS, width)
    with backend.active():
        near = attend(backend, 0, qkv)
        far = attend(backend, FAR, qkv)
    for got, want in zip(far, near, strict=True):
        assert_same_bits(got, want)
    assert_same_bits(near[1], near[0][-1:])
