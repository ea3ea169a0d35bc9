"""Grammars: random walks along the masks give JSON of the schema and calls that read back; bounds hold."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samir_vllm.errors import OptionError
from samir_vllm.extras.serve import grammar as grammar_module
from samir_vllm.extras.serve.grammar import (
    MAX_CHARS,
    MAX_DEPTH,
    MAX_STRING,
    GrammarConstraint,
    GrammarError,
    Grammars,
    grammar_of,
)
from samir_vllm.extras.serve.tool_calls import CallArguments, CallStart, TextPiece, ToolCallReader
from samir_vllm.tokenizer import Tokenizer

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

PIECES = [
    b'{"',
    b'": ',
    b'", "',
    b'"}',
    b"{}",
    b"; {",
    b"true",
    b"12",
    b" a",
    b"\n  ",
    b"}}",
    b"name",
    b"\xc3",
    b"<|end|>",
]
SPECIAL = [b"<|begin|>", b"<|end|>", b"<|eot|>", b"<|pad|>"]
FIRST_SPECIAL = 256 + len(PIECES)
END_IDS = (FIRST_SPECIAL + 1, FIRST_SPECIAL + 2)
NUM_TOKENS = FIRST_SPECIAL + len(SPECIAL)
VOCAB_SIZE = NUM_TOKENS + 45  # a model's, padded


class PieceTokenizer:
    """Bytes, some pieces of several, one of them with a special token's name for its text, special tokens."""

    vocab_size = NUM_TOKENS

    def encode(self, text: str, /) -> list[int]:
        return list(text.encode())

    def id_to_bytes(self, token_id: int, /) -> bytes:
        return ([bytes([i]) for i in range(256)] + PIECES + SPECIAL)[token_id]

    def is_special(self, token_id: int, /) -> bool:
        return token_id >= FIRST_SPECIAL


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(PieceTokenizer(), END_IDS, VOCAB_SIZE)


def allowed(constraint: GrammarConstraint, vocab_size: int = VOCAB_SIZE) -> list[int]:
    mask = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
    constraint.fill_mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def follow(constraint: GrammarConstraint, text: str) -> bool:
    """Whether the text may come, byte by byte; the mask and what is accepted must agree."""
    for byte in text.encode():
        may_come = byte in allowed(constraint)
        assert constraint.accept(byte) is may_come
        if not may_come:
            return False
    return True


def takes(grammars: Grammars, grammar: str, text: str) -> bool:
    """Whether this may be a whole answer."""
    constraint = grammars.constraint(grammar)
    return follow(constraint, text) and set(END_IDS) <= set(allowed(constraint))


def walk(grammars: Grammars, grammar: str, seed: int, hasten: int = 40) -> str:
    """A random answer: any allowed token, and after some those that bring it to an end."""
    rng = random.Random(seed)
    constraint, said = grammars.constraint(grammar), b""
    tokenizer = PieceTokenizer()
    for step in range(2000):
        ids = allowed(constraint)
        ends = set(ids) & set(END_IDS)
        assert max(ids) < NUM_TOKENS
        assert not ends or ends == set(END_IDS)
        assert all(token_id < FIRST_SPECIAL or token_id in ends for token_id in ids)
        if ends and (step >= hasten or rng.random() < 0.2 or len(ids) == len(ends)):
            assert constraint.accept(rng.choice(sorted(ends)))
            return said.decode()
        closers = [i for i in b'"}]' if i in ids] if step >= hasten or rng.random() < 0.3 else []
        chosen = closers[0] if closers else rng.choice([i for i in ids if i not in ends])
        assert constraint.accept(chosen)
        said += tokenizer.id_to_bytes(chosen)
        if constraint.is_complete:
            assert set(allowed(constraint)) == set(END_IDS)
            return said.decode()
    raise AssertionError(f"no end: {said!r}")


