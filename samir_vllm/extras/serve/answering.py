"""From what the engine says of a request's answers to what its client gets: events, or one object.

Keeps the order of a stream: role first, text or calls, one finish reason; log-probabilities go with the text
that their tokens gave. Knows neither HTTP nor the engine, only pieces and shapes.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, cast

from samir_vllm.extras.serve.api_errors import ApiError
from samir_vllm.extras.serve.bodies import ChatRequest, CompletionRequest
from samir_vllm.extras.serve.engine_client import Piece
from samir_vllm.extras.serve.shapes import (
    ChatChoice,
    ChatFinish,
    ChatShapes,
    CompletionChoice,
    CompletionFinish,
    CompletionShapes,
    ToolCall,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    usage_of,
)
from samir_vllm.extras.serve.tool_calls import CallArguments, CallStart, ToolCallReader, new_call_id
from samir_vllm.extras.serve.wire import Ending
from samir_vllm.sequence import TokenLogprobs

TokenBytes = Callable[[int], bytes]
Placed = tuple[TokenLogprobs, int]  # a token's, and the characters before it
Names = Collection[str] | None


class Usage:
    """Tokens of a request, over its prompts and answers."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0

    def add(self, ending: Ending) -> None:
        """Count an answer that has ended."""
        self.completion_tokens += ending.num_tokens
        self.cached_tokens = max(self.cached_tokens, ending.metrics.num_cached_tokens)


class ChatAnswers:
    """The answers to one chat request."""

    def __init__(
        self,
        request: ChatRequest,
        shapes: ChatShapes,
        usage: Usage,
        token_bytes: TokenBytes,
        is_special: Callable[[int], bool],
        called: Names,
    ) -> None:
        """Answers of which nothing is known yet.

        Args:
            request: what was asked.
            shapes: how it is told.
            usage: what is counted.
            token_bytes: of any of the model's ids.
            is_special: whether an id is a control token, which has no place in the text.
            called: functions that an answer may call; None: it is text, whatever it looks like.
        """
        self._shapes, self._usage, self._token_bytes = shapes, usage, token_bytes
        self._names = called
        self._places = partial(_TokenPlaces, token_bytes, is_special)
        self._choices = [_ChatState(self._places(), called) for _ in range(request.params.n)]

    def events(self, pieces: Sequence[Piece]) -> bytes:
        """The events of what has come since the last call.

        Raises:
            ApiError: an answer ended with an error.
        """
        return b"".join([self._event(*piece) for piece in _merged(pieces)])

    def _event(self, index: int, text: str, tokens: list[TokenLogprobs], ending: Ending | None) -> bytes:
        state, shapes = self._choices[index], self._shapes
        told = b""
        if not state.has_begun:
            state.has_begun = True
            told = shapes.role(index)
        shown = state.places.take(text, tokens, ending)
        if state.reader is not None:
            told += self._called(index, state, text, shown, is_last=ending is not None)
        elif text or shown:
            told += self._text(index, text, shown)
        if ending is None:
            return told
        _check(ending)
        self._usage.add(ending)
        return told + shapes.finish(index, _chat_finish(ending, state.reader))

    def _text(self, index: int, text: str, tokens: list[Placed]) -> bytes:
        if not tokens:
            return self._shapes.text(index, text)
        return self._shapes.text(
            index, text, chat_logprobs([token for token, _ in tokens], self._token_bytes)
        )

    def _called(
        self, index: int, state: _ChatState, text: str, tokens: list[Placed], *, is_last: bool
    ) -> bytes:
        assert state.reader is not None
        told = b""
        state.unshown += tokens
        events = state.reader.feed(text)
        for event in [*events, *state.reader.finish()] if is_last else events:
            if isinstance(event, CallStart):
                told += self._shapes.tool_call(index, event.number, new_call_id(), event.name)
            elif isinstance(event, CallArguments):
                told += self._shapes.tool_arguments(index, event.number, event.text)
            else:  # calls, and what may come behind them, go without log-probabilities
                shown, state.unshown = [] if state.reader.num_calls else state.unshown, []
                told += self._text(index, event.text, shown)
        return told

    def whole(self, endings: dict[int, Ending]) -> dict[str, Any]:
        """The answer in one piece, from the ends of all answers by index; raises as ``events``."""
        choices, prompt = [], None
        for index in range(len(self._choices)):
            ending = endings[index]
            _check(ending)
            self._usage.add(ending)
            choices.append(self._choice(index, ending))
            prompt = ending.prompt_logprobs or prompt
        usage = usage_of(self._usage.prompt_tokens, self._usage.completion_tokens, self._usage.cached_tokens)
        shown = None if prompt is None else prompt_logprobs(prompt, self._token_bytes)
        return self._shapes.whole(choices, usage, shown)

    def _choice(self, index: int, ending: Ending) -> ChatChoice:
        text: str | None = ending.text
        calls: list[ToolCall] = []
        reader = None if self._names is None else ToolCallReader(self._names)
        if reader is not None:
            text, calls = _read_calls(ending.text, reader)
        tokens = None
        if ending.logprobs is not None and not calls:
            tokens = [token for token, _ in self._places().take(ending.text, ending.logprobs, ending)]
        return ChatChoice(
            index,
            text if text or not calls else None,
            _chat_finish(ending, reader),
            calls,
            None if tokens is None else chat_logprobs(tokens, self._token_bytes),
        )


