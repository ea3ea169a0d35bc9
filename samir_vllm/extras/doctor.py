"""``doctor``: what the engine sees on this machine, a row each, with a remedy for what is missing.

Each check runs guarded and imports what it checks, so that one broken part is one row and never a
traceback; the report itself is plain text and needs nothing but Python. Knows how to look, not how to run:
it loads no weights and starts no engine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from samir_vllm.backends import cuda_probe
from samir_vllm.backends.cuda_cache import Cache
from samir_vllm.backends.cuda_probe import Unavailable
from samir_vllm.backends.host_memory import host_memory
from samir_vllm.errors import SamirVllmError, one_line

PYTHONS = ((3, 11), (3, 13))  # oldest and newest that the project is tested on
EXIT_NOTHING_RUNS = 2
GIB, MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """One thing looked at. ``remedy`` is "" where nothing need be done."""

    section: str
    name: str
    status: Literal["ok", "warning", "missing"]
    found: str
    remedy: str = ""


Probe = Callable[[], str | list[Row]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--model", metavar="DIR|NAME", help="look at this model only (else at all there are)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns 0 if some device can run some model (that of ``--model``), else 2."""
    rows = look(args.model)
    devices = usable_devices(rows)
    if args.json:
        print(json.dumps({"devices": devices, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        encoding = sys.stdout.encoding  # a path may hold what the terminal can't print
        print(report(rows, devices).encode(encoding, errors="backslashreplace").decode(encoding))
    return 0 if devices else EXIT_NOTHING_RUNS


def report(rows: list[Row], devices: list[str]) -> str:
    """The rows as text, under a heading for each section, and the verdict."""
    width = max(len(row.name) for row in rows)
    lines, section = [], ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines.append(section)
        lines.append(f"  {row.status:<7}  {row.name:<{width}}  {row.found}")
        if row.remedy:
            lines.append(f"  {'':<7}  {'':<{width}}  -> {row.remedy}")
    if devices:
        lines.append(f"can run on: {', '.join(devices)}")
    else:
        lines.append("can't run: see what is missing under engine and models")
    return "\n".join(lines)


def usable_devices(rows: list[Row]) -> list[str]:
    """The devices that can run a model: ``cpu`` wants the engine and a model, ``cuda`` all of CUDA too."""

    def works(section: str, quorum: Callable[..., bool]) -> bool:
        return quorum(row.status != "missing" for row in rows if row.section == section)

    if not (works("engine", all) and works("models", any)):
        return []
    return ["cpu", "cuda"] if works("cuda", all) and works("gpus", any) else ["cpu"]


def look(model: str | None) -> list[Row]:
    """Runs every check; ``model`` limits the models to one."""
    checks: list[tuple[str, str, Probe]] = [
        ("engine", "Python", _python),
        ("engine", "numpy", _numpy),
        *[
            ("engine", name, _package(name))
            for name in ("ml-dtypes", "safetensors", "regex", "jinja2", "rich")
        ],
        ("engine", "host memory", _host_memory),
        ("models", "models", lambda: _models(model)),
        ("cuda", "CuPy", _cupy),
        ("cuda", "driver", _driver),
        ("cuda", "NVRTC", _nvrtc),
        ("cuda", "test kernel", lambda: f"compiles for sm_90 ({cuda_probe.compile_test_kernel()} bytes)"),
        ("cuda", "cuBLAS", lambda: _dotted(cuda_probe.cublas_version())),
        ("cuda", "kernels", _kernels),
        ("cuda", "kernel cache", _kernel_cache),
        ("gpus", "GPU", _gpus),
    ]
    return [row for check in checks for row in guarded(*check)]


def guarded(section: str, name: str, probe: Probe) -> list[Row]:
    """The rows of one check, whatever happens in it; a str is an ok row."""
    try:
        found = probe()
    except Unavailable as exc:
        return [Row(section, name, "missing", exc.cause, exc.remedy)]
    except SamirVllmError as exc:  # of a model; most messages are "cause; remedy"
        cause, _, remedy = str(exc).partition("; ")
        return [
            Row(section, name, "missing", cause, remedy or "mend what it names, or fetch the model again")
        ]
    except Exception as exc:
        cause = f"the check failed: {type(exc).__name__}: {one_line(exc)}"
        return [Row(section, name, "missing", cause, "reinstall what it names, or report this as a bug")]
    return [Row(section, name, "ok", found)] if isinstance(found, str) else found


# Engine


def _python() -> str | list[Row]:
    found = f"{platform.python_version()} ({sys.executable})"
    if PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return found
    tested = " to ".join(map(_dotted, PYTHONS))
    return [
        Row("engine", "Python", "warning", found, f"use Python {tested}, which this version is tested on")
    ]


def _package(name: str) -> Probe:
    """A check that the package imports (its module has the same name, hyphens turned)."""

    def probe() -> str:
        try:
            importlib.import_module(name.replace("-", "_"))
        except ModuleNotFoundError as exc:
            if exc.name == name.replace("-", "_"):
                raise Unavailable("not installed", f"pip install {name}") from None
            raise Unavailable(one_line(exc), f"pip install --force-reinstall {name}") from None
        except Exception as exc:
            raise Unavailable(
                f"can't be imported: {one_line(exc)}", f"pip install --force-reinstall {name}"
            ) from None
        return metadata.version(name)

    return probe


def _numpy() -> str | list[Row]:
    version = _package("numpy")()
    import numpy as np

    blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    if not blas.get("found"):
        remedy = "pip install --force-reinstall numpy: the wheels bring a fast BLAS"
        return [
            Row("engine", "numpy", "warning", f"{version} without BLAS: matrix products are slow", remedy)
        ]
    return f"{version} with {blas.get('name')} {blas.get('version')}"


def _host_memory() -> str | list[Row]:
    memory = host_memory()
    if memory is None:
        return [Row("engine", "host memory", "warning", "unknown", "see that the model fits, as FP32")]
    available, total = memory
    return f"{available / GIB:.1f} GiB available of {total / GIB:.1f}, {os.cpu_count()} CPUs"


# Models


def _models(given: str | None) -> list[Row]:
    """The model that was given; else every model there is, and a row about the default if it isn't there."""
    from samir_vllm.errors import ModelNotFoundError
    from samir_vllm.hub import list_models, resolve_model

    if given is not None:
        return _model(given, resolve_model(given))
    models = dict(list_models())
    try:
        default = resolve_model(None)
    except ModelNotFoundError as exc:
        cause, _, remedy = str(exc).partition("; ")
        if models:
            remedy = f"name one: --model {next(iter(models))}"
        rows = [Row("models", "default", "missing", cause, remedy)]
    else:
        rows = []
        if not any(path.samefile(default) for path in models.values()):
            models = {str(default): default} | models
    return rows + [row for name, path in models.items() for row in _model(name, path)]


def _model(name: str, path: Path) -> list[Row]:
    return guarded("models", name, lambda: _inspect_model(name, path))


def _inspect_model(name: str, path: Path) -> str | list[Row]:
    """Reads all that the engine reads but the tensors themselves."""
    from samir_vllm.chat import load_chat_format
    from samir_vllm.config import ModelConfig
    from samir_vllm.tokenizer import load_tokenizer
    from samir_vllm.weights import open_weights

    config = ModelConfig.from_dir(path)
    chat = load_chat_format(path, load_tokenizer(path))
    with open_weights(path, config) as weights:
        nbytes = weights.nbytes
    found = (
        f"{path}: {config.num_parameters / 1e6:.0f}M parameters, {nbytes / GIB:.2f} GiB, "
        f"chat format {chat.name if chat else 'none (use --raw)'}"
    )
    memory, needed = host_memory(), 2 * nbytes  # on the CPU the weights become FP32
    if memory and needed > memory[0]:
        found += f"; the CPU needs {needed / GIB:.1f} GiB, {memory[0] / GIB:.1f} are available"
        return [Row("models", name, "warning", found, "free memory, use a GPU, or take a smaller model")]
    return found


# CUDA


def _cupy() -> str:
    cupy = cuda_probe.cupy_install()
    return f"{cupy.distribution} {cupy.version}, for CUDA {cupy.cuda_major}"


def _driver() -> str:
    driver = cuda_probe.driver_version()
    cuda_probe.check_driver(driver, cuda_probe.cuda_major() or cuda_probe.MIN_CUDA_MAJOR)
    return f"serves CUDA {_dotted(driver)}"


def _nvrtc() -> str | list[Row]:
    version = cuda_probe.nvrtc_version()
    major = cuda_probe.cuda_major()
    if major in (None, version[0]):
        return _dotted(version)
    found = f"{_dotted(version)}, but CuPy is for CUDA {major}: the driver may not take its code"
    remedy = f'pip install "cupy-cuda{major}x[ctk]"'
    return [Row("cuda", "NVRTC", "warning", found, remedy)]


def _kernels() -> str:
    folder = cuda_probe.find_cuda_src()
    if folder is None:
        raise Unavailable("no folder cuda_src, in the package or beside it", "reinstall samir-vllm")
    count = sum(1 for _ in folder.glob("*.cu"))
    if count == 0:
        raise Unavailable(f"{folder} has no kernels (*.cu)", "use --device cpu with this version")
    return f"{count} sources in {folder}"


def _kernel_cache() -> str | list[Row]:
    cache = Cache()
    entries, nbytes = cache.contents()
    where = "no folder" if cache.folder is None else str(cache.folder)
    found = f"{where}: {entries} entries, {nbytes / MIB:.1f} MiB"
    if reason := cache.why_unwritable():
        found += f"; can't be written ({reason}), so kernels are compiled at each start"
        remedy = "set SAMIR_VLLM_CACHE_DIR to a folder that can be written"
        return [Row("cuda", "kernel cache", "warning", found, remedy)]
    return found


def _gpus() -> list[Row]:
    found = cuda_probe.gpus()
    if not found:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is {hidden!r})"
        raise Unavailable(f"no GPU{hint}", "unset CUDA_VISIBLE_DEVICES, or run with --device cpu")
    return [_gpu(gpu) for gpu in found]


def _gpu(gpu: cuda_probe.Gpu) -> Row:
    name = f"cuda:{gpu.index}"
    capability = _dotted(gpu.compute_capability)
    free = "unknown" if gpu.free_bytes is None else f"{gpu.free_bytes / GIB:.1f}"
    found = (
        f"{gpu.name}, compute capability {capability}, {gpu.num_sms} SMs, "
        f"{free} GiB free of {gpu.total_bytes / GIB:.1f}"
    )
    if not gpu.supported:
        least = _dotted(cuda_probe.MIN_COMPUTE_CAPABILITY)
        remedy = f"needs {least} or more: use an Ampere or later GPU, or --device cpu"
        return Row("gpus", name, "missing", found, remedy)
    if gpu.free_bytes is None:
        return Row("gpus", name, "warning", found, "no context could be made: is another program using it?")
    return Row("gpus", name, "ok", found)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
