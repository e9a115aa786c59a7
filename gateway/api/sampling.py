"""The sampling fields of JSON requests, made from the table `sluice.engine.sampling_fields`."""

import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, create_model

from sluice.engine.sampling_fields import MAX_SEED, FieldKind, FieldOrigin, SamplingField
from sluice.errors import invalid
from sluice.gateway.front.http.parsing import RequestObject, WholeNumber, union_error


def _switch_kind(value: Any) -> str | None:
    if isinstance(value, bool):
        return "<flag>"
    return "<number>" if isinstance(value, int) else None


_Switch = Annotated[
    Annotated[bool, Tag("<flag>")] | Annotated[int, Tag("<number>")],
    Discriminator(_switch_kind, **union_error("true, false or an integer")),
]
_TYPES: dict[FieldKind, Any] = {
    FieldKind.FLOAT: float,
    FieldKind.INTEGER: WholeNumber,
    FieldKind.BOOLEAN: bool,
    FieldKind.SWITCH: _Switch,
    FieldKind.TOKEN_IDS: list[int],
    FieldKind.TOKEN_BIASES: dict[str, float],
}
_SCOPES = {
    FieldOrigin.OPENAI: "",
    FieldOrigin.VLLM: "vLLM's. ",
    FieldOrigin.TRANSFORMERS: "transformers'. ",
    FieldOrigin.TENSORRT_LLM: "With TensorRT-LLM alone. ",
}


def build_sampling_schema(fields: Iterable[SamplingField]) -> Any:
    """Return a model with the given sampling fields, each of which may be absent or null."""
    return create_model("SamplingFields", __base__=RequestObject, **{each.name: _schema(each) for each in fields})


def _schema(field: SamplingField) -> Any:
    extra: dict[str, Any] = {"ge": field.openai_minimum}
    if field.kind is FieldKind.TOKEN_IDS:
        extra = {"fail_fast": True, "max_length": field.max_length, "min_length": 0 if field.off else 1}
    return _TYPES[field.kind] | None, Field(None, description=_SCOPES[field.origin] + field.help, **extra)


def _logit_bias(sent: dict[str, float]) -> dict[int, float]:
    """Key the biases by token id: JSON has no keys but strings."""
    for key in sent:
        if not re.fullmatch(r"\d{1,10}", key, re.ASCII):
            raise invalid("logit_bias", f"the keys of logit_bias must be token ids, got {key[:40]!r}")
    return {int(key): bias for key, bias in sent.items()}


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "seed": lambda value: value & MAX_SEED if value < 0 else value,
    "top_k": lambda value: 0 if value == -1 else value,
    "early_stopping": int,
    "stop_token_ids": tuple,
    "allowed_token_ids": tuple,
    "logit_bias": _logit_bias,
}
"""Fields that the engine has in another type or with another value for off."""
