"""TensorRT-LLM's families, for our own executor and for an engine that reports its iterations."""

import time
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sluice.engine.statistics import EngineStats, IterationStats
from sluice.gateway.telemetry.trt_llm import TrtLlmCollector
from tests.gateway.front.http.live import LiveServer

STATS = EngineStats(
    *(3, 2, 30, 226, 5, 60, 7.5, 8.5, 9, 10), num_tokens_waiting=12, cached_tokens_total=96, num_blocks_cached=4
)
# Different numbers, so that none can stand for another.
ITERATION = IterationStats(
    iteration=101,
    latency_ms=1.5,
    timestamp_us=102,
    num_active=120,
    max_active=104,
    num_scheduled=105,
    num_context=106,
    num_generation=107,
    num_paused=108,
    context_tokens=109,
    micro_batch_id=110,
    gpu_memory_bytes=111,
    cpu_memory_bytes=112,
    pinned_memory_bytes=113,
    max_blocks=400,
    free_blocks=115,
    used_blocks=100,
    tokens_per_block=64,
    reused_blocks=116,
)
REQUESTS, MEMORY = "nv_trt_llm_request_metrics", "nv_trt_llm_runtime_memory_metrics"
BLOCKS, BATCHER = "nv_trt_llm_kv_cache_block_metrics", "nv_trt_llm_inflight_batcher_metrics"
GENERAL = "nv_trt_llm_general_metrics"
LABEL = {
    REQUESTS: "request_type",
    MEMORY: "memory_type",
    BLOCKS: "kv_cache_block_type",
    BATCHER: "inflight_batcher_specific_metric",
    GENERAL: "general_type",
}


def page(live: LiveServer) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TrtLlmCollector(live.server.plane.repository.models))
    return generate_latest(registry).decode()


def scraped(live: LiveServer) -> dict[str, dict[str, float]]:
    """Return the values by family and the value of its own label."""
    found: dict[str, dict[str, float]] = {name: {} for name in LABEL}
    for line in page(live).splitlines():
        name, _, rest = line.partition("{")
        if name in LABEL:
            labels, _, value = rest.rpartition("} ")
            told = dict(label.split("=") for label in labels.replace('"', "").split(","))
            assert told.keys() == {"model", "version", LABEL[name]}
            assert (told["model"], told["version"]) == ("rill", "1")
            found[name][told[LABEL[name]]] = float(value)
    return found


def say(live: LiveServer, monkeypatch: pytest.MonkeyPatch, stats: EngineStats, **info: Any) -> None:
    monkeypatch.setattr(live.engine, "stats", stats)
    monkeypatch.setattr(live.engine, "_info", msgspec.structs.replace(live.engine.info, **info))


