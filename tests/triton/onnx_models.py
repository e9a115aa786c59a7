"""Small ONNX models, made when a test runs."""

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8
VOCABULARY = 30522
WIDTH = 8


def write_scale(folder: Path) -> Path:
    """Y = 2 X + 1 over FP32 [rows, 4], without a configuration."""
    two, one = (numpy_helper.from_array(np.array(value, np.float32), str(value)) for value in (2, 1))
    nodes = [helper.make_node("Mul", ["X", "2"], ["twice"]), helper.make_node("Add", ["twice", "1"], ["Y"])]
    shape = ["rows", 4]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "XY")
    return _save(helper.make_graph(nodes, "scale", [x], [y], [two, one]), folder)


def write_text_classifier(folder: Path, *, is_masked: bool = True) -> Path:
    """`logits` FP32 [rows, 2]: the mean embedding of the `input_ids`, times a matrix.

    It has an `attention_mask` where `is_masked`, and without one answers as if all were unmasked. Both are INT64.
    """
    random = np.random.default_rng(3)

    def weights(name: str, *shape: int) -> onnx.TensorProto:
        values: NDArray[np.float32] = random.normal(size=shape).astype(np.float32)
        return numpy_helper.from_array(values, name)

    last = numpy_helper.from_array(np.array([-1], np.int64), "last")
    summed = numpy_helper.from_array(np.array([1], np.int64), "summed")
    nodes = [
        *([] if is_masked else _ones_like_ids()),
        helper.make_node("Gather", ["embeddings", "input_ids"], ["embedded"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["mask_column"]),
        helper.make_node("Mul", ["embedded", "mask_column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "summed"], ["total"], keepdims=0),
        helper.make_node("ReduceSum", ["mask", "summed"], ["count"], keepdims=1),
        helper.make_node("Div", ["total", "count"], ["mean"]),
        helper.make_node("MatMul", ["mean", "classes"], ["logits"]),
    ]
    shape = ["rows", "tokens"]
    names = ["input_ids", "attention_mask"] if is_masked else ["input_ids"]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in names]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", 2])
    constants = [weights("embeddings", VOCABULARY, WIDTH), weights("classes", WIDTH, 2), last, summed]
    return _save(helper.make_graph(nodes, "text_classifier", inputs, [logits], constants), folder)


def _ones_like_ids() -> list[onnx.NodeProto]:
    one = numpy_helper.from_array(np.array([1], np.int64), "one")
    return [
        helper.make_node("Shape", ["input_ids"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["attention_mask"], value=one),
    ]


def _save(graph: onnx.GraphProto, folder: Path) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    path = folder / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    onnx.save(model, path)
    return path
