"""``chat``: turns, commands, Ctrl-C and history, in a pseudo terminal and from a pipe.

Most of it with ``talking_model``, whose answers show what the model got to read.
"""

from __future__ import annotations

import fcntl
import functools
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from talking_model import ByteChat, make_talking_engine, put_in_place

from fake_model import STEPS_AHEAD, make_engine
from samir_vllm.__main__ import main
from samir_vllm.errors import RequestError
from samir_vllm.extras.chat import Conversation, Exchange
from samir_vllm.sampling import SamplingParams

TALKING = [sys.executable, str(Path(__file__).with_name("talking_model.py")), "chat"]
LIMIT = 120  # seconds until a test gives up; nothing waits as long if all is well
CTRL_C, CTRL_D, CTRL_P = "\x03", "\x04", "\x10"


class Terminal:
    """A program in a pseudo terminal, its output read as far as a test waits for it."""

    def __init__(self, command: list[str], **kwargs: Any) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 250, 0, 0))
        streams = {"stdin": slave, "stdout": slave, "stderr": slave} | kwargs
        environment = os.environ | {"TERM": "dumb", "INPUTRC": os.devnull}
        self.process = subprocess.Popen(
            command, **streams, env=environment, start_new_session=True, preexec_fn=_take_terminal
        )
        os.close(slave)
        self.seen = ""  # and not yet waited for

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Reads on until the pattern occurs; gives all before its end, and drops it."""
        while (found := re.search(pattern, self.seen)) is None:
            assert self._read(), f"no {pattern!r} in {self.seen!r}"
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def ask(self, line: str, pattern: str = "\n> ") -> str:
        """Types a line, and gives what comes until the next prompt."""
        self.send(line + "\n")
        return self.wait_for(pattern).replace("\r", "")

    def wait_until_idle(self) -> None:
        """Until the program waits for a key: a signal just before leaves Python's readline asleep."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(") ")[2][0] != "S":
            os.sched_yield()

    def end(self) -> tuple[int, str]:
        """Exit status, and the rest of the output."""
        while self._read():
            pass
        return self.process.wait(LIMIT), self.seen

    def close(self) -> None:
        os.close(self._master)
        self.process.kill()
        self.process.wait()

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], LIMIT)
        assert ready, f"nothing more after {self.seen!r}"
        try:
            data = os.read(self._master, 65536)
        except OSError:  # how Linux says that the other end is closed
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # A test run in the background of a script ignores SIGINT, and its children would inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def chat(*options: str, command: list[str] = TALKING, **kwargs: Any) -> Iterator[Terminal]:
    """A conversation at its first prompt."""
    terminal = Terminal([*command, *options], **kwargs)
    try:
        terminal.wait_for("> ")
        yield terminal
    finally:
        terminal.close()


# In a terminal


def test_greeting_turns_history_and_exit() -> None:
    with chat("--system", "be brief") as terminal:
        assert "heard s:be brief, u:hello\n" in terminal.ask("hello")
        assert "heard s:be brief, u:hello, a(25), u:and now?\n" in terminal.ask("and now?")
        assert "heard s:be brief, u:hello, a(25), u:and now?, a(44), u:/etc\n" in terminal.ask("//etc")
        terminal.send("/exit\n")
        assert terminal.end()[0] == 0


def test_greeting_names_the_help_unless_quiet() -> None:
    for options, expected in ([], True), (["--quiet"], False):
        terminal = Terminal([*TALKING, *options])
        assert ("/help" in terminal.wait_for("> ")) is expected
        terminal.close()


@pytest.mark.parametrize("way", ["/exit\n", CTRL_D])
def test_ways_to_leave(way: str) -> None:
    with chat() as terminal:
        terminal.send(way)
        status, rest = terminal.end()
        assert status == 0
        assert rest.endswith("\r\n")


def test_commands() -> None:
    with chat() as terminal:
        assert "no system message" in terminal.ask("/system")
        assert "no turn yet" in terminal.ask("/stats")
        assert "heard u:one" in terminal.ask("one")
        assert "heard u:one, a(11), u:two\n" in terminal.ask("two")
        assert "heard u:one, a(11), u:two\n" in terminal.ask("/retry")
        terminal.ask("/reset")
        assert "heard u:three\n" in terminal.ask("three")
        terminal.ask("/system be brief")
        assert "be brief\n" in terminal.ask("/system")
        assert "heard s:be brief, u:four\n" in terminal.ask("four")
        terminal.ask("/reset")
        assert "heard s:be brief, u:five\n" in terminal.ask("five")
        assert "no such command: /resett (/help" in terminal.ask("/resett")
        assert "/stats takes no text" in terminal.ask("/stats now")
        shown = terminal.ask("/help")
        for name in ("/reset", "/system [TEXT]", "/retry", "/stats", "/help", "/exit", "//", "Ctrl-C"):
            assert name in shown
        terminal.ask("/reset")
        assert "nothing to try again" in terminal.ask("/retry")


