"""Grammars: which form an answer must have, JSON by a schema or calls of tools, and which tokens may follow.

The front process makes a request's grammar and checks it; the engine process makes a constraint of it for
each answer. A grammar is a str in llguidance's own format, so it travels between the two. llguidance is
imported when a grammar is first used. Knows nothing of HTTP, of the engine, or of how calls are read back.

Source: https://github.com/guidance-ai/llguidance (derivatives of regular expressions under an Earley parser;
what it takes of JSON Schema is in its docs/json_schema.md).
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from samir_vllm.chat import CALL_END, CALL_SEPARATOR, call_opening
from samir_vllm.config import show
from samir_vllm.errors import OptionError, RequestError, one_line

if TYPE_CHECKING:
    import llguidance

Result = TypeVar("Result")

WHITESPACE = r"[ ]|\n[ ]{0,32}"
"""What may stand between the tokens of JSON, once at a place: unbounded, a weak model goes on for ever."""

MAX_DEPTH = 64
"""Deepest nesting of a schema, in JSON values."""

MAX_STRING = 1000
"""Longest literal, property name or pattern, in characters: a mask's time grows with it (1 ms at this)."""

MAX_CHARS = 1 << 18
"""Longest grammar, descriptions included."""

MAX_COST = 5000
"""Of one grammar, in units of about 20 us of compilation: see `_cost_of`."""

_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
# An answer that is no call: with a brace it begins at no place where white space could hide it.
_TEXT_RULES = ["text: TEXT", r"TEXT: /\s*([^{\s](.|\n)*)?/"]
_NOTES = {"description", "title", "$comment"}  # of no consequence, so they may be long
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}

# Of one matcher. A lexer state is about 0.5 KB; a string of bounded length needs some six a character.
_LIMITS = {
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 100_000,  # a mask that needs more fails: 14,000 are 1 ms
    "step_max_items": 5_000,  # of a mask: 4 ms at most, where 50,000 took a second
    "max_lexer_states": 100_000,
    "max_grammar_size": 200_000,
}
_CACHED = 16
_STACK_BYTES = 256 << 20  # address space only; llguidance recurses along a schema's references


class GrammarError(RequestError):
    """A form that can't be enforced. ``param`` is the field it came with."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


# --- of a request -----------------------------------------------------------------------------------------


def grammar_of(
    response_format: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any],
    parallel: bool,
) -> str | None:
    """The grammar of a request's answers, as llguidance reads it; None where anything may come.

    Args:
        response_format: ``{"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": ...}}``.
        tools: ``{"type": "function", "function": {"name", "parameters"}}`` each. Without ``parameters`` a
            function takes none.
        tool_choice: ``none``, ``auto``, ``required``, or ``{"type": "function", "function": {"name"}}``.
            ``auto``: calls, or text that begins with no brace; not together with a JSON format.
        parallel: more than one call may come in an answer.

    Raises:
        GrammarError: what is asked for contradicts itself or is too large. Whether llguidance takes the
            schemas is for `Grammars.check` to say.
    """
    schema = _schema_of(response_format)
    functions = _callable(tools, tool_choice)
    if not functions:
        if schema is None:
            return None
        _check_size([schema], "response_format")
        return _grammar({"json_schema": _with_options(schema)}, "response_format")
    if schema is not None and tool_choice == "auto":
        # Both begin with a brace, and llguidance's lexer takes any object that begins with "name" for a call.
        raise GrammarError(
            "response_format can't be combined with tools of tool_choice auto; ask for one after the other",
            "response_format",
        )
    forms = {name: _parameters(function) for name, function in functions.items()}
    _check_size(list(forms.values()), "tools")
    rules = _rules_of_calls({name: _json_rule(form) for name, form in forms.items()}, parallel)
    rules += ["start: calls | text", *_TEXT_RULES] if tool_choice == "auto" else ["start: calls"]
    return _grammar({"lark_grammar": "\n".join(rules)}, "tools")


def _schema_of(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The JSON schema of answers; None where they are free."""
    kind = "text" if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise GrammarError(
            f"response_format.type must be text, json_object or json_schema, not {show(kind)}",
            "response_format",
        )
    wrapper = response_format.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if not isinstance(schema, Mapping):
        raise GrammarError(
            "response_format.json_schema.schema must be a JSON schema, an object", "response_format"
        )
    return schema