def of_schema(schema: Any) -> str:
    grammar = grammar_of(
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, [], "none", True
    )
    assert grammar is not None
    return grammar


def an_object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def a_tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name, "description": "d" * 5000}
    return {
        "type": "function",
        "function": function | ({} if parameters is None else {"parameters": parameters}),
    }


PERSON = an_object(
    {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    required=["name", "age"],
)
TREE = {
    "$defs": {
        "node": an_object(
            {
                "v": {"type": "boolean"},
                "sub": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            required=["v"],
        )
    },
    "$ref": "#/$defs/node",
}
SCHEMAS = {
    "person": PERSON,
    "nested": an_object(
        {
            "a": an_object(
                {"b": {"type": "array", "items": {"type": "number"}, "minItems": 1}}, required=["b"]
            )
        },
        required=["a"],
    ),
    "tree": TREE,
    "enum": an_object({"c": {"enum": ["red", "green", 3, None, {"x": [1]}]}}, required=["c"]),
    "const": an_object({"c": {"const": 'a "quoted" \\ text'}}, required=["c"]),
    "union": {
        "anyOf": [
            {"type": "string", "maxLength": 5},
            {"type": "integer"},
            {"type": "null"},
            {"type": "array"},
        ]
    },
    "types": an_object({"x": {"type": ["string", "null", "boolean"]}}, required=["x"]),
    "all": {
        "allOf": [
            an_object({"a": {"type": "integer"}, "b": {"type": "string"}}),
            {"type": "object", "required": ["a"]},
        ]
    },
    "pattern": an_object({"zip": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"}}, required=["zip"]),
    "lengths": {
        "type": "array",
        "items": {"type": "string", "minLength": 2, "maxLength": 4},
        "minItems": 2,
        "maxItems": 3,
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n_[a-z]{1,3}$": {"type": "number"}},
        "additionalProperties": False,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "multiple": {
        "type": "array",
        "items": {"type": "integer", "multipleOf": 7, "exclusiveMinimum": 0},
        "minItems": 1,
    },
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "one": {
        "oneOf": [
            an_object({"k": {"const": "a"}, "n": {"type": "integer"}}, required=["k"]),
            an_object({"k": {"const": "b"}}, required=["k"]),
        ]
    },
    "date": {"type": "string", "format": "date"},
    "unicode": an_object(
        {"größe": {"type": "string"}, "<|end|>": {"const": "<|eot|>"}}, required=["größe", "<|end|>"]
    ),
    "any": {},
}


# --- JSON -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_answers_are_of_the_schema(grammars: Grammars, name: str) -> None:
    schema = SCHEMAS[name]
    grammar = of_schema(schema)
    grammars.check(grammar)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for seed in range(25):
        validator.validate(json.loads(walk(grammars, grammar, seed)))


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "person",
            ['{"name": "x", "age": 150}', '{\n  "name":"é",\n  "age":0\n}'],
            [
                '{"name": "x"}',
                '{"name": "x", "age": 151}',
                '{"name": "x", "age": 1, "z": 1}',
                '{"age": 1, "name": "x"}',
                ' {"name": "x", "age": 1}',
                '{"name": "x", "age": 1} ',
                "",
            ],
        ),
        (
            "tree",
            ['{"v": true, "sub": [{"v": false}]}'],
            ['{"v": 1}', '{"v": true, "sub": [{"v": false}, {"v": true}, {"v": true}]}'],
        ),
        ("const", ['{"c": "a \\"quoted\\" \\\\ text"}'], ['{"c": "a"}']),
        ("unicode", ['{"größe": "<|end|>", "<|end|>": "<|eot|>"}'], ['{"größe": 1}']),
        ("number", ["0", "-1.5", "2.25"], ["2.26", "-2", '"0"']),
        ("any", ["1", "[]", '{"a": {}}'], ["", "x", "{a: 1}"]),
    ],
)
def test_answers_that_may_and_may_not_come(
    grammars: Grammars, name: str, good: Sequence[str], bad: Sequence[str]
) -> None:
    grammar = of_schema(SCHEMAS[name])
    assert [text for text in good if not takes(grammars, grammar, text)] == []
    assert [text for text in bad if takes(grammars, grammar, text)] == []


def test_the_end_may_come_only_at_ends(grammars: Grammars) -> None:
    text = '{"name": "<|end|>", "age": 12}'
    for length in range(len(text)):
        constraint = grammars.constraint(of_schema(PERSON))
        assert follow(constraint, text[:length])
        assert not set(END_IDS) & set(allowed(constraint))
        assert not constraint.is_complete
        assert not constraint.accept(END_IDS[0])
    assert takes(grammars, of_schema(PERSON), text)


def test_json_object(grammars: Grammars) -> None:
    grammar = grammar_of({"type": "json_object"}, [], "none", True)
    assert grammar is not None
    grammars.check(grammar)
    for seed in range(30):
        assert isinstance(json.loads(walk(grammars, grammar, seed)), dict)
    assert not takes(grammars, grammar, "[1]")


def test_white_space_is_bounded(grammars: Grammars) -> None:
    grammar = of_schema({"type": "object"})
    assert takes(grammars, grammar, '{ "a": [\n' + " " * 32 + "1 , 2\n] }")
    for white in ("  ", "\n\n", "\n" + " " * 33, "\t", " \n"):
        assert not takes(grammars, grammar, '{"a":' + white + "1}")


def test_a_schema_cannot_set_options(grammars: Grammars) -> None:
    options = {"item_separator": "#", "whitespace_pattern": "x+", "lenient": True}
    grammar = of_schema({"x-guidance": options, "type": "array"})
    assert takes(grammars, grammar, "[1, 2]")
    assert not takes(grammars, grammar, "[1#2]")
    assert not takes(grammars, grammar, "[1,x2]")
    with pytest.raises(GrammarError, match="not"):
        grammars.check(of_schema({"x-guidance": options, "not": {}}))
    tool = a_tool("f", {"x-guidance": options, "type": "object"})
    assert not takes(
        grammars, str(grammar_of(None, [tool], "required", False)), '{"name": "f", "parameters": {"a":x1}}'
    )


def test_constraints_of_one_grammar_are_apart(grammars: Grammars) -> None:
    one, other = (grammars.constraint(of_schema(PERSON)) for _ in range(2))
    assert follow(one, '{"name": "x')
    assert follow(other, '{"name": "other", "age": 1}')
    assert other.is_complete
    assert follow(one, '", "age": 7}')
    assert one.is_complete


def test_a_refused_token_leaves_others_alone(grammars: Grammars) -> None:
    spoiled, other = (grammars.constraint(of_schema(PERSON)) for _ in range(2))
    assert not spoiled.accept(ord("x"))
    assert follow(other, '{"name": "x", "age": 7}')
    for beyond in (NUM_TOKENS, VOCAB_SIZE - 1):
        assert not grammars.constraint(of_schema(PERSON)).accept(beyond)


def test_a_vocabulary_that_fills_its_words_and_a_smaller_model() -> None:
    for vocab_size in (288, 320, NUM_TOKENS):
        constraint = Grammars(PieceTokenizer(), END_IDS, vocab_size).constraint(
            of_schema({"type": "integer"})
        )
        assert constraint.accept(ord("1"))
        assert allowed(constraint, vocab_size)[-2:] == list(END_IDS)
    small = Grammars(PieceTokenizer(), (200,), 256).constraint(of_schema({"const": "é"}))
    assert follow_ids(small, list('"é"'.encode()), 256)
    assert allowed(small, 256) == [200]


def follow_ids(constraint: GrammarConstraint, ids: Sequence[int], vocab_size: int) -> bool:
    return all(
        token_id in allowed(constraint, vocab_size) and constraint.accept(token_id) for token_id in ids
    )


def test_the_end_may_be_a_token_that_the_tokenizer_lacks_or_takes_for_text() -> None:
    for end in (VOCAB_SIZE - 1, ord("x")):
        grammars = Grammars(PieceTokenizer(), (end,), VOCAB_SIZE)
        constraint = grammars.constraint(of_schema({"type": "string"}))
        for byte in b'"abc':
            assert constraint.accept(byte)
            assert end not in allowed(constraint)
        assert constraint.accept(ord('"'))
        assert allowed(constraint) == [end]


def test_llama3(llama3_rank_path: Path) -> None:
    """A real vocabulary, its three ends, and a tokenizer's own tokens for the text."""
    tokenizer = Tokenizer.from_ranks(llama3_rank_path)
    ends = [tokenizer.special_tokens[f"<|{name}|>"] for name in ("end_of_text", "eom_id", "eot_id")]
    grammars = Grammars(tokenizer, ends, tokenizer.vocab_size + 64)
    vocab_size = tokenizer.vocab_size + 64
    constraint = grammars.constraint(of_schema(PERSON))
    for token_id in tokenizer.encode('{"name": "Zoë <|eot_id|> 東京 🙂", "age": 42}'):
        ids = allowed(constraint, vocab_size)
        assert token_id in ids
        assert max(ids) < 128_000
        assert constraint.accept(token_id)
    assert allowed(constraint, vocab_size) == sorted(ends)
    text = grammars.constraint(str(grammar_of(None, [a_tool("f")], "auto", True)))
    assert text.accept(tokenizer.encode("Hello")[0])
    assert [i for i in allowed(text, vocab_size) if i >= 128_000] == sorted(ends)


# --- tools ------------------------------------------------------------------------------------------------

TOOLS = [
    a_tool("get_weather", PERSON),
    a_tool("get", {"properties": {"q": {"type": "string"}}}),
    a_tool("now"),
]
CALL = '{"name": "now", "parameters": {}}'


def calls_in(text: str) -> list[tuple[str, Any]]:
    reader = ToolCallReader(["get_weather", "get", "now"])
    events = reader.feed(text) + reader.finish()
    assert not any(isinstance(event, TextPiece) for event in events)
    calls = {event.number: [event.name, ""] for event in events if isinstance(event, CallStart)}
    for event in events:
        if isinstance(event, CallArguments):
            calls[event.number][1] += event.text
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_random_calls_read_back(grammars: Grammars, choice: Any, parallel: bool) -> None:
    grammar = grammar_of(None, TOOLS, choice, parallel)
    assert grammar is not None
    grammars.check(grammar)
    counts = set()
    for seed in range(40):
        calls = calls_in(walk(grammars, grammar, seed, hasten=400))
        counts.add(len(calls))
        for name, arguments in calls:
            assert isinstance(arguments, dict)
            assert name != "now" or arguments == {}
            assert choice == "required" or name == "get_weather"
            if name == "get_weather":
                jsonschema.validate(arguments, PERSON)
    assert min(counts) == 1
    assert (max(counts) > 1) is parallel


def test_automatic_choice(grammars: Grammars) -> None:
    grammar = grammar_of(None, TOOLS, "auto", True)
    assert grammar is not None
    grammars.check(grammar)
    for text in ("", " ", "Hello", "\n\nIt is {12}; é", " x {", "[1]", CALL, f"{CALL}; {CALL}"):
        assert takes(grammars, grammar, text), text
    for text in (
        "{",
        " {",
        "\n{}",
        '\u2003{"name"',
        CALL + " ",
        f"{CALL};{CALL}",
        '{"name": "other", "parameters": {}}',
    ):
        assert not takes(grammars, grammar, text), text
    assert not takes(grammars, str(grammar_of(None, TOOLS, "auto", False)), f"{CALL}; {CALL}")


def test_the_wrapper_is_exact(grammars: Grammars) -> None:
    grammar = str(grammar_of(None, TOOLS, "required", True))
    assert takes(grammars, grammar, CALL)
    for text in (
        "Hello",
        "",
        CALL.replace(": {", ":{"),
        CALL.replace(', "', ',"'),
        CALL[:-1] + " }",
        " " + CALL,
    ):
        assert not takes(grammars, grammar, text), text


@pytest.mark.parametrize(
    ("response_format", "tools", "choice"),
    [
        (None, [], "auto"),
        ({"type": "text"}, TOOLS, "none"),
        (None, TOOLS, "none"),
        ({"type": "text"}, [], "none"),
    ],
)
def test_free_text_has_no_grammar(response_format: Any, tools: Any, choice: Any) -> None:
    assert grammar_of(response_format, tools, choice, True) is None


def test_format_where_no_tool_may_be_called() -> None:
    wished = {"type": "json_object"}
    assert grammar_of(wished, TOOLS, "none", True) == grammar_of(wished, [], "auto", True)
    assert grammar_of(wished, TOOLS, "required", True) == grammar_of(None, TOOLS, "required", True)


# --- refusals ---------------------------------------------------------------------------------------------


def refused(expected: str, param: str, *arguments: Any) -> None:
    with pytest.raises(GrammarError, match=expected) as error:
        grammar_of(*arguments)
    assert error.value.param == param
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("response_format", "tools", "choice", "expected", "param"),
    [
        ({"type": "xml"}, [], "none", "response_format.type must be", "response_format"),
        ({}, [], "none", "response_format.type must be", "response_format"),
        ({"type": "json_schema"}, [], "none", "must be a JSON schema", "response_format"),
        (
            {"type": "json_schema", "json_schema": {"schema": [1]}},
            [],
            "none",
            "must be a JSON schema",
            "response_format",
        ),
        ({"type": "json_object"}, TOOLS, "auto", "can't be combined", "response_format"),
        (None, [], "required", "there are no tools", "tool_choice"),
        (None, TOOLS, "any", "not 'any'", "tool_choice"),
        (
            None,
            TOOLS,
            {"type": "function", "function": {"name": "other"}},
            "name one of tools",
            "tool_choice",
        ),
        (
            None,
            TOOLS,
            {"type": "function", "function": {"name": ["now"]}},
            "name one of tools",
            "tool_choice",
        ),
        (None, [a_tool("a b")], "auto", r"tools\[0\] must be a function with a name", "tools"),
        (None, [a_tool("now\n")], "auto", r"tools\[0\] must be a function with a name", "tools"),
        (None, [a_tool("f"), {"type": "function"}], "auto", r"tools\[1\] must be a function", "tools"),
        (None, [a_tool("f"), a_tool("f")], "auto", "'f' is there twice", "tools"),
        (
            None,
            [a_tool("f", {"type": "array"})],
            "auto",
            "function f must be a JSON schema of type object",
            "tools",
        ),
        (None, [a_tool("f", [1])], "auto", "function f must be a JSON schema of type object", "tools"),
    ],
)
def test_requests_that_contradict_themselves(
    response_format: Any, tools: Any, choice: Any, expected: str, param: str
) -> None:
    refused(expected, param, response_format, tools, choice, True)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "((("}, "unclosed group"),
        ({"type": "string", "format": "no-such"}, "no-such"),
        ({"type": "nothing"}, "nothing"),
        ({"enum": []}, "[Uu]nsatisfiable"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"$ref": "file:///etc/passwd"}, "does not fetch"),
        ({"$ref": "#"}, "can't be enforced"),
        ({"type": "object", "description": 7, "const": "\ud800"}, "can't be enforced"),
    ],
)
def test_schemas_that_llguidance_refuses(grammars: Grammars, schema: Any, expected: str) -> None:
    grammar = of_schema(schema)
    for attempt in (grammars.check, grammars.check, grammars.constraint):
        with pytest.raises(GrammarError, match=expected) as error:
            attempt(grammar)
        assert error.value.param == "response_format"
        assert len(str(error.value).splitlines()) == 1
    tool = grammar_of(None, [a_tool("f", an_object({"x": schema}, required=["x"]))], "auto", True)
    if "$ref" not in schema:
        with pytest.raises(GrammarError) as error:
            grammars.check(str(tool))
        assert error.value.param == "tools"


