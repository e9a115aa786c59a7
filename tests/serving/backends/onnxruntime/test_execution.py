"""Results equal onnxruntime's own; types, shapes, errors. What other libraries do alike: ../arrays/test_contract.py."""

import asyncio
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper, numpy_helper

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.arrays.batch import BatchAssembler
from sluice.serving.backends.onnxruntime.session import OnnxSession
from sluice.serving.model import Model
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Array, Tensor
from tests.serving.backends.builders import infer, request
from tests.serving.backends.onnxruntime.parts import INT64, STRING, graph, load, one_op, value


def direct(model: onnx.ModelProto, **inputs: Array) -> list[Array]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    arrays: list[Array] = session.run(None, inputs)
    return arrays


def layers(generator: np.random.Generator) -> onnx.ModelProto:
    """Make two dense layers, enough for results that depend on how they are computed."""
    weights = [
        numpy_helper.from_array(generator.standard_normal(shape).astype(np.float32), name)
        for name, shape in (("w", (16, 64)), ("v", (64, 8)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["s"]),
        helper.make_node("Softmax", ["s"], ["y"]),
    ]
    return graph(nodes, [value("x", ["n", 16])], [value("y", ["n", 8])], weights)


async def test_results_are_the_library_s_bit_for_bit(tmp_path: Path, loaded: list[Model]) -> None:
    generator = np.random.default_rng(0)
    onnx_model = layers(generator)
    loaded.append(model := await load(tmp_path, onnx_model))
    for rows in (1, 4):
        x = generator.standard_normal((rows, 16)).astype(np.float32)
        assert (await infer(model, request(x=x)))["y"].tobytes() == direct(onnx_model, x=x)[0].tobytes()


async def test_requests_of_other_shapes_are_kept_apart(tmp_path: Path, loaded: list[Model]) -> None:
    loaded.append(model := await load(tmp_path, one_op("Neg", ("n", "m")), "max_batch_size: 8"))
    rows = [np.full((1, 1 + index % 3), index, np.float32) for index in range(9)]
    answers = await asyncio.gather(*(infer(model, request(x=row)) for row in rows))
    assert [answer["y"].tolist() for answer in answers] == [(-row).tolist() for row in rows]


TYPES = {
    "BOOL": "BOOL", "UINT8": "UINT8", "UINT16": "UINT16", "UINT32": "UINT32", "UINT64": "UINT64", "INT8": "INT8",
    "INT16": "INT16", "INT32": "INT32", "INT64": "INT64", "FLOAT16": "FP16", "FLOAT": "FP32", "DOUBLE": "FP64",
    "BFLOAT16": "BF16", "STRING": "STRING",
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
async def test_types_have_their_names_and_go_through(tmp_path: Path, loaded: list[Model], kind: str) -> None:
    number = getattr(TensorProto, kind)
    loaded.append(model := await load(tmp_path, one_op("Identity", kind=number), "max_batch_size: 8"))
    assert f"data_type: TYPE_{TYPES[kind]}\n" in text_format.MessageToString(model.config.input[0])
    dtype = ml_dtypes.bfloat16 if kind == "BFLOAT16" else helper.tensor_dtype_to_np_dtype(number)
    rows = [np.array([[b"%d" % index, b"x"]] if kind == "STRING" else [[index, 1]]).astype(dtype) for index in range(3)]
    for answer, row in zip(await asyncio.gather(*(infer(model, request(x=row)) for row in rows)), rows, strict=True):
        assert answer["y"].dtype == row.dtype
        assert answer["y"].tolist() == row.tolist()


async def test_bfloat16_is_computed_with(tmp_path: Path, loaded: list[Model]) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["f", "k"], ["g"]),
        helper.make_node("Cast", ["g"], ["y"], to=TensorProto.BFLOAT16),
    ]
    inputs = [value("x", ["n", 2], TensorProto.BFLOAT16), value("k", ["n", 2])]
    loaded.append(model := await load(tmp_path, graph(nodes, inputs, [value("y", ["n", 2], TensorProto.BFLOAT16)])))
    x, k = np.array([[1.5, -2]], ml_dtypes.bfloat16), np.array([[2, 3]], np.float32)
    assert (await infer(model, request(x=x, k=k)))["y"].tolist() == [[3.0, -6.0]]


