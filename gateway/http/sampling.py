"""The sampling fields of JSON requests, made from the table `engine.sampling_fields`."""

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, create_model

from engine.sampling_fields import FieldKind, FieldOrigin, SamplingField
from gateway.http.parsing import RequestObject, WholeNumber, union_error


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