def nested(depth: int) -> Any:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "integer"}


def chained(number: int, depth: int = 1) -> Any:
    """A schema whose references lead through so many definitions, each nested so deep."""
    definitions: dict[str, Any] = {f"d{number}": {"type": "integer"}}
    for i in range(number):
        inner: Any = {"$ref": f"#/$defs/d{i + 1}"}
        for _ in range(depth):
            inner = {"type": "array", "items": inner}
        definitions[f"d{i}"] = inner
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"enum": list(range(3000))}, "too large"),
        (
            an_object({f"p{i}": {} for i in range(2200)}, required=[f"p{i}" for i in range(2200)])
            | {"$defs": [0] * 600},
            "too large",
        ),
        (an_object({f"p{i}": {} for i in range(400)}), "too large"),
        ({"anyOf": [{"type": "string", "format": "email", "maxLength": i} for i in range(300)]}, "too large"),
        ({"anyOf": [{"type": "string", "pattern": rf"\p{{L}}{{{i}}}"} for i in range(120)]}, "too large"),
        ({"anyOf": [{"minimum": i * 1234567891234} for i in range(300)]}, "too large"),
        ({"type": "object", "patternProperties": {f"^{i}" + "x" * 900: {} for i in range(30)}}, "too large"),
        ({"type": "integer", "multipleOf": 999983}, "too large"),
        ({"type": "number", "multipleOf": 123.457}, "too large"),
        (chained(800), "too large"),
        ({"const": "x" * (MAX_STRING + 1)}, "1001 characters"),
        ({"const": [{"description": "x" * (MAX_STRING + 1)}]}, "1001 characters"),
        (an_object({"x" * (MAX_STRING + 1): {}}), "1001 characters"),
        ({"type": "string", "pattern": "x" * (MAX_STRING + 1)}, "1001 characters"),
        (nested(MAX_DEPTH), "nested too deep"),
        ({"description": "x" * MAX_CHARS}, "262"),
        ({"minimum": float("inf")}, "isn't JSON"),
        ({"minimum": 10**5000}, "too many digits"),
        ({"multipleOf": 10**5000}, "too many digits"),
        ({"x": 10**5000}, "isn't JSON"),
    ],
)
def test_bounds_of_schemas(schema: Any, expected: str) -> None:
    refused(
        expected,
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": schema}},
        [],
        "none",
        True,
    )
    parameters = {"type": "object", "properties": {"x": schema}}
    refused(f"({expected}|nested too deep)", "tools", None, [a_tool("f", parameters)], "auto", True)


