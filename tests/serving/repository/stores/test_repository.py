"""Repositories in stores: what lies there serves, as a whole or not at all."""

import asyncio
import os
import sys
import threading
from glob import glob
from pathlib import Path
from typing import Any

import pytest
from fsspec.registry import _registry

from sluice.errors import ErrorCode
from sluice.serving.repository.managed_model import ModelState
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.roots import Roots
from sluice.serving.repository.settings import ControlMode
from sluice.serving.repository.stores.root import StoreListing
from tests.serving.repository.parts import READY, ask, ensemble_config, failure, rows, write_model
from tests.serving.repository.stores.parts import ALL_VERSIONS, Bucket, HookedFilesystem, S3Server, StoreBench, stamps
from tests.waiting import PATIENCE_S, until


async def polling(bench: StoreBench, **options: Any) -> ModelRepository:
    repository = bench.repository(ControlMode.POLL, **options)
    await repository.start()
    return repository


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> list[HookedFilesystem]:
    """The filesystems that repositories open, the newest last."""
    opened: list[HookedFilesystem] = []
    begin = StoreListing.__init__

    def hook(listing: StoreListing, location: Any) -> None:
        begin(listing, location)
        listing.filesystem = HookedFilesystem(listing.filesystem)
        opened.append(listing.filesystem)

    monkeypatch.setattr(StoreListing, "__init__", hook)
    return opened


async def test_loads_what_lies_there(bucket: Bucket) -> None:
    bucket.put_model("a", 10, 20, config=ALL_VERSIONS)
    bucket.put_model("b", 30)
    bucket.put("README.md", "no model")
    bucket.put(".hidden/config.pbtxt", "no model")
    bench = StoreBench(bucket.url)
    repository = bench.repository(ControlMode.NONE)
    assert await repository.start() == {}
    assert stamps(repository) == {"a": [10, 20], "b": [30]}
    assert await ask(repository, "a", 1) == 10
    assert rows(repository) == {("a", 1): READY, ("a", 2): READY, ("b", 1): READY}
    await repository.close()
    assert not bench.stamp.open_models


async def test_explicit_loads_see_what_is_new(memory: Bucket) -> None:
    bench = StoreBench(memory.url)
    memory.put_model("a", 1)
    repository = bench.repository()
    await repository.start()
    assert rows(repository) == {("a", 0): (None, "")}
    await repository.load("a")
    first = repository.find("a")
    memory.put("a/2/stamp.txt", 22)
    memory.put("new/config.pbtxt", "nothing yet")
    await repository.load("a")
    assert await ask(repository, "a") == 22
    await repository.load("a")
    assert bench.stamp.loads == [("a", 1), ("a", 2)]
    await repository.refresh()
    assert ("new", 0) in rows(repository)
    assert (await failure(repository.load("nope"))).message.endswith("failed to poll from model repository")
    folder = first.source.folder  # type: ignore[attr-defined]
    await until(lambda: not folder.exists())
    await repository.close()


async def test_polls_follow_the_store(bucket: Bucket) -> None:
    bucket.put_model("a", 1, config=ALL_VERSIONS)
    bench = StoreBench(bucket.url)
    repository = await polling(bench)
    assert stamps(repository) == {"a": [1]}
    bucket.put("a/2/stamp.txt", 2)
    bucket.put_model("b", 5)
    await until(lambda: stamps(repository) == {"a": [1, 2], "b": [5]})
    assert bench.stamp.loads.count(("a", 1)) == 1
    bucket.remove("a/1")
    await until(lambda: stamps(repository) == {"a": [2], "b": [5]})
    bucket.put("a/2/stamp.txt", 3)
    await until(lambda: stamps(repository) == {"a": [3], "b": [5]})
    bucket.remove("b")
    await until(lambda: stamps(repository) == {"a": [3]})
    assert repository.is_ready
    assert set(rows(repository)) == {("a", 1), ("a", 2)}
    await repository.close()
    assert not bench.stamp.open_models


