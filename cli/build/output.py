"""The output of a build: checked before it begins, staged beside the repository, and moved there when complete."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sluice.cli.build.options import BuildError, UsageError
from sluice.cli.build.steps import BuildStep
from sluice.cli.terminal import format_size

_PREFIX = ".sluice-build-"
"""Begins with a dot, since hidden folders of a repository are not read as models."""
_MARGIN = 1.05
"""Factor on the size of a build, which is an estimate."""


def check_output(repository: Path, names: Sequence[str], *, is_forced: bool) -> None:
    """Raises UsageError where the models cannot be put into `repository`."""
    if repository.exists() and not repository.is_dir():
        raise UsageError(f"--output {repository} is a file; it must be a folder, or not there yet")
    if (repository / "config.pbtxt").is_file():
        raise UsageError(
            f"--output {repository} is a model's folder (it has a config.pbtxt); give the folder of the repository, in "
            "which the model's is made"
        )
    taken = [name for name in names if (repository / name).exists()]
    if taken and not is_forced:
        raise UsageError(
            f"{repository} has {', '.join(taken)} already; replace with --force, or choose another --name; for several "
            "models in one repository, --layout prefixed"
        )


def check_space(folder: Path, steps: Iterable[BuildStep]) -> None:
    """Raises UsageError where the disk of `folder` has less free than the steps need together."""
    num_bytes, free = sum(step.size_bytes() for step in steps), shutil.disk_usage(folder).free
    if num_bytes * _MARGIN > free:
        raise UsageError(
            f"not enough space: the build needs about {format_size(num_bytes)} at {folder.parent}, and "
            f"{format_size(free)} are free; choose another --output, or --link to copy no weights"
        )


@contextmanager
def staging(repository: Path) -> Iterator[Path]:
    """Yield a folder on the same disk as `repository`. It is removed with its content when the context ends."""
    parent = repository if repository.is_dir() else _existing_parent(repository)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(built: Path, repository: Path, names: Sequence[str], replaced: Path) -> None:
    """Move the models from `built` into the repository, each by one rename, all or none.

    The models that they replace are moved to `replaced`. Raises BuildError where a move fails. A failure or a signal in
    the middle restores the repository as it was.
    """
    repository.mkdir(parents=True, exist_ok=True)
    replaced.mkdir()
    moved: list[tuple[Path, Path]] = []
    try:
        for name in names:
            if (repository / name).exists():
                _move(repository / name, replaced / name, moved)
            _move(built / name, repository / name, moved)
    except OSError as error:
        _move_back(moved)
        raise BuildError(f"cannot move {name} into {repository}: {error}; nothing there was changed") from error
    except BaseException:
        _move_back(moved)
        raise


def _move(before: Path, after: Path, moved: list[tuple[Path, Path]]) -> None:
    moved.append((before, after))  # before the rename: a signal after it must find the move recorded
    before.rename(after)


def _move_back(moved: Sequence[tuple[Path, Path]]) -> None:
    for before, after in reversed(moved):
        if after.exists() and not before.exists():
            after.rename(before)


def _existing_parent(repository: Path) -> Path:
    """Return the nearest parent that exists."""
    return next(parent for parent in repository.absolute().parents if parent.is_dir())
