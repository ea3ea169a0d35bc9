"""The timeline of a run: Chrome trace events, and a picture of pool occupancy and batch size.

Fed by ``Engine.on_step``. Knows nothing of what the requests say. Drawing needs matplotlib (extra ``plot``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samir_vllm.commandline import load_pyplot, save_figure
from samir_vllm.errors import OptionError
from samir_vllm.outputs import StepRecord


class Timeline:
    """Collects the records of a run; ``engine.on_step = timeline.add``."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def add(self, record: StepRecord) -> None:
        """Keep one step."""
        self.records.append(record)

    def write_trace(self, path: Path, num_pages: int) -> None:
        """Write Chrome trace events (load them in a browser's tracing page or in Perfetto).

        One row ("thread") shows the steps; each answer has a row with its prefill chunks and decode steps,
        opened by ``admitted`` and closed by ``finished``. Counters: KV pages used of ``num_pages``, running,
        waiting. Times are microseconds since the first step.

        Raises:
            OptionError: the file can't be written.
        """
        document = {"displayTimeUnit": "ms", "traceEvents": self._events(num_pages)}
        try:
            path.write_text(json.dumps(document))
        except OSError as exc:
            raise OptionError(f"can't write the trace {path}: {exc.strerror}") from None

    def _events(self, num_pages: int) -> list[dict[str, Any]]:
        rows: dict[str, int] = {}
        events: list[dict[str, Any]] = [_row_name(0, "steps")]
        if not self.records:
            return events
        zero = self.records[0].started

        def emit(kind: str, name: str, row: int, at: float, **more: Any) -> None:
            events.append(
                {"ph": kind, "name": name, "pid": 1, "tid": row, "ts": round((at - zero) * 1e6, 1), **more}
            )

        for number, rec in enumerate(self.records):
            took = {"dur": round((rec.ended - rec.started) * 1e6, 1)}
            tokens = len(rec.decodes) + sum(n for _, n in rec.prefills)
            if tokens:
                emit("X", f"step {number}", 0, rec.started, **took, args={"tokens": tokens})
            for request_id in rec.admitted:
                rows[request_id] = len(rows) + 1
                events.append(_row_name(rows[request_id], request_id))
                emit("i", "admitted", rows[request_id], rec.started, s="t")
            for request_id, chunk in rec.prefills:
                emit("X", "prefill", rows[request_id], rec.started, **took, args={"tokens": chunk})
            for request_id in rec.decodes:
                emit("X", "decode", rows[request_id], rec.started, **took)
            for request_id, reason in rec.finished:
                emit("i", "finished", rows.get(request_id, 0), rec.ended, s="t", args={"reason": reason})
            pages = {"used": rec.num_used_pages, "free": num_pages - rec.num_used_pages}
            emit("C", "KV pages", 0, rec.ended, args=pages)
            emit("C", "requests", 0, rec.ended, args={"running": rec.num_running, "waiting": rec.num_waiting})
        return events

    def draw(self, path: Path, num_pages: int, title: str) -> None:
        """Draw pool occupancy and batch size over time as ``.png`` or ``.svg``.

        Raises:
            OptionError: another ending, no matplotlib, or the file can't be written.
        """
        plt = load_pyplot(path)
        records = self.records
        # A value holds from its step's start to the next one's; a last point closes the picture.
        times = [rec.started - records[0].started for rec in records]
        times += [records[-1].ended - records[0].started] if records else []

        def held(values: list[float]) -> list[float]:
            return values + values[-1:]

        figure, (pool, batch) = plt.subplots(2, 1, sharex=True, figsize=(9, 5), layout="constrained")
        pool.step(times, held([100 * rec.num_used_pages / num_pages for rec in records]), where="post")
        pool.set(ylabel="KV pages reserved (%)", ylim=(0, 105), title=title)
        decodes = held([len(rec.decodes) for rec in records])
        prefills = held([len(rec.prefills) for rec in records])
        batch.stackplot(
            times, decodes, prefills, labels=["decode", "prefill"], step="post", colors=["C2", "C1"]
        )
        batch.step(
            times, held([rec.num_waiting for rec in records]), where="post", color="0.4", label="waiting"
        )
        batch.set(xlabel="seconds", ylabel="requests")
        batch.yaxis.get_major_locator().set_params(integer=True)
        batch.legend(loc="upper right")
        for axes in (pool, batch):
            axes.grid(alpha=0.3)
        save_figure(plt, figure, path)


def _row_name(row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": name}}
