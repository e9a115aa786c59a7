"""The names of other servers: what their boards and gateways query is there, and says the same as our own names."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sluice.engine.client.supervision import RecoveryCounts
from sluice.engine.loop.recorder import Step, WorkRecorder
from sluice.engine.statistics import NO_STATS, EngineStats
from sluice.engine.types import EngineInfo, FinishReason
from sluice.gateway.telemetry.aliases import TABLE, WITHOUT_COUNTERPART, AliasedRegistry
from sluice.gateway.telemetry.engine import NamedEngine, engine_families
from sluice.gateway.telemetry.families import BucketFamily
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.telemetry.page import is_reserved_name
from sluice.gateway.workers.counts import SummedRegistry, WorkerCounts, read_counts
from sluice.pipelines.text.types import TextEvent
from tests import paths

QUERIES = json.loads((Path(__file__).parent / "data" / "alias_queries.json").read_text())
INFO = EngineInfo(
    runtime="openvino",
    model_type="echo",
    dtype="f32",
    vocab_size=8,
    eos_token_ids=(1,),
    max_model_len=512,
    block_size=16,
    num_blocks=100,
    max_num_seqs=32,
    max_num_batched_tokens=128,
    load_seconds=1.0,
    adapters=("poet", "clerk"),
)


class Engine:
    """What the collector reads of an engine."""

    recoveries = RecoveryCounts()

    def __init__(self, stats: EngineStats) -> None:
        self.stats = stats

    def heartbeat_age_s(self) -> float:
        return 0.1


class Engines:
    """Collects the families of one engine."""

    def __init__(self) -> None:
        recorder = WorkRecorder()
        recorder.record_step(Step(3, 3, 37, 40, 0.01, 0.009))
        recorder.record_wait(0.25)
        recorder.record_prefill(0.5)
        stats = msgspec.structs.replace(
            NO_STATS,
            num_running=3,
            num_waiting=2,
            num_blocks_used=25,
            num_blocks_free=75,
            cached_tokens_total=30,
            prompt_tokens_total=90,
            histograms=recorder.histograms(),
        )
        self.engine: Any = Engine(stats)

    def collect(self) -> Any:
        return engine_families([NamedEngine("rill", "1", self.engine, INFO)])


def counted() -> GatewayMetrics:
    """Return metrics of a process that has answered a request and works on another, each with an adapter."""
    metrics = GatewayMetrics()
    for adapter in ("poet", "clerk"):
        record = metrics.open_request("rill", "openai_chat")
        asyncio.run(record.admit(7, 32, adapter))
        if adapter == "poet":
            record.observe(TextEvent("x", 1, 7, 1))
            record.observe(TextEvent("y", 2, 7, 3, FinishReason.LENGTH))
            record.close()
    return metrics


def one_process() -> CollectorRegistry:
    metrics = counted()
    metrics.registry.register(Engines())
    return metrics.registry


def two_processes() -> CollectorRegistry:
    counts = WorkerCounts()
    counts.keep(1, read_counts(counted().registry))
    return SummedRegistry(one_process(), counts)


def samples(registry: CollectorRegistry, *servers: str) -> list[Sample]:
    text = generate_latest(AliasedRegistry(registry, servers)).decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


@pytest.mark.parametrize("registry", [one_process, two_processes])
@pytest.mark.parametrize("who", QUERIES)
def test_every_queried_series_is_there_with_its_labels(who: str, registry: Callable[[], CollectorRegistry]) -> None:
    found: dict[str, set[str]] = {}
    for sample in samples(registry(), QUERIES[who]["aliases"]):
        found.setdefault(sample.name, set()).update(sample.labels)
    missing = [name for name, labels in QUERIES[who]["series"] if not set(labels) <= found.get(name, set())]
    assert missing == []
    assert QUERIES[who].get("variable", "model") in set().union(*found.values())


def values(found: list[Sample], name: str, **labels: str) -> list[float]:
    return [each.value for each in found if each.name == name and labels.items() <= each.labels.items()]


@pytest.mark.parametrize(("registry", "num_processes"), [(one_process, 1), (two_processes, 2)])
def test_values_are_derived_from_our_own(registry: Callable[[], CollectorRegistry], num_processes: int) -> None:
    found = samples(registry(), "vllm", "trtllm", "dynamo")
    labels = {"model_name": "rill", "engine": "0"}
    assert values(found, "vllm:num_requests_running", **labels) == [3]
    assert values(found, "vllm:kv_cache_usage_perc", **labels) == [0.25]
    assert values(found, "vllm:prefix_cache_queries_total", **labels) == [120]
    assert values(found, "trtllm_kv_cache_hit_rate", model_name="rill", engine_type="trtllm") == [0.25]
    assert values(found, "vllm:request_success_total", finished_reason="length") == [num_processes]
    assert values(found, "vllm:request_generation_tokens_sum") == [3 * num_processes]
    assert values(found, "vllm:request_generation_tokens_bucket", le="5.0") == [num_processes]
    assert values(found, "vllm:request_params_max_tokens_count") == [2 * num_processes]
    assert values(found, "vllm:iteration_tokens_total_sum") == [40]
    assert values(found, "vllm:request_queue_time_seconds_sum") == [0.25]
    assert values(found, "vllm:request_prefill_time_seconds_sum") == [0.5]
    assert values(found, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == [1]
    requests = {"model": "rill", "endpoint": "chat_completions", "status": "success"}
    assert values(found, "dynamo_frontend_requests_total", **requests) == [num_processes]
    assert values(found, "dynamo_frontend_inflight_requests", model="rill") == [num_processes]
    [lora] = [each for each in found if each.name == "vllm:lora_requests_info"]
    adapters = {"max_lora": "2", "running_lora_adapters": "", "waiting_lora_adapters": "clerk"}
    assert lora.labels == adapters
    assert lora.value > 1e9  # the time, by which gateways find the latest


def test_names_are_shown_only_where_they_are_asked_for() -> None:
    for server in ((), ("vllm",)):
        names = {sample.name for sample in samples(one_process(), *server)}
        assert any(name.startswith("vllm:") for name in names) == bool(server)
        assert not any(name.startswith(("trtllm_", "dynamo_")) for name in names)


def test_the_table_names_families_of_ours_and_each_name_once() -> None:
    kinds = {"_engine": engine_families([]), "_gateway": GatewayMetrics().registry.collect()}
    ours = {family.name: family for each in kinds.values() for family in each}
    rows = [alias for _, aliases in TABLE.values() for alias in aliases]
    for alias in rows:
        sources = re.findall(r"sluice_\w+", alias.source)
        assert sources
        assert set(sources) <= ours.keys(), alias
        assert (alias.read is None) == (alias.kind == "histogram") == isinstance(ours[sources[0]], BucketFamily), alias
        assert is_reserved_name(alias.name)
    assert len({alias.name for alias in rows}) == len(rows)


def test_the_documentation_lists_every_name() -> None:
    page = (paths.DOCS / "metrics.md").read_text()
    for server, (_, aliases) in TABLE.items():
        for alias in aliases:
            shown = f"{alias.name}_total" if alias.kind == "counter" else alias.name
            assert f"| `{shown}` | {alias.kind} |" in page, shown
        for name in WITHOUT_COUNTERPART[server]:
            assert f"`{name}`" in page
