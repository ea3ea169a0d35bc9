"""The emulated backend as a whole: a forward pass, the check of the order of sums, every kernel launched."""

from __future__ import annotations

from typing import Any

import emulated
import numpy as np
import pytest
from twins import Part, fill_pages, make_batch, small_config

from harness import TINY, Chunk, Model, make_model, run
from samir_vllm.backends.cuda_compile import KERNELS
from samir_vllm.config import ModelConfig
from samir_vllm.llama import gemm_shapes, load_weights
from samir_vllm.sampling import SamplingParams, TokenSampling
from samir_vllm.weights import open_weights

pytestmark = [pytest.mark.emulated, emulated.needs_compiler]


# Two BF16 implementations: each is up to 0.15 off the unrounded logits, of standard deviation 1.3 (measured
# on the golden data); a wrong page or a shifted mask is off by several units.
ATOL, MEAN = 0.3, 0.05


@pytest.fixture(scope="module")
def tiny() -> Model:
    config = ModelConfig.from_dir(TINY)
    backend = emulated.cuda_backend_class()(
        config, max_tokens=64, max_num_seqs=4, max_logit_rows=64, max_positions=600
    )
    model = Model(config, backend, load_weights(backend, config, open_weights(TINY, config)))
    layers, slots, width = config.num_layers, 3, 4
    backend.allocate_kv_cache(layers * slots * width, slots, width)
    nan = np.full(backend.kv_cache.shape, 0x7FC0, np.uint16)  # what no one has written
    fill_pages(backend, nan)
    ids = np.random.default_rng(0).permutation(layers * slots * width).astype(np.int32)
    for slot, pages in enumerate(ids.reshape(slots, layers, width)):
        backend.set_block_table(slot, pages)
    return model


def test_prefill_and_decodes_of_a_model(tiny: Model) -> None:
    """17 tokens beside a chunk of another sequence, then two decode steps of both, against NumPy."""
    oracle = make_model(TINY, round_bf16=True)
    ids = np.load(TINY / "golden.npz")["long_ids"].astype(np.int32)
    steps = [
        ([Chunk(0, ids[:17]), Chunk(2, ids[100:105])], 0),
        ([Chunk(2, ids[105:106], 5), Chunk(0, ids[17:18], 17)], 2),
        ([Chunk(0, ids[18:19], 18), Chunk(2, ids[106:107], 6)], 2),
    ]
    for chunks, decodes in steps:
        got, want = run(tiny, chunks, decodes), run(oracle, chunks, decodes)
        np.testing.assert_allclose(got, want, atol=ATOL)
        assert np.abs(got - want).mean() < MEAN


class TestReductionOrder:
    """The host code of the check, whose judge is a kernel; the matrices are small."""

    CONFIG = small_config(intermediate_size=2080)

    def backend(self, *, batch_invariant: bool) -> tuple[Any, list[Any]]:
        backend = emulated.cuda_backend_class()(
            self.CONFIG, max_tokens=1, max_num_seqs=4, max_logit_rows=64, batch_invariant=batch_invariant
        )
        width = self.CONFIG.num_heads * self.CONFIG.head_dim
        rng = np.random.default_rng(0)
        shapes = [
            (self.CONFIG.hidden_size, width),
            (self.CONFIG.hidden_size, 2080),
            (1003, self.CONFIG.hidden_size),
        ]
        bits = [(rng.integers(0, 2**16, shape) & 0x81FF | 0x3E00).astype(np.uint16) for shape in shapes]
        return backend, [backend.upload([matrix]) for matrix in bits]

    def test_nothing_to_say(self) -> None:
        backend, matrices = self.backend(batch_invariant=False)
        backend.check_gemm_order(matrices)
        assert backend.notices == []

    @pytest.mark.parametrize("place", [0, -1])
    @pytest.mark.parametrize("batch_invariant", [False, True])
    def test_one_wrong_bit_is_noticed(
        self, batch_invariant: bool, place: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend, matrices = self.backend(batch_invariant=batch_invariant)
        product = backend._cublas.matmul

        def wrong(x: Any, weight: Any, out: Any, **options: Any) -> None:
            product(x, weight, out, **options)
            if len(x) >= 16 and not options.get("add"):
                out.reshape(-1)[place:][:1].view(np.uint16)[-1:] ^= np.uint16(1 << 6)

        monkeypatch.setattr(backend._cublas, "matmul", wrong)
        backend.check_gemm_order(matrices)
        [notice] = backend.notices
        assert ("takes its place" in notice) == batch_invariant
        assert "16 x 64 x 2080" in notice


def test_every_kernel_runs_on_the_emulator(tiny: Model) -> None:
    backend = tiny.backend
    before = emulated.launches.copy()
    backend.stage(make_batch([Part(0, 1)]))  # ends what an earlier step left pending
    backend.check_gemm_order(gemm_shapes(tiny.weights)[1::3])
    weight = backend.upload([np.zeros((tiny.config.hidden_size, 64), np.uint16)])
    x = backend.from_numpy(np.zeros((1, 64), np.uint16))
    residual = backend.from_numpy(np.zeros((1, tiny.config.hidden_size), np.uint16))
    backend.settle(backend.linear_add(x, weight, residual))
    ids = np.arange(20, dtype=np.int32)
    logits = run(tiny, [Chunk(1, ids)])
    run(tiny, [Chunk(1, ids[:1], 20)], num_decodes=1)
    values = backend._logits[:1, : tiny.config.vocab_size]
    backend.argmax(values)
    backend.log_probs(values, backend.from_numpy(ids[:1]), 1)
    backend.set_sampling(1, TokenSampling(SamplingParams(temperature=1, presence_penalty=1), seed=0))
    inputs = backend.stage(make_batch([Part(1, 1)]))
    backend.choose_tokens(values, inputs)
    backend.restore_logits(values, inputs)
    assert np.isfinite(logits).all()
    assert set(emulated.launches - before) == {name for names in KERNELS.values() for name in names}
