import pytest

from gateway.v2.version import parse_version
from serving.request import LATEST
from sluice.errors import ErrorCode, SluiceError


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("", LATEST),
        ("1", 1),
        ("01", 1),
        ("+1", 1),
        (" 1", 1),
        ("1x", 1),
        ("0x1", 0),
        ("0", 0),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_read_as_by_strtol(text: str, version: int) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["abc", " ", "-", "x1", "9" * 23, str(2**63), "-" + "9" * 23, "١"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(SluiceError) as caught:
        parse_version(text)
    assert caught.value.code is ErrorCode.INVALID
    assert caught.value.message == (
        f"failed to get model version from specified version string '{text}' (details: stol), "
        "version should be an integral value > 0"
    )


@pytest.mark.parametrize("text", ["-1", "-5x"])
def test_negative_versions(text: str) -> None:
    with pytest.raises(SluiceError) as caught:
        parse_version(text)
    assert caught.value.message == (
        f"invalid model version specified '{text}' , version should be an integral value > 0"
    )