def test_line_editing_recalls_what_was_said() -> None:
    with chat() as terminal:
        terminal.ask("hello")
        terminal.send(CTRL_P)
        terminal.wait_for("hello")
        assert "heard u:hello, a(13), u:hello!\n" in terminal.ask("!")


def test_stats_tell_what_was_reused() -> None:
    with chat() as terminal:
        terminal.ask("hello, this is a sentence")
        prompt, answer = "u:hello, this is a sentence|a:", "heard u:hello, this is a sentence|"
        first, n = terminal.ask("/stats"), len(prompt + answer)
        assert f"last turn: {len(prompt)} prompt tokens (0 of them reused" in first
        assert f"{len(answer)} new tokens, time to first token " in first
        assert re.search(r"then [\d.]+ tokens/s", first)
        assert f"context: {n} of 4096 tokens, KV pages: " in first
        terminal.ask("and another")
        second, more = terminal.ask("/stats"), len("u:and another|a:")
        assert f"last turn: {n + more} prompt tokens ({n - 1} of them reused" in second
        assert f"all 2 turns: {len(prompt) + n + more} prompt tokens ({n - 1} of them reused" in second


# Ctrl-C in a terminal


def test_ctrl_c_stops_the_answer_and_what_was_said_stays() -> None:
    with chat("--max-tokens", "1000000", "--max-model-len", "1000000") as terminal:
        terminal.send("on and on\n")
        terminal.wait_for("la la la ")
        terminal.send(CTRL_C)
        shown = "la la la " + terminal.wait_for(r"\(stopped\)")
        assert "> " in terminal.wait_for("> ")
        said = shown.replace("^C", "").partition("\r\n")[0]
        assert len(said) < 1000000
        assert f"heard u:on and on, a({len(said)}), u:hello\n" in terminal.ask("hello")
        reused = len("u:on and on|a:") + len(said) - 1  # the last token of an answer has no K and V
        assert f"({reused} of them reused" in terminal.ask("/stats")


def test_ctrl_c_while_the_prompt_is_read_forgets_the_message() -> None:
    with chat("--max-batched-tokens", "4") as terminal:
        terminal.send("think\n")
        terminal.wait_for("thinking")
        terminal.send(CTRL_C)
        assert "I" not in terminal.wait_for("stopped before a word")
        terminal.wait_for("> ")
        assert "heard u:hello\n" in terminal.ask("hello")


def test_second_ctrl_c_leaves_in_the_middle_of_a_step() -> None:
    with chat() as terminal:
        terminal.send("stuck\n")
        terminal.wait_for("thinking")
        terminal.send(CTRL_C)
        terminal.wait_for("still thinking")
        terminal.send(CTRL_C)
        status, rest = terminal.end()
        assert status == 130
        assert "interrupted" in rest
        assert "Traceback" not in rest


def test_ctrl_c_at_the_prompt_hints_and_a_second_one_leaves() -> None:
    with chat() as terminal:
        terminal.send("half a li")
        terminal.wait_for("half a li")
        terminal.wait_until_idle()
        terminal.send(CTRL_C)
        terminal.wait_for("Ctrl-D leaves")
        terminal.wait_for("> ")
        assert "heard u:hello\n" in terminal.ask("hello")  # and the half line is gone
        terminal.wait_until_idle()
        terminal.send(CTRL_C)
        terminal.wait_for("Ctrl-D leaves")
        terminal.wait_for("> ")
        terminal.wait_until_idle()
        terminal.send(CTRL_C)
        assert terminal.end()[0] == 130


def test_nothing_typed_during_an_answer_is_lost() -> None:
    with chat("--max-tokens", "1000000", "--max-model-len", "1000000") as terminal:
        terminal.send("on and on\n")
        terminal.wait_for("la la ")
        terminal.send("first\nsecond\nthi")
        terminal.wait_for("la la ")
        terminal.send(CTRL_C)
        terminal.wait_for(r"heard u:on and on, a\(\d+\), u:first\r")
        terminal.wait_for(r"heard .* u:first, a\(\d+\), u:second\r")
        terminal.wait_for("> thi")
        assert re.search(r"heard .* u:second, a\(\d+\), u:third\n", terminal.ask("rd"))