async def test_wire_bytes_at_any_place_of_a_message(tmp_path: Path, loaded: list[Model]) -> None:
    loaded.append(model := await load(tmp_path, one_op("Neg")))
    message = memoryview(b"\0" + np.array([[1, 2]], np.float32).tobytes())[1:]
    given = InferRequest({"x": Tensor("x", "FP32", (1, 2), raw=message)})
    assert not given.inputs["x"].array.flags.aligned
    session = OnnxSession(tmp_path / "1" / "model.onnx", model.config, ["CPUExecutionProvider"])
    assert BatchAssembler(model.spec, session).join_inputs([given])["x"].flags.aligned
    assert (await infer(model, given))["y"].tolist() == [[-1, -2]]


async def test_strings(tmp_path: Path, loaded: list[Model]) -> None:
    node = helper.make_node("StringConcat", ["x", "k"], ["y"])
    inputs = [value("x", ["n", 1], STRING), value("k", ["n", 1], STRING)]
    loaded.append(model := await load(tmp_path, graph([node], inputs, [value("y", ["n", 1], STRING)])))
    text = np.array([[b"ab"], ["é漢".encode()], [b""], [b"a\0b"]], object)
    answer = await infer(model, request(x=text, k=np.full((4, 1), b"!", object)))
    assert answer["y"].ravel().tolist() == [b"ab!", "é漢!".encode(), b"!", b"a\0b!"]


async def test_strings_in_batches_and_one_that_is_no_text(tmp_path: Path, loaded: list[Model]) -> None:
    loaded.append(model := await load(tmp_path, one_op("Identity", ("n", 1), STRING)))
    given = [b"one", b"\xff", b"three"]
    answers = await asyncio.gather(
        *(infer(model, request(x=np.array([[each]], object))) for each in given), return_exceptions=True
    )
    assert isinstance(answers[1], SluiceError)
    assert answers[1].code is ErrorCode.INVALID
    assert "inference input 'x' for model 'm' holds bytes that are not UTF-8" in answers[1].message
    for index in (0, 2):
        answer = answers[index]
        assert isinstance(answer, dict)
        assert answer["y"].tolist() == [[given[index]]]


async def test_scalars(tmp_path: Path, loaded: list[Model]) -> None:
    """Clients see scalars as [1], and the model as scalars: `Unsqueeze` adds one dimension, not two."""
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [0])
    nodes = [helper.make_node("Unsqueeze", ["x", "axes"], ["u"]), helper.make_node("Neg", ["x"], ["y"])]
    outputs = [value("u", None), value("y", [])]
    text = """
        input { name: "x" data_type: TYPE_FP32 dims: [1] }
        output { name: "u" data_type: TYPE_FP32 dims: [1] } output { name: "y" data_type: TYPE_FP32 dims: [1] }
    """
    loaded.append(model := await load(tmp_path, graph(nodes, [value("x", [])], outputs, [axes]), text))
    answer = await infer(model, request(x=np.array([2], np.float32)))
    assert {name: (array.shape, array.tolist()) for name, array in answer.items()} == {
        "u": ((1,), [2]),
        "y": ((1,), [-2]),
    }


async def test_rows_without_dims(tmp_path: Path, loaded: list[Model]) -> None:
    loaded.append(model := await load(tmp_path, one_op("Neg", ("n",))))
    answer = await infer(model, request(x=np.array([[2], [3]], np.float32)))
    assert answer["y"].tolist() == [[-2], [-3]]


async def test_empty_tensors(tmp_path: Path, loaded: list[Model]) -> None:
    loaded.append(model := await load(tmp_path, one_op("Neg", ("n", "m"))))
    answer = await infer(model, request(x=np.zeros((2, 0), np.float32)))
    assert answer["y"].shape == (2, 0)


