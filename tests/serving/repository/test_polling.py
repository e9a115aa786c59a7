"""Poll mode: what changes is taken up, and nothing that is still being copied."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.serving.repository.folders import FolderState, LocalRoot, scan_folder
from sluice.serving.repository.managed_model import ModelState
from sluice.serving.repository.polling import ChangeDetector, Changes
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.roots import RepositoryScan, Roots
from sluice.serving.repository.settings import ControlMode
from tests.serving.repository.parts import CONFIG, Bench, ask, ensemble_config, rows, write_model, write_version
from tests.waiting import until

POLL_S = 0.02


async def polling(bench: Bench) -> ModelRepository:
    repository = bench.repository(ControlMode.POLL, poll_s=POLL_S)
    await repository.start()
    return repository


def stamps(repository: ModelRepository) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for model in repository.models():
        found.setdefault(model.name, []).append(model.version)
    return found


async def test_models_and_versions_come_and_go(bench: Bench, root: Path) -> None:
    folder = write_model(root, "a", 1, config=CONFIG + "version_policy { all {} }")
    repository = await polling(bench)
    assert stamps(repository) == {"a": [1]}
    write_version(folder, 2, 2)
    write_model(root, "b", 5)
    await until(lambda: stamps(repository) == {"a": [1, 2], "b": [1]})
    shutil.rmtree(folder / "1")
    await until(lambda: stamps(repository) == {"a": [2], "b": [1]})
    write_version(folder, 2, 333)
    await until(lambda: len(bench.stamp.loads) == 4)
    await until(lambda: repository.find("a").stamp == 333)  # type: ignore[attr-defined]
    shutil.rmtree(folder)
    await until(lambda: stamps(repository) == {"b": [1]})
    assert repository.is_ready
    await repository.close()
    assert not bench.stamp.open_models


async def test_a_model_that_fails_is_tried_again_when_it_changes(bench: Bench, root: Path) -> None:
    folder = write_model(root, "a", "fail")
    repository = await polling(bench)
    assert rows(repository)["a", 1] == (ModelState.UNAVAILABLE, "Internal: RuntimeError: cannot start")
    num_loads = len(bench.stamp.loads)
    write_model(root, "other", 1)
    await until(lambda: "other" in stamps(repository))
    assert [name for name, _ in bench.stamp.loads[num_loads:]] == ["other"]
    write_version(folder, 1, 8)
    await until(lambda: "a" in stamps(repository))
    assert await ask(repository, "a") == 8
    (folder / "config.pbtxt").write_text("nonsense")
    await until(lambda: any("nonsense" in note for note in bench.notes))
    assert await ask(repository, "a") == 8
    await repository.close()


async def test_a_model_that_failed_and_is_taken_away_is_not_missed(bench: Bench, root: Path) -> None:
    folder = write_model(root, "a", "fail")
    repository = await polling(bench)
    assert not repository.is_ready
    shutil.rmtree(folder)
    await until(lambda: repository.is_ready)
    assert rows(repository) == {}
    await repository.close()


async def test_members_and_ensembles(bench: Bench, root: Path) -> None:
    write_model(root, "outer", 0, config=ensemble_config("inner"))
    repository = await polling(bench)
    assert "not available or ambiguous: inner" in rows(repository)["outer", 1][1]
    inner = write_model(root, "inner", 1)
    await until(lambda: set(stamps(repository)) == {"inner", "outer"})
    shutil.rmtree(inner)
    await until(lambda: stamps(repository) == {})
    await repository.close()


async def test_files_that_change_under_a_load(bench: Bench, root: Path) -> None:
    folder = write_model(root, "a", "hang")
    repository = bench.repository(ControlMode.POLL, poll_s=POLL_S)
    starting = repository.start()
    bench.stamp.release.set()  # a load that hangs writes its file before it goes on
    failures = await starting
    assert "its files changed while it was being loaded" in failures["a"].message
    await until(lambda: "a" in stamps(repository))
    assert await ask(repository, "a") == 0
    assert (folder / "1" / "stamp.txt").read_text() == "0"
    await repository.close()
    assert not bench.stamp.open_models


async def test_a_root_that_goes_away_and_comes_back(bench: Bench, root: Path) -> None:
    write_model(root, "a", 1)
    repository = await polling(bench)
    shutil.move(root, root.with_name("away"))
    await until(lambda: any("cannot be read" in note for note in bench.notes))
    assert await ask(repository, "a") == 1
    shutil.move(root.with_name("away"), root)
    write_model(root, "b", 1)
    await until(lambda: "b" in stamps(repository))
    assert repository.find("a")
    await repository.close()


async def test_a_slow_load_holds_up_no_other(bench: Bench, root: Path) -> None:
    repository = await polling(bench)
    slow = write_model(root, "slow", "hang")
    await bench.stamp.is_hanging.wait()
    write_model(root, "quick", 1)
    await until(lambda: stamps(repository) == {"quick": [1]})
    shutil.rmtree(slow)
    write_model(root, "later", 1)
    await until(lambda: "later" in stamps(repository))
    slow.joinpath("1").mkdir(parents=True)
    bench.stamp.release.set()
    await until(lambda: rows(repository).get(("slow", 1), (None, ""))[0] is ModelState.UNAVAILABLE)
    await until(lambda: not bench.stamp.num_loading)
    assert sorted(stamps(repository)) == ["later", "quick"]
    await repository.close()
    assert not bench.stamp.open_models


async def test_polling_goes_on_after_an_error(bench: Bench, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = await polling(bench)
    scan, errors = Roots.scan, [ValueError("unforeseen")]

    def fail_once(roots: Roots) -> RepositoryScan:
        if errors:
            raise errors.pop()
        return scan(roots)

    monkeypatch.setattr(Roots, "scan", fail_once)
    write_model(root, "a", 1)
    await until(lambda: "a" in stamps(repository))
    assert not errors
    assert any("unforeseen" in note for note in bench.notes)
    await repository.close()


async def test_without_an_interval_the_folders_are_looked_at_once(
    bench: Bench, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan, num_scans = Roots.scan, 0

    def count_and_scan(roots: Roots) -> RepositoryScan:
        nonlocal num_scans
        num_scans += 1
        return scan(roots)

    monkeypatch.setattr(Roots, "scan", count_and_scan)
    write_model(root, "a", 1)
    repository = bench.repository(ControlMode.POLL, poll_s=0)
    await repository.start()
    assert await ask(repository, "a") == 1
    num_at_start = num_scans
    assert repository._polls is not None
    await repository._polls  # it has come to an end
    assert num_scans == num_at_start
    await repository.close()


async def test_two_roots_of_one_name(tmp_path: Path) -> None:
    write_model(tmp_path / "one", "twin", 1)
    (tmp_path / "two").mkdir()
    bench = Bench(tmp_path / "one", tmp_path / "two")
    repository = await polling(bench)
    assert await ask(repository, "twin") == 1
    write_model(tmp_path / "two", "twin", 2)
    await until(lambda: any("several repositories" in note for note in bench.notes))
    assert await ask(repository, "twin") == 1
    shutil.rmtree(tmp_path / "one" / "twin")
    await until(lambda: repository.find("twin").stamp == 2)  # type: ignore[attr-defined]
    await repository.close()


pieces = st.lists(st.sampled_from(["scan", "piece"]), min_size=1, max_size=30)


@settings(deadline=None, max_examples=60)
@given(pieces=pieces)
def test_only_what_two_scans_saw_the_same_is_taken(tmp_path_factory: pytest.TempPathFactory, pieces: list[str]) -> None:
    """A model copied file by file and file in pieces, with scans at any moment between."""
    root = tmp_path_factory.mktemp("root")
    poller, roots = ChangeDetector(), Roots([LocalRoot(root)])
    copied: list[int] = []
    taken_after: list[int] = []
    num_copied = 0
    last_scans: list[int] = []
    for step in pieces:
        if step == "piece":
            _copy_piece(root, num_copied)
            num_copied += 1
            copied.append(num_copied)
            continue
        changes = poller.take(roots.scan())
        last_scans.append(num_copied)
        if "a" in changes.changed:
            taken_after.append(num_copied)
            assert last_scans[-2:] == [num_copied, num_copied]
    assert taken_after == sorted(set(taken_after))
    for _ in range(2):
        changes = poller.take(roots.scan())
        taken_after += [num_copied] * ("a" in changes.changed)
    assert (taken_after[-1:] == [num_copied]) == bool(num_copied)
    shutil.rmtree(root / "a", ignore_errors=True)
    removed = poller.take(roots.scan()).removed
    assert removed == (("a",) if num_copied else ())


def _copy_piece(root: Path, index: int) -> None:
    """Every third piece begins a file, the others go on with it."""
    file = root / "a" / "1" / f"file{index // 3}"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as out:
        out.write(b"x")


def test_a_copy_with_old_times_is_as_new_as_it_is(tmp_path: Path) -> None:
    """cp -p and rsync give files the times of their originals, which says nothing about when they came."""
    folder = write_model(tmp_path, "a", 1)
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    changed_ns = scan_folder(folder).changed_ns
    assert changed_ns > 1_000_000_000_000_000_000
    poller, roots = ChangeDetector(), Roots([LocalRoot(tmp_path)])
    assert not poller.take(roots.scan(), settled_before_ns=changed_ns).changed
    assert list(poller.take(roots.scan()).changed) == ["a"]
    assert list(ChangeDetector().take(roots.scan(), settled_before_ns=changed_ns + 1).changed) == ["a"]


def test_a_folder_that_vanishes_under_the_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "a", 1)
    poller, roots = ChangeDetector(), Roots([LocalRoot(tmp_path)])

    def vanish(folder: Path) -> FolderState:
        raise FileNotFoundError(folder)

    with monkeypatch.context() as patch:
        patch.setattr("sluice.serving.repository.folders.scan_folder", vanish)
        for _ in range(3):
            assert poller.take(roots.scan()) == Changes({}, (), is_settled=False)
    poller.take(roots.scan())
    assert poller.take(roots.scan()).changed.keys() == {"a"}


def test_links_to_nowhere_and_to_themselves(tmp_path: Path) -> None:
    write_model(tmp_path, "a", 1)
    os.symlink(tmp_path / "nowhere", tmp_path / "a" / "dangling")
    os.symlink(tmp_path / "a", tmp_path / "a" / "loop")
    poller, roots = ChangeDetector(), Roots([LocalRoot(tmp_path)])
    poller.take(roots.scan())
    assert poller.take(roots.scan()).changed.keys() == {"a"}


async def test_what_comes_between_a_scan_and_its_load_waits(
    bench: Bench, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version whose copy begins just when another change is taken up, and goes on from scan to scan."""
    folder = write_model(root, "a", 1)
    repository = await polling(bench)
    scan, pieces = Roots.scan, iter(["fail", "fai", "f", "7"])
    seen: list[object] = [None]

    def scan_and_copy(roots: Roots) -> RepositoryScan:
        now = scan(roots)
        seen.append(now.models["a"])
        is_taken_now = (folder / "labels.txt").exists() and seen[-1] == seen[-2]
        if is_taken_now or (folder / "2").exists():
            piece = next(pieces, None)
            if piece is not None:
                write_version(folder, 2, piece)
        return now

    monkeypatch.setattr(Roots, "scan", scan_and_copy)
    (folder / "labels.txt").write_text("a change that is taken up")
    await until(lambda: 2 in stamps(repository)["a"])
    assert await ask(repository, "a") == 7
    assert bench.stamp.loads == [("a", 1), ("a", 2)]
    await repository.close()


