"""What Postgres' errors are to who asked."""

import psycopg
from psycopg import errors

from sluice.errors import ErrorCode, SluiceError

GONE = (errors.UndefinedTable, errors.InvalidSchemaName)
"""A table that was there a moment ago: of a collection just deleted, or of a database that was made anew."""
LOST_RACES = (errors.DeadlockDetected, errors.SerializationFailure)
"""Nothing was done; the same again may succeed."""
_REFUSALS = (errors.InsufficientPrivilege, errors.ReadOnlySqlTransaction, *GONE, *LOST_RACES)


def unavailable(store: str, reason: str) -> SluiceError:
    return SluiceError(ErrorCode.UNAVAILABLE, f"{store} {reason}")


def explained(error: psycopg.Error, store: str, statement_timeout_s: float) -> Exception:
    """UNAVAILABLE; the error itself where it is not the server's state, but a fault of ours."""
    if isinstance(error, errors.QueryCanceled):
        return unavailable(store, f"took longer than {statement_timeout_s:g} s for a statement")
    if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError, *_REFUSALS)):
        return unavailable(store, reason_of(error))
    return error


def reason_of(error: Exception) -> str:
    """In one line. libpq's messages name host, database and role, and never the password."""
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    return "is not available: " + " ".join((primary or str(error)).split())
