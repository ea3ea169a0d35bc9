"""What the server takes and gives, as an OpenAPI document.

A body that the document forbids is refused. The other way round it promises less: JSON Schema can't say that
two fields contradict each other, nor where the vocabulary ends. Bounds are those of `bodies` and of
`SamplingParams`. Knows no HTTP and no model but its name.

Sources: the OpenAPI Specification 3.1; JSON Schema, draft 2020-12.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from samir_vllm import __version__, sampling
from samir_vllm.extras.serve import bodies
from samir_vllm.extras.serve.shapes import LEAST_LOGPROB

Schema = dict[str, Any]

_NULL: Schema = {"type": "null"}
_ANYTHING: Schema = {}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TOKEN_IDS: Schema = {"type": "array", "items": _COUNT}
_LOGPROB: Schema = {"type": "number", "minimum": LEAST_LOGPROB, "maximum": 0}

_STATUSES = {
    400: "The request is wrong: `param` names the field.",
    401: "An API key is needed.",
    404: "The model isn't served here.",
    405: "The path takes another method.",
    408: "The body took too long, or the stream was read too slowly.",
    413: "The body is too large.",
    415: "The body isn't JSON.",
    429: "Too many requests wait.",
    500: "The server failed.",
    503: "The engine is starting, or the server is shutting down.",
}
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    405: {"Allow": "The path's methods."},
    429: {"Retry-After": "Seconds."},
    503: {"Retry-After": "Seconds."},
}


def document(model_name: str, aliases: Sequence[str] = ()) -> dict[str, Any]:
    """The document, ready for JSON.

    Args:
        model_name: the model's.
        aliases: what else a request's ``model`` may be.
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "samir_vllm",
            "version": __version__,
            "summary": "Llama inference behind OpenAI's API",
            "description": "A field that would change the answer and can't be obeyed is refused.",
        },
        "paths": _paths(model_name),
        "components": {
            "schemas": {**_request_schemas([model_name, *aliases]), **_answer_schemas(), **_other_schemas()},
            "responses": {f"Error{status}": _error_response(status) for status in _STATUSES},
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
        },
    }


# --- paths ------------------------------------------------------------------------------------------------


def _paths(model_name: str) -> dict[str, Any]:
    parameter = {
        "name": "model",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
        "example": model_name,
    }
    return {
        "/": _open("page", "A page to chat with the model", {"text/html": {"schema": {"type": "string"}}}),
        "/health": _health(),
        "/metrics": _open(
            "metrics", "Figures for Prometheus", {"text/plain": {"schema": {"type": "string"}}}
        ),
        "/openapi.json": _open("openapi", "This document", _json({"type": "object"})),
        "/v1/models": _get("models", "The model, under all its names", "ModelList"),
        "/v1/models/{model}": {
            **_get("model", "One name of the model", "Model", 404),
            "parameters": [parameter],
        },
        "/v1/chat/completions": _post(
            "chat", "The next message of a dialog", "ChatRequest", "ChatCompletion", "ChatCompletionChunk"
        ),
        "/v1/completions": _post(
            "completions",
            "What comes after each of some texts",
            "CompletionRequest",
            "Completion",
            "CompletionChunk",
        ),
        "/v1/tokenize": _post("tokenize", "Token ids of a text or a dialog", "TokenizeRequest", "Tokens"),
        "/v1/detokenize": _post("detokenize", "The text of token ids", "DetokenizeRequest", "Text"),
    }


def _open(operation: str, summary: str, content: dict[str, Any]) -> dict[str, Any]:
    """A path that needs no key."""
    responses = {"200": {"description": summary, "content": content}, **_errors(405, 500)}
    return {"get": {"operationId": operation, "summary": summary, "security": [], "responses": responses}}


def _health() -> dict[str, Any]:
    path = _open("health", "How busy the server is", _json(_ref("Health")))
    path["get"]["responses"]["503"] = {
        "description": "No requests are taken, at least for now.",
        "content": _json(_ref("Health")),
    }
    return path


def _get(operation: str, summary: str, schema: str, *statuses: int) -> dict[str, Any]:
    responses = {
        "200": {"description": summary, "content": _json(_ref(schema))},
        **_errors(401, 405, 500, *statuses),
    }
    return {
        "get": {"operationId": operation, "summary": summary, "security": _keyed(), "responses": responses}
    }


