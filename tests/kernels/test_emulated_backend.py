"""The emulated backend as a whole: forward passes, steps from graphs, the check of the order of sums."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import emulated
import numpy as np
import pytest
from twins import Part, fill_pages, make_batch, small_config

from harness import TINY, Chunk, Model, make_model, run
from samir_vllm.backends import CHOSEN
from samir_vllm.backends.cuda_compile import KERNELS
from samir_vllm.batch import build_batch
from samir_vllm.config import ModelConfig
from samir_vllm.decode_loop import DecodeLoop, StepArrays, run_step
from samir_vllm.llama import gemm_shapes, load_weights
from samir_vllm.sampling import SamplingParams, TokenSampling
from samir_vllm.sequence import ScheduledStep, Sequence
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
    layers, slots, width = config.num_layers, 4, 4
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


class Decoder:
    """One model's steps, as a runner makes them; all are under way before any of their tokens is known."""

    def __init__(self, model: Model, sequences: dict[str, Sequence]) -> None:
        self.model = model
        self.backend = model.backend
        self.loop = DecodeLoop(model.backend, model.weights)
        self.sequences = sequences
        self.decodes: list[Sequence] = []
        for seq in sequences.values():
            self.backend.set_stop_ids(seq.slot, seq.stop_ids)
            self.backend.set_sampling(seq.slot, seq.sampling, seq.token_ids)

    def step(self, names: str, prompt_of: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Raw logits [L, vocab_size] and tokens [L] of those that decode, and of new ones behind them."""
        if names != "".join(seq.request_id for seq in self.decodes):
            self.decodes = [self.sequences[name] for name in names]
        prefills = [(seq, seq.num_prompt_tokens) for seq in map(self.sequences.__getitem__, prompt_of)]
        with self.backend.active():
            arrays = self._run_mixed(prefills) if prefills else self.loop.run(self.decodes)
            if not arrays.inputs.is_argmax:
                self.backend.restore_logits(arrays.logits, arrays.inputs)
            rows = slice(0, len(names) + len(prompt_of))
            found = self.backend.to_numpy(arrays.logits)[rows], self.backend.to_numpy(arrays.token_ids)[rows]
        for seq, count in [*((s, 1) for s in self.decodes), *prefills]:
            seq.num_launched_tokens += count
        return found

    def _run_mixed(self, prefills: list[tuple[Sequence, int]]) -> StepArrays:
        batch = build_batch(ScheduledStep(self.decodes, prefills, []))
        return run_step(self.backend, self.model.weights, self.backend.stage(batch))


def golden_ids(start: int, count: int) -> list[int]:
    return np.load(TINY / "golden.npz")["long_ids"][start : start + count].tolist()


def sequence(
    name: str, slot: int, prompt: list[int], stop_ids: Seq[int] = (), says: Seq[int] = ()
) -> Sequence:
    """One that says these tokens, whatever the model thinks: each once, as biases and a penalty have it."""
    sampling = None
    if says:
        bias = {token: 100.0 - 10 * i for i, token in enumerate(says)}
        sampling = TokenSampling(SamplingParams(logit_bias=bias, repetition_penalty=100), seed=0)
    seq = Sequence(name, prompt, max_tokens=20, stop_ids=frozenset(stop_ids), sampling=sampling)
    seq.slot = slot
    return seq


def test_steps_from_graphs(tiny: Model) -> None:
    """Against NumPy's steps: padding, a prompt beside decodes, an end that only the device sees.

    A row's logits are those of a prefill of the same tokens, to the bit: the order of sums is one.
    """
    prompts = {"a": golden_ids(0, 17), "b": golden_ids(30, 5), "c": golden_ids(50, 7)}
    free = sorted(set(range(512)).difference(*prompts.values()))
    says = {"a": free[:9], "b": free[9:18], "c": free[18:27]}
    stop_ids = {"b": [free[40], says["b"][5]]}

    def decoder(model: Model) -> Decoder:
        return Decoder(
            model,
            {
                name: sequence(name, slot, prompts[name], stop_ids.get(name, ()), says[name])
                for name, slot in (("a", 3), ("b", 0), ("c", 1))
            },
        )

    tested, oracle = decoder(tiny), decoder(make_model(TINY, round_bf16=True))
    rows: dict[str, list[np.ndarray]] = {"a": [], "b": [], "c": []}
    tokens: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    before = emulated.launches.copy()
    steps = [("", "ab"), ("ab", ""), ("ab", ""), ("ab", "c")]  # then with padding, until b's end is known
    steps += [("abc", ""), ("abc", ""), ("abc", ""), ("ac", "")]
    for names, prompt_of in steps:
        (got, got_tokens), (want, want_tokens) = (d.step(names, prompt_of) for d in (tested, oracle))
        for i, name in enumerate(names + prompt_of):
            if name == "b" and len(tokens["b"]) == 6:  # padding by now: whatever this row says is dropped
                continue
            np.testing.assert_allclose(got[i], want[i], atol=ATOL)
            assert got_tokens[i] == want_tokens[i]
            rows[name].append(got[i])
            tokens[name].append(int(got_tokens[i]))
    assert tokens == {"a": says["a"][:8], "b": says["b"][:6], "c": says["c"][:5]}
    assert len(tested.loop._records) == 2  # of two rows and of four
    assert emulated.launches["begin_decode"] - before["begin_decode"] == 6

    whole = [[*prompts[name], *tokens[name][:-1]] for name in rows]
    again = run(tiny, [Chunk(slot, np.array(ids, np.int32)) for slot, ids in enumerate(whole)])
    ends = np.cumsum([len(ids) for ids in whole])
    for name, end in zip(rows, ends, strict=True):
        prefill = again[end - len(rows[name]) : end]
        np.testing.assert_array_equal(np.stack(rows[name]).view(np.uint32), prefill.view(np.uint32))


@pytest.mark.slow
def test_greedy_steps_from_a_graph(tiny: Model) -> None:
    """The golden model is sure enough of these tokens for two BF16 implementations to agree."""
    decoders = [
        Decoder(model, {"a": sequence("a", 2, golden_ids(258, 3))})
        for model in (tiny, make_model(TINY, round_bf16=True))
    ]
    for step in [("", "a"), *[("a", "")] * 4]:
        (got, got_tokens), (want, want_tokens) = (d.step(*step) for d in decoders)
        np.testing.assert_allclose(got, want, atol=ATOL)
        best = np.sort(want[0])
        assert best[-1] - best[-2] > 2 * ATOL
        np.testing.assert_array_equal(got_tokens, want_tokens)


class TestCapture:
    """Of the emulator itself: what a graph does, and what must not happen while it is made."""

    @pytest.fixture
    def table(self, tiny: Model) -> Any:
        hidden = tiny.config.hidden_size
        return tiny.backend.from_numpy(np.arange(4 * hidden, dtype=np.uint16).reshape(4, hidden))

    def test_work_is_done_at_each_launch_and_not_before(self, tiny: Model, table: Any) -> None:
        backend, ids = tiny.backend, tiny.backend.from_numpy(np.array([2], np.int32))
        before = emulated.launches["embedding"]
        backend.poison()
        run_again = backend.record(lambda: backend.take_rows(table, ids))
        assert emulated.launches["embedding"] == before
        assert (backend._rows[0] == 0xFFFF).all()
        for row in (2, 1):
            ids.set(np.array([row], np.int32))  # the graph knows where it is, not what it was
            np.testing.assert_array_equal(run_again()[0], table[row])
        assert emulated.launches["embedding"] == before + 2

    def test_products_and_memory_set_to_a_value_are_captured(self, tiny: Model) -> None:
        backend = tiny.backend
        x, weight = (backend.from_numpy(np.full((n, 32), 0x3F80, np.uint16)) for n in (1, 8))
        out = backend.from_numpy(np.zeros((1, 8), np.float32))

        def work() -> None:
            out.data.memset_async(0, out.nbytes, backend.stream)
            backend._cublas.matmul(x, weight, out, add=True)
            backend._cublas.matmul(x, weight, out, add=True)

        run_again = backend.record(work)
        assert not out.any()
        for _ in range(2):
            run_again()
            assert (out == 64).all()

    def test_a_graph_keeps_no_memory(self, tiny: Model, table: Any) -> None:
        backend = tiny.backend
        arrays = [backend.from_numpy(np.array([2], np.int32))]
        run_again = backend.record(lambda: len(backend.take_rows(table, arrays[0][:])))
        assert run_again() == 1
        arrays.clear()
        with pytest.raises(emulated.EmulatorError, match="whose memory is free again"):
            run_again()

    @pytest.mark.parametrize(
        ("what", "says"),
        [
            (lambda b, table: b.from_numpy(np.zeros(1, np.int32)), "an array made"),
            (lambda b, table: table.get(), "a copy to the host"),
            (lambda b, table: b.stream.synchronize(), "a wait"),
            (
                lambda b, table: b.set_block_table(0, np.zeros((3, 1), np.int32)),
                "while a stream is capturing",
            ),
            (lambda b, table: b.read_later(table), "a copy from one address"),
            (lambda b, table: b.record(lambda: None), "another capture"),
        ],
    )
    def test_what_must_not_be_captured(self, tiny: Model, table: Any, what: Any, says: str) -> None:
        with pytest.raises(emulated.EmulatorError, match=says):
            tiny.backend.record(lambda: what(tiny.backend, table))
        assert len(tiny.backend.record(lambda: tiny.backend.take_rows(table, table[:0, 0].view("i4")))()) == 0


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
    backend.mask_logits(values, ids[:1], np.zeros((1, -(-tiny.config.vocab_size // 32)), np.uint32))
    assert np.isfinite(logits).all()
    backend.keep_tokens(backend.from_numpy(ids[:1]), inputs)
    backend.set_decode_rows(*np.array([[1], [1], [1]], np.int32))
    backend.begin_decode(backend.decode_shape(2))
    backend.stage(make_batch([Part(1, 1)], 1, token_ids=np.array([CHOSEN])))
    assert set(emulated.launches - before) == {name for names in KERNELS.values() for name in names}
