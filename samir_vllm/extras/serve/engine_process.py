"""The engine's own process: requests in, one message out for each step, until nobody is at the other end.

Started by the front with ``python -m``, so that Python's lock in there never delays a launch. Knows nothing
of HTTP; what an answer means to a client, the front knows.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from samir_vllm.commandline import EXIT_USER_ERROR
from samir_vllm.config import PAGE_SIZE
from samir_vllm.engine import Engine
from samir_vllm.errors import RequestError, SamirVllmError, one_line
from samir_vllm.extras.serve.channel import Channel
from samir_vllm.extras.serve.grammar import GrammarConstraint, Grammars
from samir_vllm.extras.serve.wire import (
    Abort,
    Add,
    Begin,
    Ending,
    Failed,
    Load,
    Output,
    Ready,
    Refusal,
    Report,
)
from samir_vllm.outputs import Completion, StepOutput

QUEUE_FULL = "too many requests wait already: try again later"
COMPILE_WAIT = 0.002
"""Seconds between two looks at the channel while nothing but a grammar is under way."""


class EngineProcess:
    """An engine between two ends of a channel."""

    def __init__(self, engine: Engine, channel: Channel, max_waiting: int) -> None:
        """Serve until the channel ends.

        Args:
            engine: nobody else steps it.
            channel: to the front.
            max_waiting: requests that may wait for their admission; whoever comes after them is refused.
        """
        self._engine = engine
        self._channel = channel
        self._max_waiting = max_waiting
        self._grammars = Grammars(
            engine.tokenizer, engine.model_config.eos_token_ids, engine.model_config.vocab_size
        )
        self._streams: dict[int, bool] = {}  # by key, of live requests
        self._refusals: list[Refusal] = []
        # Grammars are compiled on another thread, mostly without Python's lock: steps go on meanwhile.
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._compiling: deque[tuple[Add, Future[GrammarConstraint]]] = deque()
        self._compiler.submit(self._grammars.load)  # now, not when somebody waits for it
        self._last_load: tuple[int, ...] = ()

    def run(self) -> None:
        """Until the front has gone, however that came about."""
        try:
            while True:
                wait = not self._engine.has_work and not self._compiling
                arrived = self._take(self._channel.receive(wait=wait))
                arrived += self._take_compiled()
                outputs = self._engine.step() if self._engine.has_work else []
                self._turn_away(arrived)
                self._report(outputs)
        except ConnectionError:
            return

    def _take(self, messages: list[list[Add | Abort]]) -> list[Add]:
        arrived = []
        for message in messages:
            for command in message:
                if isinstance(command, Abort):
                    self._abort(command.key)
                else:
                    self._streams[command.key] = command.streams
                    if command.grammar is not None and len(self._compiling) >= max(1, self._max_waiting):
                        self._refuse(command.key, QUEUE_FULL, 429)
                    elif command.grammar is not None:
                        compiled = self._compiler.submit(self._grammars.constraint, command.grammar)
                        self._compiling.append((command, compiled))
                    elif self._add(command):
                        arrived.append(command)
        return arrived

    def _abort(self, key: int) -> None:
        if self._streams.pop(key, None) is None:
            return
        for add, compiled in self._compiling:
            if add.key == key:
                compiled.cancel()
        self._engine.abort(str(key))

    def _take_compiled(self) -> list[Add]:
        """Add the requests whose grammars are ready; with nothing else to do, wait a moment for the first."""
        arrived = []
        while self._compiling:
            add, compiled = self._compiling[0]
            if not compiled.done():
                if not self._engine.has_work:
                    wait_for([compiled], COMPILE_WAIT)
                if not compiled.done():
                    break
            self._compiling.popleft()
            if add.key in self._streams and self._add(add, compiled):
                arrived.append(add)
        return arrived

    def _add(self, add: Add, compiled: Future[GrammarConstraint] | None = None) -> bool:
        most = self._engine.config.max_num_seqs + self._max_waiting
        if add.params.n > most:
            self._refuse(add.key, f"n is {add.params.n}, but only {most} answers may run or wait", 400)
            return False
        try:
            constraint = None if compiled is None else compiled.result().copy
            self._engine.add_request(
                add.prompt,
                add.params,
                request_id=str(add.key),
                retain_kv=add.retain_kv,
                constraint=constraint,
            )
        except RequestError as exc:
            self._refuse(add.key, str(exc), 400)
            return False
        except Exception as exc:  # a grammar's, that nobody has thought of: the others go on
            logging.error("a request could not be queued", exc_info=exc)
            self._refuse(add.key, f"the request could not be queued: {one_line(exc)}", 500)
            return False
        return True

    def _refuse(self, key: int, message: str, status: int) -> None:
        if self._streams.pop(key, None) is not None:
            self._refusals.append(Refusal(key, message, status))

    def _turn_away(self, arrived: list[Add]) -> None:
        """Of those that came before this step, and that it could not admit, the latest are too many."""
        waiting = self._engine.scheduler.num_waiting
        while arrived and waiting > self._max_waiting:
            add = arrived.pop()
            if add.key in self._streams:
                self._engine.abort(str(add.key))
                self._refuse(add.key, QUEUE_FULL, 429)
            waiting = self._engine.scheduler.num_waiting

    def _report(self, outputs: list[StepOutput]) -> None:
        engine, scheduler = self._engine, self._engine.scheduler
        told: list[Output] = []
        for out in outputs:
            key = int(out.request_id)
            streams = self._streams.get(key)
            if streams is None:
                continue  # aborted
            if out.completion is not None:
                told.append((key, out.index, out.text, out.logprobs, _ending(out, out.completion, streams)))
                if out.result is not None:
                    del self._streams[key]
            elif streams:
                told.append((key, out.index, out.text, out.logprobs, None))
        used = engine.pool.num_used - scheduler.num_retained_pages
        load = (scheduler.num_running, scheduler.num_waiting + len(self._compiling), used)
        if told or self._refusals or load != self._last_load:
            refusals, self._refusals, self._last_load = self._refusals, [], load
            self._channel.send(Report(Load(*load, time.process_time()), told, refusals))
        else:
            self._channel.flush()


def _ending(out: StepOutput, completion: Completion, streams: bool) -> Ending:
    """Of a request that streams only what it has not been told."""
    return Ending(
        completion.finish_reason,
        isinstance(completion.stop_reason, int),
        completion.error,
        len(completion.token_ids),
        completion.metrics,
        "" if streams else completion.text,
        None if streams else completion.logprobs,
        None if out.result is None else out.result.prompt_logprobs,
    )


def _ready(engine: Engine) -> Ready:
    return Ready(
        engine.context_len,
        engine.model_config.vocab_size,
        engine.pool.num_pages,
        engine.pool.num_pages // engine.model_config.num_layers * PAGE_SIZE,
    )


def main(argv: list[str]) -> int:
    """``FD MODULE``: the number of an inherited socket, and a module whose ``load_engine(args)`` loads."""
    # The front decides when to end; a terminal's Ctrl-C goes to both processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="samir_vllm engine: %(levelname)s: %(message)s", level=logging.ERROR)
    channel = Channel(socket.socket(fileno=int(argv[0])))
    try:
        (begin,) = channel.receive(wait=True)
        assert isinstance(begin, Begin)
        try:
            engine: Engine = importlib.import_module(argv[1]).load_engine(begin.args)
        except SamirVllmError as exc:
            channel.send(Failed(str(exc)))
            return EXIT_USER_ERROR
        gc.freeze()  # what has been loaded stays
        channel.send(_ready(engine))
    except ConnectionError:
        return 0
    EngineProcess(engine, channel, begin.max_waiting).run()
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # without the seconds that freeing a GPU's memory piece by piece may take
