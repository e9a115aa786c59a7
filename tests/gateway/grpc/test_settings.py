import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from gateway.v2.trace import TraceSettings
from tests.gateway.grpc.parts import EchoModel, failure, serving
from tests.gateway.v2.small_service import SmallService

INVALID = "INVALID_ARGUMENT"
KEY = f"/sluice_settings_{os.getpid()}"


@pytest.fixture
def key() -> Iterator[str]:
    """A shared memory object of 100 bytes."""
    path = Path("/dev/shm", KEY[1:])
    path.write_bytes(bytes(100))
    yield KEY
    path.unlink()


def region(name: str, key: str, offset: int, byte_size: int) -> Any:
    return pb.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=byte_size)


async def test_system_shared_memory(key: str) -> None:
    async with serving(SmallService()) as running:
        stub = running.stub
        await stub.SystemSharedMemoryRegister(region("a", key, 10, 20))
        await stub.SystemSharedMemoryRegister(region("b", key, 0, 100))
        found = (await stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())).regions
        assert sorted(found) == ["a", "b"]
        assert (found["a"].name, found["a"].key, found["a"].offset, found["a"].byte_size) == ("a", key, 10, 20)
        assert await failure(stub.SystemSharedMemoryRegister(region("a", key, 0, 1))) == (
            "ALREADY_EXISTS",
            "shared memory region 'a' already in manager",
        )
        await stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name="a"))
        assert await failure(stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(name="a"))) == (
            "NOT_FOUND",
            "Unable to find system shared memory region: 'a'",
        )
        await stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
        assert not (await stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())).regions


async def test_cuda_shared_memory_without_a_gpu(key: str) -> None:
    async with serving(SmallService()) as running:
        stub = running.stub
        assert not (await stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest())).regions
        assert await failure(stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest(name="x"))) == (
            "NOT_FOUND",
            "Unable to find cuda shared memory region: 'x'",
        )
        code, message = await failure(stub.CudaSharedMemoryRegister(pb.CudaSharedMemoryRegisterRequest(name="x")))
        assert code == INVALID and "no GPU" in message
        await stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest(name="x"))
        await stub.SystemSharedMemoryRegister(region("x", key, 0, 1))
        assert (await failure(stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest(name="x"))))[1] == (
            "The region named 'x' is registered as system shared memory, not CUDA shared memory"
        )


def trace(model: str = "", **settings: list[str]) -> Any:
    request = pb.TraceSettingRequest(model_name=model)
    for name, values in settings.items():
        request.settings[name].SetInParent()
        request.settings[name].value.extend(values)
    return request


def values(response: Any) -> dict[str, list[str]]:
    return {name: list(setting.value) for name, setting in response.settings.items()}


async def test_trace_settings_are_told_and_changed() -> None:
    service = SmallService(EchoModel())
    service.trace = TraceSettings("/nowhere/trace.json")
    async with serving(service) as running:
        ask = running.stub.TraceSetting
        assert values(await ask(trace())) == {
            "trace_level": ["OFF"],
            "trace_rate": ["1000"],
            "trace_count": ["-1"],
            "log_frequency": ["0"],
            "trace_file": ["/nowhere/trace.json"],
            "trace_mode": ["triton"],
        }
        assert values(await ask(trace(trace_rate=["7"], trace_mode=["opentelemetry"], unknown=["x"])))[
            "trace_rate"
        ] == ["7"]
        found = values(await ask(trace("echo", trace_level=["TIMESTAMPS", "TENSORS"])))
        assert found["trace_level"] == ["TIMESTAMPS", "TENSORS"] and found["trace_rate"] == ["7"]
        assert values(await ask(trace("echo", trace_level=[])))["trace_level"] == ["OFF"]
        assert values(await ask(trace(trace_rate=[])))["trace_rate"] == ["1000"]


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (trace("nope"), INVALID, "Request for unknown model : nope"),
        (trace(trace_rate=["x"]), INVALID, "Unable to parse 'trace_rate', got: x"),
        (trace(trace_rate=["1", "2"]), INVALID, "expect only 1 value for 'trace_rate'"),
        (
            trace(trace_file=["/tmp/x"]),
            "UNIMPLEMENTED",
            "trace file location can not be updated through network protocol",
        ),
    ],
)
async def test_trace_settings_that_are_wrong(request_: Any, code: str, message: str) -> None:
    async with serving(SmallService(EchoModel())) as running:
        assert await failure(running.stub.TraceSetting(request_)) == (code, message)


def log(**settings: tuple[str, Any]) -> Any:
    request = pb.LogSettingsRequest()
    for name, (kind, value) in settings.items():
        setattr(request.settings[name], kind, value)
    return request


async def test_log_settings_are_told_and_changed() -> None:
    async with serving(SmallService()) as running:
        ask = running.stub.LogSettings
        found = (await ask(log())).settings
        assert sorted(found) == [
            "log_error",
            "log_file",
            "log_format",
            "log_info",
            "log_verbose_level",
            "log_warning",
        ]
        assert found["log_format"].string_param == "default"
        assert found["log_verbose_level"].WhichOneof("parameter_choice") == "uint32_param"
        before = found["log_error"].bool_param
        changed = (await ask(log(log_error=("bool_param", not before), unknown=("string_param", "x")))).settings
        assert changed["log_error"].bool_param is not before
        await ask(log(log_error=("bool_param", before)))


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        ({"log_info": ("string_param", "x")}, INVALID, "expect boolean for 'log_info'"),
        ({"log_verbose_level": ("bool_param", True)}, INVALID, "expect int32 for 'log_verbose_level'"),
        ({"log_format": ("bool_param", True)}, INVALID, "expect string for 'log_format'"),
        ({"log_format": ("string_param", "bad")}, INVALID, "invalid argument for log_format, got: bad"),
        (
            {"log_file": ("string_param", "x")},
            "UNIMPLEMENTED",
            "log file location can not be updated through network protocol",
        ),
    ],
)
async def test_log_settings_that_are_wrong(settings: dict[str, tuple[str, Any]], code: str, message: str) -> None:
    async with serving(SmallService()) as running:
        assert await failure(running.stub.LogSettings(log(**settings))) == (code, message)
