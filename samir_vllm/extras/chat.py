"""``chat``: a conversation in the terminal; the whole dialog goes to the model with every turn.

Answers go to standard output, everything else to standard error. K and V of earlier turns are reused: every
turn asks the engine to retain them. Knows the engine only by its public names, and of terminals what the
standard library tells.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from samir_vllm.commandline import (
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    Interrupts,
    add_engine_options,
    add_sampling_options,
    error_console,
    load_engine,
    logprobs_table,
    print_notice,
    sampling_notices,
    sampling_options,
    user_error,
)
from samir_vllm.config import PAGE_SIZE
from samir_vllm.engine import Engine, RequestOutput
from samir_vllm.errors import ChatError, OptionError, RequestError, SamirVllmError
from samir_vllm.sampling import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from samir_vllm.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 512
PROMPT = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--date", metavar="TEXT", help='today for the chat format, such as "26 Jul 2024"')
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="new tokens of an answer at most, as far as context and KV pages reach (default: %(default)s)",
    )
    parser.add_argument("--quiet", action="store_true", help="no greeting, no progress")
    add_sampling_options(parser, leave_out=("n", "prompt_logprobs"))
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status: 0, 130 after Ctrl-C.

    Where standard input is no terminal: 2 if a turn failed.
    """
    params = SamplingParams(**sampling_options(args))
    console = error_console()
    for notice in sampling_notices([params]):
        print_notice(console, notice)
    engine = load_engine(args, console, quiet=args.quiet)
    if engine.chat_format is None:
        raise ChatError(f"{engine.model_dir}: this model has no chat format: use generate --raw")
    with Interrupts() as interrupts:
        conversation = Conversation(engine, params, system=args.system, date=args.date)
        chat = Chat(conversation, Lines(interrupts), console, interrupts)
        if not args.quiet:
            chat.greet()
        return chat.run()


# The dialog


@dataclass(frozen=True, slots=True)
class Turn:
    """Figures of one turn, seconds; None for what never happened."""

    num_prompt_tokens: int
    num_cached_tokens: int  # of those: K and V were there
    num_new_tokens: int
    time_to_first_token: float | None
    time_per_output_token: float | None  # mean over the tokens after the first
    seed: int | None = None

    @classmethod
    def of(cls, result: RequestOutput) -> Turn:
        """The figures of a turn that has ended."""
        metrics = result.metrics
        return cls(
            len(result.prompt_token_ids),
            metrics.num_cached_tokens,
            len(result.token_ids),
            metrics.time_to_first_token,
            metrics.time_per_output_token,
            result.seed,
        )


@dataclass(frozen=True, slots=True)
class Exchange:
    """A user's message and its answer."""

    question: str
    answer: str
    encoded: list[int]  # the dialog up to the answer, as the chat format encodes it
    prompt_ids: list[int]  # the same as the model read it
    answer_ids: list[int]  # as the model said it, without the id that ended it

    @classmethod
    def of(cls, question: str, encoded: list[int], result: RequestOutput) -> Exchange:
        """The exchange that a request has made."""
        ended_by_id = result.finish_reason == "stop" and isinstance(result.stop_reason, int)
        answer_ids = result.token_ids[:-1] if ended_by_id else result.token_ids
        return cls(question, result.text, encoded, result.prompt_token_ids, answer_ids)

    def with_own_tokens(self, encoded: list[int], tokenizer: Tokenizer) -> list[int]:
        """A dialog that goes on after this exchange, its answers in the very tokens that were generated.

        A text can be cut into tokens in many ways, the model needn't choose the tokenizer's, and K and V are
        those of tokens. Where the chat format has changed something on the way, ``encoded`` stays as it is.
        """
        as_text = tokenizer.encode(self.answer)
        start = len(self.encoded)
        stop = start + len(as_text)
        same_frame = encoded[:start] == self.encoded and encoded[start:stop] == as_text
        in_vocabulary = max(self.answer_ids, default=0) < tokenizer.vocab_size  # a model's may be padded
        if same_frame and in_vocabulary and tokenizer.decode(self.answer_ids) == self.answer:
            return self.prompt_ids + self.answer_ids + encoded[stop:]
        return encoded


