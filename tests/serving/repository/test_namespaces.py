"""Models of one name in several repositories: all serve, each under a name of its own."""

import asyncio
import shutil
from pathlib import Path

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.repository.folders import FolderState
from sluice.serving.repository.polling import ChangeDetector
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.roots import Naming, RepositoryScan, choose_namespaces
from sluice.serving.repository.settings import ControlMode, RepositorySettings
from tests.serving.repository.parts import CONFIG, READY, Bench, ask, ensemble_config, failure, rows, write_model
from tests.waiting import until

NAMESPACES = RepositorySettings(has_namespaces=True)


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    return folders


async def started(
    roots: tuple[Path, ...], mode: ControlMode = ControlMode.NONE, settings: RepositorySettings = NAMESPACES
) -> tuple[Bench, ModelRepository]:
    bench = Bench(*roots)
    repository = bench.repository(mode, settings=settings, poll_s=0.02)
    await repository.start()
    return bench, repository


async def test_all_serve_under_names_of_their_own(roots: tuple[Path, Path]) -> None:
    for index, root in enumerate(roots, start=1):
        write_model(root, "twin", index * 10, config=CONFIG + 'name: "twin"')
        write_model(root, f"only{index}", index)
    _, repository = await started(roots)
    assert await ask(repository, "one::twin") == 10
    assert await ask(repository, "two::twin") == 20
    assert await ask(repository, "only1") == await ask(repository, "one::only1") == 1
    assert rows(repository) == {
        ("one::twin", 1): READY, ("two::twin", 1): READY, ("only1", 1): READY, ("only2", 1): READY
    }  # fmt: skip
    with pytest.raises(SluiceError) as caught:
        repository.find("twin")
    assert caught.value.code is ErrorCode.INVALID
    assert "name one of 'one::twin', 'two::twin'" in caught.value.message
    for name in ("two::only1", "three::twin", "nope"):
        with pytest.raises(SluiceError, match="is not found"):
            repository.find(name)
    assert repository.find("one::twin").name == "one::twin"
    assert repository.is_ready
    await repository.close()


async def test_explicit_loads(roots: tuple[Path, Path]) -> None:
    write_model(roots[0], "twin", 10)
    _, repository = await started(roots, ControlMode.EXPLICIT)
    await repository.load("one::twin")
    assert await ask(repository, "twin") == await ask(repository, "one::twin") == 10
    write_model(roots[1], "twin", 20)
    await repository.load("two::twin")
    assert await ask(repository, "two::twin") == 20
    with pytest.raises(SluiceError, match="namespace must be provided to resolve ambiguity"):
        repository.find("twin")
    assert await ask(repository, "one::twin") == 10
    assert (await failure(repository.load("three::twin"))).message.endswith("failed to poll from model repository")
    await repository.unload("two::twin")
    with pytest.raises(SluiceError, match="no available versions"):
        repository.find("two::twin")
    await repository.close()


async def test_a_plain_name_loads_the_ensembles_of_all_repositories_that_have_it(roots: tuple[Path, Path]) -> None:
    for index, root in enumerate(roots, start=1):
        write_model(root, f"only{index}", index)
        write_model(root, "outer", 0, config=step_config(f"only{index}"))
    _, repository = await started(roots, ControlMode.EXPLICIT)
    await repository.load("outer")
    for index, name in enumerate(("one::outer", "two::outer"), start=1):
        assert await ask(repository, name) == await ask(repository, f"only{index}") == index
    with pytest.raises(SluiceError, match="namespace must be provided to resolve ambiguity"):
        repository.find("outer")
    await repository.unload("outer")
    assert {model.name for model in repository.models()} == {"only1", "only2"}
    await repository.close()


def step_config(member: str, namespace: str = "") -> str:
    named = f'model_namespace: "{namespace}"' if namespace else ""
    return ensemble_config(member).replace("model_version: -1", f"model_version: -1 {named}")


