"""Prometheus metrics of one server, in a registry of its own.

Names are vLLM's behind another prefix, so that dashboards and load generators need one search and
replace. Labels come from closed sets only: nothing that a client sends becomes one.
"""

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from mstar.engine.output import EngineStats
from mstar.transport.messages import EngineFacts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISHED_REASONS = ("stop", "length", "abort", "error")
TIERS = ("device", "host", "disk")
REJECTION_REASONS = ("queue_full", "draining", "not_ready")

_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TTFT_SECONDS = (0.001, 0.005, *_SECONDS, 163.84, 640.0, 2560.0)
_ITL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
_TOKENS = tuple(float(2**n) for n in range(0, 18, 2))


class Metrics:
    """All metrics of a server with one model and one engine.

    Args:
        model_name: First name of the model.
        num_in_flight: Tells how many requests are in the server at the moment.
    """

    def __init__(self, model_name: str, num_in_flight: Callable[[], float]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._last: EngineStats | None = None

        self._running = self._gauge("num_requests_running", "Requests that the engine runs.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for the engine.")
        self._gauge("num_requests_in_flight", "Being prepared, waiting or running.").set_function(
            num_in_flight
        )
        self._usage = self._gauge("kv_cache_usage_perc", "Share of KV pages held, 0 to 1.")
        self._alive = self._gauge("engine_up", "1 while the engine can serve.")
        self._config = Gauge(
            "mstar:cache_config_info",
            "Geometry of the KV pool, as labels.",
            [*self._labels, "block_size", "num_gpu_blocks", "enable_prefix_caching"],
            registry=self._registry,
        )
        self._restarts = self._counter("engine_restarts", "Engine processes that died.")
        self._worker_restarts = self._counter("worker_restarts", "Workers that died.")
        self._counters = {
            "prefix_queries": self._counter(
                "prefix_cache_queries", "Prompt tokens that were looked up for reuse."
            ),
            "prefix_hits": self._counter("prefix_cache_hits", "Prompt tokens that were reused."),
            "prompt_tokens": self._counter("prompt_tokens", "Prompt tokens taken in."),
            "cached_tokens": self._counter(
                "prompt_tokens_cached", "Prompt tokens that were not computed."
            ),
            "generation_tokens": self._counter("generation_tokens", "Tokens generated."),
            "num_preemptions": self._counter("num_preemptions", "Requests put back to wait."),
            "num_steps": self._counter("engine_steps", "Steps of the engine."),
            "num_evictions": self._counter(
                "prefix_cache_evictions", "Pages kept for reuse that were handed out anew."
            ),
            "num_pages_broken": self._counter(
                "prefix_cache_pages_broken", "Pages of tiers that were not what had been written."
            ),
            "num_encoder_hits": self._counter(
                "encoder_cache_hits", "Items whose encoder's output was found."
            ),
            "num_events_lost": self._counter(
                "kv_events_lost", "Batches of KV events that no reader will see."
            ),
        }
        hits = self._family(
            "prefix_cache_hits_by_tier", "Prompt tokens that were reused, by tier.", "tier"
        )
        self._counters |= {
            f"prefix_hits_{tier}": hits.labels(**self._labels, tier=tier) for tier in TIERS
        }
        pages = Gauge(
            "mstar:prefix_cache_pages",
            "Pages kept for reuse only, by tier.",
            [*self._labels, "tier"],
            registry=self._registry,
        )
        self._pages = {tier: pages.labels(**self._labels, tier=tier) for tier in TIERS}
        finished = self._family("request_success", "Requests that ended.", "finished_reason")
        self._finished = {
            reason: finished.labels(**self._labels, finished_reason=reason)
            for reason in FINISHED_REASONS
        }
        rejected = self._family("admission_rejections", "Requests turned away.", "reason")
        self._rejected = {
            reason: rejected.labels(**self._labels, reason=reason) for reason in REJECTION_REASONS
        }
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token, or the first of what is not told in tokens.",
            _TTFT_SECONDS,
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", _ITL_SECONDS
        )
        self.request_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", _TOKENS
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        family = Gauge(f"mstar:{name}", text, list(self._labels), registry=self._registry)
        return family.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(f"mstar:{name}", text, list(self._labels), registry=self._registry)
        return family.labels(**self._labels)

    def _family(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"mstar:{name}", text, [*self._labels, label], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(
            f"mstar:{name}", text, list(self._labels), buckets=buckets, registry=self._registry
        )
        return family.labels(**self._labels)

    def render(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self._registry)

    def engine_ready(self, facts: EngineFacts) -> None:
        """Note a loaded engine, whose counters begin at zero."""
        self._last = None
        self._alive.set(1)
        self._config.clear()
        self._config.labels(
            **self._labels,
            block_size=str(facts.page_size),
            num_gpu_blocks=str(facts.num_pages),
            enable_prefix_caching=str(facts.deployment_root is not None),
        ).set(1)

    def engine_died(self) -> None:
        """Note a dead engine."""
        self._restarts.inc()
        # What the disk keeps is told by the next engine.
        gauges = (self._alive, self._running, self._waiting, self._usage, *self._pages.values())
        for gauge in gauges:
            gauge.set(0)

    def worker_died(self) -> None:
        """Note a dead preprocess worker."""
        self._worker_restarts.inc()

    def update(self, stats: EngineStats) -> None:
        """Take over the engine's gauges, and what its counters gained since the last time."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._usage.set(stats.num_pages_used / max(stats.num_pages, 1))
        self._pages["device"].set(stats.num_pages_cached)
        self._pages["host"].set(stats.num_pages_host)
        self._pages["disk"].set(stats.num_pages_disk)
        for name, counter in self._counters.items():
            before = 0 if self._last is None else getattr(self._last, name)
            # A counter that seems to shrink must not take the metrics down.
            counter.inc(max(0, getattr(stats, name) - before))
        self._last = stats

    def finished(self, reason: str) -> None:
        """Count a request that ended; ``reason`` is one of ``FINISHED_REASONS``."""
        self._finished[reason].inc()

    def rejected(self, reason: str) -> None:
        """Count a request that was turned away; ``reason`` is one of ``REJECTION_REASONS``."""
        self._rejected[reason].inc()
