"""Writes the models that both servers are measured with, as Triton model repositories."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WIDTH = 16
TOKENS = 128
"""Number of responses to one request to the decoupled model."""
MAX_BATCH_SIZE = 64

_IDENTITY = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
            )
            for request in requests
        ]
"""
_IDENTITY_CONFIG = f"""\
name: "identity"
backend: "python"
max_batch_size: {MAX_BATCH_SIZE}
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
dynamic_batching {{ }}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
"""
_REPEAT = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "count").as_numpy()[0])
            for _ in range(count):
                word = pb_utils.Tensor("text_output", np.array([b"token"], dtype=np.object_))
                sender.send(pb_utils.InferenceResponse([word]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_REPEAT_CONFIG = """\
name: "repeat"
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "count" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
_DENSE_CONFIG = """\
name: "{name}"
backend: "{backend}"
max_batch_size: {rows}
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {width} ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ {width} ] }} ]
{batching}
"""
_NUMPY_DENSE = """\
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        folder = os.path.join(args["model_repository"], args["model_version"])
        self.weights = list(np.load(os.path.join(folder, "weights.npy")))

    def execute(self, requests):
        rows = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        values = np.concatenate(rows)
        for weight in self.weights:
            values = np.maximum(values @ weight, 0)
        ends = np.cumsum([len(each) for each in rows])[:-1]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", part)]) for part in np.split(values, ends)]
"""
DENSE_WIDTH = 256
_DENSE_LAYERS = 4


def write_python_models(folder: Path) -> None:
    """Write `identity`, which returns its input, and `repeat`, which sends `count` responses."""
    _write(folder / "identity", _IDENTITY_CONFIG, _IDENTITY)
    _write(folder / "repeat", _REPEAT_CONFIG, _REPEAT)


def write_large_model(folder: Path) -> None:
    """Write `large`, which returns its input of any width."""
    config = _IDENTITY_CONFIG.replace('"identity"', '"large"').replace(f"[ {WIDTH} ]", "[ -1 ]")
    _write(folder / "large", config.replace("dynamic_batching { }\n", ""), _IDENTITY)


def write_onnx_models(folder: Path) -> None:
    """Write the same small network with dynamic batching (`dense_batched`) and without (`dense_single`)."""
    for model in _write_dense(folder, "onnxruntime"):
        (model / "model.onnx").write_bytes(_dense_network())


def write_numpy_models(folder: Path) -> None:
    """Write the same models in numpy: tritonserver's wheel has the Python backend alone."""
    import numpy as np

    for model in _write_dense(folder, "python"):
        (model / "model.py").write_text(_NUMPY_DENSE)
        np.save(model / "weights.npy", np.stack(_dense_weights()))


def _write_dense(folder: Path, backend: str) -> Iterator[Path]:
    """Write the configurations of both models. Yields the folders for their files."""
    for name, batching in (("dense_batched", "dynamic_batching { }"), ("dense_single", "")):
        values = {"backend": backend, "rows": MAX_BATCH_SIZE, "width": DENSE_WIDTH, "batching": batching}
        (folder / name / "1").mkdir(parents=True, exist_ok=True)
        (folder / name / "config.pbtxt").write_text(_DENSE_CONFIG.format(name=name, **values))
        yield folder / name / "1"


def _write(model: Path, config: str, code: str) -> None:
    (model / "1").mkdir(parents=True, exist_ok=True)
    (model / "config.pbtxt").write_text(config)
    (model / "1" / "model.py").write_text(code)


def _dense_weights() -> "list[NDArray[np.float32]]":
    import numpy as np

    random = np.random.default_rng(0)
    shape = (DENSE_WIDTH, DENSE_WIDTH)
    return [
        (random.standard_normal(shape, np.float32) / DENSE_WIDTH**0.5).astype(np.float32) for _ in range(_DENSE_LAYERS)
    ]


def _dense_network() -> bytes:
    """Make layers of matrix product and ReLU over rows of `DENSE_WIDTH`, with fixed weights."""
    from onnx import TensorProto, helper, numpy_helper

    nodes, weights, last = [], [], "x"
    for layer, weight in enumerate(_dense_weights()):
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        following = "y" if layer == _DENSE_LAYERS - 1 else f"h{layer}"
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"p{layer}"]))
        nodes.append(helper.make_node("Relu", [f"p{layer}"], [following]))
        last = following
    rows = ["batch", DENSE_WIDTH]
    graph = helper.make_graph(
        nodes,
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, rows)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, rows)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())
