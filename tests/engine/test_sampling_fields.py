"""The table of sampling fields agrees with the struct that has their values."""

import typing

import msgspec
import pytest

from sluice.engine.sampling_fields import OPTIONAL_FIELDS, SAMPLING_FIELDS, FieldKind, SamplingField
from sluice.engine.types import SamplingParams

_WITHOUT_ROW = {"bad_words", "grammar", "thinking_token_budget"}
"""Protocols make these of fields of their own."""
_TYPES = {
    FieldKind.FLOAT: float,
    FieldKind.INTEGER: int,
    FieldKind.BOOLEAN: bool,
    FieldKind.SWITCH: int,
    FieldKind.TOKEN_IDS: tuple[int, ...],
    FieldKind.TOKEN_BIASES: dict[int, float],
}


def test_every_parameter_has_a_row() -> None:
    assert set(SAMPLING_FIELDS) == set(SamplingParams.__struct_fields__) - _WITHOUT_ROW


@pytest.mark.parametrize("field", SAMPLING_FIELDS.values(), ids=lambda each: each.name)
def test_a_row_has_the_parameters_type_and_an_allowed_default(field: SamplingField) -> None:
    declared = typing.get_type_hints(SamplingParams)[field.name]
    assert declared in (_TYPES[field.kind], _TYPES[field.kind] | None)
    field.check(field.default)
    assert msgspec.structs.replace(SamplingParams(), **{field.name: field.default}) == SamplingParams()


@pytest.mark.parametrize("field", SAMPLING_FIELDS.values(), ids=lambda each: each.name)
def test_an_absent_optional_field_is_neutral_on_every_runtime(field: SamplingField) -> None:
    if field.name in OPTIONAL_FIELDS and field.default is not None:
        assert field.is_neutral(field.default, ())


def test_names_of_inputs_are_unique() -> None:
    names = [name for each in SAMPLING_FIELDS.values() for name in (each.name, *each.aliases)]
    assert len(names) == len(set(names))
