import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from sluice.pipelines.text.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    TokenTexts,
    UnspacedDetokenizer,
    WindowDetokenizer,
    detokenizer_factory,
)
from sluice.pipelines.text.types import TokenText
from tests.pipelines.text import vocabularies
from tests.pipelines.text.vocabularies import id_of

TOKENIZERS = {
    make.__name__: make()
    for make in (
        vocabularies.byte_level,
        vocabularies.byte_fallback,
        vocabularies.unigram,
        vocabularies.word_piece,
        vocabularies.word_end,
        vocabularies.no_decoder,
    )
}
FACTORIES = {name: detokenizer_factory(tokenizer) for name, tokenizer in TOKENIZERS.items()}
BYTE_TOKENS = [i for token, i in TOKENIZERS["byte_fallback"].get_vocab().items() if token.startswith("<0x")]


SHOWING = {name: detokenizer_factory(each, skip_special_tokens=False) for name, each in TOKENIZERS.items()}
"""Factories of detokenizers that show special tokens."""


def whole(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
    return text


def streamed(detokenizer: Detokenizer, token_ids: Sequence[int], cuts: random.Random) -> list[str]:
    """The pieces from feeding the ids a few at a time, and none at times."""
    pieces, left = [], list(token_ids)
    while left:
        size = cuts.choice([0, 1, 1, 1, 2, 5])
        pieces.append(detokenizer.feed(left[:size]))
        del left[:size]
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=25)
@given(data=st.data(), cuts=st.randoms(use_true_random=False))
def test_pieces_join_to_the_whole_text(name: str, data: st.DataObject, cuts: random.Random) -> None:
    tokenizer = TOKENIZERS[name]
    beyond = tokenizer.get_vocab_size() + 3  # models may have more rows than their tokenizer has tokens
    token_ids = data.draw(st.lists(st.integers(0, beyond), max_size=40))
    assert "".join(streamed(FACTORIES[name](), token_ids, cuts)) == whole(tokenizer, token_ids)
    shown = whole(tokenizer, token_ids, skip_special_tokens=False)
    assert "".join(streamed(SHOWING[name](), token_ids, cuts)) == shown


@settings(deadline=None, max_examples=100)
@given(
    token_ids=st.lists(st.sampled_from([*BYTE_TOKENS, *range(len(BYTE_TOKENS))]), max_size=30),
    cuts=st.randoms(use_true_random=False),
)
def test_runs_of_byte_tokens_join_to_the_whole_text(token_ids: list[int], cuts: random.Random) -> None:
    pieces = streamed(FACTORIES["byte_fallback"](), token_ids, cuts)
    assert "".join(pieces) == whole(TOKENIZERS["byte_fallback"], token_ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=25)
@given(text=st.lists(st.sampled_from([*vocabularies.LINES, " ", "😀", "漢", "e\u0301", "\n"])).map("".join))
def test_pieces_of_real_text_have_no_half_characters(name: str, text: str) -> None:
    detokenizer = FACTORIES[name]()
    pieces = [detokenizer.feed([token_id]) for token_id in TOKENIZERS[name].encode(text).ids]
    assert "\ufffd" not in "".join(pieces)


@settings(deadline=None)
@given(text=st.text())
def test_byte_level_keeps_back_no_more_than_half_a_character(text: str) -> None:
    tokenizer, detokenizer = TOKENIZERS["byte_level"], FACTORIES["byte_level"]()
    token_ids = tokenizer.encode(text).ids
    so_far = ""
    for i, token_id in enumerate(token_ids):
        so_far += detokenizer.feed([token_id])
        assert so_far == whole(tokenizer, token_ids[: i + 1]).rstrip("\ufffd")


def test_half_a_character_comes_out_at_the_end() -> None:
    tokenizer, detokenizer = TOKENIZERS["byte_level"], FACTORIES["byte_level"]()
    half = [id_of(tokenizer, char) for char in "ðŁĺ"]  # 😀 is F0 9F 98 80
    assert [detokenizer.feed([token_id]) for token_id in half] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_special_tokens_have_no_text_and_other_added_tokens_do() -> None:
    tokenizer, detokenizer = TOKENIZERS["byte_level"], FACTORIES["byte_level"]()
    token_ids = [id_of(tokenizer, token) for token in ["<|end|>", "<a tool>", "q"]]
    assert [detokenizer.feed([token_id]) for token_id in token_ids] == ["", "<a tool>", "q"]


