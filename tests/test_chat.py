"""Chat formats: Meta's dialogs id by id, templates, and text that tries to become a control token."""

import itertools
import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samir_vllm.chat import ChatFormat, Llama3Chat, TemplateChat, load_chat_format
from samir_vllm.errors import ChatError
from samir_vllm.tokenizer import Tokenizer, load_tokenizer

GOLDEN_DIR = Path(__file__).parent / "golden"
GOLDEN = json.loads((GOLDEN_DIR / "llama3_tokenizer.json").read_text())
SMOLLM2 = json.loads((GOLDEN_DIR / "smollm2_greedy.json").read_text())

HELLO = [{"role": "user", "content": "hello"}]
PATH = Path("tokenizer_config.json")

# What Llama 3.2's own template does with messages alone: always a system turn with dates, contents trimmed.
LLAMA32_TEMPLATE = """
{{- bos_token }}
{%- if messages[0].role == "system" %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\nToday Date: " }}
{{- (date_string if date_string is defined else "26 Jul 2024") ~ "\\n\\n" ~ system ~ "<|eot_id|>" }}
{%- for message in messages %}
    {{- "<|start_header_id|>" ~ message.role ~ "<|end_header_id|>\\n\\n" }}
    {{- message.content | trim ~ "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
"""


class ByteTokenizer:
    """A byte is an id; control tokens follow from 256 up."""

    def __init__(self, *names: str, adds_bos: bool = False) -> None:
        self.special_tokens = {name: 256 + i for i, name in enumerate(names)}
        self.bos_token_id = 256 if names else None
        self.adds_bos = adds_bos

    def encode(self, text: str, /) -> list[int]:
        return list(text.encode("utf-8", errors="surrogatepass"))


CHATML = ByteTokenizer("<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def template(source: str, tokenizer: ByteTokenizer = CHATML, **token_names: str) -> TemplateChat:
    return TemplateChat(source, PATH, tokenizer, token_names)


def text_of(ids: list[int]) -> str:
    """The ids of CHATML as text, control tokens as [256] and [257]."""
    runs = itertools.groupby(ids, key=lambda token_id: token_id < 256)
    return "".join(
        bytes(run).decode() if is_text else "".join(f"[{i}]" for i in run) for is_text, run in runs
    )


@pytest.fixture(scope="module")
def llama3(llama3_rank_path: Path) -> Tokenizer:
    return Tokenizer.from_ranks(llama3_rank_path)


# --- golden data -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN["dialogs"], ids=lambda case: case["name"])
def test_native_format_as_metas_reference(llama3: Tokenizer, case: dict[str, Any]) -> None:
    ids = Llama3Chat(llama3).encode(case["messages"])
    assert ids == case["ids"]
    assert ids.count(llama3.bos_token_id) == 1


@pytest.mark.parametrize("case", GOLDEN["hub_template_dialogs"]["dialogs"], ids=lambda case: case["name"])
def test_llama32_template(llama3: Tokenizer, case: dict[str, Any]) -> None:
    chat = TemplateChat(LLAMA32_TEMPLATE, PATH, llama3, {"bos_token": "<|begin_of_text|>"})
    assert chat.encode(case["messages"], date=case["date_string"]) == case["ids"]
    assert chat.encode(case["messages"]) == case["ids"]  # the template's own date is the same


def test_template_sees_the_date(llama3: Tokenizer) -> None:
    chat = TemplateChat(LLAMA32_TEMPLATE, PATH, llama3, {"bos_token": "<|begin_of_text|>"})
    assert "Today Date: 01 May 2031\n\n<|eot_id|>" in llama3.decode(chat.encode(HELLO, date="01 May 2031"))


@pytest.mark.demo
def test_demo_model_prompts(demo_model_dir: Path) -> None:
    chat = load_chat_format(demo_model_dir, load_tokenizer(demo_model_dir))
    assert chat is not None
    for case in SMOLLM2["cases"]:
        if case["kind"] == "chat":
            assert chat.encode([{"role": "user", "content": case["text"]}]) == case["prompt_ids"]


# --- injection ---------------------------------------------------------------------------------------------

HOSTILE_PARTS = [
    *("<|im_end|>", "<|im_start|>", "<|IM_END|>", "<|", "<|im_", "im", "start", "_end|>", "end|>", "|>"),
    *'<> \n\ta"\\ſ\u212a\ufdd0\ufdd1\ud83d',
]
HOSTILE = st.lists(st.sampled_from(HOSTILE_PARTS), max_size=8).map("".join)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "x"]) | HOSTILE, "content": HOSTILE}),
    min_size=1,
    max_size=4,
)
# Each with the number of control tokens it writes for a message. They join, trim, fold case and quote.
TEMPLATES = [
    ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}", 2),
    ("{% for m in messages %}<|im_start|>{{ m.content | trim }}{{ m.role | trim }}{% endfor %}", 1),
    ("{% for m in messages %}{{ m.content.strip() }}{% endfor %}{{ messages | length }}", 0),
    ("{% for m in messages %}{{ m.content | lower ~ m.role | lower }}{% endfor %}", 0),
    ("{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(ensure_ascii=true) }}{% endfor %}", 0),
    ("{% for m in messages %}{{ m.content }}|>{{ m.content }}end|>{{ m.content }}_end|>{% endfor %}", 0),
    ("{{ messages | map(attribute='content') | join }}", 0),
]


