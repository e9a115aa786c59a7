"""URLs of Postgres stores."""

import pytest
from psycopg.conninfo import conninfo_to_dict

from pipelines.rag.stores.postgres.connections import parse_address
from sluice.errors import ErrorCode, SluiceError


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("postgresql://me:s3cret@db.example:6543/rag", "Postgres store db.example:6543/rag"),
        ("postgres://me:s3cret@db.example/rag?sslmode=require", "Postgres store db.example:5432/rag"),
        ("postgresql://me:s3cret@[::1]/rag", "Postgres store ::1:5432/rag"),
        ("postgresql://me:s3cret@a:1,b:2/rag", "Postgres store a,b:1,2/rag"),
        ("postgresql:///rag?host=/var/run/postgresql", "Postgres store /var/run/postgresql:5432/rag"),
        ("postgresql://me:s3cret@db.example", "Postgres store db.example:5432/me"),
    ],
)
def test_the_name_tells_where_and_not_the_password(url: str, name: str) -> None:
    address = parse_address(url)
    assert address.name == name
    assert "s3cret" not in repr(address)


def test_options_are_libpqs_but_the_schema() -> None:
    address = parse_address("postgresql://me:p%40ss@h/d?schema=team%20a&sslmode=require&application_name=my%20app")
    conninfo = conninfo_to_dict(address.conninfo)
    assert address.schema == "team a"
    assert (conninfo["password"], conninfo["sslmode"], conninfo["application_name"]) == ("p@ss", "require", "my app")
    assert "schema" not in conninfo


@pytest.mark.parametrize(
    "url",
    [
        "",
        "rag.sqlite",
        "host=db.example password=s3cret",
        "mysql://me:s3cret@h/d",
        "postgresql://me:s3cret%zz@h/d",
        "postgresql://me:s3cret@h/d?no_such_option=1",
        "postgresql://me:s3cret@h:port/d",
        "postgresql://me:s3cret@[h/d",
    ],
)
def test_what_is_no_address_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(SluiceError, match="postgresql://user:password@host:port/database") as caught:
        parse_address(url)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "store")
    assert "s3cret" not in caught.value.message
