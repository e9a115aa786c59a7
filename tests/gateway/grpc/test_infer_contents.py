"""The inputs of ModelInfer: typed contents, raw contents, and what is wrong with them."""

from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from tests.gateway.grpc.parts import (
    INVALID,
    EchoModel,
    add_input,
    failure,
    infer_request,
    numbers,
    serving,
)
from tests.gateway.v2.small_service import SmallService


def typed_request(datatype: str, shape: list[int], **contents: Any) -> Any:
    request = service_pb2.ModelInferRequest(model_name="echo")
    add_input(request, datatype, shape).contents.MergeFrom(service_pb2.InferTensorContents(**contents))
    return request


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("UINT8", "uint_contents", [1, 255]),
        ("UINT16", "uint_contents", [1, 65535]),
        ("UINT32", "uint_contents", [1, 2**32 - 1]),
        ("UINT64", "uint64_contents", [1, 2**64 - 1]),
        ("INT8", "int_contents", [1, -128]),
        ("INT16", "int_contents", [1, -32768]),
        ("INT32", "int_contents", [1, -(2**31)]),
        ("INT64", "int64_contents", [1, -(2**63)]),
        ("FP32", "fp32_contents", [1.5, float("inf")]),
        ("FP64", "fp64_contents", [1.5, -0.1]),
        ("BYTES", "bytes_contents", [b"a", b"\xff\0"]),
    ],
)
async def test_typed_contents(datatype: str, field: str, values: list[Any]) -> None:
    model = EchoModel(datatype=datatype)
    async with serving(SmallService(model)) as running:
        await running.stub.ModelInfer(typed_request(datatype, [2], **{field: values}))
    assert model.jobs[0].request.inputs["INPUT0"].array.tolist() == values


@pytest.mark.parametrize(("datatype", "value"), [("UINT8", 256), ("INT8", -129), ("INT16", 40000), ("UINT16", 65536)])
async def test_contents_that_overflow_are_refused(datatype: str, value: int) -> None:
    field = "uint_contents" if datatype.startswith("U") else "int_contents"
    async with serving(SmallService(EchoModel(datatype=datatype))) as running:
        code, message = await failure(running.stub.ModelInfer(typed_request(datatype, [2], **{field: [1, value]})))
    assert code == INVALID
    assert message.endswith(f"{value} is out of range for datatype '{datatype}'")


@pytest.mark.parametrize(
    ("datatype", "contents", "message"),
    [
        (
            "INT32",
            {"int64_contents": [1]},
            "unexpected explicit tensor data for input tensor 'INPUT0' for model 'echo' of type 'INT64', "
            "expected datatype 'INT32'",
        ),
        (
            "FP16",
            {"fp32_contents": [1]},
            "unexpected explicit tensor data for input tensor 'INPUT0' for model 'echo' of type 'FP32', "
            "expected datatype 'FP16'",
        ),
        (
            "INT32",
            {"int_contents": [1], "fp32_contents": [1]},
            "unexpected explicit tensor data for input tensor 'INPUT0' for model 'echo', "
            "binary data was already supplied.",
        ),
        (
            "INT32",
            {},
            "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model 'echo'. "
            "Expected 4, got 0",
        ),
        (
            "INT32",
            {"int_contents": [1, 2]},
            "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model 'echo'. "
            "Expected 4, got 8",
        ),
    ],
)
async def test_contents_that_are_wrong(datatype: str, contents: dict[str, Any], message: str) -> None:
    """The errors have the real server's words."""
    async with serving(SmallService(EchoModel(datatype=datatype))) as running:
        request = typed_request(datatype, [1], **contents)
        request.inputs[0].contents.SetInParent()
        assert await failure(running.stub.ModelInfer(request)) == (INVALID, message)


async def test_where_the_data_is_missing_or_doubled() -> None:
    async with serving(SmallService(EchoModel())) as running:
        infer = running.stub.ModelInfer
        without = service_pb2.ModelInferRequest(model_name="echo")
        add_input(without, "INT32", [1])
        assert await failure(infer(without)) == (
            INVALID,
            "unable to find data for input tensor 'INPUT0' for model 'echo' in request.",
        )
        both = infer_request("echo", 1)
        both.inputs[0].contents.int_contents.append(1)
        assert await failure(infer(both)) == (
            INVALID,
            "contents field must not be specified when using raw_input_contents for 'INPUT0' for model 'echo'",
        )
        twice = infer_request("echo", 1, id="t")
        add_input(twice, "INT32", [1], bytes(4))
        assert await failure(infer(twice)) == (INVALID, "[request id: t] input 'INPUT0' already exists in request")
        unused = infer_request("echo", 1)
        unused.raw_input_contents.append(b"more")
        assert numbers(await infer(unused)) == [1]


@pytest.mark.parametrize("datatype", ["", "FOO", "int32"])
async def test_types_that_do_not_exist(datatype: str) -> None:
    request = infer_request("echo", 1)
    request.inputs[0].datatype = datatype
    async with serving(SmallService(EchoModel())) as running:
        assert await failure(running.stub.ModelInfer(request)) == (
            INVALID,
            "[request id: <id_unknown>] inference input 'INPUT0' data-type is '<invalid>', "
            "but model 'echo' expects 'INT32'",
        )
