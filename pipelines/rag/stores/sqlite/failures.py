"""Which of SQLite's errors say that the file cannot be used now."""

from collections.abc import Iterator
from contextlib import contextmanager

import apsw

from pipelines.rag.stores.sqlite.schema import ForeignFileError
from sluice.errors import ErrorCode, SluiceError

LOCKED = (apsw.BusyError, apsw.LockedError)
_UNUSABLE = (
    *LOCKED,
    apsw.AuthError,
    apsw.CantOpenError,
    apsw.CorruptError,
    apsw.FormatError,
    apsw.FullError,
    apsw.InterruptError,
    apsw.IOError,
    apsw.NoLFSError,
    apsw.NoMemError,
    apsw.NotADBError,
    apsw.PermissionsError,
    apsw.ProtocolError,
    apsw.ReadOnlyError,
    ForeignFileError,
    OSError,
)
"""The others, wrong SQL and broken constraints, are our own bugs and stay what they are."""


@contextmanager
def translated(name: str, busy_timeout_s: float) -> Iterator[None]:
    """Turn what says that the file cannot be used now into UNAVAILABLE."""
    try:
        yield
    except _UNUSABLE as error:
        raise unavailable(name, _reason(error, busy_timeout_s)) from error


def unavailable(name: str, reason: str) -> SluiceError:
    return SluiceError(ErrorCode.UNAVAILABLE, f"{name} cannot be used: {reason}")


def _reason(error: Exception, busy_timeout_s: float) -> str:
    if isinstance(error, LOCKED):
        return f"another process held it locked for more than {busy_timeout_s:g} s"
    return str(error) or type(error).__name__
