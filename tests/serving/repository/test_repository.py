"""Explicit and none: what is loaded, replaced, listed and refused."""

import asyncio
from pathlib import Path

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backend import LoadOverrides
from sluice.serving.model import Model
from sluice.serving.repository.managed_model import IndexEntry, ModelState
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from tests.serving.repository.parts import (
    CONFIG,
    READY,
    UNLOADED,
    Bench,
    ask,
    context_for,
    failure,
    rows,
    write_model,
    write_version,
)
from tests.waiting import until


async def test_loads_everything_at_the_start(bench: Bench, root: Path) -> None:
    write_model(root, "a", 10)
    write_model(root, "b", 20, 21)
    repository = bench.repository(ControlMode.NONE)
    assert not repository.is_ready
    assert await repository.start() == {}
    assert repository.is_ready
    assert await ask(repository, "a") == 10
    assert await ask(repository, "b") == 21  # version_policy: the latest one
    assert [(model.name, model.version) for model in repository.models()] == [("a", 1), ("b", 2)]
    await repository.close()


async def test_a_model_that_fails_is_listed_while_the_others_serve(bench: Bench, root: Path) -> None:
    write_model(root, "bad", "fail")
    write_model(root, "broken", 1, config="max_batch_size: many")
    write_model(root, "good", 1)
    write_model(root, "odd", "raise")
    repository = bench.repository(ControlMode.NONE)
    failures = await repository.start()
    assert sorted(failures) == ["bad", "broken", "odd"]
    assert failures["bad"].message == (
        "load failed for model 'bad': version 1 is at UNAVAILABLE state: Internal: RuntimeError: cannot start;\n"
    )
    assert rows(repository)["bad", 1] == (ModelState.UNAVAILABLE, "Internal: RuntimeError: cannot start")
    assert rows(repository)["odd", 1][1] == "Internal: KeyError: 'what no backend should raise'"
    assert "config.pbtxt:1:17: " in rows(repository)["broken", 1][1]
    assert await ask(repository, "good") == 1
    assert not repository.is_ready
    assert "model 'bad' version 1 is UNAVAILABLE" in repository.problem
    await repository.close()


async def test_explicit_start_loads_what_is_named(bench: Bench, root: Path) -> None:
    write_model(root, "a", 1)
    write_model(root, "b", 2)
    repository = bench.repository()
    failures = await repository.start(["b", "nope"])
    assert list(failures) == ["nope"]
    assert "nope" in repository.problem
    assert rows(repository) == {("a", 0): (None, ""), ("b", 1): READY}
    assert repository.index(True) == [IndexEntry("b", 1, ModelState.READY)]
    await repository.close()
    everything = bench.repository()
    await everything.start(["*"])
    assert [model.name for model in everything.models()] == ["a", "b"]
    await everything.close()


async def test_unknown_models_and_versions_in_tritons_words(repository: ModelRepository, root: Path) -> None:
    write_model(root, "a", 1, 2)
    await repository.load("a")

    def refused(name: str, version: int = -1) -> tuple[ErrorCode, str]:
        with pytest.raises(SluiceError) as caught:
            repository.find(name, version)
        return caught.value.code, caught.value.message

    unknown = "Request for unknown model: "
    assert refused("nope") == (ErrorCode.NOT_FOUND, f"{unknown}'nope' is not found")
    assert refused("a", 9) == (ErrorCode.NOT_FOUND, f"{unknown}'a' version 9 is not found")
    await repository.unload("a")
    assert refused("a") == (ErrorCode.NOT_FOUND, f"{unknown}'a' has no available versions")
    assert refused("a", 2) == (ErrorCode.UNAVAILABLE, f"{unknown}'a' version 2 is not at ready state")
    with pytest.raises(SluiceError, match="has no available versions"):
        repository.versions("a")


@pytest.mark.parametrize("name", ["nope", "...", "..a", "a\0"])
async def test_a_load_of_no_model(repository: ModelRepository, root: Path, name: str) -> None:
    write_model(root, "a", 1)
    error = await failure(repository.load(name))
    assert error.code is ErrorCode.INTERNAL
    assert error.message == f"failed to load '{name}', failed to poll from model repository"
    await repository.unload(name)
    assert repository.is_ready


