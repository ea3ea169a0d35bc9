"""Dialogs to token ids: the model's own Jinja template if it ships one, else Llama 3's native format.

Keeps one promise whatever the format: text inside a message or a tool's definition never becomes a control
token. Knows a tokenizer only by the few members of `ChatTokenizer`, and nothing of generation.

How calls of tools are written, where a template doesn't say otherwise, is Llama 3's JSON form:
``{"name": "f", "parameters": {"x": 1}}``, and ``; `` between several.
"""

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import jinja2
import regex
from jinja2.sandbox import ImmutableSandboxedEnvironment

from samir_vllm.errors import ChatError

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

LLAMA3_CONTROL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA3_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "ipython"}

CALL_END = "}"
CALL_SEPARATOR = "; "

# Word for word what Llama 3.1 and 3.2 were trained on: Meta's chat template for them, "custom tools".
_LLAMA3_ENVIRONMENT = "Environment: ipython\n\n"
_LLAMA3_TOOLS = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments "
    "that best answers the given prompt.\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)
# For models whose template has no place for tools, and so weren't trained on any such text.
_OTHER_TOOLS = (
    'You can call the functions below. To call one, answer with only {"name": its name, "parameters": {its '
    "arguments by name}}. If no function helps, answer in plain words."
)

_GUARDS = [*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE)]
_GUARD_VARIABLE = "guard_character"


class ChatTokenizer(Protocol):
    """What a chat format asks of a tokenizer."""

    special_tokens: dict[str, int]
    bos_token_id: int | None
    adds_bos: bool

    def encode(self, text: str, /) -> list[int]:
        """Ids of a text in which no name of a special token is read as that token."""


class ChatFormat(Protocol):
    """A model's way of writing a dialog down."""

    @property
    def name(self) -> str:
        """``llama3`` or ``template``."""

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        date: str | None = None,
    ) -> list[int]:
        """Token ids of a dialog, with exactly one BOS in front if the model wants one.

        Args:
            messages: mappings with a str ``role`` and a ``content`` that is a str or a list of
                ``{"type": "text", "text": ...}`` (joined). Templates see the other keys too. Beside
                ``tool_calls``, a list of ``{"id", "type": "function", "function": {"name", "arguments"}}``
                whose arguments are JSON in a str, or a mapping, the content may be None. A result has the
                role ``tool`` and its call's id as ``tool_call_id``.
            tools: ``{"type": "function", "function": {"name", "description", "parameters"}}`` each, what the
                model may call; ``parameters`` is a JSON schema.
            add_generation_prompt: end with the header of an assistant's turn, for the model to go on.
            date: today's date as the model should read it (such as ``26 Jul 2024``); templates see it as
                ``date_string``. Without it the template decides. The native format has no date.

        Raises:
            ChatError: messages or tools of another form, or a dialog that the format refuses.
        """


