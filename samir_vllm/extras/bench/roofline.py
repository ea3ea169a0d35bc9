"""``bench roofline``: what this device can do at best; the limits that the other benches stand beside.

Knows the backend for its shapes and its device; no weights, no engine.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from samir_vllm.backends import select_backend
from samir_vllm.commandline import load_pyplot, save_figure
from samir_vllm.config import EngineConfig
from samir_vllm.extras.bench.limits import Limits, gemm_rates, measure_limits
from samir_vllm.extras.bench.model import add_model_arguments, model_config
from samir_vllm.extras.bench.report import (
    add_output_arguments,
    check_output,
    duration,
    print_notices,
    print_table,
    progress,
    rate,
)


@dataclass(frozen=True, slots=True)
class Gemm:
    """One GEMM, and the best it does."""

    rows: int
    features: int
    depth: int
    flops_per_second: float

    @property
    def intensity(self) -> float:
        """Floating-point operations for each byte of its BF16 operands and result."""
        rows, features, depth = self.rows, self.features, self.depth
        return rows * features * depth / (rows * depth + features * depth + rows * features)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_model_arguments(parser)
    add_output_arguments(parser, peers=False)


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    check_output(args)
    config = model_config(args)
    # Nothing of the model runs here: the smallest buffers do.
    options = EngineConfig(device=args.device, max_num_seqs=1, max_batched_tokens=1, max_model_len=1)
    backend = select_backend(options, config)
    print_notices(backend.notices)
    with progress(2) as begin:
        begin("GEMMs")
        rates = gemm_rates(backend)
        begin("memory and launches")
        limits = measure_limits(backend, rates)
    gemms = [Gemm(*size, flops) for size, flops in rates.items()]
    if args.json:
        found = {"bench": "roofline", "limits": asdict(limits), "gemms": [asdict(g) for g in gemms]}
        print(json.dumps(found))
    else:
        print_table(table_of(limits, gemms))
    if args.plot is not None:
        draw(limits, gemms, Path(args.plot))
    return 0


def table_of(limits: Limits, gemms: list[Gemm]) -> Table:
    """For people."""
    table = Table("limit", box=box.SIMPLE, title=f"roofline: {limits.device}")
    table.add_column("measured", justify="right")
    table.add_row("read memory", rate(limits.read_bytes_per_second, "B/s"))
    table.add_row("copy memory, read + written", rate(limits.copy_bytes_per_second, "B/s"))
    for gemm in gemms:
        name = f"GEMM, {gemm.rows} rows, {gemm.features} features, depth {gemm.depth}"
        table.add_row(name, rate(gemm.flops_per_second, "FLOP/s"))
    table.add_row("operation started from Python", duration(limits.launch_seconds))
    if limits.graph_node_seconds is not None:
        table.add_row("empty kernel in a CUDA graph", duration(limits.graph_node_seconds))
    ridge = limits.gemm_flops_per_second / limits.read_bytes_per_second
    table.caption = f"bound by memory below {ridge:,.0f} FLOP a byte"
    return table


def draw(limits: Limits, gemms: list[Gemm], path: Path) -> None:
    """The roofline (Williams, Waterman and Patterson, 2009), and the GEMMs below it.

    Raises:
        OptionError: no matplotlib, another ending than PICTURES, or the file can't be written.
    """
    plt = load_pyplot(path)
    ridge = limits.gemm_flops_per_second / limits.read_bytes_per_second
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    corners = [ridge / 100, ridge, max(10 * ridge, *(2 * gemm.intensity for gemm in gemms))]
    roof = [min(limits.gemm_flops_per_second, limits.read_bytes_per_second * x) / 1e12 for x in corners]
    axes.plot(corners, roof, color="C0", label="roof")
    axes.plot(
        [gemm.intensity for gemm in gemms],
        [gemm.flops_per_second / 1e12 for gemm in gemms],
        "o",
        color="C1",
        label="GEMMs",
    )
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="TFLOP/s", title=limits.device)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(plt, figure, path)
