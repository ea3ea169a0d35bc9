"""The HTTP application: routes, bodies in, answers out, errors in OpenAI's shape.

Knows the engine by its client alone, and of text only what a tokenizer and a chat format tell.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from samir_vllm.errors import ChatError, RequestError, one_line
from samir_vllm.extras.serve.answering import ChatAnswers, CompletionAnswers, Usage
from samir_vllm.extras.serve.api_errors import ApiError, bad_request, model_not_found
from samir_vllm.extras.serve.bodies import (
    ChatRequest,
    CompletionRequest,
    ModelFacts,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from samir_vllm.extras.serve.engine_client import EngineClient, Job, ReaderGone, Stream
from samir_vllm.extras.serve.grammar import GrammarError, Grammars, grammar_of
from samir_vllm.extras.serve.metrics import Metrics
from samir_vllm.extras.serve.model import TextParts
from samir_vllm.extras.serve.shapes import DONE, ChatShapes, CompletionShapes, error_event
from samir_vllm.extras.serve.wire import Ending

BODY_SECONDS = 60.0
"""A body must be there within these: who sends half of one doesn't hold a connection for ever."""

LONG_BYTES = 1 << 16
"""Prompts beyond these are encoded on another thread, so that the others' tokens go on meanwhile."""

MAX_LOGPROB_VALUES = 200_000
"""Of an answer in one piece, alternatives included: about a second's work for JSON."""

CLIENT_GONE = 499  # as nginx writes it; nobody is there to read it
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

T = TypeVar("T")
Answers = ChatAnswers | CompletionAnswers

log = logging.getLogger("samir_vllm.serve")


@dataclass(frozen=True, slots=True)
class AppOptions:
    """How the application behaves towards its clients."""

    max_body_bytes: int
    api_keys: Sequence[str] = ()  # any of them opens /v1; none: it is open
    cors_origins: Sequence[str] = ()


