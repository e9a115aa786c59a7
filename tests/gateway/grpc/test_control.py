from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from gateway.v2.server import PROTOCOL_VERSION
from serving.backend import LoadOverrides
from tests.gateway.grpc.parts import (
    EchoModel,
    failure,
    infer_request,
    serving,
    set_parameters,
)
from tests.gateway.v2.small_service import SmallService
from tests.waiting import until

INVALID = "INVALID_ARGUMENT"


async def test_probes() -> None:
    service = SmallService(EchoModel())
    async with serving(service) as running:
        stub = running.stub
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="echo"))).ready
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="echo", version="1"))).ready
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="echo", version="9"))).ready
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="nope"))).ready
        assert (await failure(stub.ModelReady(pb.ModelReadyRequest(name="echo", version="-1"))))[0] == INVALID
        service.ready = False
        assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready


async def test_server_metadata() -> None:
    async with serving(SmallService()) as running:
        found = await running.stub.ServerMetadata(pb.ServerMetadataRequest())
    assert (found.name, found.version) == ("triton", PROTOCOL_VERSION)
    assert found.extensions[0] == "classification" and len(found.extensions) == 13


async def test_model_metadata() -> None:
    versions = [EchoModel("add", "FP32", (4,), 8, version) for version in (1, 2)]
    async with serving(SmallService(*versions)) as running:
        ask = running.stub.ModelMetadata
        found = await ask(pb.ModelMetadataRequest(name="add"))
        assert (found.name, list(found.versions), found.platform) == ("add", ["1", "2"], "python")
        assert [(each.name, each.datatype, list(each.shape)) for each in found.inputs] == [("INPUT0", "FP32", [-1, 4])]
        assert [(each.name, each.datatype, list(each.shape)) for each in found.outputs] == [
            ("OUTPUT0", "FP32", [-1, 4])
        ]
        assert list((await ask(pb.ModelMetadataRequest(name="add", version="1"))).versions) == ["1"]
        assert (await failure(ask(pb.ModelMetadataRequest(name="nope"))))[0] == "NOT_FOUND"
        assert (await failure(ask(pb.ModelMetadataRequest(name="add", version="3"))))[0] == "NOT_FOUND"
        assert (await failure(ask(pb.ModelMetadataRequest(name="add", version="abc"))))[0] == INVALID


async def test_model_config() -> None:
    model = EchoModel()
    async with serving(SmallService(model)) as running:
        assert (await running.stub.ModelConfig(pb.ModelConfigRequest(name="echo"))).config == model.config
        assert (await failure(running.stub.ModelConfig(pb.ModelConfigRequest(name="nope")))) == (
            "NOT_FOUND",
            "Request for unknown model: 'nope' is not found",
        )


async def test_model_statistics() -> None:
    async with serving(SmallService(EchoModel(), EchoModel("other"))) as running:
        await running.stub.ModelInfer(infer_request("echo", 1))
        ask = running.stub.ModelStatistics
        [found] = (await ask(pb.ModelStatisticsRequest(name="echo"))).model_stats
        assert (found.name, found.version, found.inference_count) == ("echo", "1", 1)
        assert found.inference_stats.success.count == 1
        assert found.inference_stats.HasField("cache_miss")
        assert len((await ask(pb.ModelStatisticsRequest())).model_stats) == 2
        assert await failure(ask(pb.ModelStatisticsRequest(name="nope"))) == (
            INVALID,
            "requested model 'nope' is not available",
        )
        assert await failure(ask(pb.ModelStatisticsRequest(name="echo", version="9"))) == (
            INVALID,
            "requested model version is not available for model 'echo'",
        )


async def test_repository_index() -> None:
    async with serving(SmallService(EchoModel())) as running:
        ask = running.stub.RepositoryIndex
        found = [(each.name, each.version, each.state, each.reason) for each in (await ask(_index())).models]
        assert found == [
            ("echo", "1", "READY", ""),
            ("broken", "1", "UNAVAILABLE", "it is broken"),
            ("on_demand", "", "", ""),
        ]
        assert [each.name for each in (await ask(_index(ready=True))).models] == ["echo"]


def _index(**given: Any) -> Any:
    return pb.RepositoryIndexRequest(**given)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("RepositoryIndex", pb.RepositoryIndexRequest),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest),
    ],
)
async def test_repositories_have_no_names(method: str, message: Any) -> None:
    async with serving(SmallService()) as running:
        assert await failure(getattr(running.stub, method)(message(repository_name="x"))) == (
            "UNIMPLEMENTED",
            "'repository_name' specification is not supported",
        )


