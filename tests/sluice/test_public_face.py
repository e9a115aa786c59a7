"""`import sluice` costs nothing, and every public name resolves."""

import subprocess
import sys
from importlib.metadata import version

import pytest

import sluice
from sluice.engine.config import EngineConfig
from tests.paths import ROOT

IMPORTED = """
import sys
before = set(sys.modules)
import sluice
print(*{name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))
"""


def test_importing_it_loads_nothing_but_the_standard_library() -> None:
    run = subprocess.run(
        [sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.split() == ["sluice"]


@pytest.mark.parametrize("name", sluice.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(sluice, name) is not None
    assert name in dir(sluice)


def test_a_name_is_the_object_of_the_module_that_defines_it() -> None:
    assert sluice.EngineConfig is EngineConfig
    assert sluice.__version__ == version("sluice")


def test_an_unknown_name_is_an_attribute_error_that_lists_the_names() -> None:
    with pytest.raises(AttributeError, match="sluice has no public name 'Engine'; it has: Backend, BackendContext, "):
        _ = sluice.Engine  # type: ignore[attr-defined]
    with pytest.raises(ImportError):
        from sluice import Engine  # type: ignore[attr-defined]  # noqa: F401
