"""The shared memory extensions, and tensors that lie there."""

import asyncio
import base64
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.v2.shared_memory import LongCopyError, copy_window
from tests.gateway.http.v2.small_server import SmallServer

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
IDENTITY = "/v2/models/identity/infer"
KEY = f"/sluice_test_{os.getpid()}"
FILE = Path("/dev/shm") / KEY[1:]
HANDLE = base64.b64encode(bytes(64)).decode()


@pytest.fixture
def region(small: SmallServer) -> Iterator[str]:
    """Sixteen floats that count from 0 in shared memory, registered as `r`."""
    FILE.write_bytes(struct.pack("<16f", *range(16)))
    assert small.post(f"{SYSTEM}/region/r/register", {"key": KEY, "byte_size": 64}).status_code == 200
    yield "r"
    small.post(f"{SYSTEM}/unregister")
    FILE.unlink()


def infer(where: dict[str, Any] | None, out: dict[str, Any] | None = None) -> dict[str, Any]:
    tensor: dict[str, Any] = {"name": "INPUT0", "shape": [1, 2], "datatype": "FP32"}
    tensor |= {"data": [1.5, 2.5]} if where is None else {"parameters": where}
    outputs = [] if out is None else [{"name": "OUTPUT0", "parameters": out}]
    return {"inputs": [tensor], "outputs": outputs}


def place(region: str, size: int, offset: int = 0) -> dict[str, Any]:
    return {"shared_memory_region": region, "shared_memory_byte_size": size, "shared_memory_offset": offset}


def test_status(small: SmallServer, region: str) -> None:
    row = {"name": "r", "key": KEY, "offset": 0, "byte_size": 64}
    assert small.get(f"{SYSTEM}/status").json() == [row]
    assert small.get(f"{SYSTEM}/region/r/status").json() == [row]
    assert small.post(f"{SYSTEM}/region/r/unregister").status_code == 200
    assert small.get(f"{SYSTEM}/status").json() == []


def test_inputs_are_read_and_outputs_written_there(small: SmallServer, region: str) -> None:
    (output,) = small.post(IDENTITY, infer(place(region, 8, 12))).json()["outputs"]
    assert output["data"] == [3.0, 4.0]
    (output,) = small.post(IDENTITY, infer(None, place(region, 20, 40))).json()["outputs"]
    assert output == {"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 2]}
    assert struct.unpack("<2f", FILE.read_bytes()[40:48]) == (1.5, 2.5)
    assert FILE.read_bytes()[48:] == struct.pack("<4f", *range(12, 16))


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (infer(place("nope", 8)), 404, "Unable to find shared memory region: 'nope'"),
        (infer(place("r", 400)), 400, "Invalid offset + byte size for shared memory region: 'r'"),
        (infer(place("r", 8, 60)), 400, "Invalid offset + byte size for shared memory region: 'r'"),
        (
            infer({"shared_memory_region": "r"}),
            400,
            "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model 'identity'. Expected 8, "
            "got 0",
        ),
        (infer(place("r", 0, 64)), 400, "Invalid offset for shared memory region: 'r'"),
        (
            infer(None, {"shared_memory_offset": "0"}),
            500,
            "Unable to parse 'shared_memory_offset': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            infer({"shared_memory_region": 5}),
            500,
            "Unable to parse 'shared_memory_region': attempt to access JSON non-string as string",
        ),
        (
            infer(place("r", 4)),
            400,
            "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model 'identity'. Expected 8, "
            "got 4",
        ),
        (
            infer(None, place("r", 4)),
            500,
            "shared memory size specified with the request for output 'OUTPUT0' (4 bytes) should be at least 8 bytes "
            "to hold the results",
        ),
        (
            infer(None, place("r", 8) | {"classification": 1}),
            400,
            "Output can't set both 'shared_memory_region' and 'classification'",
        ),
        (
            infer(None, place("r", 8) | {"binary_data": True}),
            400,
            "Output can't set both 'shared_memory_region' and 'binary_data'",
        ),
    ],
)
def test_places_that_do_not_fit(small: SmallServer, region: str, body: Any, status: int, error: str) -> None:
    response = small.post(IDENTITY, body)
    assert (response.status_code, response.json()) == (status, {"error": error})


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        (f"{SYSTEM}/register", {}, 400, "'region name' is necessary to register system shared memory region"),
        (f"{SYSTEM}/region/x/register", {}, 400, "Shared memory register request has no 'key' field"),
        (f"{SYSTEM}/region/x/register", {"key": KEY}, 400, "Shared memory register request has no 'byte_size' field"),
        (
            f"{SYSTEM}/region/x/register",
            {"key": 5},
            400,
            "Unable to parse 'key': attempt to access JSON non-string as string",
        ),
        (
            f"{SYSTEM}/region/x/register",
            {"key": KEY, "byte_size": -4},
            400,
            "Unable to parse 'byte_size': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            f"{SYSTEM}/region/x/register",
            {"key": "/no_such_memory", "byte_size": 4},
            500,
            "Unable to open shared memory region: '/no_such_memory'",
        ),
        (f"{CUDA}/register", {}, 400, "'region name' is necessary to register cuda shared memory region"),
        (f"{CUDA}/region/x/register", {}, 400, "Shared memory register request has no 'raw_handle' field"),
        (
            f"{CUDA}/region/x/register",
            {"raw_handle": {"b64": HANDLE}, "byte_size": 4},
            400,
            "Shared memory register request has no 'device_id' field",
        ),
        (
            f"{CUDA}/region/x/register",
            {"raw_handle": {"b64": "AAAA"}, "byte_size": 4, "device_id": 0},
            400,
            "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t",
        ),
        (
            f"{CUDA}/region/x/register",
            {"raw_handle": {"b64": HANDLE}, "byte_size": 4, "device_id": 0},
            400,
            "failed to register CUDA shared memory region: 'x', GPUs not supported",
        ),
    ],
)
def test_what_cannot_be_registered(small: SmallServer, path: str, body: Any, status: int, error: str) -> None:
    response = small.post(path, body)
    assert (response.status_code, response.json()) == (status, {"error": error})