async def test_loading_and_unloading() -> None:
    service = SmallService()
    async with serving(service) as running:
        await running.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="plain"))
        whole = pb.RepositoryModelLoadRequest(model_name="whole")
        set_parameters(whole.parameters, {"config": "{}", "file:1/model.py": ("bytes_param", b"\xff")})
        await running.stub.RepositoryModelLoad(whole)
        await running.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="plain"))
        dependents = pb.RepositoryModelUnloadRequest(model_name="whole")
        set_parameters(dependents.parameters, {"unload_dependents": True, "unknown": "x"})
        await running.stub.RepositoryModelUnload(dependents)
    assert service.repository.calls == [
        ("load", "plain", None),
        ("load", "whole", LoadOverrides("{}", (("1/model.py", b"\xff"),))),
        ("unload", "plain", False),
        ("unload", "whole", True),
    ]


async def test_adapters_are_loaded_and_unloaded_by_their_parameters() -> None:
    service = SmallService()
    async with serving(service) as running:
        load, unload = running.stub.RepositoryModelLoad, running.stub.RepositoryModelUnload
        named = pb.RepositoryModelLoadRequest(model_name="sql")
        set_parameters(named.parameters, {"lora_path": "/adapters/sql", "base_model_name": "llama"})
        await load(named)
        wrong = pb.RepositoryModelLoadRequest(model_name="sql")
        set_parameters(wrong.parameters, {"lora_path": 1})
        expected = "invalid value type for load parameter 'lora_path', expected string_param."
        assert await failure(load(wrong)) == (INVALID, expected)
        await unload(pb.RepositoryModelUnloadRequest(model_name="llama:polite"))
        based = pb.RepositoryModelUnloadRequest(model_name="sql")
        set_parameters(based.parameters, {"base_model_name": "llama"})
        await unload(based)
    assert service.repository.calls == [
        ("load_adapter", "sql", "/adapters/sql", "llama", True),
        ("unload_adapter", "llama:polite", ""),
        ("unload_adapter", "sql", "llama"),
    ]


async def test_files_of_a_load_need_the_operator_s_leave() -> None:
    service = SmallService()
    service.takes_model_files = False
    async with serving(service) as running:
        message = pb.RepositoryModelLoadRequest(model_name="m")
        set_parameters(message.parameters, {"config": "{}"})
        await running.stub.RepositoryModelLoad(message)
        set_parameters(message.parameters, {"file:1/model.py": ("bytes_param", b"x")})
        code, text = await failure(running.stub.RepositoryModelLoad(message))
    assert code == "PERMISSION_DENIED" and "--allow-model-file-override" in text
    assert service.repository.calls == [("load", "m", LoadOverrides("{}"))]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"foo": "x"}, "unrecognized load parameter 'foo'."),
        ({"config": 1}, "invalid value type for load parameter 'config', expected string_param."),
        (
            {"file:1/model.py": "x"},
            "invalid value type for load parameter 'file:1/model.py', expected bytes_param.",
        ),
    ],
)
async def test_load_parameters_that_are_wrong(parameters: dict[str, Any], message: str) -> None:
    request = pb.RepositoryModelLoadRequest(model_name="plain")
    set_parameters(request.parameters, parameters)
    service = SmallService()
    async with serving(service) as running:
        assert await failure(running.stub.RepositoryModelLoad(request)) == (INVALID, message)
    assert not service.repository.calls


async def test_unload_parameters_that_are_wrong() -> None:
    request = pb.RepositoryModelUnloadRequest(model_name="plain")
    set_parameters(request.parameters, {"unload_dependents": "yes"})
    async with serving(SmallService()) as running:
        assert await failure(running.stub.RepositoryModelUnload(request)) == (
            INVALID,
            "invalid value type for 'unload_dependents' parameter, expected bool_param.",
        )


async def test_a_load_that_fails() -> None:
    async with serving(SmallService()) as running:
        assert await failure(running.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="nope"))) == (
            "INTERNAL",
            "failed to load 'nope', failed to poll from model repository",
        )


async def test_a_load_goes_on_when_its_client_has_left() -> None:
    service = SmallService()
    service.repository.may_load.clear()
    async with serving(service) as running:
        call = running.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="large"), timeout=0.1)
        assert (await failure(call))[0] == "DEADLINE_EXCEEDED"
        service.repository.may_load.set()
        await until(lambda: service.repository.calls)
    assert service.repository.calls == [("load", "large", None)]
