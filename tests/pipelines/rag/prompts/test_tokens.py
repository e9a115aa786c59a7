from transformers import PreTrainedTokenizerFast

from pipelines.rag.prompts.tokens import EstimatedTokens, TokenizerTokens
from pipelines.text.tokenizer import Tokenizer
from pipelines.text.types import ChatMessage

TURNS = [ChatMessage("user", "What is a sluice for?"), ChatMessage("assistant", "Water."), ChatMessage("user", "And?")]


async def test_a_conversation_is_counted_as_the_model_gets_it(rill: Tokenizer) -> None:
    tokens = TokenizerTokens(rill)
    assert await tokens.count_chat(TURNS) == len(await rill.encode_chat(TURNS))
    assert await tokens.takes_system()


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


async def test_a_template_that_refuses_system_messages_is_known(rill: Tokenizer) -> None:
    refuses = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    )
    assert not await with_template(rill, refuses).takes_system()


async def test_a_tokenizer_without_a_template_counts_what_one_would_add(rill: Tokenizer) -> None:
    tokens = with_template(rill, None)
    assert await tokens.count_chat(TURNS) == sum(await tokens.count_turns(TURNS))
    assert await tokens.takes_system()


async def test_an_estimate_counts_characters() -> None:
    tokens = EstimatedTokens(4.0)
    assert await tokens.count_texts(["", "four", "fives", "日本語 yes"]) == [0, 1, 2, 4]
    assert await tokens.count_chat([ChatMessage("user", "four")]) == 9
