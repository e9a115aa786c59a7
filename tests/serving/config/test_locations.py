"""Places of fields, against a text whose every value says where it stands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.serving.config.locations import NOWHERE, locate_fields
from sluice.serving.findings import Finding

TEXT = """\
# name: "not this"
name: "m # neither"
input [
  { name: "a" dims: [ 1,
                      2 ] },
  { name: "b" }
]
input { name: 'c' }
parameters { key: "x" value: { string_value: "1" } }
parameters: <
  key: "y", value { string_value: "a"
                                  "b" };
>
model_warmup [ { inputs { key: "ids"
  value { dims: -1 zero_data: true } } } ]
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("name", 2),
        ("input", 3),
        ("input[0].name", 4),
        ("input[0].dims", 4),
        ("input[0].dims[1]", 5),
        ("input[1]", 6),
        ("input[2].name", 8),
        ("input[0].data_type", 3),
        ("input[9]", None),
        ('parameters["x"]', 9),
        ('parameters["y"].value.string_value', 11),
        ('parameters["z"]', None),
        ('model_warmup[0].inputs["ids"].value.dims', 15),
        ('model_warmup[0].inputs["masks"]', 14),
        ("", None),
        ("output[0].name", None),
    ],
)
def test_lines_of_fields_and_of_what_is_around_them(path: str, line: int | None) -> None:
    assert locate_fields(TEXT).line_of(path) == line


def test_values_columns_and_statements() -> None:
    locations = locate_fields(TEXT)
    name, joined = locations.find("name"), locations.find("parameters[1].value.string_value")
    assert name is not None and joined is not None
    assert (name.value, name.column, TEXT[name.begin : name.end]) == ("m # neither", 1, '"m # neither"')
    assert joined.value == "ab"
    second = locations.find("input[1]")
    assert second is not None
    assert TEXT[slice(*second.statement)].startswith("input [")
    assert TEXT[slice(*second.statement)].endswith('"b" }\n]')


def test_what_can_be_told_of_a_broken_text() -> None:
    locations = locate_fields("name: 'a'\ninput { name: 'b' } }\noutput { }")
    assert (locations.line_of("input.name"), locations.line_of("output")) == (2, None)
    assert locate_fields("input { dims: [1, 2").line_of("input.dims[1]") == 1
    assert NOWHERE.line_of("name") is None


def test_a_finding_keeps_the_line_that_it_has() -> None:
    locations = locate_fields(TEXT)
    assert locations.locate(Finding("wrong", "name")).text("c") == "c:2: wrong"
    assert locations.locate(Finding("wrong", "name", "name: 'n'", line=7)).text("c") == "c:7: wrong; write: name: 'n'"
    assert locations.locate(Finding("wrong", "output")).text() == "wrong"


@given(st.text(alphabet="ab:{}[]<>,;'\"#\n -\\", max_size=60))
def test_any_text_ends(text: str) -> None:
    for written in locate_fields(text).fields:
        assert 0 <= written.begin < written.end <= len(text)
        assert text.count("\n", 0, written.begin) + 1 >= written.line
