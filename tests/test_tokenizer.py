"""The tokenizer against Meta's reference (golden ids), tiktoken, a naive BPE, and damaged files.

Llama 3's rank file is never committed: it comes from the PyPI package llama-models, or its tests skip.
"""

import base64
import contextlib
import copy
import gc
import hashlib
import json
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

import samir_vllm.tokenizer as tokenizer_module
from harness import load_tool
from samir_vllm.errors import TokenizerError
from samir_vllm.tokenizer import LLAMA3_SPLIT, Tokenizer, llama3_special_tokens, load_tokenizer

GOLDEN_DIR = Path(__file__).parent / "golden"
GOLDEN = json.loads((GOLDEN_DIR / "llama3_tokenizer.json").read_text())
SMOLLM2 = json.loads((GOLDEN_DIR / "smollm2_greedy.json").read_text())

# What the byte-level pre-tokenizer calls each byte: printable ones themselves, the others U+0100 and up.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_NAMES = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}


def named(data: bytes) -> str:
    return "".join(BYTE_NAMES[byte] for byte in data)


def ids_hash(ids: list[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


def by_name(cases: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case["name"])


# --- fixtures: Llama 3's vocabulary in both formats --------------------------------------------------------


@pytest.fixture(scope="module")
def from_ranks(llama3_rank_path: Path) -> Tokenizer:
    return Tokenizer.from_ranks(llama3_rank_path)


@pytest.fixture(scope="module")
def ranks(llama3_rank_path: Path) -> dict[bytes, int]:
    lines = (line.split() for line in llama3_rank_path.read_bytes().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


@pytest.fixture(scope="module")
def from_json(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The same vocabulary as the tokenizer.json of Llama 3: its pairs of tokens listed, in order of ranks."""
    merges = []
    for token in ranks:
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    split = {"type": "Split", "pattern": {"Regex": LLAMA3_SPLIT}, "behavior": "Isolated", "invert": False}
    document = tiny_json(
        vocab={named(token): rank for token, rank in ranks.items()},
        merges=[[named(left), named(right)] for left, right in merges],
        ignore_merges=True,
    )
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level(use_regex=False)]}
    document["added_tokens"] = [added(name, i) for name, i in GOLDEN["special_tokens"].items()]
    document["post_processor"] = {
        "type": "Sequence",
        "processors": [
            byte_level(),
            {"type": "TemplateProcessing", "single": bos_template("<|begin_of_text|>")},
        ],
    }
    path = tmp_path_factory.mktemp("llama3") / "tokenizer.json"
    path.write_text(json.dumps(document))
    return Tokenizer.from_json(path)


@pytest.fixture(scope="module", params=["tokenizer.model", "tokenizer.json"])
def llama3(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue("from_ranks" if request.param == "tokenizer.model" else "from_json")


@pytest.fixture(scope="module")
def peer(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "llama3", pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens=GOLDEN["special_tokens"]
    )


# --- a tiny tokenizer.json ---------------------------------------------------------------------------------


def added(content: str, token_id: int, **changes: Any) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": content, **flags, **changes}


def byte_level(**changes: Any) -> dict[str, Any]:
    options = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"type": "ByteLevel", **options, **changes}


def bos_template(name: str) -> list[dict[str, Any]]:
    return [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]


def tiny_json(
    vocab: dict[str, int] | None = None, merges: list[Any] | None = None, **model: Any
) -> dict[str, Any]:
    """256 bytes, `ab`, `abc`, `Ġab` and two added tokens: <s> (special) and NEW (not)."""
    if vocab is None:
        vocab = {BYTE_NAMES[byte]: byte for byte in range(256)} | {"ab": 256, "abc": 257, "Ġab": 258}
        merges = ["a b", ["ab", "c"], "Ġ ab"] if merges is None else merges
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added("<s>", 259), added("NEW", 260, special=False)],
        "normalizer": None,
        "pre_tokenizer": byte_level(),
        "post_processor": None,
        "decoder": byte_level(),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "vocab": vocab,
            "merges": merges,
            **model,
        },
    }


def read(document: Any, folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return Tokenizer.from_json(path)


def rank_lines(tokens: list[bytes]) -> list[bytes]:
    return [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]


TINY_RANKS = [*(bytes([byte]) for byte in range(256)), b"ab", b"abc", b" ab"]


# --- golden data -------------------------------------------------------------------------------------------


@by_name(GOLDEN["cases"])
def test_golden_case(llama3: Tokenizer, case: dict[str, Any]) -> None:
    assert llama3.encode(case["text"]) == case["ids"]
    assert llama3.encode(case["text"], allow_special=True) == case["ids_special_allowed"]
    assert llama3.decode(case["ids"]) == case["decode"]
    assert llama3.decode_bytes(case["ids"]).hex() == case["decode_bytes_hex"]


@by_name(GOLDEN["discriminators"])
def test_golden_discriminator(llama3: Tokenizer, case: dict[str, Any]) -> None:
    assert llama3.encode(case["text"]) == case["ids"]


@by_name(GOLDEN["long_cases"])
def test_golden_long_piece(llama3: Tokenizer, case: dict[str, Any]) -> None:
    """As plain tiktoken: Meta's wrapper cuts runs of 25,000 characters first, which we needn't."""
    generators: dict[str, Any] = {}
    for source in GOLDEN["generators"].values():
        exec(source, generators)
    text = eval(case["generator"], generators)
    assert hashlib.sha256(text.encode()).hexdigest() == case["text_sha256"]
    ids = llama3.encode(text)
    assert ids[:8] == case["plain_tiktoken"]["head"]
    assert ids[-8:] == case["plain_tiktoken"]["tail"]
    assert ids_hash(ids) == case["plain_tiktoken"]["sha256"]


@by_name(GOLDEN["decode_cases"])
def test_golden_streamed_decode(llama3: Tokenizer, case: dict[str, Any]) -> None:
    assert [llama3.id_to_bytes(i).hex() for i in case["ids"]] == case["token_bytes_hex"]
    assert llama3.decode(case["ids"]) == case["text_replace"]
    decoder = llama3.stream_decoder()
    assert [decoder.push(i) for i in case["ids"]] == case["incremental_deltas"]
    assert decoder.flush() == case["final_flush"]


def test_tokens_that_merging_cannot_reach(llama3: Tokenizer, ranks: dict[bytes, int]) -> None:
    whole = GOLDEN["whole_piece_only_tokens"]
    for sample in whole["sample"]:
        assert llama3.encode(sample["text"]) == [sample["id"]]
    llama3._whole_piece_first = False
    try:
        for sample in whole["sample"]:
            assert llama3._encode_piece(sample["text"]) == sample["wrong_ids_by_merging"]
    finally:
        llama3._whole_piece_first = True


def test_a_special_token_takes_no_other_token_away(tmp_path: Path) -> None:
    """One outside the byte alphabet has bytes that an ordinary token may have too: here a space and `Ġ`."""
    document = tiny_json()
    document["model"]["vocab"][" "] = 261
    document["added_tokens"].append(added(" ", 261))
    tokenizer = read(document, tmp_path)
    assert tokenizer.encode(" ") == [32]
    assert tokenizer.encode(" ", allow_special=True) == [261]


def test_special_tokens(llama3: Tokenizer) -> None:
    meta = GOLDEN["meta"]
    assert llama3_special_tokens(meta["n_base"]) == GOLDEN["special_tokens"]
    assert llama3.special_tokens == GOLDEN["special_tokens"]
    assert llama3.vocab_size == meta["n_words"]
    assert (llama3.bos_token_id, llama3.adds_bos) == (meta["bos"], True)
    for name, token_id in GOLDEN["special_tokens"].items():
        assert llama3.is_special(token_id)
        assert llama3.decode([token_id]) == name
        assert llama3.token_to_id(name) == token_id
    assert not llama3.is_special(meta["n_base"] - 1)
    assert llama3.encode("Hi", add_bos=True) == [meta["bos"], *llama3.encode("Hi")]
    assert llama3.decode([meta["bos"], *llama3.encode("Hi"), meta["eot"]], skip_special=True) == "Hi"


@pytest.mark.demo
@pytest.mark.parametrize("case", SMOLLM2["tokenizer_cases"], ids=lambda case: ascii(case["text"])[:30])
def test_demo_model_case(demo_tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert demo_tokenizer.encode(case["text"]) == case["ids"]
    assert demo_tokenizer.decode(case["ids"]) == case["text"]


@pytest.mark.demo
def test_demo_model_prompts_and_answers(demo_tokenizer: Tokenizer) -> None:
    for case in SMOLLM2["cases"]:
        if case["kind"] == "raw":
            assert demo_tokenizer.encode(case["text"]) == case["prompt_ids"]
        assert demo_tokenizer.decode(case["greedy_ids"]) == case["decoded"]
        answer = case["decoded"].removesuffix("<|im_end|>")
        assert demo_tokenizer.decode(case["greedy_ids"], skip_special=True) == answer


@pytest.fixture(scope="module")
def demo_tokenizer(demo_model_dir: Path) -> Tokenizer:
    return load_tokenizer(demo_model_dir)


# --- peers -------------------------------------------------------------------------------------------------

# Scripts, white space, digits, apostrophes, surrogates and names of special tokens, close together.
FRAGMENTS = [
    *"aZé漢字कि😀٣½ⅷ'’´-_!?.,<|>\n\r\t \x00\x1c\x85\u00a0\u2028\u3000\u0301\u200d\ufeff\ud83d\ude00",
    *(
        "'s",
        "'LL",
        "'ſ",
        "the",
        " of",
        "1234",
        "\r\n",
        "   ",
        " việc",
        "aaaa",
        "<|eot_id|>",
        "<|begin_of_text|>",
    ),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=30).map("".join)


@settings(max_examples=400, deadline=None)
@given(text=TEXTS)
def test_same_ids_as_tiktoken(from_ranks: Tokenizer, peer: tiktoken.Encoding, text: str) -> None:
    assert from_ranks.encode(text) == peer.encode(text, disallowed_special=())
    ids = from_ranks.encode(text, allow_special=True)
    assert ids == peer.encode(text, allowed_special="all")
    assert from_ranks.decode_bytes(ids) == peer.decode_bytes(ids)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_both_formats_agree(from_ranks: Tokenizer, from_json: Tokenizer, text: str) -> None:
    assert from_json.encode(text) == from_ranks.encode(text)


def naive_bpe(ids: list[int], merges: dict[tuple[int, int], tuple[int, int]]) -> list[int]:
    """The definition: merge the leftmost of the lowest-ranked pairs until there is none."""
    while ranked := [(merges[pair][0], i) for i, pair in enumerate(pairwise(ids)) if pair in merges]:
        i = min(ranked)[1]
        ids = [*ids[:i], merges[ids[i], ids[i + 1]][1], *ids[i + 2 :]]
    return ids


class WholeTable(dict[int, int]):
    """Every merge of a rank file, listed beforehand by cutting each token in two at every place."""

    def __init__(self, ranks: dict[bytes, int]) -> None:
        super().__init__()
        for token, rank in ranks.items():
            for cut in range(1, len(token)):
                left, right = ranks.get(token[:cut]), ranks.get(token[cut:])
                if left is not None and right is not None:
                    self[left << 32 | right] = rank << 32 | rank

    def __missing__(self, pair: int) -> int:
        return tokenizer_module._NO_MERGE


@pytest.fixture(scope="module")
def whole_table(ranks: dict[bytes, int]) -> WholeTable:
    return WholeTable(ranks)


LETTERS = st.text("abcdeghinorst ", min_size=1, max_size=200)  # words to few of which there is a token


@pytest.mark.parametrize("long_piece", [0, 10**9], ids=["heap", "rescan"])
@settings(max_examples=100, deadline=None)
@given(texts=st.lists(TEXTS | LETTERS, min_size=1, max_size=4))
def test_merges_found_on_demand_are_the_whole_table(
    llama3: Tokenizer, whole_table: WholeTable, long_piece: int, texts: list[str]
) -> None:
    """Also when pairs are forgotten again: 20 fit."""
    whole = copy.copy(llama3)
    whole._merges = whole_table  # type: ignore[assignment]
    llama3._merges.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "_CACHED_PAIRS", 20)
        patch.setattr(tokenizer_module, "_LONG_PIECE", long_piece)
        for text in texts:
            data = tokenizer_module._without_surrogates(text)
            assert llama3._encode_piece(data) == whole._encode_piece(data)
            assert len(llama3._merges) <= 20


def test_only_listed_pairs_merge(tmp_path: Path) -> None:
    """`ab` + `c` is listed, `a` + `bc` isn't, though both make a token; the list's order decides, not ids."""
    document = tiny_json()
    document["model"]["vocab"] |= {"bc": 261}
    document["model"]["merges"] = ["b c", "a b", "ab c"]
    tokenizer = read(document, tmp_path)
    assert tokenizer.encode("abc") == [97, 261]
    document["model"]["merges"] = ["a b", "b c", "ab c"]
    assert read(document, tmp_path).encode("abc") == [257]


def test_an_added_token_leaves_the_merges_of_its_name_alone(tmp_path: Path) -> None:
    """`é` is byte 0xE9 in the vocabulary and decodes to its name as an added token."""
    document = tiny_json()
    document["model"]["vocab"] |= {BYTE_NAMES[0xE9] + BYTE_NAMES[0x80]: 261}
    document["model"]["merges"].append([BYTE_NAMES[0xE9], BYTE_NAMES[0x80]])
    document["added_tokens"].append(added("é", 0xE9, special=False))
    tokenizer = read(document, tmp_path)
    assert tokenizer.decode([0xE9]) == "é"
    assert tokenizer.encode("\u9000") == [261, 0x80]  # in UTF-8 e9 80 80


def test_threads_share_a_tokenizer(from_ranks: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads fill and empty the same caches."""
    monkeypatch.setattr(tokenizer_module, "_CACHED_PAIRS", 50)
    monkeypatch.setattr(tokenizer_module, "_CACHED_PIECES", 10)
    rng = random.Random(0)
    texts = ["".join(rng.choices("etaoin shrdlu_{}", k=2000)) for _ in range(8)]
    alone = [from_ranks.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(from_ranks.encode, texts * 4)) == alone * 4


@pytest.mark.parametrize("long_piece", [0, 10**9], ids=["heap", "rescan"])
@pytest.mark.parametrize("seed", range(20))
def test_merging_is_naive_bpe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_piece: int, seed: int
) -> None:
    """Merges in random order, so that a merge often makes way for one of a lower rank."""
    monkeypatch.setattr(tokenizer_module, "_LONG_PIECE", long_piece)
    rng = random.Random(seed)
    vocab = {BYTE_NAMES[byte]: byte for byte in range(256)}
    pairs: list[tuple[str, str]] = []
    pool = list("aab")
    while len(pairs) < 25:
        pair = rng.choice(pool), rng.choice(pool)
        if pair not in pairs and len("".join(pair)) < 9:
            pairs.append(pair)
            pool.append("".join(pair))
            vocab.setdefault("".join(pair), len(vocab))
    rng.shuffle(pairs)
    document = tiny_json(vocab=vocab, merges=[list(pair) for pair in pairs])
    document["added_tokens"] = []
    tokenizer = read(document, tmp_path)
    merges = {
        (vocab[left], vocab[right]): (rank, vocab[left + right]) for rank, (left, right) in enumerate(pairs)
    }
    for length in (0, 1, 2, 3, 10, 80, 200):
        text = "".join(rng.choices("aab", k=length))
        assert tokenizer.encode(text) == naive_bpe(list(text.encode()), merges)


def test_repeated_pieces_come_from_a_bounded_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "_CACHED_PIECES", 8)
    tokenizer = read(tiny_json(), tmp_path)
    calls = []
    tokenizer._pieces._encode_piece = lambda piece: calls.append(piece) or [0]
    tokenizer.encode("ab ab ab ab")
    assert calls == ["ab", " ab"]
    long = "a" * 10_000
    tokenizer.encode(f"{long} {long} " + " ".join(str(i) for i in range(100)))
    assert len(tokenizer._pieces) <= 8
    assert max(map(len, tokenizer._pieces)) < 100
    tokenizer.encode(long)
    assert long not in tokenizer._pieces


# --- decoding ----------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 260) | st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 259]), max_size=30))
def test_stream_gives_the_whole_text(tiny: Tokenizer, ids: list[int]) -> None:
    for skip in (True, False):
        decoder = tiny.stream_decoder(skip_special=skip)
        text = "".join(map(decoder.push, ids)) + decoder.flush()
        assert text == tiny.decode(ids, skip_special=skip)
    assert tiny.stream_decoder().push(259) == ""


def test_stream_holds_back_an_incomplete_character_only(tiny: Tokenizer) -> None:
    decoder = tiny.stream_decoder()
    assert [decoder.push(byte) for byte in "a€".encode()] == ["a", "", "", "€"]
    assert [decoder.push(byte) for byte in b"\xe2\x82a"] == ["", "", "\ufffda"]
    assert [decoder.push(0x80), decoder.push(0xFF), decoder.flush()] == ["\ufffd", "\ufffd", ""]
    assert [decoder.push(0xE2), decoder.flush(), decoder.push(97)] == ["", "\ufffd", "a"]


@pytest.mark.parametrize("token_id", [-1, 261, 10**30])
def test_id_outside_the_vocabulary(tiny: Tokenizer, token_id: int) -> None:
    calls = (tiny.id_to_bytes, tiny.stream_decoder().push, lambda i: tiny.decode([97, i]))
    for call in calls:
        with pytest.raises(TokenizerError, match=rf"{token_id} .* 261 tokens"):
            call(token_id)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return read(tiny_json(), tmp_path_factory.mktemp("tiny"))


# --- what tokenizer.json may ask for -----------------------------------------------------------------------


def test_added_tokens(tiny: Tokenizer) -> None:
    """Special ones on request; the others always, also inside a word; the longest where two start."""
    assert tiny.encode("<s>ab") == [60, 115, 62, 256]
    assert tiny.encode("<s>ab", allow_special=True) == [259, 256]
    assert tiny.encode("xNEWab") == [120, 260, 256]
    assert (tiny.token_to_id("NEW"), tiny.token_to_id(" ab"), tiny.token_to_id("no")) == (260, 258, None)
    assert tiny.special_tokens == {"<s>": 259}
    assert tiny.is_special(259)
    assert not tiny.is_special(260)


def test_longest_added_token_wins(tmp_path: Path) -> None:
    document = tiny_json()
    document["added_tokens"].append(added("NEWER", 261, special=False))
    assert read(document, tmp_path).encode("NEWERNEW") == [261, 260]


def test_bytes_missing_from_the_vocabulary_are_dropped(tmp_path: Path) -> None:
    document = tiny_json(unk_token="<s>")
    document["pre_tokenizer"] = byte_level(use_regex=False)
    vocab = document["model"]["vocab"]
    vocab["a b"] = vocab.pop(BYTE_NAMES[4])  # a blank isn't of the byte alphabet: can be decoded only
    tokenizer = read(document, tmp_path)
    assert tokenizer.encode("a\x04b", allow_special=True) == [256]
    assert tokenizer.decode([4]) == "a b"


def test_whole_piece_first(tmp_path: Path) -> None:
    document = tiny_json(ignore_merges=True)
    document["model"]["merges"] = []
    document["model"]["vocab"]["end"] = 261
    document["added_tokens"].append(added("end", 261))
    tokenizer = read(document, tmp_path)
    assert tokenizer.encode("abc abc") == [257, 32, 97, 98, 99]
    assert tokenizer.encode("end") == [*b"end"]  # special: not even as a whole piece


SPLIT_ON = {"type": "Split", "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("stages", "text", "pieces"),
    [
        ([byte_level()], "ab abc  x9", ["ab", " abc", " ", " x", "9"]),
        ([byte_level(use_regex=False)], "ab ab", ["ab ab"]),
        ([byte_level(add_prefix_space=True)], "ab c", [" ab", " c"]),
        ([byte_level(add_prefix_space=True)], " ab", [" ab"]),
        ([{"type": "Digits", "individual_digits": True}, byte_level()], "a  1½½", ["a", "  ", "1", "½", "½"]),
        ([{"type": "Digits", "individual_digits": False}, byte_level()], "a  12½", ["a", "  ", "12½"]),
        ([{**SPLIT_ON, "pattern": {"String": "."}}, byte_level(use_regex=False)], "a.b", ["a", ".", "b"]),
        ([{**SPLIT_ON, "pattern": {"Regex": "(b)|c"}}, byte_level(use_regex=False)], "abcd", [*"abcd"]),
        ([{**SPLIT_ON, "pattern": {"Regex": "x*"}}, byte_level(use_regex=False)], "axxb", ["a", "xx", "b"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, stages: list[Any], text: str, pieces: list[str]) -> None:
    document = tiny_json()
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": stages}
    assert [piece for piece in read(document, tmp_path)._split(text) if piece] == pieces


@pytest.mark.parametrize(
    ("post_processor", "bos"),
    [
        (None, None),
        (byte_level(), None),
        ({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}]}, None),
        ({"type": "TemplateProcessing", "single": bos_template("<s>")}, 259),
    ],
)
def test_post_processor_says_whether_there_is_a_bos(
    tmp_path: Path, post_processor: Any, bos: int | None
) -> None:
    for spec in (
        post_processor,
        {"type": "Sequence", "processors": [post_processor] if post_processor else []},
    ):
        document = tiny_json()
        document["post_processor"] = spec
        tokenizer = read(document, tmp_path)
        assert (tokenizer.bos_token_id, tokenizer.adds_bos) == (bos, bos is not None)
    if bos is None:
        with pytest.raises(TokenizerError, match="no BOS"):
            tokenizer.encode("a", add_bos=True)
    else:
        assert tokenizer.encode("a", add_bos=True) == [bos, 97]


# --- finding the file --------------------------------------------------------------------------------------


def test_load_prefers_json_then_model_then_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "from_ranks", lambda path: path)
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "tokenizer.model").touch()
    assert load_tokenizer(tmp_path) == tmp_path / "original" / "tokenizer.model"
    (tmp_path / "tokenizer.model").touch()
    assert load_tokenizer(tmp_path) == tmp_path / "tokenizer.model"
    (tmp_path / "tokenizer.json").write_text(json.dumps(tiny_json()))
    assert load_tokenizer(tmp_path).vocab_size == 261


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>"}])
def test_load_takes_the_bos_from_the_config(tmp_path: Path, bos: Any) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tiny_json()))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.adds_bos) == (259, False)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: isn't JSON"):
        load_tokenizer(tmp_path)