def test_a_name_is_taken_once(small: SmallServer, region: str) -> None:
    response = small.post(f"{SYSTEM}/region/r/register", {"key": KEY, "byte_size": 64})
    assert (response.status_code, response.json()) == (400, {"error": "shared memory region 'r' already in manager"})


def test_there_is_no_cuda_memory(small: SmallServer) -> None:
    assert small.get(f"{CUDA}/status").json() == []
    assert small.get(f"{CUDA}/region/x/status").status_code == 404
    assert small.post(f"{CUDA}/unregister").status_code == 200
    assert small.post(f"{CUDA}/region/x/unregister").status_code == 200


def test_unregistering_what_is_not_there_is_no_error(small: SmallServer) -> None:
    assert small.post(f"{SYSTEM}/region/x/unregister").status_code == 200
    assert small.get(f"{SYSTEM}/region/x/status").status_code == 404


LONG = 3 << 20
"""Bytes that a thread copies."""


@pytest.fixture
def long_region(small: SmallServer) -> Iterator[str]:
    """Two halves of shared memory, registered as `long`; the first has one string."""
    FILE.write_bytes(struct.pack("<I", LONG - 4) + b"x" * (LONG - 4) + bytes(LONG))
    assert small.post(f"{SYSTEM}/region/long/register", {"key": KEY, "byte_size": 2 * LONG}).status_code == 200
    yield "long"
    small.post(f"{SYSTEM}/unregister")
    FILE.unlink()


def test_a_long_copy_is_none_of_the_event_loop() -> None:
    memory = memoryview(bytearray(b"y" * LONG))

    async def copy_on_the_loop() -> None:
        with pytest.raises(LongCopyError):
            copy_window(memory)
        assert copy_window(memory[:8]) == b"y" * 8

    asyncio.run(copy_on_the_loop())
    copied = copy_window(memory)
    memory[0:1] = b"z"
    assert bytes(copied) == b"y" * LONG


def test_a_long_string_in_shared_memory_comes_back(small: SmallServer, long_region: str) -> None:
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "BYTES", "parameters": place(long_region, LONG)}
    outputs = [{"name": "OUTPUT0", "parameters": place(long_region, LONG, LONG)}]
    answer = small.post("/v2/models/identity_bytes/infer", {"inputs": [tensor], "outputs": outputs})
    assert answer.status_code == 200, answer.text
    content = FILE.read_bytes()
    assert content[LONG:] == content[:LONG]
