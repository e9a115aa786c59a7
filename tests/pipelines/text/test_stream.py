import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sluice.engine.types import FinishReason, SamplingParams, TokenEvent
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.text.detokenizer import detokenizer_factory
from sluice.pipelines.text.stream import MAX_STOP_LENGTH, MAX_STOP_STRINGS, StopStrings, TextStream
from sluice.pipelines.text.types import TextDetail, TextEvent
from tests.pipelines.text.vocabularies import LINES, byte_level, id_of

TOKENIZER = byte_level()
MAKE_DETOKENIZER = detokenizer_factory(TOKENIZER)
END = id_of(TOKENIZER, "<|end|>")


def stream(stop: tuple[str, ...] = (), *, includes_stop: bool = False, **sampling: Any) -> TextStream:
    params = SamplingParams(**sampling)
    return TextStream(MAKE_DETOKENIZER(), stop, params, 7, includes_stop=includes_stop, prompt_token_ids=[5] * 7)


def encode(text: str) -> list[int]:
    token_ids: list[int] = TOKENIZER.encode(text).ids
    return token_ids


def feed(
    target: TextStream, token_ids: list[int], size: int, reason: FinishReason = FinishReason.LENGTH
) -> list[TextEvent]:
    """The events from giving `token_ids` `size` at a time; the last with `reason`."""
    batches = [token_ids[i : i + size] for i in range(0, len(token_ids), size)]
    events = []
    for i, batch in enumerate(batches):
        event = target.feed(TokenEvent(1, batch, reason if i == len(batches) - 1 else None))
        if event is not None:
            events.append(event)
            if event.finish_reason is not None:
                break
    return events


def ids_of(events: list[TextEvent]) -> list[int]:
    return [each for event in events if event.detail is not None for each in event.detail.token_ids or ()]


def joined(events: list[TextEvent]) -> str:
    return "".join(event.text for event in events)


def test_every_token_is_counted_once_also_those_without_text() -> None:
    token_ids = encode("a😀漢b")
    events = feed(stream(), token_ids, 1)
    assert joined(events) == "a😀漢b"
    assert len(events) == len(token_ids) > sum(bool(event.text) for event in events)
    assert sum(event.num_tokens for event in events) == len(token_ids) == events[-1].completion_tokens
    assert [event.finish_reason for event in events][-2:] == [None, FinishReason.LENGTH]
    assert {event.prompt_tokens for event in events} == {7}


def test_half_a_character_is_flushed_at_the_end() -> None:
    events = feed(stream(), [*encode("a"), id_of(TOKENIZER, "ð")], 1)
    assert joined(events) == "a\ufffd"


def test_the_last_event_may_have_no_text() -> None:
    *_, last = feed(stream(), [*encode("a"), END], 1, FinishReason.STOP)
    detail = TextDetail(token_ids=[END])
    assert last == TextEvent("", 1, 7, 2, FinishReason.STOP, None, detail=detail)


def test_a_stop_token_is_counted_named_and_not_shown() -> None:
    token_ids = encode("axb")
    events = feed(stream(stop_token_ids=(token_ids[-1],)), token_ids, 2, FinishReason.STOP)
    assert joined(events) == "ax"
    assert (events[-1].stop_reason, events[-1].completion_tokens) == (token_ids[-1], 3)
    assert ids_of(events) == token_ids
    shown = feed(stream(includes_stop=True, stop_token_ids=(token_ids[-1],)), token_ids, 2, FinishReason.STOP)
    assert joined(shown) == "axb"
    assert (shown[-1].stop_reason, shown[-1].completion_tokens) == (token_ids[-1], 3)


def test_what_a_stop_string_could_begin_with_is_shown_when_nothing_follows() -> None:
    for reason in (FinishReason.LENGTH, FinishReason.STOP, FinishReason.CANCELLED):
        token_ids = [*encode("a##"), END] if reason is FinishReason.STOP else encode("a##")
        events = feed(stream(("###",)), token_ids, 1, reason)
        assert joined(events) == "a##"
        assert (events[-1].finish_reason, events[-1].stop_reason) == (reason, None)


def test_a_stop_string_ends_the_text_at_the_token_that_completes_it() -> None:
    token_ids = encode("q###zzz")
    num_used = next(n for n in range(len(token_ids)) if "###" in TOKENIZER.decode(token_ids[:n]))
    (event,) = feed(stream(("###",)), token_ids, len(token_ids))
    detail = TextDetail(token_ids=token_ids[:num_used], prompt_token_ids=[5] * 7)
    assert event == TextEvent("q", num_used, 7, num_used, FinishReason.STOP, "###", detail=detail)
    (event,) = feed(stream(("###",), includes_stop=True), token_ids, len(token_ids))
    assert (event.text, event.stop_reason) == ("q###", "###")


def test_a_stop_string_before_the_end_token_wins() -> None:
    (event,) = feed(stream(("##",)), [*encode("q##z"), END], 10, FinishReason.STOP)
    assert (event.text, event.stop_reason) == ("q", "##")


def test_a_stop_string_may_be_completed_by_the_flush() -> None:
    *_, last = feed(stream(("\ufffd",)), [*encode("a"), id_of(TOKENIZER, "ð")], 1)
    assert (last.text, last.finish_reason, last.stop_reason) == ("", FinishReason.STOP, "\ufffd")


def test_min_tokens_hides_earlier_stop_strings() -> None:
    token_ids = encode("#q#q#q")
    assert len(token_ids) == 6
    assert joined(feed(stream(("#",), min_tokens=0), token_ids, 1)) == ""
    assert joined(feed(stream(("#",), min_tokens=3), token_ids, 1)) == "#q#q"
    assert joined(feed(stream(("#",), min_tokens=6), token_ids, 1)) == "#q#q#q"


@settings(deadline=None)
@given(
    token_ids=st.lists(st.integers(0, END - 1), min_size=1, max_size=30),
    size=st.integers(2, 31),
    stop=st.lists(st.sampled_from([*"abcdeé漢 ", "th", " q", "\ufffd"]), max_size=3).map(tuple),
    min_tokens=st.integers(0, 5),
    includes_stop=st.booleans(),
)
def test_merged_events_change_nothing(
    token_ids: list[int], size: int, stop: tuple[str, ...], min_tokens: int, includes_stop: bool
) -> None:
    alone = feed(stream(stop, min_tokens=min_tokens, includes_stop=includes_stop), token_ids, 1)
    merged = feed(stream(stop, min_tokens=min_tokens, includes_stop=includes_stop), token_ids, size)
    assert joined(alone) == joined(merged)
    assert ids_of(alone) == ids_of(merged) == token_ids[: merged[-1].completion_tokens]
    assert alone[-1].stop_reason == merged[-1].stop_reason
    assert alone[-1].completion_tokens == merged[-1].completion_tokens
    assert sum(event.num_tokens for event in merged) == merged[-1].completion_tokens


def test_without_stop_strings_the_text_is_the_tokenizers() -> None:
    text = "".join(LINES)
    assert joined(feed(stream(), encode(text), 3)) == text


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
