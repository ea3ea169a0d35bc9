"""Fixtures shared by the tests: the demo model, and the GPU marker."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from pathlib import Path

import pytest

from samir_vllm.errors import ModelNotFoundError
from samir_vllm.hub import DEMO_MODEL, resolve_model


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model's folder; tests that need it skip where it was not pulled."""
    try:
        return resolve_model(DEMO_MODEL)
    except ModelNotFoundError:
        pytest.skip(f"the demo model is not there: python -m samir_vllm pull {DEMO_MODEL}")


@pytest.fixture(scope="session")
def llama3_rank_path() -> Path:
    """Llama 3's ``tokenizer.model``, as the package llama-models carries it."""
    # Not imported: the package would run far more than we need, and brings a top-level "models".
    spec = importlib.util.find_spec("llama_models")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llama-models, which carries Llama 3's rank file, isn't installed")
    path = Path(spec.submodule_search_locations[0]) / "llama3" / "tokenizer.model"
    golden = json.loads((Path(__file__).parent / "golden" / "llama3_tokenizer.json").read_text())
    assert hashlib.sha256(path.read_bytes()).hexdigest() == golden["meta"]["tokenizer_model_sha256"]
    return path


def pytest_configure(config: pytest.Config) -> None:
    # For tools/sanitize.sh: in a pool's block an overrun would hit memory that is allocated.
    if os.environ.get("SAMIR_NO_POOL") == "1":
        import cupy

        cupy.cuda.set_allocator(None)


def _gpu_missing() -> str | None:
    """Why no GPU can be used; None if one can."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "no GPU"
    except Exception as exc:  # no driver: CuPy's own error type comes from its C extension
        return f"no usable GPU: {exc}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (reason := _gpu_missing()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))