def _post(operation: str, summary: str, takes: str, gives: str, event: str | None = None) -> dict[str, Any]:
    """``event``: of the stream that comes if the body asks for it; None: there is none, nor an engine."""
    content, statuses = _json(_ref(gives)), set(_STATUSES)
    if event is None:
        statuses -= {429, 503}
    else:
        content["text/event-stream"] = {"schema": _stream(event)}
    responses = {"200": {"description": summary, "content": content}, **_errors(*statuses)}
    return {
        "post": {
            "operationId": operation,
            "summary": summary,
            "security": _keyed(),
            "requestBody": {"required": True, "content": _json(_ref(takes))},
            "responses": responses,
        }
    }


def _stream(event: str) -> Schema:
    """Of each event, as is the custom before OpenAPI 3.2."""
    chunk = {
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_ref(event), _ref("Error")]},
    }
    return {
        "type": "object",
        "properties": {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, chunk]}},
        "required": ["data"],
        "description": "With `stream`: an event each time that there is more to tell, `[DONE]` the last. "
        "An error, where the answer fails midway, ends the stream, too.",
    }


def _keyed() -> list[dict[str, list[str]]]:
    return [{}, {"apiKey": []}]  # whether a key is needed is for whoever starts the server to say


def _errors(*statuses: int) -> dict[str, Any]:
    return {str(status): {"$ref": f"#/components/responses/Error{status}"} for status in sorted(statuses)}


def _error_response(status: int) -> dict[str, Any]:
    response: dict[str, Any] = {"description": _STATUSES[status], "content": _json(_ref("Error"))}
    if headers := _HEADERS.get(status):
        response["headers"] = {
            name: {"description": description, "schema": {"type": "string"}}
            for name, description in headers.items()
        }
    return response


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


# --- what is asked ----------------------------------------------------------------------------------------


def _request_schemas(model_names: list[str]) -> dict[str, Schema]:
    model: Schema = {"type": "string", "enum": model_names}
    return {
        "ChatRequest": _chat_request(model),
        "CompletionRequest": _completion_request(model),
        "TokenizeRequest": _tokenize_request(model),
        "DetokenizeRequest": _object({"tokens": _TOKEN_IDS}, {"model": _maybe(model)}),
        "Message": {"anyOf": [_plain_message(), _assistant_message(), _calling_message(), _tool_message()]},
        "TextParts": _text_parts(),
        "PastCalls": _past_calls(),
        "Tool": _tool(),
    }


def _chat_request(model: Schema) -> Schema:
    at_least_one = {"type": "integer", "minimum": 1}
    return _object(
        {"model": model, "messages": _messages()},
        {
            **_shared(bodies.UNSUPPORTED_IN_CHAT),
            "max_tokens": _maybe(at_least_one, "New tokens at most; what the context holds, if left out."),
            "max_completion_tokens": _maybe(at_least_one, "The same as `max_tokens`."),
            "logprobs": _flag("Each new token comes with its log-probability."),
            "top_logprobs": _maybe(
                _within(0, sampling.MAX_LOGPROBS), "With `logprobs`: alternatives to each token."
            ),
            "tools": _maybe({"type": "array", "items": _ref("Tool"), "maxItems": bodies.MAX_TOOLS}),
            "tool_choice": _tool_choice(),
            "parallel_tool_calls": _flag("Whether an answer may call more than one tool; true if left out."),
            "response_format": _response_format(),
        },
    )


def _completion_request(model: Schema) -> Schema:
    text, ids = {"type": "string", "minLength": 1}, {**_TOKEN_IDS, "minItems": 1}
    texts: Schema = {"type": "array", "items": text, "minItems": 1, "maxItems": bodies.MAX_COMPLETIONS}
    return _object(
        {
            "model": model,
            "prompt": {
                "anyOf": [text, texts, ids, {**texts, "items": ids}],
                "description": f"Prompts times `n` are at most {bodies.MAX_COMPLETIONS}.",
            },
        },
        {
            **_shared(bodies.UNSUPPORTED_IN_COMPLETION),
            "max_tokens": _maybe(
                _COUNT,
                f"New tokens at most; {bodies.DEFAULT_COMPLETION_TOKENS} if left out. 0 with `echo` only.",
            ),
            "logprobs": _maybe(
                _within(0, sampling.MAX_LOGPROBS), "Alternatives to each token; with `echo` the prompt's too."
            ),
            "echo": _flag("The prompt comes before each answer."),
            "best_of": _maybe({"type": "integer", "minimum": 1}, "Nothing but `n`."),
        },
    )


