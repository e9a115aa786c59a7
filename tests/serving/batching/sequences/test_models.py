"""Sequences of real models: ONNX models whose state the batcher keeps, Python models that keep one or are given it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.model import Model, infer_one
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from sluice.serving.request import InferRequest, SequenceFlag
from sluice.serving.tensors.tensor import Tensor
from tests.serving.backends.builders import infer_stream
from tests.serving.backends.onnxruntime import parts as onnx_parts
from tests.serving.backends.python import parts as python_parts
from tests.serving.batching.sequences.parts import END, NONE, START

pytestmark = pytest.mark.slow

STRATEGIES = ["direct { }", "oldest { max_candidate_sequences: 16 }"]

ONNX_CONFIG = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
sequence_batching {
  %s
  control_input { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  state { input_name: "sum_in" output_name: "sum_out" data_type: TYPE_FP32 dims: [ 2 ] }
  state { input_name: "count_in" output_name: "count_out" data_type: TYPE_INT64 dims: [ 1 ] }
}
"""
PYTHON_CONFIG = """
max_batch_size: 8
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
sequence_batching {
  %s
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
}
"""
PRELUDE = (
    python_parts.PRELUDE
    + """
def number(request, name):
    return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().item())

def tensor(name, value):
    return pb_utils.Tensor(name, np.array([[value]], np.int32))

def answer(value, *more):
    return pb_utils.InferenceResponse([tensor("Y", value), *more])
"""
)
SUMS_BY_ID = """
class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [answer(self.add(each)) for each in requests]

    def add(self, request):
        if not number(request, "READY"):
            return 0
        if number(request, "X") == -1:
            os._exit(3)
        key = number(request, "ID")
        before = 0 if number(request, "START") else self.sums[key]
        self.sums[key] = before + number(request, "X")
        return self.sums.pop(key) if number(request, "END") else self.sums[key]
"""
SUMS_BY_ROW = """
class TritonPythonModel:
    def initialize(self, args):
        self.sums = [0] * 8

    def execute(self, requests):
        for row, request in enumerate(requests):
            if number(request, "READY"):
                self.sums[row] = number(request, "X") + (0 if number(request, "START") else self.sums[row])
        return [answer(self.sums[row]) for row, _ in enumerate(requests)]
"""
SUMS_OF_STATES = """
class TritonPythonModel:
    def execute(self, requests):
        sums = [number(each, "X") + number(each, "S") for each in requests]
        return [answer(each, tensor("T", each)) for each in sums]
"""
COUNTS_DOWN = """
class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            key, sender = request.correlation_id(), request.get_response_sender()
            if not number(request, "READY"):
                sender.send(flags=FINAL)
                continue
            assert key == number(request, "ID")
            if number(request, "START"):
                self.left[key] = number(request, "X")
            sender.send(answer(self.left[key]))
            self.left[key] -= 1
            if self.left[key]:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                sender.send(flags=FINAL)
"""


def running_sums() -> onnx.ModelProto:
    """y and sum_out are x + sum_in, and count_out is one more than count_in; start is there and changes nothing."""
    value = onnx_parts.value
    nodes = [
        helper.make_node("Add", ["x", "sum_in"], ["sum_out"]),
        helper.make_node("Mul", ["start", "zero"], ["nothing"]),
        helper.make_node("Add", ["sum_out", "nothing"], ["y"]),
        helper.make_node("Add", ["count_in", "one"], ["count_out"]),
    ]
    inputs = [value("x", ["n", 2]), value("start", ["n", 1]), value("sum_in", ["n", 2])]
    inputs.append(value("count_in", ["n", 1], onnx_parts.INT64))
    outputs = [value("y", ["n", 2]), value("sum_out", ["n", 2]), value("count_out", ["n", 1], onnx_parts.INT64)]
    constants = [
        helper.make_tensor("zero", onnx_parts.FLOAT, [1], [0.0]),
        helper.make_tensor("one", onnx_parts.INT64, [1], [1]),
    ]
    return onnx_parts.graph(nodes, inputs, outputs, constants)


@asynccontextmanager
async def onnx_model(folder: Path, text: str) -> AsyncIterator[Model]:
    model = await onnx_parts.load(folder, running_sums(), text)
    try:
        yield model
    finally:
        await model.close()


@asynccontextmanager
async def python_model(folder: Path, code: str, text: str) -> AsyncIterator[Model]:
    async with python_parts.loaded(python_parts.write_model(folder / "sums", code, text, PRELUDE)) as model:
        yield model


async def ask_onnx(model: Model, of: int, flags: SequenceFlag, value: float, *outputs: str) -> dict[str, list[float]]:
    x = Tensor.of("x", np.full((1, 2), value, np.float32))
    response = await infer_one(
        model, InferRequest({"x": x}, correlation_id=of, sequence=flags, requested_outputs=outputs)
    )
    return {tensor.name: tensor.array[0].tolist() for tensor in response.outputs}


async def ask_python(model: Model, of: int, flags: SequenceFlag = NONE, value: int = 1) -> int:
    x = Tensor.of("X", np.array([[value]], np.int32))
    response = await infer_one(model, InferRequest({"X": x}, correlation_id=of, sequence=flags))
    (output,) = response.outputs
    return int(output.array.item())


def flags_of(index: int, length: int) -> SequenceFlag:
    return (START if index == 0 else NONE) | (END if index == length - 1 else NONE)


