"""Ensembles and their members: who is loaded for whom, and goes and comes back with whom."""

import asyncio
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError
from sluice.serving.repository.managed_model import ModelState
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from sluice.serving.spec import ModelSource
from tests.serving.repository.parts import (
    CONFIG,
    READY,
    UNLOADED,
    Bench,
    StampBackend,
    StampModel,
    ask,
    ensemble_config,
    failure,
    rows,
    write_model,
    write_version,
)
from tests.waiting import until


async def test_an_ensemble_brings_its_members(bench: Bench, repository: ModelRepository, root: Path) -> None:
    write_model(root, "inner", 4)
    write_model(root, "outer", 0, config=ensemble_config("inner"))
    write_model(root, "outermost", 0, config=ensemble_config("outer", "inner"))
    await repository.load("outermost")
    assert [model.name for model in repository.models()] == ["inner", "outer", "outermost"]
    assert await ask(repository, "outermost") == 4
    assert bench.join.loads == [("outer", 1), ("outermost", 1)]


async def test_ensembles_go_and_come_back_with_their_members(repository: ModelRepository, root: Path) -> None:
    folder = write_model(root, "inner", 4)
    write_model(root, "outer", 0, config=ensemble_config("inner"))
    write_model(root, "outermost", 0, config=ensemble_config("outer"))
    await repository.load("outermost")
    await repository.unload("inner")
    await until(lambda: set(rows(repository).values()) == {UNLOADED})
    with pytest.raises(SluiceError, match="'outermost' has no available versions"):
        repository.find("outermost")
    await repository.load("inner")
    assert await ask(repository, "outermost") == 4
    write_version(folder, 1, 55)
    await repository.load("inner")
    assert await ask(repository, "outermost") == 55
    await repository.unload("outermost")
    await repository.unload("inner")
    await repository.load("inner")
    assert sorted(model.name for model in repository.models()) == ["inner", "outer"]


async def test_a_member_that_goes_while_its_ensemble_loads(
    bench: Bench, repository: ModelRepository, root: Path
) -> None:
    write_model(root, "inner", 4)
    write_model(root, "outer", 0, config=ensemble_config("inner"))
    await repository.load("inner")
    bench.join.gate.clear()
    loading = asyncio.ensure_future(repository.load("outer"))
    await until(lambda: bool(bench.join.loads))
    unloading = asyncio.ensure_future(repository.unload("inner"))
    await until(lambda: rows(repository)["inner", 1] == UNLOADED)
    bench.join.gate.set()
    await asyncio.gather(loading, unloading)
    await until(lambda: rows(repository)["outer", 1] == UNLOADED)


async def test_unloading_dependents(repository: ModelRepository, root: Path) -> None:
    named = write_model(root, "named", "fail")
    for name in ("implied", "shared"):
        write_model(root, name, 1)
    write_model(root, "outer", 0, config=ensemble_config("named", "implied", "shared"))
    write_model(root, "other", 0, config=ensemble_config("shared"))
    await failure(repository.load("named"))
    write_version(named, 1, 1)
    await repository.load("outer")  # which brings what was named before, too
    await repository.load("other")
    await repository.unload("outer", unload_dependents=True)
    assert [model.name for model in repository.models()] == ["named", "other", "shared"]
    await repository.unload("other")
    assert [model.name for model in repository.models()] == ["named", "shared"]


async def test_ensembles_without_their_members(repository: ModelRepository, root: Path) -> None:
    write_model(root, "outer", 0, config=ensemble_config("later"))
    error = await failure(repository.load("outer"))
    assert error.message == (
        "load failed for model 'outer': ensemble outer contains models that are not available or ambiguous: later\n"
    )
    assert rows(repository)["outer", 1] == (
        ModelState.UNAVAILABLE,
        "ensemble outer contains models that are not available or ambiguous: later",
    )
    write_model(root, "later", 6)
    await repository.load("later")
    assert await ask(repository, "outer") == 6


