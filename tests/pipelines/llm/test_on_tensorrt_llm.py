"""From a model's folder to TensorRT-LLM's constructor and back, over the stand-in in the real engine process."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.config import EngineConfig, Runtime
from sluice.errors import SluiceError
from sluice.pipelines.llm.backend import LlmBackend, load_checkpoint
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.services import LlmServices
from sluice.serving.backend import BackendContext
from sluice.serving.spec import ModelSource
from tests.pipelines.llm.calls import Record, ask
from tests.serving.backends.builders import Lookup
from tests.serving.config.parts import parse_config
from tests.stand_ins.engines import fork_engines
from tests.stand_ins.model_folders import BUILT, make_checkpoint, make_compiled_engine
from tests.stand_ins.paths import PYTHONPATH, STAND_INS
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

PATIENT = LlmServices(heartbeat_timeout_s=PATIENCE_S)


BOTH_VERSIONS = pytest.mark.parametrize("version", ["1.2.1", "1.3.0"], indirect=True)


@pytest.fixture
def version(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "1.3.0"))


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> Path:
    """TensorRT-LLM of that version is installed. The file gets what it is given."""
    fork_engines(monkeypatch)
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH, prepend=os.pathsep)
    monkeypatch.setenv("STAND_IN_VERSION", version)
    monkeypatch.setenv("STAND_IN_RECORD", str(tmp_path / "record"))
    return tmp_path / "record"


def source(folder: Path, **parameters: str) -> ModelSource:
    config, _ = parse_config('backend: "tensorrtllm"', "config.pbtxt")
    config.name = folder.name
    for key, text in parameters.items():
        config.parameters[key].string_value = text
    return ModelSource(folder, 1, config)


@asynccontextmanager
async def loaded(found: ModelSource, services: LlmServices = PATIENT) -> AsyncIterator[LlmModel]:
    """As the repository loads it, with a heartbeat that a busy machine keeps to."""
    context = BackendContext(Lookup())
    backend = LlmBackend(services)
    complete = ModelSource(found.folder, found.version, await backend.complete(found, context))
    async with asyncio.timeout(PATIENCE_S):
        model = await backend.load(complete, context)
    try:
        yield model
    finally:
        await model.close()


def constructed(record: Path) -> dict[str, Any]:
    """The arguments that the LLM was made with."""
    (made,) = [each for each in map(json.loads, record.read_text().splitlines()) if "arguments" in each]
    return dict(made["arguments"])


def make_model(folder: Path) -> Path:
    """A model's folder with a checkpoint in version 1."""
    folder.mkdir()
    version = make_checkpoint(folder / "1", with_tokenizer=True)
    (version / "model.safetensors").touch()
    return folder


async def test_parameters_reach_the_constructor(tmp_path: Path, record: Path, version: str) -> None:
    found = source(
        make_model(tmp_path / "m"),
        runtime="tensorrt_llm",
        max_batch_size="16",
        max_num_tokens="2048",
        batch_scheduler_policy="max_utilization",
        kv_cache_free_gpu_mem_fraction="0.5",
        kv_cache_host_memory_bytes="1048576",
        max_tokens_in_paged_kv_cache="4096",
        enable_kv_cache_reuse="false",
        tensor_parallel_size="2",
        normalize_log_probs="true",
        executor_worker_path="/opt/worker",
    )
    async with loaded(found) as model:
        answer = await ask(model, {"text_input": "hello", "max_tokens": 3})
        info = model.text.info
    assert answer["finish_reason"] == "length"
    assert (info.runtime, info.runtime_version, info.num_gpus, info.max_num_seqs) == ("tensorrt_llm", version, 2, 16)
    made = constructed(record)
    assert (made["max_batch_size"], made["max_num_tokens"], made["tensor_parallel_size"]) == (16, 2048, 2)
    assert made["scheduler_config"]["capacity_scheduler_policy"] == "MAX_UTILIZATION"
    cache = made["kv_cache_config"]
    assert (cache["free_gpu_memory_fraction"], cache["host_cache_size"], cache["max_tokens"]) == (0.5, 1 << 20, 4096)
    assert cache["enable_block_reuse"] is False


@pytest.mark.usefixtures("record")
async def test_an_engine_that_cannot_be_tried_is_a_load_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", "exit_after=2")  # the engine's own try is the first
    with pytest.raises(SluiceError, match="the model failed when it was tried: this request crashed the engine twice"):
        async with loaded(source(make_model(tmp_path / "m"), runtime="tensorrt_llm")):
            pass


