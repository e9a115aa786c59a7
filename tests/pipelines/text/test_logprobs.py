from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.types import EventDetail, FinishReason, SamplingParams, TokenEvent, TokenLogprob
from sluice.pipelines.text.detokenizer import TokenTexts, detokenizer_factory
from sluice.pipelines.text.logprobs import LogprobTracker
from sluice.pipelines.text.stream import TextStream
from sluice.pipelines.text.types import TextEvent, TextLogprob
from tests.pipelines.text.vocabularies import byte_level, id_of

TOKENIZER = byte_level()
MAKE_DETOKENIZER = detokenizer_factory(TOKENIZER)
TEXTS = TokenTexts(TOKENIZER)
END = id_of(TOKENIZER, "<|end|>")


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


def entry(token_id: int) -> TokenLogprob:
    """Binary fractions, so that sums are exact."""
    return TokenLogprob(token_id, -token_id / 64, [(token_id, -token_id / 64), (1, -8.0)])


def generate(
    token_ids: list[int],
    size: int,
    stop: tuple[str, ...] = (),
    reason: FinishReason = FinishReason.LENGTH,
) -> list[TextEvent]:
    """The events from `token_ids`, `size` at a time."""
    track = LogprobTracker(TEXTS, [5], has_output=True)
    stream = TextStream(MAKE_DETOKENIZER(), stop, SamplingParams(), 1, track)
    events = []
    for start in range(0, len(token_ids), size):
        batch = token_ids[start : start + size]
        is_last = start + size >= len(token_ids)
        detail = EventDetail(logprobs=[entry(token_id) for token_id in batch])
        event = stream.feed(TokenEvent(1, batch, reason if is_last else None, detail))
        if event is not None:
            events.append(event)
            if event.finish_reason is not None:
                break
    return events


def entries_of(events: list[TextEvent]) -> list[TextLogprob]:
    return [one for event in events if event.detail for one in event.detail.logprobs or ()]


def total(events: list[TextEvent]) -> float:
    detail = events[-1].detail
    assert detail is not None
    return detail.total_logprob


def test_each_token_has_its_start_and_the_likeliest() -> None:
    ids = encode("the fox")
    entries = entries_of(generate(ids, 1))
    assert [one.token.token_id for one in entries] == ids
    assert "".join(one.token.text for one in entries) == "the fox"
    assert [one.start for one in entries] == [len(TOKENIZER.decode(ids[:i])) for i in range(len(ids))]
    assert entries[0].logprob == -ids[0] / 64
    assert [(token.token_id, logprob) for token, logprob in entries[0].top] == [(ids[0], -ids[0] / 64), (1, -8.0)]


def test_tokens_of_half_a_character_come_with_the_character() -> None:
    ids = encode("a😀b")
    events = generate(ids, 1)
    assert [len(event.detail.logprobs or ()) for event in events if event.text and event.detail] == [1, len(ids) - 2, 1]
    assert [one.start for one in entries_of(events)] == [0, *[1] * (len(ids) - 2), 2]


def test_the_token_that_ends_the_text_counts_and_has_no_entry() -> None:
    ids = [*encode("ab"), END]
    events = generate(ids, 2, reason=FinishReason.STOP)
    assert [one.token.token_id for one in entries_of(events)] == ids[:-1]
    assert total(events) == -sum(ids) / 64


def test_text_cut_off_by_a_stop_string_has_no_entries() -> None:
    ids = encode("q###zzz")
    for size in (1, 2, len(ids)):
        events = generate(ids, size, ("###",))
        assert "".join(event.text for event in events) == "q"
        assert [one.token.text for one in entries_of(events)] == ["q"]


def test_text_that_was_kept_back_has_its_entries() -> None:
    ids = encode("q##z")
    events = generate(ids, 1, ("###",))
    for event in events:
        assert event.detail is not None
        assert "".join(one.token.text for one in event.detail.logprobs or ()) == event.text


def test_a_request_for_the_prompt_s_alone() -> None:
    track = LogprobTracker(TEXTS, [70, 71], has_output=False)
    stream = TextStream(MAKE_DETOKENIZER(), (), SamplingParams(), 2, track)
    detail = EventDetail(num_cached_tokens=0, prompt_logprobs=[None, entry(71)])
    event = stream.feed(TokenEvent(1, [72], FinishReason.LENGTH, detail))
    assert event is not None
    assert event.detail is not None
    assert event.detail.logprobs is None
    assert [(one.token.text, one.logprob) for one in event.detail.prompt_logprobs or ()] == [
        (TEXTS[70].text, None),
        (TEXTS[71].text, -71 / 64),
    ]


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, END - 1), min_size=1, max_size=30),
    size=st.integers(2, 31),
    stop=st.lists(st.sampled_from([*"abcdeé漢 ", "th", " q", "\ufffd"]), max_size=3).map(tuple),
)
def test_a_stream_has_the_same_entries_however_its_tokens_are_merged(
    ids: list[int], size: int, stop: tuple[str, ...]
) -> None:
    alone, merged = generate(ids, 1, stop), generate(ids, size, stop)
    assert entries_of(alone) == entries_of(merged)
    assert total(alone) == total(merged)
    text = "".join(event.text for event in alone)
    assert all(one.start <= len(text) for one in entries_of(alone))
