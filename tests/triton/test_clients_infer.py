"""Inference by tritonclient over both protocols."""

import json
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from tests.server_process import ServerProcess
from tests.triton.clients import GRPC, HTTP, Library, text
from tests.waiting import PATIENCE_S

LEFT = np.arange(8, dtype=np.float32).reshape(2, 4)
RIGHT = np.full((2, 4), 0.5, np.float32)


def pair(library: Library, **settings: Any) -> list[Any]:
    return [library.tensor("INPUT0", LEFT, **settings), library.tensor("INPUT1", RIGHT, **settings)]


def check_sums(result: Any) -> None:
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), LEFT + RIGHT)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), LEFT - RIGHT)


def echoed(client: Any, library: Library, **settings: Any) -> dict[str, Any]:
    """Return the request as the model received it."""
    result = client.infer("params_echo", [library.tensor("INPUT0", np.array([1], np.int32))], **settings)
    seen: dict[str, Any] = json.loads(result.as_numpy("PARAMS")[0])
    return seen


def test_infer(client: Any, library: Library) -> None:
    result = client.infer("add_sub", pair(library), request_id="seven")
    check_sums(result)
    response = result.get_response(**library.as_json)
    assert (response["model_name"], response["model_version"], response["id"]) == ("add_sub", "1", "seven")


@pytest.mark.parametrize("sends_binary", [True, False])
@pytest.mark.parametrize("wants_binary", [True, False])
def test_json_and_binary_mix(triton: ServerProcess, sends_binary: bool, wants_binary: bool) -> None:
    outputs = [HTTP.output(name, binary_data=wants_binary) for name in ("OUTPUT0", "OUTPUT1")]
    with HTTP.client(triton) as client:
        check_sums(client.infer("add_sub", pair(HTTP, binary_data=sends_binary), outputs=outputs))


@pytest.mark.parametrize("is_binary", [True, False])
def test_text_arrives_as_it_is(triton: ServerProcess, is_binary: bool) -> None:
    words = text("größer".encode(), b"", b"x" * 70_000, b' \\ "quoted" \x01').reshape(2, 2)
    with HTTP.client(triton) as client:
        inputs = [HTTP.tensor("INPUT0", words, binary_data=is_binary)]
        result = client.infer("identity_bytes", inputs, outputs=[HTTP.output("OUTPUT0", binary_data=is_binary)])
    assert [_bytes(word) for word in result.as_numpy("OUTPUT0").flat] == list(words.flat)


def _bytes(word: str | bytes) -> bytes:
    return word.encode() if isinstance(word, str) else word


def test_bytes_need_not_be_text(client: Any, library: Library) -> None:
    blobs = text(b"\xff\xfe\x00", bytes(range(256))).reshape(1, 2)
    result = client.infer("identity_bytes", [library.tensor("INPUT0", blobs)])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), blobs)


@pytest.mark.parametrize(
    "values",
    [
        np.array([True, False]),
        np.array([0, 255], np.uint8),
        np.array([0, 2**16 - 1], np.uint16),
        np.array([0, 2**32 - 1], np.uint32),
        np.array([0, 2**64 - 1], np.uint64),
        np.array([-(2**7), 2**7 - 1], np.int8),
        np.array([-(2**15), 2**15 - 1], np.int16),
        np.array([-(2**31), 2**31 - 1], np.int32),
        np.array([-(2**63), 2**63 - 1], np.int64),
        np.array([-1.5, np.inf], np.float16),
        np.array([-0.0, np.nan], np.float32),
        np.array([1e300, -np.inf], np.float64),
    ],
    ids=lambda values: str(values.dtype),
)
def test_every_datatype(client: Any, library: Library, values: NDArray[Any]) -> None:
    tensor = library.tensor("IN", values)
    datatype = tensor.datatype()
    result = client.infer("alltypes", [library.tensor(f"IN_{datatype}", values)])
    returned = result.as_numpy(f"OUT_{datatype}")
    assert returned.dtype == values.dtype
    np.testing.assert_array_equal(returned, values)


def test_bf16(client: Any, library: Library) -> None:
    values = np.array([[1.0, -2.5, 3.140625]], ml_dtypes.bfloat16)
    result = client.infer("half", [library.tensor("X", values, "BF16")])
    np.testing.assert_array_equal(result.as_numpy("Y"), values)


@pytest.mark.parametrize("request_algorithm", [None, "gzip", "deflate"])
@pytest.mark.parametrize("response_algorithm", [None, "gzip", "deflate"])
def test_compressed_http(triton: ServerProcess, request_algorithm: str | None, response_algorithm: str | None) -> None:
    with HTTP.client(triton) as client:
        result = client.infer(
            "add_sub",
            pair(HTTP),
            request_compression_algorithm=request_algorithm,
            response_compression_algorithm=response_algorithm,
        )
    check_sums(result)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_grpc(triton: ServerProcess, algorithm: str) -> None:
    with GRPC.client(triton) as client:
        check_sums(client.infer("add_sub", pair(GRPC), compression_algorithm=algorithm))


def test_async_infer_over_http(triton: ServerProcess) -> None:
    with HTTP.client(triton, concurrency=8) as client:
        pending = [client.async_infer("add_sub", pair(HTTP), request_id=str(number)) for number in range(32)]
        results = [request.get_result() for request in pending]
    for number, result in enumerate(results):
        check_sums(result)
        assert result.get_response()["id"] == str(number)


