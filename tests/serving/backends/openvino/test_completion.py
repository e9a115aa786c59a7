"""Completion of configurations from the model file, contradictions to it, and the effects of parameters."""

from pathlib import Path

import openvino as ov
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backends.openvino.options import OpenVinoOptions, parse_options
from sluice.errors import ErrorCode, SluiceError
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


async def test_a_model_without_a_batch_dimension_does_not_batch(tmp_path: Path) -> None:
    config = await complete(tmp_path, add_sub((3, -1)))
    assert (config.max_batch_size, list(config.input[0].dims)) == (0, [3, -1])
    assert not config.HasField("dynamic_batching")


async def test_a_layout_says_that_a_fixed_first_dimension_is_the_batch(tmp_path: Path) -> None:
    model = add_sub((1, 4))
    for node in (*model.get_parameters(), *model.get_results()):
        node.set_layout(ov.Layout("NC"))
    config = await complete(tmp_path, model)
    assert (config.max_batch_size, list(config.input[0].dims)) == (4, [4])


async def test_a_batch_size_that_is_given_makes_a_fixed_first_dimension_the_batch(tmp_path: Path) -> None:
    config = await complete(tmp_path, add_sub((1, 4)), "max_batch_size: 8")
    assert (config.max_batch_size, list(config.output[0].dims)) == (8, [4])


async def test_scalars_are_ones(tmp_path: Path) -> None:
    config = await complete(tmp_path, add_sub(()))
    assert (list(config.input[0].dims), config.input[0].HasField("reshape")) == ([1], False)


@pytest.mark.parametrize(
    ("openvino_name", "config_name"),
    [
        ("boolean", "TYPE_BOOL"),
        ("u8", "TYPE_UINT8"),
        ("u16", "TYPE_UINT16"),
        ("u32", "TYPE_UINT32"),
        ("u64", "TYPE_UINT64"),
        ("i8", "TYPE_INT8"),
        ("i16", "TYPE_INT16"),
        ("i32", "TYPE_INT32"),
        ("i64", "TYPE_INT64"),
        ("f16", "TYPE_FP16"),
        ("f32", "TYPE_FP32"),
        ("f64", "TYPE_FP64"),
        ("bf16", "TYPE_BF16"),
    ],
)
async def test_every_type_has_its_name(tmp_path: Path, openvino_name: str, config_name: str) -> None:
    config = await complete(tmp_path, doubled(kind=getattr(ov.Type, openvino_name)))
    assert f"data_type: {config_name}\n" in text_format.MessageToString(config.input[0])


async def test_a_type_that_the_protocol_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="unsupported datatype f8e4m3 for I/O 'x'") as caught:
        await complete(tmp_path, doubled(kind=ov.Type.f8e4m3))
    assert caught.value.code is ErrorCode.UNIMPLEMENTED


async def refusal(folder: Path, model: ov.Model, text: str) -> str:
    with pytest.raises(SluiceError) as caught:
        await load(folder, model, text)
    return caught.value.message


def tensors(side_in: str = "x", dims: str = "2", out_dims: str = "4") -> str:
    return f"""input {{ name: "{side_in}" data_type: TYPE_FP32 dims: [{dims}] }}
        output {{ name: "y" data_type: TYPE_FP32 dims: [{out_dims}] }}"""


async def test_contradictions_are_named(tmp_path: Path) -> None:
    batched = "max_batch_size: 4"
    assert await refusal(tmp_path, doubled(), f"{batched} {tensors('q')}") == (
        "unexpected inference input 'q', allowed inputs are: x"
    )
    assert "making complete shape [-1,3])" in await refusal(tmp_path, doubled(), f"{batched} {tensors(dims='3')}")
    assert await refusal(tmp_path, add_sub(), f"{batched} {tensors('a', '4', '4')}") == (
        "unable to load model 'm', configuration expects 1 inputs, model provides 2"
    )


async def test_a_file_that_is_no_model_says_so(tmp_path: Path) -> None:
    source = put(tmp_path, None)
    source.model_file.write_bytes(b"no model")
    message = await refusal_of_file(tmp_path)
    assert message.startswith("openvino error in reading model : ")
    assert "Exception from" not in message


async def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert (await refusal_of_file(tmp_path)).endswith("1/model.xml' for model 'm'")


async def refusal_of_file(folder: Path) -> str:
    with pytest.raises(SluiceError) as caught:
        await load(folder, None)
    return caught.value.message


async def test_a_device_that_there_is_not_says_so(tmp_path: Path) -> None:
    message = await refusal(tmp_path, doubled(), parameters(TARGET_DEVICE="abacus"))
    assert message.startswith("openvino error in loading model : ")
    assert "ABACUS" in message


async def test_a_library_of_operations_that_there_is_not_says_so(tmp_path: Path) -> None:
    message = await refusal(tmp_path, doubled(), parameters(CPU_EXTENSION_PATH="/nowhere/libops.so"))
    assert message.startswith("openvino error in loading custom CPU extensions : ")


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
