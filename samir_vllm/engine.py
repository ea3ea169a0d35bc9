"""The engine: text in, text out; many requests at once.

``step`` is three moves: schedule, run, postprocess. Where the runner allows it the next step is launched
before the results of the one before are read, so that a GPU never waits for Python; text is made while it
works. An engine belongs to one thread; others hand it requests with ``submit``. Knows no command line and no
protocol; what a device is, only the backend knows.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np

from samir_vllm.answers import Answer, Request
from samir_vllm.chat import ChatFormat
from samir_vllm.config import EngineConfig, ModelConfig
from samir_vllm.errors import InvariantError, RequestError, one_line
from samir_vllm.hub import resolve_model
from samir_vllm.interrupts import uninterrupted
from samir_vllm.loading import Progress, load_model
from samir_vllm.outputs import Completion, RequestMetrics, RequestOutput, StepOutput, StepRecord, refused
from samir_vllm.page_pool import PagePool
from samir_vllm.sampling import SamplingParams, TokenConstraint, TokenMasks, TokenSampling
from samir_vllm.scheduler import Scheduler
from samir_vllm.sequence import FinishReason, ScheduledStep, Sequence, StepResult
from samir_vllm.stopping import StopStrings
from samir_vllm.timing import StartupTimes
from samir_vllm.tokenizer import Tokenizer

__all__ = [
    "Completion",
    "Engine",
    "Prompt",
    "RequestMetrics",
    "RequestOutput",
    "Runner",
    "StepOutput",
    "StepRecord",
    "TokenStream",
    "refused",
]

Prompt = str | Seq[int] | Seq[Mapping[str, Any]]
"""Raw text, token ids, or a dialog: ``[{"role": "user", "content": "..."}]`` in the model's chat format."""

SEED_BITS = 63
"""Of a drawn seed: it fits a signed 64-bit number, so that any JSON or SQL can hold it."""

log = logging.getLogger("samir_vllm")


