"""NVIDIA's own HTTP clients work as with Triton."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as blocking
import tritonclient.http.aio as concurrent
from tritonclient.utils import InferenceServerException, shared_memory

from tests.gateway.http.v2.small_server import SmallServer

VALUES = np.arange(4, dtype=np.float32).reshape(1, 4)


@pytest.fixture
def client(small: SmallServer) -> Iterator[Any]:
    with blocking.InferenceServerClient(small.url.removeprefix("http://")) as client:
        yield client


def inputs(is_binary: bool, kind: Any = blocking) -> list[Any]:
    made = [kind.InferInput(f"INPUT{index}", [1, 4], "FP32") for index in range(2)]
    for tensor in made:
        tensor.set_data_from_numpy(VALUES, binary_data=is_binary)
    return made


@pytest.mark.parametrize("is_binary_in", [True, False])
@pytest.mark.parametrize("is_binary_out", [True, False])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_infer(client: Any, is_binary_in: bool, is_binary_out: bool, compression: str | None) -> None:
    outputs = [blocking.InferRequestedOutput(f"OUTPUT{index}", binary_data=is_binary_out) for index in range(2)]
    result = client.infer(
        "add_sub",
        inputs(is_binary_in),
        outputs=outputs,
        request_id="a",
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )
    assert result.get_response()["id"] == "a"
    assert np.array_equal(result.as_numpy("OUTPUT0"), VALUES * 2)
    assert np.array_equal(result.as_numpy("OUTPUT1"), VALUES * 0)


def test_without_outputs_all_come_in_binary(client: Any) -> None:
    assert np.array_equal(client.infer("add_sub", inputs(True)).as_numpy("OUTPUT0"), VALUES * 2)


@pytest.mark.parametrize("is_binary", [True, False])
def test_strings(client: Any, is_binary: bool) -> None:
    values = np.array([["é漢", "", "\x00x"]], np.object_)
    tensor = blocking.InferInput("INPUT0", [1, 3], "BYTES")
    tensor.set_data_from_numpy(values, binary_data=is_binary)
    wanted = [blocking.InferRequestedOutput("OUTPUT0", binary_data=is_binary)]
    result = client.infer("identity_bytes", [tensor], outputs=wanted).as_numpy("OUTPUT0")
    texts = [value.decode() if isinstance(value, bytes) else value for value in result.ravel()]
    assert texts == values.ravel().tolist()


def test_classes(client: Any) -> None:
    outputs = [blocking.InferRequestedOutput("OUTPUT0", class_count=1)]
    result = client.infer("add_sub", inputs(True), outputs=outputs)
    assert result.as_numpy("OUTPUT0").ravel().tolist() == [b"6.000000:3:three"]


def test_shared_memory(client: Any) -> None:
    region = shared_memory.create_shared_memory_region("r", f"/sluice_client_{os.getpid()}", 48)
    try:
        shared_memory.set_shared_memory_region(region, [VALUES, VALUES])
        client.register_system_shared_memory("client", f"/sluice_client_{os.getpid()}", 48)
        made = [blocking.InferInput(f"INPUT{index}", [1, 4], "FP32") for index in range(2)]
        for index, tensor in enumerate(made):
            tensor.set_shared_memory("client", 16, 16 * index)
        output = blocking.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("client", 16, 32)
        result = client.infer("add_sub", made, outputs=[output])
        assert result.get_output("OUTPUT0")["shape"] == [1, 4]
        assert np.array_equal(shared_memory.get_contents_as_numpy(region, np.float32, [1, 4], 32), VALUES * 2)
        assert client.get_system_shared_memory_status()[0]["name"] == "client"
        client.unregister_system_shared_memory("client")
        assert client.get_system_shared_memory_status() == []
        assert client.get_cuda_shared_memory_status() == []
    finally:
        shared_memory.destroy_shared_memory_region(region)


def test_what_only_asks(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add_sub")
    assert not client.is_model_ready("nope")
    assert client.get_server_metadata()["name"] == "triton"
    assert client.get_model_metadata("versioned", "1")["versions"] == ["1"]
    assert client.get_model_config("add_sub")["max_batch_size"] == 8
    assert client.get_inference_statistics("add_sub")["model_stats"][0]["name"] == "add_sub"
    assert client.get_model_repository_index()[0]["name"] == "identity"
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.get_log_settings()["log_info"] is True


def test_what_changes(client: Any, small: SmallServer) -> None:
    client.load_model("m", config="{}", files={"file:1/model.py": b"x"})
    client.unload_model("m", unload_dependents=True)
    assert small.service.repository.calls[-1] == ("unload", "m", True)
    assert client.update_trace_settings("add_sub", {"trace_rate": "5"})["trace_rate"] == "5"
    assert client.update_trace_settings("add_sub", {"trace_rate": None})["trace_rate"] == "1000"
    assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
    client.update_log_settings({"log_verbose_level": 0})


def test_errors_have_their_message(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'nope' is not found"):
        client.infer("nope", inputs(True))


async def test_the_asyncio_client(small: SmallServer) -> None:
    async with concurrent.InferenceServerClient(small.url.removeprefix("http://")) as client:
        result = await client.infer("add_sub", inputs(True, concurrent), response_compression_algorithm="gzip")
        assert np.array_equal(result.as_numpy("OUTPUT0"), VALUES * 2)
        assert await client.is_model_ready("add_sub")
