"""Sampling fields that not every runtime has, and which of their values ask for nothing."""

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from pipelines.text.types import SamplingOverrides


@dataclass(frozen=True, slots=True)
class RuntimeField:
    """`off` values ask for nothing, whatever the runtime; `unnoticed` ones change nothing where the field is not there.

    `is_detail`: it says more about another field, so that without that one no value of it could change anything.
    """

    off: tuple[float, ...] = ()
    unnoticed: tuple[float, ...] = ()
    is_detail: bool = False


RUNTIME_FIELDS: dict[str, RuntimeField] = {
    "beam_width": RuntimeField(unnoticed=(1,)),
    "length_penalty": RuntimeField(unnoticed=(0.0, 1.0)),
    "early_stopping": RuntimeField(is_detail=True),
    "beam_search_diversity_rate": RuntimeField(off=(0.0,)),
    "no_repeat_ngram_size": RuntimeField(off=(0,)),
    "top_p_min": RuntimeField(off=(0.0,)),
    "top_p_decay": RuntimeField(off=(0.0, 1.0)),
    "top_p_reset_ids": RuntimeField(is_detail=True),
}
"""By their names in `engine.types.SamplingParams`. 0 is how clients of TensorRT-LLM leave out what must be above 0."""


def wanted_of_runtime(sent: SamplingOverrides, has: Collection[str]) -> SamplingOverrides:
    """`sent` without those values that ask nothing of a runtime whose `EngineInfo.sampling_fields` are `has`."""
    dropped = {name: None for name, field in RUNTIME_FIELDS.items() if _asks_nothing(sent, name, field, has)}
    return msgspec.structs.replace(sent, **dropped) if dropped else sent


def _asks_nothing(sent: SamplingOverrides, name: str, field: RuntimeField, has: Collection[str]) -> bool:
    value = getattr(sent, name)
    if value is None:
        return False
    return value in field.off or (name not in has and (field.is_detail or value in field.unnoticed))
