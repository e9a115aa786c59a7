"""Ragged inputs, batch inputs and scattered outputs, with ONNX models, as in Triton."""

import asyncio
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.model import Model, infer_one
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Array
from tests.serving.backends.builders import request
from tests.serving.backends.onnxruntime.parts import INT64, STRING, graph, load, value
from tests.waiting import PATIENCE_S

INT32 = TensorProto.INT32
KINDS = {
    "BATCH_ELEMENT_COUNT": [3, 8, 1],
    "BATCH_ACCUMULATED_ELEMENT_COUNT": [3, 11, 12],
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": [0, 3, 11, 12],
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": [0] * 8,
}


def ragged_input(name: str = "x", kind: str = "TYPE_FP32", dims: str = "-1") -> str:
    return f'input {{ name: "{name}" data_type: {kind} dims: [{dims}] allow_ragged_batch: true }}'


def batch_input(kind: str, target: str = "b", data_type: str = "TYPE_INT32", source: str = "x") -> str:
    return f'batch_input {{ kind: {kind} target_name: "{target}" data_type: {data_type} source_input: "{source}" }}'


def output(name: str, dims: str = "-1", kind: str = "TYPE_FP32") -> str:
    return f'output {{ name: "{name}" data_type: {kind} dims: [{dims}] }}'


def seen(kind: int = INT32, rank: int = 1) -> onnx.ModelProto:
    """Return each row of a batch everything that the model saw: `x` and `b`, repeated for each row of `r`."""
    dims = ["k"] * rank
    nodes = [
        helper.make_node("Shape", ["r"], ["shape"]),
        helper.make_node("Slice", ["shape", "zero", "one"], ["rows"]),
    ]
    constants = [helper.make_tensor("zero", INT64, [1], [0]), helper.make_tensor("one", INT64, [1], [1])]
    for name, ones in (("x", [1]), ("b", [1] * rank)):
        constants.append(helper.make_tensor(f"{name}_ones", INT64, [len(ones)], ones))
        nodes += [
            helper.make_node("Concat", ["rows", f"{name}_ones"], [f"{name}_shape"], axis=0),
            helper.make_node("Unsqueeze", [name, "zero"], [f"{name}_row"]),
            helper.make_node("Expand", [f"{name}_row", f"{name}_shape"], [f"{name}_seen"]),
        ]
    inputs = [value("x", ["n"]), value("r", ["m", 1]), value("b", dims, kind)]
    outputs = [value("x_seen", ["m", "n"]), value("b_seen", ["m", *dims], kind)]
    return graph(nodes, inputs, outputs, constants)


def row() -> str:
    return 'input { name: "r" data_type: TYPE_FP32 dims: [1] }'


async def load_seen(folder: Path, rest: str, kind: int = INT32, rank: int = 1) -> Model:
    config_kind = {INT32: "TYPE_INT32", TensorProto.FLOAT: "TYPE_FP32"}[kind]
    text = f"""max_batch_size: 8 dynamic_batching {{}} {row()}
        {output("x_seen")} {output("b_seen", ",".join(["-1"] * rank), config_kind)} {rest}"""
    return await load(folder, seen(kind, rank), text)


async def together(model: Model, *given: InferRequest) -> list[dict[str, Array]]:
    """Return the responses to requests that were run as one batch."""
    async with asyncio.timeout(PATIENCE_S):
        responses = await asyncio.gather(*(infer_one(model, each) for each in given))
    assert model.statistics.execution_count == 1
    return [{tensor.name: tensor.array for tensor in response.outputs} for response in responses]


