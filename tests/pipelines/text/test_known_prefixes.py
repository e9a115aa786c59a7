"""Texts that go on from others have the token ids that the library gives them whole."""

from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sluice.pipelines.text import known_prefixes
from sluice.pipelines.text.known_prefixes import KnownPrefixes, find_seams
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.pipelines.text.types import ChatMessage
from tests.paths import RILL_TOKENIZER
from tests.pipelines.text.vocabularies import LINES, byte_fallback, byte_level, unigram, word_piece

RILL: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(RILL_TOKENIZER).backend_tokenizer
VOCABULARIES = {"rill": RILL, **{make.__name__: make() for make in (byte_level, byte_fallback, unigram, word_piece)}}


def added_of(vocabulary: tokenizers.Tokenizer) -> list[AddedToken]:
    return list(vocabulary.get_added_tokens_decoder().values())


@pytest.mark.parametrize("name", VOCABULARIES)
@given(data=st.data())
def test_a_text_has_the_ids_that_it_has_whole_whatever_came_before(name: str, data: st.DataObject) -> None:
    vocabulary = VOCABULARIES[name]
    num_encoded = 0

    def encode(text: str) -> list[int]:
        nonlocal num_encoded
        num_encoded += len(text)
        ids: list[int] = vocabulary.encode(text, add_special_tokens=False).ids
        return ids

    seams = find_seams(added_of(vocabulary))
    known = KnownPrefixes(encode, seams)
    pieces = st.sampled_from([*(token.content for token in added_of(vocabulary)), *LINES, " ", "  \n", "<|", "end|>"])
    conversations = data.draw(st.lists(st.lists(pieces | st.text(max_size=3), max_size=8), min_size=1, max_size=3))
    for turns in conversations:
        for end in range(len(turns) + 1):
            text = "".join(turns[:end])
            assert known.encode(text) == vocabulary.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("tokens", "seams"),
    [
        ([AddedToken("<a>", special=True), AddedToken("<b>", special=True)], ("<a>", "<b>")),
        ([AddedToken("<a>", special=True), AddedToken("b", normalized=True)], ("<a>",)),
        ([AddedToken("<a>", special=True, lstrip=True)], ()),
        ([AddedToken("<a>", special=True, single_word=True)], ()),
        ([AddedToken("<a>", special=True), AddedToken("x<", special=True)], ()),
    ],
)
def test_a_text_is_cut_only_where_the_library_cuts_it_too(tokens: list[AddedToken], seams: tuple[str, ...]) -> None:
    assert find_seams(tokens) == seams


async def test_of_a_long_conversation_only_what_is_new_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Callable[..., PreTrainedTokenizerFast] = AutoTokenizer.from_pretrained
    tokenizer, fresh = Tokenizer(made(RILL_TOKENIZER)), Tokenizer(made(RILL_TOKENIZER))
    sizes: list[int] = []

    def encode(text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        sizes.append(len(text))
        return fresh.encode(text, param, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", encode)
    turns = [ChatMessage("user", "The cache of blocks. " * 1000)]
    for number in range(4):
        assert await tokenizer.encode_chat(turns) == await fresh.encode_chat(turns)
        assert number == 0 or sum(sizes) < 1000
        sizes.clear()
        turns += [ChatMessage("assistant", "Yes."), ChatMessage("user", f"And {number}?")]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_prefixes, "MAX_BYTES", 5000)
    known = KnownPrefixes(lambda text: [1] * len(text), ("<a>",))
    for number in range(300):
        known.encode(f"{number} {'x' * 90}<a>")
        known.encode(f"{number} {'x' * 90}<a>")
    sizes = [len(text) + 4 * len(ids) for (_, text), ids in known._known.items()]
    assert sum(sizes) == known._num_bytes <= 5000, "tokens count: a text of many has more bytes in them than its own"
    known.encode("y" * 2000 + "<a>")
    assert all(len(text) < 1000 for _, text in known._known)


def test_what_is_known_under_one_salt_says_nothing_under_another() -> None:
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [1] * len(text)

    known, text = KnownPrefixes(encode, ("<a>",)), "x" * 90 + "<a>"
    for salt, is_new in (("", True), ("a", True), ("a", False), ("", False), ("b", True)):
        encoded.clear()
        known.encode(text, salt)
        assert "".join(encoded) == (text if is_new else "<a>"), salt
