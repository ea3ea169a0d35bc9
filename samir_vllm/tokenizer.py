"""Text to token ids and back: byte-level BPE, from ``tokenizer.json`` or from Meta's ``tokenizer.model``.

Both files end in one inner form, the `Tokenizer`: the bytes of each token, the merges between pairs of
ids, and a function that splits text into pieces no merge crosses. Knows nothing of chat roles, of models or
of devices.

A start waits for its tokenizer, so files are read whole columns at a time, and what a short text doesn't need
is left for later. Only a file that is damaged, or not as usually written, is then read line by line: to name
the place.

Sources: Sennrich, Haddow, Birch 2016, "Neural Machine Translation of Rare Words with Subword Units";
the byte-level variant of Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

import binascii
import codecs
import gc
import json
import re
import reprlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from heapq import heapify, heappop, heappush
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import regex

from samir_vllm.errors import TokenizerError

LLAMA3_NUM_RANKS = 128_000
LLAMA3_NUM_SPECIAL = 256
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_LOW = (1 << 32) - 1  # merges pack two numbers into one int: (left id, right id) and (rank, merged id)
_NO_MERGE = 1 << 64  # above every packed (rank, id)
_LONG_PIECE = 64  # tokens above which the heap beats rescanning the list (measured)
_CACHED_PIECES = 1 << 16
_CACHED_CHARS = 48  # longer pieces seldom repeat, and would make the cache's memory unbounded
_CACHED_PAIRS = 1 << 18

Splitter = Callable[[str], Iterable[str]]
RankOf = Callable[[int, int], int | None]


class Tokenizer:
    """One vocabulary with its merges.

    Args:
        token_bytes: the bytes of each token; a token's id is its index.
        ordinary: bytes to id for the tokens that text may become (special tokens are not among them).
        merges: gives ``rank << 32 | merged`` for ``left << 32 | right``, all but the rank being ids. The
            lowest rank merges first, the leftmost pair among equals.
        split: cuts text into pieces; merges happen inside a piece only.
        whole_piece_first: look a piece up in the vocabulary before merging. It matters: some tokens
            (588 of Llama 3's) can't be reached by merging.
        special_tokens: name to id; text becomes one only with ``encode(..., allow_special=True)``.
        added_tokens: name to id of non-special tokens that are cut out of any text before it is split.
        bos_token_id: the token for the start of a text, if there is one.
        adds_bos: whether the tokenizer's own file says that texts start with it.
    """

    def __init__(
        self,
        *,
        token_bytes: list[bytes],
        ordinary: dict[bytes, int],
        merges: "_Merges",
        split: Splitter,
        whole_piece_first: bool,
        special_tokens: dict[str, int],
        added_tokens: dict[str, int] | None = None,
        bos_token_id: int | None = None,
        adds_bos: bool = False,
    ) -> None:
        self.special_tokens = special_tokens
        self.bos_token_id = bos_token_id
        self.adds_bos = adds_bos
        self._token_bytes = token_bytes
        self._ordinary = ordinary
        self._merges = merges
        self._split = split
        self._whole_piece_first = whole_piece_first
        self._named = special_tokens | (added_tokens or {})
        self._special_ids = frozenset(special_tokens.values())
        self._bytes_without_special = list(token_bytes)
        for special_id in self._special_ids:
            self._bytes_without_special[special_id] = b""
        self._texts: dict[int, str] = {}  # for stream decoders, see there
        self._texts_without_special: dict[int, str] = {}
        self._byte_ids = [ordinary.get(bytes([byte]), -1) for byte in range(256)]
        self._cut_added = _any_of(added_tokens or {})
        self._pieces = _PieceCache(self._encode_piece)

    @classmethod
    def from_json(cls, path: Path) -> "Tokenizer":
        """Read a ``tokenizer.json`` of Hugging Face's tokenizers library: byte-level BPE only.

        Runs the pre-tokenizers Split, Digits and ByteLevel, and the post-processors that put nothing or
        one BOS in front. As in that library, added tokens that aren't special are always cut out of the
        text, and a byte that the vocabulary lacks is dropped (``unk_token`` is never emitted here: it is
        a control token, and text must not become one). ``truncation`` and ``padding`` concern batches and
        are ignored.

        Raises:
            TokenizerError: the file is damaged, or asks for something that isn't run here.
        """
        try:
            with _no_garbage_collection():
                return cls(**_read_json(_load_json(path)))
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None

    @classmethod
    def from_ranks(cls, path: Path, *, num_ranks: int = LLAMA3_NUM_RANKS) -> "Tokenizer":
        """Read Meta's ``tokenizer.model`` of Llama 3: lines of ``base64-bytes rank``, ranks 0, 1, 2 ...

        The rank of a token is its id and its merge priority. The 256 special ids follow the last rank.

        Args:
            path: the rank file.
            num_ranks: how many ranks it must hold (the special ids depend on it, and a file that was cut
                at the end of a line shows no other damage).

        Raises:
            TokenizerError: the file can't be read, is cut short or damaged; names the line.
        """
        try:
            tokens = _parse_ranks(_read_bytes(path), num_ranks)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None
        special_tokens = llama3_special_tokens(num_ranks)
        ordinary = dict(zip(tokens, range(num_ranks), strict=True))
        return cls(
            token_bytes=tokens + [name.encode() for name in special_tokens],
            ordinary=ordinary,
            merges=_Merges(tokens, ordinary, rank_of=lambda pair, merged: merged),
            split=_isolate(regex.compile(LLAMA3_SPLIT)),
            whole_piece_first=True,
            special_tokens=special_tokens,
            bos_token_id=special_tokens["<|begin_of_text|>"],
            adds_bos=True,
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids; the model's embedding may be padded beyond it."""
        return len(self._token_bytes)

    def encode(self, text: str, *, allow_special: bool = False, add_bos: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: any string. Surrogate pairs are joined and lone surrogates become U+FFFD, as in
                tiktoken.
            allow_special: read the names of special tokens as those tokens. Otherwise they are ordinary
                text: leave it off for anything a user wrote.
            add_bos: put ``bos_token_id`` in front.

        Raises:
            TokenizerError: add_bos, and this tokenizer has no BOS.
        """
        ids: list[int] = []
        if add_bos:
            if self.bos_token_id is None:
                raise TokenizerError("this tokenizer has no BOS token; encode without add_bos")
            ids.append(self.bos_token_id)
        text = _without_surrogates(text)
        cut = self._cut_all if allow_special else self._cut_added
        parts = cut.split(text) if cut else [text]  # tokens at the odd places, the text between at the even
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self._named[part])
            elif part:
                ids.extend(chain.from_iterable(map(self._pieces.__getitem__, self._split(part))))
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of the ids; bytes that aren't UTF-8 become U+FFFD. Special tokens decode to their names.

        Raises:
            TokenizerError: an id outside the vocabulary.
        """
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int], *, skip_special: bool = False) -> bytes:
        """The exact bytes of the ids, one token's after the other's. Raises as `decode` does."""
        table = self._bytes_without_special if skip_special else self._token_bytes
        for token_id in ids:
            if not 0 <= token_id < len(table):
                raise _outside(token_id, len(table))
        return b"".join([table[token_id] for token_id in ids])

    def stream_decoder(self, *, skip_special: bool = True) -> "StreamDecoder":
        """A decoder for one stream of tokens; by default special tokens give no text."""
        if skip_special:
            return StreamDecoder(self._bytes_without_special, self._texts_without_special)
        return StreamDecoder(self._token_bytes, self._texts)

    def id_to_bytes(self, token_id: int) -> bytes:
        """Bytes of one token. Raises TokenizerError for an id outside the vocabulary."""
        return self.decode_bytes([token_id])

    def token_to_id(self, name: str) -> int | None:
        """Id of the token with exactly this text (for special tokens: this name), or None."""
        found = self._named.get(name)
        return self._ordinary.get(name.encode("utf-8", errors="replace")) if found is None else found

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token."""
        return token_id in self._special_ids

    @cached_property
    def _cut_all(self) -> re.Pattern[str] | None:
        return _any_of(self._named)

    def _encode_piece(self, piece: str) -> list[int]:
        data = piece.encode("utf-8")
        if self._whole_piece_first and (whole := self._ordinary.get(data)) is not None:
            return [whole]
        ids = list(map(self._byte_ids.__getitem__, data))
        if -1 in ids:  # a byte that the vocabulary lacks
            ids = [token_id for token_id in ids if token_id >= 0]
        return self._merge_long(ids) if len(ids) > _LONG_PIECE else self._merge_short(ids)

    def _merge_short(self, ids: list[int]) -> list[int]:
        """Merge in place, looking over the whole list for each merge: O(n^2), and quick for a word."""
        find = self._merges.__getitem__
        found = [find(left << 32 | right) for left, right in pairwise(ids)]
        while found and (best := min(found)) < _NO_MERGE:
            at = found.index(best)
            ids[at : at + 2] = [best & _LOW]
            del found[at]
            if at:
                found[at - 1] = find(ids[at - 1] << 32 | ids[at])
            if at < len(found):
                found[at] = find(ids[at] << 32 | ids[at + 1])
        return ids

    def _merge_long(self, ids: list[int]) -> list[int]:
        """The same merges in O(n log n): a heap of (rank, place) over a doubly linked list of tokens.

        Heap entries are never removed when a merge spoils them; one whose rank is no longer that of the
        pair at its place is skipped. Merged-away places hold -1, as does one place past the end (which is
        also place -1): a pair with -1 has a negative key, and no merge.
        """
        find = self._merges.__getitem__
        end = len(ids)
        ids = [*ids, -1]
        after = [*range(1, end + 1), end]
        before = [*range(-1, end)]
        heap = []
        for place, (left, right) in enumerate(pairwise(ids)):
            if (found := find(left << 32 | right)) < _NO_MERGE:
                heap.append(found & ~_LOW | place)
        heapify(heap)
        while heap:
            entry = heappop(heap)
            place = entry & _LOW
            right = after[place]
            if ids[place] < 0 or ((found := find(ids[place] << 32 | ids[right])) ^ entry) >> 32:
                continue
            ids[place], ids[right] = found & _LOW, -1
            after[place] = after[right]
            before[after[place]] = place
            for start in (before[place], place):
                if (found := find(ids[start] << 32 | ids[after[start]])) < _NO_MERGE:
                    heappush(heap, found & ~_LOW | start)
        return [token_id for token_id in ids if token_id >= 0]


class StreamDecoder:
    """Turns tokens into text one at a time, for one sequence.

    Holds back nothing but the incomplete end of a UTF-8 character; invalid bytes become U+FFFD at once.
    The pushed texts and the flushed one, joined, are `Tokenizer.decode` of the ids.
    """

    __slots__ = ("_pending", "_table", "_texts")

    def __init__(self, table: list[bytes], texts: dict[int, str]) -> None:
        """``texts`` is shared: tokens whose text needs nothing before or after them, as they come up."""
        self._table = table
        self._texts = texts
        self._pending = b""  # the beginning of a character

    def push(self, token_id: int) -> str:
        """Text that this token completes, often "" or one word. Raises TokenizerError for an unknown id."""
        pending = self._pending
        if not pending and (known := self._texts.get(token_id)) is not None:
            return known
        if not 0 <= token_id < len(self._table):
            raise _outside(token_id, len(self._table))
        data = pending + self._table[token_id]
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        if not pending and used == len(data):
            self._texts[token_id] = text
        return text

    def flush(self) -> str:
        """End of the stream: U+FFFD if a character is left incomplete, else "". Then ready for another."""
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", "replace")


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of a model folder: ``tokenizer.json``, else ``[original/]tokenizer.model``.

    A ``bos_token`` that only ``tokenizer_config.json`` names becomes ``bos_token_id`` (not ``adds_bos``).

    Raises:
        TokenizerError: none of the files is there, or the one found is damaged or unsupported.
    """
    model_dir = Path(model_dir)
    if (path := model_dir / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_json(path)
        if tokenizer.bos_token_id is None:
            tokenizer.bos_token_id = _bos_from_config(model_dir / "tokenizer_config.json", tokenizer)
        return tokenizer
    for path in (model_dir / "tokenizer.model", model_dir / "original" / "tokenizer.model"):
        if path.is_file():
            return Tokenizer.from_ranks(path)
    raise TokenizerError(
        f"{model_dir}: no tokenizer.json, tokenizer.model or original/tokenizer.model; copy one of them from "
        "the place the weights came from, or fetch the model anew with `python -m samir_vllm pull`"
    )


def llama3_special_tokens(first_id: int) -> dict[str, int]:
    """Name to id of Llama 3's 256 special tokens, in the order of ids, as Meta's reference names them."""
    named = [
        "begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1",
        "finetune_right_pad_id", "step_id", "start_header_id", "end_header_id", "eom_id", "eot_id",
        "python_tag", "image",
    ]  # fmt: skip
    reserved = [f"reserved_special_token_{i}" for i in range(2, 2 + LLAMA3_NUM_SPECIAL - len(named))]
    return {f"<|{name}|>": first_id + i for i, name in enumerate(named + reserved)}


class _PieceCache(dict[str, list[int]]):
    """Piece to ids, filled on demand. `__missing__` lets `map` walk over a text without Python code."""

    def __init__(self, encode_piece: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._encode_piece = encode_piece

    def __missing__(self, piece: str) -> list[int]:
        ids = self._encode_piece(piece)
        if len(piece) <= _CACHED_CHARS:
            if len(self) >= _CACHED_PIECES:
                self.clear()
            self[piece] = ids
        return ids


class _Merges(dict[int, int]):
    """``left << 32 | right`` to ``rank << 32 | merged``, or to `_NO_MERGE`: filled on demand.

    Few of a vocabulary's pairs meet in one text, so this is ready at once where a table of them all (280,147
    for Llama 3) takes half a second. Threads may share it: at worst, two of them work out the same pair.

    Args:
        tokens: the bytes of each id.
        ordinary: bytes to id of the tokens that a merge may make.
        rank_of: the rank of a pair, ``left << 32 | right``, whose join is the token given second; None if the
            two don't merge all the same. A rank file merges any such pair: the token's id is its rank.
    """

    def __init__(self, tokens: list[bytes], ordinary: dict[bytes, int], rank_of: RankOf) -> None:
        super().__init__()
        self._tokens = tokens
        self._ordinary = ordinary
        self._rank_of = rank_of

    def __missing__(self, pair: int) -> int:
        if pair < 0:  # a place with no token
            return _NO_MERGE
        found = _NO_MERGE
        merged = self._ordinary.get(self._tokens[pair >> 32] + self._tokens[pair & _LOW])
        if merged is not None and (rank := self._rank_of(pair, merged)) is not None:
            found = rank << 32 | merged
        if len(self) >= _CACHED_PAIRS:
            self.clear()
        self[pair] = found
        return found


# --- text -------------------------------------------------------------------------------------------------


def _without_surrogates(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _any_of(names: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern whose `split` keeps the names it cuts out; the longest of those that start together."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


def _isolate(pattern: regex.Pattern[str]) -> Splitter:
    """A splitter whose pieces are the pattern's matches and whatever lies between them."""

    def split(text: str) -> list[str]:
        if not pattern.groups:  # with groups, findall would give the groups
            pieces = pattern.findall(text)
            if sum(map(len, pieces)) == len(text):
                return pieces
        return list(_matches_and_gaps(pattern, text))

    return split


def _matches_and_gaps(pattern: regex.Pattern[str], text: str) -> Iterator[str]:
    end = 0
    for match in pattern.finditer(text):
        yield text[end : match.start()]
        yield match.group()
        end = match.end()
    yield text[end:]


def _prefix_space(text: str) -> list[str]:
    return [text if text.startswith(" ") or not text else " " + text]


def _chained(steps: list[Splitter]) -> Splitter:
    if len(steps) == 1:
        return steps[0]

    def split(text: str) -> Iterable[str]:
        pieces: Iterable[str] = [text]
        for step in steps:
            pieces = chain.from_iterable(map(step, pieces))
        return pieces

    return split


# --- tokenizer.model --------------------------------------------------------------------------------------


def _parse_ranks(data: bytes, num_ranks: int) -> list[bytes]:
    """The tokens in the order of their ranks; the lines may come in any order."""
    tokens = _parse_ranks_in_order(data, num_ranks) or _parse_rank_lines(data, num_ranks)
    _check_tokens(tokens)
    return tokens


def _parse_ranks_in_order(data: bytes, num_ranks: int) -> list[bytes] | None:
    """The tokens, if the file is line for line what Meta's writer makes of ranks 0, 1, 2 ...; else None."""
    encoded = data.split()[::2]
    if len(encoded) != num_ranks:
        return None
    rewritten = b"\n".join(map(b"%b %d".__mod__, zip(encoded, range(num_ranks), strict=True)))
    if rewritten != data.removesuffix(b"\n"):
        return None
    try:
        return list(map(_decode_base64, encoded))
    except binascii.Error:
        return None


_decode_base64 = partial(binascii.a2b_base64, strict_mode=True)


def _parse_rank_lines(data: bytes, num_ranks: int) -> list[bytes]:
    """The same of lines in any order, one after the other: names the line that is damaged."""
    by_rank: dict[int, bytes] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        encoded, _, rank_text = line.partition(b" ")
        try:
            token = _decode_base64(encoded)
        except binascii.Error:
            raise _broken(f"line {number}: {reprlib.repr(encoded)} isn't base64") from None
        # At most 9 digits: int() refuses thousands of them with another error.
        if not token or not rank_text.isdigit() or len(rank_text) > 9:
            raise _broken(f"line {number}: should be 'base64 rank', is {reprlib.repr(line)}")
        if int(rank_text) in by_rank:
            raise _broken(f"line {number}: rank {int(rank_text)} is there twice")
        by_rank[int(rank_text)] = token
    if len(by_rank) != num_ranks:
        raise _broken(f"holds {len(by_rank)} ranks, should hold {num_ranks} (cut short, or not Llama 3's?)")
    if (gap := next((rank for rank in range(num_ranks) if rank not in by_rank), None)) is not None:
        raise _broken(f"rank {gap} is missing")
    return [by_rank[rank] for rank in range(num_ranks)]


def _check_tokens(tokens: list[bytes]) -> None:
    distinct = set(tokens)
    if len(distinct) < len(tokens):
        first, again = _first_repeated(tokens)
        raise _broken(f"ranks {first} and {again} are the same token {reprlib.repr(tokens[again])}")
    for byte in range(256):
        if bytes([byte]) not in distinct:
            raise _broken(f"no rank for the single byte {byte:#04x}")


def _first_repeated(items: Iterable[Any]) -> tuple[int, int]:
    """Where the first item that is there twice is first, and where again."""
    seen: dict[Any, int] = {}
    return next((seen[item], i) for i, item in enumerate(items) if seen.setdefault(item, i) != i)


# --- tokenizer.json ---------------------------------------------------------------------------------------


def _read_json(root: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Tokenizer` from a parsed tokenizer.json."""
    if root.get("normalizer") is not None:
        raise _unsupported(f"normalizer {_type_of(root['normalizer'], 'normalizer')}")
    if (decoder := _type_of(root.get("decoder"), "decoder")) != "ByteLevel":
        raise _unsupported(f"decoder {decoder}")
    model = _get(root, "", "model", dict)
    _check_model(model)
    vocab = _get(model, "model", "vocab", dict)
    special_tokens, added_tokens = _added_tokens(root)
    named = special_tokens | added_tokens
    _check_ids(vocab, named)

    vocab_bytes, ordinary = _read_vocab(vocab, len(vocab | named))
    for name in special_tokens.keys() & vocab.keys():
        # By its id: outside the byte alphabet a name's own bytes may be another token's.
        if ordinary.get(data := vocab_bytes[vocab[name]]) == vocab[name]:
            del ordinary[data]
    token_bytes = vocab_bytes.copy()
    for text, token_id in named.items():
        token_bytes[token_id] = _utf8(text, "added_tokens")
    bos = _bos_of(root.get("post_processor"), named)
    pairs = _read_merges(_get(model, "model", "merges", list), vocab, frozenset(special_tokens.values()))
    return {
        "token_bytes": token_bytes,
        "ordinary": ordinary,
        "merges": _Merges(vocab_bytes, ordinary, _ranks_of_pairs(pairs)),
        "split": _chained(_pre_tokenizer(root.get("pre_tokenizer"), "pre_tokenizer")),
        "whole_piece_first": _get(model, "model", "ignore_merges", bool, False),
        "special_tokens": special_tokens,
        "added_tokens": added_tokens,
        "bos_token_id": bos,
        "adds_bos": bos is not None,
    }


def _check_model(model: dict[str, Any]) -> None:
    if (kind := model.get("type", "BPE")) != "BPE":
        raise _unsupported(f"model {reprlib.repr(kind)}")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise _unsupported(f"model.{key} = {reprlib.repr(model[key])}")


def _check_ids(vocab: dict[str, Any], named: dict[str, int]) -> None:
    """Each id from 0 up belongs to one token: checked before anything is as long as the largest id."""
    if not set(map(type, vocab.values())) <= {int}:
        text, token_id = next(item for item in vocab.items() if type(item[1]) is not int)
        raise _broken(f"model.vocab[{reprlib.repr(text)}] should be a number, is {reprlib.repr(token_id)}")
    for text, token_id in named.items():
        if vocab.get(text, token_id) != token_id:
            raise _broken(f"added token {reprlib.repr(text)} has another id in model.vocab")
    ids = sorted((vocab | named).values())
    if ids != list(range(len(ids))):
        expected, token_id = next(item for item in enumerate(ids) if item[0] != item[1])
        if token_id > expected:
            raise _broken(f"model.vocab with added_tokens: id {expected} is missing")
        raise _broken(f"model.vocab with added_tokens: id {token_id} is negative or there twice")


def _read_vocab(vocab: dict[str, int], num_ids: int) -> tuple[list[bytes], dict[bytes, int]]:
    """The bytes of each id (b"" where the vocabulary has none), and bytes to id of what text may become."""
    vocab_bytes = [b""] * num_ids
    ordinary: dict[bytes, int] = {}
    encode = codecs.charmap_encode
    for text, token_id in vocab.items():
        try:
            vocab_bytes[token_id] = data = encode(text, "strict", _BYTE_OF_CHARACTER)[0]
            ordinary[data] = token_id
        except UnicodeEncodeError:  # not of the byte alphabet: decodes to its own text, never encoded to
            vocab_bytes[token_id] = _utf8(text, "model.vocab")
    return vocab_bytes, ordinary


def _read_merges(
    merges: list[Any], vocab: dict[str, int], special_ids: frozenset[int]
) -> npt.NDArray[np.int64]:
    """``left << 32 | right`` of each merge, in order of rank: int64 [number of merges]."""
    try:
        halves = [merge.split(" ", 2) if type(merge) is str else merge for merge in merges]
        pairs = [vocab[left] << 32 | vocab[right] for left, right in halves]
        merged = [vocab[left + right] for left, right in halves]
    except (ValueError, TypeError, KeyError):
        rank = next(rank for rank, merge in enumerate(merges) if not _is_merge(merge, vocab))
        raise _broken(
            f"model.merges[{rank}] = {reprlib.repr(merges[rank])} isn't two tokens whose join is a token"
        ) from None
    if not special_ids.isdisjoint(merged):
        rank = next(rank for rank, token_id in enumerate(merged) if token_id in special_ids)
        raise _unsupported(f"model.merges[{rank}], which makes a special token of ordinary text,")
    by_rank = np.array(pairs, np.int64)
    in_order = np.sort(by_rank)  # np.unique would import numpy.ma
    if (in_order[1:] == in_order[:-1]).any():
        rank = _first_repeated(pairs)[1]
        raise _broken(f"model.merges[{rank}] = {reprlib.repr(merges[rank])} is there twice")
    return by_rank


def _is_merge(merge: Any, vocab: dict[str, int]) -> bool:
    try:
        left, right = merge.split(" ") if type(merge) is str else merge
        return left in vocab and right in vocab and left + right in vocab
    except (ValueError, TypeError):
        return False


def _ranks_of_pairs(pairs: npt.NDArray[np.int64]) -> RankOf:
    """The place of a pair in the list, by binary search: sorting is a tenth of the time of making a dict."""
    order = pairs.argsort()
    # Views, since an array takes 2 us to search for a single number and 0.5 us to give one.
    sorted_pairs, ranks = pairs[order].data, order.data

    def rank_of(pair: int, merged: int) -> int | None:
        at = bisect_left(sorted_pairs, pair)
        return ranks[at] if at < len(sorted_pairs) and sorted_pairs[at] == pair else None

    return rank_of


def _added_tokens(root: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Name to id of the special tokens, and of the added tokens that aren't special."""
    special: dict[str, int] = {}
    plain: dict[str, int] = {}
    for i, token in enumerate(_get(root, "", "added_tokens", list, [])):
        where = f"added_tokens[{i}]"
        content = _get(token, where, "content", str)
        for key in ("lstrip", "rstrip", "single_word"):
            if _get(token, where, key, bool, False):
                raise _unsupported(f"{where}.{key}")
        if not content or content in special or content in plain:
            raise _broken(f"{where}: {reprlib.repr(content)} is empty or there twice")
        kind = special if _get(token, where, "special", bool, False) else plain
        kind[content] = _get(token, where, "id", int)
    return special, plain


def _pre_tokenizer(spec: Any, where: str) -> list[Splitter]:
    """The splitting steps of a pre-tokenizer. ByteLevel comes last, or later steps would see its alphabet."""
    if _type_of(spec, where) == "Sequence":
        stages = _get(spec, where, "pretokenizers", list)
    else:
        stages, where = [spec], ""
    steps: list[Splitter] = []
    for i, stage in enumerate(stages):
        name = f"{where}.pretokenizers[{i}]" if where else "pre_tokenizer"
        kind = _type_of(stage, name)
        if (kind == "ByteLevel") != (i == len(stages) - 1):
            raise _unsupported(f"{name} {kind} at this place (ByteLevel must come last)")
        if kind == "ByteLevel":
            if _get(stage, name, "add_prefix_space", bool, True):
                steps.append(_prefix_space)
            if _get(stage, name, "use_regex", bool, True):
                steps.append(_isolate(regex.compile(GPT2_SPLIT)))
        elif kind == "Digits":
            each = _get(stage, name, "individual_digits", bool, False)
            steps.append(_isolate(regex.compile(r"\p{N}" if each else r"\p{N}+")))
        elif kind == "Split":
            steps.append(_isolate(_split_pattern(stage, name)))
        else:
            raise _unsupported(f"{name} {kind}")
    return steps


def _split_pattern(stage: dict[str, Any], where: str) -> regex.Pattern[str]:
    if (behavior := stage.get("behavior")) != "Isolated":
        raise _unsupported(f"{where}.behavior {reprlib.repr(behavior)}")
    pattern = _get(stage, where, "pattern", dict)
    if "String" in pattern:
        return regex.compile(regex.escape(_get(pattern, f"{where}.pattern", "String", str)))
    source = _get(pattern, f"{where}.pattern", "Regex", str)
    try:
        return regex.compile(source)
    except (regex.error, ValueError, RecursionError, OverflowError) as error:
        raise _broken(f"{where}.pattern.Regex {reprlib.repr(source)}: {_one_line(error)}") from None


def _bos_of(spec: Any, named: dict[str, int]) -> int | None:
    """The one token that a post-processor puts in front of a text, if any."""
    where = "post_processor"
    if _type_of(spec, where) == "Sequence":
        stages = _get(spec, where, "processors", list)
    else:
        stages = [] if spec is None else [spec]
    bos = None
    for stage in stages:
        if (kind := _type_of(stage, where)) == "ByteLevel":
            continue  # concerns the offsets of tokens in the text only
        if kind != "TemplateProcessing":
            raise _unsupported(f"{where} {kind}")
        template = _get(stage, where, "single", list)
        shape = [next(iter(part), None) if isinstance(part, dict) else None for part in template]
        if shape == ["Sequence"]:
            continue
        if shape != ["SpecialToken", "Sequence"] or bos is not None:
            raise _unsupported(f"{where} that adds anything but one token in front")
        name = _get(_get(template[0], where, "SpecialToken", dict), where, "id", str)
        if (bos := named.get(name)) is None:
            raise _broken(f"{where}: {reprlib.repr(name)} isn't in added_tokens")
    return bos


def _bos_from_config(path: Path, tokenizer: Tokenizer) -> int | None:
    if not path.is_file():
        return None
    try:
        bos = _load_json(path).get("bos_token")
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    name = bos.get("content") if isinstance(bos, dict) else bos
    return tokenizer.special_tokens.get(name) if isinstance(name, str) else None


def _byte_of_character() -> dict[int, int]:
    """Byte-level BPE writes each byte as a printable character: the way back, as a codec's character map.

    Printable Latin-1 bytes stand for themselves; the others, in order, for U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


# --- reading files ----------------------------------------------------------------------------------------


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"can't be read: {error.strerror}; check the file and its permissions") from None


def _load_json(path: Path) -> dict[str, Any]:
    try:
        root = json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise _broken(f"isn't JSON ({_one_line(error)})") from None
    if not isinstance(root, dict):
        raise _broken("should hold a JSON object")
    return root


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Parsing makes a million objects and no cycles; collections would only walk over them time and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_REQUIRED = object()


def _get(obj: Any, where: str, key: str, kind: type, default: Any = _REQUIRED) -> Any:
    """``obj[key]`` if it is of the kind; the default where the key is missing or null."""
    if not isinstance(obj, dict):
        raise _broken(f"{where} should be an object, is {reprlib.repr(obj)}")
    value = obj.get(key)
    if value is None and default is not _REQUIRED:
        return default
    if type(value) is not kind:
        name = f"{where}.{key}" if where else key
        is_what = "is missing" if key not in obj else f"is {reprlib.repr(value)}"
        raise _broken(f"{name} should be of type {kind.__name__}, {is_what}")
    return value


def _type_of(spec: Any, where: str) -> str:
    return "null" if spec is None else _get(spec, where, "type", str)


def _utf8(text: str, where: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise _broken(f"{where}: {reprlib.repr(text)} holds half a surrogate pair") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _broken(what: str) -> TokenizerError:
    return TokenizerError(f"{what}; the file is damaged, fetch it again")


def _unsupported(what: str) -> TokenizerError:
    return TokenizerError(
        f"{what} isn't supported; use a model with a Llama 3 style byte-level BPE tokenizer"
    )


def _outside(token_id: int, vocab_size: int) -> TokenizerError:
    return TokenizerError(
        f"token id {token_id} is outside the vocabulary of {vocab_size} tokens; "
        "do the tokenizer and the weights belong to the same model?"
    )