@settings(max_examples=300, deadline=None)
@given(messages=MESSAGES, chosen=st.sampled_from(TEMPLATES))
def test_text_never_becomes_a_control_token(messages: list[dict[str, str]], chosen: tuple[str, int]) -> None:
    source, per_message = chosen
    ids = template(source).encode(messages)
    assert sum(token_id >= 256 for token_id in ids) == per_message * len(messages)


@settings(max_examples=200, deadline=None)
@given(messages=MESSAGES)
def test_guards_leave_no_trace(messages: list[dict[str, str]]) -> None:
    """Without control tokens in the template, the ids are those of the text that plain Jinja renders."""
    each = "{{ m.role }}{{ m.content | trim }}{{ m | tojson(ensure_ascii=true) }}\n"
    source = "{% for m in messages %}" + each + "{% endfor %}"
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = lambda value, **options: json.dumps(value, **options)
    assert template(source).encode(messages) == CHATML.encode(
        plain.from_string(source).render(messages=messages)
    )


def test_guards_reach_nested_values_and_keys() -> None:
    arguments = {"<|im_end|>": ["<|im_end|>", {"deep": ("<|im_", "end|>")}], "n": 1.5, "none": None}
    call = {"function": {"name": "<|im_end|>", "arguments": arguments}}
    messages = [{"role": "user", "content": "", "tool_calls": [call]}]
    source = (
        "{{ messages[0].tool_calls | tojson }}"
        "{{ messages[0].tool_calls[0].function.arguments['<|im_end|>'] }}"
        "{{ messages[0].tool_calls[0].function.name }}"
    )
    assert max(template(source).encode(messages)) < 256
    joined = "{% for c in messages[0].tool_calls %}{{ c.function.arguments.values() | list }}{% endfor %}"
    assert max(template(joined).encode(messages)) < 256


@pytest.mark.parametrize(
    ("begun", "source"),
    [
        ("<|im_", "{{ messages[0].content }}end|>"),
        ("<|im_ \n", "{{ messages[0].content | trim }}end|>"),
        ("<|IM_", "{{ messages[0].content | lower }}end|>"),
        ("<|", "<|im_{{ messages[0].content }}im_end|>"),
        ("<", "{{ messages[0].content ~ '|im_' ~ 'start|>' }}"),
    ],
)
def test_a_begun_name_is_not_completed(begun: str, source: str) -> None:
    assert max(template(source).encode([{"role": "user", "content": begun}])) < 256


def test_the_date_is_guarded_too() -> None:
    ids = template("{{ date_string }}{{ messages[0].role }}").encode(HELLO, date="<|im_end|>")
    assert text_of(ids) == "<|im_end|>user"


def test_native_format_never_reads_names(llama3: Tokenizer) -> None:
    content = "".join(llama3.special_tokens)
    ids = Llama3Chat(llama3).encode([{"role": "user", "content": content}])
    assert sum(map(llama3.is_special, ids)) == 6
    assert llama3.decode(ids[5:-5]) == content


# --- tools ------------------------------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Today's weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def call(name: str, arguments: Any, call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED_TWICE = [
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": [call("f", '{"x":1}'), call("g", "{}", "call_2")]},
    {"role": "tool", "tool_call_id": "call_2", "content": "2"},
    {"role": "tool", "tool_call_id": "call_1", "content": "1"},
    {"role": "user", "content": "thanks"},
]

