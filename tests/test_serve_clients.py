"""The server as its clients see it: the bytes of its streams, and the libraries people use.

Knows the fake model's one sentence, and the golden runs of the demo model; nothing of how answers are made.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serving import SERVING_PACKAGES, Server, read_events, running_server

for name in SERVING_PACKAGES:
    pytest.importorskip(name, reason="serving needs it: pip install 'samir-vllm[serve]'")
openai = pytest.importorskip("openai", reason="the openai client isn't installed")

from pydantic import BaseModel  # noqa: E402  (openai brings it)

from harness import GOLDEN  # noqa: E402
from samir_vllm import Engine, SamplingParams  # noqa: E402
from samir_vllm.extras.serve.fake_model import CONTEXT, LOGPROB, SENTENCE  # noqa: E402

TEXT = SENTENCE.decode()
DIALOG: list[Any] = [{"role": "user", "content": "What can you say?"}]
CHAT: dict[str, Any] = {"model": "fake", "messages": DIALOG}
COMPLETION: dict[str, Any] = {"model": "fake", "prompt": "Say it"}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
LONG = 100  # tokens: more than the fake says

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
            "required": ["town", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 9},
        "name": {"enum": ["pole", "equator"]},
    },
    "required": ["x", "name"],
    "additionalProperties": False,
}
POINT_FORMAT = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}


class Point(BaseModel):
    """What `POINT` describes, as the openai client takes it."""

    x: int
    name: str


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("--served-model-name", "fake", "--served-model-name", "also-fake") as started:
        yield started


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """One request at a time, slowly, nobody waits, and only for who has the key."""
    options = ("--max-num-seqs", "1", "--max-waiting", "0", "--fake-step-ms", "50", "--api-key", "sesame")
    with running_server(*options) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with client_of(server) as made:
        yield made


def client_of(server: Server, **options: Any) -> Any:
    """The openai client."""
    return openai.OpenAI(base_url=f"{server.url}/v1", **{"api_key": "-", "max_retries": 0, **options})


# --- what is refused, and what is cut ---------------------------------------------------------------------


def error_of(server: Server, path: str, body: dict[str, Any]) -> tuple[int, str | None]:
    """Status, and the field to blame."""
    reply = server.post(path, body)
    return reply.status, json.loads(reply.body)["error"]["param"]


def test_more_than_there_is_room_for_is_a_mistake(server: Server, narrow: Server) -> None:
    long = {**CHAT, "messages": [{"role": "user", "content": "x" * (CONTEXT - 300)}]}
    assert error_of(server, "/v1/chat/completions", {**long, "min_tokens": 500}) == (400, "min_tokens")
    many = {**COMPLETION, "n": 64, "max_tokens": 1000, "logprobs": 20}
    assert error_of(server, "/v1/completions", many) == (400, "logprobs")
    reply = narrow.post("/v1/completions", {**COMPLETION, "n": 2}, {"Authorization": "Bearer sesame"})
    assert (reply.status, b"only 1 answers may run or wait" in reply.body) == (400, True)


def test_a_stop_string_that_cuts_a_call_makes_no_call(server: Server) -> None:
    """Who is told of tool calls parses their arguments."""
    body = {**CHAT, "tools": [WEATHER], "tool_choice": "required"}
    path = "/v1/chat/completions"
    for stop, reason in ((["}"], "stop"), (["?"], "tool_calls")):
        whole = json.loads(server.post(path, {**body, "stop": stop}).body)
        assert whole["choices"][0]["finish_reason"] == reason
        assert [c.finish_reason for c in streamed(server, path, {**body, "stop": stop})] == [reason]


def test_echoed_control_tokens_have_no_place_in_the_text(server: Server) -> None:
    body = {"model": "fake", "prompt": [256, 65, 257, 66], "echo": True, "logprobs": 0, "max_tokens": 1}
    choice = json.loads(server.post("/v1/completions", body).body)["choices"][0]
    assert choice["text"] == "AB" + TEXT[0]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 2]


# --- streams, by hand ---------------------------------------------------------------------------------------


@dataclass
class Choice:
    """One answer, however it came."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    calls: list[list[str]] = field(default_factory=list)  # name and arguments


