"""The engine: text in, text out; many requests at once.

``step`` is three moves: schedule, run, postprocess. An engine belongs to one thread; others hand it
requests with ``submit``. Knows no command line and no protocol; what a device is, only the backend knows.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np

from samir_vllm.backends import Backend, begin_context, fall_back, select_backend
from samir_vllm.chat import ChatFormat, load_chat_format
from samir_vllm.config import PAGE_SIZE, EngineConfig, ModelConfig
from samir_vllm.errors import DeviceError, InvariantError, OptionError, RequestError
from samir_vllm.hub import resolve_model
from samir_vllm.model_runner import ModelRunner
from samir_vllm.page_pool import PagePool
from samir_vllm.sampling import SamplingParams
from samir_vllm.scheduler import Scheduler
from samir_vllm.sequence import FinishReason, ScheduledStep, Sequence
from samir_vllm.timing import StartupTimes
from samir_vllm.tokenizer import StreamDecoder, Tokenizer, load_tokenizer
from samir_vllm.weights import open_weights

if TYPE_CHECKING:
    from samir_vllm.backends.cuda_context import EarlyContext

Prompt = str | Seq[int] | Seq[Mapping[str, Any]]
"""Raw text, token ids, or a dialog: ``[{"role": "user", "content": "..."}]`` in the model's chat format."""

Progress = Callable[[int, int], None]
"""Called as ``progress(layers_done, layers_in_all)`` while the weights load."""

log = logging.getLogger("samir_vllm")


class Runner(Protocol):
    """What the engine needs of a model: a token id for each of ``step.sampled()``, -1 for NaN."""

    def run(self, step: ScheduledStep) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Figures of one request, seconds; None for what never happened."""

    queue_time: float | None  # arrival to admission
    time_to_first_token: float | None  # arrival to the first new token
    time_per_output_token: float | None  # mean over the tokens after the first
    total_time: float  # arrival to end
    num_pages: int  # KV pages reserved, over all layers


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request that has ended."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]  # a stop id included
    text: str  # a stop id gives none
    finish_reason: FinishReason
    error: str | None  # one line, where finish_reason is "error"
    metrics: RequestMetrics


@dataclass(slots=True)  # not frozen: one is made for each token, and freezing triples what that costs
class StepOutput:
    """What one step gave one request."""

    request_id: str
    token_id: int | None  # None where the request ended without a new token
    text: str  # new text; may be empty while a character is incomplete
    result: RequestOutput | None  # set when the request ended


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step did, for a timeline; times are seconds of ``time.perf_counter``."""

    started: float
    ended: float
    admitted: list[str]
    prefills: list[tuple[str, int]]  # request id, prompt tokens
    decodes: list[str]
    finished: list[tuple[str, FinishReason]]  # aborts since the last step included
    num_running: int  # after the step, like the counts below
    num_waiting: int
    num_used_pages: int


@dataclass(slots=True)
class _Request:
    seq: Sequence
    decoder: StreamDecoder
    texts: list[str]
    future: Future[RequestOutput] | None = None


