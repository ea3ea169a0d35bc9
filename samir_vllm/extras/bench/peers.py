"""``--peers transformers``: the bench's works through transformers, in a child of the same process group.

The child (``transformers_peer``) builds a model of the same shape with random BF16 weights: nothing is
fetched. Whatever goes wrong in it is a line for the user, never the end of the bench. Knows nothing of torch
but whether it is installed.

A work is a dict with ``name``, unique, and ``kind``:

    decode      batch, prompt, new      seconds of a step: the mean from the first new token to the last
    prefill     tokens                  seconds of one prompt's forward to its token, the median: eager as in
                                        transformers' ``generate``, or compiled
    throughput  requests, batches       seconds of all requests ([prompt, new] tokens): in static batches of
                                        each of the sizes, in their order, or by its own continuous batching

Where there are several ways, the fastest counts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from samir_vllm.commandline import error_console
from samir_vllm.config import ModelConfig, show

PEER_SECONDS = 300
"""How long the child may take for all its works, its start and its compiling included."""

PROGRAM = Path(__file__).with_name("transformers_peer.py")
NEEDED = ("torch", "transformers")

Notify = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class PeerTime:
    """The fastest way that transformers found for a work."""

    seconds: float
    how: str


@dataclass(frozen=True, slots=True)
class _Ended:
    """What is left of a child."""

    status: int | None  # None: it was stopped at its limit
    lines: list[str]  # of its standard output
    error: str  # the last line of its standard error


def transformers_results(
    config: ModelConfig,
    works: Sequence[Mapping[str, Any]],
    *,
    notify: Notify,
    device: str = "auto",
    seconds: float = PEER_SECONDS,
) -> dict[str, PeerTime] | None:
    """Run works through transformers.

    To be called while the bench itself holds little of the GPU's memory: when its engine is gone.

    Args:
        config: the shape.
        works: see the module.
        notify: told, in a line each, what ran, and what went otherwise than it should.
        device: auto, cpu, cuda or cuda:N. It compiles on a GPU only, as transformers itself does.
        seconds: the limit for all works; those not measured by then are left out.

    Returns:
        The results by the works' names, as far as they were measured; None where transformers is missing.
    """
    missing = missing_packages()
    if missing:
        notify(f"--peers transformers is left out: {' and '.join(missing)} not installed here")
        return None
    task = {"config": asdict(config), "device": device, "works": [dict(w) for w in works]}
    ended = _run_child(json.dumps(task), seconds)
    results = _read_results(ended, notify)
    if ended.status is None:
        left = [str(work["name"]) for work in works if work["name"] not in results]
        without = f" without {'; '.join(left)}" if left else ""
        notify(f"transformers was stopped at its limit of {seconds:g} s{without}")
    elif ended.status != 0:
        notify(f"transformers failed: {ended.error or f'exit status {ended.status}'}")
    return results


def missing_packages() -> list[str]:
    """What the child needs and this Python lacks; nothing is imported."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def _run_child(task: str, seconds: float) -> _Ended:
    """The program with ``task`` on its standard input, ended after ``seconds`` at the latest."""
    console = error_console()
    waiting = console.status(f"transformers, {seconds:g} s at most ...") if console.is_terminal else None
    # Files, not pipes: we would wait for the end of one that the compiler's own processes hold.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # -P: the modules beside the program must not stand in for others of their names.
        command = [sys.executable, "-P", str(PROGRAM)]
        with waiting or contextlib.nullcontext():
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err)
            try:
                child.communicate(task.encode(), timeout=seconds)
                status = child.returncode
            except subprocess.TimeoutExpired:
                status = None
            finally:  # Ctrl-C too, where it doesn't reach the child
                child.kill()
                child.wait()
        errors = [line for line in _read(out=err) if line.strip()]
        return _Ended(status, _read(out=out), show_line(errors[-1]) if errors else "")


def _read(*, out: IO[bytes]) -> list[str]:
    out.seek(0)
    return out.read().decode(errors="replace").splitlines()


def show_line(line: str) -> str:
    """For a message: without what would break it."""
    text = " ".join("".join(c if c.isprintable() else " " for c in line).split())
    return text if len(text) <= 200 else text[:199] + "…"


def _read_results(ended: _Ended, notify: Notify) -> dict[str, PeerTime]:
    """The fastest result for each name; notices go to ``notify``."""
    results: dict[str, PeerTime] = {}
    lines = ended.lines
    if ended.status is None and lines and not _is_json(lines[-1]):
        lines = lines[:-1]  # it was stopped in the middle of the line
    for line in lines:
        found = _parse(line)
        if found is None:
            notify(f"transformers: no result but {show(line)}; what follows it is left out")
            break
        if isinstance(found, str):
            notify(f"transformers: {show_line(found)}")
            continue
        name, result = found
        if name not in results or result.seconds < results[name].seconds:
            results[name] = result
    return results


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _parse(line: str) -> tuple[str, PeerTime] | str | None:
    """A result with its name, or a notice; None for anything else."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    match fields:
        case {"notice": str(notice)}:
            return notice
        case {"name": str(name), "seconds": float(seconds), "how": str(how)} if 0 < seconds < math.inf:
            return name, PeerTime(seconds, how)
    return None