def streamed(server: Server, path: str, body: dict[str, Any], *, include_usage: bool = True) -> list[Choice]:
    """The answers of a stream, every event of which has been looked at."""
    options = {"stream": True, "stream_options": {"include_usage": include_usage}}
    reply = server.post(path, {**body, **options})
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    events = read_events(reply.body)
    check_fronts(path, body, events)
    if include_usage:
        check_usage(events.pop(), events, server.post(path, body).json["usage"])
    else:
        assert all("usage" not in event for event in events)
    choices = [Choice() for _ in range(answers_to(body))]
    begun: set[int] = set()
    for event in events:
        (choice,) = event["choices"]
        if path == "/v1/chat/completions":
            take_chat(choices[choice["index"]], choice, is_first=choice["index"] not in begun)
        else:
            take_completion(choices[choice["index"]], choice)
        begun.add(choice["index"])
    return choices


def check_fronts(path: str, body: dict[str, Any], events: list[Any]) -> None:
    kind = "chat.completion.chunk" if "chat" in path else "text_completion"
    fronts = {(e["id"], e["object"], e["created"], e["model"]) for e in events}
    ((_, shown, _, model),) = fronts
    assert (shown, model) == (kind, body["model"])


def check_usage(last: Any, others: list[Any], expected: Any) -> None:
    assert last["choices"] == []
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in others)
    for usage in (last["usage"], expected):  # the second of two equal prompts finds K and V of the first
        usage.pop("prompt_tokens_details")
    assert last["usage"] == expected


def answers_to(body: dict[str, Any]) -> int:
    prompt = body.get("prompt")
    is_one = not isinstance(prompt, list) or isinstance(prompt[0], int)
    return (1 if is_one else len(prompt)) * body.get("n", 1)


def take_chat(choice: Choice, event: Any, *, is_first: bool) -> None:
    delta = event["delta"]
    if is_first:
        assert event == {
            "index": event["index"],
            "delta": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None,
            "finish_reason": None,
        }
        return
    assert choice.finish_reason is None
    choice.finish_reason = event["finish_reason"]
    if choice.finish_reason is not None:
        assert (delta, event["logprobs"]) == ({}, None)
        return
    assert len(delta) == 1
    choice.text += delta.get("content", "")
    add_logprobs(choice, event)
    for call in delta.get("tool_calls", ()):
        if "id" in call:
            assert call["index"] == len(choice.calls)
            assert call["type"] == "function"
            choice.calls.append([call["function"]["name"], ""])
        choice.calls[call["index"]][1] += call["function"]["arguments"]


def take_completion(choice: Choice, event: Any) -> None:
    assert choice.finish_reason is None
    choice.finish_reason = event["finish_reason"]
    choice.text += event["text"]
    add_logprobs(choice, event)
    if choice.finish_reason is not None:
        assert (event["text"], event["logprobs"]) == ("", None)


def add_logprobs(choice: Choice, event: Any) -> None:
    for name, values in (event["logprobs"] or {}).items():
        if values:
            choice.logprobs[name] = choice.logprobs.get(name, []) + values


def unstreamed(server: Server, path: str, body: dict[str, Any]) -> list[Choice]:
    """The answers to a request that wants them in one piece."""
    reply = server.post(path, body)
    assert reply.status == 200, reply.body
    choices = []
    for index, shown in enumerate(reply.json["choices"]):
        assert shown["index"] == index
        message = shown.get("message") or {"content": shown["text"]}
        calls = [call["function"] for call in message.get("tool_calls", ())]
        choice = Choice(
            message["content"] or "",
            shown["finish_reason"],
            calls=[[call["name"], call["arguments"]] for call in calls],
        )
        add_logprobs(choice, shown)
        choices.append(choice)
    assert len(choices) == answers_to(body)
    return choices


