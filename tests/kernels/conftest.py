"""The backends that the kernel tests run on, and their twin.

``cuda`` is a GPU; ``emulated`` runs the same kernels and the same host code on the CPU, at small sizes
(``large`` marks what is left out there), and is skipped where there is no g++.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import emulated
import pytest
from twins import MAX_ROWS, Twins

from samir_vllm.backends import Backend
from samir_vllm.config import ModelConfig

EMULATED_MAX_ROWS, EMULATED_MAX_SEQS = 400, 320


def cuda_backend(config: ModelConfig) -> Backend:
    from samir_vllm.backends.cuda_backend import CudaBackend

    return CudaBackend(config, max_logit_rows=MAX_ROWS)


def emulated_backend(config: ModelConfig, max_shared_bytes: int = emulated.MAX_SHARED_BYTES) -> Backend:
    if emulated.COMPILER is None:
        pytest.skip(emulated.NO_COMPILER)
    return emulated.cuda_backend_class(max_shared_bytes)(
        config, max_tokens=EMULATED_MAX_ROWS, max_num_seqs=EMULATED_MAX_SEQS, max_logit_rows=EMULATED_MAX_ROWS
    )


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(cuda_backend, id="cuda", marks=pytest.mark.gpu),
        pytest.param(emulated_backend, id="emulated", marks=pytest.mark.emulated),
    ],
)
def make_backend(request: pytest.FixtureRequest) -> Callable[[ModelConfig], Backend]:
    """The backend under test for a config; its kernels are compiled once a session."""
    return functools.cache(request.param)


@pytest.fixture
def twins(request: pytest.FixtureRequest, make_backend: Callable[[ModelConfig], Backend]) -> Twins:
    backend = make_backend(request.param)
    return Twins.of(backend, MAX_ROWS if request.node.get_closest_marker("gpu") else EMULATED_MAX_ROWS)


@pytest.fixture
def less_shared_memory(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[ModelConfig], Backend]:
    """The backend under test for a config, as it is where a block may have 99 KiB of shared memory."""
    if request.node.get_closest_marker("emulated"):
        return functools.partial(emulated_backend, max_shared_bytes=99 << 10)
    from samir_vllm.backends import cuda_probe
    from samir_vllm.backends.cuda_backend import CudaBackend

    gpu = replace(cuda_probe.require_gpu(0), max_shared_bytes=99 << 10)
    return functools.partial(CudaBackend, device=gpu)


def pytest_configure(config: pytest.Config) -> None:
    if (cache := getattr(config, "cache", None)) is not None:
        emulated.use_folder(cache.mkdir("emulated-kernels"))


STEMS = {
    "test_adjust_logits": ["adjust_logits"],
    "test_argmax": ["argmax"],
    "test_decode_state": ["decode_state", "rope_kv_write", "paged_attention_decode"],
    "test_embedding": ["embedding"],
    "test_linear": ["linear", "rmsnorm"],
    "test_linear_add": ["linear", "rmsnorm", "embedding"],
    "test_lm_head": ["linear", "rmsnorm"],
    "test_log_probs": ["log_probs"],
    "test_mask_logits": ["mask_logits", "argmax"],
    "test_paged_attention_decode": ["paged_attention_decode", "paged_attention_prefill"],
    "test_paged_attention_prefill": ["paged_attention_prefill", "paged_attention_decode"],
    "test_rmsnorm": ["rmsnorm"],
    "test_rope_kv_write": ["rope_kv_write"],
    "test_sample": ["sample"],
    "test_sample_statistics": ["sample"],
    "test_silu_mul": ["silu_mul"],
    "test_take_rows": ["embedding"],
}
"""What the tests of a file launch: built ahead, while others run; the rest is built when it is launched."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def wrong(item: pytest.Item) -> bool:
        if item.get_closest_marker("emulated") is None:
            return item.get_closest_marker("emulated_only") is not None
        return any(item.get_closest_marker(mark) for mark in ("large", "gpu"))

    for item in items:
        if item.get_closest_marker("emulated") and item.get_closest_marker("emulated_slow"):
            item.add_marker(pytest.mark.slow)
    deselected = [item for item in items if wrong(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if not wrong(item)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts building what the session needs."""
    if emulated.COMPILER is None or session.config.option.collectonly:
        return
    for item in session.items:
        if not isinstance(item, pytest.Function) or not item.get_closest_marker("emulated"):
            continue
        model = item.callspec.params.get("twins") if hasattr(item, "callspec") else None
        if isinstance(model, ModelConfig):
            for stem in STEMS.get(item.module.__name__, []):
                emulated.stem_program(stem, model, emulated.MAX_SHARED_BYTES)
