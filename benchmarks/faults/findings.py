"""Keeps what each fault did to each server, in a file for each pair, and makes the tables of all of them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.figures import Figure

Value = float | str
ABSENT = ""
"""The cell of a server that a measure was not taken of."""


class Finding(msgspec.Struct, frozen=True):
    """A measure of a fault: a number with its unit, or words if there is no number."""

    measure: str
    value: Value
    unit: str = ""

    def __str__(self) -> str:
        if isinstance(self.value, str):
            return self.value
        return f"{_number(self.value)} {self.unit}".rstrip()


class Record(msgspec.Struct, frozen=True):
    """The effects of one fault on one server."""

    fault: str
    server: str
    version: str
    measured_at: str
    findings: tuple[Finding, ...]

    def figures(self) -> Iterator[Figure]:
        """Yield the findings that are numbers."""
        for finding in self.findings:
            if not isinstance(finding.value, str):
                yield Figure(f"{self.fault}: {finding.measure}", self.server, finding.unit, (finding.value,))


def write_record(folder: Path, record: Record) -> None:
    """Write the record in place of that of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{_slug(record.fault)}-{_slug(record.server)}.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))


def read_records(folder: Path) -> list[Record]:
    """Return the records of all runs into the folder."""
    return [msgspec.json.decode(file.read_bytes(), type=Record) for file in sorted(folder.glob("*.json"))]


def render(records: Iterable[Record], faults: Sequence[str], servers: Sequence[str]) -> str:
    """Return a table in Markdown for each fault, with a column for each server, both in the given order."""
    found: dict[str, dict[str, Record]] = defaultdict(dict)
    for record in records:
        found[record.fault][record.server] = record
    return "\n".join(_table(fault, found[fault], servers) for fault in faults if fault in found)


def _table(fault: str, records: dict[str, Record], servers: Sequence[str]) -> str:
    names = [server for server in servers if server in records]
    cells = {name: {finding.measure: str(finding) for finding in records[name].findings} for name in names}
    measures = list(dict.fromkeys(measure for name in names for measure in cells[name]))
    rows = [[measure, *(cells[name].get(measure, ABSENT) for name in names)] for measure in measures]
    head = [["", *(f"{name} {records[name].version}".rstrip() for name in names)], ["---"] * (len(names) + 1)]
    lines = [f"| {' | '.join(_escape(cell) for cell in row)} |" for row in (*head, *rows)]
    return "\n".join((f"### {fault}", "", *lines, ""))


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.2g}" if value < 1 else f"{value:.3g}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def tally(words: Iterable[str]) -> str:
    """Return how often each word occurs, the most frequent first: `14 whole, 2 error`."""
    counts: dict[str, int] = defaultdict(int)
    for word in words:
        counts[word] += 1
    return ", ".join(f"{count} {word}" for word, count in sorted(counts.items(), key=lambda item: -item[1])) or "none"