def test_the_bound_is_for_all_tools_together() -> None:
    parameters = an_object({f"p{i}": {"type": "string"} for i in range(100)})
    tools = [a_tool(f"f{i}", parameters) for i in range(10)]
    assert grammar_of(None, tools[:5], "auto", True) is not None
    refused("too large", "tools", None, tools, "auto", True)
    assert grammar_of(None, tools, {"type": "function", "function": {"name": "f7"}}, True) is not None


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"value number {i}" for i in range(2000)]},
        an_object({f"p{i}": {"type": "string"} for i in range(300)}),
        {"type": "array", "items": {"type": "string", "maxLength": 10**9}, "maxItems": 10**9},
        {"type": "integer", "multipleOf": 9973},
        chained(500),
        chained(60, 30),
        an_object({"x": {"description": "x" * 20_000, "title": "t" * 2000}}),
    ],
)
def test_what_is_just_within_bounds(grammars: Grammars, schema: Any) -> None:
    """Long chains of references once overflowed the stack, which ends the process."""
    grammar = of_schema(schema)
    grammars.check(grammar)
    assert allowed(grammars.constraint(grammar))


def test_a_pattern_that_outgrows_its_limits_ends_its_answer_only(grammars: Grammars) -> None:
    grammar = of_schema({"type": "string", "pattern": "^.*a.{60}$"})
    grammars.check(grammar)
    rng = random.Random(1)
    constraint = grammars.constraint(grammar)
    assert constraint.accept(ord('"'))

    def go_on() -> None:
        for _ in range(100_000):
            allowed(constraint)
            constraint.accept(rng.choice(b"ab"))

    with pytest.raises(GrammarError, match="response_format: the schema can't be enforced") as error:
        go_on()
    assert len(str(error.value).splitlines()) == 1
    assert follow(grammars.constraint(grammar), '"' + "a" * 61 + '"')


