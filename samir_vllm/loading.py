"""From a model's folder to a runner on a device, with its pages: what an engine is made of.

Falls back to the CPU where that is allowed. Knows no request and no scheduler; what a device is, only the
backend knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from samir_vllm.backends import Backend, begin_context, fall_back, select_backend
from samir_vllm.chat import ChatFormat, load_chat_format
from samir_vllm.config import PAGE_SIZE, EngineConfig, ModelConfig
from samir_vllm.errors import DeviceError, OptionError
from samir_vllm.model_runner import ModelRunner
from samir_vllm.timing import StartupTimes
from samir_vllm.tokenizer import Tokenizer, load_tokenizer
from samir_vllm.weights import open_weights

if TYPE_CHECKING:
    from samir_vllm.backends.cuda_context import EarlyContext

Progress = Callable[[int, int], None]
"""Called as ``progress(layers_done, layers_in_all)`` while the weights load."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    config: ModelConfig
    tokenizer: Tokenizer
    chat_format: ChatFormat | None
    runner: ModelRunner
    num_pages: int  # physical pages, over all layers
    kv_itemsize: int  # bytes of one K or V value
    backend_name: str
    notices: list[str]  # lines for the user


def load_model(
    model_dir: Path, config: EngineConfig, times: StartupTimes, progress: Progress | None = None
) -> LoadedModel:
    """Load a model on the device that ``config`` names.

    Args:
        model_dir: its folder.
        config: the options.
        times: where the stages are booked.
        progress: told of the layers loaded.

    Raises:
        SamirVllmError: any of its kinds; the message names cause and remedy.
    """
    model_config = ModelConfig.from_dir(model_dir)
    context = begin_context(config)  # the driver needs a while
    try:
        return _load(model_dir, config, model_config, context, times, progress or (lambda done, total: None))
    except BaseException:
        if context is not None:
            context.release()
        raise


def _load(
    model_dir: Path,
    config: EngineConfig,
    model_config: ModelConfig,
    context: EarlyContext | None,
    times: StartupTimes,
    progress: Progress,
) -> LoadedModel:
    with times.stage("tokenizer, files of weights"):
        tokenizer = load_tokenizer(model_dir)
        chat_format = load_chat_format(model_dir, tokenizer)
        weights = open_weights(model_dir, model_config)
    make_runner = partial(
        _make_runner,
        config,
        model_config,
        weights,
        lambda done: progress(done, model_config.num_layers),
        times,
    )
    backend = select_backend(config, model_config, context=context, times=times)
    refusal: str | None = None
    try:
        runner, num_pages = make_runner(backend)
    except DeviceError as exc:  # too little memory
        if config.device != "auto":
            raise
        refusal = str(exc)
    if refusal is not None:  # here the exception is gone, and with it what it kept alive on the GPU
        del backend
        if context is not None:
            context.release()
        times.stages.clear()  # what comes now has the same names
        backend = fall_back(config, model_config, refusal)
        runner, num_pages = make_runner(backend)
    return LoadedModel(
        config=model_config,
        tokenizer=tokenizer,
        chat_format=chat_format,
        runner=runner,
        num_pages=num_pages,
        kv_itemsize=backend.kv_itemsize,
        backend_name=backend.name,
        notices=[*weights.notices, *backend.notices],
    )


def _make_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    weights: Mapping[str, np.ndarray],
    progress: Callable[[int], None],
    times: StartupTimes,
    backend: Backend,
) -> tuple[ModelRunner, int]:
    """A runner on a backend, and the number of its pages."""
    num_pages = _num_pages(config, model_config, backend)
    runner = ModelRunner(
        backend,
        model_config,
        weights,
        num_pages=num_pages,
        max_num_seqs=config.max_num_seqs,
        max_pages_per_seq=min(
            -(-config.context_len(model_config) // PAGE_SIZE), num_pages // model_config.num_layers
        ),
        progress=progress,
        times=times,
    )
    return runner, num_pages


def _num_pages(config: EngineConfig, model_config: ModelConfig, backend: Backend) -> int:
    """Physical pages, over all layers, that the pool's size gives."""
    page_bytes = model_config.page_bytes(itemsize=backend.kv_itemsize)
    layers = model_config.num_layers
    if config.kv_cache_mib == "auto":
        most = -(-config.context_len(model_config) // PAGE_SIZE) * layers * config.max_num_seqs
        num_pages = min(most, backend.free_bytes() // page_bytes)
        if num_pages < layers:
            raise DeviceError(
                f"too little memory is free for KV pages: {num_pages} of {page_bytes} bytes fit, but "
                f"{layers} layers need one each; free memory or give --kv-cache-mib"
            )
        return num_pages
    num_pages = config.kv_cache_mib * 2**20 // page_bytes
    if num_pages < layers:
        raise OptionError(
            f"kv_cache_mib {config.kv_cache_mib} holds {num_pages} KV pages of {page_bytes} bytes, "
            f"but {layers} layers need one each: give at least {-(-layers * page_bytes // 2**20)}"
        )
    return num_pages
