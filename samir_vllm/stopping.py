"""Stop strings in text that arrives in pieces: where it ends, and what can be shown before that is known.

Characters are read one after another. The first place where any stop string is complete ends the text; of
several that are complete there the longest counts; the text is cut where it begins. How the text was cut into
pieces changes nothing. Knows characters only: no tokens, no requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_START = 0


class StopStrings:
    """The stop strings of a request as one automaton; unchanging, shared by the request's answers.

    That of Aho and Corasick ("Efficient string matching", 1975): a state is the longest end of the text that
    begins a stop string, so that reading costs the same however many and long those are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Time and memory grow with the characters of ``stops``, none of which is empty."""
        self._next: list[dict[str, int]] = [{}]  # of each state: character -> state one character longer
        self._shorter = [_START]  # of each state: the longest proper end of it that is a state too
        self._held = [0]  # of each state: characters at its end that may be the beginning of a stop string
        self._complete: list[str | None] = [None]  # of each state: the longest stop string it ends with
        for stop in stops:
            self._add(stop)
        self._link()

    def matcher(self) -> StopMatcher:
        """A reader of one text, at its start."""
        return StopMatcher(self)

    def _add(self, stop: str) -> None:
        state = _START
        for depth, char in enumerate(stop, 1):
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._shorter.append(_START)
                self._held.append(depth)
                self._complete.append(None)
            state = self._next[state][char]
        self._complete[state] = stop

    def _link(self) -> None:
        """Fill in what a state takes from a shorter one; shorter states come first."""
        states = deque(self._next[_START].values())
        while states:
            state = states.popleft()
            shorter = self._shorter[state]
            for char, longer in self._next[state].items():
                self._shorter[longer] = self._step(shorter, char)
                states.append(longer)
            if not self._next[state]:  # a whole stop string that begins no longer one
                self._held[state] = self._held[shorter]
            if self._complete[state] is None:
                self._complete[state] = self._complete[shorter]

    def _step(self, state: int, char: str) -> int:
        """The state after one more character. Each turn of the loop undoes an earlier step: linear in all."""
        while (longer := self._next[state].get(char)) is None:
            if state == _START:
                return _START
            state = self._shorter[state]
        return longer


class StopMatcher:
    """Reads one text; made by ``StopStrings.matcher``.

    Attributes:
        matched: the stop string that ended the text; None so far.
    """

    __slots__ = ("_held", "_state", "_stops", "matched")

    def __init__(self, stops: StopStrings) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._state = _START
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Read on.

        Args:
            text: the next characters; may be empty.
            may_stop: whether a stop string that gets complete in ``text`` counts. One that doesn't is
                text like any other.

        Returns:
            What can be let go of the text so far: all but the longest end that is a proper beginning of a
            stop string; once one is complete, all before it, and from then on nothing.
        """
        if self.matched is not None:
            return ""
        state = self._state
        for num_read, char in enumerate(text, 1):
            state = self._stops._step(state, char)
            if may_stop and (stop := self._stops._complete[state]) is not None:
                self.matched = stop
                known = self._held + text[:num_read]
                self._held = ""
                return known[: len(known) - len(stop)]
        self._state = state
        known = self._held + text
        free = len(known) - self._stops._held[state]
        self._held = known[free:]
        return known[:free]

    def flush(self) -> str:
        """What was held back, at the end of a text that no stop string ended."""
        held, self._held, self._state = self._held, "", _START
        return held