@BOTH_VERSIONS
async def test_a_model_yaml_reaches_it(tmp_path: Path, record: Path, version: str) -> None:
    folder, beams = make_model(tmp_path / "m"), 1 if version == "1.2.1" else 2
    (folder / "1" / "model.yaml").write_text(
        f"backend: pytorch\nmax_batch_size: 12\nmax_beam_width: {beams}\n"
        "kv_cache_config: {sink_token_length: 4}\n"
        "triton_config: {max_batch_size: 0, decoupled: true}\n"
    )
    async with loaded(source(folder, runtime="tensorrt_llm")) as model:
        assert model.spec.is_decoupled
        assert (model.text.info.max_num_seqs, model.text.info.max_beam_width) == (12, beams)
    made = constructed(record)
    assert (made["max_batch_size"], made["kv_cache_config"]["sink_token_length"]) == (12, 4)


async def test_what_would_choose_code_does_not_reach_it(
    tmp_path: Path, record: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model(tmp_path / "m")
    (folder / "1" / "model.yaml").write_text("kv_connector_config: {connector_module: evil}\nmax_batch_size: 12\n")
    with caplog.at_level(logging.INFO):
        async with loaded(source(folder, runtime="tensorrt_llm", trust_remote_code="true")):
            pass
    made = constructed(record)
    assert made["max_batch_size"] == 12
    assert not made.get("trust_remote_code") and not made.get("kv_connector_config")
    reason = "what chooses code to run is taken from the command line alone, by --runtime-setting"
    assert f"trust_remote_code: {reason}; model.yaml: kv_connector_config: {reason}" in caplog.text


async def test_the_command_line_may_choose_code(tmp_path: Path, record: Path) -> None:
    def options(path: str, runtime: Runtime | None) -> EngineConfig:
        settings = {"trust_remote_code": "true"}
        return EngineConfig(model_path=path, runtime=runtime or Runtime.AUTO, runtime_settings=settings)

    services = LlmServices(options, heartbeat_timeout_s=PATIENCE_S)
    async with loaded(source(make_model(tmp_path / "m"), runtime="tensorrt_llm"), services):
        assert constructed(record)["trust_remote_code"] is True


@BOTH_VERSIONS
async def test_an_engine_of_nvidias_layout(tmp_path: Path, record: Path, version: str) -> None:
    """Its tokenizer is elsewhere, and 1.3 has engines no more."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    tokenizer = make_checkpoint(tmp_path / "tokenizer", with_tokenizer=True)
    engine = make_compiled_engine(tmp_path / "engine")
    found = source(tmp_path / "m", gpt_model_path=str(engine), tokenizer_dir=str(tokenizer), multi_block_mode="true")
    if version == "1.3.0":
        with pytest.raises(SluiceError, match=r"1\.3\.0"):
            async with loaded(found):
                pass
        return
    async with loaded(found) as model:
        assert (await ask(model, {"text_input": "hello", "max_tokens": 2}))["finish_reason"] == "length"
        assert model.text.info.max_num_seqs == BUILT["max_batch_size"]
    assert constructed(record)["extended_runtime_perf_knob_config"]["multi_block_mode"] is True


@pytest.mark.usefixtures("record")
async def test_model_of_the_command_line_tells_its_runtime(tmp_path: Path, version: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "weights")
    tokenizer = make_checkpoint(tmp_path / "tokenizer", with_tokenizer=True)
    engine = ProcessEngineClient(
        EngineConfig(
            model_path=str(checkpoint),
            runtime=Runtime.TENSORRT_LLM,
            tokenizer_path=str(tokenizer),
            tensor_parallel_size=2,
        ),
        heartbeat_timeout_s=PATIENCE_S,
    )
    async with asyncio.timeout(PATIENCE_S):
        model = await load_checkpoint("m", checkpoint, engine, asyncio.create_task(engine.start()), Record)
    try:
        told = {key: each.string_value for key, each in model.config.parameters.items()}
        expected = {"runtime": "tensorrt_llm", "runtime_version": version, "tensor_parallel_size": "2"}
        assert expected.items() <= told.items()
        assert "pipeline_parallel_size" not in told
    finally:
        await model.close()
