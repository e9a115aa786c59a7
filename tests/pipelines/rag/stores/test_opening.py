"""Stores that URLs and paths open."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.stores.opening import open_store
from sluice.pipelines.rag.stores.sqlite.store import SqliteStore


@pytest.mark.parametrize("prefix", ["", "sqlite:///"])
async def test_a_path_is_a_sqlite_file(tmp_path: Path, prefix: str) -> None:
    store = open_store(f"{prefix}{tmp_path}/a b/rag.sqlite")
    assert isinstance(store, SqliteStore)
    await store.open()
    await store.close()
    assert (tmp_path / "a b" / "rag.sqlite").exists()


@pytest.mark.parametrize("given", [":memory:", "sqlite:///:memory:"])
async def test_memory_is_private_and_leaves_no_file_here(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(given)
    await store.open()
    assert await store.collections() == []
    await store.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "given", ["", "  ", "sqlite://", "sqlite://host/path", "sqlite:///", "mysql://user:secret@h/d", "a\0b"]
)
def test_what_names_no_store_is_refused(given: str) -> None:
    with pytest.raises(SluiceError, match="postgresql://") as caught:
        open_store(given)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "store")
    assert "secret" not in caught.value.message


def test_postgres_without_its_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    load = importlib.import_module

    def without_psycopg(name: str, package: str | None = None) -> object:
        if name.startswith("psycopg"):
            raise ImportError(f"No module named '{name}'")
        return load(name, package)

    monkeypatch.setattr(importlib, "import_module", without_psycopg)
    with pytest.raises(SluiceError, match=r"pip install 'sluice\[postgres\]'") as caught:
        open_store("postgresql://user:secret@localhost/rag")
    assert caught.value.code is ErrorCode.INVALID
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_a_postgres_url_is_a_postgres_store(scheme: str) -> None:
    pytest.importorskip("psycopg")
    store = open_store(f"{scheme}://user:secret@localhost/rag")
    assert type(store).__name__ == "PostgresStore"
    assert "secret" not in store.name


def test_psycopg_is_imported_for_postgres_only() -> None:
    modules = "sluice.pipelines.rag.library, sluice.pipelines.rag.stores.sqlite.store"
    code = f"import sys, {modules}; assert 'psycopg' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