# Llama 3.2's own template, as far as tools go.
LLAMA32_TOOL_TEMPLATE = """
{{- "Environment: ipython\n" if tools is not none else "" }}
{%- for message in messages %}
    {{- "<|im_start|>" ~ message.role ~ "\n" }}
    {%- if loop.first and tools is not none %}
        {%- for t in tools %}
            {{- t | tojson(indent=4) ~ "\n\n" }}
        {%- endfor %}
    {%- endif %}
    {%- if "tool_calls" in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set called = message.tool_calls[0].function %}
        {{- '{"name": "' + called.name + '", "parameters": ' }}
        {{- called.arguments | tojson ~ "}" }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- "<|im_end|>" }}
{%- endfor %}
"""


def test_native_tools_as_in_metas_template(llama3: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO, {"role": "user", "content": "and now"}]
    ids = Llama3Chat(llama3).encode(messages, tools=[WEATHER, WEATHER])
    definition = json.dumps(WEATHER, indent=4) + "\n\n"
    assert llama3.decode(ids) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Environment: ipython\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
        "Given the following functions, please respond with a JSON for a function call with its proper "
        "arguments that best answers the given prompt.\n\n"
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its '
        f"value}}.Do not use variables.\n\n{definition}{definition}hello<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nand now<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    late = [{"role": "assistant", "content": "Hi."}, *HELLO]
    told_late = llama3.decode(Llama3Chat(llama3).encode(late, tools=[WEATHER]))
    assert "assistant<|end_header_id|>\n\nHi.<|eot_id|>" in told_late
    alone = llama3.decode(Llama3Chat(llama3).encode(HELLO, tools=[WEATHER]))
    assert "system<|end_header_id|>\n\nEnvironment: ipython\n\n<|eot_id|>" in alone


def test_native_calls_and_results(llama3: Tokenizer) -> None:
    """Arguments in a str come as they are; the same tokens as the model's own answer has."""
    chat = Llama3Chat(llama3)
    text = llama3.decode(chat.encode(ASKED_TWICE))
    said = '{"name": "f", "parameters": {"x":1}}; {"name": "g", "parameters": {}}'
    assert (
        f"assistant<|end_header_id|>\n\n{said}<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n2"
        in text
    )
    as_text = [ASKED_TWICE[0], {"role": "assistant", "content": said}, *ASKED_TWICE[2:]]
    assert chat.encode(ASKED_TWICE) == chat.encode(as_text)
    both = [*HELLO, {"role": "assistant", "content": "I look. ", "tool_calls": [call("é", {"ü": [1]})]}]
    assert 'I look. {"name": "é", "parameters": {"ü": [1]}}<|eot_id|>' in llama3.decode(chat.encode(both))


def test_native_tools_never_become_control_tokens(llama3: Tokenizer) -> None:
    name = "".join(llama3.special_tokens)
    tool = {"type": "function", "function": {"name": name, "description": name, "parameters": {name: [name]}}}
    messages = [*HELLO, {"role": "assistant", "content": name, "tool_calls": [call(name, name)]}]
    assert sum(map(llama3.is_special, Llama3Chat(llama3).encode(messages, tools=[tool]))) == 12


def test_a_template_sees_tools_and_calls_as_hugging_faces_do() -> None:
    chat = template(LLAMA32_TOOL_TEMPLATE)
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call("f", ' {"x" : "<é>"}')]}]
    assert text_of(chat.encode(messages, tools=[WEATHER])) == (
        "Environment: ipython\n[256]user\n" + json.dumps(WEATHER, indent=4) + "\n\nhello[257]"
        '[256]assistant\n{"name": "f", "parameters": {"x": "<é>"}}[257]'
    )
    for none in (None, []):
        assert text_of(chat.encode(HELLO, tools=none)) == "[256]user\nhello[257]"
        answered = [*HELLO, {"role": "assistant", "content": "yes", "tool_calls": none}]
        assert text_of(chat.encode(answered)).endswith("yes[257]")


def test_arguments_that_are_no_object_stay_text() -> None:
    chat = template("{{ messages[0].tool_calls[0].function.arguments is string }}")
    for arguments in ("{", "[1]", "7", '{"a": ' * 5000, '{"a": 1' + "0" * 5000 + "}"):
        message = {"role": "assistant", "tool_calls": [call("f", arguments)]}
        assert text_of(chat.encode([message])) == "True"


