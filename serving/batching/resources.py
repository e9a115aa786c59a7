"""The resources of a rate limiter: how much there is of each, and how much of that is held."""

from collections.abc import Iterable, Mapping

from serving.instance import Placement
from sluice.errors import ErrorCode, SluiceError

Key = tuple[str, int | None]
"""A resource by name and device; None: there is one for the whole server."""
Needs = Mapping[Key, int]


class Resources:
    """Where no count is given at all, there is as much of each as the largest demand, else nothing of what has none."""

    def __init__(self, given: Mapping[tuple[str, int | None], int]) -> None:
        """`given`: counts by name and device (None: on each, or in all for global ones)."""
        self._given = dict(given)
        self._totals: dict[Key, int] = {}
        self._held: dict[Key, int] = {}

    def check(self, needs: Needs) -> None:
        """Raises SluiceError INVALID, in Triton's words, for what could never be had."""
        for (name, device), needed in needs.items():
            given = self._given_of(name, device)
            if given is not None and given < needed:
                raise _invalid(
                    f'Resource count for "{name}" is limited to {given} which will prevent scheduling of one or more '
                    f"model instances, the minimum required count is {needed}"
                )
            known = {*needs, *self._totals}
            if (name, None) in known and any(other == name and at is not None for other, at in known):
                raise _invalid(
                    f'Resource "{name}" is present as both global and device-specific resource in the model '
                    "configuration."
                )

    def _given_of(self, name: str, device: int | None) -> int | None:
        """The count that was given for a resource; for a global one, whatever device it was given for."""
        counts = [
            count
            for (known, at), count in self._given.items()
            if known == name and (device is None or at in (device, None))
        ]
        # A name that is not among those given is a slip of the pen sooner than a resource without a limit.
        return max(counts, default=0 if self._given else None)

    def demand(self, needs: Iterable[Needs]) -> None:
        """What all that share them need now."""
        totals: dict[Key, int] = {}
        for each in needs:
            for key, needed in each.items():
                totals[key] = max(totals.get(key, 0), needed)
        for key in totals:
            given = self._given_of(*key)
            totals[key] = totals[key] if given is None else given
        self._totals = totals
        self._held = {key: held for key, held in self._held.items() if held or key in totals}

    @property
    def keys(self) -> Iterable[Key]:
        """Of all that somebody needs."""
        return self._totals.keys()

    def free(self, key: Key) -> int:
        """How much of one nobody holds. Below 0 after who needed most has gone."""
        return self._totals.get(key, 0) - self._held.get(key, 0)

    @property
    def are_free(self) -> bool:
        """Whether nobody holds anything."""
        return not any(self._held.values())

    def take(self, needs: Needs) -> None:
        for key, needed in needs.items():
            self._held[key] = self._held.get(key, 0) + needed

    def give_back(self, needs: Needs) -> None:
        for key, needed in needs.items():
            self._held[key] -= needed


def needs_of(placement: Placement) -> dict[Key, int]:
    """What an instance there takes. Like in Triton, one on the CPU takes what device 0 has."""
    device = placement.gpu or 0
    return {(each.name, None if each.is_global else device): each.count for each in placement.resources if each.count}


def parse_resource(text: str) -> tuple[tuple[str, int | None], int]:
    """`NAME:COUNT` or `NAME:COUNT:DEVICE` as a key and its count. Raises SluiceError INVALID in Triton's words."""
    name, *numbers = text.split(":")
    if not name or not 1 <= len(numbers) <= 2 or not all(each.isdecimal() for each in numbers):
        raise _invalid(
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or '<resource_name>:<count>'. "
            f"Got {text}"
        )
    return (name, int(numbers[1]) if len(numbers) == 2 else None), int(numbers[0])


def parse_resources(texts: Iterable[str]) -> dict[tuple[str, int | None], int]:
    """All of a command line's; of equal keys the last one counts."""
    return dict(map(parse_resource, texts))


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
