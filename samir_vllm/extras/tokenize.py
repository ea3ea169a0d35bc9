"""``tokenize``: the pieces, ids and bytes of a text or a dialog, and the way back from ids to bytes.

Reads a model's tokenizer and chat format; knows nothing of its weights, of engines or of devices.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from samir_vllm.commandline import quoted
from samir_vllm.errors import ChatError, OptionError

if TYPE_CHECKING:
    from samir_vllm.tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("text", nargs="*", metavar="TEXT", help="a text, or ids; - reads standard input")
    parser.add_argument(
        "--model", metavar="DIR|NAME", help="model folder, or a name under models/ (else $SAMIR_VLLM_MODEL)"
    )
    parser.add_argument("--chat", action="store_true", help="TEXT as a user's message in the chat format")
    parser.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    parser.add_argument(
        "--decode", action="store_true", help="TEXT is ids, separated by spaces or commas; print their bytes"
    )
    parser.add_argument(
        "--special", action="store_true", help="names of special tokens in TEXT are those tokens"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0.

    Raises:
        SamirVllmError: options that contradict each other, no such model, a damaged or missing tokenizer,
            an id outside the vocabulary.
    """
    from samir_vllm.hub import resolve_model
    from samir_vllm.tokenizer import load_tokenizer

    _check(args)
    text = _read_text(args)
    model_dir = resolve_model(args.model)
    tokenizer = load_tokenizer(model_dir)
    if args.decode:
        ids = parse_ids(text)
    elif args.chat:
        ids = _encode_dialog(text, args.system, model_dir, tokenizer)
    else:
        ids = tokenizer.encode(text, allow_special=args.special)
    data = tokenizer.decode_bytes(ids)
    if args.json:
        print(json.dumps(_as_json(ids, data, tokenizer)))
    elif args.decode:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)  # as they are: a token may hold half a character
        sys.stdout.buffer.flush()
    else:
        _print_table(ids, tokenizer)
        print(f"{len(ids)} tokens, {len(data)} bytes")
        print(*ids)
    return 0


def parse_ids(text: str) -> list[int]:
    """Ids from numbers separated by white space or commas; the brackets of a list may stay."""
    words = re.split(r"[\s,\[\]]+", text)
    for word in filter(None, words):
        if not re.fullmatch(r"[0-9]{1,18}", word):
            raise OptionError(
                f"--decode: {word[:40]!r} is not a token id; give whole numbers separated by spaces or commas"
            )
    return [int(word) for word in words if word]


def shown(data: bytes, encoding: str = "utf-8") -> str:
    """A token's bytes to look at: quoted, with escapes for what isn't UTF-8, can't be seen or printed."""
    return quoted(data.decode("utf-8", errors="backslashreplace"), encoding)


def _check(args: argparse.Namespace) -> None:
    for option in ("chat", "special"):
        if args.decode and getattr(args, option):
            raise OptionError(f"--decode and --{option} contradict each other; leave one out")
    if args.chat and args.special:
        raise OptionError(
            "--chat and --special contradict each other: text in a message is never a special token; "
            "leave one out"
        )
    if args.system is not None and not args.chat:
        raise OptionError("--system is a message of a dialog; add --chat")


def _read_text(args: argparse.Namespace) -> str:
    """TEXT, or standard input to the byte (text mode would turn CR LF into LF)."""
    if not args.text:
        raise OptionError("nothing to tokenize; give TEXT, or - for standard input")
    if len(args.text) > 1 and not args.decode:
        raise OptionError(f"{len(args.text)} texts given; put one text in quotes")
    if args.text != ["-"]:
        return " ".join(args.text)
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as exc:
        raise OptionError(f"standard input: byte {exc.start} isn't UTF-8; convert the text first") from None


def _encode_dialog(text: str, system: str | None, model_dir: Path, tokenizer: Tokenizer) -> list[int]:
    from samir_vllm.chat import load_chat_format

    chat = load_chat_format(model_dir, tokenizer)
    if chat is None:
        raise ChatError(f"{model_dir}: this model has no chat format; leave out --chat")
    messages = [{"role": "system", "content": system}] if system is not None else []
    return chat.encode([*messages, {"role": "user", "content": text}])


def _as_json(ids: list[int], data: bytes, tokenizer: Tokenizer) -> dict[str, object]:
    """``text`` has U+FFFD for what isn't UTF-8; ``bytes`` (hexadecimal) is exact."""
    tokens = [
        {
            "id": token_id,
            "text": (piece := tokenizer.id_to_bytes(token_id)).decode("utf-8", errors="replace"),
            "bytes": piece.hex(),
            "special": tokenizer.is_special(token_id),
        }
        for token_id in ids
    ]
    return {
        "text": data.decode("utf-8", errors="replace"),
        "bytes": data.hex(),
        "ids": ids,
        "tokens": tokens,
    }


def _print_table(ids: list[int], tokenizer: Tokenizer) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("#", "id", "piece", "bytes", box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"  # rather than cut a long piece short
    for i, token_id in enumerate(ids):
        piece = tokenizer.id_to_bytes(token_id)
        style = "bold magenta" if tokenizer.is_special(token_id) else ""
        table.add_row(str(i), str(token_id), Text(shown(piece, sys.stdout.encoding), style), piece.hex(" "))
    Console(highlight=False).print(table)
