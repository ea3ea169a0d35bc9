"""Request bodies: parsed JSON, whatever it is, becomes a request of checked fields, or an `ApiError`.

An error names the field. A field that would change the answer is obeyed or refused, never passed over; one
that can't change it is taken and forgotten. ``null`` is as good as absent. Names and defaults are OpenAI's
(``CompletionCreateParams`` of the ``openai`` package, of both endpoints), beside them those of
`SamplingParams`.

Knows the model by `ModelFacts` alone: no tokenizer, no chat format, no grammar, no engine, no HTTP.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from samir_vllm.config import show
from samir_vllm.errors import RequestError, one_line
from samir_vllm.extras.serve.api_errors import ApiError, bad_request, model_not_found
from samir_vllm.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOPS, SamplingParams

MAX_ALL_STOP_CHARS = 8192
"""Most characters of all of a request's stop strings: the search for them is built in time with these."""

MAX_STOP_IDS = 256
"""Most ``stop_token_ids``."""

MAX_PARTS = 1024
"""Most parts of a message's content."""

MAX_VALUES = 20_000
"""Most JSON values, names included, in what is handed on as it came."""

MAX_CONSTRAINED = 16
"""Most answers to one request that keep to a grammar: each costs the engine time at every step."""

MAX_MESSAGES = 4096
"""Most messages of a dialog."""

MAX_TOOLS = 128
"""Most tools of a request."""

MAX_COMPLETIONS = 256
"""Most answers to one completion request, over all its prompts."""

MAX_DEPTH = 64
"""Deepest nesting of what is handed on as it came: tools, their schemas, response formats."""

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's ``max_tokens`` of a completion."""

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

# Fields of SamplingParams that both endpoints take under their own names, with a value as it stands.
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "min_tokens", "n", "prompt_logprobs",
)  # fmt: skip

_SHARED = {
    *_SAMPLING,
    *("model", "stream", "stream_options", "max_tokens", "logprobs", "logit_bias"),
    *("stop", "stop_token_ids", "ignore_eos"),
}
_CHAT = {
    *_SHARED,
    *("messages", "max_completion_tokens", "top_logprobs"),
    *("tools", "tool_choice", "parallel_tool_calls", "response_format"),
}
_COMPLETION = {*_SHARED, "prompt", "echo", "best_of"}

# For whoever runs many users' requests elsewhere; no answer depends on them here.
HARMLESS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
}

# Fields that ask for what we can't do, with the values that ask for nothing (null always does). The last of
# each are vLLM's.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}
UNSUPPORTED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    **_UNSUPPORTED,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "echo": (False,),
}
UNSUPPORTED_IN_COMPLETION: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    **_UNSUPPORTED,
    "add_special_tokens": (True,),
}

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a request is checked against."""

    name: str  # the model's
    aliases: tuple[str, ...]  # other names a request may call it by
    context_len: int  # tokens of prompt and answer
    vocab_size: int  # ids are below this
    default_max_tokens: int  # of a chat that names no bound


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request for the next message of a dialog."""

    model: str  # as the request spelt it
    messages: list[dict[str, Any]]
    """``role`` system, user, assistant or tool; ``content`` a str, or None beside ``tool_calls``; perhaps
    ``name``, ``tool_calls``, ``tool_call_id``."""
    params: SamplingParams
    stream: bool
    include_usage: bool
    tools: list[dict[str, Any]]
    """``{"type": "function", "function": {"name", "parameters"}}`` and perhaps ``description``, ``strict``;
    ``parameters`` is an object's schema."""
    tool_choice: str | dict[str, Any]  # none, auto, required, or {"type": "function", "function": {"name"}}
    parallel_tool_calls: bool
    response_format: dict[str, Any] | None  # None: text


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked request to go on with texts."""

    model: str  # as the request spelt it
    prompts: list[str | list[int]]  # texts or token ids
    params: SamplingParams
    stream: bool
    include_usage: bool
    echo: bool
    generates: (
        bool  # False: the prompt alone is wanted back, and the one token of ``params`` is to be dropped
    )


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A checked request for the token ids of a text or of a dialog: one of both is None."""

    prompt: str | None
    messages: list[dict[str, Any]] | None  # as in `ChatRequest`
    tools: list[dict[str, Any]]  # as in `ChatRequest`
    add_special_tokens: bool
    add_generation_prompt: bool


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """A checked request for the text of token ids."""

    tokens: list[int]