def test_calls_that_a_template_takes_one_by_one() -> None:
    assert text_of(template(LLAMA32_TOOL_TEMPLATE).encode(ASKED_TWICE)) == (
        "[256]user\nhello[257]"
        '[256]assistant\n{"name": "g", "parameters": {}}[257][256]tool\n2[257]'
        '[256]assistant\n{"name": "f", "parameters": {"x": 1}}[257][256]tool\n1[257]'
        "[256]user\nthanks[257]"
    )
    unanswered = text_of(template(LLAMA32_TOOL_TEMPLATE).encode(ASKED_TWICE[:2]))
    assert unanswered.index('"f"') < unanswered.index('"g"')
    given_up = text_of(template(LLAMA32_TOOL_TEMPLATE).encode([*ASKED_TWICE[:2], *HELLO]))
    assert given_up.index('"f"') < given_up.index('"g"') < given_up.rindex("hello")
    spoken = [{**ASKED_TWICE[1], "content": "I look."}]
    each = (
        "{% for m in messages %}{% if m.tool_calls | length > 1 %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{{ m.tool_calls[0].function.name }}{% endfor %}"
    )
    assert text_of(template(each).encode(spoken)) == "I look.fg"
    refused(template("{{ raise_exception('no') }}{{ tool_calls }}"), ASKED_TWICE, "failed: no")


def test_a_template_without_tools_is_told_in_words() -> None:
    chat = template(CHATML_TEMPLATE)
    system = [{"role": "system", "content": "Be brief."}]
    text = text_of(chat.encode([*system, *HELLO], tools=[WEATHER]))
    assert text.startswith("[256]system\nBe brief.\n\nYou can call the functions below.")
    assert '"parameters": ' in text
    assert json.dumps(WEATHER["function"]) + "[257]\n[256]user\nhello[257]" in text
    assert text_of(chat.encode(HELLO, tools=[WEATHER])) == text.replace("Be brief.\n\n", "")
    assert text_of(chat.encode(ASKED_TWICE, add_generation_prompt=False)) == (
        "[256]user\nhello[257]\n"
        '[256]assistant\n{"name": "f", "parameters": {"x":1}}; {"name": "g", "parameters": {}}[257]\n'
        "[256]user\nResult of g: 2\nResult of f: 1[257]\n[256]user\nthanks[257]\n"
    )
    again = [*ASKED_TWICE[:3], *ASKED_TWICE[:3]]
    assert text_of(chat.encode(again)).count("Result of g: 2[257]") == 2
    assert text_of(chat.encode(again)).count("Result of g") == 2
    assert text_of(chat.encode([{"role": "tool", "content": "x"}])).startswith("[256]tool\nx[257]")


@pytest.mark.demo
def test_demo_model_with_tools(demo_model_dir: Path) -> None:
    tokenizer = load_tokenizer(demo_model_dir)
    chat = load_chat_format(demo_model_dir, tokenizer)
    assert chat is not None
    text = tokenizer.decode(chat.encode(ASKED_TWICE, tools=[WEATHER]))
    assert text.count("<|im_start|>") == text.count("<|im_end|>") + 1 == 6
    assert json.dumps(WEATHER["function"]) in text


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(HOSTILE, min_size=6, max_size=6), data=st.data())
def test_tools_never_become_control_tokens(texts: list[str], data: st.DataObject) -> None:
    name, told, key, value, result, call_id = texts
    function = {"name": name, "description": told, "parameters": {key: {"enum": [value, told]}}}
    arguments = json.dumps({key: value, "x": [told]}, ensure_ascii=data.draw(st.booleans()))
    escaped = arguments.replace("<", "\\u003c") if data.draw(st.booleans()) else arguments
    messages = [
        {"role": "user", "content": told},
        {"role": "assistant", "content": None, "tool_calls": [call(name, escaped, call_id)]},
        {"role": "tool", "content": result, "tool_call_id": call_id},
    ]
    tools = [{"type": "function", "function": function}]
    each = "{% for m in messages %}<|im_start|>{{ m.content }}{{ m.tool_calls }}{% endfor %}{{ tools }}"
    for source, per_message in ((LLAMA32_TOOL_TEMPLATE, 2), (CHATML_TEMPLATE, 2), (each, 1)):
        ids = template(source).encode(messages, tools=tools, add_generation_prompt=False)
        num_messages = 3 + (source == CHATML_TEMPLATE)  # there the tools have a message of their own
        assert sum(token_id >= 256 for token_id in ids) == per_message * num_messages


