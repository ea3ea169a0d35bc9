"""``bench kernels``: a decode step taken apart, each kernel timed alone beside what memory allows it.

Every launch of one step is written down while the step runs once. Launches of one kind (on a GPU: a kernel,
and which matrix it meets) are then replayed together: those of all layers, so that no layer's weights stay in
a cache. On NumPy the operations take the place of kernels. Knows how a backend launches; no scheduler.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from samir_vllm.config import ModelConfig
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
    add_output_arguments,
    check_output,
    draw_bars,
    duration,
    number,
    print_notices,
    print_table,
    progress,
    rate,
    share,
)
from samir_vllm.llama import LlamaWeights
from samir_vllm.model_runner import ModelRunner
from samir_vllm.sequence import ScheduledStep, Sequence

OPERATIONS = (
    *("embedding", "rmsnorm", "linear", "linear_add", "rope_kv_write", "paged_attention_decode"),
    *("silu_mul", "take_rows", "lm_head", "argmax", "keep_tokens"),
)
"""Of a backend, in place of kernels where there are none."""

MOVING = "begin_decode"
"""The kernel that moves all sequences on by a token, each time it runs."""


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


@dataclass(frozen=True, slots=True)
class StepReport:
    """A whole step, and its parts, the longest first."""

    limits: Limits
    seconds: float
    kinds: list[Kind]


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
    report = measure_step(args, config, tensors)
    work = f"decode step, batch {args.batch}, {args.context} KV tokens each"
    title = f"{work}\n{model_name(args)} on {report.limits.device}"
    if args.json:
        print(json.dumps(as_json(args, report)))
    else:
        print_table(table_of(title, report))
    if args.plot is not None:
        kinds = report.kinds
        bars = [("measured", [k.seconds for k in kinds]), ("floor", [k.floor_seconds for k in kinds])]
        draw_bars(Path(args.plot), title, [kind.name for kind in kinds], bars)
    return 0


def measure_step(
    args: argparse.Namespace, config: ModelConfig, tensors: Mapping[str, np.ndarray]
) -> StepReport:
    """All kinds of launches, and the whole step."""
    pages = pages_per_seq(args.context + 2)
    engine = make_engine(
        args,
        config,
        tensors,
        num_pages=pages * config.num_layers * args.batch,
        max_num_seqs=args.batch,
        max_batched_tokens=args.batch,
        max_pages_per_seq=pages,
    )
    print_notices(engine.notices)
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    launches = record_step(runner, args.batch, args.context)
    staying = [launch for launch in launches if launch.kind != MOVING]
    # MOVING is timed last: the others would find the sequences beyond their pages.
    names = dict.fromkeys(launch.kind for launch in [*staying, *launches])
    with progress(2 + len(names)) as begin:
        begin("limits")
        limits = measure_limits(runner.backend)
        begin("whole step")
        seconds = replay_seconds(runner, staying)
        kinds = []
        for name in names:
            begin(name)
            kinds.append(measure(runner, limits, name, [one for one in launches if one.kind == name]))
    seconds += sum(kind.seconds for kind in kinds if kind.name == MOVING)
    return StepReport(limits, seconds, sorted(kinds, key=lambda kind: -kind.seconds))


# Writing a step down


def record_step(runner: ModelRunner, batch: int, context: int) -> list[Launch]:
    """The launches of one decode step of ``batch`` sequences with ``context`` KV tokens each.

    All but MOVING can be repeated: they find the sequences where that has left them.
    """
    prefill_last_tokens(runner, batch, context)
    backend, recorder = runner.backend, Recorder(runner, batch, context)
    slots, places = np.arange(batch, dtype=np.int32), np.full(batch, context, np.int32)
    with backend.active(), recorder.recording():
        backend.set_decode_rows(slots, places, prompt_lens=places)
        run_step(backend, runner.weights, backend.begin_decode(backend.decode_shape(context + 1)))
    return recorder.launches


def prefill_last_tokens(runner: ModelRunner, batch: int, context: int) -> None:
    """Gives each slot a prompt of ``context`` tokens: what comes before the last one's K and V stays zero."""
    num_layers, pages = runner.config.num_layers, pages_per_seq(context + 2)
    page_ids = np.arange(batch * num_layers * pages, dtype=np.int32).reshape(batch, num_layers, pages)
    sequences = []
    for slot in range(batch):
        seq = Sequence(str(slot), random_prompt(runner.config, context, seed=slot), max_tokens=2)
        seq.slot, seq.num_launched_tokens = slot, context - 1
        sequences.append(seq)
    prefills = [(seq, 1) for seq in sequences]
    runner.run(ScheduledStep([], prefills, list(zip(sequences, page_ids, strict=True))))


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
        table = runner.weights.embed_tokens
        self._embedding_bytes = table.nbytes // len(table)  # of a token
        # Of these an operation touches a part, that of its tokens.
        tables = [table, *getattr(self._backend, "_partials", ())]
        names = ("kv_cache", "block_tables", "_cos", "_sin")
        tables += [getattr(self._backend, name) for name in names if hasattr(self._backend, name)]
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
        segments = 1 if options.get("segment") is None else options["segments"]
        depth = x.shape[1] // segments  # of a segment that is multiplied alone
        arrays = (x[:, :depth], weight[:, :depth], out)
        self._add("cuBLAS", partial(matmul, x, weight, out, **options), arrays)
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
            nbytes += self._batch * self._embedding_bytes
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


def as_json(args: argparse.Namespace, report: StepReport) -> dict[str, Any]:
    """All figures; seconds, bytes and floating-point operations of a whole step."""
    return {
        "bench": "kernels",
        "model": model_name(args),
        "batch": args.batch,
        "context": args.context,
        "limits": asdict(report.limits),
        "step_seconds": report.seconds,
        "kernels": [asdict(kind) for kind in report.kinds],
    }


def table_of(title: str, report: StepReport) -> Table:
    """For people."""
    table = Table(box=box.SIMPLE, title=title)
    table.add_column("kernel")
    for column in ("launches", "each", "together", "of the step", "bytes", "rate", "floor", "floor / time"):
        table.add_column(column, justify="right")
    together = sum_of(report.kinds)
    whole = replace(together, name="whole step", seconds=report.seconds)
    for kind in [*report.kinds, together, whole]:
        table.add_row(
            kind.name,
            str(kind.count),
            duration(kind.seconds / kind.count),
            duration(kind.seconds),
            share(kind.seconds / report.seconds),
            rate(kind.bytes, "B"),
            rate(kind.bytes / kind.seconds, "B/s"),
            duration(kind.floor_seconds),
            share(kind.floor_seconds / kind.seconds),
        )
    limits = report.limits
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