def test_load_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json, tokenizer\.model or original.* pull"):
        load_tokenizer(tmp_path)


# --- damaged files -----------------------------------------------------------------------------------------


def refusal(error: pytest.ExceptionInfo[TokenizerError], path: Path) -> str:
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(f"{path}: ")
    assert ";" in message  # cause; remedy
    return message


def test_tiny_rank_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\n".join(reversed(rank_lines(TINY_RANKS))))
    tokenizer = Tokenizer.from_ranks(path, num_ranks=259)
    assert tokenizer.encode("abc abab") == [257, 258, 256]
    assert tokenizer.special_tokens["<|begin_of_text|>"] == 259


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("order", [1, -1])
def test_rank_file_in_any_spelling(tmp_path: Path, end: bytes, order: int) -> None:
    path = tmp_path / "tokenizer.model"
    for last in (b"", end):
        path.write_bytes(end.join(rank_lines(TINY_RANKS)[::order]) + last)
        tokenizer = Tokenizer.from_ranks(path, num_ranks=259)
        assert [tokenizer.id_to_bytes(rank) for rank in range(259)] == TINY_RANKS


def test_llama3_rank_file_is_read_at_once(llama3_rank_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "_parse_rank_lines", None)
    assert Tokenizer.from_ranks(llama3_rank_path).vocab_size == 128_256


