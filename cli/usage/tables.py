"""Writes tables: CSV, lines of JSON, and Parquet files."""

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

import orjson

Rows = Sequence[Mapping[str, Any]]
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


class TableError(Exception):
    """Raised where a table cannot be read or written. The text is for the user."""


class TableWriter(Protocol):
    """Writes one table."""

    def write(self, kinds: Mapping[str, Any], pages: Iterator[Rows]) -> None:
        """Write all rows. `kinds` are the types of the columns, in their order; `| None` where a value may lack."""


class CsvTable:
    """Writes CSV. Texts that a spreadsheet would take for formulas get an apostrophe: clients choose some of them."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, kinds: Mapping[str, Any], pages: Iterator[Rows]) -> None:
        """Write a head line and all rows."""
        writer = csv.writer(self._file, lineterminator="\n")
        writer.writerow(kinds)
        for page in pages:
            writer.writerows([_safe(row[name]) for name in kinds] for row in page)


def _safe(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


class JsonLinesTable:
    """Writes an object a line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, kinds: Mapping[str, Any], pages: Iterator[Rows]) -> None:
        """Write all rows."""
        for page in pages:
            self._file.writelines(f"{orjson.dumps(row).decode()}\n" for row in page)


class ParquetTable:
    """Writes a Parquet file, row groups of it at a time. Columns named `…_us` are timestamps there, without the ending.

    arro3 writes it: Arrow's Rust writer in 12 MB of wheels, where pyarrow has 55.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[Self]:
        """Write beside `path`, and move the file there at the end. Raises TableError without arro3."""
        try:
            import arro3.io  # noqa: F401 - few need it
        except ImportError as error:
            raise TableError(f"--parquet needs arro3 ({error}): pip install 'sluice[parquet]'") from None
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            yield cls(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def write(self, kinds: Mapping[str, Any], pages: Iterator[Rows]) -> None:
        """Write all rows."""
        from arro3.core import Array, DataType, Field, RecordBatch, RecordBatchReader, Schema
        from arro3.io import write_parquet

        stored = {str: DataType.utf8(), int: DataType.int64(), float: DataType.float64()}
        shown = {name: stored[_plain(kind)] for name, kind in kinds.items()}
        shown |= {name: DataType.timestamp("us", tz="UTC") for name in kinds if name.endswith("_us")}
        fields = [
            Field(name.removesuffix("_us"), shown[name], nullable=_plain(kind) is not kind)
            for name, kind in kinds.items()
        ]
        schema = Schema(fields)

        def batches() -> Iterator[Any]:
            for page in pages:
                columns = {name: Array([row[name] for row in page], stored[_plain(kinds[name])]) for name in kinds}
                arrays = [column.cast(shown[name]) for name, column in columns.items()]
                yield RecordBatch.from_arrays(arrays, schema=schema)

        write_parquet(RecordBatchReader.from_batches(schema, batches()), self._path)


def _plain(kind: Any) -> Any:
    """Return int for `int | None`."""
    return getattr(kind, "__args__", (kind,))[0]