def call_opening(name: str) -> str:
    """What stands before the arguments of a call, in Llama 3's JSON form; `CALL_END` stands behind them."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": '


def load_chat_format(model_dir: Path, tokenizer: ChatTokenizer) -> ChatFormat | None:
    """The chat format of a model folder; None if the model has none (a base model: prompt it with raw text).

    A template is looked for in ``chat_template.jinja``, ``tokenizer_config.json`` and
    ``chat_template.json``. Without one, a tokenizer with Llama 3's header tokens gets the native format.

    Raises:
        ChatError: the template, or the file that should hold it, is damaged.
    """
    model_dir = Path(model_dir)
    config = _load_json(model_dir / "tokenizer_config.json")
    found: Any
    if (path := model_dir / "chat_template.jinja").is_file():
        found = _read(path)
    elif (found := config.get("chat_template")) is not None:
        path = model_dir / "tokenizer_config.json"
    else:
        path = model_dir / "chat_template.json"
        found = _load_json(path).get("chat_template")
    if found is not None:
        return TemplateChat(_template_source(found, path), path, tokenizer, _token_names(config, tokenizer))
    if all(name in tokenizer.special_tokens for name in LLAMA3_CONTROL):
        return Llama3Chat(tokenizer)
    return None


class Llama3Chat:
    """Llama 3's native format, put together id by id, so that no text can be read as a control token.

    ``<|begin_of_text|>``, then each message as ``<|start_header_id|>role<|end_header_id|>\\n\\n``, content,
    ``<|eot_id|>``. Contents aren't trimmed, and don't merge with the line feeds before them. Tools come as
    indented JSON in front of the first user message, calls after the assistant's content, results from the
    role ipython. Arguments in a str are written as they are: the model reads what it wrote.
    Source: Meta's "Llama 3 prompt format", reference code, and chat template of Llama 3.2 for tools.
    """

    name = "llama3"

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._text = tokenizer.encode
        self._bos, self._start, self._end, self._eot = (tokenizer.special_tokens[t] for t in LLAMA3_CONTROL)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        date: str | None = None,
    ) -> list[int]:
        """See `ChatFormat.encode`; the roles are system, user, assistant and tool."""
        checked = _checked(messages)
        for i, message in enumerate(checked):
            if message["role"] not in LLAMA3_ROLES:
                raise ChatError(
                    f"messages[{i}]: role {reprlib.repr(message['role'])} is unknown to Llama 3; "
                    f"use one of {', '.join(LLAMA3_ROLES)}"
                )
        ids = [self._bos]
        for message in _with_llama3_tools(checked, tools) if tools else checked:
            content = message["content"] + _calls_text(message.get("tool_calls", []))
            ids += [*self._header(LLAMA3_ROLES[message["role"]]), *self._text(content), self._eot]
        return ids + self._header("assistant") if add_generation_prompt else ids

    def _header(self, role: str) -> list[int]:
        return [self._start, *self._text(role), self._end, *self._text("\n\n")]


class TemplateChat:
    """A Jinja chat template, rendered in Jinja's sandbox with what Hugging Face's templates expect there.

    A template writes control tokens by name, and so might a message. Hence guards: before rendering, a
    character that occurs nowhere goes behind the first character of every name of a special token in a
    message, and of every beginning of such a name at the end of a string, which the text that follows
    could complete. With the guard inside it is no name, whatever the template joins or trims (a guard is
    never at the edge of white space). Names that are left after rendering are control tokens; the text
    between them loses its guards and is encoded.

    A template that doesn't mention tools gets them in the system message, calls as the assistant's text and
    results as the user's. One that refuses several calls in a message gets them in several.

    Args:
        source: the template.
        path: its file, for error messages.
        tokenizer: encodes the text between control tokens.
        token_names: ``bos_token``, ``eos_token`` and the like, for the template.
    """

    name = "template"

    def __init__(
        self, source: str, path: Path, tokenizer: ChatTokenizer, token_names: Mapping[str, str]
    ) -> None:
        self._source = source
        self._path = path
        self._tokenizer = tokenizer
        self._token_names = token_names
        # A name of one character has no inside for a guard: it stays text.
        names = sorted((name for name in tokenizer.special_tokens if len(name) > 1), key=len, reverse=True)
        self._cut = regex.compile(f"({_alternatives(names)})") if names else None
        self._guarding = _Guarding(names)
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise self._failure(error) from None

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        date: str | None = None,
    ) -> list[int]:
        """See `ChatFormat.encode`. A BOS that the template doesn't write is added if ``adds_bos``."""
        checked = _checked(messages)
        as_told = _with_parsed_arguments if self._mentions("tool_calls") else _without_calls
        given: dict[str, Any] = {
            "messages": as_told(checked),
            "tools": _checked_tools(tools) if tools else None,
        }
        if tools and not self._mentions("tools"):
            given["messages"] = _with_tools_told(given["messages"], given.pop("tools"))
        if date is not None:
            given["date_string"] = date
        try:
            text, guard = self._render(given, add_generation_prompt)
        except ChatError:
            if all(len(message.get("tool_calls", [])) <= 1 for message in given["messages"]):
                raise
            given["messages"] = _one_call_each(given["messages"])
            text, guard = self._render(given, add_generation_prompt)
        ids: list[int] = []
        for i, part in enumerate(self._cut.split(text) if self._cut else [text]):
            if i % 2:  # the names that were cut out are at the odd places, the text between at the even ones
                ids.append(self._tokenizer.special_tokens[part])
            else:
                ids += self._tokenizer.encode(part.replace(guard, ""))
        bos = self._tokenizer.bos_token_id
        if self._tokenizer.adds_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def _mentions(self, name: str) -> bool:
        return regex.search(rf"\b{name}\b", self._source) is not None

    def _render(self, given: dict[str, Any], add_generation_prompt: bool) -> tuple[str, str]:
        """The rendered dialog, its guards still inside, and the guard."""
        try:
            taken = set(self._source).union(*self._tokenizer.special_tokens, *_strings(given))
            guard = next(char for char in map(chr, _GUARDS) if char not in taken)
            variables = _mapped(
                given,
                lambda text: self._guarding.whole_and_begun(text, guard),
                lambda key: self._guarding.whole(key, guard),  # a template looks keys up: "content" stays so
            )
        except RecursionError:
            raise ChatError("messages are nested too deep; flatten them") from None
        fixed = {_GUARD_VARIABLE: guard, "add_generation_prompt": add_generation_prompt, "documents": None}
        try:
            return self._template.render({"tools": None, **self._token_names, **variables, **fixed}), guard
        except Exception as error:  # a template is somebody's program: it may fail in any way Python can
            raise self._failure(error) from None

    def _failure(self, error: Exception) -> ChatError:
        line = f", template line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        reason = " ".join(str(error).split()) or type(error).__name__
        return ChatError(
            f"{self._path}{line}: chat template failed: {reason}; change the messages or use --raw"
        )


