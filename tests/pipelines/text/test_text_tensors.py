import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.text.tensor_model import decode_messages, encode_messages
from sluice.pipelines.text.types import ChatMessage

CHAT = (ChatMessage("system", "Be brief."), ChatMessage("user", 'a "tensor"\n漢'))


def test_what_is_encoded_is_decoded() -> None:
    assert decode_messages(encode_messages(CHAT).decode()) == CHAT


def test_parts_of_text_are_joined_and_other_fields_left_alone() -> None:
    text = '[{"role": "user", "name": "x", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]'
    assert decode_messages(text) == (ChatMessage("user", "ab"),)


DEEP = '[{"role": "user", "content": "a", "x": ' + "[" * 100_000


@pytest.mark.parametrize("text", ["", "{", "5", '["a"]', '[{"role": 1, "content": "a"}]', '[{"content": "a"}]', DEEP])
def test_anything_else_is_refused_by_the_field_s_name(text: str) -> None:
    with pytest.raises(SluiceError, match="history must be a JSON array of messages") as caught:
        decode_messages(text, "history")
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "history")