async def test_what_is_being_uploaded_is_not_served(memory: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload of one object between every two scans: the model is not touched before the last one has come."""
    memory.put_model("other", 1)
    bench = StoreBench(memory.url)
    repository = await polling(bench)
    scan, pieces = Roots.scan, iter(["config.pbtxt", "1/a.bin", "1/b.bin", "1/stamp.txt", "labels.txt"])
    content = {"config.pbtxt": ALL_VERSIONS, "1/stamp.txt": "7"}
    uploaded: list[str] = []

    def upload_and_scan(roots: Roots) -> Any:
        piece = next(pieces, None)
        if piece is not None:
            memory.put(f"a/{piece}", content.get(piece, "x"))
            uploaded.append(piece)
        assert piece is None or "a" not in stamps(repository)
        return scan(roots)

    monkeypatch.setattr(Roots, "scan", upload_and_scan)
    await until(lambda: "a" in stamps(repository))
    assert len(uploaded) == 5
    assert bench.stamp.loads.count(("a", 1)) == 1
    assert not any("'a'" in note for note in bench.notes)
    await repository.close()


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        pytest.param("s3", ControlMode.EXPLICIT, marks=pytest.mark.slow),
        ("memory", ControlMode.EXPLICIT),
        ("memory", ControlMode.POLL),
    ],
)
async def test_objects_that_change_while_they_are_read(
    request: pytest.FixtureRequest, hooked: list[HookedFilesystem], kind: str, mode: ControlMode
) -> None:
    bucket: Bucket = request.getfixturevalue(kind)
    bucket.put_model("a", 1)
    bench = StoreBench(bucket.url)
    repository = bench.repository(mode)
    await repository.start()
    if mode is ControlMode.EXPLICIT:
        await repository.load("a")
    changes = iter([333, 4444])

    def change(path: str) -> None:
        if path.endswith("stamp.txt") and (stamp := next(changes, None)) is not None:
            bucket.put("a/1/stamp.txt", stamp)

    hooked[-1].before_get = change
    bucket.put("a/1/stamp.txt", 22)
    if mode is ControlMode.POLL:
        await until(lambda: stamps(repository) == {"a": [4444]})
    else:
        for _ in range(2):
            error = await failure(repository.load("a"))
            assert error.code is ErrorCode.UNAVAILABLE
            assert "a/1/stamp.txt" in error.message
            assert await ask(repository, "a") == 1
        await repository.load("a")
        assert await ask(repository, "a") == 4444
    assert 22 not in {model.stamp for model in bench.stamp.made}
    assert 333 not in {model.stamp for model in bench.stamp.made}
    await repository.close()


async def test_an_object_added_after_the_listing_is_a_change(memory: Bucket, hooked: list[HookedFilesystem]) -> None:
    memory.put_model("a", 1)
    repository = StoreBench(memory.url).repository()
    await repository.start()
    hooked[-1].before_get = lambda path: memory.put("a/labels.txt", "more")
    error = await failure(repository.load("a"))
    assert "changed while they were read: labels.txt" in error.message
    hooked[-1].before_get = lambda path: None
    await repository.load("a")
    await repository.close()


async def test_a_download_that_fails_harms_no_other_model(memory: Bucket, hooked: list[HookedFilesystem]) -> None:
    memory.put_model("a", 1)
    memory.put_model("b", 2)
    bench = StoreBench(memory.url)
    repository = bench.repository(ControlMode.POLL)
    await repository.start()
    is_failing = threading.Event()
    is_failing.set()

    def fail(path: str) -> None:
        if is_failing.is_set() and "/a/" in path:
            raise ConnectionResetError("the network is away")

    hooked[-1].before_get = fail
    memory.put("a/1/stamp.txt", 11)
    memory.put("b/1/stamp.txt", 22)
    await until(lambda: stamps(repository) == {"a": [1], "b": [22]})
    await until(lambda: any("the network is away" in note for note in bench.notes))
    assert await ask(repository, "a") == 1
    is_failing.clear()
    await until(lambda: stamps(repository) == {"a": [11], "b": [22]})
    await repository.close()


async def test_a_model_that_never_came_is_listed_with_the_reason(
    memory: Bucket, hooked: list[HookedFilesystem]
) -> None:
    memory.put_model("a", 1)
    bench = StoreBench(memory.url)
    repository = bench.repository()
    await repository.start()

    def fail(path: str) -> None:
        raise ConnectionResetError("the network is away")

    hooked[-1].before_get = fail
    error = await failure(repository.load("a"))
    assert error.code is ErrorCode.UNAVAILABLE
    state, reason = rows(repository)["a", 1]
    assert state is ModelState.UNAVAILABLE
    assert "the network is away" in reason
    assert memory.url in reason
    assert repository.num_failed_loads == {"a": 1}
    await repository.close()


async def test_an_object_shorter_than_listed_is_not_served(memory: Bucket, hooked: list[HookedFilesystem]) -> None:
    memory.put_model("a", 1)
    repository = StoreBench(memory.url).repository()
    await repository.start()
    whole = hooked[-1].get_file

    def cut(path: str, target: str, **options: Any) -> None:
        whole(path, target, **options)
        Path(target).write_bytes(Path(target).read_bytes()[:-1])

    hooked[-1].get_file = cut  # type: ignore[method-assign]
    assert "was listed with" in (await failure(repository.load("a"))).message
    await repository.close()


async def test_a_store_that_goes_away_keeps_what_is_served(
    memory: Bucket, hooked: list[HookedFilesystem], root: Path
) -> None:
    memory.put_model("a", 1)
    write_model(root, "local", 5)
    bench = StoreBench(memory.url, root)
    repository = await polling(bench)
    is_away = threading.Event()
    is_away.set()

    def fail(path: str) -> None:
        if is_away.is_set():
            raise TimeoutError("no answer")

    hooked[-1].before_find = fail
    await until(lambda: any("no answer" in note for note in bench.notes))
    write_model(root, "more", 6)
    await until(lambda: stamps(repository) == {"a": [1], "local": [5], "more": [6]})
    assert await ask(repository, "a") == 1
    assert repository.is_ready
    await repository.refresh()
    assert rows(repository)["a", 1] == READY
    assert sum("no answer" in note for note in bench.notes) == 1
    memory.put("a/1/stamp.txt", 9)
    is_away.clear()
    await until(lambda: stamps(repository)["a"] == [9])
    assert any("can be read again" in note for note in bench.notes)
    await repository.close()


async def test_nothing_settles_while_the_store_is_away(
    memory: Bucket, hooked: list[HookedFilesystem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was changing when the store went away is still unsettled when it comes back."""
    memory.put_model("first", 1)
    bench = StoreBench(memory.url)
    repository = await polling(bench)
    scans: list[str] = []
    scan = Roots.scan

    def script(roots: Roots) -> Any:
        scans.append("scan")
        if len(scans) == 1:
            memory.put("a/config.pbtxt", ALL_VERSIONS)
            memory.put("a/1/stamp.txt", "half")
        if len(scans) == 4:
            memory.put("a/1/stamp.txt", "8")
        return scan(roots)

    def fail(path: str) -> None:
        if len(scans) in (2, 3):
            raise TimeoutError("no answer")

    hooked[-1].before_find = fail
    monkeypatch.setattr(Roots, "scan", script)
    await until(lambda: "a" in stamps(repository))
    assert len(scans) >= 5
    assert await ask(repository, "a") == 8
    assert not any("'a'" in note for note in bench.notes)
    await repository.close()


async def test_a_server_that_does_not_answer(s3_server: S3Server, s3_environment: None) -> None:
    gone = S3Server()
    gone.stop()
    repository = StoreBench(f"s3://{gone.endpoint}/bucket/models").repository()
    error = await failure(repository.start())
    assert error.code is ErrorCode.UNAVAILABLE
    assert gone.endpoint in error.message
    await repository.close()


async def test_a_bucket_that_is_not_there(s3_server: S3Server, s3_environment: None) -> None:
    repository = StoreBench(f"s3://{s3_server.endpoint}/nowhere/models").repository()
    error = await failure(repository.start())
    assert error.code is ErrorCode.UNAVAILABLE
    assert "nowhere" in error.message
    await repository.close()


async def test_an_empty_store_has_no_models(bucket: Bucket) -> None:
    repository = StoreBench(bucket.url).repository(ControlMode.NONE)
    assert await repository.start() == {}
    assert rows(repository) == {}
    await repository.close()


async def test_a_whole_bucket_is_a_repository(s3_server: S3Server, s3: Bucket) -> None:
    bucket = s3.path.partition("/")[0]
    whole = Bucket(s3.filesystem, bucket, f"s3://{s3_server.host}:{s3_server.port}/{bucket}")
    whole.put_model("a", 3)
    repository = StoreBench(whole.url).repository(ControlMode.NONE)
    assert await repository.start() == {}
    assert stamps(repository) == {"a": [3]}
    await repository.close()


async def test_an_empty_version_folder_of_an_ensemble(s3: Bucket) -> None:
    """Consoles and tools make them as empty objects whose names end in a slash."""
    s3.put_model("inner", 4)
    s3.put("outer/config.pbtxt", ensemble_config("inner"))
    bucket, _, prefix = s3.path.partition("/")
    s3.filesystem.call_s3("put_object", Bucket=bucket, Key=f"{prefix}/outer/1/", Body=b"")
    repository = StoreBench(s3.url).repository()
    await repository.start()
    await repository.load("outer")
    assert await ask(repository, "outer") == 4
    await repository.close()


async def test_a_model_in_a_store_and_in_a_folder_is_ambiguous(memory: Bucket, root: Path) -> None:
    memory.put_model("a", 1)
    write_model(root, "a", 2)
    repository = StoreBench(root, memory.url).repository(ControlMode.NONE)
    failures = await repository.start()
    assert str(root / "a") in failures["a"].message
    assert f"{memory.url}/a" in failures["a"].message
    await repository.close()


async def test_a_cache_that_stays_spares_the_next_server_the_download(
    memory: Bucket, hooked: list[HookedFilesystem], tmp_path: Path
) -> None:
    memory.put_model("a", 1, 2, config=ALL_VERSIONS)
    cache = tmp_path / "cache"
    options = {"settings": {"cache_path": cache}}
    got: list[str] = []
    for expected in (3, 1):
        repository = StoreBench(memory.url).repository(ControlMode.NONE, **options)
        await repository._read(repository._names)
        hooked[-1].before_get = got.append
        await repository.start()
        assert len(stamps(repository)["a"]) == 2
        assert len(got) == expected
        got.clear()
        memory.put("a/2/stamp.txt", 22)
        await repository.close()
    assert not list(cache.rglob("stamp.txt"))
    assert len(list(cache.rglob("objects/a/*"))) == 3


async def test_two_servers_do_not_share_a_cache(memory: Bucket, tmp_path: Path) -> None:
    memory.put_model("a", 1)
    options = {"settings": {"cache_path": tmp_path}}
    first = StoreBench(memory.url).repository(ControlMode.NONE, **options)
    await first.start()
    second = StoreBench(memory.url).repository(ControlMode.NONE, **options)
    error = await failure(second.start())
    assert error.code is ErrorCode.INVALID
    assert "another server" in error.message
    await second.close()
    assert await ask(first, "a") == 1
    await first.close()


async def test_a_temporary_cache_goes(memory: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory.put_model("a", 1)
    repository = StoreBench(memory.url).repository(ControlMode.NONE)
    await repository.start()
    assert glob(f"{tmp_path}/sluice-run-*/*")
    await repository.close()
    assert not glob(f"{tmp_path}/sluice-run-*/*")


async def test_requests_under_way_keep_their_files(memory: Bucket) -> None:
    memory.put_model("a", 1)
    repository = StoreBench(memory.url).repository()
    await repository.start()
    await repository.load("a")
    old = repository.find("a")
    old.gate.clear()  # type: ignore[attr-defined]
    answer = asyncio.ensure_future(ask(repository, "a"))
    await until(lambda: old.num_in_flight == 1)
    memory.put("a/1/stamp.txt", 2)
    await repository.load("a")
    file: Path = old.source.model_file  # type: ignore[attr-defined]
    assert await ask(repository, "a") == 2
    assert file.name in os.listdir(file.parent)
    old.gate.set()  # type: ignore[attr-defined]
    assert await answer == 1
    await until(lambda: not file.exists())
    await repository.close()


async def test_closing_ends_a_download(memory: Bucket, hooked: list[HookedFilesystem]) -> None:
    memory.put_model("a", 1)
    repository = StoreBench(memory.url).repository()
    await repository.start()
    is_downloading, goes_on = threading.Event(), threading.Event()

    def hang(path: str) -> None:
        is_downloading.set()
        goes_on.wait(PATIENCE_S)

    hooked[-1].before_get = hang
    loading = asyncio.ensure_future(repository.load("a"))
    await until(is_downloading.is_set)
    closing = asyncio.ensure_future(repository.close())
    await asyncio.wait([closing], timeout=0.1)
    goes_on.set()
    await closing
    assert isinstance((await asyncio.gather(loading, return_exceptions=True))[0], BaseException)


async def test_names_that_lead_out_of_the_cache(s3: Bucket) -> None:
    s3.put_model("a", 1)
    bucket, _, prefix = s3.path.partition("/")
    s3.filesystem.call_s3("put_object", Bucket=bucket, Key=f"{prefix}/evil/1/../../../escaped", Body=b"x")
    repository = StoreBench(s3.url).repository()
    await repository.start()
    assert "is not a path inside a model's folder" in (await failure(repository.load("evil"))).message
    await repository.load("a")
    await repository.close()


async def test_the_library_of_a_store_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    repository = StoreBench("s3://bucket/models").repository(ControlMode.NONE)
    error = await failure(repository.start())
    assert error.code is ErrorCode.INVALID
    assert "pip install 'sluice[s3]'" in error.message


async def test_a_protocol_that_nobody_reads() -> None:
    error = await failure(StoreBench("carrier-pigeon://loft").repository().start())
    assert error.code is ErrorCode.INVALID
    assert "carrier-pigeon://" in error.message
