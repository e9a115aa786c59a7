"""The output folder: the setup of a tuning and its trials, each a file, so that a tuning goes on where it stopped."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from sluice.tuning.errors import TuneError
from sluice.tuning.figures import Figures
from sluice.tuning.space import Point

SETUP_FILE, TRIALS_FOLDER = "setup.json", "trials"


class Stage(StrEnum):
    """The purposes of trials."""

    SIMULATED = "simulated"
    """A step of the search, in the simulator."""
    SCALED = "scaled"
    """A step of the second search, in the simulator with costs that were scaled to servers."""
    LIVE = "live"
    """A step of the search, or the check of a simulated point, on a server."""
    ROUND = "round"
    """A run of the comparison with the default settings, made in turns."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A point that was measured. `error` says why there are no figures."""

    number: int
    stage: Stage
    point: Point
    figures: Figures | None
    error: str = ""
    seconds: float = 0.0
    round: int = 0
    """The round of the comparison, from 1; 0 in other stages."""

    @property
    def key(self) -> tuple[Any, ...]:
        """The identity of the trial: no two of a tuning have the same."""
        return self.stage, self.round, tuple(sorted((name, str(value)) for name, value in self.point.items()))


@dataclass(slots=True)
class TrialStore:
    """The trials of one tuning, in memory and in its folder."""

    folder: Path
    trials: list[Trial] = field(default_factory=list)
    _known: dict[tuple[Any, ...], Trial] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, setup: dict[str, Any]) -> "TrialStore":
        """Open the folder of a tuning, a new one or one to go on with. Raises TuneError where it has another's."""
        try:
            (folder / TRIALS_FOLDER).mkdir(parents=True, exist_ok=True)
            _claim(folder / SETUP_FILE, setup)
            store = cls(folder)
            for path in sorted((folder / TRIALS_FOLDER).glob("*.json")):
                store._keep(_read(path))
        except OSError as error:
            raise TuneError(f"--out {folder} cannot be used: {error.strerror}") from None
        return store

    def find(self, stage: Stage, point: Point, round_number: int = 0) -> Trial | None:
        """Return the trial of a point, None where it was not measured."""
        return self._known.get(Trial(number=0, stage=stage, point=point, figures=None, round=round_number).key)

    def add(
        self, stage: Stage, point: Point, figures: Figures | None, error: str, seconds: float, round_number: int = 0
    ) -> Trial:
        """Keep a trial, on disk first."""
        number = max((each.number for each in self.trials), default=0) + 1
        trial = Trial(
            number=number,
            stage=stage,
            point=point,
            figures=figures,
            error=error,
            seconds=round(seconds, 3),
            round=round_number,
        )
        write_json(self.folder / TRIALS_FOLDER / f"{number:05}.json", trial)
        self._keep(trial)
        return trial

    def of(self, stage: Stage) -> Iterator[Trial]:
        """Yield the trials of a stage, in their order."""
        return (trial for trial in self.trials if trial.stage is stage)

    def _keep(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._known[trial.key] = trial


def write_json(path: Path, document: object) -> None:
    """Write a document as a whole or not at all."""
    partial = path.with_name(f".{path.name}.part")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    os.replace(partial, path)


def _claim(path: Path, setup: dict[str, Any]) -> None:
    written: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(setup))
    if not path.exists():
        write_json(path, written)
        return
    try:
        earlier = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise TuneError(f"{path} is damaged ({error}): give --out another folder") from None
    changed = sorted(name for name in earlier.keys() | written.keys() if earlier.get(name) != written.get(name))
    if changed:
        raise TuneError(
            f"{path.parent} has a tuning with another {' and '.join(changed)}: repeat its command to go on with it, or "
            "give --out another folder"
        )


def _read(path: Path) -> Trial:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Trial)
    except msgspec.DecodeError as error:
        raise TuneError(f"{path} is damaged ({error}): delete it, and its point is measured anew") from None
