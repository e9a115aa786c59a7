"""Results equal OpenVINO's own; types, shapes, errors. What other libraries do alike: ../arrays/test_contract.py."""

import asyncio
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import openvino as ov
import pytest
from google.protobuf import text_format
from openvino import opset13 as ops

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.openvino.model import ClientTensorNames, read_signature
from sluice.serving.backends.openvino.session import OpenVinoSession, convert_error, convert_read_error
from sluice.serving.model import Model
from tests.serving.backends.builders import infer, parameters, request
from tests.serving.backends.onnxruntime import parts as onnx_parts
from tests.serving.backends.openvino.parts import add_sub, doubled, load, model_of, parameter


def layers(generator: np.random.Generator) -> ov.Model:
    """Make two dense layers, enough for results that depend on how they are computed."""
    weights = [generator.standard_normal(shape).astype(np.float32) for shape in ((16, 64), (64, 8))]
    x = parameter("x", [-1, 16])
    hidden = ops.relu(ops.matmul(x, ops.constant(weights[0]), False, False))
    return model_of([x], y=ops.softmax(ops.matmul(hidden, ops.constant(weights[1]), False, False), 1))


async def test_results_are_the_library_s_bit_for_bit(tmp_path: Path, loaded: list[Model]) -> None:
    generator = np.random.default_rng(0)
    loaded.append(model := await load(tmp_path, layers(generator)))
    core = ov.Core()
    compiled = core.compile_model(tmp_path / "1" / "model.xml", "CPU", {"PERFORMANCE_HINT": "LATENCY"})
    for rows in (1, 4):
        x = generator.standard_normal((rows, 16)).astype(np.float32)
        assert (await infer(model, request(x=x)))["y"].tobytes() == compiled({"x": x})["y"].tobytes()


async def test_answers_stay_what_they_are_when_the_model_runs_again(tmp_path: Path, loaded: list[Model]) -> None:
    loaded.append(model := await load(tmp_path, doubled()))
    first = await infer(model, request(x=np.array([[1, 2]], np.float32)))
    await infer(model, request(x=np.array([[3, 4]], np.float32)))
    assert first["y"].tolist() == [[1, 2, 1, 2]]