class Conversation:
    """A dialog with one engine, and the figures of its turns. Knows no terminal.

    Attributes:
        system: the system message, or None.
        exchanges: the dialog so far.
        turns: figures of all turns since the start, those that ``reset`` forgot included.
        num_tokens: of the dialog, as the last turn saw and left it.
    """

    def __init__(
        self, engine: Engine, params: SamplingParams, *, system: str | None = None, date: str | None = None
    ) -> None:
        """An empty dialog; ``params`` hold for every turn, their ``max_tokens`` as far as there is room."""
        self.engine = engine
        self.turns: list[Turn] = []
        self._params = params
        self._date = date
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Forget the dialog and begin with this system message."""
        self.system = system
        self.exchanges: list[Exchange] = []
        self.num_tokens = 0

    def ask(
        self, text: str, show: Callable[[str], None], is_interrupted: Callable[[], bool] = lambda: False
    ) -> RequestOutput:
        """One turn.

        An answer that ends, or is stopped with something said, joins the dialog with its question. Where it
        failed, or was stopped before a word, the dialog stays as it was.

        Args:
            text: the user's message.
            show: gets the answer piece by piece.
            is_interrupted: asked after each step; True ends the answer (``finish_reason`` is "abort").

        Raises:
            SamirVllmError: the turn was refused, before anything was shown.
        """
        return self._ask(self.exchanges, text, show, is_interrupted)

    def retry(
        self, show: Callable[[str], None], is_interrupted: Callable[[], bool] = lambda: False
    ) -> RequestOutput:
        """The last turn once more, as ``ask``; the new answer takes the old one's place.

        Raises:
            RequestError: there is no turn yet.
        """
        if not self.exchanges:
            raise RequestError("nothing to try again: the dialog is empty")
        *before, last = self.exchanges
        return self._ask(before, last.question, show, is_interrupted)

    def _ask(
        self,
        before: list[Exchange],
        text: str,
        show: Callable[[str], None],
        is_interrupted: Callable[[], bool],
    ) -> RequestOutput:
        encoded = self._encode(before, text)
        ids = before[-1].with_own_tokens(encoded, self.engine.tokenizer) if before else encoded
        params = replace(self._params, max_tokens=min(self._params.max_tokens, self._room(len(ids))))
        result = self._run(ids, params, show, is_interrupted)
        self.turns.append(Turn.of(result))
        if result.finish_reason != "error" and (result.text or result.finish_reason != "abort"):
            self.exchanges = [*before, Exchange.of(text, encoded, result)]
            self.num_tokens = len(ids) + len(result.token_ids)
        return result

    def _encode(self, before: list[Exchange], text: str) -> list[int]:
        """The dialog with a new message at its end, as the chat format writes it."""
        messages = [] if self.system is None else [_message("system", self.system)]
        for exchange in before:
            messages += [_message("user", exchange.question), _message("assistant", exchange.answer)]
        assert self.engine.chat_format is not None
        return self.engine.chat_format.encode([*messages, _message("user", text)], date=self._date)

    def _run(
        self,
        ids: list[int],
        params: SamplingParams,
        show: Callable[[str], None],
        is_interrupted: Callable[[], bool],
    ) -> RequestOutput:
        request_id = self.engine.add_request(ids, params, retain_kv=True)
        result, num_shown = None, 0
        try:
            # Not by a stream: that gives nothing while a long prompt is prefilled, and Ctrl-C would wait.
            while result is None:
                for out in self.engine.step():
                    if out.text:
                        show(out.text)
                    num_shown += len(out.text)
                    result = out.result
                if result is None and is_interrupted():
                    result = self.engine.abort(request_id)
                    if result is not None and (rest := result.text[num_shown:]):  # held back until now
                        show(rest)
        except Exception:
            self.engine.abort(request_id)
            raise
        return result

    def _room(self, num_prompt_tokens: int) -> int:
        """New tokens that fit behind a prompt: one at least, and what ``min_tokens`` asks for."""
        engine = self.engine
        pages_per_layer = engine.pool.num_pages // engine.model_config.num_layers
        # The last new token's K and V are never stored.
        limits = {"context": engine.context_len, "KV page pool": pages_per_layer * PAGE_SIZE + 1}
        name, most = min(limits.items(), key=lambda item: item[1])
        room, least = most - num_prompt_tokens, max(1, self._params.min_tokens)
        if room >= least:
            return room
        remedy = "/reset forgets it" if self.exchanges else "shorten the message"
        if name != "context":
            remedy += ", or leave and give a larger --kv-cache-mib"
        raise RequestError(
            f"the dialog has {num_prompt_tokens} tokens but the {name} holds {most}, "
            f"{'one new token' if least == 1 else f'{least} new tokens'} included: {remedy}"
        )

    def limit_of(self, result: RequestOutput) -> str:
        """What an answer of ``finish_reason`` "length" ran into, in words."""
        if len(result.token_ids) == self._params.max_tokens:
            return "--max-tokens allows more"
        return "context or KV pages are full, /reset forgets the dialog"

    def stats(self) -> list[str]:
        """Lines about the last turn, all turns, and what is used of context and pages."""
        if not self.turns:
            return ["no turn yet"]
        pool = self.engine.pool
        lines = [f"last turn: {_figures(self.turns[-1:])}"]
        if len(self.turns) > 1:
            lines.append(f"all {len(self.turns)} turns: {_figures(self.turns)}")
        lines.append(
            f"context: {self.num_tokens} of {self.engine.context_len} tokens, "
            f"KV pages: {pool.num_used} of {pool.num_pages}"
        )
        return lines


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _figures(turns: list[Turn]) -> str:
    prompt_tokens = sum(t.num_prompt_tokens for t in turns)
    cached_tokens = sum(t.num_cached_tokens for t in turns)
    parts = [f"{prompt_tokens} prompt tokens ({cached_tokens} of them reused from the KV cache)"]
    parts.append(f"{sum(t.num_new_tokens for t in turns)} new tokens")
    first = [t.time_to_first_token for t in turns if t.time_to_first_token is not None]
    if first:
        name = "time to first token" if len(turns) == 1 else "mean time to first token"
        parts.append(f"{name} {sum(first) / len(first):.2f} s")
    later = [(t.num_new_tokens - 1, t.time_per_output_token) for t in turns]
    seconds = sum(n * mean for n, mean in later if mean is not None)
    if seconds > 0:
        parts.append(f"then {sum(n for n, mean in later if mean is not None) / seconds:.1f} tokens/s")
    if len(turns) == 1 and turns[0].seed is not None:
        parts.append(f"seed {turns[0].seed}")
    return ", ".join(parts)


# The terminal


class Lines:
    """The user's lines: from a terminal, with line editing where Python has readline, or from a pipe."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self.interactive = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
        if self.interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  # input() takes it up: editing, and history

    def read(self) -> str | None:
        """The next line without its end; None after the last one.

        Raises:
            KeyboardInterrupt: Ctrl-C.
            OptionError: standard input isn't text.
        """
        with self._interrupts.immediate():
            try:
                return self._read_terminal() if self.interactive else self._read_pipe()
            except EOFError:
                return None
            except UnicodeDecodeError:
                encoding = sys.stdin.encoding
                raise OptionError(f"standard input isn't {encoding} text; convert it first") from None

    def _read_terminal(self) -> str:
        sys.stdout.flush()
        if sys.stdout.isatty():
            return input(PROMPT)
        print(PROMPT, end="", file=sys.stderr, flush=True)  # standard output is for answers
        return input()

    def _read_pipe(self) -> str:
        line = "" if sys.stdin is None or sys.stdin.closed else sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


