"""Routing of requests that name no version: to the highest one, or by weights (a canary)."""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import invalid_argument

PARAMETER = "version_weights"
"""The parameter in config.pbtxt: `parameters { key: "version_weights" value: { string_value: "1=95,2=5" } }`."""
_EXAMPLE = "versions with weights, such as 1=95,2=5"
_HASH_SPACE = 1 << 64


@dataclass(frozen=True, slots=True)
class VersionWeights:
    """Weights by version, at least one above 0. A version without a weight gets no requests."""

    by_version: Mapping[int, float]

    def __post_init__(self) -> None:
        """Raise INVALID for negative or infinite weights, and where all are 0."""
        weights = self.by_version.values()
        if not all(isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
            raise invalid_argument("weights must be numbers of at least 0, and one of them more")

    def shares(self, ready: Collection[int]) -> dict[int, float]:
        """Return each ready version's share, the highest version first; nothing where none has a weight."""
        weights = {version: self.by_version.get(version, 0.0) for version in sorted(ready, reverse=True)}
        total = sum(weights.values())
        return {version: weight / total for version, weight in weights.items()} if total else {}

    def choose(self, ready: Collection[int], point: float) -> int | None:
        """Return the version at `point`, from 0 to 1; None where no ready version has a weight.

        The highest version has the lowest points, so that a key in a canary's share stays in it while it grows.
        """
        chosen = None
        for version, share in self.shares(ready).items():
            if share:
                chosen = version
                if point < share:
                    break
            point -= share
        return chosen


def routing_point(model: str, key: str) -> float:
    """Return a request's point from 0 to 1, equal for equal keys, random without a key."""
    if not key:
        return random.random()
    digest = blake2b(f"{model}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / _HASH_SPACE


def configured_weights(config: ModelConfig) -> VersionWeights | None:
    """Return the weights in `parameters`, else None. Raises INVALID for an invalid list of weights."""
    if PARAMETER not in config.parameters:
        return None
    text = config.parameters[PARAMETER].string_value
    weights: dict[int, float] = {}
    for part in text.split(","):
        version, _, weight = part.partition("=")
        try:
            weights[int(version)] = float(weight)
        except ValueError:
            raise invalid_argument(f"parameter '{PARAMETER}' must be {_EXAMPLE}, got '{text}'") from None
    return VersionWeights(weights)


@dataclass(frozen=True, slots=True)
class Routing:
    """How a model's versions share the requests that name none. `weights` None: the highest version serves all.

    `is_set`: the weights were set at run time, over the configuration's.
    """

    weights: VersionWeights | None
    shares: Mapping[int, float]
    is_set: bool
