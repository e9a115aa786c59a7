"""A route: its targets, in the order in which a request asks them, and what became of its requests."""

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from sluice.errors import SluiceError
from sluice.pipelines.routes.settings import RouteSettings, TargetChoice
from sluice.pipelines.routes.target import Target
from sluice.pipelines.text.model import TextModel

_HASH_SPACE = 1 << 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """A target of one request, and the model that it is now."""

    target: Target
    model: TextModel


class Route:
    """One route of the server. Belongs to the event loop."""

    def __init__(self, name: str, settings: RouteSettings, note_asked: Callable[[str, str], None]) -> None:
        """`note_asked` is told which model and adapter are asked, and again who answers, in the task of the request."""
        self.name = name
        self.settings = settings
        self.note_asked = note_asked
        self.targets = [Target(name, each, settings.breaker) for each in settings.targets]
        self.created = int(time.time())
        """When the route was made, in seconds since 1970."""
        self.num_hedges_won = 0
        self.num_hedges_lost = 0
        """Requests for which a second target was asked, by whether it answered first."""
        self._tasks: set[asyncio.Task[None]] = set()

    def order(self, key: str) -> list[Target]:
        """Return the targets in the order in which a request asks them, equal for equal keys; "" is no key.

        By weight, each place goes to one of the targets left with a chance in proportion to its weight.
        """
        if self.settings.choose is TargetChoice.ORDERED:
            return self.targets
        return sorted(self.targets, key=lambda target: _race_time(self._point(target, key), target.settings.weight))

    def _point(self, target: Target, key: str) -> float:
        """Return a number from 0 to 1: random, or that of the key and the target."""
        if not key:
            return random.random()
        digest = blake2b(f"{self.name}\0{target.name}\0{key}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) / _HASH_SPACE

    def note_hedge(self, *, is_won: bool) -> None:
        """Count a request for which a second target was asked."""
        self.num_hedges_won += is_won
        self.num_hedges_lost += not is_won

    def run_apart(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what no request waits for."""
        task = asyncio.create_task(work, name=f"route {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def describe(self) -> dict[str, object]:
        """Return what clients may see of the route, as JSON has it."""
        targets = [
            {
                "model": each.name,
                "weight": each.settings.weight,
                "state": each.breaker.state.name.lower(),
                "closes_in_s": round(each.breaker.closes_in_s, 3),
            }
            for each in self.targets
        ]
        settings = self.settings
        return {"description": settings.description, "choose": settings.choose.value, "targets": targets}


def _race_time(point: float, weight: float) -> float:
    """Return when a target arrives in a race in which it wins with a chance in proportion to its weight."""
    return -math.log(point or 0.5 / _HASH_SPACE) / weight if weight else math.inf


def join_failures(route: str, failures: Sequence[tuple[str, SluiceError]]) -> SluiceError:
    """Return the error of a route whose targets have failed: that of the last one which was not too long for it, with
    what all of them said."""
    others = [error for _, error in failures if not error.exceeds_context]
    last = others[-1] if others else failures[-1][1]
    if len(failures) == 1:
        return last
    said = "; ".join(f"{name}: {error.message}" for name, error in failures)
    return last.reworded(f"route {route!r}: no target answered: {said}")


def known_lengths(models: Sequence[TextModel]) -> list[int]:
    """Return the contexts of models, in tokens, of those that are known."""
    return [each.max_model_len for each in models if each.max_model_len is not None]