class _ChatState:
    """One answer of a stream so far."""

    def __init__(self, places: _TokenPlaces, called: Names = None) -> None:
        self.has_begun = False
        self.places = places
        self.reader = None if called is None else ToolCallReader(called)
        self.unshown: list[Placed] = []  # of text that may turn out a call


class _TokenPlaces:
    """Which tokens an answer's text has come to, and where in it they begin, however it is cut in pieces."""

    def __init__(
        self, token_bytes: TokenBytes, is_special: Callable[[int], bool], keeps_end: bool = False
    ) -> None:
        """Nothing has come.

        Args:
            token_bytes: of any of the model's ids.
            is_special: whether an id is a control token, which has no place in the text.
            keeps_end: whether the token that ends an answer belongs to it, though it says nothing.
        """
        self._token_bytes, self._is_special, self._keeps_end = token_bytes, is_special, keeps_end
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._place = self._end = 0  # characters: of the tokens so far, and of the text
        self._held: list[Placed] = []  # of text that is held back: it may turn out a stop string

    def take(self, text: str, tokens: Sequence[TokenLogprobs], ending: Ending | None) -> list[Placed]:
        """The tokens, with their places, that go with the next piece of text; nothing of a stop string."""
        self._end += len(text)
        if not tokens and not self._held:
            return []
        for token in tokens:
            self._held.append((token, self._place))
            if not self._is_special(token.token_id):
                self._place += len(self._decode(self._token_bytes(token.token_id)))
        held = self._held
        if ending is not None and ending.is_stop_token:
            count = len(held) - (not self._keeps_end)
        elif ending is not None and ending.finish_reason != "stop":
            count = len(held)
        else:
            count = sum(place < self._end for _, place in held)
        self._held = held[count:]
        return held[:count]


