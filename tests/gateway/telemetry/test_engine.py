"""The engine's numbers as a scraper reads them."""

import re

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sluice.engine.client.supervision import RecoveryCounts
from sluice.engine.statistics import EngineStats
from sluice.gateway.telemetry.engine import EngineCollector
from sluice.serving.repository.repository import ModelRepository
from tests import paths
from tests.gateway.front.http.live import LiveServer

DOCS = paths.DOCS / "metrics.md"

# Different numbers, so that none can stand for another.
STATS = EngineStats(
    *(1, 2, 3, 4, 5, 6, 7.5, 8.5, 9, 10),
    num_blocks_cached=11,
    num_tokens_waiting=12,
    cached_tokens_total=13,
    preemptions_total=14,
    recomputed_tokens_total=15,
    draft_tokens_total=16,
    accepted_tokens_total=17,
    timeouts_total=18,
    predicted_wait_s=19.5,
    waits_total=20,
    wait_seconds_total=21.5,
    wait_error_seconds_total=22.5,
)
EXPECTED = {
    "sluice_sequences_running": 1,
    "sluice_sequences_waiting": 2,
    "sluice_tokens_waiting": 12,
    "sluice_kv_blocks_used": 3,
    "sluice_kv_blocks_free": 4,
    "sluice_kv_blocks_reserved": 5,
    "sluice_kv_blocks_cached": 11,
    "sluice_predicted_wait_seconds": 19.5,
    "sluice_engine_steps_total": 6,
    "sluice_engine_prompt_tokens_total": 9,
    "sluice_engine_cached_tokens_total": 13,
    "sluice_engine_generation_tokens_total": 10,
    "sluice_engine_preemptions_total": 14,
    "sluice_engine_recomputed_tokens_total": 15,
    "sluice_engine_draft_tokens_total": 16,
    "sluice_engine_accepted_tokens_total": 17,
    "sluice_engine_timeouts_total": 18,
    "sluice_engine_waits_total": 20,
    "sluice_engine_wait_seconds_total": 21.5,
    "sluice_engine_wait_error_seconds_total": 22.5,
    "sluice_engine_restarts_total": 31,
    "sluice_engine_recovery_seconds_total": 32.5,
    "sluice_engine_last_recovery_seconds": 33.5,
    "sluice_engine_resumed_requests_total": 34,
    "sluice_engine_poisoned_requests_total": 35,
    "sluice_model_load_failures_total": 36,
    "sluice_engine_load_seconds": 37.5,
    "sluice_engine_max_num_seqs": 38,
    "sluice_engine_max_num_batched_tokens": 39,
    "sluice_engine_max_model_len": 40,
    "sluice_kv_blocks": 41,
    "sluice_engine_info": 1,
}


def scraped(live: LiveServer) -> dict[str, float]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(live.server.plane))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        sample.name: sample.value for family in families for sample in family.samples if "part" not in sample.labels
    }


def test_each_number_goes_by_its_own_name(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = live.engine
    monkeypatch.setattr(engine, "stats", STATS)
    monkeypatch.setattr(engine, "recoveries", RecoveryCounts(31, 32.5, 33.5, 34, 35))
    monkeypatch.setattr(ModelRepository, "num_failed_loads", {"broken": 36})
    limits = {"max_num_seqs": 38, "max_num_batched_tokens": 39, "max_model_len": 40, "num_blocks": 41}
    monkeypatch.setattr(engine, "_info", structs.replace(engine.info, load_seconds=37.5, **limits))
    found = scraped(live)
    assert {name: found.get(name) for name in EXPECTED} == EXPECTED


def test_what_the_engine_is(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    said = structs.replace(live.engine.info, runtime="tensorrt_llm", runtime_version="1.2.1", quantization="fp8")
    monkeypatch.setattr(live.engine, "_info", said)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(live.server.plane))
    labels = {
        "model": "rill",
        "version": "1",
        "runtime": "tensorrt_llm",
        "runtime_version": "1.2.1",
        "model_type": "echo",
        "dtype": "f32",
        "quantization": "fp8",
        "kv_cache_dtype": "",
        "num_gpus": "0",
        "scheduler_policy": "guaranteed_no_evict",
    }
    assert registry.get_sample_value("sluice_engine_info", labels) == 1


def test_every_family_is_documented(live: LiveServer) -> None:
    documented = set(re.findall(r"^\| `(sluice_\w+)`", DOCS.read_text(), re.MULTILINE))
    engine = {name for name in documented if name.startswith("sluice_engine_")} - {"sluice_engine_seconds_total"}
    shown = {re.sub(r"_(bucket|count|sum)$", "", name) for name in scraped(live)}
    assert shown <= documented
    assert engine <= shown
