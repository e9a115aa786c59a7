"""Real models, small ones, with whatever tensors a configuration asks for."""

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

IDS, NUMBERS = TensorProto.INT64, TensorProto.FLOAT


def write_onnx(path: Path, inputs: Sequence[str], output: str, width: int, *, keeps_length: bool = False) -> None:
    """Takes int64 `[n, s]` inputs; gives float32 `[n, width]`, the mean of their sum, or `[n, s, width]`, the sum."""
    nodes = [helper.make_node("Cast", [name], [f"{name}_number"], to=NUMBERS) for name in inputs]
    nodes.append(helper.make_node("Sum", [f"{name}_number" for name in inputs], ["sum"]))
    if keeps_length:
        nodes.append(helper.make_node("Unsqueeze", ["sum", "last"], ["column"]))
    else:
        nodes.append(helper.make_node("ReduceMean", ["sum", "second"], ["column"], keepdims=1))
    nodes.append(helper.make_node("Concat", ["column"] * width, [output], axis=-1))
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info(name, IDS, ["n", "s"]) for name in inputs],
        [helper.make_tensor_value_info(output, NUMBERS, ["n", "s", width] if keeps_length else ["n", width])],
        [helper.make_tensor("last", IDS, [1], [2]), helper.make_tensor("second", IDS, [1], [1])],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), path)


PYTHON = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "{input}").as_numpy()
            made = {code}
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("{output}", made)]))
        return responses
"""


def write_python(folder: Path, given: tuple[str, str], made: tuple[str, str], code: str, max_batch_size: int) -> None:
    """A model of one input and one output, each a name and a `TYPE [dims]`; `code` makes an array of `given`."""
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(PYTHON.format(input=given[0], output=made[0], code=code))
    (folder / "config.pbtxt").write_text(
        f'backend: "python" max_batch_size: {max_batch_size}\n'
        f"{_tensor('input', *given)}\n{_tensor('output', *made)}\ninstance_group [ {{ kind: KIND_CPU }} ]\n"
    )


def _tensor(side: str, name: str, kind: str) -> str:
    data_type, dims = kind.split(" ", 1)
    return f'{side} [ {{ name: "{name}" data_type: TYPE_{data_type} dims: {dims} }} ]'
