"""Request bodies: what each field becomes, the words of each refusal, and JSON of any kind thrown at them."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from samir_vllm.extras.serve import bodies
from samir_vllm.extras.serve.api_errors import ApiError, bad_request, model_not_found
from samir_vllm.extras.serve.bodies import (
    ChatRequest,
    CompletionRequest,
    ModelFacts,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from samir_vllm.sampling import SamplingParams

FACTS = ModelFacts("tiny", ("tiny-alias",), context_len=500, vocab_size=1000, default_max_tokens=77)
HALF = "\ud83d"  # half a surrogate pair

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "the weather", "parameters": SCHEMA, "strict": True},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "town", "schema": SCHEMA, "strict": True}}

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hello"}
DIALOG: list[dict[str, Any]] = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "what "}, {"type": "text", "text": "time?"}]},
    {"role": "assistant", "tool_calls": [CALL], "content": None, "refusal": None, "function_call": None},
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    {"role": "assistant", "content": "noon", "tool_calls": None, "name": "Ann", "annotations": []},
]
# Every field that is obeyed, so that what is mutated below meets every check.
SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": -1,
    "frequency_penalty": 0.25,
    "logit_bias": {"5": -100, "999": 1.5},
    "seed": 7,
    "min_tokens": 3,
    "stop": ["a", "bc"],
    "stop_token_ids": [1, 999],
    "ignore_eos": True,
    "n": 2,
    "prompt_logprobs": 4,
}
FULL_CHAT = {
    **CHAT,
    **{name: value for name, value in SAMPLING.items() if name not in ("min_tokens", "ignore_eos")},
    "messages": DIALOG,
    "max_tokens": 9,
    "max_completion_tokens": 9,
    "logprobs": True,
    "top_logprobs": 3,
    "stream": False,
    "tools": [WEATHER, CLOCK],
    "tool_choice": {"type": "function", "function": {"name": "clock"}},
    "parallel_tool_calls": False,
    "user": "u",
}
FORMATTED_CHAT = {
    **CHAT,
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": JSON_SCHEMA,
}
FULL_COMPLETION = {
    **COMPLETION,
    **SAMPLING,
    "prompt": [[1, 2], [3]],
    "max_tokens": 9,
    "logprobs": 4,
    "echo": True,
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "best_of": 2,
    "suffix": None,
}
TOKENIZE_TEXT = {"prompt": "hello", "add_special_tokens": False, "model": "tiny"}
TOKENIZE_CHAT = {"messages": DIALOG, "tools": [CLOCK], "add_generation_prompt": False}
DETOKENIZE = {"tokens": [1, 2, 999], "model": "tiny"}


def chat(**changes: Any) -> ChatRequest:
    return parse_chat(read({**CHAT, **changes}), FACTS)


def completion(**changes: Any) -> CompletionRequest:
    return parse_completion(read({**COMPLETION, **changes}), FACTS)


def read(body: Any) -> Any:
    """The body as a server would read it."""
    return json.loads(json.dumps(body))


def params_of(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    return {field.name: getattr(request.params, field.name) for field in dataclasses.fields(SamplingParams)}


# --- what fields become -----------------------------------------------------------------------------------


def test_defaults_are_openais() -> None:
    request = chat()
    assert request.params == SamplingParams(temperature=1.0, max_tokens=77)
    assert request.messages == CHAT["messages"]
    assert (request.model, request.stream, request.include_usage) == ("tiny", False, False)
    assert (request.tools, request.tool_choice, request.parallel_tool_calls) == ([], "none", True)
    assert request.response_format is None
    other = completion()
    assert other.params == SamplingParams(temperature=1.0, max_tokens=16)
    assert (other.prompts, other.echo, other.generates) == (["hello"], False, True)


def test_every_sampling_field_arrives() -> None:
    expected = {
        **SAMPLING,
        "logit_bias": {5: -100, 999: 1.5},
        "stop": ("a", "bc"),
        "stop_token_ids": (1, 999),
    }
    assert set(SAMPLING) | {"max_tokens", "logprobs"} == {f.name for f in dataclasses.fields(SamplingParams)}
    assert params_of(completion(**SAMPLING, max_tokens=9, logprobs=2)) == {
        **expected,
        "max_tokens": 9,
        "logprobs": 2,
    }
    assert params_of(chat(**SAMPLING, max_tokens=9, logprobs=True, top_logprobs=2)) == {
        **expected,
        "max_tokens": 9,
        "logprobs": 2,
    }


def test_null_is_as_good_as_absent() -> None:
    names = (bodies._CHAT | bodies.HARMLESS | set(bodies.UNSUPPORTED_IN_CHAT)) - set(CHAT)
    assert chat(**dict.fromkeys(names)) == chat()
    names = (bodies._COMPLETION | bodies.HARMLESS | set(bodies.UNSUPPORTED_IN_COMPLETION)) - set(COMPLETION)
    assert completion(**dict.fromkeys(names)) == completion()
    assert (
        parse_tokenize({"prompt": "a", "messages": None, "tools": None, "model": None}, FACTS).prompt == "a"
    )


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_every_field_of_openais_is_known(kind: str) -> None:
    types = pytest.importorskip("openai.types")
    module = types.chat.completion_create_params if kind == "chat" else types.completion_create_params
    fields = set(module.CompletionCreateParamsStreaming.__annotations__)
    fields |= set(module.CompletionCreateParamsBase.__annotations__)
    assert {"model", "stream", "stop", "seed"} <= fields
    if kind == "chat":
        assert fields <= bodies._CHAT | bodies.HARMLESS | set(bodies.UNSUPPORTED_IN_CHAT)
    else:
        assert fields <= bodies._COMPLETION | bodies.HARMLESS | set(bodies.UNSUPPORTED_IN_COMPLETION)


def test_no_field_is_in_two_tables() -> None:
    for known, unsupported in (
        (bodies._CHAT, bodies.UNSUPPORTED_IN_CHAT),
        (bodies._COMPLETION, bodies.UNSUPPORTED_IN_COMPLETION),
    ):
        assert not known & bodies.HARMLESS
        assert not (known | bodies.HARMLESS) & set(unsupported)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "user": "u",
            "metadata": {"a": "b"},
            "store": True,
            "service_tier": "flex",
            "safety_identifier": "s",
        },
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}},
        {"modalities": ["text"], "functions": [], "function_call": "none", "reasoning_effort": "none"},
        {"verbosity": "medium", "audio": None, "prediction": None, "web_search_options": None},
        {"skip_special_tokens": True, "length_penalty": 1.0, "use_beam_search": False, "echo": False},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": False},
        {"response_format": {"type": "text"}, "logit_bias": {}, "stop": [], "top_logprobs": 0},
    ],
)
def test_harmless_fields_of_a_chat_are_taken(changes: dict[str, Any]) -> None:
    request = chat(**changes)
    assert dataclasses.replace(request, parallel_tool_calls=True) == chat()


def test_harmless_fields_of_a_completion_are_taken() -> None:
    assert completion(suffix="", best_of=1, user="u", add_special_tokens=True) == completion()
    assert completion(best_of=3, n=3) == completion(n=3)


def test_other_spellings() -> None:
    assert chat(model="tiny-alias").model == "tiny-alias"
    assert chat(top_k=-1).params == chat().params  # vLLM's off
    assert chat(seed=-1).params.seed == 2**64 - 1  # OpenAI's are signed
    assert chat(seed=-(2**63)).params.seed == 2**63
    assert chat(stop="x").params.stop == ("x",)
    assert chat(max_completion_tokens=5).params.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).params.max_tokens == 5
    assert chat(max_tokens=10**3000).params.max_tokens == FACTS.context_len
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=False).params.logprobs is None


def test_prompts_of_all_four_kinds() -> None:
    assert completion(prompt="").prompts == [""]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2, 999]).prompts == [[1, 2, 999]]
    assert completion(prompt=[[1], [2, 0]]).prompts == [[1], [2, 0]]
    assert len(completion(prompt=["a"] * 64, n=4).prompts) == 64


def test_echo() -> None:
    only = completion(max_tokens=0, echo=True, logprobs=1)
    assert (only.generates, only.echo) == (False, True)
    assert (only.params.max_tokens, only.params.logprobs, only.params.prompt_logprobs) == (1, 1, 1)
    both = completion(max_tokens=4, echo=True, logprobs=0, stream=True)
    assert (both.generates, both.params.max_tokens, both.params.prompt_logprobs) == (True, 4, 0)
    assert completion(echo=True).params.prompt_logprobs is None
    assert completion(logprobs=3).params.prompt_logprobs is None
    assert completion(prompt_logprobs=2).params.prompt_logprobs == 2


def test_usage_in_a_stream() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={"include_usage": None}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage
    assert completion(stream=True, stream_options={"include_usage": True}).include_usage


def test_messages() -> None:
    assert chat(messages=DIALOG).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what time?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        {"role": "assistant", "content": "noon", "name": "Ann"},
    ]
    beside = {"role": "assistant", "content": "wait", "tool_calls": [{**CALL, "index": 0}]}
    assert chat(messages=[beside]).messages == [{**beside, "tool_calls": [CALL]}]


def test_tools() -> None:
    request = chat(tools=[WEATHER, CLOCK])
    no_parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    assert request.tools == [
        WEATHER,
        {"type": "function", "function": {"name": "clock", "parameters": no_parameters}},
    ]
    assert request.tool_choice == "auto"
    untyped = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}
    assert chat(tools=[untyped]).tools[0]["function"]["parameters"] == {"type": "object", "properties": {}}
    for choice in ("none", "auto", "required", {"type": "function", "function": {"name": "clock"}}):
        assert chat(tools=[WEATHER, CLOCK], tool_choice=choice).tool_choice == choice


def test_the_body_is_left_as_it_was() -> None:
    body = {**FULL_CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
    body["tool_choice"] = "auto"
    before = copy.deepcopy(body)
    parse_chat(body, FACTS)
    assert body == before


def test_response_formats() -> None:
    assert chat(response_format={"type": "text"}).response_format is None
    assert chat(response_format={"type": "json_object"}).response_format == {"type": "json_object"}
    assert chat(response_format=JSON_SCHEMA).response_format == JSON_SCHEMA
    both = chat(response_format=JSON_SCHEMA, tools=[CLOCK])
    assert (both.response_format, both.tool_choice) == (JSON_SCHEMA, "auto")


def test_ends_may_be_moved_where_no_grammar_rules() -> None:
    request = chat(tools=[CLOCK], tool_choice="none", min_tokens=2, ignore_eos=True)
    assert (request.params.min_tokens, request.params.ignore_eos) == (2, True)
    assert not chat(tools=[CLOCK], min_tokens=0, ignore_eos=False).params.ignore_eos


def test_tokenize_and_detokenize() -> None:
    text = parse_tokenize({"prompt": "a"}, FACTS)
    assert (text.prompt, text.messages, text.add_special_tokens) == ("a", None, True)
    assert not parse_tokenize(TOKENIZE_TEXT, FACTS).add_special_tokens
    dialog = parse_tokenize(TOKENIZE_CHAT, FACTS)
    assert dialog.prompt is None
    assert dialog.messages == chat(messages=DIALOG).messages
    assert dialog.tools == chat(tools=[CLOCK]).tools
    assert not dialog.add_generation_prompt
    assert parse_tokenize({"messages": DIALOG}, FACTS).add_generation_prompt
    assert parse_detokenize(DETOKENIZE, FACTS).tokens == [1, 2, 999]
    assert parse_detokenize({"tokens": []}, FACTS).tokens == []


# --- refusals ---------------------------------------------------------------------------------------------

MISSING, TYPE, VALUE = "missing_required_parameter", "invalid_type", "invalid_value"
UNKNOWN, UNSUPPORTED = "unknown_parameter", "unsupported_parameter"


def message(**changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi", **changes}]}


def assistant(**changes: Any) -> dict[str, Any]:
    return message(role="assistant", content=None, **changes)


def tool(**changes: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **changes}}]}


def schema(**changes: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **changes}}
    }


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"not": value}
    return value


IN_BOTH: list[tuple[dict[str, Any], str, str | None, str]] = [
    ({"model": None}, "model is missing: give one", "model", MISSING),
    ({"model": 5}, "model must be a string, not 5", "model", TYPE),
    ({"maxtokens": 5}, 'unknown field "maxtokens": did you mean "max_tokens"?', "maxtokens", UNKNOWN),
    ({"zzz": None}, 'unknown field "zzz": leave it out', "zzz", UNKNOWN),
    ({"stream": 1}, "stream must be true or false, not 1", "stream", TYPE),
    (
        {"stream_options": {"include_usage": True}},
        "stream_options needs stream: set stream to true, or leave stream_options out",
        "stream_options",
        VALUE,
    ),
    (
        {"stream": True, "stream_options": {"include_usge": True}},
        'unknown field "include_usge" in stream_options: did you mean "include_usage"?',
        "stream_options.include_usge",
        UNKNOWN,
    ),
    (
        {"stream": True, "stream_options": {"include_usage": "yes"}},
        "stream_options.include_usage must be true or false, not 'yes'",
        "stream_options.include_usage",
        TYPE,
    ),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats True isn't supported: set it to false, or leave it out",
        "stream_options.continuous_usage_stats",
        UNSUPPORTED,
    ),
    ({"stream_options": 5}, "stream_options must be an object, not 5", "stream_options", TYPE),
    ({"temperature": "1"}, "temperature must be a number of 0 to 100, not '1'", "temperature", VALUE),
    ({"temperature": math.nan}, "temperature must be a number of 0 to 100, not nan", "temperature", VALUE),
    ({"temperature": True}, "temperature must be a number of 0 to 100, not True", "temperature", VALUE),
    ({"top_p": -math.inf}, "top_p must be a number of 0 to 1, not -inf", "top_p", VALUE),
    (
        {"presence_penalty": 3},
        "presence_penalty must be a number of -2 to 2, not 3",
        "presence_penalty",
        VALUE,
    ),
    ({"top_k": -2}, "top_k must be a whole number of at least 0, not -2", "top_k", VALUE),
    ({"n": 65}, "n must be a whole number of 1 to 64, not 65", "n", VALUE),
    ({"n": 1.0}, "n must be a whole number of 1 to 64, not 1.0", "n", VALUE),
    ({"seed": -(2**63) - 1}, f"seed must be None or a whole number of 0 to {2**64 - 1}", "seed", VALUE),
    ({"seed": True}, f"seed must be None or a whole number of 0 to {2**64 - 1}, not True", "seed", VALUE),
    (
        {"max_tokens": 5, "min_tokens": 6},
        "min_tokens must be a whole number of 0 to 5 (max_tokens), not 6",
        "min_tokens",
        VALUE,
    ),
    ({"max_tokens": True}, "max_tokens must be a whole number of at least", "max_tokens", TYPE),
    ({"max_tokens": -1}, "max_tokens must be a whole number of at least", "max_tokens", VALUE),
    ({"ignore_eos": "no"}, "ignore_eos must be true or false, not 'no'", "ignore_eos", TYPE),
    ({"logit_bias": [1]}, "logit_bias must be an object, not [1]", "logit_bias", TYPE),
    (
        {"logit_bias": {"1000": 1}},
        "logit_bias must map token ids of 0 to 999 to numbers, not '1000'",
        "logit_bias",
        VALUE,
    ),
    ({"logit_bias": {"01": 1}}, "logit_bias must map token ids of 0 to 999 to", "logit_bias", VALUE),
    ({"logit_bias": {" 1": 1}}, "logit_bias must map token ids of 0 to 999 to", "logit_bias", VALUE),
    ({"logit_bias": {"٣": 1}}, "logit_bias must map token ids of 0 to 999 to", "logit_bias", VALUE),
    (
        {"logit_bias": {"1": "x"}},
        "logit_bias of token 1 must be a number of -100 to 100",
        "logit_bias",
        VALUE,
    ),
    ({"stop": 5}, "stop must be a string or a list of strings, not 5", "stop", TYPE),
    ({"stop": ["a", None]}, "stop[1] must be a string, not None", "stop[1]", TYPE),
    ({"stop": ["a", HALF]}, "stop[1] holds half a surrogate pair", "stop[1]", VALUE),
    ({"stop": ""}, "a stop string must have 1 to 1024 characters, not 0", "stop", VALUE),
    (
        {"stop": ["x" * 1024] * 8 + ["x"]},
        "stop must have at most 8192 characters in all, not 8193",
        "stop",
        VALUE,
    ),
    ({"stop": ["x"] * 65}, "stop must hold at most 64 strings, not 65", "stop", VALUE),
    (
        {"logit_bias": {str(i): 0 for i in range(1025)}},
        "logit_bias must have at most 1024 tokens, not 1025",
        "logit_bias",
        VALUE,
    ),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids must hold at most 256 ids", "stop_token_ids", VALUE),
    ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, not 5", "stop_token_ids", TYPE),
    (
        {"stop_token_ids": [1, 1000]},
        "stop_token_ids[1] must be a token id, a whole number of 0 to 999, not 1000",
        "stop_token_ids[1]",
        VALUE,
    ),
    ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs can't be combined", "prompt_logprobs", VALUE),
    (
        {"use_beam_search": True},
        "use_beam_search True isn't supported: set it to false, or leave it out",
        "use_beam_search",
        UNSUPPORTED,
    ),
]

IN_CHATS: list[tuple[dict[str, Any], str, str | None, str]] = [
    ({"messages": None}, "messages is missing: give one", "messages", MISSING),
    ({"messages": "hi"}, "messages must be a list, not 'hi'", "messages", TYPE),
    ({"messages": []}, "messages must hold 1 to 4096 items, not 0", "messages", VALUE),
    ({"messages": [{}] * 4097}, "messages must hold 1 to 4096 items, not 4097", "messages", VALUE),
    ({"messages": ["hi"]}, "messages[0] must be an object, not 'hi'", "messages[0]", TYPE),
    (
        message(role="function"),
        "messages[0].role must be one of system, developer, user, assistant, tool, not 'function'",
        "messages[0].role",
        VALUE,
    ),
    (message(role=None), "messages[0].role is missing: give one", "messages[0].role", MISSING),
    (message(content=None), "messages[0].content is missing: give one", "messages[0].content", MISSING),
    (message(content=HALF), "messages[0].content holds half a surrogate", "messages[0].content", VALUE),
    (message(content=[]), "messages[0].content must be a string or a list of", "messages[0].content", TYPE),
    (
        message(content=[{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]),
        "messages[0].content[1].type 'image_url' isn't supported: this model reads text parts only",
        "messages[0].content[1].type",
        "unsupported_value",
    ),
    (
        message(content=[{"type": "input_audio"}]),
        "messages[0].content[0].type 'input_audio' isn't supported",
        "messages[0].content[0].type",
        "unsupported_value",
    ),
    (
        message(content=[{"type": "text", "text": 5}]),
        "messages[0].content[0].text must be a string, not 5",
        "messages[0].content[0].text",
        TYPE,
    ),
    (message(weight=0), 'unknown field "weight" in messages[0]: leave', "messages[0].weight", UNKNOWN),
    (message(tool_calls=[CALL]), 'unknown field "tool_calls" in mess', "messages[0].tool_calls", UNKNOWN),
    (message(role="tool"), "messages[0].tool_call_id is missing", "messages[0].tool_call_id", MISSING),
    (assistant(), "messages[0].content is missing: give one", "messages[0].content", MISSING),
    (assistant(tool_calls=[]), "messages[0].content is missing: give one", "messages[0].content", MISSING),
    (
        assistant(tool_calls=[{**CALL, "type": "custom"}]),
        "messages[0].tool_calls[0].type must be function, not 'custom'",
        "messages[0].tool_calls[0].type",
        VALUE,
    ),
    (
        assistant(tool_calls=[{**CALL, "function": {"name": "f", "arguments": {}}}]),
        "messages[0].tool_calls[0].function.arguments must be a string, not {}",
        "messages[0].tool_calls[0].function.arguments",
        TYPE,
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens must be a whole", "max_completion_tokens", VALUE),
    (
        {"max_tokens": 5, "max_completion_tokens": 6},
        "max_tokens 5 and max_completion_tokens 6 contradict each other: leave max_tokens out",
        "max_tokens",
        VALUE,
    ),
    ({"logprobs": 5}, "logprobs must be true or false, not 5", "logprobs", TYPE),
    ({"top_logprobs": 5}, "top_logprobs needs logprobs: set logprobs to true", "top_logprobs", VALUE),
    (
        {"logprobs": True, "top_logprobs": 21},
        "top_logprobs must be a whole number of 0 to 20, not 21",
        "top_logprobs",
        VALUE,
    ),
    ({"tools": {}}, "tools must be a list, not {}", "tools", TYPE),
    ({"tools": [CLOCK] * 129}, "tools must hold 0 to 128 items, not 129", "tools", VALUE),
    ({"tools": [{"type": "custom"}]}, "tools[0].type must be function, not 'custom'", "tools[0].type", VALUE),
    ({"tools": [{"type": "function"}]}, "tools[0].function is missing", "tools[0].function", MISSING),
    (tool(name="a b"), "tools[0].function.name must be 1 to 64 letters", "tools[0].function.name", VALUE),
    (tool(name="é"), "tools[0].function.name must be 1 to 64 letters", "tools[0].function.name", VALUE),
    (tool(name="a\n"), "tools[0].function.name must be 1 to 64 letters", "tools[0].function.name", VALUE),
    (
        tool(parameters={"type": "array"}),
        "tools[0].function.parameters.type must be object, not 'array'",
        "tools[0].function.parameters.type",
        VALUE,
    ),
    (
        tool(parameters=[]),
        "tools[0].function.parameters must be a JSON",
        "tools[0].function.parameters",
        TYPE,
    ),
    (
        tool(parameters=nested(64)),
        "tools[0].function.parameters is nested deeper than 64: flatten it",
        "tools[0].function.parameters",
        VALUE,
    ),
    (
        tool(parameters={"maximum": math.inf}),
        "tools[0].function.parameters holds inf, which JSON has no number for: give a finite one",
        "tools[0].function.parameters",
        VALUE,
    ),
    (
        tool(parameters={"properties": {HALF: {}}}),
        "tools[0].function.parameters holds half a surrogate pair",
        "tools[0].function.parameters",
        VALUE,
    ),
    (tool(strict="yes"), "tools[0].function.strict must be true or", "tools[0].function.strict", TYPE),
    (
        {"tools": [CLOCK, CLOCK]},
        "tools[1].function.name 'clock' is taken: rename one of both",
        "tools[1].function.name",
        VALUE,
    ),
    ({"tool_choice": "auto"}, "tool_choice needs tools: give tools, or leave it", "tool_choice", VALUE),
    (
        {"tools": [CLOCK], "tool_choice": "any"},
        "tool_choice must be one of none, auto, required, not 'any'",
        "tool_choice",
        VALUE,
    ),
    ({"tools": [CLOCK], "tool_choice": 5}, "tool_choice must be none, auto, required", "tool_choice", TYPE),
    (
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice.function.name 'f' is none of the tools: name one of them",
        "tool_choice.function.name",
        VALUE,
    ),
    (
        {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "tool_choice.type must be function, not 'allowed_tools'",
        "tool_choice.type",
        VALUE,
    ),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls must be true or false", "parallel_tool_calls", TYPE),
    (
        {"response_format": {"type": "grammar"}},
        "response_format.type must be one of text, json_object, json_schema, not 'grammar'",
        "response_format.type",
        VALUE,
    ),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema is missing: give one",
        "response_format.json_schema",
        MISSING,
    ),
    (
        {"response_format": {"type": "json_object", "json_schema": {}}},
        "response_format.json_schema {} isn't supported: leave it out",
        "response_format.json_schema",
        UNSUPPORTED,
    ),
    (
        schema(schema=None),
        "response_format.json_schema.schema is missing: give one",
        "response_format.json_schema.schema",
        MISSING,
    ),
    (
        schema(schema={"enum": [10**400]}),
        "response_format.json_schema.schema holds 10",
        "response_format.json_schema.schema",
        VALUE,
    ),
    (
        schema(shema={}),
        'unknown field "shema" in response_format.json_schema: did you mean "schema"?',
        "response_format.json_schema.shema",
        UNKNOWN,
    ),
    (
        {**schema(), "tools": [CLOCK], "tool_choice": "required"},
        "response_format can't be combined with a tool_choice that demands a call",
        "response_format",
        VALUE,
    ),
    (
        {**schema(), "tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}}},
        "response_format can't be combined with a tool_choice that demands a call",
        "response_format",
        VALUE,
    ),
    ({**schema(), "min_tokens": 1}, "min_tokens can't be combined with response_format", "min_tokens", VALUE),
    ({"tools": [CLOCK], "min_tokens": 1}, "min_tokens can't be combined with tools", "min_tokens", VALUE),
    ({**schema(), "n": 17}, "n must be at most 16 with response_format, not 17", "n", VALUE),
    (
        {"tools": [{**CLOCK, "function": {**CLOCK["function"], "parameters": {"enum": [0] * 20_000}}}]},
        "tools[0].function.parameters holds more than 20000 values: make it smaller",
        "tools[0].function.parameters",
        VALUE,
    ),
    ({"tools": [CLOCK], "ignore_eos": True}, "ignore_eos can't be combined with", "ignore_eos", VALUE),
    (
        {"response_format": {"type": "json_object"}, "ignore_eos": True},
        "ignore_eos can't be combined with response_format: leave one of them out",
        "ignore_eos",
        VALUE,
    ),
    ({"modalities": ["text", "audio"]}, "modalities ['text', 'audio'] isn't", "modalities", UNSUPPORTED),
    ({"functions": [{"name": "f"}]}, "functions [{'name': 'f'}] isn't supp", "functions", UNSUPPORTED),
    (
        {"web_search_options": {}},
        "web_search_options {} isn't supported: leave",
        "web_search_options",
        UNSUPPORTED,
    ),
    (
        {"reasoning_effort": "high"},
        "reasoning_effort 'high' isn't supported",
        "reasoning_effort",
        UNSUPPORTED,
    ),
    ({"length_penalty": True}, "length_penalty True isn't supported: set", "length_penalty", UNSUPPORTED),
    ({"use_beam_search": 0}, "use_beam_search 0 isn't supported: set it", "use_beam_search", UNSUPPORTED),
    ({"echo": True}, "echo True isn't supported: set it to false, or leave", "echo", UNSUPPORTED),
    ({"prompt": "hi"}, 'unknown field "prompt": leave it out', "prompt", UNKNOWN),
]

IN_COMPLETIONS: list[tuple[dict[str, Any], str, str | None, str]] = [
    ({"prompt": None}, "prompt is missing: give one", "prompt", MISSING),
    ({"prompt": 5}, "prompt must be a string, a list of strings, token ids, or a list", "prompt", TYPE),
    ({"prompt": []}, "prompt must be a string, a list of strings, token ids, or a list", "prompt", TYPE),
    ({"prompt": [[]]}, "prompt[0] has no token: give at least one", "prompt[0]", VALUE),
    ({"prompt": ["a", 5]}, "prompt[1] must be a string, not 5", "prompt[1]", TYPE),
    ({"prompt": [5, "a"]}, "prompt[1] must be a token id, a whole number of 0", "prompt[1]", TYPE),
    ({"prompt": [5, True]}, "prompt[1] must be a token id, a whole number of 0", "prompt[1]", TYPE),
    ({"prompt": [5, -1]}, "prompt[1] must be a token id, a whole number of 0", "prompt[1]", VALUE),
    ({"prompt": [[5], [1000]]}, "prompt[1][0] must be a token id, a whole number", "prompt[1][0]", VALUE),
    ({"prompt": [10**30]}, "prompt[0] must be a token id, a whole number of 0", "prompt[0]", VALUE),
    ({"prompt": ["a", HALF]}, "prompt[1] holds half a surrogate pair, which is", "prompt[1]", VALUE),
    (
        {"prompt": [1] * 501},
        "prompt has 501 tokens, the model's context holds 500: shorten it",
        "prompt",
        "context_length_exceeded",
    ),
    (
        {"prompt": ["a"] * 65, "n": 4},
        "65 prompts with n 4 ask for over 256 answers: send several requests",
        "prompt",
        VALUE,
    ),
    ({"max_tokens": 0}, "max_tokens 0 asks for nothing: give at least 1, or echo true", "max_tokens", VALUE),
    ({"logprobs": 21}, "logprobs must be a whole number of 0 to 20, not 21", "logprobs", VALUE),
    ({"logprobs": True}, "logprobs must be a whole number of 0 to 20, not True", "logprobs", TYPE),
    ({"echo": "yes"}, "echo must be true or false, not 'yes'", "echo", TYPE),
    (
        {"echo": True, "logprobs": 1, "prompt_logprobs": 2},
        "with echo, logprobs are the prompt's too: leave prompt_logprobs out",
        "prompt_logprobs",
        VALUE,
    ),
    (
        {"echo": True, "logprobs": 1, "prompt_logprobs": True},
        "prompt_logprobs must be a whole number of 0 to 20, not True",
        "prompt_logprobs",
        TYPE,
    ),
    ({"best_of": 2}, "best_of 2 isn't supported: set it to n (1), or leave it out", "best_of", UNSUPPORTED),
    ({"best_of": True}, "best_of must be a whole number of at least 1, not True", "best_of", TYPE),
    ({"suffix": "x"}, "suffix 'x' isn't supported: set it to \"\", or leave", "suffix", UNSUPPORTED),
    ({"max_completion_tokens": 5}, 'unknown field "max_completion_tok', "max_completion_tokens", UNKNOWN),
]


def refusal(parse: Callable[..., Any], body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body, FACTS)
    check_error(caught.value)
    return caught.value


def check_error(error: ApiError) -> None:
    """It can be sent, and is one line that a person can read."""
    shown = json.loads(json.dumps(error.body(), ensure_ascii=False).encode("utf-8"))
    assert set(shown) == {"error"}
    assert set(shown["error"]) == {"message", "type", "param", "code"}
    assert 0 < len(error.message) < 400
    assert error.message.isprintable()
    assert error.param is None or len(error.param) < 200
    assert error.code
    assert (error.status, error.code) == (404, "model_not_found") or error.status == 400


@pytest.mark.parametrize(("changes", "text", "param", "code"), IN_BOTH + IN_CHATS)
def test_refusals_of_chats(changes: dict[str, Any], text: str, param: str, code: str) -> None:
    error = refusal(parse_chat, read({**CHAT, **changes}))
    assert error.message.startswith(text)
    assert (error.status, error.type, error.param, error.code) == (400, "invalid_request_error", param, code)


@pytest.mark.parametrize(("changes", "text", "param", "code"), IN_BOTH + IN_COMPLETIONS)
def test_refusals_of_completions(changes: dict[str, Any], text: str, param: str, code: str) -> None:
    error = refusal(parse_completion, read({**COMPLETION, **changes}))
    assert error.message.startswith(text)
    assert (error.status, error.type, error.param, error.code) == (400, "invalid_request_error", param, code)


@pytest.mark.parametrize(
    ("parse", "body", "text", "param"),
    [
        (parse_tokenize, {}, "prompt is missing: give one", "prompt"),
        (parse_tokenize, {"prompt": [1]}, "prompt must be a string, not [1]", "prompt"),
        (parse_tokenize, {"prompt": "a", "tools": []}, "tools can't be combined with prompt", "tools"),
        (parse_tokenize, {"messages": DIALOG, "prompt": "a"}, "prompt can't be combined with mess", "prompt"),
        (parse_tokenize, {"prompt": "a", "stop": "b"}, 'unknown field "stop": leave it out', "stop"),
        (parse_detokenize, {}, "tokens is missing: give one", "tokens"),
        (parse_detokenize, {"tokens": "1"}, "tokens must be a list of token ids, not '1'", "tokens"),
        (parse_detokenize, {"tokens": [1, 1000]}, "tokens[1] must be a token id", "tokens[1]"),
        (parse_detokenize, {"tokens": [1], "token": 1}, 'unknown field "token": did you mean', "token"),
    ],
)
def test_other_refusals(parse: Callable[..., Any], body: Any, text: str, param: str) -> None:
    error = refusal(parse, body)
    assert error.message.startswith(text)
    assert error.param == param


PARSERS = [parse_chat, parse_completion, parse_tokenize, parse_detokenize]


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("body", [None, True, 5, 1.5, "text", [], [{}]])
def test_a_body_that_is_no_object(parse: Callable[..., Any], body: Any) -> None:
    error = refusal(parse, body)
    assert error.message.startswith("the body must be an object, not ")
    assert (error.status, error.param, error.code) == (400, None, TYPE)


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_chat, CHAT),
        (parse_completion, COMPLETION),
        (parse_tokenize, TOKENIZE_TEXT),
        (parse_detokenize, DETOKENIZE),
    ],
)
def test_another_model(parse: Callable[..., Any], body: dict[str, Any]) -> None:
    error = refusal(parse, {**body, "model": "gpt-4o"})
    assert error.message == "the model 'gpt-4o' is not served here: ask for 'tiny'"
    assert (error.status, error.type, error.param, error.code) == (
        404,
        "invalid_request_error",
        "model",
        "model_not_found",
    )


def test_hostile_names_are_shown_short_and_encodable() -> None:
    error = refusal(parse_chat, {**CHAT, HALF: 1})
    assert error.body()["error"]["param"] == "\\ud83d"
    assert "\\ud83d" in error.message
    error = refusal(parse_chat, {**CHAT, "a" * 10**6: 1})
    assert error.param == "a" * 61 + "..."
    error = refusal(parse_chat, {**CHAT, "a\n\x7f": 1})
    assert error.message == 'unknown field "a\\n\\u007f": leave it out'


def test_errors() -> None:
    error = ApiError(429, "busy", "rate_limit_error", code="queue_full", headers={"Retry-After": "1"})
    assert (str(error), error.headers) == ("busy", {"Retry-After": "1"})
    assert error.body() == {
        "error": {"message": "busy", "type": "rate_limit_error", "param": None, "code": "queue_full"}
    }
    for original in (error, bad_request("m", "p", "c"), bad_request("m"), model_not_found("m")):
        twin = pickle.loads(pickle.dumps(original))
        assert vars(twin) == vars(original)
        assert str(twin) == str(original)
    assert vars(bad_request("m")) == {
        "status": 400,
        "message": "m",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
        "headers": None,
    }


# --- anything at all --------------------------------------------------------------------------------------

BODIES: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (parse_chat, FULL_CHAT),
    (parse_chat, FORMATTED_CHAT),
    (parse_chat, {**CHAT, "min_tokens": 2, "ignore_eos": True, "stop": "x"}),
    (parse_completion, FULL_COMPLETION),
    (parse_completion, {**COMPLETION, "max_tokens": 0, "echo": True}),
    (parse_completion, {**COMPLETION, "prompt": ["a", "b"]}),
    (parse_tokenize, TOKENIZE_TEXT),
    (parse_tokenize, TOKENIZE_CHAT),
    (parse_detokenize, DETOKENIZE),
]
NAMES = sorted(
    {
        *(bodies._CHAT | bodies._COMPLETION | bodies.HARMLESS),
        *bodies.UNSUPPORTED_IN_CHAT,
        *bodies.UNSUPPORTED_IN_COMPLETION,
        *("role", "content", "type", "text", "tool_calls", "function", "name", "parameters", "json_schema"),
    }
)
TEXTS = st.text(st.characters(exclude_categories=()), max_size=6) | st.sampled_from(
    [HALF, "text", "function", "auto", "none", "json_schema", "user", "tiny", "1", "a" * 5000]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 1001)
    | st.sampled_from([2**63, 2**64, -(2**64), 10**400, -(10**4000)])
    | st.floats()
    | TEXTS
)
VALUES = st.recursive(
    SCALARS | st.builds(nested, st.sampled_from([900, 70, 63])),  # built anew: it may be changed
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(TEXTS | st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=8,
)


def outcome(parse: Callable[..., Any], body: Any) -> Any:
    """The request, which can be written as JSON, or None for an error that can be sent."""
    try:
        request = parse(body, FACTS)
    except ApiError as error:
        check_error(error)
        return None
    plain = dataclasses.asdict(request)
    plain.pop("params", None)
    json.dumps(plain, ensure_ascii=False, allow_nan=False).encode("utf-8")
    return request


def places(body: Any) -> list[tuple[Any, ...]]:
    """Paths of what lies in a JSON value, none longer than 12."""
    found: list[tuple[Any, ...]] = []
    pending: list[tuple[tuple[Any, ...], Any]] = [((), body)]
    while pending:
        path, value = pending.pop()
        if len(path) <= 12 and isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            inner = [((*path, key), item) for key, item in items]
            found += [place for place, _ in inner]
            pending += inner
    return found


@st.composite
def mutated(draw: st.DrawFn) -> tuple[Callable[..., Any], Any]:
    """A valid body that has been changed in one to three places: something else there, or gone, or new."""
    parse, body = draw(st.sampled_from(BODIES))
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(places(body)))
        parent = body
        for key in path:
            parent = parent[key]
        action = draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "replace":
            parent[last] = draw(VALUES)
        elif action == "remove" and len(body) > 1:
            del parent[last]
        elif isinstance(parent, dict):
            parent[draw(st.sampled_from(NAMES) | TEXTS)] = draw(VALUES)
        else:
            parent.append(draw(VALUES))
    return parse, body


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PARSERS), VALUES | st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6))
def test_any_json_gives_a_request_or_an_api_error(parse: Callable[..., Any], body: Any) -> None:
    outcome(parse, body)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(mutated())
@example((parse_chat, {**CHAT, **tool(parameters=nested(900))}))
def test_any_change_to_a_valid_body_gives_a_request_or_an_api_error(
    changed: tuple[Callable[..., Any], Any],
) -> None:
    outcome(*changed)


@pytest.mark.parametrize(("parse", "body"), BODIES)
def test_the_bodies_that_are_changed_are_valid(parse: Callable[..., Any], body: Any) -> None:
    assert outcome(parse, read(body)) is not None


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_no_field_is_passed_over(parse: Callable[..., Any]) -> None:
    """A value of a wrong type is refused under every name that isn't harmless, and blamed on it."""
    body = CHAT if parse is parse_chat else COMPLETION
    names = set(NAMES) - bodies.HARMLESS
    for name in names:
        blamed = refusal(parse, {**body, name: object()}).param
        assert blamed == name, name
