"""One server for the recorded models. Tests may load and unload `on_demand`, and leave the rest as it was."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server_process import ServerProcess
from tests.triton.clients import GRPC, HTTP, Library
from tests.triton.held import Hold, write_held_models
from tests.triton.onnx_models import write_scale
from tests.triton.server import EXAM_FLAGS, MODELS, NOT_LOADED, OF_THE_EXAM, copy_models, serving


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = sorted(folder.name for folder in MODELS.iterdir())
    folder = copy_models(tmp_path_factory.mktemp("triton") / "models", names)
    write_held_models(folder)
    write_scale(folder / "scale")
    return folder


@pytest.fixture(scope="session")
def triton(repository: Path) -> Iterator[ServerProcess]:
    names = {each.name for each in repository.iterdir()} - NOT_LOADED - OF_THE_EXAM
    loads = [f"--load-model={name}" for name in sorted(names)]
    flags = ("--http-max-input-size=256M", "--grpc-max-input-size=256M", *EXAM_FLAGS, *loads)
    with serving(repository, repository.with_name("log"), *flags) as server:
        yield server


@pytest.fixture(params=[HTTP, GRPC], ids=lambda library: library.name)
def library(request: pytest.FixtureRequest) -> Library:
    chosen: Library = request.param
    return chosen


@pytest.fixture
def client(library: Library, triton: ServerProcess) -> Iterator[Any]:
    with library.client(triton) as client:
        yield client


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Hold]:
    """A request to the `held` model, released at the end: a failed test would otherwise keep an instance."""
    hold = Hold(tmp_path / "request")
    yield hold
    hold.release()