TYPES = {
    "boolean": "BOOL", "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "u64": "UINT64", "i8": "INT8", "i16": "INT16",
    "i32": "INT32", "i64": "INT64", "f16": "FP16", "f32": "FP32", "f64": "FP64", "bf16": "BF16",
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
async def test_types_have_their_names_and_go_through(tmp_path: Path, loaded: list[Model], kind: str) -> None:
    loaded.append(model := await load(tmp_path, doubled(kind=getattr(ov.Type, kind)), "max_batch_size: 8"))
    assert f"data_type: TYPE_{TYPES[kind]}\n" in text_format.MessageToString(model.config.input[0])
    dtype = ml_dtypes.bfloat16 if kind == "bf16" else getattr(ov.Type, kind).to_dtype()
    rows = [np.array([[index, 1]]).astype(dtype) for index in range(3)]
    for answer, row in zip(await asyncio.gather(*(infer(model, request(x=row)) for row in rows)), rows, strict=True):
        assert answer["y"].dtype == row.dtype
        assert answer["y"].tobytes() == np.concatenate([row, row], 1).tobytes()


async def test_a_type_of_the_configuration_is_converted(tmp_path: Path, loaded: list[Model]) -> None:
    text = """max_batch_size: 4 input { name: "x" data_type: TYPE_FP16 dims: [2] }
        output { name: "y" data_type: TYPE_INT32 dims: [4] }"""
    loaded.append(model := await load(tmp_path, doubled(), text))
    answer = await infer(model, request(x=np.array([[1, 2]], np.float16)))
    assert answer["y"].dtype == np.int32
    assert answer["y"].tolist() == [[1, 2, 1, 2]]


async def test_strings_are_bytes(tmp_path: Path, loaded: list[Model]) -> None:
    x = parameter("x", [-1, 1], ov.Type.string)
    text = """max_batch_size: 4 dynamic_batching {} input { name: "x" data_type: TYPE_STRING dims: [1] }
        output { name: "y" data_type: TYPE_STRING dims: [1] }"""
    loaded.append(model := await load(tmp_path, model_of([x], y=x), text))
    given = [b"one", "é漢".encode(), b"\xff", b""]
    answers = await asyncio.gather(*(infer(model, request(x=np.array([[each]], object))) for each in given))
    assert [answer["y"].tolist() for answer in answers] == [[[each]] for each in given]
    assert model.statistics.execution_count < len(given)


async def test_scalars(tmp_path: Path, loaded: list[Model]) -> None:
    loaded.append(model := await load(tmp_path, add_sub(())))
    answer = await infer(model, request(a=np.array([2], np.float32), b=np.array([3], np.float32)))
    assert answer["sum"].tolist() == [5]


async def test_sizes_that_change_from_run_to_run(tmp_path: Path, loaded: list[Model]) -> None:
    loaded.append(model := await load(tmp_path, doubled((-1, -1))))
    for width in (5, 0, 7, 2):
        x = np.arange(2 * width, dtype=np.float32).reshape(2, width)
        assert (await infer(model, request(x=x)))["y"].tolist() == np.concatenate([x, x], 1).tolist()


@pytest.mark.parametrize(
    "fixed",
    [
        pytest.param({}, id="made dynamic"),
        pytest.param({"SKIP_OV_DYNAMIC_BATCHSIZE": "YES", "ENABLE_BATCH_PADDING": "YES"}, id="padded where wanted"),
    ],
)
async def test_a_fixed_first_dimension_takes_batches(
    tmp_path: Path, loaded: list[Model], fixed: dict[str, str]
) -> None:
    loaded.append(model := await load(tmp_path, add_sub((1, 4)), f"max_batch_size: 4 {parameters(**fixed)}"))
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert (await infer(model, request(a=rows, b=rows)))["sum"].tolist() == (rows * 2).tolist()


async def test_a_fixed_batch_refuses_smaller_ones_in_triton_s_words(tmp_path: Path, loaded: list[Model]) -> None:
    fixed = parameters(SKIP_OV_DYNAMIC_BATCHSIZE="YES")
    loaded.append(model := await load(tmp_path, add_sub((1, 4)), f"max_batch_size: 4 {fixed}"))
    rows = np.ones((3, 4), np.float32)
    with pytest.raises(SluiceError, match="expected requests with batch size '4', got '3'"):
        await infer(model, request(a=rows, b=rows))
    full = np.ones((4, 4), np.float32)
    assert (await infer(model, request(a=full, b=full)))["sum"].shape == (4, 4)


async def test_dims_are_reshaped_to_the_configuration_s(tmp_path: Path, loaded: list[Model]) -> None:
    text = """input { name: "x" data_type: TYPE_FP32 dims: [-1, 3] }
        output { name: "y" data_type: TYPE_FP32 dims: [-1, 6] }"""
    loaded.append(model := await load(tmp_path, doubled((1, 2)), f"{text} {parameters(RESHAPE_IO_LAYERS='yes')}"))
    assert (await infer(model, request(x=np.ones((2, 3), np.float32))))["y"].shape == (2, 6)


async def test_an_onnx_file(tmp_path: Path, loaded: list[Model]) -> None:
    (tmp_path / "1").mkdir()
    onnx.save(onnx_parts.add_sub(), tmp_path / "1" / "model.onnx")
    loaded.append(model := await load(tmp_path, None, 'default_model_filename: "model.onnx"'))
    ones = np.ones((2, 4), np.float32)
    assert (await infer(model, request(a=ones, b=ones)))["sum"].tolist() == (ones * 2).tolist()


async def test_ragged_requests(tmp_path: Path, loaded: list[Model]) -> None:
    x, ends = parameter("x", [-1]), parameter("ends", [-1], ov.Type.i32)
    totals = ops.gather(
        ops.cumsum(x, ops.constant(0)), ops.subtract(ends, ops.constant(1, ov.Type.i32)), ops.constant(0)
    )
    text = """max_batch_size: 4 dynamic_batching {}
        input { name: "x" data_type: TYPE_FP32 dims: [-1] allow_ragged_batch: true }
        batch_input {
            kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_INT32 source_input: "x"
        }
        output { name: "total" data_type: TYPE_FP32 dims: [1] reshape { shape: [] } }"""
    loaded.append(model := await load(tmp_path, model_of([x, ends], total=totals), text))
    rows = [np.ones((1, width), np.float32) for width in (2, 5)]
    answers = await asyncio.gather(*(infer(model, request(x=row)) for row in rows))
    assert [answer["total"].tolist() for answer in answers] == [[[2]], [[7]]]


def broken_at(limit: int) -> ov.Model:
    """Make a model that fails in the run for inputs that cannot be reshaped."""
    x = parameter("x", [-1, -1])
    return model_of([x], y=ops.reshape(x, ops.constant([-1, limit]), False))


async def test_a_request_that_fails_harms_no_other(tmp_path: Path, loaded: list[Model]) -> None:
    text = """input { name: "x" data_type: TYPE_FP32 dims: [-1, -1] }
        output { name: "y" data_type: TYPE_FP32 dims: [-1, 4] }"""
    loaded.append(model := await load(tmp_path, broken_at(4), text))
    with pytest.raises(SluiceError) as caught:
        await infer(model, request(x=np.ones((1, 3), np.float32)))
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.message.startswith("openvino error in running inference : ")
    assert (await infer(model, request(x=np.ones((2, 4), np.float32))))["y"].shape == (2, 4)


def test_a_run_that_was_stopped_before_it_began_does_not_run() -> None:
    x = node = parameter("x", [-1, -1])
    for _ in range(200):  # many seconds for a large `x`: a short run may have ended before it is cancelled
        node = ops.matmul(node, x, False, False)
    model = model_of([x], y=node)
    session = OpenVinoSession(ov.Core().compile_model(model, "CPU"), read_signature(model, ClientTensorNames()))
    run = session.open_run()
    run.stop()
    with pytest.raises(RuntimeError, match="cancel"):
        run.execute({"x": np.zeros((1536, 1536), np.float32)}, ["y"])
    following = session.open_run()
    assert not following.is_stopped
    assert following.execute({"x": np.zeros((1, 1), np.float32)}, ["y"])[0].tolist() == [[0]]


PLACES = "Exception from src/inference/src/cpp/core.cpp:84:\nCheck 'false' failed at src/report.cpp:151:\n"


def test_places_are_left_out() -> None:
    failure = convert_error(RuntimeError(f"{PLACES}Caught exception: the shape\nis wrong\n\n"), "running inference")
    assert failure.code is ErrorCode.INTERNAL
    assert failure.message == "openvino error in running inference : the shape is wrong"


@pytest.mark.parametrize(
    "summary", ["No conversion rule found for operations: A, B\nTo facilitate …", "Conversion is failed for: A, B\n"]
)
def test_operations_that_cannot_be_converted_are_named(summary: str) -> None:
    failure = convert_read_error(RuntimeError(f"{PLACES}Model wasn't fully converted.\nSummary:\n-- {summary}"))
    assert failure.code is ErrorCode.UNIMPLEMENTED
    assert failure.message == "OpenVINO cannot convert these operations of the model: A, B"


def test_a_file_that_cannot_be_read() -> None:
    failure = convert_read_error(RuntimeError(f"{PLACES}Unable to read the model"))
    assert failure.message == "openvino error in reading model : Unable to read the model"