class CompletionAnswers:
    """The answers to one completion request: each prompt's n, prompt after prompt."""

    def __init__(
        self,
        request: CompletionRequest,
        shapes: CompletionShapes,
        usage: Usage,
        token_bytes: TokenBytes,
        is_special: Callable[[int], bool],
        prompts: list[tuple[str, list[int]]],
    ) -> None:
        """Answers of which nothing is known yet.

        Args:
            request: what was asked.
            shapes: how it is told.
            usage: what is counted.
            token_bytes: of any of the model's ids.
            is_special: whether an id is a control token, which has no place in the text.
            prompts: text and token ids of each.
        """
        self._request, self._shapes, self._usage = request, shapes, usage
        self._token_bytes, self._is_special, self._prompts = token_bytes, is_special, prompts
        # With the end's: who echoes a prompt finds its tokens by counting from either end, as lm-eval does.
        self._places = partial(_TokenPlaces, token_bytes, is_special, keeps_end=True)
        self._states = [_ChatState(self._places()) for _ in range(len(prompts) * request.params.n)]

    def events(self, pieces: Sequence[Piece]) -> bytes:
        """As `ChatAnswers.events`."""
        return b"".join([self._event(*piece) for piece in _merged(pieces)])

    def _event(self, index: int, text: str, tokens: list[TokenLogprobs], ending: Ending | None) -> bytes:
        state, told = self._states[index], b""
        if not self._request.generates:
            text, tokens = "", []
        if not state.has_begun:
            state.has_begun = True
            if self._request.echo:
                told = self._shapes.text(index, self._prompts[index // self._request.params.n][0])
        shown = state.places.take(text, tokens, ending)
        if text or shown:
            told += self._shapes.text(index, text, self._shown(shown) if shown else None)
        if ending is None:
            return told
        _check(ending)
        if self._request.generates:
            self._usage.add(ending)
        return told + self._shapes.finish(index, self._finish(ending))

    def _shown(self, tokens: list[Placed]) -> dict[str, Any]:
        """Of a stream without an echo: its log-probabilities would come in one piece."""
        spoken = [token for token, _ in tokens]
        ids = [token.token_id for token in spoken]
        shown = completion_logprobs(spoken, ids, self._token_bytes, 0, self._is_special)
        return {**shown, "text_offset": [place for _, place in tokens]}

    def _finish(self, ending: Ending) -> CompletionFinish:
        return _completion_finish(ending) if self._request.generates else "length"

    def events_of_whole(self, endings: dict[int, Ending]) -> bytes:
        """The events of answers that come in one piece: where the prompt's log-probabilities come first."""
        told = b""
        for choice in self._choices(endings):
            told += self._shapes.text(choice.index, choice.text, choice.logprobs)
            told += self._shapes.finish(choice.index, choice.finish_reason)
        return told

    def whole(self, endings: dict[int, Ending]) -> dict[str, Any]:
        """As `ChatAnswers.whole`."""
        choices = self._choices(endings)
        usage = usage_of(self._usage.prompt_tokens, self._usage.completion_tokens, self._usage.cached_tokens)
        return self._shapes.whole(choices, usage)

    def _choices(self, endings: dict[int, Ending]) -> list[CompletionChoice]:
        choices = []
        for index in range(len(self._states)):
            ending = endings[index]
            _check(ending)
            if self._request.generates:
                self._usage.add(ending)
            choices.append(self._choice(index, ending, self._prompt_logprobs(index, endings)))
        return choices

    def _prompt_logprobs(self, index: int, endings: dict[int, Ending]) -> list[TokenLogprobs | None] | None:
        """They come with the last answer to each prompt."""
        n = self._request.params.n
        siblings = range(index // n * n, index // n * n + n)
        return next((found for i in siblings if (found := endings[i].prompt_logprobs) is not None), None)

    def _choice(
        self, index: int, ending: Ending, of_prompt: list[TokenLogprobs | None] | None
    ) -> CompletionChoice:
        request = self._request
        prompt, prompt_ids = self._prompts[index // request.params.n]
        text = (prompt if request.echo else "") + (ending.text if request.generates else "")
        logprobs = None
        if ending.logprobs is not None:
            spoken = [token for token, _ in self._places().take(ending.text, ending.logprobs, ending)]
            tokens: list[TokenLogprobs | None] = [*spoken] if request.generates else []
            ids = [token.token_id for token in spoken] if request.generates else []
            if request.echo and of_prompt is not None:
                tokens, ids = [*of_prompt, *tokens], [*prompt_ids, *ids]
            logprobs = completion_logprobs(tokens, ids, self._token_bytes, 0, self._is_special)
        asked = request.params.prompt_logprobs is not None and not request.echo and of_prompt is not None
        return CompletionChoice(
            index,
            text,
            self._finish(ending),
            logprobs,
            prompt_logprobs(of_prompt or [], self._token_bytes) if asked else None,
        )


def _merged(
    pieces: Sequence[Piece],
) -> Iterable[tuple[int, str, list[TokenLogprobs], Ending | None]]:
    """One item for each answer: a client that reads slowly gets what has piled up in one event."""
    if len(pieces) == 1:
        index, text, logprobs, ending = pieces[0]
        return [(index, text, [] if logprobs is None else [logprobs], ending)]
    found: dict[int, tuple[list[str], list[TokenLogprobs], list[Ending]]] = {}
    for index, text, logprobs, ending in pieces:
        texts, tokens, ends = found.setdefault(index, ([], [], []))
        texts.append(text)
        if logprobs is not None:
            tokens.append(logprobs)
        if ending is not None:
            ends.append(ending)
    return [
        (i, "".join(texts), tokens, ends[0] if ends else None) for i, (texts, tokens, ends) in found.items()
    ]


def _check(ending: Ending) -> None:
    if ending.finish_reason == "error":
        raise ApiError(500, ending.error or "the engine failed", "server_error")
    if ending.finish_reason == "abort":
        raise ApiError(503, "the server is shutting down", "server_error")


def _chat_finish(ending: Ending, reader: ToolCallReader | None) -> ChatFinish:
    """``tool_calls`` only for whole ones: a stop string may have cut the last."""
    if reader is not None and reader.num_calls and not reader.is_cut and ending.finish_reason == "stop":
        return "tool_calls"
    return _completion_finish(ending)


def _completion_finish(ending: Ending) -> CompletionFinish:
    return cast(CompletionFinish, ending.finish_reason)


def _read_calls(text: str, reader: ToolCallReader) -> tuple[str, list[ToolCall]]:
    """Plain text, and calls, of a whole answer."""
    plain, names, arguments = "", [], []
    for event in [*reader.feed(text), *reader.finish()]:
        if isinstance(event, CallStart):
            names.append(event.name)
            arguments.append("")
        elif isinstance(event, CallArguments):
            arguments[event.number] += event.text
        else:
            plain += event.text
    return plain, [ToolCall(new_call_id(), *call) for call in zip(names, arguments, strict=True)]