def test_async_infer_over_grpc(triton: ServerProcess) -> None:
    answers: dict[str, Any] = {}
    all_arrived = threading.Event()

    def take(result: Any, error: InferenceServerException | None) -> None:
        assert error is None, error
        answers[result.get_response().id] = result
        if len(answers) == 32:
            all_arrived.set()

    with GRPC.client(triton) as client:
        for number in range(32):
            client.async_infer("add_sub", pair(GRPC), callback=take, request_id=str(number))
        assert all_arrived.wait(PATIENCE_S)
    for result in answers.values():
        check_sums(result)


def test_only_the_wanted_outputs_come(client: Any, library: Library) -> None:
    result = client.infer("add_sub", pair(library), outputs=[library.output("OUTPUT1")])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), LEFT - RIGHT)
    assert result.get_output("OUTPUT0") is None


def test_classification(client: Any, library: Library) -> None:
    result = client.infer("add_sub", pair(library), outputs=[library.output("OUTPUT0", class_count=2)])
    best = [[_bytes(entry).split(b":") for entry in row] for row in result.as_numpy("OUTPUT0")]
    assert [[(float(value), int(index), label) for value, index, label in row] for row in best] == [
        [(3.5, 3, b"three"), (2.5, 2, b"two")],
        [(7.5, 3, b"three"), (6.5, 2, b"two")],
    ]


def test_request_parameters_reach_the_model(client: Any, library: Library) -> None:
    parameters = {"count": 3, "is_new": True, "word": "hello"}
    seen = echoed(client, library, parameters=parameters, request_id="r1")
    assert (seen["params"], seen["id"]) == (parameters, "r1")


def test_timeout_reaches_the_model(client: Any, library: Library) -> None:
    assert echoed(client, library, timeout=5_000_000)["timeout"] == 5_000_000


def test_priority_is_taken(client: Any, library: Library) -> None:
    numbers = np.array([[1, 2, 3]], np.int32)
    result = client.infer("ragged", [library.tensor("X", numbers)], priority=1, timeout=5_000_000)
    assert result.as_numpy("TOTAL").tolist() == [[6]]


def test_a_sequence_keeps_its_state(client: Any, library: Library) -> None:
    sums = []
    for number in (1, 2, 3):
        result = client.infer(
            "sequence_accum",
            [library.tensor("INPUT", np.array([[number]], np.int32))],
            sequence_id=4711,
            sequence_start=number == 1,
            sequence_end=number == 3,
        )
        sums.append((int(result.as_numpy("SUM")[0, 0]), result.as_numpy("FLAGS")[0].tolist()))
        assert result.as_numpy("ID").tolist() == [[4711]]
    assert sums == [(1, [1, 0, 1]), (3, [0, 0, 1]), (6, [0, 1, 1])]


def test_a_sequence_may_be_named(client: Any, library: Library) -> None:
    for word, so_far in ((b"one", b"one"), (b"two", b"one two")):
        result = client.infer(
            "sequence_text",
            [library.tensor("WORD", text(word).reshape(1, 1))],
            sequence_id="named",
            sequence_start=word == b"one",
            sequence_end=word == b"two",
        )
        assert so_far in result.as_numpy("SO_FAR")[0, 0]


def test_a_version_may_be_chosen(client: Any, library: Library) -> None:
    values = np.array([1], np.int32)
    for version, expected in (("1", 101), ("2", 201), ("", 201)):
        result = client.infer("versioned", [library.tensor("INPUT0", values)], model_version=version)
        assert result.as_numpy("OUTPUT0").tolist() == [expected]


def test_onnx_answers_as_onnxruntime_does(client: Any, library: Library, repository: Path) -> None:
    values = np.random.default_rng(5).normal(size=(3, 4)).astype(np.float32)
    session = onnxruntime.InferenceSession(repository / "scale" / "1" / "model.onnx")
    [expected] = session.run(None, {"X": values})
    result = client.infer("scale", [library.tensor("X", values)])
    np.testing.assert_array_equal(result.as_numpy("Y"), expected)


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        ("nope", {"INPUT0": LEFT}, "unknown model: 'nope'"),
        ("add_sub", {"INPUT0": LEFT}, "expected 2 inputs but got 1"),
        ("add_sub", {"INPUT0": LEFT, "Q": RIGHT}, "unexpected inference input 'Q'"),
        ("add_sub", {"INPUT0": LEFT, "INPUT1": RIGHT[:, :3]}, "unexpected shape for input 'INPUT1'"),
        ("add_sub", {"INPUT0": LEFT, "INPUT1": RIGHT.astype(np.int32)}, "data-type"),
        ("text_repeat", {"text_input": text(b"a")}, "decoupled"),
    ],
)
def test_what_cannot_be_asked(
    client: Any, library: Library, model: str, inputs: dict[str, NDArray[Any]], words: str
) -> None:
    tensors = [library.tensor(name, values) for name, values in inputs.items()]
    with pytest.raises(InferenceServerException, match=words):
        client.infer(model, tensors)
    check_sums(client.infer("add_sub", pair(library)))