async def test_an_ensemble_calls_the_members_of_its_own_repository(roots: tuple[Path, Path]) -> None:
    for index, root in enumerate(roots, start=1):
        write_model(root, "twin", index * 10)
        write_model(root, "outer", 0, config=step_config("twin"))
    write_model(roots[0], "other", 0, config=step_config("twin", "two"))
    write_model(roots[0], "by_path", 0, config=step_config("twin", str(roots[1])))
    write_model(roots[1], "elsewhere", 0, config=step_config("only1"))
    write_model(roots[0], "only1", 1)
    _, repository = await started(roots)
    answers = {name: await ask(repository, name) for name in ("one::outer", "two::outer", "other", "by_path")}
    assert answers == {"one::outer": 10, "two::outer": 20, "other": 20, "by_path": 20}
    assert await ask(repository, "elsewhere") == 1
    await repository.close()


async def test_steps_that_name_no_one_model(roots: tuple[Path, Path], tmp_path: Path) -> None:
    for index, root in enumerate(roots, start=1):
        write_model(root, "twin", index * 10)
    third = tmp_path / "three"
    third.mkdir()
    write_model(third, "undecided", 0, config=step_config("twin"))
    write_model(third, "nowhere", 0, config=step_config("twin", "four"))
    write_model(third, "lacking", 0, config=step_config("nope", "one"))
    bench = Bench(*roots, third)
    repository = bench.repository(ControlMode.NONE, settings=NAMESPACES)
    failures = await repository.start()
    assert "name one of 'one::twin', 'two::twin'" in failures["undecided"].message
    assert "there is no model namespace 'four'; there are 'one', 'two', 'three'" in failures["nowhere"].message
    assert "model namespace 'one' has no model 'nope'" in failures["lacking"].message
    assert sorted(failures) == ["lacking", "nowhere", "undecided"]
    await repository.close()


def refusal_to_find(repository: ModelRepository, name: str) -> str:
    try:
        repository.find(name)
    except SluiceError as error:
        return error.message
    return ""


async def test_a_name_comes_to_be_shared_and_is_shared_no_more(roots: tuple[Path, Path]) -> None:
    write_model(roots[0], "twin", 10)
    write_model(roots[0], "outer", 0, config=step_config("twin"))
    _, repository = await started(roots, ControlMode.POLL)
    assert await ask(repository, "twin") == await ask(repository, "outer") == 10
    write_model(roots[1], "twin", 20)
    await until(lambda: {"one::twin", "two::twin"} <= {model.name for model in repository.models()})
    assert await ask(repository, "one::twin") == 10
    await until(lambda: "name one of" in refusal_to_find(repository, "twin"))
    await until(lambda: "outer" in {model.name for model in repository.models()})
    assert await ask(repository, "outer") == 10
    shutil.rmtree(roots[0] / "twin")
    await until(lambda: {model.name for model in repository.models()} == {"twin", "outer"})
    assert await ask(repository, "outer") == 20
    assert await ask(repository, "twin") == await ask(repository, "two::twin") == 20
    await repository.close()


async def test_in_explicit_mode_a_name_that_comes_to_be_shared_answers_no_more(roots: tuple[Path, Path]) -> None:
    write_model(roots[1], "twin", 20)
    for index, root in enumerate(roots, start=1):
        write_model(root, f"outer{index}", 0, config=step_config("twin"))
    _, repository = await started(roots, ControlMode.EXPLICIT)
    for name in ("outer1", "outer2"):
        await repository.load(name)
        assert await ask(repository, name) == await ask(repository, "twin") == 20
    write_model(roots[0], "twin", 10)
    await repository.load("outer1")
    assert [await ask(repository, name) for name in ("outer1", "outer2")] == [10, 20]
    with pytest.raises(SluiceError, match="ambiguity: name one of 'one::twin', 'two::twin'"):
        repository.find("twin")
    await repository.close()


