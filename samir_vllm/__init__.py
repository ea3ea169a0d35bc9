"""Llama inference in Python and hand-written CUDA C++: the public names.

``Engine`` is loaded on first use, so that ``import samir_vllm`` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from samir_vllm.config import EngineConfig
from samir_vllm.errors import (
    ChatError,
    ConfigError,
    DeviceError,
    DownloadError,
    InvariantError,
    ModelNotFoundError,
    OptionError,
    RequestError,
    SamirVllmError,
    TokenizerError,
    WeightsError,
)
from samir_vllm.sampling import SamplingParams

if TYPE_CHECKING:
    from samir_vllm.engine import Engine, RequestOutput, StepOutput

__version__ = "0.1.0"

__all__ = [
    "ChatError",
    "ConfigError",
    "DeviceError",
    "DownloadError",
    "Engine",
    "EngineConfig",
    "InvariantError",
    "ModelNotFoundError",
    "OptionError",
    "RequestError",
    "RequestOutput",
    "SamirVllmError",
    "SamplingParams",
    "StepOutput",
    "TokenizerError",
    "WeightsError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in ("Engine", "RequestOutput", "StepOutput"):
        from samir_vllm import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
