"""Modules of a model that have the names of Sluice's package, and of folders in it."""

import venv
from pathlib import Path

import pytest

from sluice.serving.backends.python.backend import PythonBackend
from sluice.serving.backends.python.worker.start import OWN_PACKAGE
from sluice.serving.spec import ModelSource
from tests import paths
from tests.serving.backends.python.parts import DECOUPLED, ask, context, loaded, stream, write_model

NAMES = ["cli", "engine", "gateway", "load", "pipelines", "serving", "sluice", "tuning"]
PACKAGES = ("engine", "gateway", "sluice")
CODE = """
import importlib.util

class TritonPythonModel:
    def execute(self, requests):
        return [text(eval(text_of(each))) for each in requests]
"""
WHO = "[__import__(name).WHO for name in {names}]"
POOL = """
import multiprocessing

class TritonPythonModel:
    def execute(self, requests):
        import engine
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return [text(pool.apply(engine.say, (text_of(each),))) for each in requests]
"""


def own_modules(folder: Path, *names: str) -> None:
    """Write modules that say which folder they lie in."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / f"{name}.py").write_text(f"WHO = {folder.name!r}\nsay = '{{}} from the model'.format\n")


def in_environment(source: ModelSource, environment: Path) -> ModelSource:
    source.config.parameters["EXECUTION_ENV_PATH"].string_value = str(environment)
    return source


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment with an installation of Sluice of its own, as far as its package and metadata go."""
    folder = tmp_path / "env"
    venv.create(folder, symlinks=True, with_pip=False)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "sluice-0.0.1.dist-info").mkdir()
    (packages / "only_here.py").write_text("WHO = 'the environment'")
    (packages / "sluice").mkdir()
    (packages / "sluice" / "__init__.py").write_text("WHO = 'Sluice'")
    return folder


def test_an_installation_brings_one_package() -> None:
    import tomllib

    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == {OWN_PACKAGE}


async def test_modules_and_packages_of_these_names_are_the_models(tmp_path: Path) -> None:
    """They lie beside the model, or in its folder, with or without a file that makes them packages."""
    source = write_model(tmp_path / "model", CODE)
    beside, above = tmp_path / "model" / "1", tmp_path / "model"
    modules = [name for name in NAMES if name not in PACKAGES]
    own_modules(beside, *modules[:2])
    own_modules(above, *modules[2:])
    for name, file in zip(PACKAGES, ("__init__", "part", "__init__"), strict=True):
        own_modules(beside / name, file, "part")
    async with loaded(source) as model:
        assert await ask(model, WHO.format(names=modules)) == str(["1"] * 2 + ["model"] * (len(modules) - 2))
        for name in PACKAGES:
            assert await ask(model, f"importlib.import_module('{name}.part').WHO") == name


async def test_the_configuration_is_completed_with_them(tmp_path: Path) -> None:
    code = """
        import engine, serving

        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                config.add_input({"name": engine.WHO + serving.WHO, "data_type": "TYPE_FP32", "dims": [1]})
                return config
        """
    source = write_model(tmp_path / "model", code, config="")
    own_modules(tmp_path / "model" / "1", "engine", "serving")
    completed = await PythonBackend().complete(source, context())
    assert [each.name for each in completed.input] == ["11"]


async def test_without_own_ones_there_is_nothing_of_these_names(tmp_path: Path) -> None:
    async with loaded(write_model(tmp_path / "model", CODE)) as model:
        beside = ["tests", "models", "docs", "benchmarks"]
        found = await ask(model, f"[importlib.util.find_spec(name) for name in {NAMES + beside}]")
        assert found == str([None] * len(NAMES + beside))
        assert await ask(model, "[name for name in sys.modules if name.startswith(('serving', 'sluice'))]") == "[]"
        assert await ask(model, "importlib.util.find_spec('httpx') is not None") == "True"


@pytest.mark.parametrize("own", [["engine", "sluice"], ["serving"]])
async def test_an_environment_with_sluice_in_it_hides_none_of_them_and_shows_none_of_it(
    own: list[str], environment: Path, tmp_path: Path
) -> None:
    source = in_environment(write_model(tmp_path / "model", CODE), environment)
    own_modules(tmp_path / "model" / "1", *own)
    async with loaded(source) as model:
        assert await ask(model, WHO.format(names=[*own, "only_here"])) == str(["1"] * len(own) + ["the environment"])
        others = [name for name in NAMES if name not in own]
        found = await ask(model, f"[importlib.util.find_spec(name) for name in {others}]")
        assert found == str([None] * len(others))


async def test_processes_that_the_model_starts_find_them_too(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", POOL)
    own_modules(tmp_path / "model" / "1", "engine")
    async with loaded(source) as model:
        assert await ask(model, "hello") == "hello from the model"


async def test_a_coroutine_streams_and_objects_are_pickled_beside_a_module_called_serving(tmp_path: Path) -> None:
    code = """
        import pickle, serving, c_python_backend_utils as c_utils

        class TritonPythonModel:
            async def execute(self, requests):
                for request in requests:
                    sender = request.get_response_sender()
                    sender.send(text(pickle.loads(pickle.dumps(pb_utils.TritonModelException(serving.WHO)))))
                    sender.send(text(c_utils.Tensor is pb_utils.Tensor), FINAL)
        """
    source = write_model(tmp_path / "model", code, DECOUPLED)
    own_modules(tmp_path / "model" / "1", "serving")
    async with loaded(source) as model:
        assert await stream(model, "go") == ["1", "True"]
