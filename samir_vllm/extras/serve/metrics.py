"""Figures for Prometheus, at ``/metrics``: what runs and waits, how long things take. Knows no HTTP.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (written by prometheus-client).
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from samir_vllm.extras.serve.engine_client import EngineClient
from samir_vllm.extras.serve.wire import Ending

# Seconds.
_LONG = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_SHORT = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """One server's figures."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # of the front's process
        self._endings = self._counter("requests", "Answers that have ended, by how", ["finish_reason"])
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were answered")
        self._new_tokens = self._counter("generation_tokens", "Tokens generated, when their answers end")
        self._cached = self._counter(
            "cached_prompt_tokens", "Of the prompts, tokens whose K and V were there"
        )
        self._restarts = self._counter("engine_restarts", "Engine processes that ended before the server did")
        self._responses = self._counter("http_responses", "Responses begun, by their status", ["status"])
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token", _LONG)
        self._per_token = self._histogram(
            "time_per_output_token_seconds", "Mean over an answer's tokens after the first", _SHORT
        )
        self._queue = self._histogram("queue_time_seconds", "Arrival to admission", _LONG)
        self._total = self._histogram("request_seconds", "Arrival to the answer's end", _LONG)

    def _counter(self, name: str, help: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"samir_vllm_{name}", help, labels or [], registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"samir_vllm_{name}", help, buckets=buckets, registry=self._registry)

    def watch(self, engine: EngineClient) -> None:
        """Show how busy this engine is, whenever somebody asks."""

        def gauge(name: str, help: str, value: Callable[[], float]) -> None:
            Gauge(f"samir_vllm_{name}", help, registry=self._registry).set_function(value)

        gauge("requests_running", "Answers that are being generated", lambda: engine.load.num_running)
        gauge("requests_waiting", "Answers that wait for their admission", lambda: engine.load.num_waiting)
        gauge("kv_pages_used", "Pages reserved by what runs", lambda: engine.load.num_used_pages)
        gauge("kv_pages", "Pages of the pool", lambda: engine.ready.num_pages if engine.ready else 0)
        gauge("engine_cpu_seconds", "CPU time of the engine's process", lambda: engine.cpu_seconds)
        gauge("engine_up", "1 while there is an engine", lambda: engine.is_up)

    def ended(self, ending: Ending) -> None:
        """An answer has ended."""
        metrics = ending.metrics
        self._endings.labels(ending.finish_reason).inc()
        self._new_tokens.inc(ending.num_tokens)
        self._cached.inc(metrics.num_cached_tokens)
        self._total.observe(metrics.total_time)
        for histogram, value in (
            (self._queue, metrics.queue_time),
            (self._first_token, metrics.time_to_first_token),
            (self._per_token, metrics.time_per_output_token),
        ):
            if value is not None:
                histogram.observe(value)

    def aborted(self, count: int) -> None:
        """So many answers were given up."""
        self._endings.labels("abort").inc(count)

    def prompted(self, num_tokens: int) -> None:
        """A prompt was taken."""
        self._prompt_tokens.inc(num_tokens)

    def restarted(self) -> None:
        """The engine's process died."""
        self._restarts.inc()

    def responded(self, status: int) -> None:
        """A response has begun."""
        self._responses.labels(str(status)).inc()

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)
