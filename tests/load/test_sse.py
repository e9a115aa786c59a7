import itertools

from hypothesis import given
from hypothesis import strategies as st

from load.sse import EventSplitter

STREAM = (
    b': ping\n\ndata: {"a":1}\n\ndata:{"b":2}\n\nevent: x\nid: 4\ndata: one\ndata: two\n\nevent: y\n\ndata: [DONE]\n\n'
)
EVENTS = [b'{"a":1}', b'{"b":2}', b"one\ntwo", b"[DONE]"]


def feed_all(pieces: list[bytes]) -> list[bytes]:
    splitter = EventSplitter()
    events = [event for piece in pieces for event in splitter.feed(piece)]
    assert splitter.is_between_events
    return events


@given(st.lists(st.integers(0, len(STREAM))), st.booleans())
def test_events_do_not_depend_on_where_the_network_cuts(cuts: list[int], has_carriage_returns: bool) -> None:
    stream = STREAM.replace(b"\n", b"\r\n") if has_carriage_returns else STREAM
    borders = [0, *sorted(cuts), len(stream)]
    assert feed_all([stream[a:b] for a, b in itertools.pairwise(borders)]) == EVENTS


def test_one_event_a_piece() -> None:
    assert feed_all([b"data: a\n\n", b"data: b\n\n"]) == [b"a", b"b"]


def test_a_cut_event_is_not_between_events() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n\ndata: b\n") == [b"a"]
    assert not splitter.is_between_events
