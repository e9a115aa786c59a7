"""Where a Postgres store is: its URL, and what messages call it."""

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from sluice.errors import SluiceError, invalid

_DEFAULTS = {"application_name": "sluice", "keepalives_idle": "15", "keepalives_interval": "5", "keepalives_count": "3"}
_SCHEMES = ("postgresql://", "postgres://")
_PORTS = re.compile(r"[\d,]*")


@dataclass(frozen=True, slots=True)
class Address:
    """`conninfo` is libpq's, and has the password. `schema` "": the first of the role's search_path."""

    name: str
    conninfo: str = field(repr=False)
    schema: str = ""


def parse_address(url: str) -> Address:
    """Of `postgresql://user:password@host:port/database`, with libpq's options behind `?`, and one of ours: `schema`.

    Raises SluiceError INVALID (param "store"), which repeats no part of the URL: any may be the password.
    """
    base, _, query = url.partition("?")
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        schema = options.pop("schema", "")
        given = conninfo_to_dict(f"{base}?{urlencode(options, quote_via=quote)}")
    except (ValueError, psycopg.Error):
        raise _no_address() from None
    texts = {key: str(value) for key, value in given.items()}
    if not base.startswith(_SCHEMES) or not _PORTS.fullmatch(texts.get("port", "")):
        raise _no_address()
    return Address(_name(texts), make_conninfo(**_DEFAULTS | texts), schema)


def _name(given: dict[str, str]) -> str:
    hosts = given.get("host") or given.get("hostaddr") or "localhost"
    ports = given.get("port") or "5432"
    database = given.get("dbname") or given.get("user") or ""
    return f"Postgres store {hosts}:{ports}/{database}"


def _no_address() -> SluiceError:
    form = "postgresql://user:password@host:port/database?sslmode=require"
    return invalid("store", f"the store's URL is not of the form {form}, with '/' and '@' in names as %2F and %40")
