"""Optimization profiles: ranges of shapes that an engine was tuned for, and the one that fits a batch best."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.errors import ErrorCode, SluiceError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """Of one input: the smallest, the one that it is fastest for, the largest."""

    smallest: Shape
    best: Shape
    largest: Shape

    def misfit(self, shape: Shape) -> int | None:
        """The first dimension that is out of range; None where all are in."""
        if len(shape) != len(self.smallest):
            return min(len(shape), len(self.smallest))
        bounds = zip(shape, self.smallest, self.largest, strict=True)
        return next((index for index, (size, low, high) in enumerate(bounds) if not low <= size <= high), None)

    def distance(self, shape: Shape) -> int:
        """How far from the best, over all dimensions."""
        return sum(abs(size - best) for size, best in zip(shape, self.best, strict=True))


@dataclass(frozen=True, slots=True)
class Profile:
    index: int
    ranges: Mapping[str, ShapeRange]
    """By input."""

    def fits(self, shapes: Mapping[str, Shape]) -> bool:
        return all(self.ranges[name].misfit(shape) is None for name, shape in shapes.items())

    def distance(self, shapes: Mapping[str, Shape]) -> int:
        return sum(self.ranges[name].distance(shape) for name, shape in shapes.items())


def best_profile(profiles: Sequence[Profile], shapes: Mapping[str, Shape], model: str) -> Profile:
    """The nearest of those that fit, as in Triton. Raises SluiceError INVALID where none does."""
    fitting = [profile for profile in profiles if profile.fits(shapes)]
    if fitting:
        return min(fitting, key=lambda profile: profile.distance(shapes))
    if len(profiles) > 1:
        names = " ".join(f"{profile.index}[{profile.index}]" for profile in profiles)
        reason = f"failed to find any Optimization Profile among [ {names}] to support the requested dimensions"
        raise SluiceError(ErrorCode.INVALID, f"{reason}: {_shapes_text(shapes)}")
    raise _misfit(profiles[0], shapes, model)


def profile_indexes(names: Sequence[str], num_profiles: int, instance: str) -> list[int]:
    """`profile` of an instance group as numbers, without repeats; the first where none is given.

    Raises SluiceError INVALID for what the engine does not have.
    """
    indexes = [_index(name) for name in names] or [0]
    for index in indexes:
        if not 0 <= index < num_profiles:
            raise SluiceError(
                ErrorCode.INVALID,
                f"Can not set the specified optimization profile {index}[{index}] for {instance}. Expected "
                f"optimization profile index range 0-{num_profiles - 1}",
            )
    return list(dict.fromkeys(indexes))


def _index(name: str) -> int:
    if not name.isdecimal():
        raise SluiceError(ErrorCode.INVALID, f"unable to parse '{name}': optimization profiles have numbers")
    return int(name)


def _misfit(profile: Profile, shapes: Mapping[str, Shape], model: str) -> SluiceError:
    for name, shape in shapes.items():
        allowed = profile.ranges[name]
        dimension = allowed.misfit(shape)
        if dimension is None:
            continue
        begin = f"request specifies invalid shape for input '{name}' for {model}. Error details: model expected"
        if len(shape) != len(allowed.smallest):
            details = f"{len(allowed.smallest)} dimensions but received {len(shape)}"
        else:
            details = (
                f"the shape of dimension {dimension} to be between {allowed.smallest[dimension]} and "
                f"{allowed.largest[dimension]} but received {shape[dimension]}"
            )
        return SluiceError(ErrorCode.INVALID, f"{begin} {details}", param=name)
    raise AssertionError("all shapes fit")


def _shapes_text(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} [{','.join(map(str, shape))}]" for name, shape in shapes.items())