class Runner(Protocol):
    """What the engine needs of a model: steps, and their results."""

    @property
    def steps_ahead(self) -> int:
        """How many steps may be launched on top of one whose results have not been read: 0 or more."""

    def launch(self, step: ScheduledStep) -> Callable[[], StepResult]:
        """Starts a step that isn't empty; what is returned waits for its results, as often as it is called.

        A step that raises has not been launched, as far as the engine is concerned, and may come again.
        """

    def launch_forward(self, step: ScheduledStep) -> Callable[[TokenMasks | None], Callable[[], StepResult]]:
        """The same in two parts: up to the logits, and, by calling what is returned, on from there.

        So what the tokens of the step before mean for this one's is found out while this one is under way.
        The second part comes once all steps before have been read, and before another is launched.
        """


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step under way."""

    step: ScheduledStep
    result: Callable[[], StepResult] | None  # None: its tokens are still to be chosen
    started: float  # seconds
    has_failed: bool = False  # it isn't under way, and its result raises why
    go_on: Callable[[TokenMasks | None], Callable[[], StepResult]] | None = None  # chooses its tokens

    @property
    def bears_another(self) -> bool:
        """Whether a step may be launched on top of it."""
        return self.result is not None and not self.has_failed


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
        loaded = load_model(self.model_dir, config, self.startup_times, progress)
        self.backend_name = loaded.backend_name
        self.notices: list[str] = loaded.notices
        self._assemble(
            config,
            loaded.config,
            loaded.tokenizer,
            loaded.chat_format,
            loaded.runner,
            loaded.num_pages,
            loaded.kv_itemsize,
        )

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
        self._eos_ids = frozenset(model_config.eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._answers: dict[str, Answer] = {}  # by sequence id
        self._num_constrained = 0  # answers whose tokens must be allowed
        # Filled anew at each step: megabytes made anew would cost more than to fill them.
        self._mask_words = np.empty((0, 0), np.uint32)
        self._ids = itertools.count()
        self._held: list[StepOutput] = []  # for the next `step`
        self._outboxes: dict[str, list[StepOutput]] = {}  # of requests that `generate` or a stream waits for
        self._launched: deque[_Launched] = deque()  # the oldest first
        self._booked: deque[Sequence] = deque()  # they have a token, or have ended, and nobody has been told
        self._unrecorded: _Launched | None = None  # the step that booked them, where on_step is to hear of it
        self._last_end = 0.0  # of the step before, seconds
        self.on_step: Callable[[StepRecord], None] | None = None
        self._ended: list[tuple[str, FinishReason]] = []  # for on_step
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()

    @property
    def has_work(self) -> bool:
        """A call of ``step`` has something to do or to tell."""
        return self.scheduler.has_work or bool(self._booked or self._held) or not self._inbox.empty()

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
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        retain_kv: bool = False,
        constraint: Callable[[], TokenConstraint] | None = None,
    ) -> str:
        """Queue a request; ``step`` runs it. Allowed between any two steps.

        Args:
            prompt: text, token ids or a dialog.
            params: the request's wishes; the defaults of ``SamplingParams`` if None.
            request_id: unique among live requests; made up if None.
            retain_kv: take part in the reuse of K and V, as the turns of a conversation do: take over those
                of an earlier such request whose tokens begin the same, and leave one's own, while nobody
                needs their pages, to a later one.
            constraint: makes, for each answer, what says which tokens may come in it (a grammar's masks).

        Returns:
            The request's id.

        Raises:
            RequestError: empty, longer than the context, more than the whole pool, an id already live, or
                wishes that this model can't fulfil.
        """
        params = params or SamplingParams()
        if constraint is not None and params.min_tokens:
            raise RequestError("min_tokens can't be combined with a constraint: it may have to end earlier")
        if request_id is None:
            request_id = next(name for i in self._ids if (name := f"request-{i}") not in self._requests)
        ids = self.encode(prompt)
        if len(ids) >= self.context_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens but the context holds {self.context_len}, "
                "one new token included: shorten it"
            )
        self._check_params(params, self.context_len - len(ids))
        request = self._make_request(request_id, ids, params, retain_kv, constraint)
        self._queue(request)
        return request_id

    def _check_params(self, params: SamplingParams, room: int) -> None:
        """What only the model can tell; ``room`` is the new tokens that the context has left."""
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens is {params.min_tokens} but the context has room for {room} new tokens: "
                "ask for fewer or shorten the prompt"
            )
        vocab_size = self.model_config.vocab_size
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for i in ids:
                if not 0 <= i < vocab_size:
                    given = i if i < 1 << 64 else "a huge number"  # too long to be shown, or even printed
                    raise RequestError(f"{name}: token ids must be 0 to {vocab_size - 1}, not {given}")

    def _make_request(
        self,
        request_id: str,
        ids: list[int],
        params: SamplingParams,
        retain_kv: bool,
        constraint: Callable[[], TokenConstraint] | None,
    ) -> Request:
        now = time.perf_counter()
        seed = params.seed
        if seed is None and params.temperature > 0:
            seed = secrets.randbits(SEED_BITS)
        stop_ids = frozenset() if params.ignore_eos else self._eos_ids
        if params.stop_token_ids:
            stop_ids = stop_ids.union(params.stop_token_ids)
        stops = StopStrings(params.stop) if params.stop else None
        greedy = _is_plainly_greedy(params)
        request = Request(request_id, ids)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(ids)
        for index in range(params.n):
            seq = Sequence(
                request_id if params.n == 1 else f"{request_id}#{index}",
                ids,
                max_tokens=min(params.max_tokens, self.context_len - len(ids)),
                stop_ids=stop_ids,
                sampling=None if greedy else TokenSampling(params, seed or 0, index, stop_ids),
                constraint=None if constraint is None else constraint(),
                retain_kv=retain_kv,
                # For the prompt's log-probabilities every row must run.
                reuse_kv=retain_kv and params.prompt_logprobs is None,
                arrival_time=now,
            )
            answer = Answer(
                request_id,
                seq,
                index,
                params,
                seed,
                decoder=self.tokenizer.stream_decoder(),
                vocab_size=self._vocab_size,
                matcher=None if stops is None else stops.matcher(),
            )
            request.answers.append(answer)
        return request

    def _queue(self, request: Request) -> None:
        """All of the request's sequences, or none."""
        request_id = request.request_id
        if request_id in self._requests:  # with n > 1 no sequence has this id
            raise RequestError(
                f"request id {request_id!r} is already live: wait for its end or take another id"
            )
        sequences = [answer.seq for answer in request.answers]
        for i, seq in enumerate(sequences):
            try:
                self.scheduler.add(seq)
            except BaseException:
                for queued in sequences[:i]:
                    self.scheduler.abort(queued)
                raise
        self._requests[request_id] = request
        for answer in request.answers:
            self._answers[answer.seq.request_id] = answer
            self._num_constrained += answer.seq.constraint is not None

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, wherever its answers are, and give back its pages. Allowed between two steps.

        Returns:
            What it had generated; None if no such request is live (never was, or has ended).
        """
        self._postprocess()  # what an interruption has left
        request = self._requests.get(request_id)
        if request is None:
            return None
        outputs = []
        for answer in request.pending():
            self.scheduler.abort(answer.seq)
            outputs.append(self._finish(answer))
        outbox = self._outboxes.pop(request_id, None)
        if outbox is not None:
            outbox += outputs
        return outputs[-1].result

    def drop_retained_kv(self) -> None:
        """Free what ended requests with ``retain_kv`` left; whoever needs pages does so anyway."""
        self.scheduler.drop_retained()

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
        """Finish one step: the decodes of all running requests, and some prefill beside them.

        Returns:
            One output for each answer that got a token or ended.
        """
        self._pump()
        held, self._held = self._held, []
        return held

    def _pump(self) -> None:
        """One step, each output to whom it concerns."""
        self._take_inbox()
        self._postprocess()  # what an interruption has left
        self._launch()
        if self._launched:
            self._read()

    def _deliver(self, out: StepOutput) -> None:
        self._outboxes.get(out.request_id, self._held).append(out)
        if out.result is not None:
            self._outboxes.pop(out.request_id, None)

    def _launch(self) -> None:
        """Launch steps until as many are under way as may be, or there is nothing to do."""
        launched = self._launched
        self._choose()
        while len(launched) <= self._runner.steps_ahead and all(step.bears_another for step in launched):
            with uninterrupted():
                step, started = self.scheduler.schedule(), time.perf_counter()
            if step.is_empty:
                break
            result = go_on = None
            try:
                if self._num_constrained and any(seq.constraint is not None for seq in step.sampled()):
                    go_on = self._runner.launch_forward(step)
                else:
                    result = self._runner.launch(step)
            except InvariantError:
                raise
            except Exception as exc:
                # Its turn comes when those before it have been read: they may give its sequences tokens.
                launched.append(_Launched(step, _raises(exc), started, has_failed=True))
                break
            with uninterrupted():
                launched.append(_Launched(step, result, started, go_on=go_on))
                self.scheduler.launched(step)
            self._choose()

    def _choose(self) -> None:
        """Let the oldest step under way choose its tokens, if it waits for that: those before are known."""
        if not self._launched or self._launched[0].result is not None:
            return
        launched = self._launched[0]
        assert launched.go_on is not None
        try:
            masks = self._masks(launched.step)
            chosen = replace(launched, result=launched.go_on(masks))
        except InvariantError:
            raise
        except Exception as exc:
            chosen = replace(launched, result=_raises(exc), has_failed=True)
        self._launched[0] = chosen

    def _masks(self, step: ScheduledStep) -> TokenMasks | None:
        """Of the rows of living sequences that have a constraint; None if there are none."""
        sampled = step.sampled()
        if len(self._mask_words) < len(sampled):
            self._mask_words = np.empty((len(sampled), -(-self.model_config.vocab_size // 32)), np.uint32)
        bound = [(i, s) for i, s in enumerate(sampled) if s.constraint is not None and not s.is_finished]
        if not bound:
            return None
        # One after another: on threads it takes longer, however little of the work needs Python's lock.
        for (_, seq), mask in zip(bound, self._mask_words, strict=False):
            assert seq.constraint is not None
            try:
                seq.constraint.fill_mask(mask)
            except Exception as exc:  # somebody's grammar: the others' tokens don't depend on it
                mask[:] = ~np.uint32(0)
                self.scheduler.abort(seq, "error", f"its constraint failed: {one_line(exc)}")
                if seq not in self._booked:
                    self._booked.append(seq)  # it is told of with the next outputs
        return TokenMasks(np.array([row for row, _ in bound], np.int32), self._mask_words[: len(bound)])

    def _advance(self, seq: Sequence) -> None:
        """Tell the constraint of the newest token, which may complete the answer."""
        constraint = seq.constraint
        if constraint is None or seq.finish_reason in ("stop", "error"):
            return
        try:
            is_allowed, is_complete = constraint.accept(seq.token_ids[-1]), constraint.is_complete
        except Exception as exc:
            is_allowed, is_complete = False, False
            log.error("a constraint failed", exc_info=exc)
        if not is_allowed:
            self.scheduler.abort(seq, "error", "its constraint refused the token that was chosen")
        elif is_complete and not self.scheduler.abort(seq, "stop"):
            seq.finish_reason = "stop"  # rather than "length", which would say that something is missing

    def _read(self) -> None:
        """Take in the results of the oldest step under way."""
        launched = self._launched[0]
        step = launched.step
        living = None if self.on_step is None else replace(launched, step=_for_the_living(launched))
        try:
            assert launched.result is not None
            result = launched.result()
        except InvariantError:
            raise
        except Exception as exc:
            with uninterrupted():
                self._launched.popleft()
                self._unrecorded = living
                self._fail(step, exc)
        else:
            with uninterrupted():
                self._book(step, result)
                self._launched.popleft()
                self._unrecorded = living
            if self._runner.steps_ahead:
                self._launch()  # before the text is made: the device shall not wait for that
        self._postprocess()

    def _record(self, step: ScheduledStep, started: float) -> StepRecord:
        ended, self._ended = self._ended, []
        self._last_end = time.perf_counter()
        return StepRecord(
            started=started,
            ended=self._last_end,
            admitted=[seq.request_id for seq, _ in step.admitted],
            prefills=[(seq.request_id, chunk) for seq, chunk in step.prefills],
            decodes=[seq.request_id for seq in step.decodes],
            finished=ended,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_used_pages=self.pool.num_used,
        )

    def _book(self, step: ScheduledStep, result: StepResult) -> None:
        if result.logprobs is not None or result.prompt_logprobs:
            self._book_logprobs(step, result)
        booked = self.scheduler.commit(step, result.token_ids)
        if self._num_constrained:
            for seq in booked:
                self._advance(seq)
        self._booked += booked

    def _postprocess(self) -> None:
        """Tell of the sequences that the last step gave something; what they say becomes text."""
        with uninterrupted():
            while self._booked:
                self._deliver(self._tell(self._booked[0]))
                self._booked.popleft()
        if self._unrecorded is not None:
            self._tell_on_step(self._unrecorded)
            self._unrecorded = None

    def _tell_on_step(self, launched: _Launched) -> None:
        step = launched.step
        if self.on_step is not None and (step.sequences() or step.admitted):
            self.on_step(self._record(step, max(launched.started, self._last_end)))

    def _tell(self, seq: Sequence) -> StepOutput:
        answer = self._answers[seq.request_id]
        text = ""
        if seq.finish_reason is None:
            token = seq.token_ids[-1]
            text = answer.push(token)
            if answer.stop_string is None:
                return StepOutput(
                    answer.request_id, answer.index, token, text, None, None, answer.newest_logprobs()
                )
            self.scheduler.abort(seq, "stop")
        return self._finish(answer, text)

    def _book_logprobs(self, step: ScheduledStep, result: StepResult) -> None:
        """Before the step is committed: only now do the sequences tell where its tokens belong."""
        for seq, prompt_logprobs in result.prompt_logprobs:
            if not seq.is_finished:
                request = self._requests[self._answers[seq.request_id].request_id]
                request.book_prompt_logprobs(seq.num_computed_tokens, prompt_logprobs)
        if result.logprobs is not None:
            for seq, logprobs in zip(step.sampled(), result.logprobs, strict=True):
                if logprobs is not None and not seq.is_finished:
                    self._answers[seq.request_id].book_logprobs(logprobs)

    def _fail(self, step: ScheduledStep, exc: Exception) -> None:
        """The step's sequences end with an error and return their pages; those that wait go on."""
        log.error("a step failed", exc_info=exc)
        for seq in step.sequences():
            if self.scheduler.abort(seq, "error", f"{type(exc).__name__}: {one_line(exc)}"):
                self._deliver(self._finish(self._answers[seq.request_id]))

    def _finish(self, answer: Answer, text: str = "") -> StepOutput:
        """The last output of an answer whose sequence has ended; ``text`` is what this step gave already."""
        seq, request = answer.seq, self._requests[answer.request_id]
        rest, completion = answer.finish(self.scheduler.credit_of(seq))
        del self._answers[seq.request_id]
        self._num_constrained -= seq.constraint is not None
        result = request.book(completion)
        if self.on_step is not None:
            self._ended.append((seq.request_id, completion.finish_reason))
        if result is not None:
            del self._requests[request.request_id]
            # From here on it can't be cancelled: another thread may try at any moment.
            if request.future is not None and request.future.set_running_or_notify_cancel():
                request.future.set_result(result)
        token = seq.token_ids[-1] if completion.finish_reason in ("stop", "length") else None
        logprobs = None if token is None else answer.newest_logprobs()
        return StepOutput(request.request_id, answer.index, token, text + rest, completion, result, logprobs)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        retain_kv: bool = False,
        constraint: Callable[[], TokenConstraint] | None = None,
    ) -> TokenStream:
        """Generate for one prompt, an output a token; the last one carries the result.

        Other live requests go on beside it; their outputs come with the next ``step``. Closing the stream
        early, or dropping it, aborts the request. Of several answers, each output names its ``index``, and
        ``completion`` comes with each one's last. ``retain_kv`` and ``constraint`` as for ``add_request``.

        Raises:
            RequestError: at the call, before anything runs.
        """
        request_id = self.add_request(prompt, params, retain_kv=retain_kv, constraint=constraint)
        return TokenStream(self, request_id)

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


def _is_single(prompts: Any) -> bool:
    """Text, token ids or a dialog, rather than a list of prompts."""
    if isinstance(prompts, str):
        return True
    items = list(prompts)
    return bool(items) and (isinstance(items[0], (int, Mapping)))


def _for_the_living(launched: _Launched) -> ScheduledStep:
    """Without those who have ended since it was launched: to them it was nothing, and nobody heard of it.

    And without those whom it admitted and who are in none of its rows, if it failed: they are admitted again.
    """
    step = launched.step
    rows = step.sequences()
    return ScheduledStep(
        [seq for seq in step.decodes if not seq.is_finished],
        [(seq, chunk) for seq, chunk in step.prefills if not seq.is_finished],
        [
            (seq, pages)
            for seq, pages in step.admitted
            if not seq.is_finished and (seq in rows or not launched.has_failed)
        ],
    )


def _raises(exc: Exception) -> Callable[[], StepResult]:
    def result() -> StepResult:
        raise exc

    return result


def _is_plainly_greedy(params: SamplingParams) -> bool:
    """The runner has nothing to do but to take the greatest logit."""
    return not (
        params.temperature
        or params.adjusts_logits
        or params.logprobs is not None
        or params.prompt_logprobs is not None
    )
