"""Counts and times of a served model, in Prometheus' format at `/metrics`.

Counts, sizes and times only: no caption, image, file name or key is ever kept here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from lapclip.machine.system_memory import memory_bytes
from lapclip.serving.batching import TOWERS, BatchReport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lapclip.serving.service import Service

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64)
PHASES = ("read", "prepare", "queue", "engine", "whole")
"""Reading a request, decoding or encoding an item, its wait for the engine, a batch there, the whole request."""


class Metrics:
    """All counters of one server. Threads may share it."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "lapclip_requests", "Answers, by path and status", ["path", "status"], registry=registry
        )
        self._items = Counter(
            "lapclip_items",
            "Images and texts that the engine embedded",
            ["tower"],
            registry=registry,
        )
        self._failed = Counter(
            "lapclip_failed_items", "Items on which the engine failed", ["tower"], registry=registry
        )
        self._refusals = Counter(
            "lapclip_refusals",
            "Requests that were refused, by reason",
            ["reason"],
            registry=registry,
        )
        self._swaps = Counter(
            "lapclip_swaps", "Models taken or refused while serving", ["result"], registry=registry
        )
        self._sizes = Histogram(
            "lapclip_batch_size", "Rows of a batch", ["tower"], buckets=SIZES, registry=registry
        )
        self._seconds = Histogram(
            "lapclip_seconds", "Latency by phase", ["phase"], buckets=SECONDS, registry=registry
        )
        for tower in TOWERS:  # shown from the start, as zero
            self._items.labels(tower)
            self._sizes.labels(tower)
        for phase in PHASES:
            self._seconds.labels(phase)

    def watch(self, service: Service) -> None:
        """Show the state of a service as well: its queue, its cache, its model, its memory."""
        self._registry.register(_State(service))

    def batch(self, report: BatchReport) -> None:
        """A batch was computed."""
        self._items.labels(report.tower).inc(report.size - report.failed)
        if report.failed:
            self._failed.labels(report.tower).inc(report.failed)
        self._sizes.labels(report.tower).observe(report.size)
        self._seconds.labels("engine").observe(report.engine_seconds)
        queue = self._seconds.labels("queue")
        for waited in report.queue_seconds:
            queue.observe(waited)

    def phase(self, name: str, seconds: float) -> None:
        """Something took its time."""
        self._seconds.labels(name).observe(seconds)

    def answered(self, path: str, method: str, status: int, seconds: float) -> None:
        """A request was answered. `path` is one of ours, never what was asked."""
        self._requests.labels(path, str(status)).inc()
        if method == "POST":  # not probes, pages, and Prometheus itself
            self._seconds.labels("whole").observe(seconds)

    def refused(self, code: str) -> None:
        """A request was refused."""
        self._refusals.labels(code).inc()

    def swapped(self, result: str) -> None:
        """A newer model was "taken", or "refused" because it failed its check."""
        self._swaps.labels(result).inc()

    def text(self) -> bytes:
        """Everything in Prometheus' format."""
        return generate_latest(self._registry)


class _State:
    """What is read at the moment when Prometheus asks."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Any]:
        service, model = self._service, self._service.model
        items, seconds = service.load
        yield GaugeMetricFamily(
            "lapclip_queue_items", "Items that were admitted and are not answered", items
        )
        yield GaugeMetricFamily("lapclip_queue_seconds", "The work that they are", seconds)
        yield CounterMetricFamily(
            "lapclip_cache_hits", "Items answered from the cache", model.cache.hits
        )
        yield CounterMetricFamily(
            "lapclip_cache_misses", "Items that the cache did not have", model.cache.misses
        )
        yield GaugeMetricFamily("lapclip_cache_bytes", "Memory of the cache", model.cache.bytes)
        yield GaugeMetricFamily("lapclip_memory_bytes", "Memory of the process", memory_bytes())
        yield GaugeMetricFamily(
            "lapclip_notes",
            "What is wrong beside the answers; the page says what",
            len(service.notes),
        )
        about = {"name": model.name, "fingerprint": model.fingerprint, "engine": model.engine.name}
        yield InfoMetricFamily("lapclip_model", "The model that is served", about)
