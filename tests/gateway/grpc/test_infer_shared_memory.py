"""Inputs and outputs of ModelInfer in shared memory."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2
from tritonclient.utils import shared_memory

from tests.gateway.grpc.parts import (
    INVALID,
    EchoModel,
    add_input,
    failure,
    infer_request,
    serving,
    set_parameters,
)
from tests.gateway.v2.small_service import SmallService

KEY = f"/sluice_grpc_{os.getpid()}"


@pytest.fixture
def region() -> Iterator[Any]:
    """64 bytes of shared memory under KEY, made by the stock client's utilities."""
    made = shared_memory.create_shared_memory_region("region", KEY, 64)
    yield made
    shared_memory.destroy_shared_memory_region(made)


async def test_tensors_in_shared_memory(region: Any) -> None:
    """The stock client's shared memory utilities work at offsets."""
    values = np.array([3, 1, 2, 5], np.int32)
    shared_memory.set_shared_memory_region(region, [values], offset=8)
    model = EchoModel()
    async with (
        serving(SmallService(model)) as running,
        triton_aio.InferenceServerClient(running.target) as client,
    ):
        await client.register_system_shared_memory("data", KEY, 48, offset=4)
        given = triton_aio.InferInput("INPUT0", [4], "INT32")
        given.set_shared_memory("data", 16, offset=4)
        wanted = triton_aio.InferRequestedOutput("OUTPUT0")
        wanted.set_shared_memory("data", 20, offset=24)
        result = await client.infer("echo", [given], outputs=[wanted])
        assert list(result.get_response().raw_output_contents) == [b""]
        assert shared_memory.get_contents_as_numpy(region, np.int32, [4], offset=28).tolist() == values.tolist()
        await client.unregister_system_shared_memory("data")
        model.jobs.clear()  # they hold the input
        with pytest.raises(Exception, match="Unable to find shared memory region: 'data'"):
            await client.infer("echo", [given])


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (
            {"shared_memory_region": "data"},
            (
                INVALID,
                "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor "
                "'INPUT0'",
            ),
        ),
        (
            {"shared_memory_byte_size": 4},
            (
                INVALID,
                "'shared_memory_byte_size' can not be specified without 'shared_memory_region' parameter for tensor "
                "'INPUT0'",
            ),
        ),
        (
            {"shared_memory_offset": 4},
            (
                INVALID,
                "'shared_memory_offset' can not be specified without 'shared_memory_region' parameter for tensor "
                "'INPUT0'",
            ),
        ),
        (
            {"shared_memory_region": 1, "shared_memory_byte_size": 4},
            (
                INVALID,
                "invalid value type for 'shared_memory_region' parameter for tensor 'INPUT0', expected string_param.",
            ),
        ),
        (
            {"shared_memory_region": "data", "shared_memory_byte_size": "4"},
            (
                INVALID,
                "invalid value type for 'shared_memory_byte_size' parameter for tensor 'INPUT0', expected int64_param.",
            ),
        ),
        (
            {"shared_memory_region": "none", "shared_memory_byte_size": 4},
            ("NOT_FOUND", "Unable to find shared memory region: 'none'"),
        ),
        (
            {"shared_memory_region": "data", "shared_memory_byte_size": 4, "shared_memory_offset": 62},
            (INVALID, "Invalid offset + byte size for shared memory region: 'data'"),
        ),
        (
            {"shared_memory_region": "data", "shared_memory_byte_size": 8},
            (
                INVALID,
                "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model 'echo'. "
                "Expected 4, got 8",
            ),
        ),
    ],
)
async def test_inputs_in_shared_memory_that_are_wrong(
    region: Any, parameters: dict[str, Any], expected: tuple[str, str]
) -> None:
    service = SmallService(EchoModel())
    service.shared_memory.register("data", KEY, 0, 64)
    request = service_pb2.ModelInferRequest(model_name="echo")
    set_parameters(add_input(request, "INT32", [1]).parameters, parameters)
    async with serving(service) as running:
        assert await failure(running.stub.ModelInfer(request)) == expected


async def test_outputs_in_shared_memory_that_are_wrong(region: Any) -> None:
    service = SmallService(EchoModel())
    service.shared_memory.register("data", KEY, 0, 64)
    place = {"shared_memory_region": "data", "shared_memory_byte_size": 4}

    def asking(**parameters: Any) -> Any:
        request = infer_request("echo", 1, 2, outputs=["OUTPUT0"])
        set_parameters(request.outputs[0].parameters, {**place, **parameters})
        return request

    async with serving(service) as running:
        infer = running.stub.ModelInfer
        assert await failure(infer(asking())) == (
            "INTERNAL",
            "shared memory size specified with the request for output 'OUTPUT0' (4 bytes) should be at least 8 bytes "
            "to hold the results",
        )
        assert (await failure(infer(asking(shared_memory_offset=64))))[1] == (
            "Invalid offset for shared memory region: 'data'"
        )
        assert (await failure(infer(asking(classification=1))))[1] == (
            "output can't set both 'shared_memory_region' and 'classification'"
        )
        both = infer_request("echo", 1)
        del both.raw_input_contents[:]
        set_parameters(both.inputs[0].parameters, place)
        both.inputs[0].contents.int_contents.append(1)
        assert (await failure(infer(both)))[1] == (
            "unexpected 'content' provided when using shared memory for input tensor 'INPUT0' for model 'echo'"
        )


async def test_long_tensors_in_shared_memory() -> None:
    """Copies that take long are made on a thread, with the same result."""
    size = 4 << 20
    made = shared_memory.create_shared_memory_region("long", f"{KEY}_long", 2 * size)
    try:
        values = np.arange(size // 4, dtype=np.int32)
        shared_memory.set_shared_memory_region(made, [values])
        async with (
            serving(SmallService(EchoModel())) as running,
            triton_aio.InferenceServerClient(running.target) as client,
        ):
            await client.register_system_shared_memory("long", f"{KEY}_long", 2 * size)
            given, wanted = (
                triton_aio.InferInput("INPUT0", values.shape, "INT32"),
                triton_aio.InferRequestedOutput("OUTPUT0"),
            )
            given.set_shared_memory("long", size)
            wanted.set_shared_memory("long", size, size)
            await client.infer("echo", [given], outputs=[wanted])
        assert shared_memory.get_contents_as_numpy(made, np.int32, [size // 4], size).tolist() == values.tolist()
    finally:
        shared_memory.destroy_shared_memory_region(made)
