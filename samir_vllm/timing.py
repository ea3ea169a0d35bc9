"""Where the time of a start goes: named stages one after another, and what ran beside them.

Knows nothing of engines, devices and files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Stage:
    """One stretch of a start."""

    name: str
    seconds: float
    detail: str = ""
    background: bool = False  # beside the stages of the main thread: not part of their sum


class StartupTimes:
    """The stages of one start, in the order in which they ended. For one thread, but for ``add``."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Times the block; its ``detail`` may be set inside. A stage that fails counts too."""
        stage = Stage(name, 0.0)
        started = time.perf_counter()
        try:
            yield stage
        finally:
            stage.seconds = time.perf_counter() - started
            self.stages.append(stage)

    def add(self, name: str, seconds: float, detail: str = "", *, background: bool = False) -> None:
        """Book what somebody else has timed."""
        self.stages.append(Stage(name, seconds, detail, background))

    def total(self) -> float:
        """Seconds of all stages of the main thread."""
        return sum(stage.seconds for stage in self.stages if not stage.background)


def process_seconds() -> float | None:
    """Seconds since this process started, to 10 ms; None where Linux's /proc doesn't tell (proc(5))."""
    try:
        with open("/proc/self/stat", "rb") as file:
            # The name in brackets may hold anything; behind it comes field 3, and field 22 is the start.
            fields = file.read().rpartition(b") ")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return None