class BracketTokenizer(PieceTokenizer):
    """With tokens of many brackets, as real vocabularies have them."""

    def id_to_bytes(self, token_id: int, /) -> bytes:
        first = 256 + len(PIECES) - 8
        return (
            b"[" * (token_id - first + 2) if first <= token_id < first + 8 else super().id_to_bytes(token_id)
        )


def test_a_schema_whose_masks_take_long_is_refused() -> None:
    """Each bracket may begin any of the alternatives: within other limits a mask takes seconds."""
    grammars = Grammars(BracketTokenizer(), END_IDS, VOCAB_SIZE)
    for count, is_taken in ((4, True), (100, False)):
        schema = {"anyOf": [{"type": "array", "items": {"$ref": "#"}}] * count}
        grammar = grammar_of({"type": "json_schema", "json_schema": {"schema": schema}}, [], "none", True)
        assert grammar is not None
        if is_taken:
            assert follow(grammars.constraint(grammar), "[[[]]]")
        else:
            with pytest.raises(GrammarError, match="Too many items"):
                grammars.constraint(grammar)


def test_many_grammars_are_not_all_kept() -> None:
    grammars = Grammars(PieceTokenizer(), END_IDS, VOCAB_SIZE)
    for i in range(40):
        grammar = of_schema({"const": i})
        grammars.check(grammar)
        assert takes(grammars, grammar, str(i))
    assert len(grammars._compiled) == len(grammars._checked) == grammar_module._CACHED


