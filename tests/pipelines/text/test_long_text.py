"""Long texts: tokenized without keeping the interpreter's lock, and refused before they cost time and memory."""

import threading
import time
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sluice.errors import SluiceError
from sluice.pipelines.text.tokenizer import INLINE_CHARS, Tokenizer
from sluice.pipelines.text.types import ChatMessage
from tests.pipelines.text.vocabularies import byte_fallback, byte_level, unigram
from tests.waiting import wait_until

CONTEXT = 1024
TEXTS = (
    "a b " * 2000,
    "wörter, 中文 und 😀\n" * 500,
    "<|user|>hi<|end|> " * 400,
    "x" * 9000,
    " " * 9000,
    "\r\n\t" * 3000,
)


def wrap(backend: tokenizers.Tokenizer, **options: Any) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **options))


def words(*, normalizer: Any = None) -> tokenizers.Tokenizer:
    """A tokenizer that drops white space and takes a long word for one unknown token."""
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "b": 2, "<e>": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.normalizer = normalizer
    return backend


def characters() -> tokenizers.Tokenizer:
    """A tokenizer that has white space as tokens, but for what follows a control token."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, " ": 2, "?": 3}, [], unk_token="?"))
    backend.add_special_tokens([AddedToken("<e>", rstrip=True, special=True)])
    return backend


async def refusal(tokenizer: Tokenizer, prompt: str | list[ChatMessage]) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        if isinstance(prompt, str):
            await tokenizer.encode_text(prompt, CONTEXT)
        else:
            await tokenizer.encode_chat(prompt, CONTEXT)
    return caught.value


@pytest.mark.parametrize("backend", [byte_level(), byte_fallback(), unigram(), words(), characters()])
@pytest.mark.parametrize("text", TEXTS)
async def test_a_long_text_has_the_token_ids_of_the_library(backend: tokenizers.Tokenizer, text: str) -> None:
    assert len(text) > INLINE_CHARS
    assert await wrap(backend).encode_text(text) == backend.encode(text).ids


def test_other_threads_run_while_a_long_text_is_tokenized(rill: Tokenizer) -> None:
    def count_turns() -> int:
        thread = threading.Thread(target=rill.encode_words, args=("a b " * (1 << 16), "prompt"))
        thread.start()
        num_turns = 0
        while thread.is_alive():
            time.sleep(0.001)
            num_turns += 1
        return num_turns

    wait_until(lambda: count_turns() > 4, "with the lock kept there is one turn before it and one behind")


@pytest.mark.parametrize("text", ["a b " * 500_000, "a" * 2_000_000, "\u4e2d" * 200_000, " a" * 200_000])
async def test_a_long_prompt_is_refused_without_tokenizing_all_of_it(
    rill: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encode = rill.encode

    def watched(piece: str, param: str, *, add_special_tokens: bool) -> list[int]:
        lengths.append(len(piece))
        return encode(piece, param, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(rill, "encode", watched)
    error = await refusal(rill, text)
    assert (error.code, error.param) == ("invalid", "prompt")
    assert f"has {len(text)} characters" in error.message
    assert f"context: it is {CONTEXT} tokens" in error.message
    assert sum(lengths) <= 1 << 17


async def test_a_long_conversation_is_refused_before_it_is_rendered(rill: Tokenizer) -> None:
    error = await refusal(rill, [ChatMessage("user", "a b " * 500_000)])
    assert error.param == "messages"
    assert "context" in error.message
    assert (await refusal(rill, [ChatMessage("user", "")] * 200_000)).param == "messages"
    assert (await refusal(rill, [ChatMessage("user", "a b " * 100_000)])).param == "messages"


async def test_control_tokens_are_not_sought_in_a_conversation_that_is_too_long(
    rill: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rill._guard is not None
    monkeypatch.setattr(rill._guard, "is_needed", lambda contents: pytest.fail("looked for control tokens"))
    assert (await refusal(rill, [ChatMessage("user", "<|end|>" * 100_000)])).param == "messages"


@pytest.mark.parametrize(
    ("backend", "text", "num_tokens"),
    [
        (words(), "a" + " " * 900_000 + "b", 2),
        (words(), "a " + "x" * 900_000, 2),
        (words(normalizer=normalizers.StripAccents()), "a" + "\u0301" * 900_000, 1),
        (words(normalizer=normalizers.Replace(tokenizers.Regex(" +"), " ")), "a b " * 500 + " " * 900_000, 1000),
        (characters(), "a<e>" + " " * 900_000 + "b" * 1000, 1002),
        (characters(), "a " * 500 + "<e>" + " " * 200_000, 1001),
    ],
)
async def test_no_prompt_that_fits_is_refused(backend: tokenizers.Tokenizer, text: str, num_tokens: int) -> None:
    assert len(await wrap(backend).encode_text(text, CONTEXT)) == num_tokens


async def test_a_few_long_tokens_may_fill_the_context() -> None:
    vocabulary = {"a": 0, "?": 1, **{"a" * 2**n: n + 1 for n in range(1, 12)}}
    merges = [("a" * 2**n, "a" * 2**n) for n in range(11)]
    tokenizer = wrap(tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="?")))
    assert len(await tokenizer.encode_text("a" * 2048 * 1000, CONTEXT)) == 1000
    assert (await refusal(tokenizer, "a" * (2048 * CONTEXT + 1))).param == "prompt"
