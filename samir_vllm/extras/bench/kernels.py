"""``bench kernels``: a decode step taken apart, each kernel timed alone beside what memory allows it.

Every launch of one step is written down while the step runs once. Launches of one kind (on a GPU: a kernel,
and which matrix it meets) are then replayed together: those of all layers, so that no layer's weights stay in
a cache. On NumPy the operations take the place of kernels. Knows how a backend launches; no scheduler.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from samir_vllm.batch import build_batch
from samir_vllm.commandline import error_console, print_notice
from samir_vllm.decode_loop import run_step
from samir_vllm.extras.bench.limits import Limits, floor_seconds, measure_limits, median_seconds
from samir_vllm.extras.bench.model import (
    add_model_arguments,
    check_context,
    make_engine,
    model_name,
    open_model,
    pages_per_seq,
    random_prompt,
)
from samir_vllm.extras.bench.report import (
    WIDTH,
    add_output_arguments,
    check_output,
    draw_bars,
    duration,
    number,
    progress,
    rate,
    share,
)
from samir_vllm.llama import LlamaWeights
from samir_vllm.model_runner import ModelRunner
from samir_vllm.sequence import ScheduledStep, Sequence

OPERATIONS = (
    *("embedding", "rmsnorm", "linear", "linear_add", "rope_kv_write", "paged_attention_decode"),
    *("silu_mul", "take_rows", "lm_head", "argmax"),
)
"""Of a backend, in place of kernels where there are none."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a step, ready to be repeated."""

    kind: str
    run: Callable[[], object]
    bytes: float  # moved at least
    flops: float


@dataclass(frozen=True, slots=True)
class Kind:
    """All launches of a kind in one step, and what they take together."""

    name: str
    count: int
    seconds: float
    bytes: float
    flops: float
    floor_seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_model_arguments(parser)
    parser.add_argument(
        "--batch", type=number, default=1, metavar="N", help="sequences that decode (%(default)s)"
    )
    parser.add_argument(
        "--context", type=number, default=128, metavar="N", help="KV tokens of each (%(default)s)"
    )
    add_output_arguments(parser, peers=False)


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    check_output(args)
    config, tensors = open_model(args)
    check_context(config, args.context + 1)
    pages = pages_per_seq(args.context + 2)
    engine = make_engine(
        args,
        config,
        tensors,
        num_pages=pages * config.num_layers * args.batch,
        max_num_seqs=args.batch,
        max_batched_tokens=1,
        max_pages_per_seq=pages,
    )
    console = error_console()
    for notice in engine.notices:
        print_notice(console, notice)
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    launches = record_step(runner, args.batch, args.context)
    names = list(dict.fromkeys(launch.kind for launch in launches))
    with progress(2 + len(names)) as begin:
        begin("limits")
        limits = measure_limits(runner.backend)
        begin("whole step")
        step_seconds = replay_seconds(runner, launches)
        kinds = []
        for name in names:
            begin(name)
            kinds.append(measure(runner, limits, name, [one for one in launches if one.kind == name]))
    kinds.sort(key=lambda kind: -kind.seconds)
    work = f"decode step, batch {args.batch}, {args.context} KV tokens each"
    title = f"{work}\n{model_name(args)} on {limits.device}"
    if args.json:
        print(json.dumps(as_json(args, limits, kinds, step_seconds)))
    else:
        out = Console(highlight=False)
        if not out.is_terminal:
            out.width = WIDTH
        out.print(table_of(title, limits, kinds, step_seconds))
    if args.plot is not None:
        bars = [("measured", [k.seconds for k in kinds]), ("floor", [k.floor_seconds for k in kinds])]
        draw_bars(Path(args.plot), title, [kind.name for kind in kinds], bars)
    return 0


# Writing a step down


