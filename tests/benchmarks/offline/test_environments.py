import subprocess
import zipfile
from pathlib import Path

import pytest

from benchmarks.offline.environments import Environment, interpreter

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"


def make_wheel(folder: Path, name: str, needs: str = "") -> None:
    """Write the smallest wheel: a module of one line and its metadata."""
    info = f"{name}-1.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "ANSWER = 42\n")
        wheel.writestr(f"{info}/METADATA", METADATA.format(name=name) + needs)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder the only place where pip finds packages."""
    for variable in ("PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    needs = (
        "Requires-Dist: helper; python_version >= '3'\nRequires-Dist: torchvision\nRequires-Dist: other; extra == 'x'\n"
    )
    make_wheel(tmp_path, "peer", needs)
    make_wheel(tmp_path, "helper")
    return tmp_path


def test_an_environment_is_made_once_with_what_its_package_needs(index: Path) -> None:
    lines: list[str] = []
    peer = Environment("peer", "peer", "1")
    python = interpreter(peer, index / "envs", lines.append)
    subprocess.run([python, "-c", "import peer, helper"], check=True)
    assert interpreter(peer, index / "envs", lines.append) == python
    assert len(lines) == 1
