"""Folders that go with their process, however it ends."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sluice import run_folder
from sluice.errors import ErrorCode, SluiceError
from sluice.run_folder import make_folder, make_socket_folder, remove_left_over, temporary_folder

MAKE = "import sys; from sluice.run_folder import make_folder; print(make_folder('x'), flush=True); sys.stdin.read()"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    run_folder._folders.pop(tmp_path).remove() if tmp_path in run_folder._folders else None


@contextmanager
def another_process(parent: Path) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """A process that has made a folder, and ends when its input does."""
    environment = {**os.environ, "TMPDIR": str(parent)}  # noqa: TID251 - the child's
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    with process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_process_that_ends_leaves_nothing(tmp_path: Path) -> None:
    with another_process(tmp_path) as (process, folder):
        assert folder.is_dir()
        process.communicate()
    assert list(tmp_path.iterdir()) == []


def test_the_next_process_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    with another_process(tmp_path) as (process, folder):
        (folder / "file").touch()
        process.kill()
        process.wait()
    assert folder.is_dir()
    own = make_folder("x")
    assert list(tmp_path.iterdir()) == [own.parent]


def test_what_a_living_process_uses_stays(tmp_path: Path) -> None:
    with another_process(tmp_path) as (_, folder):
        make_folder("x")
        remove_left_over(tmp_path)
        assert folder.is_dir()


def test_other_folders_and_links_stay(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "sluice-run-link").symlink_to(target, target_is_directory=True)
    (tmp_path / "sluice-other").mkdir()
    remove_left_over(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"target", "sluice-run-link", "sluice-other"}


def test_a_folder_that_somebody_deleted_is_made_anew() -> None:
    folder = make_folder("x")
    folder.rmdir()
    folder.parent.rmdir()
    assert make_folder("x").is_dir()


def test_a_fork_has_a_folder_of_its_own_and_does_not_remove_its_parents() -> None:
    folder = make_folder("x")
    pid = os.fork()
    if pid == 0:
        run_folder.remove_all()
        os._exit(0 if make_folder("x").parent != folder.parent else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert folder.is_dir()


def test_a_context_removes_its_folder() -> None:
    with temporary_folder("x") as folder:
        (folder / "file").touch()
    assert not folder.exists()


def test_folders_are_for_this_user_alone() -> None:
    folder = make_folder("x")
    assert [each.stat().st_mode & 0o777 for each in (folder, folder.parent)] == [0o700, 0o700]


def test_sockets_are_refused_a_path_that_is_too_long_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(SluiceError, match=r"too long for sockets in it; set TMPDIR to one of at most 6\d bytes"):
        make_socket_folder("x")


def test_the_error_names_what_to_do_where_no_folder_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    with pytest.raises(SluiceError, match=r"no temporary folder can be made: .*; set TMPDIR") as caught:
        make_folder("x")
    assert caught.value.code is ErrorCode.UNAVAILABLE