async def sum_up(model: Model, of: int, length: int) -> None:
    """One sequence of a Python model, each answer checked."""
    expected = 0
    for index in range(length):
        expected += of + index
        assert await ask_python(model, of, flags_of(index, length), of + index) == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_states_of_an_onnx_model(tmp_path: Path, strategy: str) -> None:
    async def sequence(of: int, length: int) -> None:
        for index in range(length):
            answer = await ask_onnx(model, of, flags_of(index, length), float(of))
            assert answer == {"y": [of * (index + 1.0)] * 2}

    async with onnx_model(tmp_path, ONNX_CONFIG % strategy) as model:
        await asyncio.gather(*(sequence(of, 3 + of % 5) for of in range(1, 31)))
        rows = model.statistics.batches
        assert max(rows) > 1
        assert model.statistics.infer.success.count == sum(3 + of % 5 for of in range(1, 31))


async def test_an_onnx_state_that_is_an_output_of_the_model_too(tmp_path: Path) -> None:
    declared = 'output { name: "count_out" data_type: TYPE_INT64 dims: [ 1 ] }'
    async with onnx_model(tmp_path, ONNX_CONFIG % STRATEGIES[1] + declared) as model:
        assert await ask_onnx(model, 1, START, 1.0) == {"y": [1.0, 1.0], "count_out": [1]}
        assert await ask_onnx(model, 1, NONE, 1.0, "y") == {"y": [2.0, 2.0]}
        assert await ask_onnx(model, 1, NONE, 1.0, "count_out") == {"count_out": [3]}


async def test_a_repository_says_which_initial_state_is_missing_and_serves_it_once_it_is_there(tmp_path: Path) -> None:
    initial = 'initial_state { name: "i" data_type: TYPE_FP32 dims: [ 2 ] data_file: "sums" }'
    text = (ONNX_CONFIG % STRATEGIES[0]).replace(
        "TYPE_FP32 dims: [ 2 ] }\n  state", f"TYPE_FP32 dims: [ 2 ] {initial} }}\n  state"
    )
    folder = tmp_path / "m"
    folder.mkdir()
    onnx_parts.put(folder, running_sums())
    (folder / "config.pbtxt").write_text(text)
    repository = ModelRepository([tmp_path], ControlMode.EXPLICIT, lambda _: onnx_parts.context())
    await repository.start()
    try:
        path = folder / "initial_state" / "sums"
        with pytest.raises(SluiceError, match=f"failed to open text file for read {path}: No such file"):
            await repository.load("m")
        path.parent.mkdir()
        path.write_bytes(np.array([10, 20], np.float32).tobytes())
        await repository.load("m")
        model = repository.find("m")
        assert await ask_onnx(model, 1, START, 1.0) == {"y": [11.0, 21.0]}
        assert await ask_onnx(model, 1, END, 1.0) == {"y": [12.0, 22.0]}
    finally:
        await repository.close()


async def test_a_python_model_that_keeps_sums_by_id(tmp_path: Path) -> None:
    async with python_model(tmp_path, SUMS_BY_ID, PYTHON_CONFIG % STRATEGIES[1]) as model:
        await asyncio.gather(*(sum_up(model, of, 2 + of % 4) for of in range(1, 31)))


async def test_a_python_model_that_keeps_sums_by_row(tmp_path: Path) -> None:
    two = PYTHON_CONFIG % STRATEGIES[0] + "instance_group { count: 2 }"
    async with python_model(tmp_path, SUMS_BY_ROW, two) as model:
        await asyncio.gather(*(sum_up(model, of, 2 + of % 7) for of in range(1, 41)))


async def test_states_of_a_python_model(tmp_path: Path) -> None:
    state = 'state { input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: [ 1 ] }'
    async with python_model(tmp_path, SUMS_OF_STATES, PYTHON_CONFIG % f"{STRATEGIES[1]} {state}") as model:
        await asyncio.gather(*(sum_up(model, of, 2 + of % 4) for of in range(1, 31)))


async def test_an_iterative_python_model_streams_between_its_runs(tmp_path: Path) -> None:
    async def count_down(value: int) -> list[int]:
        x = Tensor.of("X", np.array([[value]], np.int32))
        stream = infer_stream(model, InferRequest({"X": x}))
        return [int(each.outputs[0].array.item()) async for each in stream if each.outputs]

    text = PYTHON_CONFIG % f"{STRATEGIES[0]} iterative_sequence: true"
    decoupled = text + "model_transaction_policy { decoupled: true }"
    async with python_model(tmp_path, COUNTS_DOWN, decoupled) as model:
        counted = await asyncio.gather(*(count_down(value) for value in range(1, 11)))
        assert counted == [list(range(value, 0, -1)) for value in range(1, 11)]
        assert model.statistics.execution_count < 55


async def test_a_process_that_dies_takes_its_sequences_with_it(tmp_path: Path) -> None:
    async with python_model(tmp_path, SUMS_BY_ID, PYTHON_CONFIG % STRATEGIES[1]) as model:
        assert await ask_python(model, 1, START, 5) == 5
        assert await ask_python(model, 2, START, 5) == 5
        with pytest.raises(SluiceError, match="not healthy"):
            await ask_python(model, 2, NONE, -1)
        for of in (1, 2):
            with pytest.raises(SluiceError, match=f"the state of sequence {of} of model 'sums' was lost") as caught:
                await ask_python(model, of)
            assert caught.value.code is ErrorCode.UNAVAILABLE
        assert await ask_python(model, 1, START, 7) == 7
        assert await ask_python(model, 1, END, 7) == 14