def parse_chat(body: Any, facts: ModelFacts) -> ChatRequest:
    """The request in the body of ``/v1/chat/completions``.

    Args:
        body: what ``json.loads`` gave.
        facts: the model's.

    Raises:
        ApiError: 404 for another model, 400 for anything else that is wrong.
    """
    fields = _Object(body)
    fields.check_names(_CHAT | HARMLESS, UNSUPPORTED_IN_CHAT)
    model = _model(fields, facts)
    messages = _messages(fields)
    tools = _tools(fields)
    request = ChatRequest(
        model=model,
        messages=messages,
        params=_params(fields, facts, _chat_tokens(fields, facts), logprobs=_chat_logprobs(fields)),
        stream=fields.flag("stream", False),
        include_usage=_include_usage(fields),
        tools=tools,
        tool_choice=_tool_choice(fields, tools),
        parallel_tool_calls=fields.flag("parallel_tool_calls", True),
        response_format=_response_format(fields),
    )
    if request.stream and request.params.prompt_logprobs is not None:
        raise _clash("prompt_logprobs", "stream")
    _check_constraints(request)
    return request


def parse_completion(body: Any, facts: ModelFacts) -> CompletionRequest:
    """The request in the body of ``/v1/completions``. Arguments and errors as of `parse_chat`."""
    fields = _Object(body)
    fields.check_names(_COMPLETION | HARMLESS, UNSUPPORTED_IN_COMPLETION)
    model = _model(fields, facts)
    echo, stream = fields.flag("echo", False), fields.flag("stream", False)
    max_tokens = fields.whole("max_tokens", 0)
    if max_tokens == 0 and not echo:
        raise _invalid("max_tokens", "max_tokens 0 asks for nothing: give at least 1, or echo true")
    logprobs = fields.whole("logprobs", 0, MAX_LOGPROBS)
    prompt_logprobs = fields.whole("prompt_logprobs", 0, MAX_LOGPROBS)
    if echo and logprobs is not None:
        if prompt_logprobs is not None and prompt_logprobs != logprobs:
            raise _invalid(
                "prompt_logprobs", "with echo, logprobs are the prompt's too: leave prompt_logprobs out"
            )
        prompt_logprobs = logprobs
    elif stream and prompt_logprobs is not None:
        raise _clash("prompt_logprobs", "stream")
    tokens = DEFAULT_COMPLETION_TOKENS if max_tokens is None else max(1, max_tokens)
    params = _params(fields, facts, tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    _check_best_of(fields, params.n)
    return CompletionRequest(
        model=model,
        prompts=_prompts(fields, facts, params.n),
        params=params,
        stream=stream,
        include_usage=_include_usage(fields),
        echo=echo,
        generates=max_tokens != 0,
    )


def parse_tokenize(body: Any, facts: ModelFacts) -> TokenizeRequest:
    """The request in the body of ``/v1/tokenize``. Arguments and errors as of `parse_chat`.

    ``model`` may be left out. ``prompt`` goes with ``add_special_tokens``, ``messages`` with ``tools`` and
    ``add_generation_prompt``; both are true unless given.
    """
    fields = _Object(body)
    of_prompt = ("prompt", "add_special_tokens")
    of_dialog = ("messages", "tools", "add_generation_prompt")
    fields.check_names({"model", *of_prompt, *of_dialog}, {})
    if fields.get("model") is not None:
        _model(fields, facts)
    is_dialog = fields.get("messages") is not None
    for name in of_prompt if is_dialog else of_dialog:
        if fields.get(name) is not None:
            raise _clash(name, "messages" if is_dialog else "prompt")
    return TokenizeRequest(
        prompt=None if is_dialog else fields.need_text("prompt"),
        messages=_messages(fields) if is_dialog else None,
        tools=_tools(fields),
        add_special_tokens=fields.flag("add_special_tokens", True),
        add_generation_prompt=fields.flag("add_generation_prompt", True),
    )


def parse_detokenize(body: Any, facts: ModelFacts) -> DetokenizeRequest:
    """The request in the body of ``/v1/detokenize``: ``tokens``, and perhaps ``model``. As `parse_chat`."""
    fields = _Object(body)
    fields.check_names({"model", "tokens"}, {})
    if fields.get("model") is not None:
        _model(fields, facts)
    if fields.get("tokens") is None:
        raise _missing("tokens")
    return DetokenizeRequest(_token_ids(fields.get("tokens"), "tokens", facts))


# --- fields -----------------------------------------------------------------------------------------------


class _Object:
    """A JSON object, and its place in the body: reads fields by type, and names them where they are wrong."""

    def __init__(self, value: Any, place: str = "") -> None:
        if not isinstance(value, dict):
            raise _wrong_type(place, "an object", value)
        self.fields: dict[str, Any] = value
        self._place = place

    def path(self, name: str) -> str:
        """The field's place in the body."""
        return f"{self._place}.{name}" if self._place else name

    def get(self, name: str) -> Any:
        """The value as it came; None for null, and where there is none."""
        return self.fields.get(name)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _wrong_type(self.path(name), "true or false", value)
        return value

    def whole(self, name: str, least: int, most: int | None = None) -> int | None:
        """A whole number within the bounds."""
        value = self.get(name)
        if value is None:
            return None
        bounds = f"a whole number of {f'at least {least}' if most is None else f'{least} to {most}'}"
        if type(value) is not int:  # a bool is an int to isinstance
            raise _wrong_type(self.path(name), bounds, value)
        if value < least or (most is not None and value > most):
            raise _wrong_value(self.path(name), bounds, value)
        return value

    def text(self, name: str) -> str | None:
        """A string that can be written as UTF-8."""
        value = self.get(name)
        return None if value is None else _text(value, self.path(name))

    def need_text(self, name: str) -> str:
        """The same, where there must be one."""
        text = self.text(name)
        if text is None:
            raise _missing(self.path(name))
        return text

    def name(self, name: str) -> str:
        """The name of a function or a schema: there must be one."""
        text = self.need_text(name)
        if not NAME.fullmatch(text):
            raise _wrong_value(self.path(name), "1 to 64 letters, digits, _ and - of ASCII", text)
        return text

    def items(self, name: str, least: int, most: int) -> list[Any] | None:
        """A list of so many items."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise _wrong_type(self.path(name), "a list", value)
        if not least <= len(value) <= most:
            message = f"{self.path(name)} must hold {least} to {most} items, not {len(value)}"
            raise _invalid(self.path(name), message)
        return value

    def schema(self, name: str) -> dict[str, Any] | None:
        """A JSON schema, taken as it is: that it means something is not known here."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise _wrong_type(self.path(name), "a JSON schema, an object", value)
        _check_nested(value, self.path(name))
        return value

    def object(self, name: str) -> _Object:
        """An object: there must be one."""
        value = self.get(name)
        if value is None:
            raise _missing(self.path(name))
        return _Object(value, self.path(name))

    def one_of(self, name: str, *choices: str) -> str:
        """One of the strings: there must be one."""
        value = self.get(name)
        if value is None:
            raise _missing(self.path(name))
        if not isinstance(value, str) or value not in choices:
            expected = f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
            raise _wrong_value(self.path(name), expected, value)
        return value

    def check_names(self, known: Collection[str], unsupported: dict[str, tuple[Any, ...]]) -> None:
        """Refuse a name that is neither, and a value of the unsupported that asks for something."""
        for name, value in self.fields.items():
            if name in unsupported:
                harmless = unsupported[name]
                if value is not None and not any(_is_same(value, other) for other in harmless):
                    neutral = f"set it to {json.dumps(harmless[0])}, or " if harmless else ""
                    message = f"{self.path(name)} {_shown(value)} isn't supported: {neutral}leave it out"
                    raise bad_request(message, self.path(name), "unsupported_parameter")
            elif name not in known:
                raise self._unknown(name, {*known, *unsupported})

    def check_others_null(self, known: Collection[str]) -> None:
        """Refuse a name that isn't known unless it is null, as in an answer that is sent back."""
        for name, value in self.fields.items():
            if name not in known and value is not None:
                raise self._unknown(name, known)

    def _unknown(self, name: str, known: Collection[str]) -> ApiError:
        short = name if len(name) <= 64 else f"{name[:61]}..."
        near = difflib.get_close_matches(short, sorted(known), n=1)
        remedy = f"did you mean {json.dumps(near[0])}?" if near else "leave it out"
        where = f" in {self._place}" if self._place else ""
        return bad_request(
            f"unknown field {json.dumps(short)}{where}: {remedy}", self.path(short), "unknown_parameter"
        )


def _shown(value: Any) -> str:
    return one_line(show(value), 120)  # nested values can still give a long picture


def _is_same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)  # True == 1 to Python


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise _wrong_type(place, "a string", value)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _invalid(
            place, f"{place} holds half a surrogate pair, which is no character: send whole ones"
        ) from None
    return value


