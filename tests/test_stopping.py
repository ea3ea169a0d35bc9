"""Stop strings against a plain search over the whole text, however the text is cut into pieces."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samir_vllm.stopping import StopStrings

Piece = tuple[str, bool]  # text, and whether it may stop


@dataclass
class Expected:
    let_go: str
    held: str
    matched: str | None


def expected(stops: Sequence[str], text: str, counts: Sequence[bool]) -> Expected:
    """By the definition: each place of the text is tried with each stop string.

    ``counts``: for each character, whether a stop string that is complete with it ends the text.
    """
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete and counts[end - 1]:
            longest = max(complete, key=len)
            return Expected(text[: end - len(longest)], "", longest)
    beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
    held = next(text[i:] for i in range(len(text) + 1) if text[i:] in beginnings | {""})
    return Expected(text[: len(text) - len(held)], held, None)


def check(stops: Sequence[str], pieces: Sequence[Piece]) -> Expected:
    """Push the pieces; after each one the matcher must have let go exactly what the definition allows."""
    matcher = StopStrings(stops).matcher()
    text, let_go, counts, want = "", "", [], Expected("", "", None)
    for piece, may_stop in pieces:
        let_go += matcher.push(piece, may_stop=may_stop)
        text += piece
        counts += [may_stop] * len(piece)
        want = expected(stops, text, counts)
        assert (let_go, matcher.matched) == (want.let_go, want.matched), (stops, pieces, text)
    assert matcher.flush() == want.held
    assert matcher.flush() == ""
    return want


def cut(text: str, rng: random.Random) -> list[str]:
    """The text in pieces of 0 to 5 characters."""
    pieces, start = [], 0
    while start < len(text):
        stop = start + rng.randrange(6)
        pieces.append(text[start:stop])
        start = stop
    return pieces


def in_all_cuts(text: str) -> list[list[str]]:
    """Every way to cut a short text into pieces."""
    cuts = []
    for inner in itertools.product([False, True], repeat=max(0, len(text) - 1)):
        ends = [i + 1 for i, here in enumerate(inner) if here] + [len(text)]
        cuts.append([text[a:b] for a, b in itertools.pairwise([0, *ends])])
    return cuts


# Fuzzed


def pieces_of(alphabet: st.SearchStrategy[str]) -> st.SearchStrategy[list[Piece]]:
    flags = st.booleans() | st.just(True) | st.just(True)
    return st.lists(st.tuples(st.text(alphabet, max_size=6), flags), max_size=25)


@settings(max_examples=600, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=5), pieces_of(st.sampled_from("ab")))
def test_two_letters(stops: list[str], pieces: list[Piece]) -> None:
    check(stops, pieces)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("abc", min_size=3, max_size=9), max_size=8), pieces_of(st.sampled_from("abc")))
def test_long_stops_that_seldom_match(stops: list[str], pieces: list[Piece]) -> None:
    check(stops, pieces)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_unicode_with_stops_from_the_text(data: st.DataObject) -> None:
    pieces = data.draw(pieces_of(st.characters()))
    text = "".join(piece for piece, _ in pieces)
    spans = st.tuples(st.integers(0, len(text)), st.integers(1, 7)).map(lambda s: text[s[0] : s[0] + s[1]])
    stops = data.draw(st.lists((spans | st.text(min_size=1, max_size=4)).filter(bool), max_size=6))
    check(stops, pieces)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5), st.text("ab"), st.randoms())
def test_how_the_text_is_cut_changes_nothing(stops: list[str], text: str, rng: random.Random) -> None:
    ends = [
        check(stops, [(piece, True) for piece in pieces]) for pieces in ([text], list(text), cut(text, rng))
    ]
    assert ends[0] == ends[1] == ends[2]
    if ends[0].matched is None:
        assert not any(stop in text for stop in stops)


# By hand

OVERLAPPING = ["ab", "b", "abcd", "bc"]


@pytest.mark.parametrize(
    ("stops", "text", "let_go", "held", "matched"),
    [
        (["END"], "the END of it", "the ", "", "END"),
        (["END"], "the EN", "the ", "EN", None),
        (["END"], "the ENE", "the EN", "E", None),
        (["END"], "ENENEND", "ENEN", "", "END"),
        (["a"], "bbabb", "bb", "", "a"),
        (["aab"], "aaaab", "aa", "", "aab"),
        (OVERLAPPING, "xab", "x", "", "ab"),  # of "ab" and "b" the longer
        (OVERLAPPING, "xcb", "xc", "", "b"),
        (OVERLAPPING, "abcd", "", "", "ab"),  # the first that is complete, not the longest there might be
        (["abcd", "bc"], "xabcd", "xa", "", "bc"),
        (["abcd", "bc"], "xabd", "xabd", "", None),
        (["abcd", "bx"], "abbx", "ab", "", "bx"),
        (["abcabd"], "abcabcabd", "abc", "", "abcabd"),
        (["\n\n", "\n#"], "a\n b\n", "a\n b", "\n", None),
        (["é🦙"], "caffé🦙!", "caff", "", "é🦙"),
        (["e\u0301"], "caf\u00e9", "caf\u00e9", "", None),  # characters, not what they look like
    ],
)
def test_cases_in_all_cuts(stops: list[str], text: str, let_go: str, held: str, matched: str | None) -> None:
    for pieces in in_all_cuts(text):
        assert check(stops, [(piece, True) for piece in pieces]) == Expected(let_go, held, matched)


def test_nothing_of_the_stop_string_is_let_go_on_the_way() -> None:
    matcher = StopStrings(["<|stop|>"]).matcher()
    assert [matcher.push(c) for c in "hi <|stop|"] == ["h", "i", " ", "", "", "", "", "", "", ""]
    assert matcher.matched is None
    assert matcher.push("> and more") == ""
    assert matcher.matched == "<|stop|>"
    assert matcher.push("more") == matcher.flush() == ""


def test_a_failed_match_is_let_go_at_once_and_no_earlier() -> None:
    matcher = StopStrings(["abcabd"]).matcher()
    assert [matcher.push(c) for c in "abcabcx"] == ["", "", "", "", "", "abc", "abcx"]


def test_a_match_that_may_not_stop_is_text() -> None:
    matcher = StopStrings(["ab"]).matcher()
    assert matcher.push("xaby", may_stop=False) == "xaby"
    assert matcher.push("zab") == "z"
    assert matcher.matched == "ab"


def test_a_match_begun_where_nothing_may_stop_counts_where_it_is_complete() -> None:
    matcher = StopStrings(["abc"]).matcher()
    assert matcher.push("xab", may_stop=False) == "x"
    assert matcher.push("cd") == ""
    assert matcher.matched == "abc"


def test_a_match_that_may_not_stop_can_begin_another() -> None:
    for pieces in (["aa"], ["a", "a"]):
        matcher = StopStrings(["aa"]).matcher()
        assert "".join(matcher.push(p, may_stop=False) for p in pieces) == "a"
        assert matcher.push("a") == ""
        assert matcher.matched == "aa"
    matcher = StopStrings(["ab", "abc"]).matcher()
    assert matcher.push("ab", may_stop=False) == ""
    assert matcher.push("c") == ""
    assert matcher.matched == "abc"


def test_what_was_flushed_begins_nothing() -> None:
    matcher = StopStrings(["ab"]).matcher()
    assert matcher.push("a") == ""
    assert matcher.flush() == "a"
    assert matcher.push("b") == "b"
    assert matcher.matched is None


def test_matchers_of_one_request_are_independent() -> None:
    stops = StopStrings(["ab"])
    first, second = stops.matcher(), stops.matcher()
    assert first.push("a") == ""
    assert second.push("b") == "b"
    assert first.push("b") == ""
    assert (first.matched, second.matched) == ("ab", None)


def test_without_stop_strings_all_is_let_go() -> None:
    matcher = StopStrings([]).matcher()
    assert matcher.push("anything") == "anything"
    assert matcher.flush() == ""


def test_a_stop_string_given_twice() -> None:
    assert check(["ab", "ab"], [("xa", True), ("b", True)]).matched == "ab"


@pytest.mark.parametrize("tail", ["", "b"])
def test_a_long_text_of_nothing_but_beginnings(tail: str) -> None:
    # Quadratic work, in the text or the stop string, would take minutes here.
    text = "a" * 200_000 + tail
    stop = "a" * 1023 + "b"
    matcher = StopStrings([stop, "ca" * 512]).matcher()
    out = "".join(matcher.push(char) for char in text)
    assert matcher.matched == (stop if tail else None)
    assert out == "a" * (200_000 - 1023)
    assert matcher.flush() == ("" if tail else "a" * 1023)


def test_as_many_and_as_long_as_a_request_may_have() -> None:
    rng = random.Random(0)
    stops = ["".join(rng.choices("ab", k=1023)) + "c" for _ in range(64)]
    text = "b" + "".join(stop[:-1] for stop in stops) + stops[31] + "aaa"
    matcher = StopStrings(stops).matcher()
    out = "".join(matcher.push(piece) for piece in cut(text, rng))
    assert matcher.matched == stops[31]
    assert out == text[: text.index("c") - 1023]
