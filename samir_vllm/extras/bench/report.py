"""What a measurement found, for people (table, picture) and for programs (JSON), and the options that choose.

Every row stands beside its floor. Knows no engine and no device; drawing needs matplotlib (extra ``plot``).
"""

from __future__ import annotations

import argparse
import gc
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from samir_vllm.backends.cuda_probe import free_unused_memory
from samir_vllm.commandline import error_console, load_pyplot, print_notice, save_figure
from samir_vllm.config import ModelConfig
from samir_vllm.extras.bench.limits import Limits
from samir_vllm.extras.bench.peers import PEER_SECONDS, transformers_results

PEERS = ("transformers",)
WIDTH = 140  # of a table that isn't printed on a terminal
LONGEST = 1 << 24  # a number on the command line that is surely a slip


@dataclass(frozen=True, slots=True)
class Row:
    """One piece of work: what it took, and the least that it could take."""

    name: str
    seconds: float  # median
    tokens: int  # prompt tokens taken in, or new tokens given out, in these seconds
    bytes: float  # that it must move
    flops: float  # that it must do
    floor_seconds: float
    gpu_idle: float | None = None  # share of the time in which the GPU did nothing; None where it is unknown
    peer_seconds: float | None = None  # of the same work; None without a peer
    details: dict[str, Any] = field(default_factory=dict)  # more, for the JSON

    @property
    def tokens_per_second(self) -> float:
        """Of the median."""
        return self.tokens / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Its fields, the details among them, and what follows from them."""
        found = asdict(self)
        details = found.pop("details")
        found["tokens_per_second"] = self.tokens_per_second
        found["share_of_floor"] = self.floor_seconds / self.seconds
        return found | details


@dataclass(frozen=True, slots=True)
class Report:
    """What one command measured."""

    bench: str
    model: str
    limits: Limits
    rows: list[Row]
    peer: str | None = None  # whose seconds the rows have

    def as_json(self) -> dict[str, Any]:
        """All of it; seconds, bytes and floating-point operations."""
        return {
            "bench": self.bench,
            "model": self.model,
            "peer": self.peer,
            "limits": asdict(self.limits),
            "rows": [row.as_json() for row in self.rows],
        }


# Options


def add_output_arguments(parser: argparse.ArgumentParser, *, peers: bool = True) -> None:
    """``--json``, ``--plot`` and, where a peer can do the same work, ``--peers``."""
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--plot", metavar="FILE", help="draw the rows as .png or .svg")
    if peers:
        parser.add_argument(
            "--peers", choices=PEERS, help="the same work through this library, if it is installed"
        )
        parser.add_argument(
            "--peer-seconds",
            type=number,
            default=PEER_SECONDS,
            metavar="N",
            help="what it has measured by then is what counts (%(default)s)",
        )


def check_output(args: argparse.Namespace) -> None:
    """Raises OptionError for a picture that couldn't be drawn: before the measurement, not after it."""
    if args.plot is not None:
        load_pyplot(Path(args.plot))


