"""Answers in OpenAI's shapes: whole JSON objects, and the server-sent events of a stream.

Events are bytes ready to be sent. They are pure ASCII (JSON can spell any character so), because clients
that split a stream into lines may take U+0085 or U+2028 for line ends. Sources: ``ChatCompletion``,
``ChatCompletionChunk`` and ``Completion`` of the ``openai`` package; the HTML standard, "Server-sent events".

Knows no HTTP, no engine, no tokenizer, and not what may follow what: the caller calls in the right order.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from samir_vllm.extras.serve.api_errors import ApiError
from samir_vllm.sequence import TokenLogprobs

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""

LEAST_LOGPROB = -9999.0
"""Stands for any smaller log-probability, minus infinity above all, which JSON can't spell."""

ChatFinish = Literal["stop", "length", "tool_calls"]
CompletionFinish = Literal["stop", "length"]

_dump = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    call_id: str
    name: str
    arguments: str  # JSON, as the model wrote it


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One whole answer of a chat."""

    index: int
    text: str | None  # None: nothing but tool calls
    finish_reason: ChatFinish
    tool_calls: Sequence[ToolCall] = ()
    logprobs: list[dict[str, Any]] | None = None  # see `chat_logprobs`


@dataclass(frozen=True, slots=True)
class CompletionChoice:
    """One whole answer to a prompt."""

    index: int
    text: str
    finish_reason: CompletionFinish
    logprobs: dict[str, Any] | None = None  # see `completion_logprobs`
    prompt_logprobs: list[dict[str, Any] | None] | None = None  # see `prompt_logprobs`; left out if None


class _Shapes:
    """What chats and completions share: the fields in front, the text's events, the usage.

    Args:
        response_id: such as ``chatcmpl-...``; the same in all events of a stream.
        created: Unix time, seconds.
        model: the model's name, as the request spelt it.
        include_usage: the stream's events carry ``usage``: null, but for the last.
    """

    _whole_object: ClassVar[str]
    _event_object: ClassVar[str]
    _before_text: ClassVar[str]
    _after_text: ClassVar[str]

    def __init__(self, response_id: str, created: int, model: str, include_usage: bool) -> None:
        self._front: dict[str, Any] = {"id": response_id, "object": "", "created": created, "model": model}
        opening = _dump({**self._front, "object": self._event_object})
        self._opening = f'data: {opening[:-1]},"choices":['
        self._closing = '],"usage":null}\n\n' if include_usage else "]}\n\n"
        self._text_opening: dict[int, str] = {}  # by index
        self._text_closing = f'{self._after_text},"logprobs":null,"finish_reason":null}}{self._closing}'

    def text(self, index: int, text: str, logprobs: Any = None) -> bytes:
        """The event of a piece of text.

        Args:
            index: which answer.
            text: the piece; half a surrogate pair becomes U+FFFD.
            logprobs: of its tokens, see `chat_logprobs` or `completion_logprobs`; None: not asked for.
        """
        opening = self._text_opening.get(index)
        if opening is None:
            opening = self._text_opening[index] = f'{self._opening}{{"index":{index},{self._before_text}'
        closing = self._text_closing if logprobs is None else self._closing_with(logprobs)
        return f"{opening}{_dump(text if text.isascii() else _mended(text))}{closing}".encode("ascii")

    def usage(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> bytes:
        """The event of the token counts, which has no choices; see `usage_of`."""
        usage = usage_of(prompt_tokens, completion_tokens, cached_tokens)
        return f'{self._opening}],"usage":{_dump(usage)}}}\n\n'.encode("ascii")

    def _closing_with(self, logprobs: Any) -> str:
        shown = _dump(self._logprobs(logprobs))
        return f'{self._after_text},"logprobs":{shown},"finish_reason":null}}{self._closing}'

    def _event(self, choice: dict[str, Any]) -> bytes:
        return f"{self._opening}{_dump(choice)}{self._closing}".encode("ascii")

    def _whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._front, "object": self._whole_object, "choices": choices, "usage": usage}

    @staticmethod
    def _logprobs(logprobs: Any) -> Any:
        return logprobs


class ChatShapes(_Shapes):
    """The answer to one chat request."""

    _whole_object = "chat.completion"
    _event_object = "chat.completion.chunk"
    _before_text = '"delta":{"content":'
    _after_text = "}"

    def role(self, index: int) -> bytes:
        """An answer's first event."""
        return self._delta(index, {"role": "assistant", "content": "", "refusal": None})

    def tool_call(self, index: int, number: int, call_id: str, name: str) -> bytes:
        """A tool call's first event: its name, and no arguments yet. ``number`` counts the answer's calls."""
        call = {"index": number, "id": call_id, "type": "function"}
        return self._delta(index, {"tool_calls": [{**call, "function": {"name": name, "arguments": ""}}]})

    def tool_arguments(self, index: int, number: int, fragment: str) -> bytes:
        """More of a tool call's arguments."""
        call = {"index": number, "function": {"arguments": _mended(fragment)}}
        return self._delta(index, {"tool_calls": [call]})

    def finish(self, index: int, reason: ChatFinish) -> bytes:
        """An answer's last event."""
        return self._delta(index, {}, reason)

    def whole(
        self,
        choices: Iterable[ChatChoice],
        usage: dict[str, Any],
        prompt_logprobs: list[dict[str, Any] | None] | None = None,
    ) -> dict[str, Any]:
        """The answer in one piece.

        Args:
            choices: by index.
            usage: see `usage_of`.
            prompt_logprobs: see `prompt_logprobs`; left out if None.
        """
        answer = self._whole([self._choice(choice) for choice in choices], usage)
        return answer if prompt_logprobs is None else {**answer, "prompt_logprobs": prompt_logprobs}

    def _choice(self, choice: ChatChoice) -> dict[str, Any]:
        text = None if choice.text is None else _mended(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _mended(call.arguments)},
                }
                for call in choice.tool_calls
            ]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": None if choice.logprobs is None else self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _delta(self, index: int, delta: dict[str, Any], reason: ChatFinish | None = None) -> bytes:
        return self._event({"index": index, "delta": delta, "logprobs": None, "finish_reason": reason})

    @staticmethod
    def _logprobs(logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"content": logprobs, "refusal": None}


