"""Long messages of inference requests, which are read in pieces: the same as those parsed at once, and bounded."""

from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.grpc import messages, requests
from sluice.gateway.api.v2.grpc.messages import MAX_FIELDS, split_contents, split_message
from sluice.serving.tensors import byte_strings
from tests.gateway.api.v2.grpc.parts import EchoModel, failure, serving
from tests.gateway.api.v2.small_service import SmallService

VALUES: dict[str, tuple[str, list[Any]]] = {
    "bool_contents": ("BOOL", [True, False]),
    "int_contents": ("INT32", [0, -1, 2**31 - 1, -(2**31)]),
    "int64_contents": ("INT64", [1, -(2**63), 2**63 - 1]),
    "uint_contents": ("UINT32", [0, 2**32 - 1]),
    "uint64_contents": ("UINT64", [127, 128, 2**64 - 1]),
    "fp32_contents": ("FP32", [0.5, -2.0]),
    "fp64_contents": ("FP64", [0.1, 1e300]),
    "bytes_contents": ("BYTES", [b"", b"a", b"x" * 300]),
}


def message(kind: str, values: list[Any], **more: Any) -> "pb.ModelInferRequest":
    made = pb.ModelInferRequest(model_name="m", id="7", **more)
    added = made.inputs.add(name="INPUT0", datatype=VALUES[kind][0], shape=[len(values)])
    added.parameters["p"].int64_param = 3
    getattr(added.contents, kind).extend(values)
    made.outputs.add(name="OUTPUT0")
    return made


@pytest.mark.parametrize("kind", VALUES)
def test_long_contents_are_the_contents(kind: str) -> None:
    values = VALUES[kind][1] * (20_000 if kind == "bytes_contents" else 60_000)
    split = split_message(message(kind, values).SerializeToString())
    assert (split.header.id, split.header.outputs[0].name, split.header.inputs[0].name) == ("7", "OUTPUT0", "INPUT0")
    assert split.header.inputs[0].parameters["p"].int64_param == 3
    assert split.header.inputs[0].HasField("contents")
    pieces = [list(getattr(piece, kind)) for piece in split_contents(split.contents[0])]
    assert len(pieces) > 1 and [value for piece in pieces for value in piece] == values


def test_numbers_that_are_not_packed_are_read_too() -> None:
    raw = b"\x18\x05" * 100_000
    assert [each for piece in split_contents(memoryview(raw)) for each in piece.int64_contents] == [5] * 100_000


def test_raw_contents_stay_where_they_came() -> None:
    made = pb.ModelInferRequest(model_name="m")
    made.inputs.add(name="INPUT0", datatype="UINT8", shape=[100_000])
    made.raw_input_contents.append(bytes(range(250)) * 400)
    made.raw_input_contents.append(b"")
    split = split_message(made.SerializeToString())
    assert [bytes(each) for each in split.raw] == list(made.raw_input_contents)
    assert not split.header.raw_input_contents and isinstance(split.raw[0], memoryview)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"\x2a\x00" * 50_000, ErrorCode.INVALID),
        (b"\x3a\x00" * 50_000, ErrorCode.INVALID),
        (b"\x0a\xff\xff\x7f" + b"x" * 70_000, ErrorCode.INTERNAL),
        (b"\x0a" + b"\xff" * 70_000, ErrorCode.INTERNAL),
        (b"\x0b" * 70_000, ErrorCode.INTERNAL),
        (b"\x1a\x80\x80\x20" + b"x" * (1 << 19), ErrorCode.INVALID),
    ],
)
def test_long_messages_that_cannot_be_read_are_refused(raw: bytes, code: ErrorCode) -> None:
    with pytest.raises(SluiceError) as caught:
        split_message(raw)
    assert caught.value.code is code


async def test_a_long_request_with_contents_is_answered() -> None:
    async with serving(SmallService(EchoModel(datatype="INT32"))) as running:
        sent = message("int_contents", list(range(100_000)))
        sent.model_name = "echo"
        del sent.outputs[:]
        answer = await running.stub.ModelInfer(sent)
    assert len(answer.raw_output_contents[0]) == 400_000


async def test_more_strings_than_a_tensor_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_strings, "MAX_ELEMENTS", 40_000)
    async with serving(SmallService(EchoModel(datatype="BYTES"))) as running:
        sent = message("bytes_contents", [b""] * (byte_strings.MAX_ELEMENTS + 1))
        sent.model_name = "echo"
        code, text = await failure(running.stub.ModelInfer(sent))
    assert code == "INVALID_ARGUMENT" and f"more than {byte_strings.MAX_ELEMENTS} string elements" in text


async def test_contents_that_would_not_fit_a_message_as_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_CONTENTS_BYTES", 100_000)
    async with serving(SmallService(EchoModel(datatype="INT64"))) as running:
        sent = message("int64_contents", [1] * 100_000)
        sent.model_name = "echo"
        code, text = await failure(running.stub.ModelInfer(sent))
    assert code == "INVALID_ARGUMENT" and "raw_input_contents" in text


async def test_settings_are_short() -> None:
    async with serving(SmallService()) as running:
        long = pb.ModelReadyRequest(name="x" * (messages.INLINE_BYTES + 1))
        code, text = await failure(running.stub.ModelReady(long))
        assert code == "INVALID_ARGUMENT" and str(messages.INLINE_BYTES) in text
        load = pb.RepositoryModelLoadRequest(model_name="m")
        for number in range(MAX_FIELDS + 1):
            load.parameters[f"file:{number:020}"].bytes_param = b""
        code, text = await failure(running.stub.RepositoryModelLoad(load))
        assert code == "INVALID_ARGUMENT" and str(MAX_FIELDS) in text
