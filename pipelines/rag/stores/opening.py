"""Opens a store from its URL or path."""

import importlib
import os
import re
from pathlib import Path

from sluice.errors import invalid
from sluice.pipelines.rag.stores.base import DocumentStore
from sluice.pipelines.rag.stores.sqlite.store import SqliteStore

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SQLITE = "sqlite://"
_MEMORY = ":memory:"
_TAKEN = "give a path, sqlite:///path, :memory: or postgresql://user@host/database"


def open_store(url_or_path: str) -> DocumentStore:
    """Create the store for a URL or path, not connected yet.

    A path or sqlite:///path is a SQLite file, `:memory:` a temporary one, postgresql://... a Postgres database.
    Raises SluiceError INVALID (param "store") for anything else.
    """
    scheme = _SCHEME.match(url_or_path)
    match scheme.group(1).lower() if scheme else "":
        case "":
            return _sqlite(url_or_path, url_or_path)
        case "sqlite":
            return _sqlite(_path_of_url(url_or_path), url_or_path)
        case "postgresql" | "postgres":
            return _postgres(url_or_path)
        case other:
            raise invalid("store", f"there is no store for {other}://; {_TAKEN}")


def _path_of_url(url: str) -> str:
    """Return the path of a sqlite URL: sqlite:///rag.sqlite is relative, sqlite:////data/rag.sqlite absolute."""
    host, slash, path = url[len(_SQLITE) :].partition("/")
    if host or not slash:
        raise invalid("store", f"{url!r} names a host, and a SQLite file has none; {_TAKEN}")
    return path


def _sqlite(path: str, given: str) -> DocumentStore:
    if not path.strip() or "\0" in path:
        raise invalid("store", f"{given!r} names no file; {_TAKEN}")
    return SqliteStore(None if path == _MEMORY else Path(os.path.expanduser(path)))


def _postgres(url: str) -> DocumentStore:
    try:
        importlib.import_module("psycopg")
    except ImportError as error:
        message = f"a Postgres store needs psycopg, which is not here ({error}): pip install 'sluice[postgres]'"
        raise invalid("store", message) from error
    from sluice.pipelines.rag.stores.postgres.store import PostgresStore

    return PostgresStore(url)
