"""Health, metadata, statistics, the repository and settings, as far as the recorded answers do not show them."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from sluice.gateway.api.v2.server import PROTOCOL_VERSION
from sluice.gateway.api.v2.trace_settings import TraceSettings
from sluice.gateway.plane.health import Phase
from sluice.serving.backend import LoadOverrides
from tests.gateway.api.v2.grpc.parts import INVALID, EchoModel, failure, infer_request, serving, set_parameters
from tests.gateway.api.v2.small_service import SmallService
from tests.waiting import until


async def test_probes_metadata_and_statistics() -> None:
    service = SmallService(*(EchoModel("add", "FP32", (4,), 8, version) for version in (1, 2)), EchoModel())
    async with serving(service) as running:
        stub = running.stub
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        service.health.phase = Phase.LOADING
        assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
        found = await stub.ServerMetadata(pb.ServerMetadataRequest())
        assert (found.name, found.version, len(found.extensions)) == ("triton", PROTOCOL_VERSION, 13)
        found = await stub.ModelMetadata(pb.ModelMetadataRequest(name="add"))
        assert (found.name, list(found.versions), found.platform) == ("add", ["1", "2"], "python")
        assert [(each.name, each.datatype, list(each.shape)) for each in (*found.inputs, *found.outputs)] == [
            ("INPUT0", "FP32", [-1, 4]),
            ("OUTPUT0", "FP32", [-1, 4]),
        ]
        assert list((await stub.ModelMetadata(pb.ModelMetadataRequest(name="add", version="1"))).versions) == ["1"]
        config = (await stub.ModelConfig(pb.ModelConfigRequest(name="echo"))).config
        assert config == service.models.find("echo").config
        await stub.ModelInfer(infer_request("echo", 1))
        [row] = (await stub.ModelStatistics(pb.ModelStatisticsRequest(name="echo"))).model_stats
        assert (row.name, row.version, row.inference_count) == ("echo", "1", 1)
        assert row.inference_stats.success.count == 1 and row.inference_stats.HasField("cache_miss")
        assert len((await stub.ModelStatistics(pb.ModelStatisticsRequest())).model_stats) == 3


async def test_the_repository_s_index() -> None:
    async with serving(SmallService(EchoModel())) as running:
        ask = running.stub.RepositoryIndex
        found = [(each.name, each.version, each.state, each.reason) for each in (await ask(_index())).models]
        assert found == [
            ("echo", "1", "READY", ""),
            ("broken", "1", "UNAVAILABLE", "it is broken"),
            ("on_demand", "", "", ""),
        ]
        assert [each.name for each in (await ask(_index(ready=True))).models] == ["echo"]
        named = ("UNIMPLEMENTED", "'repository_name' specification is not supported")
        assert await failure(ask(_index(repository_name="x"))) == named


def _index(**given: Any) -> Any:
    return pb.RepositoryIndexRequest(**given)


def load(model: str, **parameters: Any) -> Any:
    request = pb.RepositoryModelLoadRequest(model_name=model)
    set_parameters(request.parameters, parameters)
    return request


def unload(model: str, **parameters: Any) -> Any:
    request = pb.RepositoryModelUnloadRequest(model_name=model)
    set_parameters(request.parameters, parameters)
    return request


FILE = {"file:1/model.py": ("bytes_param", b"\xff")}


@pytest.mark.parametrize(
    ("request_", "call"),
    [
        (load("plain"), ("load", "plain", None)),
        (load("whole", config="{}", **FILE), ("load", "whole", LoadOverrides("{}", (("1/model.py", b"\xff"),)))),
        (unload("plain"), ("unload", "plain", False)),
        (unload("whole", unload_dependents=True, unknown="x"), ("unload", "whole", True)),
        (load("sql", lora_path="/a", base_model_name="llama"), ("load_adapter", "sql", "/a", "llama", True)),
        (unload("llama:polite"), ("unload_adapter", "llama:polite", "")),
        (unload("sql", base_model_name="llama"), ("unload_adapter", "sql", "llama")),
    ],
)
async def test_loading_and_unloading_of_models_and_adapters(request_: Any, call: tuple[object, ...]) -> None:
    service = SmallService()
    async with serving(service) as running:
        await _send(running, request_)
    assert service.repository.calls == [call]


async def _send(running: Any, request: Any) -> None:
    is_load = isinstance(request, pb.RepositoryModelLoadRequest)
    await getattr(running.stub, "RepositoryModelLoad" if is_load else "RepositoryModelUnload")(request)


WRONG = "invalid value type for load parameter '{}', expected {}."


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (load("m", foo="x"), INVALID, "unrecognized load parameter 'foo'."),
        (load("m", config=1), INVALID, WRONG.format("config", "string_param")),
        (load("m", **{"file:1/model.py": "x"}), INVALID, WRONG.format("file:1/model.py", "bytes_param")),
        (load("m", lora_path=1), INVALID, WRONG.format("lora_path", "string_param")),
        (
            unload("m", unload_dependents="yes"),
            INVALID,
            "invalid value type for 'unload_dependents' parameter, expected bool_param.",
        ),
        *(
            (request(repository_name="x"), "UNIMPLEMENTED", "'repository_name' specification is not supported")
            for request in (pb.RepositoryModelLoadRequest, pb.RepositoryModelUnloadRequest)
        ),
        (load("nope"), "INTERNAL", "failed to load 'nope', failed to poll from model repository"),
    ],
)
async def test_what_is_not_loaded(request_: Any, code: str, message: str) -> None:
    service = SmallService()
    async with serving(service) as running:
        assert await failure(_send(running, request_)) == (code, message)
    assert len(service.repository.calls) == (code == "INTERNAL")


async def test_files_of_a_load_need_the_operator_s_leave() -> None:
    service = SmallService()
    service.takes_model_files = False
    async with serving(service) as running:
        await _send(running, load("m", config="{}"))
        code, text = await failure(_send(running, load("m", config="{}", **FILE)))
    assert code == "PERMISSION_DENIED" and "--allow-model-file-override" in text
    assert service.repository.calls == [("load", "m", LoadOverrides("{}"))]


async def test_a_load_goes_on_when_its_client_has_left() -> None:
    service = SmallService()
    service.repository.may_load.clear()
    async with serving(service) as running:
        call = asyncio.ensure_future(_send(running, load("large")))
        await until(lambda: service.repository.begun)
        call.cancel()
        service.repository.may_load.set()
        await until(lambda: service.repository.calls)
    assert service.repository.calls == [("load", "large", None)]


def _log(name: str, kind: str, value: Any) -> Any:
    request = pb.LogSettingsRequest()
    setattr(request.settings[name], kind, value)
    return request


def _trace(name: str, *values: str) -> Any:
    request = pb.TraceSettingRequest()
    request.settings[name].value.extend(values)
    return request


@pytest.mark.parametrize(
    ("method", "request_", "code", "message"),
    [
        ("TraceSetting", _trace("trace_rate", "1", "2"), INVALID, "expect only 1 value for 'trace_rate'"),
        (
            "TraceSetting",
            _trace("trace_file", "/tmp/x"),
            "UNIMPLEMENTED",
            "trace file location can not be updated through network protocol",
        ),
        ("LogSettings", _log("log_verbose_level", "bool_param", True), INVALID, "expect int32 for 'log_verbose_level'"),
        ("LogSettings", _log("log_format", "bool_param", True), INVALID, "expect string for 'log_format'"),
        (
            "LogSettings",
            _log("log_file", "string_param", "x"),
            "UNIMPLEMENTED",
            "log file location can not be updated through network protocol",
        ),
    ],
)
async def test_settings_that_are_wrong(method: str, request_: Any, code: str, message: str) -> None:
    async with serving(SmallService()) as running:
        assert await failure(getattr(running.stub, method)(request_)) == (code, message)


async def test_trace_settings_are_changed_and_cleared() -> None:
    service = SmallService(EchoModel())
    service.trace = TraceSettings("/nowhere/trace.json")
    async with serving(service) as running:
        for name, given, shown in (
            ("echo", ["TIMESTAMPS", "TENSORS"], ["TIMESTAMPS", "TENSORS"]),
            ("", ["TENSORS"], ["TENSORS"]),
            ("echo", [], ["TENSORS"]),
        ):
            request = pb.TraceSettingRequest(model_name=name)
            request.settings["trace_level"].SetInParent()
            request.settings["trace_level"].value.extend(given)
            assert list((await running.stub.TraceSetting(request)).settings["trace_level"].value) == shown
        for values, shown in ((["7"], ["7"]), ([], ["1000"])):
            request = pb.TraceSettingRequest()
            request.settings["trace_rate"].SetInParent()
            request.settings["trace_rate"].value.extend(values)
            answer = await running.stub.TraceSetting(request)
            assert list(answer.settings["trace_rate"].value) == shown


@pytest.fixture
def memory() -> Iterator[str]:
    """The key of four bytes of shared memory."""
    path = Path(f"/dev/shm/sluice_control_{os.getpid()}")
    path.write_bytes(bytes(4))
    yield path.name
    path.unlink()


async def test_cuda_memory_that_is_system_memory(memory: str) -> None:
    service = SmallService()
    service.shared_memory.register("x", memory, 0, 4)
    async with serving(service) as running:
        found = await failure(running.stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest(name="x")))
    assert found[1] == "The region named 'x' is registered as system shared memory, not CUDA shared memory"