@contextmanager
def typed_text_kept() -> Iterator[None]:
    """In the block Ctrl-C leaves what was typed ahead; else a terminal drops it (NOFLSH, termios(3))."""
    try:
        import termios
    except ImportError:  # no POSIX
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    changed: list[Any] = before.copy()
    changed[3] |= termios.NOFLSH
    termios.tcsetattr(descriptor, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


class Chat:
    """Reads lines, carries out commands, shows answers."""

    def __init__(
        self, conversation: Conversation, lines: Lines, console: Console, interrupts: Interrupts
    ) -> None:
        self._conversation = conversation
        self._lines = lines
        self._console = console  # standard error
        self._interrupts = interrupts
        self._failed = False
        self._leaves = False
        # Name -> what it does, how it is called, its help.
        self._commands: dict[str, tuple[Callable[[str], None], str, str]] = {
            "/reset": (self._reset, "", "forget the dialog, keep the system message"),
            "/system": (
                self._system,
                " [TEXT]",
                "begin anew with this system message; without TEXT: show it",
            ),
            "/retry": (self._retry, "", "answer the last message once more"),
            "/stats": (self._stats, "", "figures of the last turn and of all, context and KV pages used"),
            "/help": (self._help, "", "this list"),
            "/exit": (self._exit, "", "leave, as Ctrl-D does"),
        }

    def greet(self) -> None:
        """One line on a terminal: which model, and how to get help."""
        if self._lines.interactive:
            engine = self._conversation.engine
            self._say(
                f"{engine.model_dir.name} [{engine.backend_name}], context of {engine.context_len} tokens; "
                "/help lists the commands, Ctrl-D leaves"
            )

    def run(self) -> int:
        """Until the last line; returns the exit status."""
        hinted = False
        while not self._leaves:
            try:
                line = self._lines.read()
            except KeyboardInterrupt:
                self._end_line()
                if hinted or not self._lines.interactive:
                    return EXIT_INTERRUPTED
                hinted = True
                self._say("/exit or Ctrl-D leaves, and so does a second Ctrl-C")
                continue
            except OptionError as exc:
                if not self._lines.interactive:
                    raise
                self._fail(str(exc))
                continue
            if line is None:
                self._end_line()
                break
            hinted = False
            self._take(line)
            if self._interrupts.requested and not self._lines.interactive:
                return EXIT_INTERRUPTED
        return EXIT_USER_ERROR if self._failed and not self._lines.interactive else 0

    def _take(self, line: str) -> None:
        """One line: a command, or a message; ``//`` begins a message that begins with ``/``."""
        if not line.strip():
            return
        try:
            if not line.startswith("/"):
                self._answer(lambda show, stop: self._conversation.ask(line, show, stop))
            elif line.startswith("//"):
                self._answer(lambda show, stop: self._conversation.ask(line[1:], show, stop))
            else:
                self._command(line)
        except SamirVllmError as exc:
            self._fail(str(exc))

    def _answer(self, turn: Callable[[Callable[[str], None], Callable[[], bool]], RequestOutput]) -> None:
        last = "\n"

        def show(text: str) -> None:
            nonlocal last
            sys.stdout.write(text)
            sys.stdout.flush()
            last = text[-1]

        with typed_text_kept() if self._lines.interactive else nullcontext():
            result = turn(show, lambda: self._interrupts.requested)
        if last != "\n" or not result.text:
            print(flush=True)
        if result.error is not None:
            self._fail(result.error)
        elif result.finish_reason == "abort":
            self._say("(stopped)" if result.text else "(stopped before a word: the message is forgotten)")
        elif result.finish_reason == "length":
            self._say(f"(cut after {len(result.token_ids)} tokens: {self._conversation.limit_of(result)})")
        if result.logprobs:
            tokenizer = self._conversation.engine.tokenizer
            print("\n" + logprobs_table(result.logprobs, result.token_ids, tokenizer), end="\n\n", flush=True)

    def _command(self, line: str) -> None:
        name, _, text = line.partition(" ")
        command, text = self._commands.get(name.rstrip()), text.strip()
        if command is None:
            raise OptionError(f"no such command: {name} (/help lists them; // begins a message with a /)")
        action, takes, _ = command
        if text and not takes:
            raise OptionError(f"{name} takes no text")
        action(text)

    def _reset(self, text: str) -> None:
        self._conversation.reset(self._conversation.system)

    def _system(self, text: str) -> None:
        if text:
            self._conversation.reset(text)
        else:
            system = self._conversation.system
            self._say("no system message (the chat format may have its own)" if system is None else system)

    def _retry(self, text: str) -> None:
        self._answer(self._conversation.retry)

    def _stats(self, text: str) -> None:
        for line in self._conversation.stats():
            self._say(line)

    def _help(self, text: str) -> None:
        called = {name + takes: help_text for name, (_, takes, help_text) in self._commands.items()}
        width = max(map(len, called))
        for name, help_text in called.items():
            self._say(f"{name:{width}}  {help_text}")
        self._say("Ctrl-C stops an answer. // begins a message with a /.")

    def _exit(self, text: str) -> None:
        self._leaves = True

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim")

    def _fail(self, message: str) -> None:
        self._failed = True
        user_error(message)

    def _end_line(self) -> None:
        """After ^C or Ctrl-D the cursor stands behind what was typed."""
        if self._lines.interactive:
            print(file=sys.stderr, flush=True)
