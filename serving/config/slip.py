"""One thing in the text of a configuration that Triton would not take."""

from dataclasses import dataclass

from serving.config.fields import field_at
from serving.config.reader import WrittenField
from serving.findings import ConfigFinding


@dataclass(frozen=True, slots=True)
class Slip:
    """`begin` to `end` of the text is to be `replacement`; None: refused."""

    finding: ConfigFinding
    begin: int
    end: int
    replacement: str | None = None

    @property
    def is_refused(self) -> bool:
        return self.replacement is None


def finding_at(written: WrittenField, message: str, remedy: str = "") -> ConfigFinding:
    """Of a field that stands in the text."""
    return ConfigFinding(message, _path_text(written), remedy, written.line, written.column)


def _path_text(written: WrittenField) -> str:
    """With numbers where there may be several."""
    parts = []
    for depth, (name, number) in enumerate(written.path, start=1):
        field = field_at(written.names[:depth])
        parts.append(f"{name}[{number}]" if field is not None and field.is_repeated else name)
    return ".".join(parts)
