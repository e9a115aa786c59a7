"""A build is made beside its place and moved there when it is whole."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cli.build.failures import AskedError, BuildError

_PREFIX = ".sluice-build-"
"""A repository's hidden folders are nobody's models."""


def check_place(repository: Path, names: Sequence[str], *, is_forced: bool) -> None:
    """Raises AskedError where the models cannot be put into `repository`."""
    if repository.exists() and not repository.is_dir():
        raise AskedError(f"--output {repository} is a file; it must be a folder, or not there yet")
    if (repository / "config.pbtxt").is_file():
        raise AskedError(
            f"--output {repository} is a model's folder (it has a config.pbtxt); give the folder of the repository, in "
            "which the model's is made"
        )
    taken = [name for name in names if (repository / name).exists()]
    if taken and not is_forced:
        raise AskedError(
            f"{repository} has {', '.join(taken)} already; replace with --force, or choose another --name; for several "
            "models in one repository, --layout prefixed"
        )


@contextmanager
def staging(repository: Path) -> Iterator[Path]:
    """A folder on the same disk as `repository`; gone with the context, whatever is left in it."""
    parent = repository if repository.is_dir() else _nearest(repository)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(built: Path, repository: Path, names: Sequence[str], aside: Path) -> None:
    """Move the models into the repository, one after another, each in one step; all or none.

    What they replace is moved to `aside`. Raises BuildError where a move fails. What was there before is there then,
    and when a signal ends it in the middle.
    """
    repository.mkdir(parents=True, exist_ok=True)
    aside.mkdir()
    moved: list[tuple[Path, Path]] = []
    try:
        for name in names:
            if (repository / name).exists():
                _move(repository / name, aside / name, moved)
            _move(built / name, repository / name, moved)
    except OSError as error:
        _move_back(moved)
        raise BuildError(f"cannot move {name} into {repository}: {error}; nothing there was changed") from error
    except BaseException:
        _move_back(moved)
        raise


def _move(before: Path, after: Path, moved: list[tuple[Path, Path]]) -> None:
    moved.append((before, after))  # first: what is not noted is not moved back
    before.rename(after)


def _move_back(moved: Sequence[tuple[Path, Path]]) -> None:
    for before, after in reversed(moved):
        if after.exists() and not before.exists():
            after.rename(before)


def _nearest(repository: Path) -> Path:
    """The folder that is there already: the others are made with the models."""
    return next(parent for parent in repository.absolute().parents if parent.is_dir())
