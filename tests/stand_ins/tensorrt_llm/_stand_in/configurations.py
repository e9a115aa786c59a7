# ruff: noqa: TID252 - importers know the package as tensorrt_llm, the type checker by its folder
"""The configuration classes: pydantic models that forbid what they do not know, made from the files."""

from collections.abc import Callable
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Any, Optional, Union, get_args

import pydantic
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from ..models.modeling_utils import QuantConfig
from .settings import settings
from .specifications import REQUIRED, Parameter, config_fields, config_names, llm_arguments, type_of
from .values import CalibConfig


class CapacitySchedulerPolicy(StrEnum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class ContextChunkingPolicy(StrEnum):
    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"


class BatchingType(StrEnum):
    STATIC = "STATIC"
    INFLIGHT = "INFLIGHT"


class SamplerType(StrEnum):
    TRTLLMSampler = "TRTLLMSampler"
    TorchSampler = "TorchSampler"
    auto = "auto"


class LoadFormat(IntEnum):
    AUTO = 0
    DUMMY = 1
    VISION_ONLY = 2


class StrictBaseModel(pydantic.BaseModel):
    """An unknown field is an error."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())


_VALUES = {"QuantConfig": QuantConfig, "CalibConfig": CalibConfig}
_ENUMS: tuple[type[Enum], ...] = (CapacitySchedulerPolicy, ContextChunkingPolicy, BatchingType, SamplerType, LoadFormat)


def make_configurations() -> dict[str, Any]:
    """Make every class of this version, by its name."""
    version = settings().surface
    classes: dict[str, Any] = {each.__name__: each for each in _ENUMS}

    def resolve(name: str) -> Any:
        return classes.get(name) or _VALUES.get(name)

    waiting = list(config_names())
    while waiting:  # a class is made after those that its fields name
        name = waiting.pop(0)
        fields = config_fields(name, version)
        if fields is None:
            continue
        if any(each in str(field.annotation) for field in fields.values() for each in waiting):
            waiting.append(name)
            continue
        classes[name] = _model(name, fields, resolve)
    classes["TorchLlmArgs"] = _model("TorchLlmArgs", llm_arguments(version, is_engine=False), resolve)
    if version == "1.2.1":
        classes["TrtLlmArgs"] = _model("TrtLlmArgs", llm_arguments(version, is_engine=True), resolve)
    return classes


def _model(name: str, fields: dict[str, Parameter], resolve: Callable[[str], Any]) -> Any:
    made: dict[str, Any] = {key: _field(key, parameter, resolve) for key, parameter in fields.items()}
    return pydantic.create_model(name, __base__=_BASES.get(name, StrictBaseModel), **made)


def _field(name: str, parameter: Parameter, resolve: Callable[[str], Any]) -> tuple[Any, Any]:
    annotation = type_of(parameter.annotation, resolve)
    annotation = _CHECKS[name](annotation) if name in _CHECKS else annotation
    told: dict[str, Any] = {"json_schema_extra": {"annotation": parameter.annotation}}
    if parameter.is_deprecated:
        told["deprecated"] = True
    if parameter.default is REQUIRED:
        return annotation, Field(**told)
    if parameter.is_made:
        return annotation, Field(default_factory=_class_in(annotation), **told)
    if isinstance(parameter.default, (list, dict)):
        return annotation, Field(default_factory=parameter.default.copy, **told)
    return annotation, Field(parameter.default, validate_default=parameter.default is not None, **told)


def _class_in(annotation: Any) -> Any:
    """Return the class of an annotation that may be optional."""
    return next((each for each in get_args(annotation) if each is not type(None)), annotation)


def _load_format(value: Any) -> Any:
    return LoadFormat[value.upper()] if isinstance(value, str) and value.upper() in LoadFormat.__members__ else value


def _speculative(annotation: Any) -> Any:
    """Make a union that is told apart by `decoding_type`, as the real one is."""
    classes = [each for each in get_args(annotation) if each is not type(None)]
    return Optional[Annotated[Union[tuple(classes)], Field(discriminator="decoding_type")]]  # noqa: UP007, UP045


def _at_least_one(value: Any) -> Any:
    if value is not None and not value:
        raise ValueError("max_attention_window must hold at least one window")
    return value


def _is_share(value: Any) -> Any:
    if value is not None and not 0 <= value <= 1:
        raise ValueError(f"must be from 0 to 1, got {value}")
    return value


def _is_unset(value: Any) -> Any:
    if value is not None:
        raise ValueError("lora_prefetch_dir is not supported")
    return value


_CHECKS: dict[str, Any] = {
    "load_format": lambda annotation: (
        Annotated[annotation, BeforeValidator(_load_format)] if LoadFormat in get_args(annotation) else annotation
    ),
    "speculative_config": _speculative,
    "max_attention_window": lambda annotation: Annotated[annotation, AfterValidator(_at_least_one)],
    "free_gpu_memory_fraction": lambda annotation: Annotated[annotation, AfterValidator(_is_share)],
    "lora_prefetch_dir": lambda annotation: Annotated[annotation, AfterValidator(_is_unset)],
}

_DEFAULT_LIMITS = {"max_batch_size": 2048, "max_input_len": 1024, "max_beam_width": 1, "max_num_tokens": 8192}


class _TorchArguments(StrictBaseModel):
    """An explicit None for a limit is its default."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _no_empty_limits(cls, values: Any) -> Any:
        return {key: value for key, value in values.items() if value is not None or key not in _DEFAULT_LIMITS}

    @pydantic.model_validator(mode="after")
    def _known_speculation(self) -> Any:
        kind = getattr(getattr(self, "speculative_config", None), "decoding_type", None)
        if kind in _NOT_OF[type(self).__name__]:
            raise ValueError(f"speculative_config of type {kind} is not for this backend")
        return self


_NOT_OF = {
    "TorchLlmArgs": {"Lookahead", "Medusa"},
    "TrtLlmArgs": {"MTP", "NGram", "Draft_Target", "User_Provided", "SaveState", "AUTO"},
}
_BASES: dict[str, Any] = {"TorchLlmArgs": _TorchArguments, "TrtLlmArgs": _TorchArguments}

CONFIGURATIONS = make_configurations()
"""The classes of the imported version by name."""
