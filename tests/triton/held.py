"""The test's side of the `held` model, which keeps a request until its release."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests import paths
from tests.triton.clients import Library
from tests.waiting import wait_until

_FOLDER = paths.DATA / "faults" / "held"


def write_held_models(repository: Path) -> None:
    """`held`, and `held_stream`, which is decoupled."""
    for name, more in (("held", ""), ("held_stream", "model_transaction_policy { decoupled: true }\n")):
        shutil.copytree(_FOLDER, repository / name, ignore=shutil.ignore_patterns("__pycache__"))
        config = repository / name / "config.pbtxt"
        config.write_text(config.read_text() + more)


@dataclass(frozen=True)
class Hold:
    """One request's files."""

    path: Path

    def _file(self, kind: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{kind}")

    def inputs(self, library: Library) -> list[object]:
        return [library.tensor("PATH", np.array([str(self.path).encode()], np.object_))]

    def release(self) -> None:
        self._file("go").touch()

    @property
    def is_started(self) -> bool:
        return self._file("started").exists()

    def wait_started(self) -> int:
        """Id of the process that holds the request."""
        wait_until(lambda: self.is_started, "the model starts")
        return int(self._file("started").read_text())

    def wait_cancelled(self) -> None:
        wait_until(self._file("cancelled").exists, "the model sees that the request is cancelled")
