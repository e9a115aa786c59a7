"""Placement of a request under attention data parallelism."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None
