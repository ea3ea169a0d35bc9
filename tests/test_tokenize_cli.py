"""``tokenize``: what it prints of a text, a dialog and ids, and the mistakes it refuses."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from samir_vllm.errors import ChatError, ModelNotFoundError, OptionError, SamirVllmError, TokenizerError
from samir_vllm.extras import tokenize

SPECIAL = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
BOS, START, END, EOT = range(257, 261)
HI = 256  # the one merge


def write_tokenizer(folder: Path, special: list[str]) -> None:
    """A ``tokenizer.json``: an id for each byte (its own value), 256 for "hi", then the special tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}
    added = [{"id": 257 + i, "content": name, "special": True} for i, name in enumerate(special)]
    root = {
        "model": {"type": "BPE", "vocab": vocab | {"hi": HI}, "merges": ["h i"]},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": added,
    }
    (folder / "tokenizer.json").write_text(json.dumps(root), encoding="utf-8")


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")  # makes it a model; nothing here reads it
    write_tokenizer(tmp_path, SPECIAL)
    return str(tmp_path)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    tokenize.add_arguments(parser)
    return tokenize.run(parser.parse_args(words))


def refusal(*words: str) -> SamirVllmError:
    with pytest.raises(SamirVllmError) as caught:
        run(*words)
    assert "\n" not in str(caught.value)
    return caught.value


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert run(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_the_parser_costs_no_heavy_imports() -> None:
    code = (
        "import argparse, sys; from samir_vllm.extras import doctor, tokenize; "
        "doctor.add_arguments(argparse.ArgumentParser()); tokenize.add_arguments(argparse.ArgumentParser()); "
        "print(*sorted({'cupy', 'jinja2', 'ml_dtypes', 'regex', 'rich', 'safetensors'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


# Texts


def test_table_has_a_row_for_each_token(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("hi [b]é\x1b", "--model", model) == 0
    *table, counts, ids = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in table]
    assert rows[0] == ["#", "id", "piece", "bytes"]
    assert rows[1] == ["0", "256", "'hi'", "68", "69"]
    assert rows[2] == ["1", "32", "'", "'", "20"]
    assert [row[2] for row in rows[3:]] == ["'['", "'b'", "']'", r"'\xc3'", r"'\xa9'", r"'\x1b'"]
    assert counts == "8 tokens, 9 bytes"
    assert ids == "256 32 91 98 93 195 169 27"


def test_a_long_piece_is_not_cut_short_nor_read_as_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"[b]{'x' * 300}[/b]"
    (tmp_path / "config.json").write_text("{}")
    write_tokenizer(tmp_path, [name])
    run(name, "--special", "--model", str(tmp_path))
    out = capsys.readouterr().out
    assert out.count("x") == 300
    assert "[b]" in out


def test_shown_escapes_what_the_terminal_lacks() -> None:
    assert tokenize.shown("é\u200b".encode()) == r"'é\u200b'"
    assert tokenize.shown("é".encode(), "ascii") == r"'\xe9'"


def test_json_text_is_exact_in_bytes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "hié", "--model", model)
    assert found["ids"] == [HI, 0xC3, 0xA9]
    assert found["text"] == "hié"
    assert bytes.fromhex(found["bytes"]) == "hié".encode()
    assert found["tokens"][0] == {"id": HI, "text": "hi", "bytes": "6869", "special": False}
    assert found["tokens"][1] == {"id": 0xC3, "text": "\ufffd", "bytes": "c3", "special": False}


def test_special_tokens_only_when_asked_for(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = "hi<|eot_id|>"
    plain = as_json(capsys, text, "--model", model)
    assert plain["ids"] == [HI, *b"<|eot_id|>"]
    special = as_json(capsys, text, "--special", "--model", model)
    assert special["ids"] == [HI, EOT]
    assert [token["special"] for token in special["tokens"]] == [False, True]


def test_standard_input_is_read_to_the_byte(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"a\r\nhi\n")
    assert as_json(capsys, "-", "--model", model)["ids"] == [*b"a\r\n", HI, 10]


def test_empty_text_has_no_tokens(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, "", "--model", model)["ids"] == []
    run("", "--model", model)
    assert "0 tokens, 0 bytes" in capsys.readouterr().out


# Dialogs


def test_chat_wraps_the_text_and_keeps_it_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "hi<|eot_id|>", "--chat", "--system", "s", "--model", model)

    def message(role: str, content: list[int]) -> list[int]:
        return [START, *role.encode(), END, 10, 10, *content, EOT]

    said = [HI, *b"<|eot_id|>"]
    assert found["ids"] == [
        BOS,
        *message("system", [*b"s"]),
        *message("user", said),
        START,
        *b"assistant",
        END,
        10,
        10,
    ]


def test_chat_without_system(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    ids = as_json(capsys, "x", "--chat", "--model", model)["ids"]
    assert ids[:6] == [BOS, START, *b"user"]


def test_model_without_chat_format(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_tokenizer(tmp_path, ["<s>"])
    error = refusal("x", "--chat", "--model", str(tmp_path))
    assert isinstance(error, ChatError)
    assert str(tmp_path) in str(error)
    assert "leave out --chat" in str(error)


# The way back


@pytest.mark.parametrize(
    "words", [["256 195,169"], ["256", "195", "169"], ["256,", "195 ,169"], ["[256, 195, 169]"]]
)
def test_decode_writes_the_exact_bytes(
    model: str, words: list[str], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run(*words, "--decode", "--model", model) == 0
    assert capsysbinary.readouterr().out == b"hi\xc3\xa9"


def test_decode_takes_half_characters_names_and_line_ends(
    model: str, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    run("--decode", "195 13 10 260", "--model", model)
    assert capsysbinary.readouterr().out == b"\xc3\r\n<|eot_id|>"


def test_decode_undoes_the_ids_line(model: str, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    text = "hi thïs\n 😀\t"
    run(text, "--model", model)
    ids = capsysbinary.readouterr().out.decode().splitlines()[-1]
    run("--decode", ids, "--model", model)
    assert capsysbinary.readouterr().out == text.encode()


def test_decode_reads_standard_input_and_writes_json(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"256\n33\n")
    found = as_json(capsys, "--decode", "-", "--model", model)
    assert (found["text"], found["ids"], found["bytes"]) == ("hi!", [256, 33], "686921")


# Mistakes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "give TEXT"),
        (["a", "b"], "put one text in quotes"),
        (["a", "--system", "s"], "add --chat"),
        (["1", "--decode", "--chat"], "--decode and --chat"),
        (["1", "--decode", "--special"], "--decode and --special"),
        (["a", "--chat", "--special"], "--chat and --special"),
        (["1 x7", "--decode"], "'x7' is not a token id"),
        (["1.5", "--decode"], "'1.5' is not a token id"),
        (["-1", "--decode"], "'-1' is not a token id"),
        (["1_0", "--decode"], "'1_0' is not a token id"),
        (["²", "--decode"], "'²' is not a token id"),
        (["9" * 5000, "--decode"], "is not a token id"),
    ],
)
def test_refused_options(model: str, words: list[str], expected: str) -> None:
    error = refusal(*words, "--model", model)
    assert isinstance(error, OptionError)
    assert expected in str(error)
    assert len(str(error)) < 200


def test_refused_ids_and_models(model: str, tmp_path: Path) -> None:
    assert isinstance(refusal("--decode", "261", "--model", model), TokenizerError)
    assert isinstance(refusal("x", "--model", str(tmp_path / "none")), ModelNotFoundError)
    (Path(model) / "tokenizer.json").write_text("{")
    assert isinstance(refusal("x", "--model", model), TokenizerError)


def test_refused_standard_input(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, b"ab\xff")
    assert "byte 2 isn't UTF-8" in str(refusal("-", "--model", model))