# --- guards -----------------------------------------------------------------------------------------------


class _Guarding:
    """Puts guards into the names of special tokens, whatever their case (templates may change it)."""

    def __init__(self, names: list[str]) -> None:
        self._starts = regex.compile(f"(?is)(?={_alternatives(names)}).") if names else None
        self._beginnings = {name[:length].lower() for name in names for length in range(1, len(name))}
        self._longest = max(map(len, self._beginnings), default=0)

    def whole(self, text: str, guard: str) -> str:
        """Guards the names inside the text."""
        return self._starts.sub(lambda match: match.group() + guard, text) if self._starts else text

    def whole_and_begun(self, text: str, guard: str) -> str:
        """Guards also what may begin a name at the end; white space behind it could be trimmed."""
        text = self.whole(text, guard)
        end = len(text.rstrip())
        for start in range(end - 1, max(-1, end - 1 - self._longest), -1):  # backwards: places ahead stay
            if text[start:end].lower() in self._beginnings:
                text = text[: start + 1] + guard + text[start + 1 :]
                end += 1
        return text


def _alternatives(names: list[str]) -> str:
    """A regex for any of the names, quick to say no: most characters start none of them."""
    first = "".join(sorted({regex.escape(name[0]) for name in names}))
    return f"(?=[{first}])(?:{'|'.join(map(regex.escape, names))})"


def _mapped(value: Any, change: Callable[[str], str], change_key: Callable[[str], str]) -> Any:
    """A copy of nested JSON-like data with its strings, and the keys among them, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change_key(key) if isinstance(key, str) else key: _mapped(item, change, change_key)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mapped(item, change, change_key) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ChatError(f"messages hold {_shown(value)}; use str, numbers, bool, None, lists and mappings only")


def _strings(value: Any) -> list[str]:
    found: list[str] = []

    def keep(text: str) -> str:
        found.append(text)
        return text

    _mapped(value, keep, keep)
    return found


# --- template ---------------------------------------------------------------------------------------------


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@jinja2.pass_context
def _tojson(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes; guards stay characters, or they couldn't be taken out again."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        beyond = regex.compile(f"[^\\x00-\\x7f{context[_GUARD_VARIABLE]}]+")
        text = beyond.sub(lambda match: json.dumps(match.group())[1:-1], text)
    return text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _template_source(found: Any, path: Path) -> str:
    """The template from a string, or from a list of named ones."""
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise ChatError(
            f"{path}: chat_template should be a string or name a 'default' one; fetch the file again"
        )
    return found


def _token_names(config: Mapping[str, Any], tokenizer: ChatTokenizer) -> dict[str, str]:
    """``bos_token`` and the like for the template, from tokenizer_config.json; BOS from the tokenizer too."""
    found = {}
    for name, token_id in tokenizer.special_tokens.items():
        if token_id == tokenizer.bos_token_id:
            found["bos_token"] = name
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


# --- tools ------------------------------------------------------------------------------------------------


def _checked_tools(tools: Sequence[Tool]) -> list[Tool]:
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ChatError(
                f"tools[{i}] should be {{'type': 'function', 'function': {{'name': ...}}}}, is {_shown(tool)}"
            )
    return list(tools)


def _checked_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The calls of a message, each a dict with a dict ``function``."""
    if not isinstance(calls, list | tuple):
        raise ChatError(f"{where} should be a list, is {_shown(calls)}")
    checked = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if (
            not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments"), str | Mapping)
        ):
            raise ChatError(
                f"{where}[{i}] should be {{'function': {{'name': ..., 'arguments': JSON in a str}}}}, "
                f"is {_shown(call)}"
            )
        checked.append({**call, "function": dict(function)})
    return checked