def test_terminal_is_left_as_it_was() -> None:
    with chat("--max-tokens", "1000000", "--max-model-len", "1000000") as terminal:
        before = termios.tcgetattr(terminal._master)
        terminal.send("on and on\n")
        terminal.wait_for("la ")
        assert termios.tcgetattr(terminal._master)[3] & termios.NOFLSH
        terminal.send(CTRL_C)
        terminal.wait_for("stopped")
        terminal.wait_for("> ")
        assert termios.tcgetattr(terminal._master) == before
        terminal.send("/exit\n")
        assert terminal.end()[0] == 0


# Errors


def test_errors_are_one_line_and_the_dialog_goes_on() -> None:
    with chat() as terminal:
        terminal.ask("hello")
        for line, error in ("break", "RuntimeError: the model broke"), ("refuse", "this dialog is refused"):
            shown = terminal.ask(line)
            assert f"samir_vllm: {error}\n" in shown
            assert "Traceback" not in shown
            assert "heard" not in shown
        assert "heard u:hello, a(13), u:again\n" in terminal.ask("again")
        terminal.send("/exit\n")
        assert terminal.end()[0] == 0


def test_full_context_says_so_until_reset() -> None:
    with chat("--max-model-len", "60") as terminal:
        shown = terminal.ask("0123456789" * 4)  # 45 tokens; 15 are left
        assert "heard u:0123456\n" in shown
        assert "cut after 15 tokens: context or KV pages are full" in shown
        assert "the dialog has 71 tokens but the context holds 60" in terminal.ask("hello")
        terminal.ask("/reset")
        assert "heard u:hello\n" in terminal.ask("hello")


def test_cut_answers_name_the_option() -> None:
    with chat("--max-tokens", "5") as terminal:
        assert "heard\n(cut after 5 tokens: --max-tokens allows more)\n" in terminal.ask("hello")


# Not a terminal


