"""A backend that another package brings: installed by pip, found by entry point, served and checked like our own."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.serving.backend import BackendContext
from sluice.serving.model import infer_one
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Tensor
from tests import paths

PACKAGE = paths.DATA / "third_party_backend"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package."""
    site = tmp_path_factory.mktemp("site")
    source = Path(shutil.copytree(PACKAGE, tmp_path_factory.mktemp("source") / "package"))
    if importlib.util.find_spec("hatchling") is None:
        install_by_hand(source, site)
    else:
        options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(source)]
        subprocess.run(command, check=True, timeout=60)
    return site


def install_by_hand(source: Path, site: Path) -> None:
    """Write what pip would: without its build backend, and without a network to fetch it, pip cannot build a wheel."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    shutil.copy(source / "sluice_scaling.py", site)
    info = site / f"sluice_scaling-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"{name} = {value}\n" for name, value in project["entry-points"]["sluice.backends"].items()]
    (info / "entry_points.txt").write_text("[sluice.backends]\n" + "".join(lines))


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package on the path of this process."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "sluice_scaling", raising=False)


def write_model(root: Path, name: str, content: str = '{"factor": 2}', config: str = "") -> None:
    """Write a model whose version 1 has a `scale.json`."""
    folder = root / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "scale.json").write_text(content)
    if config:
        (folder / "config.pbtxt").write_text(config)


async def infer(repository: ModelRepository, name: str, values: Sequence[float] | Sequence[Sequence[float]]) -> Any:
    """Return the values of Y."""
    request = InferRequest({"X": Tensor.of("X", np.array(values, np.float32))})
    (output,) = (await infer_one(repository.find(name), request)).outputs
    assert (output.name, output.datatype) == ("Y", "FP32")
    return output.array.tolist()


@pytest.mark.usefixtures("installed")
async def test_its_models_are_recognised_completed_and_served(tmp_path: Path) -> None:
    write_model(tmp_path, "doubles")
    write_model(tmp_path, "batches", '{"factor": 3}', config="max_batch_size: 4 dynamic_batching { }")
    write_model(tmp_path, "named", config='platform: "scaling_json" instance_group [ { count: 2 kind: KIND_CPU } ]')
    repository = ModelRepository([tmp_path], ControlMode.NONE, BackendContext)
    assert await repository.start() == {}
    config = repository.find("doubles").config
    assert (config.backend, config.platform, config.default_model_filename) == ("scaling", "scaling_json", "scale.json")
    assert ([each.name for each in config.input], [each.name for each in config.output]) == (["X"], ["Y"])
    assert await infer(repository, "doubles", [1, -2.5]) == [2, -5]
    assert await infer(repository, "batches", [[1, 2], [3, 4]]) == [[3, 6], [9, 12]]
    assert await infer(repository, "named", [0.5]) == [1]
    assert repository.find("batches").statistics.batches.keys() == {2}
    await repository.close()


@pytest.mark.usefixtures("installed")
async def test_its_errors_are_those_of_the_load(tmp_path: Path) -> None:
    write_model(tmp_path, "broken", "{}")
    write_model(tmp_path, "typed", config='input [ { name: "X" data_type: TYPE_INT8 dims: [ -1 ] } ]')
    repository = ModelRepository([tmp_path], ControlMode.NONE, BackendContext)
    failures = await repository.start()
    assert "has no factor: KeyError" in failures["broken"].message
    assert "input 'X' of model 'typed' must be of type FP32, got TYPE_INT8" in failures["typed"].message
    await repository.close()


def test_a_check_has_its_findings(tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sluice repository check` as a user runs it, in a process of its own."""
    ignored = 'parameters { key: "factor" value { string_value: "3" } }'
    layout = 'input [ { name: "X" data_type: TYPE_FP32 format: FORMAT_NHWC dims: [ -1, -1, 3 ] } ]'
    write_model(tmp_path, "doubles")
    write_model(tmp_path, "broken", '{"factor": "x"}')
    write_model(tmp_path, "noted", config=f"{layout}\n{ignored}\ninstance_group [ {{ count: 100000 }} ]")
    command = [sys.executable, "-m", "sluice.cli", "repository", "check", "--json", str(tmp_path)]
    monkeypatch.setenv("PYTHONPATH", str(site))
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    models = {each["name"]: each for each in json.loads(done.stdout)["models"]}
    assert {name: (each["backend"], each["verdict"]) for name, each in models.items()} == {
        "broken": ("scaling", "error"),
        "doubles": ("scaling", "ok"),
        "noted": ("scaling", "notes"),
    }
    (error,) = models["broken"]["errors"]
    assert "has no factor: ValueError" in error["message"]
    notes = [(each["field"], each["line"], each["message"]) for each in models["noted"]["notes"]]
    assert notes == [
        ("parameters", 2, "parameters is not obeyed: the factor is in scale.json"),
        ("instance_group[0].count", 3, f"100000 instances share {os.cpu_count()} processors"),
    ]