def _check_nested(value: Any, place: str) -> None:
    """Refuse what can't be written as JSON in UTF-8 again, or only by deep recursion."""
    pending, count = [(value, 0)], 0
    while pending:
        item, depth = pending.pop()
        count += 1
        if count + len(pending) > MAX_VALUES:
            raise _invalid(place, f"{place} holds more than {MAX_VALUES} values: make it smaller")
        if isinstance(item, str):
            _text(item, place)
        elif isinstance(item, int | float):
            if not _is_finite(item):
                message = f"{place} holds {_shown(item)}, which JSON has no number for: give a finite one"
                raise _invalid(place, message)
        elif isinstance(item, dict | list):
            if depth >= MAX_DEPTH:
                raise _invalid(place, f"{place} is nested deeper than {MAX_DEPTH}: flatten it")
            if isinstance(item, dict):
                pending += ((key, depth) for key in item)
                item = item.values()
            pending += ((inner, depth + 1) for inner in item)


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond any float
        return False


def _wrong_type(place: str, expected: str, value: Any) -> ApiError:
    message = f"{place or 'the body'} must be {expected}, not {_shown(value)}"
    return bad_request(message, place or None, "invalid_type")


def _wrong_value(place: str, expected: str, value: Any) -> ApiError:
    return _invalid(place, f"{place} must be {expected}, not {_shown(value)}")