def piped(lines: str, *options: str, command: list[str] = TALKING) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    done = subprocess.run(
        [*command, *options], input=lines.encode(), capture_output=True, timeout=LIMIT, check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_piped_lines_are_turns() -> None:
    status, out, err = piped("hello\n\n/stats\nsay über\r\nthe last one has no end")
    assert status == 0
    assert out.splitlines() == [
        "heard u:hello",
        "über",
        "heard u:hello, a(13), u:say über, a(4), u:the last one has no end",
    ]
    assert "last turn: 10 prompt tokens" in err
    assert "> " not in out + err


def test_piped_turn_that_fails_shows_in_the_status() -> None:
    status, out, err = piped("refuse\nhello\n/what\n")
    assert status == 2
    assert out == "heard u:hello\n"
    assert err.splitlines() == [
        "samir_vllm: this dialog is refused",
        "samir_vllm: no such command: /what (/help lists them; // begins a message with a /)",
    ]


def test_piped_input_of_another_encoding() -> None:
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(
        TALKING, input=b"caf\xe9\n", capture_output=True, timeout=LIMIT, env=strict, check=False
    )
    assert done.returncode == 2
    assert done.stderr == b"samir_vllm: standard input isn't utf-8 text; convert it first\n"


def test_ctrl_c_ends_a_piped_conversation() -> None:
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    command = [*TALKING, "--max-tokens", "1000000", "--max-model-len", "1000000"]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("on and on\nhello\n")
    process.stdin.flush()
    assert process.stdout.read(6) == "la la "
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert "(stopped)" in err
    assert "heard" not in out
    assert out.endswith("\n")


def test_answers_alone_go_to_standard_output(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, chat(stdout=log) as terminal:
        terminal.send("hello\n/stats\n/exit\n")
        assert terminal.end()[0] == 0
    assert (tmp_path / "log").read_text() == "heard u:hello\n"


# Options


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command in this process, on the talking model."""

    def run(lines: str, *options: str, **engine: Any) -> int:
        put_in_place(monkeypatch, **engine)
        reader, writer = os.pipe()
        os.write(writer, lines.encode())
        os.close(writer)
        with os.fdopen(reader) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            return main(["chat", *options])

    return run


def test_sampling_options_reach_the_model(
    talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("options\n", "--seed", "7", "--temperature", "0.5") == 0
    assert capsys.readouterr().out == "seed 7, answer 0\n"
    assert talk("say one. two.\n", "--stop", ".") == 0
    assert capsys.readouterr().out == "one\n"
    assert talk("hello\n", "--date", "26 Jul ") == 0
    assert capsys.readouterr().out == "heard 26 Jul u:hello\n"


def test_drawn_seed_is_in_the_stats(talk: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert talk("options\n/stats\n", "--temperature", "1") == 0
    out, err = capsys.readouterr()
    seed = out.split()[1].rstrip(",")
    assert re.search(f"tokens/s, seed {seed}\n", err)


def test_logprobs_follow_the_answer(talk: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert talk("say ab\n", "--logprobs", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "ab",
        "",
        "#  id  token    logprob  likeliest",
        "0  97  'a'     -12.1250  'a' -12.1250",
        "1  98  'b'     -12.2500  'b' -12.2500",
        r"2  30  '\x1e'   -3.7500  '\x1e' -3.7500",
        "",
    ]


def test_text_held_back_for_a_stop_string_is_released(
    talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("say one two th\nhello\n", "--stop", "three", "--stop", "too") == 0
    assert capsys.readouterr().out == "one two th\nheard u:say one two th, a(10), u:hello\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--n", "2"], ["--n"]),
        (["--prompt-logprobs", "1"], ["--prompt-logprobs"]),
        (["--max-tokens", "0"], ["max_tokens", "at least 1"]),
        (["--temperature", "-1"], ["temperature", "0 to 100"]),
        (["--model", "/nowhere/at/all"], ["/nowhere/at/all"]),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_filters_without_a_temperature_are_noticed(
    talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("hello\n", "--top-p", "0.9", "--seed", "3") == 0
    assert "top_p, seed have no effect at temperature 0" in capsys.readouterr().err
    assert talk("hello\n", "--top-p", "0.9", "--temperature", "0.1") == 0
    assert capsys.readouterr().err == ""


def test_model_without_chat_format(talk: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert talk("hello\n", has_chat_format=False) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "no chat format" in err
    assert err.count("\n") == 1


# The dialog alone


def ask(conversation: Conversation, text: str) -> str:
    shown: list[str] = []
    result = conversation.ask(text, shown.append)
    assert result.text == "".join(shown)
    return result.text


def test_small_pool_limits_a_turn() -> None:
    # 3 pages in each of 2 layers: 48 tokens of K and V, and one new token beyond
    conversation = Conversation(make_talking_engine(num_pages=6), SamplingParams(max_tokens=512))
    assert ask(conversation, "0123456789" * 3) == "heard u:012345"  # 35 + 14 = 49
    with pytest.raises(
        RequestError, match=r"65 tokens but the KV page pool holds 49.*/reset.*--kv-cache-mib"
    ):
        ask(conversation, "0123456789")
    assert len(conversation.exchanges) == 1
    conversation.reset(None)
    assert ask(conversation, "hello") == "heard u:hello"


def test_longest_turn_that_fits_has_one_token() -> None:
    conversation = Conversation(make_talking_engine(num_pages=6), SamplingParams(max_tokens=512))
    assert ask(conversation, "0" * 43) == "h"
    conversation.reset(None)
    with pytest.raises(RequestError, match=r"49 tokens but the KV page pool holds 49.*shorten"):
        ask(conversation, "0" * 44)


def test_show_that_fails_leaves_nothing_running() -> None:
    engine = make_talking_engine()
    conversation = Conversation(engine, SamplingParams())

    def fail(text: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        conversation.ask("hello", fail)
    assert not engine.has_work
    assert conversation.exchanges == []
    assert ask(conversation, "hello") == "heard u:hello"


def test_retry_takes_the_last_answers_place() -> None:
    conversation = Conversation(make_talking_engine(), SamplingParams(temperature=1.0))
    first = ask(conversation, "options")
    shown: list[str] = []
    conversation.retry(shown.append)
    assert "".join(shown) != first  # another seed was drawn
    assert [(e.question, e.answer) for e in conversation.exchanges] == [("options", "".join(shown))]
    assert len(conversation.turns) == 2


class SaidAnother:
    """A byte tokenizer with a second token for the letter e, id 200: what no text is encoded to."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ord("e") if i == 200 else i for i in ids).decode(errors="replace")


FRAME = list(b"u:hi|a:")


def next_prompt(answer: str, answer_ids: list[int], encoded: bytes) -> list[int]:
    """Of the turn after one whose prompt was read in other tokens, too: its first one was 200."""
    exchange = Exchange("hi", answer, FRAME, [200, *FRAME], answer_ids)
    return exchange.with_own_tokens(list(encoded), SaidAnother())  # type: ignore[arg-type]


def test_next_prompt_has_the_tokens_that_were_generated() -> None:
    assert next_prompt("he", [ord("h"), 200], b"u:hi|a:he|u:x|a:") == [
        200,
        *FRAME,
        ord("h"),
        200,
        *b"|u:x|a:",
    ]
    assert next_prompt("", [], b"u:hi|a:|u:x|a:") == [200, *b"u:hi|a:|u:x|a:"]


@pytest.mark.parametrize(
    ("answer", "answer_ids", "encoded"),
    [
        ("he ", [ord("h"), 200, 32], b"u:hi|a:he|u:x|a:"),  # the chat format trims
        ("he", [ord("h"), 200], b"u:HI|a:he|u:x|a:"),  # or changes something in front
        ("h", [ord("h"), 200], b"u:hi|a:h|u:x|a:"),  # a stop string cut the text inside the tokens
        ("h", [ord("h"), 270], b"u:hi|a:h|u:x|a:"),  # a token beyond the tokenizer's
    ],
)
def test_next_prompt_is_the_chat_formats_where_tokens_and_text_differ(
    answer: str, answer_ids: list[int], encoded: bytes
) -> None:
    assert next_prompt(answer, answer_ids, encoded) == list(encoded)


def test_dialog_after_a_stop_string_has_the_text_alone() -> None:
    conversation = Conversation(make_talking_engine(), SamplingParams(stop="!"))
    assert ask(conversation, "say well!") == "well"
    second = conversation.ask("hello", lambda text: None)
    assert bytes(second.prompt_token_ids) == b"u:say well!\x1ea:well\x1eu:hello\x1ea:"


def test_answers_tokens_are_kept_without_the_id_that_ended_them() -> None:
    conversation = Conversation(make_talking_engine(), SamplingParams(max_tokens=20))
    ask(conversation, "hello")
    ask(conversation, "a longer message")
    assert bytes(conversation.exchanges[0].answer_ids) == b"heard u:hello"
    assert bytes(conversation.exchanges[1].answer_ids) == b"heard u:hello, a(13)"  # cut, not ended


def test_interrupted_answer_shows_what_was_held_back() -> None:
    conversation = Conversation(make_talking_engine(), SamplingParams(stop="la!"))
    steps, shown = iter(range(8)), []
    result = conversation.ask("on and on", shown.append, lambda: next(steps) == 7)
    assert result.text == "".join(shown) == "la la la"  # the last "la" might have begun the stop string
    assert conversation.exchanges[0].answer == "la la la"


@STEPS_AHEAD
def test_what_an_interrupted_turn_left_is_reused_at_once(steps_ahead: int) -> None:
    """Though steps of it may still be under way; the model reads its K and V back and would not go on."""
    engine, runner = make_engine(steps_ahead=steps_ahead, context=4096, num_pages=512)
    engine.chat_format = ByteChat()  # type: ignore[assignment]
    runner.says = [*b"la "]
    conversation = Conversation(engine, SamplingParams(max_tokens=100))
    first = conversation.ask("sing", lambda text: None, lambda: len(runner.steps) > 20)
    assert first.finish_reason == "abort"
    assert len(engine._launched) == (steps_ahead + 1 if steps_ahead else 0)
    second = conversation.ask("sing on", lambda text: None, lambda: len(runner.steps) > 30)
    written = len(first.prompt_token_ids) + len(first.token_ids) - 1
    assert second.metrics.num_cached_tokens == written
    assert second.text.startswith("la la")


# The demo model


@pytest.mark.slow
@pytest.mark.demo
def test_demo_model_reuses_what_an_interrupted_turn_left(demo_model_dir: Path) -> None:
    command = [sys.executable, "-m", "samir_vllm", "chat"]
    with chat("--model", str(demo_model_dir), "--device", "cpu", command=command) as terminal:
        # It says "1. ..." and a blank line in one token, which its own tokenizer never makes before a "2".
        terminal.send("Name three colours.\n")
        terminal.wait_for(r"colours\.\r\n1\. .*\r\n\r\n2")
        terminal.send(CTRL_C)
        terminal.wait_for(r"\(stopped\)\r\n> ")
        terminal.send("Go on.\n")
        terminal.wait_for(r"on\.\r\n\w")
        terminal.send(CTRL_C)
        terminal.wait_for("> ")
        shown = terminal.ask("/stats")
        found = re.search(r"last turn: (\d+) prompt tokens \((\d+) of them reused", shown)
        assert found is not None
        assert int(found[1]) - int(found[2]) < 20  # all but the new message and its frame
        assert int(found[2]) > 60
        terminal.send(CTRL_D)
        assert terminal.end()[0] == 0