class Engine:
    """One model, one page pool, one scheduler."""

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, progress: Progress | None = None, **options: Any
    ) -> None:
        """Load a model.

        Args:
            model: a folder, or a name under ``models/``; None looks for the usual ones (see ``hub``).
            progress: told of the layers loaded.
            **options: the fields of ``EngineConfig``: ``device="auto"``, ``kv_cache_mib=128``,
                ``max_num_seqs``, ``max_batched_tokens``, ``batching``, ``max_model_len``, ``dtype`` ...

        Raises:
            SamirVllmError: any of its kinds; the message names cause and remedy.
        """
        config = EngineConfig.from_options(**options)
        self.startup_times = StartupTimes()
        self.model_dir: Path = resolve_model(None if model is None else os.fspath(model))
        model_config = ModelConfig.from_dir(self.model_dir)
        context = begin_context(config)  # the driver needs a while
        try:
            self._load_model(config, model_config, context, progress or (lambda done, total: None))
        except BaseException:
            if context is not None:
                context.release()
            raise

    def _load_model(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        context: EarlyContext | None,
        progress: Progress,
    ) -> None:
        times = self.startup_times
        with times.stage("tokenizer, files of weights"):
            tokenizer = load_tokenizer(self.model_dir)
            chat_format = load_chat_format(self.model_dir, tokenizer)
            weights = open_weights(self.model_dir, model_config)
        load = partial(
            _load, config, model_config, weights, lambda done: progress(done, model_config.num_layers), times
        )
        backend = select_backend(config, model_config, context=context, times=times)
        refusal: str | None = None
        try:
            runner, num_pages = load(backend)
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
            runner, num_pages = load(backend)
        self.backend_name = backend.name
        self.notices: list[str] = [*weights.notices, *backend.notices]
        self._assemble(config, model_config, tokenizer, chat_format, runner, num_pages, backend.kv_itemsize)

    @classmethod
    def from_parts(
        cls,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        runner: Runner,
        *,
        chat_format: ChatFormat | None = None,
        num_pages: int,
    ) -> Engine:
        """An engine around a runner of one's own: fake models in tests, measurements of the scheduler."""
        engine = cls.__new__(cls)
        engine.model_dir = Path()
        engine.backend_name = "custom"
        engine.notices = []
        engine.startup_times = StartupTimes()
        engine._assemble(config, model_config, tokenizer, chat_format, runner, num_pages, 2)
        return engine

    def _assemble(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        chat_format: ChatFormat | None,
        runner: Runner,
        num_pages: int,
        kv_itemsize: int,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.chat_format = chat_format
        self.context_len = config.context_len(model_config)
        self.pool = PagePool(num_pages)
        page_bytes = model_config.page_bytes(itemsize=kv_itemsize)
        self.scheduler = Scheduler(
            self.pool,
            num_layers=model_config.num_layers,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            batching=config.batching,
            kv_cache_mib_for=lambda pages: -(-pages * page_bytes // 2**20),
        )
        self._runner = runner
        self._vocab_size = tokenizer.vocab_size
        self._requests: dict[str, _Request] = {}
        self._ids = itertools.count()
        self._held: list[StepOutput] = []  # for the next `step`
        self._outboxes: dict[str, list[StepOutput]] = {}  # of requests that `generate` or a stream waits for
        self.on_step: Callable[[StepRecord], None] | None = None
        self._ended: list[tuple[str, FinishReason]] = []  # for on_step
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()

    @property
    def has_work(self) -> bool:
        """A call of ``step`` has something to do or to tell."""
        return self.scheduler.has_work or bool(self._held) or not self._inbox.empty()

    # Requests

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            RequestError: it is empty, or holds something that is no token.
            ChatError: a dialog the chat format refuses.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_bos=self.tokenizer.adds_bos) if prompt else []
        else:
            items: list[Any] = list(prompt)
            if items and all(isinstance(m, Mapping) for m in items):
                return self._encode_dialog(items)
            ids = items
            vocab_size = self.model_config.vocab_size
            for i in ids:
                if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size:
                    raise RequestError(
                        f"a prompt's token ids must be whole numbers of 0 to {vocab_size - 1}, not {i!r}"
                    )
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        return ids

    def _encode_dialog(self, messages: list[Any]) -> list[int]:
        if self.chat_format is None:
            raise RequestError("this model has no chat format: give the prompt as text (--raw)")
        return self.chat_format.encode(messages)

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> str:
        """Queue a request; ``step`` runs it. Allowed between any two steps.

        Args:
            prompt: text, token ids or a dialog.
            params: limits; the defaults of ``SamplingParams`` if None.
            request_id: unique among live requests; made up if None.

        Returns:
            The request's id.

        Raises:
            RequestError: empty, longer than the context, more than the whole pool, or an id already live.
        """
        params = params or SamplingParams()
        if request_id is None:
            request_id = next(name for i in self._ids if (name := f"request-{i}") not in self._requests)
        ids = self.encode(prompt)
        if len(ids) >= self.context_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens but the context holds {self.context_len}, "
                "one new token included: shorten it"
            )
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.update(self.model_config.eos_token_ids)
        seq = Sequence(
            request_id,
            ids,
            max_tokens=min(params.max_tokens, self.context_len - len(ids)),
            stop_ids=frozenset(stop_ids),
            arrival_time=time.perf_counter(),
        )
        self.scheduler.add(seq)
        self._requests[request_id] = _Request(seq, self.tokenizer.stream_decoder(), [])
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, wherever it is, and give back its pages. Allowed between any two steps.

        Returns:
            What it had generated; None if no such request is live (never was, or has ended).
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        self.scheduler.abort(request.seq)
        out = self._finish(request)
        outbox = self._outboxes.pop(request_id, None)
        if outbox is not None:
            outbox.append(out)
        return out.result

    # From other threads

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Future[RequestOutput]:
        """Queue a request from any thread; the engine's own thread takes it up at its next ``step``.

        The engine's thread runs ``while ...: engine.wait_for_work(0.1); engine.step()``.

        Returns:
            A future of the result. A refused request is its exception; cancelling it aborts the request.
        """
        future: Future[RequestOutput] = Future()

        def add() -> None:
            if future.cancelled():
                return
            try:
                request_id = self.add_request(prompt, params)
            except Exception as exc:  # the caller's mistake, or its prompt's: it must not stop the engine
                if future.set_running_or_notify_cancel():
                    future.set_exception(exc)
                return
            self._requests[request_id].future = future
            future.add_done_callback(lambda f: self._on_done(request_id, f))

        self._post(add)
        return future

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)
        self._wake.set()

    def _on_done(self, request_id: str, future: Future[RequestOutput]) -> None:
        """On whatever thread the future was completed or cancelled."""

        def abort() -> None:
            request = self._requests.get(request_id)
            if request is not None and request.future is future:  # the id may have been used again
                self.abort(request_id)

        if future.cancelled():
            self._post(abort)

    def _drop_stream(self, request_id: str, outbox: list[StepOutput]) -> None:
        if self._outboxes.get(request_id) is outbox:  # else it has ended, and the id may be another's
            self.abort(request_id)

    def wait_for_work(self, timeout: float | None = None) -> bool:
        """Block the engine's thread until there is work, ``timeout`` seconds at most; tells if there is."""
        if not self.has_work:
            self._wake.wait(timeout)
        self._wake.clear()
        return self.has_work

    def _take_inbox(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    # Running

    def step(self) -> list[StepOutput]:
        """Run one step: the decodes of all running requests, and some prefill beside them.

        Returns:
            One output for each request that got a token or ended.
        """
        self._pump()
        held, self._held = self._held, []
        return held

    def _pump(self) -> None:
        """One step, each output to whom it concerns."""
        outputs = self._advance()
        if not self._outboxes:
            self._held += outputs
            return
        for out in outputs:
            self._outboxes.get(out.request_id, self._held).append(out)
            if out.result is not None:
                self._outboxes.pop(out.request_id, None)

    def _advance(self) -> list[StepOutput]:
        self._take_inbox()
        step = self.scheduler.schedule()
        started = time.perf_counter()
        try:
            token_ids = self._runner.run(step)
        except InvariantError:
            raise
        except Exception as exc:
            outputs = self._fail(step, exc)
        else:
            outputs = self._postprocess(step, token_ids)
        if self.on_step is not None:
            self.on_step(self._record(step, started))
        return outputs

    def _record(self, step: ScheduledStep, started: float) -> StepRecord:
        ended, self._ended = self._ended, []
        return StepRecord(
            started=started,
            ended=time.perf_counter(),
            admitted=[seq.request_id for seq, _ in step.admitted],
            prefills=[(seq.request_id, chunk) for seq, chunk in step.prefills],
            decodes=[seq.request_id for seq in step.decodes],
            finished=ended,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_used_pages=self.pool.num_used,
        )

    def _postprocess(self, step: ScheduledStep, token_ids: list[int]) -> list[StepOutput]:
        outputs = []
        for seq in self.scheduler.commit(step, token_ids):
            request = self._requests[seq.request_id]
            if seq.finish_reason is not None:
                outputs.append(self._finish(request))
                continue
            token = seq.token_ids[-1]
            text = self._text_of(request, token)
            if text:
                request.texts.append(text)
            outputs.append(StepOutput(seq.request_id, token, text, None))
        return outputs

    def _text_of(self, request: _Request, token: int) -> str:
        # A model's vocabulary may be padded beyond the tokenizer's: such an id has no text.
        return request.decoder.push(token) if token < self._vocab_size else ""

    def _fail(self, step: ScheduledStep, exc: Exception) -> list[StepOutput]:
        """The step's requests end with an error and return their pages; those that wait go on."""
        log.error("a step failed", exc_info=exc)
        outputs = []
        for seq in [*step.decodes, *(s for s, _ in step.prefills)]:
            self.scheduler.abort(seq, "error", f"{type(exc).__name__}: {' '.join(str(exc).split())}")
            outputs.append(self._finish(self._requests[seq.request_id]))
        return outputs

    def _finish(self, request: _Request) -> StepOutput:
        """The last output of a request whose sequence has ended."""
        seq = request.seq
        assert seq.finish_reason is not None
        got_token = seq.finish_reason in ("stop", "length")
        text = ""
        if seq.finish_reason == "length":
            text = self._text_of(request, seq.token_ids[-1])
        text += request.decoder.flush()
        request.texts.append(text)
        del self._requests[seq.request_id]
        result = RequestOutput(
            request_id=seq.request_id,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            token_ids=seq.output_token_ids,
            text="".join(request.texts),
            finish_reason=seq.finish_reason,
            error=seq.error,
            metrics=_metrics(seq, self.scheduler.credit_of(seq)),
        )
        if self.on_step is not None:
            self._ended.append((seq.request_id, seq.finish_reason))
        # From here on it can't be cancelled: another thread may try at any moment.
        if request.future is not None and request.future.set_running_or_notify_cancel():
            request.future.set_result(result)
        return StepOutput(seq.request_id, seq.token_ids[-1] if got_token else None, text, result)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> TokenStream:
        """Generate for one prompt, an output a token; the last one carries the result.

        Other live requests go on beside it; their outputs come with the next ``step``. Closing the stream
        early, or dropping it, aborts the request.

        Raises:
            RequestError: at the call, before anything runs.
        """
        return TokenStream(self, self.add_request(prompt, params))

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str
        self, prompts: str | Seq[int] | Seq[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> RequestOutput: ...

    @overload
    def generate(
        self, prompts: Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]: ...

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> RequestOutput | list[RequestOutput]:
        """Generate for one prompt or several, which run together.

        Args:
            prompts: one prompt, or a list of them.
            params: for all, or one for each.

        Returns:
            ``RequestOutput`` for one prompt; for a list, a list in its order, where a prompt that was
            refused has ``finish_reason`` "error" and its message in ``error``.

        Raises:
            RequestError: the one prompt was refused; or the numbers of prompts and params differ.
        """
        if _is_single(prompts):
            if not (params is None or isinstance(params, SamplingParams)):
                raise RequestError("several sampling params for one prompt: give one, or a list of prompts")
            *_, last = self.stream(prompts, params)  # type: ignore[arg-type]
            assert last.result is not None
            return last.result
        batch: list[Prompt] = list(prompts)  # type: ignore[arg-type]
        each: list[SamplingParams | None]
        if params is None or isinstance(params, SamplingParams):
            each = [params] * len(batch)
        else:
            each = list(params)
        if len(each) != len(batch):
            raise RequestError(
                f"{len(batch)} prompts but {len(each)} sampling params: give one for each, or one for all"
            )
        return self._generate_batch(batch, each)

    def _generate_batch(
        self, prompts: list[Prompt], params: list[SamplingParams | None]
    ) -> list[RequestOutput]:
        results: dict[int, RequestOutput] = {}
        index: dict[str, int] = {}
        outbox: list[StepOutput] = []
        try:
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
                try:
                    request_id = self.add_request(prompt, p)
                except ValueError as exc:  # RequestError, ChatError
                    results[i] = refused(str(exc))
                    continue
                index[request_id] = i
                self._outboxes[request_id] = outbox
            while len(results) < len(prompts):
                if not outbox:
                    self._pump()
                for out in outbox:
                    if out.result is not None:
                        results[index[out.request_id]] = out.result
                outbox.clear()
        finally:
            for request_id in index:
                if self._outboxes.get(request_id) is outbox:
                    self.abort(request_id)
        return [results[i] for i in range(len(prompts))]


class TokenStream(Iterator[StepOutput]):
    """The outputs of one request; made by ``Engine.stream``."""

    def __init__(self, engine: Engine, request_id: str) -> None:
        self.request_id = request_id
        self._engine = engine
        self._outbox: list[StepOutput] = []
        engine._outboxes[request_id] = self._outbox

    def __next__(self) -> StepOutput:
        while not self._outbox:
            if not self._is_live():
                raise StopIteration
            self._engine._pump()
        return self._outbox.pop(0)

    def _is_live(self) -> bool:
        return self._engine._outboxes.get(self.request_id) is self._outbox

    def close(self) -> None:
        """Abort the request if it hasn't ended, and give no more outputs."""
        if self._is_live():
            self._engine.abort(self.request_id)
        self._outbox.clear()

    def __del__(self) -> None:
        # The garbage collector may call this in the middle of a step: leave the abort to the next one.
        engine, request_id, outbox = self._engine, self.request_id, self._outbox
        if self._is_live():
            engine._post(lambda: engine._drop_stream(request_id, outbox))


def refused(error: str) -> RequestOutput:
    """The result of a request that was never queued."""
    return RequestOutput("", [], [], "", "error", error, RequestMetrics(None, None, None, 0.0, 0))


def _is_single(prompts: Any) -> bool:
    """Text, token ids or a dialog, rather than a list of prompts."""
    if isinstance(prompts, str):
        return True
    items = list(prompts)
    return bool(items) and (isinstance(items[0], (int, Mapping)))


def _metrics(seq: Sequence, num_pages: int) -> RequestMetrics:
    first, end = seq.first_token_time, seq.finished_time
    assert end is not None
    later_tokens = seq.num_output_tokens - 1
    return RequestMetrics(
        queue_time=None if seq.admitted_time is None else seq.admitted_time - seq.arrival_time,
        time_to_first_token=None if first is None else first - seq.arrival_time,
        time_per_output_token=(end - first) / later_tokens
        if first is not None and later_tokens > 0
        else None,
        total_time=end - seq.arrival_time,
        num_pages=num_pages,
    )


def _load(
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
