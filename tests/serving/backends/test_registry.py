"""Backends by entry point: ours, a stranger's, and a stranger's that is broken."""

import sys
from pathlib import Path

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from tests.errors import error_of
from tests.serving.repository.parts import CONFIG, StampBackend, ask, context_for, rows, write_model

MODULE = """
from tests.serving.repository.parts import StampBackend


class Foreign(StampBackend):
    name = "foreign"


class NoBackend:
    pass


def broken():
    raise RuntimeError("cannot be made")
"""
ENTRY_POINTS = """
[sluice.backends]
foreign = sluice_foreign:Foreign
broken = sluice_foreign:broken
missing = sluice_foreign_missing:Foreign
odd = sluice_foreign:NoBackend
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution, as importlib.metadata finds it: a folder on the path."""
    site = tmp_path / "site"
    info = site / "sluice_foreign-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "sluice_foreign.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sluice-foreign\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "sluice_foreign", raising=False)


def refusal(registry: BackendRegistry, name: str) -> SluiceError:
    return error_of(registry.get, name)


@pytest.mark.usefixtures("distribution")
def test_backends_are_found_by_entry_point() -> None:
    registry = BackendRegistry()
    backend = registry.get("foreign")
    assert isinstance(backend, StampBackend)
    assert registry.get("foreign") is backend
    assert {"foreign", "ensemble", "llm", "onnxruntime", "python", "tensorrtllm", "vllm"} <= set(registry.names)


@pytest.mark.usefixtures("distribution")
def test_what_is_wrong_with_the_others() -> None:
    registry = BackendRegistry()
    unknown = refusal(registry, "nope")
    assert unknown.code is ErrorCode.INVALID
    assert "unable to find backend library for backend 'nope'. Installed backends: " in unknown.message
    assert "foreign" in unknown.message
    for name, reason in (
        ("broken", "RuntimeError: cannot be made"),
        ("missing", "ModuleNotFoundError"),
        ("odd", "is not a sluice Backend"),
    ):
        error = refusal(registry, name)
        assert error.code is ErrorCode.INTERNAL
        assert error.message.startswith(f"backend '{name}' (sluice_foreign")
        assert reason in error.message


@pytest.mark.usefixtures("distribution")
async def test_a_broken_backend_fails_only_its_models(tmp_path: Path) -> None:
    root = tmp_path / "models"
    for name in ("foreign", "broken", "odd"):
        write_model(root, name, 4, config=CONFIG.replace("stamp", name))
    repository = ModelRepository([root], ControlMode.NONE, context_for)
    failures = await repository.start()
    assert sorted(failures) == ["broken", "odd"]
    assert await ask(repository, "foreign") == 4
    assert "cannot be made" in rows(repository)["broken", 1][1]
    await repository.close()
