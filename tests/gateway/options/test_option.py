import pytest

from sluice.engine.config import Speculation
from sluice.gateway.options.option import (
    Option,
    OptionError,
    Parse,
    choice,
    enum_member,
    fraction,
    integer,
    printable_text,
    seconds,
    size,
    truth,
    weights,
)


def read(parse: Parse, text: str) -> object:
    return Option("--some-flag", parse, "help", "X").read(text, "--some-flag")


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (integer(0, 65535), "0", 0),
        (integer(0, 65535), "65535", 65535),
        (integer(1), "007", 7),
        (seconds(0), "0", 0.0),
        (seconds(0), "2.5", 2.5),
        (size(1), "1048576", 1 << 20),
        (size(1), "256M", 256 << 20),
        (size(1), "2G", 2 << 30),
        (size(1), "2GiB", 2 << 30),
        (size(1), "64kb", 64 << 10),
        (choice("a", "b"), "b", "b"),
        (printable_text("a name"), "rill 2", "rill 2"),
        (enum_member(Speculation), "ngram", Speculation.NGRAM),
        (fraction, "0.5", 0.5),
        (fraction, "1", 1.0),
        (fraction, ".25", 0.25),
        (weights, "a=2,b=1", {"a": 2.0, "b": 1.0}),
        (weights, "team = x=0.5", {"team = x": 0.5}),
        (truth, "Yes", True),
        (truth, "0", False),
    ],
)
def test_reads(parse: Parse, text: str, value: object) -> None:
    assert read(parse, text) == value


@pytest.mark.parametrize(
    ("parse", "text", "allowed"),
    [
        (integer(0, 65535), "65536", "a whole number from 0 to 65535"),
        (integer(0, 65535), "-1", "a whole number from 0 to 65535"),
        (integer(1), "1.5", "a whole number of at least 1"),
        (integer(1), "1_000", "a whole number of at least 1"),
        (integer(1), "", "a whole number of at least 1"),
        (seconds(1), "0.5", "a number of seconds of at least 1"),
        (seconds(0), "nan", "a number of seconds of at least 0"),
        (seconds(0), "-1", "a number of seconds of at least 0"),
        (size(1), "2Q", "a size of at least 1 bytes, such as 1048576, 256M or 2G"),
        (size(1024), "1", "a size of at least 1024 bytes, such as 1048576, 256M or 2G"),
        (choice("a", "b"), "c", "one of a, b"),
        (printable_text("a name"), " ", "a name"),
        (printable_text("a name"), "a\nb", "a name"),
        (enum_member(Speculation), "on", "one of off, ngram, draft_model"),
        (fraction, "0", "a number above 0 and at most 1"),
        (fraction, "1.01", "a number above 0 and at most 1"),
        (fraction, "half", "a number above 0 and at most 1"),
        (weights, "a=0", "names with weights above 0, such as a=2,b=1"),
        (weights, "a", "names with weights above 0, such as a=2,b=1"),
        (weights, "=2", "names with weights above 0, such as a=2,b=1"),
        (weights, "a=1,a=2", "names with weights above 0, such as a=2,b=1"),
        (truth, "maybe", "1, true, yes, on, 0, false, no or off"),
    ],
)
def test_refuses_and_says_what_came_and_what_is_allowed(parse: Parse, text: str, allowed: str) -> None:
    with pytest.raises(OptionError) as caught:
        read(parse, text)
    assert str(caught.value) == f"--some-flag must be {allowed}, got {text!r}"


def test_the_variable_follows_the_flag() -> None:
    assert Option("--http-port", truth, "", "X").variable == "SLUICE_HTTP_PORT"
    assert Option("MODEL", truth, "", "X").variable == "SLUICE_MODEL"
