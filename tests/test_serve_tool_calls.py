"""Calls read back from a stream: any calls, any cuts, and text that only looks like a call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samir_vllm.chat import call_opening
from samir_vllm.extras.serve.tool_calls import (
    CallArguments,
    CallStart,
    Event,
    TextPiece,
    ToolCallReader,
    new_call_id,
)

NAMES = ["get", "get_weather", "x-1"]
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text('a"\\{}[]; é\n\U0001f642', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('"\\}{ k', max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
ARGUMENTS = st.builds(
    lambda value, indent, is_ascii: json.dumps(value, indent=indent, ensure_ascii=is_ascii),
    st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3),
    st.sampled_from([None, 2]),
    st.booleans(),
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=4)


def written(calls: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls)


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The text in pieces, some of them empty."""
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def read(pieces: Sequence[str]) -> list[Event]:
    reader = ToolCallReader(NAMES)
    return [event for piece in pieces for event in reader.feed(piece)] + reader.finish()


def joined(events: Sequence[Event]) -> list[Event]:
    """With fragments of the same text or call put together."""
    whole: list[Event] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, TextPiece) and isinstance(last, TextPiece):
            whole[-1] = TextPiece(last.text + event.text)
        elif (
            isinstance(event, CallArguments)
            and isinstance(last, CallArguments)
            and last.number == event.number
        ):
            whole[-1] = CallArguments(event.number, last.text + event.text)
        else:
            whole.append(event)
    return whole


def as_events(calls: Sequence[tuple[str, str]]) -> list[Event]:
    return [
        event
        for number, (name, arguments) in enumerate(calls)
        for event in (CallStart(number, name), CallArguments(number, arguments))
    ]


PLACES = st.lists(st.integers(0, 10_000), max_size=12)


@settings(max_examples=400, deadline=None)
@given(calls=CALLS, places=PLACES)
def test_calls_come_back_whatever_the_cuts(calls: list[tuple[str, str]], places: list[int]) -> None:
    events = read(cut(written(calls), places))
    assert joined(events) == as_events(calls)
    assert all(event.text for event in events if not isinstance(event, CallStart))


@settings(max_examples=100, deadline=None)
@given(calls=CALLS)
def test_character_by_character(calls: list[tuple[str, str]]) -> None:
    assert joined(read(list(written(calls)))) == as_events(calls)


def rebuilt(events: Sequence[Event], num_ended: int) -> str:
    """The answer's text, of which so many calls were ended by their brace."""
    text = ""
    for event in events:
        if isinstance(event, CallStart):
            text += ("; " if event.number else "") + call_opening(event.name)
        else:
            text += event.text
            if isinstance(event, CallArguments) and event.number < num_ended:
                text += "}"
    return text


PARTS = st.sampled_from(
    [
        '{"name": "',
        'get"',
        '{"name": "get", "parameters": ',
        "{",
        "}",
        "}}",
        "; ",
        ";",
        " ",
        '"',
        "\\",
        "[",
        "]",
        "é",
        "a",
    ]
)


@settings(max_examples=600, deadline=None)
@given(text=st.lists(PARTS, max_size=12).map("".join), places=PLACES)
def test_text_is_never_lost(text: str, places: list[int]) -> None:
    events = joined(read(cut(text, places)))
    assert events == joined(read([text]))
    num_calls = sum(isinstance(event, CallStart) for event in events)
    assert text in {rebuilt(events, num_ended) for num_ended in (num_calls - 1, num_calls)}


@settings(max_examples=200, deadline=None)
@given(calls=CALLS, length=st.integers(0, 400), places=PLACES)
def test_calls_cut_short(calls: list[tuple[str, str]], length: int, places: list[int]) -> None:
    text = written(calls)[:length]
    events = joined(read(cut(text, places)))
    whole = as_events(calls)
    starts = [event for event in events if isinstance(event, CallStart)]
    assert starts == [event for event in whole if isinstance(event, CallStart)][: len(starts)]
    for event in events:
        if isinstance(event, CallArguments):
            assert calls[event.number][1].startswith(event.text)
    assert text in {rebuilt(events, num_ended) for num_ended in (len(starts) - 1, len(starts))}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello",
        '{"name": "get',
        '{"name": "other", "parameters": {}}',
        '{"name":"get", "parameters": {}}',
        "{}",
        ' {"name": "get", "parameters": {}}',
        '{"name": "get", "parameters": [1]}',
        '{"name": "get", "parameters": 7}',
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert joined(read(list(text))) == ([TextPiece(text)] if text else [])
    assert joined(read([text])) == ([TextPiece(text)] if text else [])


def test_text_behind_a_call() -> None:
    call = '{"name": "get", "parameters": {}'
    for rest in ("a", " }", "} ", "};", "}; ", "}; a", '}; {"name": "get'):
        events = joined(read(list(call + rest)))
        assert events == [*as_events([("get", "{}")]), TextPiece(rest.removeprefix("}"))]


def test_events_come_as_early_as_they_can() -> None:
    reader = ToolCallReader(NAMES)
    assert reader.feed('{"name": "get", "param') == []
    assert reader.num_calls == 0
    assert reader.feed('eters": {"a') == [CallStart(0, "get"), CallArguments(0, '{"a')]
    assert reader.num_calls == 1
    assert reader.feed('": "}') == [CallArguments(0, '": "}')]
    assert reader.feed('"}') == [CallArguments(0, '"}')]
    assert reader.feed("}; ") == []
    assert reader.feed(call_opening("x-1")) == []
    assert reader.feed("{}}") == [CallStart(1, "x-1"), CallArguments(1, "{}")]
    assert reader.finish() == []
    assert ToolCallReader(NAMES).feed("Hel") == [TextPiece("Hel")]
    other = ToolCallReader(NAMES)
    assert other.feed('{"n') == []
    assert other.feed('o": 1') == [TextPiece('{"no": 1')]
    assert other.feed("}") == [TextPiece("}")]


def test_without_functions_all_is_text() -> None:
    assert ToolCallReader([]).feed('{"name": "get", "parameters": {}}') == [
        TextPiece('{"name": "get", "parameters": {}}')
    ]


def test_ids() -> None:
    ids = {new_call_id() for _ in range(200)}
    assert len(ids) == 200
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", call_id) for call_id in ids)
