import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gateway.v2.shared_memory import Region, SharedMemoryRegistry
from sluice.errors import ErrorCode, SluiceError

Make = Callable[[bytes], str]


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a function that makes a shared memory object of some bytes, and returns its key."""
    made: list[Path] = []

    def make_one(data: bytes) -> str:
        path = Path("/dev/shm", f"sluice_test_{os.getpid()}_{secrets.token_hex(4)}")
        path.write_bytes(data)
        made.append(path)
        return f"/{path.name}"

    yield make_one
    for path in made:
        path.unlink(missing_ok=True)


@pytest.fixture
def registry() -> Iterator[SharedMemoryRegistry]:
    made = SharedMemoryRegistry(is_allowed=True)
    yield made
    made.close()


def path_of(key: str) -> Path:
    return Path("/dev/shm", key.lstrip("/"))


def is_mapped(key: str) -> bool:
    return path_of(key).name in Path("/proc/self/maps").read_text()


def refusal(call: Callable[[], object]) -> tuple[ErrorCode, str]:
    with pytest.raises(SluiceError) as caught:
        call()
    return caught.value.code, caught.value.message


def test_reads_where_the_client_has_written(registry: SharedMemoryRegistry, make: Make) -> None:
    registry.register("input", make(b"0123456789"), 0, 10)
    assert bytes(registry.read("input", 0, 10)) == b"0123456789"
    assert bytes(registry.read("input", 3, 2)) == b"34"
    assert bytes(registry.read("input", 3, 0)) == bytes(registry.read("input", 0, 0)) == b""


@pytest.mark.parametrize("offset", [1, 50, mmap.PAGESIZE - 1, mmap.PAGESIZE, mmap.PAGESIZE + 7])
def test_a_region_begins_at_its_offset(registry: SharedMemoryRegistry, make: Make, offset: int) -> None:
    data = np.random.default_rng(7).bytes(3 * mmap.PAGESIZE)
    key = make(data)
    registry.register("late", key, offset, 100)
    assert bytes(registry.read("late", 0, 100)) == data[offset : offset + 100]
    assert bytes(registry.read("late", 90, 10)) == data[offset + 90 : offset + 100]
    registry.window("late", 5, 7)[:] = b"written"
    assert path_of(key).read_bytes() == data[: offset + 5] + b"written" + data[offset + 12 :]


def test_nothing_is_copied(registry: SharedMemoryRegistry, make: Make) -> None:
    key = make(bytes(16))
    registry.register("live", key, 0, 16)
    array = np.frombuffer(registry.read("live", 0, 16), np.int32)
    with path_of(key).open("r+b") as file:
        file.write(np.arange(4, dtype=np.int32).tobytes())
    assert array.tolist() == [0, 1, 2, 3]
    assert not array.flags.writeable


def test_a_window_is_checked_first_and_written_later(registry: SharedMemoryRegistry, make: Make) -> None:
    key = make(bytes(8))
    registry.register("output", key, 0, 8)
    window = registry.window("output", 2, 4)
    registry.unregister("output")
    window[:] = b"late"
    assert path_of(key).read_bytes() == b"\0\0late\0\0"


def test_what_is_in_use_stays_mapped(registry: SharedMemoryRegistry, make: Make) -> None:
    key = make(b"still here")
    registry.register("used", key, 0, 10)
    view = registry.read("used", 0, 10)
    registry.unregister("used")
    registry.close()
    path_of(key).unlink()
    assert bytes(view) == b"still here"
    assert is_mapped(key)
    view.release()
    del view
    assert not is_mapped(key)


def test_closing_unmaps_everything(registry: SharedMemoryRegistry, make: Make) -> None:
    keys = [make(bytes(10)) for _ in range(3)]
    for number, key in enumerate(keys):
        registry.register(str(number), key, 0, 10)
    assert all(is_mapped(key) for key in keys)
    registry.close()
    assert not any(is_mapped(key) for key in keys)


def test_several_names_for_one_object(registry: SharedMemoryRegistry, make: Make) -> None:
    key = make(b"0123456789")
    registry.register("first", key, 0, 5)
    registry.register("second", key, 5, 5)
    registry.unregister("first")
    assert bytes(registry.read("second", 0, 5)) == b"56789"


def test_status_lists_by_name(registry: SharedMemoryRegistry, make: Make) -> None:
    key = make(bytes(100))
    registry.register("b", key, 0, 100)
    registry.register("a", key.lstrip("/"), 40, 20)
    first, second = Region("a", key.lstrip("/"), 40, 20), Region("b", key, 0, 100)
    assert registry.status() == [first, second]
    assert registry.status("b") == [second]
    code, message = refusal(lambda: registry.status("c"))
    assert (code, message) == (ErrorCode.NOT_FOUND, "Unable to find system shared memory region: 'c'")


def test_unregistering_what_is_not_there_is_no_error(registry: SharedMemoryRegistry, make: Make) -> None:
    registry.register("there", make(bytes(1)), 0, 1)
    registry.unregister("not there")
    assert len(registry.status()) == 1
    registry.unregister("")
    assert registry.status() == []


def test_a_name_is_registered_once(registry: SharedMemoryRegistry, make: Make) -> None:
    key = make(bytes(10))
    registry.register("twice", key, 0, 10)
    code, message = refusal(lambda: registry.register("twice", key, 0, 5))
    assert (code, message) == (ErrorCode.ALREADY_EXISTS, "shared memory region 'twice' already in manager")
    assert registry.status("twice")[0].byte_size == 10


@pytest.mark.parametrize("key", ["/no_such_object", "/../tmp", "/a/b", ".", "null\0character", "x" * 300])
def test_keys_that_cannot_be_opened(registry: SharedMemoryRegistry, key: str) -> None:
    code, message = refusal(lambda: registry.register("name", key, 0, 1))
    assert (code, message) == (ErrorCode.INTERNAL, f"Unable to open shared memory region: '{key}'")
    assert registry.status() == []


@pytest.mark.parametrize("key", ["", "/", "//"])
def test_a_key_that_names_nothing(registry: SharedMemoryRegistry, key: str) -> None:
    expected = f"cannot register shared memory region 'name' - invalid shm key '{key}'"
    assert refusal(lambda: registry.register("name", key, 0, 1)) == (ErrorCode.INVALID, expected)


def test_objects_of_the_python_backend_are_reserved(registry: SharedMemoryRegistry) -> None:
    code, message = refusal(lambda: registry.register("name", "//triton_python_backend_shm_region_1", 0, 1))
    assert code is ErrorCode.INVALID
    assert "the key contains the reserved prefix 'triton_python_backend_shm_region_'" in message


def test_without_leave_regions_are_neither_registered_nor_unregistered() -> None:
    closed = SharedMemoryRegistry()
    text = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
    for call in (lambda: closed.register("name", "/key", 0, 1), lambda: closed.unregister("")):
        assert refusal(call) == (ErrorCode.UNIMPLEMENTED, text)
    assert closed.status() == []


def test_a_region_in_use_stays_until_its_last_request_ends(registry: SharedMemoryRegistry, make: Make) -> None:
    registry.register("used", make(bytes(10)), 0, 10)
    first = registry.window("used", 0, 4)
    registry.unregister("")
    assert [each.name for each in registry.status()] == ["used"]
    second = registry.read("used", 4, 4)
    del first
    assert [each.name for each in registry.status()] == ["used"]
    del second
    assert registry.status() == []
    assert refusal(lambda: registry.read("used", 0, 1))[0] is ErrorCode.NOT_FOUND


def test_a_link_out_of_shared_memory_is_not_followed(
    registry: SharedMemoryRegistry, make: Make, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    path = path_of(make(b""))
    path.unlink()
    path.symlink_to(tmp_path / "secret")
    assert refusal(lambda: registry.register("link", path.name, 0, 6))[0] is ErrorCode.INTERNAL


def test_a_pipe_is_no_shared_memory(registry: SharedMemoryRegistry, make: Make) -> None:
    path = path_of(make(b""))
    path.unlink()
    os.mkfifo(path)
    assert refusal(lambda: registry.register("pipe", path.name, 0, 6))[0] is ErrorCode.INTERNAL


@pytest.mark.parametrize(
    ("offset", "byte_size"), [(0, 101), (200, 10), (50, 51), (2**64 - 1, 10), (0, 2**64 - 1), (2**64 - 50, 60), (-1, 5)]
)
def test_regions_beyond_the_object(registry: SharedMemoryRegistry, make: Make, offset: int, byte_size: int) -> None:
    code, message = refusal(lambda: registry.register("name", make(bytes(100)), offset, byte_size))
    assert (code, message) == (ErrorCode.INVALID, "failed to register shared memory region 'name': invalid args")


def test_an_empty_region_cannot_be_mapped(registry: SharedMemoryRegistry, make: Make) -> None:
    code, message = refusal(lambda: registry.register("name", make(bytes(100)), 0, 0))
    assert code is ErrorCode.INVALID
    assert message.startswith("failed to register shared memory region 'name': unable to process address space")


@pytest.mark.parametrize(
    ("offset", "byte_size", "reason"),
    [
        (100, 1, "Invalid offset"),
        (100, 0, "Invalid offset"),
        (101, 0, "Invalid offset"),
        (-1, 4, "Invalid offset"),
        (2**63, 4, "Invalid offset"),
        (90, 11, "Invalid offset + byte size"),
        (0, 101, "Invalid offset + byte size"),
        (0, -4, "Invalid offset + byte size"),
    ],
)
def test_what_lies_outside_is_refused(
    registry: SharedMemoryRegistry, make: Make, offset: int, byte_size: int, reason: str
) -> None:
    registry.register("small", make(bytes(500)), 200, 100)
    expected = (ErrorCode.INVALID, f"{reason} for shared memory region: 'small'")
    assert refusal(lambda: registry.read("small", offset, byte_size)) == expected
    assert refusal(lambda: registry.window("small", offset, byte_size)) == expected


def test_sizes_that_overflow(registry: SharedMemoryRegistry, make: Make) -> None:
    registry.register("small", make(bytes(100)), 0, 100)
    message = "Integer overflow detected: byte_size (18446744073709551584) + offset (32) exceeds maximum value"
    found = refusal(lambda: registry.window("small", 32, 2**64 - 32))
    assert found == (ErrorCode.INVALID, f"{message} (18446744073709551615) for region 'small'")


def test_writing_beyond_the_end_changes_nothing(registry: SharedMemoryRegistry, make: Make) -> None:
    key = make(bytes(10))
    registry.register("small", key, 0, 10)
    assert refusal(lambda: registry.window("small", 8, 4))[0] is ErrorCode.INVALID
    assert path_of(key).read_bytes() == bytes(10)


def test_unknown_regions(registry: SharedMemoryRegistry) -> None:
    expected = (ErrorCode.NOT_FOUND, "Unable to find shared memory region: 'nowhere'")
    assert refusal(lambda: registry.read("nowhere", 0, 1)) == expected


def test_an_object_that_its_client_cut_short_does_not_end_the_process(
    registry: SharedMemoryRegistry, make: Make
) -> None:
    key = make(bytes(4 * mmap.PAGESIZE))
    registry.register("shrinking", key, 0, 4 * mmap.PAGESIZE)
    os.truncate(path_of(key), mmap.PAGESIZE)
    assert len(bytes(registry.read("shrinking", 0, mmap.PAGESIZE))) == mmap.PAGESIZE
    code, _ = refusal(lambda: registry.read("shrinking", mmap.PAGESIZE, 1))
    assert code is ErrorCode.INVALID
