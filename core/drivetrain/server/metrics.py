"""Figures for Prometheus, in a registry of this server's own. Gauges are 0 when nothing is queued or running."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from drivetrain.server.messages import Ready, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)
FINISH_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """All metrics of one server; names start with ``drivetrain_``."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        own: dict[str, Any] = {"namespace": "drivetrain", "registry": self._registry}
        self._waiting = Gauge("requests_waiting", "Sequences queued in the loop", **own)
        self._running = Gauge("requests_running", "Sequences that hold a row", **own)
        self.held = Gauge("http_requests_held", "HTTP requests inside the server", **own)
        self._cache = Gauge("cache_use_ratio", "Part of the cache's blocks in use by requests", **own)
        self.ready = Gauge("ready", "1 while requests are served", **own)
        self._start = Gauge("start", "Seconds and bytes of the loop's start, by name", ["figure"], **own)
        self.time_to_first_token = Histogram(
            "time_to_first_token_seconds", "From a request's headers to its first token", buckets=SECONDS, **own
        )
        self.duration = Histogram(
            "request_duration_seconds", "From a request's headers to its last byte", buckets=SECONDS, **own
        )
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens taken", **own)
        self.cached_tokens = Counter("cached_prompt_tokens", "Prompt tokens of sequences found in the cache", **own)
        self.generated_tokens = Counter("generated_tokens", "Tokens generated and kept", **own)
        self.finished = Counter("finished", "Sequences ended, by reason", ["reason"], **own)
        self.refused = Counter("refused_requests", "HTTP requests refused, by status", ["status"], **own)
        self.restarts = Counter("loop_losses", "Loops that died or hung", **own)
        self._preemptions = Gauge("loop_preemptions", "Preemptions since the loop started", **own)
        self._steps = Gauge("loop_steps", "Steps since the loop started", **own)
        self._prefix = Gauge(
            "loop_prefix_tokens", "Prompt tokens looked up and found since the loop started", ["what"], **own
        )
        self._graphs = Gauge("loop_graphs", "Captured steps of the loop", ["what"], **own)
        self._graph_bytes = Gauge("loop_graph_bytes", "Device memory of captured steps", ["what"], **own)
        self._retries = Gauge(
            "loop_memory_retries", "Steps done again for want of memory since the loop started", **own
        )
        self._least_free = Gauge(
            "loop_memory_least_free_bytes", "Least free device memory seen by the loop; NaN: never looked", **own
        )
        self._given_back = Gauge(
            "loop_memory_given_back_bytes", "Device memory that the cache gave back for captured steps", **own
        )
        for reason in FINISH_REASONS:
            self.finished.labels(reason)
        self.take_stats(Stats())

    def take_stats(self, stats: Stats) -> None:
        """Take the loop's figures."""
        self._waiting.set(stats.waiting)
        self._running.set(stats.running)
        self._cache.set(stats.cache_used / stats.cache_total if stats.cache_total else 0.0)
        self._preemptions.set(stats.preemptions)
        self._steps.set(stats.steps)
        self._prefix.labels("queried").set(stats.prefix_query_tokens)
        self._prefix.labels("hit").set(stats.prefix_hit_tokens)
        self._graphs.labels("captured").set(stats.graphs_captured)
        self._graphs.labels("wanted").set(stats.graphs_wanted)
        self._graphs.labels("given_up").set(stats.graphs_given_up)
        self._graph_bytes.labels("planned").set(stats.graphs_planned_bytes)
        self._graph_bytes.labels("measured").set(stats.graphs_measured_bytes)
        self._retries.set(stats.memory_retries)
        self._given_back.set(stats.memory_given_back_bytes)
        least = stats.memory_least_free_bytes
        self._least_free.set(float("nan") if least < 0 else least)

    def take_ready(self, ready: Ready) -> None:
        """Take the figures of the loop's start."""
        for name, value in ready.figures.items():
            self._start.labels(name).set(value)

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self._registry)
