"""`sluice doctor --live`: each diagnosis, of a server under a load that makes it."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.doctor.command import command
from engine.config import EngineConfig
from gateway.access.identity import Identity, QuotaLimits, RouteGroup
from gateway.access.keys import make_key
from gateway.options.config import ServeConfig
from gateway.options.serving import RepositoryOptions
from tests.cli.live.gateway import MODEL, LiveGateway, PacedRunner, live_gateway

SECONDS = "0.3"
SLOW_MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.05 * len(requests))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros(1, np.float32))]) for _ in requests]
"""
SLOW_CONFIG = """
backend: "python"
max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""


class Doctor:
    """Runs the command, and reads what it writes."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *arguments: str) -> tuple[int, str, str]:
        code = command([*arguments, "--seconds", SECONDS])
        streams = self._capsys.readouterr()
        return code, streams.out, streams.err

    def findings(self, gateway: LiveGateway, code: int = 0) -> dict[str, dict[str, Any]]:
        """Return the findings by what they say is the bound."""
        ended, written, _ = self.run("--live", gateway.url, "--json")
        report = json.loads(written)
        assert ended == code, report
        assert report["bound"] == report["findings"][0]["bound"]
        return {each["bound"]: each for each in report["findings"]}


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    monkeypatch.delenv("SLUICE_API_KEY", raising=False)
    monkeypatch.delenv("SLUICE_URL", raising=False)
    return Doctor(capsys)


def test_an_idle_server_is_bound_by_nothing(doctor: Doctor, tmp_path: Path) -> None:
    with live_gateway(tmp_path, PacedRunner()) as gateway:
        code, written, said = doctor.run("--live", gateway.url)
    assert code == 0
    assert "it is idle" in written and written.rstrip().endswith("Nothing bounds this server.")
    assert said == f"watching {gateway.url} for {SECONDS} s\n"


def test_the_places_of_a_step_are_taken(doctor: Doctor, tmp_path: Path) -> None:
    engine = EngineConfig(model_path="none", max_num_seqs=2)
    with live_gateway(tmp_path, PacedRunner(step_s=0.02), engine=engine) as gateway:
        for _ in range(8):
            gateway.complete(max_tokens=500)
        gateway.wait_until(lambda: gateway.engines[0].stats.num_waiting == 6)
        found = doctor.findings(gateway)
    assert "6 requests wait" in found["queue"]["text"] and "one of the 2 places" in found["queue"]["text"]
    assert found["queue"]["subject"] == MODEL and "--max-num-seqs" in found["queue"]["remedy"]
    assert "kv_cache" not in found


def test_a_full_queue_refuses(doctor: Doctor, tmp_path: Path) -> None:
    engine = EngineConfig(model_path="none", max_num_seqs=1, max_queued_requests=1)
    with live_gateway(tmp_path, PacedRunner(step_s=0.02), engine=engine) as gateway:
        gateway.complete(max_tokens=900)
        gateway.wait_until(lambda: gateway.engines[0].stats.num_running == 1)
        gateway.complete(max_tokens=900)
        gateway.wait_until(lambda: gateway.engines[0].stats.num_waiting == 1)
        gateway.keep_asking(1, gateway.complete)
        found = doctor.findings(gateway)
    assert "refused by a full queue" in found["queue"]["text"]


def test_all_kv_blocks_are_reserved(doctor: Doctor, tmp_path: Path) -> None:
    with live_gateway(tmp_path, PacedRunner(step_s=0.02, num_blocks=32)) as gateway:
        for _ in range(4):
            gateway.complete(max_tokens=900)
        gateway.wait_until(lambda: gateway.engines[0].stats.num_waiting == 3)
        found = doctor.findings(gateway)
    assert "3 requests wait" in found["kv_cache"]["text"] and "are reserved by 1 sequences" in found["kv_cache"]["text"]
    remedy = found["kv_cache"]["remedy"]
    assert "--kv-cache-memory" in remedy and "have clients lower it" in remedy, "little of what is reserved is used"
    assert "queue" not in found


def test_running_sequences_are_paused_for_blocks(doctor: Doctor, tmp_path: Path) -> None:
    engine = EngineConfig(model_path="none", scheduler_policy="max_utilization")  # type: ignore[arg-type]
    with live_gateway(tmp_path, PacedRunner(step_s=0.001, num_blocks=32), engine=engine) as gateway:
        gateway.keep_asking(6, lambda: gateway.complete(max_tokens=400))
        gateway.wait_until(lambda: gateway.engines[0].stats.preemptions_total > 0)
        found = doctor.findings(gateway)
    assert "kv_cache" in found


def test_steps_fill_the_time(doctor: Doctor, tmp_path: Path) -> None:
    with live_gateway(tmp_path, PacedRunner(step_s=0.02)) as gateway:
        gateway.complete(max_tokens=900)
        gateway.wait_until(lambda: gateway.engines[0].stats.generation_tokens_total > 5)
        found = doctor.findings(gateway)
    assert "tokens a second" in found["compute"]["text"] and "--quantization" in found["compute"]["remedy"]
    assert found.keys().isdisjoint({"prefill", "queue", "kv_cache"})