FOR_BOTH: dict[str, dict[str, Any]] = {
    "plain": {},
    "one token": {"max_tokens": 1},
    "cut before a character": {"max_tokens": 34},
    "over and over": {"max_tokens": 200, "ignore_eos": True},
    "several": {"n": 5, "max_tokens": LONG},
    "stop": {"stop": "thoughts", "max_tokens": LONG},
    "stops": {"stop": ["nowhere", "?", "“al", "again & again"], "max_tokens": LONG},
    "stop of a part of a character's bytes": {"stop": "🙂", "max_tokens": LONG},
    "late stop": {"stop": "no", "min_tokens": 30, "ignore_eos": True, "max_tokens": 200},
    "stop token": {"stop_token_ids": [ord(",")], "max_tokens": LONG},
    "stop token amid a character": {"stop_token_ids": ["“".encode()[1]], "max_tokens": LONG},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "max_tokens": LONG},
    "biased": {"logit_bias": {"65": 1.5}, "presence_penalty": 1, "frequency_penalty": -1, "max_tokens": 7},
}
FOR_CHAT: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True},
    "top logprobs": {"logprobs": True, "top_logprobs": 3},
    "logprobs and stop": {"logprobs": True, "stop": "thoughts", "n": 3},
    "logprobs and stop token": {"logprobs": True, "stop_token_ids": [ord("g")]},
    "logprobs cut short": {"logprobs": True, "max_completion_tokens": 35},
    "logprobs of tools": {"logprobs": True, "tools": [WEATHER]},
    "logprobs of a call": {"logprobs": True, "tools": [WEATHER], "tool_choice": "required"},
    "logprobs of half a call": {
        "logprobs": True,
        "tools": [WEATHER],
        "tool_choice": "required",
        "max_tokens": 9,
    },
    "any call": {"tools": [WEATHER, CLOCK], "tool_choice": "required"},
    "one call": {"tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": False},
    "this call": {
        "tools": [CLOCK, WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    },
    "perhaps a call": {"tools": [WEATHER], "tool_choice": "auto", "n": 2},
    "no call": {"tools": [WEATHER], "tool_choice": "none"},
    "half a call": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 45},
    "not even a call": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 9},
    "any object": {"response_format": {"type": "json_object"}},
    "a point": {"response_format": POINT_FORMAT, "n": 2},
}
FOR_COMPLETION: dict[str, dict[str, Any]] = {
    "echo": {"echo": True},
    "nothing but an echo": {"echo": True, "max_tokens": 0},
    "logprobs": {"logprobs": 0, "max_tokens": LONG},
    "top logprobs": {"logprobs": 4, "max_tokens": LONG},
    "logprobs and stop": {"logprobs": 2, "stop": "thoughts", "max_tokens": LONG},
    "logprobs of an echo": {"logprobs": 2, "echo": True},
    "logprobs of nothing but an echo": {"logprobs": 2, "echo": True, "max_tokens": 0},
    "texts": {"prompt": ["One", "and two", "Drüben"], "n": 2, "echo": True},
    "ids": {"prompt": [[1, 2, 3], [0x20], [0xE2, 0x80]], "max_tokens": 3, "logprobs": 1},
}
SAME_EITHER_WAY = [
    *((path, case) for path in BODIES for case in FOR_BOTH),
    *(("/v1/chat/completions", case) for case in FOR_CHAT),
    *(("/v1/completions", case) for case in FOR_COMPLETION),
]


@pytest.mark.parametrize(("path", "case"), SAME_EITHER_WAY)
def test_a_stream_says_what_an_answer_in_one_piece_says(server: Server, path: str, case: str) -> None:
    cases = FOR_BOTH | (FOR_CHAT if "chat" in path else FOR_COMPLETION)
    body = {**BODIES[path], **cases[case]}
    assert streamed(server, path, body) == unstreamed(server, path, body)


@pytest.mark.parametrize("path", BODIES)
def test_usage_comes_only_if_asked_for(server: Server, path: str) -> None:
    body = {**BODIES[path], "max_tokens": LONG}
    (without,) = streamed(server, path, body, include_usage=False)
    assert without.text == TEXT
    assert without == streamed(server, path, body)[0]
    bare = read_events(server.post(path, {**body, "stream": True}).body)
    assert all("usage" not in event for event in bare)


