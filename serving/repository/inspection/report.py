"""What is told of each model."""

from dataclasses import dataclass, replace
from enum import StrEnum

from serving.backend import RuntimeReport
from serving.findings import ConfigFinding


class Verdict(StrEnum):
    """Of one model."""

    OK = "ok"
    NOTES = "notes"
    """It would load, and not everything is as it is written."""
    ERROR = "error"
    """It would not load."""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """`folders`: where it lies, more than one where several repositories have it. `versions`: what would be served.

    `config_file` is where lines of findings are; "" where the model has none.
    """

    name: str
    folders: tuple[str, ...]
    config_file: str = ""
    backend: str = ""
    versions: tuple[int, ...] = ()
    notes: tuple[ConfigFinding, ...] = ()
    errors: tuple[ConfigFinding, ...] = ()
    runtime: RuntimeReport | None = None
    """Of language models that would load."""

    @property
    def verdict(self) -> Verdict:
        if self.errors:
            return Verdict.ERROR
        return Verdict.NOTES if self.notes else Verdict.OK

    def with_errors(self, *errors: ConfigFinding) -> "ModelReport":
        """Besides those that there are."""
        return replace(self, errors=(*self.errors, *errors))