def test_prompts_fill_the_time(doctor: Doctor, tmp_path: Path) -> None:
    numbers = iter(range(10**6))
    engine = EngineConfig(model_path="none", max_num_batched_tokens=128)
    with live_gateway(tmp_path, PacedRunner(token_s=0.0002), engine=engine) as gateway:
        gateway.keep_asking(3, lambda: gateway.complete([next(numbers) % 4000] * 400, max_tokens=2))
        gateway.wait_until(lambda: gateway.engines[0].stats.prompt_tokens_total > 1000)
        found = doctor.findings(gateway)
    assert "mostly with prompts" in found["prefill"]["text"]
    assert "prefix cache" in found["prefill"]["remedy"] and "compute" not in found


def test_the_thread_of_all_requests_is_late(doctor: Doctor, tmp_path: Path) -> None:
    async def hold_up(gateway: LiveGateway) -> None:
        while not gateway.is_over:
            until = time.perf_counter() + 0.08
            while time.perf_counter() < until:
                pass
            await asyncio.sleep(0)

    with live_gateway(tmp_path, PacedRunner()) as gateway:
        asyncio.run_coroutine_threadsafe(hold_up(gateway), gateway._loop)
        found = doctor.findings(gateway)
    assert found["gateway"]["subject"] == "gateway"
    assert "ms late" in found["gateway"]["text"]


def test_a_quota_refuses(doctor: Doctor, tmp_path: Path) -> None:
    config = ServeConfig()
    config = replace(config, quotas=replace(config.quotas, default_limits=QuotaLimits(requests_per_minute=1)))
    with live_gateway(tmp_path, PacedRunner(), config=config) as gateway:
        ring = gateway.service.calls.access.ring
        assert ring.store is not None
        new = make_key(Identity(name="ci", tenant="research", groups=frozenset([*RouteGroup])))
        gateway.run(ring.store.add(new.stored))
        gateway.run(ring.refresh())
        key = {"authorization": f"Bearer {new.text}"}
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        code, _, said = doctor.run("--live", gateway.url)
        assert code == 1 and "SLUICE_API_KEY" in said
        gateway.keep_asking(1, lambda: gateway.post("/v1/completions", body, **key))
        code, written, _ = doctor.run("--live", gateway.url, "--json", "--api-key", new.text)
    [found] = [each for each in json.loads(written)["findings"] if each["bound"] == "quota"]
    assert code == 0
    assert "were refused by its key's limit requests_per_minute" in found["text"] and "'research'" in found["text"]
    assert "sluice keys update NAME --requests-per-minute" in found["remedy"]


def test_a_replica_is_lost(doctor: Doctor, tmp_path: Path) -> None:
    with live_gateway(tmp_path, PacedRunner(), PacedRunner()) as gateway:
        gateway.run(gateway.engines[0].stop())
        found = doctor.findings(gateway, code=1)
    assert found["replica_lost"]["text"] == f"1 of 2 replicas serve {MODEL}: replica 0 is given up"
    assert found["replica_lost"]["level"] == "fail"


def test_an_engine_is_given_up(doctor: Doctor, tmp_path: Path) -> None:
    with live_gateway(tmp_path, PacedRunner()) as gateway:
        gateway.run(gateway.engines[0].stop())
        found = doctor.findings(gateway, code=1)
    assert "the engine was stopped" in found["unready"]["text"]


def test_the_one_instance_of_a_model_is_busy(doctor: Doctor, tmp_path: Path) -> None:
    model = tmp_path / "models" / "slow"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(SLOW_CONFIG)
    (model / "1" / "model.py").write_text(SLOW_MODEL)
    config = ServeConfig(repository=RepositoryOptions(paths=(str(tmp_path / "models"),)))
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [0]}]}
    with live_gateway(tmp_path, PacedRunner(), config=config) as gateway:
        gateway.keep_asking(6, lambda: gateway.post("/v2/models/slow/infer", body))
        slow = gateway.service.repository.find("slow")
        gateway.wait_until(lambda: slow.statistics.count_pending() >= 3)
        found = doctor.findings(gateway)
    assert found["instance"]["subject"] == "slow"
    assert "its one instance is always busy" in found["instance"]["text"]
    assert "instance_group { count: 2 }" in found["instance"]["remedy"]


def test_what_cannot_be_asked_is_said(doctor: Doctor) -> None:
    code, _, said = doctor.run("--live", "http://127.0.0.1:9")
    assert code == 1 and "http://127.0.0.1:9/ cannot be reached" in said
    code, _, said = doctor.run("--live", "http://127.0.0.1:9", "model")
    assert code == 2 and "leave MODEL out" in said
    code, _, said = doctor.run("--live", "nowhere")
    assert code == 2


def test_an_engine_is_being_replaced(doctor: Doctor, tmp_path: Path) -> None:
    with live_gateway(tmp_path, PacedRunner()) as gateway:
        gateway.engines[0].is_restarting = True
        try:
            found = doctor.findings(gateway, code=1)
        finally:
            gateway.engines[0].is_restarting = False
    assert found["unready"]["text"] == "it takes no requests: the engine is restarting"
    assert found["unready"]["level"] == "fail"


def test_what_health_names_is_degraded(doctor: Doctor, tmp_path: Path) -> None:
    with live_gateway(tmp_path, PacedRunner()) as gateway:
        gateway.service.notices.append(lambda: "the store of quotas is away")
        found = doctor.findings(gateway)
    assert found["degraded"]["text"] == "the store of quotas is away" and found["degraded"]["level"] == "warn"
