"""Where each field of a config.pbtxt stands, by its path."""

import re
from collections.abc import Iterable
from dataclasses import replace

from serving.config.reader import FieldPath, WrittenField, read_fields
from serving.findings import ConfigFinding

_SEGMENT = re.compile(r'(?P<name>\w+)(?:\[(?:(?P<index>\d+)|"(?P<key>[^"]*)")\])?(?:\.|$)')


class Locations:
    """The fields of one text, by path."""

    def __init__(self, fields: tuple[WrittenField, ...] = ()) -> None:
        self.fields = fields
        self._by_path = {each.path: each for each in fields}
        # A map's entries are written one after the other; whoever asks for one knows its key.
        self._keys = {
            each.path[:-1]: each.value for each in fields if each.path[-1][0] == "key" and each.value is not None
        }

    def find(self, path: str) -> WrittenField | None:
        """The field at `path`, else the nearest around it that is written; None where none is."""
        found = None
        inner: FieldPath = ()
        for name, index, key in _SEGMENT.findall(path):
            number = int(index or 0) if not key else self._number_of(inner, name, key)
            inner = (*inner, (name, number))
            if inner not in self._by_path:
                break
            found = self._by_path[inner]
        return found

    def line_of(self, path: str) -> int | None:
        """Where the field stands, or what is nearest around it."""
        found = self.find(path)
        return None if found is None else found.line

    def locate(self, finding: ConfigFinding) -> ConfigFinding:
        """The finding with its line; as it is where it has one, or where nothing of its path is written."""
        return finding if finding.line else replace(finding, line=self.line_of(finding.path))

    def locate_all(self, findings: Iterable[ConfigFinding]) -> tuple[ConfigFinding, ...]:
        return tuple(self.locate(each) for each in findings)

    def _number_of(self, parent: FieldPath, name: str, key: str) -> int:
        numbers = (
            path[-1][1]
            for path, given in self._keys.items()
            if given == key and path[:-1] == parent and path[-1][0] == name
        )
        return next(numbers, -1)


NOWHERE = Locations()
"""Of a configuration without a text."""


def locations_of(text: str) -> Locations:
    """Of what can be read of the text."""
    return Locations(read_fields(text))