def record_step(runner: ModelRunner, batch: int, context: int) -> list[Launch]:
    """The launches of one decode step of ``batch`` sequences with ``context`` KV tokens each (zeros).

    The step's inputs come from the host, so that every launch can be repeated: the kernel that moves decoding
    sequences on by a token is not among them.
    """
    backend = runner.backend
    step = decode_step(runner, batch, context)
    recorder = Recorder(runner, batch, context)
    with backend.active(), recorder.recording():
        run_step(backend, runner.weights, backend.stage(build_batch(step)))
    return recorder.launches


def decode_step(runner: ModelRunner, batch: int, context: int) -> ScheduledStep:
    """A step of sequences whose prompts are in their pages, as far as anybody can tell."""
    config, backend = runner.config, runner.backend
    pages = pages_per_seq(context + 2)
    sequences = []
    with backend.active():
        for slot in range(batch):
            seq = Sequence(str(slot), random_prompt(config, context + 1, seed=slot), max_tokens=2)
            seq.slot, seq.num_prompt_tokens = slot, context
            seq.num_computed_tokens = seq.num_launched_tokens = context
            first = slot * pages * config.num_layers
            page_ids = np.arange(first, first + pages * config.num_layers, dtype=np.int32)
            backend.set_block_table(slot, page_ids.reshape(config.num_layers, pages))
            backend.set_stop_ids(slot, ())
            sequences.append(seq)
    return ScheduledStep(sequences, [], [])


class Recorder:
    """Sees every launch of a runner's backend, and lets it happen."""

    def __init__(self, runner: ModelRunner, batch: int, context: int) -> None:
        """For a step of so many sequences with so many KV tokens each, one more after the step."""
        self.launches: list[Launch] = []
        self._backend: Any = runner.backend
        self._config = config = runner.config
        self._batch = batch
        self._attended = batch * (context + 1)
        self._kv_bytes = 2 * config.num_kv_heads * config.head_dim * runner.backend.kv_itemsize  # of a token
        self._roles = matrix_roles(runner.weights)
        # Of these an operation touches a part, that of its tokens.
        tables = [runner.weights.embed_tokens, *getattr(self._backend, "_partials", ())]
        for name in ("kv_cache", "block_tables", "_cos", "_sin"):
            if (table := getattr(self._backend, name, None)) is not None:
                tables.append(table)
        self._tables = {address(table) for table in tables}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside it launches are written down."""
        backend, wrapped = self._backend, list[tuple[Any, str, Callable[..., Any]]]()
        if backend.name == "cuda":
            wrapped += [(backend, "_launch", self._see_kernel), (backend._cublas, "matmul", self._see_matmul)]
        else:
            wrapped += [(backend, name, partial(self._see_operation, name)) for name in OPERATIONS]
        try:
            for owner, name, see in wrapped:
                setattr(owner, name, partial(see, getattr(owner, name)))
            yield
        finally:
            for owner, name, _ in wrapped:
                vars(owner).pop(name, None)

    def _see_kernel(
        self, launch: Any, name: str, grid: Any, threads: int, args: tuple[Any, ...], shared: int = 0
    ) -> None:
        if 0 not in grid:
            self._add(name, partial(launch, name, grid, threads, args, shared), args)
        launch(name, grid, threads, args, shared)

    def _see_matmul(self, matmul: Any, x: Any, weight: Any, out: Any, **options: Any) -> None:
        self._add("cuBLAS", partial(matmul, x, weight, out, **options), (x, weight, out))
        matmul(x, weight, out, **options)

    def _see_operation(self, name: str, operation: Any, *args: Any) -> Any:
        self._add(name, partial(operation, *args), args)
        return operation(*args)

    def _add(self, name: str, run: Callable[[], object], args: tuple[Any, ...]) -> None:
        """Bytes: of every array that comes with the launch, whole but for tables."""
        cfg, arrays = self._config, [arg for arg in args if hasattr(arg, "nbytes") and arg.ndim > 0]
        nbytes = sum(a.nbytes for a in arrays if address(a) not in self._tables)
        flops = 0.0
        matrix = next((a for a in arrays if address(a) in self._roles), None)
        if "embedding" in name:
            nbytes += self._batch * cfg.hidden_size * self._backend.kv_itemsize
        elif matrix is not None:
            if address(matrix) in self._tables:  # the embeddings as the LM head
                nbytes += matrix.nbytes
            name = f"{name}, {self._roles[address(matrix)]}"
            flops = 2 * self._batch * matrix.size
        elif "attention" in name:
            nbytes += self._attended * self._kv_bytes
            flops = 4 * cfg.num_heads * cfg.head_dim * self._attended
        elif "rope" in name:
            nbytes += self._batch * self._kv_bytes
        self.launches.append(Launch(name, run, nbytes, flops))


def matrix_roles(weights: LlamaWeights) -> dict[int, str]:
    """What each matrix is for, by its address."""
    roles = {
        address(getattr(layer, field.name)): field.name.removesuffix("_proj")
        for layer in weights.layers
        for field in fields(layer)
        if field.name.endswith("_proj")
    }
    return roles | {address(weights.lm_head): "lm_head"}


def address(array: Any) -> int:
    """Of an array's first element, NumPy's or CuPy's."""
    where: int = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return where