def _invalid(place: str | None, message: str) -> ApiError:
    return bad_request(message, place, "invalid_value")


def _missing(place: str) -> ApiError:
    return bad_request(f"{place} is missing: give one", place, "missing_required_parameter")


def _clash(name: str, other: str) -> ApiError:
    return _invalid(name, f"{name} can't be combined with {other}: leave one of them out")


# --- what both endpoints ask for --------------------------------------------------------------------------


def _model(fields: _Object, facts: ModelFacts) -> str:
    name = fields.need_text("model")
    if name != facts.name and name not in facts.aliases:
        raise model_not_found(f"the model {_shown(name)} is not served here: ask for {_shown(facts.name)}")
    return name


def _include_usage(fields: _Object) -> bool:
    if fields.get("stream_options") is None:
        return False
    options = fields.object("stream_options")
    options.check_names({"include_usage", "include_obfuscation"}, {"continuous_usage_stats": (False,)})
    if not fields.get("stream"):
        raise _invalid(
            "stream_options", "stream_options needs stream: set stream to true, or leave stream_options out"
        )
    return options.flag("include_usage", False)


def _params(fields: _Object, facts: ModelFacts, max_tokens: int, **settled: int | None) -> SamplingParams:
    """The wishes; ``settled`` are those that the endpoints spell differently."""
    options: dict[str, Any] = {name: fields.get(name) for name in _SAMPLING}
    options |= settled
    options["max_tokens"] = min(max_tokens, facts.context_len)
    options["ignore_eos"] = fields.flag("ignore_eos", False)
    options["stop"] = _stop(fields)
    options["logit_bias"] = _logit_bias(fields, facts)
    if (stop_ids := fields.get("stop_token_ids")) is not None:
        ids = _token_ids(stop_ids, "stop_token_ids", facts)
        if len(ids) > MAX_STOP_IDS:
            message = f"stop_token_ids must hold at most {MAX_STOP_IDS} ids, not {len(ids)}"
            raise _invalid("stop_token_ids", message)
        options["stop_token_ids"] = ids
    if _is_same(options["top_k"], -1):
        options["top_k"] = 0  # vLLM's way to say off
    if type(options["seed"]) is int and -(2**63) <= options["seed"] < 0:
        options["seed"] += 2**64  # OpenAI's seeds are signed
    options = {name: value for name, value in options.items() if value is not None}
    options.setdefault("temperature", 1.0)
    try:
        return SamplingParams(**options)
    except RequestError as error:
        raise _invalid(_culprit(options), one_line(error)) from None