# --- BOS ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adds_bos", [True, False])
def test_one_bos(adds_bos: bool) -> None:
    tokenizer = ByteTokenizer("<s>", "<|end|>", adds_bos=adds_bos)
    writes = template("{{ bos_token }}{{ messages[0].content }}", tokenizer, bos_token="<s>")
    leaves = template("{{ messages[0].content }}", tokenizer)
    assert writes.encode(HELLO) == [256, *b"hello"]
    assert leaves.encode(HELLO) == [256, *b"hello"] if adds_bos else [*b"hello"]
    hostile = [{"role": "user", "content": "<s>"}]
    assert writes.encode(hostile) == [256, *b"<s>"]
    assert leaves.encode(hostile) == ([256] if adds_bos else []) + [*b"<s>"]


# --- what a template may use -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        (CHATML_TEMPLATE, "[256]user\nhello[257]\n[256]assistant\n"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hello"}]'),
        ("{{ '<é&>' | tojson }}{{ '<é>' | tojson(ensure_ascii=true) }}", '"<é&>""<\\u00e9>"'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  2\n ],\n "b": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ eos_token }}{{ nothing }}{{ tools is none }}{{ documents is none }}", "[257]TrueTrue"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
        ("{{ date_string is defined }}", "False"),
    ],
)
def test_template_features(source: str, rendered: str) -> None:
    assert text_of(template(source, eos_token="<|im_end|>").encode(HELLO)) == rendered


def test_no_generation_prompt(llama3: Tokenizer) -> None:
    ids = template(CHATML_TEMPLATE).encode(HELLO, add_generation_prompt=False)
    assert text_of(ids) == "[256]user\nhello[257]\n"
    native = Llama3Chat(llama3)
    assert native.encode(HELLO, add_generation_prompt=False) == native.encode(HELLO)[:-4]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    chat = template(CHATML_TEMPLATE)
    assert chat.encode([{"role": "user", "content": parts}]) == chat.encode(HELLO)


def test_longest_control_token_wins() -> None:
    tokenizer = ByteTokenizer("<a>", "<a><b>", "x")
    assert template("<a><b><a>x", tokenizer).encode(HELLO) == [257, 256, ord("x")]


def test_tokenizer_without_control_tokens() -> None:
    assert template("{{ messages[0].content }}<a>", ByteTokenizer()).encode(HELLO) == [*b"hello<a>"]


# --- refusals ----------------------------------------------------------------------------------------------


def refused(chat: ChatFormat, messages: Any, expected: str) -> None:
    with pytest.raises(ChatError, match=expected) as error:
        chat.encode(messages)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "list of at least one"),
        ("hello", "list of at least one"),
        ({"role": "user"}, "list of at least one"),
        (None, "list of at least one"),
        (["hello"], r"messages\[0\] should be a mapping"),
        ([*HELLO, {"content": "x"}], r"messages\[1\] should be a mapping with a str 'role'"),
        ([{"role": 1, "content": "x"}], r"messages\[0\] should be a mapping with a str 'role'"),
        ([{"role": "user"}], r"messages\[0\].content should be .*None"),
        ([{"role": "user", "content": 7}], r"messages\[0\].content should be .*7"),
        ([{"role": "user", "content": [{"type": "image"}]}], "holds {'type': 'image'}"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "holds {'text': None"),
        ([{"role": "user", "content": ["x"]}], "holds 'x'"),
        (
            [{"role": "assistant", "content": None, "tool_calls": []}],
            r"messages\[0\].content should be .*None",
        ),
        ([{"role": "assistant", "tool_calls": "f"}], r"messages\[0\].tool_calls should be a list, is 'f'"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"messages\[0\].tool_calls\[0\] should be .*is {}"),
        ([{"role": "assistant", "tool_calls": [call("f", None)]}], r"tool_calls\[0\] should be"),
        (
            [{"role": "assistant", "tool_calls": [call("f", "{}"), call(7, "{}")]}],
            r"tool_calls\[1\] should be",
        ),
    ],
)
def test_messages_of_another_form(llama3: Tokenizer, messages: Any, expected: str) -> None:
    refused(Llama3Chat(llama3), messages, expected)
    refused(template(CHATML_TEMPLATE), messages, expected)