# Timing it


def measure(runner: ModelRunner, limits: Limits, name: str, launches: list[Launch]) -> Kind:
    """All launches of one kind."""
    nbytes, flops = sum(one.bytes for one in launches), sum(one.flops for one in launches)
    return Kind(
        name=name,
        count=len(launches),
        seconds=replay_seconds(runner, launches),
        bytes=nbytes,
        flops=flops,
        floor_seconds=floor_seconds(limits, nbytes, flops),
    )


def replay_seconds(runner: ModelRunner, launches: list[Launch]) -> float:
    """One round of them, in their order."""
    backend = runner.backend
    if backend.name == "cuda":
        from samir_vllm.backends import cuda_measure

        with backend.active():
            return cuda_measure.graph_seconds(backend, [launch.run for launch in launches])
    return median_seconds(lambda: [launch.run() for launch in launches])


# Telling it


def as_json(
    args: argparse.Namespace, limits: Limits, kinds: list[Kind], step_seconds: float
) -> dict[str, Any]:
    """All figures; seconds, bytes and floating-point operations of a whole step."""
    return {
        "bench": "kernels",
        "model": model_name(args),
        "batch": args.batch,
        "context": args.context,
        "limits": asdict(limits),
        "step_seconds": step_seconds,
        "kernels": [asdict(kind) for kind in kinds],
    }


def table_of(title: str, limits: Limits, kinds: list[Kind], step_seconds: float) -> Table:
    """For people."""
    table = Table(box=box.SIMPLE, title=title)
    table.add_column("kernel")
    for column in ("launches", "each", "together", "of the step", "bytes", "rate", "floor", "floor / time"):
        table.add_column(column, justify="right")
    together = sum_of(kinds)
    whole = replace(together, name="whole step", seconds=step_seconds)
    for kind in [*kinds, together, whole]:
        table.add_row(
            kind.name,
            str(kind.count),
            duration(kind.seconds / kind.count),
            duration(kind.seconds),
            share(kind.seconds / step_seconds),
            rate(kind.bytes, "B"),
            rate(kind.bytes / kind.seconds, "B/s"),
            duration(kind.floor_seconds),
            share(kind.floor_seconds / kind.seconds),
        )
    notes = [f"read {rate(limits.read_bytes_per_second, 'B/s')}: what a cache still holds may come faster"]
    if limits.graph_node_seconds is not None:
        notes.append(f"a kernel that does nothing takes {duration(limits.graph_node_seconds)}")
    table.caption = "; ".join(notes)
    return table


def sum_of(kinds: list[Kind]) -> Kind:
    """Of all kinds, each timed alone."""
    columns = ("count", "seconds", "bytes", "flops", "floor_seconds")
    count, *rest = (sum(getattr(kind, column) for kind in kinds) for column in columns)
    return Kind("sum", count, *rest)