def _callable(
    tools: Sequence[Mapping[str, Any]], tool_choice: str | Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Name to function of the tools that may be called."""
    functions: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not _TOOL_NAME.match(name):
            raise GrammarError(
                f"tools[{i}] must be a function with a name of 1 to 64 letters, digits, _ and -", "tools"
            )
        if name in functions:
            raise GrammarError(f"tools[{i}]: the name {show(name)} is there twice", "tools")
        functions[name] = function
    if tool_choice == "none":
        return {}
    if tool_choice == "auto" or (tool_choice == "required" and functions):
        return functions
    if tool_choice == "required":
        raise GrammarError("tool_choice is required, but there are no tools", "tool_choice")
    chosen = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    chosen_name = chosen.get("name") if isinstance(chosen, Mapping) else None
    if not isinstance(chosen_name, str) or chosen_name not in functions:
        raise GrammarError(
            f"tool_choice must be none, auto, required or name one of tools, not {show(tool_choice)}",
            "tool_choice",
        )
    return {chosen_name: functions[chosen_name]}


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments, which are always an object: the reader counts braces."""
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise GrammarError(
            f"the parameters of function {function['name']} must be a JSON schema of type object", "tools"
        )
    return {"type": "object", **parameters}


def _rules_of_calls(forms: Mapping[str, str], parallel: bool) -> list[str]:
    """Rules up to ``calls``, in Lark's syntax as llguidance extends it. ``forms``: of arguments, by name."""
    rules = [
        f"call_{i}: {json.dumps(call_opening(name))} {form} {json.dumps(CALL_END)}"
        for i, (name, form) in enumerate(forms.items())
    ]
    rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(forms)))}")
    rules.append(f"calls: call ({json.dumps(CALL_SEPARATOR)} call)*" if parallel else "calls: call")
    return rules


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {_dumped(_with_options(schema), 'tools')}"


def _with_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    """With our options; by its own a schema could ask for what isn't JSON."""
    own = {key: value for key, value in schema.items() if key != "x-guidance"}
    return {"x-guidance": {"whitespace_pattern": WHITESPACE}, **own}


def _grammar(form: Mapping[str, Any], param: str) -> str:
    grammar = _dumped({"grammars": [form]}, param)
    if len(grammar) > MAX_CHARS:
        raise GrammarError(f"{param}: the schemas have {len(grammar)} characters, at most {MAX_CHARS}", param)
    return grammar


