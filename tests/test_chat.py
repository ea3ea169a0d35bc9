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
    call = {"arguments": {"<|im_end|>": ["<|im_end|>", {"deep": ("<|im_", "end|>")}], "n": 1.5, "none": None}}
    messages = [{"role": "user", "content": "", "tool_calls": [call]}]
    source = "{{ messages[0].tool_calls | tojson }}{{ messages[0].tool_calls[0].arguments['<|im_end|>'] }}"
    assert max(template(source).encode(messages)) < 256
    joined = "{% for c in messages[0].tool_calls %}{{ c.arguments.values() | list | string }}{% endfor %}"
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
    ],
)
def test_messages_of_another_form(llama3: Tokenizer, messages: Any, expected: str) -> None:
    refused(Llama3Chat(llama3), messages, expected)
    refused(template(CHATML_TEMPLATE), messages, expected)


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
