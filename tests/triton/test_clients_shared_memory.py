"""tritonclient's shared memory utilities."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import serialize_byte_tensor

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
    assert status(client, library) == ["exchange"]
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
