"""Calls of tools as a model writes them, read back while they are written.

A call is ``{"name": "f", "parameters": {...}}``, as `samir_vllm.chat` writes calls of the past, with ``; ``
between several: to the letter, since the answer's grammar allows nothing else. So the end of the arguments is
where their braces close, and no JSON is parsed. Knows nothing of tokens, of grammars or of HTTP.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection
from typing import NamedTuple

from samir_vllm.chat import CALL_END, CALL_SEPARATOR, call_opening

_OUTSIDE_STRING = re.compile(r'["{}]')
_INSIDE_STRING = re.compile(r'["\\]')


class TextPiece(NamedTuple):
    """Text of the answer that is no call."""

    text: str


class CallStart(NamedTuple):
    """Call ``number``, 0 the first, of this function begins."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """More of call ``number``'s arguments: all of a call's, joined, are one JSON object."""

    number: int
    text: str


Event = TextPiece | CallStart | CallArguments


def new_call_id() -> str:
    """``call_`` and 24 random hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


class ToolCallReader:
    """Reads one answer, in pieces cut anywhere, as text and calls.

    An answer that begins as a call of one of the functions is calls; any other is text, given on at once.
    Text of the answer is never lost: what turns out to be no call after all comes as text. Held back is only
    the opening of a call until it is complete.

    Args:
        names: of the functions that may be called.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._openings = {call_opening(name): name for name in names}
        self._held = ""  # what may become an opening, with the separator before it
        self._read = self._read_opening
        self._arguments = _ObjectEnd()
        self.num_calls = 0
        """Calls begun so far."""

    @property
    def is_cut(self) -> bool:
        """The last call has begun, but not ended."""
        return self._read in (self._read_arguments, self._read_end)

    def feed(self, piece: str) -> list[Event]:
        """Events of the next piece of the answer's text."""
        events: list[Event] = []
        while piece:
            piece = self._read(piece, events)
        return events

    def finish(self) -> list[Event]:
        """Events of what is held back at the answer's end: an opening cut short is text."""
        held, self._held = self._held, ""
        return [TextPiece(held)] if held else []

    # Each of these takes some of the piece, and returns the rest for whichever is to read on.

    def _read_text(self, piece: str, events: list[Event]) -> str:
        events.append(TextPiece(piece))
        return ""

    def _read_opening(self, piece: str, events: list[Event]) -> str:
        held = self._held + piece
        before = CALL_SEPARATOR if self.num_calls else ""
        for opening, name in self._openings.items():
            # The brace of the arguments belongs to what is asked for: they are an object, or this is no call.
            if held.startswith(before + opening + "{"):
                events.append(CallStart(self.num_calls, name))
                self.num_calls += 1
                self._held = ""
                self._read = self._read_arguments
                return held[len(before + opening) :]
        if any((before + opening + "{").startswith(held) for opening in self._openings):
            self._held = held
            return ""
        self._held = ""
        self._read = self._read_text
        return held

    def _read_arguments(self, piece: str, events: list[Event]) -> str:
        end = self._arguments.find(piece)
        if end is None:
            events.append(CallArguments(self.num_calls - 1, piece))
            return ""
        events.append(CallArguments(self.num_calls - 1, piece[:end]))
        self._read = self._read_end
        return piece[end:]

    def _read_end(self, piece: str, events: list[Event]) -> str:
        if not piece.startswith(CALL_END):
            self._read = self._read_text
            return piece
        self._read = self._read_opening
        return piece[len(CALL_END) :]


class _ObjectEnd:
    """Finds where a JSON object ends that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False  # the next piece begins behind a backslash

    def find(self, piece: str) -> int | None:
        """The place behind the closing brace; None if it isn't in this piece."""
        at = int(self._escaped)
        self._escaped = False
        while True:
            found = (_INSIDE_STRING if self._in_string else _OUTSIDE_STRING).search(piece, at)
            if found is None:
                return None
            at = found.end()
            match found.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = at == len(piece)
                    at += 1
                case "{":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if not self._depth:
                        return at