def ragged(*shape: int, start: int = 0) -> InferRequest:
    x = np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)
    return request(x=x, r=np.zeros((shape[0], 1), np.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data_type", ["TYPE_INT32", "TYPE_FP32"])
async def test_a_batch_of_ragged_requests_is_one_flat_input_and_what_tells_it_apart(
    tmp_path: Path, loaded: list[Model], kind: str, data_type: str
) -> None:
    """Counts are per request, not per row, as in Triton's backends."""
    number = INT32 if data_type == "TYPE_INT32" else TensorProto.FLOAT
    rest = f"{ragged_input()} {batch_input(kind, data_type=data_type)}"
    loaded.append(model := await load_seen(tmp_path, rest, number))
    answers = await together(model, ragged(1, 3), ragged(2, 4, start=3), ragged(1, 1, start=11))
    assert [len(answer["x_seen"]) for answer in answers] == [1, 2, 1]
    for answer in answers:
        assert answer["x_seen"][0].tolist() == list(range(12))
        assert answer["b_seen"][0].tolist() == KINDS[kind]
        assert answer["b_seen"].dtype == (np.int32 if data_type == "TYPE_INT32" else np.float32)


async def test_a_request_alone_is_flat_too(tmp_path: Path, loaded: list[Model]) -> None:
    rest = f"{ragged_input()} {batch_input('BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO')}"
    loaded.append(model := await load_seen(tmp_path, rest))
    (answer,) = await together(model, ragged(2, 3))
    assert answer["x_seen"][1].tolist() == [0, 1, 2, 3, 4, 5]
    assert answer["b_seen"][1].tolist() == [0, 6]


async def test_item_shapes_are_there_once_a_row(tmp_path: Path, loaded: list[Model]) -> None:
    rest = f"{ragged_input(dims='-1, -1')} {batch_input('BATCH_ITEM_SHAPE')}"
    loaded.append(model := await load_seen(tmp_path, rest, rank=2))
    answers = await together(model, ragged(2, 2, 1), ragged(1, 1, 3))
    assert answers[0]["b_seen"][0].tolist() == [[2, 1], [2, 1], [1, 3]]
    assert answers[1]["x_seen"].shape == (1, 7)


async def test_item_shapes_in_a_row(tmp_path: Path, loaded: list[Model]) -> None:
    rest = f"{ragged_input(dims='-1, -1')} {batch_input('BATCH_ITEM_SHAPE_FLATTEN', data_type='TYPE_FP32')}"
    loaded.append(model := await load_seen(tmp_path, rest, TensorProto.FLOAT))
    answers = await together(model, ragged(2, 2, 1), ragged(1, 1, 3))
    assert answers[0]["b_seen"][0].tolist() == [2, 1, 2, 1, 1, 3]


async def test_ragged_strings(tmp_path: Path, loaded: list[Model]) -> None:
    nodes = [
        helper.make_node("Identity", ["x"], ["y"]),
        helper.make_node("Identity", ["b"], ["n"]),
    ]
    model_file = graph(
        nodes,
        [value("x", ["n"], STRING), value("b", ["m"], INT32)],
        [value("y", ["n"], STRING), value("n", ["m"], INT32)],
    )
    text = f"""max_batch_size: 8 dynamic_batching {{}}
        {ragged_input(kind="TYPE_STRING")} {batch_input("BATCH_ELEMENT_COUNT")}
        output {{ name: "n" data_type: TYPE_INT32 dims: [1] reshape {{ shape: [] }} }}
        output {{ name: "y" data_type: TYPE_STRING dims: [-1] }}
        batch_output {{ target_name: "y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" }}"""
    loaded.append(model := await load(tmp_path, model_file, text))
    words = [np.array([[b"a", b"bb"]], object), np.array([["é".encode()]], object)]
    answers = await together(model, *(request(x=each) for each in words))
    assert [answer["y"].tolist() for answer in answers] == [each.tolist() for each in words]
    assert [answer["n"].tolist() for answer in answers] == [[[2]], [[1]]]


def scattered(dims: str = "-1") -> str:
    return f"""max_batch_size: 8 dynamic_batching {{}} {ragged_input(dims=dims)} {output("y", dims)}
        batch_output {{ target_name: "y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" }}"""


def flat() -> onnx.ModelProto:
    return graph([helper.make_node("Neg", ["x"], ["y"])], [value("x", ["n"])], [value("y", ["k"])])


async def test_outputs_are_scattered_in_the_shapes_of_their_inputs(tmp_path: Path, loaded: list[Model]) -> None:
    loaded.append(model := await load(tmp_path, flat(), scattered("-1, 2")))
    rows = [np.full((1, 3, 2), 1, np.float32), np.full((2, 1, 2), 2, np.float32), np.full((1, 0, 2), 3, np.float32)]
    answers = await together(model, *(request(x=each) for each in rows))
    assert [answer["y"].tolist() for answer in answers] == [(-each).tolist() for each in rows]
    assert [answer["y"].shape for answer in answers] == [each.shape for each in rows]


async def test_an_output_that_is_too_short_to_be_scattered_is_an_error(tmp_path: Path, loaded: list[Model]) -> None:
    loaded.append(model := await load(tmp_path, short(), scattered()))
    with pytest.raises(SluiceError, match=r"output 'y' of model 'm' has shape \[1\] for parts in the shapes of"):
        await infer_one(model, request(x=np.ones((1, 4), np.float32)))


def short() -> onnx.ModelProto:
    node = helper.make_node("ReduceMax", ["x"], ["m"], keepdims=1)
    return graph([node, helper.make_node("Neg", ["m"], ["y"])], [value("x", ["n"])], [value("y", ["k"])])


async def refusal(folder: Path, model: onnx.ModelProto, text: str) -> str:
    with pytest.raises(SluiceError) as caught:
        await load(folder, model, text)
    assert caught.value.code is ErrorCode.INVALID
    return caught.value.message


async def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    inputs = f"max_batch_size: 8 {ragged_input()} {output('y')}"
    assert await refusal(tmp_path, flat(), f"{inputs} {batch_input('BATCH_ELEMENT_COUNT')}") == (
        "unable to load model 'm', configuration expects 2 inputs, model provides 1"
    )


async def test_a_ragged_input_has_one_dimension_in_the_model(tmp_path: Path) -> None:
    two = graph([helper.make_node("Neg", ["x"], ["y"])], [value("x", ["n", 2])], [value("y", ["n", 2])])
    assert await refusal(tmp_path, two, f"max_batch_size: 8 {ragged_input(dims='2')} {output('y', '2')}") == (
        "unable to load model 'm', configuration expects model provides input with shape [-1] for ragged input 'x', "
        "model provides [-1,2]"
    )


async def test_the_type_of_a_batch_input_is_the_model_s(tmp_path: Path) -> None:
    rest = f"{ragged_input()} {batch_input('BATCH_ELEMENT_COUNT', data_type='TYPE_FP32')}"
    with pytest.raises(
        SluiceError, match="configuration expects datatype TYPE_FP32 for input 'b', model provides TYPE"
    ):
        await load_seen(tmp_path, rest, INT32)
