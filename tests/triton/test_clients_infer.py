"""Inference by tritonclient over both protocols, blocking and with asyncio."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc.aio
import tritonclient.http.aio
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from tests.server_process import ServerProcess
from tests.triton.clients import GRPC, HTTP, Library, text
from tests.triton.held import Hold
from tests.triton.server import http_address
from tests.waiting import PATIENCE_S

LEFT = np.arange(8, dtype=np.float32).reshape(2, 4)
RIGHT = np.full((2, 4), 0.5, np.float32)
ONE = np.array([1], np.int32)


def pair(library: Library, **settings: Any) -> list[Any]:
    return [library.tensor("INPUT0", LEFT, **settings), library.tensor("INPUT1", RIGHT, **settings)]


def check_sums(result: Any) -> None:
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), LEFT + RIGHT)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), LEFT - RIGHT)


def as_bytes(word: str | bytes) -> bytes:
    return word.encode() if isinstance(word, str) else word


def test_infer(client: Any, library: Library) -> None:
    result = client.infer("add_sub", pair(library), request_id="seven")
    check_sums(result)
    response = result.get_response(**library.as_json)
    assert (response["model_name"], response["model_version"], response["id"]) == ("add_sub", "1", "seven")


@pytest.mark.parametrize(
    ("sends_binary", "wants_binary", "request_algorithm", "response_algorithm"),
    [
        (True, True, None, None),
        (True, False, "gzip", "deflate"),
        (False, True, "deflate", "gzip"),
        (False, False, "gzip", "gzip"),
    ],
)
def test_http_s_forms_of_tensors_and_compressions(
    triton: ServerProcess,
    sends_binary: bool,
    wants_binary: bool,
    request_algorithm: str | None,
    response_algorithm: str | None,
) -> None:
    words = text("größer".encode(), b"", b"x" * 70_000, b' \\ "quoted" \x01').reshape(2, 2)
    settings = {
        "request_compression_algorithm": request_algorithm,
        "response_compression_algorithm": response_algorithm,
    }
    with HTTP.client(triton) as client:
        outputs = [HTTP.output(name, binary_data=wants_binary) for name in ("OUTPUT0", "OUTPUT1")]
        check_sums(client.infer("add_sub", pair(HTTP, binary_data=sends_binary), outputs=outputs, **settings))
        inputs = [HTTP.tensor("INPUT0", words, binary_data=sends_binary)]
        result = client.infer("identity_bytes", inputs, outputs=outputs[:1], **settings)
    assert [as_bytes(word) for word in result.as_numpy("OUTPUT0").flat] == list(words.flat)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_grpc(triton: ServerProcess, algorithm: str) -> None:
    with GRPC.client(triton) as client:
        check_sums(client.infer("add_sub", pair(GRPC), compression_algorithm=algorithm))


def test_every_datatype(client: Any, library: Library) -> None:
    integers: list[NDArray[Any]] = [
        np.array([np.iinfo(f"{kind}{bits}").min, np.iinfo(f"{kind}{bits}").max], f"{kind}{bits}")
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    ]
    floats: list[NDArray[Any]] = [
        np.array([-1.5, np.inf], np.float16),
        np.array([-0.0, np.nan], np.float32),
        np.array([1e300, -np.inf]),
    ]
    for values in [*integers, *floats, np.array([True, False])]:
        datatype = library.tensor("IN", values).datatype()
        result = client.infer("alltypes", [library.tensor(f"IN_{datatype}", values)])
        returned = result.as_numpy(f"OUT_{datatype}")
        assert returned.dtype == values.dtype
        np.testing.assert_array_equal(returned, values)
    halves = np.array([[1.0, -2.5, 3.140625]], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(client.infer("half", [library.tensor("X", halves, "BF16")]).as_numpy("Y"), halves)
    blobs = text(b"\xff\xfe\x00", bytes(range(256))).reshape(1, 2)
    result = client.infer("identity_bytes", [library.tensor("INPUT0", blobs)])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), blobs)


def test_async_infer_over_http(triton: ServerProcess) -> None:
    with HTTP.client(triton, concurrency=8) as client:
        pending = [client.async_infer("add_sub", pair(HTTP), request_id=str(number)) for number in range(32)]
        for number, result in enumerate(each.get_result() for each in pending):
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


def test_wanted_outputs_and_classes(client: Any, library: Library) -> None:
    result = client.infer("add_sub", pair(library), outputs=[library.output("OUTPUT1")])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), LEFT - RIGHT)
    assert result.get_output("OUTPUT0") is None
    result = client.infer("add_sub", pair(library), outputs=[library.output("OUTPUT0", class_count=2)])
    best = [[as_bytes(entry).split(b":") for entry in row] for row in result.as_numpy("OUTPUT0")]
    assert [[(float(value), int(index), label) for value, index, label in row] for row in best] == [
        [(3.5, 3, b"three"), (2.5, 2, b"two")],
        [(7.5, 3, b"three"), (6.5, 2, b"two")],
    ]


def test_what_a_request_says_reaches_the_model(client: Any, library: Library) -> None:
    parameters = {"count": 3, "is_new": True, "word": "hello"}
    asked = {"parameters": parameters, "request_id": "r1", "timeout": 5_000_000}
    result = client.infer("params_echo", [library.tensor("INPUT0", ONE)], **asked)
    seen = json.loads(result.as_numpy("PARAMS")[0])
    assert (seen["params"], seen["id"], seen["timeout"]) == (parameters, "r1", 5_000_000)
    numbers = np.array([[1, 2, 3]], np.int32)
    result = client.infer("ragged", [library.tensor("X", numbers)], priority=1, timeout=5_000_000)
    assert result.as_numpy("TOTAL").tolist() == [[6]]


def test_a_sequence_keeps_its_state(client: Any, library: Library) -> None:
    sums = []
    for number in (1, 2, 3):
        sequence: dict[str, Any] = {"sequence_start": number == 1, "sequence_end": number == 3}
        inputs = [library.tensor("INPUT", np.array([[number]], np.int32))]
        result = client.infer("sequence_accum", inputs, sequence_id=4711, **sequence)
        sums.append((int(result.as_numpy("SUM")[0, 0]), result.as_numpy("FLAGS")[0].tolist()))
        words = [library.tensor("WORD", text(b"w%d" % number).reshape(1, 1))]
        named = client.infer("sequence_text", words, sequence_id="named", **sequence)
        assert b" ".join(b"w%d" % each for each in range(1, number + 1)) in named.as_numpy("SO_FAR")[0, 0]
    assert sums == [(1, [1, 0, 1]), (3, [0, 0, 1]), (6, [0, 1, 1])]


def test_a_version_may_be_chosen(client: Any, library: Library) -> None:
    for version, expected in (("1", 101), ("2", 201), ("", 201)):
        result = client.infer("versioned", [library.tensor("INPUT0", ONE)], model_version=version)
        assert result.as_numpy("OUTPUT0").tolist() == [expected]


def test_onnx_answers_as_onnxruntime_does(client: Any, library: Library, repository: Path) -> None:
    values = np.random.default_rng(5).normal(size=(3, 4)).astype(np.float32)
    [expected] = onnxruntime.InferenceSession(repository / "scale" / "1" / "model.onnx").run(None, {"X": values})
    result = client.infer("scale", [library.tensor("X", values)])
    np.testing.assert_array_equal(result.as_numpy("Y"), expected)
    metadata = library.ask(client, "get_model_metadata", "scale")
    assert (metadata["platform"], metadata["inputs"][0]["name"]) == ("onnxruntime_onnx", "X")


async def test_the_asyncio_clients(library: Library, triton: ServerProcess) -> None:
    if library is HTTP:
        client: Any = tritonclient.http.aio.InferenceServerClient(http_address(triton))
    else:
        client = tritonclient.grpc.aio.InferenceServerClient(triton.grpc_address)
    async with client:
        assert await client.is_server_live() and await client.is_model_ready("add_sub")
        assert (await client.get_model_metadata("versioned", **library.as_json))["versions"] == ["1", "2"]
        for result in await asyncio.gather(*(client.infer("add_sub", pair(library)) for _ in range(64))):
            check_sums(result)
        with pytest.raises(InferenceServerException, match="unknown model: 'nope'"):
            await client.infer("nope", pair(library))


async def test_a_cancelled_task_reaches_the_model(triton: ServerProcess, hold: Hold) -> None:
    async with tritonclient.grpc.aio.InferenceServerClient(triton.grpc_address) as client:
        task = asyncio.create_task(client.infer("held", hold.inputs(GRPC)))
        await asyncio.to_thread(hold.wait_started)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(hold.wait_cancelled)
