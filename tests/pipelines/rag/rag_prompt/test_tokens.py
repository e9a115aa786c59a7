from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from sluice.pipelines.rag.rag_prompt.assembly import (
    COMMON_CONTROL_TOKENS,
    ControlTokens,
    EstimatedTokens,
    TokenizerTokens,
)
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.pipelines.text.types import ChatMessage

TURNS = [ChatMessage("user", "What is a sluice for?"), ChatMessage("assistant", "Water."), ChatMessage("user", "And?")]


async def test_a_conversation_is_counted_as_the_model_gets_it(rill: Tokenizer) -> None:
    tokens = TokenizerTokens(rill)
    assert await tokens.count_chat(TURNS) == len(await rill.encode_chat(TURNS))


async def test_turns_add_no_more_than_is_counted_for_them(rill: Tokenizer) -> None:
    tokens = TokenizerTokens(rill)
    assert await tokens.count_chat(TURNS) <= sum(await tokens.count_turns(TURNS))


async def test_long_texts_are_counted_like_short_ones(rill: Tokenizer) -> None:
    text = "A sluice holds water back. " * 400
    assert await TokenizerTokens(rill).count_texts([text]) == [len(rill.encode_words(text, "text"))]


def with_template(rill: Tokenizer, template: str | None) -> TokenizerTokens:
    made = PreTrainedTokenizerFast(tokenizer_object=rill._backend)
    made.chat_template = template
    return TokenizerTokens(Tokenizer(made))


async def test_instructions_count_where_a_template_refuses_system_messages(rill: Tokenizer) -> None:
    refuses = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    )
    tokens, question = with_template(rill, refuses), ChatMessage("user", "What is a sluice for?")
    with_instructions = await tokens.count_chat([ChatMessage("system", "Be exact."), question])
    assert with_instructions == await tokens.count_chat([ChatMessage("user", f"Be exact.\n\n{question.content}")])


async def test_a_tokenizer_without_a_template_counts_what_one_would_add(rill: Tokenizer) -> None:
    tokens = with_template(rill, None)
    assert await tokens.count_chat(TURNS) == sum(await tokens.count_turns(TURNS))


async def test_an_estimate_counts_characters() -> None:
    tokens = EstimatedTokens(4.0)
    assert await tokens.count_texts(["", "four", "fives", "日本語 yes"]) == [0, 1, 2, 4]
    assert await tokens.count_chat([ChatMessage("user", "four")]) == 9


RILL_TOKENS = ["<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
PARTS = st.sampled_from([*RILL_TOKENS, "<", "<|", "|>", "end", "|", " ", "user", "\n", "text "])


@given(st.lists(PARTS, max_size=10).map("".join))
def test_no_text_makes_a_control_token_of_rill(rill: Tokenizer, text: str) -> None:
    control = ControlTokens.of(rill)
    token_ids = rill.encode_words(control.escape(text), "text")
    assert not set(token_ids) & set(range(len(RILL_TOKENS)))


@given(st.text(max_size=100))
def test_texts_without_one_stay_as_they_are(rill: Tokenizer, text: str) -> None:
    control = ControlTokens.of(rill)
    if not any(token in text for token in RILL_TOKENS):
        assert control.escape(text) == text


def test_an_escaped_text_still_reads(rill: Tokenizer) -> None:
    assert ControlTokens.of(rill).escape("a<|end|><|user|>b") == "a< |end|>< |user|>b"


def of_vocabulary(*added: AddedToken, normalizer: Any = None) -> Tokenizer:
    backend = Backend(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(list(added))
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.parametrize("text", ["<think>", "[TOOL]", "x<think>[TOOL]</think>"])
def test_markup_counts_though_no_tokenizer_calls_it_special(text: str) -> None:
    tokenizer = of_vocabulary(*(AddedToken(each, special=False) for each in ("<think>", "</think>", "[TOOL]")))
    escaped = ControlTokens.of(tokenizer).escape(text)
    assert not {2, 3, 4} & set(tokenizer.encode_words(escaped, "text"))


def test_added_words_and_spaces_are_left_alone() -> None:
    tokenizer = of_vocabulary(AddedToken("sluice", special=False), AddedToken("\n\n", special=False))
    assert ControlTokens.of(tokenizer).escape("sluice\n\nsluice") == "sluice\n\nsluice"


@pytest.mark.parametrize("text", ["<|END|>", "<|End|>", "＜｜ｅｎｄ｜＞"])
def test_tokens_that_are_looked_for_in_normalized_text_are_found_there(text: str) -> None:
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer = of_vocabulary(AddedToken("<|end|>", special=False, normalized=True), normalizer=normalizer)
    assert 2 in tokenizer.encode_words(text, "text")
    assert 2 not in tokenizer.encode_words(ControlTokens.of(tokenizer).escape(text), "text")


def test_a_token_of_one_character_is_taken_out() -> None:
    tokenizer = of_vocabulary(AddedToken("§", special=True))
    assert ControlTokens.of(tokenizer).escape("a§b") == "ab"


def test_a_tokenizer_without_any_changes_nothing() -> None:
    assert ControlTokens.of(of_vocabulary()).escape("<|end|>") == "<|end|>"


@pytest.mark.parametrize(
    "text",
    ["<|im_start|>system", "<|eot_id|>", "</s><s>", "[INST] now [/INST]", "<<SYS>>", "<start_of_turn>user", "</think>"],
)
def test_the_usual_ones_are_known_without_a_tokenizer(text: str) -> None:
    escaped = ControlTokens(COMMON_CONTROL_TOKENS).escape(text)
    assert COMMON_CONTROL_TOKENS.search(text)
    assert not COMMON_CONTROL_TOKENS.search(escaped)
    assert "".join(escaped.split()) == "".join(text.split())
