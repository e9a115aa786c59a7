"""Completion of configurations from the model file, and contradictions to it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.onnxruntime.backend import OnnxRuntimeBackend
from sluice.serving.model import infer_one
from tests.serving.backends.builders import request
from tests.serving.backends.onnxruntime.parts import (
    FLOAT,
    INT64,
    add_sub,
    complete,
    context,
    graph,
    load,
    one_op,
    put,
    value,
)

BATCHED = """
    max_batch_size: 4 dynamic_batching {}
    input { name: "a" data_type: TYPE_FP32 dims: [4] } input { name: "b" data_type: TYPE_FP32 dims: [4] }
    output { name: "sum" data_type: TYPE_FP32 dims: [4] } output { name: "difference" data_type: TYPE_FP32 dims: [4] }
"""


async def test_a_model_that_batches_is_completed_to_dynamic_batches_of_four(tmp_path: Path) -> None:
    config = await complete(tmp_path, add_sub())
    expected = 'name: "m" backend: "onnxruntime" platform: "onnxruntime_onnx" default_model_filename: "model.onnx"'
    assert config == text_format.Parse(expected + BATCHED, type(config)())


async def test_what_is_given_stays(tmp_path: Path) -> None:
    config = await complete(tmp_path, add_sub(), "max_batch_size: 32 dynamic_batching { preferred_batch_size: 8 }")
    assert config.max_batch_size == 32
    assert list(config.dynamic_batching.preferred_batch_size) == [8]
    assert [each.name for each in config.input] == ["a", "b"]


async def test_inputs_and_outputs_given_say_all(tmp_path: Path) -> None:
    text = """
        input { name: "x" data_type: TYPE_FP32 dims: [-1, 2] } output { name: "y" data_type: TYPE_FP32 dims: [-1, 2] }
    """
    config = await complete(tmp_path, one_op("Neg"), text)
    assert (config.max_batch_size, config.WhichOneof("scheduling_choice")) == (0, None)


async def test_the_default_batch_size_is_an_option_of_the_backend(tmp_path: Path) -> None:
    config = await complete(tmp_path, one_op("Neg"), **{"default-max-batch-size": "16"})
    assert config.max_batch_size == 16
    config = await complete(tmp_path, one_op("Neg"), **{"default-max-batch-size": "1"})
    assert (config.max_batch_size, config.WhichOneof("scheduling_choice")) == (1, None)
    config = await complete(tmp_path, one_op("Neg"), **{"default-max-batch-size": "0"})
    assert (config.max_batch_size, list(config.input[0].dims)) == (0, [-1, 2])


async def test_the_default_for_all_backends_comes_second(tmp_path: Path) -> None:
    backend, source = OnnxRuntimeBackend(), put(tmp_path, one_op("Neg"))
    for_all = {"": {"default-max-batch-size": "7"}}
    config = await backend.complete(source, replace(context(), backend_options=for_all))
    assert config.max_batch_size == 7
    own = for_all | {"onnxruntime": {"default-max-batch-size": "9"}}
    config = await backend.complete(source, replace(context(), backend_options=own))
    assert config.max_batch_size == 9
    with pytest.raises(SluiceError, match="'x' is no default-max-batch-size"):
        await backend.complete(source, context(**{"default-max-batch-size": "x"}))


async def test_a_model_without_a_batch_dimension_does_not_batch(tmp_path: Path) -> None:
    config = await complete(tmp_path, one_op("Neg", (3, "m")))
    assert config.max_batch_size == 0
    assert list(config.input[0].dims) == [3, -1]
    assert not config.HasField("dynamic_batching")
    with pytest.raises(SluiceError) as caught:
        await complete(tmp_path, one_op("Neg", (3, "m")), "max_batch_size: 2")
    assert caught.value.message == (
        "autofill failed for model 'm': model does not support batching while non-zero max_batch_size is specified"
    )


@pytest.mark.parametrize(
    ("dims", "kind", "completed", "reshaped"),
    [
        pytest.param(("n",), FLOAT, [1], True, id="rows without dims are ones that are reshaped"),
        pytest.param((), FLOAT, [1], False, id="scalars are ones"),
        pytest.param(("n", 3, "m", None), INT64, [3, -1, -1], False, id="other ranks"),
    ],
)
async def test_dims_are_completed(
    tmp_path: Path, dims: Sequence[int | str | None], kind: int, completed: list[int], reshaped: bool
) -> None:
    config = await complete(tmp_path, one_op("Neg", dims, kind))
    for each in (config.input[0], config.output[0]):
        assert (list(each.dims), each.HasField("reshape"), list(each.reshape.shape)) == (completed, reshaped, [])


async def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    sequence = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)
    model = graph([helper.make_node("SequenceConstruct", ["x"], ["y"])], [value("x", [2])], [sequence])
    with pytest.raises(SluiceError) as caught:
        await complete(tmp_path, model)
    assert caught.value.code is ErrorCode.UNIMPLEMENTED
    assert caught.value.message == (
        "Unsupported ONNX Type 'ONNX_TYPE_SEQUENCE' for I/O 'y', expected 'ONNX_TYPE_TENSOR'."
    )


async def test_a_type_that_the_protocol_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="unsupported datatype float8e4m3fn for I/O 'x'"):
        await complete(tmp_path, one_op("Identity", kind=TensorProto.FLOAT8E4M3FN))


async def refusal(folder: Path, model: onnx.ModelProto, text: str) -> str:
    with pytest.raises(SluiceError) as caught:
        await load(folder, model, text)
    assert caught.value.code is ErrorCode.INVALID
    return caught.value.message


def neg(input_name: str = "x", kind: str = "TYPE_FP32", dims: str = "2", output: str = "", rest: str = "") -> str:
    """Write a configuration for `y = -x`."""
    return f"""
        {rest} input {{ name: "{input_name}" data_type: {kind} dims: [{dims}] }}
        output {{ name: "{output or "y"}" data_type: TYPE_FP32 dims: [{"2" if output else dims}] }}
    """


BATCHES = "max_batch_size: 4"
SHAPE = "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,2]) but the model configuration specifies "
CONTRADICTIONS = {
    "type": (
        one_op("Neg"),
        neg(kind="TYPE_INT32", rest=BATCHES),
        "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'x', model provides TYPE_FP32",
    ),
    "input": (one_op("Neg"), neg("q", rest=BATCHES), "unexpected inference input 'q', allowed inputs are: x"),
    "output": (
        one_op("Neg"),
        neg(output="q", rest=BATCHES),
        "unexpected inference output 'q', allowed outputs are: y",
    ),
    "dims of rows": (
        one_op("Neg"),
        neg(dims="3", rest=BATCHES),
        f"{SHAPE}2 dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit tensor "
        "shape, making complete shape [-1,3])",
    ),
    "dims": (one_op("Neg"), neg(dims="2"), f"{SHAPE}1 dimensions (shape [2])"),
    "no batches": (
        one_op("Neg", (4, 2)),
        neg(rest=BATCHES),
        "model 'm', tensor 'x': for the model to support batching the shape should have at least 1 dimension and the "
        "first dimension must be -1; but shape expected by the model is [4,2]",
    ),
    "number of inputs": (
        add_sub(),
        neg("a", output="sum", rest=BATCHES),
        "unable to load model 'm', configuration expects 1 inputs, model provides 2",
    ),
    "scalar": (
        one_op("Neg", ()),
        neg(),
        "unable to load model 'm', scalar tensor 'x', should only provide 1 in the model configuration when the model "
        "doesn't support batching. Model configuration provided: [2].",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
async def test_contradictions_are_named(tmp_path: Path, name: str) -> None:
    model, text, expected = CONTRADICTIONS[name]
    assert await refusal(tmp_path, model, text) == expected


async def test_an_output_that_the_model_leaves_open_must_be_left_open(tmp_path: Path) -> None:
    text = """input { name: "x" data_type: TYPE_FP32 dims: [3] } output { name: "y" data_type: TYPE_FP32 dims: [3] }"""
    assert "tensor 'y'" in await refusal(tmp_path, one_op("Neg", ("m",)), text)


async def test_optional_inputs_and_batches_exclude_each_other(tmp_path: Path) -> None:
    rest = 'max_batch_size: 4 input { name: "k" data_type: TYPE_FP32 dims: [2] optional: true }'
    default = helper.make_tensor("k", TensorProto.FLOAT, [1, 2], [1, 2])
    model = graph(
        [helper.make_node("Add", ["x", "k"], ["y"])],
        [value("x", ["n", 2]), value("k", [1, 2])],
        [value("y", ["n", 2])],
        [default],
    )
    assert await refusal(tmp_path, model, neg(rest=rest)) == (
        "unable to load model 'm', optional input 'k' is not supported for models that support batching"
    )


async def test_inputs_that_the_sequence_batcher_sets_are_counted(tmp_path: Path) -> None:
    rest = """
        max_batch_size: 4 sequence_batching { control_input {
            name: "b" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] }
        } }
    """
    model = await load(
        tmp_path, add_sub(), neg("a", dims="4", output="sum", rest=rest).replace("dims: [2]", "dims: [4]")
    )
    assert list(model.spec.inputs) == ["a"]
    await model.close()


async def test_inputs_that_clients_do_not_give_are_not_completed(tmp_path: Path) -> None:
    rest = """
        batch_input { kind: BATCH_ELEMENT_COUNT target_name: "b" data_type: TYPE_FP32 source_input: "a" }
        output { name: "sum" data_type: TYPE_FP32 dims: [4] }
    """
    config = await complete(tmp_path, add_sub(), rest)
    assert [each.name for each in config.input] == ["a"]


async def test_a_file_that_is_no_model_says_so(tmp_path: Path) -> None:
    source = put(tmp_path, None)
    source.model_file.write_bytes(b"no model")
    with pytest.raises(SluiceError, match=r"onnx runtime error 7: .*[Pp]rotobuf parsing failed"):
        await load(tmp_path, None)


async def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match=r"unable to find '.*1/model.onnx' for model instance 'm'") as caught:
        await load(tmp_path, None)
    assert caught.value.code is ErrorCode.UNAVAILABLE


def folding() -> onnx.ModelProto:
    """`y` is `x` as (1, 2, 4), which is known only after the product of two constants is computed."""
    shape = [helper.make_tensor(name, INT64, [3], sizes) for name, sizes in (("s", [1, 2, 4]), ("ones", [1, 1, 1]))]
    nodes = [helper.make_node("Mul", ["s", "ones"], ["shape"]), helper.make_node("Reshape", ["x", "shape"], ["y"])]
    return graph(nodes, [value("x", [2, 4])], [value("y", ["i", "j", 4])], shape)


async def test_a_model_whose_sizes_are_known_only_after_optimization_is_completed_and_loads(tmp_path: Path) -> None:
    config = await complete(tmp_path, folding())
    assert list(config.output[0].dims) == [-1, -1, 4]
    model = await load(tmp_path, folding())
    assert (await infer_one(model, request(x=np.ones((2, 4), np.float32)))).outputs[0].shape == (1, 2, 4)
    await model.close()


@pytest.mark.parametrize("dims", ["[1, 2, 4]", "[-1, -1, 4]"])
async def test_a_configuration_may_have_its_sizes_before_and_after_optimization(tmp_path: Path, dims: str) -> None:
    text = f"""input {{ name: "x" data_type: TYPE_FP32 dims: [2, 4] }}
        output {{ name: "y" data_type: TYPE_FP32 dims: {dims} }}"""
    OnnxRuntimeBackend().check(put(tmp_path, folding(), text))
    await (await load(tmp_path, folding(), text)).close()


@pytest.mark.parametrize("dims", ["[3, 2, 4]", "[-1, -1, -1]", "[1, 2]"])
async def test_sizes_that_are_neither_are_refused(tmp_path: Path, dims: str) -> None:
    text = f"""input {{ name: "x" data_type: TYPE_FP32 dims: [2, 4] }}
        output {{ name: "y" data_type: TYPE_FP32 dims: {dims} }}"""
    with pytest.raises(SluiceError, match="the model configuration specifies"):
        OnnxRuntimeBackend().check(put(tmp_path, folding(), text))
    with pytest.raises(SluiceError, match="the model configuration specifies"):
        await load(tmp_path, folding(), text)
