"""A server of its own with the bundled encoders, for the stock client."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.pipelines.rag.bundled import copy_models
from tests.pipelines.rag.parts import parameter
from tests.server_process import ServerProcess, running_command


def add_parameter(root: Path, name: str, key: str, value: str) -> None:
    with (root / name / "config.pbtxt").open("a") as config:
        config.write(f"\n{parameter(key, value)}\n")


def add_copy(root: Path, original: str, name: str, **parameters: str) -> Path:
    """Put a model with the files of `original` and further parameters beside it. Returns its folder."""
    copy_models(root, original)
    (root / original).rename(root / name)
    for key, value in parameters.items():
        add_parameter(root, name, key, value)
    return root / name


@contextmanager
def serving_process(root: Path, *arguments: str) -> Iterator[ServerProcess]:
    with running_command(root.parent / "log", "--model-repository", str(root), *arguments) as server:
        server.wait_ready()
        yield server