def test_tensorrt_llms_own_numbers(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    say(live, monkeypatch, msgspec.structs.replace(STATS, iteration=ITERATION))
    assert scraped(live) == {
        REQUESTS: {"active": 120, "max": 104, "scheduled": 105, "context": 106, "waiting": 15},
        MEMORY: {"gpu": 111, "cpu": 112, "pinned": 113},
        BLOCKS: {"max": 400, "free": 115, "used": 100, "tokens_per": 64, "reused": 116, "fraction": 0.25},
        BATCHER: {
            "total_context_tokens": 109,
            "generation_requests": 107,
            "micro_batch_id": 110,
            "paused_requests": 108,
        },
        GENERAL: {"timestamp": 102, "iteration_counter": 101},
    }


def test_a_batch_that_is_over_is_not_shown(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM's last reported iteration had requests, of which none is left."""
    say(live, monkeypatch, msgspec.structs.replace(STATS, num_running=0, num_waiting=0, iteration=ITERATION))
    found = scraped(live)
    assert found[REQUESTS] == {"active": 0, "max": 104, "scheduled": 0, "context": 0, "waiting": 0}
    assert (found[BATCHER]["generation_requests"], found[BATCHER]["total_context_tokens"]) == (0, 0)
    assert (found[GENERAL]["iteration_counter"], found[BLOCKS]["used"]) == (101, 100)


def test_of_our_own_executor(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    say(live, monkeypatch, STATS, num_blocks=256, block_size=32, max_num_seqs=64)
    found = scraped(live)
    assert found[GENERAL].pop("timestamp") == pytest.approx(time.time() * 1e6, rel=0.01)
    assert found == {
        REQUESTS: {"active": 5, "max": 64, "scheduled": 3, "context": 0, "waiting": 2},
        MEMORY: {},
        BLOCKS: {"max": 256, "free": 226, "used": 30, "tokens_per": 32, "reused": 3, "fraction": 30 / 256},
        BATCHER: {"total_context_tokens": 0, "generation_requests": 3, "micro_batch_id": 0, "paused_requests": 0},
        GENERAL: {"iteration_counter": 60},
    }


def test_what_tensorrt_llm_does_not_tell_is_worked_out(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = IterationStats(iteration=7, latency_ms=1.0, num_active=9)
    say(live, monkeypatch, msgspec.structs.replace(STATS, iteration=bare), num_blocks=256)
    found = scraped(live)
    assert found[GENERAL]["iteration_counter"] == 7
    assert found[REQUESTS]["waiting"] == 6
    assert found[BLOCKS]["max"] == 256
    assert found[MEMORY] == {}


def test_who_may_pause_does_not_say_how_many(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    say(live, monkeypatch, STATS, scheduler_policy="max_utilization")
    assert "paused_requests" not in scraped(live)[BATCHER]


def test_a_request_without_a_token_is_in_its_context(live: LiveServer) -> None:
    live.runner.hold_after(0)
    connection = live.send("/v1/completions", {"model": "rill", "prompt": [1, 2, 3, 4, 5], "max_tokens": 2})
    try:
        live.runner.wait_held()
        # What the engine will say once it says anything: it is busy with the prompt.
        live.engine.stats = msgspec.structs.replace(live.engine.stats, num_running=1, num_waiting=0)
        found = scraped(live)
    finally:
        live.runner.release()
        connection.close()
    assert (found[REQUESTS]["context"], found[BATCHER]["total_context_tokens"]) == (1, 5)
    assert found[BATCHER]["generation_requests"] == 0
    live.wait_idle()
    live.blocks_used_after_step()
    assert scraped(live)[REQUESTS]["context"] == 0


def lengths(live: LiveServer, name: str) -> dict[str, float]:
    """Return the buckets by bound, and the sum."""
    found = {}
    for line in page(live).splitlines():
        if line.startswith(name):
            series, _, value = line.rpartition(" ")
            bound = series.partition('le="')[2].partition('"')[0]
            found[bound or series.partition("{")[0].removeprefix(f"{name}_")] = float(value)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_lengths_of_answered_requests(live: LiveServer, stream: bool) -> None:
    before = {name: lengths(live, name) for name in ("nv_llm_input_token_len", "nv_llm_output_token_len")}
    body = {"model": "rill", "prompt": [1] * 60, "max_tokens": 7, "ignore_eos": True, "stream": stream}
    assert live.post("/v1/completions", body).status_code == 200
    prompt = lengths(live, "nv_llm_input_token_len")
    output = lengths(live, "nv_llm_output_token_len")
    grown = {name: value - before["nv_llm_input_token_len"][name] for name, value in prompt.items()}
    assert grown == {"10.0": 0, "50.0": 0, "100.0": 1, "500.0": 1, "1000.0": 1, "+Inf": 1, "count": 1, "sum": 60}
    grown = {name: value - before["nv_llm_output_token_len"][name] for name, value in output.items()}
    assert grown == {"10.0": 1, "50.0": 1, "100.0": 1, "500.0": 1, "1000.0": 1, "+Inf": 1, "count": 1, "sum": 7}


def test_the_token_face_counts_too(live: LiveServer) -> None:
    before = lengths(live, "nv_llm_output_token_len")["count"]
    body = {"input_ids": [1, 2, 3], "max_tokens": 3, "end_id": -1}
    assert live.post("/v2/models/rill/generate", body).status_code == 200
    assert lengths(live, "nv_llm_output_token_len")["count"] == before + 1


def test_warming_up_does_not_count(live: LiveServer) -> None:
    before = lengths(live, "nv_llm_output_token_len")
    live.run(live.model.warm_up())
    assert lengths(live, "nv_llm_output_token_len") == before
