"""Findings: what is wrong with a configuration, in which field, and how to fix it."""

from collections.abc import Iterable
from dataclasses import dataclass

from sluice.errors import ErrorCode, SluiceError


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong or worth a note.

    `path` is the field's, from the top: `input[1].dims`, `parameters["key"].string_value`; "" for the whole. `fix` is
    text for config.pbtxt or an instruction, "" where the message says it all. `line` and `column` count from 1 and are
    None until the field was located in a text.
    """

    message: str
    path: str = ""
    fix: str = ""
    line: int | None = None
    column: int | None = None

    def text(self, file: str = "") -> str:
        """Return one line: `config.pbtxt:3: MESSAGE; write: FIX`."""
        position = ":".join(str(each) for each in (file, self.line, self.column) if each)
        text = f"{self.message}; write: {self.fix}" if self.fix else self.message
        return f"{position}: {text}" if position else text


class InvalidConfig(SluiceError):
    """A configuration that cannot be served: a message for the client, and every finding."""

    def __init__(self, findings: Iterable[Finding], message: str = "") -> None:
        """Without a `message`, the first finding's is taken: Triton reports one error at a time."""
        self.findings = tuple(findings)
        first = self.findings[0]
        super().__init__(ErrorCode.INVALID, message or first.message, param=first.path or None)


def invalid_field(message: str, path: str = "", fix: str = "") -> InvalidConfig:
    return InvalidConfig([Finding(message, path, fix)])


def error_findings(error: SluiceError) -> tuple[Finding, ...]:
    """Return the findings of an InvalidConfig; for any other error, one made of its message."""
    return error.findings if isinstance(error, InvalidConfig) else (Finding(error.message, error.param or ""),)
