"""Objects become files, whole ones only, and large models say how far they are."""

import threading
from pathlib import Path

import pytest

from sluice.serving.repository.failures import StoreFailure
from sluice.serving.repository.stores.mirror import Download, DownloadProgress, Downloads
from tests.serving.repository.stores.parts import Bucket, HookedFilesystem
from tests.waiting import PATIENCE_S

MB = 1_000_000


def test_a_large_model_tells_how_far_it_is() -> None:
    notes: list[str] = []
    now = [0.0]
    progress = DownloadProgress("m", 200 * MB, notes.append, lambda: now[0])
    for second in range(1, 25):
        now[0] = float(second)
        progress.add(5 * MB)
    assert notes == [
        "model 'm': downloading 200 MB",
        "model 'm': 50 of 200 MB downloaded",
        "model 'm': 100 of 200 MB downloaded",
    ]


def test_a_small_model_tells_nothing() -> None:
    notes: list[str] = []
    progress = DownloadProgress("m", 63 * MB, notes.append, lambda: 0.0)
    progress.add(63 * MB)
    assert notes == []


def transfers(bucket: Bucket, folder: Path, num: int) -> list[Download]:
    for index in range(num):
        bucket.put(f"m/{index}", "x" * index)
    return [Download(f"{bucket.path}/m/{index}", index, folder / str(index)) for index in range(num)]


def test_objects_come_side_by_side(memory: Bucket, tmp_path: Path) -> None:
    filesystem = HookedFilesystem(memory.filesystem)
    wanted = transfers(memory, tmp_path, 4)
    together = threading.Barrier(4, timeout=PATIENCE_S)
    filesystem.before_get = lambda path: (together.wait(), None)[1]
    downloads = Downloads(filesystem)
    whole, error = downloads.run("m", wanted)
    assert error is None
    assert {each.target: each.target.read_text() for each in whole} == {
        each.target: "x" * each.size for each in wanted
    }  # fmt: skip
    downloads.close()


def test_what_is_whole_when_one_fails(memory: Bucket, tmp_path: Path) -> None:
    filesystem = HookedFilesystem(memory.filesystem)
    wanted = transfers(memory, tmp_path, 3)
    others_are_there = threading.Barrier(3, timeout=PATIENCE_S)

    def fail_last(path: str) -> None:
        others_are_there.wait()
        if path.endswith("/2"):
            raise ConnectionResetError("away")

    filesystem.before_get = fail_last
    downloads = Downloads(filesystem)
    whole, error = downloads.run("m", wanted)
    assert isinstance(error, ConnectionResetError)
    assert wanted[2] not in whole
    downloads.close()


@pytest.mark.parametrize("size", [2, 4])
def test_an_object_of_another_size_is_not_whole(memory: Bucket, tmp_path: Path, size: int) -> None:
    memory.put("m/a", "abc")
    downloads = Downloads(memory.filesystem)
    whole, error = downloads.run("m", [Download(f"{memory.path}/m/a", size, tmp_path / "a")])
    assert whole == []
    assert "has 3 bytes and was listed with" in str(error)
    downloads.close()


def test_the_end_of_the_server_ends_a_download(memory: Bucket, tmp_path: Path) -> None:
    filesystem = HookedFilesystem(memory.filesystem)
    downloads = Downloads(filesystem)
    filesystem.before_get = lambda path: downloads.stop()
    memory.put("m/a", "abc")
    _, error = downloads.run("m", [Download(f"{memory.path}/m/a", 3, tmp_path / "a")])
    assert isinstance(error, StoreFailure)
    with pytest.raises(StoreFailure, match="shutting down"):
        downloads.rest(60)
    downloads.close()
