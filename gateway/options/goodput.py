"""Goodput: which requests are as fast as they should be, by the targets that the operator sets (`--slo`)."""

from dataclasses import dataclass, fields
from math import inf

_ALLOWED_SLOW = 0.01
"""ITL is the 99th percentile of a request's own gaps: one in a hundred may be longer."""


@dataclass(frozen=True, slots=True)
class GoodputTargets:
    """Targets in seconds, infinite where there is none. A request counts towards goodput where it meets all of them."""

    ttft: float = inf
    itl: float = inf
    """Target of the 99th percentile of a request's own gaps."""
    tpot: float = inf
    e2e: float = inf

    def missed(self, ttft_s: float, e2e_s: float, num_gaps: int, num_slow_gaps: int, tpot_s: float | None) -> list[str]:
        """Return the names of the targets that an answered request missed. `num_slow_gaps` are longer than `itl`."""
        measured = {
            "ttft": ttft_s > self.ttft,
            "itl": num_slow_gaps > num_gaps * _ALLOWED_SLOW,
            "tpot": tpot_s is not None and tpot_s > self.tpot,
            "e2e": e2e_s > self.e2e,
        }
        return [name for name, is_missed in measured.items() if is_missed]


_NAMES = tuple(each.name for each in fields(GoodputTargets))


def parse_targets(text: str) -> GoodputTargets:
    """Parse `ttft=500,itl=50`, in milliseconds, as `sluice load --slo` takes them. Raises ValueError."""
    targets: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _NAMES or name in targets:
            raise ValueError(f"targets in milliseconds, each of {', '.join(_NAMES)} once, such as ttft=500,itl=50")
        targets[name] = _seconds(name, value)
    return GoodputTargets(**targets)


def _seconds(name: str, text: str) -> float:
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    if not 0.0 < milliseconds < inf:
        raise ValueError(f"a number of milliseconds above 0 for {name}, such as {name}=500")
    return milliseconds / 1000
