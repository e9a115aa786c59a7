"""Triton's Python-based backends: one model.py for all models that name its folder."""

from pathlib import Path

import pytest

from sluice.errors import SluiceError
from sluice.serving.backends.python.backend import find_python_based
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.config.completion import complete_kind
from sluice.serving.config.config_json import parse_config_json
from sluice.serving.model import infer_one
from sluice.serving.spec import ModelSource
from tests.serving.backends.python.parts import context, text_of, text_request

SCRIPT = """
import os

import numpy as np
import triton_python_backend_utils as pb_utils
from beside_the_backend import VOICE
from beside_the_model import ENDING


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        for add in (config.add_input, config.add_output):
            add({"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args):
        self.folder = os.path.join(args["model_repository"], args["model_version"])
        assert self.folder == pb_utils.get_model_dir()

    def execute(self, requests):
        found = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].decode()
            with open(os.path.join(self.folder, "name.txt")) as file:
                said = f"{VOICE}: {text}, {file.read()}{ENDING}"
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([said], np.object_))]))
        return found
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("greeter", "python"):
        folder = tmp_path / "backends" / name
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(SCRIPT)
        (folder / "beside_the_backend.py").write_text("VOICE = 'loud'")
    (tmp_path / "backends" / "native").mkdir()
    return tmp_path / "backends"


def write_model(folder: Path, name: str, runtime: str = "") -> ModelSource:
    version = folder / name / "1"
    version.mkdir(parents=True)
    (version / "name.txt").write_text(name)
    (version / "beside_the_model.py").write_text("ENDING = '!'")
    config = parse_config_json(f'{{"name": "{name}", "backend": "greeter", "runtime": "{runtime}"}}')
    config.instance_group.add(name=name, kind="KIND_CPU", count=1)
    return ModelSource(folder / name, 1, config)


async def test_models_of_one_script_with_files_of_their_own(tmp_path: Path, directory: Path) -> None:
    registry = BackendRegistry()
    registry.register_missing(find_python_based(directory))
    backend = registry.get("greeter")
    for name in ("ann", "bob"):
        source = write_model(tmp_path, name, runtime="libtriton_greeter.so")
        config = await backend.complete(source, context())
        assert [each.name for each in (*config.input, *config.output)] == ["TEXT", "TEXT"]
        model = await backend.load(ModelSource(source.folder, 1, config), context())
        assert text_of(await infer_one(model, text_request("hi"))) == f"loud: hi, {name}!"
        await model.close()


def test_a_model_may_have_the_backend_in_its_name(tmp_path: Path, directory: Path) -> None:
    registry = BackendRegistry()
    registry.register_missing(find_python_based(directory))
    source = write_model(tmp_path, "my.greeter")
    source.config.backend = ""
    complete_kind(source.config, [source.version_folder], registry)
    assert (source.config.backend, source.config.default_model_filename) == ("greeter", "model.greeter")


def test_names_that_are_taken_stay_so_and_nothing_is_recognized_by_files(directory: Path) -> None:
    registry = BackendRegistry()
    installed = registry.get("python")
    assert registry.register_missing(find_python_based(directory)) == ["python"]
    assert registry.get("python") is installed
    assert "native" not in registry.names
    assert not registry.get("greeter").recognizes(directory / "greeter")


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="nowhere' is no folder"):
        find_python_based(tmp_path / "nowhere")
