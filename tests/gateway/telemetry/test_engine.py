"""The engine's numbers as a scraper reads them."""

import re

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sluice.engine.client.supervision import RecoveryCounts
from sluice.engine.statistics import EngineStats, HandoverStats, KvTierStats
from sluice.gateway.telemetry.engine import HANDOVERS, KV_TIERS, EngineCollector
from sluice.gateway.telemetry.families import DeclaredParts, read_parts
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
TIERS = structs.replace(KvTierStats(*range(1, 12), *[True, 12, 13.5, 14, 15]), is_disk_off=True)
TIERS_EXPECTED = {
    ("sluice_kv_tier_blocks", "host"): 1,
    ("sluice_kv_tier_capacity_blocks", "host"): 2,
    ("sluice_kv_tier_stored_blocks_total", "host"): 3,
    ("sluice_kv_tier_lost_blocks_total", "host"): 4,
    ("sluice_kv_tier_hit_blocks_total", "host"): 5,
    ("sluice_kv_tier_blocks", "disk"): 6,
    ("sluice_kv_tier_capacity_blocks", "disk"): 7,
    ("sluice_kv_tier_stored_blocks_total", "disk"): 8,
    ("sluice_kv_tier_lost_blocks_total", "disk"): 9,
    ("sluice_kv_tier_hit_blocks_total", "disk"): 10,
    ("sluice_kv_tier_damaged_blocks_total", ""): 11,
    ("sluice_kv_tier_disk_off", ""): 1,
    ("sluice_kv_tier_restored_tokens_total", ""): 12,
    ("sluice_kv_tier_restore_seconds_total", ""): 13.5,
    ("sluice_kv_tier_skipped_prefixes_total", "slower"): 14,
    ("sluice_kv_tier_skipped_prefixes_total", "late"): 15,
}
HANDOVER = HandoverStats(1, 2, 3.5, 4, 5, 6.5, 7, 8, 9)
HANDOVERS_EXPECTED = {
    ("sluice_kv_handover_blocks_total", "sent"): 1,
    ("sluice_kv_handover_bytes_total", "sent"): 2,
    ("sluice_kv_handover_seconds_total", "sent"): 3.5,
    ("sluice_kv_handover_blocks_total", "received"): 4,
    ("sluice_kv_handover_bytes_total", "received"): 5,
    ("sluice_kv_handover_seconds_total", "received"): 6.5,
    ("sluice_kv_handover_missing_blocks_total", ""): 7,
    ("sluice_kv_handover_failures_total", ""): 8,
    ("sluice_kv_handover_late_prompts_total", ""): 9,
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


@pytest.mark.parametrize(
    ("declared", "stats", "expected"), [(KV_TIERS, TIERS, TIERS_EXPECTED), (HANDOVERS, HANDOVER, HANDOVERS_EXPECTED)]
)
def test_each_number_of_a_part_goes_by_its_own_name(
    declared: tuple[DeclaredParts[object], ...], stats: object, expected: dict[tuple[str, str], float]
) -> None:
    samples = [sample for family in read_parts(declared, {("m",): stats}) for sample in family.samples]
    assert {each.labels.pop("model") for each in samples} == {"m"}
    assert {(each.name, "".join(each.labels.values())): each.value for each in samples} == expected
    assert not [sample for family in read_parts(declared, {}) for sample in family.samples]
