"""Writes a text classifier to tune: a Python tokenizer, an ONNX encoder, an ONNX head, and their ensemble.

The encoder is a deep averaging network: the mean of its tokens' embeddings passes through dense layers. A transformer
keeps two cores busy with the tokens of one text, so that batching gains it little on a CPU. Here one text reads all
weights for a single row.
"""

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

PIPELINE, TOKENIZER, ENCODER, HEAD = "classification-pipeline", "tokenizer", "encoder", "classifier-head"
NUM_TOKENS = 64
MAX_BATCH_SIZE = 64
TEXT = "The delivery came a week late and half of the parts were missing from the box."
_VOCABULARY = 4096
_WIDTHS = (512, 3072, 3072, 3072, 512)
"""Widths of the layers: 22 million weights, as many as MiniLM, a common sentence encoder, has."""
_NUM_CLASSES = 10
_TOKENIZER_FILE = Path(__file__).parents[2] / "models" / "rill" / "1" / "tokenizer.json"

_TOKENIZER = """\
import os

import numpy as np
import tokenizers
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        folder = os.path.join(args["model_repository"], args["model_version"])
        self.tokenizer = tokenizers.Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        self.tokenizer.enable_truncation(LENGTH)
        self.tokenizer.enable_padding(length=LENGTH)

    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().ravel()
            encoded = self.tokenizer.encode_batch([text.decode() for text in texts])
            ids = np.array([each.ids for each in encoded], np.int64)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("input_ids", ids)]))
        return responses
"""


def write_pipeline(folder: Path, tokenizer: str = "", encoder: str = "") -> None:
    """Write the models as a repository. `tokenizer` and `encoder` are text to add to their configurations."""
    shutil.rmtree(folder, ignore_errors=True)
    ids = f'name: "input_ids" data_type: TYPE_INT64 dims: [ {NUM_TOKENS} ]'
    text = 'name: "text" data_type: TYPE_STRING dims: [ 1 ]'
    vector = f"data_type: TYPE_FP32 dims: [ {_WIDTHS[-1]} ]"
    classes = f"data_type: TYPE_FP32 dims: [ {_NUM_CLASSES} ]"
    _write(folder, TOKENIZER, "python", text, ids, tokenizer)
    _write(folder, ENCODER, "onnxruntime", ids, f'name: "embeddings" {vector}', encoder)
    _write(folder, HEAD, "onnxruntime", f'name: "embeddings" {vector}', f'name: "logits" {classes}', "")
    _write(folder, PIPELINE, "", text, f'name: "logits" {classes}', _steps())
    (folder / TOKENIZER / "1" / "model.py").write_text(_TOKENIZER.replace("LENGTH", str(NUM_TOKENS)))
    shutil.copy(_TOKENIZER_FILE, folder / TOKENIZER / "1")
    (folder / ENCODER / "1" / "model.onnx").write_bytes(_encoder().SerializeToString())
    (folder / HEAD / "1" / "model.onnx").write_bytes(_head().SerializeToString())


def _write(folder: Path, name: str, backend: str, taken: str, given: str, more: str) -> None:
    (folder / name / "1").mkdir(parents=True)
    kind = f'backend: "{backend}"' if backend else 'platform: "ensemble"'
    lines = (f'name: "{name}"', kind, f"max_batch_size: {MAX_BATCH_SIZE}", f"input [ {{ {taken} }} ]")
    (folder / name / "config.pbtxt").write_text("\n".join((*lines, f"output [ {{ {given} }} ]", more)) + "\n")


def _steps() -> str:
    def step(model: str, taken: tuple[str, str], given: tuple[str, str]) -> str:
        into = f'input_map {{ key: "{taken[0]}" value: "{taken[1]}" }}'
        out_of = f'output_map {{ key: "{given[0]}" value: "{given[1]}" }}'
        return f'{{ model_name: "{model}" model_version: -1 {into} {out_of} }}'

    steps = (
        step(TOKENIZER, ("text", "text"), ("input_ids", "ids")),
        step(ENCODER, ("input_ids", "ids"), ("embeddings", "vectors")),
        step(HEAD, ("embeddings", "vectors"), ("logits", "logits")),
    )
    return f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}"


def _encoder() -> ModelProto:
    """Make the graph from INT64 [rows, NUM_TOKENS] to FP32 [rows, 512]. The mean leaves out token 0, the padding."""
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["as_numbers"], to=TensorProto.FLOAT),
        helper.make_node("Sign", ["as_numbers"], ["mask"]),
        helper.make_node("ReduceSum", ["mask", "tokens_axis"], ["count"], keepdims=1),
        helper.make_node("Gather", ["table", "input_ids"], ["embedded"]),
        helper.make_node("Unsqueeze", ["mask", "last_axis"], ["mask_column"]),
        helper.make_node("Mul", ["embedded", "mask_column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "tokens_axis"], ["total"], keepdims=0),
        helper.make_node("Div", ["total", "count"], ["h0"]),
    ]
    constants = [
        _weights("table", _VOCABULARY, _WIDTHS[0]),
        numpy_helper.from_array(np.array([1], np.int64), "tokens_axis"),
        numpy_helper.from_array(np.array([-1], np.int64), "last_axis"),
    ]
    for layer, (width, next_width) in enumerate(pairwise(_WIDTHS)):
        constants.append(_weights(f"w{layer}", width, next_width))
        nodes.append(helper.make_node("MatMul", [f"h{layer}", f"w{layer}"], [f"p{layer}"]))
        is_last = layer == len(_WIDTHS) - 2
        nodes.append(helper.make_node("Tanh", [f"p{layer}"], ["embeddings" if is_last else f"h{layer + 1}"]))
    return _model(nodes, ("input_ids", TensorProto.INT64, NUM_TOKENS), ("embeddings", _WIDTHS[-1]), constants)


def _head() -> ModelProto:
    nodes = [helper.make_node("MatMul", ["embeddings", "w"], ["logits"])]
    weights = [_weights("w", _WIDTHS[-1], _NUM_CLASSES)]
    return _model(nodes, ("embeddings", TensorProto.FLOAT, _WIDTHS[-1]), ("logits", _NUM_CLASSES), weights)


def _weights(name: str, rows: int, columns: int) -> TensorProto:
    values: NDArray[np.float32] = np.random.default_rng(rows + columns).standard_normal((rows, columns), np.float32)
    return numpy_helper.from_array(values / np.float32(rows**0.5), name)


def _model(
    nodes: list[NodeProto], taken: tuple[str, int, int], given: tuple[str, int], constants: list[TensorProto]
) -> ModelProto:
    name, kind, width = taken
    inputs = [helper.make_tensor_value_info(name, kind, ["rows", width])]
    outputs = [helper.make_tensor_value_info(given[0], TensorProto.FLOAT, ["rows", given[1]])]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
