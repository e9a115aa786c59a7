"""Opens the ledger from its URL or path."""

import os
from pathlib import Path

from sluice.errors import invalid
from sluice.gateway.tenancy.ledger.sqlite import SqliteLedger
from sluice.gateway.tenancy.ledger.store import LedgerStore

_POSTGRES = ("postgresql://", "postgres://")


def is_postgres(place: str) -> bool:
    """Whether the ledger is in a database, not a file."""
    return place.startswith(_POSTGRES)


def open_ledger(place: str) -> LedgerStore:
    """Open the ledger in a file, or in the database of a URL, at the first use. Raises SluiceError INVALID."""
    if not is_postgres(place):
        return SqliteLedger(Path(os.path.expanduser(place)))
    try:
        from sluice.gateway.tenancy.ledger.postgres import PostgresLedger
    except ImportError as error:
        message = f"a ledger in Postgres needs psycopg, which is not here ({error}): pip install 'sluice[postgres]'"
        raise invalid("ledger", message) from None
    return PostgresLedger(place)
