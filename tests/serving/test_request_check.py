"""The words are those of tritonserver 2.51, asked over gRPC."""

import struct
from collections.abc import Sequence

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.request import InferRequest
from sluice.serving.request_check import check_request
from sluice.serving.spec import ModelSpec, build_spec
from sluice.serving.tensors.datatypes import DATA_TYPES
from sluice.serving.tensors.tensor import Tensor

NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
UNKNOWN = "[request id: <id_unknown>] "


def spec(text: str) -> ModelSpec:
    return build_spec(text_format.Parse(text, ModelConfig()), 1)


ADD_SUB = spec("""
    name: "add_sub" max_batch_size: 8
    input [ { name: "INPUT0" data_type: TYPE_FP32 dims: 4 }, { name: "INPUT1" data_type: TYPE_FP32 dims: 4 } ]
    output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: 4 }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: 4 } ]
""")
IDENTITY = spec("""
    name: "identity"
    input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1, -1 ] }
    output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1, -1 ] }
""")
BYTES = spec("""
    name: "identity_bytes"
    input { name: "INPUT0" data_type: TYPE_STRING dims: [ -1, -1 ] }
    output { name: "OUTPUT0" data_type: TYPE_STRING dims: [ -1, -1 ] }
""")
TEXT_ONCE = spec("""
    name: "text_once" max_batch_size: 4
    input { name: "text_input" data_type: TYPE_STRING dims: 1 }
    input { name: "max_tokens" data_type: TYPE_INT32 dims: 1 optional: true }
    output { name: "text_output" data_type: TYPE_STRING dims: 1 }
""")
SEQUENCE = spec("""
    name: "sequence_accum" max_batch_size: 4
    sequence_batching {
        control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
    }
    input { name: "INPUT" data_type: TYPE_INT32 dims: 1 }
    output { name: "SUM" data_type: TYPE_INT32 dims: 1 }
""")


def tensor(name: str, shape: Sequence[int], datatype: str = "FP32", raw: bytes | None = None) -> Tensor:
    """Zeros, as many as the shape asks for."""
    if raw is None:
        raw = bytes(DATA_TYPES[datatype].itemsize * max(0, int(np.prod(shape))))
    return Tensor(name, datatype, shape, raw)


def asked(*tensors: Tensor, outputs: Sequence[str] = (), id: str = "") -> InferRequest:
    return InferRequest({each.name: each for each in tensors}, id, tuple(outputs))


def refusal(request: InferRequest, of: ModelSpec) -> str:
    with pytest.raises(SluiceError) as caught:
        check_request(request, of)
    assert caught.value.code is ErrorCode.INVALID
    return caught.value.message


GOOD0, GOOD1 = tensor("INPUT0", [1, 4]), tensor("INPUT1", [1, 4])


@pytest.mark.parametrize("rows", [1, 8])
def test_what_fits_passes_and_tells_its_rows(rows: int) -> None:
    request = asked(tensor("INPUT0", [rows, 4]), tensor("INPUT1", [rows, 4]), outputs=["OUTPUT1"])
    check_request(request, ADD_SUB)
    assert request.batch_size == rows


def test_arrays_pass_as_bytes_do() -> None:
    array = np.ones((2, 4), np.float32)
    request = asked(Tensor.of("INPUT0", array), Tensor.of("INPUT1", array))
    check_request(request, ADD_SUB)
    assert request.batch_size == 2


