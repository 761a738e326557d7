"""Metrics of one server."""

from mstar.engine.output import EngineStats
from mstar.server.metrics import Metrics
from tests.server.fakes import FACTS


def stats(**changes: int) -> EngineStats:
    names = EngineStats.__struct_fields__
    return EngineStats(**(dict.fromkeys(names, 0) | {"num_pages": 10} | changes))


def sample(metrics: Metrics, name: str) -> float:
    lines = metrics.render().decode().splitlines()
    (line,) = (line for line in lines if line.startswith(f"mstar:{name}{{"))
    return float(line.rsplit(" ", 1)[1])


def test_gauges_follow_and_counters_add_up_over_restarts_of_the_engine() -> None:
    metrics = Metrics("m", lambda: 3)
    metrics.engine_ready(FACTS)
    metrics.update(stats(num_running=2, num_pages_used=5, generation_tokens=100))
    assert sample(metrics, "num_requests_running") == 2
    assert sample(metrics, "num_requests_in_flight") == 3
    assert sample(metrics, "kv_cache_usage_perc") == 0.5
    assert sample(metrics, "engine_up") == 1
    metrics.engine_died()
    assert sample(metrics, "num_requests_running") == 0
    assert sample(metrics, "engine_up") == 0
    metrics.engine_ready(FACTS)
    metrics.update(stats(generation_tokens=30))
    assert sample(metrics, "generation_tokens_total") == 130


def test_a_counter_that_shrinks_is_ignored() -> None:
    metrics = Metrics("m", lambda: 0)
    metrics.update(stats(prefix_hits=10))
    metrics.update(stats(prefix_hits=4))
    metrics.update(stats(prefix_hits=5))
    assert sample(metrics, "prefix_cache_hits_total") == 11


def test_all_series_are_there_before_any_request() -> None:
    text = Metrics("m", lambda: 0).render().decode()
    for reason in ("stop", "length", "abort", "error"):
        assert f'finished_reason="{reason}"' in text
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        assert f"mstar:{name}_count" in text
    assert "_created" not in text


def test_two_servers_in_a_process_do_not_share_a_registry() -> None:
    one, two = Metrics("m", lambda: 0), Metrics("m", lambda: 0)
    one.finished("stop")
    assert b'finished_reason="stop",model_name="m"} 1.0' in one.render()
    assert b'finished_reason="stop",model_name="m"} 1.0' not in two.render()


def tiers(metrics: Metrics, name: str) -> list[float]:
    lines = metrics.render().decode().splitlines()
    found = {
        line.partition('tier="')[2].partition('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(f"mstar:{name}{{")
    }
    assert set(found) == {"device", "host", "disk"}
    return [found[tier] for tier in ("device", "host", "disk")]


def test_reuse_is_counted_by_tier_and_over_restarts_of_the_engine() -> None:
    metrics = Metrics("m", lambda: 0)
    assert tiers(metrics, "prefix_cache_hits_by_tier_total") == [0, 0, 0]
    assert tiers(metrics, "prefix_cache_pages") == [0, 0, 0]
    hits = {"prefix_hits_device": 32, "prefix_hits_host": 16, "prefix_hits_disk": 8}
    pages = {"num_pages_cached": 7, "num_pages_host": 5, "num_pages_disk": 3}
    metrics.update(stats(prefix_hits=56, **hits, **pages))
    assert tiers(metrics, "prefix_cache_hits_by_tier_total") == [32, 16, 8]
    assert sum(tiers(metrics, "prefix_cache_hits_by_tier_total")) == sample(
        metrics, "prefix_cache_hits_total"
    )
    assert tiers(metrics, "prefix_cache_pages") == [7, 5, 3]
    metrics.engine_died()
    assert tiers(metrics, "prefix_cache_pages") == [0, 0, 0]
    metrics.engine_ready(FACTS)
    metrics.update(stats(prefix_hits_disk=4))
    assert tiers(metrics, "prefix_cache_hits_by_tier_total") == [32, 16, 12]


def test_what_reuse_lost_or_spared_is_counted() -> None:
    metrics = Metrics("m", lambda: 0)
    fields = {
        "num_evictions": "prefix_cache_evictions_total",
        "num_pages_broken": "prefix_cache_pages_broken_total",
        "num_encoder_hits": "encoder_cache_hits_total",
        "num_events_lost": "kv_events_lost_total",
    }
    assert [sample(metrics, name) for name in fields.values()] == [0] * 4
    metrics.update(stats(**{field: 3 + place for place, field in enumerate(fields)}))
    assert [sample(metrics, name) for name in fields.values()] == [3, 4, 5, 6]