def _tokenize_request(model: Schema) -> Schema:
    of_prompt = {"prompt": {"type": "string"}}
    prompt_options = {"add_special_tokens": _flag("Whether the text begins as the model's texts do.")}
    of_dialog = {"messages": _messages()}
    dialog_options = {
        "tools": _maybe({"type": "array", "items": _ref("Tool"), "maxItems": bodies.MAX_TOOLS}),
        "add_generation_prompt": _flag("Whether the next message's opening comes last."),
    }
    named = {"model": _maybe(model)}
    return {
        "anyOf": [
            _object(
                of_prompt, {**named, **prompt_options, **dict.fromkeys((*of_dialog, *dialog_options), _NULL)}
            ),
            _object(
                of_dialog, {**named, **dialog_options, **dict.fromkeys((*of_prompt, *prompt_options), _NULL)}
            ),
        ]
    }


def _shared(unsupported: Mapping[str, tuple[Any, ...]]) -> dict[str, Schema]:
    """Fields of both kinds of answers."""
    numbers = {
        name: _maybe({"type": "number", "minimum": least, "maximum": most})
        for name, (least, most) in sampling.NUMBER_BOUNDS.items()
    }
    least_seed, most_seed = sampling.OPTIONAL_WHOLE_BOUNDS["seed"]
    return {
        **numbers,
        "temperature": _described(numbers["temperature"], "0 takes the likeliest token; 1 if left out."),
        "top_k": _maybe({"type": "integer", "minimum": -1}, "Only the k likeliest tokens; 0 and -1: all."),
        "seed": _maybe(_within(-(most_seed + 1) // 2, most_seed), f"Below {least_seed} modulo 2^64."),
        "n": _maybe(_within(*sampling.WHOLE_BOUNDS["n"]), "Answers to each prompt."),
        "min_tokens": _maybe(_COUNT, "Before so many nothing ends the answer; at most `max_tokens`."),
        "prompt_logprobs": _maybe(_within(0, sampling.MAX_LOGPROBS), "Not with `stream`."),
        "ignore_eos": _flag("Go on past the model's own end."),
        "stop": _stop(),
        "stop_token_ids": _maybe(_TOKEN_IDS, "Ids that end the answer, as the model's own do."),
        "logit_bias": _logit_bias(),
        "stream": _flag("The answer comes in events, as it is generated."),
        "stream_options": _stream_options(),
        **{name: {"description": "Taken and ignored."} for name in sorted(bodies.HARMLESS)},
        **{name: _neutral(values) for name, values in unsupported.items()},
    }


def _stop() -> Schema:
    text = {"type": "string", "minLength": 1, "maxLength": sampling.MAX_STOP_CHARS}
    return {
        "anyOf": [text, {"type": "array", "items": text, "maxItems": sampling.MAX_STOPS}, _NULL],
        "description": "The answer ends before the first of these, "
        f"which have at most {bodies.MAX_ALL_STOP_CHARS} characters in all.",
    }


def _logit_bias() -> Schema:
    least, most = sampling.BIAS_BOUNDS
    return {
        "type": ["object", "null"],
        "propertyNames": {"pattern": f"^({bodies.TOKEN_ID.pattern})$"},
        "additionalProperties": {"type": "number", "minimum": least, "maximum": most},
        "maxProperties": sampling.MAX_LOGIT_BIAS,
        "description": "Token id to what is added to its logit.",
    }


def _stream_options() -> Schema:
    known = {
        "include_usage": _flag("The last event before `[DONE]` has the token counts, and no choices."),
        "include_obfuscation": {"description": "Taken and ignored."},
        "continuous_usage_stats": _neutral((False,)),
    }
    return _maybe(_object({}, known), "With `stream` only.")


def _messages() -> Schema:
    return {"type": "array", "items": _ref("Message"), "minItems": 1, "maxItems": bodies.MAX_MESSAGES}


def _message(required: Mapping[str, Schema], optional: Mapping[str, Schema]) -> Schema:
    """Null in a field that isn't known is what comes back of an answer."""
    return {
        **_object(required, {**optional, "name": _maybe({"type": "string"})}),
        "additionalProperties": _NULL,
    }


def _plain_message() -> Schema:
    roles = {"type": "string", "enum": ["system", "developer", "user"]}
    return _message({"role": roles, "content": _ref("TextParts")}, {})


def _assistant_message() -> Schema:
    calls = {"anyOf": [_ref("PastCalls"), _NULL]}
    role = {"type": "string", "enum": ["assistant"]}
    return _message(
        {"role": role, "content": _ref("TextParts")}, {"tool_calls": calls, "annotations": _ANYTHING}
    )


def _calling_message() -> Schema:
    role = {"type": "string", "enum": ["assistant"]}
    calls = {"allOf": [_ref("PastCalls")], "minItems": 1}
    return _message({"role": role, "tool_calls": calls}, {"content": _NULL, "annotations": _ANYTHING})


def _tool_message() -> Schema:
    role = {"type": "string", "enum": ["tool"]}
    return _message({"role": role, "content": _ref("TextParts"), "tool_call_id": {"type": "string"}}, {})


def _text_parts() -> Schema:
    part = {
        **_object(
            {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
            {"prompt_cache_breakpoint": _ANYTHING},
        ),
        "additionalProperties": _NULL,
    }
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": part, "minItems": 1}]}


def _past_calls() -> Schema:
    function = _object({"name": {"type": "string"}, "arguments": {"type": "string"}}, {})
    call = _object(
        {
            "id": {"type": "string"},
            "type": {"type": "string", "enum": ["function"]},
            "function": {**function, "additionalProperties": _NULL},
        },
        {"index": _ANYTHING},
    )
    return {
        "type": "array",
        "items": {**call, "additionalProperties": _NULL},
        "maxItems": bodies.MAX_TOOLS,
    }


def _tool() -> Schema:
    parameters = {
        "type": ["object", "null"],
        "properties": {"type": {"type": "string", "enum": ["object"]}},
        "description": "A JSON schema of the arguments. Null: there are none.",
    }
    function = _object(
        {"name": _name()},
        {"description": _maybe({"type": "string"}), "parameters": parameters, "strict": _flag()},
    )
    return _object({"type": {"type": "string", "enum": ["function"]}, "function": function}, {})


def _tool_choice() -> Schema:
    named = _object(
        {"type": {"type": "string", "enum": ["function"]}, "function": _object({"name": _name()}, {})}, {}
    )
    words = {"type": "string", "enum": ["none", "auto", "required"]}
    return {"anyOf": [words, named, _NULL], "description": "With `tools`; auto if left out."}


def _response_format() -> Schema:
    described = _object(
        {"name": _name(), "schema": {"type": "object"}},
        {"strict": _flag(), "description": _maybe({"type": "string"})},
    )
    return {
        "anyOf": [
            _object({"type": {"type": "string", "enum": ["text", "json_object"]}}, {"json_schema": _NULL}),
            _object({"type": {"type": "string", "enum": ["json_schema"]}, "json_schema": described}, {}),
            _NULL,
        ],
        "description": "The form that the answer keeps to, whatever the model would say.",
    }


# --- what is answered -------------------------------------------------------------------------------------


def _answer_schemas() -> dict[str, Schema]:
    finish = {"type": "string", "enum": ["stop", "length"]}
    chat_finish = {"type": "string", "enum": [*finish["enum"], "tool_calls"]}
    message = _object(
        {"role": {"const": "assistant"}, "content": _maybe({"type": "string"}), "refusal": _NULL},
        {"tool_calls": {"type": "array", "items": _call(), "minItems": 1}},
    )
    logprobs = {"anyOf": [_ref("ChatLogprobs"), _NULL]}
    chat_choice = _object(
        {"index": _COUNT, "message": message, "logprobs": logprobs, "finish_reason": chat_finish}, {}
    )
    chat_event = {
        "index": _COUNT,
        "delta": _delta(),
        "logprobs": logprobs,
        "finish_reason": _maybe(chat_finish),
    }
    piece = {
        "index": _COUNT,
        "text": {"type": "string"},
        "logprobs": {"anyOf": [_ref("CompletionLogprobs"), _NULL]},
    }
    return {
        "ChatCompletion": _answer(
            "chat.completion", chat_choice, {"prompt_logprobs": _ref("PromptLogprobs")}
        ),
        "ChatCompletionChunk": _event("chat.completion.chunk", _object(chat_event, {})),
        "Completion": _answer(
            "text_completion",
            _object({**piece, "finish_reason": finish}, {"prompt_logprobs": _ref("PromptLogprobs")}),
        ),
        "CompletionChunk": _event("text_completion", _object({**piece, "finish_reason": _maybe(finish)}, {})),
        "Usage": _usage(),
        **_logprob_schemas(),
    }


def _front(kind: str) -> dict[str, Schema]:
    return {
        "id": {"type": "string"},
        "object": {"const": kind},
        "created": {**_COUNT, "description": "Unix time, seconds."},
        "model": {"type": "string"},
    }


def _answer(kind: str, choice: Schema, optional: Mapping[str, Schema] | None = None) -> Schema:
    choices = {"type": "array", "items": choice, "minItems": 1}
    return _object({**_front(kind), "choices": choices, "usage": _ref("Usage")}, optional or {})


def _event(kind: str, choice: Schema) -> Schema:
    choices = {"type": "array", "items": choice, "maxItems": 1}
    usage = {"anyOf": [_ref("Usage"), _NULL], "description": "Null until the last, if it was asked for."}
    return _object({**_front(kind), "choices": choices}, {"usage": usage})


def _delta() -> Schema:
    call = _object(
        {
            "index": _COUNT,
            "function": _object({"arguments": {"type": "string"}}, {"name": {"type": "string"}}),
        },
        {"id": {"type": "string"}, "type": {"const": "function"}},
    )
    return _object(
        {},
        {
            "role": {"const": "assistant"},
            "content": {"type": "string"},
            "refusal": _NULL,
            "tool_calls": {"type": "array", "items": call, "minItems": 1},
        },
    )


def _call() -> Schema:
    arguments = {"type": "string", "description": "JSON, cut off if the answer was."}
    function = _object({"name": {"type": "string"}, "arguments": arguments}, {})
    return _object({"id": {"type": "string"}, "type": {"const": "function"}, "function": function}, {})


def _usage() -> Schema:
    counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT)
    return _object(counts, {"prompt_tokens_details": _object({"cached_tokens": _COUNT}, {})})


def _logprob_schemas() -> dict[str, Schema]:
    data = {"type": "array", "items": _within(0, 255), "description": "Its UTF-8."}
    token = {"token": {"type": "string"}, "logprob": _LOGPROB, "bytes": data}
    alternatives = {"type": "array", "items": _object(token, {}), "maxItems": sampling.MAX_LOGPROBS}
    content = {"type": "array", "items": _object({**token, "top_logprobs": alternatives}, {})}
    by_text = {"type": ["object", "null"], "additionalProperties": _LOGPROB}
    ranked = _object(
        {"logprob": _LOGPROB, "rank": _maybe(_within(1, None)), "decoded_token": {"type": "string"}}, {}
    )
    lists = {
        "tokens": {"type": "string"},
        "token_logprobs": _maybe(_LOGPROB),
        "top_logprobs": by_text,
        "text_offset": _COUNT,
    }
    return {
        "ChatLogprobs": _object({"content": content, "refusal": _NULL}, {}),
        "CompletionLogprobs": _object(
            {name: {"type": "array", "items": items} for name, items in lists.items()}, {}
        ),
        "PromptLogprobs": {
            "type": "array",
            "items": {"type": ["object", "null"], "additionalProperties": ranked},
            "description": "For each token of the prompt, id to log-probability; null for the first.",
        },
    }


def _other_schemas() -> dict[str, Schema]:
    text = {"type": "string"}
    card: dict[str, Schema] = {
        "id": text,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": text,
        "max_model_len": _COUNT,
    }
    error: dict[str, Schema] = {"message": text, "type": text, "param": _maybe(text), "code": _maybe(text)}
    health: dict[str, Schema] = {
        "status": {"type": "string", "enum": ["ok", "starting", "draining"]},
        "model": text,
        "running": _COUNT,
        "waiting": _COUNT,
        "kv_pages": _object({"used": _COUNT, "total": _COUNT}, {}),
    }
    return {
        "Model": _object(card, {}),
        "ModelList": _object(
            {"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}}, {}
        ),
        "Tokens": _object({"count": _COUNT, "max_model_len": _COUNT, "tokens": _TOKEN_IDS}, {}),
        "Text": _object({"prompt": text}, {}),
        "Health": _object(health, {}),
        "Error": _object({"error": _object(error, {})}, {}),
    }


# --- pieces of schemas ------------------------------------------------------------------------------------


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema]) -> Schema:
    """An object of these fields and no others."""
    schema: Schema = {
        "type": "object",
        "properties": {**required, **optional},
        "additionalProperties": False,
    }
    return {**schema, "required": list(required)} if required else schema


def _maybe(schema: Schema, description: str = "") -> Schema:
    """The schema, which has one type, or null."""
    nullable = {**schema, "type": [schema["type"], "null"]}
    if "enum" in schema:
        nullable["enum"] = [*schema["enum"], None]
    return _described(nullable, description)


def _described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description} if description else schema


def _flag(description: str = "") -> Schema:
    return _maybe({"type": "boolean"}, description)


def _within(least: int, most: int | None) -> Schema:
    bounds: Schema = {"type": "integer", "minimum": least}
    return bounds if most is None else {**bounds, "maximum": most}


def _name() -> Schema:
    return {"type": "string", "pattern": f"^{bodies.NAME.pattern}$"}


def _neutral(values: Iterable[Any]) -> Schema:
    """A field that isn't supported: the values that ask for nothing."""
    found: list[Any] = []
    for value in (*values, None):
        if value not in found:  # 1 and 1.0 are one number in JSON
            found.append(value)
    return {"enum": found, "description": "Not supported beyond these."}
