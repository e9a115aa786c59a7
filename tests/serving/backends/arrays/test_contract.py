"""What every library of arrays does alike: batches, chosen outputs, runs that nobody wants, instances side by side."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from openvino import opset13 as ops

from sluice.errors import ErrorCode
from sluice.serving.model import Model
from sluice.serving.request import InferResponse
from sluice.serving.tensors.tensor import Array
from tests.serving.backends.builders import check_batching, infer, request
from tests.serving.backends.onnxruntime import parts as onnx_parts
from tests.serving.backends.openvino import parts as openvino_parts
from tests.waiting import PATIENCE_S

Load = Callable[[Path, str], Awaitable[Model]]


@dataclass(frozen=True)
class Library:
    """How a library's models are loaded: one of sums and differences, and one that computes `long` for very long."""

    add_sub: Load
    lasting: Load
    long: Array
    short: Array


async def onnx_add_sub(folder: Path, text: str) -> Model:
    return await onnx_parts.load(folder, onnx_parts.add_sub(), text)


async def onnx_lasting(folder: Path, text: str) -> Model:
    """Load a model that counts up from a positive `x` until it is stopped, and returns any other."""
    value, kinds = onnx_parts.value, TensorProto
    body = helper.make_graph(
        [helper.make_node("Add", ["v", "one"], ["w"]), helper.make_node("Identity", ["c"], ["d"])],
        "body",
        [value("i", [], kinds.INT64), value("c", [], kinds.BOOL), value("v", [1, 1])],
        [value("d", [], kinds.BOOL), value("w", [1, 1])],
    )
    constants = [
        helper.make_tensor("one", kinds.FLOAT, [1, 1], [1]),
        helper.make_tensor("zero", kinds.FLOAT, [1, 1], [0]),
        helper.make_tensor("count", kinds.INT64, [], [2**62]),
    ]
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["goes"]),
        helper.make_node("Squeeze", ["goes"], ["go"]),
        helper.make_node("Loop", ["count", "go", "x"], ["y"], body=body),
    ]
    model = onnx_parts.graph(nodes, [value("x", [1, 1])], [value("y", [1, 1])], constants)
    return await onnx_parts.load(folder, model, text)


async def openvino_add_sub(folder: Path, text: str) -> Model:
    return await openvino_parts.load(folder, openvino_parts.add_sub(), text)


async def openvino_lasting(folder: Path, text: str) -> Model:
    """Load a model that takes many seconds for a large `x`, in many operators."""
    x = node = openvino_parts.parameter("x", [-1, -1])
    for _ in range(200):
        node = ops.matmul(node, x, False, False)
    return await openvino_parts.load(folder, openvino_parts.model_of([x], y=node), f"max_batch_size: 4096 {text}")


SMALL = np.zeros((1, 1), np.float32)
LIBRARIES = {
    "onnxruntime": Library(onnx_add_sub, onnx_lasting, np.ones((1, 1), np.float32), SMALL),
    "openvino": Library(openvino_add_sub, openvino_lasting, np.zeros((3072, 3072), np.float32), SMALL),
}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    return LIBRARIES[request.param]


async def test_requests_that_wait_are_run_as_one_batch(tmp_path: Path, loaded: list[Model], library: Library) -> None:
    loaded.append(model := await library.add_sub(tmp_path, "max_batch_size: 8"))
    await check_batching(model)


async def test_outputs_are_those_asked_for(tmp_path: Path, loaded: list[Model], library: Library) -> None:
    loaded.append(model := await library.add_sub(tmp_path, "max_batch_size: 8"))
    ones, both = np.ones((1, 4), np.float32), ["sum", "difference"]
    asked: list[tuple[str, ...]] = [("sum",), ("difference",), ("difference", "sum"), ()]
    answers = await asyncio.gather(*(infer(model, request(outputs, a=ones, b=ones)) for outputs in asked))
    assert [list(answer) for answer in answers] == [["sum"], ["difference"], both, both]


async def test_a_run_that_nobody_wants_any_more_is_ended(tmp_path: Path, loaded: list[Model], library: Library) -> None:
    loaded.append(model := await library.lasting(tmp_path, ""))
    responses: list[InferResponse] = []
    job = model.submit(request(x=library.long), responses.append)
    job.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await model.wait_idle()
    assert not responses
    assert job.infer_ended_ns == 0
    assert (await infer(model, request(x=library.short)))["y"].tolist() == [[0]]


async def test_closing_ends_what_is_under_way(tmp_path: Path, library: Library) -> None:
    model = await library.lasting(tmp_path, "")
    responses: list[InferResponse] = []
    model.submit(request(x=library.long), responses.append)
    await model.close()
    assert [response.error.code for response in responses if response.error] == [ErrorCode.UNAVAILABLE]


async def test_instances_run_side_by_side(tmp_path: Path, loaded: list[Model], library: Library) -> None:
    """While one instance is busy for long, the other answers."""
    loaded.append(model := await library.lasting(tmp_path, "instance_group { count: 2 kind: KIND_CPU }"))
    busy = model.submit(request(x=library.long), lambda _: None)
    assert (await infer(model, request(x=library.short)))["y"].tolist() == [[0]]
    assert not busy.is_finished
    busy.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await model.wait_idle()