def test_usage_counts_each_prompt_once_and_every_token(server: Server) -> None:
    body = {**COMPLETION, "prompt": ["abc", "defgh"], "n": 3, "max_tokens": 4}
    usage = server.post("/v1/completions", body).json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (8, 24, 32)
    with_end = server.post("/v1/completions", {**COMPLETION, "max_tokens": LONG}).json["usage"]
    assert with_end["completion_tokens"] == len(SENTENCE) + 1  # the token that ends it counts
    nothing = {**COMPLETION, "echo": True, "max_tokens": 0}
    assert server.post("/v1/completions", nothing).json["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", BODIES)
def test_characters_come_whole_wherever_an_answer_is_cut(server: Server, path: str) -> None:
    """A token of the fake is a byte. What `max_tokens` cuts off of a character shows as one U+FFFD."""

    def check(count: int) -> None:
        body = {**BODIES[path], "max_tokens": count, "stream": True}
        expected = SENTENCE[:count].decode("utf-8", "replace")
        pieces = [e["choices"][0] for e in read_events(server.post(path, body).body)]
        texts = [piece["delta"].get("content", "") if "delta" in piece else piece["text"] for piece in pieces]
        assert "".join(texts) == expected
        assert "\ufffd" not in "".join(texts)[:-1]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, range(1, len(SENTENCE) + 1)))


def check_stop(server: Server, path: str, stop: str) -> None:
    """Nothing of the stop string comes, and all that is before it."""
    logprobs = {"logprobs": True} if "chat" in path else {"logprobs": 0}
    body = {**BODIES[path], "stop": stop, "max_tokens": LONG, **logprobs, "stream": True}
    expected = TEXT[: TEXT.index(stop)]
    choice, told = Choice(), ""
    for event in read_events(server.post(path, body).body):
        (shown,) = event["choices"]
        if "delta" in shown:
            take_chat(choice, shown, is_first="role" in shown["delta"])
        else:
            take_completion(choice, shown)
        told = choice.text
        assert expected.startswith(told), (stop, told)
    assert (told, choice.finish_reason) == (expected, "stop")
    if "chat" in path:
        spoken = b"".join(bytes(token["bytes"]) for token in choice.logprobs.get("content", ()))
        assert spoken.decode() == expected, stop
    else:
        assert len(choice.logprobs.get("tokens", ())) == len(expected.encode()), stop


def substrings(lengths: range) -> list[str]:
    return sorted({TEXT[i : i + length] for length in lengths for i in range(len(TEXT) - length + 1)})


@pytest.mark.parametrize("path", BODIES)
def test_no_part_of_a_stop_string_leaks(server: Server, path: str) -> None:
    stops = substrings(range(1, 3)) + substrings(range(3, len(TEXT) + 1))[:: 41 if "chat" in path else 43]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda stop: check_stop(server, path, stop), stops))


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_no_part_of_any_stop_string_leaks(server: Server, path: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda stop: check_stop(server, path, stop), substrings(range(1, len(TEXT) + 1))))


@pytest.mark.parametrize("path", BODIES)
def test_what_looks_like_a_stop_string_but_is_none_comes_in_the_end(server: Server, path: str) -> None:
    body = {**BODIES[path], "stop": [TEXT[10:40] + "!", TEXT[-5:] + "?"], "max_tokens": LONG}
    for choice in (*streamed(server, path, body), *unstreamed(server, path, body)):
        assert (choice.text, choice.finish_reason) == (TEXT, "stop")


# --- the openai client --------------------------------------------------------------------------------------


def test_chat(client: Any) -> None:
    answer = client.chat.completions.create(**CHAT)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert choice.message.tool_calls is None
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.completion_tokens == len(SENTENCE) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_chat(client: Any) -> None:
    chunks = list(client.chat.completions.create(**CHAT, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks)


def test_streamed_chat_with_usage(client: Any) -> None:
    *chunks, last = client.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}, max_completion_tokens=7
    )
    assert last.choices == []
    assert last.usage.completion_tokens == 7
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat_logprobs(client: Any) -> None:
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in content) == SENTENCE
    assert [(top.bytes[0] - content[0].bytes[0], top.logprob) for top in content[0].top_logprobs] == [
        (0, LOGPROB),
        (1, LOGPROB - 1),
    ]
    assert all(token.logprob == LOGPROB and len(token.top_logprobs) == 2 for token in content)


