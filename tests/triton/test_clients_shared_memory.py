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
def region(client: Any) -> Iterator[Any]:
    """4096 bytes, registered as `exchange`."""
    name = f"sluice_{uuid4().hex}"
    handle = shm.create_shared_memory_region(name, f"/{name}", 4096)
    client.register_system_shared_memory("exchange", handle._shm_key, 4096)
    yield handle
    client.unregister_system_shared_memory()
    shm.destroy_shared_memory_region(handle)


def there(tensor: Any, size: int, offset: int = 0) -> Any:
    """Let an input or output lie in the region."""
    tensor.set_shared_memory("exchange", size, offset=offset)
    return tensor


def status(client: Any, library: Library) -> list[str]:
    answer = library.ask(client, "get_system_shared_memory_status")
    return [entry["name"] for entry in answer] if library.name == "http" else list(answer.get("regions", {}))


def test_tensors_in_and_out(client: Any, library: Library, region: Any) -> None:
    shm.set_shared_memory_region(region, [VALUES, VALUES * 10])
    inputs = [there(library.module.InferInput(f"INPUT{n}", [1, 4], "FP32"), SIZE, n * SIZE) for n in range(2)]
    outputs = [there(library.output(f"OUTPUT{n}"), SIZE, (2 + n) * SIZE) for n in range(2)]
    client.infer("add_sub", inputs, outputs=outputs)
    np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.float32, [1, 4], 2 * SIZE), VALUES * 11)
    np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.float32, [1, 4], 3 * SIZE), VALUES * -9)
    words = text(b"one", "größer".encode(), b"").reshape(1, 3)
    serialized = serialize_byte_tensor(words)
    shm.set_shared_memory_region(region, [serialized])
    tensor = there(library.module.InferInput("INPUT0", [1, 3], "BYTES"), len(serialized.item()))
    client.infer("identity_bytes", [tensor], outputs=[there(library.output("OUTPUT0"), 1024, 1024)])
    np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.object_, [1, 3], 1024), words)


def test_regions_are_listed_until_they_are_unregistered(client: Any, library: Library, region: Any) -> None:
    client.register_system_shared_memory("mine", region._shm_key, 64, offset=128)
    assert sorted(status(client, library)) == ["exchange", "mine"]
    with pytest.raises(InferenceServerException, match="already in manager"):
        client.register_system_shared_memory("mine", region._shm_key, 64)
    client.unregister_system_shared_memory("mine")
    assert status(client, library) == ["exchange"]
    client.unregister_system_shared_memory()
    assert status(client, library) == []


def test_what_cannot_be_read_or_written(client: Any, library: Library, region: Any) -> None:
    given = library.tensor("INPUT1", VALUES)
    outside = there(library.module.InferInput("INPUT0", [1, 4], "FP32"), SIZE, 4096 - SIZE + 1)
    with pytest.raises(InferenceServerException, match=r"[Ii]nvalid offset"):
        client.infer("add_sub", [outside, given])
    short = there(library.output("OUTPUT0"), SIZE - 1)
    with pytest.raises(InferenceServerException, match="shared memory size specified with the request"):
        client.infer("add_sub", [library.tensor("INPUT0", VALUES), given], outputs=[short])
    with pytest.raises(InferenceServerException, match="Unable to open shared memory region"):
        client.register_system_shared_memory("nothing", "/sluice_nothing", 64)
    with pytest.raises(InferenceServerException, match="GPU"):
        client.register_cuda_shared_memory("gpu", b64encode(bytes(64)), 0, 64)
    assert library.ask(client, "get_cuda_shared_memory_status") in ([], {})
