"""The backend that the kernel tests run on, and its twin."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from twins import Twins

from samir_vllm.backends import Backend
from samir_vllm.config import ModelConfig

MAX_LOGIT_ROWS = 2304  # as many as the largest step has tokens


def cuda_backend(config: ModelConfig) -> Backend:
    from samir_vllm.backends.cuda_backend import CudaBackend

    return CudaBackend(config, max_logit_rows=MAX_LOGIT_ROWS)


@pytest.fixture(scope="session", params=[pytest.param(cuda_backend, id="cuda", marks=pytest.mark.gpu)])
def make_backend(request: pytest.FixtureRequest) -> Callable[[ModelConfig], Backend]:
    """The backend under test for a config; its kernels are compiled once a session."""
    return functools.cache(request.param)


@pytest.fixture
def twins(request: pytest.FixtureRequest, make_backend: Callable[[ModelConfig], Backend]) -> Twins:
    return Twins.of(make_backend(request.param))