def _culprit(options: dict[str, Any]) -> str | None:
    """Which of them SamplingParams refuses."""
    for name, value in options.items():
        try:
            SamplingParams(**{"max_tokens": options["max_tokens"], name: value})
        except RequestError:
            return name
    return None


def _stop(fields: _Object) -> list[str] | None:
    stop = fields.get("stop")
    if stop is None:
        return None
    if isinstance(stop, str):
        stops = [_text(stop, "stop")]
    elif isinstance(stop, list):
        if len(stop) > MAX_STOPS:
            raise _invalid("stop", f"stop must hold at most {MAX_STOPS} strings, not {len(stop)}")
        stops = [_text(text, f"stop[{i}]") for i, text in enumerate(stop)]
    else:
        raise _wrong_type("stop", "a string or a list of strings", stop)
    chars = sum(map(len, stops))
    if chars > MAX_ALL_STOP_CHARS:
        raise _invalid("stop", f"stop must have at most {MAX_ALL_STOP_CHARS} characters in all, not {chars}")
    return stops


def _logit_bias(fields: _Object, facts: ModelFacts) -> dict[int, Any] | None:
    if fields.get("logit_bias") is None:
        return None
    biases, given = {}, fields.object("logit_bias").fields
    if len(given) > MAX_LOGIT_BIAS:
        raise _invalid(
            "logit_bias", f"logit_bias must have at most {MAX_LOGIT_BIAS} tokens, not {len(given)}"
        )
    for key, bias in given.items():
        if not TOKEN_ID.fullmatch(key) or int(key) >= facts.vocab_size:
            bounds = f"token ids of 0 to {facts.vocab_size - 1}"
            message = f"logit_bias must map {bounds} to numbers, not {_shown(key)}"
            raise _invalid("logit_bias", message)
        biases[int(key)] = bias
    return biases


def _token_ids(ids: Any, place: str, facts: ModelFacts) -> list[int]:
    """A list of token ids, checked without Python code for each: a prompt may have a hundred thousand."""
    if not isinstance(ids, list):
        raise _wrong_type(place, "a list of token ids", ids)
    if set(map(type, ids)) - {int} or (ids and (min(ids) < 0 or max(ids) >= facts.vocab_size)):
        bounds = f"a token id, a whole number of 0 to {facts.vocab_size - 1}"
        for i, token_id in enumerate(ids):
            if type(token_id) is not int:
                raise _wrong_type(f"{place}[{i}]", bounds, token_id)
            if not 0 <= token_id < facts.vocab_size:
                raise _wrong_value(f"{place}[{i}]", bounds, token_id)
    return ids


# --- completions ------------------------------------------------------------------------------------------


def _prompts(fields: _Object, facts: ModelFacts, n: int) -> list[str | list[int]]:
    prompt = fields.get("prompt")
    if prompt is None:
        raise _missing("prompt")
    if isinstance(prompt, str):
        return [_text(prompt, "prompt")]
    if not isinstance(prompt, list) or not prompt:
        expected = "a string, a list of strings, token ids, or a list of lists of token ids"
        raise _wrong_type("prompt", expected, prompt)
    if type(prompt[0]) is int:
        return [_prompt_ids(prompt, "prompt", facts)]
    if len(prompt) * n > MAX_COMPLETIONS:
        raise _invalid(
            "prompt",
            f"{len(prompt)} prompts with n {n} ask for over {MAX_COMPLETIONS} answers: send several requests",
        )
    if isinstance(prompt[0], str):
        return [_text(text, f"prompt[{i}]") for i, text in enumerate(prompt)]
    return [_prompt_ids(ids, f"prompt[{i}]", facts) for i, ids in enumerate(prompt)]


