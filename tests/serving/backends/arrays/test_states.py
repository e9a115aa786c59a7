"""States of sequences that pass from one request to the next."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from openvino import opset13 as ops

from sluice.errors import SluiceError
from sluice.serving.model import Model, infer_one
from sluice.serving.request import SequenceFlag
from tests.serving.backends.builders import request
from tests.serving.backends.onnxruntime import parts as onnx_parts
from tests.serving.backends.openvino import parts as openvino_parts
from tests.waiting import PATIENCE_S


def accumulating(state_type: str = "TYPE_FP32") -> str:
    return f"""max_batch_size: 4
        input {{ name: "x" data_type: TYPE_FP32 dims: [1] }} output {{ name: "y" data_type: TYPE_FP32 dims: [1] }}
        sequence_batching {{ oldest {{ max_candidate_sequences: 4 }} state {{
            input_name: "before" output_name: "after" data_type: {state_type} dims: [1]
        }} }}"""


async def load_onnx(folder: Path, text: str) -> Model:
    nodes = [helper.make_node("Add", ["x", "before"], ["after"]), helper.make_node("Neg", ["after"], ["y"])]
    inputs = [onnx_parts.value("x", ["n", 1]), onnx_parts.value("before", ["n", 1])]
    outputs = [onnx_parts.value("y", ["n", 1]), onnx_parts.value("after", ["n", 1])]
    return await onnx_parts.load(folder, onnx_parts.graph(nodes, inputs, outputs), text)


async def load_openvino(folder: Path, text: str) -> Model:
    x, before = openvino_parts.parameter("x", [-1, 1]), openvino_parts.parameter("before", [-1, 1])
    after = ops.add(x, before)
    model = openvino_parts.model_of(
        [x, before], y=ops.negative(after), after=ops.add(after, ops.constant(np.float32(0)))
    )
    return await openvino_parts.load(folder, model, text)


LOADS = pytest.mark.parametrize("load", [load_onnx, load_openvino])
Load = Callable[[Path, str], Awaitable[Model]]


@LOADS
async def test_each_sequence_goes_on_from_its_own_state(tmp_path: Path, loaded: list[Model], load: Load) -> None:
    loaded.append(model := await load(tmp_path, accumulating()))

    async def total(sequence: int) -> list[float]:
        """Run a sequence that adds its number three times, and asks for `y` alone in the end."""
        totals: list[float] = []
        for flags in (SequenceFlag.START, SequenceFlag.NONE, SequenceFlag.END):
            asked = request(("y",) if totals else (), x=np.array([[sequence]], np.float32))
            asked.correlation_id, asked.sequence = sequence, flags
            (tensor,) = (await infer_one(model, asked)).outputs
            totals.append(float(tensor.array.item()))
        return totals

    async with asyncio.timeout(PATIENCE_S):
        totals = await asyncio.gather(*(total(sequence) for sequence in range(1, 9)))
    assert totals == [[-number, -2 * number, -3 * number] for number in range(1, 9)]


@LOADS
async def test_a_state_s_type_is_the_model_s(tmp_path: Path, load: Load) -> None:
    with pytest.raises(
        SluiceError, match="configuration expects datatype TYPE_INT64 for input 'before', model provides"
    ):
        await load(tmp_path, accumulating("TYPE_INT64"))


@LOADS
async def test_a_state_that_the_model_lacks_is_named(tmp_path: Path, load: Load) -> None:
    with pytest.raises(SluiceError, match="unexpected inference output 'q', allowed outputs are: after, y"):
        await load(tmp_path, accumulating().replace('"after"', '"q"'))
