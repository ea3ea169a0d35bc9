"""Llama inference in Python and hand-written CUDA C++: the public names.

``Engine`` is loaded on first use, so that ``import samir_vllm`` stays light.
"""

from __future__ import annotations

import logging
from importlib import import_module
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
    from samir_vllm.engine import Engine
    from samir_vllm.outputs import Completion, RequestOutput, StepOutput
    from samir_vllm.sequence import TokenLogprobs

__version__ = "0.1.0"

# Who wants the traceback of a failed step sets logging up; else it would stand beside the line that tells it.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "ChatError",
    "Completion",
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
    "TokenLogprobs",
    "TokenizerError",
    "WeightsError",
    "__version__",
]


_LAZY = {
    "Completion": "outputs",
    "Engine": "engine",
    "RequestOutput": "outputs",
    "StepOutput": "outputs",
    "TokenLogprobs": "sequence",
}
"""Public name -> the module it comes from, imported when it is asked for."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"samir_vllm.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
