"""The model that is served, as each of the two processes needs it: an engine here, text and tokens there.

Another module with the same two functions may take this one's place. Knows no HTTP.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from samir_vllm.chat import ChatFormat, load_chat_format
from samir_vllm.commandline import error_console
from samir_vllm.commandline import load_engine as load_engine_by
from samir_vllm.config import ModelConfig
from samir_vllm.engine import Engine
from samir_vllm.hub import resolve_model
from samir_vllm.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class TextParts:
    """What the front needs of a model to read and write text."""

    name: str  # of the model, if no other is given
    tokenizer: Tokenizer
    chat_format: ChatFormat | None
    eos_token_ids: tuple[int, ...]


def load_engine(args: argparse.Namespace) -> Engine:
    """In the engine's process; raises what ``Engine`` raises."""
    return load_engine_by(args, error_console(), quiet=True)


def load_text(args: argparse.Namespace) -> TextParts:
    """In the front; raises what loading a tokenizer or a chat format raises."""
    folder = resolve_model(args.model)
    tokenizer = load_tokenizer(folder)
    config = ModelConfig.from_dir(folder)
    return TextParts(folder.name, tokenizer, load_chat_format(folder, tokenizer), config.eos_token_ids)
