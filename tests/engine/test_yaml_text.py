"""YAML that PyYAML itself fails on in ways of its own."""

import pytest
import yaml

from sluice.engine.yaml_text import load_yaml


@pytest.mark.parametrize(
    "text",
    [
        *("2024-99-99", "!!int x", "!!int ''", "!!float x", "!!bool x", "!!timestamp x", "a: !!int _"),
        *("[" * 1200, "{a: " * 3000, "!!python/object:os.system x", "[", "a: b: c", "\0"),
        *(b"\xff", b"\xed\xa0\x80"),
    ],
)
def test_everything_that_cannot_be_read_is_an_error_of_yaml(text: str | bytes) -> None:
    with pytest.raises(yaml.YAMLError):
        load_yaml(text)


def test_json_is_yaml() -> None:
    assert load_yaml('{"a": [1, null, true, "x"]}') == {"a": [1, None, True, "x"]}