def test_a_model_that_only_gets_another_name_is_settled() -> None:
    states = {root: ((root, FolderState((), 1)),) for root in ("one", "two")}
    detector = ChangeDetector()
    assert detector.take(RepositoryScan({"one::twin": states["one"], "two::twin": states["two"]}), 2).is_settled
    changes = detector.take(RepositoryScan({"twin": states["two"]}))
    assert list(changes.changed) == ["twin"]
    assert changes.removed == ("one::twin", "two::twin")
    shared = RepositoryScan({"one::twin": states["one"], "two::twin": states["two"]})
    changes = detector.take(shared)
    assert (list(changes.changed), changes.removed) == (["two::twin"], ())  # the copy may go on
    changes = detector.take(shared)
    assert (list(changes.changed), changes.removed) == (["one::twin"], ("twin",))


async def test_an_ensemble_serves_while_its_steps_get_other_names(roots: tuple[Path, Path]) -> None:
    for index, root in enumerate(roots, start=1):
        write_model(root, "twin", index * 10)
        write_model(root, f"outer{index}", 0, config=step_config("twin"))
    _, repository = await started(roots, ControlMode.POLL)
    away = roots[0].parent / "away"
    for names in ({"twin"}, {"one::twin", "two::twin"}):
        shutil.move(*((roots[0] / "twin", away) if "twin" in names else (away, roots[0] / "twin")))
        while {each.name for each in repository.models()} != {*names, "outer1", "outer2"}:
            assert await ask(repository, "outer2") == 20
            assert await ask(repository, "outer1") in (10, 20)
            await asyncio.sleep(0.002)
        assert await ask(repository, "outer1") == (20 if "twin" in names else 10)
    await repository.close()


async def test_a_step_keeps_its_old_name_while_its_ensemble_is_loading(roots: tuple[Path, Path]) -> None:
    for index, root in enumerate(roots, start=1):
        write_model(root, "twin", index * 10)
    outer = write_model(roots[1], "outer", 0, config=step_config("twin"))
    bench, repository = await started(roots, ControlMode.POLL)
    bench.join.gate.clear()
    (outer / "config.pbtxt").write_text(step_config("twin") + "# changed")
    await until(lambda: len(bench.join.loads) == 2)
    shutil.rmtree(roots[0] / "twin")
    await until(lambda: "twin" in {each.name for each in repository.models()})
    for _ in range(100):
        assert await ask(repository, "outer") == 20
        await asyncio.sleep(0.002)
    bench.join.gate.set()
    await until(lambda: {each.name for each in repository.models()} == {"twin", "outer"})
    assert await ask(repository, "outer") == 20
    await repository.close()


async def test_without_namespaces_a_step_may_name_the_only_one(roots: tuple[Path, Path]) -> None:
    write_model(roots[0], "inner", 10)
    write_model(roots[1], "outer", 0, config=step_config("inner", "one"))
    write_model(roots[1], "wrong", 0, config=step_config("inner", "two"))
    bench = Bench(*roots)
    repository = bench.repository(ControlMode.NONE)
    failures = await repository.start()
    assert await ask(repository, "outer") == 10
    assert "model namespace 'two' has no model 'inner'" in failures["wrong"].message
    await repository.close()


def test_namespaces_of_folders_of_one_name() -> None:
    roots = ["/a/models", "/b/models/", "s3://bucket/more", "/c"]
    assert choose_namespaces(roots) == {
        "/a/models": "/a/models", "/b/models/": "/b/models/", "s3://bucket/more": "more", "/c": "c"
    }  # fmt: skip


def test_names_without_need_are_plain() -> None:
    naming = Naming.of([("one", "a"), ("two", "a"), ("two", "b")], has_namespaces=True)
    assert set(naming.folders) == {"one::a", "two::a", "b"}
    assert naming.canonical("two::b") == "b"
    assert naming.canonical("one::a") == "one::a"
    assert naming.choices == {"a": ("one::a", "two::a")}
    assert set(Naming.of([("one", "a"), ("two", "a")], has_namespaces=False).folders) == {"a"}
