"""Writes the models that both servers are measured with, as Triton model repositories."""

from pathlib import Path

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
backend: "onnxruntime"
max_batch_size: {rows}
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {width} ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ {width} ] }} ]
{batching}
"""
DENSE_WIDTH = 256
_DENSE_LAYERS = 4


def write_python_models(folder: Path) -> None:
    """Write `identity`, which returns its input, and `repeat`, which sends `count` responses."""
    _write(folder / "identity", _IDENTITY_CONFIG, _IDENTITY)
    _write(folder / "repeat", _REPEAT_CONFIG, _REPEAT)


def write_onnx_models(folder: Path) -> None:
    """Write the same small network with dynamic batching (`dense_batched`) and without (`dense_single`)."""
    for name, batching in (("dense_batched", "dynamic_batching { }"), ("dense_single", "")):
        config = _DENSE_CONFIG.format(name=name, rows=MAX_BATCH_SIZE, width=DENSE_WIDTH, batching=batching)
        model = folder / name
        (model / "1").mkdir(parents=True, exist_ok=True)
        (model / "config.pbtxt").write_text(config)
        (model / "1" / "model.onnx").write_bytes(_dense_network())


def _write(model: Path, config: str, code: str) -> None:
    (model / "1").mkdir(parents=True, exist_ok=True)
    (model / "config.pbtxt").write_text(config)
    (model / "1" / "model.py").write_text(code)


def _dense_network() -> bytes:
    """Make layers of matrix product and ReLU over rows of `DENSE_WIDTH`, with fixed weights."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for layer in range(_DENSE_LAYERS):
        weight = random.standard_normal((DENSE_WIDTH, DENSE_WIDTH), np.float32) / DENSE_WIDTH**0.5
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