@pytest.mark.parametrize("name", ["", " ", "\t\n", ".", "..", " ..", "../models/a", "a/b", "a/"])
async def test_a_load_of_what_names_no_folder_says_so(repository: ModelRepository, root: Path, name: str) -> None:
    write_model(root, "a", 1)
    error = await failure(repository.load(name))
    assert error.code is ErrorCode.INVALID
    assert error.message == (
        f"model name must not contain path traversal characters, got '{name}'"
        if name.strip()
        else "Model name cannot be empty. Please enter a valid name to deploy."
    )
    await repository.unload(name)


async def test_a_new_version_serves_when_it_is_loaded(bench: Bench, repository: ModelRepository, root: Path) -> None:
    folder = write_model(root, "a", 1)
    await repository.load("a")
    write_version(folder, 2, "hang")
    loading = asyncio.ensure_future(repository.load("a"))
    await bench.stamp.is_hanging.wait()
    assert await ask(repository, "a") == 1
    assert rows(repository) == {("a", 1): READY, ("a", 2): (ModelState.LOADING, "")}
    assert repository.is_ready
    bench.stamp.release.set()
    await loading
    assert await ask(repository, "a") == 0
    await until(lambda: rows(repository) == {("a", 1): UNLOADED, ("a", 2): READY})
    assert repository.is_ready


async def test_the_old_one_serves_on_where_the_new_one_fails(repository: ModelRepository, root: Path) -> None:
    folder = write_model(root, "a", 7)
    await repository.load("a")
    serving = repository.find("a")
    write_version(folder, 1, "fail")
    error = await failure(repository.load("a"))
    assert "version 1 is at UNAVAILABLE state: Internal: RuntimeError: cannot start;\n" in error.message
    assert repository.find("a") is serving
    assert await ask(repository, "a") == 7
    (folder / "config.pbtxt").write_text("nonsense {")
    assert "failed to poll" in (await failure(repository.load("a"))).message
    assert await ask(repository, "a") == 7


async def test_what_has_failed_stays_so_until_it_loads(repository: ModelRepository, root: Path) -> None:
    folder = write_model(root, "a", "fail")
    await failure(repository.load("a"))
    assert not repository.is_ready
    await repository.unload("a")
    assert rows(repository) == {("a", 1): (ModelState.UNAVAILABLE, "Internal: RuntimeError: cannot start")}
    assert not repository.is_ready
    write_version(folder, 2, 2)
    await repository.load("a")
    assert rows(repository) == {("a", 1): UNLOADED, ("a", 2): READY}
    assert repository.is_ready


async def test_what_has_not_changed_is_not_loaded_again(bench: Bench, repository: ModelRepository, root: Path) -> None:
    folder = write_model(root, "a", 1, 2, config=CONFIG + "version_policy { all {} }")
    await repository.load("a")
    await repository.load("a")
    assert sorted(bench.stamp.loads) == [("a", 1), ("a", 2)]
    (folder / "1" / "__pycache__").mkdir()
    (folder / "1" / "__pycache__" / "model.cpython-311.pyc").write_text("")
    await repository.load("a")
    assert len(bench.stamp.loads) == 2
    write_version(folder, 2, 2222)
    await repository.load("a")
    assert bench.stamp.loads[2:] == [("a", 2)]
    (folder / "labels.txt").write_text("one")
    await repository.load("a")
    assert sorted(bench.stamp.loads[3:]) == [("a", 1), ("a", 2)]


@pytest.mark.parametrize("overrides", [None, LoadOverrides('{"backend": "stamp"}')])
async def test_what_is_lost_is_loaded_again(
    repository: ModelRepository, root: Path, monkeypatch: pytest.MonkeyPatch, overrides: LoadOverrides | None
) -> None:
    """Its files are as they were; what ran it is not."""
    write_model(root, "a", 1)
    await repository.load("a", overrides)
    lost = repository.find("a")
    await repository.load("a")
    assert repository.find("a") is lost
    monkeypatch.setattr(type(lost), "is_lost", property(lambda model: model is lost))
    await repository.load("a")
    fresh = repository.find("a")
    assert fresh is not lost
    await repository.load("a")
    assert repository.find("a") is fresh


