"""Answers read back with the ``openai`` package's own types, events byte by byte, and hostile text."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samir_vllm.extras.serve.api_errors import ApiError
from samir_vllm.extras.serve.shapes import (
    DONE,
    LEAST_LOGPROB,
    ChatChoice,
    ChatShapes,
    CompletionChoice,
    CompletionShapes,
    ToolCall,
    chat_logprobs,
    completion_logprobs,
    error_event,
    prompt_logprobs,
    usage_of,
)
from samir_vllm.sequence import TokenLogprobs

pydantic = pytest.importorskip("pydantic")
types = pytest.importorskip("openai.types")

HALF = "\ud83d"  # half a surrogate pair
LINE_ENDS = "a\nb\rc\x85d\u2028e\u2029f\x0bg\x0ch\x1ci\x1dj\x1ek"  # all that Python takes for one
TOKENS = [b"Hi", b" the", b"\xf0\x9f", b"\x98", b"\x80", b"\n", b"<|end|>", b" \\\xe2\x80", b"\xff", b"Hi"]
END = 6
FRONT = {"id": "chatcmpl-1", "created": 1700000000, "model": 'tiny"é'}


def chat_shapes(include_usage: bool = False) -> ChatShapes:
    return ChatShapes("chatcmpl-1", 1700000000, 'tiny"é', include_usage)


def completion_shapes(include_usage: bool = False) -> CompletionShapes:
    return CompletionShapes("cmpl-1", 1700000000, "tiny", include_usage)


def read(event: bytes) -> dict[str, Any]:
    """The JSON object of exactly one event, whatever the reader takes for the end of a line."""
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    lines = event.decode("utf-8").splitlines()
    assert len(lines) == 2, lines
    assert lines[1] == ""
    return json.loads(lines[0].removeprefix("data: "))


def read_chunk(event: bytes) -> dict[str, Any]:
    """A chat's event, which ``openai`` must find right."""
    chunk = read(event)
    types.chat.ChatCompletionChunk.model_validate(chunk, strict=True)
    usage = {"usage": chunk["usage"]} if "usage" in chunk else {}
    assert chunk == {**FRONT, "object": "chat.completion.chunk", "choices": chunk["choices"], **usage}
    return chunk


def read_choice(event: bytes) -> dict[str, Any]:
    (choice,) = read_chunk(event)["choices"]
    return choice


def check_completion(answer: dict[str, Any]) -> None:
    """``openai`` finds it right, but for the nulls that its types leave out, and the API itself sends."""
    try:
        types.Completion.model_validate(answer, strict=True)
    except pydantic.ValidationError as error:
        for one in error.errors():
            assert one["input"] is None, one
            _, _, *path = one["loc"]
            assert path == ["finish_reason"] or path[:2] in (
                ["logprobs", "token_logprobs"],
                ["logprobs", "top_logprobs"],
            )


def token_bytes(token_id: int) -> bytes:
    return TOKENS[token_id]


def logprobs_of(token_id: int, logprob: float = -0.5, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, top)


# --- chats ------------------------------------------------------------------------------------------------