@pytest.mark.parametrize("shape", [[0, 4], [3, 0], [2, 5]])
def test_a_model_without_batches_takes_any_size(shape: list[int]) -> None:
    request = asked(tensor("INPUT0", shape))
    check_request(request, IDENTITY)
    assert request.batch_size == 1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (asked(GOOD0, outputs=["NOPE"]), "unexpected inference output 'NOPE' for model 'add_sub'"),
        (
            asked(GOOD0, id="x"),
            "[request id: x] expected 2 inputs but got 1 inputs for model 'add_sub'. Got input(s) ['INPUT0'], but "
            "missing required input(s) ['INPUT1']. Please provide all required input(s).",
        ),
        (
            asked(),
            UNKNOWN + "expected 2 inputs but got 0 inputs for model 'add_sub'. Got input(s) [], but missing required "
            "input(s) ['INPUT0','INPUT1']. Please provide all required input(s).",
        ),
        (
            asked(GOOD0, GOOD1, tensor("X", [1, 4])),
            UNKNOWN + "expected 2 inputs but got 3 inputs for model 'add_sub'. Got input(s) ['X','INPUT1','INPUT0'], "
            "but missing required input(s) []. Please provide all required input(s).",
        ),
        (asked(GOOD0, tensor("X", [1, 4])), "unexpected inference input 'X' for model 'add_sub'"),
        (asked(tensor("INPUT0", [2, 4]), tensor("X", [1, 4])), "unexpected inference input 'X' for model 'add_sub'"),
        (
            asked(GOOD0, tensor("INPUT1", [2, 4])),
            UNKNOWN + "input 'INPUT0' batch size does not match other inputs for 'add_sub'",
        ),
        (
            asked(tensor("INPUT0", [9, 4]), tensor("INPUT1", [9, 4])),
            UNKNOWN + "inference request batch-size must be <= 8 for 'add_sub'",
        ),
        (
            asked(tensor("INPUT0", [0, 4]), tensor("INPUT1", [0, 4])),
            UNKNOWN + "input byte size mismatch for input 'INPUT1' for model 'add_sub'. Expected 16, got 0",
        ),
        (
            asked(tensor("INPUT0", [2, 4]), tensor("INPUT1", [0, 4])),
            UNKNOWN + "input byte size mismatch for input 'INPUT1' for model 'add_sub'. Expected 32, got 0",
        ),
        (
            asked(tensor("INPUT0", [0, 4], raw=bytes(16)), tensor("INPUT1", [0, 4], raw=bytes(16))),
            UNKNOWN + "inference request batch-size must be >= 1 for 'add_sub'",
        ),
        (
            asked(tensor("INPUT0", [-1, 4]), tensor("INPUT1", [-1, 4])),
            UNKNOWN + "input 'INPUT0' batch size does not match other inputs for 'add_sub'",
        ),
        (
            asked(tensor("INPUT0", []), GOOD1),
            UNKNOWN + "input 'INPUT0' has no shape but model requires batch dimension for 'add_sub'",
        ),
        (
            asked(tensor("INPUT0", [4]), tensor("INPUT1", [4])),
            UNKNOWN + "unexpected shape for input 'INPUT1' for model 'add_sub'. Expected [-1,4], got [4]. " + NOTE,
        ),
        (
            asked(tensor("INPUT0", [1, 4, 1]), GOOD1),
            UNKNOWN + "unexpected shape for input 'INPUT0' for model 'add_sub'. Expected [-1,4], got [1,4,1]. " + NOTE,
        ),
        (
            asked(tensor("INPUT0", [1, 4], "INT32"), GOOD1),
            UNKNOWN + "inference input 'INPUT0' data-type is 'INT32', but model 'add_sub' expects 'FP32'",
        ),
        (
            asked(tensor("INPUT0", [1, 4], "fp32", bytes(16)), GOOD1),
            UNKNOWN + "inference input 'INPUT0' data-type is '<invalid>', but model 'add_sub' expects 'FP32'",
        ),
        (
            asked(tensor("INPUT0", [1, -1]), GOOD1),
            UNKNOWN + "All input dimensions should be specified for input 'INPUT0' for model 'add_sub', got [1,-1]",
        ),
        (
            asked(tensor("INPUT0", [1, 4], raw=bytes(12)), GOOD1),
            UNKNOWN + "input byte size mismatch for input 'INPUT0' for model 'add_sub'. Expected 16, got 12",
        ),
        (
            asked(tensor("INPUT0", [1, 3]), tensor("INPUT1", [1, 5])),
            UNKNOWN + "unexpected shape for input 'INPUT1' for model 'add_sub'. Expected [-1,4], got [1,5]. " + NOTE,
        ),
    ],
)
def test_a_batching_model_refuses(request_: InferRequest, message: str) -> None:
    assert refusal(request_, ADD_SUB) == message


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            asked(tensor("INPUT0", [4])),
            UNKNOWN + "unexpected shape for input 'INPUT0' for model 'identity'. Expected [-1,-1], got [4]. ",
        ),
        (
            asked(tensor("INPUT0", [])),
            UNKNOWN + "unexpected shape for input 'INPUT0' for model 'identity'. Expected [-1,-1], got []. ",
        ),
        (
            asked(tensor("INPUT0", [-2, -4], raw=bytes(32))),
            UNKNOWN + "All input dimensions should be specified for input 'INPUT0' for model 'identity', got [-2,-4]",
        ),
        (
            asked(tensor("INPUT0", [-1, -1], raw=bytes(4))),
            UNKNOWN + "All input dimensions should be specified for input 'INPUT0' for model 'identity', got [-1,-1]",
        ),
        (
            asked(tensor("INPUT0", [0, 4], raw=bytes(4))),
            UNKNOWN + "input byte size mismatch for input 'INPUT0' for model 'identity'. Expected 0, got 4",
        ),
        (
            asked(tensor("INPUT0", [1 << 40, 1 << 40], raw=bytes(32))),
            UNKNOWN + f"input byte size mismatch for input 'INPUT0' for model 'identity'. Expected {4 << 80}, got 32",
        ),
        (asked(tensor("I", [1, 1])), "unexpected inference input 'I' for model 'identity'"),
    ],
)
def test_a_model_without_batches_refuses(request_: InferRequest, message: str) -> None:
    assert refusal(request_, IDENTITY) == message