async def test_versions_load_all_or_none(bench: Bench, repository: ModelRepository, root: Path) -> None:
    write_model(root, "half", 1, "fail", config=CONFIG + "version_policy { all {} }")
    await failure(repository.load("half"))
    await until(lambda: rows(repository)["half", 1] == UNLOADED)
    assert rows(repository)["half", 2] == (ModelState.UNAVAILABLE, "Internal: RuntimeError: cannot start")
    assert not bench.stamp.open_models


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", [3]),
        ("latest { num_versions: 2 }", [2, 3]),
        ("latest { num_versions: 9 }", [1, 2, 3]),
        ("all {}", [1, 2, 3]),
        ("specific { versions: [ 1, 3, 8 ] }", [1, 3]),
    ],
)
async def test_version_policy(repository: ModelRepository, root: Path, policy: str, expected: list[int]) -> None:
    folder = write_model(root, "a", 1, 2, 3, config=CONFIG + f"version_policy {{ {policy} }}" * bool(policy))
    for junk in ("01", "x", "-4", "0", "4.0", "5"):
        (folder / junk).mkdir() if junk != "5" else (folder / junk).write_text("a file")
    await repository.load("a")
    assert [model.version for model in repository.versions("a")] == expected


@pytest.mark.parametrize("policy", ["latest { num_versions: 0 }", "specific { versions: 7 }", "specific {}"])
async def test_no_version(repository: ModelRepository, root: Path, policy: str) -> None:
    write_model(root, "a", 1, config=CONFIG + f"version_policy {{ {policy} }}")
    error = await failure(repository.load("a"))
    assert error.code is ErrorCode.INVALID
    assert error.message == (
        "load failed for model 'a': at least one version must be available under the version policy of model 'a'\n"
    )
    assert not repository.is_ready


@pytest.mark.parametrize("mode", [ControlMode.NONE, ControlMode.POLL])
async def test_clients_change_nothing_in_other_modes(bench: Bench, root: Path, mode: ControlMode) -> None:
    repository = bench.repository(mode)
    await repository.start()
    for change in (repository.load("a"), repository.unload("a")):
        error = await failure(change)
        assert error.code is ErrorCode.UNAVAILABLE
        assert error.message == "explicit model load / unload is not allowed if polling is enabled"
    await repository.close()


async def test_one_name_in_two_roots(tmp_path: Path) -> None:
    for each in ("one", "two"):
        write_model(tmp_path / each, "twin", 1)
        write_model(tmp_path / each, each, 1)
    bench = Bench(tmp_path / "one", tmp_path / "two")
    repository = bench.repository(ControlMode.NONE)
    failures = await repository.start()
    assert list(failures) == ["twin"]
    for each in ("one", "two"):
        assert str(tmp_path / each / "twin") in failures["twin"].message
    assert sorted(model.name for model in repository.models()) == ["one", "two"]
    await repository.close()


async def test_a_root_that_is_none(tmp_path: Path) -> None:
    error = await failure(Bench(tmp_path / "nowhere").repository().start())
    assert error.code is ErrorCode.INVALID
    assert "nowhere" in error.message


async def test_an_added_model_needs_no_folder(bench: Bench, repository: ModelRepository, root: Path) -> None:
    write_model(root, "a", 5)
    await repository.load("a")
    added: Model = repository.find("a")
    other = bench.repository(ControlMode.NONE)
    other.add(added)
    with pytest.raises(SluiceError, match="already served"):
        other.add(added)
    failures = await other.start()
    assert "started with a model of this name" in failures["a"].message
    assert other.find("a") is added
    [row] = other.index()
    assert row.state is ModelState.READY
    assert "started with a model of this name" in row.reason
    assert other.is_ready
    alone = Bench().repository(ControlMode.NONE)
    await alone.start()
    alone.add(added)
    assert rows(alone) == {("a", 1): READY}
    await other.close()