def test_spaces_between_added_tokens_may_be_left_out() -> None:
    tokenizer, make = TOKENIZERS["word_piece"], SHOWING["word_piece"]
    added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
    first, second = list(added)[:2]
    word = tokenizer.encode("the", add_special_tokens=False).ids
    spaced = make().feed([first, second, *word])
    assert UnspacedDetokenizer(make(), added).feed([first, second, *word]) == spaced.replace(" ", "", 1) != spaced


def test_sequences_of_one_tokenizer_do_not_mix() -> None:
    tokenizer, make = TOKENIZERS["byte_level"], FACTORIES["byte_level"]
    first, second = make(), make()
    assert first.feed([id_of(tokenizer, "ð")]) == ""
    assert second.feed([id_of(tokenizer, "q")]) == "q"
    assert second.flush() == ""


def test_the_window_does_not_grow_with_the_text() -> None:
    """No decode call sees more than a few tokens, however long the text already is."""
    tokenizer = TOKENIZERS["unigram"]
    token_ids = tokenizer.encode(" ".join(vocabularies.LINES)).ids
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return whole(tokenizer, ids)

    shown = frozenset(tokenizer.get_vocab().values())
    detokenizer = WindowDetokenizer(decode, shown, frozenset())
    detokenizer.feed(token_ids)
    assert len(token_ids) > 100 > 10 > longest > 0


def test_the_decoder_decides_the_kind() -> None:
    kinds = {name: type(make()) for name, make in FACTORIES.items()}
    assert kinds.pop("byte_level") is ByteLevelDetokenizer
    assert set(kinds.values()) == {WindowDetokenizer}


def test_byte_level_alone_in_a_sequence_is_byte_level() -> None:
    tokenizer = vocabularies.byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert isinstance(detokenizer_factory(tokenizer)(), ByteLevelDetokenizer)


def test_byte_level_among_others_is_refused() -> None:
    tokenizer = vocabularies.byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(ValueError, match="ByteLevel, Strip"):
        detokenizer_factory(tokenizer)


def letters(text: str) -> str:
    """Without what a decoder adds between words and at borders, and without unknown words."""
    return "".join(text.replace("<unk>", "").replace("[UNK]", "").split())


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_of_tokens_joined_are_the_text_but_for_spaces(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    texts = TokenTexts(tokenizer)
    for line in vocabularies.LINES:
        ids = tokenizer.encode(line, add_special_tokens=False).ids
        spelled = b"".join(texts[token_id].spelled for token_id in ids).decode()
        shown = tokenizer.decode(ids, skip_special_tokens=True)
        assert letters(spelled) == letters(shown)


def test_part_of_a_character_has_its_bytes() -> None:
    for tokenizer, token in ((TOKENIZERS["byte_level"], "ð"), (TOKENIZERS["byte_fallback"], "<0xF0>")):
        token_id = id_of(tokenizer, token)
        assert TokenTexts(tokenizer)[token_id] == TokenText(token_id, "\ufffd", b"\xf0")


def test_a_token_keeps_the_space_before_it() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    assert TokenTexts(tokenizer)[id_of(tokenizer, "▁quick")].text == " quick"


def test_special_tokens_read_as_they_are_written() -> None:
    for tokenizer, token in (
        (TOKENIZERS["byte_level"], "<|end|>"),
        (TOKENIZERS["byte_fallback"], "</s>"),
        (TOKENIZERS["word_piece"], "[CLS]"),
    ):
        assert TokenTexts(tokenizer)[id_of(tokenizer, token)].text == token


def test_ids_that_the_vocabulary_lacks_are_empty() -> None:
    assert TokenTexts(TOKENIZERS["byte_level"])[99999] == TokenText(99999, "", b"")