def test_garbage_collection_is_as_before(tmp_path: Path) -> None:
    read(tiny_json(), tmp_path)
    assert gc.isenabled()
    with pytest.raises(TokenizerError):
        read("{", tmp_path)
    assert gc.isenabled()
    gc.disable()
    try:
        read(tiny_json(), tmp_path)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda lines: [*lines[:7], lines[7] + b" ", *lines[8:]], "line 8: should be"),
        (lambda lines: [*lines[:7], b" " + lines[7], *lines[8:]], "line 8: should be"),
        (lambda lines: [*lines[:7], lines[7].replace(b" ", b"\t"), *lines[8:]], "line 8: "),
        (lambda lines: [*lines[:7], lines[7] + b" " + lines[8], *lines[9:]], "line 8: should be"),
        (lambda lines: [*lines[:7], lines[7].replace(b" ", b"  "), *lines[8:]], "line 8: should be"),
        (lambda lines: lines[:-1], "holds 258 ranks, should hold 259"),
        (lambda lines: [*lines[:-1], lines[-1][:-4]], "line 259: should be 'base64 rank'"),
        (lambda lines: [*lines[:7], b"A* 7", *lines[8:]], "line 8: .*isn't base64"),
        (lambda lines: [*lines[:7], b"QUJ 7", *lines[8:]], "line 8: .*isn't base64"),
        (lambda lines: [*lines[:7], b"", *lines[8:]], "line 8: should be"),
        (lambda lines: [*lines[:7], b"QUJD -7", *lines[8:]], "line 8: should be"),
        (lambda lines: [*lines[:7], b"QUJD " + b"9" * 5000, *lines[8:]], "line 8: should be"),
        (lambda lines: [*lines[:7], b"QUJD 8", *lines[8:]], "line 9: rank 8 is there twice"),
        (lambda lines: [*lines[:7], b"QUJD 999", *lines[8:]], "rank 7 is missing"),
        (lambda lines: [b"QUJD 999", *lines[1:]], "rank 0 is missing"),
        (lambda lines: [*lines[:-1], b"YWI= 258"], "ranks 256 and 258 are the same token"),
        (lambda lines: [*lines[:7], b"QUJD 7", *lines[8:]], "no rank for the single byte 0x07"),
        (lambda lines: [b"version https://git-lfs", b"oid sha256:0"], "line 1: "),
        (lambda lines: [], "holds 0 ranks"),
    ],
)
def test_damaged_rank_file(tmp_path: Path, damage: Any, expected: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\n".join(damage(rank_lines(TINY_RANKS))))
    with pytest.raises(TokenizerError, match=expected) as error:
        Tokenizer.from_ranks(path, num_ranks=259)
    refusal(error, path)


def test_llama3_rank_file_cut_at_a_line_end(llama3_rank_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"".join(llama3_rank_path.read_bytes().splitlines(keepends=True)[:100_000]))
    with pytest.raises(TokenizerError, match="holds 100000 ranks, should hold 128000") as error:
        load_tokenizer(tmp_path)
    refusal(error, path)


def test_unreadable_files(tmp_path: Path) -> None:
    for read_file in (Tokenizer.from_json, Tokenizer.from_ranks):
        for path in (tmp_path, tmp_path / "none"):
            with pytest.raises(TokenizerError, match="can't be read") as error:
                read_file(path)
            refusal(error, path)


def at(document: Any, *path: Any, value: Any = None, drop: bool = False) -> Any:
    """A copy of nested data with one place changed, or dropped."""
    document = copy.deepcopy(document)
    place = document
    for key in path[:-1]:
        place = place[key]
    if drop:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return document


SEQUENCE = {"type": "Sequence", "pretokenizers": [byte_level(), {"type": "Digits"}]}
DIGITS_ONLY = {"type": "Sequence", "pretokenizers": [{"type": "Digits"}]}
MERGED_SPECIAL = [added("abc", 257), added("<s>", 259), added("NEW", 260)]
EOS_TEMPLATE = {"type": "TemplateProcessing", "single": [*bos_template("<s>"), *bos_template("<s>")[:1]]}
TWO_BOS = [{"type": "TemplateProcessing", "single": bos_template("<s>")}] * 2
REMOVED = {**SPLIT_ON, "behavior": "Removed", "pattern": {"String": "x"}}


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (["model"], None, "model should be of type dict"),
        (["model"], [], "model should be of type dict"),
        (["model", "type"], "Unigram", "model 'Unigram' isn't supported"),
        (["model", "dropout"], 0.1, "model.dropout = 0.1 isn't supported"),
        (["model", "byte_fallback"], True, "model.byte_fallback = True isn't supported"),
        (["model", "continuing_subword_prefix"], "##", "continuing_subword_prefix = '##' isn't supported"),
        (["model", "end_of_word_suffix"], "</w>", "end_of_word_suffix = '</w>' isn't supported"),
        (["model", "ignore_merges"], 1, "ignore_merges should be of type bool, is 1"),
        (["model", "vocab"], [], "model.vocab should be of type dict, is"),
        (["model", "vocab", "ab"], "x", r"model.vocab\['ab'\] should be a number, is 'x'"),
        (["model", "vocab", "ab"], 257, "id 256 is missing"),
        (["model", "vocab", "ab"], 10**12, "id 256 is missing"),
        (["model", "vocab", "ab"], -1, "id -1 is negative or there twice"),
        (["model", "vocab", "ab"], 3, "id 3 is negative or there twice"),
        (["model", "vocab", "<s>"], 300, "'<s>' has another id in model.vocab"),
        (["model", "vocab", "\ud800 "], 261, "half a surrogate pair"),
        (["model", "merges"], {}, "model.merges should be of type list"),
        (["model", "merges", 1], "a b c", r"model.merges\[1\] = 'a b c' isn't two tokens"),
        (["model", "merges", 1], ["a", "q"], r"model.merges\[1\] = \['a', 'q'\] isn't two tokens"),
        (["model", "merges", 1], ["ab", []], r"model.merges\[1\] .*isn't two tokens"),
        (["model", "merges", 1], 7, r"model.merges\[1\] = 7 isn't two tokens"),
        (["model", "merges", 1], "a  b", r"model.merges\[1\] = 'a  b' isn't two tokens"),
        (["model", "merges", 1], ["a", "b", "c"], r"model.merges\[1\] .*isn't two tokens"),
        (["model", "merges", 1], ["xa", "b"], r"model.merges\[1\] .*isn't two tokens"),
        (["model", "merges", 1], ["a", "bc"], r"model.merges\[1\] .*isn't two tokens"),
        (["model", "merges", 2], ["a", "b"], r"model.merges\[2\] = \['a', 'b'\] is there twice"),
        (["model", "merges", 1], "a b", r"model.merges\[1\] = 'a b' is there twice"),
        (["added_tokens"], {}, "added_tokens should be of type list"),
        (["added_tokens", 0], "<s>", r"added_tokens\[0\] should be an object"),
        (["added_tokens", 0, "id"], None, r"added_tokens\[0\].id should be of type int"),
        (["added_tokens", 0, "id"], 5.0, r"added_tokens\[0\].id should be of type int, is 5.0"),
        (["added_tokens", 0, "content"], "", r"added_tokens\[0\]: '' is empty or there twice"),
        (["added_tokens", 0, "content"], "\ud800", "half a surrogate pair"),
        (["added_tokens", 1, "content"], "<s>", r"added_tokens\[1\]: '<s>' is empty or there twice"),
        (["added_tokens", 0, "lstrip"], True, r"added_tokens\[0\].lstrip isn't supported"),
        (["added_tokens", 0, "rstrip"], True, r"added_tokens\[0\].rstrip isn't supported"),
        (["added_tokens", 0, "single_word"], True, r"added_tokens\[0\].single_word isn't supported"),
        (["added_tokens"], MERGED_SPECIAL, r"model.merges\[1\], which makes a special token"),
        (["normalizer"], {"type": "NFC"}, "normalizer NFC isn't supported"),
        (["decoder"], None, "decoder null isn't supported"),
        (["decoder"], {"type": "WordPiece"}, "decoder WordPiece isn't supported"),
        (["pre_tokenizer"], None, "pre_tokenizer null at this place"),
        (["pre_tokenizer"], {"type": "Whitespace"}, "pre_tokenizer Whitespace at this place"),
        (["pre_tokenizer"], SEQUENCE, r"pretokenizers\[0\] ByteLevel at this place"),
        (["pre_tokenizer"], DIGITS_ONLY, r"\[0\] Digits at this place"),
        (["pre_tokenizer"], at(SEQUENCE, "pretokenizers", value=[REMOVED, byte_level()]), "'Removed'"),
        (["pre_tokenizer", "use_regex"], "no", "use_regex should be of type bool, is 'no'"),
        (["post_processor"], {"type": "BertProcessing"}, "post_processor BertProcessing isn't supported"),
        (["post_processor"], EOS_TEMPLATE, "adds anything but one token in front isn't supported"),
        (["post_processor"], {"type": "Sequence", "processors": TWO_BOS}, "adds anything but one token"),
        (["post_processor"], at(TWO_BOS[0], "single", 0, "SpecialToken", "id", value="<x>"), "'<x>' isn't"),
    ],
)  # fmt: skip
def test_damaged_or_unsupported_json(tmp_path: Path, path: list[Any], value: Any, expected: str) -> None:
    with pytest.raises(TokenizerError, match=expected) as error:
        read(at(tiny_json(), *path, value=value), tmp_path)
    refusal(error, tmp_path / "tokenizer.json")