def test_a_chats_events() -> None:
    shapes = chat_shapes()
    rest = {"logprobs": None, "finish_reason": None}
    assert read_choice(shapes.role(2)) == {
        "index": 2,
        "delta": {"role": "assistant", "content": "", "refusal": None},
        **rest,
    }
    assert read_choice(shapes.text(2, "Hi")) == {"index": 2, "delta": {"content": "Hi"}, **rest}
    call = {"index": 1, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert read_choice(shapes.tool_call(0, 1, "call_1", "f")) == {
        "index": 0,
        "delta": {"tool_calls": [call]},
        **rest,
    }
    assert read_choice(shapes.tool_arguments(0, 1, '{"a')) == {
        "index": 0,
        "delta": {"tool_calls": [{"index": 1, "function": {"arguments": '{"a'}}]},
        **rest,
    }
    for reason in ("stop", "length", "tool_calls"):
        assert read_choice(shapes.finish(1, reason)) == {
            "index": 1,
            "delta": {},
            "logprobs": None,
            "finish_reason": reason,
        }


def test_text_events_keep_their_index() -> None:
    for shapes in (chat_shapes(), completion_shapes()):
        indices = [0, 7, 0, 63, 7]
        assert [read(shapes.text(i, "x"))["choices"][0]["index"] for i in indices] == indices


@pytest.mark.parametrize("make", [chat_shapes, completion_shapes])
def test_usage_is_null_until_the_last_event(make: Any) -> None:
    for include_usage in (False, True):
        shapes = make(include_usage)
        events = [shapes.text(0, "Hi"), shapes.text(0, "Hi", logprobs=[]), shapes.finish(0, "stop")]
        if make is chat_shapes:
            events += [shapes.role(0), shapes.tool_call(0, 0, "c", "f"), shapes.tool_arguments(0, 0, "{")]
        for event in events:
            assert read(event).get("usage", "absent") == (None if include_usage else "absent")
    last = read(make(True).usage(3, 4))
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert read(make(True).usage(3, 4, 2))["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_usage_as_openai_reads_it() -> None:
    read_chunk(chat_shapes(True).usage(3, 4, 2))
    check_completion(read(completion_shapes(True).usage(3, 4)))
    types.CompletionUsage.model_validate(usage_of(3, 4, 0), strict=True)


def test_a_whole_chat() -> None:
    calls = [ToolCall("call_1", "f", '{"a": 1}'), ToolCall("call_2", "g", "{}")]
    listed = chat_logprobs([logprobs_of(0)], token_bytes)
    answer = chat_shapes().whole(
        [
            ChatChoice(0, "Hi", "stop", logprobs=listed),
            ChatChoice(1, None, "tool_calls", tool_calls=calls),
            ChatChoice(2, "", "length"),
        ],
        usage_of(3, 4),
    )
    types.chat.ChatCompletion.model_validate(answer, strict=True)
    assistant = {"role": "assistant", "refusal": None}
    shown = [
        {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in calls
    ]
    assert answer == {
        **FRONT,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {**assistant, "content": "Hi"},
                "logprobs": {"content": listed, "refusal": None},
                "finish_reason": "stop",
            },
            {
                "index": 1,
                "message": {**assistant, "content": None, "tool_calls": shown},
                "logprobs": None,
                "finish_reason": "tool_calls",
            },
            {
                "index": 2,
                "message": {**assistant, "content": ""},
                "logprobs": None,
                "finish_reason": "length",
            },
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }
    assert chat_shapes().whole([], usage_of(1, 1), [None])["prompt_logprobs"] == [None]


# --- completions ------------------------------------------------------------------------------------------


def test_a_completions_events() -> None:
    shapes = completion_shapes()
    front = {"id": "cmpl-1", "object": "text_completion", "created": 1700000000, "model": "tiny"}
    text = read(shapes.text(5, "Hi"))
    assert text == {
        **front,
        "choices": [{"index": 5, "text": "Hi", "logprobs": None, "finish_reason": None}],
    }
    end = read(shapes.finish(5, "length"))
    assert end == {
        **front,
        "choices": [{"index": 5, "text": "", "logprobs": None, "finish_reason": "length"}],
    }
    for answer in (text, end):
        check_completion(answer)


def test_a_whole_completion() -> None:
    listed = completion_logprobs([logprobs_of(0)], [0], token_bytes, 0)
    prompt = prompt_logprobs([None], token_bytes)
    choices = [CompletionChoice(0, "Hi", "stop", listed), CompletionChoice(1, "", "length", None, prompt)]
    answer = completion_shapes().whole(choices, usage_of(3, 4))
    types.Completion.model_validate(answer, strict=True)
    assert answer == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1700000000,
        "model": "tiny",
        "choices": [
            {"index": 0, "text": "Hi", "logprobs": listed, "finish_reason": "stop"},
            {"index": 1, "text": "", "logprobs": None, "finish_reason": "length", "prompt_logprobs": [None]},
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }


# --- text -------------------------------------------------------------------------------------------------

EVENTS: list[Any] = [
    (lambda text: chat_shapes().text(0, text), lambda choice: choice["delta"]["content"]),
    (lambda text: chat_shapes(True).text(0, text, []), lambda choice: choice["delta"]["content"]),
    (lambda text: completion_shapes().text(0, text), lambda choice: choice["text"]),
    (
        lambda text: chat_shapes().tool_arguments(0, 0, text),
        lambda choice: choice["delta"]["tool_calls"][0]["function"]["arguments"],
    ),
]


@pytest.mark.parametrize(("write", "text_of"), EVENTS)
@pytest.mark.parametrize(
    "text", ["", "Hi", 'a"b\\c', LINE_ENDS, "é天😀", "\x00\x7f", "</script>", "data: x\n\n"]
)
def test_text_comes_through(write: Any, text_of: Any, text: str) -> None:
    event = write(text)
    assert event.isascii()
    assert text_of(read(event)["choices"][0]) == text


@pytest.mark.parametrize(("write", "text_of"), EVENTS)
@given(text=st.text(st.characters(exclude_categories=())))
def test_any_text_gives_a_readable_event(write: Any, text_of: Any, text: str) -> None:
    got = text_of(read(write(text))["choices"][0])
    assert got == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    got.encode("utf-8")


def test_half_a_surrogate_pair_is_replaced() -> None:
    for write, text_of in EVENTS:
        assert text_of(read(write(f"a{HALF}b"))["choices"][0]) == "a\ufffdb"
        assert b"\\ud83d" not in write(HALF)
    call = ToolCall("call_1", "f", HALF)
    chat = chat_shapes().whole([ChatChoice(0, HALF, "stop", [call])], usage_of(1, 1))
    completion = completion_shapes().whole([CompletionChoice(0, HALF, "stop")], usage_of(1, 1))
    for answer in (chat, completion):
        assert "\ufffd" in json.dumps(answer, ensure_ascii=False).encode("utf-8").decode("utf-8")


def test_errors_and_the_end() -> None:
    error = ApiError(500, f"no\n{HALF}", "server_error", code="engine")
    assert read(error_event(error)) == {
        "error": {"message": "no\n\\ud83d", "type": "server_error", "param": None, "code": "engine"}
    }
    assert DONE == b"data: [DONE]\n\n"


# --- log-probabilities ------------------------------------------------------------------------------------


def test_logprobs_of_a_chat() -> None:
    listed = chat_logprobs(
        [logprobs_of(0, -0.5, (0, -0.5), (2, -1.5)), logprobs_of(7, -math.inf)],
        token_bytes,
    )
    assert listed == [
        {
            "token": "Hi",
            "logprob": -0.5,
            "bytes": [72, 105],
            "top_logprobs": [
                {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]},
                {"token": "\ufffd", "logprob": -1.5, "bytes": [0xF0, 0x9F]},
            ],
        },
        {"token": " \\\ufffd", "logprob": -9999.0, "bytes": [32, 92, 0xE2, 0x80], "top_logprobs": []},
    ]
    choice = read_choice(chat_shapes(True).text(0, "Hi", listed))
    assert choice["logprobs"] == {"content": listed, "refusal": None}
    assert choice["delta"] == {"content": "Hi"}


def test_what_json_cant_spell_is_clipped() -> None:
    for value in (-math.inf, math.nan, -1e9):
        token = logprobs_of(0, value, (1, value))
        listed = chat_logprobs([token], token_bytes)
        assert listed[0]["logprob"] == LEAST_LOGPROB
        assert listed[0]["top_logprobs"][0]["logprob"] == LEAST_LOGPROB
        shown = completion_logprobs([token], [0], token_bytes, 0)
        assert shown["token_logprobs"] == [LEAST_LOGPROB]
        assert shown["top_logprobs"] == [{" the": LEAST_LOGPROB, "Hi": LEAST_LOGPROB}]
        read(completion_shapes().text(0, "Hi", shown))


def test_logprobs_of_a_completion() -> None:
    ids = [0, 1, 5, 7, 8]
    tokens = [None, *(logprobs_of(i, -1.0, (0, -0.25), (1, -0.5)) for i in ids[1:])]
    shown = completion_logprobs(tokens, ids, token_bytes, 0)
    assert shown["tokens"] == ["Hi", " the", "\n", "bytes: \\x5c\\xe2\\x80", "bytes:\\xff"]
    assert shown["token_logprobs"] == [None, -1.0, -1.0, -1.0, -1.0]
    assert shown["top_logprobs"] == [
        None,
        {"Hi": -0.25, " the": -0.5},
        {"Hi": -0.25, " the": -0.5, "\n": -1.0},
        {"Hi": -0.25, " the": -0.5, "bytes: \\x5c\\xe2\\x80": -1.0},
        {"Hi": -0.25, " the": -0.5, "bytes:\\xff": -1.0},
    ]
    assert list(shown["top_logprobs"][2]) == ["Hi", " the", "\n"]
    event = read(completion_shapes().text(0, "x", shown))
    assert event["choices"][0]["logprobs"] == shown
    check_completion(event)


def test_the_likelier_of_two_ids_speaks_for_their_text() -> None:
    shown = completion_logprobs([logprobs_of(9, -3.0, (0, -1.0))], [9], token_bytes, 0)
    assert shown["top_logprobs"] == [{"Hi": -1.0}]
    assert shown["token_logprobs"] == [-3.0]


@pytest.mark.parametrize(
    ("ids", "offsets"),
    [
        ([0, 1, 5, 0], [0, 2, 6, 7]),
        ([0, 2, 3, 4, 1], [0, 2, 2, 2, 3]),  # a character of three tokens is complete after the last
        ([2, 3, 0, 1], [0, 0, 0, 3]),  # two bytes and one that go nowhere: one U+FFFD, when "Hi" shows it
        ([8, 8, 0], [0, 1, 2]),
        ([END, 0, END, END, 0], [0, 0, 2, 2, 2]),  # a control token has no place in the text
        ([2, END, 3, 4, 0], [0, 0, 0, 0, 1]),
    ],
)
def test_offsets_count_characters_of_the_text(ids: list[int], offsets: list[int]) -> None:
    tokens = [logprobs_of(i) for i in ids]
    for first in (0, 100):
        shown = completion_logprobs(tokens, ids, token_bytes, first, is_special=lambda i: i == END)
        assert shown["text_offset"] == [first + offset for offset in offsets]


@given(st.lists(st.sampled_from([i for i in range(len(TOKENS)) if i != END]), max_size=12))
def test_offsets_agree_with_the_text(ids: list[int]) -> None:
    """What stands before a token's offset is what the tokens before it have completed."""
    shown = completion_logprobs([logprobs_of(i) for i in ids], ids, token_bytes, 0)
    text = b"".join(TOKENS[i] for i in ids).decode("utf-8", "replace")
    for count, offset in enumerate(shown["text_offset"]):
        before = b"".join(TOKENS[i] for i in ids[:count]).decode("utf-8", "replace")
        assert before.startswith(text[:offset])
        assert len(before) - offset in (0, 1)  # 1: an incomplete character at the end


def test_logprobs_of_a_prompt() -> None:
    tokens = [None, logprobs_of(1, -0.25, (1, -0.25), (2, -math.inf)), logprobs_of(0, -4.0, (1, -0.5))]
    assert prompt_logprobs(tokens, token_bytes) == [
        None,
        {
            "1": {"logprob": -0.25, "rank": 1, "decoded_token": " the"},
            "2": {"logprob": -9999.0, "rank": 2, "decoded_token": "\ufffd"},
        },
        {
            "1": {"logprob": -0.5, "rank": 1, "decoded_token": " the"},
            "0": {"logprob": -4.0, "rank": None, "decoded_token": "Hi"},
        },
    ]
