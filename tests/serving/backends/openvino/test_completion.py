"""Completion of configurations from the model file, contradictions to it, and the effects of parameters."""

from pathlib import Path

import openvino as ov
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.openvino.options import OpenVinoOptions, parse_options
from tests.serving.backends.builders import parameters
from tests.serving.backends.openvino.parts import add_sub, complete, doubled, load, put


async def test_a_model_that_batches_is_completed_to_dynamic_batches(tmp_path: Path) -> None:
    config = await complete(tmp_path, add_sub())
    expected = """name: "m" backend: "openvino" default_model_filename: "model.xml"
        max_batch_size: 4 dynamic_batching {}
        input { name: "a" data_type: TYPE_FP32 dims: [4] } input { name: "b" data_type: TYPE_FP32 dims: [4] }
        output { name: "sum" data_type: TYPE_FP32 dims: [4] }
        output { name: "difference" data_type: TYPE_FP32 dims: [4] }"""
    assert config == text_format.Parse(expected, ModelConfig())


@pytest.mark.parametrize(
    ("dims", "text", "max_batch_size", "completed"),
    [
        pytest.param((3, -1), "", 0, [3, -1], id="a model without a batch dimension does not batch"),
        pytest.param((1, 4), "max_batch_size: 8", 8, [4], id="a batch size makes a fixed first dimension the batch"),
        pytest.param((), "", 0, [1], id="scalars are ones"),
    ],
)
async def test_dims_are_completed(
    tmp_path: Path, dims: tuple[int, ...], text: str, max_batch_size: int, completed: list[int]
) -> None:
    config = await complete(tmp_path, add_sub(dims), text)
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (max_batch_size, max_batch_size > 0)
    assert [list(each.dims) for each in (*config.input, *config.output)] == [completed] * 4
    assert not config.input[0].HasField("reshape")


async def test_a_layout_says_that_a_fixed_first_dimension_is_the_batch(tmp_path: Path) -> None:
    model = add_sub((1, 4))
    for node in (*model.get_parameters(), *model.get_results()):
        node.set_layout(ov.Layout("NC"))
    config = await complete(tmp_path, model)
    assert (config.max_batch_size, list(config.input[0].dims)) == (4, [4])


async def test_a_type_that_the_protocol_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="unsupported datatype f8e4m3 for I/O 'x'") as caught:
        await complete(tmp_path, doubled(kind=ov.Type.f8e4m3))
    assert caught.value.code is ErrorCode.UNIMPLEMENTED


async def refusal(folder: Path, model: ov.Model | None, text: str = "") -> str:
    with pytest.raises(SluiceError) as caught:
        await load(folder, model, text)
    return caught.value.message


async def test_a_file_that_is_no_model_says_so(tmp_path: Path) -> None:
    put(tmp_path, None).model_file.write_bytes(b"no model")
    message = await refusal(tmp_path, None)
    assert message.startswith("openvino error in reading model : ")
    assert "Exception from" not in message


@pytest.mark.parametrize(
    ("model", "text", "expected"),
    [
        pytest.param(None, "", "1/model.xml' for model 'm'", id="a file that is not there"),
        pytest.param(doubled(), parameters(TARGET_DEVICE="abacus"), "ABACUS", id="a device that there is not"),
        pytest.param(
            doubled(),
            parameters(CPU_EXTENSION_PATH="/nowhere/libops.so"),
            "openvino error in loading custom CPU extensions : ",
            id="a library of operations that there is not",
        ),
    ],
)
async def test_what_is_not_there_is_named(tmp_path: Path, model: ov.Model | None, text: str, expected: str) -> None:
    assert expected in await refusal(tmp_path, model, text)


def options(**values: str) -> OpenVinoOptions:
    return parse_options(text_format.Parse(parameters(**values), ModelConfig()))


def test_parameters_are_openvino_s_properties() -> None:
    given = options(
        INFERENCE_NUM_THREADS="3", COMPILATION_NUM_THREADS="2", NUM_STREAMS="auto", PERFORMANCE_HINT="throughput"
    )
    assert given.properties == {
        "INFERENCE_NUM_THREADS": "3",
        "COMPILATION_NUM_THREADS": "2",
        "NUM_STREAMS": "AUTO",
        "PERFORMANCE_HINT": "THROUGHPUT",
    }
    assert options(CPU_THREADS_NUM="4").properties == {"INFERENCE_NUM_THREADS": "4"}
    assert options(HINT_BF16="yes").properties == {"INFERENCE_PRECISION_HINT": "bf16"}
    assert options(INFERENCE_PRECISION_HINT="f32").properties == {"INFERENCE_PRECISION_HINT": "f32"}
    assert options() == OpenVinoOptions()


def test_without_parameters_each_instance_has_a_stream() -> None:
    assert options().compile_properties(3) == {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "3"}
    assert options(PERFORMANCE_HINT="throughput").compile_properties(3) == {"PERFORMANCE_HINT": "THROUGHPUT"}
    assert options(NUM_STREAMS="1").compile_properties(3, 4) == {
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": "4",
        "ENABLE_CPU_PINNING": "NO",
    }
    assert options(NUM_STREAMS="1", INFERENCE_NUM_THREADS="2").compile_properties(3, 4)["INFERENCE_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("INFERENCE_NUM_THREADS", "-1", "a non-negative number"),
        ("COMPILATION_NUM_THREADS", "two", "a non-negative number"),
        ("NUM_STREAMS", "some", "either AUTO/NUMA/<int_value>"),
        ("PERFORMANCE_HINT", "fast", "LATENCY/THROUGHPUT/CUMULATIVE_THROUGHPUT"),
        ("HINT_BF16", "no", "YES"),
    ],
)
def test_wrong_values_are_named(key: str, value: str, expected: str) -> None:
    with pytest.raises(SluiceError) as caught:
        options(**{key: value})
    assert caught.value.code is ErrorCode.INVALID
    assert caught.value.message == f"expected the parameter '{key}' to be {expected}, got {value}"
