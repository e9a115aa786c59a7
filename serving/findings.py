"""What there is to say of a configuration: a field, what is wrong with it, and what to write instead."""

from collections.abc import Iterable
from dataclasses import dataclass

from sluice.errors import ErrorCode, SluiceError


@dataclass(frozen=True, slots=True)
class Finding:
    """`path` is the field's, from the top: `input[1].dims`, `parameters["key"].string_value`; "" for the whole.

    `remedy` is text for config.pbtxt or what to do, "" where the message says it all. `line` and `column` count from 1
    and are there once the field was looked up in a text.
    """

    message: str
    path: str = ""
    remedy: str = ""
    line: int | None = None
    column: int | None = None

    def text(self, file: str = "") -> str:
        """One line: `config.pbtxt:3: what is wrong; write: what to write`."""
        place = ":".join(str(each) for each in (file, self.line, self.column) if each)
        said = f"{self.message}; write: {self.remedy}" if self.remedy else self.message
        return f"{place}: {said}" if place else said


class InvalidConfig(SluiceError):
    """A configuration that cannot be served: a message for the wire, and all that is wrong."""

    def __init__(self, findings: Iterable[Finding], message: str = "") -> None:
        """Without a `message`, the first finding's is taken: Triton says one thing at a time."""
        self.findings = tuple(findings)
        first = self.findings[0]
        super().__init__(ErrorCode.INVALID, message or first.message, param=first.path or None)


def invalid_field(message: str, path: str = "", remedy: str = "") -> InvalidConfig:
    """The error for one field."""
    return InvalidConfig([Finding(message, path, remedy)])


def error_findings(error: SluiceError) -> tuple[Finding, ...]:
    """What `error` says of a configuration; of any other error its message."""
    return error.findings if isinstance(error, InvalidConfig) else (Finding(error.message, error.param or ""),)
