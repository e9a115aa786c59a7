"""Models that bring an environment: `EXECUTION_ENV_PATH`."""

import asyncio
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.python.backend import PythonBackend
from sluice.serving.backends.python.environments import EnvironmentCache
from sluice.serving.model import Model
from sluice.serving.spec import ModelSource
from tests.serving.backends.python.parts import TEXT, ask, context, loaded, write_model
from tests.waiting import until

CODE = """
import importlib.util

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        import only_here
        return config

    def initialize(self, args):
        import only_here
        self.name = only_here.NAME

    def execute(self, requests):
        return [text(eval(text_of(each), {**globals(), "name": self.name})) for each in requests]
"""
OTHER_PYTHON = """#!/bin/sh
echo '[[3, {minor}], "cpython-3{minor}-x86_64-linux-gnu", {found}]'
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real environment, with a package of its own and one that replaces a package of the server's."""
    folder = tmp_path_factory.mktemp("environments") / "env"
    venv.create(folder, symlinks=True, with_pip=False)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "only_here.py").write_text("NAME = 'only here'")
    (packages / "httpx.py").write_text("NAME = 'not the server\\'s'")
    return folder


def pack(environment: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(environment, ".")
    return archive


def model_in(folder: Path, environment: str, config: str = TEXT) -> ModelSource:
    parameter = f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{environment}" }} }}'
    return write_model(folder, CODE, parameter + config)


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary folder of this test alone, because others may unpack environments at the same time."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def unpacked() -> set[str]:
    return {each.name for each in Path(tempfile.gettempdir()).glob("sluice-run-*/environment-*")}


async def check(model: Model) -> Path:
    """Check that the model runs in the environment, and return its folder."""
    prefix = Path(await ask(model, "sys.prefix"))
    assert await ask(model, "name") == "only here"
    assert await ask(model, "__import__('httpx').NAME") == "not the server's"
    assert await ask(model, "os.environ['VIRTUAL_ENV']") == str(prefix)
    assert (await ask(model, "os.environ['PATH']")).startswith(f"{prefix}/bin:")
    # Of the server's packages it has what the worker needs, and no other.
    assert await ask(model, "importlib.util.find_spec('tritonclient')") == "None"
    assert str(prefix) not in await ask(model, "np.__file__")
    return prefix


async def test_a_model_runs_in_a_folder(environment: Path, tmp_path: Path) -> None:
    source = model_in(tmp_path / "model", str(environment))
    assert await PythonBackend().complete(source, context()) == source.config
    async with loaded(source) as model:
        assert await check(model) == environment


async def test_an_archive_is_unpacked_once_for_all_and_removed(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    pack(environment, tmp_path / "model" / "env.tar.gz")
    source = model_in(tmp_path / "model", "$$TRITON_MODEL_DIRECTORY/env.tar.gz", "instance_group { count: 2 }" + TEXT)
    backend, before = PythonBackend(), unpacked()
    backend._environments = EnvironmentCache(idle_keep_s=0.5)
    await backend.complete(source, context())
    models = await asyncio.gather(backend.load(source, context()), backend.load(source, context()))
    folders = {await check(model) for model in models}
    assert {folder.name for folder in folders} == unpacked() - before
    assert len(folders) == 1
    await models[0].close()
    await models[0].close()
    assert await check(models[1]) in folders
    await models[1].close()
    await until(lambda: unpacked() == before)


async def test_an_environment_may_have_numpy_of_its_own(environment: Path, tmp_path: Path) -> None:
    import numpy

    packages = next((environment / "lib").glob("python*/site-packages"))
    (packages / "numpy").symlink_to(Path(numpy.__file__).parent)
    try:
        async with loaded(model_in(tmp_path / "model", str(environment))) as model:
            assert (await ask(model, "np.__file__")).startswith(str(environment))
    finally:
        (packages / "numpy").unlink()


async def test_conda_environments_are_told_where_they_lie(environment: Path, tmp_path: Path) -> None:
    (environment / "conda-meta").mkdir()
    script = environment / "bin" / "conda-unpack"
    script.write_text("import sys\nopen(sys.prefix + '/fixed', 'w').close()")
    try:
        archive = pack(environment, tmp_path / "env.tar.gz")
        async with loaded(model_in(tmp_path / "model", str(archive))) as model:
            assert await ask(model, "os.environ['CONDA_PREFIX'] == sys.prefix") == "True"
            assert await ask(model, "os.path.exists(sys.prefix + '/fixed')") == "True"
        script.write_text("raise SystemExit('cannot be fixed')")
        archive = pack(environment, tmp_path / "broken.tar.gz")
        with pytest.raises(SluiceError, match="its conda-unpack fails: cannot be fixed"):
            async with loaded(model_in(tmp_path / "broken", str(archive))):
                pass
    finally:
        script.unlink()
        (environment / "conda-meta").rmdir()


async def test_the_servers_python_variables_do_not_reach_it(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "httpx.py").write_text("NAME = 'from PYTHONPATH'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    async with loaded(model_in(tmp_path / "model", str(environment))) as model:
        await check(model)


def other_python(folder: Path, minor: int, found: str = "[]") -> Path:
    (folder / "bin").mkdir(parents=True)
    script = folder / "bin" / "python"
    script.write_text(OTHER_PYTHON.format(minor=minor, found=found))
    script.chmod(0o755)
    return folder


async def refusal(tmp_path: Path, environment: Path) -> str:
    with pytest.raises(SluiceError) as caught:
        async with loaded(model_in(tmp_path / "model", str(environment))):
            pass
    assert caught.value.code is ErrorCode.INVALID
    assert str(environment) in caught.value.message
    return caught.value.message


async def test_another_version_of_python_needs_packages_of_its_own(tmp_path: Path) -> None:
    own = "Python {}.{}".format(*sys.version_info)
    said = await refusal(tmp_path, other_python(tmp_path / "env", 99, '["numpy"]'))
    assert f"it has Python 3.99 and the server {own}, which cannot lend it msgspec, ml_dtypes" in said
    said = await refusal(tmp_path, other_python(tmp_path / "old", 8))
    assert "it has Python 3.8, and models run in Python 3.11 or later" in said


async def test_what_is_no_environment_is_told(tmp_path: Path) -> None:
    assert "No such file or directory" in await refusal(tmp_path, tmp_path / "nothing.tar.gz")
    (tmp_path / "empty").mkdir()
    assert "it has no bin/python" in await refusal(tmp_path, tmp_path / "empty")
    before = unpacked()
    (tmp_path / "text.tar.gz").write_text("no archive")
    assert "it cannot be unpacked" in await refusal(tmp_path, tmp_path / "text.tar.gz")
    assert "it has no bin/python" in await refusal(tmp_path, pack(tmp_path / "empty", tmp_path / "empty.tar.gz"))
    await until(lambda: unpacked() == before)
    broken = other_python(tmp_path / "broken", 11)
    (broken / "bin" / "python").write_text("#!/bin/sh\necho 'libpython is missing' >&2; exit 127")
    assert "does not work: libpython is missing" in await refusal(tmp_path, broken)
    (broken / "bin" / "python").write_text("no program")
    assert "cannot be run: Exec format error" in await refusal(tmp_path, broken)


async def test_an_archive_writes_nothing_outside(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as tar:
        (tmp_path / "file").write_text("x")
        tar.add(tmp_path / "file", "../escaped")
    assert "it cannot be unpacked" in await refusal(tmp_path, tmp_path / "bad.tar.gz")