def test_unknown_pre_tokenizer_and_bad_regex(tmp_path: Path) -> None:
    for stage, expected in (
        ({"type": "Metaspace"}, "Metaspace isn't supported"),
        ({**SPLIT_ON, "pattern": {"Regex": "("}}, r"pattern.Regex '\('"),
        ({**SPLIT_ON, "pattern": {"Glob": "("}}, "pattern.Regex should be of type str, is missing"),
    ):
        document = at(
            tiny_json(), "pre_tokenizer", value={"type": "Sequence", "pretokenizers": [stage, byte_level()]}
        )
        with pytest.raises(TokenizerError, match=expected) as error:
            read(document, tmp_path)
        refusal(error, tmp_path / "tokenizer.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "nul", '{"a": ' * 2000, '{"n": ' + "9" * 5000 + "}", "\xff"])
def test_not_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TokenizerError) as error:
        Tokenizer.from_json(path)
    refusal(error, path)


JUNK = st.sampled_from(
    [None, True, -1, 1.5, 10**25, "", "x", "Ġ", "\ud800", [], [[]], {}, {"type": "x"}, [None, "a"]]
)


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to everything in nested data but most of the vocabulary."""
    if path[-1:] == ("vocab",):
        return [path, (*path, "a"), (*path, "ab"), (*path, "abc")]
    inner = document.items() if isinstance(document, dict) else enumerate(document)
    found = [path] if path else []
    for key, item in inner:
        found += places(item, (*path, key)) if isinstance(item, dict | list) else [(*path, key)]
    return found


@settings(max_examples=300, deadline=None)
@given(data=st.data(), value=JUNK, drop=st.booleans())
def test_json_damaged_anywhere_is_refused_or_works(
    tmp_path_factory: pytest.TempPathFactory, data: Any, value: Any, drop: bool
) -> None:
    document = tiny_json()
    stages = [{"type": "Digits"}, {**SPLIT_ON, "pattern": {"Regex": "x"}}, byte_level()]
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": stages}
    document["post_processor"] = {"type": "Sequence", "processors": TWO_BOS[:1]}
    document = at(document, *data.draw(st.sampled_from(places(document))), value=value, drop=drop)
    survives(Tokenizer.from_json, json.dumps(document).encode(), tmp_path_factory)


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, 10**6), new=st.binary(max_size=3), cut=st.booleans())
def test_bytes_damaged_anywhere_are_refused_or_work(
    tmp_path_factory: pytest.TempPathFactory, place: int, new: bytes, cut: bool
) -> None:
    ranks_file = b"\n".join(rank_lines(TINY_RANKS))
    for reader, intact in (
        (lambda path: Tokenizer.from_ranks(path, num_ranks=259), ranks_file),
        (Tokenizer.from_json, json.dumps(tiny_json()).encode()),
    ):
        start = place % len(intact)
        survives(
            reader, intact[:start] + new + (b"" if cut else intact[start + len(new) :]), tmp_path_factory
        )


def survives(reader: Any, content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content)
    with contextlib.suppress(TokenizerError):
        tokenizer = reader(path)
        tokenizer.decode(tokenizer.encode("ab abc <s> 12 NEW", allow_special=True))


# --- tools/check_tokenizer.py ------------------------------------------------------------------------------


def test_check_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = load_tool("check_tokenizer")
    (tmp_path / "tokenizer.json").write_text(json.dumps(tiny_json()))
    text = tmp_path / "text.txt"
    text.write_bytes("ab\r\nabc é€ NEW".encode())
    golden = tmp_path / "golden.json"
    raw = {"kind": "raw", "text": "abc", "prompt_ids": [257], "greedy_ids": [97], "decoded": "a"}
    golden.write_text(json.dumps({"tokenizer_cases": [{"text": "ab", "ids": [256]}], "cases": [raw]}))
    arguments = [str(tmp_path), str(golden), "--text", str(text)]
    assert tool.main(arguments) == 0
    assert "encode: 1 of 1 equal" in capsys.readouterr().out

    golden.write_text(json.dumps({"tokenizer_cases": [{"text": "ab", "ids": [97, 98]}], "cases": [raw]}))
    assert tool.main(arguments) == 1
    out = capsys.readouterr().out
    assert "differs: encode 'ab': at 0 expected [97, 98], got [256]" in out
    assert "encode: 0 of 1 equal" in out

    for broken in ("{", "{}", '{"tokenizer_cases": [{}], "cases": []}', '{"cases": []}'):
        golden.write_text(broken)
        assert tool.main(arguments) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert tool.main([str(tmp_path / "none")]) == 2
