"""The numbers of KV tiers as a scraper reads them."""

from msgspec import structs
from prometheus_client.samples import Sample

from sluice.engine.statistics import KvTierStats
from sluice.gateway.telemetry.kv_tiers import collect_kv_tiers

# Different numbers, so that none can stand for another.
STATS = structs.replace(KvTierStats(*range(1, 12), *[True, 12, 13.5, 14, 15]), is_disk_off=True)
EXPECTED = {
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


def samples(stats: dict[str, KvTierStats]) -> list[Sample]:
    return [sample for family in collect_kv_tiers(stats) for sample in family.samples]


def test_each_number_goes_by_its_own_name() -> None:
    found = {}
    for sample in samples({"m": STATS}):
        assert sample.labels["model"] == "m"
        found[sample.name, sample.labels.get("tier", sample.labels.get("reason", ""))] = sample.value
    assert found == EXPECTED


def test_an_engine_without_tiers_has_no_samples() -> None:
    assert samples({}) == []