async def test_an_optional_input_has_the_model_s_value(tmp_path: Path, loaded: list[Model]) -> None:
    default = helper.make_tensor("k", TensorProto.FLOAT, [2], [10, 20])
    onnx_model = graph(
        [helper.make_node("Add", ["x", "k"], ["y"])], [value("x", [2]), value("k", [2])], [value("y", [2])], [default]
    )
    text = """
        input { name: "x" data_type: TYPE_FP32 dims: [2] }
        input { name: "k" data_type: TYPE_FP32 dims: [2] optional: true }
    """
    loaded.append(model := await load(tmp_path, onnx_model, text))
    x = np.array([1, 2], np.float32)
    assert (await infer(model, request(x=x)))["y"].tolist() == [11, 22]
    assert (await infer(model, request(x=x, k=x)))["y"].tolist() == [2, 4]


async def test_external_data_next_to_the_model(tmp_path: Path, loaded: list[Model]) -> None:
    onnx_model = layers(np.random.default_rng(1))
    x = np.ones((1, 16), np.float32)
    expected = direct(onnx_model, x=x)[0]
    (tmp_path / "1").mkdir()
    onnx.save(
        onnx_model,
        tmp_path / "1" / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    assert (tmp_path / "1" / "weights.bin").stat().st_size > 4096
    loaded.append(model := await load(tmp_path, None))
    assert (await infer(model, request(x=x)))["y"].tobytes() == expected.tobytes()


async def test_a_folder_as_the_model(tmp_path: Path, loaded: list[Model]) -> None:
    (tmp_path / "1" / "net").mkdir(parents=True)
    onnx.save(one_op("Neg"), tmp_path / "1" / "net" / "model.onnx")
    loaded.append(model := await load(tmp_path, None, 'default_model_filename: "net"'))
    assert (await infer(model, request(x=np.ones((1, 2), np.float32))))["y"].tolist() == [[-1, -1]]


def picker() -> onnx.ModelProto:
    """Make `y[i] = table[x[i]]`, which fails for an index that the table does not have."""
    table = numpy_helper.from_array(np.arange(5, dtype=np.float32), "table")
    node = helper.make_node("Gather", ["table", "x"], ["y"])
    return graph([node], [value("x", ["n", 1], INT64)], [value("y", ["n", 1])], [table])


async def test_a_request_that_fails_harms_no_other_in_its_batch(tmp_path: Path, loaded: list[Model]) -> None:
    loaded.append(model := await load(tmp_path, picker(), "max_batch_size: 8"))
    answers = await asyncio.gather(
        *(infer(model, request(x=np.array([[index]]))) for index in (1, 99, 3)), return_exceptions=True
    )
    assert isinstance(answers[1], SluiceError)
    assert answers[1].code is ErrorCode.INVALID
    assert answers[1].message.startswith("onnx runtime error 2: Non-zero status code returned while running Gather")
    assert [answer["y"].tolist() for answer in answers if isinstance(answer, dict)] == [[[1]], [[3]]]
    assert (await infer(model, request(x=np.array([[4]]))))["y"].tolist() == [[4]]


async def test_rows_that_do_not_add_up_are_not_mixed(tmp_path: Path, loaded: list[Model]) -> None:
    """A model whose first output dimension is not the batch answers each request separately."""
    node = helper.make_node("Concat", ["x", "x"], ["y"], axis=0)
    loaded.append(model := await load(tmp_path, graph([node], [value("x", ["n", 1])], [value("y", ["k", 1])])))
    assert model.spec.max_batch_size == 4
    rows = [np.full((1, 1), index, np.float32) for index in range(3)]
    answers = await asyncio.gather(*(infer(model, request(x=row)) for row in rows))
    assert [answer["y"].tolist() for answer in answers] == [[[index], [index]] for index in range(3)]
    assert model.statistics.execution_count < len(rows)


async def test_times_are_set(tmp_path: Path, loaded: list[Model]) -> None:
    loaded.append(model := await load(tmp_path, one_op("Neg")))
    await infer(model, request(x=np.ones((2, 2), np.float32)))
    counts = model.statistics
    assert counts.infer.compute_infer.ns > 0
    assert list(counts.batches) == [2]
