import pytest
from tokenizers import Tokenizer

from pipelines.text.detokenizer import TokenTexts
from pipelines.text.types import TokenText
from tests.pipelines.text.vocabularies import (
    LINES,
    byte_fallback,
    byte_level,
    id_of,
    no_decoder,
    unigram,
    word_end,
    word_piece,
)


def letters(text: str) -> str:
    """Without what a decoder adds between words and at borders, and without unknown words."""
    return "".join(text.replace("<unk>", "").replace("[UNK]", "").split())


FAMILIES = [byte_level, byte_fallback, unigram, word_piece, word_end, no_decoder]


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_they_are_the_text_but_for_spaces(family: object) -> None:
    tokenizer: Tokenizer = family()  # type: ignore[operator]
    texts = TokenTexts(tokenizer)
    for line in LINES:
        ids = tokenizer.encode(line, add_special_tokens=False).ids
        spelled = b"".join(texts[token_id].spelled for token_id in ids).decode()
        shown = tokenizer.decode(ids, skip_special_tokens=True)
        assert letters(spelled) == letters(shown)


def test_part_of_a_character_has_its_bytes() -> None:
    for tokenizer, token in ((byte_level(), "ð"), (byte_fallback(), "<0xF0>")):
        token_id = id_of(tokenizer, token)
        assert TokenTexts(tokenizer)[token_id] == TokenText(token_id, "\ufffd", b"\xf0")


def test_a_token_keeps_the_space_before_it() -> None:
    tokenizer = byte_fallback()
    assert TokenTexts(tokenizer)[id_of(tokenizer, "▁quick")].text == " quick"


def test_special_tokens_read_as_they_are_written() -> None:
    for tokenizer, token in ((byte_level(), "<|end|>"), (byte_fallback(), "</s>"), (word_piece(), "[CLS]")):
        assert TokenTexts(tokenizer)[id_of(tokenizer, token)].text == token


def test_ids_that_the_vocabulary_lacks_are_empty() -> None:
    assert TokenTexts(byte_level())[99999] == TokenText(99999, "", b"")


def test_each_is_worked_out_once() -> None:
    texts = TokenTexts(byte_level())
    assert texts[70] is texts[70]