class CompletionShapes(_Shapes):
    """The answer to one request of the older kind, text after text."""

    _whole_object = _event_object = "text_completion"
    _before_text = '"text":'
    _after_text = ""

    def finish(self, index: int, reason: CompletionFinish) -> bytes:
        """An answer's last event."""
        return self._event({"index": index, "text": "", "logprobs": None, "finish_reason": reason})

    def whole(self, choices: Iterable[CompletionChoice], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece.

        Args:
            choices: by index.
            usage: see `usage_of`.
        """
        return self._whole([self._choice(choice) for choice in choices], usage)

    def _choice(self, choice: CompletionChoice) -> dict[str, Any]:
        shown = {
            "index": choice.index,
            "text": _mended(choice.text),
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }
        if choice.prompt_logprobs is not None:
            shown["prompt_logprobs"] = choice.prompt_logprobs
        return shown


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """The token counts of a request, over all its answers.

    Args:
        prompt_tokens: each prompt counts once.
        completion_tokens: of all answers.
        cached_tokens: prompt tokens whose K and V were there already; None: not told.
    """
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return (
        counts
        if cached_tokens is None
        else {**counts, "prompt_tokens_details": {"cached_tokens": cached_tokens}}
    )


def error_event(error: ApiError) -> bytes:
    """The event of an error that comes after the stream has begun."""
    return f"data: {_dump(error.body())}\n\n".encode("ascii")


# --- log-probabilities ------------------------------------------------------------------------------------


def chat_logprobs(
    tokens: Sequence[TokenLogprobs], token_bytes: Callable[[int], bytes]
) -> list[dict[str, Any]]:
    """Log-probabilities as a chat shows them: ``{"token", "logprob", "bytes", "top_logprobs"}`` for a token.

    Args:
        tokens: what was generated.
        token_bytes: the bytes of an id; may not raise for any of the model's, which may be padded beyond the
            tokenizer. Bytes that aren't UTF-8 show as U+FFFD in ``token`` and as they are in ``bytes``.
    """

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": _clipped(logprob), "bytes": list(data)}

    return [
        {**shown(token.token_id, token.logprob), "top_logprobs": [shown(*top) for top in token.top]}
        for token in tokens
    ]


def completion_logprobs(
    tokens: Sequence[TokenLogprobs | None],
    ids: Sequence[int],
    token_bytes: Callable[[int], bytes],
    first_offset: int,
    is_special: Callable[[int], bool] = lambda token_id: False,
) -> dict[str, Any]:
    """Log-probabilities as a completion shows them: four lists with an item for each token.

    ``tokens`` holds their texts; ``token_logprobs`` numbers, or None; ``top_logprobs`` dicts of text to
    log-probability, the token's own included, or None; ``text_offset`` how many characters of the text are
    complete before the token. A text that isn't UTF-8 shows as ``bytes:\\xe2\\x80``.

    Args:
        tokens: their log-probabilities; None for a prompt's first, which nothing precedes.
        ids: the tokens, as many.
        token_bytes: see `chat_logprobs`.
        first_offset: characters of the text, an echoed prompt included, before the first of the tokens.
        is_special: whether an id is a control token: these show, but have no place in the text.
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    texts, offsets, offset = [], [], first_offset
    for token_id in ids:
        data = token_bytes(token_id)
        texts.append(_token_text(data))
        offsets.append(offset)
        if not is_special(token_id):
            offset += len(decode(data))
    return {
        "tokens": texts,
        "token_logprobs": [None if token is None else _clipped(token.logprob) for token in tokens],
        "top_logprobs": [None if token is None else _by_text(token, token_bytes) for token in tokens],
        "text_offset": offsets,
    }


def prompt_logprobs(
    tokens: Iterable[TokenLogprobs | None], token_bytes: Callable[[int], bytes]
) -> list[dict[str, Any] | None]:
    """A prompt's log-probabilities in vLLM's shape: for each token a dict of id to the alternatives.

    Each alternative, the token itself among them, is ``{"logprob", "rank", "decoded_token"}``; rank 1 is the
    likeliest, null a token beyond those asked for. None for the first token, which nothing precedes.

    Args:
        tokens: one for each prompt token.
        token_bytes: see `chat_logprobs`.
    """

    def shown(token: TokenLogprobs) -> dict[str, Any]:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(token.top, 1)]
        if all(token_id != token.token_id for token_id, _ in token.top):
            ranked.append((token.token_id, token.logprob, None))  # type: ignore[arg-type]
        return {
            str(token_id): {
                "logprob": _clipped(logprob),
                "rank": rank,
                "decoded_token": token_bytes(token_id).decode("utf-8", "replace"),
            }
            for token_id, logprob, rank in ranked
        }

    return [None if token is None else shown(token) for token in tokens]


def _by_text(token: TokenLogprobs, token_bytes: Callable[[int], bytes]) -> dict[str, float]:
    """Best first; where two ids have one text, the likelier speaks for it."""
    found: dict[str, float] = {}
    for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
        found.setdefault(_token_text(token_bytes(token_id)), _clipped(logprob))
    return found


def _token_text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        printable = (chr(b) if 0x20 <= b < 0x7F and b != 0x5C else f"\\x{b:02x}" for b in data)
        return "bytes:" + "".join(printable)


def _clipped(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)  # in this order NaN gives the bound, too


def _mended(text: str) -> str:
    """The text with the halves of surrogate pairs joined, and lone ones as U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