def packed(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(each)) + each for each in elements)


LENGTH_CUT = (
    "incomplete string length indicator for inference input 'INPUT0' for model 'identity_bytes', expecting 4 bytes but "
    "only 1 bytes available. Please make sure the string length indicator is in one buffer."
)


@pytest.mark.parametrize(
    ("count", "raw", "message"),
    [
        (2, packed(b"a"), UNKNOWN + "expected 2 string elements for inference input 'INPUT0' for model {}, got 1"),
        (1, b"", UNKNOWN + "expected 1 string elements for inference input 'INPUT0' for model {}, got 0"),
        (
            1,
            packed(b"a", b"b") + b"x",
            UNKNOWN + "unexpected number of string elements 2 for inference input 'INPUT0' for model {}, expecting 1",
        ),
        (
            0,
            packed(b"a"),
            UNKNOWN + "unexpected number of string elements 1 for inference input 'INPUT0' for model {}, expecting 0",
        ),
        (1, packed(b"a") + b"x", UNKNOWN + LENGTH_CUT),
        (
            2,
            packed(b"a") + b"\xff\0\0\0ab",
            "incomplete string data for inference input 'INPUT0', expecting string of length 255 but only 2 bytes "
            "available",
        ),
        (
            2,
            b"\xff\0\0\0ab",
            UNKNOWN + "expected 2 string elements for inference input 'INPUT0' for model {}, got 1",
        ),
    ],
)
def test_strings_are_counted(count: int, raw: bytes, message: str) -> None:
    request = asked(tensor("INPUT0", [1, count], "BYTES", raw))
    assert refusal(request, BYTES) == message.format("'identity_bytes'")


@pytest.mark.parametrize("elements", [(), (b"a",), (b"", b"\xff" * 300)])
def test_whole_strings_pass(elements: tuple[bytes, ...]) -> None:
    check_request(asked(tensor("INPUT0", [1, len(elements)], "BYTES", packed(*elements))), BYTES)


def test_optional_inputs_may_be_left_out() -> None:
    text = tensor("text_input", [2, 1], "BYTES", packed(b"a", b"b"))
    request = asked(text)
    check_request(request, TEXT_ONCE)
    assert request.batch_size == 2
    check_request(asked(text, tensor("max_tokens", [2, 1], "INT32")), TEXT_ONCE)
    assert refusal(asked(), TEXT_ONCE) == (
        UNKNOWN + "expected number of inputs between 1 and 2 but got 0 inputs for model 'text_once'. Got input(s) [], "
        "but missing required input(s) ['text_input']. Please provide all required input(s)."
    )


def test_a_client_may_not_set_the_inputs_of_the_sequence_batcher() -> None:
    start = tensor("START", [1, 1], "INT32")
    assert refusal(asked(start), SEQUENCE) == "unexpected inference input 'START' for model 'sequence_accum'"
    assert "got 2 inputs" in refusal(asked(tensor("INPUT", [1, 1], "INT32"), start), SEQUENCE)


@pytest.mark.parametrize(
    ("dims", "reshape", "shape", "seen"),
    [
        ("1", "", (3, 1), (3,)),
        ("[ 4, -1 ]", "shape: [ -1, 2, 2 ]", (3, 4, 5), (3, 5, 2, 2)),
        ("[ -1, -1 ]", "shape: [ -1, 1, -1 ]", (3, 4, 5), (3, 4, 1, 5)),
    ],
)
def test_reshaped_inputs_keep_their_rows_and_values(
    dims: str, reshape: str, shape: tuple[int, ...], seen: tuple[int, ...]
) -> None:
    of = spec(
        f'name: "r" max_batch_size: 8 input {{ name: "X" data_type: TYPE_INT32 dims: {dims} reshape {{ {reshape} }} }}'
    )
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    for given in (Tensor("X", "INT32", shape, array.tobytes()), Tensor.of("X", array)):
        request = asked(given)
        check_request(request, of)
        assert request.inputs["X"].shape == seen
        assert request.inputs["X"].array.ravel().tolist() == array.ravel().tolist()
        assert given.shape == shape


def test_reshaped_strings() -> None:
    of = spec('name: "r" max_batch_size: 8 input { name: "X" data_type: TYPE_STRING dims: 1 reshape { shape: [] } }')
    request = asked(tensor("X", [2, 1], "BYTES", packed(b"a", b"b")))
    check_request(request, of)
    assert request.inputs["X"].array.tolist() == [b"a", b"b"]
