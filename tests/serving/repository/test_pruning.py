"""Which old versions go, and that a server that polls never sees half of one."""

import errno
import os
from pathlib import Path

import pytest

from sluice.errors import SluiceError
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.repository.managed_model import ModelState
from sluice.serving.repository.pruning import Removal, folder_bytes, plan_prune, remove_version
from sluice.serving.repository.settings import ControlMode
from tests.serving.repository.parts import CONFIG, Bench, ensemble_config, rows, write_model
from tests.waiting import until


def going(plan: list[Removal] | tuple[Removal, ...]) -> list[tuple[str, int]]:
    return [(each.model, each.version) for each in plan]


def test_all_but_the_newest_go(root: Path) -> None:
    write_model(root, "a", *range(12))
    write_model(root, "b", 1, 2)
    (root / "a" / "v3").mkdir()
    plan = plan_prune([root], 2, BackendRegistry())
    assert going(plan.removals) == [("a", version) for version in range(1, 11)]
    assert {each.note for each in plan.removals} == {""}
    assert plan.size_bytes == 10
    assert plan.kept == ()


@pytest.mark.parametrize("config", ['backend: "python"', 'platform: "onnxruntime_onnx"', CONFIG])
def test_what_is_not_whole_counts_for_nothing(root: Path, config: str) -> None:
    folder = write_model(root, "a", 1, 2, config=config)
    for version in (1, 2):
        for name in ("model.py", "model.onnx"):
            (folder / str(version) / name).touch()
    (folder / "3").mkdir()
    plan = plan_prune([root], 1, BackendRegistry())
    assert going(plan.removals) == [("a", 1)]
    assert [(each.version, each.reason) for each in plan.kept] == [
        (3, "its model's file is not there, so it counts for nothing")
    ]


@pytest.mark.parametrize(
    ("policy", "gone", "note"),
    [
        ("all { }", [1, 2, 3], "served until now: version_policy all"),
        ("latest { num_versions: 2 }", [1, 2, 3], ""),
        ("specific { versions: [2, 3, 9] }", [1], ""),
    ],
)
def test_policies(root: Path, policy: str, gone: list[int], note: str) -> None:
    write_model(root, "a", 1, 2, 3, 4, config=f"{CONFIG} version_policy {{ {policy} }}")
    plan = plan_prune([root], 1, BackendRegistry())
    assert [each.version for each in plan.removals] == gone
    assert plan.removals[0].note == note
    assert [each.version for each in plan.kept] == sorted({1, 2, 3} - set(gone))
    assert {each.reason for each in plan.kept} <= {"its version_policy names it"}


def test_a_policy_of_more_versions_than_are_kept_is_told(root: Path) -> None:
    write_model(root, "a", 1, 2, 3, 4, config=f"{CONFIG} version_policy {{ latest {{ num_versions: 3 }} }}")
    notes = {each.version: each.note for each in plan_prune([root], 1, BackendRegistry()).removals}
    assert notes == dict.fromkeys((2, 3), "served until now: version_policy latest 3") | {1: ""}