def test_from_several_threads() -> None:
    grammars = Grammars(PieceTokenizer(), END_IDS, VOCAB_SIZE)
    found: list[str] = []

    def work(number: int) -> None:
        for i in range(20):
            grammar = of_schema(an_object({f"k{i % 5}": {"const": number}}, required=[f"k{i % 5}"]))
            grammars.check(grammar)
            found.append(walk(grammars, grammar, i))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted({next(iter(json.loads(text).values())) for text in found}) == [0, 1, 2, 3]
    assert len(found) == 80
    assert threading.stack_size() != grammar_module._STACK_BYTES


def test_a_model_without_an_end() -> None:
    grammars = Grammars(PieceTokenizer(), (), VOCAB_SIZE)
    for attempt in (grammars.check, grammars.constraint):
        with pytest.raises(GrammarError, match="no end-of-sequence token"):
            attempt(of_schema({}))


def test_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammars = Grammars(PieceTokenizer(), END_IDS, VOCAB_SIZE)
    grammar = of_schema(PERSON)
    for attempt in (grammars.check, grammars.constraint):
        with pytest.raises(OptionError, match=r"pip install 'samir-vllm\[serve\]'"):
            attempt(grammar)


def test_llguidance_is_imported_late() -> None:
    code = (
        "import sys; from samir_vllm.extras.serve.grammar import Grammars, grammar_of\n"
        "assert grammar_of({'type': 'json_object'}, [], 'none', True)\n"
        "assert 'llguidance' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