@pytest.mark.usefixtures("no_gpu")
async def test_a_note_names_what_is_not_obeyed(bench: Bench, repository: ModelRepository, root: Path) -> None:
    write_model(root, "a", 1, config=CONFIG + "runtime: 'x' instance_group { kind: KIND_GPU gpus: 0 }")
    await repository.load("a")
    await repository.load("a", LoadOverrides())
    assert [note for note in bench.notes if note.startswith("model 'a'")] == [
        "model 'a': not obeyed: instance_group.gpus (config.pbtxt:5: instances of this backend choose no GPU); "
        "runtime (config.pbtxt:5: a backend is chosen by its name); "
        "there is no GPU, instances of KIND_GPU run on the CPU"
    ]


async def test_the_backend_completes_what_is_left_out(bench: Bench, root: Path) -> None:
    def complete(config: object) -> None:
        config.max_batch_size = 3  # type: ignore[attr-defined]
        config.dynamic_batching.SetInParent()  # type: ignore[attr-defined]

    bench.stamp.completes = complete
    write_model(root, "a", 1)
    loose = bench.repository()
    await loose.start(["a"])
    config = loose.find("a").config
    assert (config.name, config.default_model_filename) == ("a", "stamp.txt")
    assert list(config.dynamic_batching.preferred_batch_size) == [3]
    assert [group.name for group in config.instance_group] == ["a"]
    await loose.close()
    strict = bench.repository(strict_config=True)
    await strict.start(["a"])
    assert strict.find("a").config.max_batch_size == 0
    (root / "a" / "config.pbtxt").unlink()
    assert "config.pbtxt: No such file" in (await failure(strict.load("a"))).message
    await strict.close()


async def test_a_link_to_itself_harms_no_model(bench: Bench, repository: ModelRepository, root: Path) -> None:
    (root / "loop").symlink_to(root / "loop")
    write_model(root, "a", 1)
    await repository.load("a")
    assert repository.find("a").is_ready
    await repository.refresh()
    assert [row.name for row in repository.index()] == ["a"]


@pytest.mark.parametrize(("stamp", "kind"), [("raise", KeyError), ("fail", None)])
async def test_a_failed_load_is_logged_once_with_the_trace_of_what_no_backend_should_raise(
    root: Path, caplog: pytest.LogCaptureFixture, stamp: str, kind: type[Exception] | None
) -> None:
    write_model(root, "a", stamp)
    repository = ModelRepository([root], ControlMode.NONE, context_for, registry=Bench(root).registry)
    await repository.start()
    await repository.close()
    [record] = [each for each in caplog.records if each.levelname == "ERROR"]
    assert record.getMessage().startswith("load failed for model 'a': version 1 is at UNAVAILABLE state: Internal: ")
    assert (record.exc_info and record.exc_info[0]) == kind


async def test_weights_of_a_version_that_is_not_there_are_told(
    bench: Bench, repository: ModelRepository, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = 'parameters { key: "version_weights" value: { string_value: "1=9,7=1" } }'
    write_model(root, "a", 1, config=CONFIG + weights)
    await repository.load("a")
    assert "model 'a': version_weights name version 7, which does not serve" in caplog.text
    assert repository.routing("a").shares == {1: 1.0}


async def test_the_index_says_where_what_serves_is_not_what_lies_there(
    bench: Bench, repository: ModelRepository, root: Path
) -> None:
    folder = write_model(root, "a", 1)
    await repository.load("a")
    write_version(folder, 1, "fail")
    await failure(repository.load("a"))
    [row] = repository.index()
    assert (row.state, row.reason.partition(": ")[0]) == (
        ModelState.READY,
        "what lies in the repository cannot be loaded",
    )
    write_version(folder, 1, 2)
    await repository.load("a")
    assert [each.reason for each in repository.index()] == [""]
