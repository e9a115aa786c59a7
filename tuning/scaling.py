"""Costs of the simulator held against servers: how far both lie apart, and the factors that bring them together."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from sluice.tuning.errors import TuneError
from sluice.tuning.figures import Goal
from sluice.tuning.space import Value
from sluice.tuning.trials import Stage, Trial, TrialStore, write_json

SCALE_FILE = "scale.json"
AGREEMENT = 1.1
"""The largest factor, or its inverse, with which simulator and servers count as alike."""
TPOT = "mean_tpot"
"""The figure by which costs are scaled. ITL would not do: a gateway that is late merges tokens, and the simulator has
each token by itself."""


class LoadFactor(msgspec.Struct, frozen=True):
    """The factor that was found at a load."""

    load: float
    factor: float


class CostScale(msgspec.Struct, frozen=True):
    """Factors of all costs, by load: where a gateway shares the engine's cores, it slows steps down the more, the more
    requests there are."""

    factors: tuple[LoadFactor, ...]

    @property
    def agrees(self) -> bool:
        """Return whether no factor is worth a second search."""
        return all(1 / AGREEMENT <= each.factor <= AGREEMENT for each in self.factors)

    def at(self, load: Value) -> float:
        """Return the factor at a load: between two that were measured an interpolated one, else that of the nearest."""
        loads, factors = ([math.log(getattr(each, name)) for each in self.factors] for name in ("load", "factor"))
        return math.exp(float(np.interp(math.log(float(load)), loads, factors)))

    def __str__(self) -> str:
        return ", ".join(f"{each.factor:.2f} at {each.load:g}" for each in self.factors)


def scale_of(found: Sequence[LoadFactor]) -> CostScale:
    """Return the scale by the factors of trials; several at one load count as their geometric mean."""
    logarithms: dict[float, list[float]] = {}
    for each in found:
        logarithms.setdefault(each.load, []).append(math.log(each.factor))
    means = sorted((load, sum(each) / len(each)) for load, each in logarithms.items())
    return CostScale(tuple(LoadFactor(load, math.exp(mean)) for load, mean in means))


def read_scale(folder: Path) -> CostScale | None:
    """Return the scale that a tuning has found before, so that it goes on with it. Raises TuneError."""
    path = folder / SCALE_FILE
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostScale)
    except msgspec.DecodeError as error:
        raise TuneError(f"{path} is damaged ({error}): give --out another folder") from None


def keep_scale(folder: Path, scale: CostScale) -> None:
    """Write a scale where `read_scale` finds it."""
    write_json(folder / SCALE_FILE, scale)


class SimulationGap(NamedTuple):
    """The distance of simulated figures from measured ones, over the points that have both."""

    figure: str
    num_points: int
    median: float
    """Measured / simulated, 1 where they are alike."""
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


def gap_names(goal: Goal) -> list[str]:
    """Return the figures whose distances are told: the one by which costs are scaled, and those of the goal."""
    return list(dict.fromkeys((TPOT, *goal.shown_figures)))


def simulation_gaps(store: TrialStore, stage: Stage, names: Sequence[str]) -> list[SimulationGap]:
    """Return the distance of a stage of simulated trials, by figure; none for figures that no point has in both."""
    pairs = list(_measured_pairs(store, stage))
    found = []
    for name in names:
        ratios = [live[name] / simulated[name] for simulated, live in pairs if live.get(name) and simulated.get(name)]
        if ratios:
            found.append(SimulationGap(name, len(ratios), float(np.median(ratios)), min(ratios), max(ratios)))
    return found


def _measured_pairs(store: TrialStore, stage: Stage) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
    for live in store.of(Stage.LIVE):
        simulated: Trial | None = store.find(stage, live.point)
        if simulated is not None and simulated.figures and live.figures:
            yield simulated.figures, live.figures
