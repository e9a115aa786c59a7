import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipelines.text.stop import MAX_STOP_LENGTH, MAX_STOP_STRINGS, StopStrings
from sluice.errors import ErrorCode, SluiceError

# Few letters, so that stop strings overlap with each other and with themselves.
texts = st.text("ab😀", max_size=30)
stop_strings = st.lists(st.text("ab😀", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def expected(text: str, strings: tuple[str, ...]) -> tuple[str, str | None]:
    """Straight from the definition: the first end of any stop string; there, the longest."""
    for end in range(1, len(text) + 1):
        ending = [s for s in strings if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], strings: tuple[str, ...]) -> tuple[str, str | None]:
    stops, out = StopStrings(strings), ""
    for piece in pieces:
        out += stops.feed(piece)
        if stops.matched is not None:
            return out, stops.matched
    return out + stops.flush(), None


@given(text=texts, strings=stop_strings, cuts=st.randoms(use_true_random=False))
@example(text="abab", strings=("abb", "ba"), cuts=random.Random(0))
def test_text_ends_before_the_first_stop_string_however_it_is_cut(
    text: str, strings: tuple[str, ...], cuts: random.Random
) -> None:
    borders = sorted(cuts.randrange(len(text) + 1) for _ in range(cuts.randrange(6)))
    pieces = [text[i:j] for i, j in zip([0, *borders], [*borders, len(text)], strict=True)]
    assert run(pieces, strings) == run(list(text), strings) == run([text], strings) == expected(text, strings)


@given(text=texts, strings=stop_strings)
def test_only_the_longest_possible_beginning_is_kept_back(text: str, strings: tuple[str, ...]) -> None:
    stops, out = StopStrings(strings), ""
    for i, char in enumerate(text):
        out += stops.feed(char)
        if stops.matched is not None:
            return
        so_far = text[: i + 1]
        beginnings = [s[:n] for s in strings for n in range(1, len(s)) if so_far.endswith(s[:n])]
        assert out == so_far[: len(so_far) - max(map(len, beginnings), default=0)]


def test_a_false_alarm_is_let_go() -> None:
    stops = StopStrings(("\n\nHuman:",))
    assert [stops.feed(piece) for piece in ["Hi.", "\n", "\nHum", "ming", "\n"]] == ["Hi.", "", "", "\n\nHumming", ""]
    assert stops.flush() == "\n"
    assert stops.matched is None


def test_of_two_that_end_together_the_longer_is_taken() -> None:
    assert run(["xab"], ("b", "ab")) == ("x", "ab")


def test_the_one_that_is_complete_first_wins() -> None:
    assert run(["xabcd"], ("abcd", "bc")) == ("xa", "bc")


def refusal(strings: tuple[str, ...]) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        StopStrings(strings)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "stop")
    return caught.value


def test_strings_must_have_a_length_within_limits() -> None:
    assert "stop[1] has 0 characters" in refusal(("a", "")).message
    assert f"from 1 to {MAX_STOP_LENGTH}" in refusal(("a" * (MAX_STOP_LENGTH + 1),)).message
    StopStrings(("a" * MAX_STOP_LENGTH,))


def test_there_may_not_be_too_many() -> None:
    assert str(MAX_STOP_STRINGS) in refusal(("a",) * (MAX_STOP_STRINGS + 1)).message
    StopStrings(("a",) * MAX_STOP_STRINGS)
