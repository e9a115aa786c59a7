"""Loads that bring a configuration or files along."""

import asyncio
from pathlib import Path

import pytest

from sluice.errors import ErrorCode
from sluice.serving.backend import LoadOverrides
from sluice.serving.repository.managed_model import IndexEntry, ModelState
from sluice.serving.repository.repository import ModelRepository
from tests.serving.repository.parts import READY, Bench, StampModel, ask, failure, rows, write_model, write_version
from tests.waiting import until


async def test_a_changed_config_override(repository: ModelRepository, root: Path) -> None:
    write_model(root, "a", 1, 2)
    await repository.load("a")
    config = (
        '{"backend": "stamp", "version_policy": {"all": {}}, "max_batch_size": 2,'
        '"input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [-1]}],'
        '"output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": ["1"]}]}'
    )
    await repository.load("a", LoadOverrides(config))
    assert [model.version for model in repository.versions("a")] == [1, 2]
    assert repository.find("a").config.max_batch_size == 2
    overridden = repository.find("a")
    await repository.load("a")
    assert repository.find("a") is overridden  # as the real server: nothing in the folder has changed
    write_version(root / "a", 2, 22)
    await repository.load("a")
    assert [model.version for model in repository.versions("a")] == [2]
    assert repository.find("a").config.max_batch_size == 0
    await repository.load("a", LoadOverrides(config))
    await repository.unload("a")
    await repository.load("a")
    assert repository.find("a").config.max_batch_size == 0


async def test_a_config_override_that_is_none_changes_nothing(repository: ModelRepository, root: Path) -> None:
    write_model(root, "a", 1)
    write_model(root, "b", 1)
    await repository.load("a")
    for text in ("{", "[]", "", '{"max_batch_size": "x"}', '{"nope": 1}', '{"name": "other"}'):
        for name in ("a", "b"):
            error = await failure(repository.load(name, LoadOverrides(text)))
            assert error.code is ErrorCode.INTERNAL
            assert error.message.startswith(f"failed to load '{name}', failed to poll from model repository: ")
    assert rows(repository) == {("a", 1): READY, ("b", 0): (None, "")}
    assert repository.is_ready


STAMP_JSON = (
    '{"backend": "stamp", "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [-1]}],'
    '"output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]}]}'
)


async def test_a_file_override_lives_in_a_folder_that_goes_with_it(repository: ModelRepository, root: Path) -> None:
    write_model(root, "a", 1)
    await repository.load("a")
    files = (("5/stamp.txt", b"55"), ("labels/x.txt", b""))
    await repository.load("a", LoadOverrides(STAMP_JSON, files))
    model = repository.find("a")
    assert isinstance(model, StampModel)
    assert (model.version, await ask(repository, "a")) == (5, 55)
    folder = model.source.folder
    assert folder.is_dir() and not folder.is_relative_to(root)
    await repository.load("a")
    assert await ask(repository, "a") == 1
    await until(lambda: not folder.exists())


async def test_a_file_override_needs_no_folder_in_the_repository(repository: ModelRepository) -> None:
    await repository.load("new", LoadOverrides(STAMP_JSON, (("1/stamp.txt", b"3"),)))
    model = repository.find("new")
    assert isinstance(model, StampModel)
    assert rows(repository) == {}
    assert repository.index(True) == [IndexEntry("new", 1, ModelState.READY)]
    await repository.unload("new")
    await until(lambda: not model.source.folder.exists())
    assert rows(repository) == {}
    bad = LoadOverrides(STAMP_JSON, (("1/stamp.txt", b"fail"),))
    assert "cannot start" in (await failure(repository.load("new", bad))).message
    assert rows(repository) == {}
    assert repository.is_ready


async def test_a_file_override_that_fails_leaves_no_folder(
    repository: ModelRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ensemble = (
        '{"platform": "ensemble", "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [-1]}],'
        '"output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]}], "ensemble_scheduling": {"step": ['
        '{"model_name": "nope", "input_map": {"IN": "IN"}, "output_map": {"OUT": "OUT"}}]}}'
    )
    for name, config in (("bad", STAMP_JSON), ("broken", "{"), ("outer", ensemble)):
        await failure(repository.load(name, LoadOverrides(config, (("1/stamp.txt", b"fail"),))))
    await until(lambda: not list(tmp_path.glob("sluice-run-*/model-*")))


@pytest.mark.parametrize("path", ["../1/stamp.txt", "/tmp/x", "1/../../x", "", "1/a\0b"])
async def test_files_do_not_leave_their_folder(repository: ModelRepository, path: str) -> None:
    error = await failure(repository.load("new", LoadOverrides(STAMP_JSON, ((path, b"3"),))))
    assert "is not a path inside a model's folder" in error.message


async def test_files_without_a_configuration(repository: ModelRepository) -> None:
    error = await failure(repository.load("new", LoadOverrides(None, (("1/stamp.txt", b"3"),))))
    assert "Load parameter 'config' must be specified for model file override" in error.message


async def test_many_loads_leave_nothing(
    bench: Bench, repository: ModelRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(asyncio.all_tasks())
    for round_ in range(60):
        name = f"m{round_ % 3}"
        content = b"fail" if round_ % 5 == 4 else b"%d" % round_
        override = LoadOverrides(STAMP_JSON, (("1/stamp.txt", content),))
        await asyncio.gather(repository.load(name, override), return_exceptions=True)
        if round_ % 2:
            await repository.unload(name)
    for index in range(3):
        await repository.unload(f"m{index}")
    await until(lambda: len(asyncio.all_tasks()) <= before)
    await until(lambda: not list(tmp_path.glob("sluice-run-*/model-*")))
    assert not bench.stamp.open_models
