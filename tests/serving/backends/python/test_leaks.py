"""Models release all their resources."""

import gc
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from sluice.errors import SluiceError
from sluice.serving.backends.python import connection
from sluice.serving.backends.python.shared_memory import MAX_FREE_BYTES
from sluice.serving.model import infer_one
from tests.serving.backends.python.parts import ARRAY, array_request, ask, children, loaded, write_model
from tests.waiting import until

CODE = """
class TritonPythonModel:
    def execute(self, requests):
        if requests[0].inputs()[0].name() == "TEXT":
            return [text(self.mapped()) for _ in requests]
        y = lambda request: pb_utils.Tensor("Y", request.inputs()[0].as_numpy() * 2)
        return [pb_utils.InferenceResponse([y(request)]) for request in requests]

    def mapped(self):
        with open("/proc/self/maps") as maps:
            spans = [line.split()[0].split("-") for line in maps if "sluice-tensor" in line]
        return sum(int(end, 16) - int(start, 16) for start, end in spans)
"""
BOTH = (
    ARRAY.replace("input {", "input { optional: true ")
    + """
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] optional: true }
output { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
"""
)


MOST_LEFT_BYTES = 256 * 1024
"""Less than one of the buffers that frames are read into."""


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_tensor_fds() -> int:
    """Return the number of open segments, of which other tests of this process have none."""
    links = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return sum("sluice-tensor" in link for link in links)


def mapped_bytes() -> int:
    spans = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "sluice-tensor" in line
    ]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def is_unmapped() -> bool:
    gc.collect()
    return mapped_bytes() == 0


async def test_loading_and_unloading_leaves_nothing(tmp_path: Path) -> None:
    source = write_model(tmp_path / "double", CODE, BOTH)
    array = np.ones((300, 300), np.float32)

    async def cycle() -> None:
        async with loaded(source) as model:
            (output,) = (await infer_one(model, array_request(array))).outputs
            assert output.array[0, 0] == 2

    await cycle()
    gc.collect()  # what other tests have left must not go meanwhile
    before = num_fds()
    for _ in range(3):
        await cycle()
    await until(lambda: num_fds() <= before)  # other tests' threads may have opened some meanwhile
    await until(is_unmapped)
    assert not children()


@pytest.mark.usefixtures("without_garbage_collection")
async def test_what_is_large_does_not_wait_for_the_garbage_collector(tmp_path: Path) -> None:
    source = write_model(tmp_path / "double", CODE, BOTH)
    array = np.ones((300, 300), np.float32)

    async def cycle() -> None:
        async with loaded(source) as model:
            await infer_one(model, array_request(array))
            assert mapped_bytes() > 0

    await cycle()
    await until(lambda: mapped_bytes() == 0)
    tracemalloc.start()
    try:
        await cycle()
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left < MOST_LEFT_BYTES


async def test_shared_memory_is_used_again_and_given_back(tmp_path: Path) -> None:
    async with loaded(write_model(tmp_path / "double", CODE, BOTH)) as model:
        array = np.ones((256, 1024), np.float32)
        for _ in range(50):
            await infer_one(model, array_request(array))
        used = mapped_bytes()
        assert used <= 6 * array.nbytes
        assert int(await ask(model, "")) <= used

        fds = num_tensor_fds()
        kept = [await infer_one(model, array_request(array)) for _ in range(300)]
        assert mapped_bytes() >= 300 * array.nbytes
        assert num_tensor_fds() == fds
        kept.clear()
        gc.collect()
        for _ in range(3):
            await infer_one(model, array_request(array))
        await until(lambda: mapped_bytes() <= 2 * MAX_FREE_BYTES + 6 * array.nbytes)
        assert int(await ask(model, "")) <= 2 * MAX_FREE_BYTES + 6 * array.nbytes


async def test_shared_memory_is_given_back_when_no_large_tensor_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SEGMENT_IDLE_S", 0.1)
    async with loaded(write_model(tmp_path / "double", CODE, BOTH)) as model:
        array = np.ones((256, 1024), np.float32)
        await infer_one(model, array_request(array))
        await until(is_unmapped)
        assert int(await ask(model, "")) == 0
        (output,) = (await infer_one(model, array_request(array))).outputs
        assert output.array[0, 0] == 2


async def test_a_crash_takes_its_shared_memory_along(tmp_path: Path) -> None:
    code = (
        CODE
        + """
    def execute_or_exit(self, requests, execute=execute):
        if requests[0].request_id() == "exit":
            os._exit(1)
        return execute(self, requests)

    execute = execute_or_exit
"""
    )
    async with loaded(write_model(tmp_path / "double", code, BOTH)) as model:
        array = np.ones((256, 1024), np.float32)
        held = (await infer_one(model, array_request(array))).outputs[0].array
        request = array_request(array)
        request.id = "exit"
        with pytest.raises(SluiceError):
            await infer_one(model, request)
        assert (held == 2).all()
        del held
        await ask(model, "")
        await until(is_unmapped)
