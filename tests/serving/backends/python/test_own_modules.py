"""Modules of a model that have the names of Sluice's packages."""

import venv
from pathlib import Path

import pytest

from serving.backends.python.backend import PythonBackend
from serving.backends.python.worker.start import INSTALLED_PACKAGES
from serving.spec import ModelSource
from tests import paths
from tests.serving.backends.python.parts import DECOUPLED, TEXT, ask, context, loaded, stream, write_model

NAMES = sorted(INSTALLED_PACKAGES)
CODE = """
import importlib.util, pickle

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
    """An environment with an installation of Sluice of its own, as far as its packages and metadata go."""
    folder = tmp_path / "env"
    venv.create(folder, symlinks=True, with_pip=False)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "sluice-0.0.1.dist-info").mkdir()
    (packages / "only_here.py").write_text("WHO = 'the environment'")
    for name in NAMES:
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text("WHO = 'Sluice'")
    return folder


def test_the_packages_of_an_installation_are_known() -> None:
    import tomllib

    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == INSTALLED_PACKAGES


async def test_modules_beside_the_model_are_imported(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", CODE)
    own_modules(tmp_path / "model" / "1", *NAMES)
    async with loaded(source) as model:
        assert await ask(model, WHO.format(names=NAMES)) == str(["1"] * len(NAMES))


async def test_modules_in_the_folder_of_the_model_are_imported(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", CODE)
    own_modules(tmp_path / "model", *NAMES)
    async with loaded(source) as model:
        assert await ask(model, WHO.format(names=NAMES)) == str(["model"] * len(NAMES))


@pytest.mark.parametrize("package_file", ["__init__.py", "part.py"])
async def test_packages_beside_the_model_are_imported(tmp_path: Path, package_file: str) -> None:
    source = write_model(tmp_path / "model", CODE)
    for name in ("engine", "serving", "gateway"):
        own_modules(tmp_path / "model" / "1" / name, Path(package_file).stem, "part")
    async with loaded(source) as model:
        for name in ("engine", "serving", "gateway"):
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
        assert await ask(model, "[name for name in sys.modules if name.startswith('serving')]") == "[]"
        assert await ask(model, "importlib.util.find_spec('httpx') is not None") == "True"


async def test_each_version_has_its_own(tmp_path: Path) -> None:
    first = write_model(tmp_path / "model", CODE)
    own_modules(tmp_path / "model" / "1", "engine")
    own_modules(tmp_path / "model" / "2", "engine")
    (tmp_path / "model" / "2" / "model.py").write_text((tmp_path / "model" / "1" / "model.py").read_text())
    async with loaded(first) as one, loaded(ModelSource(first.folder, 2, first.config)) as two:
        assert [await ask(each, "__import__('engine').WHO") for each in (one, two)] == ["1", "2"]


async def test_an_environment_with_sluice_in_it_hides_none_of_them(environment: Path, tmp_path: Path) -> None:
    source = in_environment(write_model(tmp_path / "model", CODE), environment)
    own_modules(tmp_path / "model" / "1", *NAMES)
    async with loaded(source) as model:
        assert await ask(model, WHO.format(names=[*NAMES, "only_here"])) == str(
            ["1"] * len(NAMES) + ["the environment"]
        )


async def test_an_environment_with_sluice_in_it_shows_none_of_it(environment: Path, tmp_path: Path) -> None:
    async with loaded(in_environment(write_model(tmp_path / "model", CODE), environment)) as model:
        found = await ask(model, f"[importlib.util.find_spec(name) for name in {NAMES}]")
        assert found == str([None] * len(NAMES))


async def test_processes_that_the_model_starts_find_them_too(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", POOL)
    own_modules(tmp_path / "model" / "1", "engine")
    async with loaded(source) as model:
        assert await ask(model, "hello") == "hello from the model"


async def test_objects_of_pb_utils_are_pickled_beside_a_module_called_serving(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", CODE)
    own_modules(tmp_path / "model" / "1", "serving")
    async with loaded(source) as model:
        said = await ask(model, "pickle.loads(pickle.dumps(pb_utils.TritonModelException(__import__('serving').WHO)))")
        assert said == "1"


async def test_a_coroutine_streams_beside_a_module_called_serving(tmp_path: Path) -> None:
    code = """
        import serving, c_python_backend_utils as c_utils

        class TritonPythonModel:
            async def execute(self, requests):
                for request in requests:
                    sender = request.get_response_sender()
                    sender.send(text(serving.WHO))
                    sender.send(text(c_utils.Tensor is pb_utils.Tensor), FINAL)
        """
    source = write_model(tmp_path / "model", code, DECOUPLED)
    own_modules(tmp_path / "model" / "1", "serving")
    async with loaded(source) as model:
        assert await stream(model, "go") == ["1", "True"]


async def test_installed_packages_still_win_over_modules_of_their_names(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", CODE, TEXT)
    own_modules(tmp_path / "model" / "1", "httpx", "json")
    async with loaded(source) as model:
        assert await ask(model, "hasattr(__import__('httpx'), 'WHO')") == "False"
