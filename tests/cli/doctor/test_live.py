"""`sluice doctor --live`: each diagnosis of a load, by the pages that it makes, and the command on a busy server."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sluice.cli.doctor.command import command
from sluice.engine.config import EngineConfig
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.serving import RepositoryOptions
from sluice.gateway.tenancy.access.identity import Identity, RouteGroup
from sluice.gateway.tenancy.access.keys import make_key
from sluice.gateway.watch.live.bounds import BoundKind, Observation, judge
from sluice.gateway.watch.live.scrape import Change, parse_scrape
from tests.cli.live_gateway import MODEL, LiveGateway, PacedRunner, live_gateway
from tests.paths import DOCS

SECONDS = 10.0
LLM = {
    "sluice_engine_max_num_seqs": 2,
    "sluice_kv_blocks": 100,
    "sluice_kv_blocks_reserved": 90,
    "sluice_kv_blocks_used": 80,
    "sluice_sequences_running": 2,
    "sluice_open_requests": 2,
}
"""The gauges of a language model that runs as many sequences as it may."""
ONE_RUNS = LLM | {"sluice_sequences_running": 1}
BUSY = "sluice_engine_seconds_total part=runner"
PROMPTS, GENERATED = "sluice_engine_prompt_tokens_total", "sluice_engine_generation_tokens_total"
LOOP = "sluice_event_loop_cpu_seconds_total process=gateway"
LATE, NUM_LATE = (f"sluice_event_loop_lag_seconds_{each} process=gateway" for each in ("sum", "count"))
REFUSED = "sluice_quota_refusals_total scope={} limit=requests_per_minute tenant={}"
USED = "sluice_quota_used_ratio scope=key name=ci limit=tokens_per_day"
PENDING = "nv_inference_pending_request_count model=slow"


@dataclass(frozen=True)
class Load:
    """A page has these values, and grows by those in ten seconds. Series are of the model without another.

    `found` are the bounds, `text` has words of the first one's, and `remedy` patterns of its remedy.
    """

    steady: Mapping[str, float]
    grown: Mapping[str, float]
    found: tuple[BoundKind, ...]
    text: tuple[str, ...] = ()
    remedy: tuple[str, ...] = ()
    instances: Mapping[str, int] = field(default_factory=dict)


LOADS: dict[str, Load] = {
    "nobody asks": Load({}, {}, (BoundKind.NONE,), ("it is idle: no request in 10 s",)),
    "nothing bounds it": Load(
        {"sluice_engine_max_num_seqs": 2, "sluice_open_requests": 1},
        {
            "sluice_generation_tokens_total": 50,
            "sluice_time_to_first_token_seconds_bucket le=0.02": 0,
            "sluice_time_to_first_token_seconds_bucket le=0.04": 4,
            "sluice_time_to_first_token_seconds_bucket le=+Inf": 4,
        },
        (BoundKind.NONE,),
        ("nothing bounds it: 5 tokens a second, half of the first tokens within 30 ms",),
    ),
    "the places of a step are taken": Load(
        LLM | {"sluice_sequences_waiting": 6},
        {"sluice_engine_waits_total": 4, "sluice_engine_wait_seconds_total": 2},
        (BoundKind.QUEUE,),
        ("6 requests wait, 0.5 s in the mean for one of the 2 places of a step",),
        ("--max-num-seqs above 2",),
    ),
    "a full queue refuses, and deadlines pass": Load(
        LLM,
        {"sluice_requests_total outcome=overloaded": 3, "sluice_engine_timeouts_total": 1},
        (BoundKind.QUEUE,),
        ("0 requests wait", "; 3 were refused by a full queue; 1 ended at their deadline"),
    ),
    "all KV blocks are reserved": Load(
        ONE_RUNS | {"sluice_sequences_waiting": 3},
        {},
        (BoundKind.KV_CACHE,),
        ("3 requests wait for KV blocks: 90% of 100 are reserved by 1 sequences, 80% are used",),
        ("^--kv-cache-memory",),
    ),
    "and little of what is reserved is used": Load(
        ONE_RUNS | {"sluice_sequences_waiting": 3, "sluice_kv_blocks_used": 44},
        {},
        (BoundKind.KV_CACHE,),
        ("44% are used",),
        ("have clients lower it", "--kv-cache-memory"),
    ),
    "running sequences are paused for blocks": Load(
        LLM,
        {"sluice_engine_preemptions_total": 2, "sluice_engine_recomputed_tokens_total": 70},
        (BoundKind.KV_CACHE,),
        ("2 running sequences were paused for want of KV blocks, 70 tokens computed again",),
    ),
    "steps fill the time": Load(
        LLM,
        {BUSY: 9, "sluice_engine_steps_total": 450, GENERATED: 900, PROMPTS: 10},
        (BoundKind.COMPUTE,),
        ("steps fill 90% of the time: 45 steps a second of 20 ms, 90 tokens a second",),
        ("--quantization",),
    ),
    "steps of two replicas fill half of their time": Load(
        {"sluice_engine_max_num_seqs": 2, "sluice_replica_up replica=0": 1, "sluice_replica_up replica=1": 1},
        {BUSY: 10, "sluice_requests_total outcome=ok": 1},
        (BoundKind.NONE,),
    ),
    "what is not the model fills the time": Load(
        LLM,
        {BUSY: 4, "sluice_engine_seconds_total part=overhead": 5, GENERATED: 900},
        (BoundKind.COMPUTE,),
        ("50% outside of the model",),
        ("fewer log probabilities",),
    ),
    "prompts fill the time": Load(
        LLM | {"sluice_engine_prefill_tokens_per_second": 1000},
        {BUSY: 9, PROMPTS: 6000, GENERATED: 900},
        (BoundKind.PREFILL,),
        ("mostly with prompts: 600 tokens of prompts a second, 90 generated",),
        ("prefix cache", "--max-num-batched-tokens"),
    ),
    "prompts take less than half of the time": Load(
        LLM | {"sluice_engine_prefill_tokens_per_second": 1000},
        {BUSY: 9, PROMPTS: 4000, GENERATED: 10},
        (BoundKind.COMPUTE,),
    ),
    "nearly all tokens are of prompts, of a speed that is not known": Load(
        LLM, {BUSY: 9, PROMPTS: 960, GENERATED: 40}, (BoundKind.PREFILL,)
    ),
    "the thread of all requests is busy": Load(
        {},
        {LOOP: 8, LATE: 1, NUM_LATE: 100},
        (BoundKind.GATEWAY,),
        ("80% of a core and 10 ms late",),
        ("--http-workers",),
    ),
    "it is late, as the machine has no core left": Load(
        {"nv_cpu_utilization": 0.95},
        {LOOP: 2, LATE: 6, NUM_LATE: 100},
        (BoundKind.GATEWAY,),
        ("60 ms late, as the machine has no core left for it",),
        ("--num-threads",),
    ),
    "it never came to its timer": Load({}, {LOOP: 7}, (BoundKind.GATEWAY,), ("10000 ms late",)),
    "it is as late as any": Load({}, {LOOP: 7, LATE: 4, NUM_LATE: 100}, (BoundKind.NONE,)),
    "a key's limit refuses": Load(
        {},
        {REFUSED.format("key", "research"): 4},
        (BoundKind.QUOTA,),
        ("4 requests of tenant 'research' were refused by its key's limit requests_per_minute",),
        ("sluice keys update NAME --requests-per-minute N",),
    ),
    "a tenant's limit refuses": Load(
        {}, {REFUSED.format("tenant", "research"): 4}, (BoundKind.QUOTA,), (), ("sluice tenants set research",)
    ),
    "the one instance of a model is busy": Load(
        {PENDING: 3},
        {
            "nv_inference_count model=slow": 20,
            "nv_inference_exec_count model=slow": 10,
            "nv_inference_queue_duration_us model=slow": 4_000_000,
        },
        (BoundKind.INSTANCE,),
        ("its one instance is always busy: 3 requests or more wait, 200 ms in the mean; batches have 2.0 inferences",),
        (r"instance_group \{ count: 2 \}",),
        {"slow": 1},
    ),
    "the instances of a model are busy": Load(
        {PENDING: 1},
        {},
        (BoundKind.INSTANCE,),
        ("its 3 instances are always busy: 1 requests",),
        ("count: 4",),
        {"slow": 3},
    ),
    "the gravest comes first": Load(
        LLM | {PENDING: 1, "sluice_sequences_waiting": 1},
        {BUSY: 9, LOOP: 9, REFUSED.format("key", "a"): 1, "sluice_engine_restarts_total": 1},
        (
            BoundKind.ENGINE_LOST,
            BoundKind.GATEWAY,
            BoundKind.QUOTA,
            BoundKind.QUEUE,
            BoundKind.INSTANCE,
            BoundKind.COMPUTE,
        ),
    ),
}


def page(values: Mapping[str, float]) -> str:
    """A metrics page of series, each a name and labels as `name=value`."""
    lines = []
    for series, value in values.items():
        name, *labels = series.split()
        if name.startswith("sluice_") and "process=" not in series and "quota" not in name:
            labels.append(f"model={MODEL}")
        shown = ",".join('{}="{}"'.format(*each.split("=")) for each in labels)
        lines.append(f"{name}{{{shown}}} {value}\n")
    return "".join(lines)


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_what_a_load_is_bound_by(load: Load) -> None:
    """Counters have been at 7 when the watch began, but for those of refusals, which begin with the first."""
    first = {name: 7.0 for name in load.grown if "refusals" not in name}
    last = {name: first.get(name, 0.0) + grown for name, grown in load.grown.items()}
    pages = (parse_scrape(page({**each, **load.steady}), at) for each, at in ((first, 100.0), (last, 100.0 + SECONDS)))
    found = judge(Observation(Change(*pages), num_instances=load.instances))
    assert tuple(each.bound for each in found) == load.found, found
    assert all(words in found[0].text for words in load.text), found[0].text
    assert all(re.search(pattern, found[0].remedy) for pattern in load.remedy), found[0].remedy


def test_a_quota_that_is_nearly_used_is_a_note() -> None:
    first, last = (parse_scrape(page({USED: 0.9}), at) for at in (0.0, SECONDS))
    note, _ = judge(Observation(Change(first, last)))
    assert (note.level, note.text) == ("note", "key 'ci' has used 90% of its tokens_per_day")


def test_what_is_judged_is_documented() -> None:
    documented = (DOCS / "metrics.md").read_text()
    names = {name.split()[0] for load in LOADS.values() for name in (*load.steady, *load.grown)} | {USED.split()[0]}
    bare = {name.removesuffix("_bucket") if "_seconds_bucket" in name else name for name in names}
    missing = [name for name in bare if name.removesuffix("_sum").removesuffix("_count") not in documented]
    assert [name for name in missing if name not in documented] == []


# --- the command ---

HELD_MODEL = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        while not os.path.exists({over!r}):
            time.sleep(0.01)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros(1, np.float32))]) for _ in requests]
"""
HELD_CONFIG = """
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
        code = command([*arguments, "--seconds", "0.1"])
        streams = self._capsys.readouterr()
        return code, streams.out, streams.err

    def findings(self, gateway: LiveGateway, *more: str, code: int = 0) -> dict[str, dict[str, Any]]:
        """Return the findings by what they say is the bound."""
        ended, written, _ = self.run("--live", gateway.url, "--json", *more)
        report = json.loads(written)
        assert ended == code, report
        assert report["bound"] == report["findings"][0]["bound"]
        return {each["bound"]: each for each in report["findings"]}


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    monkeypatch.delenv("SLUICE_API_KEY", raising=False)
    monkeypatch.delenv("SLUICE_URL", raising=False)
    return Doctor(capsys)


def test_a_server_s_load_is_told(doctor: Doctor, tmp_path: Path) -> None:
    """A sequence runs, three wait for its place, and two of three requests wait for an instance."""
    over, model = tmp_path / "over", tmp_path / "models" / "slow"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(HELD_CONFIG)
    (model / "1" / "model.py").write_text(HELD_MODEL.format(over=str(over)))
    config = ServeConfig(repository=RepositoryOptions(paths=(str(tmp_path / "models"),)))
    engine = EngineConfig(model_path="none", max_num_seqs=1)
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [0]}]}
    with live_gateway(tmp_path, PacedRunner(step_s=0.02), engine=engine, config=config) as gateway:
        for _ in range(4):
            gateway.complete(max_tokens=900)
        for _ in range(3):
            gateway.post("/v2/models/slow/infer", body)
        slow = gateway.server.plane.repository.find("slow")
        gateway.wait_until(lambda: gateway.engines[0].stats.num_waiting == 3 and slow.statistics.count_pending() == 2)
        found = doctor.findings(gateway)
        over.touch()
    assert found["queue"]["subject"] == MODEL and "3 requests wait" in found["queue"]["text"]
    assert found["instance"]["subject"] == "slow"
    assert "its one instance is always busy: 2 requests" in found["instance"]["text"]


def test_an_idle_server_a_key_that_is_missing_and_an_engine_that_is_given_up(doctor: Doctor, tmp_path: Path) -> None:
    with live_gateway(tmp_path, PacedRunner()) as gateway:
        code, written, said = doctor.run("--live", gateway.url)
        assert (code, said) == (0, f"watching {gateway.url} for 0.1 s\n")
        assert written.rstrip().splitlines()[-1].startswith(("Nothing bounds this server.", "Bound by: gateway"))
        ring = gateway.server.accounts.calls.access.ring
        assert ring.store is not None
        new = make_key(Identity(name="ci", tenant="research", groups=frozenset([*RouteGroup])))
        gateway.run(ring.store.add(new.stored))
        gateway.run(ring.refresh())
        code, _, said = doctor.run("--live", gateway.url)
        assert code == 1 and "SLUICE_API_KEY" in said
        gateway.run(gateway.engines[0].stop())
        found = doctor.findings(gateway, "--api-key", new.text, code=1)
        _, written, _ = doctor.run("--live", gateway.url, "--api-key", new.text)
    assert written.rstrip().endswith("Bound by: unready (server).")
    assert (found["unready"]["level"], "the engine was stopped" in found["unready"]["text"]) == ("fail", True)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("http://127.0.0.1:9",), 1, "http://127.0.0.1:9/ cannot be reached"),
        (("http://127.0.0.1:9", "model"), 2, "leave MODEL out"),
        (("nowhere",), 2, ""),
    ],
)
def test_what_cannot_be_asked_is_said(doctor: Doctor, arguments: tuple[str, ...], code: int, words: str) -> None:
    found, _, said = doctor.run("--live", *arguments)
    assert found == code and words in said
