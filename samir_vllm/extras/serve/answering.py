"""From what the engine says of a request's answers to what its client gets: events, or one object.

Keeps the order of a stream: role first, text or calls, one finish reason; log-probabilities go with the text
that their tokens gave. Knows neither HTTP nor the engine, only pieces and shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
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
        self, request: ChatRequest, shapes: ChatShapes, usage: Usage, token_bytes: TokenBytes, called: Names
    ) -> None:
        """Answers of which nothing is known yet.

        Args:
            request: what was asked.
            shapes: how it is told.
            usage: what is counted.
            token_bytes: of any of the model's ids.
            called: functions that an answer may call; None: it is text, whatever it looks like.
        """
        self._shapes, self._usage, self._token_bytes = shapes, usage, token_bytes
        self._names = called
        self._choices = [_ChatState(called) for _ in range(request.params.n)]

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
        if state.reader is not None:
            told += self._called(index, state, text, is_last=ending is not None)
        elif text or tokens or state.held:
            state.held += tokens
            shown = state.release(text, ending)
            if text or shown:
                told += shapes.text(index, text, chat_logprobs(shown, self._token_bytes) if shown else None)
        if ending is None:
            return told
        _check(ending)
        self._usage.add(ending)
        return told + shapes.finish(
            index, _chat_finish(ending, state.reader.num_calls if state.reader else 0)
        )

    def _called(self, index: int, state: _ChatState, text: str, *, is_last: bool) -> bytes:
        assert state.reader is not None
        told = b""
        events = state.reader.feed(text)
        for event in [*events, *state.reader.finish()] if is_last else events:
            if isinstance(event, CallStart):
                told += self._shapes.tool_call(index, event.number, new_call_id(), event.name)
            elif isinstance(event, CallArguments):
                told += self._shapes.tool_arguments(index, event.number, event.text)
            else:
                told += self._shapes.text(index, event.text)
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
        if self._names is not None:
            text, calls = _read_calls(ending.text, self._names)
        tokens = (
            None
            if ending.logprobs is None
            else _spoken(ending.logprobs, ending, ending.text, self._token_bytes)
        )
        return ChatChoice(
            index,
            text if text or not calls else None,
            _chat_finish(ending, len(calls)),
            calls,
            None if tokens is None else chat_logprobs(tokens, self._token_bytes),
        )


class _ChatState:
    """One answer of a stream so far."""

    def __init__(self, called: Names = None) -> None:
        self.has_begun = False
        self.reader = None if called is None else ToolCallReader(called)
        self.held: list[TokenLogprobs] = []  # of tokens whose text is still held back

    def release(self, text: str, ending: Ending | None) -> list[TokenLogprobs]:
        """The log-probabilities that go with this text: what is held back may turn out a stop string."""
        if ending is None and not text:
            return []
        held, self.held = self.held, []
        return held if ending is None else _without_end(held, ending, bool(text))


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
        count = len(prompts) * request.params.n
        self._states = [_ChatState() for _ in range(count)]
        self._offsets = [0] * count  # characters told so far

    def events(self, pieces: Sequence[Piece]) -> bytes:
        """As `ChatAnswers.events`."""
        return b"".join([self._event(*piece) for piece in _merged(pieces)])

    def _event(self, index: int, text: str, tokens: list[TokenLogprobs], ending: Ending | None) -> bytes:
        state, told = self._states[index], b""
        if not state.has_begun:
            state.has_begun = True
            if self._request.echo:
                told = self._tell(index, self._prompts[index // self._request.params.n][0], [])
        state.held += tokens
        shown = state.release(text, ending)
        if text or shown:
            told += self._tell(index, text, shown)
        if ending is None:
            return told
        _check(ending)
        self._usage.add(ending)
        return told + self._shapes.finish(index, _completion_finish(ending))

    def _tell(self, index: int, text: str, tokens: list[TokenLogprobs]) -> bytes:
        offset = self._offsets[index]
        self._offsets[index] += len(text)
        if not tokens:
            return self._shapes.text(index, text)
        ids = [token.token_id for token in tokens]
        shown = completion_logprobs(tokens, ids, self._token_bytes, offset, self._is_special)
        return self._shapes.text(index, text, shown)

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
            spoken = _spoken(ending.logprobs, ending, ending.text, self._token_bytes)
            tokens: list[TokenLogprobs | None] = [*spoken] if request.generates else []
            ids = [token.token_id for token in spoken] if request.generates else []
            if request.echo and of_prompt is not None:
                tokens, ids = [*of_prompt, *tokens], [*prompt_ids, *ids]
            logprobs = completion_logprobs(tokens, ids, self._token_bytes, 0, self._is_special)
        asked = request.params.prompt_logprobs is not None and not request.echo and of_prompt is not None
        return CompletionChoice(
            index,
            text,
            _completion_finish(ending) if request.generates else "length",
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


def _chat_finish(ending: Ending, num_calls: int) -> ChatFinish:
    return "tool_calls" if num_calls and ending.finish_reason == "stop" else _completion_finish(ending)


def _completion_finish(ending: Ending) -> CompletionFinish:
    return cast(CompletionFinish, ending.finish_reason)


def _without_end(tokens: list[TokenLogprobs], ending: Ending, has_text: bool) -> list[TokenLogprobs]:
    """Those of a stream's last tokens that belong to its text."""
    if ending.is_stop_token:
        return tokens[:-1]
    return tokens if has_text or ending.finish_reason == "length" else []


def _spoken(
    tokens: list[TokenLogprobs], ending: Ending, text: str, token_bytes: TokenBytes
) -> list[TokenLogprobs]:
    """Those of a whole answer's tokens that begin in its text: none of what ended it."""
    if ending.is_stop_token:
        return tokens[:-1]
    if ending.finish_reason != "stop":
        return tokens
    end, place = len(text.encode("utf-8", "surrogatepass")), 0
    for count, token in enumerate(tokens):
        if place >= end:
            return tokens[:count]
        place += len(token_bytes(token.token_id))
    return tokens


def _read_calls(text: str, called: Collection[str]) -> tuple[str, list[ToolCall]]:
    """Plain text, and calls, of a whole answer."""
    reader = ToolCallReader(called)
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