def _dumped(value: Any, param: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (ValueError, TypeError) as error:  # no number, or one with too many digits
        raise GrammarError(f"{param}: the schema isn't JSON: {one_line(error)}", param) from None


# --- bounds -----------------------------------------------------------------------------------------------


def _check_size(schemas: Sequence[Mapping[str, Any]], param: str) -> None:
    cost = 0
    try:
        for schema in schemas:
            cost += _cost_of(schema)
            if cost > MAX_COST:
                raise _OutOfBounds(
                    f"the schemas are too large, beyond {MAX_COST} units; use fewer properties, "
                    "alternatives, formats and patterns"
                )
    except _OutOfBounds as error:
        raise GrammarError(f"{param}: {error}", param) from None


class _OutOfBounds(Exception):
    pass


def _cost_of(schema: Any) -> int:
    """About how long a schema takes to compile; not counted much beyond `MAX_COST`. What might be a keyword
    counts as one."""
    cost = 0
    open_values: list[tuple[Any, int, bool]] = [(schema, 1, False)]
    while open_values and cost <= MAX_COST:
        value, depth, is_literal = open_values.pop()
        if depth > MAX_DEPTH:
            raise _OutOfBounds(f"a schema is nested too deep, at most {MAX_DEPTH} levels")
        cost += 2 if is_literal else 1
        if isinstance(value, Mapping):
            cost += _cost_of_keywords(value)
            for key, item in value.items():
                _check_length(key)
                if is_literal or key not in _NOTES or not isinstance(item, str):
                    open_values.append((item, depth + 1, is_literal or key in ("const", "enum")))
        elif isinstance(value, list | tuple):
            open_values += [(item, depth + 1, is_literal) for item in value]
        elif isinstance(value, str):
            _check_length(value)
    return cost


def _cost_of_keywords(schema: Mapping[str, Any]) -> int:
    """Of those that take long. Measured: each weight is what the worst found of its kind takes."""
    cost = 15 * isinstance(schema.get("format"), str) + 5 * ("$ref" in schema)
    patterns = [schema.get("pattern")]
    if isinstance(of_names := schema.get("patternProperties"), Mapping):
        patterns += of_names
    for pattern in patterns:
        if isinstance(pattern, str):
            cost += 10 + len(pattern) // 4 + 40 * pattern.count("\\p") + 40 * pattern.count("\\P")
    if isinstance(properties := schema.get("properties"), Mapping):
        required = schema.get("required")
        num_optional = len(properties) - (len(required) if isinstance(required, list) else 0)
        cost += max(0, num_optional) ** 2 // 30  # any may follow any: some 400 are beyond llguidance's limits
    cost += sum(2 * len(_digits(schema[key])) for key in _BOUNDS & schema.keys())
    if "multipleOf" in schema:
        cost += int(_digits(schema["multipleOf"]) or 0) // 3  # so many states has the automaton
    return cost


def _digits(value: Any) -> str:
    """The significant ones of a number."""
    if not isinstance(value, int | float):
        return ""
    try:
        return "".join(map(str, Decimal(str(value)).normalize().as_tuple().digits))
    except (ValueError, ArithmeticError):
        raise _OutOfBounds("a schema holds a number with too many digits") from None


def _check_length(text: str) -> None:
    if len(text) > MAX_STRING:
        raise _OutOfBounds(
            f"a name, literal or pattern of a schema has {len(text)} characters, at most {MAX_STRING}"
        )


# --- of a model -------------------------------------------------------------------------------------------


class GrammarTokenizer(Protocol):
    """What grammars ask of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    def encode(self, text: str, /) -> list[int]:
        """Ids of a text."""

    def id_to_bytes(self, token_id: int, /) -> bytes:
        """Bytes of one token."""

    def is_special(self, token_id: int, /) -> bool:
        """Whether the id is a control token, which no text may become."""


class Grammars:
    """Grammars over one model's vocabulary. All of it may be used from any thread.

    Compiled grammars are kept, the latest ``_CACHED`` of them: another answer by the same one begins within
    microseconds, and finds the automaton as far as earlier answers have built it.

    Args:
        tokenizer: gives each token's bytes.
        eos_token_ids: what may end an answer, wherever its grammar lets it end. Never text, special or not.
        vocab_size: of the model; ids beyond the tokenizer's are never allowed.
    """

    def __init__(self, tokenizer: GrammarTokenizer, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabularies: dict[str, llguidance.LLTokenizer] = {}
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._checked: OrderedDict[str, None] = OrderedDict()

    def check(self, grammar: str) -> None:
        """See whether llguidance takes a grammar, within its limits; without the model's vocabulary.

        Takes milliseconds, 0.1 s for the worst found, most of it without the GIL: call it in a thread.

        Raises:
            GrammarError: it doesn't; says why.
            OptionError: llguidance isn't installed.
        """
        self._check_end(grammar)
        with self._lock:
            if grammar in self._checked:
                return
        _compile(self._vocabulary("bytes"), grammar)
        with self._lock:
            _keep(self._checked, grammar, None)

    def constraint(self, grammar: str) -> GrammarConstraint:
        """A fresh constraint for one answer. Raises as `check` does. The first one takes 0.5 s more."""
        self._check_end(grammar)
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:
            compiled = _compile(self._vocabulary("model"), grammar)
            with self._lock:
                _keep(self._compiled, grammar, compiled)
        return GrammarConstraint(compiled.deep_copy(), grammar, self._forget)

    def load(self) -> None:
        """Read the vocabulary now (0.5 s for 128,000 tokens), not at the first constraint."""
        self._vocabulary("model")

    def _check_end(self, grammar: str) -> None:
        if not self._eos_token_ids:
            param = _param_of(grammar)
            raise GrammarError(
                f"{param} asks for a grammar, but the model's config names no end-of-sequence token", param
            )

    def _forget(self, grammar: str) -> None:
        """Copies share their automaton's states, and so the limit that one of them ran into."""
        with self._lock:
            self._compiled.pop(grammar, None)

    def _vocabulary(self, of: str) -> llguidance.LLTokenizer:
        with self._lock:
            if of not in self._vocabularies:
                tokens = _byte_tokens() if of == "bytes" else self._model_tokens()
                made = _llguidance().LLTokenizer(tokens, eos_token=tokens.eos_token_ids)
                self._vocabularies[of] = made
            return self._vocabularies[of]

    def _model_tokens(self) -> _Tokens:
        known = range(min(self._tokenizer.vocab_size, self._vocab_size))
        tokens = [self._tokenizer.id_to_bytes(i) for i in known] + [b""] * (self._vocab_size - len(known))
        special = {i for i in known if self._tokenizer.is_special(i)}.union(self._eos_token_ids)
        return _Tokens(tokens, sorted(special), self._eos_token_ids, self._tokenizer.encode)


class GrammarConstraint:
    """Where one answer is in its grammar: a `TokenConstraint`. For one thread at a time."""

    __slots__ = ("_forget", "_grammar", "_matcher")

    def __init__(self, matcher: llguidance.LLMatcher, grammar: str, forget: Callable[[str], None]) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._forget = forget

    def fill_mask(self, mask: np.ndarray) -> None:
        """See `TokenConstraint.fill_mask`. Releases the GIL.

        Raises:
            GrammarError: the grammar turned out to need more than its limits; the constraint is of no use
                any more.
        """
        # A third of the time of mask.ctypes.data.
        self._matcher.unsafe_compute_mask_ptr(mask.__array_interface__["data"][0], mask.nbytes)
        if self._matcher.is_error():
            self._forget(self._grammar)
            _raise_error_of(self._matcher, self._grammar)

    def accept(self, token_id: int) -> bool:
        """See `TokenConstraint.accept`. Once False, the constraint is of no use any more."""
        is_accepted = self._matcher.consume_token(token_id)
        if not is_accepted:  # perhaps for a limit
            self._forget(self._grammar)
        return is_accepted

    def copy(self) -> GrammarConstraint:
        """Another one, as far as this one is; takes microseconds."""
        return GrammarConstraint(self._matcher.deep_copy(), self._grammar, self._forget)

    @property
    def is_complete(self) -> bool:
        """See `TokenConstraint.is_complete`."""
        return self._matcher.is_stopped()


class _Tokens:
    """A vocabulary as llguidance asks for it."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(
        self,
        tokens: list[bytes],
        special_token_ids: list[int],
        eos_token_ids: list[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_ids = eos_token_ids
        self.eos_token_id = eos_token_ids[0]
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _byte_tokens() -> _Tokens:
    tokens = [bytes([i]) for i in range(256)] + [b"<|end|>"]
    return _Tokens(tokens, [256], [256], lambda text: list(text.encode()))


def _compile(vocabulary: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    module = _llguidance()
    limits = module.LLParserLimits(**_LIMITS, verbose_errors=False)
    matcher = _on_a_deep_stack(lambda: module.LLMatcher(vocabulary, grammar, log_level=0, limits=limits))
    matcher.compute_bitmask()  # some grammars fail here only, and some limits are met
    _raise_error_of(matcher, grammar)
    return matcher


def _raise_error_of(matcher: llguidance.LLMatcher, grammar: str) -> None:
    if matcher.is_error():
        param = _param_of(grammar)
        reason = one_line(matcher.get_error().replace("<non-verbose/>", ""))
        raise GrammarError(f"{param}: the schema can't be enforced, change it: {reason}", param)


def _param_of(grammar: str) -> str:
    return "response_format" if grammar.startswith('{"grammars": [{"json_schema"') else "tools"


def _keep(cache: OrderedDict[str, Result], key: str, value: Result) -> None:
    cache[key] = value
    if len(cache) > _CACHED:
        cache.popitem(last=False)


def _on_a_deep_stack(work: Callable[[], Result]) -> Result:
    """In a thread of its own: llguidance recurses along references, and an overflow would end the process."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    with _STACK_SIZE:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return outcome.result()


_STACK_SIZE = threading.Lock()
"""It is one setting for the whole process."""


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise OptionError("grammars need llguidance: pip install 'samir-vllm[serve]'") from None
    return llguidance
