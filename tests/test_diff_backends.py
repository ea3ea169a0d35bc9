"""tools/diff_backends.py on NumPy alone: equal backends and honest rounding pass, planted bugs are named."""

from __future__ import annotations

from types import ModuleType

import ml_dtypes
import numpy as np
import pytest

from harness import TINY, load_tool
from samir_vllm.backends.numpy_backend import NumpyBackend, NumpyInputs
from samir_vllm.config import EngineConfig, ModelConfig


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("diff_backends")


class AnotherOrder(NumpyBackend):
    """As right as NumpyBackend: other orders of summation, probabilities rounded to BF16."""

    def _matmul(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        out = np.zeros((len(x), len(weight)), np.float32)
        for k in range(0, x.shape[1], 64):
            out += x[:, k : k + 64] @ weight[:, k : k + 64].T
        return out

    def _attend(self, q: np.ndarray, table: np.ndarray, seq_len: int) -> np.ndarray:
        first = seq_len - len(q) + 1
        return np.stack([self._attend_one(row, table, first + j) for j, row in enumerate(q)])

    @staticmethod
    def _softmax_part(
        q: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        peak, total, _ = NumpyBackend._softmax_part(q, k, v)
        p = np.exp(q @ k.swapaxes(1, 2) - peak).astype(ml_dtypes.bfloat16)
        return peak, total, p.astype(np.float32) @ v


class WeakDecode(AnotherOrder):
    """Attention of layer 1 is a tenth too small in decode steps."""

    def paged_attention_decode(self, q: np.ndarray, layer_idx: int, inputs: NumpyInputs) -> np.ndarray:
        out = super().paged_attention_decode(q, layer_idx, inputs)
        return out * np.float32(0.9) if layer_idx == 1 else out


class SwappedHeads(AnotherOrder):
    """Attention of layer 1 mixes up two heads in prefill."""

    def paged_attention_prefill(self, q: np.ndarray, layer_idx: int, inputs: NumpyInputs) -> np.ndarray:
        out = super().paged_attention_prefill(q, layer_idx, inputs)
        if layer_idx == 1:
            out[:, :128] = np.roll(out[:, :128], 64, axis=1)
        return out


class OneTokenOff(AnotherOrder):
    """Attention of layer 1 is two percent off for the last of the prompt's tokens."""

    def paged_attention_prefill(self, q: np.ndarray, layer_idx: int, inputs: NumpyInputs) -> np.ndarray:
        out = super().paged_attention_prefill(q, layer_idx, inputs)
        if layer_idx == 1:
            out[-1] *= np.float32(1.02)
        return out


class LostToken(AnotherOrder):
    """The page write of layer 2 forgets the last token: its place keeps NaN."""

    def rope_kv_write(self, qkv: np.ndarray, layer_idx: int, inputs: NumpyInputs) -> np.ndarray:
        q = super().rope_kv_write(qkv, layer_idx, inputs)
        if layer_idx == 2:
            self.kv_cache[inputs.page_ids[layer_idx, -1], 1, :, inputs.offsets[-1]] = np.nan
        return q


BOTH_MODES = pytest.mark.parametrize("mode", [[], ["--lockstep"]], ids=["free", "lockstep"])


def run(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    other: type[NumpyBackend],
    *options: str,
) -> tuple[int, str]:
    """Exit status and output of the tool, with ``other`` in the place of the CUDA backend."""

    def select(engine: EngineConfig, config: ModelConfig) -> NumpyBackend:
        assert engine.device == "cuda"
        return other(config)

    monkeypatch.setattr(tool, "select_backend", select)
    status = tool.main([str(TINY), *options])
    return status, capsys.readouterr().out


@BOTH_MODES
def test_equal_backends(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: list[str]
) -> None:
    status, out = run(tool, monkeypatch, capsys, NumpyBackend, "--tokens", "40", "--decode", "2", *mode)
    assert status == 0
    # 3 steps of 3 layers with 7 buffers, the embedding and the logits
    assert "all 69 buffers within" in out
    assert "0.0e+00 / 0.0e+00" in out


@BOTH_MODES
@pytest.mark.parametrize("seed", ["0", "1"])
def test_another_order_passes(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: list[str],
    seed: str,
) -> None:
    """300 tokens: more than one split of attention, and an honest error in nearly every buffer."""
    options = ["--tokens", "300", "--seed", seed, *mode]
    status, out = run(tool, monkeypatch, capsys, AnotherOrder, *options)
    assert status == 0, out
    assert "attention" in out


@BOTH_MODES
@pytest.mark.parametrize(
    ("bug", "where"),
    [
        (WeakDecode, "decode step 1, layer 1, attention:"),
        (SwappedHeads, "prefill, layer 1, attention:"),
        (LostToken, "prefill, layer 2, kv:"),
    ],
)
def test_a_planted_bug_is_named(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bug: type[NumpyBackend],
    where: str,
    mode: list[str],
) -> None:
    status, out = run(tool, monkeypatch, capsys, bug, *mode)
    assert status == 1
    assert f"first over its tolerance: {where}" in out


def test_lockstep_finds_what_running_free_hides(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tool, monkeypatch, capsys, OneTokenOff)[0] == 0
    status, out = run(tool, monkeypatch, capsys, OneTokenOff, "--lockstep")
    assert status == 1
    assert "first over its tolerance: prefill, layer 1, attention:" in out
    assert out.count("OVER") == 1  # it is born there, and spreads nowhere


@pytest.mark.parametrize("options", [["--tokens", "0"], ["--decode", "-1"], ["--device", "cuba"]])
def test_a_mistake_is_one_line(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert tool.main([str(TINY), "--device", "cpu", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_runs_on_the_cpu_alone(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(TINY), "--device", "cpu", "--tokens", "5", "--decode", "0"]) == 0
    assert "all 23 buffers" in capsys.readouterr().out
