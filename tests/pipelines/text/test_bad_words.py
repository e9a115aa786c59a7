import pytest

from pipelines.text.bad_words import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS, bad_word_ids
from pipelines.text.tokenizer import Tokenizer
from sluice.errors import ErrorCode, SluiceError


def test_a_word_is_spelled_with_and_without_a_space_before_it(rill: Tokenizer) -> None:
    spelled = bad_word_ids(rill, ("cat", "  cat"))
    assert spelled == (tuple(rill.encode_words("cat", "")), tuple(rill.encode_words(" cat", "")))
    assert spelled[0] != spelled[1]


@pytest.mark.parametrize("words", [("",), ("a", " "), ("a" * (MAX_BAD_WORD_LENGTH + 1),), ("a",) * (MAX_BAD_WORDS + 1)])
def test_words_and_their_number_have_limits(rill: Tokenizer, words: tuple[str, ...]) -> None:
    with pytest.raises(SluiceError) as caught:
        bad_word_ids(rill, words)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "bad_words")