async def test_an_ensemble_over_a_model_that_fails(repository: ModelRepository, root: Path) -> None:
    write_model(root, "inner", "fail")
    write_model(root, "outer", 0, config=ensemble_config("inner"))
    error = await failure(repository.load("outer"))
    assert "ensemble 'outer' depends on 'inner' which has no loaded version" in error.message
    assert "RuntimeError: cannot start" in error.message


async def test_an_ensemble_of_a_version_that_is_not_there(repository: ModelRepository, root: Path) -> None:
    write_model(root, "inner", 1)
    write_model(root, "outer", 0, config=ensemble_config("inner").replace("model_version: -1", "model_version: 9"))
    error = await failure(repository.load("outer"))
    assert "ensemble 'outer' depends on 'inner' whose required version 9 is not loaded." in error.message


async def test_an_ensemble_that_no_longer_fits_its_member(repository: ModelRepository, root: Path) -> None:
    folder = write_model(root, "inner", 1)
    config = ensemble_config("inner").replace("model_version: -1", "model_version: 1")
    write_model(root, "outer", 0, config=config)
    write_model(root, "outermost", 0, config=ensemble_config("outer"))
    await repository.load("outermost")
    write_version(folder, 2, 2)
    await repository.load("inner")
    reason = "ensemble 'outer' depends on 'inner' whose required version 1 is not loaded."
    await until(lambda: rows(repository)["outer", 1] == (ModelState.UNAVAILABLE, reason))
    await until(lambda: rows(repository)["outermost", 1] == UNLOADED)
    assert "outer" in repository.problem
    (folder / "config.pbtxt").write_text(CONFIG + "version_policy { all {} }")
    await repository.load("inner")
    assert await ask(repository, "outermost") == 1
    assert repository.is_ready


async def test_ensembles_in_a_circle(bench: Bench, root: Path) -> None:
    write_model(root, "inner", 1)
    write_model(root, "self", 0, config=ensemble_config("self"))
    write_model(root, "e1", 0, config=ensemble_config("e2"))
    write_model(root, "e2", 0, config=ensemble_config("e3"))
    write_model(root, "e3", 0, config=ensemble_config("e1"))
    write_model(root, "over", 0, config=ensemble_config("e1"))
    repository = bench.repository(ControlMode.NONE)
    failures = await repository.start()
    assert sorted(failures) == ["e1", "e2", "e3", "over", "self"]
    assert "circular dependency between ensembles: e1 -> e2 -> e3 -> e1" in failures["e1"].message
    assert [model.name for model in repository.models()] == ["inner"]
    await repository.close()


async def test_an_ensemble_waits_for_a_model_that_is_loaded_elsewhere(bench: Bench, root: Path) -> None:
    write_model(root, "llm", 4)
    write_model(root, "other", 5)
    write_model(root, "outer", 0, config=ensemble_config("llm", "other"))
    repository = bench.repository(ControlMode.NONE)
    arrived = repository.expect("llm")
    starting = asyncio.ensure_future(repository.start())
    await until(lambda: rows(repository).get(("other", 1)) == READY)
    assert bench.join.loads == []
    config = text_format.Parse(f'name: "llm" {CONFIG} default_model_filename: "stamp.txt"', ModelConfig())
    repository.add(StampModel(ModelSource(root / "llm", 1, config), StampBackend()))
    arrived()
    assert await starting == {}
    assert bench.join.loads == [("outer", 1)]
    assert await ask(repository, "outer") == 4
    assert [model.name for model in bench.stamp.made] == ["other"], "the folder of the model that came is not loaded"
    await repository.close()


async def test_an_ensemble_hears_that_a_model_does_not_come(bench: Bench, root: Path) -> None:
    write_model(root, "outer", 0, config=ensemble_config("llm"))
    repository = bench.repository(ControlMode.NONE)
    repository.expect("llm")()
    failures = await repository.start()
    assert "llm" in failures["outer"].message
    await repository.close()
