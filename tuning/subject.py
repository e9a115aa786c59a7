"""The interface of what is tuned, which a language model and a model of a repository implement."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from sluice.load.config import ApiKind
from sluice.tuning.figures import Figures
from sluice.tuning.server import TrialServer
from sluice.tuning.space import Point, SearchSpace


class ServedCounts(NamedTuple):
    """Counters of a model: requests, inferences in them, batches, and nanoseconds of all requests."""

    num_requests: int
    num_inferences: int
    num_batches: int
    queue_ns: int
    compute_ns: int

    def figures(self, earlier: "ServedCounts", prefix: str) -> Figures:
        """Return the mean batch, and the mean times in the queue and in the model, since `earlier`."""
        requests, inferences, batches, queue_ns, compute_ns = (b - a for a, b in zip(earlier, self, strict=True))
        if not requests or not batches:
            return {}
        return {
            f"{prefix}mean_batch": inferences / batches,
            f"{prefix}mean_queue": queue_ns / requests / 1e6,
            f"{prefix}mean_compute": compute_ns / requests / 1e6,
        }


class Subject(Protocol):
    """A model whose server is tuned."""

    @property
    def title(self) -> str: ...

    @property
    def model(self) -> str | None:
        """The name that requests ask for; None for the first that the server has."""
        ...

    @property
    def default_api(self) -> ApiKind: ...

    @property
    def space(self) -> SearchSpace: ...

    def default_arguments(self) -> list[str]:
        """Return the arguments of `sluice serve` with the default settings."""
        ...

    async def learn(self, server: TrialServer) -> None:
        """Learn from a server with the default settings what can be searched. Raises TuneError."""
        ...

    async def counters(self, server: TrialServer) -> dict[str, ServedCounts]:
        """Return what the server has counted so far of each tuned model, by the beginning of the names of figures.
        Raises TrialFailedError."""
        ...

    def arguments(self, point: Point, folder: Path) -> list[str]:
        """Return the arguments of `sluice serve` with the settings of a point. What they need is written to
        `folder`."""
        ...

    def write(self, point: Point, folder: Path) -> list[Path]:
        """Write the files that tell how to serve with the settings of a point. Returns their paths."""
        ...


def write_script(folder: Path, command: Sequence[str]) -> Path:
    """Write a script that runs a command in place of itself."""
    path = folder / "serve.sh"
    path.write_text(f"#!/bin/sh\nexec {shlex.join(command)}\n")
    path.chmod(0o755)
    return path
