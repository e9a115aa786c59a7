from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import FinishReason, SamplingParams, TokenEvent
from pipelines.text.detokenizer import detokenizer_factory
from pipelines.text.stream import TextStream
from pipelines.text.types import TextEvent
from tests.pipelines.text.vocabularies import LINES, byte_level, id_of

TOKENIZER = byte_level()
MAKE_DETOKENIZER = detokenizer_factory(TOKENIZER)
END = id_of(TOKENIZER, "<|end|>")


def stream(stop: tuple[str, ...] = (), **sampling: object) -> TextStream:
    return TextStream(MAKE_DETOKENIZER(), stop, SamplingParams(**sampling), prompt_tokens=7)  # type: ignore[arg-type]


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


def joined(events: list[TextEvent]) -> str:
    return "".join(event.text for event in events)


def test_every_token_is_counted_once_also_those_without_text() -> None:
    token_ids = encode("a😀漢b")
    events = feed(stream(), token_ids, 1)
    assert joined(events) == "a😀漢b"
    assert len(events) < len(token_ids)
    assert all(event.text for event in events)
    assert sum(event.num_tokens for event in events) == len(token_ids) == events[-1].completion_tokens
    assert [event.finish_reason for event in events][-2:] == [None, FinishReason.LENGTH]
    assert {event.prompt_tokens for event in events} == {7}


def test_half_a_character_is_flushed_at_the_end() -> None:
    events = feed(stream(), [*encode("a"), id_of(TOKENIZER, "ð")], 1)
    assert joined(events) == "a\ufffd"


def test_the_last_event_may_have_no_text() -> None:
    *_, last = feed(stream(), [*encode("a"), END], 1, FinishReason.STOP)
    assert last == TextEvent("", 1, 7, 2, FinishReason.STOP, None)


def test_a_stop_token_is_counted_named_and_not_shown() -> None:
    token_ids = encode("axb")
    events = feed(stream(stop_token_ids=(token_ids[-1],)), token_ids, 2, FinishReason.STOP)
    assert joined(events) == "ax"
    assert (events[-1].stop_reason, events[-1].completion_tokens) == (token_ids[-1], 3)


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
    assert event == TextEvent("q", num_used, 7, num_used, FinishReason.STOP, "###")


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
)
def test_merged_events_change_nothing(token_ids: list[int], size: int, stop: tuple[str, ...], min_tokens: int) -> None:
    alone = feed(stream(stop, min_tokens=min_tokens), token_ids, 1)
    merged = feed(stream(stop, min_tokens=min_tokens), token_ids, size)
    assert joined(alone) == joined(merged)
    assert alone[-1].stop_reason == merged[-1].stop_reason
    assert alone[-1].completion_tokens == merged[-1].completion_tokens
    assert sum(event.num_tokens for event in merged) == merged[-1].completion_tokens


def test_without_stop_strings_the_text_is_the_tokenizers() -> None:
    text = "".join(LINES)
    assert joined(feed(stream(), encode(text), 3)) == text
