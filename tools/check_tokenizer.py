"""Check a model folder's tokenizer: golden ids, and a round trip over text files.

    python tools/check_tokenizer.py MODEL_DIR [GOLDEN.json] [--text FILE ...]

GOLDEN.json holds cases as tests/golden/llama3_tokenizer.json does (for any folder with Llama 3's
vocabulary) or as tests/golden/smollm2_greedy.json does. Each text file must come back unchanged from
decode(encode(text)); without --text, the README and the package's sources are read. Exit status: 0 clean,
1 differences, 2 a mistake of the user's. Knows the golden formats, and no model.
"""

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from samir_vllm.chat import LLAMA3_CONTROL, ChatFormat, Llama3Chat, load_chat_format
from samir_vllm.errors import SamirVllmError
from samir_vllm.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parent.parent


class Check(NamedTuple):
    """One comparison: the kind of case, its name, and what should be equal."""

    kind: str
    name: str
    expected: Any
    got: Any


class UsageError(Exception):
    """A file that can't be used; the message is one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks, print what differs and a count for each kind of case; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("golden", type=Path, nargs="?", help="a JSON file of golden cases")
    parser.add_argument("--text", type=Path, nargs="+", help="text files for the round trip")
    args = parser.parse_args(argv)
    totals, differing = Counter[str](), Counter[str]()
    try:
        tokenizer = load_tokenizer(args.model_dir)
        for check in checks(args, tokenizer):
            totals[check.kind] += 1
            if check.got != check.expected:
                differing[check.kind] += 1
                print(f"differs: {check.kind} {check.name}: {first_difference(check.expected, check.got)}")
    except (SamirVllmError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for kind, total in totals.items():
        print(f"{kind}: {total - differing[kind]} of {total} equal")
    return 1 if differing else 0


def checks(args: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[Check]:
    """All comparisons that the arguments ask for."""
    if args.golden is not None:
        golden = read_golden(args.golden)
        try:
            if "tokenizer_cases" in golden:
                yield from smollm2_checks(golden, tokenizer, load_chat_format(args.model_dir, tokenizer))
            else:
                yield from llama3_checks(golden, tokenizer)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{args.golden}: a case is damaged: {error!r}; see tests/golden for the format"
            ) from None
    for path in args.text or [ROOT / "README.md", *sorted((ROOT / "samir_vllm").rglob("*.py"))]:
        text = read_text(path)
        yield Check("round trip", str(path), text, tokenizer.decode(tokenizer.encode(text)))


def llama3_checks(golden: dict[str, Any], tokenizer: Tokenizer) -> Iterator[Check]:
    """The cases of llama3_tokenizer.json, except those of one hub template."""
    if not tokenizer.special_tokens.keys() >= set(LLAMA3_CONTROL):
        raise UsageError("the golden cases are for Llama 3's vocabulary, which this model doesn't have")
    encode, decode = tokenizer.encode, tokenizer.decode
    for case in golden["cases"]:
        yield Check("encode", case["name"], case["ids"], encode(case["text"]))
        special = encode(case["text"], allow_special=True)
        yield Check("encode with special tokens", case["name"], case["ids_special_allowed"], special)
        yield Check("decode", case["name"], case["decode"], decode(case["ids"]))
    for case in golden["discriminators"]:
        yield Check("discriminator", case["name"], case["ids"], encode(case["text"]))
    for case in golden["whole_piece_only_tokens"]["sample"]:
        yield Check("whole piece", ascii(case["text"]), [case["id"]], encode(case["text"]))
    for case in golden["long_cases"]:
        ids = encode(long_text(case["generator"]))
        digest = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
        yield Check("long piece", case["name"], case["plain_tiktoken"]["sha256"], digest)
    for case in golden["decode_cases"]:
        decoder = tokenizer.stream_decoder()
        deltas = [*map(decoder.push, case["ids"]), decoder.flush()]
        yield Check("stream", case["name"], [*case["incremental_deltas"], case["final_flush"]], deltas)
    native = Llama3Chat(tokenizer)
    for case in golden["dialogs"]:
        yield Check("native dialog", case["name"], case["ids"], native.encode(case["messages"]))


def long_text(generator: str) -> str:
    """``"piece"*count`` or ``lcg_word(length,seed)``, read rather than run: the file may be anybody's."""
    if generator.startswith("lcg_word("):
        length, state = map(int, generator[len("lcg_word(") : -1].split(","))
        letters = []
        for _ in range(length):
            state = (state * 1103515245 + 12345) % 2**31
            letters.append(chr(ord("a") + (state >> 16) % 26))
        return "".join(letters)
    piece, _, count = generator.rpartition("*")
    return str(json.loads(piece)) * int(count)


def smollm2_checks(golden: dict[str, Any], tokenizer: Tokenizer, chat: ChatFormat | None) -> Iterator[Check]:
    """The tokenizer's part of smollm2_greedy.json."""
    for case in golden["tokenizer_cases"]:
        yield Check("encode", ascii(case["text"]), case["ids"], tokenizer.encode(case["text"]))
    for case in golden["cases"]:
        got: list[int] | None = None
        if case["kind"] == "raw":
            got = tokenizer.encode(case["text"])
        elif chat is not None:
            got = chat.encode([{"role": "user", "content": case["text"]}])
        yield Check(f"{case['kind']} prompt", ascii(case["text"])[:40], case["prompt_ids"], got)
        yield Check("decode", ascii(case["text"])[:40], case["decoded"], tokenizer.decode(case["greedy_ids"]))


def first_difference(expected: Any, got: Any) -> str:
    """Where two sequences part, and what each holds there."""
    if not isinstance(expected, list | str) or not isinstance(got, list | str):
        return f"expected {expected!r}, got {got!r}"
    at = next((i for i, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]), None)
    at = min(len(expected), len(got)) if at is None else at
    return f"at {at} expected {expected[at : at + 8]!r}, got {got[at : at + 8]!r}"


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, its line ends as they are."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: isn't UTF-8 at byte {error.start}; convert it, or leave it out") from None


def read_golden(path: Path) -> dict[str, Any]:
    """The object in a golden file."""
    try:
        golden = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: isn't JSON: {error}") from None
    if not isinstance(golden, dict) or not {"cases", "tokenizer_cases"} & golden.keys():
        raise UsageError(f"{path}: holds no cases; see tests/golden for the format")
    return golden


if __name__ == "__main__":
    sys.exit(main())