def _calls_text(calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls in Llama 3's JSON form."""
    written = []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else _json_text(arguments)
        written.append(call_opening(name) + text + CALL_END)
    return CALL_SEPARATOR.join(written)


def _json_text(value: Any, indent: int | None = None) -> str:
    try:
        plain = _mapped(value, lambda text: text, lambda key: key)
        return json.dumps(plain, ensure_ascii=False, indent=indent)
    except RecursionError:
        raise ChatError("tools or calls of them are nested too deep; flatten them") from None


def _with_parsed_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments that are JSON objects in a str as those objects: what Hugging Face's templates expect."""
    return [
        {**message, "tool_calls": [_with_parsed(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_parsed(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _with_llama3_tools(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Definitions in front of the first user message; the system message tells where results come from."""
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    system, rest = messages[0], messages[1:]
    at = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
    if at is None:
        raise ChatError("tools are told of in the first user message: add one to messages")
    definitions = [_json_text(tool, indent=4) + "\n\n" for tool in _checked_tools(tools)]
    asked = {**rest[at], "content": _LLAMA3_TOOLS + "".join(definitions) + rest[at]["content"]}
    told = {**system, "content": _LLAMA3_ENVIRONMENT + system["content"]}
    return [told, *rest[:at], asked, *rest[at + 1 :]]


def _with_tools_told(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The functions in our own words, at the end of the system message."""
    functions = [_json_text(tool["function"]) for tool in tools]
    told = "\n".join([_OTHER_TOOLS, *functions])
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": told}, *messages]
    return [{**messages[0], "content": f"{messages[0]['content']}\n\n{told}"}, *messages[1:]]


def _without_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls as the assistant's text, results as the user's: those in a row as one message."""
    names: dict[Any, str] = {}
    plain: list[dict[str, Any]] = []
    results: list[str] = []
    for i, message in enumerate(messages):
        calls = message.get("tool_calls", [])
        names |= {str(call.get("id")): call["function"]["name"] for call in calls}
        if message["role"] == "tool" and names:
            name = names.get(str(message.get("tool_call_id")), "the function")
            results.append(f"Result of {name}: {message['content']}")
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                plain.append({"role": "user", "content": "\n".join(results)})
                results = []
        elif calls:
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            plain.append({**kept, "content": message["content"] + _calls_text(calls)})
        else:
            plain.append(message)
    return plain


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several calls of one message in messages of their own, the result of each behind it."""
    apart: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []  # calls whose results may follow
    for message in messages:
        if message["role"] == "tool" and waiting:
            call_id = message.get("tool_call_id")
            asked = next((call for call in waiting if call["tool_calls"][0].get("id") == call_id), waiting[0])
            waiting.remove(asked)
            apart += [asked, message]
            continue
        apart += waiting
        waiting = [
            {**message, "tool_calls": [call], "content": "" if i else message["content"]}
            for i, call in enumerate(message.get("tool_calls", []))
        ]
        if not waiting:
            apart.append(message)
    return apart + waiting


# --- messages and files -----------------------------------------------------------------------------------


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with every content one string."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise ChatError("messages should be a list of at least one {'role': ..., 'content': ...}")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatError(f"messages[{i}] should be a mapping with a str 'role' and a 'content'")
        kept = dict(message)
        # Templates ask whether it is there, not whether it holds anything.
        if calls := kept.pop("tool_calls", None):
            kept["tool_calls"] = _checked_calls(calls, f"messages[{i}].tool_calls")
        content = "" if calls and kept.get("content") is None else kept.get("content")
        checked.append({**kept, "content": _joined(content, f"messages[{i}].content")})
    return checked


def _joined(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise ChatError(
                f"{where} should be a str or a list of {{'type': 'text', 'text': ...}}, holds {_shown(part)}"
            )
        texts.append(text)
    return "".join(texts)


def _shown(value: Any) -> str:
    return " ".join(reprlib.repr(value).split())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ChatError(f"{path}: isn't UTF-8; fetch the file again") from None
    except OSError as error:
        raise ChatError(f"{path}: can't be read: {error.strerror}; check its permissions") from None


def _load_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        root = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ChatError(f"{path}: isn't JSON ({error}); fetch the file again") from None
    if not isinstance(root, dict):
        raise ChatError(f"{path}: should hold a JSON object; fetch the file again")
    return root
