import asyncio
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.errors import ErrorCode
from sluice.gateway.api.v2.shared_memory import LongCopyError, Region, SharedMemoryRegistry, copy_window
from tests.errors import error_of

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


def refusal(call: Callable[..., object], *arguments: Any) -> tuple[ErrorCode, str]:
    error = error_of(call, *arguments)
    return error.code, error.message


@pytest.mark.parametrize("offset", [0, 1, mmap.PAGESIZE - 1, mmap.PAGESIZE, mmap.PAGESIZE + 7])
def test_a_region_begins_at_its_offset(registry: SharedMemoryRegistry, make: Make, offset: int) -> None:
    data = np.random.default_rng(7).bytes(3 * mmap.PAGESIZE)
    key = make(data)
    registry.register("late", key, offset, 100)
    assert bytes(registry.read("late", 0, 100)) == data[offset : offset + 100]
    assert bytes(registry.read("late", 90, 10)) == data[offset + 90 : offset + 100]
    assert bytes(registry.read("late", 3, 0)) == b""
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


def test_names_are_listed_and_taken_once(registry: SharedMemoryRegistry, make: Make) -> None:
    key = make(b"0123456789")
    registry.register("b", key, 0, 10)
    registry.register("a", key.lstrip("/"), 4, 2)
    first, second = Region("a", key.lstrip("/"), 4, 2), Region("b", key, 0, 10)
    assert (registry.status(), registry.status("b")) == ([first, second], [second])
    assert refusal(registry.status, "c") == (ErrorCode.NOT_FOUND, "Unable to find system shared memory region: 'c'")
    taken = (ErrorCode.ALREADY_EXISTS, "shared memory region 'b' already in manager")
    assert refusal(registry.register, "b", key, 0, 5) == taken
    registry.unregister("b")
    registry.unregister("not there")
    assert registry.status() == [first] and bytes(registry.read("a", 0, 2)) == b"45"
    registry.unregister("")
    assert registry.status() == []


RESERVED = "//triton_python_backend_shm_region_1"
NO_KEY = "cannot register shared memory region 'name' - invalid shm key '{}'"


@pytest.mark.parametrize(
    ("key", "code", "words"),
    [
        *(
            (key, ErrorCode.INTERNAL, f"Unable to open shared memory region: '{key}'")
            for key in ("/no_such_object", "/../tmp", "/a/b", ".", "null\0character", "x" * 300)
        ),
        *((key, ErrorCode.INVALID, NO_KEY.format(key)) for key in ("", "/", "//")),
        (RESERVED, ErrorCode.INVALID, "the key contains the reserved prefix 'triton_python_backend_shm_region_'"),
    ],
)
def test_keys_that_cannot_be_opened(registry: SharedMemoryRegistry, key: str, code: ErrorCode, words: str) -> None:
    found, message = refusal(registry.register, "name", key, 0, 1)
    assert found is code and words in message
    assert registry.status() == []


def test_without_leave_regions_are_neither_registered_nor_unregistered() -> None:
    closed = SharedMemoryRegistry()
    text = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
    assert refusal(closed.register, "name", "/key", 0, 1) == (ErrorCode.UNIMPLEMENTED, text)
    assert refusal(closed.unregister, "") == (ErrorCode.UNIMPLEMENTED, text)
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
    assert refusal(registry.read, "used", 0, 1)[0] is ErrorCode.NOT_FOUND


@pytest.mark.parametrize("kind", ["a link out of shared memory", "a pipe"])
def test_other_files_are_no_shared_memory(
    registry: SharedMemoryRegistry, make: Make, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    path = path_of(make(b""))
    path.unlink()
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "secret")
    assert refusal(registry.register, "name", path.name, 0, 6)[0] is ErrorCode.INTERNAL


@pytest.mark.parametrize(
    ("offset", "byte_size", "reason"),
    [
        *((0, 101, "invalid args"), (200, 10, "invalid args"), (50, 51, "invalid args"), (-1, 5, "invalid args")),
        *((2**64 - 1, 10, "invalid args"), (0, 2**64 - 1, "invalid args"), (2**64 - 50, 60, "invalid args")),
        (0, 0, "unable to process address space"),
    ],
)
def test_regions_beyond_the_object(
    registry: SharedMemoryRegistry, make: Make, offset: int, byte_size: int, reason: str
) -> None:
    code, message = refusal(registry.register, "name", make(bytes(100)), offset, byte_size)
    assert code is ErrorCode.INVALID
    assert message.startswith(f"failed to register shared memory region 'name': {reason}")


OUTSIDE, BEYOND = "Invalid offset for", "Invalid offset + byte size for"


@pytest.mark.parametrize(
    ("offset", "byte_size", "reason"),
    [
        *((100, 1, OUTSIDE), (100, 0, OUTSIDE), (101, 0, OUTSIDE), (-1, 4, OUTSIDE), (2**63, 4, OUTSIDE)),
        *((90, 11, BEYOND), (0, 101, BEYOND), (0, -4, BEYOND)),
        (32, 2**64 - 32, f"Integer overflow detected: byte_size ({2**64 - 32}) + offset (32) exceeds maximum value"),
    ],
)
def test_what_lies_outside_is_refused(
    registry: SharedMemoryRegistry, make: Make, offset: int, byte_size: int, reason: str
) -> None:
    registry.register("small", make(bytes(500)), 200, 100)
    for look in (registry.read, registry.window):
        code, message = refusal(look, "small", offset, byte_size)
        assert code is ErrorCode.INVALID and message.startswith(reason) and "'small'" in message
    assert refusal(registry.read, "nowhere", 0, 1) == (
        ErrorCode.NOT_FOUND,
        "Unable to find shared memory region: 'nowhere'",
    )


def test_an_object_that_its_client_cut_short_does_not_end_the_process(
    registry: SharedMemoryRegistry, make: Make
) -> None:
    key = make(bytes(4 * mmap.PAGESIZE))
    registry.register("shrinking", key, 0, 4 * mmap.PAGESIZE)
    os.truncate(path_of(key), mmap.PAGESIZE)
    assert len(bytes(registry.read("shrinking", 0, mmap.PAGESIZE))) == mmap.PAGESIZE
    code, _ = refusal(registry.read, "shrinking", mmap.PAGESIZE, 1)
    assert code is ErrorCode.INVALID


def test_a_long_copy_is_none_of_the_event_loop() -> None:
    long = 3 << 20
    memory = memoryview(bytearray(b"y" * long))

    async def copy_on_the_loop() -> bytes | memoryview:
        with pytest.raises(LongCopyError):
            copy_window(memory)
        return copy_window(memory[:8])

    with asyncio.Runner() as runner:
        assert runner.run(copy_on_the_loop()) == b"y" * 8
    copied = copy_window(memory)
    memory[0:1] = b"z"
    assert bytes(copied) == b"y" * long