def test_what_an_ensemble_of_any_repository_calls_stays(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    write_model(one, "a", 1, 2, 3)
    config = ensemble_config("a", "a").replace("model_version: -1", "model_version: 2", 1)
    write_model(other, "e", 1, config=config)
    plan = plan_prune([one, other], 1, BackendRegistry())
    assert going(plan.removals) == [("a", 1)]
    assert [(each.model, each.version, each.reason) for each in plan.kept] == [("a", 2, "ensemble 'e' calls it")]


def test_what_has_a_share_of_the_requests_stays(root: Path) -> None:
    weights = 'parameters { key: "version_weights" value { string_value: "1=0,2=95,3=5" } }'
    write_model(root, "a", 1, 2, 3, config=f"{CONFIG} {weights}")
    plan = plan_prune([root], 1, BackendRegistry())
    assert going(plan.removals) == [("a", 1)]
    assert [(each.version, each.reason) for each in plan.kept] == [(2, "its version_weights name it")]


def test_nothing_goes_where_something_cannot_be_read(root: Path) -> None:
    write_model(root, "a", 1, 2, 3)
    write_model(root, "b", 1, config="ensemble_scheduling { stp { } }")
    with pytest.raises(SluiceError, match=r"b/config.pbtxt:1:23: ModelEnsembling has no field 'stp'"):
        plan_prune([root], 1, BackendRegistry())


def test_removal_leaves_nothing(root: Path, tmp_path: Path) -> None:
    folder = write_model(root, "a", 1, 2)
    (folder / "1" / "inner").mkdir()
    (folder / "1" / "inner" / "weights").write_bytes(bytes(1000))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("by its owner")
    (folder / "1" / "inner" / "link").symlink_to(elsewhere)
    assert folder_bytes(folder / "1") >= 1001
    (removal,) = plan_prune([root], 1, BackendRegistry()).removals
    remove_version(removal)
    assert sorted(each.name for each in folder.iterdir()) == ["2", "config.pbtxt"]
    assert [each.name for each in root.iterdir()] == ["a"]
    assert (elsewhere / "kept").exists()


def test_a_version_that_is_a_link(root: Path, tmp_path: Path) -> None:
    folder = write_model(root, "a", 1, 2)
    target = tmp_path / "target"
    (folder / "1").rename(target)
    (folder / "1").symlink_to(target)
    (removal,) = plan_prune([root], 1, BackendRegistry()).removals
    assert removal.size_bytes < 1000
    remove_version(removal)
    assert not (folder / "1").is_symlink()
    assert (target / "stamp.txt").exists()


def test_across_devices_it_hides_inside(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(root, "a", 1, 2)
    hidden: list[Path] = []
    rename = os.rename

    def one_device_a_folder(self: Path, target: Path) -> Path:
        if target.parent != self.parent:
            raise OSError(errno.EXDEV, "another device")
        rename(self, target)
        hidden.append(target)
        return target

    monkeypatch.setattr(Path, "rename", one_device_a_folder)
    (removal,) = plan_prune([root], 1, BackendRegistry()).removals
    remove_version(removal)
    assert [each.parent for each in hidden] == [folder]
    assert sorted(each.name for each in folder.iterdir()) == ["2", "config.pbtxt"]


def test_what_an_interrupted_prune_left_goes_with_the_next(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(root, "a", 1, 2)
    (removal,) = plan_prune([root], 1, BackendRegistry()).removals
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(OSError("interrupted")))
        with pytest.raises(OSError, match="interrupted"):
            remove_version(removal)
    (root / ".sluice-pruned-of-somebody-else").mkdir()
    plan = plan_prune([root], 1, BackendRegistry())
    assert plan.removals == ()
    assert [(each.model, each.version, each.note) for each in plan.leftovers] == [
        ("a", 1, "left by a prune that was interrupted")
    ]
    remove_version(plan.leftovers[0])
    assert sorted(each.name for each in root.iterdir()) == [".sluice-pruned-of-somebody-else", "a"]


async def test_a_server_that_polls_takes_it_up(root: Path, bench: Bench) -> None:
    """The other versions stay as they are: nothing of them is loaded again."""
    write_model(root, "a", 1, 2, 3, config=f"{CONFIG} version_policy {{ all {{ }} }}")
    repository = bench.repository(ControlMode.POLL, poll_s=0.02)
    assert await repository.start() == {}
    assert [model.version for model in repository.versions("a")] == [1, 2, 3]
    for removal in plan_prune([root], 1, BackendRegistry()).removals:
        remove_version(removal)
    await until(lambda: [model.version for model in repository.versions("a")] == [3])
    assert sorted(bench.stamp.loads) == [("a", 1), ("a", 2), ("a", 3)]
    assert rows(repository)["a", 3][0] is ModelState.READY
    await repository.close()
