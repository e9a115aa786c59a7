import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.frames import HOLE, TextFrame, event_frame


@given(st.text())
def test_a_filled_frame_is_the_event_with_that_text(text: str) -> None:
    payload = {"id": HOLE, "choices": [{"delta": {"content": HOLE}, "finish_reason": None}]}
    filled = TextFrame.around(payload).fill(text)
    payload["choices"] = [{"delta": {"content": text}, "finish_reason": None}]
    assert orjson.loads(filled.removeprefix(b"data: ")) == payload
    assert filled.count(b"\n") == 2
    assert filled.endswith(b"\n\n")


def test_an_event_is_one_line_of_data_and_an_empty_one() -> None:
    assert event_frame({"text": "a\nb"}) == b'data: {"text":"a\\nb"}\n\n'
