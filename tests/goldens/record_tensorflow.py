# mypy: disable-error-code="untyped-decorator"
"""Makes the TensorFlow models of the tests, and records TensorFlow's outputs for them.

    python -m venv tf && tf/bin/pip install tensorflow-cpu==2.21.0
    tf/bin/python tests/goldens/record_tensorflow.py

Each model is a folder under tests/data/tensorflow, as in a version's folder. `answers.npz` beside it has the inputs and
outputs of one run of each signature: arrays `SIGNATURE/in/NAME` and `SIGNATURE/out/NAME`.
"""

from typing import Any

import numpy as np
import tensorflow as tf  # type: ignore[import-untyped]

from tests import paths

ROOT = paths.DATA / "tensorflow"
Signatures = dict[str, Any]
Answers = dict[str, Any]


def dense(generator: np.random.Generator) -> tuple[tf.Module, Signatures]:
    """Make two layers with variables, whose outputs have other names than their operations."""
    module = tf.Module()
    module.w = tf.Variable(generator.standard_normal((8, 16)).astype(np.float32))
    module.b = tf.Variable(generator.standard_normal(16).astype(np.float32))
    module.v = tf.Variable(generator.standard_normal((16, 4)).astype(np.float32))

    @tf.function(input_signature=[tf.TensorSpec([None, 8], tf.float32, "features")])
    def serve(features: Any) -> dict[str, Any]:
        hidden = tf.nn.relu(features @ module.w + module.b)
        scores = tf.nn.softmax(hidden @ module.v)
        return {"scores": scores, "best": tf.argmax(scores, axis=-1)}

    @tf.function(input_signature=[tf.TensorSpec([None, 8], tf.float32, "features")])
    def hidden_layer(features: Any) -> dict[str, Any]:
        return {"hidden": tf.nn.relu(features @ module.w + module.b)}

    return module, {"serving_default": serve, "hidden_layer": hidden_layer}


def swapped(_: np.random.Generator) -> tuple[tf.Module, Signatures]:
    """Make inputs and outputs whose names sort in another order than they are given; one input is passed through."""

    @tf.function(
        input_signature=[tf.TensorSpec([None, 3], tf.float32, "zeta"), tf.TensorSpec([None, 3], tf.float32, "alpha")]
    )
    def serve(zeta: Any, alpha: Any) -> dict[str, Any]:
        return {"b_difference": zeta - alpha, "a_sum": zeta + alpha, "same": tf.identity(alpha)}

    return tf.Module(), {"serving_default": serve}


def loop(_: np.random.Generator) -> tuple[tf.Module, Signatures]:
    """Make a model with control flow, a scalar, and an input that nothing reads."""

    @tf.function(
        input_signature=[
            tf.TensorSpec([2], tf.float32, "start"),
            tf.TensorSpec([], tf.int32, "count"),
            tf.TensorSpec([2], tf.float32, "unread"),
        ]
    )
    def serve(start: Any, count: Any, unread: Any) -> dict[str, Any]:
        _, total = tf.while_loop(
            lambda index, _: index < count, lambda index, value: (index + 1, value * 2), (0, start)
        )
        return {"total": total}

    return tf.Module(), {"serving_default": serve}


def jpeg(_: np.random.Generator) -> tuple[tf.Module, Signatures]:
    """Make a model with an operation that OpenVINO does not have."""

    @tf.function(input_signature=[tf.TensorSpec([], tf.string, "image")])
    def serve(image: Any) -> dict[str, Any]:
        return {"pixels": tf.io.decode_jpeg(image)}

    return tf.Module(), {"serving_default": serve}


def example_of(spec: tf.TensorSpec, generator: np.random.Generator) -> np.ndarray:
    shape = [2 if size is None else size for size in spec.shape]
    if spec.dtype == tf.int32:
        return np.array(3, np.int32)
    return generator.standard_normal(shape).astype(spec.dtype.as_numpy_dtype)


def record_saved_model(name: str, make: Any) -> None:
    generator = np.random.default_rng(0)
    module, signatures = make(generator)
    folder = ROOT / name
    tf.saved_model.save(module, str(folder / "model.savedmodel"), signatures)
    (folder / "model.savedmodel" / "fingerprint.pb").unlink(missing_ok=True)
    if name == "jpeg":
        return
    loaded = tf.saved_model.load(str(folder / "model.savedmodel"))
    answers: Answers = {}
    for key in signatures:
        function = loaded.signatures[key]
        inputs = {spec.name: example_of(spec, generator) for spec in function.structured_input_signature[1].values()}
        outputs = function(**{each: tf.constant(value) for each, value in inputs.items()})
        answers |= {f"{key}/in/{each}": value for each, value in inputs.items()}
        answers |= {f"{key}/out/{each}": value.numpy() for each, value in outputs.items()}
    np.savez_compressed(folder / "answers.npz", **answers)


def record_graph_def() -> None:
    """Record a frozen `model.graphdef`, with an operation after its outputs that is not needed."""
    folder = ROOT / "graphdef"
    folder.mkdir(parents=True, exist_ok=True)
    v1 = tf.compat.v1
    graph = v1.Graph()
    with graph.as_default():
        a = v1.placeholder(tf.float32, [None, 4], "INPUT0")
        b = v1.placeholder(tf.float32, [None, 4], "INPUT1")
        total = tf.add(a, b, "OUTPUT0")
        difference = tf.subtract(a, b, "OUTPUT1")
        tf.multiply(total, difference, "product")
        (folder / "model.graphdef").write_bytes(graph.as_graph_def().SerializeToString())
        inputs = {"INPUT0": np.arange(8, dtype=np.float32).reshape(2, 4), "INPUT1": np.ones((2, 4), np.float32)}
        with v1.Session() as session:
            outputs = session.run(["OUTPUT0:0", "OUTPUT1:0"], {f"{each}:0": value for each, value in inputs.items()})
    answers: Answers = {f"/in/{each}": value for each, value in inputs.items()}
    answers |= {f"/out/OUTPUT{index}": value for index, value in enumerate(outputs)}
    np.savez_compressed(folder / "answers.npz", **answers)


if __name__ == "__main__":
    for each in (dense, swapped, loop, jpeg):
        record_saved_model(each.__name__, each)
    record_graph_def()