def test_several_answers(client: Any) -> None:
    answer = client.chat.completions.create(**CHAT, n=4, stop="thoughts")
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.message.content for choice in answer.choices} == {"No weights, no "}


def test_completion(client: Any) -> None:
    answer = client.completions.create(**COMPLETION, max_tokens=11, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("Say itNo weights,", "length")
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs == [None] + [LOGPROB] * (len(choice.text) - 1)
    assert choice.logprobs.text_offset == list(range(len(choice.text)))
    assert choice.logprobs.top_logprobs[1] == {"a": LOGPROB}


def test_completion_logprobs_hold_the_token_that_ends_it(client: Any) -> None:
    """It has no text. Who finds a prompt's log-probabilities by place, such as lm-eval, counts on it."""
    for stop in ({}, {"stop_token_ids": [ord(" ")]}):
        answer = client.completions.create(**COMPLETION, max_tokens=LONG, logprobs=1, extra_body=stop)
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        assert choice.logprobs.tokens[-1] == (" " if stop else "<|eot_id|>")
        assert choice.logprobs.text_offset[-1] == len(choice.text)
        assert len(choice.logprobs.tokens) == answer.usage.completion_tokens


def test_streamed_completions_of_several_prompts(client: Any) -> None:
    prompts = ["One", "Two", "Three"]
    texts = ["", "", "", "", "", ""]
    for chunk in client.completions.create(
        model="fake", prompt=prompts, n=2, max_tokens=LONG, echo=True, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [prompt + TEXT for prompt in prompts for _ in range(2)]


def test_prompts_of_token_ids(client: Any) -> None:
    ids = list(b"Say it")
    for prompt in (ids, [ids, ids]):
        answer = client.completions.create(model="fake", prompt=prompt, max_tokens=2, echo=True)
        assert {choice.text for choice in answer.choices} == {"Say itNo"}
        assert len(answer.choices) == (1 if prompt is ids else 2)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "also-fake"]
    assert client.models.retrieve("also-fake").id == "also-fake"
    assert client.chat.completions.create(**{**CHAT, "model": "also-fake"}).model == "also-fake"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("fa/ke")
    assert caught.value.code == "model_not_found"


def test_a_tool_is_called_and_its_result_sent_back(client: Any) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        answer = client.chat.completions.create(**CHAT, tools=[WEATHER], tool_choice=choice)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        call = message.tool_calls[0]
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "get_weather"
        assert set(arguments) == {"town", "days"}
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls
        ]
        dialog = [*DIALOG, message, *results]
        final = client.chat.completions.create(model="fake", messages=dialog)
        assert (final.choices[0].message.content, final.choices[0].finish_reason) == (TEXT, "stop")
        free = client.chat.completions.create(model="fake", messages=dialog, tools=[WEATHER])
        assert (free.choices[0].message.tool_calls, free.choices[0].finish_reason) == (None, "stop")


def test_a_streamed_tool_call(client: Any) -> None:
    with client.chat.completions.stream(**CHAT, tools=[WEATHER], tool_choice="required") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == len(final.choices[0].message.tool_calls)
    assert call.id.startswith("call_")
    assert set(json.loads(call.function.arguments)) == {"town", "days"}
    assert final.choices[0].finish_reason == "tool_calls"


def test_structured_output(client: Any) -> None:
    answer = client.chat.completions.create(**CHAT, response_format=POINT_FORMAT)
    point = json.loads(answer.choices[0].message.content)
    assert set(point) == {"x", "name"}
    assert isinstance(point["x"], int)
    assert point["name"] in ("pole", "equator")
    anything = client.chat.completions.create(**CHAT, response_format={"type": "json_object"})
    assert isinstance(json.loads(anything.choices[0].message.content), dict)