def number(text: str) -> int:
    """An argument that must be a whole number of 1 or more."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} should be a whole number, 1 to {LONGEST}")
    return int(text)


def numbers(text: str) -> list[int]:
    """An argument that must be a list of such numbers: ``1,8,32``."""
    return [number(word.strip()) for word in text.split(",")]


# Output


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, where that is a terminal; to be called with the name of each piece of work."""
    console = error_console()
    columns = (
        BarColumn(),
        TextColumn("{task.completed}/{task.total} {task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, begun = bar.add_task("", total=total), 0

        def begin(name: str) -> None:
            nonlocal begun
            bar.update(task, description=name, completed=begun)
            begun += 1

        yield begin


def print_notices(notices: Iterable[str]) -> None:
    """Lines that the user should know, on standard error."""
    console = error_console()
    for notice in notices:
        print_notice(console, notice)


def print_table(table: Table) -> None:
    """On standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)


def write_report(report: Report, args: argparse.Namespace) -> None:
    """As the arguments want it: a table or JSON on standard output, and a picture.

    Raises:
        OptionError: the picture can't be written.
    """
    if args.json:
        print(json.dumps(report.as_json()))
    else:
        print_table(table_of(report))
    if args.plot is not None:
        draw(report, Path(args.plot))


def with_peer(
    report: Report, args: argparse.Namespace, config: ModelConfig, works: list[dict[str, Any]]
) -> Report:
    """The report with the seconds of the peer that ``--peers`` names; as it is without one that can run.

    Our engine must be gone by now: the peer needs the GPU's memory.

    Args:
        report: its rows have the names of the works.
        args: parsed arguments.
        config: the model's shape.
        works: as ``peers`` wants them.
    """
    if args.peers is None:
        return report
    gc.unfreeze()
    gc.collect()
    free_unused_memory()
    results = transformers_results(
        config,
        works,
        notify=lambda line: print_notices([line]),
        device=args.device,
        seconds=args.peer_seconds,
    )
    if results is None:
        return report
    rows = []
    for row in report.rows:
        if (found := results.get(row.name)) is not None:
            row = replace(row, peer_seconds=found.seconds, details=row.details | {"peer_how": found.how})
        rows.append(row)
    return replace(report, rows=rows, peer=args.peers)


def table_of(report: Report) -> Table:
    """For people."""
    limits = report.limits
    table = Table(box=box.SIMPLE, title=f"{report.bench}: {report.model}, {limits.device}")
    table.caption = (
        f"limits of this run: read {rate(limits.read_bytes_per_second, 'B/s')}, "
        f"GEMM {rate(limits.gemm_flops_per_second, 'FLOP/s')}"
    )
    has_idle = any(row.gpu_idle is not None for row in report.rows)
    titles = ["time", "tokens/s", "bytes", "FLOP", "rate", "floor", "floor / time"]
    titles += ["GPU idle"] * has_idle
    if report.peer is not None:
        titles += [report.peer, "times ours"]
    table.add_column("")
    for title in titles:
        table.add_column(title, justify="right")
    for row in report.rows:
        cells = _cells(row, limits) + [share(row.gpu_idle)] * has_idle
        if report.peer is not None:
            other = row.peer_seconds
            cells += ["", ""] if other is None else [duration(other), f"{other / row.seconds:.2f}"]
        table.add_row(row.name, *cells)
    return table


def _cells(row: Row, limits: Limits) -> list[str]:
    by_bytes = row.bytes / limits.read_bytes_per_second >= row.flops / limits.gemm_flops_per_second
    speed = rate(row.bytes / row.seconds, "B/s") if by_bytes else rate(row.flops / row.seconds, "FLOP/s")
    return [
        duration(row.seconds),
        f"{row.tokens_per_second:,.4g}" if row.tokens_per_second < 1000 else f"{row.tokens_per_second:,.0f}",
        rate(row.bytes, "B"),
        rate(row.flops, ""),
        speed,
        duration(row.floor_seconds),
        share(row.floor_seconds / row.seconds),
    ]


def duration(seconds: float) -> str:
    """Four digits, with a unit that fits."""
    unit, size = next((u for u in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if seconds >= u[1]), ("us", 1e-6))
    return f"{seconds / size:.4g} {unit}"


def rate(value: float, unit: str) -> str:
    """Four digits, with a decimal prefix."""
    prefix, size = next(
        (p for p in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)) if value >= p[1]), ("", 1.0)
    )
    return f"{value / size:.4g} {prefix}{unit}".rstrip()


def share(value: float | None) -> str:
    """A percentage; nothing for None."""
    return "" if value is None else f"{value:.1%}"


def draw(report: Report, path: Path) -> None:
    """Bars: what each row took, its floor, and the peer's time where there is one.

    Raises:
        OptionError: no matplotlib, another ending than ``PICTURES``, or the file can't be written.
    """
    bars = [("measured", [row.seconds for row in report.rows])]
    bars.append(("floor", [row.floor_seconds for row in report.rows]))
    if report.peer is not None:
        bars.append((report.peer, [row.peer_seconds or float("nan") for row in report.rows]))
    title = f"{report.bench}: {report.model}\n{report.limits.device}"
    draw_bars(path, title, [row.name for row in report.rows], bars)


def draw_bars(path: Path, title: str, names: Sequence[str], bars: list[tuple[str, list[float]]]) -> None:
    """Groups of horizontal bars in milliseconds; ``bars`` are (label, seconds of each name)."""
    plt = load_pyplot(path)
    height = 0.8 / len(bars)
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.6 * len(names)), layout="constrained")
    for i, (label, seconds) in enumerate(bars):
        places = [n + height * (i - (len(bars) - 1) / 2) for n in range(len(names))]
        drawn = axes.barh(places, [1e3 * s for s in seconds], height, label=label)
        axes.bar_label(drawn, fmt=" %.3g", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds", title=title)
    axes.grid(axis="x", alpha=0.3)
    axes.margins(x=0.1)
    axes.legend()
    save_figure(plt, figure, path)