def _prompt_ids(ids: Any, place: str, facts: ModelFacts) -> list[int]:
    ids = _token_ids(ids, place, facts)
    if not ids:
        raise _invalid(place, f"{place} has no token: give at least one")
    if len(ids) > facts.context_len:
        raise bad_request(
            f"{place} has {len(ids)} tokens, the model's context holds {facts.context_len}: shorten it",
            place,
            "context_length_exceeded",
        )
    return ids


def _check_best_of(fields: _Object, n: int) -> None:
    best_of = fields.whole("best_of", 1)
    if best_of not in (None, n):
        raise bad_request(
            f"best_of {_shown(best_of)} isn't supported: set it to n ({n}), or leave it out",
            "best_of",
            "unsupported_parameter",
        )


# --- chats ------------------------------------------------------------------------------------------------


def _chat_tokens(fields: _Object, facts: ModelFacts) -> int:
    older, newer = fields.whole("max_tokens", 1), fields.whole("max_completion_tokens", 1)
    if older is not None and newer is not None and older != newer:
        raise _invalid(
            "max_tokens",
            f"max_tokens {_shown(older)} and max_completion_tokens {_shown(newer)} contradict each other: "
            "leave max_tokens out",
        )
    return newer or older or facts.default_max_tokens


def _chat_logprobs(fields: _Object) -> int | None:
    wanted = fields.flag("logprobs", False)
    alternatives = fields.whole("top_logprobs", 0, MAX_LOGPROBS)
    if alternatives and not wanted:
        raise _invalid(
            "top_logprobs", "top_logprobs needs logprobs: set logprobs to true, or leave top_logprobs out"
        )
    return (alternatives or 0) if wanted else None


def _messages(fields: _Object) -> list[dict[str, Any]]:
    messages = fields.items("messages", 1, MAX_MESSAGES)
    if messages is None:
        raise _missing("messages")
    return [_message(_Object(message, f"messages[{i}]")) for i, message in enumerate(messages)]


def _message(message: _Object) -> dict[str, Any]:
    role = _ROLES[message.one_of("role", *_ROLES)]
    known = {"role", "content", "name"}
    checked: dict[str, Any] = {"role": role}
    if role == "assistant":
        known |= {"tool_calls", "annotations"}
        if (calls := message.items("tool_calls", 0, MAX_TOOLS)) and message.get("content") is None:
            checked["content"] = None
        if calls:
            checked["tool_calls"] = [
                _past_call(_Object(call, f"{message.path('tool_calls')}[{i}]"))
                for i, call in enumerate(calls)
            ]
    elif role == "tool":
        known.add("tool_call_id")
        checked["tool_call_id"] = message.need_text("tool_call_id")
    message.check_others_null(known)
    if "content" not in checked:
        checked["content"] = _content(message.get("content"), message.path("content"))
    if (name := message.text("name")) is not None:
        checked["name"] = name
    return checked


def _content(content: Any, place: str) -> str:
    if content is None:
        raise _missing(place)
    if isinstance(content, str):
        return _text(content, place)
    if not isinstance(content, list) or not content:
        raise _wrong_type(place, "a string or a list of text parts", content)
    if len(content) > MAX_PARTS:
        raise _invalid(place, f"{place} must have at most {MAX_PARTS} parts, not {len(content)}")
    texts = []
    for i, value in enumerate(content):
        part = _Object(value, f"{place}[{i}]")
        kind = part.get("type")
        if kind is None:
            raise _missing(part.path("type"))
        if kind != "text":
            raise bad_request(
                f"{part.path('type')} {_shown(kind)} isn't supported: this model reads text parts only",
                part.path("type"),
                "unsupported_value",
            )
        part.check_others_null({"type", "text", "prompt_cache_breakpoint"})
        texts.append(part.need_text("text"))
    return "".join(texts)


def _past_call(call: _Object) -> dict[str, Any]:
    """A tool call of an assistant's message that is sent back."""
    call.check_others_null({"id", "type", "function", "index"})  # who gathers a stream's calls may keep index
    call.one_of("type", "function")
    function = call.object("function")
    function.check_others_null({"name", "arguments"})
    return {
        "id": call.need_text("id"),
        "type": "function",
        "function": {"name": function.need_text("name"), "arguments": function.need_text("arguments")},
    }