def test_structured_output_as_a_pydantic_model(client: Any) -> None:
    answer = client.chat.completions.parse(**CHAT, response_format=Point)
    assert isinstance(answer.choices[0].message.parsed, Point)
    with client.chat.completions.stream(**CHAT, response_format=Point) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Point)


def test_async_client(server: Server) -> None:
    async def say(client: Any, count: int) -> str:
        stream = await client.chat.completions.create(**CHAT, max_tokens=count, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            answer = await client.completions.create(**COMPLETION, max_tokens=LONG)
            assert answer.choices[0].text == TEXT
            texts = await asyncio.gather(*(say(client, count) for count in range(1, 33)))
            assert texts == [TEXT[:count] for count in range(1, 33)]
            parsed = await client.chat.completions.parse(**CHAT, response_format=Point)
            assert parsed.choices[0].message.parsed
            assert [model.id async for model in client.models.list()] == ["fake", "also-fake"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_tokens": "many"}, "max_tokens", "invalid_type"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"extra_body": {"temprature": 1}}, "temprature", "unknown_parameter"),
        ({"extra_body": {"reasoning_effort": "high"}}, "reasoning_effort", "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "messages", "context_length_exceeded"),
    ],
)
def test_bad_requests(client: Any, options: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**CHAT, **options})
    assert caught.value.type == "invalid_request_error"
    assert (caught.value.param, caught.value.code) == (param, code)


def test_a_schema_that_means_nothing_is_refused(client: Any) -> None:
    described = {"name": "x", "schema": {"type": 3}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **CHAT, response_format={"type": "json_schema", "json_schema": described}
        )
    assert caught.value.param.startswith("response_format")


def test_another_model_is_not_found(client: Any) -> None:
    for create, body in ((client.chat.completions.create, CHAT), (client.completions.create, COMPLETION)):
        with pytest.raises(openai.NotFoundError) as caught:
            create(**{**body, "model": "gpt-5"})
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_without_the_key_nobody_gets_in(narrow: Server) -> None:
    for key in ("wrong", "sesame2", "sesam", "-"):
        with pytest.raises(openai.AuthenticationError) as caught:
            client_of(narrow, api_key=key).models.list()
        assert caught.value.code == "invalid_api_key"
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
    assert [model.id for model in client_of(narrow, api_key="sesame").models.list()] == ["fake"]
    narrow.wait_until_idle()


def test_who_finds_the_queue_full_is_told_to_come_again(narrow: Server) -> None:
    client = client_of(narrow, api_key="sesame")
    running = client.completions.create(**COMPLETION, max_tokens=LONG, stream=True)
    assert next(iter(running)).choices[0].text == "N"
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(**CHAT, stream=stream)
        assert (caught.value.type, caught.value.code) == ("rate_limit_error", "queue_full")
        assert int(caught.value.response.headers["retry-after"]) >= 1
    running.close()
    narrow.wait_until_idle()
    assert client.completions.create(**COMPLETION, max_tokens=1).choices[0].text == "N"


def test_a_client_that_gives_up_ends_its_request(narrow: Server) -> None:
    impatient = client_of(narrow, api_key="sesame", timeout=0.5)
    with pytest.raises(openai.APITimeoutError):
        impatient.completions.create(**COMPLETION, max_tokens=4000, extra_body={"ignore_eos": True})
    narrow.wait_until_idle()

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{narrow.url}/v1", api_key="sesame", max_retries=0) as client:
            stream = await client.chat.completions.create(
                **CHAT, max_tokens=4000, extra_body={"ignore_eos": True}, stream=True
            )
            task = asyncio.create_task(read_all(stream))
            await stream_has_begun.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def read_all(stream: Any) -> None:
        async with stream:
            async for _ in stream:
                stream_has_begun.set()

    stream_has_begun = asyncio.Event()
    asyncio.run(main())
    narrow.wait_until_idle()


# --- litellm ------------------------------------------------------------------------------------------------

