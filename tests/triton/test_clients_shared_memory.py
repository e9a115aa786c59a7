"""tritonclient's shared memory utilities."""

from base64 import b64encode
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from tests.triton.clients import Library, text

VALUES = np.arange(4, dtype=np.float32).reshape(1, 4)
SIZE = VALUES.nbytes


@pytest.fixture
def region() -> Iterator[Any]:
    """Room for four tensors of the size of VALUES, and more."""
    name = f"sluice_{uuid4().hex}"
    handle = shm.create_shared_memory_region(name, f"/{name}", 4096)
    yield handle
    shm.destroy_shared_memory_region(handle)


@pytest.fixture
def registered(client: Any, region: Any) -> Iterator[str]:
    client.register_system_shared_memory("exchange", region._shm_key, 4096)
    yield "exchange"
    client.unregister_system_shared_memory("exchange")


def status(client: Any, library: Library) -> list[str]:
    answer = library.ask(client, "get_system_shared_memory_status")
    if library.name == "http":
        return [entry["name"] for entry in answer]
    return list(answer.get("regions", {}))


def test_tensors_in_and_out(client: Any, library: Library, region: Any, registered: str) -> None:
    shm.set_shared_memory_region(region, [VALUES, VALUES * 10])
    inputs = [library.module.InferInput(name, [1, 4], "FP32") for name in ("INPUT0", "INPUT1")]
    outputs = [library.output(name) for name in ("OUTPUT0", "OUTPUT1")]
    for position, tensor in enumerate([*inputs, *outputs]):
        tensor.set_shared_memory(registered, SIZE, offset=position * SIZE)
    client.infer("add_sub", inputs, outputs=outputs)
    np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.float32, [1, 4], 2 * SIZE), VALUES * 11)
    np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.float32, [1, 4], 3 * SIZE), VALUES * -9)


def test_text_in_and_out(client: Any, library: Library, region: Any, registered: str) -> None:
    words = text(b"one", "größer".encode(), b"").reshape(1, 3)
    serialized = serialize_byte_tensor(words)
    shm.set_shared_memory_region(region, [serialized])
    tensor = library.module.InferInput("INPUT0", [1, 3], "BYTES")
    tensor.set_shared_memory(registered, len(serialized.item()))
    output = library.output("OUTPUT0")
    output.set_shared_memory(registered, 1024, offset=1024)
    client.infer("identity_bytes", [tensor], outputs=[output])
    np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.object_, [1, 3], 1024), words)


def test_status(client: Any, library: Library, region: Any) -> None:
    assert status(client, library) == []
    client.register_system_shared_memory("mine", region._shm_key, 64, offset=128)
    assert status(client, library) == ["mine"]
    client.unregister_system_shared_memory("mine")
    client.register_system_shared_memory("again", region._shm_key, 64)
    client.unregister_system_shared_memory()
    assert status(client, library) == []


def test_a_region_that_is_not_there(client: Any, library: Library) -> None:
    with pytest.raises(InferenceServerException, match="Unable to open shared memory region"):
        client.register_system_shared_memory("nothing", "/sluice_nothing", 64)
    tensor = library.module.InferInput("INPUT0", [1, 4], "FP32")
    tensor.set_shared_memory("nothing", SIZE)
    with pytest.raises(InferenceServerException, match="nothing"):
        client.infer("add_sub", [tensor, library.tensor("INPUT1", VALUES)])


def test_a_name_is_registered_once(client: Any, region: Any, registered: str) -> None:
    with pytest.raises(InferenceServerException, match="already in manager"):
        client.register_system_shared_memory(registered, region._shm_key, 64)


def test_reading_and_writing_stays_inside(client: Any, library: Library, registered: str) -> None:
    tensor = library.module.InferInput("INPUT0", [1, 4], "FP32")
    tensor.set_shared_memory(registered, SIZE, offset=4096 - SIZE + 1)
    with pytest.raises(InferenceServerException, match=r"[Ii]nvalid offset"):
        client.infer("add_sub", [tensor, library.tensor("INPUT1", VALUES)])
    output = library.output("OUTPUT0")
    output.set_shared_memory(registered, SIZE - 1)
    with pytest.raises(InferenceServerException, match="shared memory size specified with the request"):
        client.infer("add_sub", [library.tensor(name, VALUES) for name in ("INPUT0", "INPUT1")], outputs=[output])


def test_cuda_memory_needs_a_gpu(client: Any, library: Library) -> None:
    with pytest.raises(InferenceServerException, match="GPU"):
        client.register_cuda_shared_memory("gpu", b64encode(bytes(64)), 0, 64)
    status = library.ask(client, "get_cuda_shared_memory_status")
    assert status in ([], {})