@pytest.mark.parametrize("tool", [7, {}, {"function": "f"}, {"function": {"name": None}}])
def test_tools_of_another_form(llama3: Tokenizer, tool: Any) -> None:
    for chat in (Llama3Chat(llama3), template(CHATML_TEMPLATE), template(LLAMA32_TOOL_TEMPLATE)):
        with pytest.raises(ChatError, match=r"tools\[1\] should be"):
            chat.encode(HELLO, tools=[WEATHER, tool])


def test_native_tools_that_cannot_be_told(llama3: Tokenizer) -> None:
    chat = Llama3Chat(llama3)
    with pytest.raises(ChatError, match="first user message"):
        chat.encode([{"role": "system", "content": "x"}], tools=[WEATHER])
    nested: Any = "x"
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(ChatError, match="nested too deep"):
        chat.encode(HELLO, tools=[{"function": {"name": "f", "parameters": nested}}])
    with pytest.raises(ChatError, match="hold <"):
        chat.encode(HELLO, tools=[{"function": {"name": "f", "parameters": Odd()}}])


def test_native_roles(llama3: Tokenizer) -> None:
    chat = Llama3Chat(llama3)
    assert "ipython<|end_header_id|>" in llama3.decode(chat.encode([{"role": "tool", "content": "1"}]))
    refused(
        chat, [*HELLO, {"role": "critic\n", "content": ""}], r"messages\[1\]: role 'critic\\n' is unknown"
    )


class Odd:
    def __repr__(self) -> str:
        return "<|im_end|>\nodd"


def test_messages_that_cannot_be_guarded() -> None:
    nested: Any = "x"
    for _ in range(5000):
        nested = [nested]
    refused(template("x"), [{"role": "user", "content": "", "calls": nested}], "nested too deep")
    refused(
        template("{{ messages }}"),
        [{"role": "user", "content": "", "odd": Odd()}],
        "hold <|im_end|> odd; use",
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate; change the messages"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% for i in range(999999999) %}{% endfor %}", "Range too big"),
        ("{{ 1 // 0 }}", "division"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_template_that_fails(source: str, expected: str) -> None:
    refused(template(source), HELLO, f"tokenizer_config.json: chat template failed: .*({expected})")


@pytest.mark.parametrize("source", ["a\n{% for %}", "{{ x | no_such_filter }}\n{{", "{{" + "(" * 5000])
def test_template_that_does_not_compile(source: str) -> None:
    with pytest.raises(ChatError, match=r"tokenizer_config.json.*chat template failed") as error:
        template(source)
    assert len(str(error.value).splitlines()) == 1


# --- which format ------------------------------------------------------------------------------------------

LLAMA3_LIKE = ByteTokenizer("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def test_format_without_a_template(tmp_path: Path) -> None:
    native = load_chat_format(tmp_path, LLAMA3_LIKE)
    assert native is not None
    assert native.name == "llama3"
    assert load_chat_format(tmp_path, CHATML) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": null}')
    assert load_chat_format(tmp_path, CHATML) is None


def test_template_files_in_order(tmp_path: Path) -> None:
    files = {
        "chat_template.json": json.dumps({"chat_template": "from json"}),
        "tokenizer_config.json": json.dumps({"chat_template": "from config"}),
        "chat_template.jinja": "from jinja",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        chat = load_chat_format(tmp_path, LLAMA3_LIKE)
        assert chat is not None
        assert chat.name == "template"
        assert (
            bytes(chat.encode(HELLO)).decode() == content if name.endswith("jinja") else json.loads(content)
        )


def test_named_templates_and_token_names(tmp_path: Path) -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ pad_token }}"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": source}]
    config = {"chat_template": named, "eos_token": {"content": "<|im_end|>"}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    chat = load_chat_format(tmp_path, CHATML)
    assert chat is not None
    assert chat.encode(HELLO) == [256, 257]  # BOS from the tokenizer, EOS from the file


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer_config.json", "{", "isn't JSON"),
        ("tokenizer_config.json", "[]", "JSON object"),
        ("tokenizer_config.json", '{"a": ' * 3000, "isn't JSON"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template should be"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": "x"}, 7]}', "'default'"),
        ("chat_template.json", '{"chat_template": {}}', "chat_template should be"),
        ("chat_template.jinja", "\xff", "isn't UTF-8"),
        ("chat_template.jinja", "\n{% if %}", "template line 2"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: str, expected: str) -> None:
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ChatError, match=expected) as error:
        load_chat_format(tmp_path, CHATML)
    assert str(error.value).startswith(str(tmp_path / name))
    assert len(str(error.value).splitlines()) == 1