_LITELLM = """
import json, sys
import litellm
from litellm import completion

options = {"model": "openai/fake", "api_base": sys.argv[1], "api_key": "-", "num_retries": 0}
dialog = [{"role": "user", "content": "What can you say?"}]
whole = completion(messages=dialog, **options)
pieces = [p.choices[0].delta.content or "" for p in completion(messages=dialog, stream=True, **options)]
tools = json.loads(sys.argv[2])
called = completion(messages=dialog, tools=tools, tool_choice="required", **options)
try:
    completion(messages=dialog, temperature=-1, **options)
except litellm.BadRequestError as exc:
    refusal = str(exc)
print(json.dumps({
    "whole": whole.choices[0].message.content,
    "tokens": whole.usage.completion_tokens,
    "pieces": pieces,
    "called": called.choices[0].message.tool_calls[0].function.name,
    "refusal": refusal,
}))
"""


@pytest.mark.slow  # its import alone takes many seconds
def test_litellm(server: Server) -> None:
    pytest.importorskip("litellm", reason="litellm isn't installed")
    told = subprocess.run(
        [sys.executable, "-c", _LITELLM, f"{server.url}/v1", json.dumps([WEATHER])],
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout.splitlines()[-1])
    assert found["whole"] == "".join(found["pieces"]) == TEXT
    assert found["tokens"] == len(SENTENCE) + 1
    assert found["called"] == "get_weather"
    assert "temperature" in found["refusal"]


# --- the demo model -----------------------------------------------------------------------------------------

CASES = json.loads((GOLDEN / "smollm2_greedy.json").read_text())["cases"]
DEMO = "smollm2-135m-instruct"
PROMPT = "The capital of France is"
SHORT_ANSWER = 12  # tokens


@pytest.fixture(scope="module")
def demo(demo_model_dir: Path) -> Iterator[Server]:
    with running_server("--model", str(demo_model_dir), "--device", "cpu", "--dtype", "float32") as started:
        yield started


@pytest.fixture(scope="module")
def engine(demo_model_dir: Path) -> Engine:
    return Engine(demo_model_dir, device="cpu", dtype="float32")


def check_golden(demo: Server, cases: list[dict[str, Any]]) -> None:
    """All at once, prompts as token ids."""

    def check(case: dict[str, Any]) -> None:
        body = {"model": DEMO, "prompt": case["prompt_ids"], "temperature": 0, "logprobs": 0}
        (choice,) = unstreamed(demo, "/v1/completions", {**body, "max_tokens": len(case["greedy_ids"])})
        ends = case["decoded"].endswith("<|im_end|>")
        assert choice.text == case["decoded"].removesuffix("<|im_end|>")
        assert choice.finish_reason == ("stop" if ends else "length")
        assert len(choice.logprobs["tokens"]) == len(case["greedy_ids"])  # the end's is among them

    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(check, cases))


@pytest.mark.demo
@pytest.mark.slow
def test_greedy_answers_are_the_golden_ones(demo: Server) -> None:
    check_golden(demo, [case for case in CASES if len(case["greedy_ids"]) <= SHORT_ANSWER])


@pytest.mark.demo
@pytest.mark.slow
def test_all_greedy_answers_are_the_golden_ones(demo: Server) -> None:
    check_golden(demo, CASES)


@pytest.mark.demo
@pytest.mark.slow
def test_a_dialog_is_written_as_the_golden_ones_were(demo: Server) -> None:
    case = next(case for case in CASES if case["kind"] == "chat")
    messages = [{"role": "user", "content": case["text"]}]
    assert demo.post("/v1/tokenize", {"messages": messages}).json["tokens"] == case["prompt_ids"]
    body = {"model": DEMO, "messages": messages, "temperature": 0, "max_tokens": len(case["greedy_ids"])}
    (choice,) = unstreamed(demo, "/v1/chat/completions", body)
    assert choice.text == case["decoded"].removesuffix("<|im_end|>")


WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "cool": {"temperature": 1.0, "seed": 5},
    "another seed": {"temperature": 1.0, "seed": 6},
    "hot": {"temperature": 2.0, "seed": 5},
    "top_k": {"temperature": 2.0, "seed": 5, "top_k": 2},
    "top_p": {"temperature": 2.0, "seed": 5, "top_p": 0.1},
    "min_p": {"temperature": 2.0, "seed": 5, "min_p": 0.5},
    "repetition_penalty": {"temperature": 0, "repetition_penalty": 50},
    "presence_penalty": {"temperature": 0, "presence_penalty": 2},
    "frequency_penalty": {"temperature": 0, "frequency_penalty": -2},
    "logit_bias": {"temperature": 0, "logit_bias": {"1000": 100}},
    "three": {"temperature": 1.0, "seed": 7, "n": 3},
    "stop": {"temperature": 0, "stop": " ", "min_tokens": 3},
    "stop_token_ids": {"temperature": 0, "stop_token_ids": [198]},
}


@pytest.mark.demo
@pytest.mark.slow
def test_every_wish_reaches_the_engine(demo: Server, engine: Engine) -> None:
    params = [
        SamplingParams(
            **{**wishes, "max_tokens": 8, "logit_bias": {int(i): b for i, b in bias.items()}},
        )
        for wishes in WISHES.values()
        for bias in [wishes.get("logit_bias", {})]
    ]
    results = engine.generate([PROMPT] * len(params), params)
    expected = [[(c.text, c.finish_reason) for c in result.completions] for result in results]
    assert len({answer for answers in expected for answer in answers}) >= len(WISHES)  # else one is idle

    def ask(wishes: dict[str, Any]) -> list[tuple[str, str | None]]:
        body = {"model": DEMO, "prompt": PROMPT, "max_tokens": 8, **wishes}
        return [(choice.text, choice.finish_reason) for choice in unstreamed(demo, "/v1/completions", body)]

    with ThreadPoolExecutor(len(WISHES)) as pool:
        assert list(pool.map(ask, WISHES.values())) == expected


@pytest.mark.demo
@pytest.mark.slow
def test_echoed_logprobs_are_the_engine_s(demo: Server, engine: Engine) -> None:
    """To the bit: a number that JSON carries is the same number."""
    result = engine.generate(PROMPT, SamplingParams(max_tokens=5, logprobs=3, prompt_logprobs=3))
    body = {"model": DEMO, "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logprobs": 3, "echo": True}
    for choice in (
        *unstreamed(demo, "/v1/completions", body),
        *streamed(demo, "/v1/completions", body),
    ):
        assert result.prompt_logprobs is not None
        assert result.logprobs is not None
        expected = [*result.prompt_logprobs, *result.logprobs]
        assert choice.text == PROMPT + result.text
        assert choice.logprobs["token_logprobs"] == [None if e is None else e.logprob for e in expected]
        assert choice.logprobs["tokens"] == [
            engine.tokenizer.decode([i]) for i in (*result.prompt_token_ids, *result.token_ids)
        ]
        for shown, token in zip(choice.logprobs["top_logprobs"], expected, strict=True):
            if token is not None:
                assert list(shown.values())[:3] == [logprob for _, logprob in token.top]


@pytest.mark.demo
@pytest.mark.slow
def test_a_real_model_keeps_to_a_schema(demo: Server) -> None:
    answer = client_of(demo, timeout=300).chat.completions.create(
        model=DEMO, messages=DIALOG, temperature=0, max_tokens=60, response_format=POINT_FORMAT
    )
    assert Point.model_validate_json(answer.choices[0].message.content, strict=True).x in range(10)


@pytest.mark.demo
@pytest.mark.slow
def test_a_real_model_calls_a_tool(demo: Server) -> None:
    client = client_of(demo, timeout=300)
    body = {"model": DEMO, "messages": DIALOG, "temperature": 0, "max_tokens": 60}
    called = client.chat.completions.create(
        **body, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    )
    message = called.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, called.choices[0].finish_reason) == ("get_weather", "tool_calls")
    assert set(json.loads(call.function.arguments)) == {"town", "days"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    dialog = {"messages": [*DIALOG, message, result], "max_tokens": 5}
    assert client.chat.completions.create(**{**body, **dialog}).choices[0].message.content
