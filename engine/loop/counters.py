"""What the executor counts; all of it only grows."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Totals since the engine's start; `EngineStats` explains them."""

    steps: int = 0
    runner_seconds: float = 0.0
    overhead_seconds: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    timeouts: int = 0

    def totals(self) -> dict[str, float]:
        """As the `*_total` fields of `EngineStats`."""
        return {total: getattr(self, name) for name, total in _TOTALS}


_TOTALS = tuple((field.name, f"{field.name}_total") for field in fields(Counters))
