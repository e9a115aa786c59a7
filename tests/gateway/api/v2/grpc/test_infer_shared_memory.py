"""Inputs and outputs of ModelInfer in shared memory, as far as the recorded answers do not show them."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.utils import shared_memory

from tests.gateway.api.v2.grpc.parts import (
    INVALID,
    EchoModel,
    add_input,
    failure,
    infer_request,
    serving,
    set_parameters,
)
from tests.gateway.api.v2.small_service import SmallService

KEY = f"/sluice_grpc_{os.getpid()}"
SIZE = 4 << 20
REGION, OFFSET, BYTES = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
PLACE = {REGION: "data", BYTES: 4}


@pytest.fixture
def region() -> Iterator[Any]:
    """Two halves of SIZE under KEY, made by the stock client's utilities."""
    made = shared_memory.create_shared_memory_region("region", KEY, 2 * SIZE)
    yield made
    shared_memory.destroy_shared_memory_region(made)


@pytest.fixture
def service(region: Any) -> SmallService:
    service = SmallService(EchoModel())
    service.shared_memory.register("data", KEY, 0, 2 * SIZE)
    return service


async def test_long_tensors_in_shared_memory(region: Any, service: SmallService) -> None:
    """Copies that take long are made on a thread, with the same result."""
    values = np.arange(SIZE // 4, dtype=np.int32)
    shared_memory.set_shared_memory_region(region, [values])
    request = service_pb2.ModelInferRequest(model_name="echo")
    set_parameters(add_input(request, "INT32", values.shape).parameters, {REGION: "data", BYTES: SIZE})
    place = {REGION: "data", BYTES: SIZE, OFFSET: SIZE}
    set_parameters(request.outputs.add(name="OUTPUT0").parameters, place)
    async with serving(service) as running:
        assert list((await running.stub.ModelInfer(request)).raw_output_contents) == [b""]
    assert shared_memory.get_contents_as_numpy(region, np.int32, [SIZE // 4], SIZE).tolist() == values.tolist()


WRONG_KIND = "invalid value type for '{}' parameter for tensor 'INPUT0', expected {}."
ALONE = "'{}' can not be specified without 'shared_memory_region' parameter for tensor 'INPUT0'"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({REGION: "data"}, f"'{BYTES}' must be specified along with '{REGION}' parameter for tensor 'INPUT0'"),
        ({BYTES: 4}, ALONE.format(BYTES)),
        ({OFFSET: 4}, ALONE.format(OFFSET)),
        ({REGION: 1, BYTES: 4}, WRONG_KIND.format(REGION, "string_param")),
        ({REGION: "data", BYTES: "4"}, WRONG_KIND.format(BYTES, "int64_param")),
    ],
)
async def test_inputs_in_shared_memory_that_are_wrong(
    service: SmallService, parameters: dict[str, Any], message: str
) -> None:
    request = service_pb2.ModelInferRequest(model_name="echo")
    set_parameters(add_input(request, "INT32", [1]).parameters, parameters)
    async with serving(service) as running:
        assert await failure(running.stub.ModelInfer(request)) == (INVALID, message)


async def test_places_that_are_too_small_or_exclude_something_else(service: SmallService) -> None:
    classified = infer_request("echo", 1, 2, outputs=["OUTPUT0"])
    set_parameters(classified.outputs[0].parameters, PLACE | {"classification": 1})
    both = infer_request("echo", 1)
    del both.raw_input_contents[:]
    set_parameters(both.inputs[0].parameters, PLACE)
    both.inputs[0].contents.int_contents.append(1)
    small = infer_request("echo", 1, 2, outputs=["OUTPUT0"])
    set_parameters(small.outputs[0].parameters, PLACE)
    async with serving(service) as running:
        infer = running.stub.ModelInfer
        code, message = await failure(infer(small))
        assert code == "INTERNAL" and message.endswith("(4 bytes) should be at least 8 bytes to hold the results")
        assert (await failure(infer(classified)))[1] == (
            "output can't set both 'shared_memory_region' and 'classification'"
        )
        assert (await failure(infer(both)))[1] == (
            "unexpected 'content' provided when using shared memory for input tensor 'INPUT0' for model 'echo'"
        )