async def test_an_ensemble_whose_new_member_comes_later(bench: Bench, root: Path) -> None:
    """It serves on over the old one, and is taken up when the new one has come to rest."""
    write_model(root, "old", 1)
    outer = write_model(root, "outer", 0, config=ensemble_config("old"))
    repository = await polling(bench)
    assert await ask(repository, "outer") == 1
    (outer / "config.pbtxt").write_text(ensemble_config("new"))
    await until(lambda: any("not available or ambiguous: new" in note for note in bench.notes))
    assert await ask(repository, "outer") == 1
    write_model(root, "new", 2)
    await until(lambda: "new" in stamps(repository))
    await until(lambda: repository.find("outer").member.name == "new")  # type: ignore[attr-defined]
    assert await ask(repository, "outer") == 2
    await repository.close()


async def test_a_member_that_is_being_copied_is_not_loaded_for_its_ensemble(
    bench: Bench, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = await polling(bench)
    scan, pieces = Roots.scan, iter(["hal", "half", "half a", "3"])

    def copy_and_scan(roots: Roots) -> RepositoryScan:
        piece = next(pieces, None)
        if piece is not None:
            write_model(root, "inner", piece)
        return scan(roots)

    write_model(root, "outer", 0, config=ensemble_config("inner"))
    monkeypatch.setattr(Roots, "scan", copy_and_scan)
    await until(lambda: "outer" in stamps(repository))
    assert bench.stamp.loads == [("inner", 1)]
    assert await ask(repository, "outer") == 3
    await repository.close()