class App:
    """One server's endpoints."""

    def __init__(
        self,
        engine: EngineClient,
        text: TextParts,
        facts: ModelFacts,
        metrics: Metrics,
        grammars: Grammars,
        options: AppOptions,
    ) -> None:
        self.engine, self.text, self.facts = engine, text, facts
        self.metrics, self.grammars, self.options = metrics, grammars, options
        self.is_draining = False
        self._bodies: set[asyncio.Timeout] = set()  # of requests whose bodies are being read
        self._created = int(time.time())
        self._page = files("samir_vllm.extras.serve").joinpath("page.html").read_bytes()

    def asgi(self) -> ASGIApp:
        """The application, for an ASGI server."""
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
            Route("/openapi.json", self.openapi),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/detokenize", self.detokenize, methods=["POST"]),
        ]
        middleware = []
        if self.options.cors_origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(self.options.cors_origins),
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],  # whatever a client library adds
                )
            )
        if self.options.api_keys:
            middleware.append(Middleware(_KeyGuard, keys=self.options.api_keys))
        handlers: dict[Any, Callable[..., Awaitable[Response]]] = {
            ApiError: _api_error,
            HTTPException: _http_error,
            Exception: _unexpected,
        }
        app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
        return _Counted(app, self.metrics)

    # What says how things are

    async def page(self, request: Request) -> Response:
        """A page to chat with the model."""
        headers = {"Content-Security-Policy": PAGE_POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(self._page, media_type="text/html", headers=headers)

    async def health(self, request: Request) -> Response:
        """200 while requests are taken."""
        engine = self.engine
        status = "draining" if self.is_draining else "ok" if engine.is_up else "starting"
        load = engine.load
        body = {
            "status": status,
            "model": self.facts.name,
            "running": load.num_running,
            "waiting": load.num_waiting,
            "kv_pages": {"used": load.num_used_pages, "total": engine.ready.num_pages if engine.ready else 0},
        }
        return _json(body, 200 if status == "ok" else 503)

    async def show_metrics(self, request: Request) -> Response:
        """For Prometheus."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        """What this server takes and gives."""
        from samir_vllm.extras.serve import openapi

        return _json(openapi.document(self.facts.name, self.facts.aliases))

    async def models(self, request: Request) -> Response:
        """The model, under all its names."""
        names = (self.facts.name, *self.facts.aliases)
        return _json({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """One name of the model."""
        name = request.path_params["model"]
        if name not in (self.facts.name, *self.facts.aliases):
            raise model_not_found(f"there is no model {name!r} here: this server has {self.facts.name!r}")
        return _json(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "samir_vllm",
            "max_model_len": self.facts.context_len,
        }

    # Tokens

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a dialog."""
        asked = parse_tokenize(await self._body(request), self.facts)
        if asked.messages is not None:
            ids = await self._dialog(asked.messages, asked.tools, asked.add_generation_prompt)
        else:
            assert asked.prompt is not None
            add_bos = asked.add_special_tokens and self.text.tokenizer.adds_bos
            encode = partial(self.text.tokenizer.encode, asked.prompt, add_bos=add_bos)
            ids = await _maybe_elsewhere(len(asked.prompt), encode)
        return _json({"count": len(ids), "max_model_len": self.facts.context_len, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        asked = parse_detokenize(await self._body(request), self.facts)
        text = await _maybe_elsewhere(8 * len(asked.tokens), partial(self._decoded, asked.tokens))
        return _json({"prompt": text})

    async def _dialog(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], opens_answer: bool = True
    ) -> list[int]:
        chat_format = self.text.chat_format
        if chat_format is None:
            raise bad_request("this model has no chat format: use /v1/completions", "messages")
        size = len(str(messages)) + len(str(tools))
        try:
            encode = partial(chat_format.encode, messages, tools=tools or None)
            return await _maybe_elsewhere(size, partial(encode, add_generation_prompt=opens_answer))
        except ChatError as exc:
            raise bad_request(str(exc), "messages") from None

    def _decoded(self, ids: list[int], *, skip_special: bool = False) -> str:
        """The text of ids, of which some may be beyond the tokenizer's."""
        size = self.text.tokenizer.vocab_size
        return self.text.tokenizer.decode([i for i in ids if i < size], skip_special=skip_special)

    def _token_bytes(self, token_id: int) -> bytes:
        tokenizer = self.text.tokenizer
        return tokenizer.id_to_bytes(token_id) if token_id < tokenizer.vocab_size else b""

    def _is_special(self, token_id: int) -> bool:
        tokenizer = self.text.tokenizer
        return token_id >= tokenizer.vocab_size or tokenizer.is_special(token_id)

    # Answers

    async def chat(self, request: Request) -> Response:
        """The next message of a dialog."""
        body = await self._body(request)
        chat = parse_chat(body, self.facts)
        self._check_open()
        tools = [] if chat.tool_choice == "none" else chat.tools
        called = [tool["function"]["name"] for tool in tools] or None
        prompt = await self._dialog(chat.messages, tools)
        grammar = await self._grammar(chat)
        is_bounded = any(body.get(name) is not None for name in ("max_tokens", "max_completion_tokens"))
        params = self._fitted(chat.params, len(prompt), is_bounded, "messages")
        job = Job(prompt, params, grammar, chat.stream, retain_kv=True)
        usage = Usage(len(prompt))
        shapes = ChatShapes(_new_id("chatcmpl"), int(time.time()), chat.model, chat.include_usage)
        answers = ChatAnswers(chat, shapes, usage, self._token_bytes, self._is_special, called)
        return await self._answer(request, chat, [job], answers, usage, shapes)

    async def completions(self, request: Request) -> Response:
        """What comes after each of some texts."""
        body = await self._body(request)
        asked = parse_completion(body, self.facts)
        self._check_open()
        size = sum(map(len, asked.prompts))
        prompts = await _maybe_elsewhere(size, lambda: [self._prompt(p, asked.echo) for p in asked.prompts])
        params = [self._fitted(asked.params, len(ids), True, "prompt") for _, ids in prompts]
        # Echoed log-probabilities of a prompt come first, and are there last.
        streams = asked.stream and asked.params.prompt_logprobs is None
        jobs = [
            Job(ids, p, None, streams, retain_kv=False) for (_, ids), p in zip(prompts, params, strict=True)
        ]
        usage = Usage(sum(len(ids) for _, ids in prompts))
        shapes = CompletionShapes(_new_id("cmpl"), int(time.time()), asked.model, asked.include_usage)
        answers = CompletionAnswers(asked, shapes, usage, self._token_bytes, self._is_special, prompts)
        return await self._answer(request, asked, jobs, answers, usage, shapes)

    def _prompt(self, prompt: str | list[int], is_echoed: bool) -> tuple[str, list[int]]:
        """Text, of ids only where it is wanted, and ids."""
        tokenizer = self.text.tokenizer
        if isinstance(prompt, list):
            # Without control tokens, as answers are told: they have no place in the text.
            return self._decoded(prompt, skip_special=True) if is_echoed else "", prompt
        ids = tokenizer.encode(prompt, add_bos=tokenizer.adds_bos) if prompt else []
        if not ids:
            raise bad_request("the prompt is empty: give at least one token", "prompt")
        return prompt, ids

    async def _grammar(self, chat: ChatRequest) -> str | None:
        try:
            grammar = grammar_of(chat.response_format, chat.tools, chat.tool_choice, chat.parallel_tool_calls)
            if grammar is not None:
                await asyncio.to_thread(self.grammars.check, grammar)
        except GrammarError as exc:
            raise bad_request(str(exc), exc.param, "invalid_value") from None
        return grammar

    def _fitted(self, params: Any, num_prompt: int, is_bounded: bool, field: str) -> Any:
        """The params, for a prompt that fits; without a bound of the client's, for an answer that does."""
        if num_prompt >= self.facts.context_len:
            raise bad_request(
                f"the prompt has {num_prompt} tokens but the context holds {self.facts.context_len}, "
                "one new token included: shorten it",
                field,
                "context_length_exceeded",
            )
        ready = self.engine.ready
        if is_bounded or ready is None:
            return params
        room = min(ready.pool_tokens, self.facts.context_len) - num_prompt
        try:
            return replace(params, max_tokens=max(1, min(params.max_tokens, room)))
        except RequestError as exc:  # min_tokens are more
            raise bad_request(str(exc), "min_tokens", "invalid_value") from None

    def _check_open(self) -> None:
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", "server_error", headers={"Retry-After": "5"})

    async def _answer(
        self,
        request: Request,
        asked: ChatRequest | CompletionRequest,
        jobs: list[Job],
        answers: Answers,
        usage: Usage,
        shapes: ChatShapes | CompletionShapes,
    ) -> Response:
        _check_volume(jobs)
        stream = self.engine.submit(jobs)
        answering = _Answering(self, stream, request.receive)
        try:
            first = await stream.next()  # a refusal is a status, not an event
            self.metrics.prompted(usage.prompt_tokens)
            if asked.stream:
                if jobs[0].streams:
                    opening = answers.events(first)
                else:
                    assert isinstance(answers, CompletionAnswers)
                    opening = answers.events_of_whole(await _endings(stream, first))
                ending = partial(_usage_event, shapes, usage) if asked.include_usage else bytes
                return _EventStream(answering, answers, opening, ending)
            whole = answers.whole(await _endings(stream, first))
        except ReaderGone:
            answering.end()
            return Response(status_code=CLIENT_GONE)
        except BaseException:
            answering.end()
            raise
        answering.end()
        return _json(whole)

    # Bodies

    async def _body(self, request: Request) -> Any:
        """The body's JSON."""
        # A script of another page can send this type only with leave (CORS), and others, or none, without.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(415, f"the body must be application/json, not {kind or 'without a Content-Type'}")
        data = await self._read(request)
        try:
            return json.loads(data)  # which no other thread would do any sooner: it keeps Python's lock
        except (ValueError, RecursionError) as exc:
            raise bad_request(f"the body isn't JSON: {one_line(exc)}", code="invalid_json") from None

    async def _read(self, request: Request) -> bytes:
        most = self.options.max_body_bytes
        parts, size = [], int(request.headers.get("content-length", 0))
        if size <= most:  # who says that it is longer need not send it
            size = 0
            try:
                async with asyncio.timeout(BODY_SECONDS) as patience:
                    self._bodies.add(patience)
                    async for part in request.stream():
                        size += len(part)
                        if size > most:
                            break
                        parts.append(part)
            except TimeoutError:
                self._check_open()
                raise ApiError(408, f"the body took more than {BODY_SECONDS:g} s", "timeout_error") from None
            finally:
                self._bodies.discard(patience)
        if size > most:
            raise ApiError(413, f"the body has more than {most} bytes (--max-body-mib)")
        return b"".join(parts)

    def give_up(self) -> None:
        """End all that is under way: the server has to."""
        self.engine.fail_all("the server is shutting down")
        for patience in self._bodies:
            with suppress(RuntimeError):  # it ends by itself just now
                patience.reschedule(0.0)


class _Answering:
    """One HTTP request while its answers come: what runs for it ends with it, or when its client goes."""

    def __init__(self, app: App, stream: Stream, receive: Receive) -> None:
        self._app, self.stream, self._receive = app, stream, receive
        self._watch = asyncio.get_running_loop().create_task(self._watch_client())

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.stream.leave()

    def end(self) -> None:
        """Whatever still runs is aborted."""
        self._watch.cancel()
        self.stream.close()


class _EventStream(Response):
    """Server-sent events, as the engine gives them. A client that waits gets several tokens in one event."""

    def __init__(
        self, answering: _Answering, answers: Answers, opening: bytes, ending: Callable[[], bytes]
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._answering, self._answers = answering, answers
        self._opening, self._ending = opening, ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream, answers = self._answering.stream, self._answers
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            events = self._opening
            while stream.num_open or stream.has_pieces:
                if events:
                    stream.is_sending = True
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                    stream.is_sending = False
                events = answers.events(await stream.next())
            events += self._ending() + DONE
            await send({"type": "http.response.body", "body": events, "more_body": False})
        except ReaderGone:
            pass
        except ApiError as exc:
            await send({"type": "http.response.body", "body": error_event(exc), "more_body": False})
        finally:
            self._answering.end()


class _KeyGuard:
    """Lets nobody into /v1 without a key."""

    def __init__(self, app: ASGIApp, keys: Collection[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1") and scope["method"] != "OPTIONS":
            given = dict(scope["headers"]).get(b"authorization", b"")
            kind, _, key = given.partition(b" ")
            # Each is compared, in a time that tells nothing of where they differ.
            matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
            if kind.lower() != b"bearer" or not any(matches):
                error = ApiError(
                    401,
                    "a valid API key is needed: send it as `Authorization: Bearer KEY`",
                    "authentication_error",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await _error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Counted:
    """Counts responses by their status; a client that has gone is no error."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responded(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except (ClientDisconnect, asyncio.CancelledError):
            pass  # cancelled is only who still doesn't read when the server has to end
        except Exception as exc:
            # Whoever waits has been told by `_unexpected`; raised on, it would be in the log twice.
            log.error("a request failed", exc_info=exc)


def _check_volume(jobs: list[Job]) -> None:
    """See that log-probabilities that come in one piece don't hold up everybody else."""
    if jobs[0].streams:
        return
    total = 0
    for job in jobs:
        params = job.params
        for count, tokens in (
            (params.logprobs, params.max_tokens * params.n),
            (params.prompt_logprobs, len(job.prompt)),
        ):
            total += 0 if count is None else (count + 1) * tokens
    if total > MAX_LOGPROB_VALUES:
        raise bad_request(
            f"up to {total} log-probabilities are asked for in one piece, at most {MAX_LOGPROB_VALUES}: "
            "lower max_tokens, n or their number, or stream",
            "logprobs",
            "invalid_value",
        )


async def _endings(stream: Stream, pieces: Sequence[Any]) -> dict[int, Ending]:
    """The ends of all answers, by index."""
    endings: dict[int, Ending] = {}
    while True:
        endings.update({index: ending for index, _, _, ending in pieces if ending is not None})
        if not stream.num_open and not stream.has_pieces:
            return endings
        pieces = await stream.next()


async def _maybe_elsewhere(size: int, work: Callable[[], T]) -> T:
    """The result of ``work``, which is done on another thread where it takes long."""
    return work() if size < LONG_BYTES else await asyncio.to_thread(work)


def _usage_event(shapes: ChatShapes | CompletionShapes, usage: Usage) -> bytes:
    return shapes.usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Response(data.encode("utf-8", "replace"), status, headers, "application/json")


def _error_response(error: ApiError) -> Response:
    return _json(error.body(), error.status, error.headers)


async def _api_error(request: Request, exc: ApiError) -> Response:
    return _error_response(exc)


async def _http_error(request: Request, exc: HTTPException) -> Response:
    what = {404: f"there is nothing at {request.url.path}", 405: f"{request.method} is not for this path"}
    error = ApiError(exc.status_code, what.get(exc.status_code, exc.detail), headers=dict(exc.headers or {}))
    return _error_response(error)


async def _unexpected(request: Request, exc: Exception) -> Response:
    return _error_response(ApiError(500, "the server failed: its log tells more", "server_error"))