# --- tools and formats ------------------------------------------------------------------------------------


def _tools(fields: _Object) -> list[dict[str, Any]]:
    tools = [
        _tool(_Object(tool, f"tools[{i}]"))
        for i, tool in enumerate(fields.items("tools", 0, MAX_TOOLS) or ())
    ]
    names = set()
    for i, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in names:
            place = f"tools[{i}].function.name"
            raise _invalid(place, f"{place} {_shown(name)} is taken: rename one of both")
        names.add(name)
    return tools


def _tool(tool: _Object) -> dict[str, Any]:
    tool.check_names({"type", "function"}, {})
    tool.one_of("type", "function")
    function = tool.object("function")
    function.check_names({"name", "description", "parameters", "strict"}, {})
    checked: dict[str, Any] = {"name": function.name("name")}
    if (description := function.text("description")) is not None:
        checked["description"] = description
    parameters = function.schema("parameters")
    if parameters is None:  # OpenAI's way to say that there are none
        parameters = {"properties": {}, "additionalProperties": False}
    checked["parameters"] = {"type": "object", **parameters}
    if checked["parameters"]["type"] != "object":
        raise _wrong_value(function.path("parameters.type"), "object", parameters["type"])
    if function.get("strict") is not None:
        checked["strict"] = function.flag("strict", False)
    return {"type": "function", "function": checked}


def _tool_choice(fields: _Object, tools: list[dict[str, Any]]) -> str | dict[str, Any]:
    choice = fields.get("tool_choice")
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, str):
        fields.one_of("tool_choice", "none", "auto", "required")
    elif not isinstance(choice, dict):
        raise _wrong_type("tool_choice", "none, auto, required or an object that names a function", choice)
    if choice == "none":
        return "none"
    if not tools:
        raise _invalid("tool_choice", "tool_choice needs tools: give tools, or leave it out")
    if isinstance(choice, str):
        return choice
    named = fields.object("tool_choice")
    named.one_of("type", "function")
    named.check_names({"type", "function"}, {})
    function = named.object("function")
    function.check_names({"name"}, {})
    name = function.name("name")
    if name not in {tool["function"]["name"] for tool in tools}:
        place = function.path("name")
        raise _invalid(place, f"{place} {_shown(name)} is none of the tools: name one of them")
    return {"type": "function", "function": {"name": name}}


def _response_format(fields: _Object) -> dict[str, Any] | None:
    if fields.get("response_format") is None:
        return None
    wanted = fields.object("response_format")
    kind = wanted.one_of("type", "text", "json_object", "json_schema")
    if kind != "json_schema":
        wanted.check_names({"type"}, {"json_schema": ()})
        return None if kind == "text" else {"type": kind}
    wanted.check_names({"type", "json_schema"}, {})
    described = wanted.object("json_schema")
    described.check_names({"name", "schema", "strict", "description"}, {})
    checked: dict[str, Any] = {"name": described.name("name"), "schema": described.schema("schema")}
    if checked["schema"] is None:
        raise _missing(described.path("schema"))
    if (description := described.text("description")) is not None:
        checked["description"] = description
    if described.get("strict") is not None:
        checked["strict"] = described.flag("strict", False)
    return {"type": kind, "json_schema": checked}


def _check_constraints(request: ChatRequest) -> None:
    """What has to follow a grammar ends where that one does, and has one grammar."""
    calls = request.tool_choice != "none"
    if request.response_format is not None and request.tool_choice not in ("none", "auto"):
        raise _invalid(
            "response_format",
            "response_format can't be combined with a tool_choice that demands a call: leave one of them out",
        )
    if request.response_format is None and not calls:
        return
    other = "tools" if request.response_format is None else "response_format"
    if request.params.min_tokens:
        raise _clash("min_tokens", other)
    if request.params.ignore_eos:
        raise _clash("ignore_eos", other)
    if request.params.n > MAX_CONSTRAINED:
        message = f"n must be at most {MAX_CONSTRAINED} with {other}, not {request.params.n}"
        raise _invalid("n", message)
