"""A model that says what it was told, and a program that is the command line with that model in its place.

``python talking_model.py chat ...`` behaves as ``python -m samir_vllm chat ...`` does, at once: no weights
are loaded and a token is a byte. What a user says decides the answer:

    say TEXT     TEXT
    options      the seed, and which of the n answers this is
    on and on    "la " without an end
    break        an error
    think        reads the prompt (--max-batched-tokens 4: in several steps) until Ctrl-C, and says "I think"
    stuck        after one Ctrl-C still the same step, until another
    else         "heard" and the dialog, of its own answers only the number of characters
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from fake_model import VOCAB_SIZE, ByteTokenizer, tiny_config
from samir_vllm import commandline
from samir_vllm.__main__ import main
from samir_vllm.config import PAGE_SIZE, EngineConfig
from samir_vllm.engine import Engine
from samir_vllm.errors import ChatError
from samir_vllm.extras import chat, generate
from samir_vllm.sequence import ScheduledStep, StepResult, TokenLogprobs
from samir_vllm.sequence import Sequence as Seq

SEPARATOR = "\x1e"
EOS = ord(SEPARATOR)
IMPOSSIBLE = ord("~")
"""A token whose log-probability is -inf."""
NUM_LAYERS = 2


class ByteChat:
    """``role:content`` and a separator for each message; the model goes on after ``a:``."""

    name = "bytes"

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        date: str | None = None,
    ) -> list[int]:
        if any(m["content"] == "refuse" for m in messages):
            raise ChatError("this dialog is refused")
        text = "".join(f"{m['role'][0]}:{m['content']}{SEPARATOR}" for m in messages)
        return list(((date or "") + text + ("a:" if add_generation_prompt else "")).encode())


class TalkingRunner:
    """Implements ``engine.Runner``."""

    steps_ahead = 0

    def __init__(self) -> None:
        self._replies: dict[str, Iterator[int]] = {}

    def launch(self, step: ScheduledStep) -> Callable[[], StepResult]:
        result = self._run(step)
        return lambda: result

    def _run(self, step: ScheduledStep) -> StepResult:
        for seq, _ in step.prefills:
            self._listen(seq)
        sampled = step.sampled()
        result = StepResult([self._next(seq) for seq in sampled])
        result.logprobs = [
            None if (count := _wish(seq, "logprobs")) is None else _logprobs(token, count)
            for seq, token in zip(sampled, result.token_ids, strict=True)
        ]
        for seq, chunk in step.prefills:
            if (count := _wish(seq, "prompt_logprobs")) is not None:
                start = seq.num_computed_tokens
                following = seq.token_ids[start + 1 : min(start + chunk + 1, seq.num_prompt_tokens)]
                result.prompt_logprobs.append((seq, [_logprobs(i, count) for i in following]))
        return result

    def _listen(self, seq: Seq) -> None:
        message = _messages(seq)[-1][2:]
        if message == "break":
            raise RuntimeError("the model\nbroke")
        if message == "think":
            wait_for_ctrl_c("thinking")
        if message == "stuck":
            wait_for_ctrl_c("thinking")
            wait_for_ctrl_c("still thinking")

    def _next(self, seq: Seq) -> int:
        if seq.num_output_tokens == 0:
            self._replies[seq.request_id] = itertools.chain(_reply(seq), itertools.repeat(EOS))
        return next(self._replies[seq.request_id])


def _messages(seq: Seq) -> list[str]:
    text = bytes(seq.token_ids[: seq.num_prompt_tokens]).decode()
    return text.removesuffix(f"{SEPARATOR}a:").split(SEPARATOR)


def _reply(seq: Seq) -> Iterator[int]:
    messages = _messages(seq)
    message = messages[-1].removeprefix("u:")
    if message == "on and on":
        return itertools.cycle(b"la ")
    if message == "think":
        return iter(b"I think")
    if message == "options":
        assert seq.sampling is not None
        return iter(f"seed {seq.sampling.seed}, answer {seq.sampling.index}".encode())
    if message.startswith("say "):
        return iter(message.removeprefix("say ").encode())
    heard = [f"a({len(m) - 2})" if m.startswith("a:") else m for m in messages]
    return iter(f"heard {', '.join(heard)}".encode())


def _wish(seq: Seq, name: str) -> int | None:
    return None if seq.sampling is None else getattr(seq.sampling.params, name)


def _logprobs(token: int, count: int) -> TokenLogprobs:
    value = -math.inf if token == IMPOSSIBLE else -token / 8
    return TokenLogprobs(token, value, tuple((token + i, value - i) for i in range(count)))


def wait_for_ctrl_c(announcement: str) -> None:
    """Says so on standard error, then returns at the next SIGINT, also if nobody raises for it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    print(announcement, file=sys.stderr, flush=True)
    os.read(reader, 1)
    signal.set_wakeup_fd(-1)
    os.close(reader)
    os.close(writer)


def make_talking_engine(
    *, context: int = 4096, num_pages: int = 1024, has_chat_format: bool = True, **options: object
) -> Engine:
    """An engine with the talking model; ``options`` are those of ``EngineConfig``."""
    config = EngineConfig.from_options(**options)
    model_config = tiny_config(VOCAB_SIZE, NUM_LAYERS, context, (EOS,))
    return Engine.from_parts(
        config,
        model_config,
        ByteTokenizer(),  # type: ignore[arg-type]
        TalkingRunner(),
        chat_format=ByteChat() if has_chat_format else None,
        num_pages=num_pages,
    )


def put_in_place(patch: pytest.MonkeyPatch, **options: Any) -> None:
    """Let the commands load the talking model: of 4,096 tokens, or as --max-model-len says."""

    def load(args: argparse.Namespace, console: object, *, quiet: bool) -> Engine:
        context = args.max_model_len or 4096
        num_pages = -(-context // PAGE_SIZE) * NUM_LAYERS * 4
        given = commandline.engine_options(args) | {"device": "cpu", "max_model_len": None}
        return make_talking_engine(**({"context": context, "num_pages": num_pages} | given | options))

    patch.setattr(chat, "load_engine", load)
    patch.setattr(generate, "load_engine", load)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        put_in_place(patch)
        sys.exit(main())
