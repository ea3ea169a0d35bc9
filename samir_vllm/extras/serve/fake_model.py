"""A model without weights, to try clients on and to measure the server: it says one sentence, byte by byte.

It keeps to grammars and is done at once, or as slowly as asked. Takes the place of ``model``. Knows no HTTP.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from samir_vllm.chat import LLAMA3_CONTROL, Llama3Chat
from samir_vllm.commandline import engine_options
from samir_vllm.config import EngineConfig, ModelConfig
from samir_vllm.engine import Engine
from samir_vllm.extras.serve.model import TextParts
from samir_vllm.sampling import TokenMasks
from samir_vllm.sequence import ScheduledStep, Sequence, StepResult, TokenLogprobs
from samir_vllm.tokenizer import Tokenizer

NAME = "fake"
SENTENCE = "No weights, no thoughts: this is “all” I can say, again & again. Voilà 🙂\n".encode()
EOS = 256 + LLAMA3_CONTROL.index("<|eot_id|>")
VOCAB_SIZE = 256 + len(LLAMA3_CONTROL)
NUM_LAYERS = 4
CONTEXT = 8192
LOGPROB = -0.5  # of what is said; the alternatives follow at equal distances

_ENDS = [EOS, *b'}]"']  # where masks leave a choice: whatever ends soonest


class FakeRunner:
    """Implements ``engine.Runner``."""

    steps_ahead = 1

    def __init__(self, step_seconds: float) -> None:
        self._seconds = step_seconds
        self._busy_until = 0.0

    def launch(self, step: ScheduledStep) -> Callable[[], StepResult]:
        """See ``engine.Runner``."""
        return self.launch_forward(step)(None)

    def launch_forward(self, step: ScheduledStep) -> Callable[[TokenMasks | None], Callable[[], StepResult]]:
        """See ``engine.Runner``."""
        tokens = [_token(seq) for seq in step.decodes]
        sampled = step.sampled()
        tokens += [SENTENCE[0]] * (len(sampled) - len(tokens))
        prompts = [
            (seq, start, chunk)
            for (seq, chunk), start in zip(step.prefills, step.prefill_starts, strict=True)
            if seq.sampling is not None and seq.sampling.params.prompt_logprobs is not None
        ]
        if self._seconds:
            self._busy_until = max(time.monotonic(), self._busy_until) + self._seconds
        end = self._busy_until

        def go_on(masks: TokenMasks | None) -> Callable[[], StepResult]:
            if masks is not None:
                _obey(tokens, sampled, masks)
            return lambda: self._result(step, tokens, prompts, end)

        return go_on

    def _result(
        self, step: ScheduledStep, tokens: list[int], prompts: list[tuple[Sequence, int, int]], end: float
    ) -> StepResult:
        if self._seconds:
            time.sleep(max(0.0, end - time.monotonic()))
        result = StepResult(tokens)
        wanted = [None if s.sampling is None else s.sampling.params.logprobs for s in step.sampled()]
        if any(count is not None for count in wanted):
            result.logprobs = [
                None if n is None else _logprobs(t, n) for t, n in zip(tokens, wanted, strict=True)
            ]
        for seq, start, chunk in prompts:
            assert seq.sampling is not None
            following = seq.token_ids[start + 1 : min(start + chunk + 1, seq.num_prompt_tokens)]
            count = seq.sampling.params.prompt_logprobs or 0
            result.prompt_logprobs.append((seq, [_logprobs(token, count) for token in following]))
        return result


def _token(seq: Sequence) -> int:
    """What a decoding sequence says next; once the sentence is said, it may end."""
    number = seq.num_launched_tokens - seq.num_prompt_tokens + 1
    if number == len(SENTENCE) and EOS in seq.stop_ids:
        return EOS
    return SENTENCE[number % len(SENTENCE)]


def _obey(tokens: list[int], sampled: list[Sequence], masks: TokenMasks) -> None:
    """Change the tokens that aren't allowed, to what ends the answer soon."""
    for row, words in zip(masks.rows.tolist(), masks.allowed, strict=True):
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB_SIZE]).tolist()
        ends = [i for i in _ENDS if i in allowed]
        # What has just been said doesn't end a string, where all of these may come.
        new = [i for i in ends if i not in sampled[row].token_ids[-2:]]
        visible = [i for i in allowed if i > ord(" ")]
        tokens[row] = (*new, *ends, *visible, *allowed)[0]


def _logprobs(token: int, count: int) -> TokenLogprobs:
    top = tuple(((token + i) % VOCAB_SIZE, LOGPROB - i) for i in range(count))
    return TokenLogprobs(token, LOGPROB, top)


def tokenizer() -> Tokenizer:
    """A token is a byte; behind those come Llama 3's control tokens."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # GPT-2 writes these as they are
    others = [byte for byte in range(256) if byte not in visible]
    spelt = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    control = [{"id": 256 + i, "content": name, "special": True} for i, name in enumerate(LLAMA3_CONTROL)]
    content = {
        "model": {"type": "BPE", "vocab": {spelt[byte]: byte for byte in range(256)}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": control,
    }
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        return Tokenizer.from_json(path)


def load_engine(args: argparse.Namespace) -> Engine:
    """See ``model``. The pool has room for a context in each slot, unless --kv-cache-mib is small."""
    config = ModelConfig(
        hidden_size=64,
        intermediate_size=64,
        num_layers=NUM_LAYERS,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        eos_token_ids=(EOS,),
    )
    options = EngineConfig.from_options(**{**engine_options(args), "device": "cpu"})
    pages = (options.kv_cache_mib if isinstance(options.kv_cache_mib, int) else 128) << 20
    text = load_text(args)
    return Engine.from_parts(
        options,
        config,
        text.tokenizer,
        FakeRunner(args.fake_step_ms / 1000),
        chat_format=text.chat_format,
        num_pages=pages // config.page_bytes(itemsize=2),
    )


def load_text(args: argparse.Namespace) -> TextParts:
    """See ``model``."""
    made = tokenizer()
    return TextParts(NAME, made, Llama3Chat(made), (EOS,))
