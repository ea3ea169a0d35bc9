"""``bench startup``: seconds from process start to the first token, kernel cache cold and warm.

Each start is a process of its own that generates one token; its stages are those of ``generate --timing``.
The weights are read once before, so that they lie in the page cache, and their copy to a GPU stands beside a
copy from pinned memory in the same run. Knows the engine by its command line, and the CUDA backend's probes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from samir_vllm.backends import gpu_index
from samir_vllm.commandline import error_console
from samir_vllm.config import EngineConfig, ModelConfig
from samir_vllm.errors import SamirVllmError
from samir_vllm.extras.bench.report import number, print_table
from samir_vllm.hub import resolve_model

READ_BYTES = 16 << 20
PROMPT = "Hello"


@dataclass(frozen=True, slots=True)
class Start:
    """One process, from its start to its first token."""

    backend: str
    seconds: float
    stages: list[dict[str, Any]]  # name, seconds, detail, background
    peak_bytes: int  # of resident memory, the mapped weights included


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--model", metavar="DIR|NAME", help="as for generate")
    parser.add_argument("--device", default="auto", help="as for generate (default: %(default)s)")
    parser.add_argument(
        "--runs", type=number, default=5, metavar="N", help="warm starts; the median counts (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    model_dir = resolve_model(args.model)
    console = error_console()
    read_weights(model_dir, console)
    with tempfile.TemporaryDirectory(prefix="samir_vllm-bench-") as cache:
        starts = [
            start(model_dir, args.device, Path(cache)) for _ in _tracked(args.runs + 1, "starts", console)
        ]
    report = make_report(model_dir, starts[0], starts[1:])
    if report["backend"] == "cuda" and (rate := measured_pinned_rate(args.device)) is not None:
        report["pinned_bytes_per_second"] = rate
    if args.json:
        print(json.dumps(report))
    else:
        print_table(_table(report))
        print(*_notes(report), sep="\n")
    return 0


def read_weights(model_dir: Path, console: Console) -> None:
    """Brings the weights into the page cache."""
    for path in sorted(model_dir.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            for _ in _tracked(-(-path.stat().st_size // READ_BYTES), f"reading {path.name}", console):
                file.read(READ_BYTES)


def _tracked(steps: int, what: str, console: Console) -> Iterable[int]:
    """0, 1, ... with a progress bar on a terminal."""
    return track(range(steps), what, console=console, transient=True, disable=not console.is_terminal)


def start(model_dir: Path, device: str, cache: Path) -> Start:
    """One token from a new process that keeps its kernels in ``cache``."""
    command = [sys.executable, "-m", "samir_vllm", "generate", "--model", str(model_dir), "--device", device]
    command += ["--raw", "--json", "--quiet", "--timing", PROMPT, "1"]
    # Without the compiler's own cache: cold means that every kernel is compiled.
    environment = os.environ | {"SAMIR_VLLM_CACHE_DIR": str(cache), "CUDA_CACHE_DISABLE": "1"}
    quiet = subprocess.DEVNULL
    with tempfile.TemporaryFile() as err:
        child = subprocess.Popen(command, env=environment, stdin=quiet, stdout=quiet, stderr=err)
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except BaseException:  # Ctrl-C
            child.kill()
            child.wait()
            raise
        child.returncode = os.waitstatus_to_exitcode(status)
        err.seek(0)
        messages = err.read().decode().splitlines()
    if child.returncode != 0:
        raise SamirVllmError((messages or ["the start failed"])[-1].removeprefix("samir_vllm: "))
    timing = next((json.loads(line) for line in reversed(messages) if line.startswith("{")), None)
    if timing is None:
        raise SamirVllmError("a start told no times; see generate --timing --json")
    seconds = timing["seconds_to_first_token"]
    return Start(timing["backend"], seconds, timing["stages"], usage.ru_maxrss * 1024)


def make_report(model_dir: Path, cold: Start, warm: list[Start]) -> dict[str, Any]:
    """Figures of the starts, seconds and bytes; of several warm ones the medians."""
    config = ModelConfig.from_dir(model_dir)
    stages = []
    for stage in warm[0].stages:
        name = stage["name"]
        seconds = [s["seconds"] for w in warm for s in w.stages if s["name"] == name]
        before = next((s for s in cold.stages if s["name"] == name), {"seconds": None, "detail": ""})
        stages.append(
            stage
            | {"seconds": statistics.median(seconds), "cold_seconds": before["seconds"]}
            | {"cold_detail": before["detail"]}
        )
    seconds_of = {s["name"]: s["seconds"] for s in stages}
    weights = seconds_of.get("copies to the GPU", seconds_of["weights"])
    nbytes = 2 * config.num_parameters
    return {
        "model": str(model_dir),
        "backend": warm[0].backend,
        "runs": len(warm),
        "cold_seconds": cold.seconds,
        "warm_seconds": statistics.median(w.seconds for w in warm),
        "warm_seconds_each": [w.seconds for w in warm],
        "stages": stages,
        "weight_bytes": nbytes,
        "weights_bytes_per_second": nbytes / weights,
        "peak_host_bytes": max(w.peak_bytes for w in warm),
        "peak_host_bytes_beside_mapping": max(w.peak_bytes for w in warm) - nbytes,
    }


def measured_pinned_rate(device: str) -> float | None:
    """Bytes a second from pinned memory to the GPU of that name; None if it can't be measured now."""
    from samir_vllm.backends.cuda_probe import require_gpu

    try:
        gpu = require_gpu(gpu_index(EngineConfig(device=device)))
        from samir_vllm.backends.cuda_upload import pinned_rate  # it imports CuPy, which must be possible

        return pinned_rate(gpu.index)
    except (SamirVllmError, RuntimeError, MemoryError):  # CuPy's errors are RuntimeErrors
        return None


def _table(report: dict[str, Any]) -> Table:
    table = Table(title=f"start to first token, {report['model']} [{report['backend']}]")
    for column in ("stage", "cold cache", "warm cache", ""):
        table.add_column(column, justify="right" if "cache" in column else "left")
    for stage in report["stages"]:
        details = dict.fromkeys(d for d in (stage["cold_detail"], stage["detail"]) if d)
        beside = "beside the others: " if stage["background"] else ""
        cold = "" if stage["cold_seconds"] is None else f"{stage['cold_seconds']:.3f} s"
        table.add_row(beside + stage["name"], cold, f"{stage['seconds']:.3f} s", " / ".join(details))
    table.add_section()
    each = ", ".join(f"{s:.2f}" for s in report["warm_seconds_each"])
    table.add_row(
        "all", f"{report['cold_seconds']:.3f} s", f"{report['warm_seconds']:.3f} s", f"warm: {each}"
    )
    return table


def _notes(report: dict[str, Any]) -> list[str]:
    rate = report["weights_bytes_per_second"] / 1e9
    line = f"weights: {report['weight_bytes'] / 1e6:,.0f} MB at {rate:.1f} GB/s"
    if pinned := report.get("pinned_bytes_per_second"):
        line += f", {rate * 1e9 / pinned:.0%} of the {pinned / 1e9:.1f} GB/s of a copy from pinned memory"
    beside = report["peak_host_bytes_beside_mapping"] / 2**20
    peak = report["peak_host_bytes"] / 2**20
    return [line, f"peak host memory: {peak:,.0f} MiB, {beside:,.0f} MiB of it beside the mapped weights"]
